"""Every Python client, unmodified, by every way to a namespace: AMQP, WebSocket, and through a CONNECT proxy.

All in TLS, with the CA that `twinbus serve` prints. The clients of one way run at the same time, each on its own queue.
"""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, TransportType
from azure.servicebus.aio import ServiceBusClient as AioClient
from azure.servicebus.management import ServiceBusAdministrationClient

from tests import tinyproxy
from twinbus import connect as native
from twinbus.message import Message
from twinbus.testing import LocalNamespace

SECONDS = 30.0
BODIES = [b"two coffees", b"", bytes(range(256)) * 900]
CREDENTIALS = {"username": "twin", "password": "sesame"}


class Way:
    """One way to the namespace, as options of each client. `proxy` is None, or runs with or without credentials."""

    def __init__(self, namespace: LocalNamespace, kind: str, proxy: tinyproxy.Tinyproxy | None) -> None:
        self.namespace = namespace
        self.proxy = proxy
        self.connection_string = namespace.connection_string.replace("UseDevelopmentEmulator=true;", "")
        self._kind = TransportType.Amqp if kind == "amqp" else TransportType.AmqpOverWebsocket

    def for_sdk(self, *, is_aio: bool = False) -> dict[str, Any]:
        options: dict[str, Any] = {
            "transport_type": self._kind,
            "custom_endpoint_address": f"sb://localhost:{self.namespace.port}",
            "connection_verify": str(self.namespace.ca),
            "retry_total": 0,
        }
        if self.proxy is not None:
            options["http_proxy"] = dict(self.proxy.for_sdk)
            if is_aio:  # aiohttp takes the address of a proxy as a URL
                options["http_proxy"]["proxy_hostname"] = "http://127.0.0.1"
        return options

    @property
    def for_admin(self) -> dict[str, Any]:
        if self.proxy is None:
            return {}
        user = "{username}:{password}@".format(**CREDENTIALS) if self.proxy.username else ""
        return {"proxies": {"https": f"http://{user}127.0.0.1:{self.proxy.port}"}}

    @property
    def for_native(self) -> native.NetworkOptions:
        return native.NetworkOptions(
            transport_type=native.TransportType[self._kind.name],
            http_proxy=native.HttpProxy.of(self.proxy.for_sdk) if self.proxy is not None else None,
            connection_verify=str(self.namespace.ca),
        )


@pytest.fixture(scope="module")
def namespace() -> Iterator[LocalNamespace]:
    with LocalNamespace(memory=True) as namespace:
        yield namespace


@pytest.fixture
def way(request: pytest.FixtureRequest, namespace: LocalNamespace, tmp_path: Path) -> Iterator[Way]:
    kind, _, proxied = request.param.partition(" through ")
    with ExitStack() as stack:
        proxy = None
        if proxied:
            credentials = CREDENTIALS if "credentials" in proxied else {}
            proxy = stack.enter_context(tinyproxy.running(tmp_path, **credentials))
        yield Way(namespace, kind, proxy)


def sync_sdk(way: Way, queue: str) -> list[bytes]:
    with ServiceBusClient.from_connection_string(way.connection_string, **way.for_sdk()) as client:
        with client.get_queue_sender(queue) as sender:
            sender.send_messages([ServiceBusMessage(body) for body in BODIES[:2]])
            sender.send_messages(ServiceBusMessage(BODIES[2]))
        with client.get_queue_receiver(queue) as receiver:
            found: list[bytes] = []
            while len(found) < len(BODIES):
                for message in receiver.receive_messages(len(BODIES), max_wait_time=SECONDS):
                    found.append(b"".join(message.body))
                    receiver.complete_message(message)
            assert receiver.peek_messages() == []
    return found


async def aio_sdk(way: Way, queue: str) -> list[bytes]:
    async with AioClient.from_connection_string(way.connection_string, **way.for_sdk(is_aio=True)) as client:
        async with client.get_queue_sender(queue) as sender:
            await sender.send_messages([ServiceBusMessage(body) for body in BODIES[:2]])
            await sender.send_messages(ServiceBusMessage(BODIES[2]))
        async with client.get_queue_receiver(queue) as receiver:
            found: list[bytes] = []
            while len(found) < len(BODIES):
                for message in await receiver.receive_messages(len(BODIES), max_wait_time=SECONDS):
                    found.append(b"".join(message.body))
                    await receiver.complete_message(message)
            assert await receiver.peek_messages() == []
    return found


async def our_client(way: Way, queue: str) -> list[bytes]:
    async with native.connect(way.connection_string, network=way.for_native, timeout=SECONDS) as bus:
        sender, receiver = await bus.sender(queue), await bus.receiver(queue)
        await sender.send([Message(body) for body in BODIES])
        found: list[native.ReceivedMessage] = []
        while len(found) < len(BODIES):
            found += await receiver.receive(len(BODIES) - len(found), SECONDS)
        await receiver.complete(found)
        assert await bus.management(queue).peek(0, 10) == []
        return [bytes(message.body) for message in found]


QUICK = "websocket through a proxy with credentials"
WAYS = ["amqp", "websocket", "websocket through a proxy"]


@pytest.mark.parametrize(
    "way", [QUICK, *(pytest.param(way, marks=pytest.mark.thorough) for way in WAYS)], indirect=True
)
async def test_n1_every_python_client_is_served_by_every_way(way: Way) -> None:
    admin = ServiceBusAdministrationClient.from_connection_string(
        way.connection_string, connection_verify=str(way.namespace.ca), use_env_settings=False, **way.for_admin
    )
    queues = [f"{kind}-{uuid.uuid4().hex}" for kind in ("sync", "aio", "ours")]
    with admin:
        for queue in queues:
            await asyncio.to_thread(admin.create_queue, queue)
    async with asyncio.timeout(SECONDS):
        found = await asyncio.gather(
            asyncio.to_thread(sync_sdk, way, queues[0]), aio_sdk(way, queues[1]), our_client(way, queues[2])
        )
    assert [sorted(bodies) for bodies in found] == [sorted(BODIES)] * 3
    if way.proxy is not None:
        # The administration, one connection of ours, and one for each sender, receiver and management of an SDK.
        assert way.proxy.tunnels >= 6
