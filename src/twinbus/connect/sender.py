"""What a caller sends with: batches that are accepted on return, single messages pipelined, schedules.

Attaches anew when its link is gone; how deliveries are tracked is said in `sending`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from twinbus.connect.batches import Batch, pack
from twinbus.connect.deadlines import deadline
from twinbus.connect.encoding import encode_message, to_millis, with_scheduled_time
from twinbus.connect.errors import (
    ConnectionClosedError,
    OperationTimeoutError,
    ServiceBusConnectionError,
    ServiceBusError,
)
from twinbus.connect.sending import Confirmation, SendingLink
from twinbus.message import Message

if TYPE_CHECKING:
    from twinbus.connect.bus import ServiceBusConnection
    from twinbus.connect.management import Management


class Sender:
    """Made by `ServiceBusConnection.sender`. Where bytes are taken for a message, they are an encoded one."""

    def __init__(self, bus: ServiceBusConnection, entity: str, timeout: float) -> None:
        self.entity = entity
        self.timeout = timeout
        self._bus = bus
        self._link: SendingLink | None = None
        self._attaching = asyncio.Lock()
        self._is_closed = False
        self._management: Management = bus.management(entity)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def max_message_size(self) -> int | None:
        """What the link takes; None before the first use."""
        return self._link.max_message_size if self._link is not None else None

    async def open(self, *, timeout: float | None = None) -> None:
        """Attaches, unless it is attached."""
        async with deadline(self._seconds(timeout), "attach", self.entity):
            await self._attached()

    async def send(self, messages: Sequence[Message | bytes], *, timeout: float | None = None) -> None:
        """Returns when all are accepted. Otherwise the error's `failed` are the messages that may not be."""
        encoded = [self._encode(message) for message in messages]
        if not encoded:
            return
        batches: list[Batch] = []
        confirmation = Confirmation(asyncio.get_running_loop().create_future())

        def unsafe() -> Sequence[Any]:
            if not batches:
                return messages
            spans = [batches[key] for key in sorted(confirmation.unsafe)]
            return [message for batch in spans for message in messages[batch.first : batch.end]]

        try:
            async with deadline(self._seconds(timeout), "send", self.entity, unsafe):
                link = await self._attached()
                batches = pack(encoded, link.max_message_size)
                confirmation.expect(len(batches))
                try:
                    for key, batch in enumerate(batches):
                        await link.room()
                        link.submit(batch.payload, batch.message_format, confirmation, key)
                    await confirmation.future
                except ServiceBusError as error:
                    raise error.again(self.entity, unsafe()) from None
                finally:
                    if confirmation.outstanding:
                        link.give_up(confirmation)
                    confirmation.close()
        except OperationTimeoutError:
            if not batches or confirmation.unsafe:
                raise
            # The last answer came with the end of the time: all of them are accepted.

    def send_soon(self, message: Message | bytes) -> asyncio.Future[None]:
        """Sends without waiting; the future tells the outcome. `await room()` between calls bounds what is in flight.

        After a broken link it fails until `room` (or any other call) has attached again.
        """
        link = self._link
        if link is None or self._is_closed:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.set_exception(ServiceBusConnectionError("the sender is not attached", entity=self.entity))
            return future
        loop = link.wire.loop
        confirmation = Confirmation(loop.create_future(), loop.time() + self.timeout)
        link.submit(self._encode(message), 0, confirmation)
        return confirmation.future

    async def room(self, *, timeout: float | None = None) -> None:
        """Waits until the next message can leave at once; attaches if need be."""
        async with deadline(self._seconds(timeout), "room to send", self.entity):
            await (await self._attached()).room()

    async def schedule(
        self, messages: Sequence[Message | bytes], at: datetime, *, timeout: float | None = None
    ) -> list[int]:
        """Enqueues the messages at that instant; returns their sequence numbers."""
        millis = to_millis(at)
        encoded = [
            with_scheduled_time(message, millis)
            if isinstance(message, bytes)
            else self._encode(replace(message, scheduled_enqueue_time=at))
            for message in messages
        ]
        return await self._management.schedule(encoded, timeout=self._seconds(timeout))

    async def cancel_scheduled(self, numbers: Sequence[int], *, timeout: float | None = None) -> None:
        await self._management.cancel_scheduled(numbers, timeout=self._seconds(timeout))

    async def close(self) -> None:
        """Detaches; what is in flight fails. Never raises for a peer that does not answer."""
        self._is_closed = True
        self._bus.forget(self)
        if self._link is not None:
            await self._bus.close_attachment(self._link)
        await self._management.close()

    def _encode(self, message: Message | bytes) -> bytes:
        return message if isinstance(message, bytes) else encode_message(message, self._bus.clock.now())

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    async def _attached(self) -> SendingLink:
        if self._link is not None and self._link.is_open and not self._is_closed:
            return self._link
        async with self._attaching:
            if self._is_closed:
                raise ConnectionClosedError("the sender is closed", entity=self.entity)
            if self._link is None or not self._link.is_open:
                wire = await self._bus.authorized(self.entity)
                link = SendingLink(wire, self.entity, self._bus.link_name(self.entity))
                await link.attached()
                self._link = link
            return self._link
