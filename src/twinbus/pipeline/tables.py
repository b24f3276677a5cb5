"""The tables of the pipeline, as Spark reads and writes them.

Each table is a Delta Lake table (`table_log`), and the table `snapshots` names the versions that belong together. Spark
writes Parquet files, and reads the files that the log of a table names; it never sees the log. A batch writes all its
files first. `Tables.commit` then commits one table after the other, and adds the snapshot last.

A process that dies between two commits leaves versions that no snapshot names. The next process that locks the tables
undoes them, and the batch is ingested again.

docs/tables.md describes the columns.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Final, TypeVar, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from twinbus.errors import OperatorError
from twinbus.pipeline.checkpoints import CHECKPOINTS_FOLDER, remove_checkpoints
from twinbus.pipeline.ingested_segments import LOOKED_AT_FOLDER, SEGMENTS, IngestedLedger, IngestedSegments
from twinbus.pipeline.result_tables import RESULTS, RESULTS_FOLDER
from twinbus.pipeline.snapshots import Snapshots, TablesVersion
from twinbus.pipeline.stored_files import read_files, write_files, write_packed_files
from twinbus.pipeline.table_log import AppTransaction, DataFile, TableLog, described_file, merged_size
from twinbus.pipeline.table_storage import OLD_FORMAT, SNAPSHOTS, TablesBusyError, TableStorage
from twinbus.storage_location import StorageLocation

T = TypeVar("T")
OPERATIONS, PENDING, ENTRIES, PROBLEMS, STEPS = "operations", "pending", "entries", "problems", "steps"
_ENTRY: Final = """at long, id string, writer string, role string, host string, pid long, version string, segment long,
    stage string, namespace string, entity string, ids array<string>, bytes long, units long, destination string,
    seconds double, result string, cause string, failed array<string>, event string, pair string,
    facts map<string,string>, move string, source string, reason string, op string, operation string, count long,
    since long, until long, durability string, by string, broker_at long, waited array<long>"""
SCHEMAS: Final[Mapping[str, str]] = {
    OPERATIONS: """id string, whole boolean, at long, ended long, stage string, namespace string, entity string,
        destination string, ids array<string>, bytes long, units long, seconds double, result string, cause string,
        failed array<string>, day date, count long, broker_at long, waited array<long>""",
    PENDING: f"kind string, {_ENTRY}",
    ENTRIES: f"kind string, {_ENTRY}, day date",
    PROBLEMS: "file string, line long, cause string",
    STEPS: """prefix string, id string, at long, ended long, stage string, move string, namespace string, entity string,
        source string, destination string, result string, cause string, reason string, broker_at long, entry string""",
}
TALLIES: Final = "tallies-"
"""Prefix of the tables that hold the tallies of a job; the job's name follows."""
BY_DAY: Final = frozenset({OPERATIONS, ENTRIES})
_REMOVED: Final = frozenset(
    {*SCHEMAS, SEGMENTS, LOOKED_AT_FOLDER, SNAPSHOTS, RESULTS_FOLDER, CHECKPOINTS_FOLDER, OLD_FORMAT}
)
# The number of versions of tables whose files are remembered.
_KNOWN_VERSIONS: Final = 256
_PARTITIONS: Final = "spark.sql.adaptive.coalescePartitions.initialPartitionNum"
# The size of a shuffle partition, as bytes of Parquet files. The rows need several times as much memory.
_PARTITION_BYTES: Final = 4 * 1024 * 1024
_ROW_BYTES: Final = 40
_FEWEST_PARTITIONS: Final = 2
_MOST_PARTITIONS: Final = 200
_PARALLEL_QUERIES: Final = 4
VACUUM_COMMITS: Final = 64
"""Number of commits between two removals of files that no reader needs."""
_DAY: Final = "day"
_COLUMN: Final = re.compile(r"(\w+) (\S+?)(?:,\s|$)")


def column_types(table: str) -> dict[str, str]:
    """Returns the columns of a table in SCHEMAS, in their order, each with its type in the language of Spark."""
    return dict(_COLUMN.findall(SCHEMAS[table]))


class TablesChange:
    """The files that one commit adds and removes. Make it with `Tables.change`."""

    def __init__(self, tables: Tables, before: TablesVersion) -> None:
        self.tables = tables
        self.before = before
        self.newest = before.newest
        """Time of the newest entry after the commit."""
        self.added: dict[str, list[DataFile]] = {}
        """The new files of each table. A table of tallies is in the next snapshot only if it is named here."""
        self.removed: dict[str, Sequence[DataFile]] = {}
        self.schemas: dict[str, str] = dict(SCHEMAS)
        self.ingested: IngestedLedger | None = None
        """What a batch has of its ledger."""
        self.commits: dict[str, Callable[[Mapping[str, int]], int]] = {}
        """For further tables: a function that commits the change of the table, and returns its new version.

        Its argument has the versions of the tables that are committed before."""
        self.has_batch = True
        """Whether the change adds entries: then tallies that it does not name are out of date."""

    def add(
        self, table: str, rows: DataFrame, schema: str | None = None, prefix: str = "", tasks: int | None = None
    ) -> None:
        """Writes rows, to be added to a table.

        `schema` is needed for tables of tallies only. The names of the files start with `prefix`. `tasks` is for tables
        by day: see `Tables.write`.
        """
        self.schemas[table] = schema or SCHEMAS[table]
        self.added.setdefault(table, []).extend(self.tables.write(table, rows, prefix, tasks))

    def add_packed(self, table: str, packed: DataFrame, prefix: str = "", order: Sequence[str] = ()) -> None:
        """Writes packed rows, to be added to a table. The arguments are those of `Tables.write_packed`."""
        self.added.setdefault(table, []).extend(self.tables.write_packed(table, packed, prefix, order))

    def replace(self, table: str, rows: DataFrame, schema: str | None = None) -> None:
        """Writes rows, to be the only rows of a table."""
        self.removed[table] = self.tables.latest_files(table)
        self.add(table, rows, schema)

    def keep(self, table: str, schema: str) -> None:
        """Leaves a table of tallies as it is. The next snapshot names it."""
        self.schemas[table] = schema
        self.added.setdefault(table, [])

    def added_rows(self, table: str) -> DataFrame:
        """Returns the rows that this change adds to a table."""
        return self.tables.read_files(table, self.added.get(table, ()), self.schemas[table])

    def kept(self) -> dict[str, int]:
        """Returns the tables that this change leaves as they are, with their versions."""
        return {
            table: version
            for table, version in self.before.tables.items()
            if table == SEGMENTS or table.startswith(RESULTS) or (table.startswith(TALLIES) and not self.has_batch)
        }

    def after(self) -> TablesVersion:
        """Returns the tables as they are after the commit. They can be read before the commit, too."""
        files = {}
        for table in {**self.added, **self.removed}:
            gone = {file.path for file in self.removed.get(table, ())}
            living = (file for file in self.tables.files(table, self.before) if file.path not in gone)
            files[table] = (*living, *self.added.get(table, ()))
        known = {table: version for table, version in self.before.tables.items() if table in SCHEMAS}
        versions = {**known, **self.kept(), **dict.fromkeys(files, -1)}
        return TablesVersion(self.before.number + 1, versions, self.newest, files)

    def merge(self, table: str, merge: Callable[[DataFrame], DataFrame]) -> None:
        """Merges the rows of small files of a table with `merge`, if there are many small files."""
        removed = self.removed.get(table, ())
        gone = {file.path for file in removed}
        living = [file for file in self.tables.latest_files(table) if file.path not in gone]
        files = [*living, *self.added[table]]
        limit = merged_size([file.size for file in files])
        if limit is None:
            return
        small = [file for file in files if file.size < limit]
        merged = self.tables.write(table, merge(self.tables.read_files(table, small, self.schemas[table])))
        self.removed[table] = [*removed, *(file for file in living if file.size < limit)]
        self.added[table] = [*(file for file in self.added[table] if file.size >= limit), *merged]


class Tables:
    """The tables in the folder `root`. One process at a time may change them; any process may read them."""

    def __init__(self, spark: SparkSession, root: str | os.PathLike[str]) -> None:
        self.spark = spark
        self.storage = TableStorage(root)
        self.snapshots = Snapshots(self.storage)
        self.segments = IngestedSegments(self.storage)
        self._files: dict[tuple[str, int], tuple[DataFile, ...]] = {}
        """The files of some versions. They never change."""
        self._remembered: dict[str, tuple[tuple[DataFile, ...], object]] = {}
        self._remembering = threading.Lock()
        self._parallel = 0
        """How many `parallel_queries` blocks are open."""

    @property
    def root(self) -> Path:
        """The folder of the tables. Raises LocationError if they are in an object store."""
        return self.storage.root

    # --- reading -----------------------------------------------------------------------------------------------------

    def version(self) -> TablesVersion:
        """Returns the last snapshot. Raises OperatorError if the tables have the format of an earlier version."""
        return self.snapshots.last()

    def has_segments(self) -> bool:
        """Returns whether the tables know what was ingested of a ledger. Those of an earlier version do not."""
        return bool(self.version().tables.get(SEGMENTS))

    def files(self, table: str, version: TablesVersion, days: tuple[int, int] | None = None) -> tuple[DataFile, ...]:
        """Returns the files that a table has in a snapshot; with `days`, only those of the first to the last day.

        The days are days since 1970.
        """
        if days is not None:
            return tuple(file for file in self.files(table, version) if days[0] <= _day_number(file) <= days[1])
        number = version.tables.get(table)
        if number is None:
            return ()
        if table in version.uncommitted:
            return version.uncommitted[table]
        found = self._files.get((table, number))
        if found is None:
            if len(self._files) >= _KNOWN_VERSIONS:
                self._files.clear()
            found = self._files[table, number] = self.log(table).files(number)
        return found

    def latest_files(self, table: str) -> tuple[DataFile, ...]:
        """Returns the files of the latest version of a table, whatever the last snapshot is."""
        return () if self.log(table).version() is None else self.log(table).files()

    def log(self, table: str) -> TableLog:
        return TableLog(self.storage, table)

    def read(
        self,
        table: str,
        schema: str | None = None,
        version: TablesVersion | None = None,
        days: tuple[int, int] | None = None,
    ) -> DataFrame:
        """Returns all rows of a table. `schema` is needed for tables of tallies only.

        `days` are the first and the last day that the caller needs, as days since 1970: files of other days are left
        out.
        """
        return self.read_files(table, self.files(table, version or self.version(), days), schema or SCHEMAS[table])

    def read_files(self, table: str, files: Sequence[DataFile], schema: str) -> DataFrame:
        """Returns the rows of some files of a table."""
        if not files:
            return self.spark.createDataFrame([], schema)
        if self.storage.is_url:
            return read_files(self.spark, StorageLocation.parse(self.storage.uri(table)), files, struct(schema))
        reader = self.spark.read.schema(schema).option("basePath", self.storage.uri(table))
        rows = reader.parquet(*(self.storage.file_uri(table, file.path) for file in files))
        return rows.select(*columns(schema))  # Spark puts the columns of partitions last

    def remembered(self, table: str, version: TablesVersion, read: Callable[[], T]) -> T:
        """Returns what `read` returns, and calls it only once for the files that a table has in a version.

        For a small result that several queries of one batch need: one of each table.
        """
        files = self.files(table, version)
        with self._remembering:
            known, value = self._remembered.get(table, (None, None))
            if known != files:
                self._remembered[table] = files, (value := read())
            return cast(T, value)

    def set_partitions(self, version: TablesVersion, *tables: str, rows: int = 0) -> None:
        """Sets the number of shuffle partitions for queries on these tables and on `rows` rows that are not stored yet.

        64 partitions for ten rows would take seconds; 2 partitions for 100 million rows would need too much memory.
        Does nothing inside a `parallel_queries` block, which has set the number for all tables.
        """
        if self._parallel:
            return
        size = sum(file.size for table in tables for file in self.files(table, version)) + rows * _ROW_BYTES
        # A user may allow more partitions than we do, with Spark's own setting.
        allowed = int(self.spark.conf.get("spark.sql.shuffle.partitions") or 1)
        most = max(_MOST_PARTITIONS, allowed)
        self.spark.conf.set(_PARTITIONS, str(max(_FEWEST_PARTITIONS, min(most, size // _PARTITION_BYTES))))

    @contextlib.contextmanager
    def parallel_queries(self) -> Iterator[ThreadPoolExecutor]:
        """Yields a thread pool for concurrent queries: while Spark plans one query, it computes another.

        Get the results of the queries inside the block. The number of shuffle partitions is set for the size of all
        tables together. If the block raises an exception (also at Ctrl-C), queries that have not started are cancelled,
        and the end of running queries is not awaited.
        """
        version = self.version()
        self.set_partitions(version, *version.tables)
        pool = ThreadPoolExecutor(_PARALLEL_QUERIES)
        self._parallel += 1
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        else:
            pool.shutdown()
        finally:
            self._parallel -= 1

    # --- writing -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, patience: float = 0.0, stopping: threading.Event | None = None) -> Iterator[None]:
        """Locks the tables for changes by this process, and undoes what a process left that died between two commits.

        Waits a few seconds for another process that has the lock, or for `patience` seconds if that is longer. Then
        raises TablesBusyError. After `stopping` is set, it waits a few seconds at most.
        """
        with contextlib.ExitStack() as stack:
            deadline, has_lock = time.monotonic() + patience, False
            while not has_lock:
                try:
                    stack.enter_context(self.storage.lock())
                    has_lock = True
                except TablesBusyError:
                    if time.monotonic() >= deadline or (stopping is not None and stopping.is_set()):
                        raise
            self.storage.discard_staged()
            self._undo_unfinished()
            yield

    def _undo_unfinished(self) -> None:
        """Restores each table to its version in the last snapshot. Before the first snapshot, all tables are empty.

        Raises OperatorError if a table of the snapshot is gone.
        """
        version, place = self.version(), self.storage.location
        # The table of segments is newer than some tables: without a version in the snapshot, its first one is right.
        for table in {SEGMENTS: 0, **(version.tables if version.number else SCHEMAS)}:
            known, latest = version.tables.get(table, 0), self.log(table).version()
            if latest is None and table in version.tables and not table.startswith(RESULTS):
                raise OperatorError(
                    f"the table {table} in {place} is gone",
                    f"Put it back, or make all tables again: twinbus ledger ingest LEDGER {place} --rebuild",
                )
            if latest is not None and latest != known:
                self.log(table).restore(known)

    def write(self, table: str, rows: DataFrame, prefix: str = "", tasks: int | None = None) -> list[DataFile]:
        """Writes rows as new files of a table, and returns the files. A commit has to add them.

        In a table by day, each task writes a file for each day that it has. So the rows are shuffled by day first; if
        `tasks` is given, so many tasks write the rows without a shuffle.
        """
        by_day = table in BY_DAY
        if by_day:
            rows = rows.hint("rebalance", _DAY) if tasks is None else rows.coalesce(tasks)
        if self.storage.is_url:
            return write_files(StorageLocation.parse(self.storage.uri(table)), rows, _DAY if by_day else None, prefix)
        with self.storage.staging(table) as folder:
            writer = rows.write.option("compression", "zstd")
            (writer.partitionBy(_DAY) if by_day else writer).parquet(folder)
            return self.adopted(folder, table, prefix)

    def write_packed(
        self, table: str, packed: DataFrame, prefix: str = "", order: Sequence[str] = ()
    ) -> list[DataFile]:
        """Writes packed rows as new files of a table, and returns the files. A commit has to add them.

        Each task writes one file, or in a table by day a file for each of its days. With `order`, a file is sorted by
        these columns. The names of the files start with `prefix`.
        """
        day = _DAY if table in BY_DAY else None
        if self.storage.is_url:
            return write_packed_files(StorageLocation.parse(self.storage.uri(table)), packed, day, prefix, order)
        with self.storage.staging(table) as folder:
            files = write_packed_files(StorageLocation.parse(folder), packed, day, prefix, order)
            self.storage.take_in(folder, table, [file.path for file in files])
            return files

    def adopted(self, folder: str, table: str, prefix: str = "") -> list[DataFile]:
        """Moves the Parquet files of a staged folder into a table, and returns them. A commit has to add them."""
        moved = self.storage.adopt(folder, table, prefix)
        found = [described_file(self.storage, table, path, partition) for path, partition in moved]
        return [file for file in found if file.rows]

    def change(self, before: TablesVersion | None = None) -> TablesChange:
        """Returns a change of the tables as they are in the last snapshot. The tables must be locked."""
        return TablesChange(self, before or self.version())

    def commit(self, change: TablesChange, transaction: AppTransaction | None = None) -> TablesVersion:
        """Commits the change of each table, and adds the snapshot. Returns the snapshot.

        Raises CommitFailedError if another process has committed the same transaction.
        """
        number = change.before.number + 1
        versions = change.kept()
        versions |= {table: self._commit_table(table, change, transaction) for table in {**SCHEMAS, **change.added}}
        versions[SEGMENTS] = self.segments.add(change.ingested)
        for table, commit in change.commits.items():
            versions[table] = commit(versions)
        if number % VACUUM_COMMITS == 0:
            # The version of the table of segments changes with batches only.
            versions |= {table: self.log(table).vacuum() for table in versions if table != SEGMENTS}
            self.snapshots.vacuum()
        committed = TablesVersion(number, versions, change.newest)
        self.storage.check_lock()
        self.snapshots.add(committed, transaction)
        return committed

    def _commit_table(self, table: str, change: TablesChange, transaction: AppTransaction | None) -> int:
        self.storage.check_lock()
        log, by_day = self.log(table), table in BY_DAY
        version = log.create(struct(change.schemas[table]).json(), [_DAY] if by_day else [])
        added, removed = change.added.get(table, ()), change.removed.get(table, ())
        if not added and not removed:
            return version
        version = log.commit(added, removed, transaction)
        # The rows of the other tables must not be mixed: they are sorted, or merged by their keys.
        return log.compact(_DAY if by_day else None) if by_day or table == PROBLEMS else version

    def remove(self) -> None:
        """Removes the tables, their results and the checkpoints of their streams; also tables of the old format.

        Other files stay. Does nothing in a folder without tables: there, a folder `results` would be somebody else's.
        Raises TablesBusyError if another process has the lock.
        """
        if not self.storage.has_tables():
            return
        with self.storage.lock():
            remove_checkpoints(self.storage.location)
            names = self.storage.names()
            # What marks the folder as one with tables goes last: a removal that was interrupted can be repeated.
            for name in sorted(names, key=lambda name: name in (SNAPSHOTS, OLD_FORMAT)):
                if name in _REMOVED or name.startswith(TALLIES):
                    self.storage.remove(name)


def _day_number(file: DataFile) -> int:
    return (date.fromisoformat(file.partition[_DAY]) - date(1970, 1, 1)).days


def struct(schema: str) -> StructType:
    """Returns the type of a schema that is given as text."""
    parsed = StructType.fromDDL(schema)
    assert isinstance(parsed, StructType)
    return parsed


def columns(schema: str) -> list[str]:
    """Returns the column names of a schema that is given as text."""
    return struct(schema).names
