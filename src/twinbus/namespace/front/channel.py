"""A byte stream as connections see it, plain or inside TLS, and the TLS layer that hides between it and the socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable


class TlsLayer:
    """The server side of TLS on bytes: what arrives goes in, what is to be sent comes out."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._shaken = False

    def receive(self, data: bytes) -> bytes:
        """Plain bytes out of received ones. Raises ssl.SSLError when the peer does not speak TLS as it should."""
        self._incoming.write(data)
        plain = bytearray()
        try:
            if not self._shaken:
                self._tls.do_handshake()
                self._shaken = True
            while chunk := self._tls.read(256 * 1024):
                plain += chunk
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return bytes(plain)

    def send(self, data: bytes) -> None:
        self._tls.write(data)

    def outgoing(self) -> bytes:
        return self._outgoing.read()


class Channel:
    """Writing side of one connection. Keeps silent, without losing a byte, while the namespace is black-holed."""

    def __init__(self, transport: asyncio.Transport, is_silenced: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_silenced = is_silenced
        self._held: list[bytes] = []
        self._close_after = False
        self._on_room: list[Callable[[], None]] = []
        self.tls: TlsLayer | None = None
        self.is_full = False

    def write(self, parts: list[bytes]) -> None:
        """Send bytes, in order."""
        if self.tls is not None:
            self.tls.send(b"".join(parts))
            self.write_raw(self.tls.outgoing())
        elif self._is_silenced():
            self._held += parts
        elif not self._transport.is_closing():
            self._transport.writelines(parts)

    def write_raw(self, data: bytes) -> None:
        """Send bytes that are not to be encrypted (again)."""
        if self._is_silenced():
            self._held.append(data)
        elif data and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close once all is sent."""
        if self._is_silenced():
            self._close_after = True
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def speak_again(self) -> None:
        """The black hole is over: send what was held back."""
        held, self._held = self._held, []
        if held and not self._transport.is_closing():
            self._transport.writelines(held)
        if self._close_after:
            self._transport.close()

    # --- back-pressure -----------------------------------------------------------------------------------------

    def when_room(self, call: Callable[[], None]) -> None:
        """Run `call` when the peer has read enough to be sent more."""
        self._on_room.append(call)

    def filled(self) -> None:
        self.is_full = True

    def emptied(self) -> None:
        self.is_full = False
        calls, self._on_room = self._on_room, []
        for call in calls:
            call()

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
