"""A Spark driver that a test kills: `python -m tests.pipeline.driven '{…}'` runs streams that stop at a given step.

After the kill, the test can run the same streams again from the same checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from tests.pipeline.backlogs import MOVES, first, is_first_try, watched
from tests.syphon.fixed_queues import FixedQueues
from twinbus.connect import ReceivedMessage, Receiver
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.jobs import follow_jobs
from twinbus.pipeline.servicebus import ServiceBusDataSource, broker
from twinbus.pipeline.servicebus.options import SourceOptions
from twinbus.pipeline.servicebus.session_stream_reader import SessionStreamReader
from twinbus.pipeline.servicebus.stream_reader import StreamReader
from twinbus.pipeline.servicebus.task_reader import TaskReader
from twinbus.pipeline.session import session, start_query
from twinbus.pipeline.syphon_job import SparkSyphon, SparkSyphonOptions, SyphonJob
from twinbus.pipeline.syphon_job.lane import LanePartition, LaneReader, SyphonSource
from twinbus.syphon import HeldMessage, MoveStep

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
READ = "read"
LANES = len(MOVES) + 1
_FOR_EVER = 3600.0


# --- D1: a stream read ------------------------------------------------------------------------------------------------


def sink(folder: Path, batch: int) -> Path:
    return folder / f"batch-{batch}.json"


def committed(folder: Path) -> list[int]:
    """Return the batches that Spark has committed."""
    return sorted(int(note.name) for note in (folder / "checkpoint" / "commits").glob("[0-9]*"))


def reading(
    spark: SparkSession,
    text: str,
    queue: str,
    folder: Path,
    *,
    now: bool,
    dead_in: int | None = None,
    stop_at: str | None = None,
    options: Mapping[str, str] | None = None,
) -> StreamingQuery:
    """Read a stream and write the ids of each batch to a file. The batch `dead_in` and the step `stop_at` never end."""
    folder.mkdir(exist_ok=True)

    def take(frame: DataFrame, batch: int) -> None:
        ids = [row.message_id for row in frame.collect()]
        sink(folder, batch).write_text(json.dumps(ids))
        if batch == dead_in:
            (folder / READ).touch()
            time.sleep(_FOR_EVER)

    told = {"connectionString": text, "entity": queue, "maxMessagesPerTrigger": "10", "partitions": "1"}
    stream = spark.readStream.format("servicebus").options(**{**told, "pollInterval": "1", **(options or {})})
    if stop_at is not None:
        stream = stream.format(StoppedSource.name()).options(stopAt=stop_at, stopFolder=str(folder))
    writer = stream.load().writeStream.foreachBatch(take).option("checkpointLocation", str(folder / "checkpoint"))
    return start_query((writer.trigger(availableNow=True) if now else writer.trigger(processingTime="1 second")).start)


OFFSET_LOGGED, BEFORE_COMPLETION, DURING_COMPLETION = "offset logged", "before completion", "during completion"


class StoppedSource(ServiceBusDataSource):
    """The data source, except that at the step `stopAt` it writes a file to `stopFolder` and then stops."""

    def __init__(self, options: dict[str, str]) -> None:
        told = {name.lower(): value for name, value in options.items()}
        self._stop_at, self._folder = told.pop("stopat"), Path(told.pop("stopfolder"))
        super().__init__(told)

    @classmethod
    def name(cls) -> str:
        return "servicebus_stopped"

    def streamReader(  # noqa: N802  # Spark's name
        self, schema: StructType
    ) -> StoppedReader | StoppedSessionReader:
        options = SourceOptions.parse(self.options)
        kind = StoppedSessionReader if options.sessions else StoppedReader
        made = kind(options, TaskReader(options, schema))
        made.stop_at, made.folder = self._stop_at, self._folder
        return made


class Stopping(DataSourceStreamReader):
    stop_at: str
    folder: Path

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if self.stop_at == OFFSET_LOGGED and _has_messages(start):
            self._stop()
        return super().partitions(start, end)

    def commit(self, end: dict[str, Any]) -> None:
        if self.stop_at == BEFORE_COMPLETION and _has_messages(end):
            self._stop()
        if self.stop_at == DURING_COMPLETION:
            completed = broker._completed

            async def then_stop(receiver: Receiver, messages: Sequence[ReceivedMessage]) -> set[int]:
                done = await completed(receiver, messages)
                if done:
                    self._stop()
                return done

            broker._completed = then_stop
            broker._TAKE = 2  # type: ignore[misc]  # so that some are completed, and others are not
        super().commit(end)

    def _stop(self) -> None:
        (self.folder / READ).touch()
        time.sleep(_FOR_EVER)


class StoppedReader(Stopping, StreamReader):
    pass


class StoppedSessionReader(Stopping, SessionStreamReader):
    pass


def _has_messages(offset: dict[str, Any]) -> bool:
    return bool(offset.get("read") or offset.get("sessions"))


# --- D2: the syphon ---------------------------------------------------------------------------------------------------


def stuck(folder: Path) -> type[SyphonSource]:
    """Stop the first lane of a batch that reaches a step: at the end one lane has stopped at each step."""

    def watch(step: MoveStep, held: Sequence[HeldMessage]) -> None:
        if step in MOVES and first(folder / step.name):
            time.sleep(_FOR_EVER)

    class Reader(LaneReader):
        def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
            assert isinstance(partition, LanePartition)
            # With fewer lanes, all lanes would stop, and no lane would reach the later steps.
            self._on_step = watch if len(partition.plan.tasks) >= LANES else None
            return super().read(partition)

    class Stuck(SyphonSource):
        def streamReader(self, schema: StructType) -> Reader:  # noqa: N802  # Spark's name
            return Reader(Path(self.options["folder"]), SyphonJob.of_json(self.options["secret"]), None)

    return Stuck


def executor_of_worker() -> int:
    """Return the JVM of this Python worker. Between the two is the daemon, which forks the workers."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


def killing_executors(folder: Path) -> type[SyphonSource]:
    """After two executors have moved messages, kill the JVM of the executor that reaches a step, once at each step."""

    def watch(step: MoveStep, held: Sequence[HeldMessage]) -> None:
        executor = executor_of_worker()
        if step is MoveStep.COMPLETED:
            (folder / f"executor-{executor}").touch()
        both = len(list(folder.glob("executor-*"))) > 1
        if both and step in MOVES and is_first_try() and first(folder / step.name):
            os.kill(executor, signal.SIGKILL)

    return watched(watch)


# --- D3: a ledger that is followed ------------------------------------------------------------------------------------

# test_ledger_jobs kills all jobs at every step.
FOLLOWED = ("reconcile", "incidents")


def follow(spark: SparkSession, folder: Path, ledger: Path, tables: Path) -> None:
    """Follow a ledger. Starts after a lane has stopped at each step, when the machine is idle."""
    while not all((folder / step.name).exists() for step in MOVES):
        time.sleep(0.1)
    ingest_ledger(spark, ledger, tables, every=1, most_bytes=20_000, extend=follow_jobs(FOLLOWED))


# --- all of them ------------------------------------------------------------------------------------------------------


async def syphoned(spark: SparkSession, told: dict[str, Any], source: type[SyphonSource]) -> int:
    options = SparkSyphonOptions(source=source, **told["options"])
    async with SparkSyphon(spark, FixedQueues(told["queues"]), SyphonJob.of_json(told["job"]), options) as syphon:
        return (await syphon.run()).total.returned


def main(told: dict[str, Any]) -> None:
    folder = Path(told["folder"])
    usual = {"spark.driver.defaultJavaOptions": QUICK}
    spark = session("driven", master=told.get("master"), settings={**usual, **told.get("settings", {})})
    spark.dataSource.register(ServiceBusDataSource)
    spark.dataSource.register(StoppedSource)
    for read in told.get("reads", ()):
        at = Path(read.pop("folder"))
        is_stopped = read.get("dead_in") is not None or "stop_at" in read
        query = reading(spark, folder=at, now=False, **read)
        # One after the other, because each starts a Python process.
        while not ((at / READ).exists() if is_stopped else committed(at)):
            assert query.isActive, query.exception()
            time.sleep(0.1)
    if "syphon" not in told:
        (folder / READ).touch()
        time.sleep(_FOR_EVER)
    if followed := told.get("followed"):
        arguments = (spark, folder, *map(Path, followed))
        threading.Thread(target=follow, args=arguments, daemon=True).start()
    makers: dict[str, Callable[[Path], type[SyphonSource]]] = {
        "executor": killing_executors,
        "driver": stuck,
    }
    print(asyncio.run(syphoned(spark, told["syphon"], makers[told["killed"]](folder))), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
