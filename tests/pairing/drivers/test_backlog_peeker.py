"""Y1: a backlog that fills while no syphon runs raises an alert. Real servers, both drivers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from prometheus_client import REGISTRY

from twinbus.connect import Receiver, connect
from twinbus.ledger import Operation, State, read_ledger

from .conftest import BRIEF, KEY, World
from .test_ending import Traces

OFTEN: dict[str, Any] = {
    "backlog_check_interval": timedelta(milliseconds=100),
    "backlog_unattended_after": timedelta(seconds=1),
}


@pytest.fixture(autouse=True)
def brief(world: World) -> None:
    world.try_timeout = BRIEF


async def diverted(world: World, queue: str, *ids: str, **options: Any) -> Any:
    """Return a pair with messages in its only backlog queue. The entity of the messages is restored."""
    pair = await world.pair(**{"backlog_queue_count": 1, **OFTEN, **options})
    await divert(world, pair, queue, *ids)
    await world.do(pair.force_restore, queue)
    return pair


async def divert(world: World, pair: Any, queue: str, *ids: str) -> None:
    await world.do(pair.force_failover, queue)
    sender = await world.sender(pair, queue)
    for one in ids:
        await world.send(sender, ServiceBusMessage(b"x" * 100, message_id=one))


def gauge(pair: Any, name: str) -> float | None:
    labels = {"pair": pair.options.primary_name, "queue": backlog_queue(pair)}
    return REGISTRY.get_sample_value(f"twinbus_backlog_{name}", labels)


def backlog_queue(pair: Any) -> str:
    return f"{pair.options.primary_name}/x-servicebus-transfer/0"


def peeks(folder: Path) -> list[Operation]:
    entries = (entry for entry in read_ledger(folder) if isinstance(entry, Operation))
    return [entry for entry in entries if entry.stage == "peek_backlog"]


@asynccontextmanager
async def taking(world: World, pair: Any) -> AsyncIterator[Receiver]:
    string, queue = world.secondary.connection_string, backlog_queue(pair)
    async with connect(string, timeout=10) as bus, await bus.receiver(queue) as receiver:
        yield receiver


async def take_home(world: World, pair: Any, count: int) -> None:
    """Remove messages from the backlog queue, as a syphon does."""
    async with taking(world, pair) as receiver:
        await receiver.complete(await receiver.receive(count, max_wait=5))


def hear(pair: Any) -> list[Any]:
    heard: list[Any] = []
    pair.on("backlog_unattended", heard.append)
    return heard


async def test_y1_a_backlog_that_nobody_syphons_is_told_once_and_taken_back_when_somebody_does(
    world: World, queue: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "twinbus.pairing")
    pair = await diverted(world, queue, "1", "2", ledger=tmp_path)
    heard = hear(pair)
    await world.until(lambda: gauge(pair, "unattended") == 1)
    told = gauge(pair, "oldest_seconds")
    assert told is not None
    assert told > 1
    # The queue is peeked at repeatedly, and the alert is raised once.
    await world.until(lambda: (gauge(pair, "oldest_seconds") or 0) > told)
    assert [message.delivery_count for message in await world.backlog(pair)] == [0, 0]
    await take_home(world, pair, 1)
    await world.until(lambda: gauge(pair, "unattended") == 0)
    # The second message has also been the oldest for a second now.
    await world.until(lambda: gauge(pair, "unattended") == 1)
    await take_home(world, pair, 1)
    await world.until(lambda: gauge(pair, "oldest_seconds") == 0)
    assert gauge(pair, "unattended") == 0
    assert [(notice.queue, notice.entity) for notice in heard] == [(backlog_queue(pair), queue)] * 2
    [line, _] = [record for record in caplog.records if record.getMessage().startswith("backlog_unattended")]
    assert line.levelno == logging.WARNING
    await world.do(pair.close)
    states = [entry for entry in read_ledger(tmp_path) if isinstance(entry, State)]
    assert [entry.facts["queue"] for entry in states if entry.event == "backlog_unattended"] == [heard[0].queue] * 2
    assert gauge(pair, "unattended") is None


async def test_y1_each_look_is_one_peek_in_the_ledger_and_they_end_when_the_queue_is_seen_empty(
    world: World, queue: str, tmp_path: Path
) -> None:
    pair = await diverted(world, queue, "1", "2", "3", ledger=tmp_path)
    watch = pair._state.backlog_watch
    await world.until(lambda: bool(gauge(pair, "oldest_seconds")))
    await take_home(world, pair, 3)
    await world.until(lambda: all(status.empty for status in watch.watch.queues))
    await world.until(lambda: not watch.watch.checking)
    assert watch._timer not in armed(pair)
    await world.do(pair.close)
    found = peeks(tmp_path)
    assert {(one.entity, one.result, one.units) for one in found} == {(backlog_queue(pair), "ok", 1)}
    # Each peek requests at most one message, and the last peek found none.
    assert found[0].bytes in range(200, 400)
    assert [one.bytes for one in found].index(0) == len(found) - 1


def armed(pair: Any) -> list[Any]:
    thread = getattr(pair._timeouts, "thread", None)
    if thread is not None:
        return list(thread._timers)
    timer = pair._state.backlog_watch._timer
    return [timer] if timer._handle is not None else []


async def test_y1_while_its_entity_is_failed_over_here_a_backlog_is_nobodys_fault(world: World, queue: str) -> None:
    pair = await world.pair(backlog_queue_count=1, **OFTEN)
    heard = hear(pair)
    await divert(world, pair, queue, "1")
    await world.until(lambda: (gauge(pair, "oldest_seconds") or 0) > 1.5)
    assert gauge(pair, "unattended") == 0
    await world.do(pair.force_restore, queue)
    await world.until(lambda: gauge(pair, "unattended") == 1)
    await world.until(lambda: len(heard) == 1)


async def test_y1_what_a_syphon_put_aside_is_attended(world: World, queue: str) -> None:
    pair = await diverted(world, queue, "1")
    async with taking(world, pair) as receiver:
        await receiver.defer(await receiver.receive(1, max_wait=5))
    await world.until(lambda: all(status.empty for status in pair._state.backlog_watch.watch.queues))
    assert gauge(pair, "unattended") == 0


async def test_y1_a_secondary_that_refuses_listen_is_said_once_and_diverting_goes_on(
    world: World, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = "home-of-writers"
    provisioned = await world.pair(primary_name=name)
    await world.do(provisioned.close)
    string = world.secondary.connection_string.replace("RootManageSharedAccessKey", "writer")
    assert KEY in string
    strings = (world.primary.connection_string, string)
    pair = await diverted(world, queue, "1", primary_name=name, provision="assume", keywords={"strings": strings})
    await world.until(lambda: pair._state.backlog_watch.watch.closed)
    await divert(world, pair, queue, "2")
    await world.do(pair.close)
    assert len([record for record in caplog.records if "cannot be checked" in record.getMessage()]) == 1


@pytest.mark.parametrize("options", [{}, {"backlog_check_interval": timedelta(0)}], ids=["nothing diverted", "never"])
async def test_y1_without_anything_diverted_or_wanted_there_is_no_look(
    world: World, queue: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    pair = await world.pair(**{**OFTEN, **options, "ledger": tmp_path})
    if options:
        await divert(world, pair, queue, "1")
    else:
        await world.send(await world.sender(pair, queue), ServiceBusMessage(b""))
    assert pair._state.backlog_watch._timer not in armed(pair)
    await world.do(pair.close)
    assert peeks(tmp_path) == []


async def silent(world: World, pair: Any) -> None:
    world.secondary.faults.set("black-hole", entity=backlog_queue(pair))
    await world.until(lambda: pair._state.backlog_watch.watch.checking)


async def between(world: World, pair: Any) -> None:
    await world.until(lambda: bool(gauge(pair, "oldest_seconds")))


@pytest.mark.parametrize("when", [silent, between], ids=lambda when: when.__name__)
async def test_c3_closing_ends_the_looking_also_in_the_middle_of_a_peek_that_nobody_answers(
    world: World, queue: str, when: Callable[[World, Any], Any]
) -> None:
    traces = Traces(world)
    pair = await diverted(world, queue, "1", try_timeout=timedelta(minutes=1))
    await when(world, pair)
    async with asyncio.timeout(10):
        await world.do(pair.close)
    await traces.gone()
