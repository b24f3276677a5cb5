"""Messages that wait for their time: kept in the scheduled lane of a queue or topic until due or cancelled.

Where a due message goes is decided by its entity.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from twinbus.namespace.engine.effects import AnswerRequest, EngineDecision, Meter, MeteredOperation, messages_not_found
from twinbus.namespace.engine.events import ScheduleCancelled
from twinbus.namespace.engine.lifecycle import EntityCounters
from twinbus.namespace.engine.limits import MIB
from twinbus.namespace.engine.storage_protocol import (
    DropRow,
    DueAnswer,
    DueRows,
    PutRow,
    QueueLane,
    Row,
    RowsBySeq,
    StoreRead,
    distinct,
)

_PAGE: Final = 256


class Schedule:
    """The scheduled lane of one queue."""

    __slots__ = ("counters", "next_due")

    def __init__(self, counters: EntityCounters, next_due: int | None) -> None:
        self.counters = counters
        self.next_due = next_due

    def add(self, raw: bytes, due: int, ttl: int | None, session: str | None, now: int, step: EngineDecision) -> int:
        """Its time to live runs from its activation: what `expires` tells here is that instant if it is punctual."""
        seq = self.counters.take_seq()
        expires = None if ttl is None else due + ttl
        row = Row(
            self.counters.queue, QueueLane.SCHEDULED, seq, seq, now, expires, due, session, 0, len(raw), None, None, raw
        )
        step.writes.append(PutRow(row))
        self.counters.add(QueueLane.SCHEDULED, row.size)
        if self.next_due is None or due < self.next_due:
            self.next_due = due
        return seq

    def cancel(self, event: ScheduleCancelled, path: str, step: EngineDecision) -> Generator[StoreRead, Any, None]:
        """All of them or none."""
        seqs = distinct(event.seqs)
        queue = self.counters.queue
        rows: list[Row] = yield RowsBySeq(queue, (QueueLane.SCHEDULED,), seqs, with_raw=False)
        if len(rows) < len(seqs):
            found = {row.seq for row in rows}
            missing = [seq for seq in seqs if seq not in found]
            step.effects.append(AnswerRequest(event.reply, messages_not_found("scheduled", missing)))
            return
        for row in rows:
            step.writes.append(DropRow(queue, QueueLane.SCHEDULED, row.seq))
            self.counters.drop(QueueLane.SCHEDULED, row.size)
        step.effects += (AnswerRequest(event.reply, None), Meter(path, MeteredOperation.CANCEL_SCHEDULED, len(rows)))

    def read_due(self, now: int) -> Generator[StoreRead, Any, list[Row]]:
        if self.next_due is None or self.next_due > now:
            return []
        answer: DueAnswer = yield DueRows(self.counters.queue, now, _PAGE, MIB)
        self.next_due = answer.next_at
        return answer.rows


def remaining(row: Row) -> int | None:
    """What a scheduled message has left from its activation on."""
    return None if row.expires is None or row.due is None else row.expires - row.due
