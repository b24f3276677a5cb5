"""The durable store: one SQLite file in WAL mode, with one connection that writes and one that reads.

A commit combines its writes (`write_batch`), carries them out in one transaction, and syncs the log before it returns.

    write-ahead log   SQLite appends commits to the log (-wal). A checkpoint copies the log into the file. `tidy` makes
                      a checkpoint if the log has `log_pages` pages, a commit if it has 2 * `log_pages`. While a read is
                      running, SQLite cannot start the log again from its beginning; if the log has 4 * `log_pages`
                      pages, reads wait for the checkpoint.
    dropped queues    A commit that drops an entity only records the storage id of the entity. The rows are deleted in
                      parts: up to 200 with each later commit, up to 1,000 with each `tidy`, also after a restart.
    remembered ids    Message ids that duplicate detection no longer needs are deleted in the same way.
    shared bodies     A body is stored once for all rows that name it. Triggers delete a body with its last row, and add
                      its size to the freed bytes of its topic. The triggers are off while no body is shared, because
                      they double the time of deleting a row.

`open_store` creates and checks the file, `row_reader` answers reads.
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

from twinbus.namespace.engine.storage_protocol import (
    OpenedStore,
    PutCounters,
    PutEntity,
    PutSeenId,
    PutSessionState,
    Row,
    StoreRead,
    StoreWrite,
)
from twinbus.namespace.store import open_store
from twinbus.namespace.store.errors import StoreError, StoreGoneError, store_error
from twinbus.namespace.store.files import StoreFiles, StoreLock, make_folder
from twinbus.namespace.store.interface import empty_answer
from twinbus.namespace.store.row_reader import RowReader
from twinbus.namespace.store.write_batch import RowChanges, RowKey, WriteBatch, fold_writes

_log = logging.getLogger(__name__)

LOG_PAGES = 1_000
"""Pages of 8 KiB in the log before `tidy` copies them into the file."""

# Rows of dropped queues that are deleted with a commit, and with a call of `tidy`.
_PURGED_WITH_COMMIT = 200
_PURGED_BY_TIDY = 1_000


class SqliteStore:
    """The messages and entities of one namespace in one file."""

    inline = False

    def __init__(self, path: Path, *, vfs: str | None = None, log_pages: int = LOG_PAGES) -> None:
        self.path = path.absolute()
        self._vfs = vfs
        self._log_pages = log_pages
        self._lock = StoreLock(self.path)
        self._writer_connection: apsw.Connection | None = None
        self._reader_connection: apsw.Connection | None = None
        self._read_lock = threading.Lock()
        self._pages_in_log = 0
        self._gone: set[int] = set()
        """Queues that were dropped since the store was opened, or whose rows are not deleted yet.

        Writes to these queues are ignored. Reads of these queues return an empty answer.
        """
        self._to_purge: list[int] = []
        self._to_forget: dict[int, int] = {}
        """Maps a queue to the instant before which its remembered message ids are to be deleted."""
        self._shares = False
        """Whether the file may hold shared bodies."""
        self._freed: Counter[int] = Counter()

    def open(self) -> OpenedStore:
        assert self._writer_connection is None, "opened once"
        try:
            make_folder(self.path.parent)
        except OSError as error:
            raise StoreError(
                f"The data folder cannot be created ({error.strerror})",
                self.path.parent,
                "Name a folder that may be written.",
            ) from error
        self._lock.take()
        try:
            if not open_store.inspect(self.path):
                open_store.create(self.path, self._vfs)
            self._writer_connection = open_store.connect(self.path, self._vfs, open_store.WRITER_CACHE_KIB)
            open_store.prepare(self._writer_connection, self.path)
            self._reader_connection = open_store.connect(self.path, self._vfs, open_store.READER_CACHE_KIB)
            self._reader_connection.pragma("query_only", "on")
            opened = open_store.read_opened(self._reader_connection)
            self._to_purge = open_store.read_dropped(self._reader_connection)
            # The index of the log (-shm) is checked too: SQLite's locks are in this file.
            beside = [self.path.with_name(self.path.name + suffix) for suffix in ("-wal", "-shm")]
            self._files = StoreFiles(self.path, *beside, self._lock.path)
        except (apsw.Error, OSError) as error:
            self._release()
            raise store_error(error, self.path, "opening it") from error
        except BaseException:
            self._release()
            raise
        self._gone = set(self._to_purge)
        self._writer = CommitWriter(self._writer_connection)
        self._enable_triggers(opened.next_body > 1)
        self._reader = RowReader(self._reader_connection)
        return opened

    def load(self, read: StoreRead) -> Any:
        if read.queue in self._gone:
            return empty_answer(read)
        if self._reader_connection is None:
            raise _closed(self.path)
        try:
            with self._read_lock:
                return self._reader.answer(read)
        except apsw.Error as error:
            raise store_error(error, self.path, "reading") from error

    def commit(self, writes: Sequence[StoreWrite]) -> None:
        batch = fold_writes(writes, self._gone)
        connection = self._connection()
        if batch.bodies and not self._shares:
            self._enable_triggers(True)
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._writer.carry_out(batch)
            purged = self._purge(_PURGED_WITH_COMMIT)
            freed = self._writer.settle_freed() if self._shares else {}
            connection.execute("COMMIT")
        except BaseException as error:
            _roll_back(connection)
            if isinstance(error, apsw.Error):
                raise store_error(error, self.path, "committing") from error
            raise
        # After the sync and before any acknowledgement: a commit into removed files must not be acknowledged (L7).
        self._files.check()
        self._purge_committed(purged, freed)
        if batch.gone:
            self._gone |= batch.gone
            self._to_purge += sorted(batch.gone)
        self._to_forget |= batch.forgotten
        self._pages_in_log += connection.status(apsw.SQLITE_DBSTATUS_CACHE_WRITE, True)[0]
        if self._pages_in_log >= 2 * self._log_pages:
            self._checkpoint(connection)

    def tidy(self) -> bool:
        connection = self._connection()
        if self._pages_in_log >= self._log_pages:
            self._checkpoint(connection)
        elif self._to_purge or self._to_forget:
            try:
                connection.execute("BEGIN IMMEDIATE")
                purged = self._purge(_PURGED_BY_TIDY)
                freed = self._writer.settle_freed() if self._shares else {}
                connection.execute("COMMIT")
            except BaseException as error:
                _roll_back(connection)
                if isinstance(error, apsw.Error):
                    raise store_error(error, self.path, "purging") from error
                raise
            self._purge_committed(purged, freed)
            self._pages_in_log += connection.status(apsw.SQLITE_DBSTATUS_CACHE_WRITE, True)[0]
        return bool(self._to_purge or self._to_forget)

    def take_freed(self) -> Mapping[int, int]:
        freed, self._freed = self._freed, Counter()
        return freed

    def close(self) -> None:
        if self._writer_connection is not None:
            try:
                self._files.check()
            except StoreGoneError as error:
                _log.error("store %s: %s", self.path.name, error)
            try:
                if self._reader_connection is not None:
                    self._reader_connection.close()
                # A checkpoint is safe also if files are gone: SQLite writes to the files that it opened. SQLite removes
                # the log by name only while the main file is at its path and no other process uses the main file.
                self._writer_connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except apsw.Error as error:
                # Nothing is lost: every commit is in the log, and the next open copies it into the file.
                _log.warning("store %s: closed with its log left in place: %r", self.path.name, error)
        self._release()

    def _connection(self) -> apsw.Connection:
        if self._writer_connection is None:
            raise _closed(self.path)
        return self._writer_connection

    def _enable_triggers(self, shares: bool) -> None:
        self._shares = shares
        self._connection().config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, int(shares))

    def _purge(self, limit: int) -> tuple[int | None, int | None]:
        """Delete up to `limit` rows of dropped queues, or outdated message ids.

        Returns the dropped queue that is empty now, and the queue whose outdated ids are all deleted now. The caller
        passes both to `_purge_committed` after the commit.
        """
        if self._to_purge:
            queue = self._to_purge[0]
            return (queue if self._writer.purge(queue, limit) < limit else None), None
        for queue, before in self._to_forget.items():
            return None, (queue if self._writer.forget_seen(queue, before, limit) < limit else None)
        return None, None

    def _purge_committed(self, purged: tuple[int | None, int | None], freed: Mapping[int, int]) -> None:
        self._freed.update(freed)
        empty, forgotten = purged
        if empty is not None:
            self._to_purge.remove(empty)
        if forgotten is not None:
            del self._to_forget[forgotten]

    def _checkpoint(self, connection: apsw.Connection) -> None:
        """Copy the log into the file. The next commit then starts the log again, unless a read is using it."""
        self._files.check()
        try:
            in_log, _ = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            if in_log >= 4 * self._log_pages:
                with self._read_lock:
                    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.Error as error:
            # Not a failure of the commit, which is safe in the log. The next commit or `tidy` tries again.
            _log.error("store %s: the log cannot be copied into the file: %r", self.path.name, error)
        else:
            self._pages_in_log = 0

    def _release(self) -> None:
        for connection in (self._reader_connection, self._writer_connection):
            if connection is not None:
                try:
                    connection.close(True)
                except apsw.Error as error:
                    _log.warning("store %s: closing: %r", self.path.name, error)
        self._reader_connection = self._writer_connection = None
        self._lock.give_back()


def _roll_back(connection: apsw.Connection) -> None:
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except apsw.Error as error:
        # Nothing is lost: the transaction was never committed, and closing the connection drops it.
        _log.error("store: rollback failed: %r", error)


def _closed(path: Path) -> StoreError:
    return StoreError("The store is not open", path, "Call open() first.")


# --- writing ----------------------------------------------------------------------------------------------------------


_MOST_ROWS = 256


def _insert(verb: str, table: str, columns: Sequence[str]) -> dict[int, str]:
    """Return the INSERT statements for 1, 2, 4 … `_MOST_ROWS` rows, by their number of rows."""
    row = f"({', '.join('?' * len(columns))})"
    start = f"{verb} INTO {table} ({', '.join(columns)}) VALUES "
    sizes = [1 << power for power in range(_MOST_ROWS.bit_length())]
    return {size: start + ", ".join([row] * size) for size in sizes}


# The columns have the order of the fields of the writes. OR ROLLBACK: a conflict fails the whole commit anyway, and
# SQLite then keeps no journal for the statement.
_PUT_ROWS = _insert("INSERT OR ROLLBACK", "message", Row._fields)
_PUT_BODIES = _insert("INSERT OR ROLLBACK", "body", ("id", "raw", "topic"))
_PUT_COUNTERS = _insert("INSERT OR REPLACE", "counter", PutCounters._fields)
_PUT_ENTITIES = _insert("INSERT OR REPLACE", "entity", PutEntity._fields)
_PUT_STATES = _insert("INSERT OR REPLACE", "session_state", PutSessionState._fields)
_PUT_SEEN = _insert("INSERT OR REPLACE", "seen", PutSeenId._fields)

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


class CommitWriter:
    """Runs the statements of commits on the writing connection, inside the caller's transaction.

    Every statement that SQLite runs releases the interpreter lock and may have to wait to get the lock back, so the
    number of statements decides the speed. One statement inserts up to 256 rows. All drops are one statement, with a
    JSON text as its argument, and so are all moves.
    """

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._execute = connection.execute

    def carry_out(self, batch: WriteBatch) -> None:
        """Carry out all writes of the batch, in its order."""
        if batch.bodies:
            self._put(_PUT_BODIES, list(batch.bodies.values()))
            self._execute(_CHARGE, (json.dumps(list(batch.shared_bytes().items())),))
        for changes in batch.row_changes:
            self._change_rows(changes)
        unnamed = [body for changes in batch.row_changes for body in changes.unnamed]
        if unnamed:
            self._execute(_DROP_UNNAMED, (json.dumps(unnamed),))
        if batch.seen:
            self._put(_PUT_SEEN, list(batch.seen.values()))
        if batch.states:
            self._put(_PUT_STATES, [write for write in batch.states.values() if write.state is not None])
            if cleared := [key for key, write in batch.states.items() if write.state is None]:
                self._execute(_DROP_STATES, (json.dumps(cleared),))
        if batch.entities:
            self._put(_PUT_ENTITIES, list(batch.entities.values()))
        if batch.entities or batch.gone:
            self._execute(_RAISE_HIGHEST, (max(chain(batch.entities, batch.gone)),))
        if batch.counters:
            self._put(_PUT_COUNTERS, list(batch.counters.values()))
        if batch.gone:
            self._execute(_DROP_ENTITIES, {"1": json.dumps(sorted(batch.gone))})

    def _change_rows(self, changes: RowChanges) -> None:
        if early := changes.early_puts():
            self._put(_PUT_ROWS, [(*row[:-1], None) for row in early])  # their raw is stored with the shared body
        if changes.drops:
            self._drop(changes.drops)
        if changes.moves:
            # JSON has no bytes: the overlay, the last field of a move, goes as hexadecimal text.
            moves = [
                (*move[:-1], None if move.overlay is None else move.overlay.hex()) for move in changes.moves.values()
            ]
            self._execute(_MOVE_ROWS, (json.dumps(moves),))
        if late := changes.late_puts() if early else list(changes.puts.values()):
            self._put(_PUT_ROWS, late)

    def _put(self, statements: Mapping[int, str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows in groups of 256, 128, 64 … 1. There are only nine different statements, which stay prepared."""
        done, left = 0, len(rows)
        while left:
            size = min(_MOST_ROWS, 1 << left.bit_length() - 1)
            part = rows[done : done + size] if left > size or done else rows
            self._execute(statements[size], tuple(chain.from_iterable(part)))
            done += size
            left -= size

    def _drop(self, keys: Iterable[RowKey]) -> None:
        ranges = list(_ranges(keys))
        if len(ranges) == 1:
            self._execute(_DROP_RANGE, ranges[0])
        else:
            self._execute(_DROP_RANGES, (json.dumps(ranges),))

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
