"""Runs the statements of a commit, and keeps checksums and inventories (`checksums`) in step with the rows.

The writer has the counters and the inventory of every queue in memory. A commit computes the new ones, writes them with
the rows, and takes them over when it is on disk (`committed`). The number of the commit is in every row of `counter`
that the commit writes, so it needs no page of its own; a commit without counters writes it into `totals`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import apsw

from twinbus.namespace.engine.storage_protocol import (
    MoveRow,
    PutCounters,
    PutEntity,
    PutSeenId,
    PutSessionState,
    Row,
)
from twinbus.namespace.store import open_store
from twinbus.namespace.store.checksums import (
    KEY_SQL,
    Inventory,
    body_crc,
    counters_crc,
    keys_of_range,
    moved_crc,
    row_crc,
    row_key,
    values_crc,
)
from twinbus.namespace.store.errors import UNREADABLE
from twinbus.namespace.store.open_store import StoredCounters, Totals
from twinbus.namespace.store.row_reader import DamagedRowError
from twinbus.namespace.store.write_batch import RowChanges, RowKey, WriteBatch, moved

_MOST_ROWS = 256


def _insert(verb: str, table: str, columns: Sequence[str]) -> dict[int, str]:
    """Return the INSERT statements for 1, 2, 4 … `_MOST_ROWS` rows, by their number of rows."""
    row = f"({', '.join('?' * len(columns))})"
    start = f"{verb} INTO {table} ({', '.join(columns)}) VALUES "
    sizes = [1 << power for power in range(_MOST_ROWS.bit_length())]
    return {size: start + ", ".join([row] * size) for size in sizes}


# The columns have the order of the fields of the writes. OR ROLLBACK: a conflict fails the whole commit anyway, and
# SQLite then keeps no journal for the statement.
_PUT_ROWS = _insert("INSERT OR ROLLBACK", "message", (*Row._fields, "crc"))
_PUT_BODIES = _insert("INSERT OR ROLLBACK", "body", ("id", "raw", "topic", "crc"))
_PUT_COUNTERS = _insert("INSERT OR REPLACE", "counter", (*PutCounters._fields, *Inventory._fields, "commits", "crc"))
_PUT_ENTITIES = _insert("INSERT OR REPLACE", "entity", (*PutEntity._fields, "crc"))
_PUT_STATES = _insert("INSERT OR REPLACE", "session_state", (*PutSessionState._fields, "crc"))
_PUT_SEEN = _insert("INSERT OR REPLACE", "seen", (*PutSeenId._fields, "crc"))

_DROP_RANGE = "DELETE FROM message WHERE queue = ? AND lane = ? AND seq BETWEEN ? AND ?"
_DROP_RANGES = """
DELETE FROM message WHERE rowid IN (
  SELECT m.rowid FROM json_each(?) AS r CROSS JOIN message AS m
  ON m.queue = r.value ->> 0 AND m.lane = r.value ->> 1 AND m.seq BETWEEN r.value ->> 2 AND r.value ->> 3)
"""
_MOVE_ROWS = """
UPDATE OR ROLLBACK message AS m SET
  lane = r.value ->> 3, seq = r.value ->> 4, enqueued = r.value ->> 5, expires = r.value ->> 6,
  delivery_count = r.value ->> 7, overlay = unhex(r.value ->> 8), due = iif(r.value ->> 3 = 2, m.due, NULL),
  crc = r.value ->> 9
FROM json_each(?) AS r
WHERE m.queue = r.value ->> 0 AND m.lane = r.value ->> 1 AND m.seq = r.value ->> 2
"""
# What `moved_crc` needs: the row without session and raw, and its checksum.
_TO_MOVE = """
SELECT json_group_array(json_array(
  m.queue, m.lane, m.seq, m.origin_seq, m.enqueued, m.expires, m.due, NULL, m.delivery_count, m.size,
  iif(m.overlay IS NULL, NULL, hex(m.overlay)), m.body, '', m.crc))
FROM json_each(?) AS r CROSS JOIN message AS m
ON m.queue = r.value ->> 0 AND m.lane = r.value ->> 1 AND m.seq = r.value ->> 2
"""
_INVENTORY = f"SELECT count(*), coalesce(sum({KEY_SQL}), 0) FROM message WHERE queue = ?"  # noqa: S608
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
_SET_TOTALS = "UPDATE totals SET (identity, commits, entities, entity_crcs, highest, crc) = (?, ?, ?, ?, ?, ?)"
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


class RowsMissingError(Exception):
    """Rows of these queues are gone: a commit was to drop one of them."""

    def __init__(self, queues: Collection[int], number: int) -> None:
        super().__init__(queues, number)
        self.queues = queues
        self.number = number


@dataclass(slots=True)
class _InventoryChanges:
    """How a commit changes the inventories of queues."""

    rows: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    keys: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, queue: int, rows: int, keys: int) -> None:
        self.rows[queue] += rows
        self.keys[queue] += keys


class CommitWriter:
    """Runs the statements of commits on the writing connection, inside the caller's transaction.

    Every statement that SQLite runs releases the interpreter lock and may have to wait to get the lock back, so the
    number of statements decides the speed. One statement inserts up to 256 rows. All drops are one statement, with a
    JSON text as its argument; all moves are two.
    """

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._execute = connection.execute
        self._totals = open_store.read_totals(connection)
        self._counters = open_store.read_counters(connection)
        self._entity_crcs = open_store.read_entity_crcs(connection)
        self.commits = max(self._totals.commits, *(stored.commits for stored in self._counters.values()), 0)
        """The number of the last commit."""
        self._pending = WriteBatch()
        self._new_counters: dict[int, StoredCounters] = {}
        self._new_entity_crcs: dict[int, int] = {}
        self._new_totals = self._totals

    @property
    def identity(self) -> int:
        """The identity of the store."""
        return self._totals.identity

    def carry_out(self, batch: WriteBatch) -> None:
        """Carry out all writes of the batch, in its order. Call `committed` when the transaction is on disk."""
        commits = self.commits + 1
        if batch.bodies:
            self._put(_PUT_BODIES, [(*body, body_crc(body)) for body in batch.bodies.values()])
            self._execute(_CHARGE, (json.dumps(list(batch.shared_bytes().items())),))
        changed = _InventoryChanges()
        for changes in batch.row_changes:
            self._change_rows(changes, changed)
        unnamed = [body for changes in batch.row_changes for body in changes.unnamed]
        if unnamed:
            self._execute(_DROP_UNNAMED, (json.dumps(unnamed),))
        if batch.seen:
            self._put(_PUT_SEEN, [(*seen, values_crc(seen)) for seen in batch.seen.values()])
        if batch.states:
            states = [write for write in batch.states.values() if write.state is not None]
            self._put(_PUT_STATES, [(*state, values_crc(state)) for state in states])
            if cleared := [key for key, write in batch.states.items() if write.state is None]:
                self._execute(_DROP_STATES, (json.dumps(cleared),))
        self._new_entity_crcs = {queue: values_crc(entity) for queue, entity in batch.entities.items()}
        if batch.entities:
            self._put(_PUT_ENTITIES, [(*each, self._new_entity_crcs[each.queue]) for each in batch.entities.values()])
        self._new_counters = self._counters_after(batch, changed, commits)
        if self._new_counters:
            rows = [(*new.counters, *new.inventory, commits, counters_crc(*new)) for new in self._new_counters.values()]
            self._put(_PUT_COUNTERS, rows)
        if batch.gone:
            self._execute(_DROP_ENTITIES, {"1": json.dumps(sorted(batch.gone))})
        self._new_totals = self._totals
        if batch.entities or batch.gone or not self._new_counters:
            self._new_totals = self._totals_after(batch, commits)
            self._execute(_SET_TOTALS, (*self._new_totals, values_crc(self._new_totals)))
        self._pending = batch

    def committed(self) -> None:
        """Take over the counters of the transaction that is on disk now."""
        self.commits += 1
        self._counters |= self._new_counters
        self._entity_crcs |= self._new_entity_crcs
        self._totals = self._new_totals
        for queue in self._pending.gone:
            self._counters.pop(queue, None)
            self._entity_crcs.pop(queue, None)

    def _counters_after(self, batch: WriteBatch, changed: _InventoryChanges, commits: int) -> dict[int, StoredCounters]:
        """Return the counters that the commit writes: of the queues whose counters or rows it changes."""
        written: dict[int, StoredCounters] = {}
        for queue in chain(batch.counters, changed.rows, batch.entities):
            if queue in written or queue in batch.gone:
                continue
            stored = self._counters.get(queue)
            counters = batch.counters.get(queue)
            inventory = self._inventory_after(queue, changed)
            if counters is None and stored is not None:
                counters = stored.counters
            elif counters is None:
                created = batch.entities[queue].created if queue in batch.entities else 0
                counters = PutCounters(queue, 1, 0, 0, 0, 0, 0, 0, created)
            written[queue] = StoredCounters(counters, inventory, commits)
        return written

    def _inventory_after(self, queue: int, changed: _InventoryChanges) -> Inventory:
        stored = self._counters.get(queue)
        inventory = Inventory() if stored is None else stored.inventory
        if queue not in changed.rows:
            return inventory
        return Inventory(inventory.rows + changed.rows[queue], inventory.keys + changed.keys[queue])

    def _totals_after(self, batch: WriteBatch, commits: int) -> Totals:
        old = self._totals
        known = self._entity_crcs
        number, crcs = old.entities, old.entity_crcs
        for queue, crc in self._new_entity_crcs.items():
            number += queue not in known
            crcs += crc - known.get(queue, 0)
        for queue in batch.gone:
            number -= queue in known
            crcs -= known.get(queue, 0)
        highest = max(chain((old.highest,), batch.entities, batch.gone))
        return Totals(old.identity, commits, number, crcs, highest)

    def _change_rows(self, changes: RowChanges, changed: _InventoryChanges) -> None:
        if early := changes.early_puts():
            self._put_rows(early, changed)
        if changes.drops:
            self._drop(changes.drops, changed)
        if changes.moves:
            self._move(changes.moves, changed)
        if late := changes.late_puts() if early else list(changes.puts.values()):
            self._put_rows(late, changed)

    def _put_rows(self, rows: Sequence[Row], changed: _InventoryChanges) -> None:
        values: list[Any] = []
        for row in rows:
            values += row
            if row.body is not None:
                values[-1] = None  # a shared body is stored once, in its own table
            values.append(row_crc(row))
            changed.add(row.queue, 1, row_key(row.lane, row.seq))
        self._put_values(_PUT_ROWS, values, len(rows))

    def _put(self, statements: Mapping[int, str], rows: Sequence[tuple[Any, ...]]) -> None:
        self._put_values(statements, list(chain.from_iterable(rows)), len(rows))

    def _put_values(self, statements: Mapping[int, str], values: list[Any], rows: int) -> None:
        """Insert rows in groups of 256, 128, 64 … 1. There are only nine different statements, which stay prepared."""
        width = len(values) // rows if rows else 0
        done = 0
        while left := rows - done:
            size = min(_MOST_ROWS, 1 << left.bit_length() - 1)
            part = values[done * width : (done + size) * width] if size < rows else values
            self._execute(statements[size], part)
            done += size

    def _drop(self, keys: set[RowKey], changed: _InventoryChanges) -> None:
        ranges = list(_ranges(keys))
        if len(ranges) == 1:
            self._execute(_DROP_RANGE, ranges[0])
        else:
            self._execute(_DROP_RANGES, (json.dumps(ranges),))
        deleted = self._connection.changes()
        if deleted != len(keys):
            self._count_again({key[0] for key in keys}, deleted, changed)
            return
        for queue, lane, first, last in ranges:
            changed.add(queue, first - last - 1, -keys_of_range(lane, first, last))

    def _count_again(self, queues: set[int], deleted: int, changed: _InventoryChanges) -> None:
        """Count the rows of queues of which a row was to be dropped that is not there.

        Raises RowsMissingError if the inventory has the row: then it was stored, and is gone without a commit.
        """
        missing = -deleted
        for queue in queues:
            before, counted = self._inventory_after(queue, changed), Inventory(*self._execute(_INVENTORY, (queue,)).get)
            changed.add(queue, counted.rows - before.rows, counted.keys - before.keys)
            missing += before.rows - counted.rows
        if missing:
            raise RowsMissingError(queues, missing)

    def _move(self, moves: Mapping[RowKey, MoveRow], changed: _InventoryChanges) -> None:
        try:
            stored: list[list[Any]] = json.loads(self._execute(_TO_MOVE, (json.dumps(list(moves)),)).get)
        except UnicodeDecodeError:  # a number became text
            raise DamagedRowError(None) from None
        written: list[tuple[Any, ...]] = []
        for *values, crc in stored:
            old = Row._make(values)
            old = old._replace(raw=b"", overlay=None if old.overlay is None else bytes.fromhex(old.overlay))  # type: ignore[arg-type]  # JSON has no bytes: this is text
            write = moves[old.queue, old.lane, old.seq]
            new = moved(old, write)
            overlay = None if write.overlay is None else write.overlay.hex()
            try:
                written.append((*write[:-1], overlay, moved_crc(crc, old, new)))
            except UNREADABLE:
                raise DamagedRowError(old.seq) from None
            changed.add(old.queue, 0, row_key(new.lane, new.seq) - row_key(old.lane, old.seq))
        if written:
            self._execute(_MOVE_ROWS, (json.dumps(written),))

    def settle_freed(self) -> dict[int, int]:
        """Reduce the charge of topics by the bodies that this transaction deleted. Returns the bytes by topic."""
        freed: dict[int, int] = dict(json.loads(self._execute(_FREED).get))
        if freed:
            self._execute(_CHARGE_LESS)
        return freed

    def purge(self, queue: int, limit: int) -> int:
        """Delete up to `limit` rows of a dropped queue. Returns the number deleted.

        When no row is left, the entry of the queue in the table `dropped` is deleted too.
        """
        left = limit
        for statement in _PURGE:
            self._execute(statement, (queue, left))
            left -= self._connection.changes()
            if left <= 0:
                return limit
        self._execute(_PURGED, (queue,))
        return limit - left

    def forget_seen(self, queue: int, before: int, limit: int) -> int:
        """Delete up to `limit` ids that were seen before the instant `before`. Returns the number deleted."""
        self._execute(_FORGET_SEEN, (queue, before, limit))
        return self._connection.changes()


def _ranges(keys: Iterable[RowKey]) -> Iterable[tuple[int, int, int, int]]:
    """Yield the keys as runs of consecutive sequence numbers: queue, lane, first, last."""
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
