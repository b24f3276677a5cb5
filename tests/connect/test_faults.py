"""The client while the namespace has faults, is killed and is started again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from twinbus.connect import ServiceBusConnection, connect
from twinbus.connect.errors import (
    MessageLockLostError,
    OperationTimeoutError,
    ServiceBusCommunicationError,
    ServiceBusConnectionError,
    ServiceBusInternalError,
    ServiceBusServerBusyError,
)
from twinbus.errors import RetryError
from twinbus.message import Message
from twinbus.testing import LocalNamespace

from .conftest import config


@pytest.fixture
def faulty(namespace: LocalNamespace) -> Iterator[LocalNamespace]:
    yield namespace
    namespace.faults.clear()


async def test_a_busy_namespace_raises_and_a_later_send_succeeds(
    bus: ServiceBusConnection, faulty: LocalNamespace, queue: str
) -> None:
    sender = await bus.sender(queue)
    faulty.faults.set("server-busy", entity=queue, points=["send"], count=1)
    messages = [Message("x")]
    with pytest.raises(ServiceBusServerBusyError) as caught:
        await sender.send(messages)
    assert caught.value.failed == tuple(messages)
    await sender.send(messages)


async def test_an_acknowledgement_that_is_lost_is_a_time_out_though_the_message_is_stored(
    bus: ServiceBusConnection, faulty: LocalNamespace, queue: str
) -> None:
    sender = await bus.sender(queue)
    faulty.faults.set("drop-ack", entity=queue, points=["send"], count=1)
    with pytest.raises(OperationTimeoutError):
        await sender.send([Message("x")], timeout=0.1)
    assert len(await bus.management(queue).peek(0, 10)) == 1


async def test_a_link_detached_under_a_send_is_attached_by_the_next(
    bus: ServiceBusConnection, faulty: LocalNamespace, queue: str
) -> None:
    sender = await bus.sender(queue)
    faulty.faults.set("detach", entity=queue, points=["send"], count=1)
    with pytest.raises(ServiceBusConnectionError):
        await sender.send([Message("x")])
    await sender.send([Message("x")])


async def test_a_settlement_that_fails_inside_the_namespace_can_be_repeated(
    bus: ServiceBusConnection, faulty: LocalNamespace, queue: str
) -> None:
    await (await bus.sender(queue)).send([Message("x")])
    receiver = await bus.receiver(queue)
    messages = await receiver.receive(1, 10)
    faulty.faults.set("internal-error", entity=queue, points=["settle"], count=1)
    with pytest.raises(ServiceBusInternalError):
        await receiver.complete(messages)
    assert not messages[0].is_settled
    await receiver.complete(messages)
    assert await receiver.peek() == []


async def test_a_lost_confirmation_is_resolved_by_settling_again(
    bus: ServiceBusConnection, faulty: LocalNamespace, queue: str
) -> None:
    await (await bus.sender(queue)).send([Message("x")])
    receiver = await bus.receiver(queue)
    messages = await receiver.receive(1, 10)
    faulty.faults.set("drop-ack", entity=queue, points=["settle"], count=1)
    with pytest.raises(OperationTimeoutError) as caught:
        await receiver.complete(messages, timeout=0.1)
    assert caught.value.failed == tuple(messages)
    with pytest.raises(MessageLockLostError):
        await receiver.complete(messages)


async def test_a_namespace_in_a_black_hole_ends_every_call_in_time_and_comes_back(
    faulty: LocalNamespace, queue: str
) -> None:
    async with connect(faulty.connection_string, timeout=20) as bus:
        sender, receiver = await bus.sender(queue), await bus.receiver(queue)
        await sender.room()
        fault = faulty.faults.set("black-hole")
        with pytest.raises(OperationTimeoutError):
            await sender.send([Message("x")], timeout=0.1)
        with pytest.raises(OperationTimeoutError):
            await receiver.peek(timeout=0.1)
        assert await receiver.receive(1, 0.1) == []
        async with connect(faulty.connection_string, timeout=0.1) as other:
            with pytest.raises(OperationTimeoutError):
                await other.sender(queue)
        faulty.faults.clear(fault["id"])
        await sender.send([Message("y")])
        assert await receiver.receive(10, 10)


async def test_after_kill_9_and_a_restart_the_next_calls_find_everything_that_was_accepted(tmp_path: Path) -> None:
    with LocalNamespace(data=tmp_path, config=config()) as namespace:
        async with connect(namespace.connection_string, timeout=20) as bus:
            sender, receiver = await bus.sender("plain-0"), await bus.receiver("plain-0")
            await sender.send([Message(str(number)) for number in range(50)])
            completed = await receiver.receive(10, 10)
            await receiver.complete(completed)
            namespace.kill()
            with pytest.raises((ServiceBusConnectionError, ServiceBusCommunicationError)) as caught:
                await sender.send([Message("lost")])
            assert isinstance(caught.value, RetryError)
            namespace.start()
            await sender.send([Message("50")])
            found: list[int] = []
            while len(found) < 51 - len(completed):
                batch = await receiver.receive(100, 10)
                await receiver.complete(batch)
                found += [int(message.body) for message in batch]
            assert found == list(range(len(completed), 51))
