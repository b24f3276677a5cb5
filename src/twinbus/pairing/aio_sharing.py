"""What an aio sender of azure-servicebus lacks to be shared by tasks. The rest of its private parts: `sdk`.

Its writing waits for whoever reads, in the middle of a transfer: meanwhile other tasks send the same message again or
drop it from what is to be sent. All of them queue to read, answered or not. An error of one call closes the link under
the others. Decision 14 has figures.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

_LOGGER: Final = logging.getLogger(__name__)


def share(sender: Any, close: Callable[[], None]) -> None:
    """Of a sender whose link is open, before the first call on it. Where an error would close it, `close` decides."""
    handler = sender._handler
    if can_overlap(sender):
        _write_at_once(handler._connection._transport)
    Answers(handler)
    if handler._cbs_authenticator is not None:
        _renew_one_at_a_time(handler._cbs_authenticator)

    async def handle_exception(exception: Exception) -> Any:
        error = sender._amqp_transport.create_servicebus_exception(
            _LOGGER, exception, custom_endpoint_address=sender._config.custom_endpoint_address
        )
        if error._shutdown_handler:
            close()
        if not error._retryable:
            raise error
        return error

    sender._handle_exception = handle_exception


def can_overlap(sender: Any) -> bool:
    """Not over a WebSocket, where writing may have to wait whatever is done about it."""
    return "websocket" not in str(sender._config.transport_type).lower()


def _write_at_once(transport: Any) -> None:
    """Nothing is waited for, so that a transfer is whole before another task runs.

    What is left in memory by that is no more than what callers have in flight: each waits for its own answer.
    """
    writer = transport.writer
    if writer is None:
        raise ConnectionResetError("the connection was closed")

    async def write(frame: bytes) -> None:
        if writer.transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        writer.write(frame)

    transport.write = write


class Answers:
    """One of the tasks that wait for an answer reads for all, until it has its own; then the next in line reads."""

    def __init__(self, handler: Any) -> None:
        self._transfer = handler._transfer_message_async
        self._complete = handler._on_send_complete_async
        self._work = handler.do_work_async
        self._handler = handler
        self._reading = False
        self._unanswered: dict[asyncio.Task[Any] | None, Any] = {}
        self._waiting: dict[asyncio.Task[Any] | None, asyncio.Future[None]] = {}
        handler._transfer_message_async = self.transfer
        handler._on_send_complete_async = self.complete
        handler.do_work_async = self.work

    async def transfer(self, delivery: Any, timeout: float = 0) -> Any:
        """Written here, and not by whoever comes first: what cannot be encoded is its own caller's error."""
        task = delivery.task = asyncio.current_task()
        delivery.pending = None
        self._unanswered[task] = delivery
        try:
            delivery.pending = await self._transfer(delivery, timeout)
            await self._handler._link.update_pending_deliveries()
        except BaseException:
            self._forget(task)
            raise
        return delivery.pending

    async def complete(self, delivery: Any, reason: Any, state: Any) -> None:
        await self._complete(delivery, reason, state)
        task = delivery.task
        # An answer to what was given up comes too late for its task, which may have sent another since.
        if self._unanswered.get(task) is delivery:
            del self._unanswered[task]
            self._wake(self._waiting.get(task))

    async def work(self, **kwargs: Any) -> Any:
        """What the SDK does over and over until this task's message is answered."""
        task, running = asyncio.current_task(), False
        try:
            if self._reading:
                await self._handler._link.update_pending_deliveries()
            while self._reading and task in self._unanswered:
                await self._woken(task)
            running = task not in self._unanswered or await self._read(kwargs)
        finally:
            if not running:
                self._forget(task)
            if not self._reading and task not in self._unanswered:
                self._wake(next(iter(self._waiting.values()), None))
        return running

    def _forget(self, task: asyncio.Task[Any] | None) -> None:
        """Its message has no answer to come. If it was not written, nobody else writes it: it may be diverted now."""
        delivery, link = self._unanswered.pop(task, None), self._handler._link
        pending = None if delivery is None or link is None else delivery.pending
        if pending is not None and not pending.sent and pending in link._pending_deliveries:
            link._pending_deliveries.remove(pending)

    async def _read(self, kwargs: dict[str, Any]) -> Any:
        self._reading = True
        try:
            return await self._work(**kwargs)
        finally:
            self._reading = False

    async def _woken(self, task: asyncio.Task[Any] | None) -> None:
        self._waiting[task] = asyncio.get_running_loop().create_future()
        try:
            await self._waiting[task]
        finally:
            del self._waiting[task]

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _renew_one_at_a_time(cbs: Any) -> None:
    """While one task fetches a new token the others wait, and one that is cancelled then leaves it to the next.

    The SDK reckons the time that is allowed for it from the last renewal, which others find long past.
    """
    update = cbs.update_token

    async def update_token() -> None:
        before, cbs._token_put_time = cbs.auth_state, int(time.time())
        try:
            await update()
        except BaseException:
            cbs.auth_state = before
            raise

    cbs.update_token = update_token
