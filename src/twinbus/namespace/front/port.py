"""The one port of a namespace: tells AMQP, HTTP and TLS (with either inside) apart by the first bytes."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import signal
import ssl
from typing import Protocol, cast

from twinbus.namespace.faults import Fault, FaultKind, Point
from twinbus.namespace.front.amqp import AmqpConnection
from twinbus.namespace.front.channel import Channel, TlsLayer
from twinbus.namespace.front.http import HttpConnection
from twinbus.namespace.front.site import Site

_log = logging.getLogger(__name__)

# A peer that connects and does not say what it speaks is let go.
_SILENT_SECONDS = 60.0
_TLS_HANDSHAKE = 0x16
# A peer that is refused and says nothing is refused all the same, a moment later.
_REFUSAL_SECONDS = 0.2
_FAULTS_REQUEST = re.compile(rb"[A-Z]+ /(?:\$|%24)faults[/? ]")


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
        self._first = b""
        self._speaker: Speaker | None = None
        self._protocol = ""
        self._waiting: list[bytes] = []
        self._struck: Fault | None = None
        self._for_faults = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.channel = Channel(self._transport, self._is_silenced)
        self._site.connections.add(self)
        self._patience = asyncio.get_running_loop().call_later(_SILENT_SECONDS, self._lose_patience)
        if self._site.faults.active:
            self._suffer(self._site.faults.strike(Point.CONNECT))

    def data_received(self, data: bytes) -> None:
        if self._speaker is None and not self._first and not self._waiting:
            self._for_faults = _FAULTS_REQUEST.match(data) is not None
        if self._is_refused():
            self._transport.abort()
            return
        if self._is_silenced():
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
        # Who asked over HTTP and then closed its side still reads the answer.
        return self._speaker.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._patience.cancel()
        self._site.connections.discard(self)
        if self._speaker is not None:
            self._site.meter.connections.labels(self._protocol).dec()
            self._speaker.connection_lost()

    def pause_writing(self) -> None:
        self.channel.filled()

    def resume_writing(self) -> None:
        self.channel.emptied()

    def speak_again(self) -> None:
        """A black hole is over: go on where the silence began."""
        if self._is_silenced():
            return
        self.channel.speak_again()
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.data_received(data)
        self.channel.resume_reading()

    def shut_down(self) -> None:
        """The namespace stops: say so in the peer's protocol, then close."""
        if self._speaker is not None:
            self._speaker.shut_down()
        self.channel.close()

    def _suffer(self, fault: Fault | None) -> None:
        """A fault on connecting. It is carried out on the first bytes: a request to lift faults passes all of them."""
        if fault is None or fault.silences:
            return
        self._struck = fault
        match fault.kind:
            case FaultKind.REFUSE:
                asyncio.get_running_loop().call_later(_REFUSAL_SECONDS, self._refuse)
            case FaultKind.DELAY:
                asyncio.get_running_loop().call_later(fault.delay, self._suffered)
            case FaultKind.CRASH:
                os.kill(os.getpid(), signal.SIGKILL)

    def _suffered(self) -> None:
        self._struck = None
        self.speak_again()

    def _refuse(self) -> None:
        if not self._for_faults:
            self._transport.abort()

    def _is_refused(self) -> bool:
        return self._struck is not None and self._struck.kind is FaultKind.REFUSE and not self._for_faults

    def _is_silenced(self) -> bool:
        """By a black hole over the namespace, or by one that swallowed, or a delay that holds, this connection."""
        if self._for_faults:
            return False
        held = self._struck is not None and self._struck.kind in (FaultKind.BLACK_HOLE, FaultKind.DELAY)
        return held or self._site.faults.silenced

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
        elif len(self._first) >= len(b"AMQP"):
            self._choose_speaker()

    def _choose_speaker(self) -> None:
        self._patience.cancel()
        loopback = _is_loopback(self._transport.get_extra_info("peername"))
        inside = "+tls" if self.channel.tls is not None else ""
        if self._first.startswith(b"AMQP"):
            self._protocol = f"amqp{inside}"
            self._speaker = AmqpConnection(self._site, self.channel, peer_is_loopback=loopback)
        else:
            self._protocol = f"http{inside}"
            self._speaker = HttpConnection(self._site.http, self.channel, peer_is_loopback=loopback)
        self._site.meter.connections.labels(self._protocol).inc()
        first, self._first = self._first, b""
        self._speaker.data_received(first)

    def _lose_patience(self) -> None:
        if self._speaker is None and not self._is_silenced():
            self._transport.abort()


def _is_loopback(peer: tuple[str, int] | None) -> bool:
    return peer is not None and ipaddress.ip_address(peer[0]).is_loopback
