"""Tests of the asyncio driver alone: tasks that share its links (S1, S12, S13)."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import OperationTimeoutError, ServiceBusError

from twinbus.testing import LocalNamespace

from .conftest import BRIEF, World, state_of

# As in test_outages: much longer than any timeout here, much shorter than the SDK's own timeouts.
AT_ONCE = 8.0
LONG = timedelta(minutes=1)


@pytest.fixture
async def world(primary: LocalNamespace, secondary: LocalNamespace) -> AsyncIterator[World]:
    made = World("aio", primary, secondary)
    async with made.stack:
        yield made


def sent(sender: Any, name: str, **keywords: Any) -> asyncio.Task[None]:
    return asyncio.create_task(sender.send_messages(ServiceBusMessage("x", message_id=name), **keywords))


async def ids(world: World, queue: str) -> list[Any]:
    return [one.message_id for one in await world.held(queue)]


async def opened(world: World, queue: str, **options: Any) -> tuple[Any, Any]:
    """Yield a pair without retries, and a sender whose link is open."""
    pair = await world.pair(keywords={"retry_total": 0}, **{"try_timeout": LONG, **options})
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="before"))
    return pair, sender


async def hits(namespace: LocalNamespace, count: int) -> None:
    """Wait until the last fault that was set has this number of hits."""
    async with asyncio.timeout(AT_ONCE):
        while (await asyncio.to_thread(namespace.faults.list))[-1]["hits"] < count:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


async def held_back(world: World, queue: str, sender: Any, count: int) -> list[asyncio.Task[None]]:
    """Start sends that the primary receives but does not answer until its faults are cleared."""
    world.primary.faults.set("black-hole", entity=queue, points=["send"])
    tasks = [sent(sender, f"many-{number}") for number in range(count)]
    await hits(world.primary, count)
    return tasks


async def test_s1_sends_of_tasks_that_share_a_sender_overlap(world: World, queue: str) -> None:
    pair, sender = await opened(world, queue)
    # The primary has received all of them before it answers the first.
    many = await held_back(world, queue, sender, 100)
    assert not any(task.done() for task in many)
    world.primary.faults.clear()
    async with asyncio.timeout(AT_ONCE):
        await asyncio.gather(*many)
    assert sorted(await ids(world, queue)) == sorted(["before", *(f"many-{number}" for number in range(100))])
    assert state_of(pair, queue) == "healthy"


async def test_s13_sends_that_begin_while_others_are_in_flight_are_each_sent_once(world: World, queue: str) -> None:
    _, sender = await opened(world, queue)
    world.primary.faults.set("delay", entity=queue, points=["send"], delay=0.02)
    tasks = []
    for number in range(60):
        tasks.append(sent(sender, f"{number}"))
        # The sends start at different times: some while another task reads, some while another task writes.
        await asyncio.sleep(0.001 * (number % 5))
    async with asyncio.timeout(AT_ONCE):
        await asyncio.gather(*tasks)
    assert sorted(await ids(world, queue)) == sorted(["before", *(f"{number}" for number in range(60))])


async def test_s13_one_cancelled_send_among_many_takes_nothing_from_the_others(world: World, queue: str) -> None:
    pair, sender = await opened(world, queue)
    first, *others = await held_back(world, queue, sender, 20)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not any(task.done() for task in others)
    later = sent(sender, "later")
    await hits(world.primary, 21)
    world.primary.faults.clear()
    async with asyncio.timeout(AT_ONCE):
        await asyncio.gather(*others, later)
    assert state_of(pair, queue) == "healthy"
    assert sorted(await ids(world, queue)) == sorted(["before", "later", *(f"many-{number}" for number in range(20))])
    assert await world.backlog(pair) == []


async def test_s13_one_short_time_out_among_many_takes_nothing_from_the_others(world: World, queue: str) -> None:
    pair, sender = await opened(world, queue, failover_interval=LONG)
    others = await held_back(world, queue, sender, 20)
    hasty = sent(sender, "hasty", timeout=0.5)
    with pytest.raises(OperationTimeoutError):
        await hasty
    assert not any(task.done() for task in others)
    later = sent(sender, "later")
    await hits(world.primary, 22)
    world.primary.faults.clear()
    async with asyncio.timeout(AT_ONCE):
        await asyncio.gather(*others, later)
    # The timeout came first and these successes came last, so the entity is healthy.
    assert state_of(pair, queue) == "healthy"
    found = await ids(world, queue)
    assert sorted(set(found) - {"hasty"}) == sorted({"before", "later", *(f"many-{number}" for number in range(20))})
    assert len(found) == len(set(found))


async def test_s13_an_error_of_one_send_among_many_takes_nothing_from_the_others(world: World, queue: str) -> None:
    pair, sender = await opened(world, queue, failover_interval=LONG)
    world.primary.faults.set("delay", entity=queue, points=["send"], delay=1.5, count=20)
    others = [sent(sender, f"many-{number}") for number in range(20)]
    await world.struck(world.primary)
    # After this error the SDK closes the link, also if other calls use the link.
    world.primary.faults.set("internal-error", entity=queue, points=["send"], count=1)
    bad = sent(sender, "bad")
    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(ServiceBusError):
            await bad
        await asyncio.gather(*others)
    assert sorted(await ids(world, queue)) == sorted(["before", *(f"many-{number}" for number in range(20))])
    await world.send(sender, ServiceBusMessage("after"))
    assert state_of(pair, queue) == "healthy"


async def answered_late(world: World, queue: str, sender: Any, *delays: float) -> list[asyncio.Task[None]]:
    """Start sends that are answered after different delays: between two answers the SDK looks for messages to send."""
    tasks = []
    for number, delay in enumerate(delays):
        world.primary.faults.set("delay", entity=queue, points=["send"], delay=delay, count=1)
        tasks.append(sent(sender, f"late-{number}"))
        await world.struck(world.primary)
    return tasks


async def test_s13_a_message_that_cannot_be_encoded_is_an_error_of_its_own_send_alone(world: World, queue: str) -> None:
    pair, sender = await opened(world, queue)
    others = await answered_late(world, queue, sender, 1.0, 1.2, 1.4)
    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(ServiceBusError, match="invalid"):
            await sender.send_messages(ServiceBusMessage("x", application_properties={"n": 2**70}))
        await asyncio.gather(*others, sent(sender, "after"))
    assert sorted(await ids(world, queue)) == ["after", "before", "late-0", "late-1", "late-2"]
    assert state_of(pair, queue) == "healthy"
    assert await world.backlog(pair) == []


async def test_s13_what_was_given_up_before_it_was_written_is_written_by_nobody_else(world: World, queue: str) -> None:
    pair, sender = await opened(world, queue)
    others = await answered_late(world, queue, sender, 1.5, 1.8)
    # The primary has closed its window: the SDK keeps messages until the window opens.
    session = sender._link.sender._handler._session
    window, session.remote_incoming_window = session.remote_incoming_window, 0
    async with asyncio.timeout(AT_ONCE):
        await sent(sender, "hasty", timeout=2.0)
        assert state_of(pair, queue) == "failed_over"
        session.remote_incoming_window = window
        await asyncio.gather(*others)
    assert sorted(await ids(world, queue)) == ["before", "late-0", "late-1"]
    assert [one.message_id for one in await world.backlog(pair)] == ["hasty"]


async def test_s13_no_more_is_sent_than_the_primary_has_granted_credit_for_and_the_rest_when_it_does(
    world: World, queue: str
) -> None:
    _, sender = await opened(world, queue)
    link = sender._link.sender._handler._link
    # As if the primary had granted no more credit than this. The SDK itself would ignore the limit.
    link.current_link_credit = 2
    world.primary.faults.set("black-hole", entity=queue, points=["send"])
    tasks = [sent(sender, f"{number}") for number in range(5)]
    await hits(world.primary, 2)
    cannot = asyncio.create_task(sender.send_messages(ServiceBusMessage("x", application_properties={"n": 2**70})))
    given_up = sent(sender, "given up")
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert link.current_link_credit == 0
    world.primary.faults.clear()
    # The next flow of the primary: credit for this number of further messages (AMQP 2.6.7).
    window = [None, link._session.remote_incoming_window, 0, link._session.remote_outgoing_window]
    await link._incoming_flow([*window, link.handle, link.delivery_count, 100, None, None, None, None])
    async with asyncio.timeout(AT_ONCE):
        await asyncio.gather(*tasks)
        with pytest.raises(ServiceBusError, match="invalid"):
            await cannot
    assert sorted(await ids(world, queue)) == sorted(["before", *(f"{number}" for number in range(5))])


@pytest.mark.parametrize("how", ["connection", "link"])
async def test_s13_what_breaks_under_many_is_opened_anew_and_all_are_sent(world: World, queue: str, how: str) -> None:
    pauses = {"retry_mode": "fixed", "retry_backoff_factor": 0.3, "retry_total": 50}
    pair = await world.pair(keywords=pauses, try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="before"))
    world.primary.faults.set("drop-ack", entity=queue, points=["send"], count=20)
    many = [sent(sender, f"many-{number}") for number in range(20)]
    await world.struck(world.primary)
    if how == "connection":
        await asyncio.to_thread(world.primary.kill)
        await asyncio.to_thread(world.primary.start)
    else:
        world.primary.faults.set("detach", entity=queue, points=["send"], count=1)
        many.append(sent(sender, "many-20"))
    async with asyncio.timeout(2 * AT_ONCE):
        await asyncio.gather(*many)
    assert {f"many-{number}" for number in range(len(many))} <= set(await ids(world, queue))
    assert state_of(pair, queue) == "healthy"


async def test_s13_the_first_sends_of_many_tasks_open_one_link_and_giving_up_on_it_stops_nobody(
    world: World, queue: str
) -> None:
    pair = await world.pair(keywords={"retry_total": 0}, try_timeout=LONG, failover_interval=LONG)
    sender = await world.sender(pair, queue)
    world.primary.faults.set("delay", entity=queue, points=["attach"], delay=1.5)
    hasty, cancelled = sent(sender, "hasty", timeout=0.3), sent(sender, "cancelled")
    others = [sent(sender, f"other-{number}") for number in range(8)]
    await hits(world.primary, 1)
    cancelled.cancel()
    with pytest.raises(OperationTimeoutError):
        await hasty
    async with asyncio.timeout(AT_ONCE):
        await asyncio.gather(*others)
    assert world.primary.faults.list()[-1]["hits"] == 1
    assert sorted(await ids(world, queue)) == [f"other-{number}" for number in range(8)]
    assert state_of(pair, queue) == "healthy"


@pytest.mark.thorough
async def test_s13_each_task_that_waits_for_a_link_gets_an_error_of_its_own(world: World) -> None:
    sender = await world.sender(await world.pair(failover_interval=LONG), "no-such-queue")
    first, second = await asyncio.gather(sent(sender, "1"), sent(sender, "2"), return_exceptions=True)
    assert isinstance(first, ServiceBusError)
    assert (type(first), str(first)) == (type(second), str(second))
    assert first is not second


async def test_s13_a_sender_is_shared_by_tasks_and_every_message_reported_safe_is_there(
    world: World, queue: str
) -> None:
    pair = await world.pair(backlog_queue_count=1, try_timeout=BRIEF)
    sender = await world.sender(pair, queue)
    safe: list[str] = []

    async def work(number: int) -> None:
        for position in range(20):
            name = f"{number}-{position}"
            await world.send(sender, ServiceBusMessage("x", message_id=name))
            safe.append(name)
            if name == "0-10":
                await asyncio.to_thread(world.primary.faults.set, "black-hole", entity=queue)

    async with asyncio.timeout(4 * AT_ONCE):
        await asyncio.gather(*(work(number) for number in range(8)))
    world.primary.faults.clear()
    assert len(safe) == 160
    assert set(safe) <= {one.message_id for one in (*await world.held(queue), *await world.backlog(pair))}
    assert await world.backlog(pair) != []


async def test_s13_closing_a_sender_ends_a_call_that_nobody_answers_and_fails_nothing_over(
    world: World, queue: str
) -> None:
    pair = await world.pair(try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before"))
    unanswered = await held_back(world, queue, sender, 3)
    await world.do(sender.close)
    async with asyncio.timeout(AT_ONCE):
        for task in unanswered:
            with pytest.raises(ValueError, match="shutdown"):
                await task
    assert state_of(pair, queue) == "healthy"
    assert await world.backlog(pair) == []


async def test_s12_a_loop_that_was_blocked_past_the_deadline_reads_its_answers_first(world: World, queue: str) -> None:
    pair, sender = await opened(world, queue, try_timeout=timedelta(seconds=1))
    many = [sent(sender, f"many-{number}") for number in range(5)]
    await asyncio.sleep(0)
    time.sleep(1.5)  # noqa: ASYNC251 - as a caller does who blocks its loop, or a process that is frozen
    async with asyncio.timeout(AT_ONCE):
        await asyncio.gather(*many)
    assert state_of(pair, queue) == "healthy"
    assert await ids(world, queue) == ["before", *(f"many-{number}" for number in range(5))]
    assert await world.backlog(pair) == []


async def test_s13_a_cancelled_send_takes_nothing_from_those_that_wait_for_its_backlog_link(
    world: World, queue: str
) -> None:
    pair = await world.pair(backlog_queue_count=1, try_timeout=LONG, keywords={"retry_total": 0})
    first, second = await world.sender(pair, queue), await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    await world.send(first, ServiceBusMessage("x", message_id="before"))
    (only,) = pair.backlog_queues
    world.secondary.faults.set("black-hole", entity=only, points=["send"], count=1)
    stuck = sent(first, "stuck")
    await world.struck(world.secondary)
    waiting = sent(second, "waiting")
    await asyncio.sleep(0)
    stuck.cancel()
    async with asyncio.timeout(AT_ONCE):
        await waiting
    assert pair.backlog_queues == (only,)
    assert {"before", "waiting"} <= {one.message_id for one in await world.backlog(pair)}
