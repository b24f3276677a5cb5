"""A link that receives: messages are buffered as they come, credit is given back as they are taken, settlements of many
deliveries go out in runs and come back in any pieces.

What a settlement means to the caller is said in `settling`; when to wait and for how long, in `receiver`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Final

from twinbus.amqp.events import Delivered, Disposed
from twinbus.amqp.link import Link
from twinbus.amqp.performatives import (
    RCV_FIRST,
    RCV_SECOND,
    RECEIVER,
    SENDER,
    SND_SETTLED,
    SND_UNSETTLED,
    DeliveryState,
    Released,
    Source,
    Target,
)
from twinbus.connect.attachment import Attachment
from twinbus.connect.batches import runs
from twinbus.connect.errors import MessageAlreadySettled, ServiceBusError
from twinbus.connect.received import ReceivedMessage
from twinbus.connect.settling import Settlement, refusal
from twinbus.connect.wire import Wire
from twinbus.values import Symbol, UInt

_SESSION_FILTER: Final = Symbol("com.microsoft:session-filter")
_TIMEOUT: Final = Symbol("com.microsoft:timeout")
_LOCKED_UNTIL: Final = "com.microsoft:locked-until-utc"
# .NET ticks (100 ns since year 1) at the Unix epoch.
_EPOCH_TICKS: Final = 621_355_968_000_000_000


class ReceiveMode(Enum):
    PEEK_LOCK = "peek-lock"
    RECEIVE_AND_DELETE = "receive-and-delete"


class NextAvailable(Enum):
    """Asks for any session that has messages and no receiver."""

    NEXT_AVAILABLE = "next-available"


NEXT_AVAILABLE: Final = NextAvailable.NEXT_AVAILABLE
Session = str | NextAvailable | None


class ReceivingLink(Attachment):
    def __init__(
        self,
        wire: Wire,
        entity: str,
        address: str,
        name: str,
        *,
        mode: ReceiveMode,
        prefetch: int,
        session: Session,
        session_timeout: float,
    ) -> None:
        super().__init__(wire, entity)
        self.name = name
        self.buffer: deque[ReceivedMessage] = deque()
        self.session_id: str | None = None
        self.session_locked_until: int | None = None  # ms
        self._peek_lock = mode is ReceiveMode.PEEK_LOCK
        self._prefetch = prefetch
        self._waiters: list[asyncio.Future[None]] = []
        self._settling: dict[int, Settlement] = {}
        source, properties = Source(address), None
        if session is not None:
            source.filter = {_SESSION_FILTER: None if session is NEXT_AVAILABLE else session}
            properties = {_TIMEOUT: UInt(max(1, int(session_timeout * 1000)))}
        self._link = self.attach(
            name,
            RECEIVER,
            source=source,
            target=Target(name),
            snd_settle_mode=SND_UNSETTLED if self._peek_lock else SND_SETTLED,
            rcv_settle_mode=RCV_SECOND if self._peek_lock else RCV_FIRST,
            properties=properties,
        )

    # --- taking ------------------------------------------------------------------------------------------------

    @property
    def has_credit(self) -> bool:
        return self._link.credit > 0

    def take(self, most: int) -> list[ReceivedMessage]:
        buffer = self.buffer
        if len(buffer) <= most:
            taken = list(buffer)
            buffer.clear()
        else:
            taken = [buffer.popleft() for _ in range(most)]
        if self._prefetch and self.error is None:
            wanted = self._prefetch - len(buffer)
            if wanted - self._link.credit >= (self._prefetch + 1) // 2:
                self._link.flow(wanted)
                self.wire.flush_soon()
        return taken

    def ask(self, count: int) -> None:
        """Credit for one receive, where nothing is prefetched."""
        if self.error is None and self._link.credit < count:
            self._link.flow(count)
            self.wire.flush_soon()

    async def arrived(self) -> None:
        """Until something is in the buffer; the caller bounds the wait."""
        while not self.buffer:
            if self.error is not None:
                raise self.error.again(self.entity)
            await self._changed()

    async def drain(self) -> None:
        """Takes back the credit: the peer sends what it has at once and no more (§2.6.7)."""
        if self.error is None and self._link.credit > 0:
            self._link.flow(self._link.credit, drain=True)
            self.wire.flush_soon()
        while self.error is None and self._link.credit > 0:
            await self._changed()

    def release_buffer(self) -> None:
        """Gives back what was never taken, without raising its delivery count."""
        if self._peek_lock and self.error is None:
            self.release(message.delivery_id for message in self.buffer)
            self.buffer.clear()

    def release(self, deliveries: Iterable[int]) -> None:
        """Without waiting for an answer."""
        for first, last in runs(deliveries):
            self.session.dispose(RECEIVER, first, last, settled=True, state=Released())
        self.wire.flush_soon()

    # --- settling ----------------------------------------------------------------------------------------------

    def settle(self, messages: Sequence[ReceivedMessage], settlement: Settlement, state: DeliveryState) -> None:
        """Asks for one outcome for all of them; `settlement` hears of each."""
        held = {message.delivery_id: message for message in messages}
        if len(held) != len(messages) or not self._settling.keys().isdisjoint(held):
            raise MessageAlreadySettled("a message is being settled twice", entity=self.entity, failed=messages)
        settlement.expect(held)
        self._settling.update(dict.fromkeys(held, settlement))
        for first, last in runs(held):
            self.session.dispose(RECEIVER, first, last, settled=False, state=state)
        self.wire.flush_soon()

    def give_up(self, settlement: Settlement) -> None:
        """Nobody waits for the confirmations that are still out. Asked again, it is by lock token: that is answered."""
        for message in settlement.unfinished:
            message.link = None
        self._settling = {number: entry for number, entry in self._settling.items() if entry is not settlement}

    # --- from the wire -----------------------------------------------------------------------------------------

    def link_accepted(self, link: Link) -> None:
        filters = getattr(link.source, "filter", None) or {}
        found: Any = filters.get(_SESSION_FILTER)
        if found is not None:
            self.session_id = str(getattr(found, "value", found))
        ticks = link.properties.get(_LOCKED_UNTIL)
        if isinstance(ticks, int):
            self.session_locked_until = (ticks - _EPOCH_TICKS) // 10_000
        if self._prefetch:
            link.flow(self._prefetch)

    def delivered(self, event: Delivered) -> None:
        self.buffer.append(ReceivedMessage(event.payload, event.tag, self, event.delivery_id, event.settled))
        if self._waiters:
            self._wake()

    def flowed(self, link: Link) -> None:
        self._wake()

    def disposed(self, event: Disposed) -> None:
        if event.role is not SENDER or not event.settled:
            return
        settling, last, error = self._settling, None, None
        for number in event.delivery_ids:
            settlement = settling.pop(number, None)
            if settlement is not None:
                if settlement is not last:
                    last, error = settlement, refusal(event.state, settlement.asked, self.entity)
                settlement.answered(number, error)

    def failed(self, error: ServiceBusError) -> None:
        if self._peek_lock:
            self.buffer.clear()  # their locks go with the link: they are delivered again
        settlements = set(self._settling.values())
        self._settling.clear()
        for settlement in settlements:
            settlement.fail(error)
        self._wake()

    async def _changed(self) -> None:
        waiter = self.wire.loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
