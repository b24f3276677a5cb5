"""The durable store: one SQLite file, one connection that writes and one that reads.

Decides when a commit is a commit, when the log is folded into the file, and when rows of dropped queues go. What a
commit writes is planned in plan, what SQL does it stands in writing and reading.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import apsw

from twinbus.namespace.engine.storage_protocol import Need, Opened, Write
from twinbus.namespace.store import opening
from twinbus.namespace.store.errors import StoreError, StoreGoneError, translated
from twinbus.namespace.store.lock import StoreFiles, StoreLock, make_folder
from twinbus.namespace.store.plan import planned
from twinbus.namespace.store.reading import Reader, empty_answer
from twinbus.namespace.store.writing import Writer

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

    def open(self) -> Opened:
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
            if not opening.inspect(self.path):
                opening.create(self.path, self._vfs)
            self._writing = opening.connect(self.path, self._vfs, opening.WRITER_CACHE_KIB)
            opening.prepare(self._writing, self.path)
            self._reading = opening.connect(self.path, self._vfs, opening.READER_CACHE_KIB)
            self._reading.pragma("query_only", "on")
            opened = opening.read_opened(self._reading)
            self._to_purge = opening.read_dropped(self._reading)
            # The log's index (-shm) is one of them: where it is another file, other processes do not see our locks.
            beside = [self.path.with_name(self.path.name + suffix) for suffix in ("-wal", "-shm")]
            self._files = StoreFiles(self.path, *beside, self._lock.path)
        except (apsw.Error, OSError) as error:
            self._let_go()
            raise translated(error, self.path, "opening it") from error
        except BaseException:
            self._let_go()
            raise
        self._gone = set(self._to_purge)
        self._writer = Writer(self._writing)
        self._share(opened.next_body > 1)
        self._reader = Reader(self._reading)
        return opened

    def load(self, need: Need) -> Any:
        if need.queue in self._gone:
            return empty_answer(need)
        if self._reading is None:
            raise _closed(self.path)
        try:
            with self._reader_turn:
                return self._reader.answer(need)
        except apsw.Error as error:
            raise translated(error, self.path, "reading") from error

    def commit(self, writes: Sequence[Write]) -> None:
        plan = planned(writes, self._gone)
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
                raise translated(error, self.path, "committing") from error
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
                    raise translated(error, self.path, "purging") from error
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
