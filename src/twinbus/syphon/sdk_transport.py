"""The transport over azure-servicebus, for services and networks that need the official client.

The SDK carries messages as encoded bytes (`twinbus.sdk`). This transport refuses a message that the SDK would change,
and such a message stays in the backlog (Y10).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple, cast
from weakref import WeakSet

from azure.servicebus import ServiceBusReceivedMessage
from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.exceptions import MessageLockLostError, MessageNotFoundError

from twinbus.backlog import BATCH_ENVELOPE_BYTES, LONG_SECTION_BYTES, failure_kind, split_batch, was_refused
from twinbus.connect import ReceivedMessage, bisect_refused, deadline, to_millis
from twinbus.sdk import (
    EncodedReceiver,
    LinkLimits,
    check_confirms_settlement,
    disable_retries,
    encoded_batch,
    is_open,
    keep_alive_of,
    link_limits,
    lossless_message,
    open_aio_link,
    send_message,
    speed_up_opening,
)
from twinbus.syphon.native_transport import TRY_SECONDS, NativeHeld, peeked_message
from twinbus.syphon.translation import translate
from twinbus.syphon.transport import (
    BacklogFailedError,
    CannotCarryError,
    HeldMessage,
    OutgoingMessage,
    PeekedMessage,
    SendFailedError,
    TimeToLive,
)

# Bytes. A message up to this size fits into a batch on any tier, and a batch carries the message without any change.
_FITS_ANY_BATCH: Final = 192 * 1024
# The most settlements of one call that are in flight at a time.
_CONCURRENT_SETTLEMENTS: Final = 100
_CLOSE_SECONDS: Final = 5.0


class SdkTransport:
    """Uses clients of azure.servicebus.aio, which the caller closes."""

    def __init__(
        self, primary: ServiceBusClient, secondary: ServiceBusClient, *, try_timeout: float = TRY_SECONDS
    ) -> None:
        check_confirms_settlement()
        self._primary = primary
        self._secondary = secondary
        self._timeout = try_timeout
        # Weak references: the transport must not keep backlogs and destinations in memory that nobody uses any more.
        self._members: WeakSet[SdkBacklog | SdkDestination] = WeakSet()

    def backlog(self, queue: str) -> SdkBacklog:
        made = SdkBacklog(self._secondary, queue, self._timeout)
        self._members.add(made)
        return made

    def destination(self, path: str) -> SdkDestination:
        made = SdkDestination(self._primary, path, self._timeout)
        self._members.add(made)
        return made

    def restore(self, held: HeldMessage, ttl: TimeToLive, now: datetime) -> OutgoingMessage:
        assert isinstance(held, SdkHeld)
        path, raw, enqueued = translate(held.message.raw, to_millis(now), ttl)
        single = None
        if len(raw) > _FITS_ANY_BATCH:
            single = lossless_message(raw)
            if single is None:
                raise CannotCarryError(
                    f"the SDK would change message {held.message_id!r} for {path}: its {len(raw)} bytes may not fit "
                    "a batch, and outside of a batch the SDK cannot encode it without loss",
                    path,
                )
        return OutgoingMessage(path, held.message_id, len(raw), SdkContent(raw, single), held, enqueued)

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in tuple(self._members)))


class SdkHeld(NativeHeld):
    """A held message as bytes, and the SDK's message object (`handle`), with which the message is settled."""

    __slots__ = ("handle",)

    handle: ServiceBusReceivedMessage

    def __init__(self, raw: bytes, lock_token: bytes) -> None:
        super().__init__(ReceivedMessage(raw, lock_token))

    def lock_renewed(self, until: int) -> None:
        self.message.lock_renewed(until)


class SdkContent(NamedTuple):
    """What is sent: `raw` is the encoded message. `single` is the SDK's message object for a message that may be too
    large for a batch, otherwise None.
    """

    raw: bytes
    single: Any


class SdkBacklog:
    """A backlog queue, over one receiver of the SDK."""

    def __init__(self, client: ServiceBusClient, queue: str, timeout: float) -> None:
        self._queue = queue
        self._timeout = timeout
        self._receiver = EncodedReceiver(speed_up_opening(client.get_queue_receiver(queue)), SdkHeld)

    @property
    def has_credit(self) -> bool:
        return self._receiver.has_credit

    async def open(self) -> None:
        async with self._deadline(self._timeout):
            await self._receiver.open(self._timeout)

    async def receive(self, count: int, wait: float) -> Sequence[SdkHeld]:
        async with self._deadline(wait + self._timeout):
            if not is_open(self._receiver.sdk):
                # Otherwise the SDK would open the link within `wait`, and the poll would be shorter.
                await open_aio_link(self._receiver.sdk, self._timeout)
            found = await self._receiver.receive(count, wait)
            if not found:
                # The SDK would leave the credit granted after the wait. An empty receive has to end its credit (Y2).
                await self._receiver.drain()
            return found

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[SdkHeld]:
        async def request(part: Sequence[int]) -> Sequence[SdkHeld]:
            async with self._deadline(self._timeout, passing_on=MessageNotFoundError):
                return await self._receiver.receive_deferred(part, self._timeout)

        answers = await bisect_refused(numbers, request, MessageNotFoundError)
        return [held for _, answer in answers for held in answer or ()]

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        async with self._deadline(self._timeout):
            found = await self._receiver.peek(start, count, self._timeout)
        return [peeked_message(ReceivedMessage(raw, None, is_settled=True)) for raw in found]

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle(held, self._receiver.sdk.complete_message)

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle(held, self._receiver.sdk.abandon_message)

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle(held, self._receiver.sdk.defer_message)

    async def dead_letter(self, held: Sequence[HeldMessage], reason: str, description: str) -> Sequence[HeldMessage]:
        texts = {"reason": reason, "error_description": description}
        return await self._settle(held, partial(self._receiver.sdk.dead_letter_message, **texts))

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        async def request(part: Sequence[HeldMessage]) -> bool:
            async with self._deadline(self._timeout, passing_on=MessageLockLostError):
                await self._receiver.renew_locks(cast(Sequence[SdkHeld], part), self._timeout)
                return True

        answers = await bisect_refused(held, request, MessageLockLostError)
        return [one for part, answer in answers if answer is None for one in part]

    async def stop_receiving(self) -> Sequence[SdkHeld]:
        async with self._deadline(self._timeout):
            await self._receiver.drain()
        return ()

    async def close(self) -> None:
        await _close(self._receiver.sdk)

    async def _settle(
        self, held: Sequence[HeldMessage], settle: Callable[[Any], Awaitable[None]]
    ) -> Sequence[HeldMessage]:
        lost: list[HeldMessage] = []
        for start in range(0, len(held), _CONCURRENT_SETTLEMENTS):
            part = cast(Sequence[SdkHeld], held[start : start + _CONCURRENT_SETTLEMENTS])
            async with self._deadline(self._timeout):
                answers = await asyncio.gather(*(settle(one.handle) for one in part), return_exceptions=True)
                for one, answer in zip(part, answers, strict=True):
                    if isinstance(answer, MessageLockLostError):
                        lost.append(one)
                    elif answer is not None:
                        raise answer
        return lost

    @asynccontextmanager
    async def _deadline(
        self, seconds: float, *, passing_on: type[Exception] = BacklogFailedError
    ) -> AsyncIterator[None]:
        try:
            async with deadline(seconds, "backlog", self._queue):
                yield
        except passing_on:
            raise
        except Exception as error:
            raise BacklogFailedError(
                self._queue, failure_kind(error), str(error), refused=was_refused(error)
            ) from error


class SdkDestination:
    """A destination, over one queue sender of the SDK. A queue sender can send to a topic too: it only needs a path."""

    def __init__(self, client: ServiceBusClient, path: str, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        # If a retry of the SDK succeeded, nobody would know that an earlier try had no answer and may have succeeded.
        self._sender = disable_retries(speed_up_opening(client.get_queue_sender(path)))
        self._turn = asyncio.Lock()

    async def send(self, messages: Sequence[OutgoingMessage]) -> None:
        accepted: set[int] = set()
        opened = False
        try:
            async with deadline(self._timeout, "send", self._path), self._turn:
                await open_aio_link(self._sender, self._timeout)
                opened = True
                limits = link_limits(self._sender)
                parts = split_batch([message.size for message in messages], limits.batch, envelope=BATCH_ENVELOPE_BYTES)
                for group in (*parts.groups, *((position,) for position in parts.oversized)):
                    await self._send_group([messages[position].content for position in group], limits)
                    accepted.update(group)
        except Exception as error:
            failed = [message for position, message in enumerate(messages) if position not in accepted]
            refused = not opened or was_refused(error)
            raise SendFailedError(self._path, failure_kind(error), failed, str(error), refused=refused) from error

    async def _send_group(self, contents: Sequence[SdkContent], limits: LinkLimits) -> None:
        first = contents[0]
        if first.single is not None and len(first.raw) + LONG_SECTION_BYTES + BATCH_ENVELOPE_BYTES > limits.batch:
            await send_message(self._sender, first.single, self._timeout)
        else:
            batch = encoded_batch([content.raw for content in contents], limits)
            await self._sender.send_messages(batch, timeout=self._timeout)

    async def close(self) -> None:
        await _close(self._sender)


async def _close(handler: Any) -> None:
    with suppress(Exception):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await handler.close()
    if (keep_alive := keep_alive_of(handler)) is not None:
        keep_alive.cancel()
