"""Sending many messages at once, and the limits of a message and of a batch.

The quota of a queue is not among them: the smallest that the service allows is 1 GB, too much to fill here.
"""

import contextlib

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch, ServiceBusReceiveMode
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageProperties
from azure.servicebus.exceptions import MessageSizeExceededError, ServiceBusError

from tests.compat.python.bus import Bus, both_flavours, peek_all, receive_all, receive_one, texts

STANDARD_LIMIT = 256 * 1024


@both_flavours
async def test_a_batch_arrives_message_by_message(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    batch = await sender.create_message_batch()
    empty_size = batch.size_in_bytes
    batch.add_message(ServiceBusMessage("first", message_id="1", subject="one"))
    batch.add_message({"body": "second"})
    batch.add_message(AmqpAnnotatedMessage(data_body=b"third"))
    assert len(batch) == 3
    assert empty_size < batch.size_in_bytes < batch.max_size_in_bytes <= STANDARD_LIMIT
    await sender.send_messages(batch)

    received = await receive_all(receiver, 3)
    assert texts(received) == ["first", "second", "third"]
    assert (received[0].message_id, received[0].subject) == ("1", "one")
    assert len({message.sequence_number for message in received}) == 3
    assert len({message.lock_token for message in received}) == 3


@both_flavours
async def test_a_list_is_sent_as_one_batch_and_an_empty_one_not_at_all(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages([])
    await sender.send_messages(await sender.create_message_batch())
    assert await peek_all(receiver) == []
    await sender.send_messages([ServiceBusMessage("a"), ServiceBusMessage("b")], timeout=10)
    assert texts(await receive_all(receiver, 2)) == ["a", "b"]


@both_flavours
async def test_a_full_batch_takes_no_more_and_is_sent_whole(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    batch = await sender.create_message_batch()
    for _ in range(13):
        batch.add_message(ServiceBusMessage(b"x" * 20_000))
    with pytest.raises(ValueError, match="size limit") as full:
        batch.add_message(ServiceBusMessage(b"x" * 20_000))
    assert isinstance(full.value, MessageSizeExceededError)
    assert len(batch) == 13
    await sender.send_messages(batch)
    assert len(await receive_all(receiver, 13)) == 13


@both_flavours
async def test_a_batch_can_be_made_smaller_but_not_larger_than_the_service_allows(bus: Bus) -> None:
    sender = bus.client.get_queue_sender(await bus.make_queue())
    await bus.open(sender)
    batch = await sender.create_message_batch(max_size_in_bytes=1000)
    assert batch.max_size_in_bytes == 1000
    with pytest.raises(MessageSizeExceededError):
        batch.add_message(ServiceBusMessage(b"x" * 1000))
    with pytest.raises(ValueError, match="too large"):
        await sender.create_message_batch(max_size_in_bytes=STANDARD_LIMIT + 1)
    with pytest.raises(ValueError, match="size limit"):
        await sender.send_messages([ServiceBusMessage(b"x" * 100_000) for _ in range(3)])


@pytest.mark.thorough
@both_flavours
async def test_thousands_of_messages_in_many_batches_all_arrive_in_order(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(
        queue, receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE, prefetch_count=1000
    )
    wanted = [f"{number}" for number in range(4500)]
    for start in range(0, len(wanted), 500):
        await sender.send_messages([ServiceBusMessage(text) for text in wanted[start : start + 500]])

    received = await receive_all(receiver, len(wanted))

    assert texts(received) == wanted
    numbers = [message.sequence_number or 0 for message in received]
    assert numbers == list(range(numbers[0], numbers[0] + len(wanted)))
    assert await peek_all(receiver) == []


@both_flavours
async def test_a_message_beyond_the_limit_is_refused_and_the_sender_goes_on(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(ServiceBusMessage(b"x" * (STANDARD_LIMIT - 1024)))
    with pytest.raises(MessageSizeExceededError):
        await sender.send_messages(ServiceBusMessage(b"x" * (STANDARD_LIMIT + 1)))
    await sender.send_messages(ServiceBusMessage("small"))

    large, small = await receive_all(receiver, 2)
    assert (len(b"".join(large.body)), str(small)) == (STANDARD_LIMIT - 1024, "small")


@both_flavours
async def test_properties_beyond_their_limits_are_refused(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    for too_much in (
        ServiceBusMessage("x", application_properties={"one": "x" * (33 * 1024)}),
        ServiceBusMessage("x", application_properties={f"{number}": "x" * 10_000 for number in range(7)}),
        AmqpAnnotatedMessage(data_body="x", properties=AmqpMessageProperties(message_id="x" * 129)),
        AmqpAnnotatedMessage(data_body="x", properties=AmqpMessageProperties(group_id="x" * 129)),
    ):
        with pytest.raises(ServiceBusError):
            await sender.send_messages(too_much)
    await sender.send_messages(ServiceBusMessage("x", message_id="x" * 128, application_properties={"a": "x" * 30_000}))
    assert (await receive_one(receiver)).message_id == "x" * 128
    with pytest.raises(ValueError, match="128"):
        ServiceBusMessage("x", message_id="x" * 129)


def fill(batch: ServiceBusMessageBatch, size: int) -> None:
    """Add messages with bodies of this size until the SDK refuses one."""
    with contextlib.suppress(MessageSizeExceededError):
        while True:
            batch.add_message(ServiceBusMessage(b"x" * size))


@both_flavours
async def test_n1_a_batch_that_the_sdk_filled_to_its_limit_is_accepted(bus: Bus) -> None:
    # Once the first message is added, the SDK also writes its id, its session and its partition key before the batch.
    sender, receiver = await bus.open_pair(await bus.make_queue())
    batch = await sender.create_message_batch()
    batch.add_message(ServiceBusMessage("1", message_id="i" * 128, session_id="s" * 128, partition_key="s" * 128))
    for size in (20_000, 1_000, 10, 1):
        fill(batch, size)
    assert batch.max_size_in_bytes - batch.size_in_bytes < 60, "no room for another message"
    await sender.send_messages(batch)
    assert len(await receive_all(receiver, len(batch))) == len(batch)
