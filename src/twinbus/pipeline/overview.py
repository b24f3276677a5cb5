"""What all jobs find in the tables, as plain values for one page: few of them, however much the ledger holds.

What is too much to show is left out here, worst first to stay, with the number of what there is. How it is shown is not
decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.money import Prices, Scenario
from twinbus.money.comparing import Spent
from twinbus.pipeline import latency, series
from twinbus.pipeline.jobs import JOBS, history, incomplete, so_far
from twinbus.pipeline.reconcile import JUDGED, LISTED
from twinbus.pipeline.spending import spent
from twinbus.pipeline.tables import Tables
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
_WORST: Final = ("lost", "unknown", "diverted", "direct")


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
    spent: Sequence[Spent]


def overview(tables: Tables, prices: Prices, scenario: Scenario, window: Window | None = None) -> Overview:
    """All of it, of the whole ledger or of a window. Of the scenario, tier and bandwidth are used."""
    window = window or Window()
    with ExitStack() as done:

        def keep(rows: DataFrame) -> DataFrame:
            done.callback(rows.unpersist)
            return rows.persist()

        balance, incidents, days = (
            keep(so_far(tables, JOBS[name], window)) for name in ("reconcile", "incidents", "latency")
        )
        # How deep the backlog was at the window's beginning is told before it.
        operations, entries = history(tables, tables.version(), Window(until=window.until).days())
        timeline, counts = _over_time(operations, entries, window, keep)
        spread = latency.spread(latency.tally(operations, entries), window).first()
        assert spread is not None, "an aggregate without keys has a row"
        sums, listed = _balance(balance)
        reasons = incomplete(tables)
        open_first = F.desc(F.col("began").isNotNull() & F.col("restored").isNull())
        return Overview(
            sums,
            listed,
            Some([{"reason": reason} for reason in reasons[:REASONS]], len(reasons)),
            _some(incidents, INCIDENTS, open_first, F.desc("diverted"), F.col("began")),
            Some([], 0)
            if counts is None
            else _some(keep(_entities(balance, incidents, counts)), ENTITIES, *map(F.desc, _WORST)),
            timeline,
            spread.asDict(),
            _some(days, DAYS, F.desc("diverted"), F.col("day")),
            spent(tables, prices, scenario, window),
        )


def _some(rows: DataFrame, most: int, *order: Column) -> Some:
    """`rows` is kept, or small."""
    total = rows.count()
    kept = rows.orderBy(*order, "destination").limit(most).collect() if total else ()
    return Some([row.asDict() for row in kept], total)


def _balance(rows: DataFrame) -> tuple[dict[str, int], dict[str, Some]]:
    sums = [F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in JUDGED]
    named = {name: F.col("id").isNotNull() & (F.col(name) != 0) for name in LISTED}
    counts = [F.count(F.when(is_named, 1)).alias(f"listed_{name}") for name, is_named in named.items()]
    found = rows.agg(*sums, *counts).first()
    assert found is not None, "an aggregate without keys has a row"
    said = found.asDict()
    listed = {}
    for name, is_named in named.items():
        some = rows.where(is_named).orderBy("destination", "id").limit(IDS) if said[f"listed_{name}"] else None
        messages = some.select("destination", "id", F.col(name).alias("count")).collect() if some is not None else ()
        listed[name] = Some([row.asDict() for row in messages], said[f"listed_{name}"])
    return {name: said[name] for name in JUDGED}, listed


def _over_time(
    operations: DataFrame, entries: DataFrame, window: Window, keep: Callable[[DataFrame], DataFrame]
) -> tuple[Timeline | None, DataFrame | None]:
    """Of all destinations together; and the counts of each, of all the time together."""
    extent = series.extent(operations, entries, window).first()
    if extent is None or extent["first"] is None:
        return None, None
    first, last = extent["first"], extent["last"]
    width = series.width_for(first, last, BUCKETS)
    found = keep(series.series(operations, entries, width, first, last))
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
    inside = found.where(F.col("bucket") >= start).groupBy("destination").agg(*sums)
    return Timeline(start, width, {name: counts[name] for name in RATES}, list(waiting)[1:]), inside


def _entities(balance: DataFrame, incidents: DataFrame, counts: DataFrame) -> DataFrame:
    doubts = balance.groupBy("destination").agg(*(F.sum(name).alias(name) for name in LISTED))
    failovers = incidents.groupBy("destination").agg(F.count("began").alias("incidents"))
    return counts.join(doubts, "destination", "left").join(failovers, "destination", "left").fillna(0)
