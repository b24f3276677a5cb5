"""A byte stream as connections see it, plain or inside TLS, and the TLS layer that hides between it and the socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress

# What a black hole holds back of one connection before links are asked to wait, as for a peer that does not read.
_MOST_HELD_BYTES = 4 * 1024 * 1024


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
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]

    def end(self) -> None:
        """Tell the peer that nothing more comes (close_notify)."""
        with suppress(ssl.SSLError):  # it wants the peer's answer, which nobody waits for
            self._tls.unwrap()

    def outgoing(self) -> bytes:
        return self._outgoing.read()


class Channel:
    """Writing side of one connection. Keeps silent, without losing a byte, while the connection is held."""

    def __init__(self, transport: asyncio.Transport, is_silenced: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_silenced = is_silenced
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._close_after = False
        self._on_room: list[Callable[[], None]] = []
        self._is_filled = False
        self.tls: TlsLayer | None = None

    def write(self, parts: list[bytes]) -> None:
        """Send bytes, in order."""
        if self.tls is not None:
            try:
                self.tls.send(b"".join(parts))
            except ssl.SSLError:  # the peer ended TLS
                self._transport.abort()
                return
            parts = [self.tls.outgoing()]
        self._write(parts)

    def write_raw(self, data: bytes) -> None:
        """Send bytes that are not to be encrypted (again)."""
        if data:
            self._write([data])

    def close(self) -> None:
        """Close once all is sent."""
        if self._held or self._is_silenced():
            self._close_after = True
            return
        if self.tls is not None and not self._transport.is_closing():
            self.tls.end()
            self.write_raw(self.tls.outgoing())
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def speak_again(self) -> None:
        """The silence is over: send what was held back."""
        held, self._held = self._held, []
        self._held_bytes = 0
        if held and not self._transport.is_closing():
            self._transport.writelines(held)
        if self._close_after:
            self.close()
        elif not self._is_filled:
            self.emptied()

    def _write(self, parts: list[bytes]) -> None:
        # What was held goes first, also where the silence has ended and nobody has said so yet.
        if self._held or self._is_silenced():
            self._held += parts
            self._held_bytes += sum(map(len, parts))
        elif not self._transport.is_closing():
            self._transport.writelines(parts)

    # --- back-pressure -----------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the peer has so much left to read that it should not be sent more."""
        return self._is_filled or self._held_bytes > _MOST_HELD_BYTES

    def when_room(self, call: Callable[[], None]) -> None:
        """Run `call` when the peer has read enough to be sent more."""
        self._on_room.append(call)

    def filled(self) -> None:
        self._is_filled = True

    def emptied(self) -> None:
        self._is_filled = False
        calls, self._on_room = self._on_room, []
        for call in calls:
            call()

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
