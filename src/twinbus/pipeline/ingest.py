"""Copies the entries of a ledger into tables: each entry once, intent and outcome as one operation, by day.

A batch becomes visible with one snapshot. Spark may repeat a batch: the number of a batch is committed with it, so a
batch that is in the tables is left out. A user may start the stream again from the beginning: entries that the tables
already have are not added again. Lines that are not entries go to the table `problems`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery

from twinbus.errors import OperatorError
from twinbus.ledger import Intent, Operation, Outcome
from twinbus.object_store import read_text
from twinbus.pipeline.checkpoints import checkpoints_of, refuse_no_file_system
from twinbus.pipeline.ingested_segments import IngestedLedger, ingested_by_batch
from twinbus.pipeline.line_parsing import ENTRY_COLUMNS
from twinbus.pipeline.message_steps import add_steps
from twinbus.pipeline.segment_source import LedgerDataSource
from twinbus.pipeline.session import start_query
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.table_log import AppTransaction, DataFile
from twinbus.pipeline.tables import (
    ENTRIES,
    OPERATIONS,
    PENDING,
    PROBLEMS,
    SCHEMAS,
    Tables,
    TablesChange,
    columns,
)
from twinbus.storage_location import StorageLocation

_OPERATION, _INTENT, _OUTCOME = Operation.kind, Intent.kind, Outcome.kind
_OUTCOME_COLUMNS: Final = ("seconds", "result", "cause", "failed")
# Days since 1970. An entry may have any number as its time, but Spark's dates have a limit.
_LAST_DAY: Final = 2_932_896

_KEY: Final = "key"
_TASK_ROWS: Final = 250_000
_FEW_ROWS: Final = 50_000
_MOST_FILES: Final = 64
# A longer limit of a text may be cut off in the log.
_WHOLE_LIMIT: Final = 31

Extend = Callable[[TablesChange], None]
"""A function that adds files to the change that a batch makes."""
Committed = Callable[[TablesChange, TablesVersion], object]
"""A function that is called after the commit of a change, with the snapshot."""


@dataclass(frozen=True, slots=True)
class ParsedBatch:
    """The parsed lines of one batch."""

    rows: DataFrame
    count: int
    rejected: int
    """Lines that are not entries."""
    first_day: int
    last_day: int
    """Days since 1970."""
    oldest: int
    newest: int
    """Times of the oldest and the newest entry."""
    ids: tuple[str, str]
    """The least and the greatest id of the entries."""

    def may_be_in(self, file: DataFile) -> bool:
        """Returns whether a file of operations or entries may have a line of this batch.

        A line that was written twice has the same id and the same time both times. The outcome of an operation has the
        time at which the operation ended.
        """
        least, greatest = file.limits.get("id", self.ids)
        if len(greatest) <= _WHOLE_LIMIT and (greatest < self.ids[0] or self.ids[1] < least):
            return False
        if "at" not in file.limits:
            return True
        began, ended = file.limits["at"], file.limits.get("ended", file.limits["at"])
        return bool(min(began[0], ended[0]) <= self.newest and self.oldest <= max(began[1], ended[1]))

    def write_tasks(self) -> int | None:
        """Returns how many tasks write the rows, without a shuffle. Each task writes a file for each of its days.

        Returns None if that could be too many files.
        """
        tasks = max(min(2, math.ceil(self.count / _FEW_ROWS)), math.ceil(self.count / _TASK_ROWS), 1)
        return tasks if tasks * (self.last_day - self.first_day + 1) <= _MOST_FILES else None


# --- the stream ------------------------------------------------------------------------------------------------------


def ingest_ledger(
    spark: SparkSession,
    ledger: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    every: float | None = None,
    most_bytes: int | None = None,
    extend: Extend | None = None,
    committed: Committed | None = None,
    turn: Callable[[], AbstractContextManager[object]] = nullcontext,
    checkpoints: str | os.PathLike[str] | None = None,
) -> StreamingQuery:
    """Starts to copy new entries of the ledger into the tables at `root`, and returns the running query.

    If `every` is None, the query ends when it has ingested the entries that exist at its start. Otherwise the query
    runs until it is stopped, and looks for new entries every `every` seconds. `most_bytes` limits the bytes of one
    batch. `committed` is called after each commit. `turn` returns a context in which a batch is ingested. `checkpoints`
    is where Spark keeps how far each ledger was read (default: `checkpoints_of`). `ledger` and `root` may be URLs of
    object stores. Raises OperatorError if the tables have the format of an earlier version, or if Spark has no file
    system for the checkpoints.
    """
    ledger, root = StorageLocation.parse(ledger).absolute(), StorageLocation.parse(root).absolute()
    place = checkpoints_of(root) if checkpoints is None else StorageLocation.parse(checkpoints).absolute()
    refuse_no_file_system(spark, place)
    Tables(spark, root).version()
    spark.dataSource.register(LedgerDataSource)
    source = spark.readStream.format("ledger").option("directory", str(ledger))
    if most_bytes is not None:
        source = source.option("maxBytesPerTrigger", str(most_bytes))
    # One checkpoint per ledger: several ledgers may go into the same tables.
    checkpoint = place / hashlib.sha256(str(ledger).encode()).hexdigest()[:16]
    writer = source.load().writeStream.option("checkpointLocation", str(checkpoint))
    writer = writer.trigger(availableNow=True) if every is None else writer.trigger(processingTime=f"{every} seconds")
    ingest = partial(_ingest_batch, ledger, root, checkpoint, extend, committed)

    def in_turn(lines: DataFrame, batch: int) -> None:
        with turn():
            ingest(lines, batch)

    return start_query(writer.foreachBatch(in_turn).start)


def _ingest_batch(
    ledger: StorageLocation,
    root: StorageLocation,
    checkpoint: StorageLocation,
    extend: Extend | None,
    committed: Committed | None,
    lines: DataFrame,
    batch: int,
) -> None:
    tables = Tables(lines.sparkSession, root)
    if batch > 0 and not tables.version().number:
        # Each batch makes a commit, so somebody removed the tables. To go on would lose all earlier batches forever.
        raise OperatorError(
            f"the tables in {root} are gone, but the checkpoint of their stream is there",
            f"Put them back, or remove {checkpoint} too: then the whole ledger is read again.",
        )
    with tables.locked():
        # A stream that starts from the beginning again has a new id, so its batches are not taken for earlier ones.
        transaction = AppTransaction(f"ingest-{_stream_id(checkpoint)}", batch)
        if not tables.snapshots.is_committed(transaction):
            ingested = ingested_by_batch(str(ledger), checkpoint, batch, is_first=not tables.has_segments())
            commit_batch(tables, lines, ledger, transaction, extend, ingested, committed)


def _stream_id(checkpoint: StorageLocation) -> str:
    """Returns the id that Spark has given to the stream of a checkpoint."""
    return str(json.loads(read_text(checkpoint, "metadata"))["id"])


def commit_batch(
    tables: Tables,
    lines: DataFrame,
    ledger: StorageLocation,
    transaction: AppTransaction,
    extend: Extend | None = None,
    ingested: IngestedLedger | None = None,
    committed: Committed | None = None,
) -> TablesVersion:
    """Ingests one batch of parsed lines with one snapshot. Returns the snapshot. The tables must be locked.

    `ingested` is the part of the ledger that the batch has.
    """
    with _cached(lines) as rows:
        batch = _measure(rows)
        change = tables.change()
        change.ingested = ingested
        tables.set_partitions(change.before, PENDING, rows=batch.count)
        _write_batch(change, batch, ledger)
        if extend is not None:
            extend(change)
        version = tables.commit(change, transaction)
        if committed is not None:
            committed(change, version)
        return version


@contextmanager
def _cached(rows: DataFrame) -> Iterator[DataFrame]:
    """Yields the rows. Spark computes them once and keeps them until the end of the block."""
    kept = rows.persist()
    try:
        yield kept
    finally:
        kept.unpersist()


def _measure(rows: DataFrame) -> ParsedBatch:
    number = _day_number()
    ends = (number, F.col("at"), F.col("id"))
    found = rows.agg(F.count("*"), F.count("problem"), *map(F.min, ends), *map(F.max, ends)).first()
    assert found is not None, "an aggregate without keys has a row"
    count, rejected, first_day, oldest, least, last_day, newest, greatest = found
    return ParsedBatch(
        rows, count, rejected, first_day or 0, last_day or 0, oldest or 0, newest or 0, (least or "", greatest or "")
    )


def _write_batch(change: TablesChange, batch: ParsedBatch, ledger: StorageLocation) -> None:
    tables, before = change.tables, change.before
    good = batch.rows.where("problem is null").select(*ENTRY_COLUMNS)
    change.newest = max(before.newest, batch.newest)
    if batch.rejected:
        known_problems = tables.read(PROBLEMS, version=before).select("file", "line")
        _add(change, PROBLEMS, problems(batch.rows, ledger).join(known_problems, ["file", "line"], "left_anti"))
    with ExitStack() as stack:
        fresh = _fresh_entries(stack, good, known_entries(tables, before, batch))
        halves = fresh.where(F.col("kind").isin(_INTENT, _OUTCOME)).unionAll(tables.read(PENDING, version=before))
        joined = stack.enter_context(_cached(join_halves(halves)))
        whole = fresh.where(F.col("kind") == _OPERATION)
        _add(change, OPERATIONS, operations(whole, joined), batch)
        change.replace(PENDING, pending(joined))
        others = fresh.where(~F.col("kind").isin(_OPERATION, _INTENT, _OUTCOME))
        _add(change, ENTRIES, others.withColumn("day", day()), batch)
        add_steps(change, batch.count)


def _fresh_entries(stack: ExitStack, entries: DataFrame, known: DataFrame | None) -> DataFrame:
    """Returns the entries that are not in `known`, each once. Lines with the same kind and id are the same entry.

    Most entries are there once, so they need no shuffle: only the hashes of their keys do. Entries whose hash is there
    again are compared by their keys.
    """
    keyed = entries.withColumn(_KEY, _hashed_key())
    keys = keyed.select(_KEY, F.lit(1).alias("new"))
    if known is not None:
        keys = keys.unionAll(known.select(_hashed_key().alias(_KEY), F.lit(0)))
    counts = keys.groupBy(_KEY).agg(F.count("*").alias("all"), F.sum("new").alias("new"))
    again = stack.enter_context(_cached(counts.where("all > 1 and new > 0").select(_KEY)))
    if not again.count():
        return entries
    once = keyed.join(again, _KEY, "left_anti").select(*entries.columns)
    several = keyed.join(again, _KEY, "left_semi").dropDuplicates(["kind", "id"]).select(*entries.columns)
    if known is not None:
        suspected = known.withColumn(_KEY, _hashed_key()).join(again, _KEY, "left_semi").select("kind", "id")
        several = several.join(suspected, ["kind", "id"], "left_anti").select(*entries.columns)
    return once.unionAll(stack.enter_context(_cached(several)))


def _hashed_key() -> Column:
    return F.xxhash64("kind", "id")


def _add(change: TablesChange, table: str, rows: DataFrame, batch: ParsedBatch | None = None) -> None:
    change.add(table, rows.select(*columns(SCHEMAS[table])), tasks=None if batch is None else batch.write_tasks())


# --- what is new -----------------------------------------------------------------------------------------------------


def known_entries(tables: Tables, version: TablesVersion, batch: ParsedBatch) -> DataFrame | None:
    """Returns kind and id of the entries in the tables that may be in the batch again; None if there are none.

    These are the entries of the days of the batch, of one day before and of one day after. Files that cannot have a
    line of the batch are left out: otherwise every batch of a day would read all batches of that day before.
    """
    days = (batch.first_day - 1, batch.last_day + 1)
    files = {
        table: [file for file in tables.files(table, version, days) if batch.may_be_in(file)]
        for table in (OPERATIONS, ENTRIES)
    }
    if not any(files.values()) and not tables.files(PENDING, version):
        return None
    kinds = F.when(F.col("whole"), F.array(F.lit(_OPERATION))).otherwise(F.array(F.lit(_INTENT), F.lit(_OUTCOME)))
    done, others = (tables.read_files(table, found, SCHEMAS[table]) for table, found in files.items())
    return (
        done.select(F.explode(kinds).alias("kind"), "id")
        .unionAll(others.select("kind", "id"))
        .unionAll(tables.read(PENDING, version=version).select("kind", "id"))
    )


# --- operations ------------------------------------------------------------------------------------------------------


def join_halves(halves: DataFrame) -> DataFrame:
    """Joins intents with their outcomes. If one of the two is not in the ledger yet, its columns are null."""
    intents = halves.where(F.col("kind") == _INTENT).drop(*_OUTCOME_COLUMNS)
    outcomes = halves.where(F.col("kind") == _OUTCOME).select("id", F.col("at").alias("ended"), *_OUTCOME_COLUMNS)
    return intents.join(outcomes, "id", "full_outer")


def operations(whole: DataFrame, joined: DataFrame) -> DataFrame:
    """Returns the operations that have ended: written as one line, or as an intent and an outcome."""
    ended = F.col("at") + F.round(F.col("seconds") * 1000).cast("long")
    one = whole.withColumns({"whole": F.lit(True), "ended": ended})
    two = joined.where("kind is not null and ended is not null").withColumn("whole", F.lit(False))
    resolved = {"destination": destination(), "day": day()}
    names = columns(SCHEMAS[OPERATIONS])
    return one.withColumns(resolved).select(*names).unionAll(two.withColumns(resolved).select(*names))


def pending(joined: DataFrame) -> DataFrame:
    """Returns, as entries, the intents without an outcome and the outcomes without an intent."""
    kind = F.coalesce("kind", F.lit(_OUTCOME)).alias("kind")
    names = [name for name in columns(SCHEMAS[PENDING]) if name not in ("kind", "at")]
    return joined.where("kind is null or ended is null").select(kind, F.coalesce("at", "ended").alias("at"), *names)


def destination() -> Column:
    """Returns `namespace/entity` of the entity that the messages are meant for, in lower case as in the balance."""
    own = F.concat_ws("/", "namespace", "entity")
    return F.lower(F.when(F.col("destination") != "", F.col("destination")).otherwise(own))


def problems(rows: DataFrame, ledger: StorageLocation) -> DataFrame:
    file = F.concat(F.lit(f"{ledger}/"), "file").alias("file")
    return rows.where("problem is not null").select(
        file, F.col("number").alias("line"), F.col("problem").alias("cause")
    )


def _day_number() -> Column:
    return F.expr(f"least(greatest(at div 86400000, 0), {_LAST_DAY})").cast("int")


def day() -> Column:
    """Returns the day of an entry in UTC, also if the Spark session has another time zone."""
    return F.date_from_unix_date(_day_number())


def day_of(milliseconds: int) -> Column:
    """Returns the day in UTC of a time in milliseconds since the epoch."""
    return F.date_from_unix_date(F.lit(min(max(milliseconds // 86_400_000, 0), _LAST_DAY)))
