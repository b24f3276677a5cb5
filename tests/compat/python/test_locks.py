"""Locks that run out, are renewed, and are renewed by themselves. The service's shortest lock is 5 s, so a test waits
for several of them at once; it waits by receiving, where nothing may come before the lock allows it.
"""

import asyncio
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusReceiver, ServiceBusSender
from azure.servicebus.exceptions import (
    AutoLockRenewFailed,
    AutoLockRenewTimeout,
    MessageLockLostError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)

from tests.compat.python.bus import SHORTEST_LOCK, Bus, both_flavours, from_now, receive_one, until


async def two_receivers(bus: Bus, **options: Any) -> tuple[ServiceBusSender, ServiceBusReceiver, ServiceBusReceiver]:
    """Open two receivers on a queue with the shortest lock, so that one sees what the other has locked."""
    queue = await bus.make_queue(lock_duration=SHORTEST_LOCK)
    other_receiver = bus.client.get_queue_receiver(queue)
    (sender, receiver), _ = await asyncio.gather(bus.open_pair(queue, **options), bus.open(other_receiver))
    await sender.send_messages(ServiceBusMessage("held"))
    return sender, receiver, other_receiver


async def expired_lock_of_a_message(bus: Bus) -> None:
    _, receiver, other_receiver = await two_receivers(bus)
    received = await receive_one(receiver)
    assert received.locked_until_utc
    assert received.locked_until_utc <= from_now(5)

    again = await receive_one(other_receiver)

    assert again.sequence_number == received.sequence_number
    assert again.delivery_count == 1
    assert again.enqueued_time_utc == received.enqueued_time_utc
    assert from_now(0) >= received.locked_until_utc, "not before the lock ran out"
    with pytest.raises(MessageLockLostError):
        await receiver.renew_message_lock(received)
    with pytest.raises(MessageLockLostError):
        await receiver.complete_message(received)
    await other_receiver.complete_message(again)


async def lock_of_a_closed_receiver(bus: Bus) -> None:
    _, receiver, other_receiver = await two_receivers(bus)
    received = await receive_one(receiver)
    await receiver.close()

    again = await receive_one(other_receiver)

    assert again.delivery_count == 1
    assert received.locked_until_utc
    assert from_now(0) >= received.locked_until_utc, "closing a receiver does not give back what it holds"


async def expired_lock_of_a_session(bus: Bus) -> None:
    queue = await bus.make_queue(lock_duration=SHORTEST_LOCK, requires_session=True)
    sender, receiver = await bus.open_pair(queue, session_id="one")
    await sender.send_messages(ServiceBusMessage("held", session_id="one"))
    received = await receive_one(receiver)
    other_receiver = bus.client.get_queue_receiver(queue, session_id="one")

    async def accepted() -> bool:
        try:
            await bus.open(other_receiver)
        except SessionCannotBeLockedError:
            return False
        return True

    await until(accepted, bool)

    assert receiver.session.locked_until_utc
    assert from_now(0) >= receiver.session.locked_until_utc
    again = await receive_one(other_receiver)
    assert again.delivery_count == 1
    with pytest.raises(SessionLockLostError):
        await receiver.complete_message(received)
    with pytest.raises(SessionLockLostError):
        await receiver.session.renew_lock()
    await other_receiver.complete_message(again)


@both_flavours
async def test_a_lock_that_ran_out_is_lost_and_its_message_is_delivered_again(bus: Bus) -> None:
    await asyncio.gather(expired_lock_of_a_message(bus), lock_of_a_closed_receiver(bus), expired_lock_of_a_session(bus))


async def lock_renewed_by_hand(bus: Bus) -> None:
    _, receiver, other_receiver = await two_receivers(bus)
    received = await receive_one(receiver)
    first_until = received.locked_until_utc
    assert first_until

    assert await other_receiver.receive_messages(max_wait_time=2.5) == []
    renewed_until = await receiver.renew_message_lock(received)
    assert renewed_until == received.locked_until_utc
    assert renewed_until > first_until
    assert await other_receiver.receive_messages(max_wait_time=3) == []

    assert from_now(0) > first_until
    await receiver.complete_message(received)


async def session_lock_renewed_by_hand(bus: Bus) -> None:
    queue = await bus.make_queue(lock_duration=SHORTEST_LOCK, requires_session=True)
    sender, receiver = await bus.open_pair(queue, session_id="one")
    await sender.send_messages(ServiceBusMessage("held", session_id="one"))
    received = await receive_one(receiver)
    session = receiver.session
    first_until = session.locked_until_utc
    assert first_until

    assert await receiver.receive_messages(max_wait_time=2.5) == []
    renewed_until = await session.renew_lock()
    assert renewed_until == session.locked_until_utc
    assert renewed_until > first_until
    assert await receiver.receive_messages(max_wait_time=3) == []

    assert from_now(0) > first_until
    await receiver.complete_message(received)


async def lock_renewed_by_itself(bus: Bus) -> None:
    _, receiver, other_receiver = await two_receivers(bus)
    async with bus.make_renewer(max_lock_renewal_duration=60) as renewer:
        received = await receive_one(receiver)
        first_until = received.locked_until_utc
        renewer.register(receiver, received)
        assert await other_receiver.receive_messages(max_wait_time=6) == []
        assert first_until
        assert from_now(0) > first_until
        await receiver.complete_message(received)


async def locks_renewed_from_the_moment_of_receiving(bus: Bus) -> None:
    session_queue = await bus.make_queue(lock_duration=SHORTEST_LOCK, requires_session=True)
    renewer = bus.make_renewer()
    _, receiver, other_receiver = await two_receivers(bus, auto_lock_renewer=renewer)
    session_receiver = bus.client.get_queue_receiver(session_queue, session_id="one", auto_lock_renewer=renewer)
    await bus.open(session_receiver)
    received = await receive_one(receiver)
    first_until = session_receiver.session.locked_until_utc

    assert await other_receiver.receive_messages(max_wait_time=6) == []

    assert first_until
    assert from_now(0) > first_until
    await session_receiver.session.set_state(b"still mine")
    await receiver.complete_message(received)
    await renewer.close()


@both_flavours
async def test_a_lock_that_is_renewed_outlives_its_duration(bus: Bus) -> None:
    await asyncio.gather(
        lock_renewed_by_hand(bus),
        session_lock_renewed_by_hand(bus),
        lock_renewed_by_itself(bus),
        locks_renewed_from_the_moment_of_receiving(bus),
    )


@both_flavours
async def test_a_renewer_stops_after_its_time_and_says_so(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue(lock_duration=SHORTEST_LOCK))
    await sender.send_messages(ServiceBusMessage("held"))
    received = await receive_one(receiver)
    renewer = bus.make_renewer()
    renewer.register(receiver, received, max_lock_renewal_duration=1)

    async def error() -> object:
        return received.auto_renew_error

    assert isinstance(await until(error, bool), AutoLockRenewTimeout)
    await receiver.complete_message(received)
    await renewer.close()


@both_flavours
async def test_a_renewer_calls_back_when_it_cannot_renew(bus: Bus) -> None:
    queue = await bus.make_queue(lock_duration=SHORTEST_LOCK)
    sender, receiver = await bus.open_pair(queue)
    await sender.send_messages(ServiceBusMessage("held"))
    received = await receive_one(receiver)
    failures: list[Exception | None] = []
    renewer = bus.make_renewer(on_failure=lambda _, error: failures.append(error))
    renewer.register(receiver, received)
    await bus.admin.delete_queue(queue)

    async def so_far() -> list[Exception | None]:
        return failures

    [failure] = await until(so_far, bool)
    assert isinstance(failure, AutoLockRenewFailed)
    await renewer.close()


@both_flavours
async def test_a_renewed_lock_ends_later_and_its_time_comes_from_the_entity(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue(lock_duration="PT2M"))
    await sender.send_messages(ServiceBusMessage("held"))
    received = await receive_one(receiver)
    first_until = received.locked_until_utc
    assert first_until
    assert from_now(90) < first_until < from_now(121)

    await receiver.renew_message_lock(received, timeout=10)

    assert received.locked_until_utc
    assert received.locked_until_utc >= first_until
