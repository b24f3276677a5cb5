"""Pairs whose clients reach both namespaces through a CONNECT proxy: provisioning, diverting, and their own syphon."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, TransportType
from azure.servicebus.aio import ServiceBusClient as AioClient
from azure.servicebus.aio.management import ServiceBusAdministrationClient as AioAdministrationClient

import twinbus
from tests import tinyproxy
from twinbus import aio
from twinbus.connect import connect
from twinbus.testing import LocalNamespaces

SECONDS = 60.0
QUEUE = "orders"
EMULATOR = "UseDevelopmentEmulator=true;"
CONFIG = {
    "namespaces": [{"name": "primary", "queues": [{"name": QUEUE}]}, {"name": "secondary"}],
}


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    with LocalNamespaces("primary", "secondary", memory=True, config=CONFIG) as found:
        yield found


@pytest.mark.thorough
@pytest.mark.parametrize("driver", ["sync", "aio"])
async def test_y1_a_pair_through_a_proxy_diverts_and_its_syphon_brings_home(
    namespaces: LocalNamespaces, tmp_path: Path, driver: str
) -> None:
    name = f"through-{uuid.uuid4().hex[:8]}"
    # aiohttp sends a WebSocket without TLS through a proxy as a plain request. With TLS the SDK's client drops the port
    # of its namespace, and an administration client made from it would go to 443: so it gets another one.
    in_tls = driver == "aio"
    options = twinbus.SendAvailabilityOptions(
        backlog_queue_count=1,
        enable_syphon=True,
        primary_name=name,
        try_timeout=timedelta(seconds=20),
    )
    with tinyproxy.running(tmp_path, username="twin", password="sesame") as proxy:
        clients: list[Any] = []
        for side in ("primary", "secondary"):
            sdk_proxy = dict(proxy.for_sdk)
            if driver == "aio":
                sdk_proxy["proxy_hostname"] = "http://127.0.0.1"
            text = namespaces[side].connection_string
            clients.append(
                (ServiceBusClient if driver == "sync" else AioClient).from_connection_string(
                    text.replace(EMULATOR, "") if in_tls else text,
                    connection_verify=str(namespaces[side].ca),
                    transport_type=TransportType.AmqpOverWebsocket,
                    custom_endpoint_address=f"sb://localhost:{namespaces[side].port}",
                    http_proxy=sdk_proxy,
                )
            )
        async with asyncio.timeout(SECONDS), AsyncExitStack() as stack:
            for client in clients:
                if driver == "aio":
                    await stack.enter_async_context(client)
                else:
                    stack.callback(client.close)
            message = ServiceBusMessage("x", message_id=name)
            if driver == "aio":
                admin = AioAdministrationClient.from_connection_string(namespaces["secondary"].connection_string)
                await stack.enter_async_context(admin)
                made = aio.pair_namespaces(*clients, secondary_admin=admin, options=options)
                pair: Any = await stack.enter_async_context(made)
                pair.force_failover(QUEUE)
                await pair.get_queue_sender(QUEUE).send_messages(message)
                pair.force_restore(QUEUE)
            else:
                pair = await asyncio.to_thread(lambda: twinbus.pair_namespaces(*clients, options=options))
                stack.callback(pair.close)
                assert proxy.tunnels, "the administration client uses the proxy of the secondary's client"
                pair.force_failover(QUEUE)
                await asyncio.to_thread(pair.get_queue_sender(QUEUE).send_messages, message)
                pair.force_restore(QUEUE)
            bus = await stack.enter_async_context(connect(namespaces["primary"].connection_string))
            receiver = await bus.receiver(QUEUE)
            found = await receiver.receive(1, SECONDS)
            assert [one.message_id for one in found] == [name]
            await receiver.complete(found)
