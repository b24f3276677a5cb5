"""Attach of links: accepted, or refused with an attach and then a detach that carries the reason."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.namespace.front.amqp_peer import SESSION_FILTER, Peer
from twinbus.amqp import LinkAccepted, LinkDetached, LinkState, Source, Target
from twinbus.namespace.server import NamespaceServer
from twinbus.values import Described, Symbol, ULong

Dial = Callable[..., Awaitable[Peer]]
TIMEOUT = Symbol("com.microsoft:timeout")
LOCKED_UNTIL = Symbol("com.microsoft:locked-until-utc")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere", "amqp:not-found The messaging entity 'nowhere' could not be found."),
        ("events/Subscriptions/first", "amqp:not-allowed Messages cannot be sent to"),
        ("orders/$DeadLetterQueue", "amqp:not-allowed Messages cannot be sent to"),
        ("orders/$Transfer/$DeadLetterQueue", "amqp:not-allowed Messages cannot be sent to"),
        (Described(ULong(0x99), []), "amqp:not-implemented Only a coordinator of transactions"),
        (Target(None), "amqp:invalid-field The link names no address"),
        (Target(7), "amqp:invalid-field The link names no address"),
        (None, "amqp:invalid-field The link names no address"),
    ],
)
async def test_a_sender_is_refused_with_the_reason(peer: Peer, target: Any, said: str) -> None:
    link = peer.attach_sender(target)
    assert (await peer.refused(link)).startswith(said)
    assert link.remote is not None, "an attach came before the detach"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere", "amqp:not-found The messaging entity 'nowhere' could not be found."),
        ("events/Subscriptions/second", "amqp:not-found The messaging entity"),
        ("events", "amqp:not-allowed 'events' is a topic: receive from one of its subscriptions"),
        (Source(None), "amqp:invalid-field The link names no address"),
        (None, "amqp:invalid-field The link names no address"),
    ],
)
async def test_a_receiver_is_refused_with_the_reason(peer: Peer, source: Any, said: str) -> None:
    link = peer.attach_receiver(source)
    assert (await peer.refused(link)).startswith(said)
    assert link.remote is not None, "an attach came before the detach"


@pytest.mark.parametrize(
    ("wanted", "properties", "said"),
    [
        (7, {}, "amqp:invalid-field The session of 'com.microsoft:session-filter' has to be null or a string"),
        ("x" * 129, {}, "amqp:invalid-field The session of"),
        (None, {TIMEOUT: "soon"}, "amqp:invalid-field 'com.microsoft:timeout' has to be a number"),
        (None, {TIMEOUT: -1}, "amqp:invalid-field 'com.microsoft:timeout'"),
    ],
)
async def test_the_refusal_of_an_invalid_session_filter_names_the_field(
    peer: Peer, wanted: Any, properties: dict[Any, Any], said: str
) -> None:
    link = peer.attach_receiver("visits", wanted=wanted, properties=properties)
    assert (await peer.refused(link)).startswith(said)


async def test_a_session_receiver_is_told_its_session_and_its_lock(peer: Peer) -> None:
    sender = await peer.sender("visits")
    peer.send(sender, "hello", session="s1")
    await peer.answers(1)
    link = await peer.receiver("visits", wanted=None)
    assert isinstance(link.source, Source)
    assert link.source.filter == {SESSION_FILTER: "s1"}
    assert link.properties[LOCKED_UNTIL] > 638_000_000_000_000_000
    peer.grant(link, 1)
    assert len(await peer.received(link, 1)) == 1


async def test_waiting_for_a_session_ends_with_a_session_or_in_time(peer: Peer) -> None:
    first = peer.attach_receiver("visits", wanted=None, properties={TIMEOUT: 20_000})
    await peer.echo()
    assert first.remote is None, "no answer yet: it waits"
    peer.send(await peer.sender("visits"), "hello", session="s2")
    await peer.event(LinkAccepted, first)
    second = peer.attach_receiver("visits", wanted=None, properties={TIMEOUT: 20})
    assert (await peer.refused(second)).startswith("com.microsoft:timeout")


async def test_a_session_that_is_held_and_a_queue_without_sessions_are_refused(peer: Peer) -> None:
    await peer.receiver("visits", wanted="held")
    assert (await peer.refused(peer.attach_receiver("visits", wanted="held"))).startswith(
        "com.microsoft:session-cannot-be-locked"
    )
    assert await peer.refused(peer.attach_receiver("orders", wanted="x"))
    assert await peer.refused(peer.attach_receiver("visits"))


async def test_a_receiver_that_leaves_while_it_waits_gets_no_session(peer: Peer) -> None:
    leaver = peer.attach_receiver("visits", wanted=None)
    await peer.echo()
    leaver.detach()
    peer.flush()
    await peer.event(LinkDetached, leaver)
    peer.send(await peer.sender("visits"), "hello", session="s3")
    await peer.receiver("visits", wanted="s3")


async def test_a_link_attached_again_under_its_name_replaces_the_first(peer: Peer) -> None:
    session = peer.session()
    await peer.receiver("orders", session, name="twin")
    other = await peer.receiver("bills", session, name="other")
    again = await peer.receiver("orders", peer.session(), name="twin")
    assert other.state is LinkState.ATTACHED
    assert again.state is LinkState.ATTACHED


async def test_deleting_an_entity_detaches_its_links(server: NamespaceServer, peer: Peer) -> None:
    receiver, sender = await peer.receiver("bills"), await peer.sender("bills")
    await server.runtime.delete("bills")
    assert (await peer.refused(receiver)).startswith("amqp:not-found")
    peer.send(sender, "too late")
    (answer,) = await peer.answers(1)
    assert "could not be found" in str(answer.state)


async def test_many_links_share_a_session_and_each_gets_its_own(peer: Peer) -> None:
    session = peer.session()
    senders = [await peer.sender(path, session) for path in ("orders", "bills")]
    receivers = [await peer.receiver(path, session) for path in ("orders", "bills")]
    for sender, body in zip(senders, ("for orders", "for bills"), strict=True):
        peer.send(sender, body)
    for receiver, expected in zip(receivers, (b"for orders", b"for bills"), strict=True):
        peer.grant(receiver, 5)
        (delivery,) = await peer.received(receiver, 1)
        assert expected in delivery.payload
