"""Collects the data of a report from the tables of a ledger.

A page shows only a part of each result. This module takes the first rows, with the worst in front, and the number of
all rows.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import LISTED_SUMS
from twinbus.money import Prices, Scenario
from twinbus.pipeline import clocks, latency
from twinbus.pipeline.cost_facts import compute_actual_cost
from twinbus.pipeline.jobs import (
    JOBS,
    UNKNOWN_STATES,
    current_result,
    current_sums,
    read_history,
    why_incomplete,
)
from twinbus.pipeline.report_data import (
    MOST_DAYS,
    MOST_ENTITIES,
    MOST_IDS,
    MOST_INCIDENTS,
    MOST_REASONS,
    WORST,
    ReportData,
    RowValues,
    Timeline,
    TopRows,
    WriterClock,
)
from twinbus.pipeline.result_tables import JUDGED
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.tables import Tables
from twinbus.pipeline.time_window import TimeWindow
from twinbus.pipeline.timeline import build_timeline
from twinbus.pipeline.writer_states import WriterStates


def collect_report_data(
    tables: Tables,
    prices: Prices,
    scenario: Scenario,
    window: TimeWindow | None = None,
    writers: WriterStates = UNKNOWN_STATES,
) -> ReportData:
    """Returns the data of a report on a window (default: the whole ledger).

    `scenario` and `prices` are for the cost. `writers` are the writers that are known to be dead or alive.
    """
    window, version = window or TimeWindow(), tables.version()
    open_first = F.desc(F.col("began").isNotNull() & F.col("restored").isNull())
    cost = compute_actual_cost(tables, window, writers)
    with tables.parallel_queries() as pool:
        balance = pool.submit(_balance, tables, window, writers)
        over_time = pool.submit(_over_time, tables, version, window)
        incidents = pool.submit(
            _job_rows, tables, "incidents", window, MOST_INCIDENTS, open_first, F.desc("diverted"), F.col("began")
        )
        spread = pool.submit(_spread, tables, version, window)
        days = pool.submit(_job_rows, tables, "latency", window, MOST_DAYS, F.desc("diverted"), F.col("day"))
        reasons = pool.submit(_reasons, tables, writers)
        sums, listed, entities = balance.result()
        timeline, off = over_time.result()
        return ReportData(
            sums,
            listed,
            reasons.result(),
            incidents.result(),
            entities,
            timeline,
            spread.result(),
            days.result(),
            cost.result(prices, {"tier": scenario.tier, "bandwidth": scenario.bandwidth}),
            off,
        )


def _job_rows(tables: Tables, job: str, window: TimeWindow, most: int, *order: Column) -> TopRows:
    return _top_rows(current_result(tables, JOBS[job], window), most, *order)


def _reasons(tables: Tables, writers: WriterStates) -> TopRows:
    reasons = sorted(why_incomplete(tables, writers))
    return TopRows([{"reason": reason} for reason in reasons[:MOST_REASONS]], len(reasons))


def _spread(tables: Tables, version: TablesVersion, window: TimeWindow) -> RowValues:
    found = latency.spread(current_sums(tables, version, JOBS["latency"], window), window).first()
    assert found is not None, "an aggregate without keys has a row"
    return found.asDict()


def _over_time(tables: Tables, version: TablesVersion, window: TimeWindow) -> tuple[Timeline | None, list[WriterClock]]:
    """Returns the timeline, by the broker's clock, and the writers whose clocks differ from it (L5)."""
    operations, entries, found = history_by_broker(tables, version, window)
    return build_timeline(operations, entries, window), found


def history_by_broker(
    tables: Tables, version: TablesVersion, window: TimeWindow
) -> tuple[DataFrame, DataFrame, list[WriterClock]]:
    """Returns operations and entries with times by the broker's clock, and the writers whose clocks differ from it.

    They begin at the beginning of the ledger, because the depth of the backlog at the window's start depends on all of
    it.
    """
    operations, entries = read_history(tables, version, TimeWindow(until=window.until).days())
    found = clocks.named(clocks.off_clocks(latency.tally(operations, entries)), entries)
    if found:
        off = clocks.as_rows(tables.spark, found)
        operations = clocks.corrected(operations, off, "at", "ended", writer=clocks.writer_of())
        entries = clocks.corrected(entries, off, "at", writer=clocks.writer_of())
    return operations, entries, found


def _top_rows(rows: DataFrame, most: int, *order: Column) -> TopRows:
    everything = Over.partitionBy(F.lit(0))
    counted = rows.withColumn("total", F.count(F.lit(1)).over(everything))
    kept = [row.asDict() for row in counted.orderBy(*order, "destination").limit(most).collect()]
    totals = [row.pop("total") for row in kept]
    return TopRows(kept, totals[0] if totals else 0)


def _balance(
    tables: Tables, window: TimeWindow, writers: WriterStates
) -> tuple[dict[str, int], dict[str, TopRows], TopRows]:
    rows = current_result(tables, JOBS["reconcile"], window, writers).persist()
    try:
        by_entity = rows.groupBy("destination").agg(*(F.sum(name).alias(name) for name in JUDGED))
        return *_judged(rows), _top_rows(by_entity, MOST_ENTITIES, *map(F.desc, WORST))
    finally:
        rows.unpersist()


def _judged(rows: DataFrame) -> tuple[dict[str, int], dict[str, TopRows]]:
    named = {name: F.col("id").isNotNull() & (F.col(name) != 0) for name in LISTED_SUMS}
    sums = [F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in JUDGED]
    counts = [F.count(F.when(is_named, 1)).alias(f"listed_{name}") for name, is_named in named.items()]
    found = rows.agg(*sums, *counts).first()
    assert found is not None, "an aggregate without keys has a row"
    total = {name: found[f"listed_{name}"] for name in LISTED_SUMS}
    wanted = [
        rows.where(named[name])
        .orderBy("destination", "id")
        .limit(MOST_IDS)
        .select(F.lit(name).alias("word"), "destination", "id", F.col(name).alias("count"))
        for name in LISTED_SUMS
        if total[name]
    ]
    messages = [row.asDict() for row in reduce(DataFrame.unionAll, wanted).collect()] if wanted else []
    listed = {name: TopRows([row for row in messages if row["word"] == name], total[name]) for name in LISTED_SUMS}
    return {name: found[name] for name in JUDGED}, listed
