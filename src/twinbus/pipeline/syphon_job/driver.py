"""The syphon on Spark. `SparkSyphon` has the same methods to run, pause and stop as `twinbus.syphon.Syphon`.

The driver keeps a long poll open on each backlog queue that no lane works on (Y2). When messages wait, the driver
writes a plan, which Spark's query reads, and receives the reports of the lanes. `planning` decides which tasks a
micro-batch has; `lane` moves the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from twinbus.connect import Receiver
from twinbus.errors import OperatorError, OptionError
from twinbus.ledger import Ledger, Role, Stage
from twinbus.pipeline.session import start_query
from twinbus.pipeline.syphon_job.lane import PLAN_FILE, SyphonSource
from twinbus.pipeline.syphon_job.lane_counts import CountsListener, LaneCounts, LaneProgress, LaneTry
from twinbus.pipeline.syphon_job.lost_lanes import LostLanes
from twinbus.pipeline.syphon_job.messages import BatchPlan, LaneReport, SyphonJob
from twinbus.pipeline.syphon_job.planning import BatchPlanner
from twinbus.syphon import (
    DestinationStatus,
    Discovery,
    DrainEnd,
    LeftMessages,
    NamespaceAccess,
    Progress,
    ProgressCounter,
    QueueSearches,
    RemainingMessages,
    SharedHolds,
    SyphonBrokenError,
    SyphonLedger,
    SyphonState,
    left_by_destination,
    messages_that_can_move,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


_log = logging.getLogger(__name__)

_LONGEST_PAUSE: Final = 60.0
_SHORTEST_WAIT: Final = 0.01
# A drain gives up a backlog queue that has not answered for this number of seconds.
_QUEUE_PATIENCE: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSyphonOptions:
    """The options of a syphon on Spark.

    `lanes`: the most lanes on one backlog queue; None for as many as Spark has cores. `rate`: the most messages per
    second of all lanes together. `wait_for_destinations`: the seconds that a drain waits for destinations that are not
    ready, once nothing else can move (Y11).
    `checkpoint`: the folder for Spark's checkpoint. If it is None, each run has a new checkpoint. This loses no
    message, because the messages that are to be moved are in the backlog queues, not in the checkpoint.
    """

    lanes: int | None = None
    drain: bool = False
    rate: float | None = None
    poll: float = 900.0
    wait_for_destinations: float = 0.0
    checkpoint: str | None = None
    source: type[SyphonSource] = field(default=SyphonSource)

    def __post_init__(self) -> None:
        if self.lanes is not None and self.lanes < 1:
            raise OptionError("lanes", self.lanes, "at least 1")
        if self.rate is not None and not self.rate > 0:
            raise OptionError("rate", self.rate, "messages a second, more than 0")
        if not 0 <= self.wait_for_destinations < math.inf:
            raise OptionError("wait_for_destinations", self.wait_for_destinations, "seconds, at least 0 and finite")


class RemoteSparkError(OperatorError):
    """The Spark session is a session of Spark Connect, but this syphon has to run in the process of Spark's driver."""


class SparkSyphon:
    """A syphon on Spark. Use: `async with SparkSyphon(spark, discovery, job) as syphon: await syphon.run()`.

    The caller stops the Spark session. Nothing is sent to a destination that `shared_holds` holds when a micro-batch is
    planned (S15).
    """

    def __init__(
        self,
        spark: SparkSession,
        discovery: Discovery,
        job: SyphonJob,
        options: SparkSyphonOptions | None = None,
        shared_holds: SharedHolds | None = None,
    ) -> None:
        if not hasattr(spark, "_jsparkSession"):
            raise RemoteSparkError(
                "the syphon cannot run over Spark Connect: it keeps the long polls and gets the reports of its lanes "
                "by foreachBatch, which has to run in this process, beside Spark's driver",
                "Use a classic session: give --master, or start it with spark-submit, and unset SPARK_REMOTE.",
            )
        self.options = options or SparkSyphonOptions()
        self.state = SyphonState.NEW
        self._spark = spark
        self._discovery = discovery
        self._shared_holds = shared_holds
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._counts = ProgressCounter(self._loop.time())
        self._ledger = Ledger(job.ledger, Role.SYPHON) if job.ledger is not None else None
        syphon_ledger = SyphonLedger(self._ledger, job.primary_name, job.secondary_name, self._counts)
        self._syphon_ledger = syphon_ledger
        self._poller = BacklogPoller(
            job.secondary_access, syphon_ledger, self._message_arrived, poll=self.options.poll, timeout=job.timeout
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
        """The number of the plan whose lanes run now; None if no lane runs."""
        self._busy_queues: set[str] = set()
        self._lane_counts = LaneCounts(self._counts)
        self._listener = CountsListener(self._counts_received)
        self._lost_lanes = None if job.ledger is None else LostLanes(Path(job.ledger))
        self._uncounted: list[LaneTry] = []
        """Lanes that died, whose numbers were not read from the ledger yet."""
        self._lanes_lost = 0
        self._lanes_uncounted = 0
        self._searches = QueueSearches()
        self._drain_end = DrainEnd(self.options.wait_for_destinations)
        self._has_drained = False
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
        await self._listener.close()
        if self._shared_holds is not None:
            await self._shared_holds.close()
        await self._discovery.close()
        if self._ledger is not None:
            self._ledger.close()
        self._folder.cleanup()
        self.state = SyphonState.ENDED

    # --- control -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Make no more plans. `run` returns once the running lanes have ended, usually within `SyphonJob.budget`."""
        self._stopping = True
        self._woken.set()

    def pause(self) -> None:
        self._paused = True
        self._woken.set()

    def resume(self) -> None:
        self._paused = False
        self._woken.set()

    def set_rate(self, rate: float | None) -> None:
        """Set the rate limit from the next micro-batch on."""
        self._planner.rate = rate

    # --- events ------------------------------------------------------------------------------------------------------

    def _message_arrived(self, queue: str) -> None:
        self._planner.message_arrived(queue)
        self._woken.set()

    def _counts_received(self, progress: LaneProgress) -> None:
        """Counts what a lane has moved while it runs. What arrives after its plan has ended is ignored."""
        if progress.lane.plan == self._running_plan:
            self._lane_counts.add(progress.lane, progress.counts, progress.operations, self._loop.time())

    def _lanes_reported(self, reports: Sequence[LaneReport]) -> None:
        now = self._loop.time()
        for report in reports:
            *lost, this = report.tries
            self._lane_counts.add(this, report.counts, report.operations, now)
            self._uncounted += lost
            self._lanes_lost += len(lost)
            if report.plan == self._running_plan:
                self._running_plan = None
        self._planner.lanes_reported(reports, now)
        self._woken.set()

    async def _count_lost_lanes(self) -> None:
        """Counts what lanes moved that died. Their segments in the ledger have it."""
        lost, self._uncounted = self._uncounted, []
        if lost and self._lost_lanes is not None:
            try:
                for lane, found in await asyncio.to_thread(self._lost_lanes.read, lost, self._job.primary_name):
                    self._lane_counts.add(lane, found.counts, found.operations, self._loop.time())
            except OSError as error:
                _log.warning("what %s lanes moved that died cannot be read from the ledger: %s", len(lost), error)
                self._lanes_uncounted += len(lost)
        else:
            self._lanes_uncounted += len(lost)
        if self._running_plan is None:
            self._lane_counts.forget_all()

    async def _count_duplicates_again(self) -> None:
        """Counts the possible duplicates by message, as the ledger does, once all that can move has been moved.

        Before that, nobody knows whether a message in doubt will be delivered again: each doubt counts.
        """
        if not self._has_drained or self._lost_lanes is None or not self._counts.total.possible_duplicates:
            return
        try:
            found = await asyncio.to_thread(self._lost_lanes.possible_duplicates, self._job.primary_name)
        except OSError as error:
            _log.warning("the possible duplicates cannot be read from the ledger: %s", error)
        else:
            self._counts.recount_possible_duplicates(found)

    # --- running -----------------------------------------------------------------------------------------------------

    @property
    def has_drained(self) -> bool:
        """Whether a drain ended by itself, not by `stop`. Messages may be left: see `Progress.left`."""
        return self._has_drained

    async def run(self) -> Progress:
        """Run until `stop`. A drain also ends when no message that is left can move; `Progress.left` names these."""
        self.state = SyphonState.RUNNING
        shares_state = self._shared_holds is not None
        self._syphon_ledger.started({"poll": self.options.poll, "drain": self.options.drain, "state": shares_state})
        await self._listen()
        query = await asyncio.to_thread(self._start_query)
        ended = asyncio.ensure_future(asyncio.to_thread(query.awaitTermination))
        ended.add_done_callback(lambda _: self._woken.set())
        watching = asyncio.create_task(self._watch_holds())
        try:
            while not ended.done() and not (self._stopping and self._running_plan is None) and not self._is_done():
                self._woken.clear()
                await self._count_lost_lanes()
                await self._advance()
                await self._wait()
        finally:
            self.state = SyphonState.STOPPING
            watching.cancel()
            await self._poller.pause()
            await asyncio.to_thread(query.stop)
            with contextlib.suppress(Exception):  # raised below if Spark ended the query
                await ended
            await self._count_lost_lanes()
            await self._count_duplicates_again()
            self.state = SyphonState.ENDED
        if (error := ended.exception()) is not None:
            raise SyphonBrokenError(f"Spark has ended the job: {str(error).partition(chr(10))[0]}") from error
        return replace(self.progress(), left=self._left()) if self._has_drained else self.progress()

    async def _listen(self) -> None:
        settings = self._spark.sparkContext.getConf()
        host = settings.get("spark.driver.host")
        assert host is not None, "Spark sets it when a driver starts"
        bind = settings.get("spark.driver.bindAddress", host) or host
        self._job = replace(self._job, counts_to=await self._listener.listen(host, bind))

    async def _watch_holds(self) -> None:
        """Plan again when the holds change."""
        if self._shared_holds is not None:
            await self._shared_holds.watch(self._woken.set)

    async def _read_holds(self) -> None:
        if self._shared_holds is not None:
            await self._shared_holds.refresh()
            self._planner.held = self._shared_holds.held()

    async def _advance(self) -> None:
        """Start a plan if no plan runs and there is work; start missing long polls."""
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
            if self._planner.queues:
                await self._read_holds()
            plan = self._planner.plan(self._loop.time())
            if plan is not None:
                self._running_plan = plan.number
                self._write(replace(plan, locks=self._lock_durations()))
        # A queue that a lane works on needs no poll. All other queues are polled.
        busy = self._busy_queues if self._running_plan is not None else set()
        self._poller.poll(self._planner.queues_to_poll() - busy)

    def _lock_durations(self) -> dict[str, float]:
        locks = {queue: self._discovery.lock_seconds(queue) for queue in self._planner.queues}
        return {queue: seconds for queue, seconds in locks.items() if seconds is not None}

    def _write(self, plan: BatchPlan) -> None:
        self._busy_queues = {task.queue for task in plan.tasks}
        file = Path(self._folder.name) / PLAN_FILE
        new = file.with_suffix(".new")
        new.write_text(plan.to_json(), encoding="utf-8")
        new.replace(file)

    async def _wait(self) -> None:
        """Wait for an event, or until the next plan or the next search for queues."""
        now = self._loop.time()
        due = min(self._planner.due(now), self._searches.due)
        only_events = self._paused or self._stopping or self._running_plan is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if only_events else max(due - now, _SHORTEST_WAIT)):
                await self._woken.wait()

    def _is_done(self) -> bool:
        """Return whether a drain ends now. If not, set the times of the next probes."""
        if not self.options.drain or self._running_plan is not None or self._paused or not self._planner.queues:
            return False
        now, total, planner = self._loop.time(), self._counts.total, self._planner
        moved = total.returned + total.dead_lettered + total.kept
        patience = max(self.options.wait_for_destinations, _QUEUE_PATIENCE)
        is_settled, waiting = planner.is_settled(now, patience), planner.waiting(now, patience)
        self._has_drained = self._drain_end.is_over(now, moved, is_settled=is_settled, waiting=waiting)
        for one in waiting:
            planner.retry_by(one.path, self._drain_end.last_try_at, self._job.first_pause)
        return self._has_drained

    async def _discover(self) -> None:
        """Look for backlog queues if a search is due."""
        if self._loop.time() < self._searches.due:
            return
        self._searches.began()
        try:
            found = await self._discovery.queues()
        except Exception as error:
            pause = self._searches.failed(self._loop.time())
            _log.warning("the search for backlog queues failed, next try in %g s: %s", pause, error)
            return
        now, known_before = self._loop.time(), len(self._planner.queues)
        self._planner.queues_found(found, now)
        known = len(self._planner.queues)
        pause = self._searches.succeeded(now, known=known, new=known - known_before)
        if not found:
            _log.warning("no backlog queue was found, next search in %g s", pause)
            if self.options.drain:
                self.stop()

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
        """Run the lanes of a micro-batch (by `collect`), and pass on their reports. Spark calls this in a thread."""
        reports = [LaneReport.of_json(row.report) for row in frame.collect()]
        self._loop.call_soon_threadsafe(self._lanes_reported, reports)

    # --- progress ----------------------------------------------------------------------------------------------------

    @property
    def queues(self) -> tuple[str, ...]:
        return self._planner.queues

    @property
    def plans(self) -> int:
        """The number of micro-batches that were planned."""
        return self._planner.plans

    def progress(self) -> Progress:
        """Return the progress: what lanes that have ended and running lanes have reported, and dead lanes recorded."""
        now, counts = self._loop.time(), self._counts
        rate = counts.rate(now)
        remaining = messages_that_can_move(self._remaining.last, self._planner.messages_that_cannot_move())
        memories = self._planner.memories(now)
        return Progress(
            seconds=now - counts.began,
            total=counts.total,
            by_destination=counts.by_destination,
            states=tuple(DestinationStatus(one.path, one.readiness, one.cause, now + one.left) for one in memories),
            operations=dict(Counter(counts.operations)),
            rate=rate,
            held=0,
            aside_by_destination=self._planner.messages_aside(),
            remaining=remaining,
            seconds_left=None if remaining is None or rate == 0 else remaining / rate,
            state=str(self.state),
            lanes_lost=self._lanes_lost,
            lanes_uncounted=self._lanes_uncounted,
        )

    async def count_remaining(self) -> int | None:
        """Return the number of messages that can move; None if it is not known. `progress` then shows this number too.

        Sends a request only if messages were moved since the last request.
        """
        await self._remaining.count(self._counts.total, self._loop.time())
        return self.progress().remaining

    def _left(self) -> tuple[LeftMessages, ...]:
        planner, states = self._planner, self.progress().states
        return left_by_destination(
            planner.messages_aside(),
            states,
            self._counts.by_destination,
            planner.queue_counts(),
            planner.held.__contains__,
        )


class BacklogPoller:
    """Keeps one long poll open on each queue given to `poll`.

    When a message arrives, the poller releases the message, ends the poll of that queue and calls `arrived`. The broker
    delivers a released message again, with the same delivery count. The driver moves no messages: the lanes do.
    """

    def __init__(
        self,
        secondary: NamespaceAccess | str,
        ledger: SyphonLedger,
        arrived: Callable[[str], None],
        *,
        poll: float,
        timeout: float,
    ) -> None:
        self._connection = NamespaceAccess.of(secondary).connect(timeout=timeout)
        self._ledger = ledger
        self._arrived = arrived
        self._poll_seconds = poll
        self._polls: dict[str, asyncio.Task[None]] = {}

    def poll(self, queues: Iterable[str]) -> None:
        """Start a poll on each of these queues that has no poll yet."""
        for queue in queues:
            if queue not in self._polls:
                self._polls[queue] = poll = asyncio.create_task(self._wait_for_message(queue))
                poll.add_done_callback(lambda _: self._forget_done())

    def _forget_done(self) -> None:
        self._polls = {queue: poll for queue, poll in self._polls.items() if not poll.done()}

    async def pause(self) -> None:
        """End all polls: take back their credit, and release messages that arrive before the credit has ended."""
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
        """Make one long poll. Return whether a message arrived."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            found = await receiver.receive(1, self._poll_seconds)
        except asyncio.CancelledError:
            # The credit is taken back, but the receive is charged (M1).
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
