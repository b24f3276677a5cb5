"""The sections latency and entities of the report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from twinbus.pipeline import LATENCY_EDGES, ReportData, RowValues
from twinbus.report.charts import bar
from twinbus.report.formatting import clock_text, duration, number, unknown_clock_text
from twinbus.report.markup import Markup, TableColumn, duration_column, element, more_note, number_column, table


def latency_section(data: ReportData) -> Markup:
    spread = data.spread
    if not spread["diverted"]:
        return Markup()
    heading = element("h2", "How long diverted messages were on their way", id="latency")
    lead = (
        f"From the acceptance in the backlog to the acceptance by the primary: {number(spread['returned'])} of "
        f"{number(spread['diverted'])} diverted messages came home."
    )
    parts: list[Markup] = [heading, element("p", lead)]
    if spread["unknown_clock"]:
        parts.append(element("p", unknown_clock_text(spread["unknown_clock"])))
    parts += [element("p", clock_text(clock)) for clock in data.clocks]
    if timed := spread["returned"] - spread["unknown_clock"]:
        parts += [_shares(spread), _histogram(spread["counts"], timed), _by_day(data)]
    return element("section", *parts, class_="card", aria_labelledby="latency")


def _shares(spread: RowValues) -> Markup:
    shares = {"p50": "half within", "p90": "90 % within", "p99": "99 % within", "most": "the longest"}
    tiles = [
        element("div", element("dt", label), element("dd", element("b", duration(spread[name]))), class_="tile")
        for name, label in shares.items()
    ]
    return element("dl", *tiles, class_="tiles four")


def _histogram(counts: Sequence[int], total: int) -> Markup:
    """Returns the histogram as a table: the latency classes from the first to the last class that has messages."""
    used = [index for index, count in enumerate(counts) if count]
    classes = [
        f"up to {duration(LATENCY_EDGES[0])}",
        *(f"{duration(low)} – {duration(high)}" for low, high in pairwise(LATENCY_EDGES)),
        f"over {duration(LATENCY_EDGES[-1])}",
    ]
    rows = [{"class": classes[index], "count": counts[index]} for index in range(used[0], used[-1] + 1)]
    most = max(counts)
    columns = [
        TableColumn("On their way", lambda row: row["class"], css="class"),
        TableColumn("", lambda row: bar("backlog", row["count"] / most), css="drawn"),
        TableColumn("Messages", lambda row: number(row["count"]), css="number"),
        TableColumn("Share", lambda row: _percent(row["count"], total), css="number"),
    ]
    return table(columns, rows, class_="bars")


def _percent(part: int, whole: int) -> str:
    share = part / whole * 100
    return (
        "0 %"
        if not part
        else "< 0.1 %"
        if share < 0.05
        else f"{share:.1f} %"
        if share < 99.95 or part == whole
        else "> 99.9 %"
    )


def _by_day(data: ReportData) -> Markup:
    columns = [
        TableColumn("Entity", lambda row: row["destination"], css="name"),
        TableColumn("Day", lambda row: row["day"]),
        number_column("Diverted", "diverted"),
        number_column("Returned", "returned"),
        duration_column("Half", "p50"),
        duration_column("90 %", "p90"),
        duration_column("99 %", "p99"),
        duration_column("Longest", "most"),
    ]
    rest = more_note(data.latency, "`twinbus ledger latency` lists them all")
    summary = element("summary", "By entity and day")
    return element("details", summary, table(columns, data.latency.rows, class_="cards"), rest)


# --- entities --------------------------------------------------------------------------------------------------------


def entities_section(data: ReportData) -> Markup:
    shown = data.entities
    if not shown.total:
        return Markup()
    columns = [
        TableColumn("Entity", lambda row: row["destination"], css="name"),
        number_column("Accepted", "accepted"),
        number_column("Delivered", "delivered"),
        number_column("In backlog", "in_backlog"),
        TableColumn("Dead-lettered", lambda row: _alarming(row["dead_lettered"]), css="number"),
        TableColumn("Unknown", lambda row: _alarming(row["unknown"]), css="number"),
        TableColumn("Lost", lambda row: _alarming(row["lost"]), css="number"),
        TableColumn("Duplicated", lambda row: _alarming(row["duplicated"]), css="number"),
    ]
    heading = element("h2", "Entities", id="entities")
    rest = more_note(shown, "these have the most messages lost, unknown, duplicated or not home")
    return element(
        "section", heading, table(columns, shown.rows, class_="cards"), rest, class_="card", aria_labelledby="entities"
    )


def _alarming(count: int) -> object:
    return element("b", number(count), class_="alarm") if count else "0"
