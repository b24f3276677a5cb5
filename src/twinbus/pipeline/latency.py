"""The job `latency`: the time from the arrival of a message in the backlog to its return to the primary.

Both times are by the broker's clock, which the syphon writes with each return (L5). The returns that an older Twinbus
wrote, and messages that were resubmitted meanwhile, are measured by the clocks of two writers. These are corrected if
their differences from the broker's clock are known. If such a return seems to be earlier than its diversion, its
latency is unknown.

If a message id was diverted several times, the first diversion is paired with the first return, the second diversion
with the second return, and so on. A redirect counts as a return for the old entity and as a diversion for the new
entity.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import OK, Move, Movement, Stage
from twinbus.pipeline.clocks import corrected, off_clocks, writer_of
from twinbus.pipeline.reconcile import concerned
from twinbus.pipeline.report_data import LATENCY_EDGES
from twinbus.pipeline.result_tables import LATENCY_SHARES
from twinbus.pipeline.time_window import TimeWindow, hour_of

TALLIES: Final = (
    "destination string, id string, writer string, diverted long, home long, sent long, arrived long, returned long, "
    "resubmitted int"
)
RESULT: Final = (
    "destination string, day date, diverted long, returned long, mean double, least double, "
    + ", ".join(f"{name} double" for name in LATENCY_SHARES)
    + ", most double, unknown_clock long"
)
STORED: Final = (
    "destination string, hour long, day date, diverted long, returned long, unknown_clock long, total long, "
    "milliseconds array<long>, counts array<long>"
)
# An hour of a destination with more different latencies than this keeps them rounded to 13 binary digits.
MOST_VALUES: Final = 65_536
_DIGITS: Final = 13


def tally(operations: DataFrame, entries: DataFrame) -> DataFrame:
    """Returns one row per diversion, return and resubmission of a message, with its time in milliseconds.

    `diverted` and `home` are the end of an operation, and `sent` its beginning, by the clock of the writer. `arrived`
    and `returned` are by the broker's clock: the arrival in the backlog, and the end of the return.
    """
    diverted, home = F.col("stage") == str(Stage.SEND_BACKLOG), F.col("stage") == str(Stage.RETURN_PRIMARY)
    resubmitted = F.col("stage") == str(Stage.RESUBMIT_BACKLOG)
    rows = operations.where(diverted | home | resubmitted).select("*", F.posexplode("ids").alias("place", "message"))
    rows = rows.where((F.col("result") == OK) | ~concerned("message"))
    done = _rows(
        rows,
        F.col("destination"),
        F.when(diverted, F.col("ended")),
        F.when(home, F.col("ended")),
        F.when(diverted, F.col("at")),
        F.when(home, F.col("broker_at") - F.get("waited", F.col("place"))),
        F.when(home, F.col("broker_at") + F.round(F.col("seconds") * 1000).cast("long")),
        F.when(resubmitted, 1),
    )
    moves = entries.where((F.col("kind") == Movement.kind) & (F.col("move") == str(Move.REDIRECTED)))
    moves = moves.select("*", F.explode("ids").alias("message"))
    never = F.lit(None).cast("long")
    left = _rows(moves, F.lower("source"), never, F.col("at"))
    # Its resubmission is the diversion for the new entity.
    came = _rows(moves, F.lower("destination"), F.col("at"), never, F.col("at"), resubmitted=F.lit(-1))
    return done.unionAll(left).unionAll(came)


def _rows(
    rows: DataFrame,
    destination: Column,
    diverted: Column,
    home: Column,
    sent: Column | None = None,
    arrived: Column | None = None,
    returned: Column | None = None,
    resubmitted: Column | None = None,
) -> DataFrame:
    times = {"diverted": diverted, "home": home, "sent": sent, "arrived": arrived, "returned": returned}
    return rows.select(
        destination.alias("destination"),
        F.col("message").alias("id"),
        writer_of().alias("writer"),
        *((F.lit(None) if time is None else time).cast("long").alias(name) for name, time in times.items()),
        (F.lit(None) if resubmitted is None else resubmitted).cast("int").alias("resubmitted"),
    )


def merge(tallies: DataFrame) -> DataFrame:
    """Returns the tallies unchanged: `waits` needs the time of each diversion and return."""
    return tallies


def waits(tallies: DataFrame) -> DataFrame:
    """Returns one row per diversion. `home` is the time of the return; null if the message has not returned.

    `home` is by the broker's clock if that is known. `arrived` is the arrival of the diverted message by the broker's
    clock; null if it is not known, or if the message that returned is a resubmitted one.
    """
    home = F.struct(F.coalesce("returned", "home").alias("home"), "arrived")
    both = tallies.groupBy("destination", "id").agg(
        F.sort_array(F.collect_list("diverted")).alias("diverted"),
        F.sort_array(F.collect_list(F.when(F.col("home").isNotNull(), home))).alias("home"),
        F.sum(F.coalesce("resubmitted", F.lit(0))).alias("resubmitted"),
    )
    both = both.where(F.size("diverted") > 0)
    paired = F.arrays_zip("diverted", F.expr("slice(home, 1, size(diverted))").alias("home"))
    rows = both.select("destination", "id", "resubmitted", F.explode(paired).alias("pair"))
    return rows.select(
        "destination",
        "id",
        F.col("pair.diverted").alias("diverted"),
        F.col("pair.home.home").alias("home"),
        F.when(F.col("resubmitted") <= 0, F.col("pair.home.arrived")).alias("arrived"),
    )


def with_right_clocks(tallies: DataFrame) -> DataFrame:
    """Returns the tallies with the times of the writers by the broker's clock, if a latency depends on these times."""
    by_writers = (F.col("home").isNotNull() & F.col("arrived").isNull()) | (F.col("resubmitted") > 0)
    if tallies.where(by_writers).isEmpty():
        return tallies
    return corrected(tallies, off_clocks(tallies), "diverted", "home", "sent")


def summarize(tallies: DataFrame, window: TimeWindow, newest: int) -> DataFrame:
    """Returns the distribution of the latency in seconds, by destination and by day of the diversion."""
    rows = _with_seconds(tallies, window).withColumn("day", F.to_date(F.timestamp_millis("diverted")))
    return rows.groupBy("destination", "day").agg(*_distribution())


def spread(tallies: DataFrame, window: TimeWindow) -> DataFrame:
    """Returns one row for all destinations and days together: the distribution of the latency, and a histogram.

    The histogram is the column `counts`: one number for each of the LATENCY_EDGES, and one for messages above the last
    edge.
    """
    rows = _with_seconds(tallies, window)
    seconds, lower = F.col("seconds"), None
    counts = []
    for edge in (*LATENCY_EDGES, None):
        inside = F.lit(True) if edge is None else seconds <= edge
        inside = inside if lower is None else inside & (seconds > lower)
        counts.append(F.count(F.when(seconds.isNotNull() & inside, 1)))
        lower = edge
    return rows.agg(*_distribution(), F.array(*counts).alias("counts"))


def stored(tallies: DataFrame, newest: int, most_values: int = MOST_VALUES) -> DataFrame:
    """Returns a histogram of the latencies by destination and by hour of the diversion. Histograms can be merged.

    `milliseconds` has the different latencies in order, and `counts` how often each of them occurs. `total` is the sum
    of all latencies.
    """
    rows = _with_seconds(tallies, TimeWindow()).withColumn("hour", hour_of("diverted"))
    latency = F.when(F.col("seconds").isNotNull(), F.col("home") - F.col("diverted"))
    unknown = F.col("home").isNotNull() & F.col("seconds").isNull()
    by_value = rows.groupBy("destination", "hour", latency.alias("value")).agg(
        F.count("*").alias("diverted"), F.count("home").alias("returned"), F.count(F.when(unknown, 1)).alias("unknown")
    )
    number = F.count("value").over(Over.partitionBy("destination", "hour"))
    by_value = by_value.withColumns({"total": F.col("value") * F.col("returned"), "number": number})
    by_value = by_value.withColumn(
        "value", F.when(F.col("number") <= most_values, F.col("value")).otherwise(_rounded())
    )
    by_value = by_value.groupBy("destination", "hour", "value").agg(
        *(F.sum(name).alias(name) for name in ("diverted", "returned", "unknown", "total"))
    )
    # Null for messages without a latency: an array leaves it out.
    bar = F.when(F.col("value").isNotNull(), F.struct("value", F.col("returned").alias("count")))
    hours = by_value.groupBy("destination", "hour").agg(
        F.sum("diverted").alias("diverted"),
        F.sum("returned").alias("returned"),
        F.sum("unknown").alias("unknown_clock"),
        F.coalesce(F.sum("total"), F.lit(0)).alias("total"),
        F.sort_array(F.collect_list(bar)).alias("bars"),
    )
    return hours.select(
        "destination",
        "hour",
        F.to_date(F.timestamp_millis("hour")).alias("day"),
        "diverted",
        "returned",
        "unknown_clock",
        "total",
        F.col("bars.value").alias("milliseconds"),
        F.col("bars.count").alias("counts"),
    )


def _rounded() -> Column:
    """Returns the middle of the values that have the same first binary digits as `value`."""
    step = f"greatest(0, length(bin(value)) - {_DIGITS})"
    return F.expr(f"shiftleft(shiftright(value, {step}), {step}) + shiftleft(1L, {step}) div 2")


def _with_seconds(tallies: DataFrame, window: TimeWindow) -> DataFrame:
    rows = waits(with_right_clocks(tallies)).withColumn("diverted", F.coalesce("arrived", "diverted"))
    seconds = (F.col("home") - F.col("diverted")) / 1000
    return rows.where(window.contains(F.col("diverted"))).withColumn("seconds", F.when(seconds >= 0, seconds))


def _distribution() -> list[Column]:
    return [
        F.count("*").alias("diverted"),
        F.count("home").alias("returned"),
        F.avg("seconds").alias("mean"),
        F.min("seconds").alias("least"),
        *(F.percentile("seconds", F.lit(share)).alias(name) for name, share in LATENCY_SHARES.items()),
        F.max("seconds").alias("most"),
        F.count(F.when(F.col("home").isNotNull() & F.col("seconds").isNull(), 1)).alias("unknown_clock"),
    ]
