"""The table `steps`: what happened to each message, so that one message is found without reading all days (K3).

A step is an operation or a movement, with the message's own result. The rows are sorted by `prefix`, the first four
hexadecimal digits of the MD5 of the message id. A batch adds a *run*: files that have no prefix in common. So a reader
that looks for one id finds at most one file in each run, by the statistics in the log. There are never more than three
runs: a batch merges its rows with the newest runs when there would be more.

A run has a file for about 500,000 rows, which a task sorts in memory. Only an id with more than a million steps
can have more files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import Movement
from twinbus.pipeline.frames import in_places
from twinbus.pipeline.packed_rows import PACKED_ROWS, Batches, packed_by_place, unpacked
from twinbus.pipeline.parsed_batch import moved_messages
from twinbus.pipeline.step_rows import movement_steps, operation_steps, places_of
from twinbus.pipeline.table_log import DataFile
from twinbus.pipeline.tables import ENTRIES, OPERATIONS, SCHEMAS, STEPS, TablesChange

MOST_RUNS: Final = 3
_FILE_ROWS: Final = 500_000
_ORDER: Final = ("prefix", "id", "at")


def add_steps(change: TablesChange, operations: DataFrame, rows: int) -> None:
    """Adds the steps of the operations and entries that a change adds.

    `operations` are these operations as packed rows. `rows` is the number of steps: their message ids, and those of
    movements. An entry that the tables have already may count too.
    """
    tables, before = change.tables, change.before
    entries = [change.added_rows(ENTRIES)] if change.added.get(ENTRIES) else []
    older: list[DataFrame] = []
    if STEPS not in before.tables and before.number:
        entries.append(tables.read(ENTRIES, version=before))
        older.append(tables.read(OPERATIONS, version=before))
        rows += _sum(entries[-1], moved_messages()) + _sum(older[-1], F.size("ids"))
    elif not change.added.get(OPERATIONS) and not entries:
        return
    runs = _runs(tables.files(STEPS, before))
    merged = [file for run in runs[len(runs) - merged_runs([_rows(run) for run in runs], rows) :] for file in run]
    files = max(1, math.ceil((rows + _rows(merged)) / _FILE_ROWS))
    parts = [_packed(operations, _of_packed, files)] if change.added.get(OPERATIONS) else []
    parts += [_packed(one, _of_operations, files) for one in older]
    moves = (one.where(F.col("kind") == Movement.kind) for one in entries)
    parts += [_packed(one, _of_entries, files) for one in moves]
    if merged:
        parts.append(_packed(tables.read_files(STEPS, merged, SCHEMAS[STEPS]), _unchanged, files))
    change.removed[STEPS] = merged
    change.add_packed(STEPS, in_places(parts, files), f"{before.number + 1:010}-", _ORDER)


def _sum(rows: DataFrame, column: Column) -> int:
    found = rows.agg(F.sum(column)).first()
    return (found[0] if found is not None else None) or 0


def _packed(rows: DataFrame, steps: Callable[[Batches], Iterator[pa.Table]], files: int) -> DataFrame:
    """Returns the steps of rows, as packed rows. The place is the number of the file."""
    pack: Callable[[Batches], Batches] = partial(_pack, steps, files)
    return rows.mapInArrow(pack, PACKED_ROWS)


def _pack(steps: Callable[[Batches], Iterator[pa.Table]], files: int, batches: Batches) -> Batches:
    for found in steps(batches):
        yield from packed_by_place(found, places_of(found, files))


def _of_packed(batches: Batches) -> Iterator[pa.Table]:
    return map(operation_steps, unpacked(batches))


def _of_operations(batches: Batches) -> Iterator[pa.Table]:
    return map(operation_steps, map(_table, batches))


def _of_entries(batches: Batches) -> Iterator[pa.Table]:
    return map(movement_steps, map(_table, batches))


def _unchanged(batches: Batches) -> Iterator[pa.Table]:
    return map(_table, batches)


def _table(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


def prefix_of(message: str) -> Column:
    """Returns the prefix of a column with message ids."""
    return F.substring(F.md5(F.col(message).cast("binary")), 1, 4).alias("prefix")


def merged_runs(runs: Sequence[int], new: int) -> int:
    """Returns how many of the newest runs are merged with a new one, so that no more than MOST_RUNS are left.

    `runs` are the rows of the runs, the oldest first, and `new` are the rows of the new run. If the new run is a small
    part of all rows, few rows are rewritten: over n equal batches, a row is rewritten about 2·∛n times.
    """
    if len(runs) < MOST_RUNS:
        return 0
    size = limit = max(new, 1)
    ratio = max(2.0, ((sum(runs) + size) / size) ** (1 / MOST_RUNS))
    merged = 0
    while merged < len(runs) and (len(runs) - merged + 1 > MOST_RUNS or size > limit):
        merged += 1
        size += runs[-merged]
        limit = int(limit * ratio)
    return merged


def _runs(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """Returns the runs, the oldest first. The name of a file starts with the number of its snapshot.

    A file of another name was made by another program; it is a run of its own.
    """
    runs: dict[str, list[DataFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        number, _, rest = file.path.partition("-")
        runs.setdefault(number if rest and number.isdecimal() else f"  {file.path}", []).append(file)
    return [runs[key] for key in sorted(runs)]


def _rows(files: Sequence[DataFile]) -> int:
    return sum(file.rows for file in files)
