"""Complete, abandon, defer, dead-letter; and messages that can no longer be settled."""

import asyncio
from collections.abc import Callable

import azure.servicebus.aio as aio_sdk
import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusMessageState, ServiceBusReceiveMode, ServiceBusSubQueue
from azure.servicebus.exceptions import MessageAlreadySettled, MessageNotFoundError

from tests.compat.python.bus import Bus, both_flavours, numbered, peek_all, receive_all, receive_one, texts


@both_flavours
async def test_a_completed_message_is_gone(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(ServiceBusMessage("done"))

    [received] = await receiver.receive_messages(max_message_count=1, max_wait_time=10)
    assert str(received) == "done"
    assert received.delivery_count == 0
    assert len(await peek_all(receiver)) == 1, "a locked message is still there"
    await receiver.complete_message(received)

    assert await peek_all(receiver) == []


@both_flavours
async def test_an_abandoned_message_comes_back_at_once_and_counts_the_delivery(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(ServiceBusMessage("again"))

    first = await receive_one(receiver)
    await receiver.abandon_message(first)
    second = await receive_one(receiver)

    assert second.sequence_number == first.sequence_number
    assert second.lock_token != first.lock_token
    assert (first.delivery_count, second.delivery_count) == (0, 1)
    await receiver.complete_message(second)


@both_flavours
async def test_a_deferred_message_is_received_only_by_its_sequence_number(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(numbered(3))
    later, next_one, never = await receive_all(receiver, 3)
    for received in (later, next_one):
        await receiver.defer_message(received)
    await receiver.abandon_message(never)

    assert texts([await receive_one(receiver)]) == ["2"], "the deferred ones stand before it, and are passed over"
    assert [peeked.state for peeked in await peek_all(receiver)] == [
        ServiceBusMessageState.DEFERRED,
        ServiceBusMessageState.DEFERRED,
        ServiceBusMessageState.ACTIVE,
    ]

    [deferred] = await receiver.receive_deferred_messages(later.sequence_number or 0)
    assert str(deferred) == "0"
    assert deferred.lock_token
    assert deferred.locked_until_utc
    await receiver.complete_message(deferred)
    with pytest.raises(MessageNotFoundError):
        await receiver.receive_deferred_messages([later.sequence_number or 0])


@both_flavours
async def test_a_deferred_message_can_be_settled_in_every_way(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue)
    dead_receiver = bus.client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    await bus.open(dead_receiver)
    await sender.send_messages(numbered(3))
    numbers = []
    for received in await receive_all(receiver, 3):
        await receiver.defer_message(received)
        numbers.append(received.sequence_number or 0)

    abandoned, deferred_again, dead = await receiver.receive_deferred_messages(numbers)
    await receiver.abandon_message(abandoned)
    await receiver.defer_message(deferred_again)
    await receiver.dead_letter_message(dead, reason="why", error_description="because")

    assert [received.dead_letter_reason for received in await receive_all(dead_receiver, 1)] == ["why"]
    again = await receiver.receive_deferred_messages(numbers[:2])
    assert texts(again) == ["0", "1"], "abandoning a deferred message leaves it deferred"
    for received in again:
        await receiver.complete_message(received)
    assert await peek_all(receiver) == []


@both_flavours
async def test_a_deferred_message_can_be_completed_through_another_receiver(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue)
    other_receiver = bus.client.get_queue_receiver(queue)
    await bus.open(other_receiver)
    await sender.send_messages(ServiceBusMessage("handed over"))
    received = await receive_one(receiver)
    await receiver.defer_message(received)
    [deferred] = await receiver.receive_deferred_messages(received.sequence_number or 0)
    await receiver.close()

    await other_receiver.complete_message(deferred)

    assert await peek_all(other_receiver) == []


@both_flavours
async def test_a_dead_lettered_message_carries_reason_and_description(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue)
    dead_receiver = bus.client.get_queue_receiver(queue, sub_queue="deadletter")
    await bus.open(dead_receiver)
    await sender.send_messages(ServiceBusMessage("poison", application_properties={"kept": 1}, subject="kept too"))

    await receiver.dead_letter_message(
        await receive_one(receiver), reason="cannot be read", error_description="line 7 is torn"
    )

    assert await peek_all(receiver) == []
    received = await receive_one(dead_receiver)
    assert str(received) == "poison"
    assert received.dead_letter_reason == "cannot be read"
    assert received.dead_letter_error_description == "line 7 is torn"
    assert received.dead_letter_source in (None, queue), "documented for forwarded dead letters only"
    assert received.subject == "kept too"
    assert (received.application_properties or {})[b"kept"] == 1
    await dead_receiver.abandon_message(received)
    again = await receive_one(dead_receiver)
    await dead_receiver.complete_message(again)
    assert await peek_all(dead_receiver) == []


@both_flavours
async def test_a_message_dead_lettered_without_words_has_none(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue)
    dead_receiver = bus.client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    await bus.open(dead_receiver)
    await sender.send_messages(ServiceBusMessage("silent"))
    await receiver.dead_letter_message(await receive_one(receiver))

    received = await receive_one(dead_receiver)
    assert not received.dead_letter_reason
    assert not received.dead_letter_error_description


@both_flavours
async def test_the_delivery_after_the_last_allowed_one_is_to_the_dead_letter_queue(bus: Bus) -> None:
    queue = await bus.make_queue(max_delivery_count=2)
    sender, receiver = await bus.open_pair(queue)
    dead_receiver = bus.client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    await bus.open(dead_receiver)
    await sender.send_messages(ServiceBusMessage("never done"))

    for deliveries in range(2):
        received = await receive_one(receiver)
        assert received.delivery_count == deliveries
        await receiver.abandon_message(received)

    received = await receive_one(dead_receiver)
    assert received.dead_letter_reason == "MaxDeliveryCountExceeded"
    assert received.dead_letter_error_description
    assert await peek_all(receiver) == []


@both_flavours
async def test_receive_and_delete_leaves_nothing_to_settle(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue, receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE)
    await sender.send_messages(numbered(2))

    received, _ = await receive_all(receiver, 2)

    assert received.lock_token is None
    assert received.locked_until_utc is None
    assert await peek_all(receiver) == []
    with pytest.raises(ValueError, match="RECEIVE_AND_DELETE"):
        await receiver.complete_message(received)


@both_flavours
async def test_a_message_is_settled_once_and_a_peeked_one_never(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(ServiceBusMessage("once"))
    received = await receive_one(receiver)
    [peeked] = await receiver.peek_messages(sequence_number=1)

    with pytest.raises(ValueError, match="peeked"):
        await receiver.complete_message(peeked)
    await receiver.complete_message(received)
    for settle in (receiver.complete_message, receiver.abandon_message, receiver.defer_message):
        with pytest.raises(MessageAlreadySettled):
            await settle(received)


async def test_a_hundred_completions_at_once_are_each_confirmed(
    aio_client: aio_sdk.ServiceBusClient, make_queue: Callable[..., str]
) -> None:
    queue = make_queue()
    async with aio_client.get_queue_sender(queue) as sender, aio_client.get_queue_receiver(queue) as receiver:
        await sender.send_messages(numbered(100))
        received = await receive_all(receiver, 100)
        await asyncio.gather(*(receiver.complete_message(message) for message in received))
        assert await receiver.peek_messages(sequence_number=1) == []
