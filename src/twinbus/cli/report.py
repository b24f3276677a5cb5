"""`twinbus report`: write one HTML page from a ledger or from its tables (D4)."""

from __future__ import annotations

import json as json_text
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinbus.cli.cost import PricesFile
from twinbus.cli.engine import Master
from twinbus.cli.errors import Debug, WrongUsageError, errors_reported
from twinbus.cli.ledger import DEAD_AFTER, DeadAfter, show_judgement
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
from twinbus.money import Prices, PricesError, Scenario

if TYPE_CHECKING:
    from twinbus.pipeline import ReportData


def report(
    source: LedgerOrTables,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    tables: KeptTables = None,
    ledger: IngestFirst = None,
    since: Since = None,
    until: Until = None,
    max_age: MaxAge = 60.0,
    as_is: AsIs = False,
    dead_after: DeadAfter = DEAD_AFTER,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Twinbus report",
    prices: PricesFile = None,
    tier: Annotated[str, typer.Option(help="Tier in the price table: basic, standard, premium.")] = "standard",
    bandwidth: Annotated[
        str, typer.Option(help="Zone in the price table: inter_region, internet; or none.")
    ] = "inter_region",
    json: Annotated[bool, typer.Option("--json", help="Print the verdict and the sums as JSON.")] = False,
    master: Master = None,
    debug: Debug = False,
) -> None:
    """Write a report on a ledger as one HTML page.

    It shows the failovers of each entity, rates and backlog over time, delivery times of diverted messages, and cost
    by stage. The page is one file and needs no network.

    Exit code: 0, whatever the verdict is. `twinbus ledger reconcile` has an exit code for each verdict.

    Examples:
      twinbus report ./ledger -o report.html
      twinbus report ./tables --since 2026-11-01 --title "November"
      twinbus report ./tables --json
    """
    with errors_reported(debug=debug):
        from twinbus.report import check_writable, write_page  # noqa: PLC0415 - other verbs start without

        billed, scenario = Prices.load(prices), Scenario(tier=tier, bandwidth=bandwidth)
        try:
            billed.tier(tier)
            billed.zone(bandwidth)
        except PricesError as error:
            raise WrongUsageError(error.text, error.hint) from error
        check_writable(output)
        given, folder = ledger_and_tables(source, ledger, tables)
        with kept_or_temporary(folder) as place:
            wanted = Request(
                place, given, in_utc(since), in_utc(until), max_age, as_is, timedelta(seconds=dead_after),
                "--master" if master else None,
            )  # fmt: skip
            data, as_of = _report_data(wanted, master, billed, scenario)
        from twinbus.report import ReportInfo, judge_report, render_page  # noqa: PLC0415 - other verbs start without

        texts = (_window_text(since, until), "" if as_of is None else as_of.text())
        asked = " · ".join(filter(None, texts))
        about = ReportInfo(title, source.absolute().name, datetime.now(UTC), billed, scenario, asked)
        write_page(output, render_page(data, about))
        judged = judge_report(data)
        if json:
            told = {"page": str(output.absolute()), "verdict": judged.verdict, "sentence": judged.sentence}
            typer.echo(json_text.dumps({**told, **data.sums, **({} if as_of is None else as_of.as_json())}))
        else:
            show_judgement(judged)
            typer.echo(f"report: {output}")
            if as_of is not None:
                as_of.show(json=False)


def _report_data(
    wanted: Request, master: str | None, prices: Prices, scenario: Scenario
) -> tuple[ReportData, FoundResults | None]:
    """Return the data from result tables that are up to date, and these; or from Spark, and None."""
    from twinbus.answers import HourWindow, report_data  # noqa: PLC0415 - slow, and needs the extra `tables`

    found = find_results("report", wanted)
    if found is not None:
        return report_data(found.results, prices, scenario, found.window), found
    assert wanted.silence is not None, "the verdict depends on which writers are dead"
    place, writers = tables_and_writers(wanted.tables, wanted.ledger, master, wanted.silence)
    with spinner("computing the report"):
        from twinbus.pipeline import TimeWindow, collect_report_data  # noqa: PLC0415 - needs the extra `spark`

        window = TimeWindow(wanted.since, wanted.until)
        if (results := new_results("report", place, writers, window)) is not None:
            return report_data(results, prices, scenario, HourWindow()), None
        return collect_report_data(place, prices, scenario, window, writers), None


def _window_text(since: datetime | None, until: datetime | None) -> str:
    limits = (("from", since), ("before", until))
    return " ".join(f"{word} {instant:%Y-%m-%d %H:%M:%S}" for word, instant in limits if instant is not None)
