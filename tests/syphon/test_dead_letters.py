"""Dead letters brought back (Y6), on a real server: many of them, and a backlog that does not answer."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator, Iterator
from uuid import UUID

import pytest

from twinbus.amqp import Properties, build_message
from twinbus.backlog import PATH_PROPERTY
from twinbus.connect import ServiceBusConnection, connect
from twinbus.syphon.dead_letters import DeadLetter, DeadLetters, NotResubmittedError
from twinbus.testing import LocalNamespace

QUEUES = [f"contoso/x-servicebus-transfer/{index}" for index in range(6)]
MANY = 300


@pytest.fixture(scope="module")
def secondary() -> Iterator[LocalNamespace]:
    config = {"namespaces": [{"name": "secondary", "queues": [{"name": name} for name in QUEUES]}]}
    with LocalNamespace("secondary", memory=True, config=config) as found:
        yield found


@pytest.fixture
async def bus(secondary: LocalNamespace) -> AsyncIterator[ServiceBusConnection]:
    async with connect(secondary.connection_string, timeout=10) as found:
        yield found
    secondary.faults.clear()


async def dead_letters(bus: ServiceBusConnection, queue: str, count: int, body: bytes = b"body") -> None:
    raws = [
        build_message(
            data=body,
            properties=Properties(message_id=UUID(int=number)),
            application_properties={PATH_PROPERTY: "a"},
        )
        for number in range(count)
    ]
    async with await bus.sender(queue) as sender, await bus.receiver(queue, prefetch=0) as receiver:
        await sender.send(raws)
        done = 0
        while done < count:
            held = await receiver.receive(100, 10)
            await receiver.dead_letter(held, "Reason", "why")
            done += len(held)


async def found(dead: DeadLetters) -> list[DeadLetter]:
    return [letter async for letter in dead.found()]


async def resubmitted(dead: DeadLetters, chosen: list[DeadLetter]) -> list[int]:
    wanted = {letter.sequence_number for letter in chosen}
    told: list[int] = []
    census = await dead.census(lambda letter: letter.sequence_number in wanted)
    done = await dead.resubmit(census, tell=lambda letter: told.append(letter.sequence_number))
    assert done == len(told)
    return told


async def test_y6_a_few_of_many_are_brought_back_and_the_rest_is_as_it_was(bus: ServiceBusConnection) -> None:
    queue = QUEUES[0]
    await dead_letters(bus, queue, MANY)
    dead = DeadLetters(bus, [queue])
    letters = await found(dead)
    assert len(letters) == MANY
    assert letters[5].id == f"uuid:{letters[5].message_id!s}"
    chosen = [letters[5], letters[MANY - 5]]
    assert await resubmitted(dead, chosen) == [letter.sequence_number for letter in chosen]
    left = await bus.management(queue, address=f"{queue}/$DeadLetterQueue").peek(0, MANY)
    assert {one.delivery_count for one in left} == {0}
    assert len(await found(dead)) == MANY - 2
    back = await bus.management(queue).peek(0, MANY)
    assert [one.message_id for one in back] == [letter.message_id for letter in chosen]
    # Messages that were held during the call are released: they can be resubmitted now.
    assert await resubmitted(dead, [letters[0]]) == [letters[0].sequence_number]


async def test_y6_a_backlog_that_takes_nothing_leaves_the_dead_letters_where_they_are(
    bus: ServiceBusConnection, secondary: LocalNamespace
) -> None:
    queue = QUEUES[1]
    await dead_letters(bus, queue, 3)
    dead = DeadLetters(bus, [queue])
    letters = await found(dead)
    secondary.faults.set("internal-error", entity=queue, points=["send"])
    with pytest.raises(NotResubmittedError, match="0 were resubmitted, 3 were not") as raised:
        await resubmitted(dead, letters)
    assert raised.value.done == 0
    assert await found(dead) == letters


async def test_y6_what_another_holds_is_told_as_not_resubmitted(bus: ServiceBusConnection) -> None:
    queue = QUEUES[2]
    await dead_letters(bus, queue, 2)
    dead = DeadLetters(bus, [queue])
    letters = await found(dead)
    async with await bus.receiver(queue, dead_letter=True, prefetch=0) as other:
        (held,) = await other.receive(1, 10)
        with pytest.raises(NotResubmittedError, match="1 were resubmitted, 1 were not"):
            await resubmitted(dead, letters)
        assert [letter.sequence_number for letter in await found(dead)] == [held.sequence_number]


async def test_y6_a_few_of_very_many_are_brought_back_in_bounded_memory(bus: ServiceBusConnection) -> None:
    queue, size, many = QUEUES[3], 64 * 1024, 600
    await dead_letters(bus, queue, many, b"x" * size)
    dead = DeadLetters(bus, [queue])
    tracemalloc.start()
    try:
        census = await dead.census(lambda letter: letter.message_id == UUID(int=many - 1))
        assert await dead.resubmit(census) == 1
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # One page of peeked messages and a few batches of received ones are the most that may be in memory.
    assert most < 0.6 * many * size
    assert len(await found(dead)) == many - 1
