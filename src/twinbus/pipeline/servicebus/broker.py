"""The namespace as Spark's Python workers use it: one call after the other, on an event loop of their own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

from twinbus.connect import MessageState, ReceivedMessage, ServiceBusConnection, connect
from twinbus.connect.sender import Sender
from twinbus.message import Message
from twinbus.pipeline.servicebus.options import Options

T = TypeVar("T")

PAGE: Final = 250
_TAKE: Final = 1000
_EMPTY_SECONDS: Final = 2.0


class Broker:
    """A connection for the time of one task: `with Broker(options) as broker`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._bus: ServiceBusConnection | None = None
        self._senders: dict[str, Sender] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._loop.is_closed():
            if self._bus is not None:
                self._loop.run_until_complete(self._bus.close())
            self._loop.close()

    # --- looking -----------------------------------------------------------------------------------------------

    def first_at_or_after(self, number: int) -> int | None:
        """The lowest sequence number that is not below `number`."""
        found = self._run(self._peek(number, 1))
        return found[0].sequence_number if found else None

    def last_after(self, number: int) -> int | None:
        """The highest sequence number above `number`, in few looks: strides that double, then halves."""
        low = self.first_at_or_after(number + 1)
        if low is None:
            return None
        stride = 1
        while (found := self.first_at_or_after(low + stride)) is not None:
            low, stride = found, stride * 2
        high = low + stride  # nothing from here on
        while high - low > 1:
            middle = (low + high) // 2
            found = self.first_at_or_after(middle)
            low, high = (low, middle) if found is None else (found, high)
        return low

    def between(self, first: int, last: int, *, active_only: bool) -> Iterator[ReceivedMessage]:
        """Messages by their sequence numbers, both ends included, without locking them."""
        while first <= last:
            page = self._run(self._peek(first, PAGE))
            for message in page:
                number = message.sequence_number or 0
                if number > last:
                    return
                if not active_only or message.state is MessageState.ACTIVE:
                    yield message
            if not page:
                return
            first = (page[-1].sequence_number or 0) + 1

    async def _peek(self, number: int, count: int) -> list[ReceivedMessage]:
        entity = self._options.path
        address = f"{entity}/$DeadLetterQueue" if self._options.dead_letter else entity
        return await self._connected().management(entity, address=address).peek(number, count)

    # --- completing and sending --------------------------------------------------------------------------------

    def complete_through(self, last: int) -> int:
        """Complete every message up to this sequence number that can be had; returns how many."""
        return self._run(self._complete_through(last))

    async def _complete_through(self, last: int) -> int:
        done = 0
        options = self._options
        async with await self._connected().receiver(
            options.entity or "", subscription=options.subscription, dead_letter=options.dead_letter, prefetch=0
        ) as receiver:
            while messages := await receiver.receive(_TAKE, _EMPTY_SECONDS):
                ours = [message for message in messages if (message.sequence_number or 0) <= last]
                others = [message for message in messages if (message.sequence_number or 0) > last]
                await receiver.complete(ours)
                await receiver.release(others)
                done += len(ours)
                if others:
                    break
        return done

    def send(self, batches: Mapping[str, Sequence[Message]]) -> None:
        """Returns when every message was accepted."""
        self._run(self._send(batches))

    async def _send(self, batches: Mapping[str, Sequence[Message]]) -> None:
        for entity, messages in batches.items():
            sender = self._senders.get(entity)
            if sender is None:
                sender = self._senders[entity] = await self._connected().sender(entity)
            await sender.send(messages)

    # --- the connection ----------------------------------------------------------------------------------------

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(call)

    def _connected(self) -> ServiceBusConnection:
        if self._bus is None:
            told = self._options.ca_file
            tls = ssl.create_default_context(cafile=told) if told is not None else None
            self._bus = connect(self._options.endpoint(), tls=tls, timeout=self._options.timeout)
        return self._bus
