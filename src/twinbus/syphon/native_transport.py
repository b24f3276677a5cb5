"""The transport on `twinbus.connect`: messages stay encoded bytes, one frame settles a range, broken links reconnect.

Implements the protocols of `transport`. This module does not decide what happens to a message, or after a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
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
    to_millis,
)
from twinbus.message import MessageId
from twinbus.syphon.credentials import NamespaceAccess
from twinbus.syphon.fast_translation import fast_translate
from twinbus.syphon.translation import destination_of, translate
from twinbus.syphon.transport import (
    BacklogFailedError,
    HeldMessage,
    OutgoingMessage,
    PeekedMessage,
    SendFailedError,
    TimeToLive,
)

T = TypeVar("T")

TRY_SECONDS: Final = 10.0
"""Seconds to wait for one answer of the service. For a long poll, the seconds of the poll are added."""
# How often a settlement is tried. If the link broke, the next try uses the lock token.
_SETTLE_TRIES: Final = 3
_SETTLE_PAUSE: Final = 0.2
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class NativeHeld:
    """A `HeldMessage` of `connect`.

    `known_number` is the sequence number, if the fast translation has decoded it; otherwise None.
    """

    __slots__ = ("known_number", "message", "size", "unanswered")

    def __init__(self, message: ReceivedMessage) -> None:
        self.message = message
        self.size = len(message.raw)
        self.unanswered = False
        self.known_number: int | None = None

    @property
    def sequence_number(self) -> int:
        return (self.message.sequence_number or 0) if self.known_number is None else self.known_number

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
    """A transport on `twinbus.connect`.

    `primary` and `secondary` are connection strings, clients of azure-servicebus, or `NamespaceAccess` objects.
    """

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
        fast = fast_translate(held.message.raw)
        if fast is not None:
            held.known_number = fast.sequence_number
            return OutgoingMessage(fast.path, fast.message_id, len(fast.raw), fast.raw, held, fast.enqueued)
        path, raw, enqueued = translate(held.message.raw, to_millis(now), ttl)
        return OutgoingMessage(path, held.message.message_id, len(raw), raw, held, enqueued)

    async def close(self) -> None:
        await asyncio.gather(self._primary.close(), self._secondary.close())


class NativeDestination:
    """One sender link. `send` opens the link, and opens the link again after a failure."""

    def __init__(self, connection: ServiceBusConnection, path: str) -> None:
        self._connection = connection
        self._path = path
        self._sender: Sender | None = None
        self._opening = asyncio.Lock()

    async def send(self, messages: Sequence[OutgoingMessage]) -> None:
        raws = [message.content for message in messages]
        opened = False
        try:
            sender = await self._open()
            opened = True
            await sender.send(raws)
        except Exception as error:  # a credential may raise anything
            refused = not opened or was_refused(error)
            failed = _failed_messages(error, messages, raws)
            raise SendFailedError(self._path, failure_kind(error), failed, str(error), refused=refused) from error

    async def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.close()

    async def _open(self) -> Sender:
        async with self._opening:
            sender = self._sender
            if sender is None:
                sender = self._sender = await self._connection.sender(self._path)
        # Not `self._sender`: `close` may have set that to None while this call waited for the lock.
        await sender.open()
        return sender


def _failed_messages(
    error: Exception, messages: Sequence[OutgoingMessage], raws: Sequence[bytes]
) -> Sequence[OutgoingMessage]:
    """Return the messages that the error names as not confirmed; all messages if the error names none."""
    failed = {id(raw) for raw in getattr(error, "failed", ())}
    return [one for one, raw in zip(messages, raws, strict=True) if id(raw) in failed] if failed else messages


class NativeBacklog:
    """One receiver link. A message is settled on the link that delivered it; if that link is gone, by lock token."""

    def __init__(self, connection: ServiceBusConnection, queue: str) -> None:
        self._connection = connection
        self._queue = queue
        self._receiver: Receiver | None = None
        self._opening = asyncio.Lock()

    @property
    def has_credit(self) -> bool:
        return self._receiver is not None and self._receiver.has_credit

    async def open(self) -> None:
        receiver = await self._get_receiver()
        await self._attempt(receiver.open())

    async def receive(self, count: int, wait: float) -> Sequence[NativeHeld]:
        receiver = await self._get_receiver()
        # There must be no `await` after this line: a cancellation at such an `await` would lose received messages.
        found = await self._attempt(receiver.receive(count, wait, keep_credit=True))
        return [NativeHeld(message) for message in found]

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[NativeHeld]:
        receiver = await self._get_receiver()
        found = await self._attempt(receiver.receive_deferred(numbers, leave_out_missing=True))
        return [NativeHeld(message) for message in found]

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        receiver = await self._get_receiver()
        return [peeked_message(message) for message in await self._attempt(receiver.peek(start, count))]

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle(held, COMPLETE)

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle(held, abandon_outcome(None))

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle(held, defer_outcome(None))

    async def dead_letter(self, held: Sequence[HeldMessage], reason: str, description: str) -> Sequence[HeldMessage]:
        return await self._settle(held, dead_letter_outcome(reason, description, None))

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        receiver = await self._get_receiver()
        held_by_message = {id(_received(one)): one for one in held}
        lost = await self._attempt(receiver.renew_those_held([_received(one) for one in held]))
        return [held_by_message[id(message)] for message in lost]

    async def stop_receiving(self) -> Sequence[NativeHeld]:
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return ()
        return [NativeHeld(message) for message in await self._attempt(self._released(receiver))]

    @staticmethod
    async def _released(receiver: Receiver) -> Sequence[ReceivedMessage]:
        found = await receiver.take_back_credit()
        with suppress(ServiceBusError):  # if the release fails, the messages are available again when their locks end
            await receiver.settle(found, RELEASE)
        await receiver.close()
        return found

    async def close(self) -> None:
        with suppress(BacklogFailedError):
            await self.stop_receiving()

    async def _get_receiver(self) -> Receiver:
        if self._receiver is not None:
            return self._receiver
        return await self._attempt(self._made_receiver())

    async def _made_receiver(self) -> Receiver:
        async with self._opening:
            if self._receiver is None:
                self._receiver = await self._connection.receiver(self._queue, prefetch=0)
            return self._receiver

    async def _settle(self, held: Sequence[HeldMessage], outcome: SettlementOutcome) -> Sequence[HeldMessage]:
        held_by_message = {id(one.message): one for one in held if isinstance(one, NativeHeld)}
        left = [_received(one) for one in held]
        lost: list[HeldMessage] = []
        failures: Sequence[tuple[ReceivedMessage, Exception]]
        error: Exception | None = None
        refused = True
        for attempt in range(_SETTLE_TRIES):
            if attempt:
                await asyncio.sleep(_SETTLE_PAUSE * attempt)
            try:
                receiver = self._receiver or await self._made_receiver()
                failures = await receiver.settle(left, outcome)
            except OperationTimeoutError as late:
                failures = [(message, late) for message in left if not message.is_settled]
            except Exception as broken:  # a credential may raise anything
                failures = [(message, broken) for message in left]
            lost += [held_by_message[id(message)] for message, why in failures if isinstance(why, MessageLockLostError)]
            rest = [(message, why) for message, why in failures if not isinstance(why, MessageLockLostError)]
            if not rest:
                return lost
            left, error = [message for message, _ in rest], rest[0][1]
            refused = refused and all(was_refused(why) for _, why in rest)
            for message in left:
                held_by_message[id(message)].unanswered = True
        assert error is not None
        raise self._failure(error, refused) from error

    async def _attempt(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except Exception as error:  # a credential may raise anything
            raise self._failure(error, was_refused(error)) from error

    def _failure(self, error: Exception, refused: bool) -> BacklogFailedError:
        return BacklogFailedError(self._queue, failure_kind(error), str(error), refused=refused)


def _received(held: HeldMessage) -> ReceivedMessage:
    assert isinstance(held, NativeHeld)
    return held.message


def peeked_message(message: ReceivedMessage) -> PeekedMessage:
    return PeekedMessage(
        message.sequence_number or 0,
        message.state is MessageState.DEFERRED,
        destination_of(message.raw),
        message.message_id,
        len(message.raw),
        message.enqueued_time or _EPOCH,
        message.state is MessageState.SCHEDULED,
    )
