"""Whether a try that failed is followed by another, and after which pause. Waiting for it is the driver's."""

from __future__ import annotations

from typing import Final

from twinbus.pairing.sdk import Retries, may_try_again

ONCE: Final = Retries(0, 0.0, 0.0, True)


def pause_before_next(error: Exception, retries: Retries, tried: int, left: float) -> float | None:
    """None where it was the last: the SDK would not try again either, or the pause would outlast the time left."""
    if tried > retries.total or not may_try_again(error):
        return None
    pause = retries.pause(tried)
    return pause if pause < left else None
