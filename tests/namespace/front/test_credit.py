"""Credit that is granted, lowered and drained, and peers that read more slowly than they grant."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from tests.namespace.front.amqp_peer import Peer, accepted_connections
from twinbus.amqp import Limits, Link, LinkAccepted, LinkFlowed, Properties, build_message
from twinbus.amqp.fast_frames import FlowFields, flow_frame
from twinbus.connect import ServiceBusConnection
from twinbus.message import Message
from twinbus.namespace.front.accepted_connection import AcceptedConnection
from twinbus.namespace.server import NamespaceServer

Dial = Callable[..., Awaitable[Peer]]
MIB = 1024 * 1024


async def filled(peer: Peer, *bodies: str, entity: str = "orders") -> None:
    peer.send(await peer.sender(entity), *bodies)
    await peer.answers(len(bodies))


async def drained(peer: Peer, link: Link) -> None:
    """Wait until the namespace has given the rest of the credit back."""
    await peer.event(LinkFlowed, link)
    assert link.credit == 0


async def test_credit_that_follows_the_attach_at_once_counts(dial: Dial) -> None:
    peer = await dial(limits=Limits(enforce_credit=False))
    await peer.put_token()
    await filled(peer, "a", "b")
    session = peer.session()
    link = peer.attach_receiver("orders", session)
    flow = FlowFields(0, 100, 0, 100, link.handle, 0, 2, None, False, False, None)
    peer.transport.write(flow_frame(session.channel, flow))
    await peer.event(LinkAccepted, link)
    assert len(await peer.received(link, 2)) == 2


async def test_no_more_is_delivered_than_was_granted(peer: Peer) -> None:
    await filled(peer, *"abcde")
    link = await peer.receiver("orders")
    peer.grant(link, 2)
    assert len(await peer.received(link, 2)) == 2
    await peer.echo()
    peer.grant(link, 1)
    assert len(await peer.received(link, 1)) == 1


async def test_a_drain_delivers_what_is_there_and_gives_the_rest_back(peer: Peer) -> None:
    await filled(peer, "a", "b")
    link = await peer.receiver("orders")
    peer.grant(link, 10, drain=True)
    assert len(await peer.received(link, 2)) == 2
    await drained(peer, link)


async def test_an_empty_queue_and_an_empty_credit_are_drained_at_once(peer: Peer) -> None:
    link = await peer.receiver("orders")
    peer.grant(link, 10, drain=True)
    await drained(peer, link)
    peer.grant(link, 0, drain=True)
    await drained(peer, link)


async def test_credit_after_a_drain_works(peer: Peer) -> None:
    link = await peer.receiver("orders")
    for number in range(3):
        peer.grant(link, 10, drain=True)
        await drained(peer, link)
        peer.grant(link, 1)
        await filled(peer, f"m{number}")
        assert len(await peer.received(link, 1)) == 1


async def test_credit_taken_back_is_not_used(peer: Peer) -> None:
    link = await peer.receiver("orders")
    peer.grant(link, 100)
    peer.grant(link, 0)
    await peer.echo()
    await filled(peer, "a")
    other = await peer.receiver("orders")
    peer.grant(other, 1)
    assert len(await peer.received(other, 1)) == 1, "it went to who wanted it"


async def test_after_credit_was_lowered_other_receivers_get_the_rest(peer: Peer) -> None:
    link = await peer.receiver("orders")
    peer.grant(link, 100)
    peer.grant(link, 1)
    await filled(peer, "a", "b")
    assert len(await peer.received(link, 1)) == 1
    other = await peer.receiver("orders")
    peer.grant(other, 1)
    assert len(await peer.received(other, 1)) == 1


async def test_messages_received_and_deleted_come_settled_and_leave_nothing(peer: Peer) -> None:
    await filled(peer, "a", "b")
    link = await peer.receiver("orders", delete=True)
    peer.grant(link, 10, drain=True)
    assert [delivery.settled for delivery in await peer.received(link, 2)] == [True, True]
    assert (await peer.ask("orders/$management", "com.microsoft:peek-message", {}))["statusCode"] == 204


async def test_a_reader_that_does_not_read_fills_no_memory_and_loses_nothing(
    server: NamespaceServer, bus: ServiceBusConnection, peer: Peer
) -> None:
    sender = await bus.sender("orders")
    for _ in range(8):
        await sender.send([Message(b"x" * 200_000) for _ in range(40)])
    peer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    link = await peer.receiver("orders")
    peer.transport.pause_reading()
    peer.grant(link, 10_000)
    # Meanwhile the other connection is served, and the bytes written to the first one stay bounded.
    for _ in range(20):
        await bus.management("bills").peek()
    assert max(map(_unsent, accepted_connections(server))) < 8 * MIB
    peer.transport.resume_reading()
    assert len(await peer.received(link, 320)) == 320


def _unsent(connection: AcceptedConnection) -> int:
    return connection._transport.get_write_buffer_size()


async def test_a_narrow_session_window_holds_deliveries_back_and_loses_none(dial: Dial) -> None:
    peer = await dial(limits=Limits(incoming_window=4))
    await peer.put_token()
    payload = build_message(properties=Properties(message_id="m"), data=b"x" * 100_000)
    sender = await peer.sender("orders")
    for number in range(100):
        sender.send(str(number).encode(), payload)
    peer.flush()
    await peer.answers(100)
    link = await peer.receiver("orders")
    peer.grant(link, 1000)
    numbers = [delivery.delivery_id for delivery in await peer.received(link, 100)]
    assert numbers == list(range(100))


async def test_two_receivers_share_the_messages(bus: ServiceBusConnection) -> None:
    receivers = [await bus.receiver("orders", prefetch=0) for _ in range(2)]
    waiting = [asyncio.ensure_future(receiver.receive(1, 20)) for receiver in receivers]
    await (await bus.sender("orders")).send([Message("a"), Message("b")])
    bodies = [bytes(message.body) for received in await asyncio.gather(*waiting) for message in received]
    assert sorted(bodies) == [b"a", b"b"]
