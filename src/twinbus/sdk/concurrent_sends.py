"""Patch an open asyncio sender of azure-servicebus so that several tasks can send on it at the same time.

Why. The SDK's sender is written for one task. With several tasks, three things go wrong:

- A write waits for the reading task in the middle of a transfer. During this wait other tasks send the same message
  again, or remove it from the list of pending messages.
- Every task that waits for an answer also waits for its turn to read, even if its answer has already arrived.
- An error of one call closes the link that all other calls are using.

How. `allow_concurrent_sends` replaces four parts of one sender, after its link is open and before the first call:

    transport.write              appends to the socket's buffer and never waits
    send_message_async           `ConcurrentSends`: one task reads for all; transfers are written if there is credit
    cbs.update_token             one task renews the token, the others wait
    _handle_exception            the caller decides whether an error closes the link

Decision 14 (docs/decisions) has the measurements.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from twinbus.sdk.private_names import (
    MESSAGE_DELIVERY_DONE_STATES,
    AMQPConnectionError,
    ErrorCondition,
    LinkDeliverySettleReason,
    MessageDelivery,
    MessageDeliveryState,
)

_LOGGER: Final = logging.getLogger(__name__)
# The pause between two checks whether a link is ready. The SDK uses the same pause.
_PAUSE_SECONDS: Final = 0.05


def supports_concurrent_sends(sender: Any) -> bool:
    """Return whether a write to the sender's connection never waits. A write to a WebSocket may wait."""
    return "websocket" not in str(sender._config.transport_type).lower()


def allow_concurrent_sends(sender: Any, close: Callable[[], None]) -> None:
    """Patch a sender whose link is open, before the first call on it.

    `close` is called where the SDK would close the sender because of an error.
    """
    handler = sender._handler
    if supports_concurrent_sends(sender):
        _write_without_waiting(handler._connection._transport)
    ConcurrentSends(handler)
    if handler._cbs_authenticator is not None:
        _renew_token_once(handler._cbs_authenticator)

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


def _write_without_waiting(transport: Any) -> None:
    """Make `transport.write` return without waiting, so that a transfer is complete before another task runs.

    The socket's buffer contains at most one message of each caller, because each caller waits for its own answer.
    """
    writer = transport.writer
    if writer is None:
        raise ConnectionResetError("the connection was closed")

    async def write(frame: bytes) -> None:
        if writer.transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        writer.write(frame)

    transport.write = write


class ConcurrentSends:
    """Replaces the SDK's method that sends on an open link.

    One of the tasks that wait for an answer reads for all tasks until its own answer comes. Then the next waiting task
    reads. Messages without credit wait in `_unsent`, and are written when the service grants credit.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._link = handler._link
        self._sdk_send_complete = handler._on_send_complete_async
        self._reading = self._writing = False
        self._unsent: deque[Any] = deque()
        self._waiting: dict[Any, asyncio.Future[None]] = {}
        handler.send_message_async = self.send
        handler._on_send_complete_async = self._send_complete
        self._link.update_pending_deliveries = self._write_unsent

    async def send(self, message: Any, **_: Any) -> None:
        """Send one message and wait for its answer. The caller does retries and sets a timeout (S12)."""
        while not await self._handler.client_ready_async():  # noqa: ASYNC110 - the SDK signals nothing
            await asyncio.sleep(_PAUSE_SECONDS)
        delivery: Any = MessageDelivery(message)  # type: ignore[no-untyped-call] # the SDK's own
        pending = await self._handler._transfer_message_async(delivery)
        self._unsent.append(pending)
        try:
            await self._write_unsent()
            await self._wait_for_answer(delivery)
        finally:
            if not pending.sent:
                self._forget(pending)
            if self._waiting and not self._reading:
                self._wake(next(iter(self._waiting)))
        if delivery.state is not MessageDeliveryState.Ok:
            raise delivery.error

    async def _wait_for_answer(self, delivery: Any) -> None:
        # `send` has checked that the link is ready, so the first read does not check again.
        read: Callable[[], Awaitable[Any]] = self._read
        while delivery.state not in MESSAGE_DELIVERY_DONE_STATES:
            if self._reading:
                self._waiting[delivery] = asyncio.get_running_loop().create_future()
                try:
                    await self._waiting[delivery]
                finally:
                    del self._waiting[delivery]
                continue
            self._reading = True
            try:
                running = await read()
            finally:
                self._reading = False
            if running is False:
                raise AMQPConnectionError(ErrorCondition.SocketError, description="The connection was closed.")
            read = self._handler.do_work_async

    async def _read(self) -> None:
        await self._handler._connection.listen(wait=self._handler._socket_timeout)

    async def _write_unsent(self) -> None:
        """Write waiting messages while the link has credit (AMQP 2.6.7).

        The SDK would send without credit, and the service would then close the link.
        """
        if self._writing:
            # Over a WebSocket the writing task may wait here. The reading task must not write the same message.
            return
        self._writing = True
        try:
            while self._unsent and self._link.current_link_credit > 0:
                pending = self._unsent[0]
                if not await self._write(pending):
                    return
                # The task that sends this message may have removed it while this task waited.
                if pending in self._unsent:
                    self._unsent.remove(pending)
        finally:
            self._writing = False

    async def _write(self, pending: Any) -> bool:
        """Write one message. Returns False if the session's window is closed and the message was not written."""
        if pending.settled:
            return True
        try:
            await self._link._outgoing_transfer(pending)
        except Exception as error:
            # Raise the error in the task that sends this message. This may be another task than the present one.
            (delivery,) = pending.on_delivery_settled.args
            delivery.state, delivery.error = MessageDeliveryState.Error, error
            self._link._pending_deliveries.remove(pending)
            self._wake(delivery)
            return True
        return bool(pending.sent)

    async def _send_complete(self, delivery: Any, reason: Any, state: Any) -> None:
        await self._sdk_send_complete(delivery, reason, state)
        if delivery.error is not None and reason == LinkDeliverySettleReason.NOT_DELIVERED:
            delivery.error.__cause__ = self._link._error
        self._wake(delivery)

    def _forget(self, pending: Any) -> None:
        """Remove an unsent message, so that no task writes it: the caller may now send it to the backlog."""
        for held in (self._unsent, self._link._pending_deliveries):
            if pending in held:
                held.remove(pending)

    def _wake(self, delivery: Any) -> None:
        waiter = self._waiting.get(delivery)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _renew_token_once(cbs: Any) -> None:
    """Let one task renew the token while the other tasks wait. If the task is cancelled, the next task renews it.

    The SDK measures the time limit of a renewal from the previous renewal. Without this change the limit has already
    passed for the waiting tasks.
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
