"""Sending: a `Sender` is the object that the caller uses, a `SenderLink` is its link. A new link replaces an ended one.

A call of `Sender.send` packs its messages into transfers. Each transfer is one delivery. The link sends a delivery if
the peer has granted credit; otherwise the delivery waits in the link's outbox. The peer reports the outcomes in any
order. One `SendConfirmation` collects the outcomes of all deliveries of a call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from math import inf
from types import TracebackType
from typing import Any, Final, Self

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
from twinbus.connect.management import Management
from twinbus.connect.message_encoding import (
    PackedTransfer,
    encode_message,
    pack_transfers,
    to_millis,
    with_scheduled_time,
)
from twinbus.connect.reconnection import Reconnector
from twinbus.connect.timeouts import deadline
from twinbus.connect.transport import AmqpTransport
from twinbus.message import Message

DEFAULT_MAX_MESSAGE_SIZE: Final = 262_144  # if the peer announces no max-message-size

# The keys of a confirmation with one delivery. All such confirmations share this set, so it must not be changed.
_SINGLE_KEY: Final = {0}


class Sender:
    """Sends to a queue or topic. Made by `ServiceBusConnection.sender`. A message given as bytes is already encoded."""

    def __init__(
        self,
        reconnector: Reconnector,
        entity: str,
        timeout: float,
        *,
        management: Management,
        on_close: Callable[[Sender], None],
    ) -> None:
        self.entity = entity
        self.timeout = timeout
        self._reconnector = reconnector
        self._on_close = on_close
        self._link: SenderLink | None = None
        self._attaching = asyncio.Lock()
        self._is_closed = False
        self._management = management

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def max_message_size(self) -> int | None:
        """Largest message that the link accepts, in bytes; None before the sender first attaches."""
        return self._link.max_message_size if self._link is not None else None

    async def open(self, *, timeout: float | None = None) -> None:
        """Attach, if the sender is not attached."""
        if self._link is None or not self._link.is_open or self._is_closed:
            async with deadline(self._seconds(timeout), "attach", self.entity):
                await self._attached()

    async def send(self, messages: Sequence[Message | bytes], *, timeout: float | None = None) -> None:
        """Send the messages, and return when the service has accepted all of them.

        `failed` of an error has the messages that the service has possibly not accepted.
        """
        encoded = [self._encode(message) for message in messages]
        if not encoded:
            return
        transfers: list[PackedTransfer] = []
        confirmation = SendConfirmation(asyncio.get_running_loop().create_future())

        def unaccepted() -> Sequence[Any]:
            if not transfers:
                return messages
            open_transfers = [transfers[key] for key in sorted(confirmation.unaccepted)]
            return [message for transfer in open_transfers for message in messages[transfer.first : transfer.end]]

        try:
            async with deadline(self._seconds(timeout), "send", self.entity, unaccepted):
                link = await self._attached()
                transfers = pack_transfers(encoded, link.max_message_size)
                confirmation.expect(len(transfers))
                try:
                    for key, transfer in enumerate(transfers):
                        await link.room()
                        link.submit(transfer.payload, transfer.message_format, confirmation, key)
                    await confirmation.future
                except ServiceBusError as error:
                    raise error.copy(self.entity, unaccepted()) from None
                finally:
                    if confirmation.outstanding:
                        link.give_up(confirmation)
                    confirmation.close()
        except OperationTimeoutError:
            if not transfers or confirmation.unaccepted:
                raise
            # The last outcome arrived together with the timeout: all messages are accepted.

    def send_soon(self, message: Message | bytes) -> asyncio.Future[None]:
        """Send one message without waiting. The future that is returned gets the outcome.

        This is for a caller that sends many single messages before the first outcome arrives
        (docs/decisions/0006-server-figures.md). `await room()` between two calls limits the number of messages without
        an outcome. After the link has ended, `send_soon` fails until `room` or `send` has attached again.
        """
        link = self._link
        if link is None or self._is_closed:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.set_exception(ServiceBusConnectionError("the sender is not attached", entity=self.entity))
            return future
        loop = link.transport.loop
        confirmation = SendConfirmation(loop.create_future(), loop.time() + self.timeout)
        link.submit(self._encode(message), 0, confirmation)
        return confirmation.future

    async def room(self, *, timeout: float | None = None) -> None:
        """Wait until credit and socket allow to send the next message without waiting. Attaches if necessary."""
        async with deadline(self._seconds(timeout), "room to send", self.entity):
            await (await self._attached()).room()

    async def schedule(
        self, messages: Sequence[Message | bytes], at: datetime, *, timeout: float | None = None
    ) -> list[int]:
        """Schedule messages to be enqueued at an instant. Returns their sequence numbers."""
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
        """Detach. Sends that have no outcome fail. Does not raise if the peer does not answer."""
        self._is_closed = True
        self._on_close(self)
        if self._link is not None:
            await self._reconnector.close_links(self._link)
        await self._management.close()

    def _encode(self, message: Message | bytes) -> bytes:
        return message if isinstance(message, bytes) else encode_message(message, self._reconnector.clock.now())

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    async def _attached(self) -> SenderLink:
        if self._link is not None and self._link.is_open and not self._is_closed:
            return self._link
        async with self._attaching:
            if self._is_closed:
                raise ConnectionClosedError("the sender is closed", entity=self.entity)
            if self._link is None or not self._link.is_open:
                transport = await self._reconnector.authorized(self.entity)
                link = SenderLink(transport, self.entity, self._reconnector.link_name(self.entity))
                await link.attached()
                self._link = link
            return self._link


def send_refusal(state: DeliveryState | None, entity: str) -> ServiceBusError | None:
    """Return the error for a delivery whose outcome is `state`, or None if the delivery was accepted."""
    if isinstance(state, Accepted):
        return None
    if isinstance(state, Rejected) and state.error is not None:
        return error_for(state.error.condition, state.error.description, entity=entity)
    return ServiceBusInternalError(f"the service answered with {type(state).__name__}", entity=entity)


class SendConfirmation:
    """Collects the outcomes of the deliveries of one call. `future` is done when `outstanding` is 0.

    `outstanding` is the number of deliveries without an outcome. `unaccepted` has the keys of the deliveries that the
    peer has not accepted.
    """

    __slots__ = ("deadline", "error", "future", "outstanding", "unaccepted")

    def __init__(self, future: asyncio.Future[None], deadline: float = inf) -> None:
        self.future = future
        self.outstanding = 1
        self.deadline = deadline
        self.unaccepted = _SINGLE_KEY
        self.error: ServiceBusError | None = None

    def expect(self, deliveries: int) -> None:
        """Set the number of deliveries, which is 1 without this call. The keys of the deliveries are 0, 1, 2 …"""
        self.outstanding = deliveries
        self.unaccepted = set(range(deliveries))

    def answered(self, key: int, error: ServiceBusError | None) -> None:
        if error is not None:
            self.error = self.error or error
        elif self.unaccepted is not _SINGLE_KEY:
            self.unaccepted.discard(key)
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
        """Cancel the future, or mark its exception as retrieved: the caller may no longer await the future."""
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()


class SenderLink(LinkSession):
    """One link to an entity: outbox, deliveries in flight, and their outcomes."""

    def __init__(self, transport: AmqpTransport, entity: str, name: str) -> None:
        super().__init__(transport, entity)
        self._tag = 0
        self._in_flight: dict[int, tuple[SendConfirmation, int]] = {}  # by delivery id
        self._outbox: deque[tuple[bytes, int, SendConfirmation, int]] = deque()
        self._room_waiters: list[asyncio.Future[None]] = []
        self._timeout_timer: asyncio.TimerHandle | None = None
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
        return self._link.max_message_size or DEFAULT_MAX_MESSAGE_SIZE

    def submit(self, payload: bytes, message_format: int, confirmation: SendConfirmation, key: int = 0) -> None:
        """Send one delivery now, or when the peer grants credit. `confirmation` records the outcome under `key`."""
        if self.error is not None:
            confirmation.fail(self.error.copy(self.entity))
        elif self._outbox or self._link.credit <= 0:
            self._outbox.append((payload, message_format, confirmation, key))
        else:
            self._transfer(payload, message_format, confirmation, key)
            self.transport.flush_soon(len(payload))
        if confirmation.deadline != inf and self._timeout_timer is None and self.error is None:
            self._timeout_timer = self.transport.loop.call_at(confirmation.deadline, self._fail_overdue)

    async def room(self) -> None:
        """Wait until credit and socket allow to send the next delivery without waiting. The caller sets a timeout."""
        while self.error is None and (self._outbox or self._link.credit <= 0):
            waiter = self.transport.loop.create_future()
            self._room_waiters.append(waiter)
            await waiter
        await self.transport.writable()
        if self.error is not None:
            raise self.error.copy(self.entity)

    def give_up(self, confirmation: SendConfirmation) -> None:
        """Remove the deliveries of a call whose caller no longer waits. Those still in the outbox are not sent."""
        self._in_flight = {number: entry for number, entry in self._in_flight.items() if entry[0] is not confirmation}
        self._outbox = deque(entry for entry in self._outbox if entry[2] is not confirmation)

    # --- from the transport ------------------------------------------------------------------------------------

    def on_flow(self, link: Link) -> None:
        if link.drain:
            link.drained()
        self._send_outbox()

    def on_disposition(self, event: Disposed) -> None:
        if event.role is not RECEIVER or isinstance(event.state, Received):
            return
        error = send_refusal(event.state, self.entity)
        in_flight = self._in_flight
        for number in event.delivery_ids:
            entry = in_flight.pop(number, None)
            if entry is not None:
                entry[0].answered(entry[1], error)
        if not event.settled:
            self.session.dispose(SENDER, event.first, event.last, settled=True, state=event.state)
        if self._outbox or self._room_waiters:
            self._send_outbox()

    def on_failed(self, error: ServiceBusError) -> None:
        waiting = [confirmation for confirmation, _ in self._in_flight.values()]
        waiting += [confirmation for _, _, confirmation, _ in self._outbox]
        self._in_flight.clear()
        self._outbox.clear()
        for confirmation in waiting:
            confirmation.fail(error.copy(self.entity))
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
        self._wake()

    # --- internal ----------------------------------------------------------------------------------------------

    def _transfer(self, payload: bytes, message_format: int, confirmation: SendConfirmation, key: int) -> None:
        self._tag = (self._tag + 1) & 0xFFFFFFFF
        tag = self._tag.to_bytes(4, "big")
        number = self._link.send(tag, payload, message_format=message_format)
        self._in_flight[number] = (confirmation, key)

    def _send_outbox(self) -> None:
        while self._outbox and self._link.credit > 0:
            self._transfer(*self._outbox.popleft())
        if not self._outbox and self._link.credit > 0:
            self._wake()
        self.transport.flush_soon()

    def _wake(self) -> None:
        waiters, self._room_waiters = self._room_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _fail_overdue(self) -> None:
        """Fail the `send_soon` calls whose deadline has passed, and set the timer to the next deadline.

        All calls share this one timer.
        """
        self._timeout_timer = None
        now = self.transport.loop.time()
        waiting = [confirmation for confirmation, _ in self._in_flight.values()]
        waiting += [confirmation for _, _, confirmation, _ in self._outbox]
        overdue = [confirmation for confirmation in waiting if confirmation.deadline <= now]
        for confirmation in overdue:
            confirmation.fail(OperationTimeoutError("send: no answer in time", entity=self.entity))
        if overdue:
            self._in_flight = {number: entry for number, entry in self._in_flight.items() if entry[0].deadline > now}
            self._outbox = deque(entry for entry in self._outbox if entry[2].deadline > now)
        due = min((confirmation.deadline for confirmation in waiting if confirmation.deadline > now), default=inf)
        if due != inf:
            self._timeout_timer = self.transport.loop.call_at(due, self._fail_overdue)
