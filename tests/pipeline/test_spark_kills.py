"""D1, D2, D3 and L1 when a whole process of Spark is killed: the driver with its JVM, or executors of a real cluster.

| killed with -9, at every step of a move | test |
| --- | --- |
| a Python worker, also at random instants | `test_spark_syphon.py`: `…python_workers_at_each_step_and_at_random…` |
| the destination; the backlog's server | `test_spark_syphon.py`: `…the_destination_and_of_the_backlog_at_each_step…` |
| the driver and its JVM, with all workers | here: `…the_driver_and_its_jvm…` |
| the driver, at every step of a stream read | here: `…at_each_step_of_a_stream_read…`, `…of_a_stream_of_sessions…` |
| an executor's JVM, with its workers | here: `…kill_9_of_one_at_each_step…` |
| nobody: a clean stop | `test_spark_syphon.py`: `…a_clean_stop_at_any_step…` |
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyspark
import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from pyspark.sql import SparkSession

from tests.pipeline.backlogs import MOVES, WINDOW, Backlog, namespaces
from tests.pipeline.books import history, write_segments
from tests.pipeline.driven import (
    BEFORE_COMPLETION,
    DURING_COMPLETION,
    FOLLOWED,
    LANES,
    OFFSET_LOGGED,
    QUICK,
    READ,
    committed,
    reading,
    sink,
    syphoned,
)
from tests.pipeline.driver_processes import LONG, kill, process, until
from tests.pipeline.queues import new_queue
from tests.syphon.two_namespaces import ids, numbered
from tests.tiers import budget
from twinbus.connect import connect
from twinbus.ledger import balance, read_ledger
from twinbus.message import Message
from twinbus.namespace import find_free_port
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.jobs import JOBS, current_result, follow_jobs, is_followed, result_over_history
from twinbus.pipeline.result_tables import JUDGED
from twinbus.pipeline.servicebus import ServiceBusDataSource
from twinbus.pipeline.session import java_home
from twinbus.pipeline.syphon_job.lane import SyphonSource
from twinbus.pipeline.tables import OPERATIONS, Tables
from twinbus.testing import LocalNamespace

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(700)]
# A run kills one driver with a lane at each step of a move, or one executor at each step. Each kill costs a JVM.
RUNS = budget(1, 1, 5)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LocalNamespace, LocalNamespace]]:
    with namespaces() as made:
        yield made


@pytest.fixture
def backlog(pair: tuple[LocalNamespace, LocalNamespace], tmp_path: Path) -> Backlog:
    return Backlog(*pair, tmp_path)


# --- processes --------------------------------------------------------------------------------------------------------


def driven(told: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "tests.pipeline.driven", json.dumps(told)]


# --- the driver -------------------------------------------------------------------------------------------------------


async def put(namespace: LocalNamespace, queue: str, numbers: range) -> None:
    async with connect(namespace.connection_string) as bus:
        await (await bus.sender(queue)).send([Message(b"x", message_id=str(number)) for number in numbers])


async def waiting(namespace: LocalNamespace, queue: str) -> Counter[str]:
    async with connect(namespace.connection_string) as bus:
        return ids(await bus.management(queue).peek(0, 250))


def written(folder: Path, batches: Sequence[int]) -> set[str]:
    return {one for batch in batches for one in json.loads(sink(folder, batch).read_text())}


@pytest.mark.parametrize("run", range(RUNS))
async def test_d1_d2_d3_l1_kill_9_of_the_driver_and_its_jvm_loses_nothing(
    spark: SparkSession, backlog: Backlog, tmp_path: Path, run: int
) -> None:
    """It dies with a stream read between two batches, one within a batch, a lane at each step of a move, and a ledger
    that is followed.
    """
    between, within = Backlog(backlog.primary, backlog.secondary, tmp_path), tmp_path / "within"
    folders = {between.orders: tmp_path / "between", between.watchful: within}
    for queue, count in ((between.orders, 10), (between.watchful, 25)):
        await put(backlog.primary, queue, range(count))
    await backlog.fill(10_000)
    options = {"checkpoint": str(tmp_path / "checkpoint"), "lanes": LANES, "rate": 2_000}
    told = {"job": backlog.job().to_json(), "queues": backlog.queues, "options": options}
    reads = [
        {"text": backlog.primary.connection_string, "queue": queue, "folder": str(folder), "dead_in": dead_in}
        for (queue, folder), dead_in in zip(folders.items(), (None, 1), strict=True)
    ]
    ledger, tables = tmp_path / "followed", Tables(spark, tmp_path / "tables")
    write_segments(ledger, history(2), seed=2, count=12)
    log = tmp_path / "driver.log"
    told_all = {"folder": str(tmp_path), "killed": "driver", "syphon": told, "reads": reads}
    told_all["followed"] = [str(ledger), str(tables.root)]
    with process(*driven({**told_all, "master": f"local[{LANES + 2},4]"}), log=log) as driver:
        marks = (*(tmp_path / step.name for step in MOVES), within / READ)
        until(lambda: all(mark.exists() for mark in marks) and committed(folders[between.orders]), driver, log)
        until(lambda: tables.version().number, driver, log)
        kill(driver)

    spark.dataSource.register(ServiceBusDataSource)
    for (queue, folder), count in zip(folders.items(), (10, 25), strict=True):
        gone = set(numbered(count)) - set(await waiting(backlog.primary, queue))
        assert gone <= written(folder, committed(folder))
        reading(spark, backlog.primary.connection_string, queue, folder, now=True).awaitTermination()
        assert written(folder, committed(folder)) == set(numbered(count))

    assert await syphoned(spark, {**told, "options": {**options, "rate": None, "drain": True}}, SyphonSource)
    arrived = await backlog.arrived()
    assert set(arrived) == set(numbered(10_000))
    assert arrived.total() <= 10_000 + LANES * WINDOW
    assert await backlog.left() == Counter()
    backlog.check_ledger(arrived)
    goes_on(spark, ledger, tables)


def test_d1_kill_9_of_the_driver_at_each_step_of_a_stream_read_removes_nothing_unread(
    spark: SparkSession, namespace: LocalNamespace, tmp_path: Path
) -> None:
    """One driver with a stream at each step. The official client counts what is in the queues."""
    steps: dict[str, dict[str, Any]] = {
        "batch-committed": {"stop_at": BEFORE_COMPLETION},
        "batch-read": {"dead_in": 1},
        "offset-logged": {"stop_at": OFFSET_LOGGED},
        "before-completion": {"stop_at": BEFORE_COMPLETION},
        "during-completion": {"stop_at": DURING_COMPLETION},
    }
    text, old, new = namespace.connection_string, {"old0", "old1", "old2"}, set(numbered(12))
    options = {"maxMessagesPerTrigger": "4"}
    with ServiceBusClient.from_connection_string(text) as client, ExitStack() as stack:
        receivers = {}
        for step in steps:
            new_queue(namespace, step, lock_duration=timedelta(seconds=5))
            sender = stack.enter_context(client.get_queue_sender(step))
            sender.send_messages([ServiceBusMessage("", message_id=one) for one in sorted(old)])
            sender.send_messages([ServiceBusMessage("", message_id=one) for one in numbered(12)])
            receivers[step] = stack.enter_context(client.get_queue_receiver(step))
            options["startingPosition"] = str(receivers[step].peek_messages(4)[3].sequence_number)

        def left(step: str) -> set[str]:
            return {str(one.message_id) for one in receivers[step].peek_messages(100, sequence_number=1)}

        reads = [
            {"text": text, "queue": step, "folder": str(tmp_path / step), "options": options, **stopped}
            for step, stopped in steps.items()
        ]
        reads[0]["options"] = {**options, "maxMessagesPerTrigger": "12"}
        log = tmp_path / "driver.log"
        with process(*driven({"folder": str(tmp_path), "reads": reads, "master": "local[2,4]"}), log=log) as driver:
            until((tmp_path / READ).exists, driver, log)
            kill(driver)

        completed = {step: new - left(step) for step in steps}
        # Batch 0 was committed in each, and its completion was finished in two and begun in one.
        assert {step: len(found) for step, found in completed.items()} == {
            "batch-committed": 0,
            "batch-read": 4,
            "offset-logged": 4,
            "before-completion": 0,
            "during-completion": 1,
        }
        for step in steps:
            folder = tmp_path / step
            assert old <= left(step)
            assert completed[step] <= written(folder, committed(folder)[:1])
            reading(spark, text, step, folder, now=True, options=options).awaitTermination()
            assert written(folder, committed(folder)) == new
            if step != "during-completion":
                assert left(step) == old
        # The killed process had messages locked. They are completed with the first batch after their locks have ended.
        step, folder = "during-completion", tmp_path / "during-completion"
        for number in range(12, 22):
            with client.get_queue_sender(step) as sender:
                sender.send_messages(ServiceBusMessage("", message_id=str(number)))
            reading(spark, text, step, folder, now=True, options=options).awaitTermination()
            if left(step) == old:
                break
        assert left(step) == old


def test_d1_kill_9_of_the_driver_at_each_step_of_a_stream_of_sessions_loses_nothing_and_keeps_the_order(
    spark: SparkSession, namespace: LocalNamespace, tmp_path: Path
) -> None:
    """One driver with a stream at each step. Plain peeks, which need no session, count what is in the queues."""
    steps: dict[str, dict[str, Any]] = {
        "batch-read": {"dead_in": 1},
        "offset-logged": {"stop_at": OFFSET_LOGGED},
        "before-completion": {"stop_at": BEFORE_COMPLETION},
        "during-completion": {"stop_at": DURING_COMPLETION},
    }
    text, sent = namespace.connection_string, [f"{one % 3}/{one}" for one in range(18)]
    options = {"maxMessagesPerTrigger": "9", "sessions": "true"}
    queues = {step: new_queue(namespace, f"sessions-{step}", requires_session=True) for step in steps}
    with ServiceBusClient.from_connection_string(text) as client:
        for queue in queues.values():
            with client.get_queue_sender(queue) as sender:
                sender.send_messages([ServiceBusMessage("", message_id=one, session_id=one[0]) for one in sent])

    def left(step: str) -> set[str]:
        return set(asyncio.run(waiting(namespace, queues[step])))

    reads = [
        {"text": text, "queue": queues[step], "folder": str(tmp_path / step), "options": options, **stopped}
        for step, stopped in steps.items()
    ]
    log = tmp_path / "driver.log"
    with process(*driven({"folder": str(tmp_path), "reads": reads, "master": "local[2,4]"}), log=log) as driver:
        until((tmp_path / READ).exists, driver, log)
        kill(driver)

    completed = {step: set(sent) - left(step) for step in steps}
    found = {step: len(gone) for step, gone in completed.items()}
    # Batch 0 was committed in each. In `during-completion` no session had completed more than two of three messages.
    assert 1 <= found.pop("during-completion") <= 6
    assert found == {"batch-read": 9, "offset-logged": 9, "before-completion": 0}
    for step in steps:
        folder = tmp_path / step
        assert completed[step] <= written(folder, committed(folder)[:1])
        reading(spark, text, queues[step], folder, now=True, options=options).awaitTermination()
        batches = [json.loads(sink(folder, batch).read_text()) for batch in committed(folder)]
        ids = [one for batch in batches for one in batch]
        assert Counter(ids) == Counter(sent)
        assert sorted(ids, key=lambda one: one[0]) == sorted(sent, key=lambda one: one[0]), "within each session"
        assert left(step) == set()


def goes_on(spark: SparkSession, ledger: Path, tables: Tables) -> None:
    """Check that following the ledger continues, and gives the same result as reading it from the beginning."""
    reached = tables.version()
    assert all(is_followed(JOBS[name], reached) for name in FOLLOWED)
    assert tables.read(OPERATIONS).count() > 0
    ingest_ledger(spark, ledger, tables.root, extend=follow_jobs(FOLLOWED)).awaitTermination()
    version = tables.version()
    assert version.number > reached.number
    assert all(is_followed(JOBS[name], version) for name in FOLLOWED)
    for name in FOLLOWED:
        followed, anew = current_result(tables, JOBS[name]).collect(), result_over_history(tables, JOBS[name]).collect()
        assert sorted(map(str, followed)) == sorted(map(str, anew))
    rows, whole = current_result(tables, JOBS["reconcile"]).collect(), balance(read_ledger(ledger, lambda _: None))
    for name in (name for name in JUDGED if name != "in_flight"):
        assert sum(row[name] for row in rows) == getattr(whole, name).total()


# --- an executor ------------------------------------------------------------------------------------------------------


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A standalone master and two workers of one core each."""
    program = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    port = find_free_port()
    environment = {
        "JAVA_HOME": str(java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_JAVA_OPTS": QUICK,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_NO_DAEMONIZE": "1",
    }
    place = f"spark://127.0.0.1:{port}"
    address = ("--host", "127.0.0.1", "--webui-port", "0")
    with ExitStack() as stack:
        name, log = "org.apache.spark.deploy.master.Master", folder / "master.log"
        master = stack.enter_context(process(program, name, *address, "--port", str(port), log=log, **environment))
        until(lambda: answers(port), master, log)
        for number in range(2):
            home = folder / f"worker-{number}"
            home.mkdir()
            given = ("--cores", "1", "--memory", "1g", "--work-dir", str(home), place)
            name, log = "org.apache.spark.deploy.worker.Worker", folder / f"worker-{number}.log"
            stack.enter_context(process(program, name, *address, *given, log=log, **environment))
        yield place


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("run", range(RUNS))
async def test_d2_l1_on_a_cluster_both_executors_move_messages_and_kill_9_of_one_at_each_step_loses_nothing(
    backlog: Backlog, tmp_path: Path, run: int
) -> None:
    await backlog.fill(10_000)
    marks = tmp_path / "marks"
    marks.mkdir()
    settings = {
        "spark.executor.memory": "600m",
        "spark.executor.cores": "1",
        "spark.executor.defaultJavaOptions": QUICK,
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    }
    # So slow that messages are left until the last process is killed.
    options = {"drain": True, "rate": 1_500}
    told = {"job": backlog.job(budget=1.0).to_json(), "queues": backlog.queues, "options": options}
    log = tmp_path / "driver.log"
    with cluster(tmp_path) as master:
        asked = {"folder": str(marks), "killed": "executor", "syphon": told, "master": master, "settings": settings}
        with process(*driven(asked), log=log) as driver:
            assert driver.wait(LONG) == 0, log.read_text()
    assert all((marks / step.name).exists() for step in MOVES)
    arrived = await backlog.arrived()
    assert set(arrived) == set(numbered(10_000))
    assert arrived.total() <= 10_000 + len(MOVES) * WINDOW
    assert await backlog.left() == Counter()
    backlog.check_ledger(arrived)
