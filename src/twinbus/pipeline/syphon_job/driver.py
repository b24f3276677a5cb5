"""The syphon on Spark: `SparkSyphon` is run, paused and stopped like `twinbus.syphon.Syphon`.

The driver holds a long poll on each backlog queue that no lane works on (Y2). When messages wait, it hands a plan to
Spark's query and takes the reports of the lanes. `planning` decides what a micro-batch has in it; `lane` moves the
messages.
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
_SHORTEST_WAIT: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSyphonOptions:
    """`lanes`: for each backlog queue at most; None for as many as fill Spark's cores. `rate`: of all lanes together.

    `patience`: a drain that moves nothing for so many seconds ends. `checkpoint`: Spark's folder for the query. Without
    it each run has a new one; that loses nothing, because the broker knows what there is to move.
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
    """The session is one of Spark Connect; this driver has to run in the process of Spark's driver."""


class SparkSyphon:
    """`async with SparkSyphon(spark, discovery, job) as syphon: await syphon.run()`. Does not close the session."""

    def __init__(
        self, spark: SparkSession, discovery: Discovery, job: SyphonJob, options: SparkSyphonOptions | None = None
    ) -> None:
        if not hasattr(spark, "_jsparkSession"):
            raise RemoteSparkError(
                "the syphon cannot run over Spark Connect: it has to run in the process of Spark's driver",
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
        syphon_ledger = SyphonLedger(self._ledger, job.primary_name, job.secondary_name, self._counts)
        self._poller = BacklogPoller(
            job.secondary, syphon_ledger, self._message_arrived, poll=self.options.poll, timeout=job.timeout
        )
        self._planner = BatchPlanner(
            secrets.token_hex(8),
            lanes=self.options.lanes,
            slots=spark.sparkContext.defaultParallelism,
            rate=self.options.rate,
            drain=self.options.drain,
        )
        self._folder = tempfile.TemporaryDirectory(prefix="twinbus-syphon-", ignore_cleanup_errors=True)
        self._woken = asyncio.Event()
        self._stopping = False
        self._paused = False
        self._running_plan: str | None = None
        """Number of the plan whose lanes run."""
        self._busy_queues: set[str] = set()
        self._moved_at = self._loop.time()
        self._discovered_at = float("-inf")
        self._remaining = RemainingMessages(discovery)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self.stop()
        await self._poller.close()
        await self._discovery.close()
        if self._ledger is not None:
            self._ledger.close()
        self._folder.cleanup()
        self.state = SyphonState.ENDED

    # --- control -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Plan nothing more. `run` returns once the running lanes have ended, which takes a few seconds."""
        self._stopping = True
        self._woken.set()

    def pause(self) -> None:
        self._paused = True
        self._woken.set()

    def resume(self) -> None:
        self._paused = False
        self._woken.set()

    def set_rate(self, rate: float | None) -> None:
        """Takes effect with the next micro-batch."""
        self._planner.rate = rate

    # --- events ------------------------------------------------------------------------------------------------------

    def _message_arrived(self, queue: str) -> None:
        self._planner.message_arrived(queue)
        self._woken.set()

    def _lanes_reported(self, reports: Sequence[LaneReport]) -> None:
        now = self._loop.time()
        for report in reports:
            self._counts.operations.update(report.operations)
            self._count(report, now)
            if report.plan == self._running_plan:
                self._running_plan = None
        self._planner.lanes_reported(reports, now)
        self._woken.set()

    def _count(self, report: LaneReport, now: float) -> None:
        total = self._counts
        for path, counts in report.counts.items():
            if counts.returned:
                total.returned(path, counts.returned, counts.bytes, now)
            total.deferred(path, counts.deferred)
            total.dead_lettered(path, counts.dead_lettered)
            total.kept(path, counts.kept)
            total.possible_duplicates(path, counts.possible_duplicates)
            if counts.returned or counts.dead_lettered:
                self._moved_at = now

    # --- running -----------------------------------------------------------------------------------------------------

    async def run(self) -> Progress:
        """Run until `stop` or, while draining, until every backlog queue was found empty or `patience` is over."""
        self.state = SyphonState.RUNNING
        query = await asyncio.to_thread(self._start_query)
        self._moved_at = self._loop.time()
        ended = asyncio.ensure_future(asyncio.to_thread(query.awaitTermination))
        ended.add_done_callback(lambda _: self._woken.set())
        try:
            while not ended.done() and not (self._stopping and self._running_plan is None) and not self._is_done():
                self._woken.clear()
                await self._advance()
                await self._wait()
        finally:
            self.state = SyphonState.STOPPING
            await self._poller.pause()
            await asyncio.to_thread(query.stop)
            with contextlib.suppress(Exception):  # raised below if Spark ended the query
                await ended
            self.state = SyphonState.ENDED
        if (error := ended.exception()) is not None:
            raise SyphonBrokenError(f"Spark has ended the job: {str(error).partition(chr(10))[0]}") from error
        return self.progress()

    async def _advance(self) -> None:
        """Start a plan if none runs and there is something to do; hold the long polls."""
        if self._stopping:
            self.state = SyphonState.STOPPING
        if self._paused or self._stopping:
            await self._poller.pause()
            if self._running_plan is None:
                self.state = SyphonState.PAUSED if self._paused else self.state
            return
        self.state = SyphonState.RUNNING
        if self._running_plan is None:
            await self._discover()
            plan = self._planner.plan(self._loop.time())
            if plan is not None:
                self._running_plan = plan.number
                self._write(plan)
        # A queue that a lane drains needs no poll; the others are polled meanwhile.
        busy = self._busy_queues if self._running_plan is not None else set()
        self._poller.poll(self._planner.queues_to_poll() - busy)

    def _write(self, plan: BatchPlan) -> None:
        self._busy_queues = {task.queue for task in plan.tasks}
        file = Path(self._folder.name) / PLAN_FILE
        new = file.with_suffix(".new")
        new.write_text(plan.to_json(), encoding="utf-8")
        new.replace(file)

    async def _wait(self) -> None:
        """Wait until something changed, or until the next plan, search for queues or end of patience is due."""
        now = self._loop.time()
        due = min(self._planner.due(now), self._discovered_at + DISCOVERY_INTERVAL)
        if self.options.drain:
            due = min(due, self._moved_at + self.options.patience)
        only_events = self._paused or self._stopping or self._running_plan is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if only_events else max(due - now, _SHORTEST_WAIT)):
                await self._woken.wait()

    def _is_done(self) -> bool:
        if not self.options.drain or self._running_plan is not None:
            return False
        if self._planner.is_drained() and self._discovered_at > float("-inf"):
            return True
        waited = self._loop.time() - self._moved_at
        if waited > self.options.patience and not self._paused:
            aside = self._planner.messages_aside()
            _log.warning("nothing could be moved for %d s; %d messages stay put aside", waited, aside)
            return True
        return False

    async def _discover(self) -> None:
        """Look for backlog queues if it is time. Tries until it succeeds, unless queues are known already."""
        pause = _FIRST_PAUSE
        while self._loop.time() >= self._discovered_at + DISCOVERY_INTERVAL and not self._stopping:
            try:
                found = await self._discovery.queues()
            except Exception as error:
                _log.warning("the search for backlog queues failed, next try in %g s: %s", pause, error)
                if self._planner.queues:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._woken.wait()
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            self._discovered_at = self._loop.time()
            self._planner.queues_found(found, self._discovered_at)
            if not found:
                _log.warning("no backlog queue was found")

    # --- Spark -------------------------------------------------------------------------------------------------------

    def _start_query(self) -> StreamingQuery:
        source = self.options.source
        self._spark.dataSource.register(source)
        stream = self._spark.readStream.format(source.name()).options(
            folder=self._folder.name, secret=self._job.to_json()
        )
        checkpoint = self.options.checkpoint or str(Path(self._folder.name) / "checkpoint")
        writer = stream.load().writeStream.foreachBatch(self._run_batch).option("checkpointLocation", checkpoint)
        return start_query(writer.queryName(source.name()).start)

    def _run_batch(self, frame: DataFrame, batch: int) -> None:
        """Called in a thread of Spark. `collect` runs the lanes."""
        reports = [LaneReport.of_json(row.report) for row in frame.collect()]
        self._loop.call_soon_threadsafe(self._lanes_reported, reports)

    # --- progress ----------------------------------------------------------------------------------------------------

    @property
    def queues(self) -> tuple[str, ...]:
        return self._planner.queues

    @property
    def plans(self) -> int:
        """Micro-batches that were planned."""
        return self._planner.plans

    def progress(self) -> Progress:
        """As of the last lanes that ended."""
        now, counts = self._loop.time(), self._counts
        rate = counts.rate(now)
        remaining = self._remaining.last
        memories = self._planner.memories(now)
        return Progress(
            seconds=now - counts.began,
            total=counts.total,
            by_destination=counts.by_destination,
            states=tuple(DestinationStatus(one.path, one.readiness, one.cause, now + one.left) for one in memories),
            operations=dict(Counter(counts.operations)),
            rate=rate,
            held=0,
            aside=self._planner.messages_aside(),
            remaining=remaining,
            seconds_left=None if remaining is None or rate == 0 else remaining / rate,
            state=str(self.state),
        )

    async def count_remaining(self) -> int | None:
        """Ask the secondary if messages were moved since the last time; `progress` shows the result from then on."""
        return await self._remaining.count(self._counts.total, self._loop.time())


class BacklogPoller:
    """Holds one long poll on each queue given to `poll`. A message ends the poll: it is released, then `arrived` runs.

    The released message is delivered again as it was, with its delivery count. Lanes move messages, not the driver.
    """

    def __init__(
        self, secondary: str, ledger: SyphonLedger, arrived: Callable[[str], None], *, poll: float, timeout: float
    ) -> None:
        self._connection = NamespaceAccess.of(secondary).connect(timeout=timeout)
        self._ledger = ledger
        self._arrived = arrived
        self._poll_seconds = poll
        self._polls: dict[str, asyncio.Task[None]] = {}

    def poll(self, queues: Iterable[str]) -> None:
        """Start polls on those of the queues that have none."""
        for queue in queues:
            if queue not in self._polls:
                self._polls[queue] = poll = asyncio.create_task(self._wait_for_message(queue))
                poll.add_done_callback(lambda _: self._forget_done())

    def _forget_done(self) -> None:
        self._polls = {queue: poll for queue, poll in self._polls.items() if not poll.done()}

    async def pause(self) -> None:
        """End all polls: take back their credit and release messages that were on their way."""
        polls = list(self._polls.values())
        for poll in polls:
            poll.cancel()
        if polls:
            await asyncio.wait(polls)

    async def close(self) -> None:
        await self.pause()
        await self._connection.close()

    async def _wait_for_message(self, queue: str) -> None:
        failures = 0
        while True:
            try:
                async with await self._connection.receiver(queue, prefetch=0) as receiver:
                    failures = 0
                    while not await self._poll(queue, receiver):
                        pass
            except Exception as error:  # a credential may raise anything
                if not failures:
                    _log.warning("the long poll on backlog queue %s failed and is repeated: %s", queue, error)
                await asyncio.sleep(min(2.0**failures, _LONGEST_PAUSE))
                failures = min(failures + 1, 10)
            else:
                self._arrived(queue)
                return

    async def _poll(self, queue: str, receiver: Receiver) -> bool:
        """One long poll; returns whether a message came."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            found = await receiver.receive(1, self._poll_seconds)
        except asyncio.CancelledError:
            # The credit is taken back, and the receive is charged all the same (M1).
            self._ledger.record(Stage.EMPTY_RECEIVE, queue, (), loop.time() - began)
            raise
        seconds = loop.time() - began
        if not found:
            self._ledger.record(Stage.EMPTY_RECEIVE, queue, (), seconds)
            return False
        self._ledger.record(Stage.RECEIVE_BACKLOG, queue, [len(one.raw) for one in found], seconds)
        began = loop.time()
        await receiver.release(found)
        self._ledger.record(Stage.SETTLE_BACKLOG, queue, (0,) * len(found), loop.time() - began)
        return True
