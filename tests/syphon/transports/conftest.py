"""Both transports on real servers, each test with a backlog queue and a destination of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import pytest
from azure.servicebus.aio import ServiceBusClient

from twinbus.amqp import Properties, build_message
from twinbus.backlog import PATH_PROPERTY
from twinbus.connect import ReceivedMessage, ServiceBusConnection, connect
from twinbus.syphon.native_transport import NativeTransport
from twinbus.syphon.sdk_transport import SdkTransport
from twinbus.syphon.transport import (
    Backlog,
    HeldMessage,
    OutgoingMessage,
    Transport,
)
from twinbus.testing import LocalNamespaces

ENOUGH = 60
SOON = 10.0
TRY = 2.0
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    queues = [{"name": f"{kind}-{number}"} for kind in ("backlog", "orders") for number in range(ENOUGH)]
    topics = [{"name": f"topic-{number}", "subscriptions": [{"name": "all"}]} for number in range(4)]
    closed = {"name": "closed", "status": "SendDisabled"}
    primary = {"name": "primary", "queues": [*queues, closed], "topics": topics}
    config = {"namespaces": [primary, {"name": "secondary", "queues": queues}]}
    with LocalNamespaces("primary", "secondary", memory=True, config=config) as found:
        yield found
        assert "Traceback" not in found.log.read_text()


class World:
    """A transport with a backlog queue and a destination of its own, and connections that look at both sides."""

    def __init__(self, transport: Transport, primary: ServiceBusConnection, secondary: ServiceBusConnection) -> None:
        number = next(NUMBERS) % ENOUGH
        self.queue, self.path = f"backlog-{number}", f"orders-{number}"
        self.transport = transport
        self.primary = primary
        self.secondary = secondary
        self.backlog: Backlog = transport.backlog(self.queue)

    async def divert(self, *ids: str, **given: Any) -> None:
        """Send messages with these ids to the backlog queue."""
        properties = {PATH_PROPERTY: self.path, **given.pop("application_properties", {})}
        raws = [
            build_message(
                **{"data": b"body", **given},
                properties=Properties(message_id=one),
                application_properties={name: value for name, value in properties.items() if value is not None},
            )
            for one in ids
        ]
        async with await self.secondary.sender(self.queue) as sender:
            await sender.send(raws)

    async def receive(self, count: int) -> list[HeldMessage]:
        found: list[HeldMessage] = []
        async with asyncio.timeout(SOON):
            while len(found) < count:
                found += await self.backlog.receive(count - len(found), SOON)
        return found

    def restore(self, held: Sequence[HeldMessage]) -> list[OutgoingMessage]:
        return [self.transport.restore(one, "restart", datetime.now(UTC)) for one in held]

    async def arrived(self, path: str | None = None, count: int = 500) -> list[ReceivedMessage]:
        return await self.primary.management(path or self.path).peek(0, count)

    async def left(self) -> list[Any]:
        return [one.message_id for one in await self.backlog.peek(0, 100)]

    async def stolen(self, held: HeldMessage) -> None:
        """Another receiver settles the message, as after a lock that expired."""
        token = held.message.lock_token  # type: ignore[attr-defined] # of either transport
        await self.secondary.management(self.queue).settle([token], "completed", {})


@pytest.fixture(params=["native", "sdk"])
async def world(request: pytest.FixtureRequest, namespaces: LocalNamespaces) -> AsyncIterator[World]:
    primary, secondary = (namespaces[name].connection_string for name in ("primary", "secondary"))
    async with AsyncExitStack() as stack:
        made: Transport
        if request.param == "native":
            made = NativeTransport(primary, secondary, try_timeout=TRY)
        else:
            clients = [
                await stack.enter_async_context(ServiceBusClient.from_connection_string(text, retry_total=0))
                for text in (primary, secondary)
            ]
            made = SdkTransport(*clients, try_timeout=TRY)
        stack.push_async_callback(made.close)
        buses = [await stack.enter_async_context(connect(text, timeout=10)) for text in (primary, secondary)]
        yield World(made, *buses)
        for name in ("primary", "secondary"):
            namespaces[name].faults.clear()


def ids_of(messages: Sequence[Any]) -> set[Any]:
    return {one.message_id for one in messages}
