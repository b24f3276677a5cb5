"""What a caller sends with: batches that are accepted on return, single messages pipelined, schedules.

Attaches anew when its link is gone; how deliveries are tracked is said in `sending`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from twinbus.amqp import (
    RCV_FIRST,
    RECEIVER,
    SENDER,
    SND_UNSETTLED,
    Accepted,
    DeliveryState,
    Disposed,
    Link,
    Received,
    Rejected,
    Source,
    Target,
)
from twinbus.connect.errors import (
    ConnectionClosedError,
    OperationTimeoutError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusInternalError,
    error_for,
)
from twinbus.connect.link_session import LinkSession
from twinbus.connect.message_encoding import (
    PackedTransfer,
    encode_message,
    pack_transfers,
    to_millis,
    with_scheduled_time,
)
from twinbus.connect.timeouts import deadline
from twinbus.connect.transport import AmqpTransport
from twinbus.message import Message

if TYPE_CHECKING:
    from twinbus.connect.client import ServiceBusConnection
    from twinbus.connect.management import Management


class Sender:
    """Made by `ServiceBusConnection.sender`. Where bytes are taken for a message, they are an encoded one."""

    def __init__(self, bus: ServiceBusConnection, entity: str, timeout: float) -> None:
        self.entity = entity
        self.timeout = timeout
        self._bus = bus
        self._link: SenderLink | None = None
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
        """Attach, unless attached."""
        if self._link is None or not self._link.is_open or self._is_closed:
            async with deadline(self._seconds(timeout), "attach", self.entity):
                await self._attached()

    async def send(self, messages: Sequence[Message | bytes], *, timeout: float | None = None) -> None:
        """Returns when all are accepted. Otherwise the error's `failed` are the messages that may not be."""
        encoded = [self._encode(message) for message in messages]
        if not encoded:
            return
        batches: list[PackedTransfer] = []
        confirmation = SendConfirmation(asyncio.get_running_loop().create_future())

        def unsafe() -> Sequence[Any]:
            if not batches:
                return messages
            spans = [batches[key] for key in sorted(confirmation.unsafe)]
            return [message for batch in spans for message in messages[batch.first : batch.end]]

        try:
            async with deadline(self._seconds(timeout), "send", self.entity, unsafe):
                link = await self._attached()
                batches = pack_transfers(encoded, link.max_message_size)
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
        confirmation = SendConfirmation(loop.create_future(), loop.time() + self.timeout)
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

    async def _attached(self) -> SenderLink:
        if self._link is not None and self._link.is_open and not self._is_closed:
            return self._link
        async with self._attaching:
            if self._is_closed:
                raise ConnectionClosedError("the sender is closed", entity=self.entity)
            if self._link is None or not self._link.is_open:
                wire = await self._bus.authorized(self.entity)
                link = SenderLink(wire, self.entity, self._bus.link_name(self.entity))
                await link.attached()
                self._link = link
            return self._link


DEFAULT_LIMIT: Final = 262_144  # where the peer names no max-message-size

_ONE: Final = {0}  # shared by all confirmations of one delivery, and never changed


def send_refusal(state: DeliveryState | None, entity: str) -> ServiceBusError | None:
    """Why a delivery was not accepted; None when it was."""
    if isinstance(state, Accepted):
        return None
    if isinstance(state, Rejected) and state.error is not None:
        return error_for(state.error.condition, state.error.description, entity=entity)
    return ServiceBusInternalError(f"the service answered with {type(state).__name__}", entity=entity)


class SendConfirmation:
    """`future` is done when the outcome of all `outstanding` deliveries is known; `unsafe` are those not accepted."""

    __slots__ = ("deadline", "error", "future", "outstanding", "unsafe")

    def __init__(self, future: asyncio.Future[None], deadline: float = inf) -> None:
        self.future = future
        self.outstanding = 1
        self.deadline = deadline
        self.unsafe = _ONE
        self.error: ServiceBusError | None = None

    def expect(self, deliveries: int) -> None:
        """More than one; their keys are 0, 1 …"""
        self.outstanding = deliveries
        self.unsafe = set(range(deliveries))

    def answered(self, key: int, error: ServiceBusError | None) -> None:
        if error is not None:
            self.error = self.error or error
        elif self.unsafe is not _ONE:
            self.unsafe.discard(key)
        self.outstanding -= 1
        if self.outstanding == 0:
            if self.error is not None:
                self.fail(self.error)
            elif not self.future.done():
                self.future.set_result(None)

    def fail(self, error: ServiceBusError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def close(self) -> None:
        """Whoever waited has what it needs, and may have had it from elsewhere."""
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()


class SenderLink(LinkSession):
    def __init__(self, wire: AmqpTransport, entity: str, name: str) -> None:
        super().__init__(wire, entity)
        self._tag = 0
        self._pending: dict[int, tuple[SendConfirmation, int]] = {}
        self._outbox: deque[tuple[bytes, int, SendConfirmation, int]] = deque()
        self._waiting_for_room: list[asyncio.Future[None]] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._link = self.attach(
            name,
            SENDER,
            source=Source(name),
            target=Target(entity),
            snd_settle_mode=SND_UNSETTLED,
            rcv_settle_mode=RCV_FIRST,
        )

    @property
    def max_message_size(self) -> int:
        return self._link.max_message_size or DEFAULT_LIMIT

    @property
    def in_flight(self) -> int:
        return len(self._pending) + len(self._outbox)

    def submit(self, payload: bytes, message_format: int, confirmation: SendConfirmation, key: int = 0) -> None:
        if self.error is not None:
            confirmation.fail(self.error.again(self.entity))
        elif self._outbox or self._link.credit <= 0:
            self._outbox.append((payload, message_format, confirmation, key))
        else:
            self._transfer(payload, message_format, confirmation, key)
            self.wire.flush_soon(len(payload))
        if confirmation.deadline != inf and self._sweeper is None and self.error is None:
            self._sweeper = self.wire.loop.call_at(confirmation.deadline, self._sweep)

    async def room(self) -> None:
        """Until what is submitted next leaves at once; the caller bounds the wait."""
        while self.error is None and (self._outbox or self._link.credit <= 0):
            waiter = self.wire.loop.create_future()
            self._waiting_for_room.append(waiter)
            await waiter
        await self.wire.writable()
        if self.error is not None:
            raise self.error.again(self.entity)

    def give_up(self, confirmation: SendConfirmation) -> None:
        """Nobody waits for it any more: what has not left stays here."""
        self._pending = {number: entry for number, entry in self._pending.items() if entry[0] is not confirmation}
        self._outbox = deque(entry for entry in self._outbox if entry[2] is not confirmation)

    # --- from the wire -----------------------------------------------------------------------------------------

    def flowed(self, link: Link) -> None:
        if link.drain:
            link.drained()
        self._empty_outbox()

    def disposed(self, event: Disposed) -> None:
        if event.role is not RECEIVER or isinstance(event.state, Received):
            return
        error = send_refusal(event.state, self.entity)
        pending = self._pending
        for number in event.delivery_ids:
            entry = pending.pop(number, None)
            if entry is not None:
                entry[0].answered(entry[1], error)
        if not event.settled:
            self.session.dispose(SENDER, event.first, event.last, settled=True, state=event.state)
        if self._outbox or self._waiting_for_room:
            self._empty_outbox()

    def failed(self, error: ServiceBusError) -> None:
        waiting = [confirmation for confirmation, _ in self._pending.values()]
        waiting += [confirmation for _, _, confirmation, _ in self._outbox]
        self._pending.clear()
        self._outbox.clear()
        for confirmation in waiting:
            confirmation.fail(error.again(self.entity))
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._wake()

    # --- inside ------------------------------------------------------------------------------------------------

    def _transfer(self, payload: bytes, message_format: int, confirmation: SendConfirmation, key: int) -> None:
        self._tag = (self._tag + 1) & 0xFFFFFFFF
        tag = self._tag.to_bytes(4, "big")
        number = self._link.send(tag, payload, message_format=message_format)
        self._pending[number] = (confirmation, key)

    def _empty_outbox(self) -> None:
        while self._outbox and self._link.credit > 0:
            self._transfer(*self._outbox.popleft())
        if not self._outbox and self._link.credit > 0:
            self._wake()
        self.wire.flush_soon()

    def _wake(self) -> None:
        waiters, self._waiting_for_room = self._waiting_for_room, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _sweep(self) -> None:
        """Ends what was sent soon and never answered: one timer for all, at the earliest deadline."""
        self._sweeper = None
        now = self.wire.loop.time()
        waiting = [confirmation for confirmation, _ in self._pending.values()]
        waiting += [confirmation for _, _, confirmation, _ in self._outbox]
        overdue = [confirmation for confirmation in waiting if confirmation.deadline <= now]
        for confirmation in overdue:
            confirmation.fail(OperationTimeoutError("send: no answer in time", entity=self.entity))
        if overdue:
            self._pending = {number: entry for number, entry in self._pending.items() if entry[0].deadline > now}
            self._outbox = deque(entry for entry in self._outbox if entry[2].deadline > now)
        due = min((confirmation.deadline for confirmation in waiting if confirmation.deadline > now), default=inf)
        if due != inf:
            self._sweeper = self.wire.loop.call_at(due, self._sweep)
