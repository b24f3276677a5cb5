"""The section cost of the report: the bill by stage, the forecast beside it, and the parts of the differences (L4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Final

from twinbus.ledger import Stage
from twinbus.money import EMPTY_PRIMARY, SESSIONS_PRIMARY, Comparison, CostResult, DifferencePart, Prices
from twinbus.pipeline import ReportData, RowValues
from twinbus.report.charts import bar, legend
from twinbus.report.formatting import duration, money, number
from twinbus.report.markup import Markup, TableColumn, element, number_column, table

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
    Stage.SETTLE_PRIMARY: ("primary", "Settle on primary"),
    Stage.RENEW_PRIMARY: ("primary", "Renew locks on primary"),
    Stage.PEEK_PRIMARY: ("primary", "Peek at primary"),
    EMPTY_PRIMARY: ("primary", "Empty receives on primary"),
    SESSIONS_PRIMARY: ("primary", "Sessions on primary"),
    Stage.PING: ("primary", "Pings"),
    Stage.MANAGE: ("doubt", "Management"),
}

_CENT: Final = Decimal("0.01")


def cost_section(data: ReportData, prices: Prices) -> Markup:
    """Returns the section. For a ledger without operations, the section says that there are none."""
    found = data.cost
    heading = element("h2", "What was charged for", id="cost")
    lead = "A unit is 64 KB or a part of it of each message. A call without a message is one unit. Whole days (UTC)."
    parts: list[Markup] = [heading, element("p", lead)]
    if found.bill.stages:
        parts += [legend(("primary", "on the primary"), ("backlog", "on the backlog")), _stages(found)]
    parts += [element("p", note, class_="note") for note in found.notes]
    if found.comparison is not None:
        parts.append(_differences(found.comparison))
    scenario = found.scenario
    source = f"Tier {scenario.tier}, bandwidth {scenario.bandwidth}, prices of {prices.date}: {prices.origin}."
    without = (
        "Without connections, which no ledger records. Operations that the monthly base includes cost nothing here."
    )
    parts += [element("p", note, class_="note") for note in (without, source)]
    return element("section", *parts, class_="card", aria_labelledby="cost")


def _stage(name: str) -> tuple[str, str]:
    return _STAGES.get(name, ("doubt", name.replace("_", " ").capitalize()))


def _rows(found: CostResult) -> list[RowValues]:
    order = {stage: index for index, stage in enumerate(_STAGES)}
    spent = sorted(found.bill.stages, key=lambda one: (order.get(one.stage, len(order)), one.stage))
    compared = {} if found.comparison is None else {one.stage: one for one in found.comparison.differences}
    return [
        {
            "stage": one.stage,
            "units": one.units,
            "forecast": compared[one.stage].forecast if one.stage in compared else None,
            "cost": one.cost,
        }
        for one in spent
    ]


def _stages(found: CostResult) -> Markup:
    rows, bill = _rows(found), found.bill
    most = max(row["units"] for row in rows) or 1
    title = f"Cost, {bill.currency or 'not known'}"
    columns = [
        TableColumn("Stage", lambda row: _stage(row["stage"])[1], css="class"),
        TableColumn("", lambda row: bar(_stage(row["stage"])[0], row["units"] / most), css="drawn"),
        number_column("Units", "units"),
        TableColumn("Forecast", lambda row: "–" if row["forecast"] is None else number(row["forecast"]), css="number"),
        TableColumn(title, lambda row: _price(row["cost"], bill.currency), css="number"),
    ]
    forecast = "–" if found.comparison is None else number(found.comparison.forecast)
    period = f"Base, {duration(bill.seconds)}"
    feet = [
        (period, "", "", "", _price(bill.base_cost, bill.currency)),
        ("All", "", number(bill.units), forecast, _price(bill.cost, bill.currency)),
    ]
    return table(columns, rows, element("tfoot", *(_foot(columns, texts) for texts in feet)), class_="bars cost")


def _foot(columns: Sequence[TableColumn], texts: Sequence[str]) -> Markup:
    cells = [
        element("td", text, class_=column.css, data_label=column.title)
        for column, text in zip(columns, texts, strict=True)
    ]
    return element("tr", *cells)


def _price(amount: Decimal, currency: str | None) -> str:
    return "–" if currency is None else money(amount)


def _differences(found: Comparison) -> Markup:
    """Returns the parts of all differences, folded away."""
    cost = found.actual_cost - found.forecast_cost
    said = f"{_more(found.actual - found.forecast)} units and {money(abs(cost))} {'less' if cost < 0 else 'more'}"
    summary = element("summary", f"{said} than in the forecast; {number(found.unexplained)} units unexplained")
    columns = [
        TableColumn("Stage", lambda row: row["stage"], css="class"),
        TableColumn("Units", lambda row: row["units"], css="number"),
        TableColumn("Cost", lambda row: row["cost"], css="number"),
        TableColumn("What the entries of the ledger show", lambda row: row["why"]),
    ]
    about = "The forecast is for the traffic, outages, sizes, subscriptions and intervals that this ledger shows."
    return element("details", summary, element("p", about), table(columns, list(_parts(found)), class_="cards"))


def _more(units: int) -> str:
    return f"{number(abs(units))} {'fewer' if units < 0 else 'more'}"


def _parts(found: Comparison) -> Iterator[Mapping[str, str]]:
    for one in found.differences:
        for part in one.parts:
            yield _part_row(_stage(one.stage)[1], part)
    if found.actual_base != found.forecast_base:
        yield _part_row("Base", DifferencePart(found.base_why, 0, found.actual_base - found.forecast_base))


def _part_row(stage: str, part: DifferencePart) -> Mapping[str, str]:
    units = f"{part.units:+,}" if part.units else ""
    return {"stage": stage, "units": units, "cost": _signed(part.cost) if part.cost else "", "why": part.why}


def _signed(amount: Decimal) -> str:
    """Returns a difference in money; with six decimals if it is below a cent."""
    return f"{amount:+,.2f}" if abs(amount) >= _CENT else f"{amount:+.6f}"
