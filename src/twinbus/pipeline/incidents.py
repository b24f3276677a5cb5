"""The job `incidents`: failovers by entity, with begin, restore, diverted messages and the end of the drain.

Each process fails over and restores independently. Failovers of one entity that overlap in time are one incident. Times
of a writer whose clock differs from the broker's are corrected before they are compared (L5).
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import State
from twinbus.pipeline import latency
from twinbus.pipeline.clocks import corrected, off_clocks
from twinbus.pipeline.time_window import TimeWindow

ENGAGED: Final = "failover_engaged"
RESTORED: Final = "restored"
TALLIES: Final = f"{latency.TALLIES}, event string, at long, episode long, cause string"
RESULT: Final = (
    "destination string, began long, restored long, drained long, cause string, processes long, diverted long, "
    "returned long, seconds_to_restore double, seconds_to_drain double"
)
STORED: Final = f"at long, {RESULT}"
_NEVER: Final = 2**62
_PROCESS: Final = ("destination", "writer", "episode")


def tally(operations: DataFrame, entries: DataFrame) -> DataFrame:
    """Returns one row for each diverted message, each returned message, and each failover and restore of a process."""
    messages = latency.tally(operations, entries)
    for name, kind in {"event": "string", "at": "long", "episode": "long", "cause": "string"}.items():
        messages = messages.withColumn(name, F.lit(None).cast(kind))
    states = entries.where((F.col("kind") == State.kind) & F.col("event").isin(ENGAGED, RESTORED))
    events = states.select(
        F.lower(F.concat_ws("/", "pair", F.col("facts")["entity"])).alias("destination"),
        F.lit(None).cast("string").alias("id"),
        F.substring("id", 1, 16).alias("writer"),
        *(F.lit(None).cast("long").alias(name) for name in ("diverted", "home", "sent", "arrived", "returned")),
        F.lit(None).cast("int").alias("resubmitted"),
        "event",
        "at",
        F.try_to_number(F.col("facts")["episode"], F.lit("9999999999")).cast("long").alias("episode"),
        F.col("facts")["cause"].alias("cause"),
    )
    return messages.unionAll(events)


def of_messages(tallies: DataFrame) -> DataFrame:
    """Returns the tallies of the job `latency`: those of messages, without those of events."""
    return tallies.where("event is null").drop("event", "at", "episode", "cause")


def merge(tallies: DataFrame) -> DataFrame:
    """Returns the tallies unchanged: `summarize` needs the time of each event."""
    return tallies


def summarize(tallies: DataFrame, window: TimeWindow, newest: int) -> DataFrame:
    """Returns the incidents that began in the window.

    For diversions outside of any failover, each destination has one more row, in which `began` is null.
    """
    return stored(tallies, newest).where(window.contains(F.col("at"))).drop("at")


def stored(tallies: DataFrame, newest: int) -> DataFrame:
    """Returns all incidents. `at` is when the incident began; without a failover, when the first message was diverted.

    A time window has the incidents whose `at` is in it.
    """
    off = off_clocks(of_messages(tallies))
    if not off.isEmpty():  # without this, Spark would compute `off` for each use of the tallies
        tallies = corrected(tallies, off, "diverted", "home", "sent", "at")
    found = merge_overlapping(failovers(tallies))
    spans = found.select(F.col("destination").alias("of"), F.col("began").alias("during"), "next")
    within = (F.col("destination") == F.col("of")) & F.col("diverted").between(F.col("during"), F.col("next") - 1)
    messages = latency.waits(tallies.where("event is null")).join(F.broadcast(spans), within, "left")
    counted = messages.groupBy(F.col("destination").alias("of"), "during").agg(
        F.count("*").alias("diverted"),
        F.count("home").alias("returned"),
        F.max("home").alias("home"),
        F.min("diverted").alias("first"),
    )
    same = (F.col("destination") == F.col("of")) & (F.col("began") == F.col("during"))
    rows = found.join(counted, same, "full_outer")
    rows = rows.withColumn("drained", F.when(F.col("diverted") == F.col("returned"), F.col("home")))
    return rows.select(
        F.coalesce("began", "first").alias("at"),
        F.coalesce("destination", "of").alias("destination"),
        "began",
        "restored",
        "drained",
        "cause",
        *(F.coalesce(name, F.lit(0)).cast("long").alias(name) for name in ("processes", "diverted", "returned")),
        ((F.col("restored") - F.col("began")) / 1000).alias("seconds_to_restore"),
        # A syphon may finish before the ping that restores the entity.
        (F.when(F.col("drained").isNotNull(), F.greatest("drained", "restored") - F.col("restored")) / 1000).alias(
            "seconds_to_drain"
        ),
    )


def failovers(tallies: DataFrame) -> DataFrame:
    """Returns the failovers of each process and entity.

    A failover ends with the restore. If there is none, it ends with the last message that the process diverted.
    """
    engaged = F.when(F.col("event") == ENGAGED, F.col("at"))
    found = (
        tallies.where("event is not null")
        .groupBy(*_PROCESS)
        .agg(
            F.min(engaged).alias("began"),
            F.max(F.when(F.col("event") == RESTORED, F.col("at"))).alias("restored"),
            F.min_by("cause", engaged).alias("cause"),
        )
    )
    following = F.lead("began").over(Over.partitionBy("destination", "writer").orderBy("began"))
    found = found.where("began is not null").withColumn("next", F.coalesce(following, F.lit(_NEVER)))
    own = tallies.where("diverted is not null").select(
        F.col("destination").alias("of"), F.col("writer").alias("by"), "diverted"
    )
    during = F.col("diverted").between(F.col("began"), F.col("next") - 1)
    mine = (F.col("destination") == F.col("of")) & (F.col("writer") == F.col("by")) & during
    joined = found.join(own, mine & F.col("restored").isNull(), "left")
    return joined.groupBy(*_PROCESS, "began", "restored", "cause").agg(
        F.coalesce("restored", F.max("diverted"), "began").alias("ended")
    )


def merge_overlapping(failovers: DataFrame) -> DataFrame:
    """Merges failovers of one entity that overlap in time. The column `next` is when the following incident began."""
    order = Over.partitionBy("destination").orderBy("began", "ended", "writer")
    so_far = F.max("ended").over(order.rowsBetween(Over.unboundedPreceding, -1))
    begins = F.coalesce(F.col("began") > so_far, F.lit(True)).cast("int")
    numbered = failovers.withColumn("begins", begins).withColumn("number", F.sum("begins").over(order))
    # The failover with the latest end decides whether the incident has ended. A process that died records no restore.
    last = F.struct("ended", F.col("restored").isNull())
    found = numbered.groupBy("destination", "number").agg(
        F.min("began").alias("began"),
        F.max_by("restored", last).alias("restored"),
        F.min_by("cause", F.struct("began", "writer")).alias("cause"),
        F.countDistinct("writer").alias("processes"),
    )
    following = F.lead("began").over(Over.partitionBy("destination").orderBy("began"))
    return found.withColumn("next", F.coalesce(following, F.lit(_NEVER)))
