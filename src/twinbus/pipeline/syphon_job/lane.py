"""One lane: a pump on one backlog queue for a few seconds, in a task of Spark. The same pump as everywhere.

Whatever becomes of the destination or the backlog, it ends in order and reports: an error thrown would cost Spark's
tries. It writes its own segment of the ledger; what it reports is for progress and planning alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Final

import uvloop
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.types import StructType

from twinbus.errors import TwinbusError
from twinbus.ledger import Ledger, Role
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

_POLL: Final = 0.5
_WATCH_SECONDS: Final = 0.05
# What one lane can bring back in its time; those beyond it are looked for by the next.
_MOST_FOUND: Final = 20_000


class LaneBrokenError(TwinbusError):
    """Its pump ended by a defect of its own. No message is lost: what it held comes back."""


class Lane:
    """`await Lane(job, plan, slice).run()`, once."""

    def __init__(self, job: SyphonJob, plan: BatchPlan, part: LaneTask, steps: StepListener | None = None) -> None:
        self._job = job
        self._plan = plan
        self._slice = part
        self._steps = steps
        self._look: ScanResult | None = None

    async def run(self) -> LaneReport:
        job, part = self._job, self._slice
        now = asyncio.get_running_loop().time
        began = now()
        counts = ProgressCounter(began)
        async with AsyncExitStack() as stack:
            ledger = stack.enter_context(Ledger(job.ledger, Role.SYPHON)) if job.ledger is not None else None
            transport = NativeTransport(job.primary, job.secondary, try_timeout=job.timeout)
            stack.push_async_callback(transport.close)
            policy = RetryPolicy(
                first_pause=job.first_pause, longest_pause=job.longest_pause, gone_after=job.gone_after
            )
            options = SyphonOptions(rate=part.rate, ttl=job.ttl, poll=_POLL, window=job.window, policy=policy)
            books = SyphonLedger(ledger, job.primary_name, job.secondary_name, counts)
            room = SyphonContext(transport, options, books, self._steps)
            stack.push_async_callback(room.close)
            room.destinations.remember(self._plan.memories, began)
            pump = Pump(part.queue, room)
            stack.push_async_callback(pump.close)
            # It looks for nothing by itself: that is planned, for one lane of a queue at a time.
            pump.shelf.ran_dry(inf)
            await self._pumped(pump, room, began + job.budget)
            ended = now()
            return LaneReport(
                plan=self._plan.number,
                queue=part.queue,
                lane=part.lane,
                worker=f"{socket.gethostname()}/{os.getpid()}",
                seconds=ended - began,
                dry=pump.is_dry,
                failure=None if pump.failure is None else str(pump.failure),
                tallies=counts.by_destination,
                operations=counts.operations,
                memories=room.destinations.memories(ended),
                waiting=pump.shelf.waiting(),
                seeds=part.seeds,
                look=self._look,
            )

    async def _pumped(self, pump: Pump, room: SyphonContext, end: float) -> None:
        """Until there is nothing to do, or no time for more."""
        for path, number in self._slice.seeds.items():
            pump.shelf.deferred(path, (number,))
        pump.start()
        looking = asyncio.create_task(self._bring_back(pump, room, end))
        idle = False
        try:
            while not idle and room.broken is None and room.now() < end:
                await asyncio.sleep(_WATCH_SECONDS)
                idle = looking.done() and pump.idle_until(room.now()) > room.now()
        finally:
            room.stopping = True
            looking.cancel()
            await asyncio.wait({looking})
            await pump.rest()
        if not looking.cancelled():
            looking.result()
        if room.broken is not None:
            raise LaneBrokenError(f"the pump of {pump.queue} ended: {room.broken!r}") from room.broken

    # --- what was put aside ------------------------------------------------------------------------------------------

    async def _bring_back(self, pump: Pump, room: SyphonContext, end: float) -> None:
        """Finds the numbers of messages that were put aside; the pump does the rest."""
        part = self._slice
        while part.look == 0 and not pump.is_dry:  # noqa: ASYNC110 - the pump tells nobody when it changes
            # Nobody knows of any: what waits to be received comes first, and need not be looked through.
            await asyncio.sleep(_WATCH_SECONDS)
        if part.look is not None:
            await self._find(pump, room, part.look, end)
        seeds = dict(part.seeds)
        while self._look is None and seeds:
            # Asked with the one message that it was given; once that has arrived, the others can.
            await asyncio.sleep(_WATCH_SECONDS)
            now = room.now()
            if ready := [number for path, number in seeds.items() if room.destinations.due(path) == -inf]:
                await self._find(pump, room, min(ready), end)
            elif pump.idle_until(now) > now:
                return

    async def _find(self, pump: Pump, room: SyphonContext, start: int, end: float) -> None:
        backlog = room.backlog(pump.queue)
        at, found, clean = start, 0, True
        try:
            while found < _MOST_FOUND and room.now() < end:
                page = await backlog.peek(at, PEEK_PAGE_SIZE)
                if not page:
                    self._look = ScanResult(start, None, clean)
                    return
                clean = False
                at = page[-1].sequence_number + 1
                for one in page:
                    if one.deferred:
                        pump.shelf.deferred(one.path, (one.sequence_number,))
                        found += 1
                self._look = ScanResult(start, at, clean)
                room.changed()
        except BacklogFailedError as error:
            _log.warning("what was put aside could not be looked for: %s", error)
            self._look = ScanResult(start, at, clean=False)
        finally:
            await backlog.close()


PLAN_FILE: Final = "plan.json"
# Spark asks again at once while there is nothing to do: it is kept waiting for so long.
_WAIT_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.02
_NO_PLAN: Final = BatchPlan("", ())

Offset = dict[str, Any]


@dataclass
class LanePartition(InputPartition):
    plan: BatchPlan
    part: LaneTask


class SyphonSource(DataSource):
    """Options: `folder`, where the driver's plan lies, and `secret`, the job (Spark shows no option of that name)."""

    steps: ClassVar[StepListener | None] = None
    """Told where messages are on their way, in the task."""

    @classmethod
    def name(cls) -> str:
        return "twinbus-syphon"

    def schema(self) -> str:
        return "report string"

    def streamReader(self, schema: StructType) -> LaneReader:  # noqa: N802  # Spark's names, here and below
        return LaneReader(Path(self.options["folder"]), SyphonJob.of_json(self.options["secret"]), type(self).steps)


class LaneReader(DataSourceStreamReader):
    def __init__(self, folder: Path, job: SyphonJob, steps: StepListener | None) -> None:
        self._file = folder / PLAN_FILE
        self._job = job
        self._steps = steps

    def initialOffset(self) -> Offset:  # noqa: N802
        return {"epoch": 0, "plan": _NO_PLAN.to_json()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        end = time.monotonic() + _WAIT_SECONDS
        while True:
            text = self._file.read_text(encoding="utf-8") if self._file.exists() else start["plan"]
            if text != start["plan"]:
                return {"epoch": start["epoch"] + 1, "plan": text}
            if time.monotonic() >= end:
                return start
            time.sleep(_LOOK_SECONDS)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        plan = BatchPlan.of_json(end["plan"])
        return [LanePartition(plan, part) for part in plan.slices]

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        assert isinstance(partition, LanePartition)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(Lane(self._job, partition.plan, partition.part, self._steps).run())
        yield (report.to_json(),)

    def commit(self, end: Offset) -> None:
        """Nothing: the lanes have settled what they moved."""
