"""Copies the entries of a ledger into tables: each entry once, intent and outcome as one operation, by day.

A batch becomes visible with one snapshot. Spark may repeat a batch: the number of a batch is committed with it, so a
batch that is in the tables is left out. A user may start the stream again from the beginning: entries that the tables
already have are not added again. Lines that are not entries go to the table `problems`.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery

from twinbus.errors import OperatorError
from twinbus.object_store import read_text
from twinbus.pipeline.checkpoints import checkpoints_of, refuse_no_file_system
from twinbus.pipeline.frames import cached
from twinbus.pipeline.ingested_segments import IngestedLedger, ingested_by_batch
from twinbus.pipeline.line_parsing import ENTRY_COLUMNS
from twinbus.pipeline.message_steps import add_steps
from twinbus.pipeline.new_operations import add_operations, known_files
from twinbus.pipeline.operation_rows import DAY_MILLISECONDS, LAST_DAY
from twinbus.pipeline.parsed_batch import ParsedBatch, measured
from twinbus.pipeline.segment_source import LedgerDataSource
from twinbus.pipeline.session import start_query
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.table_log import AppTransaction
from twinbus.pipeline.tables import ENTRIES, PROBLEMS, SCHEMAS, Tables, TablesChange, columns
from twinbus.storage_location import StorageLocation

_KEY: Final = "key"

FOLLOWER_PATIENCE: Final = 300.0
"""Seconds for which a query that follows a ledger waits for another process that writes the tables."""

Extend = Callable[[TablesChange], None]
"""A function that adds files to the change that a batch makes."""
Committed = Callable[[TablesChange, TablesVersion], object]
"""A function that is called after the commit of a change, with the snapshot."""


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
    stopping: threading.Event | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
) -> StreamingQuery:
    """Starts to copy new entries of the ledger into the tables at `root`, and returns the running query.

    If `every` is None, the query ends when it has ingested the entries that exist at its start. Otherwise the query
    runs until it is stopped, and looks for new entries every `every` seconds. A batch then waits for another process
    that writes the tables, until `stopping` is set. `most_bytes` limits the bytes of one batch. `committed` is called
    after each commit. `turn` returns a context in which a batch is ingested. `checkpoints` is where Spark keeps how far
    each ledger was read (default: `checkpoints_of`). `ledger` and `root` may be URLs of object stores. Raises
    OperatorError if the tables have the format of an earlier version, or if Spark has no file system for the
    checkpoints.
    """
    ledger, root = StorageLocation.parse(ledger).absolute(), StorageLocation.parse(root).absolute()
    place = checkpoints_of(root) if checkpoints is None else StorageLocation.parse(checkpoints).absolute()
    refuse_no_file_system(spark, place)
    tables = Tables(spark, root)
    tables.version()  # refuses tables of the old format
    name = tables.segments.name_of(ledger)
    spark.dataSource.register(LedgerDataSource)
    source = spark.readStream.format("ledger").option("directory", str(ledger))
    if most_bytes is not None:
        source = source.option("maxBytesPerTrigger", str(most_bytes))
    # One checkpoint per ledger: several ledgers may go into the same tables.
    checkpoint = place / hashlib.sha256(name.encode()).hexdigest()[:16]
    writer = source.load().writeStream.option("checkpointLocation", str(checkpoint))
    writer = writer.trigger(availableNow=True) if every is None else writer.trigger(processingTime=f"{every} seconds")
    patience = 0.0 if every is None else FOLLOWER_PATIENCE
    locked = partial(Tables.locked, patience=patience, stopping=stopping)
    ingest = partial(_ingest_batch, name, root, checkpoint, locked, extend, committed)

    def in_turn(lines: DataFrame, batch: int) -> None:
        with turn():
            ingest(lines, batch)

    return start_query(writer.foreachBatch(in_turn).start)


def _ingest_batch(
    ledger: str,
    root: StorageLocation,
    checkpoint: StorageLocation,
    locked: Callable[[Tables], AbstractContextManager[None]],
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
    with locked(tables):
        # A stream that starts from the beginning again has a new id, so its batches are not taken for earlier ones.
        transaction = AppTransaction(f"ingest-{_stream_id(checkpoint)}", batch)
        if not tables.snapshots.is_committed(transaction):
            ingested = ingested_by_batch(ledger, checkpoint, batch, is_first=not tables.has_segments())
            commit_batch(tables, lines, ledger, transaction, extend, ingested, committed)


def _stream_id(checkpoint: StorageLocation) -> str:
    """Returns the id that Spark has given to the stream of a checkpoint."""
    return str(json.loads(read_text(checkpoint, "metadata"))["id"])


def commit_batch(
    tables: Tables,
    lines: DataFrame,
    ledger: str,
    transaction: AppTransaction,
    extend: Extend | None = None,
    ingested: IngestedLedger | None = None,
    committed: Committed | None = None,
) -> TablesVersion:
    """Ingests one batch of parsed lines with one snapshot. Returns the snapshot. The tables must be locked.

    `ledger` is the name of the ledger in the tables. `ingested` is the part of the ledger that the batch has.
    """
    with cached(lines) as rows:
        batch = measured(rows)
        change = tables.change()
        change.ingested = ingested
        tables.set_partitions(change.before, rows=batch.others + batch.rejected)
        _write_batch(change, batch, ledger)
        if extend is not None:
            extend(change)
        version = tables.commit(change, transaction)
        if committed is not None:
            committed(change, version)
        return version


def _write_batch(change: TablesChange, batch: ParsedBatch, ledger: str) -> None:
    tables, before = change.tables, change.before
    change.newest = max(before.newest, batch.newest)
    if batch.rejected:
        known_problems = tables.read(PROBLEMS, version=before).select("file", "line")
        found = problems(batch.rows, ledger).join(known_problems, ["file", "line"], "left_anti")
        change.add(PROBLEMS, found.select(*columns(SCHEMAS[PROBLEMS])))
    with ExitStack() as stack:
        if batch.others:
            entries = batch.rows.where("kind is not null").select(*ENTRY_COLUMNS)
            fresh = _fresh_entries(stack, entries, known_entries(tables, before, batch)).withColumn("day", day())
            change.add(ENTRIES, fresh.select(*columns(SCHEMAS[ENTRIES])), tasks=batch.write_tasks(batch.others))
        added = add_operations(change, batch, stack)
        add_steps(change, added.packed, added.messages + batch.moved)


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
    again = stack.enter_context(cached(counts.where("all > 1 and new > 0").select(_KEY)))
    if not again.count():
        return entries
    once = keyed.join(again, _KEY, "left_anti").select(*entries.columns)
    several = keyed.join(again, _KEY, "left_semi").dropDuplicates(["kind", "id"]).select(*entries.columns)
    if known is not None:
        suspected = known.withColumn(_KEY, _hashed_key()).join(again, _KEY, "left_semi").select("kind", "id")
        several = several.join(suspected, ["kind", "id"], "left_anti").select(*entries.columns)
    return once.unionAll(stack.enter_context(cached(several)))


def _hashed_key() -> Column:
    return F.xxhash64("kind", "id")


def known_entries(tables: Tables, version: TablesVersion, batch: ParsedBatch) -> DataFrame | None:
    """Returns kind and id of the entries in the tables that may be in the batch again; None if there are none.

    These are entries of the days of the batch, of one day before and of one day after, without operations.
    """
    files = known_files(tables, ENTRIES, version, batch)
    return tables.read_files(ENTRIES, files, SCHEMAS[ENTRIES]).select("kind", "id") if files else None


# --- columns ---------------------------------------------------------------------------------------------------------


def destination() -> Column:
    """Returns `namespace/entity` of the entity that the messages are meant for, in lower case as in the balance."""
    own = F.concat_ws("/", "namespace", "entity")
    return F.lower(F.when(F.col("destination") != "", F.col("destination")).otherwise(own))


def problems(rows: DataFrame, ledger: str) -> DataFrame:
    file = F.concat(F.lit(f"{ledger}/"), "file").alias("file")
    return rows.where("problem is not null").select(
        file, F.col("number").alias("line"), F.col("problem").alias("cause")
    )


def _day_number() -> Column:
    return F.expr(f"least(greatest(at div {DAY_MILLISECONDS}, 0), {LAST_DAY})").cast("int")


def day() -> Column:
    """Returns the day of an entry in UTC, also if the Spark session has another time zone."""
    return F.date_from_unix_date(_day_number())


def day_of(milliseconds: int) -> Column:
    """Returns the day in UTC of a time in milliseconds since the epoch."""
    return F.date_from_unix_date(F.lit(min(max(milliseconds // DAY_MILLISECONDS, 0), LAST_DAY)))
