"""Message counts per time bucket, and the depth of the backlog over time: the data of the report's timeline."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import OK, Stage, State
from twinbus.pipeline import latency
from twinbus.pipeline.incidents import ENGAGED, RESTORED
from twinbus.pipeline.reconcile import concerned
from twinbus.pipeline.report_data import Timeline
from twinbus.pipeline.time_window import TimeWindow, hour_of
from twinbus.pipeline.timeline_buckets import BUCKETS, COUNTS, timeline_of, width_for

_DIRECT: Final = (str(Stage.SEND_PRIMARY), str(Stage.SCHEDULE_PRIMARY))
_SENT: Final = (*_DIRECT, str(Stage.SEND_BACKLOG), str(Stage.RETURN_PRIMARY))
RESULT: Final = "destination string, bucket long, " + ", ".join(f"{name} long" for name in COUNTS)
STORED: Final = "bucket long, first long, last long, " + ", ".join(f"{name} long" for name in COUNTS)
# A stored bucket must lie within one bucket of any width that a window with its hour can have. So its width divides
# that of the hour alone, and all larger ones. An hour alone has at most the last width.
STORED_WIDTHS: Final = {1000: 1000, 2000: 1000, 5000: 5000, 10_000: 5000, 15_000: 15_000}
_INSTANT: Final = "instant"


def build_timeline(operations: DataFrame, entries: DataFrame, window: TimeWindow) -> Timeline | None:
    """Returns the timeline of all destinations together; None if nothing happened in the window.

    `operations` and `entries` must begin at the beginning of the ledger.
    """
    span = extent(operations, entries, window).first()
    if span is None or span["first"] is None:
        return None
    first, last = span["first"], span["last"]
    width = width_for(first, last, BUCKETS)
    found = count_buckets(operations, entries, width, first, last, window)
    sums = [F.sum(name).alias(name) for name in COUNTS]
    by_bucket = {row.bucket: row.asDict() for row in found.groupBy("bucket").agg(*sums).collect()}
    return timeline_of(by_bucket, first, last, width)


def extent(operations: DataFrame, entries: DataFrame, window: TimeWindow) -> DataFrame:
    """Returns one row: the `first` and `last` time in the window of a send, a failover or a restore."""
    instants = _instants(operations, entries).where(window.contains(F.col("at")))
    return instants.agg(F.min("at").alias("first"), F.max("at").alias("last"))


def _instants(operations: DataFrame, entries: DataFrame) -> DataFrame:
    """Returns the times of sends, failovers and restores."""
    events = entries.where((F.col("kind") == State.kind) & F.col("event").isin(ENGAGED, RESTORED)).select("at")
    return events.unionAll(operations.where(F.col("stage").isin(*_SENT)).select(_ended().alias("at")))


def stored(operations: DataFrame, entries: DataFrame) -> DataFrame:
    """Returns counts by bucket for all time, from which `twinbus.answers` makes the timeline of any whole hours.

    The columns of counts are those of `count_buckets`. `first` and `last` are those of `extent`, in the bucket; null if
    the bucket has only changes of the depth. The buckets of an hour are as narrow as a timeline of this hour needs.
    """
    instants = _instants(operations, entries).withColumn("name", F.lit(_INSTANT))
    counted = _sends(operations).unionAll(_depth(operations, entries)).select("at", "name")
    rows = instants.unionAll(counted).withColumn("hour", hour_of("at"))
    spans = rows.where(F.col("name") == _INSTANT).groupBy("hour").agg(F.min("at").alias("low"), F.max("at").alias("up"))
    fits = [f"when up div {width} - low div {width} < {BUCKETS} then {base}L" for width, base in STORED_WIDTHS.items()]
    width = F.expr(f"case {' '.join(fits)} end").alias("width")
    joined = rows.join(F.broadcast(spans.select("hour", width)), "hour", "left").withColumn(
        "width", F.coalesce("width", F.lit(max(STORED_WIDTHS)))
    )
    at = F.when(F.col("name") == _INSTANT, F.col("at"))
    counts = [F.count(F.when(F.col("name") == name, 1)).alias(name) for name in COUNTS]
    return joined.groupBy(F.expr("at - pmod(at, width)").alias("bucket")).agg(
        F.min(at).alias("first"), F.max(at).alias("last"), *counts
    )


def count_buckets(
    operations: DataFrame, entries: DataFrame, width: int, first: int, last: int, window: TimeWindow | None = None
) -> DataFrame:
    """Returns counts by destination and bucket, for buckets that have any. `bucket` is the start of the bucket.

    `direct`, `diverted` and `returned` count accepted messages; `failed` counts tries to send a message that failed or
    whose result is unknown. `came` and `left` are the changes of the backlog's depth: messages that were diverted, and
    diverted messages that returned. The first bucket contains `first`, the last one `last`. Both may be longer than the
    part of them that is in the window, and count only this part. An extra bucket before the first one has all earlier
    changes of the depth.
    """
    since, until = (window or TimeWindow()).milliseconds()
    rows = _sends(operations).unionAll(_depth(operations, entries)).where(F.col("at") < until)
    start = F.lit(first - first % width)
    is_inside = F.col("at") >= since
    bucket = F.when(is_inside, F.greatest(F.expr(f"at - pmod(at, {width}L)"), start - width)).otherwise(start - width)
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
