"""What only the asyncio driver has to see to, because tasks share what it holds: S2, S4, S5, S6, S8, S12, S13."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus import PairClosedError, PartialSendError
from twinbus.pairing.calls import NoTurnError
from twinbus.testing import LocalNamespace

from .conftest import World, state_of

# As in test_outages: much more than any time-out here, much less than the SDK takes by itself.
AT_ONCE = 8.0
LONG = timedelta(minutes=1)


@pytest.fixture
async def world(primary: LocalNamespace, secondary: LocalNamespace) -> AsyncIterator[World]:
    made = World("aio", primary, secondary)
    async with made.stack:
        yield made


async def struck(namespace: LocalNamespace) -> None:
    """Until a fault with a count is used up."""
    async with asyncio.timeout(AT_ONCE):
        while await asyncio.to_thread(namespace.faults.list):  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.02)


def sent(sender: Any, name: str, **keywords: Any) -> asyncio.Task[None]:
    return asyncio.create_task(sender.send_messages(ServiceBusMessage("x", message_id=name), **keywords))


async def ids(world: World, queue: str) -> list[Any]:
    return [one.message_id for one in await world.held(queue)]


# --- a sender shared by tasks ----------------------------------------------------------------------------------------


async def test_s13_a_cancelled_send_takes_nothing_from_the_tasks_that_share_its_sender(
    world: World, queue: str
) -> None:
    pair = await world.pair(keywords={"retry_total": 0}, try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="before"))
    world.primary.faults.set("delay", entity=queue, points=["send"], delay=0.5, count=1)
    slow = sent(sender, "slow")
    await struck(world.primary)
    others = [sent(sender, f"other-{number}") for number in range(4)]
    await asyncio.sleep(0)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    async with asyncio.timeout(AT_ONCE):
        await asyncio.gather(*others)
    assert state_of(pair, queue) == "healthy"
    assert {"before", *(f"other-{number}" for number in range(4))} <= set(await ids(world, queue))
    assert await world.backlog(pair) == []


async def test_s13_a_send_that_gives_up_early_takes_nothing_from_the_tasks_that_share_its_sender(
    world: World, queue: str
) -> None:
    pair = await world.pair(keywords={"retry_total": 0}, try_timeout=LONG, failover_interval=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="before"))
    world.primary.faults.set("black-hole", entity=queue, points=["send"], count=1)
    hasty = sent(sender, "hasty", timeout=0.5)
    await struck(world.primary)
    others = [sent(sender, f"other-{number}") for number in range(4)]
    with pytest.raises(OperationTimeoutError):
        await hasty
    async with asyncio.timeout(AT_ONCE):
        await asyncio.gather(*others)
    # Their successes are the last word on the primary.
    assert state_of(pair, queue) == "healthy"
    assert {"before", *(f"other-{number}" for number in range(4))} <= set(await ids(world, queue))


async def test_s2_waiting_for_a_turn_on_a_shared_sender_is_no_failure_of_the_primary(world: World, queue: str) -> None:
    pair = await world.pair(try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="before"))
    world.primary.faults.set("delay", entity=queue, points=["send"], delay=2.0, count=1)
    slow = sent(sender, "slow")
    await struck(world.primary)
    with pytest.raises(NoTurnError, match=queue):
        await world.send(sender, ServiceBusMessage("no turn"), timeout=0.2)
    await slow
    assert state_of(pair, queue) == "healthy"
    assert await world.backlog(pair) == []
    assert await ids(world, queue) == ["before", "slow"]


async def test_s2_an_attempt_that_waiting_for_its_turn_cut_short_is_no_failure_of_the_primary(
    world: World, queue: str
) -> None:
    pair = await world.pair(try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before"))
    # Both are answered, one after the other, each later than the second caller's time can end.
    world.primary.faults.set("delay", entity=queue, points=["send"], delay=1.5, count=2)
    slow = sent(sender, "slow")
    async with asyncio.timeout(AT_ONCE):
        while (await asyncio.to_thread(world.primary.faults.list))[0]["hits"] < 1:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    with pytest.raises(NoTurnError):
        await world.send(sender, ServiceBusMessage("too late"), timeout=2.0)
    await slow
    assert state_of(pair, queue) == "healthy"
    assert await world.backlog(pair) == []


async def test_s13_a_sender_is_shared_by_tasks_and_every_message_reported_safe_is_there(
    world: World, queue: str
) -> None:
    pair = await world.pair(backlog_queue_count=1)
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
    world.primary.faults.set("black-hole", entity=queue, points=["send"], count=1)
    unanswered, waiting = sent(sender, "unanswered"), sent(sender, "waiting")
    await struck(world.primary)
    await world.do(sender.close)
    async with asyncio.timeout(AT_ONCE):
        for task in (unanswered, waiting):
            with pytest.raises(ValueError, match="shutdown"):
                await task
    assert state_of(pair, queue) == "healthy"
    assert await world.backlog(pair) == []


# --- failing over meanwhile ------------------------------------------------------------------------------------------


async def test_s5_a_call_whose_entity_fails_over_in_its_retry_pause_diverts_at_once(world: World, queue: str) -> None:
    pauses = {"retry_mode": "fixed", "retry_backoff_factor": 50, "retry_total": 3}
    pair = await world.pair(keywords=pauses, try_timeout=timedelta(minutes=2), failover_interval=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="before"))
    world.primary.faults.set("internal-error", entity=queue, points=["send"], count=1)
    pausing = sent(sender, "pausing")
    await struck(world.primary)
    await world.do(pair.force_failover, queue)
    async with asyncio.timeout(AT_ONCE):
        await pausing
    assert [one.message_id for one in await world.backlog(pair)] == ["pausing"]
    assert await ids(world, queue) == ["before"]


async def test_s5_a_call_that_waited_for_its_turn_diverts_when_the_one_before_it_failed_over(
    world: World, queue: str
) -> None:
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="before"))
    world.primary.faults.set("black-hole", entity=queue, points=["send"], count=1)
    first = sent(sender, "first")
    await struck(world.primary)
    # The primary would take it: it is not asked.
    await asyncio.gather(first, sent(sender, "second"))
    assert {one.message_id for one in await world.backlog(pair)} == {"first", "second"}
    assert "second" not in await ids(world, queue)


async def test_s3_a_try_that_fails_is_followed_by_the_others_that_the_client_was_made_with(
    world: World, queue: str
) -> None:
    pauses = {"retry_mode": "fixed", "retry_backoff_factor": 0.05, "retry_total": 2}
    pair = await world.pair(keywords=pauses, try_timeout=LONG)
    sender = await world.sender(pair, queue)
    world.primary.faults.set("internal-error", entity=queue, points=["send"], count=2)
    await world.send(sender, ServiceBusMessage("x", message_id="at the third"))
    assert await ids(world, queue) == ["at the third"]
    assert state_of(pair, queue) == "healthy"
    world.primary.faults.set("internal-error", entity=queue, points=["send"], count=3)
    await world.send(sender, ServiceBusMessage("x", message_id="diverted"))
    assert state_of(pair, queue) == "failed_over"


# --- the caller's time-out -------------------------------------------------------------------------------------------


async def test_s6_waiting_for_a_turn_on_a_backlog_link_ends_with_the_callers_time_and_evicts_no_queue(
    world: World, queue: str
) -> None:
    pair = await world.pair(backlog_queue_count=1, try_timeout=LONG)
    first, second = await world.sender(pair, queue), await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    await world.send(first, ServiceBusMessage("before"))
    (only,) = pair.backlog_queues
    world.secondary.faults.set("black-hole", entity=only, points=["send"], count=1)
    stuck = sent(first, "stuck")
    await struck(world.secondary)
    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(NoTurnError, match=only):
            await world.send(second, ServiceBusMessage("no turn"), timeout=0.3)
    assert pair.backlog_queues == (only,)
    await world.do(pair.close)
    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(PairClosedError):
            await stuck


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
    await struck(world.secondary)
    waiting = sent(second, "waiting")
    await asyncio.sleep(0)
    stuck.cancel()
    async with asyncio.timeout(AT_ONCE):
        await waiting
    assert pair.backlog_queues == (only,)
    assert {"before", "waiting"} <= {one.message_id for one in await world.backlog(pair)}


async def test_s4_a_call_with_a_time_out_of_its_own_keeps_time_for_the_backlog(world: World, queue: str) -> None:
    pair = await world.pair(try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before"))
    world.primary.faults.set("black-hole", entity=queue)
    async with asyncio.timeout(AT_ONCE):
        await world.send(sender, ServiceBusMessage("x", message_id="diverted"), timeout=4.0)
    assert [one.message_id for one in await world.backlog(pair)] == ["diverted"]


async def test_s6_the_callers_time_out_bounds_all_queues_tried(world: World, queue: str) -> None:
    pair = await world.pair(backlog_queue_count=4, probation=LONG)
    sender = await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    os.kill(world.secondary.pid, signal.SIGSTOP)
    with pytest.raises(OperationTimeoutError):
        await world.send(sender, ServiceBusMessage("kept"), timeout=1.5)
    # The first had a whole try_timeout; what was left says nothing about the second.
    assert len(pair.backlog_queues) == 3


async def test_s6_the_callers_time_out_bounds_all_parts_of_a_split_batch(world: World, queue: str) -> None:
    pair = await world.pair(backlog_queue_count=1, try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    await world.send(sender, ServiceBusMessage("before"))
    (only,) = pair.backlog_queues
    world.secondary.faults.set("delay", entity=only, points=["send"], delay=1.0)
    messages = [ServiceBusMessage(os.urandom(150_000), message_id=str(number)) for number in range(6)]
    with pytest.raises(PartialSendError) as raised:
        await world.send(sender, messages, timeout=3.5)
    assert raised.value.safe[0] == "0"
    assert raised.value.unsafe[-1] == "5"
    assert isinstance(raised.value.cause, OperationTimeoutError)
    assert pair.backlog_queues == (only,)
