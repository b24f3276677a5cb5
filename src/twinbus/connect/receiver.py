"""Receiving: a `Receiver` is the object that the caller uses, a `ReceiverLink` is the link of a `Receiver`.

The link puts delivered messages into a buffer. With prefetch, the link grants new credit early, so that messages
are in the buffer before `receive` is called. Without prefetch, each `receive` grants credit for the messages that it
requests and takes the unused credit back.

A settlement is sent on the link that delivered the message, one frame for each run of consecutive delivery ids, and
waits for the peer's confirmation. A message whose link has ended is settled through `$management` by its lock token.

After its link has ended, the receiver attaches again with the next operation. A session receiver does not: the lock of
the session ended together with the link.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from enum import Enum
from types import TracebackType
from typing import Any, Final, Self

from twinbus.amqp import (
    RCV_FIRST,
    RCV_SECOND,
    RECEIVER,
    SENDER,
    SND_SETTLED,
    SND_UNSETTLED,
    Delivered,
    DeliveryState,
    Disposed,
    Link,
    Released,
    Source,
    Target,
    consecutive_runs,
)
from twinbus.connect.bisection import bisect_refused
from twinbus.connect.errors import (
    ConnectionClosedError,
    MessageAlreadySettled,
    MessageLockLostError,
    MessageNotFoundError,
    ServiceBusArgumentError,
    ServiceBusError,
    SessionLockLostError,
)
from twinbus.connect.link_session import LinkSession
from twinbus.connect.management import Management
from twinbus.connect.message_encoding import to_datetime
from twinbus.connect.received_message import ReceivedMessage
from twinbus.connect.reconnection import Reconnector
from twinbus.connect.settlement import (
    COMPLETE,
    RELEASE,
    SettlementOutcome,
    SettlementProgress,
    abandon_outcome,
    dead_letter_outcome,
    defer_outcome,
    settlement_error,
    settlement_refusal,
)
from twinbus.connect.timeouts import deadline
from twinbus.connect.transport import AmqpTransport
from twinbus.values import Symbol, UInt, milliseconds_from_ticks

_DRAIN_SECONDS: Final = 5.0
# Seconds for the peer's answer to a session attach, in addition to the time that the peer waits for a session.
_ANSWER_SECONDS: Final = 10.0
_SESSION_FILTER: Final = Symbol("com.microsoft:session-filter")
_TIMEOUT: Final = Symbol("com.microsoft:timeout")
_LOCKED_UNTIL: Final = "com.microsoft:locked-until-utc"


class ReceiveMode(Enum):
    """PEEK_LOCK: a message is locked until it is settled. RECEIVE_AND_DELETE: delivery deletes the message."""

    PEEK_LOCK = "peek-lock"
    RECEIVE_AND_DELETE = "receive-and-delete"


PEEK_LOCK: Final = ReceiveMode.PEEK_LOCK
RECEIVE_AND_DELETE: Final = ReceiveMode.RECEIVE_AND_DELETE


class NextAvailable(Enum):
    """Used as a session id: the service chooses a session that has messages and no receiver."""

    NEXT_AVAILABLE = "next-available"


NEXT_AVAILABLE: Final = NextAvailable.NEXT_AVAILABLE
SessionChoice = str | NextAvailable | None


class Receiver:
    """Receives from a queue, subscription or sub-queue. Made by `ServiceBusConnection.receiver`."""

    def __init__(
        self,
        reconnector: Reconnector,
        entity: str,
        address: str,
        *,
        mode: ReceiveMode,
        prefetch: int,
        session: SessionChoice,
        session_timeout: float,
        timeout: float,
        management: Management,
        on_close: Callable[[Receiver], None],
    ) -> None:
        self.entity = entity
        self.mode = mode
        self.timeout = timeout
        self._reconnector = reconnector
        self._on_close = on_close
        self._address = address
        self._prefetch = prefetch
        self._session = session
        self._session_timeout = session_timeout
        self._link: ReceiverLink | None = None
        # Messages of a broken receive-and-delete link. The server has deleted these messages: `receive` must return
        # each of them.
        self._kept: deque[ReceivedMessage] = deque()
        self._attaching = asyncio.Lock()
        self._is_closed = False
        self._locked_until: datetime | None = None
        self.management = management

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self, *, timeout: float | None = None) -> None:
        """Attach, if the receiver is not attached. A session receiver waits for its session."""
        if self._link is None or not self._link.is_open or self._is_closed:
            await self._attached_in_time(timeout)

    # --- receiving ---------------------------------------------------------------------------------------------

    async def receive(
        self, max_messages: int = 1, max_wait: float = 60.0, *, keep_credit: bool = False
    ) -> list[ReceivedMessage]:
        """Return 1 to `max_messages` messages, as soon as one is there; [] if none arrives within `max_wait` seconds.

        Without prefetch, the call takes its unused credit back before it returns. With `keep_credit=True`, it takes
        the credit back only if no message arrived; otherwise up to `max_messages` more messages may arrive after the
        call, and the next call returns them.
        """
        if max_messages < 1:
            raise ServiceBusArgumentError("max_messages must be at least 1", entity=self.entity)
        loop = asyncio.get_running_loop()
        end = loop.time() + max_wait
        if self._kept:
            return [self._kept.popleft() for _ in range(min(max_messages, len(self._kept)))]
        link = self._link
        if link is None or not link.is_open or self._is_closed:
            link = await self._attached_in_time(None)
        if not self._prefetch:
            return await self._receive_on_demand(link, max_messages, end, keep_credit)
        if not link.buffer:
            await self._arrived(link, end)
        return link.take(max_messages)

    async def _receive_on_demand(
        self, link: ReceiverLink, count: int, end: float, keep_credit: bool
    ) -> list[ReceivedMessage]:
        if len(link.buffer) < count:
            link.grant(count - len(link.buffer))
            await self._arrived(link, end)
            if not (keep_credit and link.buffer):
                await self._drained(link)
        return link.take(count)

    @property
    def has_credit(self) -> bool:
        """Whether messages may arrive without a running call: a call was cancelled, or used `keep_credit`."""
        return self._link is not None and self._link.is_open and self._link.has_credit

    async def take_back_credit(self) -> list[ReceivedMessage]:
        """Take all credit back, so that no message arrives before the next `receive`. Returns the buffered messages."""
        link = self._link
        if link is None or not link.is_open:
            return []
        await self._drained(link)
        return link.take(len(link.buffer))

    @staticmethod
    async def _drained(link: ReceiverLink) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                await link.drain()

    async def _arrived(self, link: ReceiverLink, end: float) -> None:
        scope = asyncio.timeout_at(end)
        try:
            async with scope:
                await link.arrived()
        except TimeoutError:
            if not scope.expired():
                raise

    async def receive_deferred(
        self, numbers: Sequence[int], *, leave_out_missing: bool = False, timeout: float | None = None
    ) -> list[ReceivedMessage]:
        """Return deferred messages by their sequence numbers.

        The service refuses the whole request if one message does not exist or another receiver has locked it. With
        `leave_out_missing` such a message is left out of the result: the request is repeated with parts of the numbers.
        """

        async def request(part: Sequence[int]) -> list[ReceivedMessage]:
            return await self.management.receive_deferred(
                part,
                peek_lock=self.mode is ReceiveMode.PEEK_LOCK,
                session=self.session_id,
                timeout=self._seconds(timeout),
            )

        if not leave_out_missing:
            return await request(numbers)
        answers = await bisect_refused(numbers, request, MessageNotFoundError)
        return [message for _, answer in answers for message in answer or ()]

    async def peek(
        self, from_number: int = 0, count: int = 1, *, timeout: float | None = None
    ) -> list[ReceivedMessage]:
        """Return up to `count` messages, from a sequence number on, without locking the messages."""
        return await self.management.peek(from_number, count, session=self.session_id, timeout=self._seconds(timeout))

    async def delete_batch(self, count: int, before: datetime | None = None, *, timeout: float | None = None) -> int:
        return await self.management.delete_batch(count, before, timeout=self._seconds(timeout))

    # --- settling ----------------------------------------------------------------------------------------------

    async def complete(self, messages: Sequence[ReceivedMessage], *, timeout: float | None = None) -> None:
        """Delete the messages.

        As with every settlement, `failed` of an error has the messages that are possibly not settled.
        """
        await self._settle(messages, COMPLETE, timeout)

    async def abandon(
        self,
        messages: Sequence[ReceivedMessage],
        *,
        properties: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Unlock the messages: the service delivers them again, with a higher delivery count."""
        await self._settle(messages, abandon_outcome(properties), timeout)

    async def defer(
        self,
        messages: Sequence[ReceivedMessage],
        *,
        properties: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Defer the messages: they remain in the queue, and only `receive_deferred` returns them."""
        await self._settle(messages, defer_outcome(properties), timeout)

    async def dead_letter(
        self,
        messages: Sequence[ReceivedMessage],
        reason: str | None = None,
        description: str | None = None,
        *,
        properties: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        await self._settle(messages, dead_letter_outcome(reason, description, properties), timeout)

    async def release(self, messages: Sequence[ReceivedMessage], *, timeout: float | None = None) -> None:
        """Unlock the messages: the service delivers them again, with the same delivery count."""
        await self._settle(messages, RELEASE, timeout)

    def give_back(self, deliveries: Sequence[int]) -> int:
        """Release messages by delivery id, without waiting for the service. Returns the number of released messages.

        The result is 0 if the link has ended. This method is for a caller that has stored only the delivery ids.
        """
        link = self._link
        if not deliveries or link is None or not link.is_open:
            return 0
        link.release(deliveries)
        return len(deliveries)

    async def _settle(
        self, messages: Sequence[ReceivedMessage], outcome: SettlementOutcome, timeout: float | None
    ) -> None:
        if failures := await self.settle(messages, outcome, timeout=timeout):
            raise settlement_error(outcome.verb, failures, len(messages))

    async def settle(
        self, messages: Sequence[ReceivedMessage], outcome: SettlementOutcome, *, timeout: float | None = None
    ) -> list[tuple[ReceivedMessage, ServiceBusError]]:
        """Settle messages. Returns the messages that failed, each with its error.

        Raises MessageAlreadySettled if a message is already settled, OperationTimeoutError if an answer is missing.
        """
        if not messages:
            return []
        settled = [message for message in messages if message.is_settled]
        if settled:
            raise MessageAlreadySettled("a message is already settled", entity=self.entity, failed=settled)
        links = {message.link for message in messages}
        waiting: list[tuple[ReceiverLink, SettlementProgress]] = []
        by_token: list[ReceivedMessage] = []

        def unfinished() -> list[ReceivedMessage]:
            on_links = [message for _, progress in waiting for message in progress.unfinished]
            return on_links + [message for message in by_token if not message.is_settled]

        async with deadline(self._seconds(timeout), outcome.verb, self.entity, unfinished):
            try:
                for link in links:
                    group = messages if len(links) == 1 else [found for found in messages if found.link is link]
                    if not isinstance(link, ReceiverLink) or not link.is_open:
                        by_token += group
                        continue
                    progress = SettlementProgress(outcome.state, link.transport.loop.create_future())
                    link.settle(group, progress, outcome.state)
                    waiting.append((link, progress))
                failures = await self._settle_by_token(by_token, outcome) if by_token else []
                for _, progress in waiting:
                    await progress.future
                    failures += progress.failures
            finally:
                for open_link, progress in waiting:
                    if not progress.future.done() or progress.future.cancelled():
                        open_link.give_up(progress)
        return failures

    async def _settle_by_token(
        self, messages: Sequence[ReceivedMessage], outcome: SettlementOutcome
    ) -> list[tuple[ReceivedMessage, ServiceBusError]]:
        """Settle through `$management`, one request per message, so that a refusal concerns one message only."""

        async def settle(message: ReceivedMessage) -> ServiceBusError | None:
            token = message.lock_token
            if token is None:
                return MessageLockLostError("the message has no lock token", entity=self.entity)
            try:
                await self.management.settle([token], outcome.status, outcome.extra, session=self.session_id)
            except ServiceBusError as error:
                return error
            message.is_settled = True
            return None

        answers = await asyncio.gather(*map(settle, messages))
        return [(message, error) for message, error in zip(messages, answers, strict=True) if error is not None]

    async def renew_locks(self, messages: Sequence[ReceivedMessage], *, timeout: float | None = None) -> None:
        """Renew the locks and set `locked_until` of each message. Raises if one lock was lost."""
        if not messages:
            return
        tokens = [message.lock_token for message in messages]
        known = [token for token in tokens if token is not None]
        if len(known) != len(tokens):
            raise MessageLockLostError("a message has no lock token", entity=self.entity, failed=messages)
        instants = await self.management.renew_locks(known, timeout=self._seconds(timeout))
        for message, instant in zip(messages, instants, strict=True):
            message.lock_renewed(instant)

    async def renew_those_held(
        self, messages: Sequence[ReceivedMessage], *, timeout: float | None = None
    ) -> list[ReceivedMessage]:
        """Renew the locks that are still held. Returns the messages whose lock was lost."""

        async def renew(part: Sequence[ReceivedMessage]) -> bool:
            await self.renew_locks(part, timeout=timeout)
            return True

        answers = await bisect_refused(messages, renew, MessageLockLostError)
        return [message for part, answer in answers if answer is None for message in part]

    # --- the session -------------------------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Whether the link is open. A session receiver holds its session no longer than its link."""
        return self._link is not None and self._link.is_open and not self._is_closed

    @property
    def link_error(self) -> ServiceBusError | None:
        """Why the link ended; None while it is open."""
        return self._link.error if self._link is not None else None

    @property
    def session_id(self) -> str | None:
        """Id of the session that this receiver holds."""
        return self._link.session_id if self._link is not None else None

    @property
    def session_locked_until(self) -> datetime | None:
        """The time at which the session's lock expires, as the attach or the last renewal set it."""
        millis = self._link.session_locked_until if self._link is not None else None
        return self._locked_until or (None if millis is None else to_datetime(millis))

    async def renew_session_lock(self, *, timeout: float | None = None) -> datetime:
        session = self._held_session()
        self._locked_until = await self.management.renew_session_lock(session, timeout=self._seconds(timeout))
        return self._locked_until

    async def get_session_state(self, *, timeout: float | None = None) -> bytes | None:
        return await self.management.get_session_state(self._held_session(), timeout=self._seconds(timeout))

    async def set_session_state(self, state: bytes | None, *, timeout: float | None = None) -> None:
        await self.management.set_session_state(self._held_session(), state, timeout=self._seconds(timeout))

    def _held_session(self) -> str:
        if self.session_id is None:
            raise ServiceBusArgumentError("this receiver holds no session", entity=self.entity)
        return self.session_id

    # --- the link ----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Release the prefetched messages and detach. Does not raise if the peer does not answer."""
        if self._is_closed:
            return
        self._is_closed = True
        self._on_close(self)
        link = self._link
        if link is not None and link.is_open:
            if self.mode is ReceiveMode.PEEK_LOCK:
                await self._drained(link)
                link.release_buffer()
            await self._reconnector.close_links(link)
        await self.management.close()

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    async def _attached_in_time(self, timeout: float | None) -> ReceiverLink:
        seconds = self._seconds(timeout)
        if self._session is not None:
            seconds = max(seconds, self._session_timeout + _ANSWER_SECONDS)
        async with deadline(seconds, "attach", self.entity):
            return await self._attached()

    async def _attached(self) -> ReceiverLink:
        async with self._attaching:
            if self._is_closed:
                raise ConnectionClosedError("the receiver is closed", entity=self.entity)
            if self._link is not None and self._link.is_open:
                return self._link
            if self._link is not None:
                self._kept.extend(self._link.buffer)
                self._link.buffer.clear()
                if self._session is not None:
                    raise SessionLockLostError("the link of the session is gone", entity=self.entity)
            transport = await self._reconnector.authorized(self.entity)
            link = ReceiverLink(
                transport,
                self.entity,
                self._address,
                self._reconnector.link_name(self._address),
                mode=self.mode,
                prefetch=self._prefetch,
                session=self._session,
                session_timeout=self._session_timeout,
            )
            await link.attached()
            self._link = link
            self.management.associated_link = link.name
            return link


class ReceiverLink(LinkSession):
    """One link from an entity: its buffer, its credit, and the settlements that wait for confirmation."""

    def __init__(
        self,
        transport: AmqpTransport,
        entity: str,
        address: str,
        name: str,
        *,
        mode: ReceiveMode,
        prefetch: int,
        session: SessionChoice,
        session_timeout: float,
    ) -> None:
        super().__init__(transport, entity)
        self.name = name
        self.buffer: deque[ReceivedMessage] = deque()
        self.session_id: str | None = None
        self.session_locked_until: int | None = None  # ms since the epoch
        self._peek_lock = mode is ReceiveMode.PEEK_LOCK
        self._prefetch = prefetch
        self._waiters: list[asyncio.Future[None]] = []
        self._settling: dict[int, SettlementProgress] = {}  # by delivery id
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

    # --- the buffer --------------------------------------------------------------------------------------------

    @property
    def has_credit(self) -> bool:
        return self._link.credit > 0

    def take(self, most: int) -> list[ReceivedMessage]:
        """Take up to `most` buffered messages. With prefetch, grant new credit when half of the credit is used."""
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
                self.transport.flush_soon()
        return taken

    def grant(self, count: int) -> None:
        """Grant credit for `count` messages: one call of `receive` without prefetch."""
        if self.error is None and self._link.credit < count:
            self._link.flow(count)
            self.transport.flush_soon()

    async def arrived(self) -> None:
        """Wait until the buffer has a message. The caller sets a timeout. Raises if the link has ended."""
        while not self.buffer:
            if self.error is not None:
                raise self.error.copy(self.entity)
            await self._changed()

    async def drain(self) -> None:
        """Take the credit back (drain, amqp-core-transport §2.6.7).

        The peer sends the messages that it has available, up to the credit, and then no more.
        """
        if self.error is None and self._link.credit > 0:
            self._link.flow(self._link.credit, drain=True)
            self.transport.flush_soon()
        while self.error is None and self._link.credit > 0:
            await self._changed()

    def release_buffer(self) -> None:
        """Release the messages that are still in the buffer. Their delivery count does not rise."""
        if self._peek_lock and self.error is None:
            self.release(message.delivery_id for message in self.buffer)
            self.buffer.clear()

    def release(self, delivery_ids: Iterable[int]) -> None:
        """Release deliveries without waiting for an answer."""
        for first, last in consecutive_runs(sorted(delivery_ids)):
            self.session.dispose(RECEIVER, first, last, settled=True, state=Released())
        self.transport.flush_soon()

    # --- settling ----------------------------------------------------------------------------------------------

    def settle(self, messages: Sequence[ReceivedMessage], progress: SettlementProgress, state: DeliveryState) -> None:
        """Send the same outcome for all messages. `progress` records the answer for each message."""
        held = {message.delivery_id: message for message in messages}
        if len(held) != len(messages) or not self._settling.keys().isdisjoint(held):
            raise MessageAlreadySettled("a message is being settled twice", entity=self.entity, failed=messages)
        progress.expect(held)
        self._settling.update(dict.fromkeys(held, progress))
        for first, last in consecutive_runs(sorted(held)):
            self.session.dispose(RECEIVER, first, last, settled=False, state=state)
        self.transport.flush_soon()

    def give_up(self, progress: SettlementProgress) -> None:
        """Remove a settlement whose caller no longer waits.

        `link` of its unfinished messages becomes None, so that the caller can settle them again by lock token.
        """
        for message in progress.unfinished:
            message.link = None
        self._settling = {number: entry for number, entry in self._settling.items() if entry is not progress}

    # --- from the transport ------------------------------------------------------------------------------------

    def on_usable(self, link: Link) -> None:
        filters = getattr(link.source, "filter", None) or {}
        found: Any = filters.get(_SESSION_FILTER)
        if found is not None:
            self.session_id = str(getattr(found, "value", found))
        ticks = link.properties.get(_LOCKED_UNTIL)
        if isinstance(ticks, int):
            self.session_locked_until = milliseconds_from_ticks(ticks)
        if self._prefetch:
            link.flow(self._prefetch)

    def on_delivery(self, event: Delivered) -> None:
        self.buffer.append(ReceivedMessage(event.payload, event.tag, self, event.delivery_id, event.settled))
        if self._waiters:
            self._wake()

    def on_flow(self, link: Link) -> None:
        self._wake()

    def on_disposition(self, event: Disposed) -> None:
        if event.role is not SENDER or not event.settled:
            return
        settling, last, error = self._settling, None, None
        for number in event.delivery_ids:
            progress = settling.pop(number, None)
            if progress is not None:
                if progress is not last:
                    last, error = progress, settlement_refusal(event.state, progress.requested, self.entity)
                progress.answered(number, error)

    def on_failed(self, error: ServiceBusError) -> None:
        if self._peek_lock:
            self.buffer.clear()  # The messages' locks end with the link, so the service delivers the messages again.
        open_settlements = set(self._settling.values())
        self._settling.clear()
        for progress in open_settlements:
            progress.fail(error)
        self._wake()

    async def _changed(self) -> None:
        waiter = self.transport.loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
