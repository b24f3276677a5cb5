"""Open, watch and end the links of azure-servicebus senders and receivers.

The SDK calls a sender or receiver a handler; its `_handler` attribute is the AMQP client below it, with one connection
and one link. Handlers of both flavours go through here. Three groups:

    state        is it open or closed, which message sizes does its link take, does it have credit
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

# Batch size of the standard tier.
_STANDARD_BATCH: Final = 262_144
# Opening a link takes at most this many frames. The SDK must check its own timeout after this much silence.
_OPENING_FRAMES: Final = 16
_SILENCE_SECONDS: Final = 0.1
_PRODUCT: Final = "twinbus"
RECEIVE_METHODS: Final = ("_receive", "_iter_next")
"""Methods of a receiver that every receive and every iteration goes through."""
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
    """Return whether the service may still send messages to this receiver."""
    link = getattr(receiver._handler, "_link", None)
    return bool(receiver._running and link is not None and link.current_link_credit > 0)


class LinkLimits(NamedTuple):
    """Sizes in bytes that a sender's link takes, and the SDK object that batches for it are made with."""

    message: int
    batch: int
    transport: Any


def link_limits(sender: Any) -> LinkLimits:
    """Return the limits of the sender's link; those of the standard tier if it never was open."""
    batch = sender._max_batch_size_on_link or _STANDARD_BATCH
    return LinkLimits(sender._max_message_size_on_link or batch, batch, sender._amqp_transport)


def empty_batch(sender: Any, max_size_in_bytes: int | None) -> ServiceBusMessageBatch:
    """Return a batch for a sender that cannot be opened now. ValueError as the SDK's for a size beyond the link's."""
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
    """Open an asyncio handler within `seconds`, including its clean-up. One try after `disable_retries`.

    Before version 7.15 opening has no timeout of its own: the caller must cancel it.
    """
    await handler._do_retryable_operation(handler._open, **_opening_timeout(seconds))


def open_sync_link(handler: Any, seconds: float | None) -> None:
    """Open a sync handler within `seconds`. One try after `disable_retries`.

    Before version 7.15 opening has no timeout of its own: the caller must interrupt it.
    """
    handler._do_retryable_operation(handler._open, **_opening_timeout(seconds))


def _opening_timeout(seconds: float | None) -> dict[str, Any]:
    return {"timeout": seconds, "operation_requires_timeout": True} if OPEN_TAKES_TIMEOUT else {}


def disable_retries(handler: Any) -> Any:
    """Make the handler try once. Nobody can shorten the SDK's pauses from outside; our own pauses end at once.

    Returns the handler.
    """
    handler._config.retry_total = 0
    handler._error_policy.total_retries = 0
    return handler


def is_retryable(error: BaseException) -> bool:
    """Return whether the SDK would retry after this error."""
    return bool(getattr(error, "_retryable", False))


def speed_up_opening(handler: Any) -> Any:
    """Make the handler's link open and close in milliseconds. Returns the handler.

    The SDK pauses after every frame of an opening link. When it closes a link, also in the middle of a call that
    fails, it waits for its keep-alive thread or task, which sleeps a second at a time.
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
                    # The process may have no thread left. Then an idle link ends, and the next call opens another.
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

    The SDK reports such a send as an unknown error. It stays retryable: on another link, with another token. For
    asyncio links `concurrent_sends` does the same.
    """
    remove = getattr(link, "_remove_pending_deliveries", None)  # a receiver's link has none
    if remove is None:
        return

    def remove_with_cause() -> None:
        deliveries = [pending.on_delivery_settled.args[0] for pending in link._pending_deliveries]
        remove()
        for delivery in deliveries:
            delivery.error.__cause__ = link._error

    link._remove_pending_deliveries = remove_with_cause


class KeepAliveThread(threading.Thread):
    """Reads from an idle connection every `interval` seconds, as the SDK's own thread does, but can be cancelled."""

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
    """Return the thread or task that keeps the handler's connection alive until it is cancelled, or None."""
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
    """End at once what the thread of a sync handler waits for, a socket or a token. The thread gets an error."""
    if isinstance(handler._credential, SenderCredential):
        handler._credential.give_up()
    transport = getattr(getattr(handler._handler, "_connection", None), "_transport", None)
    found = getattr(transport, "sock", None)
    found = getattr(found, "sock", found)  # a WebSocket holds the socket
    if isinstance(found, socket.socket):
        # The plain socket's method: that of a TLS socket would free state that the reading thread uses.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(found, socket.SHUT_RDWR)


def interrupt_at_deadline(handler: Any) -> None:
    """Interrupt the handler's running call because its deadline has passed."""
    handler.given_up = True
    interrupt(handler)


def was_interrupted_at_deadline(handler: Any) -> bool:
    return getattr(handler, "given_up", False)


def abort_connection(handler: Any) -> None:
    """Close the socket of an asyncio handler without telling the other end."""
    transport = getattr(getattr(handler._handler, "_connection", None), "_transport", None)
    writer = getattr(transport, "writer", None)
    if writer is not None:
        try:
            writer.transport.abort()
        except RuntimeError:
            # The event loop is closed. This ends the connection; the garbage collector closes the descriptor.
            with contextlib.suppress(OSError):
                writer.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
