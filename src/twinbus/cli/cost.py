"""`twinbus cost forecast|actual|prices`: the forecast, the actual cost, and the price table for both (M3, M4).

`twinbus.money` computes the costs; `cost_tables` prints them.
"""

from __future__ import annotations

import json as json_text
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinbus.cli import cost_tables
from twinbus.cli.cost_options import field_of, given, read, with_scenario
from twinbus.cli.engine import Master
from twinbus.cli.errors import Debug, WrongUsageError, errors_reported
from twinbus.cli.ledger import DEAD_AFTER, DeadAfter
from twinbus.cli.ledger_spark import (
    IngestFirst,
    KeptTables,
    LedgerOrTables,
    Since,
    Until,
    in_utc,
    kept_or_temporary,
    ledger_and_tables,
    new_results,
    tables_and_writers,
)
from twinbus.cli.result_answers import AsIs, FoundResults, MaxAge, Request, find_results
from twinbus.cli.spinner import spinner
from twinbus.errors import OperatorError
from twinbus.money import Forecast, Prices, PricesError, Scenario, ScenarioError, default_price_text
from twinbus.money import forecast as foreseen

if TYPE_CHECKING:
    from twinbus.pipeline import ActualCost

app = typer.Typer(help="What a pair will cost, what it did cost, and the price table.", no_args_is_help=True)

PricesFile = Annotated[
    Path | None,
    typer.Option("--prices", help="Your own price table, in TOML.", show_default="the one that comes with Twinbus"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def cost() -> None:
    """What a pair will cost, what it did cost, and the price table."""


@app.command()
def prices(
    file: PricesFile = None,
    write: Annotated[
        Path | None, typer.Option(help="Write a copy of the default table to this file, as a start for your own.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the price table with its date, origin and notes.


    Examples:
      twinbus cost prices
      twinbus cost prices --write mine.toml
      twinbus cost prices --prices mine.toml
    """
    with errors_reported(debug=debug):
        if write is not None:
            _write(write)
        table = Prices.load(file)
        if json:
            typer.echo(json_text.dumps(cost_tables.prices_as_json(table)))
        else:
            cost_tables.show_prices(table)


@app.command()
@with_scenario()
def forecast(
    compare: Annotated[
        str | None,
        typer.Option(metavar="OPTION=VALUES", help="Compare values of one option: backlog-queues=2,5,10,20."),
    ] = None,
    file: PricesFile = None,
    json: Json = False,
    debug: Debug = False,
    **asked: Any,
) -> None:
    """Forecast what a pair will cost: idle, during outages and while draining, by stage.


    Examples:
      twinbus cost forecast --backlog-queues 10 --rate 50 --outage 1h
      twinbus cost forecast --rate 50 --compare backlog-queues=2,5,10,20
      twinbus cost forecast --outages 4 --compare syphon=standing,after
      twinbus cost forecast --tier premium --messaging-units 2 --json
    """
    with errors_reported(debug=debug):
        table = Prices.load(file)
        values = given(asked)
        if compare is None:
            found = _foreseen(values, table)
            if json:
                typer.echo(json_text.dumps(cost_tables.forecast_as_json(found)))
            else:
                cost_tables.show_forecast(found)
            return
        option, variants = _variants(compare, values, table)
        if json:
            typer.echo(json_text.dumps({name: cost_tables.forecast_as_json(one) for name, one in variants.items()}))
        else:
            cost_tables.show_variants(option, variants)


@app.command()
@with_scenario(from_ledger=True)
def actual(
    source: LedgerOrTables,
    ledger: IngestFirst = None,
    tables: KeptTables = None,
    since: Since = None,
    until: Until = None,
    max_age: MaxAge = 60.0,
    as_is: AsIs = False,
    dead_after: DeadAfter = DEAD_AFTER,
    file: PricesFile = None,
    master: Master = None,
    json: Json = False,
    debug: Debug = False,
    **asked: Any,
) -> None:
    """Show what a period cost, and beside it the forecast for what really happened.

    There is always a bill. It is in units if the prices are not known.

    The forecast takes period, outages, sizes, subscriptions, intervals and syphons from the ledger.

    Options replace these values. For example, give --rate, --outage and --outages of an earlier forecast.

    A ledger has no tier, messaging units, drain rate, bandwidth or other operations: cost forecast has their defaults.

    Each difference is divided into parts that entries of the ledger show. The rest is called unexplained.

    The window is extended to whole days.

    Examples:
      twinbus cost actual ./ledger
      twinbus cost actual ./tables --ledger ./ledger
      twinbus cost actual ./tables --since 2026-11-01 --until 2026-12-01
      twinbus cost actual ./tables --rate 50 --outage 1h --json
    """
    with errors_reported(debug=debug):
        values = given(asked)
        _scenario(values)
        table, notes = _prices_or_note(file)
        ledger, folder = ledger_and_tables(source, ledger, tables)
        silence = timedelta(seconds=dead_after)
        with kept_or_temporary(folder) as place:
            wanted = Request(
                place, ledger, in_utc(since), in_utc(until), max_age, as_is, silence, "--master" if master else None
            )
            cost, as_of = _actual_cost(wanted, master, values.get("long_poll"))
        found = cost.result(table, values, notes)
        if json:
            more = {} if as_of is None else as_of.as_json()
            typer.echo(json_text.dumps({**cost_tables.result_as_json(found), **more}))
        else:
            cost_tables.show_result(found, table)
            if as_of is not None:
                as_of.show(json=False)


def _actual_cost(
    wanted: Request, master: str | None, long_poll: timedelta | None
) -> tuple[ActualCost, FoundResults | None]:
    """Return the cost from result tables that are up to date, and these; or from Spark, and None."""
    found = find_results("bill", wanted)
    if found is not None:
        return found.results.actual_cost(found.window, long_poll), found
    assert wanted.silence is not None, "the bill depends on which writers are dead"
    place, writers = tables_and_writers(wanted.tables, wanted.ledger, master, wanted.silence)
    from twinbus.answers import HourWindow  # noqa: PLC0415 - slow
    from twinbus.pipeline import TimeWindow, compute_actual_cost  # noqa: PLC0415 - there only with the extra

    with spinner("computing cost"):
        window = TimeWindow(wanted.since, wanted.until)
        if (results := new_results("bill", place, writers, window)) is not None:
            return results.actual_cost(HourWindow(), long_poll), None
        return compute_actual_cost(place, window, writers, long_poll=long_poll), None


def _prices_or_note(file: Path | None) -> tuple[Prices | None, list[str]]:
    """Return the price table. If it cannot be read, return None and a note: the bill is then in units."""
    try:
        return Prices.load(file), []
    except PricesError as error:
        return None, [f"no prices: {error}"]


def _scenario(values: dict[str, Any]) -> Scenario:
    try:
        return Scenario(**values)
    except ScenarioError as error:
        raise WrongUsageError(str(error), "--help explains each option.") from error


def _foreseen(values: dict[str, Any], table: Prices) -> Forecast:
    scenario = _scenario(values)
    try:
        return foreseen(scenario, table)
    except ScenarioError as error:
        raise WrongUsageError(str(error), "--help explains each option.") from error
    except PricesError as error:
        # The price table has no such tier or bandwidth.
        raise WrongUsageError(error.text, error.hint) from error


def _variants(compare: str, values: dict[str, Any], table: Prices) -> tuple[str, dict[str, Forecast]]:
    option, equals, texts = compare.partition("=")
    listed = [text for text in texts.split(",") if text.strip()]
    if not equals or not listed:
        raise WrongUsageError(f"--compare {compare} has no values", "Example: --compare backlog-queues=2,5,10,20")
    field = field_of(option)
    made = {text.strip(): _foreseen(values | {field: read(field, text)}, table) for text in listed}
    return field.replace("_", "-"), made


def _write(path: Path) -> None:
    try:
        with path.open("x", encoding="utf-8") as out:
            out.write(default_price_text())
    except OSError as error:
        hint = "Name a new file in a directory that you may write to."
        raise OperatorError(f"{path} cannot be written: {error.strerror}", hint) from error
    typer.echo(f"written to {path}; edit it and use it with --prices", err=True)
