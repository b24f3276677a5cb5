"""The broker's clock, computed from the messages of a backlog queue (L5). Pure: times are arguments.

The clock of this machine may differ from the broker's by minutes. So the time that a message spent in the backlog is
computed by the broker's clock alone. A message has the time of its arrival (`enqueued`) and the end of its lock. The
end of the lock minus the lock duration of the queue is the broker's time at the delivery. The
monotonic clock of this machine measures the time after that.

    broker's time now = locked until - lock duration + monotonic time since the delivery

A delivered message may wait in the receiver before a pump takes it, so `now - received` is too short by that time, and
the computed time is too low, never too high. Of all messages of the last minutes, the highest result is the best one.

The lock duration comes from the properties of the queue. A syphon without the Manage right cannot read them. It then
assumes the minute of P5. No message has a lock that ends earlier than its arrival plus the lock duration, so that
"locked until - enqueued" of any message is an upper limit: a message that arrives while a pump waits shows the lock
duration exactly. While the lock duration is only assumed, `earliest` is never later than the broker's time: so no
message is dead-lettered before it expires.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Final

ASSUMED_LOCK: Final = 60.0
"""Seconds: the lock duration of a backlog queue that pairing created (P5)."""
LONGEST_LOCK: Final = 300.0
"""Seconds: the longest lock duration that the service permits."""
# A lock has at least this time left when a message is received. If it has less, this machine's clock is wrong.
_SHORTEST_LOCK: Final = 4.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NO_END: Final = datetime(9999, 1, 1, tzinfo=UTC)
# Seconds. A result counts for at least this time, and at most for twice this time: then clocks may have been set.
_PERIOD: Final = 300.0


@dataclass(slots=True)
class _Highest:
    """The highest value of the last one or two periods."""

    began: float = -inf
    previous: float = -inf
    current: float = -inf

    def add(self, value: float, now: float) -> None:
        age = now - self.began
        if age >= _PERIOD:
            self.previous = self.current if age < 2 * _PERIOD else -inf
            self.began, self.current = now, -inf
        self.current = max(self.current, value)

    @property
    def value(self) -> float:
        return max(self.previous, self.current)


class BrokerClock:
    """The broker's clock, as the messages of one backlog queue show it.

    `lock_seconds` is the lock duration of the queue; None while it is not known.
    """

    def __init__(self, lock_seconds: float | None = None) -> None:
        self.lock_seconds = lock_seconds
        self._shown = LONGEST_LOCK
        """The least "locked until - enqueued" so far: no lock is longer."""
        self._locked = _Highest()
        """The end of a lock minus the monotonic time of its receipt, in seconds."""

    @property
    def is_known(self) -> bool:
        """Whether a message was observed."""
        return self._locked.value > -inf

    @property
    def lock(self) -> float:
        """The lock duration in seconds that the clock uses."""
        return min(ASSUMED_LOCK, self._shown) if self.lock_seconds is None else self.lock_seconds

    def observe(self, locked_until: datetime, enqueued: datetime, now: float) -> None:
        """Take in a message that was received at `now` and whose lock is not renewed yet."""
        if not _EPOCH < enqueued < locked_until < _NO_END:
            return  # the broker did not write both times, or the lock has no end
        until, arrived = _seconds(locked_until), _seconds(enqueued)
        self._shown = min(self._shown, until - arrived)
        self._locked.add(until - now, now)

    def time(self, now: float) -> int | None:
        """Return the broker's time at the monotonic time `now`, in ms since the epoch; None before any message."""
        return round((self._locked.value - self.lock + now) * 1000) if self.is_known else None

    def earliest(self, now: float, wall: datetime) -> datetime:
        """Return the broker's time at `now`, or an earlier time while the lock duration is only assumed.

        Before any message, returns `wall`.
        """
        if not self.is_known:
            return wall
        lock = self._shown if self.lock_seconds is None else self.lock_seconds
        return _EPOCH + timedelta(seconds=self._locked.value - lock + now)

    def latest(self, now: float, wall: datetime) -> datetime:
        """Return the broker's time at `now`, or a later time while the lock duration is only assumed.

        Locks are renewed by this time. While the lock duration is only assumed, the clock of this machine may show a
        shorter lock. Then this method returns the time of that clock, unless the lock would have ended by then: in
        this case that clock is wrong. Before any message, returns `wall`.
        """
        if not self.is_known:
            return wall
        time = _EPOCH + timedelta(seconds=self._locked.value - self.lock + now)
        end = _EPOCH + timedelta(seconds=self._locked.value + now)
        if self.lock_seconds is None and time < wall <= end - timedelta(seconds=_SHORTEST_LOCK):
            return wall
        return time


def _seconds(instant: datetime) -> float:
    return (instant - _EPOCH) / timedelta(seconds=1)
