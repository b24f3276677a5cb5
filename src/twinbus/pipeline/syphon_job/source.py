"""The data source that a lane is a partition of. Offsets are epochs, each with its plan: read again, it drains again.

The driver's plan lies in a file; the broker alone knows what there is to move. Nothing is settled or kept here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import uvloop
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.types import StructType

from twinbus.pipeline.syphon_job.lane import Lane
from twinbus.pipeline.syphon_job.words import Job, Plan, Slice
from twinbus.syphon.room import Steps

PLAN_FILE: Final = "plan.json"
# Spark asks again at once while there is nothing to do: it is kept waiting for so long.
_WAIT_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.02
_NO_PLAN: Final = Plan("", ())

Offset = dict[str, Any]


@dataclass
class LanePartition(InputPartition):
    plan: Plan
    part: Slice


class SyphonSource(DataSource):
    """Options: `folder`, where the driver's plan lies, and `secret`, the job (Spark shows no option of that name)."""

    steps: ClassVar[Steps | None] = None
    """Told where messages are on their way, in the task."""

    @classmethod
    def name(cls) -> str:
        return "twinbus-syphon"

    def schema(self) -> str:
        return "report string"

    def streamReader(self, schema: StructType) -> LaneReader:  # noqa: N802  # Spark's names, here and below
        return LaneReader(Path(self.options["folder"]), Job.of_json(self.options["secret"]), type(self).steps)


class LaneReader(DataSourceStreamReader):
    def __init__(self, folder: Path, job: Job, steps: Steps | None) -> None:
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
        plan = Plan.of_json(end["plan"])
        return [LanePartition(plan, part) for part in plan.slices]

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        assert isinstance(partition, LanePartition)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(Lane(self._job, partition.plan, partition.part, self._steps).run())
        yield (report.to_json(),)

    def commit(self, end: Offset) -> None:
        """Nothing: the lanes have settled what they moved."""
