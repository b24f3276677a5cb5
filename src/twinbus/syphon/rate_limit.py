"""How fast a syphon moves messages, and whether at all (Y9): a rate shared by all pumps, as instants. Pure."""

from __future__ import annotations

BURST_SECONDS = 0.5


class RateLimit:
    """`rate` in messages a second; None is as fast as can be. Waited for before messages are taken, never under a lock.

    What was not used in the last moment may be caught up.
    """

    def __init__(self, rate: float | None = None) -> None:
        self._rate = rate
        self._spent_until = float("-inf")

    @property
    def rate(self) -> float | None:
        return self._rate

    def set_rate(self, rate: float | None, now: float) -> None:
        self._rate = rate
        self._spent_until = min(self._spent_until, now)

    def most(self, wanted: int, pumps: int = 1) -> int:
        """How many one of so many pumps may take at a time."""
        return wanted if self._rate is None else max(1, min(wanted, int(self._rate * BURST_SECONDS / pumps)))

    def delay(self, now: float) -> float:
        """Seconds until the next may be taken."""
        return 0.0 if self._rate is None else max(0.0, self._spent_until - now)

    def spend(self, messages: int, now: float) -> None:
        """So many were taken."""
        if self._rate is not None:
            self._spent_until = max(self._spent_until, now - BURST_SECONDS) + messages / self._rate
