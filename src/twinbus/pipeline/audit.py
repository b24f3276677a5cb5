"""The audit on Spark (L3): for ledgers and backlogs that do not fit in the memory of one process.

The steps are those of `twinbus.syphon.Audit`, and so are the entries and the result. A reading of the ledger is an
ingest into its tables. A look is a Spark job that peeks (`servicebus.backlog_look`). `audit_comparison` compares them.

Each look is written to a folder beside the tables before the next reading begins, and removed at the end of the audit.
If Spark lost the rows of a look and peeked again, the look would be later than the reading that must follow it, and a
message that was brought home meanwhile would seem to be lost.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import itemgetter
from typing import Final
from uuid import uuid4

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.connect import NetworkOptions
from twinbus.errors import OperatorError
from twinbus.ledger import (
    BALANCE_SUMS,
    LISTED_SUMS,
    SECOND_LOOK_WORDS,
    SILENCE,
    AuditMove,
    Ledger,
    MessageKey,
    is_recorded,
    why_undecided,
)
from twinbus.pipeline.audit_comparison import BacklogComparison, TablesReading, compare
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.jobs import JOBS, current_result, why_incomplete
from twinbus.pipeline.servicebus.backlog_look import LOOK_SCHEMA, BacklogLookSource, LookJob, plan_ranges
from twinbus.pipeline.tables import Tables
from twinbus.pipeline.writer_states import WriterStates, writers_at_work
from twinbus.syphon import (
    LISTED_WORDS,
    AuditedQueues,
    AuditSummary,
    ListedMessages,
    WritersHere,
    primaries_of,
    record_audit,
)

LOOKS_FOLDER: Final = "looks"
_FOR_EVER: Final = timedelta(days=36_500)


@dataclass(frozen=True, slots=True)
class _Look:
    """What one look showed. The rows are on the disk: those of LOOK_SCHEMA, and how many copies are `dead_letters`."""

    rows: DataFrame
    seen: int
    dead_letters: int
    peeks: int
    is_partial: bool


class SparkAudit:
    """Compares a ledger with the backlog queues of one secondary, as `twinbus.syphon.Audit` does, but on Spark.

    `tables` are the tables of the ledger: the audit ingests new entries into them. `ledger` is an open writer of the
    ledger, which the caller closes. `find_queues` returns the backlog queues of the primaries with these names.
    `connection_string`, `secondary` and `primary` are the connection string and the names of the namespaces, `network`
    how the secondary is reached. `connection_string` may be a host name, with the name of a `credential`. `silence` is
    described at `twinbus.syphon.Audit`.
    """

    def __init__(
        self,
        tables: Tables,
        ledger: Ledger,
        find_queues: Callable[[Collection[str]], AuditedQueues],
        connection_string: str,
        *,
        secondary: str,
        primary: str = "",
        network: NetworkOptions | None = None,
        credential: str | None = None,
        timeout: float = 10.0,
        silence: timedelta | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._tables = tables
        self._ledger = ledger
        self._find_queues = find_queues
        self._job = LookJob(connection_string, str(ledger.directory), secondary, timeout, network, credential)
        self._secondary = secondary
        self._primary = primary
        self._silence = silence
        self._pause = pause
        self._folder = tables.root / LOOKS_FOLDER / uuid4().hex
        self._is_written = True
        """Whether the own entries were on the disk at the last reading."""
        self._here = WritersHere(frozenset(), frozenset())
        """What the directory of the ledger showed at the last reading."""

    def run(self, second_look: Callable[[float], None] | None = None) -> AuditSummary:
        """Run the audit. Calls `second_look` with the seconds to wait, if a second look is needed.

        Raises ServiceBusError or OperatorError if a queue cannot be peeked. A queue that does not exist is empty.
        """
        try:
            return self._run(second_look)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, second_look: Callable[[float], None] | None) -> AuditSummary:
        began = time.monotonic()
        before = self._read()
        named = before.queues(self._secondary)
        audited = self._find_queues(primaries_of(named, self._primary))
        queues = audited.and_named(named)
        looks = [self._look(queues)]
        while True:
            after = self._read()
            rows, is_partial = [look.rows for look in looks], any(look.is_partial for look in looks)
            with compare(before, rows, after, self._secondary, is_partial=is_partial) as found:
                counts = found.counts()
                if len(looks) > 1 or not any(counts[word] for word in SECOND_LOOK_WORDS):
                    return self._concluded(found, counts, queues, looks, is_partial=is_partial, began=began)
            seconds = audited.lock_duration.total_seconds()
            if second_look is not None:
                second_look(seconds)
            self._pause(seconds)
            queues = audited.and_named(after.queues(self._secondary))
            looks.append(self._look(queues))

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read(self) -> TablesReading:
        directory = self._ledger.directory
        self._is_written = self._ledger.flush()
        # Before the ingest: a writer may begin a segment, or close, meanwhile.
        writers = WriterStates.in_ledger(directory, SILENCE if self._silence is None else self._silence)
        self._here = WritersHere.find(directory, self._silence)
        query = ingest_ledger(self._tables.spark, directory, self._tables.root)
        query.awaitTermination()
        return TablesReading(self._tables, self._tables.version(), writers)

    def _missing(self, reading: TablesReading) -> tuple[list[str], list[str]]:
        """Returns the reasons why entries are missing, and the writers with entries elsewhere, for the last reading."""
        missing = why_incomplete(self._tables, reading.writers)
        if not self._is_written:
            cause = self._ledger.failure or "the disk is slow"
            missing.append(f"{self._ledger.directory} cannot be written: {cause}")
        writers = reading.writers
        if self._silence is None:
            # The tables may have entries of another ledger, whose last entries are not ingested: silence is no proof.
            writers = replace(writers, silence=_FOR_EVER)
        at_work = writers_at_work(self._tables, reading.version, writers)
        return missing, self._here.why_unshipped(at_work, reading.writers.dead)

    # --- looking -----------------------------------------------------------------------------------------------------

    def _look(self, queues: Sequence[str]) -> _Look:
        """Peeks at all messages of the queues, and after that at those of their dead-letter queues.

        The order matters: if the broker dead-letters a message during the look, at least one of the two shows it.
        """
        parts = [self._look_at(queues, is_dead_letters=False), self._look_at(queues, is_dead_letters=True)]
        rows = parts[0].rows.unionAll(parts[1].rows)
        peeks, is_partial = sum(part.peeks for part in parts), any(part.is_partial for part in parts)
        return _Look(rows, parts[0].seen, parts[1].seen, peeks, is_partial)

    def _look_at(self, queues: Sequence[str], *, is_dead_letters: bool) -> _Look:
        spark, job = self._tables.spark, replace(self._job, is_dead_letters=is_dead_letters)
        ranges, peeks = plan_ranges(job, queues, self._ledger)
        if not ranges:
            nothing = spark.createDataFrame([], f"{LOOK_SCHEMA}, dead_letters long")
            return _Look(nothing, 0, 0, peeks, is_partial=False)
        spark.dataSource.register(BacklogLookSource)
        source = spark.read.format("twinbus-look").option("secret", replace(job, ranges=tuple(ranges)).to_json())
        path = str(self._folder / uuid4().hex)
        source.load().write.parquet(path)
        rows = spark.read.schema(LOOK_SCHEMA).parquet(path)
        rows = rows.withColumn("dead_letters", F.col("copies") if is_dead_letters else F.lit(0).cast("long"))
        found = (
            rows.where("id is null")
            .agg(F.sum("copies"), F.sum("peeks"), F.bool_or("is_partial"), F.first("failure", ignorenulls=True))
            .first()
        )
        assert found is not None, "an aggregate without keys has a row"
        seen, in_tasks, is_partial, failure = found
        if failure is not None:
            raise OperatorError(f"a backlog queue cannot be peeked: {failure}", "Nothing is concluded. Try again.")
        return _Look(rows, seen, 0, peeks + in_tasks, is_partial)

    # --- the result --------------------------------------------------------------------------------------------------

    def _concluded(
        self,
        found: BacklogComparison,
        counts: Mapping[str, int],
        queues: tuple[str, ...],
        looks: Sequence[_Look],
        *,
        is_partial: bool,
        began: float,
    ) -> AuditSummary:
        """Records what the audit saw, and returns the result."""
        missing, unshipped = self._missing(found.after)
        recorded = 0

        def moves() -> Iterator[AuditMove]:
            nonlocal recorded
            for one in found.moves():
                if is_recorded(one, looks=len(looks), is_partial=is_partial, missing=[*missing, *unshipped]):
                    recorded += 1
                    yield one

        record_audit(
            self._ledger,
            moves(),
            counts,
            secondary=self._secondary,
            primary=self._primary,
            queues=len(queues),
            looks=len(looks),
            seen=looks[-1].seen,
            dead_letters=looks[-1].dead_letters,
        )
        messages = found.messages(*LISTED_WORDS)
        reading = found.after
        if recorded:
            reading = self._read()
            missing, unshipped = self._missing(reading)
        # If every message was seen, it does not matter that a writer may have more entries elsewhere.
        missing += unshipped if counts["absent"] or counts["redirected"] else ()
        missing += why_undecided(counts["redirected"])
        sums, listed = self._balance(reading)
        return AuditSummary(
            sums,
            listed,
            tuple(missing),
            counts,
            messages,
            queues,
            looks[-1].seen,
            looks[-1].dead_letters,
            len(looks),
            sum(look.peeks for look in looks),
            time.monotonic() - began,
        )

    def _balance(self, reading: TablesReading) -> tuple[dict[str, int], dict[str, ListedMessages]]:
        rows = current_result(self._tables, JOBS["reconcile"], writers=reading.writers).persist()
        try:
            found = rows.agg(*(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in BALANCE_SUMS)).first()
            assert found is not None, "an aggregate without keys has a row"
            named = [*map(Row.asDict, rows.where("id is not null").collect())]
        finally:
            rows.unpersist()
        messages = sorted(((MessageKey(row["destination"], row["id"]), row) for row in named), key=itemgetter(0))
        listed: dict[str, ListedMessages] = {
            name: [(message, row[name]) for message, row in messages if row[name]] for name in LISTED_SUMS
        }
        return found.asDict(), listed
