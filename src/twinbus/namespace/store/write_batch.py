"""Combines the writes of one commit into a batch that needs only a small number of SQL statements.

Why. Every statement that SQLite runs releases the interpreter lock and may have to wait to get the lock back. So a
commit of many writes must not run one statement for each write.

How. Writes on different rows can be carried out in any order. Several writes on one row are replaced by one write with
the same result: a row that is put and then moved is put at the key to which it was moved. The results are carried out
in four groups:

    early puts   new rows that name a shared body: while such a row exists, a drop does not delete the body
    drops
    moves
    late puts    the other new rows: their key may be free only after a drop or a move

If a move has the key of a row as its target, and an earlier move of the commit moves that row away, the two moves
cannot be in one group. The later move starts a new `RowChanges`.

This module is pure and contains no SQL.
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
    """Changes of rows, to be carried out in this order: early puts, drops, moves, late puts."""

    drops: set[RowKey] = field(default_factory=set)
    moves: dict[RowKey, MoveRow] = field(default_factory=dict)
    """The moves, by the key that the row has in the file."""
    arrivals: dict[RowKey, RowKey] = field(default_factory=dict)
    """Maps the key that a moved row will have to the key that the row has in the file."""
    puts: dict[RowKey, Row] = field(default_factory=dict)
    unnamed: set[int] = field(default_factory=set)
    """Ids of the bodies of rows that this commit put and dropped. If no other row names a body, it is deleted."""

    def early_puts(self) -> list[Row]:
        """Return the new rows that name a shared body and whose key is free already."""
        return [row for key, row in self.puts.items() if row.body is not None and not self._is_occupied(key)]

    def late_puts(self) -> list[Row]:
        """Return the other new rows."""
        return [row for key, row in self.puts.items() if row.body is None or self._is_occupied(key)]

    def _is_occupied(self, key: RowKey) -> bool:
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
        elif key not in self.moves:  # otherwise the row was moved away: no row has this key now
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
    """All writes of a commit: the changes of rows in their order, and of all other writes the last one for each key."""

    bodies: dict[int, PutBody] = field(default_factory=dict)
    row_changes: list[RowChanges] = field(default_factory=lambda: [RowChanges()])
    counters: dict[int, PutCounters] = field(default_factory=dict)
    entities: dict[int, PutEntity] = field(default_factory=dict)
    states: dict[tuple[int, str], PutSessionState] = field(default_factory=dict)
    seen: dict[tuple[int, str], PutSeenId] = field(default_factory=dict)
    forgotten: dict[int, int] = field(default_factory=dict)
    """Maps a queue to the instant before which its remembered message ids can be deleted."""
    gone: set[int] = field(default_factory=set)
    """Queues that this commit drops."""

    def shared_bytes(self) -> dict[int, int]:
        """Return the bytes that each topic is charged for the bodies that this commit puts."""
        added: defaultdict[int, int] = defaultdict(int)
        for _, raw, topic in self.bodies.values():
            added[topic] += len(raw)
        return added


def moved(row: Row, write: MoveRow) -> Row:
    """Return the row as it is after the move."""
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
    """Return the writes of a commit as a batch, without writes to queues in `gone`. Raises StoreConflictError."""
    folded = WriteBatch()
    rows = folded.row_changes[0]
    for write in writes:
        if isinstance(write, PutBody):
            folded.bodies[write.body] = write
            continue
        queue = write[0].queue if isinstance(write, PutRow) else write[0]
        if queue in gone or queue in folded.gone:
            continue
        match write:
            case PutRow():
                rows.put(write.row)
            case DropRow():
                rows.drop(write)
            case PutCounters():
                folded.counters[queue] = write
            case MoveRow():
                # Another row is to be moved away from the target key: carry that move out first.
                if (queue, write.to_lane, write.to_seq) in rows.moves and write[1:3] != write[3:5]:
                    folded.row_changes.append(rows := RowChanges())
                rows.move(write)
            case PutSeenId():
                folded.seen[queue, write.message_id] = write
            case PutSessionState():
                folded.states[queue, write.session] = write
            case ForgetSeenIds():
                folded.forgotten[queue] = max(write.before, folded.forgotten.get(queue, write.before))
            case PutEntity():
                folded.entities[queue] = write
            case DropEntity():
                folded.gone.add(queue)
                folded.counters.pop(queue, None)
                folded.entities.pop(queue, None)
            case _:
                assert_never(write)
    return folded


def _conflict(key: RowKey) -> StoreConflictError:
    return StoreConflictError(f"Two rows are written to queue {key[0]}, lane {key[1]}, sequence number {key[2]}")
