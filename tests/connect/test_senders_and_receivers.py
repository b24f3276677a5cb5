"""Senders and receivers against a peer that counts frames: what they send, and how they handle the answers."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from twinbus.amqp import (
    ACCEPTED,
    BATCH_FORMAT,
    RECEIVER,
    SENDER,
    Accepted,
    DeliveryState,
    Error,
    Rejected,
    Released,
    batch_messages,
    split_sections,
)
from twinbus.connect import (
    RECEIVE_AND_DELETE,
    ReceivedMessage,
    Receiver,
    Sender,
    ServiceBusConnection,
    Token,
    connect,
    encode_message,
)
from twinbus.connect.errors import (
    MessageAlreadySettled,
    MessageLockLostError,
    MessageSizeExceededError,
    MessagingEntityDisabledError,
    ServiceBusArgumentError,
    ServiceBusConnectionError,
    ServiceBusServerBusyError,
)
from twinbus.connect.tokens import SAS_TYPE
from twinbus.message import Message
from twinbus.values import Condition

from .peer import Peer, listening


def encoded(text: str) -> bytes:
    return encode_message(Message(text), 0)


def numbered(number: int) -> bytes:
    return encode_message(Message(str(number), annotations={"x-opt-sequence-number": number}), 0)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with listening() as found:
        yield found


@pytest.fixture
async def bus(peer: Peer) -> AsyncIterator[ServiceBusConnection]:
    async with connect(peer.endpoint, timeout=10) as found:
        yield found


@pytest.fixture
async def sender(bus: ServiceBusConnection) -> Sender:
    return await bus.sender("q")


@pytest.fixture
async def receiver(bus: ServiceBusConnection, peer: Peer) -> Receiver:
    found = await bus.receiver("q", prefetch=10)
    await peer.until(lambda: peer.line.link("q").credit)
    return found


class TestSending:
    async def test_many_messages_travel_in_batches_as_large_as_the_link_takes(self, sender: Sender, peer: Peer) -> None:
        messages = [encoded("x" * 500) for _ in range(40)]
        await sender.send(messages)
        assert {event.message_format for event in peer.received} == {BATCH_FORMAT}
        assert [raw for event in peer.received for raw in batch_messages(event.payload)] == messages
        assert len(peer.received) == 3
        assert all(len(event.payload) <= 10_000 for event in peer.received)

    async def test_one_message_travels_plain(self, sender: Sender, peer: Peer) -> None:
        await sender.send([Message(b"body", message_id="1")])
        (event,) = peer.received
        assert event.message_format == 0
        assert split_sections(event.payload).data == [b"body"]

    async def test_an_empty_send_sends_nothing(self, sender: Sender, peer: Peer) -> None:
        await sender.send([])
        assert peer.received == []

    async def test_a_message_too_large_for_the_link_is_refused_before_anything_is_sent(
        self, sender: Sender, peer: Peer
    ) -> None:
        assert sender.max_message_size == 10_000
        with pytest.raises(MessageSizeExceededError):
            await sender.send([Message(b"small"), Message(b"x" * 10_000)])
        assert peer.received == []

    async def test_a_refused_batch_fails_the_call_and_names_its_messages_only(self, sender: Sender, peer: Peer) -> None:
        peer.answers = False
        messages = [Message("x" * 6000, message_id=str(number)) for number in range(3)]
        task = asyncio.ensure_future(sender.send(messages))
        await peer.until(lambda: len(peer.received) == 3)
        session = peer.received[0].link.session
        busy = Rejected(Error(Condition.SERVER_BUSY, "later"))
        outcomes: list[DeliveryState] = [ACCEPTED, busy, ACCEPTED]
        for event, state in zip(peer.received, outcomes, strict=True):
            session.dispose(RECEIVER, event.delivery_id, settled=True, state=state)
        peer.line.flush()
        with pytest.raises(ServiceBusServerBusyError, match="later") as caught:
            await task
        assert caught.value.failed == (messages[1],)

    async def test_a_released_message_was_not_accepted(self, sender: Sender, peer: Peer) -> None:
        peer.outcome = Released()
        message = Message(b"")
        with pytest.raises(Exception, match="Released") as caught:
            await sender.send([message])
        assert getattr(caught.value, "failed", None) == (message,)

    async def test_pipelined_messages_are_in_flight_together_and_bounded_by_credit(
        self, bus: ServiceBusConnection, peer: Peer
    ) -> None:
        peer.credit, peer.answers = 5, False
        sender = await bus.sender("q")
        await sender.room()
        futures = [sender.send_soon(encoded(str(number))) for number in range(8)]
        waiting = asyncio.ensure_future(sender.room())
        await peer.until(lambda: len(peer.received) == 5)
        assert not waiting.done()
        link = peer.line.link("q")
        link.flow(5)
        peer.line.flush()
        await waiting
        await peer.until(lambda: len(peer.received) == 8)
        link.session.dispose(RECEIVER, peer.received[0].delivery_id, peer.received[-1].delivery_id, settled=True,
                             state=ACCEPTED)  # fmt: skip
        peer.line.flush()
        await asyncio.gather(*futures)
        assert [split_sections(event.payload).data for event in peer.received] == [[str(n).encode()] for n in range(8)]

    async def test_an_unsettled_outcome_is_settled_by_the_sender(self, sender: Sender, peer: Peer) -> None:
        peer.answers = False
        task = asyncio.ensure_future(sender.send([Message(b"")]))
        await peer.until(lambda: peer.received)
        event = peer.received[0]
        event.link.session.dispose(RECEIVER, event.delivery_id, settled=False, state=ACCEPTED)
        peer.line.flush()
        await task
        await peer.until(lambda: peer.settled)
        assert (peer.settled[0].role, peer.settled[0].settled) == (SENDER, True)

    async def test_the_next_call_after_a_break_attaches_again(self, sender: Sender, peer: Peer) -> None:
        peer.answers = False
        task = asyncio.ensure_future(sender.send([Message(b"1")]))
        await peer.until(lambda: peer.received)
        peer.line.abort()
        with pytest.raises(ServiceBusConnectionError, match="broke"):
            await task
        peer.answers = True
        await sender.send([Message(b"2")])
        assert [split_sections(event.payload).data for event in peer.received] == [[b"1"], [b"2"]]
        assert len(peer.lines) == 2

    @pytest.mark.parametrize("end", ["link", "session", "connection"])
    async def test_an_error_that_ends_a_link_is_no_answer_to_operations_in_flight(
        self, sender: Sender, peer: Peer, end: str
    ) -> None:
        peer.answers = False
        message = Message(b"1")
        task = asyncio.ensure_future(sender.send([message]))
        await peer.until(lambda: peer.received)
        link, why = peer.line.link("q"), Error(Condition.ENTITY_DISABLED, "not now")
        match end:
            case "link":
                link.detach(error=why)
            case "session":
                link.session.end(why)
            case _:
                peer.line.core.close(why)
        peer.line.flush()
        with pytest.raises(MessagingEntityDisabledError) as caught:
            await task
        assert (caught.value.cut_off, caught.value.failed) == (True, (message,))

    async def test_a_rejection_and_an_attach_that_is_refused_are_answers(
        self, bus: ServiceBusConnection, sender: Sender, peer: Peer
    ) -> None:
        why = Error(Condition.ENTITY_DISABLED, "not now")
        peer.outcome = Rejected(why)
        with pytest.raises(MessagingEntityDisabledError) as rejected:
            await sender.send([Message(b"1")])
        peer.attach_error = why
        with pytest.raises(MessagingEntityDisabledError) as refused:
            await bus.sender("another")
        assert not rejected.value.cut_off
        assert not refused.value.cut_off

    async def test_a_detached_link_is_attached_again_on_the_same_connection(self, sender: Sender, peer: Peer) -> None:
        await sender.room()
        peer.line.link("q").detach(error=Error("amqp:link:detach-forced", "idle for 10 minutes"))
        peer.line.flush()
        peer.answers = False
        with pytest.raises(ServiceBusConnectionError, match="idle"):
            await sender.send_soon(encoded("too late"))
        peer.answers = True
        await sender.room()
        await sender.send_soon(encoded("again"))
        assert len(peer.lines) == 1
        assert peer.attaches.count("q") == 2


class TestReceiving:
    async def test_receive_returns_what_is_there_up_to_max_messages(self, receiver: Receiver, peer: Peer) -> None:
        peer.line.deliver("q", *map(numbered, range(5)))
        first = await receiver.receive(3, 5)
        assert [message.sequence_number for message in first] == [0, 1, 2]
        assert [message.body for message in await receiver.receive(3, 5)] == [b"3", b"4"]

    async def test_receive_returns_an_empty_list_after_max_wait(self, receiver: Receiver) -> None:
        assert await receiver.receive(1, 0.02) == []
        assert await receiver.receive(1, 0) == []

    async def test_max_messages_must_be_positive(self, receiver: Receiver) -> None:
        with pytest.raises(ServiceBusArgumentError):
            await receiver.receive(0, 1)

    async def test_credit_is_given_back_as_messages_are_taken(self, receiver: Receiver, peer: Peer) -> None:
        link = peer.line.link("q")
        peer.line.deliver("q", *map(numbered, range(10)))
        assert link.credit == 0
        await receiver.receive(4, 5)
        await receiver.receive(4, 5)
        await peer.until(lambda: link.credit == 8)

    async def test_without_prefetch_credit_is_given_for_one_call_and_taken_back(
        self, bus: ServiceBusConnection, peer: Peer
    ) -> None:
        receiver = await bus.receiver("q", prefetch=0)
        link = peer.line.link("q")
        assert link.credit == 0
        task = asyncio.ensure_future(receiver.receive(5, 5))
        await peer.until(lambda: link.credit == 5)
        peer.line.deliver("q", numbered(1), numbered(2))
        assert [message.sequence_number for message in await task] == [1, 2]
        assert link.credit == 0
        assert await receiver.receive(5, 0.02) == []
        assert link.credit == 0

    async def test_prefetched_messages_are_released_on_close(self, receiver: Receiver, peer: Peer) -> None:
        peer.line.deliver("q", *map(numbered, range(5)))
        taken = await receiver.receive(2, 5)
        await receiver.close()
        (released,) = peer.settled
        assert (released.settled, released.state) == (True, Released())
        assert released.delivery_ids == [taken[-1].delivery_id + step for step in (1, 2, 3)]

    async def test_messages_deleted_on_the_server_survive_the_loss_of_their_link(
        self, bus: ServiceBusConnection, peer: Peer
    ) -> None:
        receiver = await bus.receiver("q", mode=RECEIVE_AND_DELETE, prefetch=10)
        await peer.until(lambda: peer.line.link("q").credit)
        link = peer.line.link("q")
        for number in range(3):
            link.send(b"tag", numbered(number), settled=True)
        peer.line.flush()
        (first,) = await receiver.receive(1, 5)
        assert first.is_settled
        peer.line.abort()
        rest: list[ReceivedMessage] = []
        while len(rest) < 2:
            try:
                rest += await receiver.receive(1, 5)
            except ServiceBusConnectionError:
                continue
        assert [message.sequence_number for message in rest] == [1, 2]
        with pytest.raises(MessageAlreadySettled):
            await receiver.complete(rest)


class TestSettling:
    async def test_consecutive_deliveries_are_settled_in_one_disposition(self, receiver: Receiver, peer: Peer) -> None:
        peer.line.deliver("q", *map(numbered, range(6)))
        messages = await receiver.receive(6, 5)
        await receiver.complete([messages[4], messages[0], messages[1], messages[5], messages[2]])
        ids = [message.delivery_id for message in messages]
        assert [(event.first, event.last) for event in peer.settled] == [(ids[0], ids[2]), (ids[4], ids[5])]
        assert [event.settled for event in peer.settled] == [False, False]
        assert [message.is_settled for message in messages] == [True, True, True, False, True, True]

    async def test_confirmations_may_come_in_any_pieces_and_failures_are_named(
        self, receiver: Receiver, peer: Peer
    ) -> None:
        peer.line.deliver("q", *map(numbered, range(6)))
        messages = await receiver.receive(6, 5)
        peer.answers = False
        task = asyncio.ensure_future(receiver.complete(messages))
        await peer.until(lambda: peer.settled)
        session = peer.settled[0].session
        ids = [message.delivery_id for message in messages]
        lost = Rejected(Error(Condition.MESSAGE_LOCK_LOST, "expired"))
        session.dispose(SENDER, ids[4], ids[5], settled=True, state=Accepted())
        session.dispose(SENDER, ids[0], settled=True, state=Accepted())
        session.dispose(SENDER, ids[1], ids[2], settled=True, state=lost)
        peer.line.flush()
        session.dispose(SENDER, ids[3], settled=True, state=Accepted())
        peer.line.flush()
        with pytest.raises(MessageLockLostError, match=r"2 of 6 \(sequence number 1, 2\): expired") as caught:
            await task
        assert caught.value.failed == (messages[1], messages[2])

    async def test_a_message_is_settled_once(self, receiver: Receiver, peer: Peer) -> None:
        peer.line.deliver("q", numbered(1))
        messages = await receiver.receive(1, 5)
        await receiver.complete(messages)
        with pytest.raises(MessageAlreadySettled):
            await receiver.complete(messages)

    async def test_a_message_that_is_being_settled_is_not_settled_again(self, receiver: Receiver, peer: Peer) -> None:
        peer.line.deliver("q", numbered(1))
        messages = await receiver.receive(1, 5)
        peer.answers = False
        task = asyncio.ensure_future(receiver.complete(messages))
        await peer.until(lambda: peer.settled)
        with pytest.raises(MessageAlreadySettled):
            await receiver.abandon(messages)
        with pytest.raises(MessageAlreadySettled):
            await receiver.complete(messages * 2)
        event = peer.settled[0]
        event.session.dispose(SENDER, event.first, settled=True, state=Accepted())
        peer.line.flush()
        await task

    async def test_a_message_whose_link_is_gone_is_settled_by_its_lock_token(
        self, receiver: Receiver, peer: Peer
    ) -> None:
        peer.line.deliver("q", numbered(1), numbered(2))
        messages = await receiver.receive(2, 5)
        peer.line.link("q").detach(error=Error("amqp:link:detach-forced", "idle"))
        peer.line.flush()
        with pytest.raises(ServiceBusConnectionError):
            await receiver.receive(1, 5)
        await receiver.complete(messages)
        assert peer.requests == ["com.microsoft:update-disposition"] * 2
        assert all(message.is_settled for message in messages)


class ShortLived:
    """Tokens that expire after a moment."""

    def __init__(self) -> None:
        self.made = 0

    async def token(self, audience: str) -> Token:
        self.made += 1
        return Token(f"token {self.made}", SAS_TYPE, 1 if self.made < 3 else 3600)


class Frozen:
    def now(self) -> int:
        return 900


class TestTokens:
    async def test_a_token_is_put_once_for_each_entity_of_a_connection(
        self, bus: ServiceBusConnection, peer: Peer
    ) -> None:
        receiver, *_ = await asyncio.gather(bus.receiver("a"), bus.sender("a"), bus.sender("b"), bus.sender("b"))
        assert sorted(peer.tokens) == [peer.endpoint.resource("a"), peer.endpoint.resource("b")]
        peer.line.abort()
        with pytest.raises(ServiceBusConnectionError):
            await receiver.receive(1, 5)
        await bus.sender("a")
        assert peer.tokens[2:] == [peer.endpoint.resource("a")]

    async def test_a_token_is_renewed_before_it_expires(self, peer: Peer) -> None:
        source = ShortLived()
        async with connect(peer.endpoint, credential=source, clock=Frozen(), timeout=10) as bus:
            await bus.sender("q")
            await peer.until(lambda: len(peer.tokens) == 3)
        assert source.made == 3
