"""Links to the backlog queues, shared by all senders of a pair (S6), for asyncio. One call at a time on each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from azure.servicebus.aio import ServiceBusClient, ServiceBusSender
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.ledger import Stage
from twinbus.pairing.aio.timeouts import TaskTimeouts, wait
from twinbus.pairing.calls import NoTurnError, QueueLeftMeanwhileError
from twinbus.pairing.message_copies import Payload
from twinbus.pairing.pair_sides import Side
from twinbus.pairing.recording import OperationRecorder
from twinbus.pairing.shared_state import SharedRotation
from twinbus.sdk import LinkLimits, is_open, link_limits, open_aio_link, retry_settings


class AioBacklogLink:
    """One backlog queue. The SDK's sender takes one call at a time, so they queue here, within their own time (S6)."""

    def __init__(
        self,
        client: ServiceBusClient,
        side: Side,
        queue: str,
        rotation: SharedRotation,
        attempts: TaskTimeouts,
        recording: OperationRecorder,
    ) -> None:
        self._client = client
        self._side = side
        self._queue = queue
        self._rotation = rotation
        self._attempts = attempts
        self._recording = recording
        self._retries = retry_settings(client)
        self._turn = asyncio.Lock()
        self._closed = asyncio.Event()
        self._sender: ServiceBusSender | None = None
        self._limits: LinkLimits | None = None

    async def limits(self, seconds: float) -> LinkLimits:
        """`seconds`: all that the call has left. The same for `take`."""
        if self._limits is None:
            await self._in_turn(open_aio_link, seconds, lambda: self._limits is not None)
        assert self._limits is not None
        return self._limits

    async def take(self, payload: Payload, seconds: float, destination: str) -> None:
        """`destination`: the `namespace/entity` on the primary that it is for."""
        send = self._recording.aio_recorded(
            self._recording.place(Stage.SEND_BACKLOG, self._queue, destination),
            payload,
            lambda sender: sender.send_messages(payload),
        )

        async def sent(sender: ServiceBusSender, left: float) -> None:
            if not is_open(sender):
                await open_aio_link(sender, left)
            await send(sender)

        await self._in_turn(sent, seconds)

    def close(self) -> None:
        self._closed.set()
        if self._sender is not None:
            self._attempts.retire(self._sender, self._turn)

    async def _in_turn(
        self,
        call: Callable[[Any, float], Coroutine[Any, Any, None]],
        seconds: float,
        done: Callable[[], bool] = lambda: False,
    ) -> None:
        end = time.monotonic() + seconds
        try:
            await self._attempts.turn(self._turn, self._queue, seconds)
        except NoTurnError:
            # Once the pair is closed that is what the call is told (C3).
            if self._closed.is_set():
                raise QueueLeftMeanwhileError from None
            raise
        try:
            self._still_in_rotation()
            if not done():
                end = min(time.monotonic() + self._attempts.seconds, end)
                try:
                    await self._once(call, end)
                except Exception as error:
                    await self._attempts.again(error, partial(self._once, call), end, self._retries, self._paused)
        except BaseException:
            # Whatever ended it, also its caller's cancelling: what is left on this link belongs to nobody.
            self._drop()
            raise
        finally:
            self._turn.release()

    async def _once(self, call: Callable[[Any, float], Coroutine[Any, Any, None]], end: float) -> None:
        sender, left = self._sender, end - time.monotonic()
        if sender is None:
            made = self._side.made(lambda: self._client.get_queue_sender(self._queue))
            sender = self._sender = self._attempts.ready(made)
        try:
            await self._attempts.bound(call(sender, left), left, sender)
        except OperationTimeoutError:
            self._drop()
            raise
        if is_open(sender):
            self._limits = link_limits(sender)

    async def _paused(self, seconds: float) -> None:
        await wait(self._closed, seconds)
        self._still_in_rotation()

    def _still_in_rotation(self) -> None:
        # Those that waited behind a call that found the queue dead need not find it out each for themselves.
        if self._closed.is_set() or self._queue not in self._rotation.rotation.usable:
            raise QueueLeftMeanwhileError

    def _drop(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            self._attempts.discard(sender)


class AioBacklogLinks:
    """All of them, made when first needed."""

    def __init__(
        self,
        client: ServiceBusClient,
        side: Side,
        rotation: SharedRotation,
        attempts: TaskTimeouts,
        recording: OperationRecorder,
    ) -> None:
        self._client = client
        self._side = side
        self._rotation = rotation
        self._attempts = attempts
        self._recording = recording
        self._links: dict[str, AioBacklogLink] = {}

    def __getitem__(self, queue: str) -> AioBacklogLink:
        found = self._links.get(queue)
        if found is None:
            found = AioBacklogLink(self._client, self._side, queue, self._rotation, self._attempts, self._recording)
            self._links[queue] = found
        return found

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
