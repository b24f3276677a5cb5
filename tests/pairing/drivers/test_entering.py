"""An asyncio pair before, during and after pairing (P1, P3, C3, S13): with `async with`, with `await`, or neither."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import OperationTimeoutError

from tests.sdk.installed import since
from twinbus import (
    NotPairedError,
    PairClosedError,
    PairFaultedError,
    PairingRefusedError,
    PairLoopError,
    ProvisioningError,
    SendAvailabilityOptions,
)
from twinbus.aio import Pair, PairedSender, pair_connection_strings
from twinbus.testing import LocalNamespace

from .conftest import KEY, World, open_sockets
from .test_ending import Traces

OPTIONS = SendAvailabilityOptions(backlog_queue_count=2, primary_name="entered")


@pytest.fixture
async def world(primary: LocalNamespace, secondary: LocalNamespace) -> AsyncIterator[World]:
    made = World("aio", primary, secondary)
    async with made.stack:
        yield made


def made(world: World, **keywords: Any) -> Pair:
    """A pair that is not paired yet."""
    strings = {"primary": world.primary.connection_string, "secondary": world.secondary.connection_string}
    pair = pair_connection_strings(**{"options": OPTIONS, **strings, **keywords})
    world.stack.push_async_callback(pair.close)
    return pair


def wrong(world: World) -> str:
    return world.secondary.connection_string.replace(KEY, "wrong")


# --- the three ways in -----------------------------------------------------------------------------------------------


async def test_p1_a_pair_is_entered_as_the_sdks_client_is(world: World, queue: str) -> None:
    pair: Pair = made(world)
    async with pair:
        sender: PairedSender = pair.get_queue_sender(queue)
        assert len(pair.backlog_queues) == 2
        await sender.send_messages(ServiceBusMessage("x"))
    assert (pair.primary.state, pair.secondary.state) == ("closed", "closed")
    assert len(await world.held(queue)) == 1


async def test_p1_awaiting_a_pair_returns_it_paired_and_entering_it_then_closes_it_at_the_end(
    world: World, queue: str
) -> None:
    pair = made(world)
    assert await pair is pair
    assert await pair is pair
    async with pair as entered:
        assert entered is pair
        await entered.get_queue_sender(queue).send_messages(ServiceBusMessage("x"))
    assert pair.primary.state == "closed"


async def test_p1_the_first_send_of_a_pair_that_nobody_entered_pairs_it(world: World, queue: str) -> None:
    pair = made(world)
    sender = pair.get_queue_sender(queue)
    assert not pair.backlog_queues
    await asyncio.gather(*(sender.send_messages(ServiceBusMessage("x")) for _ in range(5)))
    assert len(pair.backlog_queues) == 2
    await pair.close()
    assert len(await world.held(queue)) == 5


NO_LOOP = """
import asyncio, os, sys
from azure.servicebus import ServiceBusMessage
from twinbus import SendAvailabilityOptions
from twinbus.aio import pair_connection_strings

pair = pair_connection_strings(*sys.argv[1:3], options=SendAvailabilityOptions(backlog_queue_count=1))
sender, receiver = pair.get_queue_sender(sys.argv[3]), pair.get_queue_receiver(sys.argv[3])
pair.on("closed", lambda notice: None)
try:
    pair.force_failover(sys.argv[3])
except RuntimeError as error:
    assert "no running event loop" in str(error), error
else:
    raise AssertionError("pings need a loop")
assert pair.entities()[0].state == "healthy"

async def main(text):
    async with pair:
        await sender.send_messages(ServiceBusMessage(text))

# A child that uses it first: nothing of it belongs to this process yet.
child = os.fork()
if child == 0:
    asyncio.run(main("from the child"))
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
asyncio.run(main("from the parent"))
print("ok")
"""


async def test_p1_s13_a_pair_is_made_without_a_loop_and_may_be_paired_after_a_fork(world: World, queue: str) -> None:
    strings = (world.primary.connection_string, world.secondary.connection_string)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NO_LOOP, *strings, queue, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        told, _ = await process.communicate()
    assert told == b"ok\n"
    assert [one.body for one in await world.held(queue)] == [b"from the child", b"from the parent"]


# --- before it is paired ---------------------------------------------------------------------------------------------


async def test_p1_nothing_is_sent_before_every_backlog_queue_was_found(world: World, queue: str) -> None:
    pair = made(world)
    world.secondary.faults.set("black-hole", points=["http"])
    sending = asyncio.create_task(pair.get_queue_sender(queue).send_messages(ServiceBusMessage("x")))
    entering = asyncio.create_task(pair.__aenter__())
    await asyncio.wait([sending, entering], timeout=1)
    assert not sending.done()
    assert not entering.done()
    assert await world.held(queue) == []
    world.secondary.faults.clear()
    await asyncio.gather(sending, entering)
    assert len(await world.held(queue)) == 1


async def test_p1_the_time_out_of_a_send_bounds_its_waiting_for_the_pairing(world: World, queue: str) -> None:
    pair = made(world)
    sender = pair.get_queue_sender(queue)
    world.secondary.faults.set("black-hole", points=["http"])
    with pytest.raises(OperationTimeoutError):
        await sender.send_messages(ServiceBusMessage("x"), timeout=0.5)
    world.secondary.faults.clear()
    await sender.send_messages(ServiceBusMessage("x"))
    assert len(await world.held(queue)) == 1


async def test_p3_a_pair_that_is_only_made_or_closed_unpaired_is_in_nobodys_way(world: World, queue: str) -> None:
    contradicting = replace(OPTIONS, backlog_queue_count=1)
    idle, other = made(world), made(world, options=contradicting)
    async with made(world) as pair:
        await idle.close()
        await idle.close()
        with pytest.raises(PairingRefusedError):
            await other
        await pair.get_queue_sender(queue).send_messages(ServiceBusMessage("x"))
        # Closing `idle` and refusing `other` did not unregister `pair`: another pair is still refused.
        with pytest.raises(PairingRefusedError):
            await made(world, options=contradicting)


async def test_p1_a_failover_cannot_be_forced_before_the_namespaces_are_paired(world: World, queue: str) -> None:
    pair = made(world)
    sender = pair.get_queue_sender(queue)
    with pytest.raises(NotPairedError, match="await pair"):
        pair.force_failover(queue)
    assert pair.entities()[0].state == "healthy"
    await sender.send_messages(ServiceBusMessage("x"))
    pair.force_failover(queue)
    assert pair.entities()[0].state == "failed_over"


@since("7.15", "cannot list sessions")
async def test_p1_receivers_and_session_lists_do_not_wait_for_the_pairing(world: World, queue: str) -> None:
    pair = made(world, secondary=wrong(world))
    async with pair.get_queue_receiver(queue) as receiver:
        assert await receiver.peek_messages() == []
    assert isinstance([one async for one in pair.list_queue_sessions("sessions-0")], list)
    assert pair.backlog_queues == ()


# --- when pairing fails ----------------------------------------------------------------------------------------------


async def test_p1_c3_bad_credentials_surface_from_entering_and_close_the_pair(world: World, queue: str) -> None:
    traces = Traces(world)
    pair = made(world, secondary=wrong(world))
    sender = pair.get_queue_sender(queue)
    with pytest.raises(ProvisioningError):
        async with pair:
            raise AssertionError("entered")
    for refused in (pair.__aenter__(), sender.send_messages(ServiceBusMessage("x"))):
        with pytest.raises(PairClosedError):
            await refused
    with pytest.raises(PairClosedError):
        pair.get_queue_sender(queue)
    await traces.gone()
    async with made(world):
        assert await world.held(queue) == []


async def test_p1_c3_bad_credentials_surface_from_all_that_wait_and_entering_closes_the_pair(
    world: World, queue: str
) -> None:
    pair = made(world, secondary=wrong(world))
    sends = [pair.get_queue_sender(queue).send_messages(ServiceBusMessage("x")) for _ in range(2)]
    results = await asyncio.gather(sends[0], pair.__aenter__(), sends[1], return_exceptions=True)
    assert [type(result) for result in results] == [ProvisioningError] * 3
    assert (pair.primary.state, pair.secondary.state) == ("closed", "closed")


async def test_p1_bad_credentials_surface_from_every_send_of_a_pair_that_nobody_entered(
    world: World, queue: str
) -> None:
    pair = made(world, secondary=wrong(world))
    sender = pair.get_queue_sender(queue)
    results = await asyncio.gather(
        *(sender.send_messages(ServiceBusMessage("x")) for _ in range(3)), return_exceptions=True
    )
    assert [type(result) for result in results] == [ProvisioningError] * 3
    with pytest.raises(ProvisioningError):
        await sender.send_messages(ServiceBusMessage("x"))
    assert await world.held(queue) == []
    # A pair whose pairing failed is not registered, so another pair is allowed (P3).
    await made(world)


BRIEF_OPTIONS = replace(OPTIONS, try_timeout=timedelta(seconds=2))


@pytest.mark.parametrize("fault", ["black-hole", "refuse"])
async def test_p8_s12_a_secondary_that_is_away_fails_no_send_and_is_looked_for_in_the_background(
    world: World, queue: str, fault: str
) -> None:
    pair = made(world, options=replace(BRIEF_OPTIONS, on_secondary_down="raise"))
    world.secondary.faults.set(fault)
    sender = pair.get_queue_sender(queue)
    async with asyncio.timeout(20):
        await asyncio.gather(*(sender.send_messages(ServiceBusMessage("x")) for _ in range(3)))
        assert await pair is pair
    assert pair.backlog_queues == ()
    assert len(await world.held(queue)) == 3
    world.secondary.faults.clear()
    await world.until(lambda: len(pair.backlog_queues) == 2, 30)
    pair.force_failover(queue)
    await sender.send_messages(ServiceBusMessage("x", message_id=f"diverted after {fault}"))
    assert f"diverted after {fault}" in [one.message_id for one in await world.backlog(pair)]


async def test_p8_a_secondary_that_is_away_fails_entering_as_the_option_says(world: World, queue: str) -> None:
    world.secondary.faults.set("refuse")
    pair = made(world, options=replace(BRIEF_OPTIONS, on_secondary_down="raise"))
    with pytest.raises(ProvisioningError):
        await pair
    with pytest.raises(PairClosedError):
        pair.get_queue_sender(queue)
    async with made(world, options=BRIEF_OPTIONS) as other:
        assert other.backlog_queues == ()


async def test_p8_sends_whose_callers_give_up_still_bring_the_pairing_to_its_end(world: World, queue: str) -> None:
    """The secondary never answers, and no caller waits as long as one try takes."""
    pair = made(world, options=BRIEF_OPTIONS)
    sender = pair.get_queue_sender(queue)
    world.secondary.faults.set("black-hole")
    for _ in range(20):
        try:
            await asyncio.wait_for(sender.send_messages(ServiceBusMessage("x")), 0.5)
        except TimeoutError:
            continue
        break
    assert len(await world.held(queue)) == 1


# --- cancelled and closed meanwhile ----------------------------------------------------------------------------------


async def test_s13_entering_that_is_cancelled_leaves_nothing_and_the_pair_can_be_made_again(world: World) -> None:
    traces = Traces(world)
    world.secondary.faults.set("black-hole", points=["http"])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(made(world), 0.5)
    world.secondary.faults.clear()
    await traces.gone()
    async with made(world) as pair:
        assert len(pair.backlog_queues) == 2


async def test_s13_one_of_several_that_wait_for_the_pairing_is_cancelled_and_the_others_go_on(
    world: World, queue: str
) -> None:
    pair = made(world)
    world.secondary.faults.set("black-hole", points=["http"])
    first = asyncio.create_task(pair.__aenter__())
    second = asyncio.create_task(pair.get_queue_sender(queue).send_messages(ServiceBusMessage("x")))
    await asyncio.wait([first, second], timeout=0.3)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    world.secondary.faults.clear()
    await second
    assert len(await world.held(queue)) == 1


async def test_c3_closing_while_it_is_being_paired_refuses_those_that_wait(world: World, queue: str) -> None:
    traces = Traces(world)
    pair = made(world)
    world.secondary.faults.set("black-hole", points=["http"])
    waiting = [
        asyncio.create_task(pair.__aenter__()),
        asyncio.create_task(pair.get_queue_sender(queue).send_messages(ServiceBusMessage("x"))),
    ]
    await asyncio.wait(waiting, timeout=0.3)
    await pair.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [PairClosedError] * 2
    del waiting, results
    world.secondary.faults.clear()
    await traces.gone()


async def test_c3_a_task_that_ignored_a_cancellation_before_is_refused_by_closing_too(world: World, queue: str) -> None:
    pair = made(world)
    world.secondary.faults.set("black-hole", points=["http"])
    begun, waiting = asyncio.Event(), asyncio.Event()

    async def last_words() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            waiting.set()
        await pair.get_queue_sender(queue).send_messages(ServiceBusMessage("last words"))

    task = asyncio.create_task(last_words())
    await begun.wait()
    task.cancel()
    await waiting.wait()
    await asyncio.wait([task], timeout=0.2)
    await pair.close()
    with pytest.raises(PairClosedError):
        await task


async def test_c3_a_side_that_is_closed_or_faulted_before_the_pairing_refuses_it(world: World) -> None:
    closed, faulted = made(world), made(world)
    await closed.secondary.close()
    with pytest.raises(PairClosedError):
        await closed
    faulted.primary.fault(RuntimeError("told to"))
    with pytest.raises(PairFaultedError):
        async with faulted:
            raise AssertionError("entered")


async def test_c3_a_pair_entered_twice_is_closed_by_the_first_exit(world: World, queue: str) -> None:
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(made(world))
        async with pair:
            await pair.get_queue_sender(queue).send_messages(ServiceBusMessage("x"))
        with pytest.raises(PairClosedError):
            pair.get_queue_sender(queue)


# --- one event loop --------------------------------------------------------------------------------------------------


def in_a_thread(make: Callable[[], Coroutine[Any, Any, Any]]) -> Coroutine[Any, Any, Any]:
    """Run a coroutine in another event loop, in a thread. The loop is closed afterwards."""
    return asyncio.to_thread(lambda: asyncio.run(make()))


async def test_s13_every_use_in_another_running_loop_is_refused_and_leaves_the_pair_as_it_was(
    world: World, queue: str
) -> None:
    pair = made(world)
    sender = pair.get_queue_sender(queue)
    await sender.send_messages(ServiceBusMessage("first"))
    states = pair.entities()

    async def elsewhere() -> None:
        another = pair.get_queue_sender(queue)
        for use in (
            lambda: sender.send_messages(ServiceBusMessage("x")),
            lambda: another.send_messages(ServiceBusMessage("x")),
            lambda: sender.schedule_messages(ServiceBusMessage("x"), datetime.now(UTC)),
            sender.__aenter__,
            sender.close,
            pair.__aenter__,
            pair.close,
            pair.secondary.close,
        ):
            with pytest.raises(PairLoopError, match="another event loop; make one pair for each loop"):
                await use()
        for force in (pair.force_failover, pair.force_restore):
            with pytest.raises(PairLoopError):
                force(queue)

    await in_a_thread(elsewhere)
    assert (pair.primary.state, pair.secondary.state) == ("open", "open")
    assert [one.state for one in pair.entities()] == [one.state for one in states]
    await sender.send_messages(ServiceBusMessage("last"))
    assert [one.body for one in await world.held(queue)] == [b"first", b"last"]


async def test_s13_a_loop_that_joins_another_loops_pairing_is_refused_and_the_pairing_goes_on(
    world: World, queue: str
) -> None:
    pair = made(world)
    world.secondary.faults.set("black-hole", points=["http"])
    sending = asyncio.create_task(pair.get_queue_sender(queue).send_messages(ServiceBusMessage("x")))
    await asyncio.wait([sending], timeout=0.2)
    with pytest.raises(PairLoopError):
        await in_a_thread(pair.__aenter__)
    world.secondary.faults.clear()
    await sending
    assert pair.primary.state == "open"


CLOSED_LOOP = """
import asyncio, sys, time
from azure.servicebus import ServiceBusMessage
from twinbus import PairLoopError, SendAvailabilityOptions
from twinbus.aio import pair_connection_strings

first_string, second_string, queue, tidy = sys.argv[1:]
options = SendAvailabilityOptions(backlog_queue_count=1, primary_name="closed-loop", enable_syphon=True)
pair = pair_connection_strings(first_string, second_string, options=options)
senders = [pair.get_queue_sender(name) for name in (queue, "beside-it")]

async def first():
    await pair
    for sender in senders:
        await sender.send_messages(ServiceBusMessage("first"))
    pair.force_failover("beside-it")
    await senders[1].send_messages(ServiceBusMessage("diverted"))

async def second():
    for use in (lambda: senders[0].send_messages(ServiceBusMessage("x")), pair.__aenter__):
        try:
            await use()
        except PairLoopError:
            assert pair.primary.state == pair.secondary.state == "open"
        else:
            raise AssertionError("sent without deadlines")
    try:
        pair.force_restore("beside-it")
    except PairLoopError:
        pass
    async with asyncio.timeout(20):
        await senders[0].close()
        await pair.close()
        await pair.close()
    assert pair.primary.state == pair.secondary.state == "closed"
    async with pair_connection_strings(first_string, second_string, options=options) as again:
        assert len(again.backlog_queues) == 1

if tidy == "tidy":
    asyncio.run(first())
else:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(first())
    loop.close()
asyncio.run(second())
print("ok", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("tidy", ["tidy", "with tasks under way"])
async def test_s12_c3_after_its_loop_was_closed_a_pair_refuses_sends_and_can_be_closed(
    world: World, queue: str, tidy: str
) -> None:
    """Runs in its own process, because Python logs tasks that a closed loop leaves."""
    strings = (world.primary.connection_string, world.secondary.connection_string)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLOSED_LOOP, *strings, queue, tidy, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        told, _ = await process.communicate()
    assert told == b"ok\n"
    assert [one.body for one in await world.held(queue)] == [b"first"]


def fault_both(pair: Pair) -> None:
    for side in (pair.primary, pair.secondary):
        side.fault(RuntimeError("told to"))


async def used(world: World, pair: Pair, queue: str) -> None:
    """Use the pair: links on both sides, and pings without an answer."""
    sender = pair.get_queue_sender(queue)
    await sender.send_messages(ServiceBusMessage("x"))
    world.primary.faults.set("black-hole", entity="beside-it")
    pair.force_failover("beside-it")
    await pair.get_queue_sender("beside-it").send_messages(ServiceBusMessage("x"))


PINGING = replace(OPTIONS, ping_interval=timedelta(seconds=1))


async def test_c3_both_sides_faulted_in_another_thread_end_the_pair_without_closing_it(
    world: World, queue: str
) -> None:
    traces = Traces(world)
    pair = made(world, options=PINGING)
    await used(world, pair, queue)
    await asyncio.to_thread(fault_both, pair)
    with pytest.raises(PairFaultedError):
        pair.get_queue_sender(queue)
    await traces.gone()
    world.primary.faults.clear()
    async with made(world):
        pass


async def test_c3_both_sides_faulted_while_the_loop_stands_still_end_the_pair_when_it_runs_again(
    world: World, queue: str
) -> None:
    pair = made(world, options=PINGING)

    async def gone() -> None:
        ports = (world.primary.port, world.secondary.port)
        await world.until(lambda: not any(map(open_sockets, ports)))

    def run() -> None:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(used(world, pair, queue))
            fault_both(pair)
            loop.run_until_complete(gone())
            loop.run_until_complete(pair.close())
        finally:
            loop.close()

    await asyncio.to_thread(run)


async def test_c3_a_pair_that_was_never_used_may_be_faulted_where_no_loop_runs(world: World, queue: str) -> None:
    pair = made(world)
    pair.get_queue_sender(queue)
    await asyncio.to_thread(fault_both, pair)
    with pytest.raises(PairFaultedError):
        await pair
    await pair.close()
