"""Prints forecasts, comparisons and prices as tables, and converts them to JSON. Computes no cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from twinbus.cli.option_values import as_option_text
from twinbus.cli.terminal import console
from twinbus.money import (
    ActualBill,
    Bill,
    Comparison,
    CostPhase,
    CostResult,
    Forecast,
    OutageModel,
    Prices,
    PriceScale,
    Scenario,
    StageDifference,
    Tier,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SIGNIFICANT = Decimal("0.0001")
_WIDE = 130
_OPERATIONS = ("phase", "stage", "operations", "units", "MB", "cost")
_TEXTS = ("phase", "stage", "why")


def money(amount: Decimal) -> str:
    """Return an amount as text with two decimals, or with four decimals if the amount is below 1."""
    if 0 < amount < _SIGNIFICANT:
        return f"<{_SIGNIFICANT}"
    return f"{amount:,.2f}" if amount >= 1 or not amount else f"{amount.quantize(_SIGNIFICANT):f}"


# --- forecast --------------------------------------------------------------------------------------------------------


def show_forecast(found: Forecast) -> None:
    from rich.text import Text  # noqa: PLC0415 - slow

    shown = console()
    scenario, idle = found.scenario, found.idle
    what = f" of {as_option_text(scenario.period)}, {scenario.tier}, in {found.prices.currency}"
    shown.print(Text.assemble(("Forecast", "bold"), what))
    shown.print(
        f"idle receives of the syphons: [bold]{idle.hour:,g}[/] an hour, [bold]{idle.day:,g}[/] a day, "
        f"[bold]{idle.thirty_days:,g}[/] in 30 days",
        markup=True,
    )
    rows = list(_operations(found.bill))
    if shown.width >= _WIDE:
        table = _table(*_OPERATIONS, "why")
        for number, (cells, why) in enumerate(rows):
            if number and cells[0]:
                table.add_section()
            table.add_row(*cells, why)
        shown.print(table)
    else:
        _print_above_reasons(shown, rows)
    shown.print(_totals(found))
    shown.print(_passages(found))
    _footnotes(shown, found.prices, found.scenario.tier)


def _operations(found: Bill) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield for each line of a forecast its cells, and what the operations are for. The phase is in its first line."""
    before = None
    for line in found.lines:
        used = line.usage
        phase = "" if used.phase == before else used.phase
        before = used.phase
        numbers = (f"{used.operations:,}", f"{used.units:,}", f"{used.bytes / 1e6:,.1f}", money(line.cost))
        yield (phase, used.stage, *numbers), used.why + (" (without a pair, too)" if used.anyway else "")


def _print_above_reasons(shown: Console, rows: Sequence[tuple[tuple[str, ...], str]]) -> None:
    """Print each line of a forecast, and below it what the operations are for."""
    from rich.padding import Padding  # noqa: PLC0415 - slow
    from rich.text import Text  # noqa: PLC0415

    widths = [max(map(len, column)) for column in zip(_OPERATIONS, *(cells for cells, _ in rows), strict=True)]

    def in_columns(cells: Sequence[str]) -> str:
        placed = zip(cells, widths, _OPERATIONS, strict=True)
        return "  ".join(cell.ljust(width) if name in _TEXTS else cell.rjust(width) for cell, width, name in placed)

    shown.print(Text(in_columns(_OPERATIONS), "bold"))
    for cells, why in rows:
        if cells[0]:
            shown.print()
        shown.print(in_columns(cells))
        shown.print(Padding(Text(why, "dim"), (0, 0, 0, widths[0] + 4)))
    shown.print()


def _totals(found: Forecast) -> Table:
    from rich.text import Text  # noqa: PLC0415 - slow

    table = _table("", "units", f"{found.prices.currency}")
    for phase in CostPhase:
        mine = found.bill.of(phase=phase)
        table.add_row(f"operations and bandwidth, {phase}", f"{mine.units:,}", money(mine.cost))
    table.add_row("base", "", money(found.base_cost))
    table.add_row(f"connections: {found.connections:,.1f} on average", "", money(found.connections_cost))
    table.add_section()
    table.add_row(Text("all", "bold"), f"{found.bill.units:,}", Text(money(found.cost), "bold"))
    table.add_row("the same messages without a pair and without an outage", "", money(found.without_pair))
    table.add_row("the pair, its syphons and the outages", "", money(max(found.cost - found.without_pair, Decimal(0))))
    return table


def _passages(found: Forecast) -> Table:
    from rich.text import Text  # noqa: PLC0415 - slow

    table = _table("a diverted message", "sends, receives", "as charged today", "put aside meanwhile")
    columns = ("clause", "billed", "put_aside")
    for one in found.message_units:
        table.add_row(one.stage, *(str(getattr(one, column) or "") for column in columns))
    table.add_section()
    sums = (sum(getattr(one, column) for one in found.message_units) for column in columns)
    table.add_row("", *(Text(str(total), "bold") for total in sums))
    return table


def show_variants(option: str, variants: Mapping[str, Forecast]) -> None:
    first = next(iter(variants.values()))
    from rich.text import Text  # noqa: PLC0415 - slow

    shown = console()
    what = f" of {as_option_text(first.scenario.period)}, side by side, in {first.prices.currency}"
    shown.print(Text.assemble(("Forecast", "bold"), what))
    table = _table(option, *variants)
    for name, cells in _rows(variants):
        table.add_row(name, *cells)
    shown.print(table)
    _footnotes(shown, first.prices, first.scenario.tier)


def _rows(variants: Mapping[str, Forecast]) -> Iterator[tuple[str, list[str]]]:
    found = variants.values()
    yield "idle receives an hour", [f"{one.idle.hour:,g}" for one in found]
    yield "idle receives a day", [f"{one.idle.day:,g}" for one in found]
    yield "idle receives in 30 days", [f"{one.idle.thirty_days:,g}" for one in found]
    for phase in CostPhase:
        yield f"units, {phase}", [f"{one.bill.of(phase=phase).units:,}" for one in found]
    for phase in CostPhase:
        yield f"cost, {phase}", [money(one.bill.of(phase=phase).cost) for one in found]
    yield "base", [money(one.base_cost) for one in found]
    yield "connections", [money(one.connections_cost) for one in found]
    yield "all", [money(one.cost) for one in found]


# --- bill and comparison ---------------------------------------------------------------------------------------------


def show_result(found: CostResult, prices: Prices | None) -> None:
    """Print the bill of a ledger, the notes, and the forecast beside the bill."""
    from rich.text import Text  # noqa: PLC0415 - slow

    shown, bill = console(), found.bill
    what = f" of {as_option_text(timedelta(seconds=round(bill.seconds, 1)))}, {found.scenario.tier}"
    shown.print(Text.assemble(("Bill", "bold"), what, f", in {bill.currency}" if bill.currency else ", in units"))
    shown.print(_bill_table(bill))
    for note in found.notes:
        shown.print(f"• {note}")
    if found.comparison is not None and found.forecast is not None:
        _show_comparison(shown, found, found.comparison, found.forecast)
    if prices is not None and bill.currency is not None:
        _footnotes(shown, prices, found.scenario.tier)


def _bill_table(bill: ActualBill) -> Table:
    from rich.text import Text  # noqa: PLC0415 - slow

    table = _table("stage", "units", "of these failed", "MB", bill.currency or "cost")
    priced = bill.currency is not None
    for one in sorted(bill.stages, key=lambda one: -one.units):
        failed = f"{one.failed_units:,}" if one.failed_units else ""
        table.add_row(one.stage, f"{one.units:,}", failed, f"{one.bytes / 1e6:,.1f}", _price(one.cost, priced))
    table.add_section()
    table.add_row("base", "", "", "", _price(bill.base_cost, priced))
    size = f"{sum(one.bytes for one in bill.stages) / 1e6:,.1f}"
    failed = f"{sum(one.failed_units for one in bill.stages):,}"
    table.add_row(Text("all", "bold"), f"{bill.units:,}", failed, size, Text(_price(bill.cost, priced), "bold"))
    return table


def _price(amount: Decimal, priced: bool) -> str:
    return money(amount) if priced else "–"


def _show_comparison(shown: Console, found: CostResult, result: Comparison, forecast: Forecast) -> None:
    from rich.text import Text  # noqa: PLC0415 - slow

    shown.print(Text("Beside it, the forecast", "bold"))
    shown.print(f"for {', '.join(_taken(found))}" if found.from_ledger else "nothing was taken from the ledger")
    ordered = sorted(result.differences, key=lambda one: -(one.actual or 0))
    shown.print(_comparison_table(ordered, result, found.bill.currency))
    shown.print("What the differences are made of, by the entries of the ledger:")
    shown.print(_parts_table(ordered, result, found.bill.currency))
    left = f"{result.unexplained:,} of {result.actual:,} units unexplained"
    shown.print(f"{result.actual - result.forecast:+,} units ({result.share:.2%}); {left}", style="bold")
    shown.print(f"not in a ledger: connections, {money(forecast.connections_cost)} by the forecast")


def _comparison_table(ordered: Sequence[StageDifference], result: Comparison, currency: str | None) -> Table:
    from rich.text import Text  # noqa: PLC0415 - slow

    priced, named = currency is not None, currency or "cost"
    titles = ("forecast\nunits", "actual\nunits", "difference", f"forecast\n{named}", f"actual\n{named}")
    table = _table("stage", *titles, narrow=True)
    for one in ordered:
        table.add_row(one.stage, *_compared(one, priced))
    table.add_row("base", "", "", "", _price(result.forecast_base, priced), _price(result.actual_base, priced))
    table.add_section()
    costs = (_price(amount, priced) for amount in (result.forecast_cost, result.actual_cost))
    difference = f"{result.actual - result.forecast:+,}"
    table.add_row(Text("compared", "bold"), f"{result.forecast:,}", f"{result.actual:,}", difference, *costs)
    return table


def _parts_table(ordered: Sequence[StageDifference], result: Comparison, currency: str | None) -> Table:
    """Return the parts of all differences, without parts that are only money and too small to be shown."""
    table = _table("stage", "units", currency or "cost", "why", narrow=True)
    for one in ordered:
        stage = one.stage
        for part in one.parts:
            if part.units or not 0 < abs(part.cost) < _SIGNIFICANT:
                units, cost = f"{part.units:+,}" if part.units else "", _signed_money(part.cost) if currency else ""
                table.add_row(stage, units, cost, part.why)
                stage = ""
    if currency is not None and result.actual_base != result.forecast_base:
        table.add_row("base", "", _signed_money(result.actual_base - result.forecast_base), result.base_why)
    return table


def _taken(found: CostResult) -> Iterator[str]:
    """Yield the values of the scenario that the ledger gave, as options."""
    seen, scenario = found.scenario.observed, found.scenario
    for name in sorted(found.from_ledger):
        if name == "outage" and seen is not None and len(seen.outages) > 1:
            lengths = (as_option_text(timedelta(seconds=round(one.seconds, 1))) for one in seen.outages)
            yield f"outages of {' + '.join(lengths)}"
        else:
            value = getattr(scenario, name)
            short = timedelta(seconds=round(value.total_seconds(), 1)) if isinstance(value, timedelta) else value
            yield f"{name.replace('_', '-')} {as_option_text(short)}"


def _compared(one: StageDifference, priced: bool) -> tuple[str, ...]:
    if one.actual is None:
        return f"{one.forecast:,}", "–", "–", _price(one.forecast_cost, priced), "–"
    difference = f"{one.units:+,}" if one.units else ""
    costs = (_price(amount, priced) for amount in (one.forecast_cost, one.actual_cost))
    return f"{one.forecast:,}", f"{one.actual:,}", difference, *costs


def _signed_money(amount: Decimal) -> str:
    return f"{'-' if amount < 0 else '+'}{money(abs(amount))}" if amount else ""


# --- prices ----------------------------------------------------------------------------------------------------------


def show_prices(prices: Prices) -> None:
    from rich.text import Text  # noqa: PLC0415 - slow

    shown = console()
    shown.print(Text.assemble((f"Prices of {prices.date}", "bold"), f", {prices.currency}, {prices.region}"))
    shown.print(f"from {prices.origin} ({prices.file})")
    table = _table("what", "up to, in a month", "price", "for every")
    for name, scale in _scales(prices):
        for band in scale.bands:
            end = "beyond" if band.up_to is None else f"{band.up_to:,}"
            table.add_row(name, end, "included" if not band.price else str(band.price), f"{scale.per:,}")
            name = ""  # noqa: PLW2901 - printed in the first row only
    for tier in prices.tiers.values():
        if tier.base_per_month:
            table.add_row(f"{tier.name}: base", "", str(tier.base_per_month), "month")
        if tier.messaging_unit_per_hour:
            table.add_row(f"{tier.name}: messaging unit", "", str(tier.messaging_unit_per_hour), "hour")
    for zone, price in prices.geo_replication.items():
        table.add_row(f"geo-replication, {zone}", "", str(price), "GB")
    shown.print(table)
    for note in (*prices.notes, *_notes(prices)):
        shown.print(f"• {note}")


def _scales(prices: Prices) -> Iterator[tuple[str, PriceScale]]:
    for tier in prices.tiers.values():
        if tier.operations is not None:
            yield f"{tier.name}: operations", tier.operations
        if tier.connections is not None:
            yield f"{tier.name}: connections", tier.connections
    for name, scale in prices.bandwidth.items():
        yield f"bandwidth: {name}, bytes", scale


def _notes(prices: Prices) -> Iterator[str]:
    for tier in prices.tiers.values():
        yield from (f"{tier.name}: {note}" for note in tier.notes)
    for name, notes in prices.bandwidth_notes.items():
        yield from (f"{name}: {note}" for note in notes)


def _footnotes(shown: Console, prices: Prices, tier: str) -> None:
    shown.print(f"prices of {prices.date} for {prices.region}: {prices.origin}", style="dim")
    for note in prices.tiers[tier].notes:
        shown.print(note, style="dim")


# --- JSON ------------------------------------------------------------------------------------------------------------


def forecast_as_json(found: Forecast) -> dict[str, Any]:
    lines = [
        {
            **{name: getattr(line.usage, name) for name in ("phase", "stage", "operations", "units", "bytes")},
            "operations_cost": _number(line.operations_cost),
            "bandwidth_cost": _number(line.bandwidth_cost),
            "cost": _number(line.cost),
            "without_a_pair_too": line.usage.anyway,
            "why": line.usage.why,
        }
        for line in found.bill.lines
    ]
    return {
        "scenario": {
            field.name: _plain(getattr(found.scenario, field.name))
            for field in fields(Scenario)
            if field.name != "observed"
        },
        "outages": [_outage_as_json(one, times) for one, times in found.outages],
        "prices": _origin(found.prices),
        "idle_receives": asdict(found.idle),
        "lines": lines,
        "phases": {phase: _sums(found.bill.of(phase=phase)) for phase in CostPhase},
        "passages": [asdict(one) for one in found.message_units],
        "base_cost": _number(found.base_cost),
        "connections": _number(found.connections),
        "connections_cost": _number(found.connections_cost),
        "cost": _number(found.cost),
        "without_pair": _number(found.without_pair),
    }


def result_as_json(found: CostResult) -> dict[str, Any]:
    """Return a bill and its comparison. Without a forecast, `forecast` is null, and stages have the bill alone."""
    priced, result = found.bill.currency is not None, found.comparison
    return {
        "bill": _bill_as_json(found.bill),
        "notes": list(found.notes),
        "forecast": None if found.forecast is None else forecast_as_json(found.forecast),
        "from_the_ledger": sorted(found.from_ledger),
        "stages": [] if result is None else [_stage_as_json(one, priced) for one in result.differences],
        "units": None
        if result is None
        else {
            "forecast": result.forecast,
            "actual": result.actual,
            "share": result.share,
            "unexplained": result.unexplained,
        },
        "base": None
        if result is None or not priced
        else {
            "forecast": _number(result.forecast_base),
            "actual": _number(result.actual_base),
            "why": result.base_why,
        },
        "cost": None
        if result is None or not priced
        else {"forecast": _number(result.forecast_cost), "actual": _number(result.actual_cost)},
    }


def _bill_as_json(bill: ActualBill) -> dict[str, Any]:
    def price(amount: Decimal) -> float | None:
        return None if bill.currency is None else _number(amount)

    stages = [
        {
            "stage": one.stage,
            "units": one.units,
            "bytes": one.bytes,
            "large_units": one.large_units,
            "failed": dict(one.failed),
            "unsent_units": one.unsent_units,
            "operations_cost": price(one.operations_cost),
            "bandwidth_cost": price(one.bandwidth_cost),
            "cost": price(one.cost),
        }
        for one in bill.stages
    ]
    return {
        "seconds": bill.seconds,
        "currency": bill.currency,
        "stages": stages,
        "units": bill.units,
        "base_cost": price(bill.base_cost),
        "cost": price(bill.cost),
    }


def _stage_as_json(one: StageDifference, priced: bool) -> dict[str, Any]:
    def price(amount: Decimal) -> float | None:
        return _number(amount) if priced else None

    return {
        "stage": one.stage,
        "forecast": one.forecast,
        "actual": one.actual,
        "difference": one.units,
        "forecast_cost": price(one.forecast_cost),
        "actual_cost": price(one.actual_cost),
        "cost_difference": price(one.cost),
        "parts": [{"why": part.why, "units": part.units, "cost": price(part.cost)} for part in one.parts],
    }


def prices_as_json(prices: Prices) -> dict[str, Any]:
    return {
        **_origin(prices),
        "hours_in_month": prices.hours_in_month,
        "notes": [*prices.notes, *_notes(prices)],
        "tiers": {name: _tier(tier) for name, tier in prices.tiers.items()},
        "bandwidth": {name: _bands(scale) for name, scale in prices.bandwidth.items()},
        "geo_replication": {zone: _number(price) for zone, price in prices.geo_replication.items()},
    }


def _tier(tier: Tier) -> dict[str, Any]:
    return {
        "topics": tier.topics,
        "largest_message": tier.largest_message,
        "base_per_month": _number(tier.base_per_month),
        "messaging_unit_per_hour": _number(tier.messaging_unit_per_hour),
        "operations": None if tier.operations is None else _bands(tier.operations),
        "connections": None if tier.connections is None else _bands(tier.connections),
    }


def _bands(scale: PriceScale) -> dict[str, Any]:
    bands = [
        {"up_to": None if one.up_to is None else int(one.up_to), "price": _number(one.price)} for one in scale.bands
    ]
    return {"per": scale.per, "bands": bands}


def _origin(prices: Prices) -> dict[str, Any]:
    return {
        "date": prices.date.isoformat(),
        "currency": prices.currency,
        "region": prices.region,
        "origin": prices.origin,
        "file": prices.file,
    }


def _sums(bill: Bill) -> dict[str, Any]:
    return {"operations": bill.operations, "units": bill.units, "bytes": bill.bytes, "cost": _number(bill.cost)}


def _outage_as_json(outage: OutageModel, times: int) -> dict[str, Any]:
    return {"times": times, **asdict(outage)}


def _plain(value: object) -> object:
    return value.total_seconds() if isinstance(value, timedelta) else value


def _number(amount: Decimal) -> float:
    return round(float(amount), 12)


# --- layout ---------------------------------------------------------------------------------------------------------


def _table(first: str, *columns: str, narrow: bool = False) -> Table:
    """Return an empty table. A `narrow` one has no lines between columns: six of them fit into 80 characters."""
    from rich import box  # noqa: PLC0415 - slow
    from rich.table import Table  # noqa: PLC0415 - slow

    table = Table(box=box.SIMPLE_HEAD if narrow else box.HEAVY_HEAD)
    table.add_column(first, no_wrap=first in _TEXTS)
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXTS else "right", no_wrap=column != "why")
    return table
