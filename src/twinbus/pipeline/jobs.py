"""The ledger's jobs, each a few functions from rows to rows, and the two ways to run them: over history, or followed.

Followed, the tallies of every batch are kept and committed with the batch; a restart goes on from there, and a job that
was not followed for a while begins anew. What a job finds is decided in its own module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import UNKNOWN, Closed, Dropped, Entry, Gap, Intent, Outcome, Role, SegmentHeader, balance
from twinbus.pipeline import cost, incidents, latency, reconcile
from twinbus.pipeline.ingest import day, destination
from twinbus.pipeline.tables import ENTRIES, OPERATIONS, PENDING, SCHEMAS, TALLIES, Tables, TablesVersion, columns
from twinbus.pipeline.time_window import TimeWindow

Tally = Callable[[DataFrame, DataFrame], DataFrame]
Merge = Callable[[DataFrame], DataFrame]
Resolve = Callable[[DataFrame, DataFrame], DataFrame]
Settle = Callable[[DataFrame, TimeWindow, int], DataFrame]


@dataclass(frozen=True, slots=True)
class LedgerJob:
    """`tally` reads operations and other entries, row by row; `merge` adds tallies; `settle` says what they amount to.

    `merge` of merged ones is `merge` of all: that is what lets a stream go on where it was. `onward`: what happens to
    messages of a window is told after it, too. `resolve`: between the last two, from the sums and the entries, or the
    tallies that were kept: what the sums of one message owe to those of another.
    """

    name: str
    tallies: str
    result: str
    tally: Tally
    merge: Merge
    settle: Settle
    onward: bool = True
    resolve: Resolve = lambda sums, _: sums


JOBS: Final[Mapping[str, LedgerJob]] = {
    job.name: job
    for job in (
        LedgerJob(
            "reconcile",
            reconcile.TALLIES,
            reconcile.RESULT,
            reconcile.tally,
            reconcile.merge,
            reconcile.settle,
            resolve=reconcile.resolve,
        ),
        LedgerJob("cost", cost.TALLIES, cost.RESULT, cost.tally, cost.merge, cost.settle, onward=False),
        LedgerJob("incidents", incidents.TALLIES, incidents.RESULT, incidents.tally, incidents.merge, incidents.settle),
        LedgerJob("latency", latency.TALLIES, latency.RESULT, latency.tally, latency.merge, latency.settle),
    )
}


# --- over history ----------------------------------------------------------------------------------------------------


def result_over_history(tables: Tables, job: LedgerJob, window: TimeWindow | None = None) -> DataFrame:
    """What a job finds in all that was ingested, or in a window of it."""
    version, window = tables.version(), window or TimeWindow()
    operations, entries = read_history(tables, version, window.days_onward() if job.onward else window.days())
    sums = job.resolve(job.merge(job.tally(operations, entries)), entries)
    return job.settle(sums, window, version.newest)


def read_history(tables: Tables, version: TablesVersion, days: Column) -> tuple[DataFrame, DataFrame]:
    """Operations, those that were only begun included, and other entries, of these days."""
    tables.divide(version, OPERATIONS, PENDING, ENTRIES)
    operations = tables.read(OPERATIONS, version=version).unionByName(_begun(tables, version))
    return operations.where(days), tables.read(ENTRIES, version=version).where(days)


def _begun(tables: Tables, version: TablesVersion) -> DataFrame:
    """Operations that have not ended, as far as the ledger knows: of unknown outcome."""
    begun = tables.read(PENDING, version=version).where(F.col("kind") == Intent.kind)
    made = begun.withColumns(
        {
            "whole": F.lit(False),
            "ended": F.lit(None).cast("long"),
            "result": F.lit(UNKNOWN),
            "destination": destination(),
            "day": day(),
        }
    )
    return made.select(*columns(SCHEMAS[OPERATIONS]))


# --- followed --------------------------------------------------------------------------------------------------------


def follow_jobs(names: Sequence[str]) -> Callable[[Tables, TablesVersion, TablesVersion], TablesVersion]:
    """What `ingest` is to commit with every batch, so that these jobs need not read it again."""
    return partial(_follow, tuple(names))


def _follow(names: tuple[str, ...], tables: Tables, before: TablesVersion, after: TablesVersion) -> TablesVersion:
    for name in JOBS:
        table = TALLIES + name
        if name in names:
            after = _advanced(tables, JOBS[name], before, after)
        elif after.of(table):
            # It would lack this batch.
            after = after.having(table, ())
    return replace(after, followed=dict.fromkeys(names, before.number + 1))


def _advanced(tables: Tables, job: LedgerJob, before: TablesVersion, after: TablesVersion) -> TablesVersion:
    table = TALLIES + job.name
    goes_on = before.followed.get(job.name) == before.number
    seen = set(before.of(OPERATIONS) + before.of(ENTRIES)) if goes_on else set()
    new = {name: [part for part in after.of(name) if part not in seen] for name in (OPERATIONS, ENTRIES)}
    operations, entries = (tables.read_parts(parts, SCHEMAS[name]) for name, parts in new.items())
    made = tables.write(table, job.merge(job.tally(operations, entries)).select(*columns(job.tallies)))
    parts = after.of(table) if goes_on else ()
    after = after.having(table, [*parts, made] if made else parts)
    return tables.compacted(after, table, job.tallies, job.merge)


def current_result(tables: Tables, job: LedgerJob, window: TimeWindow | None = None) -> DataFrame:
    """What a followed job finds, from its tallies."""
    version = tables.version()
    if version.followed.get(job.name) != version.number:
        return result_over_history(tables, job, window)
    tables.divide(version, TALLIES + job.name, PENDING)
    kept = tables.read(TALLIES + job.name, job.tallies, version)
    nothing = tables.read_parts((), SCHEMAS[ENTRIES])
    doubtful = job.tally(_begun(tables, version), nothing).select(*columns(job.tallies))
    sums = job.resolve(job.merge(kept.unionAll(doubtful)), kept)
    return job.settle(sums, window or TimeWindow(), version.newest)


# --- what is missing -------------------------------------------------------------------------------------------------


def why_incomplete(tables: Tables) -> list[str]:
    """Why the ledger does not hold everything, in the balance's own words, and the lines that could not be read."""
    version = tables.version()
    kinds = [SegmentHeader.kind, Closed.kind, Gap.kind, Dropped.kind]
    told = tables.read(ENTRIES, version=version).where(F.col("kind").isin(kinds)).orderBy("at", "id").collect()
    alone = tables.read(PENDING, version=version).where(F.col("kind") == Outcome.kind).orderBy("at", "id").collect()
    problems = tables.read("problems", version=version).orderBy("file", "line").collect()
    found = balance(_entry(row.asDict()) for row in (*told, *alone)).incomplete
    return [*found, *(f"{row.file}, line {row.line}: {row.cause}" for row in problems)]


def _entry(said: dict[str, object]) -> Entry:
    kinds: tuple[type[Entry], ...] = (SegmentHeader, Closed, Gap, Dropped, Outcome)
    kind = next(kind for kind in kinds if kind.kind == said["kind"])
    values = {name: said[name] for name in kind.__dataclass_fields__ if name != "kind" and said.get(name) is not None}
    if "role" in values:
        values["role"] = Role(str(values["role"]))
    return kind(**values)  # type: ignore[arg-type] # the columns have the fields' types
