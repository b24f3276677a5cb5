"""One accepted connection: tells AMQP, HTTP and TLS (with either inside) apart by the first bytes."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from http import HTTPStatus
from typing import Protocol, cast

from twinbus.amqp import KIB, Connection, LimitExceededError, Limits, Opened
from twinbus.namespace.front.amqp_connection import AmqpConnection
from twinbus.namespace.front.byte_stream import ByteStream, HandshakeTooLargeError, TlsLayer
from twinbus.namespace.front.connection_faults import ConnectionFaults, FaultyHttpHandler
from twinbus.namespace.front.context import NamespaceContext
from twinbus.namespace.front.http_connection import HttpConnection, HttpRequestHandler
from twinbus.namespace.front.http_messages import HttpRequest, HttpResponse, error

_log = logging.getLogger(__name__)

# A peer that connects and does not say what it speaks is let go. The TLS handshake is part of it.
_SILENT_SECONDS = 30.0
# A peer that is refused has so long to say what it speaks and to be told why.
_REFUSED_SECONDS = 5.0
# Faults on connecting wait this long for the first words, which may be a request to lift them.
_FIRST_WORDS_SECONDS = 0.2
_TLS_HANDSHAKE = 0x16
_AMQP = b"AMQP"


class ProtocolHandler(Protocol):
    """A protocol on a stream."""

    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool: ...
    def connection_lost(self) -> None: ...
    def shut_down(self) -> None: ...
    def evict(self, exceeded: LimitExceededError) -> None: ...


class AcceptedConnection(asyncio.Protocol):
    """One accepted connection. With `refusal` the peer is told why it cannot be served, and nothing else."""

    def __init__(self, namespace: NamespaceContext, refusal: LimitExceededError | None = None) -> None:
        self._namespace = namespace
        self._refusal = refusal
        self._admission = ConnectionFaults(namespace.faults, self._speak_again)
        self._first = b""
        self._has_spoken = False
        self._speaks_amqp = False
        self._handler: ProtocolHandler | None = None
        self._protocol = ""
        self._waiting: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._account = self._namespace.resources.open(self._evict_soon)
        self.stream = ByteStream(self._transport, self._is_silenced, self._account)
        self._namespace.connections.add(self)
        if self._refusal is not None:
            self._account.close()
            self._patience = self._loop.call_later(_REFUSED_SECONDS, self._transport.abort)
            return
        self._patience = self._loop.call_later(_SILENT_SECONDS, self._lose_patience)
        if self._namespace.faults.active:
            self._loop.call_later(_FIRST_WORDS_SECONDS, self._strike_if_silent)

    def data_received(self, data: bytes) -> None:
        if self.stream.is_refused:
            self.stream.discard(len(data))
            return
        self._has_spoken = True
        if self._waiting or self._is_silenced():
            self._waiting.append(data)
            self._account.hold("bytes held by a fault", sum(map(len, self._waiting)))
            self.stream.pause_reading("fault")
            return
        try:
            self._hear(data)
        except ssl.SSLError as error:
            _log.info("TLS ended: %s", error.reason)
            if isinstance(error, HandshakeTooLargeError):
                self._namespace.limit_exceeded(error.exceeded)
            self.stream.write_raw(self.stream.tls.outgoing() if self.stream.tls else b"")
            self.stream.refuse()
        if self._namespace.runtime.group_commit.is_congested:
            self.stream.pause_reading("disk")
            self._namespace.runtime.group_commit.when_relieved(self._relieved)

    def eof_received(self) -> bool:
        if self._handler is None or self.stream.is_refused:
            return False
        self._admission.peer_ended()
        # Who asked over HTTP and then closed its side still reads the answer.
        return self._handler.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._patience.cancel()
        self._admission.end()
        self._namespace.connections.discard(self)
        if self._handler is not None:
            self._namespace.meter.connections.labels(self._protocol).dec()
            self._handler.connection_lost()
            self._handler = None  # they know each other: without this only the garbage collector frees them
        self._waiting.clear()
        self.stream.lost()
        self._account.close()
        self.gone.set_result(None)

    def pause_writing(self) -> None:
        self.stream.filled()

    def resume_writing(self) -> None:
        self.stream.emptied()

    @property
    def is_authenticated(self) -> bool:
        return self._account.is_authenticated

    @property
    def is_answering(self) -> bool:
        """Whether an HTTP request is being answered."""
        return isinstance(self._handler, HttpConnection) and self._handler.is_answering

    def faults_changed(self) -> None:
        self._admission.faults_changed()
        if isinstance(self._handler, AmqpConnection):
            self._handler.faults_changed()

    def shut_down(self) -> None:
        """The namespace stops: say so in the peer's protocol; what is to be read of its answer is read."""
        if self._handler is None:
            self._transport.abort()
        else:
            self._handler.shut_down()
            self.stream.resume_reading("stopping")

    # --- who speaks --------------------------------------------------------------------------------------------

    def _hear(self, data: bytes) -> None:
        if self.stream.tls is not None:
            data = self.stream.tls.receive(data)
            self.stream.write_raw(self.stream.tls.outgoing())
            self._account.hold("a TLS handshake", self.stream.tls.handshake_bytes)
        if self._handler is not None:
            if data:
                self._handler.data_received(data)
            return
        self._first += data
        if self._first and self.stream.tls is None and self._first[0] == _TLS_HANDSHAKE:
            first, self._first = self._first, b""
            self.stream.tls = TlsLayer(self._namespace.tls)
            self._hear(first)
        elif len(self._first) >= len(_AMQP):
            self._choose_speaker()

    def _choose_speaker(self) -> None:
        loopback = _is_loopback(self._transport.get_extra_info("peername"))
        here = self._transport.get_extra_info("sockname")
        arrived_at = here[0] if here else None
        self._speaks_amqp = self._first.startswith(_AMQP)
        if self._refusal is not None:
            if self._speaks_amqp:
                self._begin("amqp", AmqpRefuser(self._namespace.name, self.stream, self._refusal))
            else:
                self._begin("http", self._http_connection(HttpRefuser(self._refusal), loopback, arrived_at))
        elif not self._speaks_amqp:
            gate = FaultyHttpHandler(
                self._namespace.http, self._namespace.faults, self._admission, self._transport.abort
            )
            self._account.raise_limit(self._namespace.resources.limits.http_connection_memory)
            self._begin("http", self._http_connection(gate, loopback, arrived_at))
        elif not self._admission.ask():
            self._transport.abort()
        elif self._admission.is_held:
            self.stream.pause_reading("fault")
        else:
            amqp = AmqpConnection(
                self._namespace, self.stream, self._account, peer_is_loopback=loopback, arrived_at=arrived_at
            )
            self._begin("amqp", amqp)

    def _http_connection(self, answering: HttpRequestHandler, loopback: bool, arrived_at: str | None) -> HttpConnection:
        return HttpConnection(
            answering,
            self.stream,
            self._namespace.names,
            self._account,
            peer_is_loopback=loopback,
            arrived_at=arrived_at,
        )

    def _begin(self, protocol: str, speaker: ProtocolHandler) -> None:
        if self._refusal is None:
            self._patience.cancel()
        self._handler = speaker
        self._protocol = protocol if self.stream.tls is None else f"{protocol}+tls"
        self._namespace.meter.connections.labels(self._protocol).inc()
        first, self._first = self._first, b""
        speaker.data_received(first)

    # --- who may not -------------------------------------------------------------------------------------------

    def _is_silenced(self) -> bool:
        """HTTP is held request by request, and so is nobody before it is known that it is not HTTP."""
        return self._speaks_amqp and self._admission.is_held

    def _speak_again(self) -> None:
        """The silence is over: go on where it began."""
        if not self._speaks_amqp or self._transport.is_closing():
            return
        self.stream.speak_again()
        if self._handler is None:
            self._choose_speaker()
        waiting, self._waiting = self._waiting, []
        self._account.hold("bytes held by a fault", 0)
        for data in waiting:
            self.data_received(data)
        self.stream.resume_reading("fault")

    def _strike_if_silent(self) -> None:
        if not self._has_spoken and not self._admission.ask():
            self._transport.abort()

    def _lose_patience(self) -> None:
        if self._is_silenced() and not self._admission.is_lost:
            self._patience = self._loop.call_later(_SILENT_SECONDS, self._lose_patience)
        elif self._handler is None:
            text = f"A peer did not begin AMQP or HTTP within {_SILENT_SECONDS:g} s of connecting."
            self._namespace.limit_exceeded(LimitExceededError("first-bytes-seconds", text))
            self._transport.abort()

    def _evict_soon(self, exceeded: LimitExceededError) -> None:
        """Close this connection for what it holds: not at once, because it may be in the midst of something."""
        self._namespace.limit_exceeded(exceeded)
        self._loop.call_soon(self._evict, exceeded)

    def _evict(self, exceeded: LimitExceededError) -> None:
        if self._handler is None:
            self._transport.abort()
        else:
            self._handler.evict(exceeded)

    def _relieved(self) -> None:
        self.stream.resume_reading("disk")


def _is_loopback(peer: tuple[str, int] | None) -> bool:
    return peer is not None and ipaddress.ip_address(peer[0]).is_loopback


_LIMITS = Limits(max_frame_size=64 * KIB, max_sessions=1, attach_bytes=64 * KIB, partial_bytes=0)


class AmqpRefuser:
    """Answers the peer's open with open and close."""

    def __init__(self, name: str, stream: ByteStream, refusal: LimitExceededError) -> None:
        self._stream = stream
        self._refusal = refusal
        self._core = Connection.server(name, limits=_LIMITS, bare_allowed=True)

    def data_received(self, data: bytes) -> None:
        events = self._core.receive(data, asyncio.get_running_loop().time())
        if any(isinstance(event, Opened) for event in events):
            self._core.fail(self._refusal)
        if parts := self._core.data_to_send():
            self._stream.write(parts)
        if self._core.is_closed:
            self._stream.refuse()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self) -> None:
        self._core.drop()

    def shut_down(self) -> None:
        self._stream.abort()

    def evict(self, exceeded: LimitExceededError) -> None:
        self._stream.abort()


class HttpRefuser:
    """Answers every request with 503."""

    def __init__(self, refusal: LimitExceededError) -> None:
        self._refusal = refusal

    async def handle(self, request: HttpRequest) -> HttpResponse:
        headers = {"Retry-After": "5", "Connection": "close"}
        return error(HTTPStatus.SERVICE_UNAVAILABLE, self._refusal.description, headers)
