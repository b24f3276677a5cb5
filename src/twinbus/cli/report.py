"""`twinbus report`: one page for a person, from a ledger or the tables that it was brought into (D4)."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Final

import typer

from twinbus.cli.cost import PricesFile
from twinbus.cli.errors import Debug, errors_reported
from twinbus.cli.ledger_spark import Master, Since, Until, in_utc, ingested_tables
from twinbus.cli.spinner import spinner
from twinbus.errors import OperatorError
from twinbus.ledger import list_segments
from twinbus.money import Prices, Scenario

if TYPE_CHECKING:
    from twinbus.pipeline import Tables

# What `twinbus ledger ingest` leaves: docs/tables.md.
_CURRENT: Final = "current.json"


def report(
    ledger: Annotated[
        Path, typer.Argument(help="Directory of a ledger, or the tables that it was ingested into.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    tables: Annotated[
        Path | None,
        typer.Option(
            help="Where the ledger's tables are kept, so that the next report reads only what is new. On a cluster: "
            "a folder that all machines share.",
            show_default="a temporary folder",
        ),
    ] = None,
    since: Since = None,
    until: Until = None,
    title: Annotated[str, typer.Option(help="Over the page.")] = "Twinbus report",
    prices: PricesFile = None,
    tier: Annotated[str, typer.Option(help="Of the price table: basic, standard, premium.")] = "standard",
    bandwidth: Annotated[
        str, typer.Option(help="Of the price table: inter_region, internet; or none.")
    ] = "inter_region",
    json: Annotated[bool, typer.Option("--json", help="Print what it adds up to as JSON.")] = False,
    master: Master = None,
    debug: Debug = False,
) -> None:
    """One page to look at: does it add up, what was, what it cost.

    Failovers of each entity, rates and backlog over time, how long diverted messages were on their way, cost by stage.
    The page is one file that needs no network. Ends with 0 whatever the ledger tells: it is `twinbus ledger reconcile`
    that ends with 1 when something is lost.

    Examples:
      twinbus report ./ledger -o report.html
      twinbus report ./ledger --tables ./tables --since 2026-11-01 --title "November"
      twinbus report ./tables --json
    """
    with errors_reported(debug=debug):
        from twinbus.report import check_writable, write_page  # noqa: PLC0415 - other verbs start without

        billed, scenario = Prices.load(prices), Scenario(tier=tier, bandwidth=bandwidth)
        billed.tier(tier)
        billed.zone(bandwidth)
        check_writable(output)
        with _brought_up(ledger, tables, master) as place, spinner("working out the report"):
            from twinbus.pipeline import TimeWindow, collect_report_data  # noqa: PLC0415 - there only with the extra
            from twinbus.report import ReportInfo, render_page  # noqa: PLC0415

            found = collect_report_data(place, billed, scenario, TimeWindow(in_utc(since), in_utc(until)))
            about = ReportInfo(title, ledger.absolute().name, datetime.now(UTC), billed, scenario, _asked(since, until))
            write_page(output, render_page(found, about))
        if json:
            typer.echo(json_text.dumps({"page": str(output.absolute()), **found.sums}))
        else:
            sums = ", ".join(f"{found.sums[name]:,} {name}" for name in ("accepted", "lost", "unknown", "duplicated"))
            typer.echo(f"{output}: {sums}")


@contextmanager
def _brought_up(ledger: Path, tables: Path | None, master: str | None) -> Iterator[Tables]:
    """The tables that were named; or those of a ledger, in the given folder or in one that goes with the block."""
    if (ledger / _CURRENT).is_file():
        if tables is not None:
            raise OperatorError(f"{ledger} holds tables already", "Leave --tables out, or name the ledger itself.")
        yield ingested_tables(ledger, None, master)
        return
    if not ledger.is_dir() or next(list_segments(ledger), None) is None:
        raise OperatorError(
            f"{ledger} holds neither a ledger nor its tables",
            "Name the directory that was given as `ledger`, or the one of `twinbus ledger ingest`.",
        )
    with TemporaryDirectory(prefix="twinbus-report-") if tables is None else nullcontext(tables) as folder:
        yield ingested_tables(Path(folder), ledger, master)


def _asked(since: datetime | None, until: datetime | None) -> str:
    told_of = (("from", since), ("before", until))
    return " ".join(f"{word} {instant:%Y-%m-%d %H:%M:%S}" for word, instant in told_of if instant is not None)
