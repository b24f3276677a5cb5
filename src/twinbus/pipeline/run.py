"""The whole pipeline in one Spark application: ingests a ledger, and keeps the results of all jobs with the tables.

Theory of operation. Every batch of the ledger changes the tables, the tallies of the jobs, and the results of the jobs,
in this order. The results are computed from the tallies as they are after the batch. All files are written first. Then
one table after the other is committed, and the snapshot last (D5). So the results of a snapshot are those of the
entries in its tables, also after kill -9 at any instant.

A result depends on more than entries: an operation without an outcome is unknown if its writer is dead, and no entry
says that a writer was killed. So `PipelineRun.update` looks for writers that died, and commits the results again
without a batch. It also makes the results of tables that have none.

The facts of the bill, and the timeline of the report, are counted from the whole history, not from tallies. With each
batch, that would take longer. So `PipelineRun.update` makes them: at the end of a run, and from time to time while the
run follows a ledger. They have snapshots of their own, and `results/as_of` says which entries they contain.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from twinbus.errors import OperatorError
from twinbus.ledger import SILENCE, segment_at
from twinbus.pipeline.batch_turns import BatchTurns
from twinbus.pipeline.ingest import FOLLOWER_PATIENCE, ingest_ledger
from twinbus.pipeline.ingested_segments import SEGMENTS
from twinbus.pipeline.jobs import JOBS, advance
from twinbus.pipeline.result_tables import PARTS, read_as_of
from twinbus.pipeline.results import add_results, compute_results, parts_of, unchanged_results
from twinbus.pipeline.segment_source import available_bytes
from twinbus.pipeline.settling import HORIZON, Horizon
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.table_storage import TablesBusyError
from twinbus.pipeline.tables import ENTRIES, OPERATIONS, Tables, TablesChange
from twinbus.pipeline.writer_states import WriterStates
from twinbus.storage_location import StorageLocation

# The result tables that each batch makes, from tallies; and those that need the whole history.
_OF_BATCH: Final = parts_of(JOBS)
_SLOW: Final = tuple(part for part in parts_of(PARTS) if part not in _OF_BATCH)
# The pause before the latter are computed again: at least so many seconds, and so many times as long as they took.
_SLOW_PAUSE: Final = 60.0
_SLOW_RATIO: Final = 10
# The pause in seconds before a look without new lines is recorded again. Answers may be 60 s old.
_LOOK_PAUSE: Final = 15.0
# While results wait for a batch to end, a stop is noticed after this time, in seconds.
_STOP_SECONDS: Final = 1.0
# The result that depends on which writers are dead.
_JUDGING: Final = "reconcile"
_STORING: Final = tuple(job for job in JOBS.values() if not job.stored_by)


@dataclass(frozen=True, slots=True)
class CommittedBatch:
    """What one commit of the pipeline added."""

    snapshot: int
    operations: int
    entries: int
    """Entries that are not operations."""
    newest: int
    """Time of the newest entry in the tables, in milliseconds since the epoch."""
    seconds: float
    """The time that the batch took, from its first query to the snapshot."""


class PipelineRun:
    """Ingests a ledger into the tables at `root`, with the results of all jobs.

    `silence` is the time without an entry after which a writer counts as dead, if no lock shows its state. Finished
    messages whose newest entry is older than `horizon` are settled. `report` is
    called after each batch, and after new results because of a dead writer, in the thread that committed them.
    """

    def __init__(
        self,
        spark: SparkSession,
        ledger: str | os.PathLike[str],
        root: str | os.PathLike[str],
        *,
        silence: timedelta = SILENCE,
        horizon: timedelta = HORIZON,
        report: Callable[[CommittedBatch], object] = lambda _: None,
    ) -> None:
        if not hasattr(spark, "_jsparkSession"):
            raise OperatorError(
                "the pipeline cannot run over Spark Connect: its batches have to run in this process",
                "Use a classic session: give --master, or start it with spark-submit, and unset SPARK_REMOTE.",
            )
        self.tables = Tables(spark, root)
        self.phase = ""
        """What the run does now. Empty while it waits for new entries."""
        self._ledger = StorageLocation.parse(ledger).absolute()
        self._silence = silence
        self._horizon = Horizon(horizon)
        self._report = report
        self._turns = BatchTurns()
        """Shared by the thread of the batches and the thread that calls `update`."""
        self._writers = WriterStates(silence=silence)
        self._follows = False
        self._began = 0.0
        self._slow_at = 0.0
        """When results that need the whole history may be computed again."""
        self._looked_at = 0.0
        """When the last look without new lines was recorded."""

    def start(self, *, every: float | None = None, most_bytes: int | None = None) -> StreamingQuery:
        """Starts to ingest, and returns the running query. The arguments are those of `ingest_ledger`."""
        self._follows = every is not None
        # Before the first look at the segments: otherwise outcomes of a writer that ended meanwhile would be missing.
        self._writers = WriterStates.in_ledger(self._ledger, self._silence)
        return ingest_ledger(
            self.tables.spark,
            self._ledger,
            self.tables.storage.location,
            every=every,
            most_bytes=most_bytes,
            extend=self._extend,
            committed=self._batch_committed,
            turn=self._batch_turn,
            stopping=self._turns.stopping,
        )

    def stop(self, query: StreamingQuery) -> None:
        """Waits until the current batch has ended, and stops the query that `start` has returned.

        Raises StreamingQueryException if this batch has failed.
        """
        self._turns.stop(query)

    def update(self, *, to_the_end: bool = False, stopping: threading.Event | None = None) -> None:
        """Commits results without a batch: those that are missing, and those that a batch does not make.

        Also commits the results again if a writer has died since, and all its entries are ingested. Records the time if
        the ledger has no new lines: then the results are true as of now, and no commit says so. The tables of the
        bill and of the timeline need the whole history; while the run follows a ledger, they are computed only for a
        small part of the time, or with `to_the_end`. After `stopping` is set, waits neither for a batch nor for another
        process that writes the tables: the next run makes the results.
        """
        stopping = stopping or threading.Event()
        try:
            self._update(stopping, to_the_end=to_the_end)
        except TablesBusyError:
            if not stopping.is_set():
                raise

    def _update(self, stopping: threading.Event, *, to_the_end: bool) -> None:
        if self._turns.lock.acquire(blocking=False):  # otherwise a batch is being ingested, with results of its own
            try:
                if self._has_died() or self._stale(_OF_BATCH):
                    self._report(self._commit(self._extend, stopping))
                self._record_look()
            finally:
                self._turns.lock.release()
        if self._stale(_SLOW) and (to_the_end or not self._follows or time.monotonic() >= self._slow_at):
            self._commit_slow_results(stopping)

    def _has_died(self) -> bool:
        """Returns whether a writer has died since the last results, and all its entries are ingested."""
        states = WriterStates.in_ledger(self._ledger, self._silence)
        known = read_as_of(self.tables.storage, self.tables.version()).get(_JUDGING)
        died = states.dead - frozenset(known.dead if known else ())
        if not died or not self._has_entries_of(died):
            return False
        self._writers = states
        return True

    def _stale(self, parts: Iterable[str]) -> bool:
        """Returns whether one of these result tables lacks entries of the last snapshot."""
        version = self.tables.version()
        known, segments = read_as_of(self.tables.storage, version), version.tables.get(SEGMENTS)
        return any(part not in known or known[part].segments != segments for part in parts)

    def _commit_slow_results(self, stopping: threading.Event) -> None:
        """Commits the results that need the whole history. Batches go on while they are computed."""
        began, version, self.phase = time.monotonic(), self.tables.version(), "counting the facts of bill and report"
        with self.tables.parallel_queries() as pool:
            computed = compute_results(self.tables, version, pool, _SLOW, self._writers)
        while not self._turns.lock.acquire(timeout=_STOP_SECONDS):
            if stopping.is_set():
                return
        try:
            self._commit(lambda change: add_results(change, computed), stopping)
        finally:
            self._turns.lock.release()
        now = time.monotonic()
        self._slow_at = now + max(_SLOW_PAUSE, _SLOW_RATIO * (now - began))

    def _commit(self, extend: Callable[[TablesChange], object], stopping: threading.Event) -> CommittedBatch:
        """Commits a change without a batch."""
        self._began = time.monotonic()
        with self.tables.locked(FOLLOWER_PATIENCE if self._follows else 0, stopping):
            change = self.tables.change()
            change.has_batch = False
            extend(change)
            return self._committed(change, self.tables.commit(change))

    # --- a batch -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _batch_turn(self) -> Iterator[None]:
        with self._turns.batch():
            self._began, self.phase = time.monotonic(), "reading new entries"
            try:
                yield
            finally:
                self.phase = ""

    def _extend(self, change: TablesChange) -> None:
        """Adds the tallies of all jobs to a change, and their results."""
        self.phase = "adding up"
        with change.tables.parallel_queries() as pool:
            for advanced in [pool.submit(advance, change, job, self._horizon) for job in _STORING]:
                advanced.result()
            after, self.phase = change.after(), "computing results"
            unchanged = unchanged_results(change)
            parts = [part for part in _OF_BATCH if part not in unchanged]
            add_results(change, compute_results(change.tables, after, pool, parts, self._writers), unchanged)
            self.phase = "committing"

    def _batch_committed(self, change: TablesChange, version: TablesVersion) -> None:
        if self._follows:
            # For the next batch, whose segments are looked at after this.
            self._writers = WriterStates.in_ledger(self._ledger, self._silence)
        self._report(self._committed(change, version))

    def _committed(self, change: TablesChange, version: TablesVersion) -> CommittedBatch:
        operations, entries = (sum(file.rows for file in change.added.get(name, ())) for name in (OPERATIONS, ENTRIES))
        self.phase = ""
        return CommittedBatch(version.number, operations, entries, version.newest, time.monotonic() - self._began)

    def _has_entries_of(self, writers: Iterable[str]) -> bool:
        """Returns whether the tables have all entries of these dead writers."""
        wanted = frozenset(writers)
        return not any(_writer_of(name) in wanted for name in self._unread_segments())

    def _record_look(self) -> None:
        """Records that the ledger was looked at, if all its lines are ingested.

        Does nothing while another process writes the tables.
        """
        now = time.time()  # before the look: lines that are written meanwhile are later
        if now - self._looked_at < _LOOK_PAUSE:
            return
        # With the lock: another process could make the tables again, and this version would be another one.
        with suppress(TablesBusyError), self.tables.storage.lock():
            version, segments = self.tables.version().tables.get(SEGMENTS), self.tables.segments
            if version and not self._unread_segments():
                segments.record_look(segments.name_of(self._ledger), int(now * 1000), version)
                self._looked_at = now

    def _unread_segments(self) -> list[str]:
        """Returns the names of segments with lines that are not ingested."""
        version, same = self.tables.version().tables.get(SEGMENTS), self._ledger.canonical()
        ledgers = self.tables.segments.ledgers(version)
        ingested = (one.segments for one in ledgers if StorageLocation.parse(one.ledger).canonical() == same)
        known = dict(next(ingested, {}))
        return [name for name, size in available_bytes(self._ledger, known).items() if size > known.get(name, 0)]


def _writer_of(segment: str) -> str | None:
    """Returns the writer of the segment with this file name."""
    found = segment_at(Path(segment))
    return None if found is None else found.writer
