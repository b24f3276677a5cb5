"""A primary reached over a WebSocket, where the sends of a sender take turns (S13).

The local namespace has no WebSocket server: a bridge forwards the bytes, as a gateway does.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from azure.servicebus import ServiceBusMessage, TransportType
from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus import SendAvailabilityOptions, aio
from twinbus.testing import LocalNamespace

from .conftest import World, state_of

LONG = timedelta(minutes=1)
AT_ONCE = 10.0


class Bridge:
    """WebSockets on one side, the primary's port on the other."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.connections = 0

    async def pass_on(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=["AMQPWSB10"])
        await socket.prepare(request)
        reader, writer = await asyncio.open_connection("localhost", self._port)
        self.connections += 1
        answers = asyncio.create_task(self._answers(reader, socket))
        try:
            async for message in socket:
                assert message.type is WSMsgType.BINARY
                writer.write(message.data)
        finally:
            answers.cancel()
            writer.close()
            self.connections -= 1
        return socket

    @staticmethod
    async def _answers(reader: asyncio.StreamReader, socket: web.WebSocketResponse) -> None:
        while data := await reader.read(65_536):
            await socket.send_bytes(data)
        await socket.close()


@pytest.fixture
async def paired(primary: LocalNamespace, secondary: LocalNamespace) -> AsyncIterator[tuple[World, Bridge, Any]]:
    world, bridge = World("aio", primary, secondary), Bridge(primary.port)
    application = web.Application()
    application.router.add_get("/$servicebus/websocket", bridge.pass_on)
    async with AsyncExitStack() as stack:
        runner = web.AppRunner(application, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "localhost", 0)
        await site.start()
        port = runner.addresses[0][1]
        over: dict[str, Any] = {"transport_type": TransportType.AmqpOverWebsocket, "retry_total": 0}
        over["custom_endpoint_address"] = f"sb://localhost:{port}"
        clients = [
            await stack.enter_async_context(ServiceBusClient.from_connection_string(text, **keywords))
            for text, keywords in ((primary.connection_string, over), (secondary.connection_string, {}))
        ]
        options = SendAvailabilityOptions(
            backlog_queue_count=1, primary_name="websocket", try_timeout=LONG, failover_interval=LONG
        )
        pair = await stack.enter_async_context(aio.pair_namespaces(clients[0], clients[1], options=options))
        yield world, bridge, pair


async def test_s13_sends_of_tasks_that_share_a_sender_over_a_websocket_are_each_sent_once(
    paired: tuple[World, Bridge, Any], queue: str
) -> None:
    world, bridge, pair = paired
    sender = pair.get_queue_sender(queue)
    world.primary.faults.set("delay", entity=queue, points=["send"], delay=0.01)
    async with asyncio.timeout(2 * AT_ONCE):
        await asyncio.gather(
            *(sender.send_messages(ServiceBusMessage("x", message_id=f"{number}")) for number in range(20))
        )
    assert sorted(str(one.message_id) for one in await world.held(queue)) == sorted(f"{number}" for number in range(20))
    assert bridge.connections == 1
    await pair.close()
    await world.until(lambda: bridge.connections == 0)


async def test_s2_s12_s13_a_send_over_a_websocket_ends_in_time_and_who_waited_behind_it_is_sent(
    paired: tuple[World, Bridge, Any], queue: str
) -> None:
    world, bridge, pair = paired
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
    await world.until(lambda: bridge.connections == 1)
