"""The clients that load the server: the official SDK and twinbus.connect, doing the same things.

Each method works at full speed, for some seconds or some messages, and returns how many messages it moved.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Protocol, Self

import uvloop
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from twinbus.connect import Receiver, Sender, ServiceBusConnection, connect, encode_message
from twinbus.message import Message

SIZE: Final = 1024
BATCH: Final = 100
BODY: Final = bytes(SIZE)
_IN_FLIGHT: Final = 16
_PIPELINED: Final = 500


class Client(Protocol):
    """The methods of a client that the benchmarks call."""

    def send_singles(self, seconds: float) -> int: ...
    def send_batches(self, seconds: float) -> int: ...
    def receive_and_complete(self, seconds: float) -> int: ...


class SdkClient:
    """The official SDK, sync, with its defaults."""

    def __init__(self, connection_string: str) -> None:
        self._client = ServiceBusClient.from_connection_string(connection_string)
        self._sender = self._client.get_queue_sender("sends")
        self._receiver = self._client.get_queue_receiver("receives")

    def send_singles(self, seconds: float) -> int:
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._sender.send_messages(ServiceBusMessage(BODY))
            count += 1
        return count

    def send_batches(self, seconds: float) -> int:
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._sender.send_messages([ServiceBusMessage(BODY) for _ in range(BATCH)])
            count += BATCH
        return count

    def receive_and_complete(self, seconds: float) -> int:
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            found = self._receiver.receive_messages(max_message_count=BATCH, max_wait_time=10)
            if not found:
                raise RuntimeError("the queue is empty")
            for message in found:
                self._receiver.complete_message(message)
            count += len(found)
        return count

    def send_latencies(self, count: int) -> list[float]:
        return [_timed(lambda: self._sender.send_messages(ServiceBusMessage(BODY))) for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()


class ConnectClient:
    """twinbus.connect, one connection, on a loop of its own."""

    def __init__(self, connection_string: str) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._encoded = encode_message(_message(), int(time.time() * 1000))
        self.message_size = len(self._encoded)
        self._runner.run(self._open(connection_string))

    async def _open(self, connection_string: str) -> None:
        self._bus: ServiceBusConnection = connect(connection_string)
        self._senders: dict[str, Sender] = {}
        for queue in ("sends", "receives", "deep"):
            self._senders[queue] = await self._bus.sender(queue)

    def send_singles(self, seconds: float) -> int:
        """One after the other, each confirmed before the next."""
        return self._runner.run(_repeat(seconds, lambda: self._send(self._senders["sends"], 1)))

    def send_batches(self, seconds: float) -> int:
        """One after the other, each confirmed before the next."""
        return self._runner.run(_repeat(seconds, lambda: self._send(self._senders["sends"], BATCH)))

    def receive_and_complete(self, seconds: float) -> int:
        return self._runner.run(self._drain("receives", seconds))

    def send_singles_pipelined(self, seconds: float) -> int:
        """Single messages, hundreds of them in flight."""
        return self._runner.run(self._pipeline(seconds))

    def send_batches_pipelined(self, seconds: float) -> int:
        """Send batches that are encoded once, with several in flight, so that the client uses little CPU time."""
        return self._runner.run(self._flood("sends", seconds, None))

    def fill(self, queue: str, count: int) -> None:
        self._runner.run(self._flood(queue, None, count))

    def drain(self, queue: str, seconds: float, at_most: int) -> int:
        return self._runner.run(self._drain(queue, seconds, at_most))

    def send_latencies(self, count: int) -> list[float]:
        return self._runner.run(self._latencies(count))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._bus.close())
        self._runner.close()

    async def _send(self, sender: Sender, count: int) -> int:
        await sender.send([_message() for _ in range(count)])
        return count

    async def _pipeline(self, seconds: float) -> int:
        sender = self._senders["sends"]
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            await sender.room()
            await asyncio.gather(*(sender.send_soon(_message()) for _ in range(_PIPELINED)))
            count += _PIPELINED
        return count

    async def _flood(self, queue: str, seconds: float | None, total: int | None) -> int:
        batch = [self._encoded] * BATCH
        sender = self._senders[queue]
        count, end = 0, time.perf_counter() + (seconds or 0)

        async def one_lane() -> None:
            nonlocal count
            while time.perf_counter() < end if total is None else count < total:
                count += BATCH
                await sender.send(batch)

        await asyncio.gather(*(one_lane() for _ in range(_IN_FLIGHT)))
        return count

    async def _drain(self, queue: str, seconds: float, at_most: int | None = None) -> int:
        receiver: Receiver = await self._bus.receiver(queue)
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end and (at_most is None or count < at_most):
            found = await receiver.receive(BATCH, max_wait=10)
            if not found:
                raise RuntimeError("the queue is empty")
            await receiver.complete(found)
            count += len(found)
        await receiver.close()
        return count

    async def _latencies(self, count: int) -> list[float]:
        sender, found = self._senders["sends"], []
        for _ in range(count):
            before = time.perf_counter()
            await sender.send([_message()])
            found.append(time.perf_counter() - before)
        return found


def _message() -> Message:
    """Return a message with its own id, as the SDK makes it."""
    return Message(BODY, message_id=str(uuid.uuid4()))


def _timed(call: Callable[[], object]) -> float:
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


async def _repeat(seconds: float, step: Callable[[], Awaitable[int]]) -> int:
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        count += await step()
    return count
