"""D2 on real servers: the syphon on Spark while its workers, the destination and the backlog are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.cli.syphoned import invoke
from tests.pipeline.backlogs import WINDOW, Backlog, first, killing_at, namespaces, watched
from tests.syphon.ground import numbered, until
from twinbus.connect import connect
from twinbus.ledger import Stage, read_ledger
from twinbus.ledger.entries import Header, Role
from twinbus.message import Message
from twinbus.pipeline.syphon_job.watch import Watch
from twinbus.syphon.books import Books
from twinbus.syphon.progress import Counts, Progress
from twinbus.syphon.room import Step
from twinbus.syphon.transport import Held
from twinbus.testing import LocalNamespace

pytestmark = pytest.mark.timeout(300)
LONG = 240.0
MOVES = (Step.RECEIVED, Step.INTENDED, Step.SENDING, Step.CONFIRMED, Step.COMPLETED)


async def reached(running: asyncio.Task[Progress], holds: Callable[[], object]) -> None:
    """`until`, unless it ends before."""
    await until(lambda: running.done() or holds(), LONG)
    assert not running.done(), await running


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LocalNamespace, LocalNamespace]]:
    with namespaces() as made:
        yield made


@pytest.fixture
def backlog(pair: tuple[LocalNamespace, LocalNamespace], tmp_path: Path) -> Backlog:
    return Backlog(*pair, tmp_path)


async def test_d2_10000_messages_arrive_once_each_and_the_drain_ends(spark: SparkSession, backlog: Backlog) -> None:
    await backlog.fill(5_000)
    await backlog.fill(5_000, queue=1)
    async with backlog.syphon(spark, drain=True) as syphon:
        ended = await syphon.run()
    assert ended.total.returned == 10_000
    assert ended.by_destination[backlog.orders].returned == 10_000
    arrived = await backlog.arrived()
    assert arrived == numbered(10_000)
    assert await backlog.left() == Counter()
    backlog.check_ledger(arrived)
    # Each lane wrote a segment of its own, in a process that is not this one.
    writers = [one for one in read_ledger(backlog.ledger) if isinstance(one, Header) and one.role is Role.SYPHON]
    assert {one.pid for one in writers} - {os.getpid()}


async def test_d2_y2_idle_one_long_poll_a_queue_is_out_and_no_batch_is_planned(
    spark: SparkSession, backlog: Backlog
) -> None:
    async with backlog.syphon(spark, poll=0.5) as syphon:
        running = asyncio.create_task(syphon.run())
        await reached(running, lambda: syphon.plans == 1 and syphon.progress().operations.get(Stage.PEEK_BACKLOG))
        before = syphon.progress()
        empty = before.operations[Stage.EMPTY_RECEIVE]
        await reached(running, lambda: syphon.progress().operations[Stage.EMPTY_RECEIVE] >= empty + 8)
        after = syphon.progress()
        # Looked through once, for what others had put aside; from then on nothing but the polls.
        assert syphon.plans == 1
        assert set(after.operations) == {Stage.EMPTY_RECEIVE, Stage.PEEK_BACKLOG}
        assert after.operations[Stage.PEEK_BACKLOG] == 2
        polls = (after.seconds - before.seconds) / 0.5 + 1
        assert after.operations[Stage.EMPTY_RECEIVE] - empty <= 2 * polls
        await backlog.fill(10)
        await reached(running, lambda: syphon.progress().total.returned == 10)
        syphon.stop()
        await running
    assert await backlog.arrived() == numbered(10)


async def test_d2_y2_what_ends_a_poll_is_given_back_as_it_was(backlog: Backlog) -> None:
    queue, text = backlog.queues[0], backlog.secondary.connection_string
    ended = asyncio.Event()
    counts = Counts(0.0)
    watch = Watch(text, Books(None, "primary", "secondary", counts), lambda _: ended.set(), poll=60, timeout=10)
    watch.hold([queue])
    async with connect(text) as bus:
        await (await bus.sender(queue)).send([Message(b"x", message_id="1")])
        await asyncio.wait_for(ended.wait(), 30)
        await watch.close()
        (found,) = await (await bus.receiver(queue, prefetch=0)).receive(1, 30)
    assert (found.message_id, found.delivery_count) == ("1", 0)
    assert counts.operations == {Stage.RECEIVE_BACKLOG: 1, Stage.SETTLE_BACKLOG: 1}


async def test_d2_kill_9_of_a_python_worker_at_each_step_loses_nothing(
    spark: SparkSession, backlog: Backlog, tmp_path: Path
) -> None:
    await backlog.fill(6_000)
    await backlog.fill(4_000, backlog.watchful, queue=1)
    marks = tmp_path / "marks"
    marks.mkdir()
    # More lanes than steps: the first try of each is killed at a step of its own.
    async with backlog.syphon(spark, drain=True, lanes=3, source=killing_at(marks, *MOVES)) as syphon:
        await syphon.run()
    assert {mark.name for mark in marks.iterdir()} == {step.name for step in MOVES}
    arrived = await backlog.arrived()
    assert set(arrived) == set(numbered(6_000))
    assert arrived.total() <= 6_000 + WINDOW * len(MOVES)
    assert await backlog.arrived(backlog.watchful) == numbered(4_000, 6_000)
    assert await backlog.left() == Counter()
    backlog.check_ledger(arrived)


async def test_d2_kill_9_of_the_destination_and_of_the_backlog_loses_nothing(
    spark: SparkSession, backlog: Backlog, tmp_path: Path
) -> None:
    await backlog.fill(6_000)
    await backlog.fill(4_000, backlog.watchful, queue=1)
    servers = {Step.SENDING: backlog.primary, Step.CONFIRMED: backlog.secondary}
    pids = {step: server.pid for step, server in servers.items()}
    marks = tmp_path

    def watch(step: Step, held: Sequence[Held]) -> None:
        if step in pids and first(marks / step.name):
            os.kill(pids[step], signal.SIGKILL)

    async with backlog.syphon(spark, backlog.job(timeout=3.0), drain=True, source=watched(watch)) as syphon:
        running = asyncio.create_task(syphon.run())
        for server in servers.values():
            await asyncio.to_thread(server.wait, LONG)
            await asyncio.to_thread(server.start)
        await running
    arrived = await backlog.arrived()
    assert set(arrived) == set(numbered(6_000))
    assert arrived.total() <= 6_000 + 4 * WINDOW
    assert await backlog.arrived(backlog.watchful) == numbered(4_000, 6_000)
    backlog.check_ledger(arrived)


async def test_d2_y5_what_is_put_aside_comes_home_in_a_later_batch_at_few_operations(
    spark: SparkSession, backlog: Backlog
) -> None:
    faults = backlog.primary.faults
    broken = faults.set("server-busy", entity=backlog.orders, points=["send"])
    await backlog.fill(2_000)
    await backlog.fill(50, backlog.watchful)
    async with backlog.syphon(spark, drain=True) as syphon:
        running = asyncio.create_task(syphon.run())
        # The dead destination holds up nobody else, and is asked again, batch after batch.
        await reached(running, lambda: syphon.progress().aside == 2_000 and syphon.plans >= 3)
        assert syphon.progress().by_destination[backlog.watchful].returned == 50
        assert [one.path for one in syphon.progress().not_ready] == [backlog.orders]
        faults.clear(broken["id"])
        ended = await running
    assert ended.aside == 0
    assert await backlog.arrived() == numbered(2_000)
    assert await backlog.arrived(backlog.watchful) == numbered(50, 2_000)
    operations = sum(ended.operations.values())
    # receive, defer, receive deferred, send, complete; each batch beyond: a receive and a probe for each lane.
    print(f"{operations / 2_050:.2f} operations per message in {syphon.plans} batches")
    assert operations <= 7 * 2_050 + 20 * syphon.plans


async def test_d2_y5_a_drain_that_can_move_nothing_ends_and_the_next_one_finds_what_was_put_aside(
    spark: SparkSession, backlog: Backlog
) -> None:
    faults = backlog.primary.faults
    broken = faults.set("server-busy", entity=backlog.orders, points=["send"])
    await backlog.fill(300)
    async with backlog.syphon(spark, drain=True, patience=2.0) as syphon:
        assert (await syphon.run()).aside == 300
    faults.clear(broken["id"])
    async with backlog.syphon(spark, drain=True) as syphon:
        assert (await syphon.run()).total.returned == 300
    assert await backlog.arrived() == numbered(300)


async def test_d2_a_clean_stop_settles_what_is_in_flight(spark: SparkSession, backlog: Backlog, tmp_path: Path) -> None:
    await backlog.fill(10_000)
    moving = tmp_path / "moving"

    def watch(step: Step, held: Sequence[Held]) -> None:
        if step is Step.CONFIRMED:
            moving.touch()

    async with backlog.syphon(spark, backlog.job(budget=1.0), rate=2_000, source=watched(watch)) as syphon:
        running = asyncio.create_task(syphon.run())
        await reached(running, moving.exists)
        syphon.stop()
        ended = await running
    arrived = await backlog.arrived()
    assert 0 < arrived.total() == ended.total.returned < 10_000
    async with backlog.syphon(spark, drain=True) as syphon:
        await syphon.run()
    arrived += await backlog.arrived()
    assert arrived == numbered(10_000)
    backlog.check_ledger(arrived)


def test_d2_the_verb_drains_on_spark_and_tells_as_the_native_engine_does(spark: SparkSession, backlog: Backlog) -> None:
    asyncio.run(backlog.fill(500))
    done = invoke(
        *("syphon", "--engine", "spark", "--lanes", "1", "--drain", "--json", "--ledger", str(backlog.ledger)),
        TWINBUS_PRIMARY_CONNECTION_STRING=backlog.primary.connection_string,
        TWINBUS_SECONDARY_CONNECTION_STRING=backlog.secondary.connection_string,
        TWINBUS_PRIMARY_NAME=backlog.queues[0].partition("/")[0],
    )
    assert done.exit_code == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert told[-1]["ended"] is True
    assert told[-1]["total"]["returned"] == 500
    assert told[0]["remaining"] is not None
    assert asyncio.run(backlog.arrived()) == numbered(500)
    # The session is its maker's.
    assert spark.range(3).count() == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--lanes", "2"), "--master and --lanes are for --engine spark"),
        (("--engine", "spark", "--transport", "sdk"), "over the native transport only"),
    ],
)
def test_d2_what_does_not_go_together_is_refused(backlog: Backlog, arguments: tuple[str, ...], told: str) -> None:
    done = invoke(
        *("syphon", *arguments),
        TWINBUS_PRIMARY_CONNECTION_STRING=backlog.primary.connection_string,
        TWINBUS_SECONDARY_CONNECTION_STRING=backlog.secondary.connection_string,
    )
    assert done.exit_code == 1
    assert told in done.stderr
