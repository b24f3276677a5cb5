"""The transport on `twinbus.connect`: messages stay bytes, settlements go in runs, whatever broke is made again.

Keeps the protocols of `transport`; what to do with a message, or after a failure, is not decided here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from twinbus.backlog import failure_kind, was_refused
from twinbus.connect import (
    COMPLETE,
    RELEASE,
    MessageLockLostError,
    MessageState,
    OperationTimeoutError,
    ReceivedMessage,
    Receiver,
    Sender,
    ServiceBusConnection,
    ServiceBusError,
    SettlementOutcome,
    abandon_outcome,
    dead_letter_outcome,
    defer_outcome,
)
from twinbus.message import MessageId
from twinbus.syphon.credentials import NamespaceAccess
from twinbus.syphon.fast_translation import fast_translate
from twinbus.syphon.translation import destination_of, translate
from twinbus.syphon.transport import (
    BacklogFailedError,
    Credit,
    HeldMessage,
    OutgoingMessage,
    PeekedMessage,
    SendFailedError,
    TimeToLive,
)

T = TypeVar("T")

TRY_SECONDS: Final = 10.0
"""What one answer may take; a long poll beside."""
# A settlement whose link broke is asked for again, by lock token.
_SETTLE_TRIES: Final = 3
_SETTLE_PAUSE: Final = 0.2
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class NativeHeld:
    __slots__ = ("message", "number", "size", "unanswered")

    def __init__(self, message: ReceivedMessage) -> None:
        self.message = message
        self.size = len(message.raw)
        self.number: int | None = None  # once it was read beside something else
        self.unanswered = False

    @property
    def sequence_number(self) -> int:
        return (self.message.sequence_number or 0) if self.number is None else self.number

    @property
    def message_id(self) -> MessageId | None:
        return self.message.message_id

    @property
    def locked_until(self) -> datetime:
        return self.message.locked_until or _EPOCH

    @property
    def enqueued_time(self) -> datetime:
        return self.message.enqueued_time or _EPOCH


class NativeTransport:
    """`NativeTransport(primary, secondary)`: connection strings, clients of azure-servicebus, or `NamespaceAccess`s."""

    def __init__(
        self,
        primary: NamespaceAccess | str | Any,
        secondary: NamespaceAccess | str | Any,
        *,
        try_timeout: float = TRY_SECONDS,
    ) -> None:
        self._primary = NamespaceAccess.of(primary).connect(timeout=try_timeout)
        self._secondary = NamespaceAccess.of(secondary).connect(timeout=try_timeout)

    def backlog(self, queue: str) -> NativeBacklog:
        return NativeBacklog(self._secondary, queue)

    def destination(self, path: str) -> NativeDestination:
        return NativeDestination(self._primary, path)

    def restore(self, held: HeldMessage, ttl: TimeToLive, now: datetime) -> OutgoingMessage:
        assert isinstance(held, NativeHeld)
        usual = fast_translate(held.message.raw)
        if usual is not None:
            held.number = usual.sequence_number
            return OutgoingMessage(usual.path, usual.message_id, len(usual.raw), usual.raw, held)
        found = translate(held.message.raw, (now - _EPOCH) // timedelta(milliseconds=1), ttl)
        return OutgoingMessage(found.path, held.message.message_id, len(found.raw), found.raw, held)

    async def close(self) -> None:
        await asyncio.gather(self._primary.close(), self._secondary.close())


class NativeDestination:
    def __init__(self, bus: ServiceBusConnection, path: str) -> None:
        self._bus = bus
        self._path = path
        self._sender: Sender | None = None
        self._opening = asyncio.Lock()

    async def send(self, messages: Sequence[OutgoingMessage]) -> None:
        raws = [message.content for message in messages]
        begun = False
        try:
            sender = await self._open()
            begun = True
            await sender.send(raws)
        except Exception as error:  # a credential may raise anything
            refused = not begun or was_refused(error)
            raise SendFailedError(
                self._path, failure_kind(error), _unsafe(error, messages, raws), str(error), refused=refused
            ) from error

    async def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.close()

    async def _open(self) -> Sender:
        async with self._opening:
            sender = self._sender
            if sender is None:
                sender = self._sender = await self._bus.sender(self._path)
        # It may be closed meanwhile.
        await sender.open()
        return sender


def _unsafe(error: Exception, messages: Sequence[OutgoingMessage], raws: Sequence[bytes]) -> Sequence[OutgoingMessage]:
    unsafe = {id(raw) for raw in getattr(error, "failed", ())}
    return [one for one, raw in zip(messages, raws, strict=True) if id(raw) in unsafe] if unsafe else messages


class NativeBacklog:
    """Settlements go through the link a message came by, and by its lock token once that is gone."""

    def __init__(self, bus: ServiceBusConnection, queue: str) -> None:
        self._bus = bus
        self._queue = queue
        self._receiver: Receiver | None = None
        self._opening = asyncio.Lock()
        self._fed = False

    @property
    def credit(self) -> Credit:
        if self._receiver is None or not self._receiver.has_credit:
            return Credit.NONE
        return Credit.FED if self._fed else Credit.HUNGRY

    async def open(self) -> None:
        await self._asked((await self._asked(self._open())).open())

    async def receive(self, count: int, wait: float) -> Sequence[NativeHeld]:
        receiver = await self._asked(self._open())
        self._fed = self.credit is Credit.FED
        # Nothing is awaited between taking messages and handing them out: a caller that gives up loses none.
        found = await self._asked(receiver.receive(count, wait, keep_credit=True))
        self._fed = self._fed or bool(found)
        return [NativeHeld(message) for message in found]

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[NativeHeld]:
        receiver = await self._asked(self._open())
        found = await self._asked(receiver.receive_deferred(numbers, leave_out_missing=True))
        return [NativeHeld(message) for message in found]

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        receiver = await self._asked(self._open())
        return [peeked(message) for message in await self._asked(receiver.peek(start, count))]

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle(held, COMPLETE)

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle(held, abandon_outcome(None))

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle(held, defer_outcome(None))

    async def dead_letter(self, held: Sequence[HeldMessage], reason: str, description: str) -> Sequence[HeldMessage]:
        return await self._settle(held, dead_letter_outcome(reason, description, None))

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        receiver = await self._asked(self._open())
        by_message = {id(message): one for one in held for message in (_message(one),)}
        lost = await self._asked(receiver.renew_those_held([_message(one) for one in held]))
        return [by_message[id(message)] for message in lost]

    async def rest(self) -> Sequence[NativeHeld]:
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return ()
        found = await receiver.take_back_credit()
        with suppress(ServiceBusError):  # they come back when their locks end
            await receiver.settle(found, RELEASE)
        await receiver.close()
        return [NativeHeld(message) for message in found]

    async def close(self) -> None:
        await self.rest()

    async def _open(self) -> Receiver:
        async with self._opening:
            if self._receiver is None:
                self._receiver = await self._bus.receiver(self._queue, prefetch=0)
            return self._receiver

    async def _settle(self, held: Sequence[HeldMessage], outcome: SettlementOutcome) -> Sequence[HeldMessage]:
        by_message = {id(one.message): one for one in held if isinstance(one, NativeHeld)}
        left = [_message(one) for one in held]
        lost: list[HeldMessage] = []
        failures: Sequence[tuple[ReceivedMessage, Exception]]
        error: Exception | None = None
        refused = True
        for number in range(_SETTLE_TRIES):
            if number:
                await asyncio.sleep(_SETTLE_PAUSE * number)
            try:
                receiver = await self._open()
                failures = await receiver.settle(left, outcome)
            except OperationTimeoutError as late:
                failures = [(message, late) for message in left if not message.is_settled]
            except Exception as broken:  # a credential may raise anything
                failures = [(message, broken) for message in left]
            lost += [by_message[id(message)] for message, why in failures if isinstance(why, MessageLockLostError)]
            rest = [(message, why) for message, why in failures if not isinstance(why, MessageLockLostError)]
            if not rest:
                return lost
            left, error = [message for message, _ in rest], rest[0][1]
            refused = refused and all(was_refused(why) for _, why in rest)
            for message in left:
                by_message[id(message)].unanswered = True
        assert error is not None
        raise self._failure(error, refused) from error

    async def _asked(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except Exception as error:  # a credential may raise anything
            raise self._failure(error, was_refused(error)) from error

    def _failure(self, error: Exception, refused: bool) -> BacklogFailedError:
        return BacklogFailedError(self._queue, failure_kind(error), str(error), refused=refused)


def _message(held: HeldMessage) -> ReceivedMessage:
    assert isinstance(held, NativeHeld)
    return held.message


def peeked(message: ReceivedMessage) -> PeekedMessage:
    return PeekedMessage(
        message.sequence_number or 0,
        message.state is MessageState.DEFERRED,
        destination_of(message.raw),
        message.message_id,
        len(message.raw),
        message.enqueued_time or _EPOCH,
    )
