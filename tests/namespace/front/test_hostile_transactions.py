"""Transactions of peers that misbehave: nothing is carried out in part, and the connection stays usable."""

from collections.abc import Awaitable, Callable

import pytest

from tests.amqp.transaction_requests import discharge
from tests.namespace.front.amqp_peer import Peer
from tests.namespace.front.test_transaction_coordinator import condition_of_sent, left, locked
from tests.namespace.front.transaction_peer import TransactionPeer, condition
from twinbus.amqp import ACCEPTED, RECEIVER, Properties, SessionEnded, build_message, transactional_state
from twinbus.namespace.front import transaction_coordinator
from twinbus.namespace.server import NamespaceServer
from twinbus.values import Symbol, Timestamp

Dial = Callable[..., Awaitable[Peer]]


@pytest.fixture
async def acting(peer: Peer) -> TransactionPeer:
    return await TransactionPeer.on(peer)


async def test_sending_via_an_entity_is_refused_by_name(peer: Peer) -> None:
    properties = {Symbol("com.microsoft:transfer-destination-address"): "bills"}
    link = peer.attach_sender("orders", properties=properties)
    assert (await peer.refused(link)).startswith("amqp:not-implemented Sending via 'orders' to another entity")


async def test_two_coordinators_on_one_session_end_what_either_began(peer: Peer) -> None:
    session = peer.session()
    one, other = await TransactionPeer.on(peer, session), await TransactionPeer.on(peer, session)
    orders = await peer.sender("orders", session)
    first, second = await one.begin(), await other.begin()
    await one.send(orders, first, "a")
    await one.send(orders, second, "b")
    assert await other.commit(first) is None
    assert await one.roll_back(second) is None
    assert await left(peer, "orders") == ["a"]
    one.link.detach()
    peer.flush()
    assert await other.commit(await other.begin()) is None


async def test_a_transaction_is_unknown_on_another_connection(acting: TransactionPeer, dial: Dial) -> None:
    name = await acting.begin()
    await acting.send(await acting.peer.sender("orders"), name, "a")
    stranger = await dial()
    assert await stranger.put_token() == 202
    other = await TransactionPeer.on(stranger)
    assert await other.roll_back(name) == "amqp:transaction:unknown-id"
    (answer,) = await other.send(await stranger.sender("orders"), name, "b")
    assert condition(answer.state) == "amqp:transaction:unknown-id"
    assert await acting.commit(name) is None
    assert await left(stranger, "orders") == ["a"]


async def test_a_discharge_right_before_the_detach_is_carried_out(acting: TransactionPeer) -> None:
    peer = acting.peer
    name = await acting.begin()
    await acting.send(await peer.sender("orders"), name, "a")
    acting.link.send(b"last", build_message(value=discharge(name, fail=False)))
    acting.link.detach()
    peer.flush()
    await peer.echo()
    assert await left(peer, "orders") == ["a"]


async def test_the_link_a_message_came_on_may_be_gone_when_its_transaction_ends(acting: TransactionPeer) -> None:
    peer = acting.peer
    (found,) = await locked(peer, "orders", "in")
    name = await acting.begin()
    await acting.settle(found, name)
    found.link.detach()
    peer.flush()
    assert await acting.commit_settled(name) is None
    assert await left(peer, "orders") == []


async def test_the_session_a_message_came_on_may_be_gone_when_its_transaction_ends(acting: TransactionPeer) -> None:
    peer = acting.peer
    (found,) = await locked(peer, "orders", "in")
    name = await acting.begin()
    await acting.settle(found, name)
    found.link.session.end()
    peer.flush()
    await peer.event(SessionEnded)
    assert await acting.commit(name) is None
    assert await left(peer, "orders") == []


async def test_a_receiver_that_gave_up_a_session_cannot_settle_its_messages_in_a_transaction(
    acting: TransactionPeer,
) -> None:
    peer = acting.peer
    peer.send(await peer.sender("visits"), "in", session="s")
    await peer.answers(1)
    link = await peer.receiver("visits", wanted="s")
    peer.grant(link, 1)
    (found,) = await peer.received(link, 1)
    kept, lost = await acting.begin(), await acting.begin()
    await acting.settle(found, lost)
    assert await acting.roll_back(kept) is None
    link.detach()
    peer.flush()
    assert await acting.commit(lost) == "amqp:transaction:rollback"
    assert await left(peer, "visits") == ["in"]


async def test_messages_of_a_session_are_settled_and_sent_in_a_transaction(acting: TransactionPeer) -> None:
    peer = acting.peer
    visits = await peer.sender("visits")
    peer.send(visits, "in", session="s")
    await peer.answers(1)
    link = await peer.receiver("visits", wanted="s")
    peer.grant(link, 1)
    (found,) = await peer.received(link, 1)
    name = await acting.begin()
    await acting.settle(found, name)
    payload = build_message(properties=Properties(message_id="out", group_id="s"), data=b"out")
    visits.send(b"out", payload, state=transactional_state(name))
    peer.flush()
    await peer.answers(1)
    assert await acting.commit_settled(name) is None
    assert await left(peer, "visits") == ["out"]
    peer.grant(link, 1)
    (found,) = await peer.received(link, 1)
    assert found.link is link


async def test_a_scheduled_message_waits_for_its_transaction_and_then_for_its_time(
    acting: TransactionPeer, server: NamespaceServer
) -> None:
    peer = acting.peer
    orders = await peer.sender("orders")
    due = Timestamp(server.runtime.now() + 3_600_000)
    payload = build_message(
        message_annotations={Symbol("x-opt-scheduled-enqueue-time"): due},
        properties=Properties(message_id="later"),
        data=b"later",
    )
    kept, dropped = await acting.begin(), await acting.begin()
    for name in (kept, dropped):
        orders.send(name, payload, state=transactional_state(name))
    peer.flush()
    await peer.answers(2)
    assert await acting.commit(kept) is None
    assert await acting.roll_back(dropped) is None
    info = server.runtime.info("orders")
    assert info is not None
    assert (info.counts.active, info.counts.scheduled) == (0, 1)


async def test_a_presettled_disposition_is_carried_out_with_its_transaction(acting: TransactionPeer) -> None:
    peer = acting.peer
    (found,) = await locked(peer, "orders", "in")
    name = await acting.begin()
    found.link.session.dispose(RECEIVER, found.delivery_id, settled=True, state=transactional_state(name, ACCEPTED))
    peer.flush()
    assert await left(peer, "orders") == ["in"]
    assert await acting.commit(name) is None
    assert await left(peer, "orders") == []


async def test_transactions_that_timed_out_and_were_never_ended_make_room_for_others(
    acting: TransactionPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_coordinator, "_MAX_OPEN", 2)
    monkeypatch.setattr(transaction_coordinator.Transactions, "declare", _declare_for_no_time)
    orders, name = await acting.peer.sender("orders"), b""
    for number in range(5):
        name = await acting.begin()
        while condition_of_sent((await acting.send(orders, name, f"{number}"))[0]) is None:
            pass
    assert await acting.commit(name) == "amqp:transaction:timeout"


_declare = transaction_coordinator.Transactions.declare


def _declare_for_no_time(self: transaction_coordinator.Transactions) -> object:
    self.timeout = 0.0
    return _declare(self)
