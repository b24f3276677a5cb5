"""A primary reached over a WebSocket, where the sends of a sender take turns (S13)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any
from urllib.request import urlopen

import pytest
from azure.servicebus import ServiceBusMessage, TransportType
from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus import SendAvailabilityOptions, aio
from twinbus.testing import LocalNamespace

from .conftest import World, state_of

LONG = timedelta(minutes=1)
AT_ONCE = 10.0


def websockets(namespace: LocalNamespace) -> int:
    """Return how many connections to the namespace are WebSockets, by its metrics."""
    with urlopen(f"http://localhost:{namespace.port}/metrics", timeout=AT_ONCE) as answer:
        lines = answer.read().decode().splitlines()
    found = [line.split()[-1] for line in lines if 'protocol="amqp+websocket"' in line]
    return int(float(found[0])) if found else 0


@pytest.fixture
async def paired(primary: LocalNamespace, secondary: LocalNamespace) -> AsyncIterator[tuple[World, Any]]:
    world = World("aio", primary, secondary)
    async with AsyncExitStack() as stack:
        over: dict[str, Any] = {"transport_type": TransportType.AmqpOverWebsocket, "retry_total": 0}
        over["custom_endpoint_address"] = f"sb://localhost:{primary.port}"
        clients = [
            await stack.enter_async_context(ServiceBusClient.from_connection_string(text, **keywords))
            for text, keywords in ((primary.connection_string, over), (secondary.connection_string, {}))
        ]
        options = SendAvailabilityOptions(
            backlog_queue_count=1, primary_name="websocket", try_timeout=LONG, failover_interval=LONG
        )
        pair = await stack.enter_async_context(aio.pair_namespaces(clients[0], clients[1], options=options))
        yield world, pair


async def test_s13_sends_of_tasks_that_share_a_sender_over_a_websocket_are_each_sent_once(
    paired: tuple[World, Any], queue: str
) -> None:
    world, pair = paired
    sender = pair.get_queue_sender(queue)
    world.primary.faults.set("delay", entity=queue, points=["send"], delay=0.01)
    async with asyncio.timeout(2 * AT_ONCE):
        await asyncio.gather(
            *(sender.send_messages(ServiceBusMessage("x", message_id=f"{number}")) for number in range(20))
        )
    assert sorted(str(one.message_id) for one in await world.held(queue)) == sorted(f"{number}" for number in range(20))
    assert websockets(world.primary) == 1
    await pair.close()
    await world.until(lambda: websockets(world.primary) == 0)


async def test_s2_s12_s13_a_send_over_a_websocket_ends_in_time_and_who_waited_behind_it_is_sent(
    paired: tuple[World, Any], queue: str
) -> None:
    world, pair = paired
    sender = pair.get_queue_sender(queue)
    await sender.send_messages(ServiceBusMessage("x", message_id="before"))
    world.primary.faults.set("black-hole", entity=queue, points=["send"], count=1)
    unanswered = asyncio.create_task(sender.send_messages(ServiceBusMessage("x"), timeout=1.0))
    await world.struck(world.primary)
    behind = asyncio.create_task(sender.send_messages(ServiceBusMessage("x", message_id="behind")))
    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(OperationTimeoutError):
            await unanswered
        await behind
    assert {"before", "behind"} <= {one.message_id for one in await world.held(queue)}
    assert state_of(pair, queue) == "healthy"
    await world.until(lambda: websockets(world.primary) == 1)
