"""Peeks at the backlog queues of an asyncio pair (Y1).

`decide.backlog_watch` decides when to peek, and what follows from the messages that were found.
"""

from __future__ import annotations

import asyncio
from typing import Any

from azure.servicebus.aio import ServiceBusClient

from twinbus.pairing.aio.timeouts import TaskTimeouts, cancel_until_done
from twinbus.pairing.decide.backlog_watch import CheckFinished, PeekFailed, PeekPage, QueuePeeked
from twinbus.pairing.recording import OperationRecorder
from twinbus.pairing.shared_state import IsFailedOver, SharedBacklogWatch, peek_failed, queue_peeked
from twinbus.sdk import open_aio_link


class AioBacklogPeeker:
    """Peeks at one queue after the other, in one task. Each peek opens a link and closes this link."""

    def __init__(
        self,
        client: ServiceBusClient,
        timeouts: TaskTimeouts,
        recorder: OperationRecorder,
        is_failed_over: IsFailedOver,
    ) -> None:
        self._client = client
        self._timeouts = timeouts
        self._recorder = recorder
        self._is_failed_over = is_failed_over
        self._task: asyncio.Task[None] | None = None

    def start(self, watch: SharedBacklogWatch, pages: tuple[PeekPage, ...]) -> None:
        self._task = self._timeouts.start(self._peek_all(watch, pages))

    def stop(self) -> None:
        """Cancel a peek in progress."""
        if self._task is not None:
            cancel_until_done(self._task)

    async def _peek_all(self, watch: SharedBacklogWatch, pages: tuple[PeekPage, ...]) -> None:
        for page in pages:
            if watch.watch.closed:
                break
            watch.advance(await self._peek(page))
        watch.advance(CheckFinished())

    async def _peek(self, page: PeekPage) -> QueuePeeked | PeekFailed:
        receiver: Any = None
        answered = False
        try:
            receiver = self._timeouts.prepare(self._client.get_queue_receiver(page.queue))
            messages = await self._timeouts.bound(
                self._peek_messages(receiver, page), self._timeouts.try_timeout, receiver
            )
            answered = True
            return queue_peeked(page.queue, messages, self._is_failed_over)
        except Exception as error:
            return peek_failed(page.queue, error)
        finally:
            if answered:
                self._timeouts.retire(receiver)
            elif receiver is not None:
                self._timeouts.discard(receiver)

    async def _peek_messages(self, receiver: Any, page: PeekPage) -> list[Any]:
        await open_aio_link(receiver, self._timeouts.try_timeout)
        with self._recorder.peek(page.queue) as found:
            found.extend(await receiver.peek_messages(page.size, sequence_number=page.start))
        return found
