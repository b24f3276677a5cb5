"""A byte stream as connections see it, plain or inside TLS, and the TLS layer that hides between it and the socket.

A channel bounds what waits to be read by the peer: it charges unsent bytes to the connection's account, stops reading
from a peer that does not read, and cuts off a peer that never reads the rest after the connection was closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress

from twinbus.amqp import KIB, MIB, LimitExceededError
from twinbus.namespace.resources import ConnectionAccount

# What a black hole holds back of one connection before links are asked to wait, as for a peer that does not read.
_MOST_HELD_BYTES = 4 * MIB
# Unsent bytes from which links wait, and from which the peer's requests are not read any more.
_FULL_BYTES, _MOST_UNSENT_BYTES = 64 * KIB, 4 * MIB
_FULL_BYTES_BEFORE, _MOST_UNSENT_BYTES_BEFORE = 16 * KIB, 32 * KIB
# A peer that was sent everything, and one that was refused, has so long to read the rest.
_CLOSE_SECONDS = 10.0
_REFUSED_SECONDS = 2.0
_REFUSED_BYTES = 256 * KIB
# A ClientHello has some hundred bytes, some thousand with post-quantum keys. No client certificate is asked for.
_MOST_HANDSHAKE_BYTES = 32 * KIB
# A BIO keeps the memory of its largest content for good, so it is filled in pieces.
_PIECE = 16 * KIB


class HandshakeTooLargeError(ssl.SSLError):
    """The peer sent more than a TLS handshake takes."""

    def __init__(self) -> None:
        super().__init__("the TLS handshake is too large")
        self.reason = "HANDSHAKE_TOO_LARGE"
        self.exceeded = LimitExceededError(
            "tls-handshake-bytes",
            f"A TLS handshake takes at most {_MOST_HANDSHAKE_BYTES} bytes from the client.",
        )


class TlsLayer:
    """The server side of TLS on bytes: what arrives goes in, what is to be sent comes out."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._shaken = False
        self.handshake_bytes = 0

    def receive(self, data: bytes) -> bytes:
        """Plain bytes out of received ones. Raises ssl.SSLError when the peer does not speak TLS as it should."""
        plain = bytearray()
        for piece in _pieces(data):
            self._incoming.write(piece)
            try:
                if not self._shaken:
                    self._shake(len(piece))
                while chunk := self._tls.read(256 * KIB):
                    plain += chunk
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLZeroReturnError:
                break
        return bytes(plain)

    def send(self, data: bytes) -> list[bytes]:
        """Encrypted bytes out of plain ones."""
        encrypted = []
        for piece in _pieces(data):
            rest = memoryview(piece)
            while rest:
                rest = rest[self._tls.write(rest) :]
            encrypted.append(self._outgoing.read())
        return encrypted

    def end(self) -> None:
        """Tell the peer that nothing more comes (close_notify)."""
        with suppress(ssl.SSLError):  # it wants the peer's answer, which nobody waits for
            self._tls.unwrap()

    def outgoing(self) -> bytes:
        return self._outgoing.read()

    def _shake(self, size: int) -> None:
        self.handshake_bytes += size
        if self.handshake_bytes > _MOST_HANDSHAKE_BYTES:
            raise HandshakeTooLargeError
        self._tls.do_handshake()
        self._shaken = True
        self.handshake_bytes = 0


def _pieces(data: bytes) -> Iterator[bytes]:
    if len(data) <= _PIECE:
        yield data
        return
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]


def _never() -> bool:
    return False


class ByteStream:
    """Both directions of one connection. Keeps silent, without losing a byte, while the connection is held."""

    def __init__(
        self, transport: asyncio.Transport, is_silenced: Callable[[], bool], account: ConnectionAccount
    ) -> None:
        self._transport = transport
        self._is_silenced = is_silenced
        self._account = account
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._close_after: Callable[[], None] | None = None
        self._on_room: list[Callable[[], None]] = []
        self._is_filled = False
        self._paused_for: set[str] = set()
        self._end_timer: asyncio.TimerHandle | None = None
        self._most_unsent = _MOST_UNSENT_BYTES_BEFORE
        transport.set_write_buffer_limits(high=_FULL_BYTES_BEFORE)
        self.is_refused = False
        self._discarded = 0
        self.turns: Callable[[Callable[[], None]], None] | None = None
        """How a connection that has not authenticated waits for its turn."""
        self.tls: TlsLayer | None = None

    def authenticated(self) -> None:
        """The peer proved who it is: more may wait to be read by it."""
        self._most_unsent = _MOST_UNSENT_BYTES
        self._transport.set_write_buffer_limits(high=_FULL_BYTES)

    def write(self, parts: list[bytes]) -> None:
        """Send bytes, in order."""
        if self.tls is not None:
            try:
                parts = self.tls.send(b"".join(parts))
            except ssl.SSLError:  # the peer ended TLS
                self._transport.abort()
                return
        self._write(parts)

    def write_raw(self, data: bytes) -> None:
        """Send bytes that are not to be encrypted (again)."""
        if data:
            self._write([data])

    def close(self) -> None:
        """Close once all is sent; cut off a peer that does not read it in time."""
        if self._held or self._is_silenced():
            self._close_after = self.close
            return
        if not self._transport.is_closing():
            self._end_tls()
            self._end_within(_CLOSE_SECONDS)
            self._transport.close()

    def refuse(self) -> None:
        """Close after an error was sent. What the peer still sends is thrown away for a while.

        Closing at once would reset the connection, and the peer might never read the error.
        """
        if self._held or self._is_silenced():
            self._close_after = self.refuse
            return
        if self.is_refused or self._transport.is_closing():
            return
        self.is_refused = True
        self._end_tls()
        self._end_within(_REFUSED_SECONDS)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._paused_for.clear()
        self._transport.resume_reading()

    def discard(self, size: int) -> None:
        """A peer that was refused sent so many bytes more."""
        self._discarded += size
        if self._discarded > _REFUSED_BYTES:
            self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()

    def lost(self) -> None:
        """The transport is closed: lets go of everything, so that nothing waits for the garbage collector."""
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._held.clear()
        self._on_room.clear()
        self._close_after = None
        self._is_silenced = _never
        self.turns = None
        self.tls = None

    def speak_again(self) -> None:
        """The silence is over: send what was held back."""
        held, self._held = self._held, []
        self._held_bytes = 0
        if held and not self._transport.is_closing():
            self._transport.writelines(held)
        if self._close_after is not None:
            close_after, self._close_after = self._close_after, None
            close_after()
        elif not self._is_filled:
            self.emptied()

    def _write(self, parts: list[bytes]) -> None:
        # What was held goes first, also where the silence has ended and nobody has said so yet.
        if self._held or self._is_silenced():
            self._held += parts
            self._held_bytes += sum(map(len, parts))
            self._charge()
        elif not self._transport.is_closing() and not self.is_refused:
            self._transport.writelines(parts)
            if self._is_filled:
                self._charge()

    def _end_tls(self) -> None:
        if self.tls is not None:
            self.tls.end()
            self.write_raw(self.tls.outgoing())

    def _end_within(self, seconds: float) -> None:
        if self._end_timer is None:
            self._end_timer = asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    # --- back-pressure -----------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the peer has so much left to read that it should not be sent more."""
        return self._is_filled or self._held_bytes > _MOST_HELD_BYTES

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() + self._held_bytes

    def when_room(self, call: Callable[[], None]) -> None:
        """Run `call` when the peer has read enough to be sent more."""
        self._on_room.append(call)

    def filled(self) -> None:
        self._is_filled = True
        self._charge()

    def emptied(self) -> None:
        self._is_filled = False
        self._account.hold("unsent bytes", self._held_bytes)
        self.resume_reading("unsent")
        calls, self._on_room = self._on_room, []
        for call in calls:
            call()

    def take_turn(self, call: Callable[[], None]) -> None:
        """Run `call` when it is this connection's turn."""
        if self.turns is None:
            call()
        else:
            self.turns(call)

    def pause_reading(self, reason: str) -> None:
        """Stop reading until `resume_reading` was called for every reason there is."""
        if not self._transport.is_closing() and not self.is_refused:
            self._paused_for.add(reason)
            self._transport.pause_reading()

    def resume_reading(self, reason: str) -> None:
        if reason in self._paused_for:
            self._paused_for.discard(reason)
            if not self._paused_for and not self._transport.is_closing():
                self._transport.resume_reading()

    def _charge(self) -> None:
        unsent = self.unsent_bytes
        self._account.hold("unsent bytes", unsent)
        # A black hole over the namespace stops reading by itself.
        if unsent - self._held_bytes > self._most_unsent:
            self.pause_reading("unsent")
