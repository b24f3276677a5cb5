"""Faults as peers see them (N4): each kind at each point, for all, for one entity or for one link, until it ends."""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.namespace.front.amqp_peer import SECONDS, Node, Peer
from tests.namespace.front.test_accepted_connection import HEALTH, talk
from twinbus.amqp import (
    ACCEPTED,
    RECEIVER,
    Accepted,
    Delivered,
    Disposed,
    LinkAccepted,
    Properties,
    Rejected,
    build_message,
    split_sections,
)
from twinbus.connect import ServiceBusConnection, connect, make_sas_token
from twinbus.message import Message
from twinbus.namespace.engine.events import MessagesPeeked
from twinbus.namespace.front import accepted_connection
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, DEFAULT_KEY_NAME
from twinbus.namespace.server import NamespaceServer
from twinbus.values import Int

Dial = Callable[..., Awaitable[Peer]]
CONDITIONS = {
    "server-busy": "com.microsoft:server-busy",
    "internal-error": "amqp:internal-error",
    "detach": "amqp:link:detach-forced",
}
MANAGEMENT = "orders/$management"
PEEK = "com.microsoft:peek-message"


async def stored(server: NamespaceServer, entity: str = "orders") -> list[str]:
    """Return the messages in the entity, without passing through faults."""
    async with asyncio.timeout(SECONDS):
        found = server.runtime.namespace.find(entity)
        assert found is not None
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        server.runtime.submit(found, MessagesPeeked(answer.set_result, 0, 1000, False))
        return [str(split_sections(row.raw).properties.message_id) for row in await answer]


def condition(disposed: Disposed) -> str | None:
    """Return the error condition, or None if the message was accepted."""
    if isinstance(disposed.state, Accepted):
        return None
    assert isinstance(disposed.state, Rejected)
    assert disposed.state.error is not None
    return disposed.state.error.condition


# --- refusing kinds, point by point --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["server-busy", "internal-error", "detach"])
async def test_a_fault_refuses_an_attach(peer: Peer, server: NamespaceServer, kind: str) -> None:
    server.faults.set({"kind": kind, "points": ["attach"], "count": 2})
    for attach in (peer.attach_sender, peer.attach_receiver):
        assert (await peer.refused(attach("orders"))).startswith(CONDITIONS[kind])
    await peer.sender("orders")
    assert not server.faults.active


@pytest.mark.parametrize("kind", ["server-busy", "internal-error"])
async def test_a_send_is_rejected_and_not_stored(peer: Peer, server: NamespaceServer, kind: str) -> None:
    sender = await peer.sender("orders")
    server.faults.set({"kind": kind, "points": ["send"], "count": 1})
    peer.send(sender, "a")
    assert condition((await peer.answers(1))[0]) == CONDITIONS[kind]
    peer.send(sender, "b")
    assert condition((await peer.answers(1))[0]) is None
    assert await stored(server) == ["b"]


async def test_a_send_detaches_its_link_and_is_not_stored(peer: Peer, server: NamespaceServer) -> None:
    sender, other = await peer.sender("orders"), await peer.sender("orders")
    server.faults.set({"kind": "detach", "points": ["send"], "link": sender.name})
    peer.send(other, "b")
    peer.send(sender, "a")
    assert (await peer.refused(sender)).startswith(CONDITIONS["detach"])
    await peer.answers(1)
    assert await stored(server) == ["b"]


@pytest.mark.parametrize("kind", ["server-busy", "internal-error", "detach"])
async def test_a_fault_detaches_a_receiver(peer: Peer, server: NamespaceServer, kind: str) -> None:
    link = await peer.receiver("orders")
    server.faults.set({"kind": kind, "points": ["receive"], "entity": "orders", "count": 1})
    peer.grant(link, 1)
    assert (await peer.refused(link)).startswith(CONDITIONS[kind])


@pytest.mark.parametrize("kind", ["server-busy", "internal-error", "detach"])
async def test_a_settlement_is_refused_and_the_message_stays(peer: Peer, server: NamespaceServer, kind: str) -> None:
    peer.send(await peer.sender("orders"), "a")
    await peer.answers(1)
    link = await peer.receiver("orders")
    peer.grant(link, 1)
    await peer.received(link, 1)
    server.faults.set({"kind": kind, "points": ["settle"], "entity": "orders"})
    link.session.dispose(RECEIVER, 0, settled=False, state=ACCEPTED)
    peer.flush()
    if kind == "detach":
        assert (await peer.refused(link)).startswith(CONDITIONS[kind])
    else:
        assert condition((await peer.answers(1))[0]) == CONDITIONS[kind]
    assert await stored(server) == ["a"]


@pytest.mark.parametrize(("kind", "status"), [("server-busy", 503), ("internal-error", 500)])
async def test_a_request_is_refused(peer: Peer, server: NamespaceServer, kind: str, status: int) -> None:
    server.faults.set({"kind": kind, "points": ["request"], "entity": "orders", "count": 1})
    refused = await peer.ask(MANAGEMENT, PEEK, {})
    assert (refused["statusCode"], refused["errorCondition"]) == (status, CONDITIONS[kind])
    assert (await peer.ask(MANAGEMENT, PEEK, {}))["statusCode"] == 204


async def test_a_request_detaches_its_link(peer: Peer, server: NamespaceServer) -> None:
    node = Node(peer, MANAGEMENT)
    await node.attached()
    server.faults.set({"kind": "detach", "points": ["request"], "link": node.requests.name})
    node.request("com.microsoft:peek-message", {}, {})
    assert (await peer.refused(node.requests)).startswith(CONDITIONS["detach"])
    assert (await peer.ask(MANAGEMENT, PEEK, {}))["statusCode"] == 204, "another link is not meant"


# --- stored, and silent --------------------------------------------------------------------------------------------


async def test_a_message_whose_acknowledgement_is_dropped_is_stored(peer: Peer, server: NamespaceServer) -> None:
    sender = await peer.sender("orders")
    server.faults.set({"kind": "drop-ack", "points": ["send", "settle", "request"], "count": 3})
    peer.send(sender, "a")
    link = await peer.receiver("orders")
    peer.grant(link, 1)
    await peer.received(link, 1)
    link.session.dispose(RECEIVER, 0, settled=False, state=ACCEPTED)
    peer.flush()
    node = Node(peer, "bills/$management")
    await node.attached()
    body = {"messages": [{"message": _message("scheduled"), "message-id": "scheduled"}]}
    node.request("com.microsoft:schedule-message", body, {})
    await peer.echo()
    assert not peer.core.is_closed
    assert not [event for event in peer.events if isinstance(event, Disposed)]
    assert await stored(server) == []
    assert await stored(server, "bills") == ["scheduled"]
    assert not server.faults.active


def _message(identity: str) -> bytes:
    return build_message(properties=Properties(message_id=identity), data=b"x")


# --- delay ---------------------------------------------------------------------------------------------------------


async def test_a_delayed_operation_comes_later_and_is_not_lost(peer: Peer, server: NamespaceServer) -> None:
    server.faults.set({"kind": "delay", "delay": 0.02, "entity": "orders"})
    loop = asyncio.get_running_loop()
    began = loop.time()
    sender = await peer.sender("orders")
    peer.send(sender, *"abc")
    await peer.answers(3)
    link = await peer.receiver("orders")
    peer.grant(link, 3)
    bodies = [split_sections(delivery.payload).properties.message_id for delivery in await peer.received(link, 3)]
    assert bodies == ["a", "b", "c"]
    link.session.dispose(RECEIVER, 0, 2, settled=False, state=ACCEPTED)
    peer.flush()
    await peer.answers(3)
    assert (await peer.ask(MANAGEMENT, PEEK, {}))["statusCode"] == 204
    assert loop.time() - began >= 6 * 0.02, "attach twice, send, receive, settle and request were late"


async def test_a_peer_that_leaves_during_a_delay_is_not_attached(peer: Peer, server: NamespaceServer) -> None:
    server.faults.set({"kind": "delay", "delay": 0.01, "points": ["attach"], "count": 1})
    link = peer.attach_receiver("orders")
    link.detach()
    peer.flush()
    other = await peer.receiver("orders")
    peer.send(await peer.sender("orders"), "a")
    peer.grant(other, 1)
    assert len(await peer.received(other, 1)) == 1


# --- black holes ---------------------------------------------------------------------------------------------------


async def test_a_black_hole_over_the_namespace_freezes_everything_and_loses_nothing(
    bus: ServiceBusConnection, server: NamespaceServer, trust: ssl.SSLContext
) -> None:
    async with connect(server.connection_string, tls=trust, timeout=SECONDS) as inside:
        senders = [await one.sender("orders") for one in (bus, inside)]
        receiver = await bus.receiver("bills")
        await inside.open()
        fault = server.faults.set({"kind": "black-hole"})
        sends = [asyncio.ensure_future(sender.send([Message(f"s{n}")])) for n, sender in enumerate(senders)]
        asked = asyncio.ensure_future(receiver.peek())
        late = asyncio.ensure_future(_send_late(server))
        health = asyncio.ensure_future(talk(server, HEALTH))
        done, _ = await asyncio.wait([*sends, asked, late, health], timeout=0.1)
        assert not done
        assert await stored(server) == []
        server.faults.clear(fault["id"])
        await asyncio.gather(*sends, asked, late)
        assert b"HTTP/1.1 200" in await health
        assert len(await stored(server)) == 3


async def _send_late(server: NamespaceServer) -> None:
    """Clear the faults with a client that connects during the blackout."""
    async with connect(server.connection_string, timeout=SECONDS) as bus:
        await (await bus.sender("orders")).send([Message("late")])


async def test_a_black_hole_ends_after_its_duration(bus: ServiceBusConnection, server: NamespaceServer) -> None:
    sender = await bus.sender("orders")
    server.faults.set({"kind": "black-hole", "duration": 0.1})
    await sender.send([Message("a")])
    assert not server.faults.active
    assert len(await stored(server)) == 1


async def test_deliveries_into_a_black_hole_are_bounded_and_arrive_afterwards(
    bus: ServiceBusConnection, server: NamespaceServer, peer: Peer
) -> None:
    link = await peer.receiver("orders")
    peer.grant(link, 10_000)
    await peer.echo()
    sender = await bus.sender("orders")
    sending = [asyncio.ensure_future(sender.send([Message(b"x" * 200_000)])) for _ in range(100)]
    await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
    fault = server.faults.set({"kind": "black-hole"})
    await asyncio.wait(sending, timeout=0.1)
    assert max(connection.stream._held_bytes for connection in server._context.connections) < 16 * 1024 * 1024
    server.faults.clear(fault["id"])
    await asyncio.gather(*sending)
    assert len(await peer.received(link, 100)) == 100


@pytest.mark.parametrize("point", ["attach", "send", "receive", "settle", "request"])
async def test_a_black_hole_over_an_entity_holds_what_it_swallows(
    peer: Peer, server: NamespaceServer, point: str
) -> None:
    server.faults.set({"kind": "black-hole", "points": [point], "entity": "orders"})
    doing = asyncio.ensure_future(_go_through(peer, "orders"))
    await _go_through(peer, "bills", number=100)
    assert not doing.done()
    server.faults.clear()
    await doing


async def _go_through(peer: Peer, entity: str, number: int = 0) -> None:
    """Attach, send, receive, settle, and send a request."""
    sender, link = await peer.sender(entity), await peer.receiver(entity)
    peer.grant(link, 1)
    sender.send(entity.encode(), _message(entity))
    peer.flush()
    (delivery,) = await peer.received(link, 1)
    link.session.dispose(RECEIVER, delivery.delivery_id, settled=False, state=ACCEPTED)
    peer.flush()
    await peer.until(lambda: not link.session.unsettled_in)
    assert (await peer.ask(f"{entity}/$management", PEEK, {"message-count": Int(1)}))["statusCode"] == 204


@pytest.mark.parametrize("delete", [False, True])
async def test_a_receiver_that_waits_already_gets_nothing_out_of_a_black_hole_until_it_is_over(
    peer: Peer, server: NamespaceServer, delete: bool
) -> None:
    link = await peer.receiver("orders", delete=delete)
    peer.grant(link, 1000)
    await peer.echo()
    server.faults.set({"kind": "black-hole", "points": ["receive"], "entity": "orders"})
    peer.send(await peer.sender("orders"), *"abcdef")
    await peer.answers(6)
    await peer.echo()
    assert not [event for event in peer.events if isinstance(event, Delivered) and event.link is link]
    server.faults.clear()
    bodies = [split_sections(delivery.payload).properties.message_id for delivery in await peer.received(link, 6)]
    assert bodies == list("abcdef")
    peer.send(await peer.sender("orders"), "g")
    assert len(await peer.received(link, 1)) == 1


async def test_a_drain_that_meets_a_black_hole_is_answered_behind_what_was_swallowed(
    peer: Peer, server: NamespaceServer
) -> None:
    link = await peer.receiver("orders")
    peer.grant(link, 10)
    await peer.echo()
    server.faults.set({"kind": "black-hole", "points": ["receive"], "entity": "orders"})
    peer.send(await peer.sender("orders"), "a")
    await peer.answers(1)
    peer.grant(link, 10, drain=True)
    await peer.echo()
    server.faults.clear()
    assert len(await peer.received(link, 1)) == 1
    await peer.until(lambda: link.credit == 0)


async def test_a_black_hole_with_a_count_never_gives_back_what_it_swallowed(
    peer: Peer, server: NamespaceServer
) -> None:
    sender = await peer.sender("orders")
    server.faults.set({"kind": "black-hole", "points": ["send"], "count": 1})
    peer.send(sender, "a", "b")
    await peer.answers(1)
    await peer.echo()
    assert await stored(server) == ["b"]


# --- connecting ----------------------------------------------------------------------------------------------------


async def _cut_off(server: NamespaceServer, *pieces: bytes, tls: ssl.SSLContext | None = None) -> bool:
    """Return whether the connection ended without any bytes."""
    try:
        return await talk(server, *pieces, tls=tls) == b""
    except ConnectionResetError:
        return True


async def test_a_refused_connection_ends_at_once_and_the_next_one_lives(
    server: NamespaceServer, dial: Dial, trust: ssl.SSLContext
) -> None:
    server.faults.set({"kind": "refuse", "count": 4})
    for tls in (None, trust):
        await asyncio.wait_for((await dial(tls=tls)).lost, SECONDS)
        assert await _cut_off(server, HEALTH, tls=tls)
    assert not server.faults.active
    assert await (await dial()).put_token() == 202


async def test_a_peer_that_sends_nothing_is_refused_too(server: NamespaceServer) -> None:
    server.faults.set({"kind": "refuse"})
    assert await _cut_off(server)


async def test_a_connection_is_delayed_or_swallowed_and_goes_on(server: NamespaceServer, dial: Dial) -> None:
    server.faults.set({"kind": "delay", "delay": 0.05, "points": ["connect"]})
    began = asyncio.get_running_loop().time()
    assert await (await dial()).put_token() == 202
    assert asyncio.get_running_loop().time() - began >= 0.05
    server.faults.clear()
    server.faults.set({"kind": "black-hole", "points": ["connect"], "duration": 0.1})
    assert await (await dial()).put_token() == 202
    assert not server.faults.active


# --- HTTP ----------------------------------------------------------------------------------------------------------


def _request(server: NamespaceServer, method: str, path: str, body: bytes = b"") -> bytes:
    token = make_sas_token(f"sb://localhost:{server.port}/", DEFAULT_KEY_NAME, DEFAULT_KEY, 4_000_000_000)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def queue_request(server: NamespaceServer, name: str) -> bytes:
    return _request(server, "GET", f"/{name}?api-version=2021-05")


@pytest.mark.parametrize(("kind", "status"), [("server-busy", b"503"), ("internal-error", b"500")])
async def test_the_management_api_is_refused_per_entity(server: NamespaceServer, kind: str, status: bytes) -> None:
    server.faults.set({"kind": kind, "points": ["http"], "entity": "orders", "count": 1})
    assert (await talk(server, queue_request(server, "bills"))).startswith(b"HTTP/1.1 200")
    assert (await talk(server, HEALTH)).startswith(b"HTTP/1.1 200")
    assert (await talk(server, queue_request(server, "orders"))).startswith(b"HTTP/1.1 " + status)
    assert (await talk(server, queue_request(server, "orders"))).startswith(b"HTTP/1.1 200")


async def test_the_management_api_is_delayed_or_swallowed_and_goes_on(server: NamespaceServer) -> None:
    loop = asyncio.get_running_loop()
    server.faults.set({"kind": "delay", "delay": 0.05, "points": ["http"], "count": 1})
    began = loop.time()
    assert (await talk(server, queue_request(server, "orders"))).startswith(b"HTTP/1.1 200")
    assert loop.time() - began >= 0.05
    fault = server.faults.set({"kind": "black-hole", "points": ["http"]})
    asked = asyncio.ensure_future(talk(server, queue_request(server, "orders")))
    assert (await talk(server, HEALTH)).startswith(b"HTTP/1.1 200")
    assert not asked.done()
    server.faults.clear(fault["id"])
    assert (await asked).startswith(b"HTTP/1.1 200")


async def test_a_client_that_gives_up_a_swallowed_request_leaves_nothing_behind(server: NamespaceServer) -> None:
    server.faults.set({"kind": "black-hole", "points": ["http"], "count": 1})
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(queue_request(server, "orders"))
    assert (await talk(server, HEALTH)).startswith(b"HTTP/1.1 200")
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), SECONDS) == b""
    writer.close()


async def test_a_connection_swallowed_forever_is_closed_in_the_end(
    server: NamespaceServer, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted_connection, "_FIRST_BYTES_SECONDS", 0.05)
    server.faults.set({"kind": "black-hole", "points": ["connect"], "count": 1})
    await asyncio.wait_for((await dial()).lost, SECONDS)


@pytest.mark.parametrize("kind", ["refuse", "black-hole"])
async def test_faults_can_be_cleared_whatever_is_in_force_plain_and_in_tls(
    server: NamespaceServer, trust: ssl.SSLContext, kind: str
) -> None:
    for tls in (None, trust):
        server.faults.set({"kind": kind})
        server.faults.set({"kind": "server-busy", "points": ["http"]})
        listed = await talk(server, _request(server, "GET", "/$faults"), tls=tls)
        assert [fault["hits"] for fault in json.loads(listed.partition(b"\r\n\r\n")[2])["faults"]] == [0, 0]
        assert b'{"cleared": 2}' in await talk(server, _request(server, "DELETE", "/$faults"), tls=tls)
        assert not server.faults.active


# --- chance --------------------------------------------------------------------------------------------------------


async def test_the_same_seed_gives_the_same_hits(peer: Peer, server: NamespaceServer) -> None:
    async def hits() -> list[bool]:
        fault = server.faults.set({"kind": "server-busy", "points": ["send"], "probability": 0.5, "seed": 7})
        sender = await peer.sender("orders")
        struck = []
        for number in range(20):
            peer.send(sender, str(number))
            struck.append(condition((await peer.answers(1))[0]) is not None)
        server.faults.clear(fault["id"])
        return struck

    first = await hits()
    assert True in first
    assert False in first
    assert await hits() == first


async def test_a_fault_of_one_entity_or_link_leaves_others_alone(peer: Peer, server: NamespaceServer) -> None:
    orders, bills = await peer.sender("orders"), await peer.sender("bills")
    server.faults.set({"kind": "server-busy", "points": ["send", "attach"], "entity": "events"})
    server.faults.set({"kind": "server-busy", "points": ["send"], "link": bills.name[:-1] + "?", "entity": "bills"})
    peer.send(orders, "a")
    assert condition((await peer.answers(1))[0]) is None
    peer.send(bills, "b")
    assert condition((await peer.answers(1))[0]) == CONDITIONS["server-busy"]
    assert (await peer.refused(peer.attach_receiver("events/Subscriptions/first"))).startswith("com.microsoft:server")
    link = peer.attach_receiver("orders")
    await peer.event(LinkAccepted, link)
