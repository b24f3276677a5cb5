"""Protocol detection on one port: first bytes that come slowly, are garbage, or never come."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable

import pytest

from tests.namespace.front.amqp_peer import SECONDS, Peer
from twinbus.amqp.frames import AMQP_HEADER, SASL_HEADER
from twinbus.connect import connect, make_sas_token
from twinbus.message import Message
from twinbus.namespace.front import accepted_connection
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, DEFAULT_KEY_NAME
from twinbus.namespace.server import NamespaceServer

Dial = Callable[..., Awaitable[Peer]]
HEALTH = b"GET /$health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def talk(server: NamespaceServer, *pieces: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """Send pieces one by one, then read until the namespace closes."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=tls, server_hostname="localhost" if tls else None
    )
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return await asyncio.wait_for(reader.read(), SECONDS)
    finally:
        writer.transport.abort()


async def test_amqp_and_http_are_spoken_plain_and_in_tls(server: NamespaceServer, trust: ssl.SSLContext) -> None:
    for tls in (None, trust):
        async with connect(server.connection_string, tls=tls, timeout=SECONDS) as bus:
            await (await bus.sender("orders")).send([Message(b"x" * 200_000)])
            receiver = await bus.receiver("orders")
            (found,) = await receiver.receive(1, SECONDS)
            assert bytes(found.body) == b"x" * 200_000
            await receiver.complete([found])
        assert b'"status": "ok"' in await talk(server, HEALTH, tls=tls)


async def test_first_bytes_may_come_one_by_one(server: NamespaceServer) -> None:
    assert b"HTTP/1.1 200" in await talk(server, *(bytes([byte]) for byte in HEALTH))
    answer = await talk(server, *(bytes([byte]) for byte in AMQP_HEADER), b"\x00\x00\x00\x00\x02\x00\x00\x00")
    assert answer.startswith(AMQP_HEADER)


async def test_garbage_ends_in_an_answer_and_a_closed_connection(server: NamespaceServer) -> None:
    assert (await talk(server, b"\x00\x01\x02\x03\x04\r\n\r\n")).startswith(b"HTTP/1.1 400")
    assert await talk(server, b"AMQP\x09\x09\x09\x09") == SASL_HEADER, "what would have been right (2.2)"
    assert b"TLS" not in await talk(server, b"\x16\x03\x01\x00\x05garbage that is no handshake")


async def test_a_peer_that_sends_nothing_is_disconnected(
    server: NamespaceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted_connection, "_FIRST_BYTES_SECONDS", 0.05)
    assert await talk(server) == b""
    assert await talk(server, b"AM") == b""
    assert await talk(server, b"\x16") == b""


async def test_an_idle_amqp_peer_gets_heartbeats(dial: Dial) -> None:
    peer = await dial(idle_timeout=0.2)
    heard: list[bytes] = []
    take = peer.data_received
    peer.data_received = lambda data: (heard.append(data), take(data))  # type: ignore[assignment, func-returns-value]  # listens in
    await peer.until(lambda: heard.count(b"\x00\x00\x00\x08\x02\x00\x00\x00") >= 3)
    assert not peer.lost.done()


async def test_a_connection_cut_in_the_middle_of_a_frame_does_not_affect_others(
    server: NamespaceServer, peer: Peer
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(AMQP_HEADER + b"\x00\x00\x10\x00\x02\x00")
    await reader.readexactly(8)
    writer.transport.abort()
    await peer.echo()


async def test_http_answers_a_peer_that_closed_its_side(server: NamespaceServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(HEALTH)
    writer.write_eof()
    assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.read(), SECONDS)
    writer.close()


async def test_tls_ends_with_a_close_notify(server: NamespaceServer, trust: ssl.SSLContext) -> None:
    token = make_sas_token(f"sb://localhost:{server.port}/", DEFAULT_KEY_NAME, DEFAULT_KEY, 4_000_000_000)
    request = (
        f"GET /$faults HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\nConnection: close\r\n\r\n".encode()
    )
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    layer = trust.wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    plain, sent = b"", False
    while True:
        try:
            if not sent:
                layer.do_handshake()
                layer.write(request)
                sent = True
            chunk = layer.read(65536)
            if not chunk:
                break
            plain += chunk
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            data = await asyncio.wait_for(reader.read(65536), SECONDS)
            assert data, "the connection ended without TLS having ended"
            incoming.write(data)
    writer.close()
    assert b'{"faults": []}' in plain
