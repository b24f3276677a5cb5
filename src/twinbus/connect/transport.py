"""A socket with an AMQP connection. Passes bytes of the socket to the AMQP core, and the core's events to handlers.

`AmqpTransport` is the asyncio protocol of the socket. The AMQP core (`twinbus.amqp.Connection`) does no I/O: it takes
the received bytes and the time, and returns events, bytes to send and the time of its next timer. Over a WebSocket, the
bytes are wrapped in messages (`websocket`) between core and socket. Each event belongs to an AMQP session; the
session's `context` is the `SessionHandler` that receives the event. Entities, tokens and reconnecting are not handled
in this module.

A transport ends once: `error` is set, and every registered handler fails with this error. After that the transport
sends only the close frame.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, assert_never, cast

from twinbus.amqp import (
    Connection,
    ConnectionClosed,
    ConnectionEvent,
    Delivered,
    Disposed,
    Error,
    Link,
    LinkAccepted,
    LinkAttached,
    LinkDetached,
    LinkFlowed,
    Opened,
    SaslReceived,
    Session,
    SessionBegun,
    SessionEnded,
)
from twinbus.connect.errors import (
    ConnectionClosedError,
    ServiceBusCommunicationError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusHandshakeError,
    error_for,
)
from twinbus.values import Condition

if TYPE_CHECKING:
    from twinbus.connect.websocket import WebSocketLayer, WebSocketRefusedError

# With more unsent bytes than this, `flush_soon` writes immediately instead of at the end of the event loop's iteration.
# So the socket's buffer limit also slows down a caller that never awaits.
FLUSH_BYTES: Final = 256 * 1024
# Seconds for the peer to read our close after the core has ended. After that time the socket is aborted.
CLOSE_SECONDS: Final = 5.0


def peer_error(error: Error | None, default_text: str, entity: str | None = None) -> ServiceBusError:
    """Return the error for a link, session or connection that the peer ended, with or without a reason."""
    if error is None:
        return ServiceBusConnectionError(default_text, entity=entity)
    return error_for(error.condition, error.description or default_text, entity=entity)


def _websocket_client() -> WebSocketLayer:
    from twinbus.connect.websocket import WebSocketLayer  # noqa: PLC0415 - wsproto may not be installed

    return WebSocketLayer.client()


def _handshake_error(peer: str, refused: WebSocketRefusedError) -> ServiceBusError:
    answer = f"{refused.status} {refused.text}".strip() if refused.status else refused.text
    text = f"{peer} did not accept a WebSocket: {answer}"
    # A server that is overloaded or starting may accept it later; any other answer needs a change by a person.
    return ServiceBusCommunicationError(text) if refused.status >= 500 else ServiceBusHandshakeError(text)


class SessionHandler(Protocol):
    """Receives the events of one AMQP session. `fail` is called when the transport ends."""

    def on_accepted(self, link: Link) -> None: ...
    def on_flow(self, link: Link) -> None: ...
    def on_delivery(self, event: Delivered) -> None: ...
    def on_disposition(self, event: Disposed) -> None: ...
    def on_detached(self, link: Link, error: Error | None) -> None: ...
    def on_ended(self, error: Error | None) -> None: ...
    def fail(self, error: ServiceBusError) -> None: ...


class AmqpTransport(asyncio.Protocol):
    """A socket with an AMQP connection, open until `error` is set.

    `is_writable` is false while the socket's write buffer is full, because the peer reads more slowly than we write.
    """

    def __init__(self, core: Connection, peer: str, *, websocket_host: str | None = None) -> None:
        """With `websocket_host`, the Host header of the handshake, AMQP travels in a WebSocket."""
        self.core = core
        self._websocket_host = websocket_host
        self._websocket = None if websocket_host is None else _websocket_client()
        self.loop = asyncio.get_running_loop()
        self.peer = peer
        self.error: ServiceBusError | None = None
        self.is_writable = True
        self.opened: asyncio.Future[None] = self.loop.create_future()
        self.lost: asyncio.Future[None] = self.loop.create_future()
        self._socket: asyncio.Transport | None = None
        self._handlers: dict[SessionHandler, None] = {}
        self._lost_callbacks: list[Callable[[], None]] = []
        self._write_waiters: deque[asyncio.Future[None]] = deque()
        self._flush_scheduled = False
        self._unflushed_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._abort_timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self.error is None and self.opened.done()

    # --- asyncio.Protocol --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        if self._websocket is not None and self._websocket_host is not None:
            self._socket.write(self._websocket.request(self._websocket_host))
        self._flush()
        self._schedule_timer()

    def data_received(self, data: bytes) -> None:
        if self._websocket is not None:
            data = self._unwrap_messages(self._websocket, data)
        for event in self.core.receive(data, self.loop.time()):
            self._handle(event)
        self._flush()
        self._schedule_timer()

    def _unwrap_messages(self, websocket: WebSocketLayer, data: bytes) -> bytes:
        """Return the content of WebSocket messages. If the WebSocket has ended, ends the transport."""
        from twinbus.connect.websocket import WebSocketRefusedError  # noqa: PLC0415 - as above

        assert self._socket is not None
        try:
            content = websocket.receive(data)
        except WebSocketRefusedError as refused:
            self.abort(_handshake_error(self.peer, refused))
            return b""
        if output := websocket.take_output():
            self._socket.write(output)
        if websocket.end is not None:
            for event in self.core.receive(content, self.loop.time()):
                self._handle(event)
            self.abort(ServiceBusConnectionError(f"{self.peer}: {websocket.end}"))
            return b""
        return content

    def eof_received(self) -> None:
        """Report a refused handshake whose response ends with the connection. asyncio then closes the socket."""
        if self._websocket is not None and not self._websocket.is_open:
            self._unwrap_messages(self._websocket, b"")

    def connection_lost(self, exc: Exception | None) -> None:
        cause = f": {exc}" if exc is not None else ""
        self._fail(ServiceBusConnectionError(f"the connection to {self.peer} broke{cause}"))
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        while self._write_waiters:
            waiter = self._write_waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    # --- for the sessions --------------------------------------------------------------------------------------

    def begin_session(self, handler: SessionHandler) -> Session:
        """Begin an AMQP session whose events go to `handler`. The end of the transport fails it until `remove`."""
        session = self.core.begin()
        session.context = handler
        self._handlers[handler] = None
        return session

    def remove(self, handler: SessionHandler) -> None:
        """Remove `handler` from the handlers that fail when the transport ends."""
        self._handlers.pop(handler, None)

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the transport ends."""
        self._lost_callbacks.append(callback)

    def flush_soon(self, size: int = 0) -> None:
        """Write all unsent bytes at the end of this iteration of the event loop, in one write.

        `size` is added to the number of unsent bytes. If they are more than FLUSH_BYTES, write now.
        """
        self._unflushed_bytes += size
        if self._unflushed_bytes > FLUSH_BYTES:
            self._flush()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self._flush)

    async def writable(self) -> None:
        """Wait until the socket takes more bytes, or the transport has ended."""
        while not self.is_writable and self.error is None:
            waiter = self.loop.create_future()
            self._write_waiters.append(waiter)
            await waiter

    # --- the end -----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Send close, and wait until the peer has answered and the socket is closed. The caller sets a timeout."""
        if self.error is None:
            self._fail(ConnectionClosedError("the connection was closed by its owner"))
            self.core.close()
            self._flush()
        if self._socket is not None:
            await asyncio.shield(self.lost)

    def abort(self, error: ServiceBusError) -> None:
        """Close the socket without an AMQP close and without waiting. Every call that waits fails with `error`."""
        self._fail(error)
        if self._socket is not None:
            self._socket.abort()

    def _fail(self, error: ServiceBusError) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._timer is not None:
            self._timer.cancel()
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # Marked as retrieved: otherwise asyncio logs an exception that no task awaits.
        for handler in list(self._handlers):
            handler.fail(error)
        self._handlers.clear()
        for callback in self._lost_callbacks:
            callback()
        self.resume_writing()

    # --- the AMQP core -----------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._unflushed_bytes = 0
        socket, websocket = self._socket, self._websocket
        if socket is None or (websocket is not None and not websocket.is_open):
            return
        parts = self.core.data_to_send()
        if parts and not socket.is_closing():
            socket.writelines(parts if websocket is None else websocket.send(parts))
        if self.core.is_closed and self._abort_timer is None:
            if websocket is not None and not socket.is_closing():
                socket.write(websocket.close())
            socket.close()
            self._abort_timer = self.loop.call_later(CLOSE_SECONDS, socket.abort)

    def _schedule_timer(self) -> None:
        at = self.core.next_timer()
        if at is None or self.error is not None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self.loop.call_at(at, self._timer_due)

    def _timer_due(self) -> None:
        self._timer = None
        for event in self.core.handle_timer(self.loop.time()):
            # A timer of the core ended the connection, because the peer was slow or silent. So the error is always a
            # ServiceBusConnectionError, whatever the condition is.
            reason = event.error.description if isinstance(event, ConnectionClosed) and event.error else None
            self._fail(ServiceBusConnectionError(f"{self.peer}: {reason or 'the peer is gone'}"))
        self._flush()
        self._schedule_timer()

    def _handle(self, event: ConnectionEvent) -> None:
        match event:
            case Delivered():
                event.link.session.context.on_delivery(event)
            case Disposed():
                event.session.context.on_disposition(event)
            case LinkFlowed():
                event.link.session.context.on_flow(event.link)
            case LinkAccepted():
                event.link.session.context.on_accepted(event.link)
            case LinkDetached():
                event.link.session.context.on_detached(event.link, event.error)
            case SessionEnded():
                event.session.context.on_ended(event.error)
            case Opened():
                if not self.opened.done():
                    self.opened.set_result(None)
            case ConnectionClosed():
                self._fail(peer_error(event.error, f"{self.peer} closed the connection"))
            case LinkAttached():
                event.link.refuse(Error(Condition.NOT_ALLOWED.value, "this client accepts no links"))
            case SessionBegun() | SaslReceived():
                pass
            case _:
                assert_never(event)
