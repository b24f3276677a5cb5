"""A lane: a pump that works on one backlog queue for `SyphonJob.budget` seconds, in a Spark task.

A lane uses the same pump as every syphon. A failure of the destination or of the backlog queue does not make a lane
raise an exception, which would cost one of Spark's retries: the lane ends normally and returns a report. Each lane
writes its own ledger segment; the report is used only for progress and planning. While it runs, it sends its numbers to
the driver (`lane_counts`).

`SyphonSource` is the data source that runs lanes: a streaming source without data, in which each lane is a partition.
An offset of the source has an epoch, and the plan that the driver wrote to a file. If Spark repeats a batch, the lanes
receive and move messages again. This is safe, because the source does not store which messages a batch has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Final

import uvloop
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.types import StructType

from twinbus.errors import TwinbusError
from twinbus.ledger import Ledger, Role
from twinbus.pipeline.syphon_job.lane_counts import LaneTry, send_counts
from twinbus.pipeline.syphon_job.lost_lanes import record_start
from twinbus.pipeline.syphon_job.messages import BatchPlan, LaneReport, LaneTask, ScanResult, SyphonJob
from twinbus.syphon import (
    PEEK_PAGE_SIZE,
    BacklogFailedError,
    NativeTransport,
    ProgressCounter,
    Pump,
    RetryPolicy,
    StepListener,
    SyphonContext,
    SyphonLedger,
    SyphonOptions,
)

_log = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.5
_CHECK_SECONDS: Final = 0.05
# About the number of deferred messages that one lane can bring back. The next lane scans for more messages.
_SCAN_LIMIT: Final = 20_000


class LaneBrokenError(TwinbusError):
    """The pump of a lane ended because of a defect in Twinbus.

    No message is lost: the broker delivers the messages that the pump held again when their locks end.
    """


class Lane:
    """One run of a lane: `await Lane(job, plan, task).run()`. `run` can be called only once."""

    def __init__(self, job: SyphonJob, plan: BatchPlan, task: LaneTask, on_step: StepListener | None = None) -> None:
        self._job = job
        self._plan = plan
        self._task = task
        self._on_step = on_step
        self._scan: ScanResult | None = None

    async def run(self) -> LaneReport:
        job, task = self._job, self._task
        now = asyncio.get_running_loop().time
        began = now()
        counts = ProgressCounter(began)
        this = LaneTry(self._plan.number, task.queue, task.lane, _earlier_tries())
        async with AsyncExitStack() as stack:
            ledger = stack.enter_context(Ledger(job.ledger, Role.SYPHON)) if job.ledger is not None else None
            if ledger is not None:
                record_start(ledger, this, job.primary_name)
            if job.counts_to is not None:
                sending = asyncio.create_task(send_counts(job.counts_to, this, counts))
                stack.callback(sending.cancel)
            transport = NativeTransport(job.primary_access, job.secondary_access, try_timeout=job.timeout)
            stack.push_async_callback(transport.close)
            policy = RetryPolicy(
                first_pause=job.first_pause, longest_pause=job.longest_pause, gone_after=job.gone_after
            )
            options = SyphonOptions(
                rate=task.rate, ttl=job.ttl, poll=_POLL_SECONDS, window=job.window, retry_policy=policy
            )
            syphon_ledger = SyphonLedger(ledger, job.primary_name, job.secondary_name, counts)
            context = SyphonContext(transport, options, syphon_ledger, self._on_step)
            stack.push_async_callback(context.close)
            context.destinations.remember(self._plan.memories, began)
            context.destinations.is_held = self._plan.held.__contains__
            context.broker_clock(task.queue).lock_seconds = self._plan.locks.get(task.queue)
            pump = Pump(task.queue, context)
            stack.push_async_callback(pump.close)
            # The pump must not start a scan: the driver plans the scans, so that only one lane scans a queue at a time.
            pump.deferred.schedule_first_scan(inf)
            await self._run_pump(pump, context, began + job.budget)
            ended = now()
            return LaneReport(
                plan=self._plan.number,
                queue=task.queue,
                lane=task.lane,
                worker=f"{socket.gethostname()}/{os.getpid()}",
                seconds=ended - began,
                is_empty=pump.is_empty,
                failure=None if pump.failure is None else str(pump.failure),
                counts=counts.by_destination,
                operations=counts.operations,
                memories=context.destinations.memories(ended),
                waiting=pump.deferred.waiting(),
                probes=task.probes,
                scan=self._scan,
                earlier_tries=this.number,
                failures={one.path: one.failures for one in context.destinations.statuses() if one.failures},
            )

    async def _run_pump(self, pump: Pump, context: SyphonContext, end: float) -> None:
        """Run the pump until it has no more work, but not longer than until `end`."""
        for path, number in self._task.probes.items():
            pump.deferred.add(path, (number,))
        pump.start()
        finding = asyncio.create_task(self._find_deferred(pump, context, end))
        idle = False
        try:
            while not idle and context.pump_error is None and context.now() < end:
                await asyncio.sleep(_CHECK_SECONDS)
                idle = finding.done() and pump.idle_until(context.now()) > context.now()
        finally:
            context.stopping = True
            finding.cancel()
            await asyncio.wait({finding})
            await pump.pause()
        if not finding.cancelled():
            finding.result()
        if context.pump_error is not None:
            raise LaneBrokenError(f"the pump of {pump.queue} ended: {context.pump_error!r}") from context.pump_error

    # --- messages that were put aside --------------------------------------------------------------------------------

    async def _find_deferred(self, pump: Pump, context: SyphonContext, end: float) -> None:
        """Find the sequence numbers of messages that were put aside. The pump brings these messages back."""
        task = self._task
        while task.scan_from == 0 and not pump.is_empty:  # noqa: ASYNC110 - the pump raises no event
            # A scan of the whole queue waits until the pump has received all active messages: then it is shorter.
            await asyncio.sleep(_CHECK_SECONDS)
        if task.scan_from is not None:
            await self._scan_queue(pump, context, task.scan_from, end)
        probes = dict(task.probes)
        while self._scan is None and probes:
            # Once the probe of a destination was accepted, the other messages of that destination can be brought back.
            await asyncio.sleep(_CHECK_SECONDS)
            now = context.now()
            if ready := [number for path, number in probes.items() if context.destinations.due(path) == -inf]:
                await self._scan_queue(pump, context, min(ready), end)
            elif pump.idle_until(now) > now:
                return

    async def _scan_queue(self, pump: Pump, context: SyphonContext, start: int, end: float) -> None:
        backlog = context.backlog(pump.queue)
        at, found = start, 0
        active: Counter[str] = Counter()
        scheduled: Counter[str] = Counter()
        try:
            while found < _SCAN_LIMIT and context.now() < end:
                page = await backlog.peek(at, PEEK_PAGE_SIZE)
                if not page:
                    self._scan = ScanResult(start, None, active, scheduled)
                    return
                at = page[-1].sequence_number + 1
                for message in page:
                    if message.deferred:
                        pump.deferred.add(message.path, (message.sequence_number,))
                        found += 1
                    else:
                        (scheduled if message.scheduled else active)[message.path or ""] += 1
                self._scan = ScanResult(start, at, active, scheduled)
                context.notify_listeners()
        except BacklogFailedError as error:
            _log.warning("the scan for messages that were put aside failed: %s", error)
            self._scan = ScanResult(start, at, active, scheduled)
        finally:
            await backlog.close()


def _earlier_tries() -> int:
    spark_task = TaskContext.get()
    return 0 if spark_task is None else spark_task.attemptNumber()


# --- the data source -------------------------------------------------------------------------------------------------

PLAN_FILE: Final = "plan.json"
# `latestOffset` waits this long for a plan: if it returned without a wait, Spark would call it again without a pause.
_PLAN_SECONDS: Final = 1.0
_FILE_SECONDS: Final = 0.02
_NO_PLAN: Final = BatchPlan("", ())

Offset = dict[str, Any]


@dataclass
class LanePartition(InputPartition):
    plan: BatchPlan
    task: LaneTask


class SyphonSource(DataSource):
    """The data source that runs lanes.

    Options: `folder`, where the driver writes its plan, and `secret`, the job as JSON. Spark does not show the value of
    an option with the name `secret` in logs.
    """

    on_step: ClassVar[StepListener | None] = None
    """A listener for the steps of messages, called in the Spark task that runs the lane."""

    @classmethod
    def name(cls) -> str:
        return "twinbus-syphon"

    def schema(self) -> str:
        return "report string"

    def streamReader(self, schema: StructType) -> LaneReader:  # noqa: N802  # Spark's names, here and below
        return LaneReader(Path(self.options["folder"]), SyphonJob.of_json(self.options["secret"]), type(self).on_step)


class LaneReader(DataSourceStreamReader):
    def __init__(self, folder: Path, job: SyphonJob, on_step: StepListener | None) -> None:
        self._file = folder / PLAN_FILE
        self._job = job
        self._on_step = on_step

    def initialOffset(self) -> Offset:  # noqa: N802
        return {"epoch": 0, "plan": _NO_PLAN.to_json()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        end = time.monotonic() + _PLAN_SECONDS
        while True:
            text = self._file.read_text(encoding="utf-8") if self._file.exists() else start["plan"]
            if text != start["plan"]:
                return {"epoch": start["epoch"] + 1, "plan": text}
            if time.monotonic() >= end:
                return start
            time.sleep(_FILE_SECONDS)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        plan = BatchPlan.of_json(end["plan"])
        return [LanePartition(plan, task) for task in plan.tasks]

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        assert isinstance(partition, LanePartition)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(Lane(self._job, partition.plan, partition.task, self._on_step).run())
        yield (report.to_json(),)

    def commit(self, end: Offset) -> None:
        """Does nothing: the lanes have already settled the messages of this batch."""
