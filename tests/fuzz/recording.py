"""Records what real clients send to a namespace, with a proxy on the same port of another loopback address."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusMessage, ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusClient

from twinbus.connect import NEXT_AVAILABLE, RECEIVE_AND_DELETE, connect
from twinbus.message import Message
from twinbus.namespace import NamespaceServer

QUEUE, SESSIONS, TOPIC, SUBSCRIPTION = "mangled", "mangled-sessions", "mangled-topic", "mangled-subscription"
_PROXY = "127.0.0.2"  # a token is for a host and a port: the port has to be the namespace's own
_SECONDS = 20.0
_BRIEFLY = 5.0

Recording = list[bytes]
"""One connection: protocol headers and frames, one by one, as the client sent them."""


async def recordings(server: NamespaceServer, *, with_sdk: bool) -> list[Recording]:
    """Return recordings of everything that clients can do, and first bytes of other protocols. Takes some seconds."""
    recorded: list[bytearray] = []
    async with _proxy(server, recorded):
        string = server.connection_string.replace("localhost", _PROXY)
        await _as_connect_does(string)
        if with_sdk:
            await _as_the_sdk_does(string)
    return [_frames(bytes(stream)) for stream in recorded] + [[_client_hello()], [_http(server)]]


@asynccontextmanager
async def _proxy(server: NamespaceServer, recorded: list[bytearray]) -> AsyncIterator[None]:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray | None) -> None:
        while data := await reader.read(65536):
            if record is not None:
                record += data
            writer.write(data)
        writer.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        record = bytearray()
        recorded.append(record)
        try:
            await asyncio.gather(pump(reader, inner_writer, record), pump(inner_reader, writer, None))
        except ConnectionError:
            writer.close()
            inner_writer.close()

    proxy = await asyncio.start_server(accepted, _PROXY, server.port)
    try:
        yield
    finally:
        proxy.close()


async def _as_connect_does(string: str) -> None:
    async with connect(string, timeout=_SECONDS) as bus:
        sender, receiver = await bus.sender(QUEUE), await bus.receiver(QUEUE, prefetch=5)
        await sender.send([Message("one")])
        await sender.send([Message(str(number), application_properties={"n": number}) for number in range(10)])
        first, second, third, *rest = await receiver.receive(4, _SECONDS)
        await receiver.abandon([first])
        await receiver.defer([second])
        await receiver.dead_letter([third], reason="why", description="because")
        await receiver.complete(rest)
        await receiver.complete(await receiver.receive_deferred([second.sequence_number or 0]))
        await receiver.peek()
        await bus.management(QUEUE).delete_batch(5)
    async with connect(string, timeout=_SECONDS) as bus:
        sessions = await bus.sender(SESSIONS)
        await sessions.send([Message("s", session_id="a")])
        held = await bus.receiver(SESSIONS, session=NEXT_AVAILABLE)
        await held.set_session_state(b"state")
        await held.renew_session_lock()
        await held.complete(await held.receive(1, _SECONDS))
        await bus.management(SESSIONS).list_sessions()
    async with connect(string, timeout=_SECONDS) as bus:
        await (await bus.sender(TOPIC)).send([Message(b"x" * 5000)])
        subscriber = await bus.receiver(TOPIC, subscription=SUBSCRIPTION, mode=RECEIVE_AND_DELETE)
        await subscriber.receive(1, _SECONDS)


async def _as_the_sdk_does(string: str) -> None:
    async with ServiceBusClient.from_connection_string(string) as client:
        sender = client.get_queue_sender(QUEUE)
        await sender.send_messages([ServiceBusMessage(f"sdk-{number}", message_id=str(number)) for number in range(5)])
        numbers = await sender.schedule_messages(ServiceBusMessage("later"), datetime.now(UTC) + timedelta(hours=1))
        await sender.cancel_scheduled_messages(numbers)
        receiver = client.get_queue_receiver(QUEUE, max_wait_time=_BRIEFLY, prefetch_count=2)
        for count, message in enumerate(await receiver.receive_messages(4, max_wait_time=_BRIEFLY)):
            await receiver.renew_message_lock(message)
            if count == 0:
                await receiver.abandon_message(message)
            elif count == 1:
                await receiver.dead_letter_message(message, reason="why")
            else:
                await receiver.complete_message(message)
        await receiver.peek_messages(5)
        await receiver.close()
        dead = client.get_queue_receiver(QUEUE, sub_queue=ServiceBusSubQueue.DEAD_LETTER, max_wait_time=_BRIEFLY)
        await dead.receive_messages(1, max_wait_time=_BRIEFLY)
        await dead.close()
        sessions = client.get_queue_sender(SESSIONS)
        await sessions.send_messages(ServiceBusMessage("s", session_id="sdk"))
        held = client.get_queue_receiver(SESSIONS, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=_BRIEFLY)
        await held.receive_messages(1, max_wait_time=_BRIEFLY)
        await held.session.get_state()
        await held.close()
        await sender.close()
        await sessions.close()


def _frames(stream: bytes) -> Recording:
    found, pos = [], 0
    while pos < len(stream):
        header = stream.startswith(b"AMQP", pos)
        size = 8 if header else max(8, int.from_bytes(stream[pos : pos + 4], "big"))
        found.append(stream[pos : pos + size])
        pos += size
    return found


def _client_hello() -> bytes:
    context = ssl.create_default_context()
    outgoing = ssl.MemoryBIO()
    layer = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    try:
        layer.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake wants an answer")


def _http(server: NamespaceServer) -> bytes:
    return f"GET /$health HTTP/1.1\r\nHost: localhost:{server.port}\r\n\r\n".encode()
