"""What azure-servicebus does not tell in public: limits of a link, its socket, whether a client was closed.

With `aio_sharing` it reads the private parts of clients and senders; those of messages and batches `outgoing` and
`recording`, those of credentials `administration`. All were written for WRITTEN_FOR. It decides nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from azure.servicebus import ServiceBusMessageBatch

from twinbus.backlog import Endpoint
from twinbus.sdk.sender_credentials import SenderCredential

TLS_PORT: Final = 5671
PLAIN_PORT: Final = 5672
STANDARD_BATCH: Final = 262_144
# Frames that opening a link takes at most, and how long none may come before the SDK looks at its clock again.
_FRAMES: Final = 16
_SILENCE_SECONDS: Final = 0.1
_PRODUCT: Final = "twinbus"
_UNUSED_ENTITY: Final = "twinbus-canary"
# What a call is cancelled with at its deadline (aio).
CANCELLED_AT_DEADLINE: Final = "given up at its deadline"


class LinkLimits(NamedTuple):
    """What a link takes, in bytes, and the transport that batches for it are made with."""

    message: int
    batch: int
    transport: Any


def client_endpoint(client: Any) -> Endpoint:
    """Host and port of the namespace a client was made for."""
    config = client._config
    host, _, port = str(client.fully_qualified_namespace).rpartition(":")
    if host and port.isdigit() and not host.endswith(":"):
        return Endpoint.of(host, int(port))
    host = client.fully_qualified_namespace
    if config.custom_endpoint_hostname == host:
        # With TLS the SDK strips the port from the host: it stands in the address alone.
        return Endpoint.of(host, config.connection_port)
    return Endpoint.of(host, TLS_PORT if config.use_tls else PLAIN_PORT)


def unopened_sender(client: Any) -> Any:
    """A handler that is never opened: `client.close()` closes it, and tells by that that it was called (C1)."""
    return client.get_queue_sender(client_entity(client) or _UNUSED_ENTITY)


def client_entity(client: Any) -> str | None:
    """The one entity that a client may be used for, where its connection string names one."""
    return client._entity_name or None


def is_closed(handler: Any) -> bool:
    return bool(handler._shutdown.is_set())


def is_open(sender: Any) -> bool:
    return bool(sender._running)


def link_limits(sender: Any) -> LinkLimits:
    """Of a link that was open; the standard tier's for one that never was."""
    batch = sender._max_batch_size_on_link or STANDARD_BATCH
    return LinkLimits(sender._max_message_size_on_link or batch, batch, sender._amqp_transport)


def empty_batch(sender: Any, max_size_in_bytes: int | None) -> ServiceBusMessageBatch:
    """A batch for a sender that cannot be opened now."""
    limits = link_limits(sender)
    if max_size_in_bytes and sender._max_batch_size_on_link and max_size_in_bytes > limits.batch:
        raise ValueError(
            f"Max message size: {max_size_in_bytes} is too large, acceptable max batch size is: {limits.batch} bytes."
        )
    return ServiceBusMessageBatch(max_size_in_bytes=max_size_in_bytes or limits.batch, amqp_transport=limits.transport)


def hides_pings(sender: Any) -> bool:
    """Whether the service on an open link says that it is Twinbus, which shows pings to nobody (G3)."""
    connection = getattr(sender._handler, "_connection", None)
    told = getattr(connection, "_remote_properties", None) or {}
    product = told.get(b"product") or told.get("product") or b""
    return (product.decode("utf-8", "replace") if isinstance(product, bytes) else str(product)).lower() == _PRODUCT


async def open_aio_link(sender: Any, seconds: float | None) -> None:
    """Open an aio sender or receiver, in as many tries as it has left to itself: one after `disable_retries`.

    Its own wait ends by then, and so does its cleaning up.
    """
    await sender._do_retryable_operation(sender._open, timeout=seconds, operation_requires_timeout=True)


def open_sync_link(sender: Any, seconds: float | None) -> None:
    """Open a sync sender, one try."""
    sender._do_retryable_operation(sender._open, timeout=seconds, operation_requires_timeout=True)


def speed_up_opening(sender: Any) -> Any:
    """The same sender, whose link opens and closes in milliseconds.

    The SDK pauses after every frame of an opening link. When it closes one, also in the middle of a call that fails, it
    waits for the thread or task that keeps the connection alive, which sleeps a second at a time.
    """
    create = sender._create_handler

    def create_handler(auth: Any) -> None:
        create(auth)
        handler = sender._handler
        interval, handler._keep_alive_interval = handler._keep_alive_interval, None
        if hasattr(handler, "client_ready_async"):
            handler.client_ready_async = _ready_async(sender, handler, interval)
        else:
            handler.client_ready = _ready(sender, handler, interval)

    sender._create_handler = create_handler
    return sender


def _ready(sender: Any, handler: Any, interval: float | None) -> Callable[[], bool]:
    ready = handler.client_ready

    def quick() -> bool:
        for _ in range(_FRAMES):
            begun = time.monotonic()
            if ready():
                handler.client_ready = ready
                _tell_why(handler._link)
                if interval:
                    if (before := keep_alive_of(sender)) is not None:
                        before.cancel()
                    sender.keep_alive = KeepAlive(handler, interval)
                    # Where there can be no more threads, an idle link ends, and the next call opens another.
                    with contextlib.suppress(RuntimeError):
                        sender.keep_alive.start()
                return True
            if time.monotonic() - begun > _SILENCE_SECONDS:
                break
        return False

    return quick


def _tell_why(link: Any) -> None:
    """A send under way on a sync link that the service takes away fails because of that (S2); the SDK calls it unknown.

    It may be tried again all the same: on another link, with another token. On a link of asyncio's: `aio_sharing`.
    """
    remove = getattr(link, "_remove_pending_deliveries", None)  # a receiver's link has none
    if remove is None:
        return

    def told() -> None:
        deliveries = [pending.on_delivery_settled.args[0] for pending in link._pending_deliveries]
        remove()
        for delivery in deliveries:
            delivery.error.__cause__ = link._error

    link._remove_pending_deliveries = told


def _ready_async(sender: Any, handler: Any, interval: float | None) -> Callable[[], Awaitable[bool]]:
    ready = handler.client_ready_async

    async def quick() -> bool:
        for _ in range(_FRAMES):
            begun = time.monotonic()
            if await ready():
                handler.client_ready_async = ready
                if interval:
                    handler._keep_alive_interval = interval
                    if (before := keep_alive_of(sender)) is not None:
                        before.cancel()
                    sender.keep_alive = asyncio.get_running_loop().create_task(handler._keep_alive_async())
                return True
            if time.monotonic() - begun > _SILENCE_SECONDS:
                break
        return False

    return quick


class KeepAlive(threading.Thread):
    """Listens on an idle connection now and then, as the SDK's own thread does, but ends when it is told to."""

    def __init__(self, handler: Any, interval: float) -> None:
        super().__init__(name="twinbus-keep-alive", daemon=True)
        self._handler = handler
        self._interval = interval
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        handler = self._handler
        with contextlib.suppress(Exception):
            while not self._cancelled.wait(self._interval) and handler._connection and not handler._shutdown:
                handler._connection.listen(wait=handler._socket_timeout, batch=handler._link.current_link_credit)


def keep_alive_of(sender: Any) -> Any:
    """The thread or task that keeps the connection of a sender alive until it is cancelled."""
    return getattr(sender, "keep_alive", None)


# --- one try at a time (sync) ----------------------------------------------------------------------------------------


class RetrySettings(NamedTuple):
    """How often and with which pauses the caller's client tries again."""

    total: int
    factor: float
    longest: float
    fixed: bool

    def pause(self, tried: int) -> float:
        """Before the next try, after `tried` failed ones: as the SDK's own."""
        if self.fixed:
            return min(self.factor, self.longest)
        return min(self.factor * 2.0**tried * random.uniform(0.8, 1.2), self.longest)


def retry_settings(client: Any) -> RetrySettings:
    config = client._config
    fixed = str(getattr(config.retry_mode, "value", config.retry_mode)).lower() == "fixed"
    return RetrySettings(config.retry_total, config.retry_backoff_factor, config.retry_backoff_max, fixed)


def disable_retries(sender: Any) -> Any:
    """The same sender, which tries once: its pauses cannot be cut short from outside, ours can."""
    sender._config.retry_total = 0
    sender._error_policy.total_retries = 0
    return sender


def is_retryable(error: BaseException) -> bool:
    """The SDK's own opinion."""
    return bool(getattr(error, "_retryable", False))


# --- ending a connection from outside --------------------------------------------------------------------------------


def refuse_calls(sender: Any) -> None:
    """The sender takes no other call, and makes no other try, though it is not closed yet."""
    sender._shutdown.set()


def interrupt(sender: Any) -> None:
    """Whatever the thread of a sync sender waits for, its socket or a token, ends with an error at once."""
    if isinstance(sender._credential, SenderCredential):
        sender._credential.give_up()
    transport = getattr(getattr(sender._handler, "_connection", None), "_transport", None)
    found = getattr(transport, "sock", None)
    found = getattr(found, "sock", found)  # a WebSocket holds the socket
    if isinstance(found, socket.socket):
        # The socket's own method: that of a TLS socket would take its state from under the reader.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(found, socket.SHUT_RDWR)


def interrupt_at_deadline(sender: Any) -> None:
    """`interrupt`, at the deadline of the call under way."""
    sender.given_up = True
    interrupt(sender)


def was_interrupted_at_deadline(sender: Any) -> bool:
    return getattr(sender, "given_up", False)


def abort_connection(sender: Any) -> None:
    """An aio sender's socket is closed without a word to the other end."""
    transport = getattr(getattr(sender._handler, "_connection", None), "_transport", None)
    writer = getattr(transport, "writer", None)
    if writer is not None:
        try:
            writer.transport.abort()
        except RuntimeError:
            # Its event loop is closed. This ends the connection; the garbage collector closes the descriptor.
            with contextlib.suppress(OSError):
                writer.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
