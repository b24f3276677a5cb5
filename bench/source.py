"""The Spark data source `servicebus` beside azure-servicebus: read, write and stream of the same messages.

The server is a process of its own, with durable queues. In each repeat the SDK and Spark do the same work one after the
other. The Spark session is warm: its start is not measured.

    python bench/source.py [--messages 100000] [--repeats 3] [--json]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from pyspark.sql import DataFrame, SparkSession

from bench.measuring import Figure, ProcessMeter, ProcessTree, Samples, ratios, show, write_json
from bench.serving import Server
from twinbus.pipeline.servicebus import ServiceBusDataSource
from twinbus.pipeline.session import session, start_query

QUEUE: Final = "source"
BODY: Final = "x" * 200
AIMS: Final = {"write": 1.5, "batch read": 1.5, "stream": 10.0}
PEERS: Final = {"write": "SDK batches", "batch read": "SDK peeks", "stream": "SDK receive and complete"}
# A loop that completes one message after the other takes minutes for all of them.
_LOOPED: Final = 5_000
NOTES: Final = (
    "Messages a second; median of the repeats (lowest–highest). One number: the seconds of `where sequence_number = n`"
    " among all messages. Spark runs with local[*] on the same machine as the server.",
)


class Work:
    """The same work for the SDK and for Spark, on one queue."""

    def __init__(self, spark: SparkSession, server: Server, count: int, folder: Path, per_trigger: int) -> None:
        self._spark = spark
        self._server = server
        self._count = count
        self._folder = folder
        self._options = {"connectionString": server.connection_string, "entity": QUEUE}
        self._per_trigger = per_trigger
        self._runs = 0

    def sdk_write(self) -> int:
        with self._client() as client, client.get_queue_sender(QUEUE) as sender:
            batch = sender.create_message_batch()
            for number in range(self._count):
                message = ServiceBusMessage(BODY, message_id=str(number))
                try:
                    batch.add_message(message)
                except ValueError:  # the batch is full
                    sender.send_messages(batch)
                    batch = sender.create_message_batch()
                    batch.add_message(message)
            sender.send_messages(batch)
        return self._count

    def spark_write(self) -> int:
        rows = self._spark.range(self._count).selectExpr("CAST(id AS string) AS message_id", f"'{BODY}' AS body")
        rows.write.format("servicebus").mode("append").options(**self._options).save()
        return self._count

    def sdk_read(self) -> int:
        with self._client() as client, client.get_queue_receiver(QUEUE) as receiver:
            seen, number = 0, 1
            while page := receiver.peek_messages(250, sequence_number=number):
                seen += len(page)
                number = (page[-1].sequence_number or 0) + 1
        return self._checked(seen)

    def spark_read(self) -> int:
        found = self._read().selectExpr("sum(length(body))", "count(message_id)").collect()[0]
        return self._checked(found[1])

    def one_number(self) -> float:
        """Return the seconds that Spark takes to find one message by its number, the second time.

        The first query with a filter starts a Python process for filters, which Spark ends after an idle minute.
        """
        number = self._read().selectExpr("max(sequence_number)").collect()[0][0]
        self._read().where(f"sequence_number = {number}").collect()
        began = time.perf_counter()
        assert len(self._read().where(f"sequence_number = {number}").collect()) == 1
        return time.perf_counter() - began

    def sdk_stream(self) -> int:
        done = 0
        with self._client() as client, client.get_queue_receiver(QUEUE) as receiver:
            while done < min(_LOOPED, self._count):
                for message in receiver.receive_messages(max_message_count=100, max_wait_time=10):
                    receiver.complete_message(message)
                    done += 1
        return done

    def spark_stream(self) -> int:
        before = self._server.held(QUEUE)
        self._runs += 1
        stream = self._spark.readStream.format("servicebus").options(**self._options)
        stream = stream.option("maxMessagesPerTrigger", self._per_trigger)
        writer = stream.load().writeStream.format("parquet").option("path", str(self._folder / f"out{self._runs}"))
        checkpoint = str(self._folder / f"checkpoint{self._runs}")
        query = start_query(writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start)
        query.awaitTermination()
        written = self._spark.read.parquet(str(self._folder / f"out{self._runs}"))
        different, left = written.select("sequence_number").distinct().count(), self._server.held(QUEUE)
        if left or different != before:
            raise RuntimeError(f"{different} of {before} messages were written, and {left} are left")
        return before

    def _read(self) -> DataFrame:
        return self._spark.read.format("servicebus").options(**self._options).load()

    def _client(self) -> AbstractContextManager[ServiceBusClient]:
        return ServiceBusClient.from_connection_string(self._server.connection_string)

    def _checked(self, seen: int) -> int:
        if seen != (held := self._server.held(QUEUE)):
            raise RuntimeError(f"{seen} of {held} messages were read")
        return seen


def peak_memory(spark: SparkSession, server: Server) -> str:
    """Return the peaks of Spark's JVM, of its Python processes together, and of the server."""
    jvm = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]  # it is there in a classic session
    children = ProcessTree(jvm).meters()
    workers = 0.0
    for child in children:
        with suppress(OSError, StopIteration):  # the process has ended
            workers += child.peak_rss_megabytes()
    return (
        f"Memory at the peak: Spark's JVM {ProcessMeter(jvm).peak_rss_megabytes():,.0f} MB, its {len(children)} Python "
        f"processes {workers:,.0f} MB together, the server {server.meter.peak_rss_megabytes():,.0f} MB."
    )


def rate(work: Callable[[], int]) -> float:
    began = time.perf_counter()
    count = work()
    return count / (time.perf_counter() - began)


def figures(folder: Path, *, messages: int, repeats: int, per_trigger: int) -> tuple[list[Figure], str]:
    """Return the figures, and the memory that the work took."""
    spark = session("bench")
    spark.dataSource.register(ServiceBusDataSource)
    found = {name: (Samples(), Samples()) for name in AIMS}
    one = Samples()
    with Server(folder / "data", queues=(QUEUE,)) as server:
        warm_up = Work(spark, server, 1000, folder / "warm", per_trigger)
        warm_up.spark_write()
        warm_up.spark_read()
        warm_up.spark_stream()
        for repeat in range(repeats):
            work = Work(spark, server, messages, folder / str(repeat), per_trigger)
            found["write"][0].values.append(rate(work.sdk_write))
            found["write"][1].values.append(rate(work.spark_write))
            found["batch read"][0].values.append(rate(work.sdk_read))
            found["batch read"][1].values.append(rate(work.spark_read))
            one.values.append(work.one_number())
            found["stream"][0].values.append(rate(work.sdk_stream))
            found["stream"][1].values.append(rate(work.spark_stream))
        memory = peak_memory(spark, server)
    spark.stop()
    made = [Figure(f"{messages:,} messages of {len(BODY)} bytes:")]
    for name, (sdk, ours) in found.items():
        times = ratios(ours, sdk)
        made.append(
            Figure(
                name,
                ours.told(),
                f"{PEERS[name]} {sdk.told()}",
                times.told("{:.2f}"),
                f"≥ {AIMS[name]} ×",
                times.median >= AIMS[name],
                {"rate": ours.values, "peer": sdk.values, "times": times.values},
            )
        )
    made.append(Figure("one number", one.told("{:.2f} s"), "", "", "< 1 s", one.median < 1, {"seconds": one.values}))
    return made, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--per-trigger", type=int, default=10_000, help="maxMessagesPerTrigger of the stream")
    parser.add_argument("--json", action="store_true", help="values of every repeat, for programs")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="twinbus-bench-") as name:
        made, memory = figures(
            Path(name), messages=asked.messages, repeats=asked.repeats, per_trigger=asked.per_trigger
        )
    loads = f"{os.cpu_count()} cores for all; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after."
    if asked.json:
        write_json(made, (*NOTES, loads, memory))
    else:
        show("The Spark data source", made, (*NOTES, loads, memory))


if __name__ == "__main__":
    main()
