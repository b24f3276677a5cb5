"""Sessions: accepting them, their order, their state, their lock, and what a queue with or without them refuses.

A session lock that runs out is in test_locks.py.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusMessage, ServiceBusMessageState, ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusReceiver, ServiceBusSender
from azure.servicebus.exceptions import (
    OperationTimeoutError,
    ServiceBusConnectionError,
    ServiceBusError,
    SessionCannotBeLockedError,
)

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
from tests.sdk.installed import since


async def session_queue(bus: Bus, **properties: Any) -> tuple[str, ServiceBusSender]:
    queue = await bus.make_queue(requires_session=True, **properties)
    sender = bus.client.get_queue_sender(queue)
    await bus.open(sender)
    return queue, sender


async def session_pair(bus: Bus, session_id: str = "one") -> tuple[ServiceBusSender, ServiceBusReceiver]:
    return await bus.open_pair(await bus.make_queue(requires_session=True), session_id=session_id)


@both_flavours
async def test_a_session_receiver_gets_the_messages_of_its_session_in_order(bus: Bus) -> None:
    sender, receiver = await session_pair(bus, "blue")
    for blue, red in zip(numbered(5, session_id="blue"), numbered(5, session_id="red"), strict=True):
        await sender.send_messages([blue, red])

    messages = await receive_all(receiver, 5)

    assert texts(messages) == ["0", "1", "2", "3", "4"]
    assert {received.session_id for received in messages} == {"blue"}
    assert receiver.session.session_id == "blue"
    assert receiver.session.locked_until_utc
    assert receiver.session.locked_until_utc > from_now(30)
    assert {received.locked_until_utc for received in messages} == {None}, "the session is locked, not its messages"
    with pytest.raises(TypeError):
        await receiver.renew_message_lock(messages[0])
    for received in messages:
        await receiver.complete_message(received)
    assert await peek_all(receiver) == []


@both_flavours
async def test_next_available_gives_each_receiver_another_session(bus: Bus) -> None:
    queue, sender = await session_queue(bus)
    await sender.send_messages([ServiceBusMessage("a", session_id="a"), ServiceBusMessage("b", session_id="b")])
    receivers = [
        bus.client.get_queue_receiver(queue, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=10) for _ in range(2)
    ]
    await bus.open(*receivers)

    assert {receiver.session.session_id for receiver in receivers} == {"a", "b"}
    for receiver in receivers:
        received = await receive_one(receiver)
        assert received.session_id == str(received) == receiver.session.session_id


@both_flavours
async def test_next_available_times_out_when_no_session_is_free(bus: Bus) -> None:
    queue, sender = await session_queue(bus)
    await sender.send_messages(ServiceBusMessage("taken", session_id="taken"))
    holder_receiver = bus.client.get_queue_receiver(queue, session_id="taken")
    await bus.open(holder_receiver)

    receiver = bus.client.get_queue_receiver(queue, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=1)
    with pytest.raises(OperationTimeoutError):
        await bus.open(receiver)


@both_flavours
async def test_next_available_waits_for_a_session_that_comes_later(bus: Bus) -> None:
    queue, sender = await session_queue(bus)
    receiver = bus.client.get_queue_receiver(queue, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=15)
    accepting = asyncio.create_task(bus.open(receiver))
    _, still_waiting = await asyncio.wait({accepting}, timeout=1)
    assert still_waiting

    await sender.send_messages(ServiceBusMessage("late", session_id="late"))
    await accepting

    assert receiver.session.session_id == "late"
    assert str(await receive_one(receiver)) == "late"


@both_flavours
async def test_a_session_is_held_by_one_receiver_until_that_one_closes(bus: Bus) -> None:
    queue, sender = await session_queue(bus)
    await sender.send_messages(ServiceBusMessage("held", session_id="one"))
    receiver = bus.client.get_queue_receiver(queue, session_id="one")
    other_receiver = bus.client.get_queue_receiver(queue, session_id="one")
    await bus.open(receiver)
    await receive_one(receiver)
    with pytest.raises(SessionCannotBeLockedError):
        await bus.open(other_receiver)

    await receiver.close()
    await bus.open(other_receiver)

    received = await receive_one(other_receiver)
    assert received.delivery_count == 0, "closing a session is no failed delivery"


@both_flavours
async def test_an_empty_session_can_be_accepted_by_its_id_and_fills_later(bus: Bus) -> None:
    sender, receiver = await session_pair(bus, "new")
    waiting = asyncio.create_task(receiver.receive_messages(max_wait_time=15))
    await sender.send_messages(ServiceBusMessage("first", session_id="new"))
    assert texts(await waiting) == ["first"]


@both_flavours
async def test_the_state_of_a_session_is_kept_until_it_is_cleared(bus: Bus) -> None:
    queue, sender = await session_queue(bus)
    receiver = bus.client.get_queue_receiver(queue, session_id="one")
    await bus.open(receiver)
    session = receiver.session
    assert await session.get_state() is None
    await session.set_state("step 1")
    assert await session.get_state() == b"step 1"
    await session.set_state(bytes(range(256)), timeout=10)
    await receiver.close()

    later_receiver = bus.client.get_queue_receiver(queue, session_id="one")
    await bus.open(later_receiver)
    assert await later_receiver.session.get_state(timeout=10) == bytes(range(256))
    await later_receiver.session.set_state(None)
    assert await later_receiver.session.get_state() is None
    await sender.close()


@since("7.15", "cannot list sessions")
@both_flavours
async def test_the_sessions_of_a_queue_are_listed(bus: Bus) -> None:
    queue, sender = await session_queue(bus)
    await sender.send_messages([ServiceBusMessage("x", session_id=f"with-message-{number}") for number in range(3)])
    receiver = bus.client.get_queue_receiver(queue, session_id="with-state")
    await bus.open(receiver)
    before = datetime.now(UTC)
    await receiver.session.set_state(b"kept")

    async def listed() -> set[str]:
        return {session_id async for session_id in bus.client.list_queue_sessions(queue, timeout=10)}

    await until(listed, lambda found: found == {"with-message-0", "with-message-1", "with-message-2", "with-state"})
    changed = [session_id async for session_id in bus.client.list_queue_sessions(queue, state_updated_after=before)]
    assert changed == ["with-state"]


@since("7.15", "cannot list sessions")
@both_flavours
async def test_more_than_one_page_of_sessions_is_listed(bus: Bus) -> None:
    queue, sender = await session_queue(bus)
    wanted = {f"session-{number:03}" for number in range(120)}
    await sender.send_messages([ServiceBusMessage("x", session_id=session_id) for session_id in wanted])

    async def listed() -> set[str]:
        return {session_id async for session_id in bus.client.list_queue_sessions(queue)}

    await until(listed, lambda found: found == wanted)


@both_flavours
async def test_messages_of_a_session_are_deferred_peeked_and_dead_lettered(bus: Bus) -> None:
    queue, sender = await session_queue(bus)
    receiver = bus.client.get_queue_receiver(queue, session_id="one")
    dead_receiver = bus.client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    await bus.open(receiver, dead_receiver)
    await sender.send_messages([*numbered(3, session_id="one"), *numbered(2, session_id="other")])
    deferred, dead, abandoned = await receive_all(receiver, 3)

    await receiver.defer_message(deferred)
    await receiver.dead_letter_message(dead, reason="broken")
    await receiver.abandon_message(abandoned)

    peeked = await peek_all(receiver)
    assert texts(peeked) == ["0", "2"], "only this session's"
    assert [message.state for message in peeked] == [ServiceBusMessageState.DEFERRED, ServiceBusMessageState.ACTIVE]
    received = await receive_one(dead_receiver)
    assert (received.session_id, received.dead_letter_reason) == ("one", "broken")
    [by_number] = await receiver.receive_deferred_messages([deferred.sequence_number or 0])
    await receiver.complete_message(by_number)
    again = await receive_one(receiver)
    assert (str(again), again.delivery_count) == ("2", 1)


@both_flavours
async def test_a_scheduled_message_reaches_its_session(bus: Bus) -> None:
    sender, receiver = await session_pair(bus)
    await sender.schedule_messages(ServiceBusMessage("planned", session_id="one"), from_now(1))
    assert str(await receive_one(receiver)) == "planned"


@both_flavours
async def test_a_receiver_of_the_wrong_kind_is_refused(bus: Bus) -> None:
    with_sessions, without = await asyncio.gather(bus.make_queue(requires_session=True), bus.make_queue())

    async def refused(receiver: ServiceBusReceiver) -> None:
        with pytest.raises(ServiceBusError) as refusal:
            await bus.use(receiver)
        assert not isinstance(refusal.value, OperationTimeoutError | ServiceBusConnectionError)

    await asyncio.gather(
        refused(bus.client.get_queue_receiver(with_sessions)),
        refused(bus.client.get_queue_receiver(without, session_id="one")),
        refused(bus.client.get_queue_receiver(without, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=5)),
    )


@both_flavours
async def test_a_message_without_a_session_is_refused_where_sessions_are_required(bus: Bus) -> None:
    _, sender = await session_queue(bus)
    with pytest.raises(ServiceBusError):
        await sender.send_messages(ServiceBusMessage("homeless"))


@both_flavours
async def test_a_session_id_is_only_a_label_where_sessions_are_not_required(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(ServiceBusMessage("labelled", session_id="any"))
    received = await receive_one(receiver)
    assert received.session_id == "any"
    assert received.locked_until_utc
