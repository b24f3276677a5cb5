"""Carries a plan out on a connection that is in a transaction, in as few steps of SQLite as it can.

Rows go in by statements of fixed sizes, drops and moves as one JSON argument each. Begins and ends no transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import apsw

from twinbus.namespace.store.plan import Batch, Key, Plan

# OR ROLLBACK: a conflict ends the whole commit anyway, and SQLite then needs no journal for the statement.
_PUT_ROWS = "INSERT OR ROLLBACK INTO message VALUES "
_PUT_BODIES = "INSERT OR ROLLBACK INTO body VALUES "
_PUT_COUNTERS = "INSERT OR REPLACE INTO counter VALUES "
_PUT_ENTITIES = "INSERT OR REPLACE INTO entity VALUES "
_PUT_STATES = "INSERT OR REPLACE INTO session_state VALUES "
_PUT_SEEN = "INSERT OR REPLACE INTO seen VALUES "
_WIDTH = {_PUT_ROWS: 13, _PUT_BODIES: 3, _PUT_COUNTERS: 11, _PUT_ENTITIES: 6, _PUT_STATES: 4, _PUT_SEEN: 3}
_LARGEST = 256

_DROP_RANGE = "DELETE FROM message WHERE queue = ? AND lane = ? AND seq BETWEEN ? AND ?"
_DROP_RANGES = """
DELETE FROM message WHERE rowid IN (
  SELECT m.rowid FROM json_each(?) AS r CROSS JOIN message AS m
  ON m.queue = r.value ->> 0 AND m.lane = r.value ->> 1 AND m.seq BETWEEN r.value ->> 2 AND r.value ->> 3)
"""
_MOVE_ROWS = """
UPDATE OR ROLLBACK message AS m SET
  lane = r.value ->> 3, seq = r.value ->> 4, enqueued = r.value ->> 5, expires = r.value ->> 6,
  delivery_count = r.value ->> 7, overlay = unhex(r.value ->> 8), due = iif(r.value ->> 3 = 2, m.due, NULL)
FROM json_each(?) AS r
WHERE m.queue = r.value ->> 0 AND m.lane = r.value ->> 1 AND m.seq = r.value ->> 2
"""
_DROP_UNNAMED = """
DELETE FROM body WHERE id IN (SELECT value FROM json_each(?)) AND NOT EXISTS (SELECT 1 FROM message WHERE body = id)
"""
_CHARGE = """
INSERT INTO shared SELECT value ->> 0, value ->> 1 FROM json_each(?) WHERE true
ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes
"""
_FREED = "SELECT json_group_array(json_array(topic, bytes)) FROM freed"
_CHARGE_LESS = """
UPDATE shared SET bytes = shared.bytes - freed.bytes FROM freed WHERE freed.topic = shared.topic;
DELETE FROM freed;
"""
_DROP_STATES = """
DELETE FROM session_state WHERE (queue, session) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?))
"""
_RAISE_HIGHEST = "UPDATE highest SET queue = max(queue, ?)"
_DROP_ENTITIES = """
INSERT OR IGNORE INTO dropped SELECT value FROM json_each(?1);
DELETE FROM entity WHERE queue IN (SELECT value FROM json_each(?1));
DELETE FROM counter WHERE queue IN (SELECT value FROM json_each(?1));
DELETE FROM shared WHERE topic IN (SELECT value FROM json_each(?1));
"""

_PURGE = (
    "DELETE FROM message WHERE rowid IN (SELECT rowid FROM message WHERE queue = ? LIMIT ?)",
    """DELETE FROM session_state WHERE (queue, session) IN (
      SELECT queue, session FROM session_state WHERE queue = ? LIMIT ?)""",
    "DELETE FROM seen WHERE (queue, message_id) IN (SELECT queue, message_id FROM seen WHERE queue = ? LIMIT ?)",
)
_PURGED = "DELETE FROM dropped WHERE queue = ?"
_FORGET_SEEN = """
DELETE FROM seen WHERE (queue, message_id) IN (
  SELECT queue, message_id FROM seen WHERE queue = ? AND at < ? ORDER BY at LIMIT ?)
"""


class Writer:
    """The statements of commits on the writing connection."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._execute = connection.execute

    def carry_out(self, plan: Plan) -> None:
        """Everything the plan says, in its order."""
        if plan.bodies:
            self._put(_PUT_BODIES, list(plan.bodies.values()))
            self._execute(_CHARGE, (json.dumps(list(plan.shared_bytes().items())),))
        for batch in plan.batches:
            self._carry_out_batch(batch)
        unnamed = [body for batch in plan.batches for body in batch.unnamed]
        if unnamed:
            self._execute(_DROP_UNNAMED, (json.dumps(unnamed),))
        if plan.seen:
            self._put(_PUT_SEEN, list(plan.seen.values()))
        if plan.states:
            self._put(_PUT_STATES, [write for write in plan.states.values() if write.state is not None])
            if cleared := [key for key, write in plan.states.items() if write.state is None]:
                self._execute(_DROP_STATES, (json.dumps(cleared),))
        if plan.entities:
            self._put(_PUT_ENTITIES, list(plan.entities.values()))
        if plan.entities or plan.gone:
            self._execute(_RAISE_HIGHEST, (max(chain(plan.entities, plan.gone)),))
        if plan.counters:
            self._put(_PUT_COUNTERS, list(plan.counters.values()))
        if plan.gone:
            self._execute(_DROP_ENTITIES, {"1": json.dumps(sorted(plan.gone))})

    def _carry_out_batch(self, batch: Batch) -> None:
        if early := batch.early_puts():
            self._put(_PUT_ROWS, [(*row[:12], None) for row in early])
        if batch.drops:
            self._drop(batch.drops)
        if batch.moves:
            arguments = [(*move[:8], None if move[8] is None else move[8].hex()) for move in batch.moves.values()]
            self._execute(_MOVE_ROWS, (json.dumps(arguments),))
        if late := batch.late_puts() if early else list(batch.puts.values()):
            self._put(_PUT_ROWS, late)

    def _put(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows by powers of two, so that any number takes few statements and all of them stay prepared."""
        done, left = 0, len(rows)
        while left:
            size = min(_LARGEST, 1 << left.bit_length() - 1)
            part = rows[done : done + size] if left > size or done else rows
            self._execute(_SQL[statement, size], tuple(chain.from_iterable(part)))
            done += size
            left -= size

    def _drop(self, keys: Iterable[Key]) -> None:
        ranges = list(_ranges(keys))
        if len(ranges) == 1:
            self._execute(_DROP_RANGE, ranges[0])
        else:
            self._execute(_DROP_RANGES, (json.dumps(ranges),))

    def settle_freed(self) -> dict[int, int]:
        """Bytes of bodies that went in this transaction, by their topic, which is charged for them no more."""
        freed: dict[int, int] = dict(json.loads(self._execute(_FREED).get))
        if freed:
            self._execute(_CHARGE_LESS)
        return freed

    def purge(self, queue: int, limit: int) -> int:
        """Remove up to `limit` rows of a dropped queue; when none is left, its entry too. Returns how many went."""
        left = limit
        for statement in _PURGE:
            self._execute(statement, (queue, left))
            left -= self._connection.changes()
            if left <= 0:
                return limit
        self._execute(_PURGED, (queue,))
        return limit - left

    def forget_seen(self, queue: int, before: int, limit: int) -> int:
        """Remove up to `limit` ids remembered before that instant. Returns how many went."""
        self._execute(_FORGET_SEEN, (queue, before, limit))
        return self._connection.changes()


def _ranges(keys: Iterable[Key]) -> Iterable[tuple[int, int, int, int]]:
    """The keys as runs of consecutive sequence numbers: queue, lane, first, last."""
    ordered = sorted(keys)
    queue, lane, first = ordered[0]
    last = first
    for key in ordered[1:]:
        if key[2] == last + 1 and key[1] == lane and key[0] == queue:
            last += 1
        else:
            yield queue, lane, first, last
            queue, lane, first = key
            last = first
    yield queue, lane, first, last


def _sized(statement: str, size: int) -> str:
    return statement + ",".join(["(" + ",".join("?" * _WIDTH[statement]) + ")"] * size)


_SQL = {(statement, 1 << power): _sized(statement, 1 << power) for statement in _WIDTH for power in range(9)}
