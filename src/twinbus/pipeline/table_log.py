"""One Delta Lake table: its log, its Parquet files, and the commits that add and remove files. Needs no Spark.

Theory of operation. A table is a folder of Parquet files that never change, and a log (`_delta_log`). A version of the
table is a set of files. A commit writes one entry to the log and so makes the next version: readers see all files of a
commit or none. Spark (or anything else) writes the files first; a file that no commit names is invisible. Files that
a commit removes stay on the disk for RETENTION, for readers of earlier versions.

The package `deltalake` reads and writes the log. No JAR is needed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from itertools import takewhile
from typing import Any, BinaryIO, Final

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, Schema, WriterProperties
from deltalake.exceptions import TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties, RemoveAction, Transaction
from pyarrow import parquet

from twinbus.pipeline.table_storage import TableStorage

RETENTION: Final = timedelta(days=1)
"""How long files that were replaced stay on the disk. Earlier versions can be read for this time."""
_LOG_RETENTION: Final = 2 * RETENTION
"""The log must name the files of a version for as long as these exist."""
TABLE_CONFIGURATION: Final = {
    "delta.deletedFileRetentionDuration": f"interval {int(RETENTION.total_seconds())} seconds",
    "delta.logRetentionDuration": f"interval {int(_LOG_RETENTION.total_seconds())} seconds",
    # `deltalake` would remove entries by their age, also those of a version that was replaced only now. Then the last
    # commit could not be undone. `TableLog.vacuum` removes entries instead.
    "delta.enableExpiredLogCleanup": "false",
}
_LOG_FILE: Final = re.compile(r"(\d{20})\.(json|checkpoint\..+)")
# Files below one of these sizes are merged into files of about this size. Each row is rewritten about once per size.
_MERGED_SIZES: Final = (1 << 20, 16 << 20, 256 << 20)
_MERGED_FILES: Final = 16
_COMPRESSION: Final = WriterProperties(compression="ZSTD")
# Longer texts are no good limits: every entry of the log would have them.
_LONGEST_LIMIT: Final = 64
_LIMITED_TYPES: Final = (int, str)
_NEEDED_LIMITS: Final = ("id", "at", "ended", "prefix", "messages", "until")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file of a table."""

    path: str
    """Relative to the table."""
    size: int
    rows: int
    partition: Mapping[str, str]
    """The value of each column that the table is partitioned by."""
    statistics: str = ""
    """JSON with the number of rows, and the limits of the columns, as Delta Lake defines it."""
    limits: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """The least and the greatest value of columns that the log of the table has the limits of."""


@dataclass(frozen=True, slots=True)
class AppTransaction:
    """Names a commit, so that a repeated commit is recognised: the application, and a number that it counts up."""

    application: str
    number: int


class TableLog:
    """The log of the table `name` in a storage."""

    def __init__(self, storage: TableStorage, name: str) -> None:
        self.storage = storage
        self.name = name

    # --- reading -----------------------------------------------------------------------------------------------------

    def open(self, version: int | None = None) -> DeltaTable:
        """Returns the table at this version (default: the latest). Raises TableNotFoundError."""
        return DeltaTable(self.storage.uri(self.name), version=version, storage_options=self.storage.options)

    def version(self) -> int | None:
        """Returns the latest version; None if there is no such table."""
        try:
            return self.open().version()
        except TableNotFoundError:
            return None

    def files(self, version: int | None = None) -> tuple[DataFile, ...]:
        """Returns the files of this version (default: the latest)."""
        return _files(self.open(version))

    def query(self, sql: str, version: int | None = None) -> pa.Table:
        """Returns the rows that a query finds in this version (default: the latest). Its FROM names the table `rows`.

        The methods of DeltaTable that return Arrow data are not used: for them, threads of Arrow call Python. If such a
        thread still closes a file while the process ends, the process is aborted.
        """
        found = QueryBuilder().register("rows", self.open(version)).execute(sql)
        # Not `pa.table`: it loads pandas, if that is installed.
        return pa.RecordBatchReader.from_stream(found).read_all()

    # --- writing -----------------------------------------------------------------------------------------------------

    def create(self, schema: str, partition_by: Sequence[str] = ()) -> int:
        """Makes the table if it does not exist, and adds columns that it lacks. Returns the latest version.

        `schema` is the schema as JSON, as Spark and Delta Lake write it.
        """
        wanted = Schema.from_json(schema)
        table = DeltaTable.create(
            self.storage.uri(self.name),
            wanted,
            mode="ignore",
            partition_by=list(partition_by),
            configuration=TABLE_CONFIGURATION,
            storage_options=self.storage.options,
        )
        known = {field.name for field in table.schema().fields}
        if missing := [field for field in wanted.fields if field.name not in known]:
            table.alter.add_columns(missing)
            return self.open().version()
        return table.version()

    def commit(
        self,
        added: Iterable[DataFile],
        removed: Iterable[DataFile] = (),
        transaction: AppTransaction | None = None,
        *,
        changes_data: bool = True,
    ) -> int:
        """Adds and removes files with one entry of the log. Returns the new version.

        `changes_data` is false if the added files have the rows of the removed ones. Raises CommitFailedError if
        another process has committed the same transaction, or has removed one of the files.
        """
        table, now = self.open(), int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            RemoveAction(file.path, changes_data, now, file.size, dict(file.partition)) for file in removed
        ]
        actions += [
            AddAction(file.path, file.size, file.partition, now, changes_data, file.statistics) for file in added
        ]
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            table.metadata().partition_columns,
            commit_properties=commit_properties(transaction),
        )
        return self.open().version()

    def restore(self, version: int) -> int:
        """Makes the content of an earlier version the content of the table. Returns the new version."""
        table = self.open()
        table.restore(version)
        return self.open().version()

    # --- maintenance -------------------------------------------------------------------------------------------------

    def compact(self, partition_by: str | None = None) -> int:
        """Merges small files, if there are many in one partition. Returns the latest version. No row changes."""
        table = self.open()
        by_partition: dict[str, list[int]] = {}
        for file in _files(table):
            by_partition.setdefault(file.partition.get(partition_by or "", ""), []).append(file.size)
        for value, sizes in by_partition.items():
            target = merged_size(sizes)
            if target is not None:
                only = None if partition_by is None else [(partition_by, "=", value)]
                table.optimize.compact(only, target_size=target, writer_properties=_COMPRESSION)
                table = self.open()
        return table.version()

    def vacuum(self) -> int:
        """Removes files that no version of the last RETENTION has, from the disk. Returns the latest version."""
        self.open().vacuum(dry_run=False, full=True)
        self._remove_old_entries()
        return self.open().version()

    def _remove_old_entries(self) -> None:
        """Removes from the log what no version needs that was the latest one within _LOG_RETENTION.

        A version needs its own entry and the entries before it, back to a checkpoint. An old version may have been
        replaced only now. So the age of the next entry counts, not the age of its own.
        """
        oldest = time.time() - _LOG_RETENTION.total_seconds()
        commits: dict[int, float] = {}
        checkpoints: set[int] = set()
        versions: dict[str, int] = {}
        for name, modified in self.storage.log_files(self.name):
            if (found := _LOG_FILE.fullmatch(name)) is not None:
                version = versions[name] = int(found[1])
                if found[2] == "json":
                    commits[version] = modified
                else:
                    checkpoints.add(version)
        # The version that was the latest one at the time `oldest`.
        needed = max(takewhile(lambda version: commits[version] < oldest, sorted(commits)), default=-1)
        first = max((version for version in checkpoints if version <= needed), default=0)
        for name in sorted(versions):
            if versions[name] < first:
                self.storage.remove_log_file(self.name, name)


def merged_size(sizes: Collection[int]) -> int | None:
    """Returns the size below which files should be merged now; None if there are too few small files."""
    for limit in _MERGED_SIZES:
        small = [size for size in sizes if size < limit]
        # Files of almost this size would stay as they are.
        if len(small) >= _MERGED_FILES and sum(small) <= limit * len(small) // 2:
            return limit
    return None


def commit_properties(transaction: AppTransaction | None) -> CommitProperties | None:
    """Returns what a commit with this transaction needs."""
    if transaction is None:
        return None
    return CommitProperties(app_transactions=[Transaction(transaction.application, transaction.number)])


def _files(table: DeltaTable) -> tuple[DataFile, ...]:
    rows: list[dict[str, Any]] = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    prefix = "partition."
    return tuple(
        DataFile(
            row["path"],
            row["size_bytes"],
            row["num_records"] or 0,
            {name.removeprefix(prefix): _text(value) for name, value in row.items() if name.startswith(prefix)},
            limits={
                name: (row[f"min.{name}"], row[f"max.{name}"])
                for name in _NEEDED_LIMITS
                if row.get(f"min.{name}") is not None and row.get(f"max.{name}") is not None
            },
        )
        for row in rows
    )


def _text(value: object) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)


# --- statistics ------------------------------------------------------------------------------------------------------


def described_file(storage: TableStorage, table: str, path: str, partition: Mapping[str, str]) -> DataFile:
    """Returns a new file with its statistics, which are read from the end of the file."""
    with storage.open_file(table, path) as file:
        return described(file, path, partition)


def described(file: BinaryIO, path: str, partition: Mapping[str, str]) -> DataFile:
    """Returns the opened file as a file of a table, with its statistics."""
    found = parquet.ParquetFile(file).metadata
    size = file.seek(0, 2)
    return new_file(path, size, found.num_rows, partition, json.dumps(_statistics(found)))


def new_file(path: str, size: int, rows: int, partition: Mapping[str, str], statistics: str) -> DataFile:
    """Returns a file that no commit has added yet. `statistics` are those of `described`."""
    found = json.loads(statistics)
    least, most = found["minValues"], found["maxValues"]
    limits = {name: (least[name], most[name]) for name in _NEEDED_LIMITS if name in least}
    return DataFile(path, size, rows, partition, statistics, limits)


def _statistics(found: parquet.FileMetaData) -> dict[str, Any]:
    """Returns the number of rows, and for columns of numbers and short texts the limits and the number of nulls."""
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    unlimited: set[str] = set()
    for group in range(found.num_row_groups):
        for number in range(found.num_columns):
            column = found.row_group(group).column(number)
            name, values = column.path_in_schema, column.statistics
            if "." in name:
                continue  # in a list or a map
            if values is None or not values.has_null_count:
                unlimited.add(name)
                continue
            nulls[name] = nulls.get(name, 0) + values.null_count
            if values.null_count == column.num_values:
                continue  # every value is null
            if not values.has_min_max or not _is_limit(values.min) or not _is_limit(values.max):
                unlimited.add(name)
                continue
            least[name] = min(least.get(name, values.min), values.min)
            most[name] = max(most.get(name, values.max), values.max)
    limited = {name for name in least if name not in unlimited}
    return {
        "numRecords": found.num_rows,
        "minValues": {name: least[name] for name in least if name in limited},
        "maxValues": {name: most[name] for name in most if name in limited},
        "nullCount": {name: count for name, count in nulls.items() if name not in unlimited or name in limited},
    }


def _is_limit(value: object) -> bool:
    return type(value) in _LIMITED_TYPES and (not isinstance(value, str) or len(value) <= _LONGEST_LIMIT)
