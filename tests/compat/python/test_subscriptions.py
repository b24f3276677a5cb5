"""A subscription does what a queue does: expiry, delivery count, deferral, status, required sessions."""

from datetime import timedelta

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusSubQueue
from azure.servicebus.exceptions import MessagingEntityDisabledError
from azure.servicebus.management import EntityStatus

from tests.compat.python.bus import Bus, both_flavours, peek_all, receive_one, texts, until


@both_flavours
async def test_what_expires_in_a_subscription_is_dead_lettered_there_if_asked_for(bus: Bus) -> None:
    options = {"default_message_time_to_live": timedelta(seconds=1), "dead_lettering_on_message_expiration": True}
    topic = await bus.make_topic("short", **options)
    await bus.admin.create_subscription(topic, "long")
    sender = bus.client.get_topic_sender(topic)
    dead = bus.client.get_subscription_receiver(topic, "short", sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    long = bus.client.get_subscription_receiver(topic, "long")
    await bus.open(sender, dead, long)
    await sender.send_messages(ServiceBusMessage("x"))
    assert (await receive_one(dead)).dead_letter_reason == "TTLExpiredException"
    assert texts(await peek_all(long)) == ["x"]


@both_flavours
async def test_too_many_deliveries_of_one_subscription_leave_the_others_alone(bus: Bus) -> None:
    topic = await bus.make_topic("tried", "calm", max_delivery_count=2)
    sender = bus.client.get_topic_sender(topic)
    tried = bus.client.get_subscription_receiver(topic, "tried")
    dead = bus.client.get_subscription_receiver(topic, "tried", sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    calm = bus.client.get_subscription_receiver(topic, "calm")
    await bus.open(sender, tried, dead, calm)
    await sender.send_messages(ServiceBusMessage("x"))
    for _ in range(2):
        await tried.abandon_message(await receive_one(tried))
    assert (await receive_one(dead)).dead_letter_reason == "MaxDeliveryCountExceeded"
    assert (await receive_one(calm)).delivery_count == 0


@both_flavours
async def test_a_deferred_message_of_a_subscription_is_received_by_its_number_and_dead_lettered(bus: Bus) -> None:
    topic = await bus.make_topic("s")
    sender, receiver = bus.client.get_topic_sender(topic), bus.client.get_subscription_receiver(topic, "s")
    dead = bus.client.get_subscription_receiver(topic, "s", sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    await bus.open(sender, receiver, dead)
    await sender.send_messages(ServiceBusMessage("x"))
    message = await receive_one(receiver)
    await receiver.defer_message(message)
    [deferred] = await receiver.receive_deferred_messages(message.sequence_number or 0)
    await receiver.dead_letter_message(deferred, reason="why")
    assert (await receive_one(dead)).dead_letter_reason == "why"


@both_flavours
async def test_a_disabled_subscription_gives_nothing_and_takes_nothing_while_its_topic_goes_on(bus: Bus) -> None:
    topic = await bus.make_topic("off", "on")
    sender, on = bus.client.get_topic_sender(topic), bus.client.get_subscription_receiver(topic, "on")
    await bus.open(sender, on)
    off = await bus.admin.get_subscription(topic, "off")
    off.status = EntityStatus.DISABLED
    await bus.admin.update_subscription(topic, off)
    await sender.send_messages(ServiceBusMessage("x"))
    assert texts([await receive_one(on)]) == ["x"]
    with pytest.raises(MessagingEntityDisabledError):
        await bus.use(bus.client.get_subscription_receiver(topic, "off"))
    figures = await bus.admin.get_subscription_runtime_properties(topic, "off")
    assert figures.total_message_count == 0


@both_flavours
async def test_a_subscription_with_sessions_dead_letters_what_has_none(bus: Bus) -> None:
    topic = await bus.make_topic("s", requires_session=True)
    sender = bus.client.get_topic_sender(topic)
    held = bus.client.get_subscription_receiver(topic, "s", session_id="mine")
    await bus.open(sender, held)
    await sender.send_messages([ServiceBusMessage("x", session_id="mine"), ServiceBusMessage("none")])
    assert texts([await receive_one(held)]) == ["x"]
    figures = await until(
        lambda: bus.admin.get_subscription_runtime_properties(topic, "s"),
        lambda found: found.dead_letter_message_count == 1,
    )
    assert figures.active_message_count == 1
