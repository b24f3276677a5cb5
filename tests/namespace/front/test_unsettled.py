"""Settlement on the link: ranges, several outcomes at once, lost locks, and links that are gone."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from tests.namespace.front.amqp_peer import Peer, accepted_connections
from twinbus.amqp import (
    ACCEPTED,
    RECEIVER,
    Accepted,
    Delivered,
    DeliveryState,
    Disposed,
    Error,
    Link,
    LinkDetached,
    Modified,
    Received,
    Rejected,
    Released,
    split_sections,
)
from twinbus.namespace.front.amqp_connection import AmqpConnection
from twinbus.namespace.server import NamespaceServer
from twinbus.values import Array, Symbol

MANAGEMENT = "orders/$management"


async def locked(peer: Peer, link: Link, *bodies: str) -> list[Delivered]:
    """Send messages, and receive them in peek-lock mode."""
    peer.send(await peer.sender("orders"), *bodies)
    await peer.answers(len(bodies))
    peer.grant(link, len(bodies))
    return await peer.received(link, len(bodies))


def dispose(peer: Peer, link: Link, first: int, last: int, state: DeliveryState | None, settled: bool = False) -> None:
    link.session.dispose(RECEIVER, first, last, settled=settled, state=state)
    peer.flush()


async def left(peer: Peer, node: str = MANAGEMENT) -> list[str]:
    """Return the bodies that can be peeked."""
    reply = await peer.ask(node, "com.microsoft:peek-message", {"message-count": 100})
    found = (reply["body"] or {}).get("messages", ())
    return [str(split_sections(entry["message"]).properties.message_id) for entry in found]


def outcomes(answers: Sequence[Disposed]) -> list[tuple[int, int, str | None]]:
    """Return first id, last id and error condition of each confirmation."""
    return [
        (
            answer.first,
            answer.last,
            answer.state.error.condition if isinstance(answer.state, Rejected) and answer.state.error else None,
        )
        for answer in answers
    ]


async def test_a_range_is_confirmed_as_a_range(peer: Peer) -> None:
    link = await peer.receiver("orders")
    found = await locked(peer, link, *"abcd")
    dispose(peer, link, found[0].delivery_id, found[-1].delivery_id, ACCEPTED)
    answers = await peer.answers(4)
    assert [(answer.first, answer.last, answer.settled) for answer in answers] == [(0, 3, True)]
    assert isinstance(answers[0].state, Accepted)
    assert await left(peer) == []


async def test_in_a_range_the_lost_lock_is_named_and_the_others_are_settled(
    peer: Peer, server: NamespaceServer
) -> None:
    link = await peer.receiver("orders")
    found = await locked(peer, link, *"abcde")
    token = UUID(bytes_le=found[2].tag)
    body = {"disposition-status": "completed", "lock-tokens": Array(UUID, [token])}
    assert (await peer.ask(MANAGEMENT, "com.microsoft:update-disposition", body))["statusCode"] == 200
    dispose(peer, link, found[0].delivery_id, found[-1].delivery_id, ACCEPTED)
    lost = "com.microsoft:message-lock-lost"
    assert outcomes(await peer.answers(5)) == [(0, 1, None), (2, 2, lost), (3, 4, None)]
    assert await left(peer) == []


async def test_each_outcome_does_what_it_says(peer: Peer) -> None:
    link = await peer.receiver("orders")
    await locked(peer, link, *"abcde")
    why = {Symbol("DeadLetterReason"): "tired", Symbol("DeadLetterErrorDescription"): "of it"}
    states: list[DeliveryState] = [
        ACCEPTED,
        Released(),
        Modified(True, False),
        Modified(True, True),
        Rejected(Error("com.microsoft:dead-letter", None, why)),
    ]
    for number, state in enumerate(states):
        dispose(peer, link, number, number, state)
    answers = await peer.answers(5)
    assert [type(answer.state) for answer in answers] == [type(state) for state in states]
    assert answers[4].state == Rejected(None), "an error in it would be taken for a failure"
    assert sorted(await left(peer)) == ["b", "c", "d"]
    (dead,) = (await peer.ask("orders/$DeadLetterQueue/$management", "com.microsoft:peek-message", {}))["body"][
        "messages"
    ]
    told = split_sections(dead["message"]).application_properties
    assert (told["DeadLetterReason"], told["DeadLetterErrorDescription"]) == ("tired", "of it")


async def test_settled_twice_is_answered_once_and_unknown_deliveries_are_ignored(peer: Peer) -> None:
    link = await peer.receiver("orders")
    await locked(peer, link, "a")
    dispose(peer, link, 0, 0, ACCEPTED)
    dispose(peer, link, 0, 0, ACCEPTED)
    dispose(peer, link, 7, 4_000_000_000, ACCEPTED)
    await peer.answers(1)
    await peer.echo()
    assert not [event for event in peer.events if isinstance(event, Disposed)]


async def test_a_state_that_is_no_outcome_settles_nothing(peer: Peer) -> None:
    link = await peer.receiver("orders")
    await locked(peer, link, "a")
    dispose(peer, link, 0, 0, Received(1, 1))
    dispose(peer, link, 0, 0, None)
    dispose(peer, link, 0, 0, ACCEPTED)
    assert outcomes(await peer.answers(1)) == [(0, 0, None)]
    assert await left(peer) == []


async def test_settling_without_an_outcome_gives_the_message_back(peer: Peer) -> None:
    link = await peer.receiver("orders")
    await locked(peer, link, "a")
    dispose(peer, link, 0, 0, None, settled=True)
    peer.grant(link, 1)
    (again,) = await peer.received(link, 1)
    assert split_sections(again.payload).properties.message_id == "a"
    assert split_sections(again.payload).header.delivery_count == 0


async def test_a_presettled_disposition_gets_no_answer(peer: Peer) -> None:
    link = await peer.receiver("orders")
    await locked(peer, link, "a")
    dispose(peer, link, 0, 0, ACCEPTED, settled=True)
    assert await left(peer) == []
    assert not [event for event in peer.events if isinstance(event, Disposed)]


async def test_settlements_of_two_links_in_one_range_reach_both(peer: Peer) -> None:
    session = peer.session()
    one, two = await peer.receiver("orders", session), await peer.receiver("bills", session)
    for path in ("orders", "bills"):
        peer.send(await peer.sender(path), f"{path}-1")
    for link in (one, two):
        peer.grant(link, 1)
        await peer.received(link, 1)
    await peer.answers(2)
    dispose(peer, one, 0, 1, ACCEPTED)
    assert sum(answer.last - answer.first + 1 for answer in await peer.answers(2)) == 2
    assert await left(peer) == []
    assert await left(peer, "bills/$management") == []


async def test_a_message_whose_link_is_gone_is_settled_by_its_token(peer: Peer, server: NamespaceServer) -> None:
    link = await peer.receiver("orders")
    first, second = await locked(peer, link, "a", "b")
    link.detach()
    peer.flush()
    await peer.event(LinkDetached, link)
    # A disposition on the link that is gone does nothing; the lock token still works.
    dispose(peer, link, first.delivery_id, first.delivery_id, ACCEPTED)
    body: dict[str, Any] = {
        "disposition-status": "completed",
        "lock-tokens": Array(UUID, [UUID(bytes_le=first.tag), UUID(bytes_le=second.tag)]),
    }
    assert (await peer.ask(MANAGEMENT, "com.microsoft:update-disposition", body))["statusCode"] == 200
    again = await peer.ask(MANAGEMENT, "com.microsoft:update-disposition", body)
    assert (again["statusCode"], again["errorCondition"]) == (410, "com.microsoft:message-lock-lost")
    assert await left(peer) == []


async def test_links_that_come_and_go_on_one_session_leave_nothing_behind(peer: Peer, server: NamespaceServer) -> None:
    session = peer.session()
    for number in range(20):
        link = await peer.receiver("orders", session, name=f"r{number}")
        await locked(peer, link, f"m{number}")
        link.detach()
        peer.flush()
        await peer.event(LinkDetached, link)
    (connection,) = accepted_connections(server)
    assert isinstance(connection._handler, AmqpConnection)
    assert len(connection._handler._unsettled) == 0
    assert sum(map(len, connection._handler._unsettled._by_session.values())) == 0


async def test_deliveries_whose_lock_is_gone_are_settled(
    peer: Peer, server: NamespaceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinbus.namespace.front.unsettled._CHECK_STEP", 4)
    link = await peer.receiver("orders")
    gone = await locked(peer, link, *"abc")
    tokens = Array(UUID, [UUID(bytes_le=delivery.tag) for delivery in gone])
    settled = await peer.ask(
        MANAGEMENT, "com.microsoft:update-disposition", {"disposition-status": "completed", "lock-tokens": tokens}
    )
    assert settled["statusCode"] == 200
    [kept] = await locked(peer, link, "d")
    [told] = await peer.answers(3)
    assert (told.first, told.last, told.settled, told.state) == (0, 2, True, Released())
    [connection] = accepted_connections(server)
    assert isinstance(connection._handler, AmqpConnection)
    unsettled = connection._handler._unsettled
    assert len(unsettled) == 1
    assert [list(entries) for entries in unsettled._by_session.values()] == [[kept.delivery_id]]
    dispose(peer, link, 1, 1, ACCEPTED)
    assert outcomes(await peer.answers(1)) == [(1, 1, "com.microsoft:message-lock-lost")]
    dispose(peer, link, kept.delivery_id, kept.delivery_id, ACCEPTED)
    assert outcomes(await peer.answers(1)) == [(3, 3, None)]
    assert await left(peer) == []
