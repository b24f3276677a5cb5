"""`twinbus ledger ingest|reconcile|cost|incidents|latency`: run the jobs of the pipeline and print their results."""

from __future__ import annotations

import inspect
import json as json_text
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import wraps
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

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
from twinbus.cli.interrupts import stop_on_signals
from twinbus.cli.job_answers import JobAnswer, answer_from_results, answer_from_spark, print_balance, print_rows
from twinbus.cli.ledger import LedgerLocation, has_segments
from twinbus.cli.ledger_audit import AuditDeadAfter, run_audit_on_spark, spark_errors_explained
from twinbus.cli.local_paths import path_or_url
from twinbus.cli.network import network_options
from twinbus.cli.option_values import span_option
from twinbus.cli.result_answers import AsIs, MaxAge, Request, find_results
from twinbus.cli.spinner import spinner
from twinbus.errors import OperatorError
from twinbus.ledger import SILENCE
from twinbus.object_store import StorageError
from twinbus.pipeline import TableStorage
from twinbus.printable import printable
from twinbus.storage_location import StorageLocation, refuse_url

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from twinbus.answers import Results
    from twinbus.pipeline import BatchTurns, Tables, TablesVersion, TimeWindow, WriterStates
    from twinbus.syphon import AuditSummary

_POLL_SECONDS: Final = 1


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
LedgerOrTables = Annotated[
    StorageLocation,
    typer.Argument(
        parser=path_or_url,
        metavar="LEDGER|TABLES",
        help="Directory or URL of a ledger, or of the tables that it was ingested into.",
        show_default=False,
    ),
]
KeptTables = Annotated[
    StorageLocation | None,
    typer.Option(
        "--tables",
        parser=path_or_url,
        help="With a ledger: directory or URL that keeps its tables and results. On a cluster: a directory that all "
        "machines share.",
        show_default="a temporary folder",
    ),
]
IngestFirst = Annotated[
    StorageLocation | None,
    typer.Option(
        "--ledger",
        parser=path_or_url,
        help="With tables: directory of a ledger, or its URL. If the results do not have all its entries, they are "
        "ingested first.",
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
Horizon = Annotated[
    timedelta,
    span_option(
        "Finished messages whose newest entry is older than this are settled: they keep no row of their own.",
        show_default="30d",
    ),
]
Jdbc = Annotated[
    str | None,
    typer.Option(
        envvar="TWINBUS_JDBC",
        help=f"JDBC URL of a database that also gets the result: jdbc:postgresql:… {NOT_TYPED}",
    ),
]
AuditedSecondary = Annotated[
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
    max_age: float = 60.0
    as_is: bool = False
    silence: timedelta = SILENCE
    """A writer that no lock shows counts as dead after this time without an entry."""
    horizon: timedelta = timedelta(days=30)
    """With --follow: finished messages whose newest entry is older than this are settled."""

    @property
    def on_spark(self) -> str | None:
        """The option that makes Spark answer, if one was given."""
        given = {"--follow": self.follow, "--jdbc": self.jdbc, "--master": self.master}
        return next((name for name, value in given.items() if value), None)


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
        place, _, reading = _opened(options, (), rebuild=rebuild)
        for version in _versions(place, reading, options):
            _print_ingested(place, version, json)


def job_verb(verb: Callable[..., None]) -> Callable[..., None]:
    """Make a verb of the command line from a function: the verb has the options of `_job_options`, and --debug.

    The first parameter of the function is `LedgerJobOptions`. Its other parameters are further options of the verb.
    """
    own = [*inspect.signature(verb, eval_str=True).parameters.values()][1:]

    @wraps(verb)
    def run(*, debug: bool, **given: Any) -> None:
        further = {one.name: given.pop(one.name) for one in own}
        with errors_reported(debug=debug), _job_options(**given) as options:
            verb(options, **further)

    shared = [*inspect.signature(_job_options, eval_str=True).parameters.values(), *own]
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    run.__signature__ = inspect.Signature([*shared, debug])  # type: ignore[attr-defined] # typer reads this attribute
    run.__annotations__ = {one.name: one.annotation for one in (*shared, debug)} | {"return": None}
    return run


@contextmanager
def _job_options(
    source: LedgerOrTables,
    ledger: IngestFirst = None,
    tables: KeptTables = None,
    since: Since = None,
    until: Until = None,
    max_age: MaxAge = 60.0,
    as_is: AsIs = False,
    form: DeprecatedFormat = Format.TABLE,
    json: Json = False,
    master: Master = None,
    follow: Follow = False,
    every: Every = 10.0,
    jdbc: Jdbc = None,
    jars: Jars = None,
) -> Iterator[LedgerJobOptions]:
    """Yield the values of the options that the verbs about one job share. The signature defines these options."""
    ledger, folder = ledger_and_tables(source, ledger, tables)
    json = _wants_json(json, form)
    with kept_or_temporary(folder) as place:
        yield LedgerJobOptions(place, ledger, since, until, json, master, follow, every, jdbc, jars, max_age, as_is)


@contextmanager
def kept_or_temporary(tables: StorageLocation | None) -> Iterator[StorageLocation]:
    """Yield the place of the tables: the given one, or a temporary folder, which is removed at the end."""
    with TemporaryDirectory(prefix="twinbus-tables-") if tables is None else nullcontext(tables) as folder:
        yield StorageLocation.parse(folder)


def ledger_and_tables(
    source: StorageLocation, ledger: StorageLocation | None, tables: StorageLocation | None
) -> tuple[StorageLocation | None, StorageLocation | None]:
    """Return the ledger and the tables that a user gave. Either `source` is the tables, or it is the ledger.

    The tables are None if the user gave a ledger only. Raise an error if one of both is given twice.
    """
    if ledger is not None and tables is not None:
        raise WrongUsageError(
            "--ledger cannot be combined with --tables", "Give the tables and --ledger, or the ledger and --tables."
        )
    if holds_tables(source) or not has_segments(source):
        if tables is not None and holds_tables(source):
            raise OperatorError(f"{source} contains tables already", "Leave out --tables, or give the ledger.")
        return ledger, source
    if ledger is not None:
        raise WrongUsageError(f"{source} is a ledger already", "Leave out --ledger, or give the tables first.")
    return source, tables


@network_options
@job_verb
def reconcile(
    options: LedgerJobOptions,
    audit: Annotated[bool, typer.Option("--audit", help="Compare the ledger with the backlog queues first.")] = False,
    secondary: AuditedSecondary = None,
    dead_after: AuditDeadAfter = None,
    horizon: Horizon = timedelta(days=30),
) -> None:
    """Check that every message is accounted for, in a ledger of any size.

    The sums are those of `twinbus ledger check`. With a window they count the messages accepted in it.

    The first line is the verdict: proven, proven with possible duplicates, not proven, or lost.

    Results of the pipeline that are up to date are shown without starting Spark. The last line says as of when.

    Exit code: 0 if proven, also with possible duplicates; 3 if not proven; 1 if a message is lost or on an error.

    Examples:
      twinbus ledger reconcile ./tables --ledger ./ledger
      twinbus ledger reconcile ./ledger
      twinbus ledger reconcile ./tables --as-is
      twinbus ledger reconcile ./tables --since 2026-11-01 --json
      twinbus ledger reconcile ./tables --ledger ./ledger --audit
    """
    silence = None if dead_after is None else timedelta(seconds=dead_after)
    options = replace(options, horizon=horizon, silence=options.silence if silence is None else silence)
    audited = _audited(options, secondary, silence) if audit else None
    code = 0
    for answer in _answers("reconcile", options, "--audit" if audit else None):
        code = print_balance(answer, options.json, audited)
    if code:
        raise typer.Exit(code)


@job_verb
def cost(options: LedgerJobOptions) -> None:
    """Show operations, billable units and bytes by day, stage and entity.


    Examples:
      twinbus ledger cost ./tables --ledger ./ledger
      twinbus ledger cost ./tables --since 2026-11-01 --json
    """
    for answer in _answers("cost", options):
        print_rows("cost", answer, options.json)


@job_verb
def incidents(options: LedgerJobOptions) -> None:
    """List the failovers of each entity: when, why, how many messages were diverted, and when all were delivered.


    Examples:
      twinbus ledger incidents ./tables --ledger ./ledger
      twinbus ledger incidents ./tables --ledger ./ledger --follow
    """
    for answer in _answers("incidents", options):
        print_rows("incidents", answer, options.json)


@job_verb
def latency(options: LedgerJobOptions) -> None:
    """Show how long diverted messages took to reach the primary: seconds, by entity and day.

    Times are by the broker's clock. Names writers whose clocks differ from it by more than 1 s.

    Examples:
      twinbus ledger latency ./tables --ledger ./ledger
      twinbus ledger latency ./tables --json
    """
    for answer in _answers("latency", options):
        print_rows("latency", answer, options.json)


def _wants_json(json: bool, form: Format) -> bool:
    if form is Format.JSON:
        typer.echo("--format json is deprecated and will be removed in 0.2: use --json", err=True)
    return json or form is Format.JSON


# --- running ---------------------------------------------------------------------------------------------------------


def tables_and_writers(
    tables: StorageLocation,
    ledger: StorageLocation | None,
    master: str | None,
    silence: timedelta = SILENCE,
) -> tuple[Tables, WriterStates]:
    """Return the tables, and what is known of the writers of the ledger. Verbs of other modules use this.

    If a ledger is given, its new entries are ingested first.
    """
    options = LedgerJobOptions(tables, ledger, None, None, False, master, False, 0.0, None, None, silence=silence)
    place, writers, reading = _opened(options, ())
    for _ in _versions(place, reading, options):
        pass
    return place, writers


class _Reading(NamedTuple):
    """The query that ingests a ledger."""

    query: StreamingQuery
    turns: BatchTurns


def _opened(
    options: LedgerJobOptions, jobs: Sequence[str], *, rebuild: bool = False
) -> tuple[Tables, WriterStates, _Reading | None]:
    """Return the tables, the writers of the ledger, and the query that ingests it, or None if no ledger is given."""
    if not rebuild:
        TableStorage(options.tables).refuse_old_format()
    tables = _tables(options)
    from twinbus.pipeline import BatchTurns, WriterStates, follow_jobs, ingest_ledger  # noqa: PLC0415 - needs Spark

    if rebuild:
        tables.remove()
    if options.ledger is None:
        return tables, WriterStates(silence=options.silence), None
    every, extend = (options.every, follow_jobs(jobs, options.horizon)) if options.follow else (None, None)
    writers, turns = WriterStates.in_ledger(options.ledger, options.silence), BatchTurns()
    query = ingest_ledger(
        tables.spark, options.ledger, options.tables,
        every=every, extend=extend, turn=turns.batch, stopping=turns.stopping,
    )  # fmt: skip
    return tables, writers, _Reading(query, turns)


def _check_before_spark(options: LedgerJobOptions) -> None:
    """Raise an error for paths and options with which the job would fail after Spark has started."""
    if options.follow and options.ledger is None:
        raise WrongUsageError("--follow needs a ledger", "Name its directory with --ledger.")
    if options.since is not None and options.until is not None and options.since >= options.until:
        raise WrongUsageError("--since is not before --until: the window is empty", "Give an earlier --since.")
    refuse_missing_jars(options.jars)
    if options.ledger is not None:
        refuse_no_folder("the ledger", options.ledger)
        refuse_unusable_tables(options.tables, options.jars)


def _tables(options: LedgerJobOptions) -> Tables:
    """Start Spark, and return the tables."""
    _check_before_spark(options)
    jars = {"spark.jars": options.jars} if options.jars else None
    spark = spark_session("twinbus ledger", options.master, jars)
    from twinbus.pipeline import Tables  # noqa: PLC0415 - needs Spark

    return Tables(spark, options.tables)


def _versions(tables: Tables, reading: _Reading | None, options: LedgerJobOptions) -> Iterator[TablesVersion]:
    """Yield the version of the tables once. With --follow: after every commit, until a signal."""
    if reading is None or not options.follow:
        if reading is not None:
            with spinner(f"reading {options.ledger}"), spark_errors_explained():
                reading.query.awaitTermination()
        yield tables.version()
        return
    from twinbus.pipeline import SEGMENTS  # noqa: PLC0415 - needs the extra `tables`

    stopping = stop_on_signals()
    shown: int | None = None
    ended = False
    while not ended:
        with spark_errors_explained():
            ended = bool(reading.query.awaitTermination(_POLL_SECONDS))
            if stopping.is_set() and not ended:
                reading.turns.stop(reading.query)
                ended = True
        version = tables.version()
        # Results that are written make a snapshot, too. Only a batch changes the version of this table.
        if (ingested := version.tables.get(SEGMENTS)) != shown:
            shown = ingested
            yield version


def _answers(name: str, options: LedgerJobOptions, on_spark: str | None = None) -> Iterator[JobAnswer]:
    """Yield the answer of a job: from result tables that are up to date, or from Spark. With --follow: one per batch.

    `on_spark` is a further option that makes Spark answer.
    """
    _check_before_spark(options)
    since, until = in_utc(options.since), in_utc(options.until)
    silence = options.silence if name == "reconcile" else None
    wanted = Request(
        options.tables, options.ledger, since, until, options.max_age, options.as_is, silence,
        on_spark or options.on_spark,
    )  # fmt: skip
    found = find_results(name, wanted)
    if found is not None:
        yield answer_from_results(name, found.results, found.window, found)
        return
    tables, writers, reading = _opened(options, (name,))
    from twinbus.pipeline import TimeWindow, WriterStates  # noqa: PLC0415 - needs the extra `spark`

    window = TimeWindow(since, until)
    for _ in _versions(tables, reading, options):
        yield _computed(name, tables, window, writers, options)
        if options.ledger is not None:
            # For the next result of --follow: all entries of these dead writers are ingested before that result.
            writers = WriterStates.in_ledger(options.ledger, options.silence)


def _computed(
    name: str, tables: Tables, window: TimeWindow, writers: WriterStates, options: LedgerJobOptions
) -> JobAnswer:
    """Compute a job on Spark. Write its result to a database, if one is given."""
    from twinbus.answers import HourWindow  # noqa: PLC0415 - slow
    from twinbus.pipeline import JOBS, current_result, write_to_database  # noqa: PLC0415 - needs the extra `spark`

    with spinner(f"computing {name}"):
        if options.jdbc is not None:
            write_to_database(JOBS[name], current_result(tables, JOBS[name], window, writers), options.jdbc)
        if (results := new_results(name, tables, writers, window)) is not None:
            return answer_from_results(name, results, HourWindow(), None)
        return answer_from_spark(name, tables, current_result(tables, JOBS[name], window, writers), window, writers)


def new_results(name: str, tables: Tables, writers: WriterStates, window: TimeWindow) -> Results | None:
    """Compute results on Spark, write them to the result tables, and return these.

    All verbs do this for an answer over all time, so that the next verb needs no Spark. Return None if the verb has to
    compute its answer without them: for a window, because result tables have all time; if another process is writing
    the tables, because that process writes the results, too; if the tables cannot be written, or have no entry yet.
    """
    from twinbus.answers import Results  # noqa: PLC0415 - slow
    from twinbus.pipeline import TablesBusyError, write_results  # noqa: PLC0415 - needs the extra `spark`

    if not window.is_unlimited:
        return None
    try:
        with tables.storage.lock():  # raises an error now, and not after Spark has worked for minutes
            pass
        write_results(tables, writers, (name,))
    except TablesBusyError:
        return None
    except (OSError, StorageError) as error:
        place = tables.storage.location
        typer.echo(printable(f"the results are not kept: {place} cannot be written ({error})"), err=True)
        return None
    results = Results(tables.storage)
    return None if results.as_of(name) is None else results


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
