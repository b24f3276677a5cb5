"""Duplicate detection: a second message with the same id is accepted and dropped."""

import asyncio
from datetime import timedelta

from azure.servicebus import ServiceBusMessage, ServiceBusReceiveMode

from tests.compat.python.bus import Bus, both_flavours, peek_all, receive_all, texts, unique

WINDOW = {"requires_duplicate_detection": True, "duplicate_detection_history_time_window": timedelta(minutes=1)}


@both_flavours
async def test_a_message_id_is_kept_once_within_the_window(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue(**WINDOW))
    await sender.send_messages(ServiceBusMessage("first", message_id="1"))
    await sender.send_messages(ServiceBusMessage("second", message_id="1"))
    await sender.send_messages(ServiceBusMessage("other", message_id="2"))

    assert texts(await peek_all(receiver)) == ["first", "other"]


@both_flavours
async def test_duplicates_inside_one_batch_and_after_receiving_are_left_out_too(bus: Bus) -> None:
    queue = await bus.make_queue(**WINDOW)
    sender, receiver = await bus.open_pair(queue, receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE)
    await sender.send_messages([ServiceBusMessage(text, message_id=text[0]) for text in ("a1", "b1", "a2")])
    assert texts(await receive_all(receiver, 2)) == ["a1", "b1"]

    await sender.send_messages(ServiceBusMessage("a3", message_id="a"))
    await sender.send_messages(ServiceBusMessage("c1", message_id="c"))

    assert texts(await peek_all(receiver)) == ["c1"]


@both_flavours
async def test_without_duplicate_detection_every_message_is_kept(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages([ServiceBusMessage(text, message_id="1") for text in ("first", "second")])

    assert texts(await peek_all(receiver)) == ["first", "second"]


@both_flavours
async def test_a_topic_leaves_out_duplicates_for_all_its_subscriptions(bus: Bus) -> None:
    topic = unique("topic")
    await bus.admin.create_topic(topic, requires_duplicate_detection=True)
    bus.forget_later(topic=topic)
    await asyncio.gather(*(bus.admin.create_subscription(topic, name) for name in ("left", "right")))
    sender = bus.client.get_topic_sender(topic)
    receivers = [bus.client.get_subscription_receiver(topic, name) for name in ("left", "right")]
    await bus.open(sender, *receivers)
    for text in ("first", "second"):
        await sender.send_messages(ServiceBusMessage(text, message_id="1"))

    for receiver in receivers:
        assert texts(await peek_all(receiver)) == ["first"]
