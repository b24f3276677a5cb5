"""How long a call may take, and what it does when its time is over, with both drivers: S3, S4, S5, S6."""

import asyncio
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus import PairClosedError, PartialSendError
from twinbus.pairing.call_errors import NoTurnError

from .conftest import BRIEF, World, state_of

# As in test_outages: much longer than any timeout here, much shorter than the SDK's own timeouts.
AT_ONCE = 8.0
LONG = timedelta(minutes=1)


async def test_s3_a_try_that_fails_is_followed_by_the_others_that_the_client_was_made_with(
    world: World, queue: str
) -> None:
    pauses = {"retry_mode": "fixed", "retry_backoff_factor": 0.05, "retry_total": 2}
    pair = await world.pair(keywords=pauses, try_timeout=LONG)
    sender = await world.sender(pair, queue)
    world.primary.faults.set("internal-error", entity=queue, points=["send"], count=2)
    await world.send(sender, ServiceBusMessage("x", message_id="at the third"))
    assert [one.message_id for one in await world.held(queue)] == ["at the third"]
    assert state_of(pair, queue) == "healthy"
    world.primary.faults.set("internal-error", entity=queue, points=["send"], count=3)
    await world.send(sender, ServiceBusMessage("x", message_id="diverted"))
    assert state_of(pair, queue) == "failed_over"


async def test_s4_a_call_with_a_time_out_of_its_own_keeps_time_for_the_backlog(world: World, queue: str) -> None:
    pair = await world.pair(try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before"))
    world.primary.faults.set("black-hole", entity=queue)
    async with asyncio.timeout(AT_ONCE):
        await world.send(sender, ServiceBusMessage("x", message_id="diverted"), timeout=3.0)
    assert [one.message_id for one in await world.backlog(pair)] == ["diverted"]


async def failed_over_under(world: World, queue: str, fault: str) -> tuple[Any, asyncio.Task[None]]:
    """Return a pair whose entity fails over while a fault holds the send `under way`. Pauses between tries are long."""
    pauses = {"retry_mode": "fixed", "retry_backoff_factor": 50, "retry_total": 3}
    pair = await world.pair(keywords=pauses, try_timeout=timedelta(minutes=2), failover_interval=LONG)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="before"))
    world.primary.faults.set(fault, entity=queue, points=["send"], count=1)
    under_way = asyncio.create_task(world.send(sender, ServiceBusMessage("x", message_id="under way")))
    await world.struck(world.primary)
    await world.do(pair.force_failover, queue)
    return pair, under_way


async def test_s5_a_call_whose_entity_fails_over_in_its_retry_pause_diverts_at_once(world: World, queue: str) -> None:
    pair, pausing = await failed_over_under(world, queue, "internal-error")
    async with asyncio.timeout(AT_ONCE):
        await pausing
    assert [one.message_id for one in await world.backlog(pair)] == ["under way"]
    assert [one.message_id for one in await world.held(queue)] == ["before"]


async def test_s5_a_try_that_fails_only_after_the_failover_diverts_without_a_pause(world: World, queue: str) -> None:
    pair, unanswered = await failed_over_under(world, queue, "black-hole")
    os.kill(world.primary.pid, signal.SIGKILL)
    async with asyncio.timeout(AT_ONCE):
        await unanswered
    assert [one.message_id for one in await world.backlog(pair)] == ["under way"]


async def test_s6_waiting_for_a_turn_on_a_backlog_link_ends_with_the_callers_time_and_evicts_no_queue(
    world: World, queue: str
) -> None:
    pair = await world.pair(backlog_queue_count=1, try_timeout=LONG)
    first, second = await world.sender(pair, queue), await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    await world.send(first, ServiceBusMessage("before"))
    (only,) = pair.backlog_queues
    world.secondary.faults.set("black-hole", entity=only, points=["send"], count=1)
    stuck = asyncio.create_task(world.send(first, ServiceBusMessage("x", message_id="stuck")))
    await world.struck(world.secondary)
    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(NoTurnError, match=only):
            await world.send(second, ServiceBusMessage("no turn"), timeout=0.3)
    assert pair.backlog_queues == (only,)
    await world.do(pair.close)
    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(PairClosedError):
            await stuck


async def test_s6_the_callers_time_out_bounds_all_queues_tried(world: World, queue: str) -> None:
    pair = await world.pair(backlog_queue_count=4, probation=LONG, try_timeout=BRIEF)
    sender = await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    os.kill(world.secondary.pid, signal.SIGSTOP)
    with pytest.raises(OperationTimeoutError):
        await world.send(sender, ServiceBusMessage("kept"), timeout=1.9)
    # The first attempt had a whole try_timeout. The rest of the time was too short to show that the second queue fails.
    assert len(pair.backlog_queues) == 3


@pytest.mark.thorough
async def test_s6_a_silent_queue_leaves_though_a_blocked_event_loop_notices_it_late(world: World, queue: str) -> None:
    pair = await world.pair(backlog_queue_count=4, probation=LONG, try_timeout=BRIEF)
    sender = await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    os.kill(world.secondary.pid, signal.SIGSTOP)
    # The program blocks its loop from before the end of the first attempt until after the end of the call.
    asyncio.get_running_loop().call_later(0.8, time.sleep, 1.0)
    with pytest.raises(OperationTimeoutError):
        await world.send(sender, ServiceBusMessage("kept"), timeout=1.7)
    assert len(pair.backlog_queues) == 3


async def test_s6_the_callers_time_out_bounds_all_parts_of_a_split_batch(world: World, queue: str) -> None:
    pair = await world.pair(backlog_queue_count=1, try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    await world.send(sender, ServiceBusMessage("before"))
    (only,) = pair.backlog_queues
    world.secondary.faults.set("delay", entity=only, points=["send"], delay=0.5)
    messages = [ServiceBusMessage(os.urandom(150_000), message_id=str(number)) for number in range(6)]
    with pytest.raises(PartialSendError) as raised:
        await world.send(sender, messages, timeout=1.8)
    assert raised.value.safe[0] == "0"
    assert raised.value.unsafe[-1] == "5"
    assert isinstance(raised.value.cause, OperationTimeoutError)
    assert pair.backlog_queues == (only,)
