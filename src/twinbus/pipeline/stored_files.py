"""Reads and writes the Parquet files of tables in an object store, in the Python workers of Spark (D6).

Spark from PyPI has no file system for object stores. So a task writes its rows to a temporary file, and stores the
file at its place in the table: a file is visible only when a commit names it. A task that Spark repeats leaves a file
that no commit names; `TableLog.vacuum` removes it. The rows of a table are read by tasks, some files each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Final
from uuid import uuid4

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from twinbus.object_store import ObjectFolder
from twinbus.pipeline.table_log import DataFile, described, new_file
from twinbus.storage_location import StorageLocation

_WRITTEN: Final = "path string, size long, rows long, partition map<string,string>, statistics string"
# Rows are collected until a row group has about this size.
_GROUP_BYTES: Final = 64 * 1024 * 1024
_GROUP_ROWS: Final = 500_000
# The files that one task reads.
_TASK_BYTES: Final = 16 * 1024 * 1024
_BATCH_ROWS: Final = 50_000

Batches = Iterator[pa.RecordBatch]


# --- writing ---------------------------------------------------------------------------------------------------------


def write_files(table: StorageLocation, rows: DataFrame, day: str | None, prefix: str) -> list[DataFile]:
    """Writes rows as new files of a table, and returns the files. Their names start with `prefix`.

    `day` is the column that the table is partitioned by. Then each task writes a file for each of its days.
    """
    if day is not None:
        rows = rows.sortWithinPartitions(day)
    write: Callable[[Batches], Batches] = partial(_write, table.text, day, prefix)
    found = rows.mapInArrow(write, _WRITTEN).collect()
    return [new_file(row.path, row.size, row.rows, row.partition, row.statistics) for row in found]


def _write(url: str, day: str | None, prefix: str, batches: Batches) -> Batches:
    folder = ObjectFolder(StorageLocation.parse(url))
    written: list[DataFile] = []
    new: _NewFile | None = None
    for batch in batches:
        for value, part in _by_day(batch, day):
            if new is None or new.day != value:
                if new is not None:
                    written.append(new.store(folder))
                new = _NewFile(part.schema, value, "" if day is None else f"{day}={value}/", prefix)
            new.add(part)
    if new is not None:
        written.append(new.store(folder))
    columns = [
        [file.path for file in written],
        [file.size for file in written],
        [file.rows for file in written],
        pa.array([list(file.partition.items()) for file in written], pa.map_(pa.string(), pa.string())),
        [file.statistics for file in written],
    ]
    yield pa.RecordBatch.from_arrays(
        [one if isinstance(one, pa.Array) else pa.array(one, kind) for one, kind in zip(columns, _KINDS, strict=True)],
        ["path", "size", "rows", "partition", "statistics"],
    )


_KINDS: Final = (pa.string(), pa.int64(), pa.int64(), None, pa.string())


def _by_day(batch: pa.RecordBatch, day: str | None) -> Iterator[tuple[date | None, pa.RecordBatch]]:
    """Yields the rows of each day, without the column. The rows are sorted by day."""
    if not batch.num_rows:
        return
    if day is None:
        yield None, batch
        return
    days = pa.compute.run_end_encode(batch.column(day))
    rows, begin = batch.drop_columns([day]), 0
    for value, end in zip(days.values.to_pylist(), days.run_ends.to_pylist(), strict=True):
        yield value, rows.slice(begin, end - begin)
        begin = end


class _NewFile:
    """A Parquet file that a task writes."""

    def __init__(self, schema: pa.Schema, day: date | None, folder: str, prefix: str) -> None:
        self.day = day
        self._path = f"{folder}{prefix}{uuid4().hex}.parquet"
        self._partition = dict([folder.rstrip("/").split("=", 1)]) if folder else {}
        self._file: BinaryIO = TemporaryFile()  # noqa: SIM115  # closed by `store`
        self._writer = parquet.ParquetWriter(self._file, schema, compression="zstd", store_schema=False)
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, rows: pa.RecordBatch) -> None:
        self._waiting.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting), row_group_size=_GROUP_ROWS)
        self._waiting, self._rows, self._bytes = [], 0, 0

    def store(self, folder: ObjectFolder) -> DataFile:
        """Ends the file, stores it, and returns it with its statistics."""
        self._flush()
        self._writer.close()
        with self._file as file:
            found = described(file, self._path, self._partition)
            file.seek(0)
            folder.put(self._path, file)
        return found


# --- reading ---------------------------------------------------------------------------------------------------------


def read_files(spark: SparkSession, table: StorageLocation, files: Sequence[DataFile], schema: StructType) -> DataFrame:
    """Returns the rows of files of a table. Columns that a file does not have are null."""
    shares = _shares(files)
    read: Callable[[Batches], Batches] = partial(_read, table.text, shares, to_arrow_schema(schema))
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
