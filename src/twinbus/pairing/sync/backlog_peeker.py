"""Peeks at the backlog queues of a sync pair (Y1).

`decide.backlog_watch` decides when to peek, and what follows from the messages that were found.
"""

from __future__ import annotations

from typing import Any

from azure.servicebus import ServiceBusClient

from twinbus.pairing.decide.backlog_watch import CheckFinished, PeekFailed, PeekPage, QueuePeeked
from twinbus.pairing.recording import OperationRecorder
from twinbus.pairing.shared_state import IsFailedOver, SharedBacklogWatch, peek_failed, queue_peeked
from twinbus.pairing.sync.timeouts import ThreadTimeouts
from twinbus.sdk import interrupt, open_sync_link, refuse_calls


class BacklogPeeker:
    """Peeks at one queue after the other, in a worker thread. Each peek opens a link and closes this link."""

    def __init__(
        self,
        client: ServiceBusClient,
        timeouts: ThreadTimeouts,
        recorder: OperationRecorder,
        is_failed_over: IsFailedOver,
    ) -> None:
        self._client = client
        self._timeouts = timeouts
        self._recorder = recorder
        self._is_failed_over = is_failed_over
        self._receiver: Any = None
        self._stopped = False

    def start(self, watch: SharedBacklogWatch, pages: tuple[PeekPage, ...]) -> None:
        self._timeouts.thread.soon(lambda: self._peek_all(watch, pages))

    def stop(self) -> None:
        """Interrupt a peek in progress and start no other peek."""
        self._stopped = True
        receiver = self._receiver
        if receiver is not None:
            refuse_calls(receiver)
            interrupt(receiver)

    def _peek_all(self, watch: SharedBacklogWatch, pages: tuple[PeekPage, ...]) -> None:
        for page in pages:
            if self._stopped or watch.watch.closed:
                break
            watch.advance(self._peek(page))
        watch.advance(CheckFinished())

    def _peek(self, page: PeekPage) -> QueuePeeked | PeekFailed:
        receiver: Any = None
        event: QueuePeeked | PeekFailed
        try:
            receiver = self._timeouts.prepare(self._client.get_queue_receiver(page.queue))
            self._receiver = receiver
            messages = self._timeouts.call_once(receiver, lambda link, left: self._peek_messages(link, page, left))
            event = queue_peeked(page.queue, messages, self._is_failed_over)
        except Exception as error:
            event = peek_failed(page.queue, error)
        finally:
            self._receiver = None
        if isinstance(event, QueuePeeked):
            self._timeouts.close_handler(receiver)
        elif receiver is not None:
            self._timeouts.discard(receiver)
        return event

    def _peek_messages(self, receiver: Any, page: PeekPage, seconds: float | None) -> list[Any]:
        open_sync_link(receiver, seconds)
        with self._recorder.peek(page.queue) as found:
            found.extend(receiver.peek_messages(page.size, sequence_number=page.start))
        return found
