"""How fast a syphon moves messages, and whether at all (Y9): a rate shared by all pumps, as instants. Pure."""

from __future__ import annotations

BURST_SECONDS = 1.0


class Pacing:
    """`rate` in messages a second; None is as fast as can be. What was not used in the last second may be caught up."""

    def __init__(self, rate: float | None = None) -> None:
        self._rate = rate
        self._spent_until = float("-inf")

    @property
    def rate(self) -> float | None:
        return self._rate

    def set_rate(self, rate: float | None, now: float) -> None:
        self._rate = rate
        self._spent_until = min(self._spent_until, now)

    def most(self, wanted: int) -> int:
        """How many may be taken at a time, so that none waits long under its lock."""
        return wanted if self._rate is None else max(1, min(wanted, int(self._rate * BURST_SECONDS)))

    def spend(self, messages: int, now: float) -> float:
        """Seconds until that many may go."""
        if self._rate is None:
            return 0.0
        begin = max(self._spent_until, now - BURST_SECONDS)
        self._spent_until = begin + messages / self._rate
        return max(0.0, self._spent_until - now)
