"""Scheduled messages, and scheduled messages that are cancelled in time."""

import asyncio
from datetime import timedelta

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusMessageState
from azure.servicebus.exceptions import ServiceBusError

from tests.compat.python.bus import (
    Bus,
    both_flavours,
    from_now,
    numbered,
    peek_all,
    receive_all,
    receive_one,
    texts,
    until,
)


@both_flavours
async def test_a_scheduled_message_comes_at_its_time_and_not_before(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    due = from_now(2.5)
    [number] = await sender.schedule_messages(ServiceBusMessage("planned"), due)
    assert isinstance(number, int)
    [peeked] = await peek_all(receiver)
    assert peeked.state == ServiceBusMessageState.SCHEDULED
    assert peeked.sequence_number == number

    await sender.send_messages(ServiceBusMessage("at once"))
    assert str(await receive_one(receiver)) == "at once"
    received = await receive_one(receiver)

    assert str(received) == "planned"
    assert received.scheduled_enqueue_time_utc
    assert abs(received.scheduled_enqueue_time_utc - due) < timedelta(milliseconds=2)
    assert received.enqueued_time_utc
    assert received.enqueued_time_utc >= received.scheduled_enqueue_time_utc
    assert received.state == ServiceBusMessageState.ACTIVE
    await receiver.complete_message(received)


@both_flavours
async def test_the_life_of_a_scheduled_message_is_told_as_its_sender_gave_it(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.schedule_messages(ServiceBusMessage("", time_to_live=timedelta(minutes=5)), from_now(3600))
    [peeked] = await peek_all(receiver)
    assert peeked.time_to_live == timedelta(minutes=5)


@both_flavours
async def test_many_messages_are_scheduled_in_one_call(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())

    numbers = await sender.schedule_messages(numbered(10), from_now(1), timeout=10)

    assert len(set(numbers)) == 10
    assert numbers == sorted(numbers)
    assert texts(await receive_all(receiver, 10)) == [f"{number}" for number in range(10)]


@both_flavours
async def test_a_message_can_be_scheduled_by_its_own_property(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    due = from_now(1.5)
    message = ServiceBusMessage("planned", scheduled_enqueue_time_utc=due)
    assert message.scheduled_enqueue_time_utc == due
    await sender.send_messages([message, ServiceBusMessage("at once")])

    assert texts(await receive_all(receiver, 1)) == ["at once"]
    received = await receive_one(receiver)
    assert str(received) == "planned"
    assert received.enqueued_time_utc
    assert received.scheduled_enqueue_time_utc
    assert received.enqueued_time_utc >= received.scheduled_enqueue_time_utc


@both_flavours
async def test_a_time_already_past_means_now(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.schedule_messages(ServiceBusMessage("late"), from_now(-60))
    assert str(await receive_one(receiver)) == "late"


@both_flavours
async def test_a_cancelled_message_never_comes(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue)
    [one] = await sender.schedule_messages(ServiceBusMessage("one"), from_now(2))
    many = await sender.schedule_messages(numbered(3), from_now(2))
    [kept] = await sender.schedule_messages(ServiceBusMessage("kept"), from_now(2.5))

    await sender.cancel_scheduled_messages(one)
    await sender.cancel_scheduled_messages(many, timeout=10)

    assert [peeked.sequence_number for peeked in await peek_all(receiver)] == [kept]
    assert str(await receive_one(receiver)) == "kept"
    with pytest.raises(ServiceBusError):
        await sender.cancel_scheduled_messages(one)


@both_flavours
async def test_scheduled_messages_are_counted_apart(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender = bus.client.get_queue_sender(queue)
    await bus.open(sender)
    await sender.schedule_messages(numbered(2), from_now(3600))
    await sender.send_messages(ServiceBusMessage("now"))

    async def counts() -> tuple[int | None, int | None]:
        runtime = await bus.admin.get_queue_runtime_properties(queue)
        return runtime.scheduled_message_count, runtime.active_message_count

    await until(counts, lambda found: found == (2, 1))


@both_flavours
async def test_a_topic_takes_scheduled_messages_and_gives_them_to_every_subscription(bus: Bus) -> None:
    topic = await bus.make_topic("left", "right")
    sender = bus.client.get_topic_sender(topic)
    receivers = [bus.client.get_subscription_receiver(topic, name) for name in ("left", "right")]
    await bus.open(sender, *receivers)
    [cancelled] = await sender.schedule_messages(ServiceBusMessage("cancelled"), from_now(2))
    await sender.schedule_messages(ServiceBusMessage("planned"), from_now(2.5))
    await sender.cancel_scheduled_messages(cancelled)

    received = await asyncio.gather(*map(receive_one, receivers))

    assert texts(list(received)) == ["planned", "planned"]
