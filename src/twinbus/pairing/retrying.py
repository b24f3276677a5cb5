"""Whether a try that failed is followed by another, and after which pause. Waiting for it is the driver's."""

from __future__ import annotations

from typing import Final

from twinbus.pairing.failures import FailureKind
from twinbus.pairing.sdk import Retries, kind_of, may_try_again

ONCE: Final = Retries(0, 0.0, 0.0, True)


def pause_before_next(error: Exception, retries: Retries, tried: int, left: float) -> float | None:
    """None where it was the last: the SDK would not try again either, or the pause would outlast the time left.

    A token refused because its entity does not exist is not tried again, though the SDK would: it does not try a link
    again that is refused for the same reason.
    """
    if tried > retries.total or not may_try_again(error) or kind_of(error) is FailureKind.ENTITY_NOT_FOUND:
        return None
    pause = retries.pause(tried)
    return pause if pause < left else None
