"""Open, watch and end the links of azure-servicebus senders and receivers.

The SDK calls a sender or receiver a handler. The handler's `_handler` attribute is an AMQP client with one connection
and one link. The functions here work on sync and asyncio handlers. Three groups:

    state        whether the handler is open or closed, the message sizes that its link accepts, whether it has credit
    opening      open the link in one try, and in milliseconds instead of seconds (`speed_up_opening`)
    ending       end a call from another thread or task: `interrupt` (sync), `abort_connection` (asyncio)
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from azure.servicebus import ServiceBusMessageBatch

from twinbus.sdk.private_names import OPEN_TAKES_TIMEOUT
from twinbus.sdk.sender_credentials import SenderCredential

# Largest batch of the standard tier, in bytes.
_STANDARD_BATCH: Final = 262_144
# Opening a link needs at most `_OPENING_FRAMES` frames. If no frame arrives for `_SILENCE_SECONDS`, `client_ready`
# returns, so that the SDK can check its own timeout.
_OPENING_FRAMES: Final = 16
_SILENCE_SECONDS: Final = 0.1
_PRODUCT: Final = "twinbus"
RECEIVE_METHODS: Final = ("_receive", "_iter_next")
"""Names of the methods of a receiver that every receive call and every iteration over the receiver calls."""
CANCELLED_AT_DEADLINE: Final = "given up at its deadline"
"""Message of the CancelledError that ends an asyncio call at its deadline."""


# --- state -----------------------------------------------------------------------------------------------------------


def is_closed(handler: Any) -> bool:
    """Return whether `close()` was called, on the handler or on its client."""
    return bool(handler._shutdown.is_set())


def is_open(handler: Any) -> bool:
    """Return whether the link is open."""
    return bool(handler._running)


def has_credit(receiver: Any) -> bool:
    """Return whether the link has credit, so that the service may still send messages to this receiver."""
    link = getattr(receiver._handler, "_link", None)
    return bool(receiver._running and link is not None and link.current_link_credit > 0)


class LinkLimits(NamedTuple):
    """The largest sizes, in bytes, that a sender's link accepts, and the SDK object needed to make batches for it."""

    message: int
    batch: int
    transport: Any


def link_limits(sender: Any) -> LinkLimits:
    """Return the limits of the sender's link; the limits of the standard tier if the link was never open."""
    batch = sender._max_batch_size_on_link or _STANDARD_BATCH
    return LinkLimits(sender._max_message_size_on_link or batch, batch, sender._amqp_transport)


def empty_batch(sender: Any, max_size_in_bytes: int | None) -> ServiceBusMessageBatch:
    """Return a batch for a sender that cannot be opened now.

    Raises the same ValueError as the SDK if `max_size_in_bytes` is larger than the link allows.
    """
    limits = link_limits(sender)
    if max_size_in_bytes and sender._max_batch_size_on_link and max_size_in_bytes > limits.batch:
        raise ValueError(
            f"Max message size: {max_size_in_bytes} is too large, acceptable max batch size is: {limits.batch} bytes."
        )
    return ServiceBusMessageBatch(max_size_in_bytes=max_size_in_bytes or limits.batch, amqp_transport=limits.transport)


def hides_pings(sender: Any) -> bool:
    """Return whether the service on the open link is Twinbus, which shows ping messages to no receiver (G3)."""
    connection = getattr(sender._handler, "_connection", None)
    properties = getattr(connection, "_remote_properties", None) or {}
    product = properties.get(b"product") or properties.get("product") or b""
    return (product.decode("utf-8", "replace") if isinstance(product, bytes) else str(product)).lower() == _PRODUCT


# --- opening ---------------------------------------------------------------------------------------------------------


async def open_aio_link(handler: Any, seconds: float | None) -> None:
    """Open an asyncio handler within `seconds`, including the clean-up. Only one try if `disable_retries` was called.

    In SDK versions before 7.15 opening has no timeout: the caller must cancel the call.
    """
    await handler._do_retryable_operation(handler._open, **_opening_timeout(seconds))


def open_sync_link(handler: Any, seconds: float | None) -> None:
    """Open a sync handler within `seconds`. Only one try if `disable_retries` was called.

    In SDK versions before 7.15 opening has no timeout: the caller must interrupt the call.
    """
    handler._do_retryable_operation(handler._open, **_opening_timeout(seconds))


def _opening_timeout(seconds: float | None) -> dict[str, Any]:
    return {"timeout": seconds, "operation_requires_timeout": True} if OPEN_TAKES_TIMEOUT else {}


def disable_retries(handler: Any) -> Any:
    """Make the handler try each operation once, without the SDK's retries. Returns the handler.

    Twinbus retries instead: other threads and tasks can end a pause of Twinbus early, but not a pause of the SDK.
    """
    handler._config.retry_total = 0
    handler._error_policy.total_retries = 0
    return handler


def is_retryable(error: BaseException) -> bool:
    """Return whether the SDK would retry after this error."""
    return bool(getattr(error, "_retryable", False))


def speed_up_opening(handler: Any) -> Any:
    """Make the handler's link open and close in milliseconds. Returns the handler.

    While it opens a link, the SDK pauses after every frame. When the SDK closes a link, also in a call that fails, it
    waits for its keep-alive thread or task, which sleeps for one second at a time.
    """
    create = handler._create_handler

    def create_handler(auth: Any) -> None:
        create(auth)
        amqp_client = handler._handler
        interval, amqp_client._keep_alive_interval = amqp_client._keep_alive_interval, None
        if hasattr(amqp_client, "client_ready_async"):
            amqp_client.client_ready_async = _ready_async(handler, amqp_client, interval)
        else:
            amqp_client.client_ready = _ready(handler, amqp_client, interval)

    handler._create_handler = create_handler
    return handler


def _ready(handler: Any, amqp_client: Any, interval: float | None) -> Callable[[], bool]:
    ready = amqp_client.client_ready

    def ready_without_pauses() -> bool:
        for _ in range(_OPENING_FRAMES):
            started = time.monotonic()
            if ready():
                amqp_client.client_ready = ready
                _name_cause_of_lost_sends(amqp_client._link)
                if interval:
                    _stop_keep_alive(handler)
                    handler.keep_alive = KeepAliveThread(amqp_client, interval)
                    # The process may be unable to start a thread. Then the service ends an idle link, and the next call
                    # opens another link.
                    with contextlib.suppress(RuntimeError):
                        handler.keep_alive.start()
                return True
            if time.monotonic() - started > _SILENCE_SECONDS:
                break
        return False

    return ready_without_pauses


def _ready_async(handler: Any, amqp_client: Any, interval: float | None) -> Callable[[], Awaitable[bool]]:
    ready = amqp_client.client_ready_async

    async def ready_without_pauses() -> bool:
        for _ in range(_OPENING_FRAMES):
            started = time.monotonic()
            if await ready():
                amqp_client.client_ready_async = ready
                if interval:
                    amqp_client._keep_alive_interval = interval
                    _stop_keep_alive(handler)
                    handler.keep_alive = asyncio.get_running_loop().create_task(amqp_client._keep_alive_async())
                return True
            if time.monotonic() - started > _SILENCE_SECONDS:
                break
        return False

    return ready_without_pauses


def _name_cause_of_lost_sends(link: Any) -> None:
    """Set the link's error as the cause of each send that fails because the service closed the link (S2).

    The SDK reports such a send as an unknown error. The error is still retryable: on another link, with another token.
    For asyncio links `concurrent_sends` sets the cause.
    """
    remove = getattr(link, "_remove_pending_deliveries", None)  # a receiver's link has no such method
    if remove is None:
        return

    def remove_with_cause() -> None:
        deliveries = [pending.on_delivery_settled.args[0] for pending in link._pending_deliveries]
        remove()
        for delivery in deliveries:
            delivery.error.__cause__ = link._error

    link._remove_pending_deliveries = remove_with_cause


class KeepAliveThread(threading.Thread):
    """A thread that reads from an idle connection every `interval` seconds, as the SDK's thread does.

    Unlike the SDK's thread, it can be cancelled.
    """

    def __init__(self, amqp_client: Any, interval: float) -> None:
        super().__init__(name="twinbus-keep-alive", daemon=True)
        self._amqp_client = amqp_client
        self._interval = interval
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        client = self._amqp_client
        with contextlib.suppress(Exception):
            while not self._cancelled.wait(self._interval) and client._connection and not client._shutdown:
                client._connection.listen(wait=client._socket_timeout, batch=client._link.current_link_credit)


def keep_alive_of(handler: Any) -> Any:
    """Return the thread or task that keeps the handler's connection alive, or None. The result has `cancel()`."""
    return getattr(handler, "keep_alive", None)


def _stop_keep_alive(handler: Any) -> None:
    if (running := keep_alive_of(handler)) is not None:
        running.cancel()


def call_before_close(handler: Any, callback: Callable[[], None]) -> None:
    """Call `callback` each time before the SDK closes the handler's link."""
    close = handler._close_handler

    def close_after_callback() -> Any:
        callback()
        return close()

    handler._close_handler = close_after_callback


# --- ending ----------------------------------------------------------------------------------------------------------


def refuse_calls(handler: Any) -> None:
    """Make the handler refuse new calls and new tries, without closing it yet."""
    handler._shutdown.set()


def interrupt(handler: Any) -> None:
    """End the wait of a sync handler's thread for a socket or a token. The waiting call raises an error."""
    if isinstance(handler._credential, SenderCredential):
        handler._credential.give_up()
    if (found := _socket_of(handler)) is not None:
        # Call the method of the plain socket: `shutdown` of a TLS socket would free state that the reading thread uses.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(found, socket.SHUT_RDWR)


def close_sync_handler(handler: Any) -> None:
    """Close a sync handler and its socket.

    If the closing frames cannot be sent, for example after `interrupt`, the SDK itself leaves the socket open.
    """
    transport = _transport_of(handler)
    try:
        handler.close()
    finally:
        if transport is not None:
            transport.close()


def _socket_of(handler: Any) -> socket.socket | None:
    found = getattr(_transport_of(handler), "sock", None)
    found = getattr(found, "sock", found)  # a WebSocket holds the socket
    return found if isinstance(found, socket.socket) else None


def drop_connection(handler: Any) -> None:
    """End a sync handler that no call uses: close its socket without an AMQP close, if time is short.

    Its client does not close the handler again: an AMQP close without a socket fails, and takes as long as with one.
    """
    refuse_calls(handler)
    _stop_keep_alive(handler)
    interrupt(handler)
    if (transport := _transport_of(handler)) is not None:
        with contextlib.suppress(Exception):
            transport.close()
    handler._handler, handler._running = None, False


def interrupt_at_deadline(handler: Any) -> None:
    """Interrupt the handler's running call because its deadline has passed."""
    handler.given_up = True
    interrupt(handler)


def was_interrupted_at_deadline(handler: Any) -> bool:
    return getattr(handler, "given_up", False)


def abort_connection(handler: Any) -> None:
    """Close the socket of an asyncio handler without an AMQP close."""
    writer = getattr(_transport_of(handler), "writer", None)
    if writer is not None:
        try:
            writer.transport.abort()
        except RuntimeError:
            # The event loop is closed. `shutdown` ends the connection; the garbage collector closes the descriptor.
            with contextlib.suppress(OSError):
                writer.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def drop_aio_connection(handler: Any) -> None:
    """End an asyncio handler that no call uses, as `drop_connection` does."""
    refuse_calls(handler)
    _stop_keep_alive(handler)
    abort_connection(handler)
    handler._handler, handler._running = None, False


def _transport_of(handler: Any) -> Any:
    return getattr(getattr(handler._handler, "_connection", None), "_transport", None)
