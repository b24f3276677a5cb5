"""The rate limit of a syphon (Y9), shared by all its pumps. Pure: instants are arguments, in seconds."""

from __future__ import annotations

from typing import Final

BURST_SECONDS: Final = 0.5
"""Unused capacity of the last half second may be caught up."""


class RateLimit:
    """`rate` in messages per second; None is unlimited. Pumps wait before they receive, never while they hold locks."""

    def __init__(self, rate: float | None = None) -> None:
        self._rate = rate
        self._spent_until = float("-inf")

    @property
    def rate(self) -> float | None:
        return self._rate

    def set_rate(self, rate: float | None, now: float) -> None:
        self._rate = rate
        self._spent_until = min(self._spent_until, now)

    def batch_size(self, wanted: int, pumps: int = 1) -> int:
        """How many messages one of `pumps` pumps may receive at a time, up to `wanted`."""
        return wanted if self._rate is None else max(1, min(wanted, int(self._rate * BURST_SECONDS / pumps)))

    def delay(self, now: float) -> float:
        """Seconds until the next message may be received."""
        return 0.0 if self._rate is None else max(0.0, self._spent_until - now)

    def spend(self, messages: int, now: float) -> None:
        """Record that so many messages were received."""
        if self._rate is not None:
            self._spent_until = max(self._spent_until, now - BURST_SECONDS) + messages / self._rate
