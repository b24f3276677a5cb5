"""The one port of a namespace: tells AMQP, HTTP and TLS (with either inside) apart by the first bytes."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from typing import Protocol, cast

from twinbus.namespace.front.admission import Admission
from twinbus.namespace.front.amqp import AmqpConnection
from twinbus.namespace.front.channel import Channel, TlsLayer
from twinbus.namespace.front.http import HttpConnection
from twinbus.namespace.front.http_gate import HttpGate
from twinbus.namespace.front.site import Site

_log = logging.getLogger(__name__)

# A peer that connects and does not say what it speaks is let go.
_SILENT_SECONDS = 60.0
# Faults on connecting wait this long for the first words, which may be a request to lift them.
_FIRST_WORDS_SECONDS = 0.2
_TLS_HANDSHAKE = 0x16
_AMQP = b"AMQP"


class Speaker(Protocol):
    """A protocol on a channel."""

    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool: ...
    def connection_lost(self) -> None: ...
    def shut_down(self) -> None: ...


class PortConnection(asyncio.Protocol):
    """One accepted connection."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._admission = Admission(site.faults, self._speak_again)
        self._first = b""
        self._has_spoken = False
        self._speaks_amqp = False
        self._speaker: Speaker | None = None
        self._protocol = ""
        self._waiting: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.channel = Channel(self._transport, self._is_silenced)
        self._site.connections.add(self)
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._patience = self._loop.call_later(_SILENT_SECONDS, self._lose_patience)
        if self._site.faults.active:
            self._loop.call_later(_FIRST_WORDS_SECONDS, self._strike_if_silent)

    def data_received(self, data: bytes) -> None:
        self._has_spoken = True
        if self._waiting or self._is_silenced():
            self._waiting.append(data)
            self.channel.pause_reading()
            return
        try:
            self._hear(data)
        except ssl.SSLError as error:
            _log.info("TLS ended: %s", error.reason)
            self.channel.write_raw(self.channel.tls.outgoing() if self.channel.tls else b"")
            self._transport.close()
        if self._site.driver.committer.is_congested:
            self.channel.pause_reading()
            self._site.driver.committer.when_relieved(self.channel.resume_reading)

    def eof_received(self) -> bool:
        if self._speaker is None:
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
        self.gone.set_result(None)

    def pause_writing(self) -> None:
        self.channel.filled()

    def resume_writing(self) -> None:
        self.channel.emptied()

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
            self.channel.resume_reading()

    # --- who speaks --------------------------------------------------------------------------------------------

    def _hear(self, data: bytes) -> None:
        if self.channel.tls is not None:
            data = self.channel.tls.receive(data)
            self.channel.write_raw(self.channel.tls.outgoing())
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
        if not self._speaks_amqp:
            gate = HttpGate(self._site.http, self._site.faults, self._admission, self._transport.abort)
            speaker = HttpConnection(
                gate, self.channel, self._site.names, peer_is_loopback=loopback, arrived_at=arrived_at
            )
            self._begin("http", speaker)
        elif not self._admission.ask():
            self._transport.abort()
        elif self._admission.is_held:
            self.channel.pause_reading()
        else:
            connection = AmqpConnection(self._site, self.channel, peer_is_loopback=loopback, arrived_at=arrived_at)
            self._begin("amqp", connection)

    def _begin(self, protocol: str, speaker: Speaker) -> None:
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
        for data in waiting:
            self.data_received(data)
        self.channel.resume_reading()

    def _strike_if_silent(self) -> None:
        if not self._has_spoken and not self._admission.ask():
            self._transport.abort()

    def _lose_patience(self) -> None:
        if self._is_silenced() and not self._admission.is_lost:
            self._patience = self._loop.call_later(_SILENT_SECONDS, self._lose_patience)
        elif self._speaker is None:
            self._transport.abort()


def _is_loopback(peer: tuple[str, int] | None) -> bool:
    return peer is not None and ipaddress.ip_address(peer[0]).is_loopback
