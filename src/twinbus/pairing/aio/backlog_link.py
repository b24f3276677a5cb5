"""Links to the backlog queues of an asyncio pair, shared by all its senders (S6).

The SDK's sender runs one call at a time, so calls wait here until the link is free (their *turn*). A call may wait for
all the time that it has left. The link makes copies of a call's messages that fit the limits of the link.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from azure.servicebus.aio import ServiceBusClient, ServiceBusSender
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.ledger import Stage
from twinbus.pairing.aio.timeouts import TaskTimeouts, wait_for_event
from twinbus.pairing.call_errors import NoTurnError
from twinbus.pairing.decide.send_flow import DivertTo, QueueLeftMeanwhileError, WaitForQueue, mark_whole_attempt
from twinbus.pairing.message_copies import next_payload
from twinbus.pairing.pair_sides import Side
from twinbus.pairing.recording import OperationRecorder
from twinbus.pairing.shared_state import SharedRotation
from twinbus.sdk import LinkLimits, is_open, link_limits, open_aio_link, retry_settings

LinkCall = Callable[[Any, float], Coroutine[Any, Any, None]]


class AioBacklogLink:
    """The link to one backlog queue. It opens at its first use, and again after it was dropped because of an error."""

    def __init__(
        self,
        client: ServiceBusClient,
        side: Side,
        queue: str,
        rotation: SharedRotation,
        timeouts: TaskTimeouts,
        recorder: OperationRecorder,
    ) -> None:
        self._client = client
        self._side = side
        self._queue = queue
        self._rotation = rotation
        self._timeouts = timeouts
        self._recorder = recorder
        self._retries = retry_settings(client)
        self._turn = asyncio.Lock()
        self._closed = asyncio.Event()
        self._sender: ServiceBusSender | None = None
        self._limits: LinkLimits | None = None

    async def send(self, step: DivertTo, destination: str) -> None:
        """Send the next transfer of a diversion. `destination` is the `namespace/entity` on the primary.

        Raises QueueLeftMeanwhileError, NoTurnError, or the error of the SDK call.
        """
        until = time.monotonic() + step.seconds
        try:
            await self._timeouts.take_turn(self._turn, self._queue, step.seconds)
        except NoTurnError:
            # After this error, a call on a closed pair raises PairClosedError or PairFaultedError (C3).
            if self._closed.is_set():
                raise QueueLeftMeanwhileError from None
            raise
        try:
            self._check_in_rotation(step.probe)
            if self._limits is None:
                await self._call(open_aio_link, until, step.probe)
            assert self._limits is not None
            await self._send(step, self._limits, until, destination)
        finally:
            self._turn.release()

    def close(self) -> None:
        self._closed.set()
        if self._sender is not None:
            self._timeouts.retire(self._sender, self._turn)

    async def _send(self, step: DivertTo, limits: LinkLimits, until: float, destination: str) -> None:
        payload = next_payload(step.diversion, limits)
        prefix = self._recorder.prefix(Stage.SEND_BACKLOG, self._queue, destination)
        send = self._recorder.aio_recorded(prefix, payload, lambda sender: sender.send_messages(payload))

        async def open_and_send(sender: ServiceBusSender, left: float) -> None:
            if not is_open(sender):
                await open_aio_link(sender, left)
            await send(sender)

        await self._call(open_and_send, until, step.probe)

    async def _call(self, call: LinkCall, until: float, probe: bool) -> None:
        whole = time.monotonic() + self._timeouts.try_timeout
        end = min(whole, until)
        try:
            try:
                await self._try_once(call, end)
            except Exception as error:
                pause = partial(self._pause, probe)
                await self._timeouts.retry(error, partial(self._try_once, call), end, self._retries, pause)
        except BaseException as error:
            if whole <= until:
                mark_whole_attempt(error)
            # The link is dropped also if the caller was cancelled, because no call waits for the answer on it any more.
            self._drop()
            raise

    async def _try_once(self, call: LinkCall, end: float) -> None:
        sender, left = self._sender, end - time.monotonic()
        if sender is None:
            made = self._side.remake(lambda: self._client.get_queue_sender(self._queue))
            sender = self._sender = self._timeouts.prepare(made)
        try:
            await self._timeouts.bound(call(sender, left), left, sender)
        except OperationTimeoutError:
            self._drop()
            raise
        if self._limits is None:
            self._limits = link_limits(sender)

    async def _pause(self, probe: bool, seconds: float) -> None:
        await wait_for_event(self._closed, seconds)
        self._check_in_rotation(probe)

    def _check_in_rotation(self, probe: bool) -> None:
        # An earlier call failed on this queue: the calls that waited for the link do not try the queue again.
        if self._closed.is_set() or not (probe or self._queue in self._rotation.rotation.usable):
            raise QueueLeftMeanwhileError

    def _drop(self) -> None:
        sender, self._sender, self._limits = self._sender, None, None
        if sender is not None:
            self._timeouts.discard(sender)


class AioBacklogLinks:
    """The links of a pair to its backlog queues, by queue. A link is made at its first use."""

    def __init__(
        self,
        client: ServiceBusClient,
        side: Side,
        rotation: SharedRotation,
        timeouts: TaskTimeouts,
        recorder: OperationRecorder,
    ) -> None:
        self._make: Callable[[str], AioBacklogLink] = lambda queue: AioBacklogLink(
            client, side, queue, rotation, timeouts, recorder
        )
        self._rotation = rotation
        self._timeouts = timeouts
        self._links: dict[str, AioBacklogLink] = {}

    def __getitem__(self, queue: str) -> AioBacklogLink:
        found = self._links.get(queue)
        if found is None:
            found = self._links[queue] = self._make(queue)
        return found

    async def wait(self, step: WaitForQueue) -> None:
        """Wait until the rotation has changed, or the pair closes."""
        changed = asyncio.Event()
        wake = partial(self._timeouts.tell, changed.set)
        self._rotation.on_change.add(wake)
        try:
            if self._rotation.rotation is step.rotation:
                await wait_for_event(changed, step.seconds)
        finally:
            self._rotation.on_change.discard(wake)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
