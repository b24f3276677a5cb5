"""Segments into tables: each entry once, intents and outcomes as one operation, by day; what cannot be read is told.

Everything is committed at once, and what is there already is left out: a batch may be repeated, and the stream begun
anew. What the operations amount to is decided by the jobs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery

from twinbus.errors import OperatorError
from twinbus.ledger import Intent, Operation, Outcome
from twinbus.pipeline.line_parsing import looked_at, parsed
from twinbus.pipeline.segment_source import LedgerDataSource
from twinbus.pipeline.session import start_query
from twinbus.pipeline.tables import ENTRIES, OPERATIONS, PENDING, PROBLEMS, SCHEMAS, Tables, TablesVersion, columns

_OPERATION, _INTENT, _OUTCOME = Operation.kind, Intent.kind, Outcome.kind
_ENDING: Final = ("seconds", "result", "cause", "failed")
# An entry may have any number for its instant; a date has not.
_LAST_DAY: Final = 2_932_896

Extend = Callable[[Tables, TablesVersion, TablesVersion], TablesVersion]
"""What else is to be committed, from the version before and the one that is to come."""


@dataclass(frozen=True, slots=True)
class ParsedBatch:
    """Lines that were parsed. `first` and `last`: their days, as numbers since 1970."""

    rows: DataFrame
    count: int
    rejected: int
    first: int
    last: int
    newest: int


# --- the stream ------------------------------------------------------------------------------------------------------


def ingest_ledger(
    spark: SparkSession,
    ledger: Path,
    root: Path,
    *,
    every: float | None = None,
    most_bytes: int | None = None,
    extend: Extend | None = None,
) -> StreamingQuery:
    """Bring what is new in the ledger into the tables at `root`: what is there now, or on and on, `every` few seconds.

    The query that does it is already running. `most_bytes`: of segments in one batch.
    """
    spark.dataSource.register(LedgerDataSource)
    source = spark.readStream.format("ledger").option("directory", str(ledger.absolute()))
    if most_bytes is not None:
        source = source.option("maxBytesPerTrigger", str(most_bytes))
    # Several ledgers may go into the same tables.
    checkpoint = root.absolute() / "checkpoints" / hashlib.sha256(str(ledger.absolute()).encode()).hexdigest()[:16]
    writer = source.load().writeStream.option("checkpointLocation", str(checkpoint))
    writer = writer.trigger(availableNow=True) if every is None else writer.trigger(processingTime=f"{every} seconds")
    return start_query(writer.foreachBatch(partial(_take, ledger.absolute(), root.absolute(), extend)).start)


def _take(ledger: Path, root: Path, extend: Extend | None, lines: DataFrame, batch: int) -> None:
    tables = Tables(lines.sparkSession, root)
    if batch > 0 and not tables.version().number:
        # Each batch is a commit. To go on would leave out what was ingested before, and remove what is left of it.
        raise OperatorError(
            f"the tables in {root} are gone, but the checkpoint of their stream is there",
            f"Put them back, or remove {root / 'checkpoints'} too: then the whole ledger is read again.",
        )
    with tables.changing():
        take(tables, lines, ledger, extend)


def take(tables: Tables, lines: DataFrame, ledger: Path, extend: Extend | None = None) -> TablesVersion:
    """One batch of lines, committed."""
    rows = parsed(lines).withColumn("day", _day_number()).persist()
    try:
        batch = _measured(rows)
        before = tables.version()
        tables.divide(before, PENDING, rows=batch.count)
        looked = looked_at(rows.where("line is not null"), ledger).persist() if batch.rejected else None
        after = _written(tables, before, batch, looked, ledger)
        after = extend(tables, before, after) if extend is not None else after
        for table in (OPERATIONS, ENTRIES, PROBLEMS):
            after = tables.compacted(after, table, SCHEMAS[table], lambda parts: parts)
        return tables.commit(after)
    finally:
        rows.unpersist()


def _measured(rows: DataFrame) -> ParsedBatch:
    found = rows.agg(F.count("*"), F.count("line"), F.min("day"), F.max("day"), F.max("at")).first()
    assert found is not None, "an aggregate without keys has a row"
    return ParsedBatch(rows, found[0], found[1], found[2] or 0, found[3] or 0, found[4] or 0)


def _written(
    tables: Tables, before: TablesVersion, batch: ParsedBatch, looked: DataFrame | None, ledger: Path
) -> TablesVersion:
    names = columns(SCHEMAS[PENDING])
    good = batch.rows.where("line is null").select(*names)
    after = replace(before, newest=max(before.newest, batch.newest))
    if looked is not None:
        good = good.unionAll(looked.where("problem is null").select(*names))
        known_ones = tables.read(PROBLEMS, version=before).select("file", "line")
        after = _added(
            tables, after, PROBLEMS, problems(looked, ledger).join(known_ones, ["file", "line"], "left_anti")
        )
    fresh = unknown(good, known(tables, before, batch)).persist()
    try:
        halves = fresh.where(F.col("kind").isin(_INTENT, _OUTCOME)).unionAll(tables.read(PENDING, version=before))
        met = joined(halves).persist()
        whole = fresh.where(F.col("kind") == _OPERATION)
        after = _added(tables, after, OPERATIONS, operations(whole, met))
        after = after.having(PENDING, [part] if (part := tables.write(PENDING, pending(met))) else [])
        others = fresh.where(~F.col("kind").isin(_OPERATION, _INTENT, _OUTCOME)).withColumn("day", day())
        after = _added(tables, after, ENTRIES, others)
        met.unpersist()
        return after
    finally:
        fresh.unpersist()


def _added(tables: Tables, version: TablesVersion, table: str, rows: DataFrame) -> TablesVersion:
    part = tables.write(table, rows.select(*columns(SCHEMAS[table])))
    return version.having(table, [*version.of(table), part]) if part else version


# --- what is new -----------------------------------------------------------------------------------------------------


def known(tables: Tables, version: TablesVersion, batch: ParsedBatch) -> DataFrame | None:
    """`kind` and `id` of what is there from about these days: a line that was written twice has one instant."""
    if not version.of(OPERATIONS) and not version.of(ENTRIES) and not version.of(PENDING):
        return None
    days = F.col("day").between(
        F.date_from_unix_date(F.lit(max(0, batch.first - 1))), F.date_from_unix_date(F.lit(batch.last + 1))
    )
    told = F.when(F.col("whole"), F.array(F.lit(_OPERATION))).otherwise(F.array(F.lit(_INTENT), F.lit(_OUTCOME)))
    done = tables.read(OPERATIONS, version=version).where(days).select(F.explode(told).alias("kind"), "id")
    others = tables.read(ENTRIES, version=version).where(days).select("kind", "id")
    return done.unionAll(others).unionAll(tables.read(PENDING, version=version).select("kind", "id"))


def unknown(entries: DataFrame, known: DataFrame | None) -> DataFrame:
    """Each (`kind`, `id`) once, and none that is known: the second line says nothing new."""
    once = entries.dropDuplicates(["kind", "id"])
    if known is None:
        return once
    # Few are new beside all that are known: so they are looked for there, and not the other way round.
    again = known.join(entries.select("kind", "id"), ["kind", "id"], "left_semi")
    return once.join(again, ["kind", "id"], "left_anti").select(*entries.columns)


# --- operations ------------------------------------------------------------------------------------------------------


def joined(halves: DataFrame) -> DataFrame:
    """Intents and outcomes side by side, with one of them missing where it has not come yet."""
    intents = halves.where(F.col("kind") == _INTENT).drop(*_ENDING)
    outcomes = halves.where(F.col("kind") == _OUTCOME).select("id", F.col("at").alias("ended"), *_ENDING)
    return intents.join(outcomes, "id", "full_outer")


def operations(whole: DataFrame, met: DataFrame) -> DataFrame:
    """Those that have ended: of one line, and of two."""
    ended = F.col("at") + F.round(F.col("seconds") * 1000).cast("long")
    one = whole.withColumns({"whole": F.lit(True), "ended": ended})
    two = met.where("kind is not null and ended is not null").withColumn("whole", F.lit(False))
    resolved = {"destination": destination(), "day": day()}
    names = columns(SCHEMAS[OPERATIONS])
    return one.withColumns(resolved).select(*names).unionAll(two.withColumns(resolved).select(*names))


def pending(met: DataFrame) -> DataFrame:
    """The halves that wait, as the entries that they are."""
    kind = F.coalesce("kind", F.lit(_OUTCOME)).alias("kind")
    names = [name for name in columns(SCHEMAS[PENDING]) if name not in ("kind", "at")]
    return met.where("kind is null or ended is null").select(kind, F.coalesce("at", "ended").alias("at"), *names)


def destination() -> Column:
    """`namespace/entity` on the primary, in lower case, as the balance has it."""
    own = F.concat_ws("/", "namespace", "entity")
    return F.lower(F.when(F.col("destination") != "", F.col("destination")).otherwise(own))


def problems(looked: DataFrame, ledger: Path) -> DataFrame:
    file = F.concat(F.lit(f"{ledger}/"), "file").alias("file")
    return looked.where("problem is not null").select(
        file, F.col("number").alias("line"), F.col("problem").alias("cause")
    )


def _day_number() -> Column:
    return F.expr(f"least(greatest(at div 86400000, 0), {_LAST_DAY})").cast("int")


def day() -> Column:
    """UTC, whatever the session's time zone is."""
    return F.date_from_unix_date(_day_number())
