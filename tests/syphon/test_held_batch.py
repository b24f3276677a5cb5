"""Y4: when the locks of a batch are renewed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from twinbus.syphon.held_batch import HeldBatch
from twinbus.syphon.transport import HeldMessage

WALL = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(eq=False)
class Held:
    """A message whose lock lasts so many seconds. Counts how often the end of the lock is read."""

    lock: float
    reads: int = 0
    sequence_number: int = 1
    message_id: str = "a"
    size: int = 10
    unanswered: bool = False
    enqueued_time: datetime = WALL

    @property
    def locked_until(self) -> datetime:
        self.reads += 1
        return WALL + timedelta(seconds=self.lock)


@pytest.mark.parametrize(
    ("lock", "due"), [(30.0, 15.0), (60.0, 30.0), (300.0, 30.0), (5.0, 2.5), (4.0, 2.0), (1.0, 2.0), (-7.0, 2.0)]
)
def test_y4_locks_are_due_at_half_their_time_within_bounds(lock: float, due: float) -> None:
    batch = HeldBatch([Held(lock)], 100.0, WALL)
    assert not batch.is_due(100.0 + due - 0.01)
    assert batch.is_due(100.0 + due)


def test_y4_the_end_of_the_locks_is_not_read_before_the_shortest_lock_could_be_due() -> None:
    held = Held(30.0)
    batch = HeldBatch([held], 100.0, WALL)
    assert not batch.is_due(101.9)
    assert held.reads == 0
    assert not batch.is_due(102.0)
    assert held.reads == 1
    assert batch.renew_at == 115.0


def test_y4_the_first_message_that_is_not_settled_counts() -> None:
    held: list[HeldMessage] = [Held(10.0), Held(20.0), Held(30.0)]
    batch = HeldBatch(held, 100.0, WALL)
    batch.settled(held[:1])
    batch.lost.add(id(held[1]))
    assert batch.unsettled() == held[2:]
    assert not batch.is_due(114.9)
    assert batch.is_due(115.0)


def test_y4_a_renewal_starts_the_time_again() -> None:
    held = Held(30.0)
    batch = HeldBatch([held], 100.0, WALL)
    assert batch.is_due(115.0)
    held.lock = 45.0
    batch.renewed(115.0, WALL + timedelta(seconds=15))
    assert not batch.is_due(129.9)
    assert batch.is_due(130.0)
