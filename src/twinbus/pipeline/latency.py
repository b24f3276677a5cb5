"""The job `latency`: the time from the acceptance of a message in the backlog to its return to the primary.

If a message id was diverted several times, the first diversion is paired with the first return, the second diversion
with the second return, and so on. A redirect counts as a return for the old entity and as a diversion for the new
entity.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import OK, Move, Movement, Stage
from twinbus.pipeline.reconcile import concerned
from twinbus.pipeline.report_data import LATENCY_EDGES
from twinbus.pipeline.time_window import TimeWindow

TALLIES: Final = "destination string, id string, writer string, diverted long, home long"
SHARES: Final = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99}
RESULT: Final = (
    "destination string, day date, diverted long, returned long, mean double, least double, "
    + ", ".join(f"{name} double" for name in SHARES)
    + ", most double"
)


def tally(operations: DataFrame, entries: DataFrame) -> DataFrame:
    """Returns one row per diversion and per return of a message, with its time in milliseconds."""
    diverted, home = F.col("stage") == str(Stage.SEND_BACKLOG), F.col("stage") == str(Stage.RETURN_PRIMARY)
    rows = operations.where(diverted | home).select("*", F.posexplode("ids").alias("place", "message"))
    rows = rows.where((F.col("result") == OK) | ~concerned("message"))
    done = _rows(rows, F.col("destination"), F.when(diverted, F.col("ended")), F.when(home, F.col("ended")))
    moves = entries.where((F.col("kind") == Movement.kind) & (F.col("move") == str(Move.REDIRECTED)))
    moves = moves.select("*", F.explode("ids").alias("message"))
    never = F.lit(None).cast("long")
    left = _rows(moves, F.lower("source"), never, F.col("at"))
    came = _rows(moves, F.lower("destination"), F.col("at"), never)
    return done.unionAll(left).unionAll(came)


def _rows(rows: DataFrame, destination: Column, diverted: Column, home: Column) -> DataFrame:
    return rows.select(
        destination.alias("destination"),
        F.col("message").alias("id"),
        F.substring("id", 1, 16).alias("writer"),
        diverted.alias("diverted"),
        home.alias("home"),
    )


def merge(tallies: DataFrame) -> DataFrame:
    """Returns the tallies unchanged: `waits` needs the time of each diversion and return."""
    return tallies


def waits(tallies: DataFrame) -> DataFrame:
    """Returns one row per diversion. `home` is the time of the return; null if the message has not returned."""
    both = tallies.groupBy("destination", "id").agg(
        F.sort_array(F.collect_list("diverted")).alias("diverted"), F.sort_array(F.collect_list("home")).alias("home")
    )
    both = both.where(F.size("diverted") > 0)
    paired = F.arrays_zip("diverted", F.expr("slice(home, 1, size(diverted))").alias("home"))
    rows = both.select("destination", "id", F.explode(paired).alias("pair"))
    return rows.select("destination", "id", F.col("pair.diverted").alias("diverted"), F.col("pair.home").alias("home"))


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


def _with_seconds(tallies: DataFrame, window: TimeWindow) -> DataFrame:
    rows = waits(tallies).where(window.contains(F.col("diverted")))
    return rows.withColumn("seconds", (F.col("home") - F.col("diverted")) / 1000)


def _distribution() -> list[Column]:
    return [
        F.count("*").alias("diverted"),
        F.count("home").alias("returned"),
        F.avg("seconds").alias("mean"),
        F.min("seconds").alias("least"),
        *(F.percentile("seconds", F.lit(share)).alias(name) for name, share in SHARES.items()),
        F.max("seconds").alias("most"),
    ]
