"""What all jobs find in the tables, as plain values for one page: few of them, however much the ledger holds.

What is too much to show is left out here, worst first to stay, with the number of what there is. How it is shown is not
decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.money import Prices, Scenario, StageSpending
from twinbus.pipeline import latency, series
from twinbus.pipeline.asking import asking
from twinbus.pipeline.jobs import JOBS, history, incomplete, so_far
from twinbus.pipeline.reconcile import JUDGED, LISTED
from twinbus.pipeline.spending import Seen
from twinbus.pipeline.tables import Tables, Version
from twinbus.pipeline.window import Window

BUCKETS: Final = 240
INCIDENTS: Final = 200
ENTITIES: Final = 25
IDS: Final = 100
REASONS: Final = 25
DAYS: Final = 50
RATES: Final = ("direct", "diverted", "returned", "failed")

Values = Mapping[str, Any]
"""A row of a result, by column."""
_WORST: Final = ("lost", "unknown", "duplicated", "dead_lettered", "in_backlog", "accepted")


@dataclass(frozen=True, slots=True)
class Some:
    """The first rows, and how many there are."""

    rows: Sequence[Values]
    total: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Buckets of `width` milliseconds from `start` on, one number of each in every list of `counts`.

    `waiting`: how many diverted messages had not come home when the bucket ended.
    """

    start: int
    width: int
    counts: Mapping[str, Sequence[int]]
    waiting: Sequence[int]


@dataclass(frozen=True, slots=True)
class Overview:
    """`listed`: of each word of the balance that is listed, the messages. `timeline`: None where nothing happened."""

    sums: Mapping[str, int]
    listed: Mapping[str, Some]
    incomplete: Some
    incidents: Some
    entities: Some
    timeline: Timeline | None
    spread: Values
    latency: Some
    spent: Sequence[StageSpending]


def overview(tables: Tables, prices: Prices, scenario: Scenario, window: Window | None = None) -> Overview:
    """All of it, of the whole ledger or of a window. Of the scenario, tier and bandwidth are used."""
    window, version = window or Window(), tables.version()
    open_first = F.desc(F.col("began").isNotNull() & F.col("restored").isNull())
    with asking(tables) as pool:
        balance = pool.submit(_balance, tables, window)
        over_time = pool.submit(_over_time, tables, version, window)
        incidents = pool.submit(
            _found, tables, "incidents", window, INCIDENTS, open_first, F.desc("diverted"), F.col("began")
        )
        spread = pool.submit(_spread, tables, version, window)
        days = pool.submit(_found, tables, "latency", window, DAYS, F.desc("diverted"), F.col("day"))
        reasons = pool.submit(_reasons, tables)
        spent = pool.submit(Seen, tables, window, outages=False)
        sums, listed, entities = balance.result()
        return Overview(
            sums,
            listed,
            reasons.result(),
            incidents.result(),
            entities,
            over_time.result(),
            spread.result(),
            days.result(),
            spent.result().spent(prices, scenario),
        )


def _found(tables: Tables, job: str, window: Window, most: int, *order: Column) -> Some:
    return _some(so_far(tables, JOBS[job], window), most, *order)


def _reasons(tables: Tables) -> Some:
    reasons = sorted(incomplete(tables))
    return Some([{"reason": reason} for reason in reasons[:REASONS]], len(reasons))


def _spread(tables: Tables, version: Version, window: Window) -> Values:
    told = history(tables, version, window.days_onward())
    found = latency.spread(latency.tally(*told), window).first()
    assert found is not None, "an aggregate without keys has a row"
    return found.asDict()


def _over_time(tables: Tables, version: Version, window: Window) -> Timeline | None:
    # How deep the backlog was at the window's beginning is told before it; when messages came home, also after it.
    return timeline(*history(tables, version, Window(until=window.until).days()), window)


def _some(rows: DataFrame, most: int, *order: Column) -> Some:
    all_of_them = Over.partitionBy(F.lit(0))
    counted = rows.withColumn("total", F.count(F.lit(1)).over(all_of_them))
    kept = [row.asDict() for row in counted.orderBy(*order, "destination").limit(most).collect()]
    return Some(kept, kept[0]["total"] if kept else 0)


def _balance(tables: Tables, window: Window) -> tuple[dict[str, int], dict[str, Some], Some]:
    rows = so_far(tables, JOBS["reconcile"], window).persist()
    try:
        by_entity = rows.groupBy("destination").agg(*(F.sum(name).alias(name) for name in JUDGED))
        return *_judged(rows), _some(by_entity, ENTITIES, *map(F.desc, _WORST))
    finally:
        rows.unpersist()


def _judged(rows: DataFrame) -> tuple[dict[str, int], dict[str, Some]]:
    named = {name: F.col("id").isNotNull() & (F.col(name) != 0) for name in LISTED}
    sums = [F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in JUDGED]
    counts = [F.count(F.when(is_named, 1)).alias(f"listed_{name}") for name, is_named in named.items()]
    found = rows.agg(*sums, *counts).first()
    assert found is not None, "an aggregate without keys has a row"
    total = {name: found[f"listed_{name}"] for name in LISTED}
    wanted = [
        rows.where(named[name])
        .orderBy("destination", "id")
        .limit(IDS)
        .select(F.lit(name).alias("word"), "destination", "id", F.col(name).alias("count"))
        for name in LISTED
        if total[name]
    ]
    messages = [row.asDict() for row in reduce(DataFrame.unionAll, wanted).collect()] if wanted else []
    listed = {name: Some([row for row in messages if row["word"] == name], total[name]) for name in LISTED}
    return {name: found[name] for name in JUDGED}, listed


def timeline(operations: DataFrame, entries: DataFrame, window: Window) -> Timeline | None:
    """Of all destinations together. Operations and entries are those from the beginning on."""
    extent = series.extent(operations, entries, window).first()
    if extent is None or extent["first"] is None:
        return None
    first, last = extent["first"], extent["last"]
    width = series.width_for(first, last, BUCKETS)
    found = series.series(operations, entries, width, first, last)
    sums = [F.sum(name).alias(name) for name in series.COUNTS]
    by_bucket = {row.bucket: row for row in found.groupBy("bucket").agg(*sums).collect()}
    start = first - first % width
    buckets = range(start, last + 1, width)
    counts = {
        name: [by_bucket[bucket][name] if bucket in by_bucket else 0 for bucket in buckets] for name in series.COUNTS
    }
    before = by_bucket.get(start - width)
    waiting = accumulate(
        (came - left for came, left in zip(counts["came"], counts["left"], strict=True)),
        initial=before.came - before.left if before else 0,
    )
    return Timeline(start, width, {name: counts[name] for name in RATES}, list(waiting)[1:])
