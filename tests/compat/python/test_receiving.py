"""Waiting for messages, iterating, prefetching and peeking."""

import asyncio
from collections.abc import Callable

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusMessageState, ServiceBusSubQueue

from tests.compat.python.bus import (
    PATIENCE,
    Bus,
    both_flavours,
    from_now,
    numbered,
    peek_all,
    receive_all,
    receive_one,
    texts,
)
from tests.sdk.installed import since


@both_flavours
async def test_a_waiting_receive_gets_the_message_that_comes_later(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    waiting = asyncio.create_task(receiver.receive_messages(max_wait_time=60))
    _, still_waiting = await asyncio.wait({waiting}, timeout=1)
    assert still_waiting

    await sender.send_messages(ServiceBusMessage("at last"))

    assert texts(await asyncio.wait_for(waiting, PATIENCE)) == ["at last"]


@both_flavours
async def test_a_receive_from_an_empty_queue_ends_empty_handed(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue(), max_wait_time=0.5)
    assert await receiver.receive_messages() == []
    await sender.send_messages(ServiceBusMessage("the credit of an ended receive is still good"))
    assert len(await receiver.receive_messages(max_wait_time=PATIENCE)) == 1


@both_flavours
async def test_messages_are_received_in_the_order_they_were_sent(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    for message in numbered(3):
        await sender.send_messages(message)
    await sender.send_messages([ServiceBusMessage("3"), ServiceBusMessage("4")])

    received = await receive_all(receiver, 5)

    assert texts(received) == ["0", "1", "2", "3", "4"]
    numbers = [message.sequence_number or 0 for message in received]
    assert numbers == sorted(set(numbers))
    assert numbers[0] >= 1


@both_flavours
async def test_iterating_a_receiver_ends_when_nothing_more_comes(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue(), max_wait_time=1)
    await sender.send_messages(numbered(5))

    seen = []
    async for received in receiver:
        seen.append(str(received))
        await receiver.complete_message(received)

    assert seen == ["0", "1", "2", "3", "4"]
    assert await peek_all(receiver) == []


def test_the_next_message_is_the_next_of_the_iterator(client: ServiceBusClient, make_queue: Callable[..., str]) -> None:
    queue = make_queue()
    with client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue, max_wait_time=10) as receiver:
        sender.send_messages(numbered(2))
        assert str(receiver.next()) == "0"
        assert str(next(receiver)) == "1"


@since("7.15", "keeps prefetched messages locked when a receiver closes")
@both_flavours
async def test_what_was_prefetched_and_not_received_is_given_back_on_close(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue, prefetch_count=20)
    other_receiver = bus.client.get_queue_receiver(queue)
    await bus.open(other_receiver)
    await sender.send_messages(numbered(10))
    first = await receive_one(receiver)
    await receiver.complete_message(first)
    await receiver.close()

    rest = await receive_all(other_receiver, 9)

    assert sorted([str(first), *texts(rest)]) == [f"{number}" for number in range(10)]
    assert {received.delivery_count for received in rest} == {0}, "giving back is no failed delivery"


@both_flavours
async def test_prefetching_brings_more_than_one_receive_asks_for(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue(), prefetch_count=50)
    await sender.send_messages(numbered(50))
    seen: list[str] = []
    while len(seen) < 50:
        for received in await receiver.receive_messages(max_message_count=10, max_wait_time=PATIENCE):
            await receiver.complete_message(received)
            seen.append(str(received))
    assert seen == [f"{number}" for number in range(50)]
    assert await peek_all(receiver) == []


@both_flavours
async def test_two_receivers_share_a_queue_and_no_message_is_seen_twice(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue)
    other_receiver = bus.client.get_queue_receiver(queue)
    await bus.open(other_receiver)
    await sender.send_messages(numbered(20))

    halves = await asyncio.gather(receive_all(receiver, 10), receive_all(other_receiver, 10))

    assert sorted(int(text) for half in halves for text in texts(half)) == list(range(20))


@since("7.14", "peeks from the beginning every time")
@both_flavours
async def test_peeking_goes_on_where_it_stopped_or_starts_at_a_number(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(numbered(6))

    first_two = await receiver.peek_messages(max_message_count=2)
    third = await receiver.peek_messages()
    rest = await receiver.peek_messages(max_message_count=100, timeout=10)
    from_fifth = await receiver.peek_messages(max_message_count=100, sequence_number=(rest[1].sequence_number or 0))

    assert texts(first_two + third + rest) == ["0", "1", "2", "3", "4", "5"]
    assert texts(from_fifth) == ["4", "5"]
    assert await receiver.peek_messages(sequence_number=(rest[-1].sequence_number or 0) + 1) == []
    assert {peeked.lock_token for peeked in first_two} == {None}
    assert texts(await receive_all(receiver, 6)) == ["0", "1", "2", "3", "4", "5"], "peeking locks nothing"


@both_flavours
async def test_peeking_shows_every_message_with_its_state(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(numbered(3))
    deferred, locked = await receive_all(receiver, 2)
    await receiver.defer_message(deferred)
    await sender.schedule_messages(ServiceBusMessage("3"), from_now(3600))

    states = {str(peeked): peeked.state for peeked in await peek_all(receiver)}

    assert states == {
        "0": ServiceBusMessageState.DEFERRED,
        "1": ServiceBusMessageState.ACTIVE,
        "2": ServiceBusMessageState.ACTIVE,
        "3": ServiceBusMessageState.SCHEDULED,
    }
    await receiver.abandon_message(locked)


@both_flavours
async def test_the_dead_letter_queue_can_be_peeked(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender, receiver = await bus.open_pair(queue)
    dead_receiver = bus.client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    await bus.open(dead_receiver)
    await sender.send_messages(numbered(2))
    for received in await receive_all(receiver, 2):
        await receiver.dead_letter_message(received, reason=f"reason {received}")

    peeked = await dead_receiver.peek_messages(max_message_count=5)

    assert [message.dead_letter_reason for message in peeked] == ["reason 0", "reason 1"]
    assert await receiver.peek_messages(sequence_number=1) == []
