"""What an aio sender of azure-servicebus lacks to be shared by tasks. The rest of its private parts: `sdk`.

Its writing waits for whoever reads, in the middle of a transfer: meanwhile other tasks send the same message again or
drop it from what is to be sent. All of them queue to read, answered or not. An error of one call closes the link under
the others. Decision 14 has figures.
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
# As the SDK does while a link is not ready.
_PAUSE_SECONDS: Final = 0.05


def allow_concurrent_sends(sender: Any, close: Callable[[], None]) -> None:
    """Of a sender whose link is open, before the first call on it. Where an error would close it, `close` decides."""
    handler = sender._handler
    if supports_concurrent_sends(sender):
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


def supports_concurrent_sends(sender: Any) -> bool:
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
    """How an open link sends. One of the tasks that wait for an answer reads for all, until it has its own; then the
    next in line reads. What the peer has granted no credit for waits, and is written when it does.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._link = handler._link
        self._complete = handler._on_send_complete_async
        self._reading = self._writing = False
        self._unsent: deque[Any] = deque()
        self._waiting: dict[Any, asyncio.Future[None]] = {}
        handler.send_message_async = self.send
        handler._on_send_complete_async = self._completed
        self._link.update_pending_deliveries = self._write

    async def send(self, message: Any, **_: Any) -> None:
        """Without the SDK's tries and time-outs, which are ours (S12)."""
        while not await self._handler.client_ready_async():  # noqa: ASYNC110 - nobody says when it is
            await asyncio.sleep(_PAUSE_SECONDS)
        delivery: Any = MessageDelivery(message)  # type: ignore[no-untyped-call] # the SDK's own
        pending = await self._handler._transfer_message_async(delivery)
        self._unsent.append(pending)
        try:
            await self._write()
            await self._answered(delivery)
        finally:
            if not pending.sent:
                self._forget(pending)
            if self._waiting and not self._reading:
                self._wake(next(iter(self._waiting)))
        if delivery.state is not MessageDeliveryState.Ok:
            raise delivery.error

    async def _answered(self, delivery: Any) -> None:
        # It is ready: that need not be asked again before the first reading.
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

    async def _write(self) -> None:
        """As much as there is credit for (AMQP 2.6.7): the SDK would grant itself more, and be thrown off for it."""
        if self._writing:
            # Over a WebSocket it may wait: whoever reads meanwhile writes nothing twice.
            return
        self._writing = True
        try:
            while self._unsent and self._link.current_link_credit > 0:
                pending = self._unsent[0]
                if not await self._written(pending):
                    return
                # Unless its sender gave it up meanwhile.
                if pending in self._unsent:
                    self._unsent.remove(pending)
        finally:
            self._writing = False

    async def _written(self, pending: Any) -> bool:
        """False where the session's window is closed."""
        if pending.settled:
            return True
        try:
            await self._link._outgoing_transfer(pending)
        except Exception as error:
            # Also where somebody else writes it: what cannot be encoded is its own sender's error.
            (delivery,) = pending.on_delivery_settled.args
            delivery.state, delivery.error = MessageDeliveryState.Error, error
            self._link._pending_deliveries.remove(pending)
            self._wake(delivery)
            return True
        return bool(pending.sent)

    async def _completed(self, delivery: Any, reason: Any, state: Any) -> None:
        await self._complete(delivery, reason, state)
        if delivery.error is not None and reason == LinkDeliverySettleReason.NOT_DELIVERED:
            delivery.error.__cause__ = self._link._error
        self._wake(delivery)

    def _forget(self, pending: Any) -> None:
        """Nobody else writes it: it may be diverted now."""
        for held in (self._unsent, self._link._pending_deliveries):
            if pending in held:
                held.remove(pending)

    def _wake(self, delivery: Any) -> None:
        waiter = self._waiting.get(delivery)
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
