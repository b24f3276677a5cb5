"""The transport over azure-servicebus, for services and networks that need the official client.

Its messages pass as encoded bytes (`twinbus.sdk`). What it cannot carry so, and would change, is not carried (Y10).
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

from twinbus.backlog import failure_kind, was_refused
from twinbus.connect import ReceivedMessage, bisect_refused, deadline, to_millis
from twinbus.pairing import BATCH_ENVELOPE_BYTES, LONG_SECTION_BYTES, split_batch
from twinbus.sdk import (
    EncodedReceiver,
    LinkLimits,
    check_version,
    disable_retries,
    encoded_batch,
    keep_alive_of,
    link_limits,
    lossless_message,
    open_aio_link,
    send_message,
    speed_up_opening,
)
from twinbus.syphon.native_transport import TRY_SECONDS, NativeHeld, peeked
from twinbus.syphon.translation import translate
from twinbus.syphon.transport import (
    BacklogFailedError,
    CannotCarryError,
    Credit,
    HeldMessage,
    OutgoingMessage,
    PeekedMessage,
    SendFailedError,
    TimeToLive,
)

# Below this a message goes as part of a batch, byte for byte, whatever the tier.
_SURELY_IN_A_BATCH: Final = 192 * 1024
# Settlements of one call that are under way at a time.
_AT_ONCE: Final = 100
_CLOSE_SECONDS: Final = 5.0


class SdkTransport:
    """On clients of azure.servicebus.aio, which stay the caller's to close."""

    def __init__(
        self, primary: ServiceBusClient, secondary: ServiceBusClient, *, try_timeout: float = TRY_SECONDS
    ) -> None:
        check_version()
        self._primary = primary
        self._secondary = secondary
        self._timeout = try_timeout
        # Those that are closed are nobody's any more.
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
        path, raw = translate(held.message.raw, to_millis(now), ttl)
        single = None
        if len(raw) > _SURELY_IN_A_BATCH:
            single = lossless_message(raw)
            if single is None:
                raise CannotCarryError(
                    f"the SDK would change message {held.message_id!r} for {path}: {len(raw)} bytes are too many for a "
                    "batch, and alone it would lose a type",
                    path,
                )
        return OutgoingMessage(path, held.message_id, len(raw), SdkContent(raw, single), held)

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in tuple(self._members)))


class SdkHeld(NativeHeld):
    """A message as it came, and the SDK's handle by which it is settled."""

    __slots__ = ("handle",)

    handle: ServiceBusReceivedMessage

    def __init__(self, raw: bytes, lock_token: bytes) -> None:
        super().__init__(ReceivedMessage(raw, lock_token))

    def lock_renewed(self, until: int) -> None:
        self.message.lock_renewed(until)


class SdkContent(NamedTuple):
    """`single` is the SDK's own object for a message that may not fit a batch."""

    raw: bytes
    single: Any


class SdkBacklog:
    """Made by `SdkTransport.backlog`."""

    def __init__(self, client: ServiceBusClient, queue: str, timeout: float) -> None:
        self._queue = queue
        self._timeout = timeout
        self._receiver = EncodedReceiver(speed_up_opening(client.get_queue_receiver(queue)), SdkHeld)
        self._fed = False

    @property
    def credit(self) -> Credit:
        if not self._receiver.has_credit:
            return Credit.NONE
        return Credit.FED if self._fed else Credit.HUNGRY

    async def open(self) -> None:
        async with self._bounded(self._timeout):
            await self._receiver.open(self._timeout)

    async def receive(self, count: int, wait: float) -> Sequence[SdkHeld]:
        async with self._bounded(wait + self._timeout):
            # Or the SDK takes the time that opening needs from the wait.
            await open_aio_link(self._receiver.sdk, self._timeout)
            self._fed = self.credit is Credit.FED
            found = await self._receiver.receive(count, wait)
            if not found:
                # The SDK would leave its credit standing: Y2's receive ends with the wait.
                await self._receiver.drain()
            self._fed = self._fed or bool(found)
            return found

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[SdkHeld]:
        async def ask(part: Sequence[int]) -> Sequence[SdkHeld]:
            async with self._bounded(self._timeout, passing=MessageNotFoundError):
                return await self._receiver.receive_deferred(part, self._timeout)

        answers = await bisect_refused(numbers, ask, MessageNotFoundError)
        return [held for _, answer in answers for held in answer or ()]

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        async with self._bounded(self._timeout):
            found = await self._receiver.peek(start, count, self._timeout)
        return [peeked(ReceivedMessage(raw, None, is_settled=True)) for raw in found]

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settled(held, self._receiver.sdk.complete_message)

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settled(held, self._receiver.sdk.abandon_message)

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settled(held, self._receiver.sdk.defer_message)

    async def dead_letter(self, held: Sequence[HeldMessage], reason: str, description: str) -> Sequence[HeldMessage]:
        told = {"reason": reason, "error_description": description}
        return await self._settled(held, partial(self._receiver.sdk.dead_letter_message, **told))

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        async def ask(part: Sequence[HeldMessage]) -> bool:
            async with self._bounded(self._timeout, passing=MessageLockLostError):
                await self._receiver.renew_locks(cast(Sequence[SdkHeld], part), self._timeout)
                return True

        answers = await bisect_refused(held, ask, MessageLockLostError)
        return [one for part, answer in answers if answer is None for one in part]

    async def rest(self) -> Sequence[SdkHeld]:
        async with self._bounded(self._timeout):
            await self._receiver.drain()
        return ()

    async def close(self) -> None:
        await _closed(self._receiver.sdk)

    async def _settled(
        self, held: Sequence[HeldMessage], settle: Callable[[Any], Awaitable[None]]
    ) -> Sequence[HeldMessage]:
        lost: list[HeldMessage] = []
        for start in range(0, len(held), _AT_ONCE):
            part = cast(Sequence[SdkHeld], held[start : start + _AT_ONCE])
            async with self._bounded(self._timeout):
                answers = await asyncio.gather(*(settle(one.handle) for one in part), return_exceptions=True)
                for one, answer in zip(part, answers, strict=True):
                    if isinstance(answer, MessageLockLostError):
                        lost.append(one)
                    elif answer is not None:
                        raise answer
        return lost

    @asynccontextmanager
    async def _bounded(self, seconds: float, *, passing: type[Exception] = BacklogFailedError) -> AsyncIterator[None]:
        try:
            async with deadline(seconds, "backlog", self._queue):
                yield
        except passing:
            raise
        except Exception as error:
            raise BacklogFailedError(
                self._queue, failure_kind(error), str(error), refused=was_refused(error)
            ) from error


class SdkDestination:
    """Made by `SdkTransport.destination`. A topic is sent to by its path alone, like a queue."""

    def __init__(self, client: ServiceBusClient, path: str, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        # Or a try that was answered would hide one before it that was not.
        self._sender = disable_retries(speed_up_opening(client.get_queue_sender(path)))
        self._turn = asyncio.Lock()

    async def send(self, messages: Sequence[OutgoingMessage]) -> None:
        accepted: set[int] = set()
        begun = False
        try:
            async with deadline(self._timeout, "send", self._path), self._turn:
                await open_aio_link(self._sender, self._timeout)
                begun = True
                limits = link_limits(self._sender)
                parts = split_batch([message.size for message in messages], limits.batch, envelope=BATCH_ENVELOPE_BYTES)
                for group in (*parts.groups, *((position,) for position in parts.oversized)):
                    await self._sent([messages[position].content for position in group], limits)
                    accepted.update(group)
        except Exception as error:
            waiting = [message for position, message in enumerate(messages) if position not in accepted]
            refused = not begun or was_refused(error)
            raise SendFailedError(self._path, failure_kind(error), waiting, str(error), refused=refused) from error

    async def _sent(self, contents: Sequence[SdkContent], limits: LinkLimits) -> None:
        first = contents[0]
        if first.single is not None and len(first.raw) + LONG_SECTION_BYTES + BATCH_ENVELOPE_BYTES > limits.batch:
            await send_message(self._sender, first.single, self._timeout)
        else:
            batch = encoded_batch([content.raw for content in contents], limits)
            await self._sender.send_messages(batch, timeout=self._timeout)

    async def close(self) -> None:
        await _closed(self._sender)


async def _closed(handler: Any) -> None:
    with suppress(Exception):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await handler.close()
    if (keep_alive := keep_alive_of(handler)) is not None:
        keep_alive.cancel()
