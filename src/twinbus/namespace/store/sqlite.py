"""The durable store: one SQLite file, one connection that writes and one that reads.

Decides when a commit is a commit, when the log is folded into the file, and when rows of dropped queues go. What a
commit writes is planned in plan, what SQL does it stands in writing and reading.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import apsw

from twinbus.namespace.engine.storage_protocol import OpenedStore, StoreRead, StoreWrite
from twinbus.namespace.store import open_store
from twinbus.namespace.store.errors import StoreError, StoreGoneError, store_error
from twinbus.namespace.store.files import StoreFiles, StoreLock, make_folder
from twinbus.namespace.store.row_reader import RowReader, empty_answer
from twinbus.namespace.store.write_batch import RowChanges, RowKey, WriteBatch, fold_writes

_log = logging.getLogger(__name__)

# Pages of 8 KiB that the log takes before it is folded into the file. That is left to `tidy` until a commit finds twice
# as many; at four times as many the readers are held off meanwhile, so that the log starts anew whatever the load.
LOG_PAGES = 1_000

# Rows of dropped queues that go with a commit, and those that go by themselves when there is nothing to commit.
_PURGE_WITH_COMMIT = 200
_PURGE_ALONE = 1_000


class SqliteStore:
    """A namespace's durable memory in one file."""

    inline = False

    def __init__(self, path: Path, *, vfs: str | None = None, log_pages: int = LOG_PAGES) -> None:
        self.path = path.absolute()
        self._vfs = vfs
        self._log_pages = log_pages
        self._lock = StoreLock(self.path)
        self._writing: apsw.Connection | None = None
        self._reading: apsw.Connection | None = None
        self._reader_turn = threading.Lock()
        self._pages_in_log = 0
        self._gone: set[int] = set()
        """Queues dropped in this life of the store or not purged yet: late writes are ignored, needs answered empty."""
        self._to_purge: list[int] = []
        self._to_forget: dict[int, int] = {}
        self._shares = False
        """Whether there may be shared bodies: where there are none, nobody need look after them."""
        self._freed: Counter[int] = Counter()

    def open(self) -> OpenedStore:
        assert self._writing is None, "opened once"
        try:
            make_folder(self.path.parent)
        except OSError as error:
            raise StoreError(
                f"The data folder cannot be made ({error.strerror})",
                self.path.parent,
                "Name a folder that may be written.",
            ) from error
        self._lock.take()
        try:
            if not open_store.inspect(self.path):
                open_store.create(self.path, self._vfs)
            self._writing = open_store.connect(self.path, self._vfs, open_store.WRITER_CACHE_KIB)
            open_store.prepare(self._writing, self.path)
            self._reading = open_store.connect(self.path, self._vfs, open_store.READER_CACHE_KIB)
            self._reading.pragma("query_only", "on")
            opened = open_store.read_opened(self._reading)
            self._to_purge = open_store.read_dropped(self._reading)
            # The log's index (-shm) is one of them: where it is another file, other processes do not see our locks.
            beside = [self.path.with_name(self.path.name + suffix) for suffix in ("-wal", "-shm")]
            self._files = StoreFiles(self.path, *beside, self._lock.path)
        except (apsw.Error, OSError) as error:
            self._let_go()
            raise store_error(error, self.path, "opening it") from error
        except BaseException:
            self._let_go()
            raise
        self._gone = set(self._to_purge)
        self._writer = BatchWriter(self._writing)
        self._share(opened.next_body > 1)
        self._reader = RowReader(self._reading)
        return opened

    def load(self, need: StoreRead) -> Any:
        if need.queue in self._gone:
            return empty_answer(need)
        if self._reading is None:
            raise _closed(self.path)
        try:
            with self._reader_turn:
                return self._reader.answer(need)
        except apsw.Error as error:
            raise store_error(error, self.path, "reading") from error

    def commit(self, writes: Sequence[StoreWrite]) -> None:
        plan = fold_writes(writes, self._gone)
        connection = self._connection()
        if plan.bodies and not self._shares:
            self._share(True)
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._writer.carry_out(plan)
            purged = self._purge(_PURGE_WITH_COMMIT)
            freed = self._writer.settle_freed() if self._shares else {}
            connection.execute("COMMIT")
        except BaseException as error:
            _roll_back(connection)
            if isinstance(error, apsw.Error):
                raise store_error(error, self.path, "committing") from error
            raise
        # After the sync, and before anybody may acknowledge it (L7).
        self._files.check()
        self._done(purged, freed)
        if plan.gone:
            self._gone |= plan.gone
            self._to_purge += sorted(plan.gone)
        self._to_forget |= plan.forgotten
        self._pages_in_log += connection.status(apsw.SQLITE_DBSTATUS_CACHE_WRITE, True)[0]
        if self._pages_in_log >= 2 * self._log_pages:
            self._fold_log(connection)

    def tidy(self) -> bool:
        connection = self._connection()
        if self._pages_in_log >= self._log_pages:
            self._fold_log(connection)
        elif self._to_purge or self._to_forget:
            try:
                connection.execute("BEGIN IMMEDIATE")
                purged = self._purge(_PURGE_ALONE)
                freed = self._writer.settle_freed() if self._shares else {}
                connection.execute("COMMIT")
            except BaseException as error:
                _roll_back(connection)
                if isinstance(error, apsw.Error):
                    raise store_error(error, self.path, "purging") from error
                raise
            self._done(purged, freed)
            self._pages_in_log += connection.status(apsw.SQLITE_DBSTATUS_CACHE_WRITE, True)[0]
        return bool(self._to_purge or self._to_forget)

    def take_freed(self) -> Mapping[int, int]:
        freed, self._freed = self._freed, Counter()
        return freed

    def close(self) -> None:
        if self._writing is not None:
            try:
                self._files.check()
            except StoreGoneError as error:
                _log.error("store %s: %s", self.path.name, error)
            try:
                if self._reading is not None:
                    self._reading.close()
                # Also where files are gone. SQLite writes to those it opened, and removes the log by its name only
                # while the main file is in its place and nobody else uses it.
                self._writing.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except apsw.Error as error:
                # Every commit is in the log; opening folds it in.
                _log.warning("store %s: the log stays on closing: %r", self.path.name, error)
        self._let_go()

    def _connection(self) -> apsw.Connection:
        if self._writing is None:
            raise _closed(self.path)
        return self._writing

    def _share(self, shares: bool) -> None:
        """The triggers see to shared bodies alone, and cost every row that is dropped as much again."""
        self._shares = shares
        self._connection().config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, int(shares))

    def _purge(self, limit: int) -> tuple[int | None, int | None]:
        """Remove a bounded number of rows nobody can reach; what became empty by that is told to `_done`."""
        if self._to_purge:
            queue = self._to_purge[0]
            return (queue if self._writer.purge(queue, limit) < limit else None), None
        for queue, before in self._to_forget.items():
            return None, (queue if self._writer.forget_seen(queue, before, limit) < limit else None)
        return None, None

    def _done(self, purged: tuple[int | None, int | None], freed: Mapping[int, int]) -> None:
        self._freed.update(freed)
        queue, forgetful = purged
        if queue is not None:
            self._to_purge.remove(queue)
        if forgetful is not None:
            del self._to_forget[forgetful]

    def _fold_log(self, connection: apsw.Connection) -> None:
        """Write the log's pages into the file; the next commit then starts the log anew, if no reader is in it."""
        self._files.check()
        try:
            in_log, _ = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            if in_log >= 4 * self._log_pages:
                with self._reader_turn:
                    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.Error as error:
            # The commit itself is safe in the log, so this is no failure of it; the next one tries again.
            _log.error("store %s: the log cannot be folded in: %r", self.path.name, error)
        else:
            self._pages_in_log = 0

    def _let_go(self) -> None:
        for connection in (self._reading, self._writing):
            if connection is not None:
                try:
                    connection.close(True)
                except apsw.Error as error:
                    _log.warning("store %s: closing: %r", self.path.name, error)
        self._reading = self._writing = None
        self._lock.give_back()


def _roll_back(connection: apsw.Connection) -> None:
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except apsw.Error as error:
        # A transaction that cannot be rolled back is dropped with the connection; it was never committed.
        _log.error("store: rollback failed: %r", error)


def _closed(path: Path) -> StoreError:
    return StoreError("The store is not open", path, "Open it first.")


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


class BatchWriter:
    """The statements of commits on the writing connection."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._execute = connection.execute

    def carry_out(self, plan: WriteBatch) -> None:
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

    def _carry_out_batch(self, batch: RowChanges) -> None:
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

    def _drop(self, keys: Iterable[RowKey]) -> None:
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


def _ranges(keys: Iterable[RowKey]) -> Iterable[tuple[int, int, int, int]]:
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
