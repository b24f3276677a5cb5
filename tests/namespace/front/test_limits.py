"""Limits before and after a token was accepted (X1), on a real port: the errors that peers get, and the memory held."""

import asyncio
import gc
import socket
import ssl
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.amqp.transaction_requests import coordinator
from tests.namespace.front.amqp_peer import SECONDS, Node, Peer, accepted_connections
from tests.namespace.front.transaction_peer import TransactionPeer
from twinbus.amqp import (
    KIB,
    MIB,
    RECEIVER,
    SENDER,
    Delivered,
    LinkAccepted,
    LinkDetached,
    Modified,
    Opened,
    Properties,
    Target,
    build_message,
    split_sections,
)
from twinbus.amqp.frames import AMQP_HEADER, FRAME_HEADER, performative_frame
from twinbus.amqp.performatives import Attach, Begin, Flow, Open, Transfer
from twinbus.connect import connect, make_sas_token
from twinbus.message import Message
from twinbus.namespace.engine import queries
from twinbus.namespace.engine.descriptions import QueueDescription
from twinbus.namespace.front import accepted_connection, request_response, transaction_coordinator
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, DEFAULT_KEY_NAME
from twinbus.namespace.resources import ResourceLimits, Resources
from twinbus.namespace.server import NamespaceOptions, NamespaceServer
from twinbus.values import Array, Condition, Int, Long

Dial = Callable[..., Awaitable[Peer]]
UNTIL = " until a token was accepted"
OPENED = AMQP_HEADER + performative_frame(0, Open("raw", "localhost"))
BEGUN = OPENED + performative_frame(0, Begin(next_outgoing_id=0, incoming_window=100, outgoing_window=100))


@asynccontextmanager
async def serving(tls: Path, queues: Sequence[str] = ("orders",), **limits: Any) -> AsyncIterator[NamespaceServer]:
    entities = tuple(QueueDescription(path=path) for path in queues)
    options = NamespaceOptions(name="primary", file=None, tls=tls, entities=entities)
    server = NamespaceServer(options, Resources(ResourceLimits(**limits)))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def end_of(server: NamespaceServer, *pieces: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """Send these pieces. Returns everything that the namespace sends until it ends the connection."""
    host = "localhost" if tls else None
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=tls, server_hostname=host)
    try:
        for piece in pieces:
            writer.write(piece)
        return await asyncio.wait_for(reader.read(), SECONDS)
    finally:
        writer.transport.abort()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - the namespace runs in this loop and has no event for it
            await asyncio.sleep(0)


async def metrics(server: NamespaceServer) -> str:
    return (await end_of(server, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")).decode()


def to_cbs(handle: int) -> bytes:
    return performative_frame(0, Attach(f"l{handle}", handle, SENDER, target=Target("$cbs"), initial_delivery_count=0))


def transfer(handle: int, payload: bytes, **fields: Any) -> bytes:
    head = performative_frame(0, Transfer(handle, handle, b"t", **fields))
    return FRAME_HEADER.pack(len(head) + len(payload), 2, 0, 0) + head[8:] + payload


# --- before a token was accepted -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "raw", "text"),
    [
        (
            "unfinished-bytes",
            BEGUN + to_cbs(0) + to_cbs(1) + b"".join(transfer(n, bytes(40_000), more=True) for n in range(2)),
            f"Unfinished deliveries of a connection hold at most 65536 bytes{UNTIL}.",
        ),
        ("frame-size", OPENED + (100_000).to_bytes(4) + b"\2\0\0\0", f"A frame has at most 65536 bytes{UNTIL}"),
        (
            "links",
            BEGUN + b"".join(map(to_cbs, range(17))),
            f"A connection has at most 16 links{UNTIL}. Detach some.",
        ),
        (
            "sessions",
            OPENED
            + b"".join(
                performative_frame(channel, Begin(next_outgoing_id=0, incoming_window=1, outgoing_window=1))
                for channel in range(9)
            ),
            f"A connection has at most 8 sessions{UNTIL}. End some.",
        ),
        (
            "received-bytes",
            OPENED + b"\x00\x00\x00\x08\x02\x00\x00\x00" * 20_000,
            f"A connection sends at most 131072 bytes{UNTIL}.",
        ),
        (
            "performative-bytes",
            AMQP_HEADER + performative_frame(0, Open("raw", "x" * 5000)),
            f"A frame without payload has at most 4096 bytes{UNTIL}",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
@pytest.mark.parametrize("in_tls", [False, True], ids=["plain", "tls"])
async def test_x1_a_peer_without_a_token_is_told_which_limit_ends_its_connection(
    server: NamespaceServer, trust: ssl.SSLContext, in_tls: bool, limit: str, raw: bytes, text: str
) -> None:
    said = await end_of(server, raw, tls=trust if in_tls else None)
    assert Condition.RESOURCE_LIMIT_EXCEEDED.encode() in said
    assert text.encode() in said
    assert f'twinbus_limit_exceeded_total{{limit="{limit}"}} 1.0' in await metrics(server)


async def test_x1_a_peer_that_puts_no_valid_token_in_time_is_told_so(tls_folder: Path) -> None:
    async with serving(tls_folder, authentication_seconds=0.2) as server:
        peer = await Peer.to(server)
        assert await peer.put_token(key="wrong") == 401
        closed = await peer.closed()
        assert closed.error is not None
        assert (closed.error.condition, closed.error.description) == (
            Condition.CONNECTION_FORCED,
            "No token was accepted on this connection within 0.2 s. Connect again and put a valid token on $cbs.",
        )


async def test_x1_a_peer_that_put_a_token_in_time_may_be_idle(tls_folder: Path) -> None:
    async with serving(tls_folder, authentication_seconds=0.3) as server:
        idle, late = await Peer.to(server), await Peer.to(server)
        assert await idle.put_token() == 202
        await late.closed()  # the time is over
        assert await idle.put_token() == 202
        idle.close()


async def test_x1_a_token_as_large_as_those_of_identity_providers_is_read(dial: Dial) -> None:
    peer = await dial()
    for _ in range(3):
        reply = await peer.ask("$cbs", "put-token", "x" * 32_000, {"name": "sb://localhost/", "type": "jwt"})
        assert (reply["statusCode"], "takes SAS tokens only" in reply["statusDescription"]) == (401, True)
    assert await peer.put_token() == 202


async def test_x1_the_larger_limits_hold_once_a_token_was_accepted(peer: Peer) -> None:
    for _ in range(20):
        await peer.sender("orders")
    link = await peer.sender("orders")
    link.send(b"large", build_message(properties=Properties(message_id="m"), data=bytes(200_000)))
    peer.flush()
    assert len(await peer.answers(1)) == 1


async def test_x1_unread_replies_end_their_link_early_without_a_token(dial: Dial) -> None:
    peer = await dial()
    node = Node(peer, "$cbs")
    await node.attached(credit=0)
    for _ in range(129):
        await peer.until(lambda: node.requests.credit)
        node.request("nothing", {}, {})
    assert (
        f"128 replies or 65536 bytes may wait on a connection{UNTIL}. Grant credit to the reply link and read it."
        in await peer.refused(node.replies)
    )


async def test_x1_answers_that_a_peer_does_not_read_stay_within_bounds(server: NamespaceServer, peer: Peer) -> None:
    echo = performative_frame(
        0, Flow(next_incoming_id=0, incoming_window=1, next_outgoing_id=0, outgoing_window=1, echo=True)
    )
    hostile = socket.create_connection(("127.0.0.1", server.port))
    hostile.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    hostile.setblocking(False)
    with hostile:
        left = memoryview(BEGUN + echo * 2000)
        for _ in range(60):
            try:
                left = left[hostile.send(left[: 4 * KIB]) :]
            except BlockingIOError:
                pass
            except OSError:  # refused for what it sent
                break
            await peer.echo()
        assert server.resources.unauthenticated_held < 128 * KIB


async def test_x1_a_coordinator_is_for_peers_with_a_token(dial: Dial) -> None:
    peer = await dial()
    link = peer.attach_sender(coordinator())
    assert (await peer.refused(link)).startswith(Condition.UNAUTHORIZED_ACCESS)
    assert await peer.put_token() == 202
    link = peer.attach_sender(coordinator())
    await peer.event(LinkAccepted, link)


async def test_x1_a_tls_handshake_has_its_limit(server: NamespaceServer) -> None:
    # A ClientHello of 128 KB in records of 16 KB.
    hello = b"\x01\x01\xff\x00\x03\x03" + bytes(65_536)
    await end_of(server, *(b"\x16\x03\x01\x40\x00" + hello[at : at + 16_384] for at in range(0, 65_536, 16_384)))
    assert 'twinbus_limit_exceeded_total{limit="tls-handshake-bytes"} 1.0' in await metrics(server)


async def test_x1_a_peer_that_sends_nothing_is_counted(
    server: NamespaceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted_connection, "_FIRST_BYTES_SECONDS", 0.05)
    for pieces in ((), (b"\x16\x03\x01",)):
        assert await end_of(server, *pieces) == b""
    assert 'twinbus_limit_exceeded_total{limit="first-bytes-seconds"} 2.0' in await metrics(server)


# --- all connections together ----------------------------------------------------------------------------------------


async def test_x1_the_largest_of_the_peers_without_a_token_makes_room(tls_folder: Path) -> None:
    async with serving(tls_folder, unauthenticated_memory=100_000) as server:
        half = OPENED + (60_000).to_bytes(4) + b"\2\0\0\0"
        large, small = await Peer.to(server), await Peer.to(server)
        for peer, size in ((large, 59_000), (small, 50_000)):
            await peer.event(Opened)
            peer.transport.write(half[len(OPENED) :] + bytes(size))
        closed = await large.closed()
        assert closed.error is not None
        assert closed.error.condition == Condition.RESOURCE_LIMIT_EXCEEDED
        assert closed.error.description is not None
        assert "may hold 100000 bytes together; this one held most of them" in closed.error.description
        assert not small.lost.done()
        # Meanwhile a client with a token is served.
        async with connect(server.connection_string, timeout=SECONDS) as bus:
            await (await bus.sender("orders")).send([Message(b"x" * 200_000)])
        small.close()


async def test_x1_an_http_request_that_holds_too_much_is_answered_with_503(tls_folder: Path) -> None:
    async with serving(tls_folder, unauthenticated_memory=100_000) as server:
        head = b"PUT /q HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n"
        said = await end_of(server, head + bytes(150_000))
        assert said.startswith(b"HTTP/1.1 503")
        assert b"may hold 100000 bytes together" in said
        assert 'twinbus_limit_exceeded_total{limit="unauthenticated-memory"} 1.0' in await metrics(server)


@pytest.mark.parametrize("in_tls", [False, True], ids=["plain", "tls"])
async def test_x1_connections_beyond_the_limit_are_refused_in_their_protocol(tls_folder: Path, in_tls: bool) -> None:
    async with serving(tls_folder, max_connections=2) as server:
        tls = ssl.create_default_context(cafile=str(server.ca)) if in_tls else None
        peers = [await Peer.to(server) for _ in range(2)]
        for peer in peers:
            assert await peer.put_token() == 202
        text = b"This server takes 2 connections at a time. Close connections that are not needed"
        amqp_connection = await end_of(server, OPENED, tls=tls)
        assert Condition.RESOURCE_LIMIT_EXCEEDED.encode() in amqp_connection
        assert text in amqp_connection
        http = await end_of(server, b"GET /$health HTTP/1.1\r\nHost: localhost\r\n\r\n", tls=tls)
        assert http.startswith(b"HTTP/1.1 503")
        assert text in http
        peers[0].close()
        await until(lambda: server.resources.connections == 1)
        assert b"HTTP/1.1 200" in await end_of(
            server, b"GET /$health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", tls=tls
        )
        assert server.resources.refused["connections"] == 2
        peers[1].close()


async def test_x1_the_oldest_connection_without_a_token_makes_room_for_a_client(tls_folder: Path) -> None:
    async with serving(tls_folder, max_connections=2) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        await until(lambda: server.resources.connections == 2)
        async with connect(server.connection_string, timeout=SECONDS) as bus:
            await (await bus.sender("orders")).send([Message("x")])
        assert await asyncio.wait_for(silent[0][0].read(), SECONDS) == b""
        for _, writer in silent:
            writer.transport.abort()


async def test_x1_memory_returns_to_zero_and_nothing_is_kept_alive_when_connections_close(
    server: NamespaceServer, trust: ssl.SSLContext
) -> None:
    half_frame = OPENED + (60_000).to_bytes(4) + b"\2\0\0\0" + bytes(50_000)
    held = [
        BEGUN + to_cbs(0) + transfer(0, bytes(40_000), more=True),
        half_frame,
        b"PUT /q HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n" + bytes(100_000),
        b"GET / HTTP/1.1\r\nx: " + bytes([65]) * 30_000,
        b"\x16\x03\x01\x3f\x00\x01\x00\x3f\x00\x03\x03" + bytes(10_000),
    ]
    gc.collect()
    gc.disable()
    try:
        writers = [(await asyncio.open_connection("127.0.0.1", server.port))[1] for _ in held]
        writers.append(
            (await asyncio.open_connection("127.0.0.1", server.port, ssl=trust, server_hostname="localhost"))[1]
        )
        for writer, raw in zip(writers, [*held, half_frame], strict=True):
            writer.write(raw)
        await until(lambda: server.resources.held > 270_000)
        connections = accepted_connections(server)
        handlers = [connection._handler for connection in connections if connection._handler is not None]
        alive: list[weakref.ref[Any]] = [weakref.ref(one) for one in [*connections, *handlers]]
        del connections, handlers
        assert len(alive) >= 10
        for writer in writers:
            writer.transport.abort()
        del writers, writer
        await until(lambda: not server._context.connections)
        assert (server.resources.held, server.resources.unauthenticated_held, server.resources.connections) == (0, 0, 0)
        await until(lambda: not any(reference() for reference in alive))
    finally:
        gc.enable()


async def test_x1_memory_of_a_client_with_a_token_returns_to_zero(server: NamespaceServer, dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token() == 202
    sender = await peer.sender("orders")
    acting = await TransactionPeer.on(peer)
    await acting.send(sender, await acting.begin(), "a" * 20_000)
    assert server.resources.held - server.resources.unauthenticated_held > 20_000
    peer.close()
    await until(lambda: not server._context.connections)
    assert (server.resources.held, server.resources.connections) == (0, 0)


# --- after a token was accepted --------------------------------------------------------------------------------------


async def test_x1_messages_of_open_transactions_have_a_limit(
    server: NamespaceServer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_coordinator, "_MAX_BYTES", 50_000)
    acting = await TransactionPeer.on(peer)
    sender = await peer.sender("orders")
    first, second = await acting.begin(), await acting.begin()
    await acting.send(sender, first, "a" * 30_000)
    await acting.send(sender, second, "b" * 30_000)
    assert await acting.commit(second) == Condition.TRANSACTION_ROLLBACK
    third = await acting.begin()
    await acting.send(sender, third, "c" * 10_000)
    assert [await acting.commit(name) for name in (first, third)] == [None, None]
    assert server.resources.refused["transaction-bytes"] == 1


async def test_x1_deferred_messages_are_handed_out_by_the_megabyte(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "DEFERRED_BYTES", 100_000)
    monkeypatch.setattr(queries, "DEFERRED_ROWS", 2)
    sender = await peer.sender("orders")
    payload = build_message(properties=Properties(message_id="m"), data=bytes(30_000))
    for number in range(6):
        sender.send(str(number).encode(), payload)
    peer.flush()
    await peer.answers(6)
    receiver = await peer.receiver("orders")
    peer.grant(receiver, 6)
    found = await peer.received(receiver, 6)
    for delivery in found:
        defer = Modified(undeliverable_here=True)
        receiver.session.dispose(RECEIVER, delivery.delivery_id, settled=True, state=defer)
    peer.flush()
    numbers = list(range(1, 7))

    async def ask(*numbers: int) -> dict[str, Any]:
        body = {"sequence-numbers": Array(Long, map(Long, numbers)), "receiver-settle-mode": Int(1)}
        return await peer.ask("orders/$management", "com.microsoft:receive-by-sequence-number", body)

    refused = await ask(*numbers)
    assert refused["errorCondition"] == Condition.RESOURCE_LIMIT_EXCEEDED
    assert "more than 100000 bytes together. Ask for fewer at a time." in refused["statusDescription"]
    assert len((await ask(*numbers[:3]))["body"]["messages"]) == 3, "nothing was locked"


async def test_x1_large_messages_reach_a_slow_reader_a_few_megabytes_at_a_time(
    server: NamespaceServer, peer: Peer
) -> None:
    sender = await peer.sender("orders")
    payload = build_message(properties=Properties(message_id="m"), data=bytes(200_000))
    for number in range(100):
        sender.send(str(number).encode(), payload)
    peer.flush()
    await peer.answers(100)
    slow = await Peer.to(server)
    await slow.put_token()
    slow.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
    links = [await slow.receiver("orders") for _ in range(10)]
    slow.transport.pause_reading()
    for link in links:
        slow.grant(link, 1000)
    for _ in range(50):
        await peer.echo()
    assert server.resources.held < 14 * MIB, "8 MB for the connection, and a message more for each link"
    slow.transport.resume_reading()

    def taken() -> int:
        return sum(type(event).__name__ == "Delivered" for event in slow.events)

    before = taken()
    await slow.until(lambda: taken() - before >= 100)
    assert server.resources.refused.total() == 0
    slow.close()


PEEK: tuple[str, Any, dict[str, Any]] = (
    "com.microsoft:peek-message",
    {"from-sequence-number": Long(1), "message-count": Int(250)},
    {},
)


async def send_large(peer: Peer, entity: str, number: int, size: int) -> None:
    sender = await peer.sender(entity)
    for tag in range(number):
        sender.send(str(tag).encode(), build_message(data=bytes(size)))
    peer.flush()
    await peer.answers(number)


async def test_x1_many_peeks_at_once_are_all_answered_to_a_client_that_grants_credit(peer: Peer) -> None:
    await send_large(peer, "orders", 6, 200_000)
    node = Node(peer, "orders/$management")
    await node.attached(credit=5)
    for _ in range(30):
        node.request(*PEEK)
    taken = 0
    while taken < 30:
        found = await peer.until(lambda: [e for e in peer.events if isinstance(e, Delivered | LinkDetached)])
        assert not [e for e in found if isinstance(e, LinkDetached)]
        peer.events.clear()
        taken += len(found)
        peer.grant(node.replies, 5)


async def test_x1_peeks_wait_while_their_replies_are_not_taken_and_too_many_are_refused(
    server: NamespaceServer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_response, "_MAX_WAITING_READS", request_response._Limit(20, MIB))
    await send_large(peer, "orders", 6, 200_000)
    node = Node(peer, "orders/$management")
    await node.attached(credit=0)
    for _ in range(40):
        node.request(*PEEK)
    await until(lambda: server.resources.refused["waiting-requests"])
    await peer.echo()
    assert server.resources.held < 12 * MIB, "4 MB of unread replies, and a megabyte for each read under way"
    peer.grant(node.replies, 40)
    replies = [split_sections(reply.payload) for reply in await peer.received(node.replies, 40)]
    states = Counter(reply.application_properties["statusCode"] for reply in replies)
    assert set(states) == {200, 503}
    assert states[503] == server.resources.refused["waiting-requests"]
    [text] = {r.application_properties["statusDescription"] for r in replies if r.value is None}
    assert "20 requests or 1048576 bytes may wait on a connection. Read the replies" in text


async def test_x1_a_client_that_waits_for_credit_can_send_any_number_of_peeks(
    server: NamespaceServer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_response, "_MAX_WAITING_READS", request_response._Limit(200, MIB))
    await send_large(peer, "orders", 1, 20_000)
    node = Node(peer, "orders/$management")
    await node.attached(credit=500)
    for _ in range(500):
        await peer.until(lambda: node.requests.credit)
        node.request(*PEEK)
    await peer.received(node.replies, 500)
    assert not server.resources.refused


@pytest.mark.parametrize("drain", [False, True])
async def test_x1_many_receivers_of_one_connection_get_their_messages_after_a_pause(
    tls_folder: Path, drain: bool
) -> None:
    queues = [f"q{number}" for number in range(60)]
    async with serving(tls_folder, connection_memory=8 * MIB, queues=queues) as server:
        peer = await Peer.to(server)
        await peer.put_token()
        for queue in queues:
            await send_large(peer, queue, 1, 250_000)
        slow = await Peer.to(server)
        await slow.put_token()
        slow.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
        session = slow.session()
        links = [await slow.receiver(queue, session) for queue in queues]
        slow.transport.pause_reading()
        slow.events.clear()
        for link in links:
            link.flow(200, drain=drain)
        slow.flush()
        await until(lambda: server.resources.held > MIB or server.resources.refused)
        for _ in range(50):
            await peer.echo()
        assert not server.resources.refused
        slow.transport.resume_reading()
        await slow.until(lambda: sum(isinstance(event, Delivered) for event in slow.events) == 60)
        if drain:
            await slow.until(lambda: not any(link.credit for link in links))
        slow.close()
        peer.close()


async def test_x1_an_http_connection_whose_token_was_accepted_does_not_make_room(tls_folder: Path) -> None:
    async with serving(tls_folder, max_connections=2, http_connection_memory=8 * KIB) as server:
        token = make_sas_token(f"sb://localhost:{server.port}/", DEFAULT_KEY_NAME, DEFAULT_KEY, 4_000_000_000)
        head = f"GET /$config HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head + b"\r\n")
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 \r\n"
        assert server.resources.unauthenticated_connections == 0
        others = [await Peer.to(server) for _ in range(3)]
        await until(lambda: server.resources.refused["connections"] == 2)
        writer.write(head + b"\r\n" + head + b"\r\n")  # one behind the other
        await reader.readuntil(b"HTTP/1.1 ")
        writer.write(head + b"X: " + bytes(b"x" * 16 * KIB))
        await until(lambda: server.resources.refused["connection-memory"])
        writer.close()
        for other in others:
            other.close()


async def test_x1_receivers_that_wait_for_messages_do_not_lose_a_connection_that_pauses(tls_folder: Path) -> None:
    queues = [f"q{number}" for number in range(60)]
    async with serving(tls_folder, connection_memory=8 * MIB, queues=queues) as server:
        slow = await Peer.to(server)
        await slow.put_token()
        slow.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
        session = slow.session()
        for link in [await slow.receiver(queue, session) for queue in queues]:
            link.flow(200)
        await slow.echo()
        slow.events.clear()
        slow.transport.pause_reading()
        peer = await Peer.to(server)
        await peer.put_token()
        for queue in queues:
            await send_large(peer, queue, 1, 250_000)
        assert not server.resources.refused
        slow.transport.resume_reading()
        await slow.until(lambda: sum(isinstance(event, Delivered) for event in slow.events) == 60)
        slow.close()
        peer.close()
