"""The syphon on Spark as its caller has it: told to run, pause and stop like the one of `twinbus.syphon`.

It holds the long polls, hands each plan to Spark's query and takes the reports. What a batch has in it is decided in
`planning`; messages move in `lane`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from twinbus.connect import Receiver
from twinbus.errors import OperatorError, OptionError
from twinbus.ledger import Ledger, Role, Stage
from twinbus.pipeline.session import start_query
from twinbus.pipeline.syphon_job.lane import PLAN_FILE, SyphonSource
from twinbus.pipeline.syphon_job.messages import BatchPlan, LaneReport, SyphonJob
from twinbus.pipeline.syphon_job.planning import BatchPlanner
from twinbus.syphon import (
    DISCOVERY_INTERVAL,
    DestinationStatus,
    Discovery,
    NamespaceAccess,
    Progress,
    ProgressCounter,
    RemainingMessages,
    SyphonBrokenError,
    SyphonLedger,
    SyphonState,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


_log = logging.getLogger(__name__)

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
_LEAST_WAIT: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSyphonOptions:
    """`lanes`: on each backlog queue at most; None: as many as fill Spark's cores. `rate` is for all of them.

    `patience`: seconds after which a drain that moves nothing any more ends. `checkpoint`: Spark's folder for the
    query; without it each run has a new one, which loses nothing, since the broker knows what there is to move.
    """

    lanes: int | None = None
    drain: bool = False
    rate: float | None = None
    poll: float = 900.0
    patience: float = 900.0
    checkpoint: str | None = None
    source: type[SyphonSource] = field(default=SyphonSource)

    def __post_init__(self) -> None:
        if self.lanes is not None and self.lanes < 1:
            raise OptionError("lanes", self.lanes, "at least 1")
        if self.rate is not None and not self.rate > 0:
            raise OptionError("rate", self.rate, "messages a second, more than 0")


class RemoteSparkError(OperatorError):
    """The driver of this job has to be where Spark's driver is."""


class SparkSyphon:
    """`async with SparkSyphon(spark, discovery, job) as syphon: await syphon.run()`. The session stays the caller's."""

    def __init__(
        self, spark: SparkSession, discovery: Discovery, job: SyphonJob, options: SparkSyphonOptions | None = None
    ) -> None:
        if not hasattr(spark, "_jsparkSession"):
            raise RemoteSparkError(
                "the syphon cannot run over Spark Connect: its driver holds the long polls, beside Spark's own",
                "Give --master, or start it with spark-submit.",
            )
        self.options = options or SparkSyphonOptions()
        self.state = SyphonState.NEW
        self._spark = spark
        self._discovery = discovery
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._counts = ProgressCounter(self._loop.time())
        self._ledger = Ledger(job.ledger, Role.SYPHON) if job.ledger is not None else None
        books = SyphonLedger(self._ledger, job.primary_name, job.secondary_name, self._counts)
        self._watch = BacklogPoller(job.secondary, books, self._arrived, poll=self.options.poll, timeout=job.timeout)
        self._planner = BatchPlanner(
            secrets.token_hex(8),
            lanes=self.options.lanes,
            slots=spark.sparkContext.defaultParallelism,
            rate=self.options.rate,
            drain=self.options.drain,
        )
        self._folder = tempfile.TemporaryDirectory(prefix="twinbus-syphon-", ignore_cleanup_errors=True)
        self._told = asyncio.Event()
        self._stopping = False
        self._paused = False
        self._planned: str | None = None
        self._busy: set[str] = set()
        self._moved_at = self._loop.time()
        self._looked_at = float("-inf")
        self._remainder = RemainingMessages(discovery)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self.stop()
        await self._watch.close()
        await self._discovery.close()
        if self._ledger is not None:
            self._ledger.close()
        self._folder.cleanup()
        self.state = SyphonState.ENDED

    # --- what it is told ---------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Plans nothing more; `run` returns once the lanes at work have ended, which takes them a few seconds."""
        self._stopping = True
        self._told.set()

    def pause(self) -> None:
        self._paused = True
        self._told.set()

    def resume(self) -> None:
        self._paused = False
        self._told.set()

    def set_rate(self, rate: float | None) -> None:
        """From the next batch on."""
        self._planner.rate = rate

    def _arrived(self, queue: str) -> None:
        self._planner.arrived(queue)
        self._told.set()

    def _reported(self, reports: Sequence[LaneReport]) -> None:
        now = self._loop.time()
        for report in reports:
            self._counts.operations.update(report.operations)
            self._count(report, now)
            if report.plan == self._planned:
                self._planned = None
        self._planner.reported(reports, now)
        self._told.set()

    def _count(self, report: LaneReport, now: float) -> None:
        counts = self._counts
        for path, tally in report.tallies.items():
            if tally.returned:
                counts.returned(path, tally.returned, tally.bytes, now)
            counts.deferred(path, tally.deferred)
            counts.dead_lettered(path, tally.dead_lettered)
            counts.kept(path, tally.kept)
            counts.possible_duplicates(path, tally.possible_duplicates)
            if tally.returned or tally.dead_lettered:
                self._moved_at = now

    # --- running -----------------------------------------------------------------------------------------------------

    async def run(self) -> Progress:
        """Until `stop`, or, draining, until every backlog queue was found empty or `patience` is over."""
        self.state = SyphonState.RUNNING
        query = await asyncio.to_thread(self._started)
        self._moved_at = self._loop.time()
        ended = asyncio.ensure_future(asyncio.to_thread(query.awaitTermination))
        ended.add_done_callback(lambda _: self._told.set())
        try:
            while not ended.done() and not (self._stopping and self._planned is None) and not self._is_done():
                self._told.clear()
                await self._step()
                await self._wait()
        finally:
            self.state = SyphonState.STOPPING
            await self._watch.rest()
            await asyncio.to_thread(query.stop)
            with contextlib.suppress(Exception):  # told below, where it was Spark's own end
                await ended
            self.state = SyphonState.ENDED
        if (error := ended.exception()) is not None:
            raise SyphonBrokenError(f"Spark has ended the job: {str(error).partition(chr(10))[0]}") from error
        return self.progress()

    async def _step(self) -> None:
        """A plan, where there is none out and something to do."""
        if self._stopping:
            self.state = SyphonState.STOPPING
        if self._paused or self._stopping:
            await self._watch.rest()
            if self._planned is None:
                self.state = SyphonState.PAUSED if self._paused else self.state
            return
        self.state = SyphonState.RUNNING
        if self._planned is None:
            await self._look()
            plan = self._planner.plan(self._loop.time())
            if plan is not None:
                self._planned = plan.number
                self._write(plan)
        # Also while lanes are at work elsewhere; where they are, messages do not wait.
        busy = self._busy if self._planned is not None else set()
        self._watch.hold(self._planner.polled() - busy)

    def _write(self, plan: BatchPlan) -> None:
        self._busy = {part.queue for part in plan.slices}
        file = Path(self._folder.name) / PLAN_FILE
        new = file.with_suffix(".new")
        new.write_text(plan.to_json(), encoding="utf-8")
        new.replace(file)

    async def _wait(self) -> None:
        now = self._loop.time()
        due = min(self._planner.due(now), self._looked_at + DISCOVERY_INTERVAL)
        if self.options.drain:
            due = min(due, self._moved_at + self.options.patience)
        told = self._paused or self._stopping or self._planned is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if told else max(due - now, _LEAST_WAIT)):
                await self._told.wait()

    def _is_done(self) -> bool:
        if not self.options.drain or self._planned is not None:
            return False
        if self._planner.is_drained() and self._looked_at > float("-inf"):
            return True
        waited = self._loop.time() - self._moved_at
        if waited > self.options.patience and not self._paused:
            _log.warning("nothing could be moved for %d s; %d messages stay put aside", waited, self._planner.aside())
            return True
        return False

    async def _look(self) -> None:
        """For backlog queues; the secondary may be away: then what is known is drained, and it is asked again."""
        pause = _FIRST_PAUSE
        while self._loop.time() >= self._looked_at + DISCOVERY_INTERVAL and not self._stopping:
            try:
                found = await self._discovery.queues()
            except Exception as error:
                _log.warning("the backlog queues could not be looked for, tried again in %g s: %s", pause, error)
                if self._planner.queues:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._told.wait()
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            self._looked_at = self._loop.time()
            self._planner.found(found, self._looked_at)
            if not found:
                _log.warning("no backlog queue was found")

    # --- Spark -------------------------------------------------------------------------------------------------------

    def _started(self) -> StreamingQuery:
        source = self.options.source
        self._spark.dataSource.register(source)
        stream = self._spark.readStream.format(source.name()).options(
            folder=self._folder.name, secret=self._job.to_json()
        )
        checkpoint = self.options.checkpoint or str(Path(self._folder.name) / "checkpoint")
        writer = stream.load().writeStream.foreachBatch(self._took).option("checkpointLocation", checkpoint)
        return start_query(writer.queryName(source.name()).start)

    def _took(self, frame: DataFrame, batch: int) -> None:
        """In a thread of Spark's. Collecting is what runs the lanes."""
        reports = [LaneReport.of_json(row.report) for row in frame.collect()]
        self._loop.call_soon_threadsafe(self._reported, reports)

    # --- how far it is -----------------------------------------------------------------------------------------------

    @property
    def queues(self) -> tuple[str, ...]:
        return self._planner.queues

    @property
    def plans(self) -> int:
        """Batches that were planned."""
        return self._planner.plans

    def progress(self) -> Progress:
        """As of the last lanes that have ended."""
        now, counts = self._loop.time(), self._counts
        rate = counts.rate(now)
        remaining = self._remainder.told
        memories = self._planner.memories(now)
        return Progress(
            seconds=now - counts.began,
            total=counts.total,
            by_destination=counts.by_destination,
            states=tuple(DestinationStatus(one.path, one.readiness, one.cause, now + one.left) for one in memories),
            operations=dict(Counter(counts.operations)),
            rate=rate,
            held=0,
            aside=self._planner.aside(),
            remaining=remaining,
            seconds_left=None if remaining is None or rate == 0 else remaining / rate,
            state=str(self.state),
        )

    async def count_remaining(self) -> int | None:
        """Asks the secondary, if there may be news; `progress` tells it from then on."""
        return await self._remainder.count(self._counts.total, self._loop.time())


class BacklogPoller:
    """`hold` says on which queues; `arrived` is called once a poll ended with a message, which ends it."""

    def __init__(
        self, secondary: str, books: SyphonLedger, arrived: Callable[[str], None], *, poll: float, timeout: float
    ) -> None:
        self._bus = NamespaceAccess.of(secondary).connect(timeout=timeout)
        self._books = books
        self._arrived = arrived
        self._poll = poll
        self._polls: dict[str, asyncio.Task[None]] = {}

    def hold(self, queues: Iterable[str]) -> None:
        for queue in queues:
            if queue not in self._polls:
                self._polls[queue] = poll = asyncio.create_task(self._watch(queue))
                poll.add_done_callback(lambda _: self._forget())

    def _forget(self) -> None:
        self._polls = {queue: poll for queue, poll in self._polls.items() if not poll.done()}

    async def rest(self) -> None:
        """Takes back all credit, and gives back what was on its way."""
        polls = list(self._polls.values())
        for poll in polls:
            poll.cancel()
        if polls:
            await asyncio.wait(polls)

    async def close(self) -> None:
        await self.rest()
        await self._bus.close()

    async def _watch(self, queue: str) -> None:
        failures = 0
        while True:
            try:
                async with await self._bus.receiver(queue, prefetch=0) as receiver:
                    failures = 0
                    while not await self._polled(queue, receiver):
                        pass
            except Exception as error:  # a credential may raise anything
                if not failures:
                    _log.warning("backlog queue %s cannot be watched, tried again: %s", queue, error)
                await asyncio.sleep(min(2.0**failures, _LONGEST_PAUSE))
                failures = min(failures + 1, 10)
            else:
                self._arrived(queue)
                return

    async def _polled(self, queue: str, receiver: Receiver) -> bool:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            found = await receiver.receive(1, self._poll)
        except asyncio.CancelledError:
            # Its credit is taken back; it was asked for all the same (M1).
            self._books.done(Stage.EMPTY_RECEIVE, queue, (), loop.time() - began)
            raise
        seconds = loop.time() - began
        if not found:
            self._books.done(Stage.EMPTY_RECEIVE, queue, (), seconds)
            return False
        self._books.done(Stage.RECEIVE_BACKLOG, queue, [len(one.raw) for one in found], seconds)
        began = loop.time()
        await receiver.release(found)
        self._books.done(Stage.SETTLE_BACKLOG, queue, (0,) * len(found), loop.time() - began)
        return True
