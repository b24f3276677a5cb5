"""`twinbus report`: write one HTML page from a ledger or from its tables (D4)."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from twinbus.cli.cost import PricesFile
from twinbus.cli.engine import Master, holds_tables
from twinbus.cli.errors import Debug, WrongUsageError, errors_reported
from twinbus.cli.ledger import DeadAfter, has_segments, show_judgement
from twinbus.cli.ledger_spark import Since, Until, in_utc, tables_and_writers
from twinbus.cli.local_paths import path_or_url
from twinbus.cli.spinner import spinner
from twinbus.errors import OperatorError
from twinbus.money import Prices, PricesError, Scenario
from twinbus.storage_location import StorageLocation

if TYPE_CHECKING:
    from twinbus.pipeline import Tables, WriterStates


def report(
    ledger: Annotated[
        StorageLocation,
        typer.Argument(
            parser=path_or_url,
            help="Directory or URL of a ledger, or of the tables that it was ingested into.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    tables: Annotated[
        StorageLocation | None,
        typer.Option(
            parser=path_or_url,
            help="Directory or URL that keeps the tables, so that the next report reads only new entries. On a "
            "cluster: a directory that all machines share.",
            show_default="a temporary folder",
        ),
    ] = None,
    since: Since = None,
    until: Until = None,
    dead_after: DeadAfter = 900.0,
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
      twinbus report ./ledger --tables ./tables --since 2026-11-01 --title "November"
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
        silence = timedelta(seconds=dead_after)
        with _open_tables(ledger, tables, master, silence) as (place, writers), spinner("computing the report"):
            from twinbus.pipeline import TimeWindow, collect_report_data  # noqa: PLC0415 - needs the extra `spark`
            from twinbus.report import ReportInfo, judge_report, render_page  # noqa: PLC0415

            window = TimeWindow(in_utc(since), in_utc(until))
            found = collect_report_data(place, billed, scenario, window, writers)
            about = ReportInfo(
                title,
                ledger.absolute().name,
                datetime.now(UTC),
                billed,
                scenario,
                _window_text(since, until),
            )
            write_page(output, render_page(found, about))
            judged = judge_report(found)
        if json:
            told = {"page": str(output.absolute()), "verdict": judged.verdict, "sentence": judged.sentence}
            typer.echo(json_text.dumps({**told, **found.sums}))
        else:
            show_judgement(judged)
            typer.echo(f"report: {output}")


@contextmanager
def _open_tables(
    ledger: StorageLocation, tables: StorageLocation | None, master: str | None, silence: timedelta
) -> Iterator[tuple[Tables, WriterStates]]:
    """Yield the given tables, or tables made from the given ledger: in `tables`, or in a temporary folder.

    Also yields what is known of the writers of the ledger.
    """
    if holds_tables(ledger):
        if tables is not None:
            raise OperatorError(f"{ledger} contains tables already", "Leave out --tables, or give the ledger.")
        yield tables_and_writers(ledger, None, master, silence)
        return
    if not has_segments(ledger):
        raise OperatorError(
            f"{ledger} contains neither a ledger nor tables",
            "Give the directory that the option `ledger` names, or the tables of `twinbus ledger ingest`.",
        )
    with TemporaryDirectory(prefix="twinbus-report-") if tables is None else nullcontext(tables) as folder:
        yield tables_and_writers(StorageLocation.parse(folder), ledger, master, silence)


def _window_text(since: datetime | None, until: datetime | None) -> str:
    limits = (("from", since), ("before", until))
    return " ".join(f"{word} {instant:%Y-%m-%d %H:%M:%S}" for word, instant in limits if instant is not None)
