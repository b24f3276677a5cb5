"""Crash faults (N4): before an operation is stored, or after it is stored and before it is answered."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.namespace.front.amqp_peer import SECONDS
from tests.namespace.front.test_accepted_connection import talk
from twinbus.connect import ServiceBusConnection, ServiceBusError, connect
from twinbus.message import Message
from twinbus.namespace.server import NamespaceServer
from twinbus.testing import LocalNamespace

from .test_faults import queue_request, stored


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when the process would have been killed. It lives on, so that the test can examine it."""
    killed = asyncio.Event()

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        killed.set()

    monkeypatch.setattr(os, "kill", kill)
    return killed


async def _until_killed(operations: Coroutine[Any, Any, None], killed: asyncio.Event) -> None:
    task = asyncio.ensure_future(operations)
    async with asyncio.timeout(SECONDS):
        await killed.wait()
    assert not task.done(), "nothing was answered"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("point", ["connect", "attach", "send", "receive", "settle", "request", "http"])
async def test_a_crash_fault_ends_the_process_before_the_operation_is_carried_out(
    server: NamespaceServer, bus: ServiceBusConnection, killed: asyncio.Event, point: str
) -> None:
    await bus.open()
    server.faults.set({"kind": "crash", "points": [point], "count": 1})
    await _until_killed(_go_through(server, bus), killed)
    # The operations before the one that the fault hit were carried out.
    assert len(await stored(server)) == (1 if point in ("receive", "settle") else 0)


async def _go_through(server: NamespaceServer, bus: ServiceBusConnection) -> None:
    await talk(server, queue_request(server, "orders"))
    sender = await bus.sender("orders")
    await sender.send([Message("a")])
    receiver = await bus.receiver("orders")
    await receiver.complete(await receiver.receive(1, SECONDS))
    await receiver.peek()


async def test_a_crash_fault_with_after_ends_the_process_when_the_operation_is_stored_and_not_answered(
    server: NamespaceServer, bus: ServiceBusConnection, killed: asyncio.Event
) -> None:
    sender, receiver = await bus.sender("orders"), await bus.receiver("orders", prefetch=0)
    server.faults.set({"kind": "crash", "points": ["send"], "after": True, "count": 1})
    await _until_killed(sender.send([Message(body) for body in "abc"]), killed)
    assert len(await stored(server)) == 3
    held = await receiver.receive(1, SECONDS)
    killed.clear()
    server.faults.set({"kind": "crash", "points": ["settle"], "after": True, "count": 1})
    await _until_killed(receiver.complete(held), killed)
    assert len(await stored(server)) == 2
    killed.clear()
    server.faults.set({"kind": "crash", "points": ["request"], "after": True, "count": 1})
    management = bus.management("orders")

    async def delete() -> None:
        await management.delete_batch(1)

    await _until_killed(delete(), killed)
    assert len(await stored(server)) == 1


async def test_a_batch_survives_the_crash_that_follows_it(tmp_path: Path) -> None:
    config = {"namespaces": [{"name": "one", "queues": [{"name": "orders"}]}]}
    with LocalNamespace("one", data=tmp_path, config=config) as namespace:
        async with connect(namespace.connection_string, timeout=SECONDS) as bus:
            sender = await bus.sender("orders")
            namespace.faults.set("crash", points=["send"], after=True)
            with pytest.raises(ServiceBusError):
                await sender.send([Message(body) for body in "abc"])
        assert namespace.wait() == -signal.SIGKILL
        namespace.start()
        async with connect(namespace.connection_string, timeout=SECONDS) as bus:
            left = await bus.management("orders").peek(0, 10)
    assert [bytes(message.body) for message in left] == [b"a", b"b", b"c"]
