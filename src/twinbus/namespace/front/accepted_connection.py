"""One accepted connection: recognises AMQP, HTTP and TLS (with AMQP or HTTP inside) by the first bytes.

The connection reads bytes from the socket, decrypts them if the peer uses TLS, and passes them to a `ProtocolHandler`.
An HTTP request for the path of WebSockets turns the connection into an AMQP connection, whose bytes are in messages of
the WebSocket. From then on the limits and faults of AMQP connections apply.
The connection also does what is the same for every protocol: the limit of the time until the first bytes, faults on
connecting, refusal of peers when there are too many connections, and eviction when the process holds too much memory.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from dataclasses import replace
from http import HTTPStatus
from typing import Protocol, cast

from twinbus.amqp import KIB, Connection, ConnectionEvent, LimitExceededError, Limits, Opened
from twinbus.clock import SystemClock
from twinbus.connect import WebSocketLayer, WebSocketRefusedError, accept_websocket
from twinbus.namespace.faults import Faults
from twinbus.namespace.front.amqp_connection import AmqpConnection
from twinbus.namespace.front.byte_stream import ByteStream, HandshakeTooLargeError, TlsLayer
from twinbus.namespace.front.connection_faults import ConnectionFaults, FaultyHttpHandler
from twinbus.namespace.front.context import NamespaceContext, SharedPort
from twinbus.namespace.front.http_connection import HttpConnection, HttpRequestHandler
from twinbus.namespace.front.http_messages import HttpRequest, HttpResponse, error_response
from twinbus.namespace.front.name_selection import AmqpSelector, SharedHttpHandler
from twinbus.namespace.own_names import HostNames

_log = logging.getLogger(__name__)

# A peer must begin AMQP or HTTP within this time after connecting. The time includes the TLS handshake.
_FIRST_BYTES_SECONDS = 30.0
# A peer that is refused must begin its protocol within this time. The reason is sent to the peer in that protocol.
_REFUSED_SECONDS = 5.0
# A fault on connecting takes effect with the first bytes, or after this time if there are none. The first bytes may be
# an HTTP request that clears the fault.
_CONNECT_FAULT_SECONDS = 0.2
_TLS_HANDSHAKE = 0x16
_AMQP = b"AMQP"
# What a peer may send on a WebSocket until a token was accepted: bytes, framing included, and frames. The limit on the
# bytes inside the messages (`amqp_connection`) does not count pings and empty messages. A frame of 6 bytes takes as
# much time as hundreds of bytes of AMQP.
_WEBSOCKET_BYTES, _WEBSOCKET_FRAMES = 256 * KIB, 2_000
_POLICY_VIOLATION = 1008
_REFUSAL_LIMITS = Limits(max_frame_size=64 * KIB, max_sessions=1, attach_bytes=64 * KIB, partial_bytes=0)


class ProtocolHandler(Protocol):
    """Handles the bytes of one connection in one protocol: AMQP or HTTP."""

    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool: ...
    def connection_lost(self) -> None: ...
    def shut_down(self) -> None: ...
    def evict(self, exceeded: LimitExceededError) -> None: ...


class AcceptedConnection(asyncio.Protocol):
    """One accepted connection. With a `refusal`, the peer gets nothing but an error with this reason."""

    def __init__(
        self,
        namespace: NamespaceContext,
        refusal: LimitExceededError | None = None,
        shared: SharedPort | None = None,
    ) -> None:
        """On a `shared` port, `namespace` stands in until the peer has named one (`name_selection`)."""
        self._namespace = namespace
        self._refusal = refusal
        self._shared = shared
        self._is_named = shared is None  # whether the namespace of the connection is known
        self._faults = ConnectionFaults(namespace.faults, self._fault_ended)
        self._first_bytes = b""
        self._has_received = False
        self._is_amqp = False
        self._websocket_bytes = 0
        self._waits_for_amqp = False  # a WebSocket is open, and no AMQP has come
        self._handler: ProtocolHandler | None = None
        self._protocol = ""
        self._held: list[bytes] = []  # received while a fault holds the connection
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()

    # --- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._account = self._namespace.resources.open(self._evict_soon)
        self.stream = ByteStream(self._transport, self._is_held, self._account)
        self._namespace.connections.add(self)
        if self._refusal is not None:
            self._account.close()
            self._timer = self._loop.call_later(_REFUSED_SECONDS, self._transport.abort)
            return
        self._timer = self._loop.call_later(_FIRST_BYTES_SECONDS, self._first_bytes_overdue)
        if self._namespace.faults.active:
            self._loop.call_later(_CONNECT_FAULT_SECONDS, self._trigger_connect_fault)

    def data_received(self, data: bytes) -> None:
        if self.stream.is_discarding:
            self.stream.discard(len(data))
            return
        self._has_received = True
        if self._held or self._is_held():
            self._held.append(data)
            self._account.hold("bytes held by a fault", sum(map(len, self._held)))
            self.stream.pause_reading("fault")
            return
        try:
            self._process(data)
        except ssl.SSLError as error:
            _log.info("TLS ended: %s", error.reason)
            if isinstance(error, HandshakeTooLargeError):
                self._namespace.limit_exceeded(error.exceeded)
            self.stream.write_raw(self.stream.tls.outgoing() if self.stream.tls else b"")
            self.stream.close_after_error()
        if self._namespace.runtime.group_commit.is_congested:
            self.stream.pause_reading("disk")
            self._namespace.runtime.group_commit.when_relieved(self._disk_relieved)

    def eof_received(self) -> bool:
        if self._handler is None or self.stream.is_discarding:
            return False
        self._faults.peer_sends_no_more()
        # An HTTP client that has closed its side still reads the answer.
        return self._handler.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._faults.connection_lost()
        self._namespace.connections.discard(self)
        if self._handler is not None:
            self._namespace.meter.connections.labels(self._protocol).dec()
            self._handler.connection_lost()
            self._handler = None  # breaks a reference cycle: the garbage collector seldom runs in this process
        self._held.clear()
        self.stream.connection_lost()
        self._account.close()
        self.gone.set_result(None)

    def pause_writing(self) -> None:
        self.stream.buffer_full()

    def resume_writing(self) -> None:
        self.stream.buffer_drained()

    # --- for the server and the listener -------------------------------------------------------------------------

    @property
    def is_authenticated(self) -> bool:
        """Whether a token or key of the peer was accepted."""
        return self._account.is_authenticated

    @property
    def is_answering(self) -> bool:
        """Whether an HTTP request is being answered."""
        return isinstance(self._handler, HttpConnection) and self._handler.is_answering

    def faults_changed(self) -> None:
        """Continue the connection and the operations that a fault held, if the fault has ended."""
        self._faults.faults_changed()
        if isinstance(self._handler, AmqpConnection):
            self._handler.faults_changed()

    def keys_changed(self, entity: str | None) -> None:
        """Detach the links whose key is no longer valid. `entity` is None for the keys of the namespace."""
        if isinstance(self._handler, AmqpConnection):
            self._handler.keys_changed(entity)

    def shut_down(self) -> None:
        """Close the connection as the peer's protocol demands, because the namespace stops. Reads the peer's answer."""
        if self._handler is None:
            self._transport.abort()
        else:
            self._handler.shut_down()
            self.stream.resume_reading("stopping")

    # --- protocol detection --------------------------------------------------------------------------------------

    def _process(self, data: bytes) -> None:
        if self.stream.tls is not None:
            data = self.stream.tls.receive(data)
            self.stream.write_raw(self.stream.tls.outgoing())
            self._account.hold("a TLS handshake", self.stream.tls.handshake_bytes)
        if self.stream.websocket is not None:
            data = self._unwrap_messages(self.stream.websocket, data)
        if self._handler is not None:
            if data:
                self._handler.data_received(data)
            return
        self._first_bytes += data
        if self._first_bytes and self.stream.tls is None and self._first_bytes[0] == _TLS_HANDSHAKE:
            first_bytes, self._first_bytes = self._first_bytes, b""
            self.stream.tls = TlsLayer(self._namespace.tls if self._shared is None else self._shared.tls)
            self._process(first_bytes)
        elif len(self._first_bytes) >= len(_AMQP):
            self._choose_handler()

    def _choose_handler(self) -> None:
        if self._shared is not None and self.stream.tls is None:
            _log.info("a connection without TLS was closed: this port takes only TLS")
            self._transport.abort()
            return
        self._is_amqp = self._first_bytes.startswith(_AMQP)
        if self._refusal is not None:
            if self._is_amqp:
                self._start("amqp", AmqpRefuser(self._namespace.name, self.stream, self._refusal))
            else:
                self._start("http", self._http_connection(HttpRefuser(self._refusal)))
        elif not self._is_amqp:
            handler: HttpRequestHandler = self._http_handler(self._namespace)
            if self._shared is not None:
                handler = SharedHttpHandler(self._shared, self._named_http_handler)
            self._account.set_limit(self._namespace.resources.limits.http_connection_memory)
            self._start("http", self._http_connection(handler))
        elif self._shared is not None and not self._is_named:
            seconds, exceeded = self._namespace.resources.limits.authentication_seconds, self._namespace.limit_exceeded
            selector = AmqpSelector(self.stream, self._account, exceeded, seconds, self._named_by_open)
            self._start("amqp", selector)
        elif not self._faults.may_connect():
            self._transport.abort()
        elif self._faults.is_held:
            self.stream.pause_reading("fault")
        else:
            self._start("amqp", self._amqp_connection())

    def _amqp_connection(self, core: Connection | None = None, names: HostNames | None = None) -> AmqpConnection:
        return AmqpConnection(
            self._namespace,
            self.stream,
            self._account,
            peer_is_loopback=self._peer_is_loopback,
            arrived_at=self._arrived_at,
            core=core,
            names=names,
        )

    def _http_connection(self, handler: HttpRequestHandler) -> HttpConnection:
        return HttpConnection(
            handler,
            self.stream,
            self._namespace.names if self._shared is None else self._shared.names,
            self._account,
            peer_is_loopback=self._peer_is_loopback,
            arrived_at=self._arrived_at,
            upgrade=self._upgrade if self._refusal is None else None,
        )

    def _http_handler(self, namespace: NamespaceContext) -> HttpRequestHandler:
        return FaultyHttpHandler(namespace.http, namespace.faults, self._faults, self._transport.abort)

    # --- a shared port -------------------------------------------------------------------------------------------

    def _named_http_handler(self, namespace: NamespaceContext) -> HttpRequestHandler:
        self._move_to(namespace)
        return self._http_handler(namespace)

    def _named_by_open(self, selector: AmqpSelector, events: list[ConnectionEvent], host_name: str | None) -> None:
        """Continue an AMQP connection whose open has arrived, in the namespace that the open names."""
        assert self._shared is not None, "only a shared port has names to choose from"
        # Where no namespace has the name, every token is refused with the reason. No fault may keep the reason back.
        self._move_to(self._shared.find(host_name) or replace(self._namespace, faults=Faults(SystemClock())))
        if not self._faults.may_connect():
            self._transport.abort()
            return
        amqp = self._amqp_connection(selector.core, self._shared.names)
        self._handler = amqp
        if self._faults.is_held:
            self.stream.pause_reading("fault")
        amqp.continue_with(events, selector.plain)

    def _move_to(self, namespace: NamespaceContext) -> None:
        """Make this a connection of `namespace`: its faults, its figures and its end are those of this namespace."""
        self._is_named = True
        if namespace is self._namespace:
            return
        self._faults.connection_lost()
        self._namespace.connections.discard(self)
        self._namespace.meter.connections.labels(self._protocol).dec()
        self._namespace = namespace
        self._faults = ConnectionFaults(namespace.faults, self._fault_ended)
        namespace.connections.add(self)
        namespace.meter.connections.labels(self._protocol).inc()

    # --- WebSocket -----------------------------------------------------------------------------------------------

    def _upgrade(self, headers: list[tuple[bytes, bytes]], target: bytes, following: bytes) -> HttpResponse | None:
        """Continue an HTTP connection as AMQP in a WebSocket. Returns the response if the handshake is refused."""
        if self._shared is not None:
            host = next((value.decode("latin-1").strip() for name, value in headers if name == b"host"), "")
            namespace = self._shared.find(host)
            if namespace is None:
                return error_response(HTTPStatus.MISDIRECTED_REQUEST, self._shared.names.refusal(host, None))
            self._move_to(namespace)
        try:
            websocket, response = accept_websocket(headers, target)
        except WebSocketRefusedError as refused:
            return error_response(refused.status, refused.text, dict(refused.headers))
        self._is_amqp = True  # the faults of AMQP connections apply, to the response already
        if not self._faults.may_connect():
            self._transport.abort()
            return None
        self.stream.write_outside_messages([response])
        self.stream.websocket = websocket
        self._account.set_limit(self._namespace.resources.limits.unauthenticated_connection_memory)
        self._namespace.meter.connections.labels(self._protocol).dec()
        amqp = self._amqp_connection()
        self._start("amqp+websocket", amqp)
        self._waits_for_amqp = True
        self._timer = self._loop.call_later(_FIRST_BYTES_SECONDS, self._first_bytes_overdue)
        if self._faults.is_held:
            self.stream.pause_reading("fault")
        if following and (content := self._unwrap_messages(websocket, following)):
            amqp.data_received(content)
        return None

    def _unwrap_messages(self, websocket: WebSocketLayer, data: bytes) -> bytes:
        """Return the content of WebSocket messages. Closes the stream if the WebSocket has ended."""
        if not self.is_authenticated:
            self._websocket_bytes += len(data)
            if (exceeded := self._exceeded_by(websocket)) is not None:
                self._namespace.limit_exceeded(exceeded)
                self.stream.write_outside_messages([websocket.close(_POLICY_VIOLATION, exceeded.description)])
                self.stream.close_after_error()
                return b""
        content = websocket.receive(data)
        if content and self._waits_for_amqp:
            self._waits_for_amqp = False
            self._timer.cancel()
        if output := websocket.take_output():
            self.stream.write_outside_messages([output])
        if websocket.end is not None:
            if content and self._handler is not None:
                self._handler.data_received(content)
            _log.info("WebSocket ended: %s", websocket.end)
            self.stream.close_after_error()
            return b""
        return content

    def _exceeded_by(self, websocket: WebSocketLayer) -> LimitExceededError | None:
        """Return an error if the peer has sent more than a WebSocket without a token may, otherwise None."""
        if self._websocket_bytes > _WEBSOCKET_BYTES:
            limit, most = "websocket-bytes", f"{_WEBSOCKET_BYTES} bytes"
        elif websocket.frames > _WEBSOCKET_FRAMES:
            limit, most = "websocket-frames", f"{_WEBSOCKET_FRAMES} frames"
        else:
            return None
        return LimitExceededError(limit, f"A WebSocket sends at most {most} until a token was accepted.")

    def _start(self, protocol: str, handler: ProtocolHandler) -> None:
        if self._refusal is None:
            self._timer.cancel()
        self._handler = handler
        self._protocol = protocol if self.stream.tls is None else f"{protocol}+tls"
        self._namespace.meter.connections.labels(self._protocol).inc()
        first_bytes, self._first_bytes = self._first_bytes, b""
        handler.data_received(first_bytes)

    @property
    def _peer_is_loopback(self) -> bool:
        peer = self._transport.get_extra_info("peername")
        return peer is not None and ipaddress.ip_address(peer[0]).is_loopback

    @property
    def _arrived_at(self) -> str | None:
        """The address of this end of the connection."""
        here = self._transport.get_extra_info("sockname")
        return here[0] if here else None

    # --- faults and limits ---------------------------------------------------------------------------------------

    def _is_held(self) -> bool:
        """Return whether a fault holds all bytes of the connection. For HTTP, a fault holds single requests instead."""
        return self._is_amqp and self._is_named and self._faults.is_held

    def _fault_ended(self) -> None:
        if not self._is_amqp or self._transport.is_closing():
            return
        self.stream.send_held()
        if self._handler is None:
            self._choose_handler()
        held, self._held = self._held, []
        self._account.hold("bytes held by a fault", 0)
        for data in held:
            self.data_received(data)
        self.stream.resume_reading("fault")

    def _trigger_connect_fault(self) -> None:
        if self._is_named and not self._has_received and not self._faults.may_connect():
            self._transport.abort()

    def _first_bytes_overdue(self) -> None:
        if self._is_held() and not self._faults.is_lost:
            self._timer = self._loop.call_later(_FIRST_BYTES_SECONDS, self._first_bytes_overdue)
        elif self._handler is None or self._waits_for_amqp:
            begin = "begin AMQP or HTTP" if self._handler is None else "begin AMQP in its WebSocket"
            text = f"A peer did not {begin} within {_FIRST_BYTES_SECONDS:g} s of connecting."
            self._namespace.limit_exceeded(LimitExceededError("first-bytes-seconds", text))
            self._transport.abort()

    def _evict_soon(self, exceeded: LimitExceededError) -> None:
        """Close this connection in the next turn of the event loop, because of the memory that the connection holds.

        This method does not close the connection itself, because its caller may be a method of the connection's handler
        that still uses the connection.
        """
        self._namespace.limit_exceeded(exceeded)
        self._loop.call_soon(self._evict, exceeded)

    def _evict(self, exceeded: LimitExceededError) -> None:
        if self._handler is None:
            self._transport.abort()
        else:
            self._handler.evict(exceeded)

    def _disk_relieved(self) -> None:
        self.stream.resume_reading("disk")


class AmqpRefuser:
    """Refuses an AMQP peer: answers its open with an open and a close that carries the reason."""

    def __init__(self, name: str, stream: ByteStream, refusal: LimitExceededError) -> None:
        self._stream = stream
        self._refusal = refusal
        self._core = Connection.server(name, limits=_REFUSAL_LIMITS, bare_allowed=True)

    def data_received(self, data: bytes) -> None:
        events = self._core.receive(data, asyncio.get_running_loop().time())
        if any(isinstance(event, Opened) for event in events):
            self._core.fail(self._refusal)
        if parts := self._core.data_to_send():
            self._stream.write(parts)
        if self._core.is_closed:
            self._stream.close_after_error()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self) -> None:
        self._core.drop()

    def shut_down(self) -> None:
        self._stream.abort()

    def evict(self, exceeded: LimitExceededError) -> None:
        self._stream.abort()


class HttpRefuser:
    """Refuses an HTTP peer: answers every request with 503."""

    def __init__(self, refusal: LimitExceededError) -> None:
        self._refusal = refusal

    async def handle(self, request: HttpRequest) -> HttpResponse:
        headers = {"Retry-After": "5", "Connection": "close"}
        return error_response(HTTPStatus.SERVICE_UNAVAILABLE, self._refusal.description, headers)
