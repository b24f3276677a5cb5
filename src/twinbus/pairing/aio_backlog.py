"""Links to the backlog queues, shared by all senders of a pair (S6), for asyncio. One call at a time on each."""

from __future__ import annotations

import asyncio
from typing import Any

from azure.servicebus.aio import ServiceBusClient, ServiceBusSender

from twinbus.pairing.aio_attempts import Attempts
from twinbus.pairing.calls import QueueLeftMeanwhileError
from twinbus.pairing.entity import RotationCell
from twinbus.pairing.outgoing import Payload
from twinbus.pairing.sdk import Limits, is_open, limits_of, open_link, quick_to_open


class BacklogLink:
    """One backlog queue. The SDK's sender takes one call at a time, so they queue here."""

    def __init__(self, client: ServiceBusClient, queue: str, rotation: RotationCell, attempts: Attempts) -> None:
        self._client = client
        self._queue = queue
        self._rotation = rotation
        self._attempts = attempts
        self._turn = asyncio.Lock()
        self._sender: ServiceBusSender | None = None
        self._limits: Limits | None = None

    async def limits(self, seconds: float) -> Limits:
        if self._limits is None:
            async with self._turn:
                if self._limits is None:
                    self._still_in_rotation()
                    await self._try(lambda sender: open_link(sender, seconds), seconds)
        assert self._limits is not None
        return self._limits

    async def take(self, payload: Payload, seconds: float) -> None:
        async with self._turn:
            self._still_in_rotation()
            await self._try(lambda sender: sender.send_messages(payload, timeout=seconds), seconds)

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            self._attempts.discard(sender)

    def _still_in_rotation(self) -> None:
        # Those that waited behind a call that found the queue dead need not find it out each for themselves.
        if self._queue not in self._rotation.rotation.usable:
            raise QueueLeftMeanwhileError

    async def _try(self, action: Any, seconds: float) -> None:
        sender = self._sender
        if sender is None:
            sender = self._sender = quick_to_open(self._client.get_queue_sender(self._queue))
        try:
            await self._attempts.bound(action(sender), seconds)
        except BaseException:
            # Whatever ended it, also its caller's cancelling: what is left on this link belongs to nobody.
            self.close()
            raise
        if is_open(sender):
            self._limits = limits_of(sender)


class BacklogLinks:
    """All of them, made when first needed."""

    def __init__(self, client: ServiceBusClient, rotation: RotationCell, attempts: Attempts) -> None:
        self._client = client
        self._rotation = rotation
        self._attempts = attempts
        self._links: dict[str, BacklogLink] = {}

    def __getitem__(self, queue: str) -> BacklogLink:
        found = self._links.get(queue)
        if found is None:
            found = self._links[queue] = BacklogLink(self._client, queue, self._rotation, self._attempts)
        return found

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
