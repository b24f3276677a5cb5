"""Whether a try that failed is followed by another, and after which pause. Waiting for it is the driver's."""

from __future__ import annotations

from typing import Final

from twinbus.backlog import FailureKind, failure_kind
from twinbus.sdk import RetrySettings, is_retryable

ONCE: Final = RetrySettings(0, 0.0, 0.0, True)


def pause_before_next(error: Exception, retries: RetrySettings, tried: int, left: float) -> float | None:
    """None where it was the last: the SDK would not try again either, or the pause would outlast the time left.

    The SDK would retry a token refused because the entity is missing. We do not: the SDK does not retry a link refused
    for that reason either.
    """
    if tried > retries.total or not is_retryable(error) or failure_kind(error) is FailureKind.ENTITY_NOT_FOUND:
        return None
    pause = retries.pause(tried)
    return pause if pause < left else None
