"""Computes and writes the result tables: what each job found, over all time (D4, D7).

Spark computes the rows from the tables of one snapshot, and writes the files. One commit for each table replaces the
old rows, and the next snapshot names the new versions. Only these commits need the lock: a batch may be ingested while
the results are computed. The table `results/as_of` has for each result the snapshot that it was computed from, so a
reader knows what a result contains, and how old it is.

`twinbus.answers` reads these tables, without Spark. docs/tables.md describes the columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa
from deltalake import write_deltalake
from pyspark.sql import DataFrame

from twinbus.pipeline import timeline
from twinbus.pipeline.bill_facts import FACTS
from twinbus.pipeline.cost_facts import fact_rows
from twinbus.pipeline.ingested_segments import SEGMENTS
from twinbus.pipeline.jobs import JOBS, UNKNOWN_STATES, is_followed, off_clocks, stored_rows, why_incomplete
from twinbus.pipeline.report_queries import history_by_broker
from twinbus.pipeline.result_tables import (
    AS_OF,
    CLOCKS,
    INCOMPLETE,
    PARTS,
    RESULTS,
    SMALL_SCHEMAS,
    TIMELINE,
    AsOf,
    read_as_of,
)
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.table_log import TABLE_CONFIGURATION, DataFile
from twinbus.pipeline.tables import Tables, TablesChange
from twinbus.pipeline.time_window import TimeWindow
from twinbus.pipeline.writer_states import WriterStates, dead_in_tables, undecided_writers

RESULT_NAMES: Final = tuple(PARTS)
_SCHEMAS: Final = {**{name: job.stored for name, job in JOBS.items()}, TIMELINE: timeline.STORED}
"""Schemas of the tables that Spark writes."""
# The tables that depend only on the tallies of the incidents.
_OF_DIVERSIONS: Final = ("incidents", "latency", CLOCKS)


@dataclass(frozen=True, slots=True)
class ComputedResults:
    """Results that are not committed yet. Their files are written."""

    as_of: AsOf
    files: Mapping[str, list[DataFile]]
    small: Mapping[str, pa.Table]
    """The rows of tables that Spark does not write."""


def write_results(
    tables: Tables, writers: WriterStates = UNKNOWN_STATES, names: Sequence[str] = RESULT_NAMES
) -> TablesVersion:
    """Computes these results from the last snapshot, and commits them with a snapshot. Returns the snapshot.

    `writers` are the writers that are known to be dead or alive; find this out before the entries are ingested. A
    result that another process has computed from a later snapshot stays. Raises TablesBusyError if another
    process has the lock of the tables for more than a few seconds.
    """
    version = tables.version()
    if not version.number:
        return version
    with tables.parallel_queries() as pool:
        computed = compute_results(tables, version, pool, parts_of(names), writers)
    with tables.locked():
        change = tables.change()
        change.has_batch = False
        return tables.commit(change) if add_results(change, computed) else change.before


def parts_of(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the tables that these results need, each once."""
    return tuple(dict.fromkeys(part for name in names for part in PARTS[name]))


def compute_results(
    tables: Tables,
    version: TablesVersion,
    pool: ThreadPoolExecutor,
    parts: Iterable[str],
    writers: WriterStates = UNKNOWN_STATES,
) -> ComputedResults:
    """Computes these tables from a version of the tables, which may be uncommitted (`TablesChange.after`)."""
    now = int(time.time() * 1000)
    files: dict[str, list[DataFile]] = {}
    small: dict[str, pa.Table] = {}
    undecided = pool.submit(undecided_writers, tables, version, writers)
    dead = pool.submit(dead_in_tables, tables, version, writers)
    found = {name: pool.submit(_MAKERS[name], tables, version, writers) for name in parts}
    for name, future in found.items():
        made = future.result()
        if isinstance(made, pa.Table):
            small[name] = made
        else:
            files[name] = made
    as_of = AsOf(
        snapshot=version.number,
        segments=version.tables.get(SEGMENTS),
        computed_at=now,
        newest=version.newest,
        silence=writers.silence.total_seconds(),
        dead=tuple(sorted(dead.result())),
        undecided=tuple(sorted(undecided.result())),
    )
    return ComputedResults(as_of, files, small)


def unchanged_results(change: TablesChange) -> tuple[str, ...]:
    """Returns the result tables whose rows a change does not alter.

    Most batches have no diverted message: then these are the tables about diversions. Without a batch, these are all
    tables but those that depend on which writers are dead. The tallies of the change must be written.
    """
    job, before = JOBS["incidents"], change.before
    if change.added.get(job.table) or not is_followed(job, before):
        return ()
    known, segments = read_as_of(change.tables.storage, before), before.tables.get(SEGMENTS)
    names = _OF_DIVERSIONS if change.has_batch else (*_OF_DIVERSIONS, *FACTS, TIMELINE)
    return tuple(name for name in names if name in known and known[name].segments == segments)


def add_results(change: TablesChange, computed: ComputedResults, unchanged: Collection[str] = ()) -> bool:
    """Adds results to a change of the tables. Returns whether there is anything to commit.

    Leaves out results for which the tables have a result of a later snapshot. `unchanged` are result tables that have
    the right rows already.
    """
    tables, as_of, files, small = change.tables, computed.as_of, computed.files, computed.small
    known = read_as_of(tables.storage, change.before)
    found = (*files, *small, *unchanged)
    mine = [name for name in found if name not in known or known[name].snapshot <= as_of.snapshot]
    for name in mine:
        table = RESULTS + name
        if name in unchanged:
            continue
        if name in files:
            change.schemas[table] = _SCHEMAS[name]
            change.removed[table] = tables.latest_files(table)
            change.added[table] = files[name]
        else:
            change.commits[table] = partial(_overwrite, tables, table, small[name])

    def commit_as_of(versions: Mapping[str, int]) -> int:
        is_own = as_of.snapshot > change.before.number
        stated = replace(as_of, segments=versions[SEGMENTS]) if is_own else as_of
        rows = [{"result": name, **one.as_row()} for name, one in {**known, **dict.fromkeys(mine, stated)}.items()]
        return _overwrite(tables, RESULTS + AS_OF, pa.Table.from_pylist(rows, SMALL_SCHEMAS[AS_OF]), versions)

    if mine:
        change.commits[RESULTS + AS_OF] = commit_as_of
    return bool(mine)


def _overwrite(tables: Tables, table: str, rows: pa.Table, versions: Mapping[str, int]) -> int:
    write_deltalake(
        tables.storage.uri(table),
        rows,
        mode="overwrite",
        schema_mode="overwrite",
        configuration=TABLE_CONFIGURATION,
        storage_options=tables.storage.options,
    )
    version = tables.log(table).version()
    assert version is not None, "it was just written"
    return version


# --- the rows --------------------------------------------------------------------------------------------------------


def _of_job(name: str, tables: Tables, version: TablesVersion, writers: WriterStates) -> list[DataFile]:
    """Writes the rows of a job to new files of its table, and returns the files."""
    return _written(name, tables, version, stored_rows(tables, version, JOBS[name], writers))


def _timeline(tables: Tables, version: TablesVersion, writers: WriterStates) -> list[DataFile]:
    operations, entries, _ = history_by_broker(tables, version, TimeWindow())
    return _written(TIMELINE, tables, version, timeline.stored(operations, entries))


def _written(name: str, tables: Tables, version: TablesVersion, rows: DataFrame) -> list[DataFile]:
    table = RESULTS + name
    if table not in version.tables and tables.log(table).version() is not None:
        tables.storage.remove(table)  # an earlier version wrote it, with other columns
    return tables.write(table, rows.coalesce(1) if name in _FEW else rows)


_FEW: Final = frozenset({"incidents"})


def _facts(name: str, tables: Tables, version: TablesVersion, writers: WriterStates) -> pa.Table:
    return fact_rows(name, tables, version, TimeWindow())


def _incomplete(tables: Tables, version: TablesVersion, writers: WriterStates) -> pa.Table:
    reasons = why_incomplete(tables, writers, version)
    return _table(INCOMPLETE, [{"reason": reason} for reason in reasons])


def _clocks(tables: Tables, version: TablesVersion, writers: WriterStates) -> pa.Table:
    found = off_clocks(tables, version=version)
    return _table(CLOCKS, [{"writer": one.writer, "least": one.least, "most": one.most} for one in found])


def _table(name: str, rows: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), SMALL_SCHEMAS[name])


_MAKERS: Final[dict[str, Callable[[Tables, TablesVersion, WriterStates], list[DataFile] | pa.Table]]] = {
    **{name: partial(_of_job, name) for name in JOBS},
    **{name: partial(_facts, name) for name in FACTS},
    TIMELINE: _timeline,
    INCOMPLETE: _incomplete,
    CLOCKS: _clocks,
}
