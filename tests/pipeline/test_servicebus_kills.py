"""D1 with kill -9 at every step of `INSERT INTO`, and of streams with `availableNow` that read or write.

| killed with -9 | test |
| --- | --- |
| a Python process of Spark, the namespace | here: `…of_spark_or_of_the_namespace…` |
| the JVM of the driver, which is its executor too | here: `…of_the_jvm…` |
| an executor, with its Python processes | here: `…of_an_executor…` |
| the driver with its JVM, at every step of a stream without end | `test_spark_kills.py` |

The official client counts what is in the queues. After each kill the same statement, or the same stream, runs again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from pyspark.sql import SparkSession

from tests.pipeline.driven import committed, sink
from tests.pipeline.driver_processes import LONG, process, until
from tests.pipeline.killed_source import (
    AFTER_SEND,
    BEFORE_SEND,
    DURING_SEND,
    ITSELF,
    READ,
    ROWS,
    STREAM_STEPS,
    WRITE_STEPS,
    available_now,
    give_order,
    insert,
    killed_source,
    order_of,
    reached,
    send_stream,
    streamed_options,
)
from tests.pipeline.queues import new_queue
from tests.spark_fixtures import NAMED
from twinbus.testing import LocalNamespace

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(500)]
TOGETHER, STREAMED = 500, 12
# The messages that the namespace had accepted when the process was killed: these arrive twice, and no others.
REPEATED = {BEFORE_SEND: 0, DURING_SEND: TOGETHER, AFTER_SEND: ROWS}


@pytest.fixture(scope="module")
def durable() -> Iterator[LocalNamespace]:
    with LocalNamespace("durable") as made:
        yield made


def there(namespace: LocalNamespace, queue: str) -> Counter[str]:
    """Count the messages by id."""
    found: Counter[str] = Counter()
    client = ServiceBusClient.from_connection_string(namespace.connection_string)
    with client, client.get_queue_receiver(queue) as receiver:
        number = 1
        while page := receiver.peek_messages(250, sequence_number=number):
            found.update(str(one.message_id) for one in page)
            number = (page[-1].sequence_number or 0) + 1
    return found


def check_sent(namespace: LocalNamespace, queue: str, repeated: int) -> None:
    found = there(namespace, queue)
    assert set(found) == {str(number) for number in range(ROWS)}, "nothing is lost"
    assert {one for one, count in found.items() if count > 1} == {str(number) for number in range(repeated)}
    assert max(found.values()) <= 2


def fill(namespace: LocalNamespace, queue: str) -> None:
    new_queue(namespace, queue)
    client = ServiceBusClient.from_connection_string(namespace.connection_string)
    with client, client.get_queue_sender(queue) as sender:
        sender.send_messages([ServiceBusMessage("", message_id=str(number)) for number in range(STREAMED)])


def written(folder: Path) -> Counter[str]:
    return Counter(one for batch in committed(folder) for one in json.loads(sink(folder, batch).read_text()))


def check_streamed(spark: SparkSession, namespace: LocalNamespace, queue: str, folder: Path) -> None:
    """After a kill: what is gone was written. After a restart: each message was written once, and is gone."""
    every = {str(number) for number in range(STREAMED)}
    assert every - set(there(namespace, queue)) <= set(written(folder))
    available_now(spark, streamed_options(namespace.connection_string, queue), folder).awaitTermination()
    assert written(folder) == Counter(every)
    assert there(namespace, queue) == Counter()


@pytest.mark.parametrize("who", [ITSELF, "namespace"])
def test_d1_kill_9_of_a_process_of_spark_or_of_the_namespace_at_each_step_loses_nothing(
    spark: SparkSession, durable: LocalNamespace, tmp_path: Path, who: str
) -> None:
    spark.dataSource.register(killed_source(tmp_path))
    name = "self" if who == ITSELF else who
    for step in STREAM_STEPS:
        queue = f"{name}_{step.replace(' ', '_')}"
        fill(durable, queue)
        give_order(tmp_path, queue, ITSELF if who == ITSELF else durable.pid, step)
        with suppress(Exception):  # Spark tries a task again, but not the process that plans and completes
            available_now(
                spark, streamed_options(durable.connection_string, queue), tmp_path / queue
            ).awaitTermination()
        assert not order_of(tmp_path, queue).exists(), "the step was reached"
        if who != ITSELF:
            durable.wait(60)
            durable.start()
        check_streamed(spark, durable, queue, tmp_path / queue)


@pytest.mark.parametrize("who", [ITSELF, "namespace"])
def test_d1_kill_9_of_a_process_of_spark_or_of_the_namespace_at_each_step_of_an_insert_loses_nothing(
    spark: SparkSession, named_namespace: LocalNamespace, tmp_path: Path, who: str
) -> None:
    spark.dataSource.register(killed_source(tmp_path))
    name = "self" if who == ITSELF else who
    for step in WRITE_STEPS:
        queue = new_queue(named_namespace, f"{name}_{step.replace(' ', '_')}")
        give_order(tmp_path, queue, ITSELF if who == ITSELF else named_namespace.pid, step)
        if who == ITSELF:
            insert(spark, queue, NAMED)  # Spark tries the task again
        else:
            with suppress(Exception):
                insert(spark, queue, NAMED)
            named_namespace.wait(60)
            named_namespace.start()
            insert(spark, queue, NAMED)
        assert not order_of(tmp_path, queue).exists(), "the step was reached"
        check_sent(named_namespace, queue, REPEATED[step])
        spark.sql(f"DROP TABLE {queue}")


@pytest.mark.parametrize("who", [ITSELF, "namespace"])
def test_d1_kill_9_of_a_process_of_spark_or_of_the_namespace_at_each_step_of_a_stream_that_writes_loses_nothing(
    spark: SparkSession, named_namespace: LocalNamespace, tmp_path: Path, who: str
) -> None:
    spark.dataSource.register(killed_source(tmp_path))
    name = "self" if who == ITSELF else who
    for step in WRITE_STEPS:
        queue = new_queue(named_namespace, f"{name}_sink_{step.replace(' ', '_')}")
        give_order(tmp_path, queue, ITSELF if who == ITSELF else named_namespace.pid, step)
        if who == ITSELF:
            send_stream(spark, queue, NAMED, tmp_path).awaitTermination()  # Spark tries the task again
        else:
            with suppress(Exception):
                send_stream(spark, queue, NAMED, tmp_path).awaitTermination()
            named_namespace.wait(60)
            named_namespace.start()
            send_stream(spark, queue, NAMED, tmp_path).awaitTermination()
        assert not order_of(tmp_path, queue).exists(), "the step was reached"
        # A batch whose messages were all accepted before the namespace died is not repeated.
        check_sent(named_namespace, queue, 0 if (who, step) == ("namespace", AFTER_SEND) else REPEATED[step])


def killed_driver(
    folder: Path, log: Path, *, on_executors: bool, **queues: dict[str, str]
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Start a driver in a process of its own."""
    given = json.dumps({"folder": str(folder), "variable": NAMED, "on_executors": on_executors, "queues": queues})
    return process(sys.executable, "-m", "tests.pipeline.killed_source", given, log=log)


def new_queues(namespace: LocalNamespace, name: str, streamed: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Make a queue for each step of an insert, and a filled one for each of these steps of a stream."""
    inserts = {new_queue(namespace, f"{name}_{step.replace(' ', '_')}"): step for step in WRITE_STEPS}
    streams = {f"{name}_{step.replace(' ', '_')}": step for step in streamed}
    for queue in streams:
        fill(namespace, queue)
    return inserts, streams


def test_d1_kill_9_of_the_jvm_at_each_step_of_inserts_and_streams_loses_nothing(
    spark: SparkSession, named_namespace: LocalNamespace, tmp_path: Path
) -> None:
    """One JVM with an insert, a stream that reads and a stream that writes at each step."""
    inserts, streams = new_queues(named_namespace, "jvm", STREAM_STEPS)
    sinks = {new_queue(named_namespace, f"jvm_sink_{step.replace(' ', '_')}"): step for step in WRITE_STEPS}
    log = tmp_path / "driver.log"
    with killed_driver(tmp_path, log, inserts=inserts, streams=streams, sinks=sinks, on_executors=False) as driver:
        marks = [reached(tmp_path, queue) for queue in (*inserts, *streams, *sinks)]
        until(lambda: all(mark.exists() for mark in marks), driver, log)
        os.kill(int((tmp_path / "jvm").read_text()), signal.SIGKILL)
    spark.dataSource.register(killed_source(tmp_path))
    for queue, step in inserts.items():
        insert(spark, queue, NAMED)
        check_sent(named_namespace, queue, REPEATED[step])
        spark.sql(f"DROP TABLE {queue}")
    for queue in streams:
        check_streamed(spark, named_namespace, queue, tmp_path / queue)
    for queue, step in sinks.items():
        send_stream(spark, queue, NAMED, tmp_path).awaitTermination()
        check_sent(named_namespace, queue, REPEATED[step])


def test_d1_kill_9_of_an_executor_at_each_step_of_inserts_and_streams_loses_nothing(
    named_namespace: LocalNamespace, tmp_path: Path
) -> None:
    """Spark runs the tasks of the executor again, within the same statement or batch.

    A stream that reads has only one step on executors. The others are in the process of the driver.
    """
    inserts, streams = new_queues(named_namespace, "executor", [READ])
    sinks = {new_queue(named_namespace, f"executor_sink_{step.replace(' ', '_')}"): step for step in WRITE_STEPS}
    log = tmp_path / "driver.log"
    with killed_driver(tmp_path, log, inserts=inserts, streams=streams, sinks=sinks, on_executors=True) as driver:
        assert driver.wait(LONG) == 0, log.read_text()
    for queue, step in (*inserts.items(), *streams.items(), *sinks.items()):
        assert not order_of(tmp_path, queue).exists(), f"{step} was reached"
    for queue, step in (*inserts.items(), *sinks.items()):
        check_sent(named_namespace, queue, REPEATED[step])
    for queue in streams:
        assert written(tmp_path / queue) == Counter(str(number) for number in range(STREAMED)), "each once"
        assert there(named_namespace, queue) == Counter()
