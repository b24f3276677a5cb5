"""One backlog queue of a drain: whether no message can move now, and when the queue is scanned next (Y11). Pure.

An empty receive does not show that a queue is empty: earlier runs and other syphons have deferred messages, and other
receivers have locked some. Only a scan shows this. So a drain scans a queue after its last message was moved. If the
scan finds messages that are *unavailable* (locked by another receiver), the queue is scanned again after growing
pauses: the other receiver settles these messages, or their locks end and this pump receives them. A message that stays
unavailable for longer than a lock lasts has a holder that renews the lock, and the drain ends without it.

A queue that never gets empty, because applications still divert messages for a destination that is not ready, is
scanned too: after some seconds without a moved message. If the pump then receives a message that arrived after the
scan, it has seen every message that the scan found.
"""

from __future__ import annotations

from math import inf
from typing import Final

from twinbus.syphon.plan.deferred import DeferredMessages

SCAN_ANYWAY_AFTER: Final = 10.0
"""Seconds without a moved message after which a queue is scanned although it never was empty."""
_LONGEST_PAUSE: Final = 30.0


class QueueDrain:
    """The drain of one backlog queue. `moved` is, in all methods, how many messages of the queue were moved so far."""

    def __init__(self, deferred: DeferredMessages) -> None:
        self._deferred = deferred
        self._scans = 0
        self._scan_ended = -inf
        self._moved_at_scan: int | None = None
        self._moved = 0
        self._moved_at = -inf
        self._newest = 0
        self._unavailable = 0
        self._unavailable_since: float | None = None

    def received(self, newest: int, moved: int, now: float) -> None:
        """Report a received batch. `newest` is the number of its last message."""
        self._newest = max(self._newest, newest)
        if moved != self._moved or self._moved_at == -inf:
            self._moved, self._moved_at = moved, now
        elif not self._is_scan_recent(moved) and now - max(self._moved_at, self._scan_ended) > SCAN_ANYWAY_AFTER:
            self._deferred.schedule_scan(now)

    def has_passed_scan(self, moved: int) -> bool:
        """Return whether the pump received a message that arrived after a scan, and nothing was moved since the scan.

        Then every message that the scan found active was received, by this pump or by another receiver.
        """
        return self._is_scan_recent(moved) and self._newest > self._deferred.last_scanned

    def scan_began(self, moved: int) -> None:
        self._moved_at_scan = moved

    def scan_ended(self, now: float, *, has_failed: bool) -> None:
        """Report that a scan has ended. One that failed is repeated after a pause."""
        self._scans += 1
        self._scan_ended = now
        if has_failed:
            self._deferred.schedule_scan(now + self._pause())

    def is_settled(self, now: float, moved: int, patience: float) -> bool:
        """Return whether no message of the queue can move now. If only a scan can show this, schedule the scan.

        Call this only if the pump has received all messages of the queue and holds none. Messages that stay unavailable
        for `patience` seconds count as settled.
        """
        deferred = self._deferred
        if deferred.is_scanning or deferred.recall_due(now) <= now:
            return False
        next_scan = max(now, self._scan_ended + self._pause())
        count = deferred.unavailable().total()
        if not count:
            self._unavailable_since = None
        elif self._unavailable_since is None or count < self._unavailable:
            self._unavailable_since = now
        self._unavailable = count
        if self._unavailable_since is not None and now < (end := self._unavailable_since + patience):
            deferred.schedule_scan(min(next_scan, end))
            return False
        if not self._is_scan_recent(moved):
            deferred.schedule_scan(next_scan)
            return False
        return True

    def _is_scan_recent(self, moved: int) -> bool:
        return self._deferred.is_known and moved == self._moved_at_scan

    def _pause(self) -> float:
        return min(2.0 ** min(self._scans - 1, 10), _LONGEST_PAUSE) if self._scans else 0.0
