"""How long diverted messages were on their way, what was charged for, and how each entity fared."""

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
from twinbus.report.formatting import money, number, span
from twinbus.report.markup import Column, Markup, counted, element, more, spanned, table

# Of every stage: where it is, and its name. A diverted message passes the first four kinds (M1).
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


def latency(found: ReportData) -> Markup:
    spread = found.spread
    if not spread["diverted"]:
        return Markup()
    heading = element("h2", "How long diverted messages were on their way", id="latency")
    lead = (
        f"From the acceptance in the backlog to the acceptance by the primary: {number(spread['returned'])} of "
        f"{number(spread['diverted'])} diverted messages came home."
    )
    parts: list[Markup] = [heading, element("p", lead)]
    if spread["returned"]:
        parts += [_shares(spread), _histogram(spread["counts"], spread["returned"]), _by_day(found)]
    return element("section", *parts, class_="card", aria_labelledby="latency")


def _shares(spread: RowValues) -> Markup:
    told = {"p50": "half within", "p90": "90 % within", "p99": "99 % within", "most": "the longest"}
    tiles = [
        element("div", element("dt", label), element("dd", element("b", span(spread[name]))), class_="tile")
        for name, label in told.items()
    ]
    return element("dl", *tiles, class_="tiles four")


def _histogram(counts: Sequence[int], total: int) -> Markup:
    """From the first class that has any to the last."""
    there = [place for place, count in enumerate(counts) if count]
    classes = [
        f"up to {span(LATENCY_EDGES[0])}",
        *(f"{span(low)} – {span(high)}" for low, high in pairwise(LATENCY_EDGES)),
        f"over {span(LATENCY_EDGES[-1])}",
    ]
    rows = [{"class": classes[place], "count": counts[place]} for place in range(there[0], there[-1] + 1)]
    most = max(counts)
    columns = [
        Column("On their way", lambda row: row["class"], look="class"),
        Column("", lambda row: bar("backlog", row["count"] / most), look="drawn"),
        Column("Messages", lambda row: number(row["count"]), look="number"),
        Column("Share", lambda row: _percent(row["count"], total), look="number"),
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


def _by_day(found: ReportData) -> Markup:
    columns = [
        Column("Entity", lambda row: row["destination"], look="name"),
        Column("Day", lambda row: row["day"]),
        counted("Diverted", "diverted"),
        counted("Returned", "returned"),
        spanned("Half", "p50"),
        spanned("90 %", "p90"),
        spanned("99 %", "p99"),
        spanned("Longest", "most"),
    ]
    rest = more(found.latency, "`twinbus ledger latency` tells them all")
    summary = element("summary", "By entity and day")
    return element("details", summary, table(columns, found.latency.rows, class_="cards"), rest)


# --- cost ------------------------------------------------------------------------------------------------------------


def cost(found: ReportData, prices: Prices, scenario: Scenario) -> Markup:
    if not found.spent:
        return Markup()
    order = {stage: place for place, stage in enumerate(_STAGES)}
    rows = sorted(map(asdict, found.spent), key=lambda row: (order.get(row["stage"], len(order)), row["stage"]))
    heading = element("h2", "What was charged for", id="cost")
    lead = "A unit is 64 KB or a part of it, of every message; a call without a message is one unit. Whole days (UTC)."
    keys = legend(("primary", "on the primary"), ("backlog", "on the backlog"))
    source = f"Tier {scenario.tier}, bandwidth {scenario.bandwidth}, prices of {prices.date}: {prices.origin}."
    without = "Without what is charged by the month or the connection; what a month's base includes costs nothing here."
    notes = [element("p", said, class_="note") for said in (without, source)]
    drawn = _stages(rows, prices.currency)
    return element("section", heading, element("p", lead), keys, drawn, *notes, class_="card", aria_labelledby="cost")


def _stage(row: RowValues) -> tuple[str, str]:
    return _STAGES.get(row["stage"], ("doubt", str(row["stage"]).replace("_", " ").capitalize()))


def _stages(rows: Sequence[RowValues], currency: str) -> Markup:
    most = max(row["units"] for row in rows) or 1
    columns = [
        Column("Stage", lambda row: _stage(row)[1], look="class"),
        Column("", lambda row: bar(_stage(row)[0], row["units"] / most), look="drawn"),
        counted("Units", "units"),
        Column(f"Cost, {currency}", lambda row: money(row["cost"]), look="number"),
    ]
    total = {"units": sum(row["units"] for row in rows), "cost": sum((row["cost"] for row in rows), Decimal(0))}
    cells = [
        element("td", said, class_=column.look, data_label=column.title)
        for column, said in zip(columns, ("All", "", *(column.say(total) for column in columns[2:])), strict=True)
    ]
    return table(columns, rows, element("tfoot", element("tr", *cells)), class_="bars cost")


# --- entities --------------------------------------------------------------------------------------------------------


def entities(found: ReportData) -> Markup:
    some = found.entities
    if not some.total:
        return Markup()
    columns = [
        Column("Entity", lambda row: row["destination"], look="name"),
        counted("Accepted", "accepted"),
        counted("Delivered", "delivered"),
        counted("In backlog", "in_backlog"),
        Column("Dead-lettered", lambda row: _alarming(row["dead_lettered"]), look="number"),
        Column("Unknown", lambda row: _alarming(row["unknown"]), look="number"),
        Column("Lost", lambda row: _alarming(row["lost"]), look="number"),
        Column("Duplicated", lambda row: _alarming(row["duplicated"]), look="number"),
    ]
    heading = element("h2", "Entities", id="entities")
    rest = more(some, "shown are those with most messages lost, unknown, duplicated or not home")
    return element(
        "section", heading, table(columns, some.rows, class_="cards"), rest, class_="card", aria_labelledby="entities"
    )


def _alarming(count: int) -> object:
    return element("b", number(count), class_="alarm") if count else "0"
