"""The data of a report from the result tables (D4, D7). `twinbus.pipeline.report_queries` does the same on Spark."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from twinbus.answers.results import BalanceAnswer, Histogram, Results, Row
from twinbus.answers.window import HourWindow
from twinbus.ledger import LISTED_SUMS
from twinbus.money import Prices, Scenario
from twinbus.pipeline.report_data import (
    LATENCY_EDGES,
    MOST_DAYS,
    MOST_ENTITIES,
    MOST_IDS,
    MOST_INCIDENTS,
    MOST_REASONS,
    WORST,
    ReportData,
    TopRows,
)


def report_data(results: Results, prices: Prices, scenario: Scenario, window: HourWindow) -> ReportData:
    """Returns the data of a report on a window. `scenario` and `prices` are for the cost."""
    balance = results.balance(window)
    reasons = [{"reason": reason} for reason in sorted(results.incomplete())]
    cost = results.actual_cost(window).result(prices, {"tier": scenario.tier, "bandwidth": scenario.bandwidth})
    return ReportData(
        balance.sums,
        _listed(balance),
        _top(reasons, MOST_REASONS),
        _top(results.incidents(window), MOST_INCIDENTS, _open_first),
        _top(balance.by_destination, MOST_ENTITIES, _worst_first),
        results.timeline(window),
        _spread(results.spread(window)),
        _top(results.latency(window), MOST_DAYS, lambda row: (-row["diverted"], row["day"], row["destination"])),
        cost,
        results.clocks(),
    )


def _top(rows: Sequence[Row], most: int, order: Callable[[Row], Any] | None = None) -> TopRows:
    """Returns the first rows, and the number of all rows."""
    return TopRows((rows if order is None else sorted(rows, key=order))[:most], len(rows))


def _open_first(row: Row) -> tuple[Any, ...]:
    is_open = row["began"] is not None and row["restored"] is None
    return not is_open, -row["diverted"], row["began"] is not None, row["began"] or 0, row["destination"]


def _worst_first(row: Row) -> tuple[Any, ...]:
    return *(-row[name] for name in WORST), row["destination"]


def _listed(balance: BalanceAnswer) -> dict[str, TopRows]:
    return {
        name: TopRows(
            [
                {"word": name, "destination": destination, "id": id_, "count": count}
                for (destination, id_), count in balance.listed[name][:MOST_IDS]
            ],
            len(balance.listed[name]),
        )
        for name in LISTED_SUMS
    }


def _spread(found: Histogram) -> Row:
    """Returns the distribution of all latencies, and their number between the LATENCY_EDGES."""
    counts = [0] * (len(LATENCY_EDGES) + 1)
    for value, count in found.counts.items():
        counts[bisect_left(LATENCY_EDGES, value / 1000)] += count
    return {**found.distribution(), "counts": counts}
