"""The figures of one queue that the store keeps beside its rows, and the sequence numbers it gives out.

They are absolute: the last PutQueue of a commit is the truth.
"""

from __future__ import annotations

from twinbus.namespace.engine.descriptions import Counts
from twinbus.namespace.engine.rows import Lane, PutQueue


class Counters:
    """What one queue holds, by lane."""

    __slots__ = ("accessed", "changed", "lanes", "next_seq", "queue", "size")

    def __init__(self, stored: PutQueue) -> None:
        self.queue = stored.queue
        self.next_seq = stored.next_seq
        self.lanes = [stored.active, stored.deferred, stored.scheduled, stored.dead, stored.dead_deferred]
        self.lanes += (stored.transfer_dead, stored.transfer_dead_deferred)
        self.size = stored.size
        self.accessed = stored.accessed
        self.changed = False

    @classmethod
    def new(cls, queue: int, now: int) -> Counters:
        return cls(PutQueue(queue, 1, 0, 0, 0, 0, 0, 0, now))

    def take_seq(self) -> int:
        seq = self.next_seq
        self.next_seq = seq + 1
        self.changed = True
        return seq

    def add(self, lane: int, size: int) -> None:
        self.lanes[lane] += 1
        self.size += size
        self.changed = True

    def drop(self, lane: int, size: int) -> None:
        self.lanes[lane] -= 1
        self.size -= size
        self.changed = True

    def move(self, lane: int, to_lane: int) -> None:
        self.lanes[lane] -= 1
        self.lanes[to_lane] += 1
        self.changed = True

    def put(self) -> PutQueue:
        self.changed = False
        lanes = self.lanes
        place = (self.queue, self.next_seq)
        return tuple.__new__(PutQueue, (*place, *lanes[:5], self.size, self.accessed, lanes[5], lanes[6]))

    def counts(self) -> Counts:
        lanes = self.lanes
        return Counts(
            active=lanes[Lane.ACTIVE],
            deferred=lanes[Lane.DEFERRED],
            scheduled=lanes[Lane.SCHEDULED],
            dead_letter=lanes[Lane.DEAD] + lanes[Lane.DEAD_DEFERRED],
            transfer_dead_letter=lanes[Lane.TRANSFER_DEAD] + lanes[Lane.TRANSFER_DEAD_DEFERRED],
            size_bytes=self.size,
        )
