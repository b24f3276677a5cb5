"""The operations of a batch: drops repeated lines, pairs intents with outcomes, and writes what has ended (D3).

Theory of operation. Most lines are there once, and most intents have their outcome near them. So a first pass completes
operations in each task. It leaves out *suspects*: lines whose hash of kind and id is in the batch twice, or also in the
tables. Suspects, intents without an outcome and outcomes without an intent go to a second pass, together with the table
`pending`, and with kind and id of the entries in the tables that may be the same. There all lines with one id are in
one task. It compares kinds and ids, and pairs intents with outcomes. What is left is the new table `pending`.

The hashes of a batch are in the memory of the driver: 8 bytes for each line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import Intent, Operation, Outcome
from twinbus.pipeline.frames import cached, in_places
from twinbus.pipeline.operation_rows import HASH, LINES, completed, line_keys, lines_of, pending_rows, without_repeated
from twinbus.pipeline.packed_rows import (
    PACKED_ROWS,
    Batches,
    Hashes,
    Numbers,
    is_among,
    packed_by_place,
    packed_row,
    unpacked,
)
from twinbus.pipeline.parsed_batch import ParsedBatch
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.table_log import DataFile
from twinbus.pipeline.tables import OPERATIONS, PENDING, SCHEMAS, Tables, TablesChange

# The second pass has a task for so many lines. If the batch has few lines, there is no first pass.
_TASK_LINES: Final = 500_000
_FEW_LINES: Final = 50_000

_MapBatches = Callable[[Batches], Batches]


class NewOperations(NamedTuple):
    """The operations that a batch adds."""

    packed: DataFrame
    """The operations as packed rows."""
    messages: int
    """The number of message ids that they name."""


def add_operations(change: TablesChange, batch: ParsedBatch, stack: ExitStack) -> NewOperations:
    """Adds the new operations of a batch to a change, and replaces the table `pending`.

    Returns the new operations. Spark keeps them until `stack` is closed.
    """
    lines = batch.rows.where("packed is not null")
    if not batch.lines:
        return NewOperations(lines, 0)
    waiting = sum(file.rows for file in change.tables.files(PENDING, change.before))
    tasks = max(1, math.ceil((batch.lines + waiting) / _TASK_LINES))
    stored, keys = _stored_lines(change, batch, tasks, stack)
    done: DataFrame | None = None
    messages, has_left = 0, True
    if tasks == 1 and batch.lines <= _FEW_LINES:
        nothing = [F.lit(None).cast("long").alias("messages"), F.lit(None).cast("binary").alias("keys")]
        left = lines.select(F.lit(0).alias("place"), "packed", *nothing)
    else:
        first: _MapBatches = partial(_complete, np.union1d(_repeated(batch.keys), keys), tasks)
        few = lines.select("packed").coalesce(batch.few_tasks(batch.lines))
        passed = stack.enter_context(cached(few.mapInArrow(first, PACKED_ROWS)))
        done, left = passed.where("place is null"), passed.where("place is not null")
        messages, has_left = _counted(passed)
    if has_left:
        rest = _complete_rest(change, [left, *stored], tasks, stack)
        done = rest.packed if done is None else done.unionAll(rest.packed)
        messages += rest.messages
    assert done is not None, "what no first pass has completed is left"
    change.add_packed(OPERATIONS, done)
    return NewOperations(done, messages)


def _complete_rest(change: TablesChange, parts: list[DataFrame], tasks: int, stack: ExitStack) -> NewOperations:
    """Completes what is left of all tasks, and replaces the table `pending`."""
    passed = stack.enter_context(cached(in_places(parts, tasks).mapInArrow(_compare_and_complete, PACKED_ROWS)))
    done, left = passed.where("place is null"), passed.where("place is not null")
    before = change.tables.latest_files(PENDING)
    messages, has_left = _counted(passed)
    if before or has_left:
        change.removed[PENDING] = before
        change.add_packed(PENDING, left.coalesce(1))
    return NewOperations(done.coalesce(1), messages)


def _stored_lines(
    change: TablesChange, batch: ParsedBatch, tasks: int, stack: ExitStack
) -> tuple[list[DataFrame], Hashes]:
    """Returns what the tables have of the lines of a batch, as packed rows, and the keys of these lines.

    These are all lines of the table `pending`, and operations of `known_files`.
    """
    tables, before = change.tables, change.before
    parts: list[DataFrame] = []
    if tables.files(PENDING, before):
        pack: _MapBatches = partial(_pack_lines, tasks, None)
        parts.append(tables.read(PENDING, version=before).mapInArrow(pack, PACKED_ROWS))
    files = known_files(tables, OPERATIONS, before, batch)
    if files:
        whole, two = F.array(F.lit(Operation.kind)), F.array(F.lit(Intent.kind), F.lit(Outcome.kind))
        kinds = F.explode(F.when(F.col("whole"), whole).otherwise(two)).alias("kind")
        known = tables.read_files(OPERATIONS, files, SCHEMAS[OPERATIONS]).select(kinds, "id")
        find: _MapBatches = partial(_pack_lines, tasks, batch.keys)
        parts.append(known.mapInArrow(find, PACKED_ROWS))
    parts = [stack.enter_context(cached(part)) for part in parts]
    found = [row["keys"] for part in parts for row in part.select("keys").collect()]
    return parts, np.frombuffer(b"".join(found), np.int64)


def known_files(tables: Tables, table: str, version: TablesVersion, batch: ParsedBatch) -> list[DataFile]:
    """Returns the files of a table that may have lines of a batch.

    They are of the days of the batch, of one day before and of one day after. Files that cannot have a line of the
    batch are left out: otherwise every batch of a day would read all batches of that day before.
    """
    first, last = batch.days
    return [file for file in tables.files(table, version, (first - 1, last + 1)) if batch.may_be_in(file)]


def _counted(passed: DataFrame) -> tuple[int, bool]:
    """Returns the number of message ids of the complete operations, and whether lines are left. All tasks run."""
    found = passed.agg(F.sum(F.when(F.col("place").isNull(), F.col("messages"))), F.count("place")).first()
    assert found is not None, "an aggregate without keys has a row"
    return found[0] or 0, bool(found[1])


def _repeated(keys: Hashes) -> Hashes:
    """Returns the keys that are there more than once. The keys are sorted."""
    found: Hashes = keys[1:][keys[1:] == keys[:-1]]
    return found


# --- in the Python workers -------------------------------------------------------------------------------------------


def _pack_lines(tasks: int, wanted: Hashes | None, batches: Batches) -> Batches:
    """Yields lines as packed rows with their keys: all, or those with a key that is in `wanted`."""
    for batch in batches:
        lines = lines_of(pa.Table.from_batches([batch]))
        keys = line_keys(lines)
        if wanted is not None:
            is_wanted = is_among(keys, wanted)
            lines, keys = lines.filter(pa.array(is_wanted)), keys[is_wanted]
        yield from packed_by_place(lines, _places(lines, tasks), keys)


def _complete(suspected: Hashes, tasks: int, batches: Batches) -> Batches:
    """Yields the operations that are complete here (without a place), and the lines that are left."""
    waiting = LINES.empty_table()
    for lines in unpacked(batches):
        is_suspect = is_among(line_keys(lines), suspected)
        suspects = lines.filter(pa.array(is_suspect))
        yield from packed_by_place(suspects, _places(suspects, tasks))
        others = lines.filter(pa.array(~is_suspect)) if len(suspects) else lines
        done, waiting = completed(pa.concat_tables([waiting, others]).combine_chunks())
        if done.num_rows:
            yield packed_row(done)
    yield from packed_by_place(waiting, _places(waiting, tasks))


def _compare_and_complete(batches: Batches) -> Batches:
    """Yields the operations (without a place), and the lines that are left, as rows of the table `pending`.

    A line without a time has only kind and id: the tables have this line.
    """
    parts = list(unpacked(batches))
    if not parts:
        return
    lines = pa.concat_tables(parts).combine_chunks()
    is_new = pc.is_valid(lines["at"])
    fresh = without_repeated(lines.filter(is_new), lines.filter(pc.invert(is_new)))
    done, left = completed(fresh)
    if done.num_rows:
        yield packed_row(done)
    if left.num_rows:
        yield packed_row(pending_rows(left), 0)


def _places(lines: pa.Table, tasks: int) -> Numbers:
    found: Numbers = np.mod(lines[HASH].to_numpy(), tasks)
    return found
