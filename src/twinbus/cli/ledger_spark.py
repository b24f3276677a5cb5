"""`twinbus ledger ingest|reconcile|cost|incidents|latency`: run the jobs of the pipeline and print their results."""

from __future__ import annotations

import inspect
import json as json_text
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli.connections import NOT_TYPED
from twinbus.cli.engine import (
    Master,
    holds_tables,
    refuse_missing_jars,
    refuse_no_folder,
    refuse_unusable_tables,
    spark_session,
)
from twinbus.cli.errors import Debug, WrongUsageError, errors_reported
from twinbus.cli.ledger import LISTED, SUMS, LedgerLocation, report, show
from twinbus.cli.ledger_audit import AuditDeadAfter, audit_json, run_audit_on_spark, show_audit, spark_errors_explained
from twinbus.cli.local_paths import path_or_url
from twinbus.cli.network import network_options
from twinbus.cli.spinner import spinner
from twinbus.cli.tables import Cell, print_table
from twinbus.errors import OperatorError
from twinbus.pipeline import TableStorage
from twinbus.printable import printable
from twinbus.storage_location import StorageLocation, refuse_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from twinbus.pipeline import Tables, TablesVersion, WriterStates
    from twinbus.syphon import AuditSummary

_POLL_SECONDS: Final = 1
# Titles of columns in a printed table; JSON has the names.
_TITLES: Final = {
    "destination": "entity",
    "began": "began, UTC",
    "seconds_to_restore": "to restore, s",
    "seconds_to_drain": "to drain, s",
}


class Format(StrEnum):
    """Values of the deprecated option --format."""

    TABLE = "table"
    JSON = "json"


TablesFolder = Annotated[
    StorageLocation,
    typer.Argument(
        parser=path_or_url,
        help="Directory of the tables, or their URL; on a cluster, a directory that all machines share.",
        show_default=False,
    ),
]
IngestFirst = Annotated[
    StorageLocation | None,
    typer.Option(
        "--ledger",
        parser=path_or_url,
        help="Directory of a ledger, or its URL. Its new entries are ingested first.",
    ),
]
Since = Annotated[
    datetime | None,
    typer.Option(
        metavar="TIME",
        help="Start of the window, in UTC: 2026-11-01, or 2026-11-01T08:30:00.",
        show_default="the beginning",
    ),
]
Until = Annotated[
    datetime | None,
    typer.Option(metavar="TIME", help="End of the window, in UTC; not part of it.", show_default="the end"),
]
DeprecatedFormat = Annotated[Format, typer.Option("--format", hidden=True)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Follow = Annotated[bool, typer.Option("--follow", help="Keep running: print again after new entries. Needs --ledger.")]
Every = Annotated[float, typer.Option(min=1, help="With --follow: seconds between two checks for new entries.")]
Jdbc = Annotated[
    str | None,
    typer.Option(
        envvar="TWINBUS_JDBC",
        help=f"JDBC URL of a database that also gets the result: jdbc:postgresql:… {NOT_TYPED}",
    ),
]
OptionalSecondary = Annotated[
    str | None,
    typer.Option(
        "--secondary",
        envvar="TWINBUS_SECONDARY_CONNECTION_STRING",
        show_default=False,
        help=f"With --audit: connection string of the secondary. {NOT_TYPED}",
    ),
]
Jars = Annotated[str | None, typer.Option(help="JAR files with JDBC drivers, separated by commas.")]


@dataclass(frozen=True, slots=True)
class LedgerJobOptions:
    """Options that all verbs in this module share."""

    tables: StorageLocation
    ledger: StorageLocation | None
    since: datetime | None
    until: datetime | None
    json: bool
    master: str | None
    follow: bool
    every: float
    jdbc: str | None
    jars: str | None
    silence: timedelta = timedelta(minutes=15)
    """A writer that no lock shows counts as dead after this time without an entry."""


def ingest(
    ledger: LedgerLocation,
    tables: TablesFolder,
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep running: ingest new entries when they appear.")
    ] = False,
    every: Every = 10.0,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Remove the tables first, and read the whole ledger again.")
    ] = False,
    form: DeprecatedFormat = Format.TABLE,
    json: Json = False,
    master: Master = None,
    debug: Debug = False,
) -> None:
    """Ingest the new entries of a ledger into the tables: each entry once, by day.

    It can be interrupted and repeated.

    Lines that cannot be read are listed with file and line. They do not change the exit code.

    Examples:
      twinbus ledger ingest ./ledger ./tables
      twinbus ledger ingest ./ledger ./tables --follow --every 60
      twinbus ledger ingest ./ledger ./tables --rebuild
    """
    with errors_reported(debug=debug):
        json = _wants_json(json, form)
        options = LedgerJobOptions(tables, ledger, None, None, json, master, follow, every, None, None)
        place, _, query = _opened(options, (), rebuild=rebuild)
        for version in _versions(place, query, options):
            _print_ingested(place, version, json)


def job_verb(verb: Callable[..., None]) -> Callable[..., None]:
    """Make a verb of the command line from a function: the verb has the options of `_job_options`, and --debug.

    The first parameter of the function is `LedgerJobOptions`. Its other parameters are further options of the verb.
    """
    own = [*inspect.signature(verb, eval_str=True).parameters.values()][1:]

    @wraps(verb)
    def run(*, debug: bool, **given: Any) -> None:
        with errors_reported(debug=debug):
            further = {one.name: given.pop(one.name) for one in own}
            verb(_job_options(**given), **further)

    shared = [*inspect.signature(_job_options, eval_str=True).parameters.values(), *own]
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    run.__signature__ = inspect.Signature([*shared, debug])  # type: ignore[attr-defined] # typer reads this attribute
    run.__annotations__ = {one.name: one.annotation for one in (*shared, debug)} | {"return": None}
    return run


def _job_options(
    tables: TablesFolder,
    ledger: IngestFirst = None,
    since: Since = None,
    until: Until = None,
    form: DeprecatedFormat = Format.TABLE,
    json: Json = False,
    master: Master = None,
    follow: Follow = False,
    every: Every = 10.0,
    jdbc: Jdbc = None,
    jars: Jars = None,
) -> LedgerJobOptions:
    """Return the values of the options that the verbs about one job share. The signature defines these options."""
    return LedgerJobOptions(tables, ledger, since, until, _wants_json(json, form), master, follow, every, jdbc, jars)


@network_options
@job_verb
def reconcile(
    options: LedgerJobOptions,
    audit: Annotated[bool, typer.Option("--audit", help="Compare the ledger with the backlog queues first.")] = False,
    secondary: OptionalSecondary = None,
    dead_after: AuditDeadAfter = None,
) -> None:
    """Check on Spark that every message is accounted for.

    The sums are those of `twinbus ledger check`. With a window they count the messages accepted in it.

    The first line is the verdict: proven, proven with possible duplicates, not proven, or lost.

    Exit code: 0 if proven, also with possible duplicates; 3 if not proven; 1 if a message is lost or on an error.

    Examples:
      twinbus ledger reconcile ./tables --ledger ./ledger
      twinbus ledger reconcile ./tables --since 2026-11-01 --until 2026-12-01 --json
      twinbus ledger reconcile ./tables --ledger ./ledger --audit
    """
    silence = None if dead_after is None else timedelta(seconds=dead_after)
    options = options if silence is None else replace(options, silence=silence)
    audited = _audited(options, secondary, silence) if audit else None
    code = 0
    for place, writers, rows in _results("reconcile", options):
        code = _print_balance(place, writers, rows, options.json, audited)
    if code:
        raise typer.Exit(code)


@job_verb
def cost(options: LedgerJobOptions) -> None:
    """Show operations, billable units and bytes by day, stage and entity.


    Examples:
      twinbus ledger cost ./tables --ledger ./ledger
      twinbus ledger cost ./tables --since 2026-11-01 --json
    """
    for _, _, rows in _results("cost", options):
        _print_rows(rows.orderBy("day", "stage", "namespace", "entity"), options.json)


@job_verb
def incidents(options: LedgerJobOptions) -> None:
    """List the failovers of each entity: when, why, how many messages were diverted, and when all were delivered.


    Examples:
      twinbus ledger incidents ./tables --ledger ./ledger
      twinbus ledger incidents ./tables --ledger ./ledger --follow
    """
    for _, _, rows in _results("incidents", options):
        _print_rows(rows.orderBy("began", "destination"), options.json, instants=("began", "restored", "drained"))


@job_verb
def latency(options: LedgerJobOptions) -> None:
    """Show how long diverted messages took to reach the primary: seconds, by entity and day.

    Times are by the broker's clock. Names writers whose clocks differ from it by more than 1 s.

    Examples:
      twinbus ledger latency ./tables --ledger ./ledger
      twinbus ledger latency ./tables --json
    """
    for tables, _, rows in _results("latency", options):
        _print_rows(rows.orderBy("day", "destination"), options.json)
        _print_clocks(tables, rows, options)


def _wants_json(json: bool, form: Format) -> bool:
    if form is Format.JSON:
        typer.echo("--format json is deprecated and will be removed in 0.2: use --json", err=True)
    return json or form is Format.JSON


# --- running ---------------------------------------------------------------------------------------------------------


def ingested_tables(tables: StorageLocation, ledger: StorageLocation | None, master: str | None) -> Tables:
    """Return the tables. If a ledger is given, its new entries are ingested first. Verbs of other modules use this."""
    return tables_and_writers(tables, ledger, master)[0]


def tables_and_writers(
    tables: StorageLocation,
    ledger: StorageLocation | None,
    master: str | None,
    silence: timedelta = timedelta(minutes=15),
) -> tuple[Tables, WriterStates]:
    """Return the tables, as `ingested_tables` does, and what is known of the writers of the ledger."""
    options = LedgerJobOptions(tables, ledger, None, None, False, master, False, 0.0, None, None, silence)
    place, writers, query = _opened(options, ())
    for _ in _versions(place, query, options):
        pass
    return place, writers


def _opened(
    options: LedgerJobOptions, jobs: Sequence[str], *, rebuild: bool = False
) -> tuple[Tables, WriterStates, StreamingQuery | None]:
    """Return the tables, the writers of the ledger, and the query that ingests it, or None if no ledger is given."""
    if options.follow and options.ledger is None:
        raise WrongUsageError("--follow needs a ledger", "Name its directory with --ledger.")
    if not rebuild:
        TableStorage(options.tables).refuse_old_format()
    tables = _tables(options)
    from twinbus.pipeline import WriterStates, follow_jobs, ingest_ledger  # noqa: PLC0415 - needs Spark

    if rebuild:
        tables.remove()
    if options.ledger is None:
        return tables, WriterStates(silence=options.silence), None
    every, extend = (options.every, follow_jobs(jobs)) if options.follow else (None, None)
    writers = WriterStates.in_ledger(options.ledger, options.silence)
    return tables, writers, ingest_ledger(tables.spark, options.ledger, options.tables, every=every, extend=extend)


def _check_before_spark(options: LedgerJobOptions) -> None:
    """Raise an error for paths and options with which the job would fail after Spark has started."""
    if options.since is not None and options.until is not None and options.since >= options.until:
        raise WrongUsageError("--since is not before --until: the window is empty", "Give an earlier --since.")
    refuse_missing_jars(options.jars)
    if options.ledger is not None:
        refuse_no_folder("the ledger", options.ledger)
        refuse_unusable_tables(options.tables)
    elif not holds_tables(options.tables):
        raise OperatorError(f"{options.tables} holds no tables", "Bring a ledger into them: twinbus ledger ingest.")


def _tables(options: LedgerJobOptions) -> Tables:
    """Start Spark, and return the tables."""
    _check_before_spark(options)
    jars = {"spark.jars": options.jars} if options.jars else None
    spark = spark_session("twinbus ledger", options.master, jars)
    from twinbus.pipeline import Tables  # noqa: PLC0415 - needs Spark

    return Tables(spark, options.tables)


def _versions(tables: Tables, query: StreamingQuery | None, options: LedgerJobOptions) -> Iterator[TablesVersion]:
    """Yield the version of the tables once. With --follow: after every commit, until a signal."""
    if query is None or not options.follow:
        if query is not None:
            with spinner(f"reading {options.ledger}"), spark_errors_explained():
                query.awaitTermination()
        yield tables.version()
        return
    from twinbus.pipeline import SEGMENTS  # noqa: PLC0415 - needs the extra `tables`

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The handler may run during a call of the JVM, so it must not make another call.
        signal.signal(number, lambda *_: stopping.set())
    shown: int | None = None
    ended = False
    while not ended:
        with spark_errors_explained():
            ended = bool(query.awaitTermination(_POLL_SECONDS))
            if stopping.is_set():
                query.stop()
        version = tables.version()
        # Results that are written make a snapshot, too. Only a batch changes the version of this table.
        if (ingested := version.tables.get(SEGMENTS)) != shown:
            shown = ingested
            yield version


def _results(name: str, options: LedgerJobOptions) -> Iterator[tuple[Tables, WriterStates, DataFrame]]:
    tables, writers, query = _opened(options, (name,))
    from twinbus.pipeline import (  # noqa: PLC0415 - needs the extra `spark`
        JOBS,
        TimeWindow,
        WriterStates,
        current_result,
        write_results,
        write_to_database,
    )

    job, window = JOBS[name], TimeWindow(in_utc(options.since), in_utc(options.until))
    for _ in _versions(tables, query, options):
        with ExitStack() as stack:
            with spinner(f"computing {name}"):
                rows = current_result(tables, job, window, writers).persist()
                stack.callback(rows.unpersist)
                if window.is_unlimited:
                    write_results(tables, writers, (name,))
            if options.jdbc is not None:
                write_to_database(job, rows, options.jdbc)
            yield tables, writers, rows
        if options.ledger is not None:
            # For the next result of --follow: all entries of these dead writers are ingested before that result.
            writers = WriterStates.in_ledger(options.ledger, options.silence)


def in_utc(instant: datetime | None) -> datetime | None:
    return None if instant is None else instant.replace(tzinfo=instant.tzinfo or UTC)


# --- printing -------------------------------------------------------------------------------------------------------


def _print_ingested(tables: Tables, version: TablesVersion, json: bool) -> None:
    from twinbus.pipeline import PROBLEMS, SCHEMAS  # noqa: PLC0415 - needs the extra `spark`

    counts = {table: sum(file.rows for file in tables.files(table, version)) for table in SCHEMAS}
    found = tables.read(PROBLEMS, version=version).orderBy("file", "line").collect() if counts[PROBLEMS] else []
    problems = [row.asDict() for row in found]
    if json:
        typer.echo(json_text.dumps({**counts, PROBLEMS: problems}))
        return
    for table, count in counts.items():
        typer.echo(f"{table:12} {count:>14,}")
    for problem in problems:
        typer.echo(printable(f"  {problem['file']}, line {problem['line']}: {problem['cause']}"))


def _audited(options: LedgerJobOptions, secondary: str | None, silence: timedelta | None) -> AuditSummary:
    """Audit the ledger on Spark, with the same tables. The reconciliation then has what the audit recorded."""
    if options.ledger is None or secondary is None:
        raise WrongUsageError(
            "--audit needs a ledger and the secondary",
            "Give --ledger, and set TWINBUS_SECONDARY_CONNECTION_STRING.",
        )
    if options.ledger.is_url or options.tables.is_url:
        raise WrongUsageError(
            "--audit needs a ledger and tables in local folders", "An audit records in the ledger what it saw."
        )
    if options.follow:
        raise WrongUsageError("--audit cannot be combined with --follow", "Leave out one of them.")
    return run_audit_on_spark(refuse_url(options.ledger), secondary, _tables(options), silence=silence)


def _print_balance(
    tables: Tables, writers: WriterStates, rows: DataFrame, json: bool, audited: AuditSummary | None = None
) -> int:
    """Print the balance, and what an audit saw. Return the exit code of the balance's verdict."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - its usual name

    from twinbus.ledger import judge_ledger  # noqa: PLC0415
    from twinbus.pipeline import why_incomplete  # noqa: PLC0415

    names = (*SUMS, "in_flight")
    found = rows.agg(*(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in names)).first()
    assert found is not None, "an aggregate without keys has a row"
    sums = found.asDict()
    named = rows.where("id is not null").orderBy("destination", "id").collect()
    listed = {name: [((row.destination, row.id), row[name]) for row in named if row[name]] for name in LISTED}
    missing = why_incomplete(tables, writers)
    if json:
        more = {} if audited is None else {"audit": audit_json(audited)}
        typer.echo(json_text.dumps({**report(sums, listed, missing), **more}))
    else:
        show(sums, listed, missing)
        if audited is not None:
            show_audit(audited)
        if sums["in_flight"]:
            typer.echo(f"\nin flight: {sums['in_flight']:,} of the unknown and unconfirmed may still get an outcome")
    return judge_ledger(sums, missing).exit_code


def _print_rows(rows: DataFrame, json: bool, instants: Sequence[str] = ()) -> None:
    found = [_plain(row.asDict(), instants) for row in rows.collect()]
    if json:
        typer.echo(json_text.dumps(found))
        return
    columns = [_TITLES.get(name, name.replace("_", " ")) for name in rows.columns]
    print_table(columns, [_cells(row, instants) for row in found], wrapped={"cause"}, optional={"unknown clock"})


def _print_clocks(tables: Tables, rows: DataFrame, options: LedgerJobOptions) -> None:
    """Print which writers' clocks differ from the broker's (L5): to stderr if stdout has JSON."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - its usual name

    from twinbus.pipeline import TimeWindow, off_clocks  # noqa: PLC0415 - needs the extra `spark`
    from twinbus.report import clock_text, unknown_clock_text  # noqa: PLC0415

    found = rows.agg(F.coalesce(F.sum("unknown_clock"), F.lit(0))).first()
    assert found is not None, "an aggregate without keys has a row"
    if found[0]:
        typer.echo(unknown_clock_text(found[0]), err=options.json)
    for clock in off_clocks(tables, TimeWindow(in_utc(options.since), in_utc(options.until))):
        typer.echo(printable(clock_text(clock)), err=options.json)


def _plain(row: Mapping[str, Any], instants: Sequence[str]) -> dict[str, Any]:
    def plain(name: str, value: Any) -> Any:
        if name in instants and value is not None:
            return datetime.fromtimestamp(value / 1000, UTC).isoformat(timespec="milliseconds")
        return value.isoformat() if isinstance(value, date) else value

    return {name: plain(name, value) for name, value in row.items()}


def _cells(row: Mapping[str, Any], instants: Sequence[str]) -> list[Cell]:
    """Return the cells of a row. Instants are in UTC, to the second; one on the day of the first has no date."""
    days = [row[name][:10] for name in instants if row[name] is not None]

    def cell(name: str, value: Any) -> Cell:
        if name in instants and value is not None:
            day, time = value[:10], value[11:19]
            return time if name != instants[0] and day == days[0] else f"{day} {time}"
        return None if name == "unknown_clock" and not value else value

    return [cell(name, value) for name, value in row.items()]
