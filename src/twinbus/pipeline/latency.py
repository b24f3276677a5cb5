"""How long diverted messages were on their way: from their acceptance in the backlog to their return to the primary.

An id that was diverted several times is paired in order: the first diversion with the first return. A message that was
redirected has left the one entity, and was diverted for the other, at that instant.
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
    """A row for each time that a message went into the backlog or came home, with the instant, in milliseconds."""
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
    """Nothing is lost of an instant: all of them are kept."""
    return tallies


def waits(tallies: DataFrame) -> DataFrame:
    """A row for each diversion: `home` is null while the message has not come home."""
    both = tallies.groupBy("destination", "id").agg(
        F.sort_array(F.collect_list("diverted")).alias("diverted"), F.sort_array(F.collect_list("home")).alias("home")
    )
    both = both.where(F.size("diverted") > 0)
    paired = F.arrays_zip("diverted", F.expr("slice(home, 1, size(diverted))").alias("home"))
    rows = both.select("destination", "id", F.explode(paired).alias("pair"))
    return rows.select("destination", "id", F.col("pair.diverted").alias("diverted"), F.col("pair.home").alias("home"))


def settle(tallies: DataFrame, window: TimeWindow, newest: int) -> DataFrame:
    """The distribution, in seconds, by destination and day of the diversion."""
    rows = _timed(tallies, window).withColumn("day", F.to_date(F.timestamp_millis("diverted")))
    return rows.groupBy("destination", "day").agg(*_distribution())


def spread(tallies: DataFrame, window: TimeWindow) -> DataFrame:
    """One row, of all destinations and days together: the distribution, and `counts` of those up to each edge.

    `counts` has one number more than there are EDGES: of those beyond the last.
    """
    rows = _timed(tallies, window)
    seconds, lower = F.col("seconds"), None
    counts = []
    for edge in (*LATENCY_EDGES, None):
        inside = F.lit(True) if edge is None else seconds <= edge
        inside = inside if lower is None else inside & (seconds > lower)
        counts.append(F.count(F.when(seconds.isNotNull() & inside, 1)))
        lower = edge
    return rows.agg(*_distribution(), F.array(*counts).alias("counts"))


def _timed(tallies: DataFrame, window: TimeWindow) -> DataFrame:
    rows = waits(tallies).where(window.holds(F.col("diverted")))
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
