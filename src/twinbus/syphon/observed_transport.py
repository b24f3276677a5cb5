"""The transport of the syphon inside a pair: it reports to the pair what the syphon learns.

A receive or a settlement shows that a backlog queue works: the queue returns to the pair's rotation (S6). A delivery to
an entity on trial passes or fails the trial, as a send of the application does (S14).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from twinbus.pairing import PairState
from twinbus.syphon.transport import (
    Backlog,
    Destination,
    HeldMessage,
    OutgoingMessage,
    PeekedMessage,
    SendFailedError,
    TimeToLive,
    Transport,
)


class ObservedTransport:
    """A transport that reports to `pair`. Implements `transport.Transport`."""

    def __init__(self, transport: Transport, pair: PairState) -> None:
        self._transport = transport
        self._pair = pair

    def backlog(self, queue: str) -> Backlog:
        return _ObservedBacklog(self._transport.backlog(queue), queue, self._pair)

    def destination(self, path: str) -> Destination:
        return _ObservedDestination(self._transport.destination(path), path, self._pair)

    def restore(self, held: HeldMessage, ttl: TimeToLive, now: datetime) -> OutgoingMessage:
        return self._transport.restore(held, ttl, now)

    async def close(self) -> None:
        await self._transport.close()


class _ObservedDestination:
    def __init__(self, destination: Destination, path: str, pair: PairState) -> None:
        self._destination = destination
        self._path = path
        self._pair = pair

    async def send(self, messages: Sequence[OutgoingMessage]) -> None:
        restores = self._pair.delivery_began(self._path)
        try:
            await self._destination.send(messages)
        except SendFailedError as error:
            self._pair.delivery_ended(self._path, restores, error.kind)
            raise
        self._pair.delivery_ended(self._path, restores, None)

    async def close(self) -> None:
        await self._destination.close()


class _ObservedBacklog:
    def __init__(self, backlog: Backlog, queue: str, pair: PairState) -> None:
        self._backlog = backlog
        self._queue = queue
        self._pair = pair

    @property
    def has_credit(self) -> bool:
        return self._backlog.has_credit

    async def open(self) -> None:
        await self._backlog.open()

    async def receive(self, count: int, wait: float) -> Sequence[HeldMessage]:
        held = await self._backlog.receive(count, wait)
        self._pair.backlog_queue_works(self._queue)
        return held

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[HeldMessage]:
        return await self._backlog.receive_deferred(numbers)

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        return await self._backlog.peek(start, count)

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        lost = await self._backlog.complete(held)
        self._pair.backlog_queue_works(self._queue)
        return lost

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._backlog.abandon(held)

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._backlog.defer(held)

    async def dead_letter(self, held: Sequence[HeldMessage], reason: str, description: str) -> Sequence[HeldMessage]:
        return await self._backlog.dead_letter(held, reason, description)

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._backlog.renew(held)

    async def stop_receiving(self) -> Sequence[HeldMessage]:
        return await self._backlog.stop_receiving()

    async def close(self) -> None:
        await self._backlog.close()
