"""`twinbus ledger ingest|reconcile|cost|incidents|latency`: the jobs of the pipeline, and how they are told."""

from __future__ import annotations

import json as json_text
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli.errors import FAILED, Debug, errors_reported
from twinbus.cli.ledger import LISTED, SUMS, report, show
from twinbus.cli.spinner import spinner
from twinbus.cli.terminal import console
from twinbus.errors import OperatorError
from twinbus.printable import printable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from twinbus.pipeline import Tables, TablesVersion

_POLL_SECONDS: Final = 1
# The last line of a Python trace: the error, with the module it comes from.
_RAISED: Final = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception): (.+)$", re.MULTILINE)


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


Ledger = Annotated[Path, typer.Argument(help="Directory of the ledger.", show_default=False)]
Folder = Annotated[Path, typer.Argument(help="Of the tables; shared by all machines of a cluster.", show_default=False)]
First = Annotated[
    Path | None,
    typer.Option("--ledger", help="Directory of a ledger, from which the tables are brought up to date first."),
]
Since = Annotated[datetime | None, typer.Option(help="From then on, in UTC.", show_default="the beginning")]
Until = Annotated[datetime | None, typer.Option(help="Before then, in UTC.", show_default="the end")]
Form = Annotated[Format, typer.Option("--format", help="For a person, or JSON: one object.")]
Json = Annotated[bool, typer.Option("--json", help="Short for --format json.")]
Master = Annotated[
    str | None, typer.Option(help="Where Spark runs, in its own words.", show_default="as submitted, or this machine")
]
Follow = Annotated[bool, typer.Option("--follow", help="Go on: whenever there is something new. Needs --ledger.")]
Every = Annotated[float, typer.Option(min=1, help="Seconds between two looks, with --follow.")]
Jdbc = Annotated[
    str | None,
    typer.Option(envvar="TWINBUS_JDBC", help="Address of a database that is to have the result too: jdbc:postgresql:…"),
]
Jars = Annotated[str | None, typer.Option(help="Files with drivers, with commas between them.")]


@dataclass(frozen=True, slots=True)
class LedgerJobOptions:
    """What the verbs have in common."""

    tables: Path
    ledger: Path | None
    since: datetime | None
    until: datetime | None
    form: Format
    master: str | None
    follow: bool
    every: float
    jdbc: str | None
    jars: str | None


def ingest(
    ledger: Ledger,
    tables: Folder,
    follow: Annotated[bool, typer.Option("--follow", help="Go on: whenever there is something new.")] = False,
    every: Every = 10.0,
    form: Form = Format.TABLE,
    json: Json = False,
    master: Master = None,
    debug: Debug = False,
) -> None:
    """Bring what is new in a ledger into the tables: each entry once, by day.

    It may be broken off and repeated.

    Lines that cannot be read are told with file and line, and are no reason to end with anything but 0.

    Examples:
      twinbus ledger ingest ./ledger ./tables
      twinbus ledger ingest ./ledger ./tables --follow --every 60
    """
    with errors_reported(debug=debug):
        form = Format.JSON if json else form
        asked = LedgerJobOptions(tables, ledger, None, None, form, master, follow, every, None, None)
        place, query = _opened(asked, ())
        for version in _versions(place, query, asked):
            _print_ingested(place, version, form)


def reconcile(
    tables: Folder,
    ledger: First = None,
    since: Since = None,
    until: Until = None,
    form: Form = Format.TABLE,
    json: Json = False,
    master: Master = None,
    follow: Follow = False,
    every: Every = 10.0,
    jdbc: Jdbc = None,
    jars: Jars = None,
    debug: Debug = False,
) -> None:
    """Does everything add up? On Spark, over any number of messages.

    The sums are those of `check`; for a window, of the messages that were accepted in it.

    Ends with 1 when something is lost.

    Examples:
      twinbus ledger reconcile ./tables --ledger ./ledger
      twinbus ledger reconcile ./tables --since 2026-11-01 --until 2026-12-01 --json
    """
    with errors_reported(debug=debug):
        form = Format.JSON if json else form
        asked = LedgerJobOptions(tables, ledger, since, until, form, master, follow, every, jdbc, jars)
        lost = False
        for place, rows in _results("reconcile", asked):
            lost = _print_balance(place, rows, form)
        if lost:
            raise typer.Exit(FAILED)


def cost(
    tables: Folder,
    ledger: First = None,
    since: Since = None,
    until: Until = None,
    form: Form = Format.TABLE,
    json: Json = False,
    master: Master = None,
    follow: Follow = False,
    every: Every = 10.0,
    jdbc: Jdbc = None,
    jars: Jars = None,
    debug: Debug = False,
) -> None:
    """Operations, billable units and bytes by day, stage and entity.

    Examples:
      twinbus ledger cost ./tables --ledger ./ledger
      twinbus ledger cost ./tables --since 2026-11-01 --json
    """
    with errors_reported(debug=debug):
        form = Format.JSON if json else form
        asked = LedgerJobOptions(tables, ledger, since, until, form, master, follow, every, jdbc, jars)
        for _, rows in _results("cost", asked):
            _print_rows(rows.orderBy("day", "stage", "namespace", "entity"), form)


def incidents(
    tables: Folder,
    ledger: First = None,
    since: Since = None,
    until: Until = None,
    form: Form = Format.TABLE,
    json: Json = False,
    master: Master = None,
    follow: Follow = False,
    every: Every = 10.0,
    jdbc: Jdbc = None,
    jars: Jars = None,
    debug: Debug = False,
) -> None:
    """Failovers of each entity: when, why, how many diverted, and when all were home.

    Examples:
      twinbus ledger incidents ./tables --ledger ./ledger
      twinbus ledger incidents ./tables --ledger ./ledger --follow
    """
    with errors_reported(debug=debug):
        form = Format.JSON if json else form
        asked = LedgerJobOptions(tables, ledger, since, until, form, master, follow, every, jdbc, jars)
        for _, rows in _results("incidents", asked):
            _print_rows(rows.orderBy("began", "destination"), form, instants=("began", "restored", "drained"))


def latency(
    tables: Folder,
    ledger: First = None,
    since: Since = None,
    until: Until = None,
    form: Form = Format.TABLE,
    json: Json = False,
    master: Master = None,
    follow: Follow = False,
    every: Every = 10.0,
    jdbc: Jdbc = None,
    jars: Jars = None,
    debug: Debug = False,
) -> None:
    """How long diverted messages were on their way home, in seconds, by entity and day.

    Examples:
      twinbus ledger latency ./tables --ledger ./ledger
      twinbus ledger latency ./tables --json
    """
    with errors_reported(debug=debug):
        form = Format.JSON if json else form
        asked = LedgerJobOptions(tables, ledger, since, until, form, master, follow, every, jdbc, jars)
        for _, rows in _results("latency", asked):
            _print_rows(rows.orderBy("day", "destination"), form)


# --- running ---------------------------------------------------------------------------------------------------------


def ingested_tables(tables: Path, ledger: Path | None, master: str | None) -> Tables:
    """The tables, with what is new in the ledger, if one was named: for other verbs that ask jobs."""
    asked = LedgerJobOptions(tables, ledger, None, None, Format.TABLE, master, False, 0.0, None, None)
    place, query = _opened(asked, ())
    for _ in _versions(place, query, asked):
        pass
    return place


def _opened(asked: LedgerJobOptions, jobs: Sequence[str]) -> tuple[Tables, StreamingQuery | None]:
    """The tables, and what brings them up to date, if a ledger was named."""
    if asked.follow and asked.ledger is None:
        raise OperatorError("--follow needs a ledger to follow", "Name its directory with --ledger.")
    if asked.ledger is not None and not asked.ledger.is_dir():
        raise OperatorError(f"{asked.ledger} is no directory", "Name the directory that was given as `ledger`.")
    from twinbus.pipeline.session import session  # noqa: PLC0415 - slow, and says what to install

    with spinner("starting Spark"):
        jars = {"spark.jars": asked.jars} if asked.jars else None
        spark = session("twinbus ledger", master=asked.master, settings=jars)
    from twinbus.pipeline import Tables, follow_jobs, ingest_ledger  # noqa: PLC0415 - there only with the extra

    tables = Tables(spark, asked.tables)
    if asked.ledger is None:
        if not tables.version().number:
            raise OperatorError(f"{asked.tables} holds no tables", "Bring a ledger into them: twinbus ledger ingest.")
        return tables, None
    extend = follow_jobs(jobs) if asked.follow else None
    return tables, ingest_ledger(
        spark, asked.ledger, asked.tables, every=asked.every if asked.follow else None, extend=extend
    )


def _versions(tables: Tables, query: StreamingQuery | None, asked: LedgerJobOptions) -> Iterator[TablesVersion]:
    """The tables as they are now; with --follow, again after every commit until a signal ends it."""
    if query is None or not asked.follow:
        if query is not None:
            with spinner(f"reading {asked.ledger}"), _spark_errors_explained():
                query.awaitTermination()
        yield tables.version()
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: query.stop())
    shown, ended = 0, False
    while not ended:
        with _spark_errors_explained():
            ended = bool(query.awaitTermination(_POLL_SECONDS))
        version = tables.version()
        if version.number != shown:
            shown = version.number
            yield version


@contextmanager
def _spark_errors_explained() -> Iterator[None]:
    """What ended a stream, without the traces of three processes around it."""
    from pyspark.errors import StreamingQueryException  # noqa: PLC0415 - there only with the extra

    try:
        yield
    except StreamingQueryException as error:
        raised = _RAISED.findall(str(error))
        if not raised:
            raise
        raise OperatorError(f"the ledger could not be read into the tables: {raised[-1]}") from error


def _results(name: str, asked: LedgerJobOptions) -> Iterator[tuple[Tables, DataFrame]]:
    tables, query = _opened(asked, (name,))
    from twinbus.pipeline import (  # noqa: PLC0415 - there only with the extra
        JOBS,
        TimeWindow,
        current_result,
        saved_result,
        write_to_database,
    )

    job, window = JOBS[name], TimeWindow(in_utc(asked.since), in_utc(asked.until))
    for _ in _versions(tables, query, asked):
        with ExitStack() as stack:
            with spinner(f"computing {name}"):
                rows = stack.enter_context(saved_result(tables, job, current_result(tables, job, window)))
            if asked.jdbc is not None:
                write_to_database(job, rows, asked.jdbc)
            yield tables, rows


def in_utc(instant: datetime | None) -> datetime | None:
    return None if instant is None else instant.replace(tzinfo=instant.tzinfo or UTC)


# --- telling ---------------------------------------------------------------------------------------------------------


def _print_ingested(tables: Tables, version: TablesVersion, form: Format) -> None:
    from twinbus.pipeline import PROBLEMS, SCHEMAS  # noqa: PLC0415 - there only with the extra

    counts = {table: tables.read(table, version=version).count() for table in SCHEMAS}
    problems = [row.asDict() for row in tables.read(PROBLEMS, version=version).orderBy("file", "line").collect()]
    if form is Format.JSON:
        typer.echo(json_text.dumps({**counts, PROBLEMS: problems}))
        return
    for table, count in counts.items():
        typer.echo(f"{table:12} {count:>14,}")
    for problem in problems:
        typer.echo(printable(f"  {problem['file']}, line {problem['line']}: {problem['cause']}"))


def _print_balance(tables: Tables, rows: DataFrame, form: Format) -> bool:
    """Whether something is lost."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody calls it

    from twinbus.pipeline import why_incomplete  # noqa: PLC0415

    names = (*SUMS, "in_flight")
    found = rows.agg(*(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in names)).first()
    assert found is not None, "an aggregate without keys has a row"
    sums = found.asDict()
    named = rows.where("id is not null").orderBy("destination", "id").collect()
    listed = {name: [((row.destination, row.id), row[name]) for row in named if row[name]] for name in LISTED}
    missing = why_incomplete(tables)
    if form is Format.JSON:
        typer.echo(json_text.dumps(report(sums, listed, missing)))
    else:
        show(sums, listed, missing)
        if sums["in_flight"]:
            typer.echo(f"\nin flight: {sums['in_flight']:,} of the unknown and unconfirmed may yet be told")
    return bool(sums["lost"])


def _print_rows(rows: DataFrame, form: Format, instants: Sequence[str] = ()) -> None:
    found = [_plain(row.asDict(), instants) for row in rows.collect()]
    if form is Format.JSON:
        typer.echo(json_text.dumps(found))
        return
    from rich.table import Table  # noqa: PLC0415 - slow

    table = Table(*rows.columns)
    for row in found:
        table.add_row(*("" if value is None else _shown(value) for value in row.values()))
    console().print(table)


def _plain(row: Mapping[str, Any], instants: Sequence[str]) -> dict[str, Any]:
    def plain(name: str, value: Any) -> Any:
        if name in instants and value is not None:
            return datetime.fromtimestamp(value / 1000, UTC).isoformat(timespec="milliseconds")
        return value.isoformat() if isinstance(value, date) else value

    return {name: plain(name, value) for name, value in row.items()}


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else printable(str(value))
