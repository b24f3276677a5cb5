"""What works for which version of azure-servicebus: the table in docs/guides/serve.md, with the installed version.

`make compat-versions` tries all versions. The SDK is unmodified here, also in environments of older versions.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.sdk.installed import is_since
from twinbus.testing import LocalNamespace

CALLS = """
import asyncio, sys
from azure.servicebus import ServiceBusClient, ServiceBusMessage, TransportType
from azure.servicebus.aio import ServiceBusClient as AioClient
from azure.servicebus.aio.management import ServiceBusAdministrationClient as AioAdmin
from azure.servicebus.management import ServiceBusAdministrationClient as Admin
plain, ca, port, queue = sys.argv[1:]
tls = plain.replace("UseDevelopmentEmulator=true;", "")
options = {"custom_endpoint_address": f"sb://localhost:{port}", "connection_verify": ca, "retry_total": 0}
messages = [ServiceBusMessage("1"), ServiceBusMessage("2", partition_key="p")]

def used(client):
    with client, client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue) as receiver:
        sender.send_messages(messages)
        found = []
        while len(found) < 2:
            found += receiver.receive_messages(2, max_wait_time=10)
        for message in found:
            receiver.complete_message(message)
        sender.send_messages(found[1])
        [again] = receiver.receive_messages(1, max_wait_time=10)
        assert again.partition_key == "p"

async def aio_used(client):
    async with client, client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue) as receiver:
        await sender.send_messages(messages)
        found = []
        while len(found) < 2:
            found += await receiver.receive_messages(2, max_wait_time=10)
        for message in found:
            await receiver.complete_message(message)
        await sender.send_messages(found[1])
        [again] = await receiver.receive_messages(1, max_wait_time=10)
        assert again.partition_key == "p"

async def aio_managed(client, **request):
    async with client:
        await client.get_queue(queue, **request)
"""
WEBSOCKET = "transport_type=TransportType.AmqpOverWebsocket, "
PROGRAMS = {
    "plain": "used(ServiceBusClient.from_connection_string(plain, retry_total=0))",
    "plain aio": "asyncio.run(aio_used(AioClient.from_connection_string(plain, retry_total=0)))",
    "TLS": "used(ServiceBusClient.from_connection_string(tls, **options))",
    "TLS aio": "asyncio.run(aio_used(AioClient.from_connection_string(tls, **options)))",
    "WebSocket": f"used(ServiceBusClient.from_connection_string(tls, {WEBSOCKET}**options))",
    "WebSocket aio": f"asyncio.run(aio_used(AioClient.from_connection_string(tls, {WEBSOCKET}**options)))",
    "admin": "Admin.from_connection_string(plain, connection_verify=ca, retry_total=0).get_queue(queue)",
    "admin by call": "Admin.from_connection_string(plain, retry_total=0).get_queue(queue, connection_verify=ca)",
    "admin aio": (
        "asyncio.run(aio_managed(AioAdmin.from_connection_string(plain, connection_verify=ca, retry_total=0)))"
    ),
    "admin aio by call": (
        "asyncio.run(aio_managed(AioAdmin.from_connection_string(plain, retry_total=0), connection_verify=ca))"
    ),
}
SINCE = {"plain": "7.14", "plain aio": "7.14", "admin": "7.15", "admin aio": "7.15"}
"""The first version that can do this; every version can do what is not here."""


def queue_of(program: str) -> str:
    return program.replace(" ", "-")


@pytest.fixture(scope="module")
def namespace() -> Iterator[LocalNamespace]:
    config = {"namespaces": [{"name": "primary", "queues": [{"name": queue_of(name)} for name in PROGRAMS]}]}
    with LocalNamespace("primary", memory=True, config=config) as found:
        yield found


@pytest.mark.thorough
async def test_n1_each_version_of_the_sdk_can_do_what_the_guide_says(namespace: LocalNamespace) -> None:
    places = asyncio.Semaphore(4)

    async def works(name: str) -> bool:
        arguments = (namespace.connection_string, str(namespace.ca), str(namespace.port), queue_of(name))
        async with places:
            program = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", CALLS + PROGRAMS[name], *arguments),
                env={**os.environ, "TWINBUS_UNMODIFIED_SDK": "yes"},
                stderr=subprocess.DEVNULL,
            )
            return await program.wait() == 0

    outcomes = dict(zip(PROGRAMS, await asyncio.gather(*map(works, PROGRAMS)), strict=True))
    assert outcomes == {name: is_since(SINCE.get(name, "7.11")) for name in PROGRAMS}
