"""A message that was received can be sent on, whatever it carries.

The SDK changes the types of values when it sends a message that it received: text of an annotation becomes binary, an
instant becomes an integer, a small number an int. The namespace takes all of them, and the values stay the same.
"""

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage, ServiceBusReceiveMode, ServiceBusSubQueue
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageProperties
from azure.servicebus.exceptions import ServiceBusError

from tests.compat.python.bus import Bus, both_flavours, receive_all, receive_one, unique
from tests.compat.python.random_messages import differences, random_message, seen
from tests.tiers import budget

MESSAGES = budget(40, 200, 2000)


async def sent_on(bus: Bus, received: list[ServiceBusReceivedMessage], **receiver_options: Any) -> list[dict[str, Any]]:
    """Send received messages to a new queue: one by one, as a list, in a batch and scheduled. Return what arrives."""
    sender, receiver = await bus.open_pair(await bus.make_queue(), **receiver_options)
    quarter = len(received) // 4
    for message in received[:quarter]:
        await sender.send_messages(message)
    await sender.send_messages(received[quarter : 2 * quarter])
    batch = await sender.create_message_batch()
    for message in received[2 * quarter : 3 * quarter]:
        batch.add_message(message)
    await sender.send_messages(batch)
    if rest := received[3 * quarter :]:
        await sender.schedule_messages(rest, datetime.now(UTC) - timedelta(seconds=1))
    return [seen(message) for message in await receive_all(receiver, len(received))]


@both_flavours
async def test_n1_a_received_message_can_be_sent_on_whatever_it_carries(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    for start in range(0, MESSAGES, 20):
        await sender.send_messages([random_message(seed) for seed in range(start, start + 20)])
    received = await receive_all(receiver, MESSAGES)
    before = [seen(message) for message in received]
    assert sum(each["partition key"] is not None for each in before) > MESSAGES // 4
    after = await sent_on(bus, received)
    assert differences(before, after) == []


@both_flavours
async def test_n1_a_dead_letter_can_be_sent_on_whatever_it_carries(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue)
    dead = bus.client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    await bus.open(dead)
    await sender.send_messages([random_message(seed) for seed in range(20)])
    for message in await receive_all(receiver, 20):
        await receiver.dead_letter_message(message, reason="a reason", error_description="a description")
    received = await receive_all(dead, 20)
    before = [seen(message) for message in received]
    assert differences(before, await sent_on(bus, received)) == []


@both_flavours
async def test_n1_messages_of_a_session_and_of_a_subscription_can_be_sent_on(bus: Bus) -> None:
    topic, name = await bus.make_topic("all", requires_session=True), unique("session")
    sender = bus.client.get_topic_sender(topic)
    receiver = bus.client.get_subscription_receiver(topic, "all", session_id=name)
    await bus.open(sender, receiver)
    await sender.send_messages([random_message(seed, name) for seed in range(20)])
    received = await receive_all(receiver, 20)
    before = [seen(message) for message in received]
    assert differences(before, await sent_on(bus, received)) == []


@both_flavours
async def test_n1_a_message_that_is_sent_on_has_nothing_of_its_first_delivery(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(ServiceBusMessage("x"))
    received = await receive_one(receiver)
    assert received.locked_until_utc
    assert received.lock_token
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    next_sender, next_receiver = await bus.open_pair(await bus.make_queue(), receive_mode=mode)
    await next_sender.send_messages(received)
    [peeked] = await next_receiver.peek_messages()
    again = await receive_one(next_receiver)
    for message in (peeked, again):
        assert message.locked_until_utc is None
        assert message.raw_amqp_message.delivery_annotations == {}, "not None"
        assert b"x-opt-locked-until" not in (message.raw_amqp_message.annotations or {})


@both_flavours
@pytest.mark.parametrize("kind", ["TIMESTAMP", "LONG", "ULONG"])
async def test_n1_an_instant_of_any_integer_type_schedules_a_message(bus: Bus, kind: str) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    later = int((datetime.now(UTC) + timedelta(hours=1)).timestamp() * 1000)
    annotations: dict[str, Any] = {"x-opt-scheduled-enqueue-time": {"TYPE": kind, "VALUE": later}}
    await sender.send_messages(AmqpAnnotatedMessage(data_body=b"later", annotations=annotations))
    [peeked] = await receiver.peek_messages()
    assert peeked.state.name == "SCHEDULED"
    assert (peeked.raw_amqp_message.annotations or {})[b"x-opt-scheduled-enqueue-time"] == later


INSTANT = datetime(2030, 1, 1, tzinfo=UTC)


@both_flavours
@pytest.mark.parametrize(
    "place",
    [
        {"value_body": INSTANT},
        {"data_body": b"x", "application_properties": {"at": INSTANT}},
        {"data_body": b"x", "annotations": {"x-opt-at": INSTANT}},
        {"data_body": b"x", "delivery_annotations": {"x-opt-at": INSTANT}},
        {"data_body": b"x", "footer": {"x-opt-at": INSTANT}},
    ],
    ids=lambda place: list(place)[-1],
)
async def test_the_sdk_itself_refuses_to_send_on_an_instant_anywhere(bus: Bus, place: dict[str, Any]) -> None:
    """A flaw of the SDK, which docs/guides/serve.md names. The namespace accepts the message of the first send."""
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(AmqpAnnotatedMessage(**place))
    received = await receive_one(receiver)
    with pytest.raises(ServiceBusError, match="Value supplied for int invalid"):
        await sender.send_messages(received)


@both_flavours
async def test_the_sdk_itself_refuses_an_integer_of_more_than_32_bits_without_a_type(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    with pytest.raises(ServiceBusError, match="Value supplied for int invalid"):
        await sender.send_messages(ServiceBusMessage("x", application_properties={"large": 2**31}))
    typed: Any = {"large": {"TYPE": "LONG", "VALUE": 2**31}}
    await sender.send_messages(AmqpAnnotatedMessage(data_body=b"x", application_properties=typed))
    assert ((await receive_one(receiver)).raw_amqp_message.application_properties or {})[b"large"] == 2**31


@both_flavours
async def test_n1_an_annotation_of_an_unexpected_type_is_carried_and_means_nothing(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    names = ("x-opt-partition-key", "x-opt-via-partition-key", "x-opt-scheduled-enqueue-time")
    for kind, value in (("UUID", uuid.UUID(int=1)), ("BOOL", True), ("BINARY", b"\xff"), ("DOUBLE", 1.5)):
        annotations: dict[str, Any] = {name: {"TYPE": kind, "VALUE": value} for name in names}
        message = AmqpAnnotatedMessage(
            data_body=b"x", annotations=annotations, properties=AmqpMessageProperties(group_id="session")
        )
        await sender.send_messages(message)
        received = (await receive_one(receiver)).raw_amqp_message
        assert {name: (received.annotations or {})[name.encode()] for name in names} == dict.fromkeys(names, value)
