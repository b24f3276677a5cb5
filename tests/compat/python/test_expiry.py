"""Time to live of a message and of an entity: an expired message is dropped or dead-lettered."""

import asyncio
from datetime import timedelta

from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage, ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusReceiver

from tests.compat.python.bus import Bus, both_flavours, peek_all, receive_one, until


async def empty(receiver: ServiceBusReceiver) -> None:
    await until(lambda: peek_all(receiver), lambda peeked: peeked == [])


@both_flavours
async def test_an_expired_message_is_dropped_and_its_neighbour_stays(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue)
    dead_receiver = bus.client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    await bus.open(dead_receiver)
    await sender.send_messages(
        [ServiceBusMessage("short", time_to_live=timedelta(seconds=1)), ServiceBusMessage("long")]
    )

    def only_the_long_one(peeked: list[ServiceBusReceivedMessage]) -> bool:
        return [str(message) for message in peeked] == ["long"]

    await until(lambda: peek_all(receiver), only_the_long_one)
    assert str(await receive_one(receiver)) == "long"
    assert await peek_all(dead_receiver) == []


@both_flavours
async def test_an_expired_message_becomes_a_dead_letter_where_the_queue_says_so(bus: Bus) -> None:
    queue = await bus.make_queue(dead_lettering_on_message_expiration=True)
    sender, receiver = await bus.open_pair(queue)
    dead_receiver = bus.client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    await bus.open(dead_receiver)
    message = ServiceBusMessage("short", time_to_live=timedelta(seconds=1))
    assert message.time_to_live == timedelta(seconds=1)
    await sender.send_messages(message)
    await empty(receiver)

    # The service moves expired messages when somebody receives from the queue.
    assert await receiver.receive_messages(max_wait_time=0.2) == []
    received = await receive_one(dead_receiver)

    assert str(received) == "short"
    assert received.dead_letter_reason == "TTLExpiredException"
    assert received.dead_letter_error_description


@both_flavours
async def test_the_shorter_of_the_two_times_to_live_counts(bus: Bus) -> None:
    short_queue, long_queue = await asyncio.gather(
        bus.make_queue(default_message_time_to_live=timedelta(seconds=1)),
        bus.make_queue(default_message_time_to_live=timedelta(minutes=1)),
    )
    (short_sender, short_receiver), (long_sender, long_receiver) = await asyncio.gather(
        bus.open_pair(short_queue), bus.open_pair(long_queue)
    )
    await asyncio.gather(
        short_sender.send_messages(
            [ServiceBusMessage("no time of its own"), ServiceBusMessage("too long", time_to_live=timedelta(hours=1))]
        ),
        long_sender.send_messages(ServiceBusMessage("its own", time_to_live=timedelta(seconds=20))),
    )

    await empty(short_receiver)
    received = await receive_one(long_receiver)
    assert str(received) == "its own"
    assert received.time_to_live == timedelta(seconds=20)
    assert received.enqueued_time_utc
    assert received.expires_at_utc == received.enqueued_time_utc + timedelta(seconds=20)


@both_flavours
async def test_a_message_that_expires_while_locked_can_still_be_completed(bus: Bus) -> None:
    queue = await bus.make_queue(dead_lettering_on_message_expiration=True)
    sender, receiver = await bus.open_pair(queue)
    witness_sender, witness_receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(ServiceBusMessage("held", time_to_live=timedelta(seconds=2)))
    received = await receive_one(receiver)
    await witness_sender.send_messages(ServiceBusMessage("clock", time_to_live=timedelta(seconds=2)))
    await empty(witness_receiver)

    await receiver.complete_message(received)

    runtime = await bus.admin.get_queue_runtime_properties(queue)
    assert (runtime.active_message_count, runtime.dead_letter_message_count) == (0, 0)


@both_flavours
async def test_a_subscription_has_a_time_to_live_of_its_own(bus: Bus) -> None:
    topic = await bus.make_topic("keeps")
    await bus.admin.create_subscription(
        topic, "drops", default_message_time_to_live="PT1S", dead_lettering_on_message_expiration=True
    )
    sender = bus.client.get_topic_sender(topic)
    keeping_receiver = bus.client.get_subscription_receiver(topic, "keeps")
    receiver = bus.client.get_subscription_receiver(topic, "drops")
    dead_receiver = bus.client.get_subscription_receiver(topic, "drops", sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    await bus.open(sender, keeping_receiver, receiver, dead_receiver)
    await sender.send_messages(ServiceBusMessage("brief"))
    await empty(receiver)

    assert await receiver.receive_messages(max_wait_time=0.2) == []
    assert (await receive_one(dead_receiver)).dead_letter_reason == "TTLExpiredException"
    assert str(await receive_one(keeping_receiver)) == "brief"
