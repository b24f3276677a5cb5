"""The table `steps`: what happened to each message, so that one message is found without reading all days (K3).

A step is an operation or a movement, with the message's own result. The rows are sorted by `prefix`, the first four
hexadecimal digits of the MD5 of the message id. A batch adds a *run*: files that have no prefix in common. So a reader
that looks for one id finds at most one file in each run, by the statistics in the log. There are never more than three
runs: a batch merges its rows with the newest runs when there would be more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import OK, Movement
from twinbus.pipeline.reconcile import concerned
from twinbus.pipeline.table_log import DataFile
from twinbus.pipeline.tables import ENTRIES, OPERATIONS, SCHEMAS, STEPS, TablesChange, columns

MOST_RUNS: Final = 3
_FILE_ROWS: Final = 500_000
_PREFIXES: Final = 16**4
_ORDER: Final = ("prefix", "id", "at")


def add_steps(change: TablesChange, rows: int) -> None:
    """Adds the steps of the operations and entries that a change adds. `rows` is about the number of these."""
    tables, before = change.tables, change.before
    sources = [change.added_rows(name) for name in (OPERATIONS, ENTRIES)]
    if STEPS not in before.tables and before.number:
        old = [tables.read(name, version=before) for name in (OPERATIONS, ENTRIES)]
        sources = [one.unionAll(other) for one, other in zip(old, sources, strict=True)]
    elif not change.added.get(OPERATIONS) and not change.added.get(ENTRIES):
        return
    runs = _runs(tables.files(STEPS, before))
    merged = [file for run in runs[len(runs) - merged_runs([_rows(run) for run in runs], rows) :] for file in run]
    new = steps_of(*sources)
    if merged:
        new = new.unionAll(tables.read_files(STEPS, merged, SCHEMAS[STEPS]))
    files = math.ceil((rows + _rows(merged)) / _FILE_ROWS)
    # The prefixes are even. So the ranges are known, and Spark need not read the rows twice to find them.
    place = F.expr(f"cast(conv(prefix, 16, 10) AS int) * {files} DIV {_PREFIXES}").cast("int")
    placed = new.repartitionById(files, place) if files > 1 else new.coalesce(1)
    change.removed[STEPS] = merged
    change.add(STEPS, placed.sortWithinPartitions(*_ORDER), prefix=f"{before.number + 1:010}-")


def steps_of(operations: DataFrame, entries: DataFrame) -> DataFrame:
    """Returns a row for each message of each operation and movement."""
    names = [name for name in columns(SCHEMAS[STEPS]) if name not in ("prefix", "entry")]
    texts = {name: F.lit(None).cast("string") for name in ("move", "source", "reason")}
    each = operations.select("*", F.posexplode("ids").alias("place", "message"))
    own = F.when(concerned("message"), F.col("result")).otherwise(F.lit(OK))
    done = each.withColumns({"entry": F.col("id"), "id": F.col("message"), "result": own, **texts})
    moves = entries.where(F.col("kind") == Movement.kind).withColumn("entry", F.col("id"))
    moved = moves.withColumns({"id": F.explode("ids"), "ended": F.lit(None).cast("long")})
    moved = moved.withColumn("destination", F.lower("destination"))
    prefix = prefix_of("id")
    return done.select(prefix, *names, "entry").unionAll(moved.select(prefix, *names, "entry"))


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
