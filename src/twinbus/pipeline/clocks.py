"""How far the clock of each writer is ahead of the broker's, and times corrected by that (L5).

The time of an entry is that of its writer's clock. The returns of messages also have times of the broker's clock, so
the difference of both clocks is known for a syphon. For a client it follows from its diversions: a message arrived, by
the broker's clock, between the beginning and the end of the send that diverted it. Many messages narrow the difference
down. A few samples may be wrong, as when the first try of a send arrived although it seemed to fail: so the outermost
tenth of the samples is left out.

A difference of at most 1 s is not corrected: the messages took some time on their way too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import SegmentHeader
from twinbus.pipeline.report_data import WriterClock

TOLERANCE: Final = 1000
"""Milliseconds. Clocks that differ by no more than this count as equal."""
_OUTERMOST: Final = 0.1


def off_clocks(tallies: DataFrame) -> DataFrame:
    """Returns one row for each writer whose clock differs from the broker's. `tallies` are those of the latency.

    `ahead` is the difference in milliseconds, negative if the clock is behind. If the clock was set while the writer
    ran, `ahead` is null: then `least` and `most` are the smallest and the largest difference.
    """
    samples = _of_syphons(tallies).unionAll(_of_clients(tallies))
    # The clock is ahead by at least `most` and at most `least`. If it was set meanwhile, `most` is larger than `least`.
    bounds = samples.groupBy("writer").agg(
        F.percentile_approx("low", 1 - _OUTERMOST).alias("most"), F.percentile_approx("high", _OUTERMOST).alias("least")
    )
    most, least = F.col("most"), F.col("least")
    ahead = (
        F.when(most > least, F.expr("(most + least) div 2")).when(most > 0, most).when(least < 0, least).otherwise(0)
    )
    was_set = most - least > TOLERANCE
    rows = bounds.withColumn("ahead", F.when(~was_set, ahead))
    return rows.where(was_set | (F.abs("ahead") > TOLERANCE))


def _of_syphons(tallies: DataFrame) -> DataFrame:
    ahead = F.col("home") - F.col("returned")
    return tallies.where("returned is not null").select("writer", ahead.alias("low"), ahead.alias("high"))


def _of_clients(tallies: DataFrame) -> DataFrame:
    """Returns samples of the messages that were diverted once and never resubmitted: then it is clear what arrived."""
    diverted = F.when(F.col("diverted").isNotNull(), F.struct("writer", "sent", "diverted"))
    messages = tallies.groupBy("destination", "id").agg(
        F.count("diverted").alias("times"),
        F.max(diverted).alias("one"),
        F.min("arrived").alias("arrived"),
        F.max("arrived").alias("last_arrived"),
        F.max("resubmitted").alias("resubmitted"),
    )
    clear = messages.where("times = 1 and arrived = last_arrived and coalesce(resubmitted, 0) = 0")
    return clear.select(
        "one.writer",
        (F.col("one.sent") - F.col("arrived")).alias("low"),
        (F.col("one.diverted") - F.col("arrived")).alias("high"),
    )


def corrected(rows: DataFrame, off: DataFrame, *times: str, writer: Column | None = None) -> DataFrame:
    """Returns the rows with these columns of times by the broker's clock. `off` is the result of `off_clocks`.

    `writer` is the column with the writer; the default is `writer`.
    """
    known = off.select(F.col("writer").alias("whose"), "ahead")
    joined = rows.join(F.broadcast(known), (F.col("writer") if writer is None else writer) == F.col("whose"), "left")
    ahead = F.coalesce("ahead", F.lit(0))
    return joined.withColumns({name: F.col(name) - ahead for name in times}).drop("whose", "ahead")


def writer_of() -> Column:
    """Returns the writer of an operation or entry: the first part of its id."""
    return F.substring("id", 1, 16)


def named(off: DataFrame, entries: DataFrame) -> list[WriterClock]:
    """Returns the writers whose clocks differ, with the names that the headers of their segments have."""
    if off.isEmpty():  # nearly always
        return []
    headers = entries.where(F.col("kind") == SegmentHeader.kind)
    names = headers.select(writer_of().alias("whose"), F.col("writer").alias("name")).distinct()
    rows = off.join(names, F.col("writer") == F.col("whose"), "left").orderBy(F.coalesce("name", "writer")).collect()
    return [_clock(row["name"] or row["writer"], row["ahead"], row["least"], row["most"]) for row in rows]


def _clock(writer: str, ahead: int | None, least: int, most: int) -> WriterClock:
    return WriterClock(writer, least / 1000, most / 1000) if ahead is None else WriterClock(writer, ahead / 1000)


def as_rows(spark: SparkSession, clocks: Sequence[WriterClock]) -> DataFrame:
    """Returns the argument `off` of `corrected` for the result of `named`."""
    # The name of a writer ends with the first part of its ids.
    rows = [(one.writer[-16:], None if one.was_set else round(one.least * 1000)) for one in clocks]
    return spark.createDataFrame(rows, "writer string, ahead long")
