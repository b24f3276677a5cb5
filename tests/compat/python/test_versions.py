"""What works for which version of azure-servicebus: the table in docs/guides/serve.md, with the installed version.

`make compat-versions` tries all versions. The SDK is unmodified here, also in environments of older versions. The
environments of versions have uamqp, which is the AMQP client of 7.8, and of later versions with `uamqp_transport=True`.
The project itself does not have it.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.sdk.installed import VERSION, is_since
from twinbus.testing import LocalNamespace

CALLS = """
import asyncio, os, sys
from datetime import datetime, timedelta, timezone
from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusClient, ServiceBusMessage, TransportType
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

        batch = sender.create_message_batch()
        batch.add_message(ServiceBusMessage("3"))
        sender.send_messages(batch)
        sender.schedule_messages(ServiceBusMessage("4"), datetime.now(timezone.utc) - timedelta(seconds=1))
        receiver.complete_message(again)
        found = []
        while len(found) < 2:
            found += receiver.receive_messages(2, max_wait_time=10)

def in_session(client):
    with client, client.get_queue_sender(queue + "-sessions") as sender:
        sender.send_messages(ServiceBusMessage("1", session_id="s"))
        with client.get_queue_receiver(queue + "-sessions", session_id=NEXT_AVAILABLE_SESSION) as receiver:
            [found] = receiver.receive_messages(1, max_wait_time=10)
            assert (receiver.session.session_id, found.session_id) == ("s", "s")
            receiver.complete_message(found)

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
        batch = await sender.create_message_batch()
        batch.add_message(ServiceBusMessage("3"))
        await sender.send_messages(batch)
        await sender.schedule_messages(ServiceBusMessage("4"), datetime.now(timezone.utc) - timedelta(seconds=1))
        await receiver.complete_message(again)
        found = []
        while len(found) < 2:
            found += await receiver.receive_messages(2, max_wait_time=10)

async def aio_managed(client, **request):
    async with client:
        await client.get_queue(queue, **request)
"""
UAMQP = "uamqp_transport=True, "
WEBSOCKET = "transport_type=TransportType.AmqpOverWebsocket, "
PROGRAMS = {
    "plain": "used(ServiceBusClient.from_connection_string(plain, retry_total=0))",
    "plain aio": "asyncio.run(aio_used(AioClient.from_connection_string(plain, retry_total=0)))",
    "TLS": "used(ServiceBusClient.from_connection_string(tls, **options))",
    "TLS aio": "asyncio.run(aio_used(AioClient.from_connection_string(tls, **options)))",
    "WebSocket": f"used(ServiceBusClient.from_connection_string(tls, {WEBSOCKET}**options))",
    "WebSocket aio": f"asyncio.run(aio_used(AioClient.from_connection_string(tls, {WEBSOCKET}**options)))",
    "session": "in_session(ServiceBusClient.from_connection_string(tls, **options))",
    "uamqp TLS": f"used(ServiceBusClient.from_connection_string(tls, {UAMQP}**options))",
    "uamqp TLS aio": f"asyncio.run(aio_used(AioClient.from_connection_string(tls, {UAMQP}**options)))",
    "uamqp WebSocket": f"used(ServiceBusClient.from_connection_string(tls, {UAMQP}{WEBSOCKET}**options))",
    "uamqp WebSocket aio": (
        f"asyncio.run(aio_used(AioClient.from_connection_string(tls, {UAMQP}{WEBSOCKET}**options)))"
    ),
    "uamqp session": f"in_session(ServiceBusClient.from_connection_string(tls, {UAMQP}**options))",
    "admin": "Admin.from_connection_string(plain, connection_verify=ca, retry_total=0).get_queue(queue)",
    "admin by call": "Admin.from_connection_string(plain, retry_total=0).get_queue(queue, connection_verify=ca)",
    "admin by variable": (
        "os.environ['REQUESTS_CA_BUNDLE'] = ca\nAdmin.from_connection_string(plain, retry_total=0).get_queue(queue)"
    ),
    "admin aio": (
        "asyncio.run(aio_managed(AioAdmin.from_connection_string(plain, connection_verify=ca, retry_total=0)))"
    ),
    "admin aio by call": (
        "asyncio.run(aio_managed(AioAdmin.from_connection_string(plain, retry_total=0), connection_verify=ca))"
    ),
}
SINCE = {
    "plain": "7.14",
    "plain aio": "7.14",
    "session": "7.11",
    "uamqp session": "7.15",
    "admin": "7.15",
    "admin aio": "7.15",
}
"""The first version that can do this; every version can do what is not here."""
HAS_UAMQP = importlib.util.find_spec("uamqp") is not None


def can(program: str) -> bool:
    # With uamqp, 7.14 fails before it sends a list or a batch.
    if program.startswith("uamqp") and (not HAS_UAMQP or VERSION == (7, 14)):
        return False
    return is_since(SINCE.get(program, "7.8"))


def queue_of(program: str) -> str:
    return program.replace(" ", "-")


@pytest.fixture(scope="module")
def namespace() -> Iterator[LocalNamespace]:
    queues: list[dict[str, object]] = [{"name": queue_of(name)} for name in PROGRAMS]
    queues += [{"name": f"{queue_of(name)}-sessions", "requires_session": True} for name in PROGRAMS]
    config = {"namespaces": [{"name": "primary", "queues": queues}]}
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
    assert outcomes == {name: can(name) for name in PROGRAMS}
