"""A link that sends: deliveries leave while there is credit and wait in line otherwise; outcomes come in any order.

One Confirmation stands for a whole call, however many deliveries the call makes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from math import inf
from typing import Final

from twinbus.amqp.events import Disposed
from twinbus.amqp.link import Link
from twinbus.amqp.performatives import (
    RCV_FIRST,
    RECEIVER,
    SENDER,
    SND_UNSETTLED,
    Accepted,
    DeliveryState,
    Received,
    Rejected,
    Source,
    Target,
)
from twinbus.connect.attachment import Attachment
from twinbus.connect.errors import OperationTimeoutError, ServiceBusError, ServiceBusInternalError, error_for
from twinbus.connect.wire import Wire

DEFAULT_LIMIT: Final = 262_144  # where the peer names no max-message-size

_ONE: Final = {0}  # shared by all confirmations of one delivery, and never changed


def refusal(state: DeliveryState | None, entity: str) -> ServiceBusError | None:
    """Why a delivery was not accepted; None when it was."""
    if isinstance(state, Accepted):
        return None
    if isinstance(state, Rejected) and state.error is not None:
        return error_for(state.error.condition, state.error.description, entity=entity)
    return ServiceBusInternalError(f"the service answered with {type(state).__name__}", entity=entity)


class Confirmation:
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


class SendingLink(Attachment):
    def __init__(self, wire: Wire, entity: str, name: str) -> None:
        super().__init__(wire, entity)
        self._tag = 0
        self._pending: dict[int, tuple[Confirmation, int]] = {}
        self._outbox: deque[tuple[bytes, int, Confirmation, int]] = deque()
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

    def submit(self, payload: bytes, message_format: int, confirmation: Confirmation, key: int = 0) -> None:
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

    def give_up(self, confirmation: Confirmation) -> None:
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
        error = refusal(event.state, self.entity)
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

    def _transfer(self, payload: bytes, message_format: int, confirmation: Confirmation, key: int) -> None:
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
