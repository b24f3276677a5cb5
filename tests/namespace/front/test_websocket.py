"""AMQP in a WebSocket, on the namespace's port: handshake, limits before a token (X1), origins (X3), faults (N4)."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.websocket_frames import fragments, frame, handshake, message, ping, text
from tests.namespace.front.amqp_peer import SECONDS, accepted_connections
from tests.namespace.front.test_limits import OPENED, end_of, metrics, serving, until
from twinbus.amqp.frames import HEARTBEAT
from twinbus.connect import (
    NetworkOptions,
    ReceivedMessage,
    ServiceBusCommunicationError,
    ServiceBusError,
    ServiceBusHandshakeError,
    TransportType,
    connect,
    make_sas_token,
)
from twinbus.message import Message
from twinbus.namespace.front import accepted_connection
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, DEFAULT_KEY_NAME
from twinbus.namespace.server import NamespaceServer

WEBSOCKET = NetworkOptions(transport_type=TransportType.AmqpOverWebsocket)
ACCEPTED = b"HTTP/1.1 101 "


def closed_with(code: int) -> bytes:
    """The begin of the server's close frame, behind its two bytes of framing."""
    return code.to_bytes(2)


# --- the handshake ---------------------------------------------------------------------------------------------------


async def test_n1_a_websocket_is_accepted_with_the_subprotocol_and_without_extensions(server: NamespaceServer) -> None:
    asked = handshake("Sec-WebSocket-Extensions: permessage-deflate")
    said = await end_of(server, asked, frame(8, b"\x03\xe8"))
    head, _, rest = said.partition(b"\r\n\r\n")
    assert head.startswith(ACCEPTED)
    assert b"sec-websocket-protocol: amqpwsb10" in head.lower()
    assert b"extensions" not in head.lower()
    assert rest == b"\x88\x02\x03\xe8"


@pytest.mark.parametrize(
    ("old", "new", "status", "told"),
    [
        (b"AMQPWSB10", b"mqtt", 400, b"AMQPWSB10"),
        (b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Version: 8", 426, b"Sec-WebSocket-Version: 13"),
        (b"Sec-WebSocket-Key", b"X-Key", 400, b"Sec-WebSocket-Key"),
        (b"Connection: Upgrade\r\n", b"", 400, b"Connection: Upgrade"),
        (b"GET ", b"POST ", 400, b"GET in HTTP/1.1"),
        (b"HTTP/1.1", b"HTTP/1.0", 400, b"HTTP/1.1"),
        (b"Host: localhost", b"Host: evil.example", 421, b"evil.example"),
        (b"Host: localhost", b"Host: localhost\r\nOrigin: http://evil.example", 403, b"evil.example"),
        (b"Host: localhost", b"Host: localhost\r\nSec-Fetch-Site: cross-site", 403, b"another origin"),
    ],
    ids=["subprotocol", "version", "key", "connection", "method", "http", "x3 host", "x3 origin", "x3 fetch site"],
)
async def test_x3_a_handshake_that_is_not_allowed_is_refused_with_its_reason(
    server: NamespaceServer, old: bytes, new: bytes, status: int, told: bytes
) -> None:
    said = await end_of(server, handshake().replace(old, new))
    assert said.startswith(b"HTTP/1.1 %d " % status), said[:200]
    assert told in said
    assert ACCEPTED not in said


async def test_a_websocket_to_another_path_is_an_ordinary_request(server: NamespaceServer) -> None:
    said = await end_of(server, handshake("Connection: close").replace(b"/$servicebus/websocket", b"/orders"))
    assert said.startswith(b"HTTP/1.1 401 ")


async def test_a_client_learns_why_its_websocket_is_refused(tls_folder: Path) -> None:
    async with (
        serving(tls_folder, max_connections=1) as server,
        connect(server.connection_string, timeout=SECONDS) as first,
        connect(server.connection_string, network=WEBSOCKET, timeout=SECONDS) as other,
    ):
        await first.sender("orders")  # with its token, this connection is not closed to make room
        with pytest.raises(ServiceBusCommunicationError, match=r"503 .*takes 1 connections at a time"):
            await other.open()


async def test_x3_a_client_under_a_foreign_name_learns_that_name(server: NamespaceServer) -> None:
    reached = f"ip6-localhost.localdomain.:{server.port}"
    network = NetworkOptions(custom_endpoint_address=reached)
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def resolved(host: str | bytes | None, *args: Any, **options: Any) -> Any:
        return await resolve("127.0.0.1" if host == reached.partition(":")[0] else host, *args, **options)

    loop.getaddrinfo = resolved  # type: ignore[method-assign]  # as a hosts file does
    async with connect(server.connection_string, network=network, timeout=SECONDS) as bus:
        with pytest.raises(ServiceBusHandshakeError, match=r"421 .*ip6-localhost.localdomain"):
            await bus.open()


# --- limits before a token (X1) --------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize(
    ("limit", "raw", "code"),
    [
        ("websocket-bytes", ping(b"x" * 125) * 1_990 + message(OPENED + HEARTBEAT * 2_500), 1008),
        ("websocket-frames", ping() * 4_000, 1008),
        ("websocket-frames", message(b"") * 4_000, 1008),
        ("websocket-frames", fragments([b""] * 4_000), 1008),
        ("received-bytes", message(OPENED) + message(HEARTBEAT * 500) * 50, 1000),
        ("frame-size", message(OPENED + (100_000).to_bytes(4) + b"\2\0\0\0"), 1000),
        ("frame-size", fragments([OPENED[:5], OPENED[5:], (100_000).to_bytes(4), b"\2\0\0\0"]), 1000),
    ],
    ids=[
        "pings with payload",
        "pings",
        "empty messages",
        "a message of empty frames",
        "bytes",
        "a frame",
        "a frame in fragments",
    ],
)
async def test_x1_a_peer_in_a_websocket_without_a_token_meets_the_limits(
    server: NamespaceServer, trust: ssl.SSLContext, in_tls: bool, limit: str, raw: bytes, code: int
) -> None:
    said = await end_of(server, handshake(), raw, tls=trust if in_tls else None)
    assert said.startswith(ACCEPTED)
    assert closed_with(code) in said[-130:]
    assert f'twinbus_limit_exceeded_total{{limit="{limit}"}} 1.0' in await metrics(server)
    await until(lambda: not accepted_connections(server))
    assert server.resources.held == 0


async def test_x1_a_frame_that_announces_an_enormous_size_is_not_waited_for(server: NamespaceServer) -> None:
    announced = b"\x82\xff" + ((1 << 63) - 1).to_bytes(8) + b"\0\0\0\0" + OPENED + (100_000).to_bytes(4) + b"\2\0\0\0"
    said = await end_of(server, handshake(), announced)
    assert b"A frame has at most 65536 bytes" in said


@pytest.mark.parametrize("kind", ["a slow handshake", "silence after the handshake", "pings after the handshake"])
async def test_x1_a_peer_that_does_not_begin_amqp_is_closed_in_time(
    server: NamespaceServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(accepted_connection, "_FIRST_BYTES_SECONDS", 0.2)
    monkeypatch.setattr("twinbus.namespace.front.http_connection._REQUEST_SECONDS", 0.2)
    raw = handshake()
    sent = [raw[:100]] if kind == "a slow handshake" else [raw, ping() * 10] if "pings" in kind else [raw]
    said = await end_of(server, *sent)
    assert said.startswith(b"HTTP/1.1 408 " if kind == "a slow handshake" else ACCEPTED)
    await until(lambda: not accepted_connections(server))


async def test_x1_the_limits_rise_with_the_token(server: NamespaceServer) -> None:
    async with connect(server.connection_string, network=WEBSOCKET, timeout=SECONDS) as bus:
        sender, receiver = await bus.sender("orders"), await bus.receiver("orders")
        bodies = [bytes([number]) * 200_000 for number in range(20)]
        for body in bodies:
            await sender.send([Message(body)])
        found: list[ReceivedMessage] = []
        while len(found) < len(bodies):
            found += await receiver.receive(len(bodies) - len(found), SECONDS)
        assert [bytes(one.body) for one in found] == bodies
        await receiver.complete(found)
        assert 'protocol="amqp+websocket"} 1.0' in await metrics(server)


async def test_x1_a_request_with_a_token_before_the_websocket_leaves_the_limits_as_they_are(
    server: NamespaceServer,
) -> None:
    token = make_sas_token(f"sb://localhost:{server.port}/", DEFAULT_KEY_NAME, DEFAULT_KEY, 4_000_000_000)
    request = f"GET /$config HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    async with asyncio.timeout(SECONDS):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.write(handshake() + message(OPENED + (100_000).to_bytes(4) + b"\2\0\0\0"))
        said = await reader.read()
    writer.transport.abort()
    assert b"A frame has at most 65536 bytes until a token was accepted" in said


# --- violations and the end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (text(b"AMQP"), 1003),
        (frame(2, b"AMQP", mask=None), 1002),
        (frame(2, b"AMQP", rsv=4), 1002),
        (frame(0, b"AMQP"), 1002),
        (frame(9, b"x" * 126), 1002),
        (frame(5, b""), 1002),
        (frame(8, b"\xff\xff"), 1002),
    ],
    ids=["text", "no mask", "compressed", "continuation", "long ping", "opcode", "close code"],
)
async def test_x1_a_violation_of_the_protocol_closes_the_websocket_with_its_code(
    server: NamespaceServer, raw: bytes, code: int
) -> None:
    said = await end_of(server, handshake(), raw)
    assert said.startswith(ACCEPTED)
    assert closed_with(code) in said.partition(b"\r\n\r\n")[2][:4]


async def test_a_ping_is_answered_with_its_payload(server: NamespaceServer) -> None:
    said = await end_of(server, handshake(), ping(b"there?"), frame(8, b"\x03\xe8"))
    assert said.partition(b"\r\n\r\n")[2] == b"\x8a\x06there?" + b"\x88\x02\x03\xe8"


async def test_a_namespace_that_stops_closes_amqp_and_the_websocket(server: NamespaceServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(handshake() + message(OPENED))
    async with asyncio.timeout(SECONDS):
        await reader.readuntil(b"Twinbus")  # in the namespace's open
        await server.stop()
        said = await reader.read()
    writer.transport.abort()
    assert b"amqp:connection:forced" in said


# --- faults (N4) -----------------------------------------------------------------------------------------------------


async def test_n4_connections_over_websockets_are_refused_like_others(server: NamespaceServer) -> None:
    server.faults.set({"kind": "refuse"})
    assert await end_of(server, handshake()) == b""


async def test_n4_a_black_hole_holds_a_websocket_until_it_is_cleared(server: NamespaceServer) -> None:
    async with connect(server.connection_string, network=WEBSOCKET, timeout=SECONDS) as bus:
        sender = await bus.sender("orders")
        server.faults.set({"kind": "black-hole"})
        sending = asyncio.ensure_future(sender.send([Message(b"held")]))
        async with connect(server.connection_string, network=WEBSOCKET, timeout=SECONDS) as other:
            opening = asyncio.ensure_future(other.open())
            await until(lambda: len(accepted_connections(server)) == 2)
            for _ in range(100):
                await asyncio.sleep(0)
            assert not sending.done()
            assert not opening.done()
            server.faults.clear(None)
            await asyncio.wait_for(asyncio.gather(sending, opening), SECONDS)


async def test_x4_a_rotated_key_ends_the_links_of_a_websocket(server: NamespaceServer) -> None:
    async with connect(server.connection_string, network=WEBSOCKET, timeout=SECONDS) as bus:
        sender = await bus.sender("orders")
        await sender.send([Message(b"before")])
        server.replace_rules(tuple(rule for rule in server.options.rules if rule.name == "sends"))
        with pytest.raises(ServiceBusError, match="unauthorized-access"):
            await sender.send([Message(b"after")])
