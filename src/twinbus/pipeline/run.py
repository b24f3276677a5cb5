"""The whole pipeline in one Spark application: ingests a ledger, and keeps the results of all jobs with the tables.

Theory of operation. Every batch of the ledger changes the tables, the tallies of the jobs, and the results of the jobs,
in this order. The results are computed from the tallies as they are after the batch. All files are written first. Then
one table after the other is committed, and the snapshot last (D5). So the results of a snapshot are those of the
entries in its tables, also after kill -9 at any instant.

A result depends on more than entries: an operation without an outcome is unknown if its writer is dead, and no entry
says that a writer was killed. So `PipelineRun.update` looks for writers that died, and commits the results again
without a batch. It also makes the results of tables that have none.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from twinbus.errors import OperatorError
from twinbus.ledger import SILENCE
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.ingested_segments import SEGMENTS
from twinbus.pipeline.jobs import JOBS, advance
from twinbus.pipeline.result_tables import PARTS, read_as_of
from twinbus.pipeline.results import add_results, compute_results
from twinbus.pipeline.segment_source import available_bytes
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.tables import ENTRIES, OPERATIONS, Tables, TablesChange
from twinbus.pipeline.writer_states import WriterStates, dead_in_tables
from twinbus.storage_location import StorageLocation

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

    `silence` is the time without an entry after which a writer counts as dead, if no lock shows its state. `report` is
    called after each commit, in the thread that committed.
    """

    def __init__(
        self,
        spark: SparkSession,
        ledger: str | os.PathLike[str],
        root: str | os.PathLike[str],
        *,
        silence: timedelta = SILENCE,
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
        self._report = report
        self._turn = threading.Lock()
        """Held by the thread that changes the tables: the thread of the batches, or the one that calls `update`."""
        self._writers = WriterStates(silence=silence)
        self._judged: frozenset[str] = frozenset()
        """The writers that are dead in the last results."""
        self._follows = False
        self._began = 0.0

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
            committed=self._committed,
            turn=self._batch_turn,
        )

    def update(self) -> None:
        """Commits the results without a batch, if a job has no result, or if a writer has died since the last results.

        Does nothing while a batch is ingested, and nothing about a writer whose last entries are not ingested yet:
        their batch will have these results.
        """
        if not self._turn.acquire(blocking=False):
            return
        try:
            states = WriterStates.in_ledger(self._ledger, self._silence)
            died = states.dead - self._judged
            if died and self._has_entries_of(died):
                self._writers = states
            elif self._has_results():
                return
            self._began = time.monotonic()
            with self.tables.locked():
                change = self.tables.change()
                change.has_batch = False
                self._extend(change)
                self._committed(change, self.tables.commit(change))
        finally:
            self._turn.release()

    # --- a batch -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _batch_turn(self) -> Iterator[None]:
        with self._turn:
            self._began, self.phase = time.monotonic(), "reading new entries"
            try:
                yield
            finally:
                self.phase = ""

    def _extend(self, change: TablesChange) -> None:
        """Adds the tallies of all jobs to a change, and their results."""
        self.phase = "adding up"
        with change.tables.parallel_queries() as pool:
            for advanced in [pool.submit(advance, change, job) for job in _STORING]:
                advanced.result()
            after, self.phase = change.after(), "computing results"
            judged = pool.submit(dead_in_tables, change.tables, after, self._writers)
            add_results(change, compute_results(change.tables, after, pool, self._writers))
            self._judged, self.phase = judged.result(), "committing"

    def _committed(self, change: TablesChange, version: TablesVersion) -> None:
        if self._follows:
            # For the next batch, whose segments are looked at after this.
            self._writers = WriterStates.in_ledger(self._ledger, self._silence)
        operations, entries = (sum(file.rows for file in change.added.get(name, ())) for name in (OPERATIONS, ENTRIES))
        seconds = time.monotonic() - self._began
        self.phase = ""
        self._report(CommittedBatch(version.number, operations, entries, version.newest, seconds))

    def _has_entries_of(self, writers: Iterable[str]) -> bool:
        """Returns whether the tables have all entries of these dead writers."""
        looks = (look.segments for look in self.tables.segments.looks() if look.ledger == str(self._ledger))
        known, wanted = next(looks, {}), frozenset(writers)
        there = available_bytes(self._ledger, {})
        return all(size <= known.get(name, 0) for name, size in there.items() if name.rpartition("-")[0] in wanted)

    def _has_results(self) -> bool:
        """Returns whether the last snapshot has all results, and they are those of its tables."""
        version = self.tables.version()
        known = read_as_of(self.tables.storage, version)
        segments = version.tables.get(SEGMENTS)
        return all(part in known and known[part].segments == segments for parts in PARTS.values() for part in parts)
