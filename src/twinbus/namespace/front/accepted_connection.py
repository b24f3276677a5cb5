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
    """A protocol on a channel."""

    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool: ...
    def connection_lost(self) -> None: ...
    def shut_down(self) -> None: ...
    def evict(self, exceeded: LimitExceededError) -> None: ...


class AcceptedConnection(asyncio.Protocol):
    """One accepted connection. With `refusal` the peer is told why it cannot be served, and nothing else."""

    def __init__(self, site: NamespaceContext, refusal: LimitExceededError | None = None) -> None:
        self._site = site
        self._refusal = refusal
        self._admission = ConnectionFaults(site.faults, self._speak_again)
        self._first = b""
        self._has_spoken = False
        self._speaks_amqp = False
        self._speaker: ProtocolHandler | None = None
        self._protocol = ""
        self._waiting: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._account = self._site.resources.open(self._evict_soon)
        self.channel = ByteStream(self._transport, self._is_silenced, self._account)
        self._site.connections.add(self)
        if self._refusal is not None:
            self._account.close()
            self._patience = self._loop.call_later(_REFUSED_SECONDS, self._transport.abort)
            return
        self._patience = self._loop.call_later(_SILENT_SECONDS, self._lose_patience)
        if self._site.faults.active:
            self._loop.call_later(_FIRST_WORDS_SECONDS, self._strike_if_silent)

    def data_received(self, data: bytes) -> None:
        if self.channel.is_refused:
            self.channel.discard(len(data))
            return
        self._has_spoken = True
        if self._waiting or self._is_silenced():
            self._waiting.append(data)
            self._account.hold("bytes held by a fault", sum(map(len, self._waiting)))
            self.channel.pause_reading("fault")
            return
        try:
            self._hear(data)
        except ssl.SSLError as error:
            _log.info("TLS ended: %s", error.reason)
            if isinstance(error, HandshakeTooLargeError):
                self._site.refuse(error.exceeded)
            self.channel.write_raw(self.channel.tls.outgoing() if self.channel.tls else b"")
            self.channel.refuse()
        if self._site.runtime.group_commit.is_congested:
            self.channel.pause_reading("disk")
            self._site.runtime.group_commit.when_relieved(self._relieved)

    def eof_received(self) -> bool:
        if self._speaker is None or self.channel.is_refused:
            return False
        self._admission.peer_ended()
        # Who asked over HTTP and then closed its side still reads the answer.
        return self._speaker.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._patience.cancel()
        self._admission.end()
        self._site.connections.discard(self)
        if self._speaker is not None:
            self._site.meter.connections.labels(self._protocol).dec()
            self._speaker.connection_lost()
            self._speaker = None  # they know each other: without this only the garbage collector frees them
        self._waiting.clear()
        self.channel.lost()
        self._account.close()
        self.gone.set_result(None)

    def pause_writing(self) -> None:
        self.channel.filled()

    def resume_writing(self) -> None:
        self.channel.emptied()

    @property
    def is_authenticated(self) -> bool:
        return self._account.is_authenticated

    @property
    def is_answering(self) -> bool:
        """Whether an HTTP request is being answered."""
        return isinstance(self._speaker, HttpConnection) and self._speaker.is_answering

    def faults_changed(self) -> None:
        self._admission.faults_changed()
        if isinstance(self._speaker, AmqpConnection):
            self._speaker.faults_changed()

    def shut_down(self) -> None:
        """The namespace stops: say so in the peer's protocol; what is to be read of its answer is read."""
        if self._speaker is None:
            self._transport.abort()
        else:
            self._speaker.shut_down()
            self.channel.resume_reading("stopping")

    # --- who speaks --------------------------------------------------------------------------------------------

    def _hear(self, data: bytes) -> None:
        if self.channel.tls is not None:
            data = self.channel.tls.receive(data)
            self.channel.write_raw(self.channel.tls.outgoing())
            self._account.hold("a TLS handshake", self.channel.tls.handshake_bytes)
        if self._speaker is not None:
            if data:
                self._speaker.data_received(data)
            return
        self._first += data
        if self._first and self.channel.tls is None and self._first[0] == _TLS_HANDSHAKE:
            first, self._first = self._first, b""
            self.channel.tls = TlsLayer(self._site.tls)
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
                self._begin("amqp", AmqpRefuser(self._site.name, self.channel, self._refusal))
            else:
                self._begin("http", self._http_connection(HttpRefuser(self._refusal), loopback, arrived_at))
        elif not self._speaks_amqp:
            gate = FaultyHttpHandler(self._site.http, self._site.faults, self._admission, self._transport.abort)
            self._account.raise_limit(self._site.resources.limits.http_connection_memory)
            self._begin("http", self._http_connection(gate, loopback, arrived_at))
        elif not self._admission.ask():
            self._transport.abort()
        elif self._admission.is_held:
            self.channel.pause_reading("fault")
        else:
            amqp = AmqpConnection(
                self._site, self.channel, self._account, peer_is_loopback=loopback, arrived_at=arrived_at
            )
            self._begin("amqp", amqp)

    def _http_connection(self, answering: HttpRequestHandler, loopback: bool, arrived_at: str | None) -> HttpConnection:
        return HttpConnection(
            answering,
            self.channel,
            self._site.names,
            self._account,
            peer_is_loopback=loopback,
            arrived_at=arrived_at,
        )

    def _begin(self, protocol: str, speaker: ProtocolHandler) -> None:
        if self._refusal is None:
            self._patience.cancel()
        self._speaker = speaker
        self._protocol = protocol if self.channel.tls is None else f"{protocol}+tls"
        self._site.meter.connections.labels(self._protocol).inc()
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
        self.channel.speak_again()
        if self._speaker is None:
            self._choose_speaker()
        waiting, self._waiting = self._waiting, []
        self._account.hold("bytes held by a fault", 0)
        for data in waiting:
            self.data_received(data)
        self.channel.resume_reading("fault")

    def _strike_if_silent(self) -> None:
        if not self._has_spoken and not self._admission.ask():
            self._transport.abort()

    def _lose_patience(self) -> None:
        if self._is_silenced() and not self._admission.is_lost:
            self._patience = self._loop.call_later(_SILENT_SECONDS, self._lose_patience)
        elif self._speaker is None:
            text = f"A peer did not begin AMQP or HTTP within {_SILENT_SECONDS:g} s of connecting."
            self._site.refuse(LimitExceededError("first-bytes-seconds", text))
            self._transport.abort()

    def _evict_soon(self, exceeded: LimitExceededError) -> None:
        """Close this connection for what it holds: not at once, because it may be in the midst of something."""
        self._site.refuse(exceeded)
        self._loop.call_soon(self._evict, exceeded)

    def _evict(self, exceeded: LimitExceededError) -> None:
        if self._speaker is None:
            self._transport.abort()
        else:
            self._speaker.evict(exceeded)

    def _relieved(self) -> None:
        self.channel.resume_reading("disk")


def _is_loopback(peer: tuple[str, int] | None) -> bool:
    return peer is not None and ipaddress.ip_address(peer[0]).is_loopback


_LIMITS = Limits(max_frame_size=64 * KIB, max_sessions=1, attach_bytes=64 * KIB, partial_bytes=0)


class AmqpRefuser:
    """Answers the peer's open with open and close."""

    def __init__(self, name: str, channel: ByteStream, refusal: LimitExceededError) -> None:
        self._channel = channel
        self._refusal = refusal
        self._core = Connection.server(name, limits=_LIMITS, bare_allowed=True)

    def data_received(self, data: bytes) -> None:
        events = self._core.receive(data, asyncio.get_running_loop().time())
        if any(isinstance(event, Opened) for event in events):
            self._core.fail(self._refusal)
        if parts := self._core.data_to_send():
            self._channel.write(parts)
        if self._core.is_closed:
            self._channel.refuse()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self) -> None:
        self._core.drop()

    def shut_down(self) -> None:
        self._channel.abort()

    def evict(self, exceeded: LimitExceededError) -> None:
        self._channel.abort()


class HttpRefuser:
    """Answers every request with 503."""

    def __init__(self, refusal: LimitExceededError) -> None:
        self._refusal = refusal

    async def handle(self, request: HttpRequest) -> HttpResponse:
        headers = {"Retry-After": "5", "Connection": "close"}
        return error(HTTPStatus.SERVICE_UNAVAILABLE, self._refusal.description, headers)
