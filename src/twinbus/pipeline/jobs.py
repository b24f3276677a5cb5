"""The jobs on a ledger's tables, and the two ways to run a job: over the whole history, or with each ingested batch.

Theory of operation. A *tally* is a row with counts or sums that a job makes from ledger entries. A job turns entries
into tallies, merges the tallies by key, and summarizes the merged tallies into its result. Tallies may be merged in
several steps: the result is the same as with one merge of all tallies. *Following* a job uses this: the ingest
computes the tallies of each batch, stores them in a table and commits them with the batch. The snapshot of the batch
then names that table.

The result of a followed job is computed from the stored tallies, without reading the history again. If a job was not
followed for some batches, its stored tallies are useless, and following it again starts with the whole history.

The modules `reconcile`, `cost`, `incidents` and `latency` define one job each. Followed, `reconcile` keeps no row of
messages that are finished for long (`settling`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import UNKNOWN, Intent, Outcome, balance, id_of_writer
from twinbus.pipeline import clocks, cost, incidents, latency, reconcile
from twinbus.pipeline.ingest import day, destination
from twinbus.pipeline.report_data import WriterClock
from twinbus.pipeline.settling import HORIZON, OPEN, SETTLED, Horizon, SettledState, advance_open, with_settled
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.tables import (
    ENTRIES,
    OPERATIONS,
    PENDING,
    PROBLEMS,
    SCHEMAS,
    TALLIES,
    Tables,
    TablesChange,
    columns,
)
from twinbus.pipeline.time_window import TimeWindow
from twinbus.pipeline.writer_states import WRITER_ID, WriterStates, dead_in_tables, entries_about_segments, entry_of

UNKNOWN_STATES: Final = WriterStates()
"""Nothing is known of the writers but their entries."""


@dataclass(frozen=True, slots=True)
class LedgerJob:
    """A computation on the tables of a ledger, with a schema for its tallies and for its result."""

    name: str
    tallies: str
    """Schema of the tallies."""
    result: str
    """Schema of the result."""
    tally: Callable[[DataFrame, DataFrame], DataFrame]
    """Returns tallies.

    The arguments are the operations and the other entries; each of their rows is used separately.
    """
    merge: Callable[[DataFrame], DataFrame]
    """Merges tallies by key."""
    summarize: Callable[[DataFrame, TimeWindow, int], DataFrame]
    """Returns the result from merged tallies, for a time window and the time of the newest entry."""
    stored: str
    """Schema of the table that keeps the result over all time."""
    store: Callable[[DataFrame, int], DataFrame]
    """Returns the rows of that table from merged tallies and the time of the newest entry."""
    reads_onward: bool = True
    """Whether the job has to read entries after the window too, because they may be about messages of the window."""
    resolve: Callable[[DataFrame, DataFrame], DataFrame] = lambda sums, _: sums
    """Corrects merged tallies that depend on each other, before `summarize`. The second argument has the entries, or
    for a followed job its stored tallies."""
    judges_intents: bool = False
    """Whether the result depends on which operations without an outcome are those of dead writers."""
    counts_intents: bool = True
    """Whether operations without an outcome have tallies."""
    stored_by: str = ""
    """Another job, if the stored tallies of that job contain those of this one. `part` selects them."""
    part: Callable[[DataFrame], DataFrame] = lambda tallies: tallies
    settles: bool = False
    """Whether the stored tallies of finished messages are settled (`settling`)."""

    @property
    def table(self) -> str:
        """The table of the stored tallies."""
        return OPEN if self.settles else TALLIES + (self.stored_by or self.name)

    @property
    def tables(self) -> tuple[str, ...]:
        """All tables that a followed job keeps."""
        return (OPEN, SETTLED) if self.settles else (self.table,)


JOBS: Final[Mapping[str, LedgerJob]] = {
    job.name: job
    for job in (
        LedgerJob(
            "reconcile",
            reconcile.TALLIES,
            reconcile.RESULT,
            reconcile.tally,
            reconcile.merge,
            reconcile.summarize,
            reconcile.STORED,
            reconcile.stored,
            resolve=reconcile.resolve,
            judges_intents=True,
            settles=True,
        ),
        LedgerJob(
            "cost",
            cost.TALLIES,
            cost.RESULT,
            cost.tally,
            cost.merge,
            cost.summarize,
            cost.STORED,
            cost.stored,
            reads_onward=False,
        ),
        LedgerJob(
            "incidents",
            incidents.TALLIES,
            incidents.RESULT,
            incidents.tally,
            incidents.merge,
            incidents.summarize,
            incidents.STORED,
            incidents.stored,
            counts_intents=False,
        ),
        LedgerJob(
            "latency",
            latency.TALLIES,
            latency.RESULT,
            latency.tally,
            latency.merge,
            latency.summarize,
            latency.STORED,
            latency.stored,
            counts_intents=False,
            stored_by="incidents",
            part=incidents.of_messages,
        ),
    )
}


# --- over history ----------------------------------------------------------------------------------------------------


def result_over_history(
    tables: Tables,
    job: LedgerJob,
    window: TimeWindow | None = None,
    writers: WriterStates = UNKNOWN_STATES,
    version: TablesVersion | None = None,
) -> DataFrame:
    """Returns the result of a job for a window (default: all time), computed from all ingested rows.

    `writers` are the writers that are known to be dead or alive. `version` is by default the last snapshot.
    """
    version, window = version or tables.version(), window or TimeWindow()
    return job.summarize(_history_sums(tables, version, job, window, writers), window, version.newest)


def _history_sums(
    tables: Tables, version: TablesVersion, job: LedgerJob, window: TimeWindow, writers: WriterStates
) -> DataFrame:
    """Returns the merged tallies of the days of a window."""
    days = window.days_onward() if job.reads_onward else window.days()
    operations, entries = read_history(tables, version, days, writers if job.judges_intents else None)
    return job.resolve(job.merge(job.tally(operations, entries)), entries)


def read_history(
    tables: Tables, version: TablesVersion, days: Column, writers: WriterStates | None = None
) -> tuple[DataFrame, DataFrame]:
    """Returns the operations of these days, also those without an outcome, and the other entries of these days.

    With `writers`, the cause of operations that a dead writer left without an outcome is WRITER_DIED.
    """
    tables.set_partitions(version, OPERATIONS, PENDING, ENTRIES)
    operations = tables.read(OPERATIONS, version=version).unionByName(_in_flight(tables, version, writers))
    return operations.where(days), tables.read(ENTRIES, version=version).where(days)


def _in_flight(tables: Tables, version: TablesVersion, writers: WriterStates | None) -> DataFrame:
    """Returns the operations without an outcome in the ledger. Their result is unknown."""
    begun = tables.read(PENDING, version=version).where(F.col("kind") == Intent.kind)
    operations = begun.withColumns(
        {
            "whole": F.lit(False),
            "ended": F.lit(None).cast("long"),
            "result": F.lit(UNKNOWN),
            "cause": F.when(_of_dead_writer(begun, tables, version, writers), reconcile.WRITER_DIED),
            "destination": destination(),
            "day": day(),
        }
    )
    return operations.select(*columns(SCHEMAS[OPERATIONS]))


def _of_dead_writer(begun: DataFrame, tables: Tables, version: TablesVersion, writers: WriterStates | None) -> Column:
    """Returns the condition that the writer of an intent is dead."""
    undone = [] if writers is None else [row[0] for row in begun.selectExpr(WRITER_ID).distinct().collect()]
    if writers is None or not undone:
        return F.lit(False)
    dead = {id_of_writer(name) for name in dead_in_tables(tables, version, writers)}
    return F.expr(WRITER_ID).isin([one for one in undone if one in dead])


# --- followed --------------------------------------------------------------------------------------------------------


def follow_jobs(
    names: Sequence[str], horizon: timedelta = HORIZON, now: Callable[[], float] = time.time
) -> Callable[[TablesChange], None]:
    """Returns a function for the argument `extend` of `ingest_ledger`.

    For each batch, this function adds the tallies of the named jobs to the change of the batch. A finished message
    whose newest entry is older than `horizon` is settled: it has no row of its own any more. `now` returns seconds
    since the epoch.
    """
    return partial(_follow, tuple(names), Horizon(horizon, now))


def _follow(names: tuple[str, ...], horizon: Horizon, change: TablesChange) -> None:
    for name in dict.fromkeys(JOBS[name].stored_by or name for name in names):
        advance(change, JOBS[name], horizon)


def advance(change: TablesChange, job: LedgerJob, horizon: Horizon) -> None:
    """Adds the tallies of a batch. If the last batch has no tallies of this job, adds those of the whole history."""
    if job.settles:
        advance_open(change, horizon)
        return
    table, tables = job.table, change.tables
    goes_on = is_followed(job, change.before)
    if goes_on and not change.added.get(OPERATIONS) and not change.added.get(ENTRIES):
        change.keep(table, job.tallies)
        return
    new = [change.added_rows(name) for name in (OPERATIONS, ENTRIES)]
    if not goes_on:
        old = [tables.read(name, version=change.before) for name in (OPERATIONS, ENTRIES)]
        new = [one.unionAll(other) for one, other in zip(old, new, strict=True)]
    tallies = job.merge(job.tally(*new)).select(*columns(job.tallies))
    if goes_on:
        change.add(table, tallies, job.tallies)
        change.merge(table, job.merge)
    else:
        change.replace(table, tallies, job.tallies)


def current_result(
    tables: Tables,
    job: LedgerJob,
    window: TimeWindow | None = None,
    writers: WriterStates = UNKNOWN_STATES,
    version: TablesVersion | None = None,
) -> DataFrame:
    """Returns the result of a job for a window (default: all time).

    If the ingest has stored tallies of this job for every batch (see `follow_jobs`), the result is computed from these
    tallies; otherwise from all ingested operations and entries. `writers` are the writers that are known to be dead or
    alive. `version` is by default the last snapshot.
    """
    version, window = version or tables.version(), window or TimeWindow()
    return job.summarize(current_sums(tables, version, job, window, writers), window, version.newest)


def stored_rows(tables: Tables, version: TablesVersion, job: LedgerJob, writers: WriterStates) -> DataFrame:
    """Returns the rows of the table that keeps the result of a job: over all time, up to this version."""
    sums = current_sums(tables, version, job, TimeWindow(), writers)
    return job.store(sums, version.newest).select(*columns(job.stored))


def current_sums(
    tables: Tables,
    version: TablesVersion,
    job: LedgerJob,
    window: TimeWindow,
    writers: WriterStates = UNKNOWN_STATES,
) -> DataFrame:
    """Returns the merged tallies that the result of a job for a window is computed from.

    Those of a followed job are for all time. All others are of the days that the job reads for the window; so are
    those of a followed job whose settled messages have too few times for this window.
    """
    is_split = job.settles and SettledState.of(tables, version).splits(window)
    if is_followed(job, version) and not is_split:
        return followed_sums(tables, version, job, writers)
    return _history_sums(tables, version, job, window, writers)


def is_followed(job: LedgerJob, version: TablesVersion) -> bool:
    """Returns whether the tables have the tallies of this job for every batch up to this version."""
    return job.table in version.tables


def followed_sums(tables: Tables, version: TablesVersion, job: LedgerJob, writers: WriterStates) -> DataFrame:
    """Returns the merged tallies of a followed job, for all time."""
    tables.set_partitions(version, job.table, PENDING)
    kept = stored_tallies(tables, version, job)
    if not job.counts_intents:
        return job.resolve(job.merge(kept), kept)
    nothing = tables.read_files(ENTRIES, (), SCHEMAS[ENTRIES])
    undone = _in_flight(tables, version, writers if job.judges_intents else None)
    in_flight = job.tally(undone, nothing).select(*columns(job.tallies))
    sums = job.resolve(job.merge(kept.unionAll(in_flight)), kept)
    return with_settled(sums, tables, version) if job.settles else sums


def stored_tallies(tables: Tables, version: TablesVersion, job: LedgerJob) -> DataFrame:
    """Returns the tallies of a followed job that the tables have. Operations without an outcome are not among them."""
    return job.part(tables.read(job.table, JOBS[job.stored_by or job.name].tallies, version))


# --- wrong clocks ----------------------------------------------------------------------------------------------------


def off_clocks(
    tables: Tables, window: TimeWindow | None = None, version: TablesVersion | None = None
) -> list[WriterClock]:
    """Returns the writers whose clocks differ from the broker's by more than 1 s (L5)."""
    version, window, job = version or tables.version(), window or TimeWindow(), JOBS["latency"]
    if window.is_unlimited and is_followed(job, version):
        tallies, entries = stored_tallies(tables, version, job), tables.read(ENTRIES, version=version)
    else:
        operations, entries = read_history(tables, version, window.days_onward())
        tallies = latency.tally(operations, entries)
    return clocks.named(clocks.off_clocks(tallies), entries)


# --- what is missing -------------------------------------------------------------------------------------------------


def why_incomplete(
    tables: Tables, writers: WriterStates = UNKNOWN_STATES, version: TablesVersion | None = None
) -> list[str]:
    """Returns the reasons why the ledger is not complete: `Balance.incomplete`, and lines that are not entries."""
    version = version or tables.version()
    without_intent = (
        tables.read(PENDING, version=version).where(F.col("kind") == Outcome.kind).orderBy("at", "id").collect()
    )
    problems = []
    if tables.files(PROBLEMS, version):
        problems = tables.read(PROBLEMS, version=version).orderBy("file", "line").collect()
    entries = (*entries_about_segments(tables, version), *(entry_of(row.asDict()) for row in without_intent))
    found = balance(entries, dead_in_tables(tables, version, writers), writers.alive).incomplete
    return [*found, *(f"{row.file}, line {row.line}: {row.cause}" for row in problems)]
