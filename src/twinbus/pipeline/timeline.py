"""Message counts per time bucket, and the depth of the backlog over time: the data of the report's timeline."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import OK, Stage, State
from twinbus.pipeline import latency
from twinbus.pipeline.incidents import ENGAGED, RESTORED
from twinbus.pipeline.reconcile import concerned
from twinbus.pipeline.report_data import BUCKET_WIDTHS, Timeline
from twinbus.pipeline.time_window import TimeWindow

_DIRECT: Final = (str(Stage.SEND_PRIMARY), str(Stage.SCHEDULE_PRIMARY))
_SENT: Final = (*_DIRECT, str(Stage.SEND_BACKLOG), str(Stage.RETURN_PRIMARY))
BUCKETS: Final = 240
RATES: Final = ("direct", "diverted", "returned", "failed")
COUNTS: Final = ("direct", "diverted", "returned", "failed", "came", "left")
RESULT: Final = "destination string, bucket long, " + ", ".join(f"{name} long" for name in COUNTS)


def build_timeline(operations: DataFrame, entries: DataFrame, window: TimeWindow) -> Timeline | None:
    """Returns the timeline of all destinations together; None if nothing happened in the window.

    `operations` and `entries` must begin at the beginning of the ledger.
    """
    span = extent(operations, entries, window).first()
    if span is None or span["first"] is None:
        return None
    first, last = span["first"], span["last"]
    width = width_for(first, last, BUCKETS)
    found = count_buckets(operations, entries, width, first, last)
    sums = [F.sum(name).alias(name) for name in COUNTS]
    by_bucket = {row.bucket: row for row in found.groupBy("bucket").agg(*sums).collect()}
    start = first - first % width
    buckets = range(start, last + 1, width)
    counts = {name: [by_bucket[bucket][name] if bucket in by_bucket else 0 for bucket in buckets] for name in COUNTS}
    before = by_bucket.get(start - width)
    waiting = accumulate(
        (came - left for came, left in zip(counts["came"], counts["left"], strict=True)),
        initial=before.came - before.left if before else 0,
    )
    return Timeline(start, width, {name: counts[name] for name in RATES}, list(waiting)[1:])


def extent(operations: DataFrame, entries: DataFrame, window: TimeWindow) -> DataFrame:
    """Returns one row: the `first` and `last` time in the window of a send, a failover or a restore."""
    events = entries.where((F.col("kind") == State.kind) & F.col("event").isin(ENGAGED, RESTORED)).select("at")
    sends = operations.where(F.col("stage").isin(*_SENT)).select(_ended().alias("at"))
    instants = events.unionAll(sends).where(window.contains(F.col("at")))
    return instants.agg(F.min("at").alias("first"), F.max("at").alias("last"))


def width_for(first: int, last: int, most: int) -> int:
    """Returns the smallest bucket width with which at most `most` buckets cover both times."""
    return next(width for width in _widths() if last // width - first // width < most)


def _widths() -> tuple[int, ...]:
    longest = BUCKET_WIDTHS[-1]
    return (*BUCKET_WIDTHS, *(longest * 10**power for power in range(1, 12)))


def count_buckets(operations: DataFrame, entries: DataFrame, width: int, first: int, last: int) -> DataFrame:
    """Returns counts by destination and bucket, for buckets that have any. `bucket` is the start of the bucket.

    `direct`, `diverted` and `returned` count accepted messages; `failed` counts tries to send a message that failed or
    whose result is unknown. `came` and `left` are the changes of the backlog's depth: messages that were diverted, and
    diverted messages that returned. An extra bucket before that of `first` has all earlier changes of the depth. The
    last bucket contains `last`.
    """
    rows = _sends(operations).unionAll(_depth(operations, entries))
    start = F.lit(first - first % width)
    bucket = F.greatest(F.expr(f"at - pmod(at, {width}L)"), start - width)
    rows = rows.withColumn("bucket", bucket).where(F.col("bucket") <= last - last % width)
    rows = rows.where((F.col("bucket") >= start) | F.col("name").isin("came", "left"))
    counts = [F.count(F.when(F.col("name") == name, 1)).alias(name) for name in COUNTS]
    return rows.groupBy("destination", "bucket").agg(*counts)


def _sends(operations: DataFrame) -> DataFrame:
    rows = operations.where(F.col("stage").isin(*_SENT))
    ids = rows.select(
        "destination",
        "stage",
        "result",
        _ended().alias("at"),
        "ids",
        "failed",
        F.posexplode("ids").alias("place", "id"),
    )
    succeeded = (F.col("result") == OK) | ~concerned()
    direct, diverted = F.col("stage").isin(*_DIRECT), F.col("stage") == str(Stage.SEND_BACKLOG)
    name = (
        F.when(~succeeded, F.lit("failed"))
        .when(direct, F.lit("direct"))
        .when(diverted, F.lit("diverted"))
        .otherwise(F.lit("returned"))
    )
    return ids.select("destination", "at", name.alias("name"))


def _depth(operations: DataFrame, entries: DataFrame) -> DataFrame:
    waits = latency.waits(latency.tally(operations, entries))
    waits = waits.withColumn("diverted", F.coalesce("arrived", "diverted"))
    came = waits.select("destination", F.col("diverted").alias("at"), F.lit("came").alias("name"))
    # In the ledger of an older Twinbus the times are of two clocks. No message leaves the backlog before its diversion.
    home = F.greatest("diverted", "home").alias("at")
    return came.unionAll(waits.where("home is not null").select("destination", home, F.lit("left").alias("name")))


def _ended() -> Column:
    """Returns the time at which an operation ended; if it has no outcome, the time at which it began."""
    return F.coalesce("ended", "at")
