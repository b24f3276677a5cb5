"""The sections latency, cost and entities of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from decimal import Decimal
from itertools import pairwise
from typing import Final

from twinbus.ledger import Stage
from twinbus.money import Prices, Scenario
from twinbus.pipeline import LATENCY_EDGES, ReportData, RowValues
from twinbus.report.charts import bar, legend
from twinbus.report.formatting import duration, money, number
from twinbus.report.markup import Markup, TableColumn, duration_column, element, more_note, number_column, table

# Colour and name of each stage, in the order of the table.
_STAGES: Final[Mapping[str, tuple[str, str]]] = {
    Stage.SEND_PRIMARY: ("primary", "Send to primary"),
    Stage.SEND_BACKLOG: ("backlog", "Send to backlog"),
    Stage.RECEIVE_BACKLOG: ("backlog", "Receive from backlog"),
    Stage.RETURN_PRIMARY: ("primary", "Return to primary"),
    Stage.RECEIVE_PRIMARY: ("primary", "Receive from primary"),
    Stage.COMPLETE_PRIMARY: ("primary", "Complete on primary"),
    Stage.COMPLETE_BACKLOG: ("backlog", "Complete in backlog"),
    Stage.SETTLE_BACKLOG: ("backlog", "Settle in backlog"),
    Stage.RENEW_BACKLOG: ("backlog", "Renew locks"),
    Stage.RECEIVE_DEFERRED: ("backlog", "Receive deferred"),
    Stage.RESUBMIT_BACKLOG: ("backlog", "Resubmit"),
    Stage.PEEK_BACKLOG: ("backlog", "Peek at backlog"),
    Stage.EMPTY_RECEIVE: ("backlog", "Empty long polls"),
    Stage.SCHEDULE_PRIMARY: ("primary", "Schedule on primary"),
    Stage.CANCEL_PRIMARY: ("primary", "Cancel on primary"),
    Stage.PING: ("primary", "Pings"),
    Stage.MANAGE: ("doubt", "Management"),
}


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
    if spread["returned"]:
        parts += [_shares(spread), _histogram(spread["counts"], spread["returned"]), _by_day(data)]
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


# --- cost ------------------------------------------------------------------------------------------------------------


def cost_section(data: ReportData, prices: Prices, scenario: Scenario) -> Markup:
    if not data.spent:
        return Markup()
    order = {stage: index for index, stage in enumerate(_STAGES)}
    rows = sorted(map(asdict, data.spent), key=lambda row: (order.get(row["stage"], len(order)), row["stage"]))
    heading = element("h2", "What was charged for", id="cost")
    lead = "A unit is 64 KB or a part of it of each message. A call without a message is one unit. Whole days (UTC)."
    keys = legend(("primary", "on the primary"), ("backlog", "on the backlog"))
    source = f"Tier {scenario.tier}, bandwidth {scenario.bandwidth}, prices of {prices.date}: {prices.origin}."
    without = (
        "Without charges by the month or by connection. Operations that the monthly base includes cost nothing here."
    )
    notes = [element("p", note, class_="note") for note in (without, source)]
    drawn = _stages(rows, prices.currency)
    return element("section", heading, element("p", lead), keys, drawn, *notes, class_="card", aria_labelledby="cost")


def _stage(row: RowValues) -> tuple[str, str]:
    return _STAGES.get(row["stage"], ("doubt", str(row["stage"]).replace("_", " ").capitalize()))


def _stages(rows: Sequence[RowValues], currency: str) -> Markup:
    most = max(row["units"] for row in rows) or 1
    columns = [
        TableColumn("Stage", lambda row: _stage(row)[1], css="class"),
        TableColumn("", lambda row: bar(_stage(row)[0], row["units"] / most), css="drawn"),
        number_column("Units", "units"),
        TableColumn(f"Cost, {currency}", lambda row: money(row["cost"]), css="number"),
    ]
    total = {"units": sum(row["units"] for row in rows), "cost": sum((row["cost"] for row in rows), Decimal(0))}
    cells = [
        element("td", content, class_=column.css, data_label=column.title)
        for column, content in zip(columns, ("All", "", *(column.cell(total) for column in columns[2:])), strict=True)
    ]
    return table(columns, rows, element("tfoot", element("tr", *cells)), class_="bars cost")


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
