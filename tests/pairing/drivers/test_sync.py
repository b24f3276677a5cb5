"""Tests of the sync driver alone: threads that wait in its calls (S2, G2, S12, S13)."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import OperationTimeoutError, ServiceBusError

from twinbus.pairing.call_errors import NoTurnError
from twinbus.testing import LocalNamespace

from .conftest import BRIEF, World, state_of

# As in test_outages: much longer than any timeout here, much shorter than the SDK's own timeouts.
AT_ONCE = 8.0
LONG = timedelta(minutes=1)


@pytest.fixture
async def world(primary: LocalNamespace, secondary: LocalNamespace) -> AsyncIterator[World]:
    made = World("sync", primary, secondary)
    async with made.stack:
        yield made


# --- turns -----------------------------------------------------------------------------------------------------------


async def test_s2_waiting_for_a_turn_on_a_shared_sender_is_no_failure_of_the_primary(world: World, queue: str) -> None:
    pair = await world.pair(try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before"))
    world.primary.faults.set("delay", entity=queue, points=["send"], delay=2.0, count=1)
    slow = asyncio.create_task(world.send(sender, ServiceBusMessage("slow")))
    await world.struck(world.primary)
    with pytest.raises(NoTurnError, match=queue):
        await world.send(sender, ServiceBusMessage("no turn"), timeout=0.2)
    await slow
    assert state_of(pair, queue) == "healthy"
    assert await world.backlog(pair) == []
    assert len(await world.held(queue)) == 2


async def test_s2_an_attempt_that_waiting_for_its_turn_cut_short_is_no_failure_of_the_primary(
    world: World, queue: str
) -> None:
    pair = await world.pair(try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before"))
    # Both would get an answer, one after the other. The second answer would come after the second caller's timeout.
    world.primary.faults.set("delay", entity=queue, points=["send"], delay=1.5, count=2)
    slow = asyncio.create_task(world.send(sender, ServiceBusMessage("slow")))
    await world.until(lambda: world.primary.faults.list()[0]["hits"] == 1)
    with pytest.raises(NoTurnError):
        await world.send(sender, ServiceBusMessage("too late"), timeout=2.0)
    await slow
    assert state_of(pair, queue) == "healthy"
    assert await world.backlog(pair) == []


# --- a clock that nothing stops --------------------------------------------------------------------------------------


class Stuck(logging.Handler):
    """A log handler whose disk hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()

    def handle(self, record: logging.LogRecord) -> bool:
        # Without the handler's lock: only threads that write may hang, not the test that reads.
        if "failover_engaged" in record.getMessage():
            self.entered.set()
            self.released.wait(60)
        return True


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    handler, log = Stuck(), logging.getLogger("twinbus.pairing")
    log.addHandler(handler)
    yield handler
    handler.released.set()
    log.removeHandler(handler)


async def test_s12_a_log_handler_that_hangs_stops_no_deadline_and_no_timer(
    world: World, queue: str, stuck: Stuck
) -> None:
    pair = await world.pair(failover_interval=timedelta(seconds=0.2), try_timeout=BRIEF, keywords={"retry_total": 0})
    failing, beside = await world.sender(pair, queue), await world.sender(pair, "beside-it")
    await world.send(beside, ServiceBusMessage("before"))
    world.primary.faults.set("internal-error", entity=queue)
    with pytest.raises(ServiceBusError):
        await world.send(failing, ServiceBusMessage("refused"))
    await world.until(stuck.entered.is_set)
    world.primary.faults.set("black-hole", entity="beside-it")
    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(OperationTimeoutError):
            await world.send(beside, ServiceBusMessage("given up"))
    await world.state(pair, "beside-it", "failed_over")
    stuck.released.set()


# --- closing a sender that another thread uses -----------------------------------------------------------------------


async def test_s13_closing_a_sender_that_another_thread_uses_tells_it_so_and_fails_nothing_over(
    world: World, queue: str
) -> None:
    pair = await world.pair()

    def send_until_closed(sender: Any, begun: threading.Event) -> BaseException:
        try:
            for _ in range(100_000):
                sender.send_messages(ServiceBusMessage("x"))
                begun.set()
        except BaseException as error:
            return error
        raise AssertionError("nothing stopped it")

    for _ in range(8):
        sender = await world.sender(pair, queue)
        begun = [threading.Event() for _ in range(3)]
        sending = [asyncio.create_task(asyncio.to_thread(send_until_closed, sender, event)) for event in begun]
        for event in begun:
            await world.until(event.is_set)
        await world.do(sender.close)
        for ended in await asyncio.gather(*sending):
            assert isinstance(ended, ValueError), ended
            assert "shutdown" in str(ended)
        assert state_of(pair, queue) == "healthy"
    assert await world.backlog(pair) == []


async def test_s13_closing_a_sender_ends_a_call_that_nobody_answers(world: World, queue: str) -> None:
    pair = await world.pair(try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before"))
    world.primary.faults.set("black-hole", entity=queue, points=["send"], count=1)
    sending = asyncio.create_task(world.send(sender, ServiceBusMessage("x")))
    await world.struck(world.primary)
    await world.do(sender.close)
    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(ValueError, match="shutdown"):
            await sending
    assert state_of(pair, queue) == "healthy"
    assert await world.backlog(pair) == []


# --- no more threads -------------------------------------------------------------------------------------------------


async def test_g2_c3_a_ping_for_which_no_thread_can_be_started_is_sent_when_one_can(
    world: World, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await world.pair(ping_interval=timedelta(seconds=1))
    refused, allowed = threading.Event(), threading.Event()
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        entity = next((one for one in pair._state._entities.values() if one.entity.path == queue), None)
        if not allowed.is_set() and thread.name.startswith("twinbus-work") and entity and entity.entity.pinging:
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    await world.do(pair.force_failover, queue)
    await world.until(refused.is_set)
    allowed.set()
    await world.state(pair, queue, "on_trial")
    await world.do(pair.close)


async def test_s2_a_link_that_no_thread_can_keep_alive_serves_and_is_no_failure_of_the_primary(
    world: World, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, threading.Event()

    def limited(thread: threading.Thread) -> None:
        if thread.name == "twinbus-keep-alive":
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="direct"))
    assert refused.is_set()
    assert [one.message_id for one in await world.held(queue)] == ["direct"]
    await world.do(pair.close)
