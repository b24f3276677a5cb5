"""When a drain ends although messages are left (Y11). Pure: counts and times are arguments.

A drain is *stuck* when no message can move: every backlog queue was received and scanned to its end, and every message
that is left is kept, dead-lettered, scheduled, locked by another receiver, or put aside for a destination that is not
ready. A stuck drain waits `wait` seconds for the destinations, which are probed after their growing pauses. After the
wait, each destination is tried once more. If all these tries fail, the drain ends.

A message that moves ends this: the drain is stuck again only after every queue was looked at again. New messages for a
destination that is not ready do not: applications that still divert to it cannot keep the drain from ending.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

TRIES: Final = 2
"""A destination is given up after this number of failed tries at least: the first one, and one more."""


class WaitingDestination(NamedTuple):
    """A destination for which messages are put aside.

    `failed_at` is the time of the last failed try; -inf if the destination is ready. `failures` is the number of
    failures since the destination was last ready. Nothing is sent to a held destination (S15).
    """

    path: str
    failed_at: float
    failures: int
    is_held: bool = False


class DrainEnd:
    """Decides when a drain ends. `wait` is in seconds."""

    def __init__(self, wait: float = 0.0) -> None:
        self._wait = wait
        self._moved = 0
        self._stuck_at: float | None = None

    @property
    def last_try_at(self) -> float:
        """The time from which each destination is tried for the last time; inf while the drain is not stuck."""
        return inf if self._stuck_at is None else self._stuck_at + self._wait

    def is_over(self, now: float, moved: int, *, is_settled: bool, waiting: Sequence[WaitingDestination]) -> bool:
        """Return whether the drain ends now.

        `moved` is how many messages were moved so far. `is_settled`: no queue has a message that can move.
        """
        if moved != self._moved:
            self._moved, self._stuck_at = moved, None
        if not is_settled:
            return False
        if not waiting:
            return True
        if self._stuck_at is None:
            self._stuck_at = now
        return all(self._is_given_up(one, now) for one in waiting)

    def _is_given_up(self, one: WaitingDestination, now: float) -> bool:
        if one.is_held:
            return now >= self.last_try_at
        return one.failures >= TRIES and one.failed_at > self.last_try_at
