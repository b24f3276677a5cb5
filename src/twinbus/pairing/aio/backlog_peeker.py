"""Looks at the backlog queues (Y1) of an asyncio pair. When to look and what it means is decided in `attendance`."""

from __future__ import annotations

import asyncio
from typing import Any

from azure.servicebus.aio import ServiceBusClient

from twinbus.pairing.aio.timeouts import TaskTimeouts, cancel
from twinbus.pairing.attending import FailedOver, SharedBacklogWatch, not_seen, seen
from twinbus.pairing.decide.backlog_watch import LookEnded, Peek, QueueNotSeen, QueueSeen
from twinbus.pairing.recording import OperationRecorder
from twinbus.sdk import open_aio_link


class AioBacklogPeeker:
    """One queue after the other, in one task."""

    def __init__(
        self, client: ServiceBusClient, attempts: TaskTimeouts, recording: OperationRecorder, failed_over: FailedOver
    ) -> None:
        self._client = client
        self._attempts = attempts
        self._recording = recording
        self._failed_over = failed_over
        self._task: asyncio.Task[None] | None = None

    def begin(self, cell: SharedBacklogWatch, peeks: tuple[Peek, ...]) -> None:
        self._task = self._attempts.start(self._look(cell, peeks))

    def stop(self) -> None:
        """A peek under way is given up."""
        if self._task is not None:
            cancel(self._task)

    async def _look(self, cell: SharedBacklogWatch, peeks: tuple[Peek, ...]) -> None:
        for peek in peeks:
            if cell.attendance.ended:
                break
            cell.advance(await self._peeked(peek))
        cell.advance(LookEnded())

    async def _peeked(self, peek: Peek) -> QueueSeen | QueueNotSeen:
        receiver: Any = None
        answered = False
        try:
            receiver = self._attempts.ready(self._client.get_queue_receiver(peek.queue))
            found = await self._attempts.bound(self._peek(receiver, peek), self._attempts.seconds, receiver)
            answered = True
            return seen(peek.queue, found, self._failed_over)
        except Exception as error:
            return not_seen(peek.queue, error)
        finally:
            if answered:
                self._attempts.retire(receiver)
            elif receiver is not None:
                self._attempts.discard(receiver)

    async def _peek(self, receiver: Any, peek: Peek) -> list[Any]:
        await open_aio_link(receiver, self._attempts.seconds)
        with self._recording.peeked(peek.queue) as found:
            found.extend(await receiver.peek_messages(peek.most, sequence_number=peek.start))
        return found
