"""The data source `servicebus`, with processes that are killed at a chosen step of a write or of a stream read.

A test writes an order to a file: which process is killed, and at which step. The first process of Spark that reaches
the step carries out the order and removes the file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from tests.pipeline.driven import QUICK, executor_of_worker, sink
from twinbus.message import Message
from twinbus.pipeline.servicebus import ServiceBusDataSource
from twinbus.pipeline.servicebus.broker import Broker
from twinbus.pipeline.servicebus.options import SourceOptions
from twinbus.pipeline.servicebus.source import BatchWriter, SentCount, StreamWriter
from twinbus.pipeline.servicebus.stream_reader import StreamReader
from twinbus.pipeline.servicebus.task_reader import TaskReader
from twinbus.pipeline.session import session, start_query

BEFORE_SEND, DURING_SEND, AFTER_SEND = "before send", "during send", "after send"
WRITE_STEPS = (BEFORE_SEND, DURING_SEND, AFTER_SEND)
PLANNED, READ, BEFORE_COMPLETION, COMPLETED = "planned", "read", "before completion", "completed"
STREAM_STEPS = (PLANNED, READ, BEFORE_COMPLETION, COMPLETED)
ITSELF, EXECUTOR, STOP = "itself", "executor", "stop"
_FOR_EVER = 3600.0


def order_of(folder: Path, queue: str) -> Path:
    return folder / f"{queue}.order"


def give_order(folder: Path, queue: str, who: int | str, step: str) -> None:
    """Order that a process is killed at a step, or that the step never ends (STOP).

    `who` is the id of the process, or ITSELF, or EXECUTOR: the process that reaches the step, with its JVM.
    """
    new = folder / f"{queue}.new"
    new.write_text(f"{who} {step}")
    new.rename(order_of(folder, queue))


def reached(folder: Path, queue: str) -> Path:
    """The file that shows that a process has stopped."""
    return folder / f"{queue}.reached"


def _reach(folder: Path, options: SourceOptions, step: str) -> None:
    queue = str(options.entity)
    order = order_of(folder, queue)
    with suppress(FileNotFoundError):
        who, _, at = order.read_text().partition(" ")
        if at != step:
            return
        order.unlink()  # only the first process succeeds here
        if who == STOP:
            reached(folder, queue).touch()
            time.sleep(_FOR_EVER)
        if who == EXECUTOR:
            os.kill(executor_of_worker(), signal.SIGKILL)
        # A worker would go on for a moment without its executor.
        os.kill(os.getpid() if who in {ITSELF, EXECUTOR} else int(who), signal.SIGKILL)


class KilledSource(ServiceBusDataSource):
    """Register a subclass of it, with the folder of the orders: Spark passes it to its processes by value."""

    folder: ClassVar[Path]

    @classmethod
    def name(cls) -> str:
        return "servicebus_killed"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return KilledWriter(self._written_options(schema), type(self).folder)

    def streamWriter(self, schema: StructType, overwrite: bool) -> KilledStreamWriter:  # noqa: N802  # Spark's name
        return KilledStreamWriter(self._written_options(schema), type(self).folder)

    def streamReader(self, schema: StructType) -> KilledReader:  # noqa: N802  # Spark's name
        options = self._parsed(schema)
        return KilledReader(options, TaskReader(options, schema, is_patient=True), type(self).folder)


def killed_source(folder: Path) -> type[KilledSource]:
    return type("KilledHere", (KilledSource,), {"folder": folder})


def _written(write: Callable[[], SentCount], folder: Path, options: SourceOptions) -> SentCount:
    send = Broker.send
    _reach(folder, options, BEFORE_SEND)

    def then(self: Broker, batches: Mapping[str, Sequence[Message]]) -> None:
        send(self, batches)
        _reach(folder, options, DURING_SEND)

    Broker.send = then  # type: ignore[method-assign]
    try:
        done = write()
    finally:
        Broker.send = send  # type: ignore[method-assign]
    _reach(folder, options, AFTER_SEND)
    return done


class KilledWriter(BatchWriter):
    def __init__(self, options: SourceOptions, folder: Path) -> None:
        super().__init__(options)
        self._folder = folder

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SentCount:
        return _written(partial(super().write, iterator), self._folder, self._options)


class KilledStreamWriter(StreamWriter):
    def __init__(self, options: SourceOptions, folder: Path) -> None:
        super().__init__(options)
        self._folder = folder

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SentCount:
        return _written(partial(super().write, iterator), self._folder, self._options)


class KilledReader(StreamReader):
    def __init__(self, options: SourceOptions, reader: TaskReader, folder: Path) -> None:
        super().__init__(options, reader)
        self._folder = folder

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802  # Spark's name
        end = super().latestOffset(start, limit)
        _reach(self._folder, self._options, PLANNED)
        return end

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from super().read(partition)
        _reach(self._folder, self._options, READ)

    def commit(self, end: dict[str, Any]) -> None:
        _reach(self._folder, self._options, BEFORE_COMPLETION)
        super().commit(end)
        _reach(self._folder, self._options, COMPLETED)


ROWS = 1200


def insert(spark: SparkSession, queue: str, variable: str) -> None:
    """Send ROWS messages in one task, by SQL. The environment variable has the connection string."""
    options = f"OPTIONS (connectionStringEnv '{variable}', entity '{queue}')"
    spark.sql(f"CREATE TABLE IF NOT EXISTS {queue} USING {KilledSource.name()} {options}")
    rows = f"SELECT /*+ COALESCE(1) */ CAST(id AS string), CAST('x' AS binary) FROM range({ROWS})"  # noqa: S608 - our own table
    spark.sql(f"INSERT INTO {queue} (message_id, body) {rows}")


def send_stream(spark: SparkSession, queue: str, variable: str, folder: Path) -> StreamingQuery:
    """Send ROWS messages in one task of one batch of a stream. A second call goes on from the checkpoint of the first.

    The environment variable has the connection string.
    """
    rows = folder / "rows"
    if not rows.exists():
        made = spark.range(ROWS, numPartitions=1).selectExpr(
            "CAST(id AS string) message_id", "CAST('x' AS binary) body"
        )
        made.write.parquet(str(rows))
    stream = spark.readStream.schema("message_id string, body binary").parquet(str(rows)).coalesce(1)
    writer = stream.writeStream.format(KilledSource.name()).options(connectionStringEnv=variable, entity=queue)
    writer = writer.option("checkpointLocation", str(folder / f"{queue}.sent"))
    return start_query(writer.trigger(availableNow=True).start)


def streamed_options(text: str, queue: str) -> dict[str, str]:
    return {
        "connectionString": text,
        "entity": queue,
        "maxMessagesPerTrigger": "4",
        "partitions": "2",
        "timeout": "5",  # so that a stream whose namespace is killed ends soon
    }


def available_now(spark: SparkSession, options: Mapping[str, str], folder: Path) -> StreamingQuery:
    """Stream all that is there, and write the ids of each batch to a file. A repeated batch replaces its file."""
    folder.mkdir(exist_ok=True)

    def take(frame: DataFrame, batch: int) -> None:
        sink(folder, batch).write_text(json.dumps([row.message_id for row in frame.collect()]))

    stream = spark.readStream.format(KilledSource.name()).options(**options).load()
    writer = stream.writeStream.foreachBatch(take).option("checkpointLocation", str(folder / "checkpoint"))
    return start_query(writer.trigger(availableNow=True).start)


def start(folder: Path, master: str) -> SparkSession:
    settings = {
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.driver.defaultJavaOptions": QUICK,
        "spark.executor.defaultJavaOptions": QUICK,
        "spark.executor.memory": "600m",
    }
    spark = session("killed", master=master, settings=settings)
    spark.dataSource.register(killed_source(folder))
    return spark


def run_on_executors(
    folder: Path, variable: str, inserts: Mapping[str, str], streams: Mapping[str, str], sinks: Mapping[str, str]
) -> None:
    """Run inserts and streams on two executors, one after the other. At its step, each kills the executor that runs it.

    The executors are processes of their own, and Spark starts a new one for each that died. `streams` read from their
    queue, and `sinks` are streams that write to it.
    """
    spark = start(folder, "local-cluster[2,1,1024]")
    for queue, step in (*inserts.items(), *streams.items(), *sinks.items()):
        give_order(folder, queue, EXECUTOR, step)
    for queue in inserts:
        insert(spark, queue, variable)
    for queue in streams:
        available_now(spark, streamed_options(os.environ[variable], queue), folder / queue).awaitTermination()
    for queue in sinks:
        send_stream(spark, queue, variable, folder).awaitTermination()
    spark.stop()


def run_until_killed(
    folder: Path, variable: str, inserts: Mapping[str, str], streams: Mapping[str, str], sinks: Mapping[str, str]
) -> None:
    """Run inserts and streams, by queue, each of which stops at its step. Ends when it is killed.

    `streams` read from their queue, and `sinks` are streams that write to it.
    """
    spark = start(folder, "local[12,4]")
    (folder / "jvm").write_text(str(spark.sparkContext._gateway.proc.pid))  # type: ignore[union-attr]
    for queue, step in (*inserts.items(), *streams.items(), *sinks.items()):
        give_order(folder, queue, STOP, step)
    for queue in inserts:
        threading.Thread(target=insert, args=(spark, queue, variable), daemon=True).start()
    for queue in streams:
        # One after the other, because each starts a Python process.
        available_now(spark, streamed_options(os.environ[variable], queue), folder / queue)
        while not reached(folder, queue).exists():
            time.sleep(0.1)
    for queue in sinks:
        send_stream(spark, queue, variable, folder)
    time.sleep(_FOR_EVER)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    main = run_on_executors if told["on_executors"] else run_until_killed
    main(Path(told["folder"]), told["variable"], **told["queues"])
