"""The durable store: one SQLite file in WAL mode, with one connection that writes and one that reads.

A commit combines its writes (`write_batch`), carries them out in one transaction, and syncs the log before it returns.

    write-ahead log   SQLite appends commits to the log (-wal). A checkpoint copies the log into the file. `tidy` makes
                      a checkpoint if the log has `log_pages` pages, a commit if it has 2 * `log_pages`. While a read is
                      running, SQLite cannot start the log again from its beginning; if the log has 4 * `log_pages`
                      pages, reads wait for the checkpoint.
    dropped queues    A commit that drops an entity only records the storage id of the entity. The rows are deleted in
                      parts: up to 200 with each later commit, up to 1,000 with each `tidy`, also after a restart.
    remembered ids    Message ids that duplicate detection no longer needs are deleted in the same way.
    checksums         Every row has a checksum, which is compared when the row is read. `examine` finds damage when the
                      store is opened; the commit counter beside the file shows commits that are missing (X2).
    shared bodies     A body is stored once for all rows that name it. Triggers delete a body with its last row, and add
                      its size to the freed bytes of its topic. The triggers are off while no body is shared, because
                      they double the time of deleting a row.

`open_store` creates the file, `damage` and `examine` check it, `commit_writer` writes, `row_reader` answers reads.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import apsw

from twinbus.namespace.engine.storage_protocol import OpenedStore, StoreRead, StoreWrite
from twinbus.namespace.store import open_store
from twinbus.namespace.store.commit_counter import CommitCounter, CountedCommits, read_counter
from twinbus.namespace.store.commit_writer import CommitWriter, RowsMissingError
from twinbus.namespace.store.damage import (
    connected_to_examine,
    copy_to_save,
    find_damage,
    finish_exchange,
    has_log,
    has_totals,
    is_layout_intact,
    is_older,
    log_loss,
    put_in_place,
    rebuilt_path,
    remove_files,
    replace_first_page,
)
from twinbus.namespace.store.errors import (
    DAMAGE_ERRORS,
    UNREADABLE,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreGoneError,
    damaged_error,
    is_cut_short,
    store_error,
)
from twinbus.namespace.store.examine import MOST_BYTES, OLDER_LOG, damaged_rows, messages_text
from twinbus.namespace.store.files import StoreFiles, StoreLock, make_folder
from twinbus.namespace.store.interface import empty_answer
from twinbus.namespace.store.row_reader import DamagedRowError, RowReader
from twinbus.namespace.store.salvage import Salvage
from twinbus.namespace.store.write_batch import fold_writes

_log = logging.getLogger(__name__)

LOG_PAGES = 1_000
"""Pages of 8 KiB in the log before `tidy` copies them into the file."""

# Rows of dropped queues that are deleted with a commit, and with a call of `tidy`.
_PURGED_WITH_COMMIT = 200
_PURGED_BY_TIDY = 1_000


class SqliteStore:
    """The messages and entities of one namespace in one file."""

    inline = False

    def __init__(
        self,
        path: Path,
        *,
        vfs: str | None = None,
        log_pages: int = LOG_PAGES,
        accept_damage: bool = False,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """With `accept_damage`, a damaged store is rebuilt from what is intact, and what is lost is logged.

        Up to a size of `most_bytes`, every row is checked when the store is opened.
        """
        self.path = path.absolute()
        self._vfs = vfs
        self._log_pages = log_pages
        self._accept_damage = accept_damage
        self._most_bytes = most_bytes
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
        self._commit_counter: CommitCounter | None = None
        self._paths: dict[int, str] = {}

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
            finish_exchange(self.path)
            counted = read_counter(self.path)
            if (unusable := open_store.find_unusable(self.path)) is not None:
                self._accept([unusable])
            elif not self.path.exists():
                self._create(counted)
            elif findings := find_damage(self.path, self._vfs, counted, self._checked_bytes):
                self._accept(findings)
            self._writer_connection = open_store.connect(self.path, self._vfs, open_store.WRITER_CACHE_KIB)
            open_store.prepare(self._writer_connection, self.path)
            self._reader_connection = open_store.connect(self.path, self._vfs, open_store.READER_CACHE_KIB)
            self._reader_connection.pragma("query_only", "on")
            opened = open_store.read_opened(self._reader_connection)
            self._to_purge = open_store.read_dropped(self._reader_connection)
            self._writer = CommitWriter(self._writer_connection)
            self._commit_counter = CommitCounter(self.path, self._writer.identity, self._writer.commits)
            # The index of the log (-shm) is checked too: SQLite's locks are in this file.
            beside = [self.path.with_name(self.path.name + suffix) for suffix in ("-wal", "-shm")]
            self._files = StoreFiles(self.path, *beside, self._lock.path, self._commit_counter.path)
        except (apsw.Error, OSError) as error:
            self._release()
            raise store_error(error, self.path, "opening it") from error
        except BaseException:
            self._release()
            raise
        self._gone = set(self._to_purge)
        self._paths = {stored.entity.queue: stored.entity.path for stored in opened.entities}
        self._enable_triggers(opened.next_body > 1)
        self._reader = RowReader(self._reader_connection)
        return opened

    @property
    def _checked_bytes(self) -> int:
        """The size up to which every row is checked: any size if damage is to be listed."""
        return 1 << 62 if self._accept_damage else self._most_bytes

    def _create(self, counted: CountedCommits | None) -> None:
        if counted is not None and counted.commits:
            lost = f"the file is missing, but its commit counter is there: it had {counted.commits} commits"
            if not self._accept_damage:
                raise damaged_error(self.path, lost)
            log_loss(self.path, [lost], ["everything"])
        open_store.create(self.path, self._vfs)

    def _accept(self, findings: Sequence[str]) -> None:
        """Rebuild the store from what is intact. Raises StoreDamagedError if damage is not to be accepted."""
        if not self._accept_damage:
            raise damaged_error(self.path, *findings)
        if is_older(self.path, self._vfs):
            # Without checksums, it is not known what is intact. What SQLite can read is used.
            log_loss(self.path, findings, [])
            return
        rebuilt = SqliteStore(rebuilt_path(self.path), vfs=self._vfs)
        remove_files(rebuilt.path)
        try:
            rebuilt.open()
            try:
                lost = self._save_into(rebuilt, with_log=OLDER_LOG not in findings)
            finally:
                rebuilt.close()
            if has_log(rebuilt.path):
                text = "The log of the rebuilt store cannot be copied into its file"
                raise StoreFullError(text, rebuilt.path, "Make room, then start again.")
        except BaseException:
            remove_files(rebuilt.path)  # they may be what fills the disk
            raise
        log_loss(self.path, findings, lost)
        lines = [*(f"damaged: {line}" for line in findings), *(f"lost: {line}" for line in lost)]
        put_in_place(self.path, lines)
        if findings := find_damage(self.path, self._vfs, read_counter(self.path), self._checked_bytes):
            raise damaged_error(self.path, *findings)

    def _save_into(self, rebuilt: SqliteStore, *, with_log: bool) -> list[str]:
        """Write what is intact into a new store. Returns what is lost."""
        if with_log and is_layout_intact(self.path, self._vfs):
            return _salvaged(self.path, self._vfs, rebuilt)
        source = copy_to_save(self.path, with_log=with_log)
        try:
            if not is_layout_intact(source, self._vfs):
                replace_first_page(source, self._vfs)
            if has_totals(source, self._vfs):
                return _salvaged(source, self._vfs, rebuilt)
        finally:
            remove_files(source)
        return ["everything: the tables cannot be found"]

    def load(self, read: StoreRead) -> Any:
        if read.queue in self._gone:
            return empty_answer(read)
        if self._reader_connection is None:
            raise _closed(self.path)
        try:
            with self._read_lock:
                return self._reader.answer(read)
        except DamagedRowError as error:
            raise self._damaged_rows_error(read.queue, error.seq) from error
        except apsw.Error as error:
            if isinstance(error, DAMAGE_ERRORS) or is_cut_short(error):
                raise self._damaged_rows_error(read.queue, None) from error
            raise store_error(error, self.path, "reading") from error

    def _damaged_rows_error(self, queue: int, seq: int | None) -> StoreDamagedError:
        """Return the error for a read that met damage. The error names all damaged messages of the entity."""
        path = self._path_of(queue)
        seqs = set() if seq is None else {seq}
        try:
            with connected_to_examine(self.path, self._vfs) as connection:
                seqs.update(seq for _, seq in damaged_rows(connection, queue))
        except (apsw.Error, *UNREADABLE) as error:
            return damaged_error(
                self.path, f"{path}: {messages_text(seqs)} damaged, and pages cannot be read ({error})"
            )
        return damaged_error(self.path, f"{path}: {messages_text(seqs)} damaged")

    def _path_of(self, queue: int) -> str:
        return self._paths.get(queue, f"the entity with storage id {queue}")

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
            if isinstance(error, DamagedRowError):
                which = "a message" if error.seq is None else f"message {error.seq}"
                raise damaged_error(self.path, f"{which} is damaged and cannot be moved") from error
            if isinstance(error, RowsMissingError):
                paths = ", ".join(sorted(map(self._path_of, error.queues)))
                missing = f"{error.number} messages of {paths} are missing"
                other = f"the messages of {paths} are not those that were stored"
                raise damaged_error(self.path, missing if error.number > 0 else other) from error
            if isinstance(error, apsw.Error):
                raise store_error(error, self.path, "committing") from error
            raise
        self._writer.committed()
        # After the sync and before any acknowledgement: a commit into removed files must not be acknowledged (L7).
        self._files.check()
        if self._commit_counter is not None:
            self._commit_counter.write(self._writer.commits)
        self._purge_committed(purged, freed)
        if batch.entities:
            self._paths.update((queue, entity.path) for queue, entity in batch.entities.items())
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
        if self._commit_counter is not None:
            self._commit_counter.close()
        self._lock.give_back()


def _salvaged(source: Path, vfs: str | None, rebuilt: SqliteStore) -> list[str]:
    """Write what is intact in the file `source` into a new store. Returns what is lost."""
    with connected_to_examine(source, vfs, to_save=True) as connection:
        salvage = Salvage(connection)
        for writes in salvage.writes():
            rebuilt.commit(writes)
    return salvage.lost


def _roll_back(connection: apsw.Connection) -> None:
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except apsw.Error as error:
        # Nothing is lost: the transaction was never committed, and closing the connection drops it.
        _log.error("store: rollback failed: %r", error)


def _closed(path: Path) -> StoreError:
    return StoreError("The store is not open", path, "Call open() first.")
