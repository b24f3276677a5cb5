"""Transactions: sends and settlements on several entities are committed together or not at all."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from azure.servicebus._pyamqp._decode import decode_payload
from azure.servicebus._pyamqp._encode import encode_payload
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from azure.servicebus.amqp import AmqpAnnotatedMessage

from tests.amqp.transaction_requests import declare, discharge
from tests.compat.python.random_messages import random_message
from tests.namespace.front.amqp_peer import Peer
from tests.namespace.front.transaction_peer import TransactionPeer, condition
from tests.tiers import budget
from twinbus.amqp import (
    ACCEPTED,
    RECEIVER,
    Accepted,
    Delivered,
    Disposed,
    LinkFlowed,
    Modified,
    Properties,
    Rejected,
    build_message,
    read_transactional,
    split_sections,
    transactional_state,
)
from twinbus.namespace.front import transaction_coordinator
from twinbus.namespace.server import NamespaceServer
from twinbus.values import Described, Int, Long, Timestamp, ULong


async def left(peer: Peer, entity: str) -> list[str]:
    reply = await peer.ask(f"{entity}/$management", "com.microsoft:peek-message", {"message-count": 200})
    found = (reply["body"] or {}).get("messages", ())
    return [str(split_sections(entry["message"]).properties.message_id) for entry in found]


async def locked(peer: Peer, entity: str, *bodies: str) -> list[Delivered]:
    peer.send(await peer.sender(entity), *bodies)
    await peer.answers(len(bodies))
    link = await peer.receiver(entity)
    peer.grant(link, len(bodies))
    return await peer.received(link, len(bodies))


@pytest.fixture
async def acting(peer: Peer) -> TransactionPeer:
    return await TransactionPeer.on(peer)


async def test_n1_a_message_that_is_sent_on_in_a_transaction_may_have_annotations_of_any_type(
    acting: TransactionPeer,
) -> None:
    # As the Python client writes a message that it received: text as binary, numbers and instants as ints.
    peer = acting.peer
    link, name = await peer.sender("orders"), await acting.begin()
    annotations = {
        "x-opt-partition-key": b"key",
        "x-opt-scheduled-enqueue-time": Int(5),
        "x-opt-sequence-number": Int(9),
    }
    payload = build_message(message_annotations=annotations, properties=Properties(message_id=b"id"), data=b"x")
    link.send(b"1", payload, state=transactional_state(name))
    peer.flush()
    (answer,) = await peer.answers(1)
    told = read_transactional(answer.state)
    assert told is not None
    assert type(told.outcome) is Accepted
    assert await acting.commit(name) is None
    reply = await peer.ask("orders/$management", "com.microsoft:peek-message", {"message-count": 10})
    (entry,) = reply["body"]["messages"]
    stored = split_sections(entry["message"]).message_annotations
    assert stored["x-opt-partition-key"] == "key"
    assert type(stored["x-opt-scheduled-enqueue-time"]) is Timestamp
    assert stored["x-opt-sequence-number"] != 9


def as_sent_on(seed: int) -> bytes:
    """Return what the Python SDK sends when it sends on a random message that it received."""
    first = bytes(encode_payload(bytearray(), PyamqpTransport.to_outgoing_amqp_message(random_message(seed))))
    received = AmqpAnnotatedMessage(message=decode_payload(memoryview(first)))
    return bytes(encode_payload(bytearray(), PyamqpTransport.to_outgoing_amqp_message(received)))


def carried(raw: bytes) -> dict[str, Any]:
    """Return what a message carries, without what the namespace adds to it."""
    sections = split_sections(raw)
    added = ("x-opt-sequence-number", "x-opt-enqueued-time", "x-opt-message-state", "x-opt-enqueue-sequence-number")
    return {
        "properties": replace(sections.properties, message_id=None),
        "annotations": {key: each for key, each in sections.message_annotations.items() if key not in added},
        "application properties": sections.application_properties,
        "delivery annotations": sections.delivery_annotations,
        "footer": sections.footer,
        "body": [bytes(sections.raw[start:end]) for _, start, end in sections.body],
    }


async def peeked(peer: Peer, entity: str, sequence_number: int) -> bytes:
    request = {"from-sequence-number": Long(sequence_number), "message-count": 1}
    reply = await peer.ask(f"{entity}/$management", "com.microsoft:peek-message", request)
    (entry,) = reply["body"]["messages"]
    return bytes(entry["message"])


async def test_n1_random_messages_that_are_sent_on_in_transactions_are_stored_as_without(
    acting: TransactionPeer,
) -> None:
    peer, count = acting.peer, budget(25, 100, 1000)
    plain, in_transaction = await peer.sender("orders"), await peer.sender("bills")
    for first in range(0, count, 5):
        payloads = [as_sent_on(seed) for seed in range(first, first + 5)]
        name = await acting.begin()
        for number, payload in enumerate(payloads):
            plain.send(b"%d" % number, payload)
            in_transaction.send(b"%d" % number, payload, state=transactional_state(name))
        peer.flush()
        for answer in await peer.answers(2 * len(payloads)):
            told = read_transactional(answer.state)
            assert type(answer.state if told is None else told.outcome) is Accepted
        assert await acting.commit(name) is None
    for sequence_number in range(1, count + 1):
        without, within = [await peeked(peer, entity, sequence_number) for entity in ("orders", "bills")]
        assert carried(within) == carried(without), f"seed {sequence_number - 1}"


async def test_a_commit_makes_messages_visible_in_all_entities(acting: TransactionPeer) -> None:
    peer = acting.peer
    orders, bills, events = [await peer.sender(name) for name in ("orders", "bills", "events")]
    name = await acting.begin()
    answers = await acting.send(orders, name, "a", "b") + await acting.send(bills, name, "c")
    answers += await acting.send(events, name, "d")
    for answer in answers:
        told = read_transactional(answer.state)
        assert told is not None
        assert (told.transaction, type(told.outcome)) == (name, Accepted)
    assert await left(peer, "orders") == await left(peer, "bills") == []
    assert await acting.commit(name) is None
    assert await left(peer, "orders") == ["a", "b"]
    assert await left(peer, "bills") == ["c"]
    assert await left(peer, "events/Subscriptions/first") == ["d"]


async def test_a_rollback_drops_the_messages(acting: TransactionPeer) -> None:
    name = await acting.begin()
    await acting.send(await acting.peer.sender("orders"), name, "a")
    assert await acting.roll_back(name) is None
    assert await left(acting.peer, "orders") == []
    assert await acting.commit(name) == "amqp:transaction:unknown-id"


async def test_a_settlement_and_a_send_are_committed_together(acting: TransactionPeer) -> None:
    peer = acting.peer
    (found,) = await locked(peer, "orders", "in")
    bills = await peer.sender("bills")
    name = await acting.begin()
    answer = await acting.settle(found, name)
    assert not answer.settled
    await acting.send(bills, name, "out")
    assert await left(peer, "orders") == ["in"]
    acting.link.send(b"end", build_message(value=discharge(name, fail=False)))
    peer.flush()
    ends = await peer.answers(2)
    assert {answer.role for answer in ends} == {True, False}
    assert all(answer.settled for answer in ends)
    assert (await left(peer, "orders"), await left(peer, "bills")) == ([], ["out"])


async def test_after_a_rollback_the_message_is_still_locked_and_can_be_settled(acting: TransactionPeer) -> None:
    peer = acting.peer
    (found,) = await locked(peer, "orders", "in")
    name = await acting.begin()
    await acting.settle(found, name)
    assert await acting.roll_back(name) is None
    assert await left(peer, "orders") == ["in"]
    found.link.session.dispose(RECEIVER, found.delivery_id, settled=False, state=ACCEPTED)
    peer.flush()
    (answer,) = await peer.answers(1)
    assert (answer.settled, type(answer.state)) == (True, Accepted)
    assert await left(peer, "orders") == []


async def test_a_lost_lock_rolls_back_the_transaction(acting: TransactionPeer) -> None:
    peer = acting.peer
    first, second = await locked(peer, "orders", "a", "b")
    name = await acting.begin()
    await acting.send(await peer.sender("bills"), name, "out")
    await acting.settle(first, name)
    await acting.settle(second, name, Modified(delivery_failed=True))
    second.link.session.dispose(RECEIVER, second.delivery_id, settled=False, state=ACCEPTED)
    peer.flush()
    await peer.answers(1)
    assert await acting.commit(name) == "amqp:transaction:rollback"
    assert (await left(peer, "orders"), await left(peer, "bills")) == (["a"], [])


async def test_a_transaction_takes_a_hundred_messages_and_one_more_rolls_it_back(acting: TransactionPeer) -> None:
    peer = acting.peer
    orders = await peer.sender("orders")
    bodies = [str(number) for number in range(100)]
    whole, over = await acting.begin(), await acting.begin()
    await acting.send(orders, whole, *bodies)
    await acting.send(orders, over, *bodies)
    (answer,) = await acting.send(orders, over, "one more")
    assert condition(answer.state) == "amqp:resource-limit-exceeded"
    assert await acting.commit(over) == "amqp:transaction:rollback"
    assert await left(peer, "orders") == []
    assert await acting.commit(whole) is None
    assert await left(peer, "orders") == bodies


async def test_a_refused_message_rolls_back_the_transaction(acting: TransactionPeer) -> None:
    peer = acting.peer
    name = await acting.begin()
    await acting.send(await peer.sender("orders"), name, "good")
    await acting.send(await peer.sender("visits"), name, "without a session")
    assert await acting.commit(name) == "amqp:transaction:rollback"
    assert await left(peer, "orders") == []


async def test_a_transaction_times_out_by_itself(
    dial: Callable[..., Awaitable[Peer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_out = asyncio.Event()

    def time_out(self: transaction_coordinator.Transactions, transaction: bytes) -> None:
        _time_out(self, transaction)
        timed_out.set()

    monkeypatch.setattr(transaction_coordinator.Transactions, "declare", _declare_for_a_moment)
    monkeypatch.setattr(transaction_coordinator.Transactions, "_time_out", time_out)
    peer = await dial()
    assert await peer.put_token() == 202
    acting = await TransactionPeer.on(peer)
    name = await acting.begin()
    orders = await peer.sender("orders")
    await acting.send(orders, name, "early")  # on a slow machine, late
    await timed_out.wait()
    assert condition_of_sent((await acting.send(orders, name, "late"))[0]) == "amqp:transaction:timeout"
    assert await acting.commit(name) == "amqp:transaction:timeout"
    assert await left(peer, "orders") == []


_declare = transaction_coordinator.Transactions.declare
_time_out = transaction_coordinator.Transactions._time_out


def _declare_for_a_moment(self: transaction_coordinator.Transactions) -> Any:
    self.timeout = 0.01
    return _declare(self)


def condition_of_sent(answer: Disposed) -> str | None:
    return condition(answer.state) if isinstance(answer.state, Rejected) else None


async def test_a_transaction_is_rolled_back_when_its_link_or_connection_ends(
    acting: TransactionPeer, dial: Callable[..., Awaitable[Peer]]
) -> None:
    peer = acting.peer
    name = await acting.begin()
    orders = await peer.sender("orders")
    await acting.send(orders, name, "a")
    acting.link.detach()
    peer.flush()
    again = await TransactionPeer.on(peer)
    assert await again.commit(name) == "amqp:transaction:unknown-id"
    assert await left(peer, "orders") == []
    name = await again.begin()
    await again.send(orders, name, "b")
    peer.close()
    other = await dial()
    assert await other.put_token() == 202
    assert await left(other, "orders") == []


@pytest.mark.parametrize("value", [None, "text", Described(ULong(0x32), [1, 2]), Described(ULong(0x99), [])])
async def test_an_invalid_coordinator_request_is_rejected(acting: TransactionPeer, value: Any) -> None:
    assert condition(await acting.request(value)) == "amqp:decode-error"


async def test_unknown_transactions_are_refused_for_sends_and_settlements(acting: TransactionPeer) -> None:
    peer = acting.peer
    (found,) = await locked(peer, "orders", "in")
    (answer,) = await acting.send(await peer.sender("bills"), b"nobody", "x")
    assert condition(answer.state) == "amqp:transaction:unknown-id"
    assert condition((await acting.settle(found, b"nobody")).state) == "amqp:transaction:unknown-id"
    assert (await left(peer, "orders"), await left(peer, "bills")) == (["in"], [])


async def test_a_request_to_a_node_cannot_be_part_of_a_transaction_and_rolls_it_back(acting: TransactionPeer) -> None:
    peer = acting.peer
    node = peer.attach_sender("orders/$management")
    await peer.event(LinkFlowed, node)
    name = await acting.begin()
    await acting.send(await peer.sender("bills"), name, "x")
    (answer,) = await acting.send(node, name, "a request")
    assert condition(answer.state) == "amqp:not-implemented"
    assert await acting.commit(name) == "amqp:transaction:rollback"
    assert await left(peer, "bills") == []


async def test_an_empty_transaction_is_committed(acting: TransactionPeer, server: NamespaceServer) -> None:
    assert await acting.commit(await acting.begin()) is None


async def test_a_connection_has_a_hundred_transactions_at_most(acting: TransactionPeer) -> None:
    names = [await acting.begin() for _ in range(100)]
    assert condition(await acting.request(declare())) == "amqp:resource-limit-exceeded"
    assert await acting.roll_back(names[0]) is None
    await acting.begin()
