"""After a pair has ended, or failed to start, nothing of it is left, and it can be made again: P3, C2, C3."""

import asyncio
import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient
from azure.servicebus.exceptions import ServiceBusError

from tests.pairing.drivers.test_pair_sides import RunningSyphon
from twinbus import PairClosedError, PairFaultedError, PairingRefusedError, ProvisioningError
from twinbus.errors import TwinbusError
from twinbus.pairing import pair_state
from twinbus.pairing.aio import timeouts as aio_timeouts
from twinbus.pairing.sync import timeouts

from .conftest import KEY, World, open_sockets, socket_inodes

LONG = timedelta(minutes=1)


class Traces:
    """The tasks, threads and sockets before a pair is made. `gone` waits until there are no others."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tasks = asyncio.all_tasks()

    def left(self) -> list[Any]:
        gc.collect()
        sockets = [namespace.name for namespace in self._namespaces() if open_sockets(namespace.port)]
        threads = [one.name for one in threading.enumerate() if one.name.startswith("twinbus")]
        return [*sockets, *threads, *(asyncio.all_tasks() - self._tasks)]

    async def gone(self) -> None:
        try:
            await self._world.until(lambda: not self.left())
        except TimeoutError:
            pytest.fail(f"these stayed: {self.left()}")

    def _namespaces(self) -> tuple[Any, Any]:
        return self._world.primary, self._world.secondary


async def busy(world: World, queue: str) -> tuple[Any, asyncio.Task[None]]:
    """Return a pair with links on both sides, a receiver, pings, and a call without an answer."""
    pair = await world.pair(try_timeout=LONG, ping_interval=timedelta(seconds=1), ping="message")
    direct, diverting = await world.sender(pair, queue), await world.sender(pair, "nowhere")
    await world.send(direct, ServiceBusMessage("x"))
    await world.do(pair.force_failover, "nowhere")
    await world.send(diverting, ServiceBusMessage("x"))
    await world.do(pair.get_queue_receiver(queue).peek_messages)
    world.primary.faults.set("black-hole", entity="beside-it")
    unanswered = asyncio.create_task(world.send(await world.sender(pair, "beside-it"), ServiceBusMessage("x")))
    await asyncio.wait([unanswered], timeout=0.2)
    return pair, unanswered


async def fault_both(world: World, pair: Any) -> None:
    for side in (pair.primary, pair.secondary):
        await world.do(side.fault, RuntimeError("told to"))


async def fault_the_primary_beside_a_syphon(world: World, pair: Any) -> None:
    pair._state.syphon = RunningSyphon()
    await world.do(pair.primary.fault, RuntimeError("told to"))
    await world.until(lambda: pair.secondary.state == "faulted")


async def fault_the_secondary_beside_a_syphon(world: World, pair: Any) -> None:
    pair._state.syphon = RunningSyphon()
    await world.do(pair.secondary.fault, RuntimeError("told to"))
    await world.until(lambda: pair.primary.state == "faulted")


ENDS = [fault_both, fault_the_primary_beside_a_syphon, fault_the_secondary_beside_a_syphon]


@pytest.mark.thorough
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_c2_c3_a_pair_that_faulted_leaves_nothing_and_can_be_made_again(
    world: World, queue: str, end: Callable[[World, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_state, "OTHER_SIDE_SECONDS", 0.3)
    traces = Traces(world)
    pair, unanswered = await busy(world, queue)
    await end(world, pair)
    with pytest.raises(PairFaultedError):
        pair.get_queue_sender(queue)
    with pytest.raises(PairFaultedError):
        await unanswered
    del unanswered
    await traces.gone()
    world.primary.faults.clear()
    again = await world.pair()
    await world.send(await world.sender(again, queue), ServiceBusMessage("again"))
    await world.do(again.close)
    await traces.gone()


@pytest.mark.thorough
async def test_c3_a_primary_that_faulted_alone_leaves_no_task_thread_or_socket_of_either_side(
    world: World, queue: str
) -> None:
    traces = Traces(world)
    pair = await world.pair(ping_interval=timedelta(seconds=1))
    for entity in (queue, "nowhere"):
        sender = await world.sender(pair, entity)
        if entity == "nowhere":
            await world.do(pair.force_failover, entity)
        await world.send(sender, ServiceBusMessage("x"))
    await world.do(pair.primary.fault, RuntimeError("told to"))
    await traces.gone()
    assert pair.secondary.state == "open"


async def test_c3_a_secondary_that_faulted_alone_leaves_no_socket_and_the_primary_goes_on(
    world: World, queue: str
) -> None:
    # The namespaces are shared with other tests of this process, so this test watches its own sockets only.
    before = socket_inodes(world.secondary.port)
    # Without the garbage collector: the pair itself must close every socket, also those of provisioning.
    gc.disable()
    try:
        pair = await world.pair()
        sender = await world.sender(pair, queue)
        await world.do(pair.force_failover, queue)
        await world.send(sender, ServiceBusMessage("x"))
        own = socket_inodes(world.secondary.port) - before
        assert own
        await world.do(pair.force_restore, queue)
        await world.do(pair.secondary.fault, RuntimeError("told to"))
        await world.until(lambda: not own & socket_inodes(world.secondary.port))
    finally:
        gc.enable()
    await world.send(sender, ServiceBusMessage("x", message_id="after"))
    assert [one.message_id for one in await world.held(queue)] == ["after"]


@pytest.mark.thorough
async def test_c3_a_pair_closed_under_a_call_that_nobody_answers_leaves_nothing(world: World, queue: str) -> None:
    traces = Traces(world)
    pair, unanswered = await busy(world, queue)
    await world.do(pair.close)
    with pytest.raises(TwinbusError):
        await unanswered
    del unanswered
    await traces.gone()


async def test_c3_a_pair_closed_while_a_sender_opens_leaves_nothing(world: World, queue: str) -> None:
    traces = Traces(world)
    pair = await world.pair(try_timeout=LONG)
    world.primary.faults.set("black-hole")
    opening = asyncio.create_task(world.send(await world.sender(pair, queue), ServiceBusMessage("x")))
    await asyncio.wait([opening], timeout=0.3)
    await world.do(pair.close)
    with suppress(TwinbusError, ServiceBusError):
        await opening
    del opening
    await traces.gone()


@pytest.mark.thorough
async def test_p8_c3_a_pair_that_faulted_while_it_still_looked_for_its_queues_leaves_nothing(world: World) -> None:
    traces = Traces(world)
    world.secondary.kill()
    pair = await world.pair(on_secondary_down="background")
    await fault_both(world, pair)
    await traces.gone()


async def test_p3_c3_a_pairing_that_failed_leaves_nothing_and_is_in_nobodys_way(world: World) -> None:
    traces = Traces(world)
    wrong = world.secondary.connection_string.replace(KEY, "wrong")
    with pytest.raises(ProvisioningError):
        await world.pair(keywords={"strings": (world.primary.connection_string, wrong)})
    with pytest.raises(PairingRefusedError):
        await world.pair(keywords={"strings": (world.primary.connection_string, world.primary.connection_string)})
    await traces.gone()
    await world.do((await world.pair()).close)
    await traces.gone()


async def test_p3_a_pair_that_could_not_be_made_whole_is_not_paired(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_timer(*_: object) -> None:
        raise RuntimeError("no timers today")

    traces = Traces(world)
    with monkeypatch.context() as patched:
        for driver in ("twinbus.pairing.sync.pair._Driver", "twinbus.pairing.aio.pair._Driver"):
            patched.setattr(f"{driver}.timer", no_timer)
        with pytest.raises(RuntimeError, match="no timers"):
            await world.pair()
    await traces.gone()
    await world.pair()


async def test_c3_a_pair_that_could_not_be_made_closes_the_clients_that_are_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = AioServiceBusClient if world.driver == "aio" else ServiceBusClient
    closed: list[Any] = []
    close = made.close

    def closing(client: Any) -> Any:
        closed.append(client)
        return close(client)

    monkeypatch.setattr(made, "close", closing)
    with pytest.raises(PairingRefusedError):
        await world.pair(keywords={"strings": (world.primary.connection_string,) * 2})
    assert len(closed) == 2


async def test_c3_a_ping_that_is_called_off_leaves_its_link_without_a_word(world: World, queue: str) -> None:
    pair = await world.pair(ping_interval=timedelta(seconds=1), ping="message", try_timeout=LONG)
    ended: list[str] = []
    discard = pair._timeouts.discard

    def discarded(sender: Any) -> None:
        ended.append(sender.entity_name)
        discard(sender)

    pair._timeouts.discard = discarded
    world.primary.faults.set("black-hole", entity=queue, points=["send"])
    await world.do(pair.force_failover, queue)
    await world.until(lambda: any(fault["hits"] for fault in world.primary.faults.list()))
    await world.do(pair.force_restore, queue)
    await world.until(lambda: ended == [queue])


class BrokenSyphon(RunningSyphon):
    def stop(self) -> None:
        raise RuntimeError("it does not stop")

    def ended(self) -> None:
        assert self.state == "running"


async def test_c3_a_syphon_that_fails_to_stop_is_logged_and_holds_up_nothing(
    world: World, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    traces = Traces(world)
    pair = await world.pair()
    await world.send(await world.sender(pair, queue), ServiceBusMessage("x"))
    pair._state.syphon = BrokenSyphon()
    await world.do(pair.close)
    assert "it does not stop" in caplog.text
    await traces.gone()
    await world.pair()


class SyphonThatCannotEnd(RunningSyphon):
    def ended(self) -> None:
        raise RuntimeError("it does not end")


async def test_c3_a_step_of_closing_that_fails_is_raised_and_the_others_are_done(
    world: World, queue: str, tmp_path: Path
) -> None:
    traces = Traces(world)
    pair = await world.pair(ledger=tmp_path)
    await world.send(await world.sender(pair, queue), ServiceBusMessage("x"))
    pair._state.syphon = SyphonThatCannotEnd()
    with pytest.raises(RuntimeError, match="does not end"):
        await world.do(pair.close)
    await traces.gone()
    # A second close would raise the same error, so the fixture must not close the pair.
    world.stack.pop_all()


async def test_c3_many_senders_and_threads_that_send_again_and_again_leave_nothing_behind(
    world: World, queue: str
) -> None:
    """More links than one worker closes with closing frames, and calls that are refused while the pair closes."""
    traces = Traces(world)
    pair = await world.pair()
    senders = [await world.sender(pair, queue) for _ in range(40)]
    for sender in senders:
        await world.send(sender, ServiceBusMessage("x"))
    refusals: list[Exception] = []

    async def send_until_refused(sender: Any) -> None:
        while len(refusals) < 100:
            try:
                await world.send(sender, ServiceBusMessage("x"))
            except PairClosedError as error:
                refusals.append(error)

    loops = [asyncio.create_task(send_until_refused(sender)) for sender in senders[:10]]
    await world.do(pair.close)
    await asyncio.gather(*loops)
    await traces.gone()


@pytest.mark.thorough
async def test_c3_links_for_which_no_time_is_left_are_dropped_with_their_sockets(
    world: World, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for driver in (timeouts, aio_timeouts):
        monkeypatch.setattr(driver, "_CLOSING_MANY_SECONDS", 0.0)
    traces = Traces(world)
    pair = await world.pair()
    senders = [await world.sender(pair, queue) for _ in range(40)]
    for sender in senders:
        await world.send(sender, ServiceBusMessage("x"))
    await world.do(pair.close)
    await traces.gone()
    with pytest.raises(PairClosedError):
        await world.send(senders[0], ServiceBusMessage("x"))


@pytest.mark.parametrize("syphon", [False, True], ids=["without a syphon", "with a syphon"])
async def test_c3_a_pair_that_was_left_can_be_entered_again_and_one_that_was_closed_cannot(
    world: World, queue: str, syphon: bool
) -> None:
    """The SDK's client can be entered again, and samples of the SDK do so."""
    traces = Traces(world)
    pair = await world.pair(enable_syphon=syphon)
    heard: list[str] = []
    off = pair.on("failover_engaged", lambda event: heard.append(event.entity))
    old = await world.sender(pair, queue)
    enter, leave = (pair.__aenter__, pair.__aexit__) if world.driver == "aio" else (pair.__enter__, pair.__exit__)
    for number in range(3):
        await world.do(enter)
        sender = await world.sender(pair, queue)
        await world.do(pair.force_failover, queue)
        await world.send(sender, ServiceBusMessage(f"time {number}"))
        assert (pair.syphon is not None and pair.syphon.state == "running") is syphon
        await world.do(leave, None, None, None)
        with pytest.raises(PairClosedError):
            await world.send(sender, ServiceBusMessage("the pair is closed"))
    await world.do(enter)
    with pytest.raises(PairClosedError):
        await world.send(old, ServiceBusMessage("a sender of the closed pair"))
    assert len(heard) == 3
    off()
    await world.do(pair.force_failover, queue)
    await world.do(pair.close)
    assert len(heard) == 3
    with pytest.raises(PairClosedError):
        await world.do(enter)
    await traces.gone()
