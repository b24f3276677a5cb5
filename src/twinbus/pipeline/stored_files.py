"""Reads and writes the Parquet files of tables in an object store, in the Python workers of Spark (D6).

Spark from PyPI has no file system for object stores. So a task writes its rows to a temporary file, and stores the
file at its place in the table: a file is visible only when a commit names it. A task that Spark repeats leaves a file
that no commit names; `TableLog.vacuum` removes it. The rows of a table are read by tasks, some files each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from twinbus.object_store import ObjectFolder
from twinbus.pipeline.packed_rows import Batches, unpacked
from twinbus.pipeline.table_log import DataFile, described, new_file
from twinbus.storage_location import StorageLocation

_WRITTEN: Final = "path string, size long, rows long, partition map<string,string>, statistics string"
# Rows are collected until a row group has about this size.
_GROUP_BYTES: Final = 64 * 1024 * 1024
_GROUP_ROWS: Final = 500_000
# The files that one task reads.
_TASK_BYTES: Final = 16 * 1024 * 1024
_BATCH_ROWS: Final = 50_000
# A task has at most so many open files, and so many bytes that wait for the end of a row group.
_MOST_OPEN: Final = 64
_TASK_WAITING: Final = 256 * 1024 * 1024
# So many rows are sorted in memory. A file with more rows becomes several.
_MOST_SORTED: Final = 2_000_000
_WRITTEN_ARROW: Final = pa.schema(
    {
        "path": pa.string(),
        "size": pa.int64(),
        "rows": pa.int64(),
        "partition": pa.map_(pa.string(), pa.string()),
        "statistics": pa.string(),
    }
)

_MapBatches = Callable[[Batches], Batches]


# --- writing ---------------------------------------------------------------------------------------------------------


def write_files(table: StorageLocation, rows: DataFrame, day: str | None, prefix: str) -> list[DataFile]:
    """Writes rows as new files of a table, and returns the files. Their names start with `prefix`.

    `day` is the column that the table is partitioned by. Then each task writes a file for each of its days.
    """
    if day is not None:
        rows = rows.sortWithinPartitions(day)
    write: _MapBatches = partial(_write, table.text, day, prefix)
    return _written(rows, write)


def write_packed_files(
    table: StorageLocation, packed: DataFrame, day: str | None, prefix: str, order: Sequence[str]
) -> list[DataFile]:
    """Writes packed rows as new files of a table, and returns the files. With `order`, each file is sorted by it."""
    write: _MapBatches = partial(_write_packed, table.text, day, prefix, order)
    return _written(packed.select("packed"), write)


def _written(rows: DataFrame, write: _MapBatches) -> list[DataFile]:
    found = rows.mapInArrow(write, _WRITTEN).collect()
    return [new_file(row.path, row.size, row.rows, row.partition, row.statistics) for row in found]


def _write(url: str, day: str | None, prefix: str, batches: Batches) -> Batches:
    files = _TaskFiles(StorageLocation.parse(url), day, prefix)
    for batch in batches:
        files.add(pa.Table.from_batches([batch]))
    yield files.stored()


def _write_packed(url: str, day: str | None, prefix: str, order: Sequence[str], batches: Batches) -> Batches:
    files = _TaskFiles(StorageLocation.parse(url), day, prefix)
    waiting: list[pa.Table] = []
    for rows in unpacked(batches):
        if not order:
            files.add(rows)
            continue
        waiting.append(rows)
        if sum(one.num_rows for one in waiting) >= _MOST_SORTED:
            files.add_sorted(waiting, order)
            waiting = []
    if waiting:
        files.add_sorted(waiting, order)
    yield files.stored()


class _TaskFiles:
    """The files that a task writes: one, or one for each day."""

    def __init__(self, folder: StorageLocation, day: str | None, prefix: str) -> None:
        self._folder = folder
        self._day = day
        self._prefix = prefix
        self._open: dict[date | None, _NewFile] = {}
        self._stored: list[DataFile] = []

    def add(self, rows: pa.Table) -> None:
        for value, part in _by_day(rows, self._day):
            new = self._open.pop(value, None)
            if new is None:
                if len(self._open) >= _MOST_OPEN:
                    self._store(next(iter(self._open)))
                new = _NewFile(
                    part.schema, self._folder, {} if value is None else {str(self._day): str(value)}, self._prefix
                )
            self._open[value] = new  # the last one of all
            new.add(part)
        if sum(new.waiting_bytes for new in self._open.values()) >= _TASK_WAITING:
            for new in self._open.values():
                new.flush()

    def add_sorted(self, rows: Sequence[pa.Table], order: Sequence[str]) -> None:
        """Writes the rows to a file of their own, in this order."""
        together = pa.concat_tables(rows).combine_chunks()
        self.add(together.sort_by([(name, "ascending") for name in order]))
        self._store(None)

    def _store(self, day: date | None) -> None:
        self._stored.append(self._open.pop(day).store())

    def stored(self) -> pa.RecordBatch:
        """Ends all files, and returns a row for each."""
        for day in list(self._open):
            self._store(day)
        columns = [
            [file.path for file in self._stored],
            [file.size for file in self._stored],
            [file.rows for file in self._stored],
            [list(file.partition.items()) for file in self._stored],
            [file.statistics for file in self._stored],
        ]
        arrays = [pa.array(values, field.type) for values, field in zip(columns, _WRITTEN_ARROW, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=_WRITTEN_ARROW)


def _by_day(rows: pa.Table, day: str | None) -> Iterator[tuple[date | None, pa.Table]]:
    """Yields the rows of each day, without the column."""
    if not rows.num_rows:
        return
    if day is None:
        yield None, rows
        return
    ends = pc.min_max(rows[day])
    if ends["min"] != ends["max"]:
        rows = rows.take(pc.sort_indices(rows[day])).combine_chunks()
    days = pc.run_end_encode(rows[day].combine_chunks())
    rows, begin = rows.drop_columns([day]), 0
    for value, end in zip(days.values.to_pylist(), days.run_ends.to_pylist(), strict=True):
        yield value, rows.slice(begin, end - begin)
        begin = end


class _NewFile:
    """A Parquet file that a task writes."""

    def __init__(self, schema: pa.Schema, folder: StorageLocation, partition: dict[str, str], prefix: str) -> None:
        self._folder = folder
        self._partition = partition
        self._path = "".join(
            [*(f"{name}={value}/" for name, value in partition.items()), prefix, uuid4().hex, ".parquet"]
        )
        self._file = _local_file(folder, self._path)
        self._writer = parquet.ParquetWriter(self._file, schema, compression="zstd", store_schema=False)
        self._waiting: list[pa.Table] = []
        self._rows = self.waiting_bytes = 0

    def add(self, rows: pa.Table) -> None:
        self._waiting.append(rows)
        self._rows += rows.num_rows
        self.waiting_bytes += rows.nbytes
        if self._rows >= _GROUP_ROWS or self.waiting_bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting), row_group_size=_GROUP_ROWS)
        self._waiting, self._rows, self.waiting_bytes = [], 0, 0

    def store(self) -> DataFile:
        """Ends the file, stores it, and returns it with its statistics."""
        self.flush()
        self._writer.close()
        with self._file as file:
            found = described(file, self._path, self._partition)
            if self._folder.is_url:
                file.seek(0)
                ObjectFolder(self._folder).put(self._path, file)
        return found


def _local_file(folder: StorageLocation, path: str) -> BinaryIO:
    """Opens a new file: the file itself, or for an object store a temporary file."""
    if folder.is_url:
        return TemporaryFile()
    place = Path(folder) / path
    place.parent.mkdir(parents=True, exist_ok=True)
    return place.open("w+b")


# --- reading ---------------------------------------------------------------------------------------------------------


def read_files(spark: SparkSession, table: StorageLocation, files: Sequence[DataFile], schema: StructType) -> DataFrame:
    """Returns the rows of files of a table. Columns that a file does not have are null."""
    shares = _shares(files)
    read: _MapBatches = partial(_read, table.text, shares, to_arrow_schema(schema))
    return spark.range(0, len(shares), 1, len(shares)).mapInArrow(read, schema)


_Share = tuple[tuple[str, int, dict[str, str]], ...]
"""Path, size and partition of the files that a task reads."""


def _shares(files: Sequence[DataFile]) -> list[_Share]:
    shares: list[_Share] = []
    share: list[tuple[str, int, dict[str, str]]] = []
    for file in files:
        share.append((file.path, file.size, dict(file.partition)))
        if sum(size for _, size, _ in share) >= _TASK_BYTES:
            shares.append(tuple(share))
            share = []
    return [*shares, tuple(share)] if share else shares


def _read(url: str, shares: Sequence[_Share], schema: pa.Schema, numbers: Batches) -> Batches:
    folder = ObjectFolder(StorageLocation.parse(url))
    for numbered in numbers:
        for number in numbered.column(0).to_pylist():
            for path, size, partition in shares[number]:
                with folder.open(path, size) as file:
                    yield from _rows_of(parquet.ParquetFile(file), partition, schema)


def _rows_of(file: parquet.ParquetFile, partition: dict[str, str], schema: pa.Schema) -> Batches:
    there = [name for name in schema.names if name in file.schema_arrow.names]
    for batch in file.iter_batches(_BATCH_ROWS, columns=there):
        yield pa.RecordBatch.from_arrays([_column(batch, field, partition) for field in schema], schema=schema)


def _column(batch: pa.RecordBatch, field: pa.Field, partition: dict[str, str]) -> Any:
    if field.name in partition:
        return pa.array([partition[field.name]] * batch.num_rows, pa.string()).cast(field.type)
    if field.name not in batch.schema.names:
        return pa.nulls(batch.num_rows, field.type)
    return batch.column(field.name).cast(field.type)
