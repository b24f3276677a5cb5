"""Refused operations: the entity is disabled or missing, or the handler is closed."""

import asyncio

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import (
    MessagingEntityDisabledError,
    MessagingEntityNotFoundError,
    ServiceBusAuthenticationError,
    ServiceBusError,
)
from azure.servicebus.management import EntityStatus

from tests.compat.python.bus import Bus, Handler, both_flavours, peek_all, receive_one, until

# The service already refuses the token for an entity that does not exist, which the SDK reports as authentication.
NOT_THERE = (MessagingEntityNotFoundError, ServiceBusAuthenticationError)


async def set_status(bus: Bus, queue: str, status: EntityStatus) -> None:
    await bus.admin.update_queue(await bus.admin.get_queue(queue), status=status)


@both_flavours
async def test_a_disabled_queue_takes_and_gives_nothing(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue)
    await sender.send_messages(ServiceBusMessage("kept"))
    await asyncio.gather(sender.close(), receiver.close())
    await set_status(bus, queue, EntityStatus.DISABLED)

    with pytest.raises(MessagingEntityDisabledError):
        await bus.use(bus.client.get_queue_sender(queue))
    with pytest.raises(MessagingEntityDisabledError):
        await bus.use(bus.client.get_queue_receiver(queue))

    await set_status(bus, queue, EntityStatus.ACTIVE)
    later_receiver = bus.client.get_queue_receiver(queue)
    await bus.open(later_receiver)
    assert str(await receive_one(later_receiver)) == "kept"


@both_flavours
async def test_a_send_disabled_queue_still_gives(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue)
    await sender.send_messages(ServiceBusMessage("kept"))
    await set_status(bus, queue, EntityStatus.SEND_DISABLED)

    with pytest.raises(MessagingEntityDisabledError):
        await bus.use(bus.client.get_queue_sender(queue))
    await receiver.complete_message(await receive_one(receiver))


@both_flavours
async def test_a_receive_disabled_queue_still_takes(bus: Bus) -> None:
    queue = await bus.make_queue()
    await set_status(bus, queue, EntityStatus.RECEIVE_DISABLED)
    sender = bus.client.get_queue_sender(queue)
    await bus.open(sender)
    await sender.send_messages(ServiceBusMessage("for later"))

    with pytest.raises(MessagingEntityDisabledError):
        await bus.use(bus.client.get_queue_receiver(queue))

    await set_status(bus, queue, EntityStatus.ACTIVE)
    receiver = bus.client.get_queue_receiver(queue)
    await bus.open(receiver)
    assert str(await receive_one(receiver)) == "for later"


@both_flavours
async def test_a_sender_that_was_open_feels_the_disabling(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender = bus.client.get_queue_sender(queue)
    await bus.open(sender)
    await sender.send_messages(ServiceBusMessage("before"))
    await set_status(bus, queue, EntityStatus.SEND_DISABLED)
    with pytest.raises(MessagingEntityDisabledError):
        await sender.send_messages(ServiceBusMessage("after"))


@both_flavours
async def test_a_disabled_topic_takes_nothing_and_a_disabled_subscription_gives_nothing(bus: Bus) -> None:
    topic = await bus.make_topic("a", "b")
    await bus.admin.update_subscription(
        topic, await bus.admin.get_subscription(topic, "a"), status=EntityStatus.RECEIVE_DISABLED
    )
    sender = bus.client.get_topic_sender(topic)
    receiver = bus.client.get_subscription_receiver(topic, "b")
    await bus.open(sender, receiver)
    await sender.send_messages(ServiceBusMessage("x"))
    assert len(await peek_all(receiver)) == 1
    with pytest.raises(MessagingEntityDisabledError):
        await bus.use(bus.client.get_subscription_receiver(topic, "a"))

    await bus.admin.update_topic(await bus.admin.get_topic(topic), status=EntityStatus.SEND_DISABLED)
    with pytest.raises(MessagingEntityDisabledError):
        await bus.use(bus.client.get_topic_sender(topic))


@both_flavours
async def test_what_is_not_there_can_neither_be_sent_to_nor_received_from(bus: Bus) -> None:
    topic = await bus.make_topic()
    handlers: list[Handler] = [
        bus.client.get_queue_sender("no-such-queue"),
        bus.client.get_queue_receiver("no-such-queue"),
        bus.client.get_topic_sender("no-such-topic"),
        bus.client.get_subscription_receiver(topic, "no-such-subscription"),
    ]
    for outcome in await asyncio.gather(*map(bus.use, handlers), return_exceptions=True):
        assert isinstance(outcome, NOT_THERE)


@both_flavours
async def test_a_queue_deleted_under_an_open_sender_is_not_found(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender = bus.client.get_queue_sender(queue)
    await bus.open(sender)
    await sender.send_messages(ServiceBusMessage("before"))
    await bus.admin.delete_queue(queue)
    with pytest.raises(NOT_THERE):
        await sender.send_messages(ServiceBusMessage("after"))


@both_flavours
async def test_a_queue_made_again_is_empty(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender = bus.client.get_queue_sender(queue)
    await bus.open(sender)
    await sender.send_messages(ServiceBusMessage("of the old queue"))
    await bus.admin.delete_queue(queue)
    await bus.admin.create_queue(queue)
    receiver = bus.client.get_queue_receiver(queue)
    await bus.open(receiver)
    assert await peek_all(receiver) == []


@both_flavours
async def test_a_closed_handler_cannot_be_used_again(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await asyncio.gather(sender.close(), receiver.close())
    with pytest.raises(ValueError, match="shutdown"):
        await sender.send_messages(ServiceBusMessage("late"))
    with pytest.raises(ValueError, match="shutdown"):
        await receiver.receive_messages(max_wait_time=1)
    with pytest.raises(ValueError, match="shutdown"):
        await sender.__aenter__()


@both_flavours
async def test_the_dead_letter_queue_cannot_be_sent_to(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender = bus.client.get_queue_sender(f"{queue}/$deadletterqueue")
    with pytest.raises(ServiceBusError):
        await sender.send_messages(ServiceBusMessage("x"))

    async def dead_letters() -> int | None:
        return (await bus.admin.get_queue_runtime_properties(queue)).dead_letter_message_count

    assert await until(dead_letters, lambda count: count is not None) == 0
