"""The client against a real namespace: every operation, and the errors of operations that are not allowed."""

import asyncio
import ssl
from datetime import UTC, datetime, timedelta

import pytest

from twinbus.connect import (
    NEXT_AVAILABLE,
    RECEIVE_AND_DELETE,
    ConnectionString,
    MessageState,
    ReceivedMessage,
    Receiver,
    ServiceBusConnection,
    connect,
    encode_message,
    settlement,
)
from twinbus.connect.errors import (
    MessageLockLostError,
    MessageNotFoundError,
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusCertificateError,
    ServiceBusConnectionError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)
from twinbus.message import BodyType, Message
from twinbus.testing import LocalNamespace

from .conftest import KEY

LATER = datetime.now(UTC) + timedelta(hours=1)


async def filled(bus: ServiceBusConnection, queue: str, count: int) -> Receiver:
    sender = await bus.sender(queue)
    await sender.send([Message(str(number), message_id=str(number)) for number in range(count)])
    return await bus.receiver(queue)


async def received(receiver: Receiver, count: int) -> list[ReceivedMessage]:
    messages: list[ReceivedMessage] = []
    while len(messages) < count:
        batch = await receiver.receive(count - len(messages), 10)
        assert batch
        messages += batch
    return messages


class TestMessages:
    async def test_a_message_comes_back_as_it_was_sent(self, bus: ServiceBusConnection, queue: str) -> None:
        sent = Message(
            {"a": [1, None, b"x"]},
            body_type=BodyType.VALUE,
            message_id="id",
            subject="subject",
            time_to_live=timedelta(hours=1),
            application_properties={"n": 1},
            annotations={"mine": 1},
        )
        await (await bus.sender(queue)).send([sent])
        (got,) = await received(await bus.receiver(queue), 1)
        assert (got.body, got.message_id, got.subject) == (sent.body, "id", "subject")
        assert (got.application_properties, got.annotations["mine"]) == ({"n": 1}, 1)
        assert got.time_to_live == timedelta(hours=1)
        assert (got.sequence_number, got.delivery_count, got.state) == (1, 0, MessageState.ACTIVE)
        assert got.lock_token is not None
        assert got.locked_until is not None
        assert got.enqueued_time is not None
        assert got.enqueued_time < got.locked_until

    async def test_thousands_go_through_in_order_and_are_gone_once_completed(
        self, bus: ServiceBusConnection, queue: str
    ) -> None:
        receiver = await filled(bus, queue, 3000)
        seen: list[int] = []
        while len(seen) < 3000:
            batch = await receiver.receive(500, 10)
            await receiver.complete(batch)
            seen += [int(message.body) for message in batch]
        assert seen == list(range(3000))
        assert await receiver.peek(0, 1) == []

    async def test_pipelined_messages_all_arrive(self, bus: ServiceBusConnection, queue: str) -> None:
        sender = await bus.sender(queue)
        futures = []
        for number in range(500):
            await sender.room()
            futures.append(sender.send_soon(encode_message(Message(str(number)), 0)))
        await asyncio.gather(*futures)
        messages = await received(await bus.receiver(queue), 500)
        assert [int(message.body) for message in messages] == list(range(500))

    async def test_a_message_received_and_deleted_is_gone(self, bus: ServiceBusConnection, queue: str) -> None:
        await (await bus.sender(queue)).send([Message(str(number)) for number in range(3)])
        receiver = await bus.receiver(queue, mode=RECEIVE_AND_DELETE)
        assert len(await received(receiver, 2)) == 2
        assert [message.body for message in await receiver.peek(0, 10)] == [b"2"]

    async def test_a_message_to_a_topic_reaches_each_subscription(self, bus: ServiceBusConnection) -> None:
        await (await bus.sender("topic")).send([Message("news")])
        for name in ("first", "second"):
            receiver = await bus.receiver("topic", subscription=name)
            messages = await received(receiver, 1)
            assert messages[0].body == b"news"
            await receiver.complete(messages)

    async def test_a_message_larger_than_a_frame_comes_through_whole(
        self, namespace: LocalNamespace, queue: str
    ) -> None:
        body = bytes(range(256)) * 800
        async with connect(namespace.connection_string, max_frame_size=4096) as bus:
            await (await bus.sender(queue)).send([Message(body)])
            (got,) = await received(await bus.receiver(queue), 1)
        assert got.body == body

    async def test_one_connection_carries_many_links(self, bus: ServiceBusConnection, queue: str) -> None:
        senders = await asyncio.gather(*(bus.sender(queue) for _ in range(50)))
        await asyncio.gather(*(sender.send([Message("x")]) for sender in senders))
        assert len(await received(await bus.receiver(queue), 50)) == 50


class TestSettlement:
    async def test_an_abandoned_message_comes_again_and_is_counted(self, bus: ServiceBusConnection, queue: str) -> None:
        receiver = await filled(bus, queue, 1)
        await receiver.abandon(await received(receiver, 1), properties={"why": "busy"})
        (again,) = await received(receiver, 1)
        assert again.delivery_count == 1
        assert again.application_properties["why"] == "busy"

    async def test_a_released_message_comes_again_uncounted(self, bus: ServiceBusConnection, queue: str) -> None:
        receiver = await filled(bus, queue, 1)
        await receiver.release(await received(receiver, 1))
        (again,) = await received(receiver, 1)
        assert again.delivery_count == 0

    async def test_a_deferred_message_is_received_by_its_number_and_settled(
        self, bus: ServiceBusConnection, queue: str
    ) -> None:
        receiver = await filled(bus, queue, 2)
        messages = await received(receiver, 2)
        await receiver.defer(messages)
        assert await receiver.receive(1, 0.1) == []
        numbers = [message.sequence_number or 0 for message in messages]
        deferred = await receiver.receive_deferred(numbers)
        assert [message.state for message in deferred] == [MessageState.DEFERRED] * 2
        await receiver.complete(deferred)
        with pytest.raises(MessageNotFoundError):
            await receiver.receive_deferred(numbers[:1])

    async def test_a_dead_letter_has_its_reason(self, bus: ServiceBusConnection, queue: str) -> None:
        receiver = await filled(bus, queue, 1)
        await receiver.dead_letter(await received(receiver, 1), "reason", "description")
        dead = await bus.receiver(queue, dead_letter=True)
        (got,) = await received(dead, 1)
        assert (got.dead_letter_reason, got.dead_letter_error_description) == ("reason", "description")
        await dead.complete([got])
        assert await dead.peek() == []

    async def test_a_lost_lock_fails_its_message_only(self, bus: ServiceBusConnection, queue: str) -> None:
        receiver = await filled(bus, queue, 3)
        messages = await received(receiver, 3)
        token = messages[1].lock_token
        assert token is not None
        await bus.management(queue).settle([token], "completed", {})
        with pytest.raises(MessageLockLostError) as caught:
            await receiver.complete(messages)
        assert caught.value.failed == (messages[1],)
        assert await receiver.peek(0, 10) == []

    async def test_a_message_whose_link_is_gone_can_still_be_settled(
        self, bus: ServiceBusConnection, queue: str
    ) -> None:
        first = await filled(bus, queue, 1)
        messages = await received(first, 1)
        await first.close()
        other = await bus.receiver(queue)
        await other.complete(messages)
        assert await other.peek() == []

    async def test_prefetched_messages_are_available_again_after_close(
        self, bus: ServiceBusConnection, queue: str
    ) -> None:
        first = await filled(bus, queue, 10)
        await first.complete(await received(first, 1))
        await first.close()
        second = await bus.receiver(queue)
        assert [message.delivery_count for message in await received(second, 9)] == [0] * 9

    async def test_renewed_locks_last_longer(self, bus: ServiceBusConnection, queue: str) -> None:
        receiver = await filled(bus, queue, 2)
        messages = await received(receiver, 2)
        before = [message.locked_until for message in messages]
        await receiver.renew_locks(messages)
        after = [message.locked_until for message in messages]
        assert all(new is not None and old is not None and new >= old for old, new in zip(before, after, strict=True))
        await receiver.complete(messages)
        with pytest.raises(MessageLockLostError):
            await receiver.renew_locks(messages)

    async def test_a_lost_lock_does_not_keep_the_others_from_being_renewed(
        self, bus: ServiceBusConnection, queue: str
    ) -> None:
        receiver = await filled(bus, queue, 7)
        messages = await received(receiver, 7)
        lost = [messages[2], messages[5]]
        await receiver.complete(lost)
        assert await receiver.renew_those_held(messages) == lost
        assert await receiver.settle(messages[:2], settlement.COMPLETE) == []

    async def test_settle_returns_each_failed_message_with_its_error(
        self, bus: ServiceBusConnection, queue: str
    ) -> None:
        receiver = await filled(bus, queue, 3)
        messages = await received(receiver, 3)
        token = messages[1].lock_token
        assert token is not None
        await bus.management(queue).settle([token], "completed", {})
        ((message, error),) = await receiver.settle(messages, settlement.COMPLETE)
        assert message is messages[1]
        assert isinstance(error, MessageLockLostError)

    async def test_deferred_ones_that_are_gone_or_locked_are_left_out_if_asked(
        self, bus: ServiceBusConnection, queue: str
    ) -> None:
        receiver = await filled(bus, queue, 9)
        messages = await received(receiver, 9)
        await receiver.defer(messages)
        numbers = [message.sequence_number or 0 for message in messages]
        locked = await receiver.receive_deferred([numbers[4]])
        found = await receiver.receive_deferred([*numbers, 10**9], leave_out_missing=True)
        assert [message.sequence_number for message in found] == [*numbers[:4], *numbers[5:]]
        await receiver.complete([*found, *locked])

    async def test_credit_that_is_kept_brings_more_for_the_next_call_and_ends_with_an_empty_one(
        self, bus: ServiceBusConnection, queue: str
    ) -> None:
        sender = await bus.sender(queue)
        receiver = await bus.receiver(queue, prefetch=0)
        await sender.send([Message(b"first")])
        (first,) = await receiver.receive(5, 10, keep_credit=True)
        await sender.send([Message(b"second")])
        other = await bus.receiver(queue, prefetch=0)
        assert await other.receive(1, 0.2) == []
        (second,) = await receiver.receive(5, 10, keep_credit=True)
        assert await receiver.receive(5, 0.1, keep_credit=True) == []
        await sender.send([Message(b"third")])
        (third,) = await other.receive(1, 10)
        assert [message.body for message in (first, second, third)] == [b"first", b"second", b"third"]


class TestManagement:
    async def test_scheduled_messages_wait_and_can_be_cancelled(self, bus: ServiceBusConnection, queue: str) -> None:
        sender = await bus.sender(queue)
        numbers = await sender.schedule([Message("a"), encode_message(Message("b"), 0)], LATER)
        peeked = await bus.management(queue).peek(0, 10)
        assert [message.sequence_number for message in peeked] == numbers
        assert {message.state for message in peeked} == {MessageState.SCHEDULED}
        await sender.cancel_scheduled(numbers)
        assert await bus.management(queue).peek(0, 10) == []
        with pytest.raises(MessageNotFoundError):
            await sender.cancel_scheduled(numbers)

    async def test_a_message_scheduled_for_the_past_is_there_at_once(
        self, bus: ServiceBusConnection, queue: str
    ) -> None:
        sender = await bus.sender(queue)
        await sender.schedule([Message("now")], datetime.now(UTC) - timedelta(hours=1))
        assert (await received(await bus.receiver(queue), 1))[0].body == b"now"

    async def test_peeking_walks_by_number(self, bus: ServiceBusConnection, queue: str) -> None:
        receiver = await filled(bus, queue, 5)
        assert [message.sequence_number for message in await receiver.peek(3, 2)] == [3, 4]
        assert [message.sequence_number for message in await receiver.peek(5, 10)] == [5]

    async def test_many_requests_are_in_flight_together(self, bus: ServiceBusConnection, queue: str) -> None:
        receiver = await filled(bus, queue, 300)
        found = await asyncio.gather(*(receiver.peek(number, 1) for number in range(1, 301)))
        assert [messages[0].sequence_number for messages in found] == list(range(1, 301))

    async def test_messages_are_deleted_in_batches(self, bus: ServiceBusConnection, queue: str) -> None:
        await (await bus.sender(queue)).send([Message(str(number)) for number in range(5)])
        node = bus.management(queue)
        assert await node.delete_batch(3) == 3
        assert await node.delete_batch(10, datetime.now(UTC) - timedelta(hours=1)) == 0
        assert await node.delete_batch(10) == 2
        assert await node.peek() == []


class TestSessions:
    async def test_a_session_is_held_with_its_messages_and_its_state(
        self, bus: ServiceBusConnection, session_queue: str
    ) -> None:
        sender = await bus.sender(session_queue)
        await sender.send([Message(name, session_id=name) for name in ("one", "two", "one")])
        receiver = await bus.receiver(session_queue, session="one")
        assert receiver.session_id == "one"
        assert receiver.session_locked_until is not None
        messages = await received(receiver, 2)
        assert {message.session_id for message in messages} == {"one"}
        await receiver.set_session_state(b"state")
        assert await receiver.get_session_state() == b"state"
        before = receiver.session_locked_until
        assert await receiver.renew_session_lock() >= before
        await receiver.complete(messages)
        await receiver.set_session_state(None)
        assert await receiver.get_session_state() is None

    async def test_the_next_available_session_is_given_once(
        self, bus: ServiceBusConnection, session_queue: str
    ) -> None:
        await (await bus.sender(session_queue)).send([Message("x", session_id=name) for name in ("a", "b")])
        receivers = [await bus.receiver(session_queue, session=NEXT_AVAILABLE) for _ in range(2)]
        assert {receiver.session_id for receiver in receivers} == {"a", "b"}
        with pytest.raises(OperationTimeoutError):
            await bus.receiver(session_queue, session=NEXT_AVAILABLE, session_timeout=0.2)
        with pytest.raises(SessionCannotBeLockedError):
            await bus.receiver(session_queue, session="a", session_timeout=0.2)

    async def test_sessions_are_listed_page_by_page(self, bus: ServiceBusConnection, session_queue: str) -> None:
        names = {f"session {number}" for number in range(120)}
        await (await bus.sender(session_queue)).send([Message("x", session_id=name) for name in names])
        assert set(await bus.management(session_queue).list_sessions()) == names

    async def test_a_session_whose_link_is_gone_is_no_longer_held(
        self, bus: ServiceBusConnection, namespace: LocalNamespace, session_queue: str
    ) -> None:
        await (await bus.sender(session_queue)).send([Message("x", session_id="s")] * 2)
        receiver = await bus.receiver(session_queue, session="s", prefetch=0)
        namespace.faults.set("detach", entity=session_queue, points=["receive"], count=1)
        with pytest.raises(ServiceBusConnectionError):
            await receiver.receive(1, 5)
        with pytest.raises(SessionLockLostError):
            await receiver.receive(1, 5)


class TestRefusals:
    async def test_the_error_names_a_missing_entity(self, bus: ServiceBusConnection) -> None:
        for attach in (bus.sender("nowhere"), bus.receiver("nowhere"), bus.management("nowhere").peek()):
            with pytest.raises(MessagingEntityNotFoundError, match="nowhere"):
                await attach

    async def test_a_wrong_key_is_an_authentication_error(self, namespace: LocalNamespace, queue: str) -> None:
        good = ConnectionString.parse(namespace.connection_string)
        bad = ConnectionString(good.host, good.port, good.key_name, "wrong", emulator=True)
        async with connect(bad) as bus:
            with pytest.raises(ServiceBusAuthenticationError):
                await bus.sender(queue)

    async def test_a_key_that_may_only_send_may_not_receive(self, namespace: LocalNamespace, queue: str) -> None:
        good = ConnectionString.parse(namespace.connection_string)
        async with connect(ConnectionString(good.host, good.port, "sends", KEY, emulator=True)) as bus:
            await (await bus.sender(queue)).send([Message("x")])
            with pytest.raises(ServiceBusAuthorizationError):
                await bus.receiver(queue)

    async def test_tls_works_with_a_peer_whose_authority_is_trusted(
        self, namespace: LocalNamespace, queue: str
    ) -> None:
        trusting = ssl.create_default_context(cafile=str(namespace.ca))
        async with connect(namespace.connection_string, tls=trusting) as bus:
            await (await bus.sender(queue)).send([Message("secret")])
            assert (await received(await bus.receiver(queue), 1))[0].body == b"secret"

    async def test_tls_is_refused_to_a_peer_with_an_untrusted_certificate(self, namespace: LocalNamespace) -> None:
        plain = ConnectionString.parse(namespace.connection_string)
        async with connect(ConnectionString(plain.host, plain.port, plain.key_name, plain.key)) as bus:
            with pytest.raises(ServiceBusCertificateError):
                await bus.open()
