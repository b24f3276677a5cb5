"""What the writes of one commit come to: few statements over many rows instead of one for each write.

Each step of SQLite gives the interpreter lock away and may wait for it, so their number decides the speed.
Writes on different rows commute; writes on one row are folded into their outcome. Where order would still matter,
a new batch begins. No SQL in here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import assert_never

from twinbus.namespace.engine.storage_protocol import (
    DropEntity,
    DropRow,
    ForgetSeenIds,
    MoveRow,
    PutBody,
    PutCounters,
    PutEntity,
    PutRow,
    PutSeenId,
    PutSessionState,
    QueueLane,
    Row,
    StoreWrite,
)
from twinbus.namespace.store.errors import StoreConflictError

RowKey = tuple[int, int, int]


@dataclass(slots=True)
class RowChanges:
    """Writes on rows that may be carried out in this order: early puts, drops, moves, late puts."""

    drops: set[RowKey] = field(default_factory=set)
    moves: dict[RowKey, MoveRow] = field(default_factory=dict)
    """By the key under which the row is stored now."""
    arrivals: dict[RowKey, RowKey] = field(default_factory=dict)
    """Where moved rows will stand, and the key under which each is stored now."""
    puts: dict[RowKey, Row] = field(default_factory=dict)
    unnamed: set[int] = field(default_factory=set)
    """Bodies of rows that were put and dropped again."""

    def early_puts(self) -> list[Row]:
        """Rows that name a shared body: there before the drops, lest the last drop takes the body away."""
        return [row for key, row in self.puts.items() if row.body is not None and not self._is_taken(key)]

    def late_puts(self) -> list[Row]:
        return [row for key, row in self.puts.items() if row.body is None or self._is_taken(key)]

    def _is_taken(self, key: RowKey) -> bool:
        return key in self.drops or key in self.moves

    def put(self, row: Row) -> None:
        key = row[:3]
        if key in self.puts or key in self.arrivals:
            raise _conflict(key)
        self.puts[key] = row

    def drop(self, key: RowKey) -> None:
        if (row := self.puts.pop(key, None)) is not None:
            if row.body is not None:
                self.unnamed.add(row.body)
        elif (stored := self.arrivals.pop(key, None)) is not None:
            del self.moves[stored]
            self.drops.add(stored)
        elif key not in self.moves:  # else the row stands elsewhere by now
            self.drops.add(key)

    def move(self, write: MoveRow) -> None:
        key, to = write[:3], (write.queue, write.to_lane, write.to_seq)
        if to != key and (to in self.puts or to in self.arrivals):
            raise _conflict(to)
        if (row := self.puts.pop(key, None)) is not None:
            self.puts[to] = moved(row, write)
        elif (stored := self.arrivals.pop(key, None)) is not None:
            self.moves[stored] = write._replace(lane=stored[1], seq=stored[2])
            self.arrivals[to] = stored
        elif key not in self.moves and key not in self.drops:
            self.moves[key] = write
            self.arrivals[to] = key


@dataclass(slots=True)
class WriteBatch:
    """A whole commit: batches in order, and what does not depend on rows (last word for each key)."""

    bodies: dict[int, PutBody] = field(default_factory=dict)
    batches: list[RowChanges] = field(default_factory=lambda: [RowChanges()])
    counters: dict[int, PutCounters] = field(default_factory=dict)
    entities: dict[int, PutEntity] = field(default_factory=dict)
    states: dict[tuple[int, str], PutSessionState] = field(default_factory=dict)
    seen: dict[tuple[int, str], PutSeenId] = field(default_factory=dict)
    forgotten: dict[int, int] = field(default_factory=dict)
    """By queue, the instant before which ids need no longer be known."""
    gone: set[int] = field(default_factory=set)
    """Queues dropped by this commit."""

    def shared_bytes(self) -> dict[int, int]:
        """What each topic is charged for the bodies put."""
        added: defaultdict[int, int] = defaultdict(int)
        for _, raw, topic in self.bodies.values():
            added[topic] += len(raw)
        return added


def moved(row: Row, write: MoveRow) -> Row:
    """The row as the move leaves it."""
    return row._replace(
        lane=write.to_lane,
        seq=write.to_seq,
        enqueued=write.enqueued,
        expires=write.expires,
        due=row.due if write.to_lane == QueueLane.SCHEDULED else None,
        delivery_count=write.delivery_count,
        overlay=write.overlay,
    )


def fold_writes(writes: Iterable[StoreWrite], gone: Collection[int]) -> WriteBatch:
    """Fold the writes of a commit. Writes to queues that are gone come too late and are left out."""
    plan = WriteBatch()
    batch = plan.batches[0]
    for write in writes:
        if isinstance(write, PutBody):
            plan.bodies[write.body] = write
            continue
        queue = write[0].queue if isinstance(write, PutRow) else write[0]
        if queue in gone or queue in plan.gone:
            continue
        match write:
            case PutRow():
                batch.put(write.row)
            case DropRow():
                batch.drop(write)
            case PutCounters():
                plan.counters[queue] = write
            case MoveRow():
                # Its place is that of a row still to be moved away: those moves come first.
                if (queue, write.to_lane, write.to_seq) in batch.moves and write[1:3] != write[3:5]:
                    plan.batches.append(batch := RowChanges())
                batch.move(write)
            case PutSeenId():
                plan.seen[queue, write.message_id] = write
            case PutSessionState():
                plan.states[queue, write.session] = write
            case ForgetSeenIds():
                plan.forgotten[queue] = max(write.before, plan.forgotten.get(queue, write.before))
            case PutEntity():
                plan.entities[queue] = write
            case DropEntity():
                plan.gone.add(queue)
                plan.counters.pop(queue, None)
                plan.entities.pop(queue, None)
            case _:
                assert_never(write)
    return plan


def _conflict(key: RowKey) -> StoreConflictError:
    return StoreConflictError(f"Two rows are written to queue {key[0]}, lane {key[1]}, sequence number {key[2]}")
