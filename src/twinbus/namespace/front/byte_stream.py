"""The byte stream of one connection, plain or in TLS, and the TLS layer between the stream and the socket.

A stream may carry AMQP in WebSocket messages. The messages are made before the bytes are encrypted.

A stream limits the bytes that wait until the peer reads. It charges unsent bytes to the connection's account, stops
reading from a peer that leaves too many bytes unread, and aborts the connection if the peer does not read the remaining
bytes after the close.

While a fault holds the connection, the stream collects all bytes to send. It sends them when the fault has ended.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress

from twinbus.amqp import KIB, MIB, LimitExceededError
from twinbus.connect import WebSocketLayer
from twinbus.namespace.resources import ConnectionAccount

# Bytes held by a fault. With more bytes than this, `is_full` is True.
_MAX_HELD_BYTES = 4 * MIB
# Unsent bytes. Above the first limit the stream is full. Above the second, the stream stops reading from the peer. The
# first line is for connections that have authenticated, the second for the others.
_FULL_BYTES, _MAX_UNSENT_BYTES = 64 * KIB, 4 * MIB
_UNAUTHENTICATED_FULL_BYTES, _UNAUTHENTICATED_MAX_UNSENT_BYTES = 16 * KIB, 32 * KIB
# The time that the peer has to read the remaining bytes: after a close, and after a close with an error.
_CLOSE_SECONDS = 10.0
_CLOSE_AFTER_ERROR_SECONDS = 2.0
_MAX_DISCARDED_BYTES = 256 * KIB
# A ClientHello has hundreds of bytes, or thousands with post-quantum keys. The server requests no client certificate.
_MAX_HANDSHAKE_BYTES = 32 * KIB
# A MemoryBIO never frees the memory of its largest content, so data is written to the MemoryBIO in pieces of this size.
_PIECE = 16 * KIB


class HandshakeTooLargeError(ssl.SSLError):
    """The peer sent more bytes than a TLS handshake may have."""

    def __init__(self) -> None:
        super().__init__("the TLS handshake is too large")
        self.reason = "HANDSHAKE_TOO_LARGE"
        self.exceeded = LimitExceededError(
            "tls-handshake-bytes",
            f"A TLS handshake takes at most {_MAX_HANDSHAKE_BYTES} bytes from the client.",
        )


class TlsLayer:
    """The server side of TLS, without a socket."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._is_handshake_done = False
        self.handshake_bytes = 0

    def receive(self, data: bytes) -> bytes:
        """Decrypt received bytes. Raises ssl.SSLError if the peer does not follow the protocol."""
        plain = bytearray()
        for piece in _pieces(data):
            self._incoming.write(piece)
            try:
                if not self._is_handshake_done:
                    self._continue_handshake(len(piece))
                while chunk := self._tls.read(256 * KIB):
                    plain += chunk
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLZeroReturnError:
                break
        return bytes(plain)

    def send(self, data: bytes) -> list[bytes]:
        """Encrypt bytes."""
        encrypted = []
        for piece in _pieces(data):
            rest = memoryview(piece)
            while rest:
                rest = rest[self._tls.write(rest) :]
            encrypted.append(self._outgoing.read())
        return encrypted

    def end(self) -> None:
        """Produce a close_notify alert. `outgoing` returns its bytes."""
        with suppress(ssl.SSLError):  # unwrap raises because the peer has not answered; the answer is not needed
            self._tls.unwrap()

    def outgoing(self) -> bytes:
        """Return the bytes of handshake messages and alerts that must be sent to the peer."""
        return self._outgoing.read()

    def _continue_handshake(self, size: int) -> None:
        self.handshake_bytes += size
        if self.handshake_bytes > _MAX_HANDSHAKE_BYTES:
            raise HandshakeTooLargeError
        self._tls.do_handshake()
        self._is_handshake_done = True
        self.handshake_bytes = 0


def _pieces(data: bytes) -> Iterator[bytes]:
    if len(data) <= _PIECE:
        yield data
        return
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]


class ByteStream:
    """Both directions of one connection."""

    def __init__(self, transport: asyncio.Transport, is_held: Callable[[], bool], account: ConnectionAccount) -> None:
        """`is_held` returns whether a fault holds the connection."""
        self._transport = transport
        self._is_held = is_held
        self._account = account
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._close_when_released: Callable[[], None] | None = None
        self._on_room: list[Callable[[], None]] = []
        self._is_buffer_full = False
        self._paused_for: set[str] = set()
        self._abort_timer: asyncio.TimerHandle | None = None
        self._max_unsent = _UNAUTHENTICATED_MAX_UNSENT_BYTES
        transport.set_write_buffer_limits(high=_UNAUTHENTICATED_FULL_BYTES)
        self.is_discarding = False
        """Whether received bytes are discarded, because an error was sent and the connection is being closed."""
        self._discarded = 0
        self.wait_for_turn: Callable[[Callable[[], None]], None] | None = None
        """Calls its argument when it is the turn of this connection (see `listener`). None if there are no turns."""
        self.tls: TlsLayer | None = None
        self.websocket: WebSocketLayer | None = None

    def authenticated(self) -> None:
        """Raise the limits of unsent bytes, because a token or key of the peer was accepted."""
        self._max_unsent = _MAX_UNSENT_BYTES
        self._transport.set_write_buffer_limits(high=_FULL_BYTES)

    # --- writing -------------------------------------------------------------------------------------------------

    def write(self, parts: list[bytes]) -> None:
        """Send bytes, in order. On a WebSocket, send them in messages."""
        if self.websocket is not None:
            parts = self.websocket.send(parts)
        self.write_outside_messages(parts)

    def write_outside_messages(self, parts: list[bytes]) -> None:
        """Send bytes, in order, that are no content of a WebSocket message, such as a frame of the WebSocket itself."""
        if self.tls is not None:
            try:
                parts = self.tls.send(b"".join(parts))
            except ssl.SSLError:  # the peer ended TLS
                self._transport.abort()
                return
        self._write(parts)

    def write_raw(self, data: bytes) -> None:
        """Send bytes without encrypting them."""
        if data:
            self._write([data])

    def _write(self, parts: list[bytes]) -> None:
        # Held bytes go first, also if the fault has ended and `send_held` was not called yet.
        if self._held or self._is_held():
            self._held += parts
            self._held_bytes += sum(map(len, parts))
            self._charge()
        elif not self._transport.is_closing() and not self.is_discarding:
            self._transport.writelines(parts)
            if self._is_buffer_full:
                self._charge()

    def send_held(self) -> None:
        """Send the bytes that a fault held. Called when the fault has ended."""
        held, self._held = self._held, []
        self._held_bytes = 0
        if held and not self._transport.is_closing():
            self._transport.writelines(held)
        if self._close_when_released is not None:
            close, self._close_when_released = self._close_when_released, None
            close()
        elif not self._is_buffer_full:
            self.buffer_drained()

    # --- closing -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close after all bytes were sent. Aborts if the peer does not read them within `_CLOSE_SECONDS`."""
        if self._held or self._is_held():
            self._close_when_released = self.close
            return
        if not self._transport.is_closing():
            self._end_layers()
            self._abort_after(_CLOSE_SECONDS)
            self._transport.close()

    def close_after_error(self) -> None:
        """Close after an error was sent. For `_CLOSE_AFTER_ERROR_SECONDS`, bytes of the peer are read and discarded.

        A close without this delay would reset the connection, and the peer might never read the error.
        """
        if self._held or self._is_held():
            self._close_when_released = self.close_after_error
            return
        if self.is_discarding or self._transport.is_closing():
            return
        self._end_layers()
        self.is_discarding = True
        self._abort_after(_CLOSE_AFTER_ERROR_SECONDS)
        if self._transport.can_write_eof():
            try:
                self._transport.write_eof()
            except OSError:  # the peer has reset the connection, and nobody has read that yet
                self._transport.abort()
                return
        self._paused_for.clear()
        self._transport.resume_reading()

    def discard(self, size: int) -> None:
        """Count received bytes that were discarded. Aborts after more than `_MAX_DISCARDED_BYTES`."""
        self._discarded += size
        if self._discarded > _MAX_DISCARDED_BYTES:
            self._transport.abort()

    def abort(self) -> None:
        """Close now, without sending the bytes that wait."""
        self._transport.abort()

    def connection_lost(self) -> None:
        """Release all objects that the stream refers to, because the transport is closed.

        Otherwise a reference cycle would keep them in memory until the garbage collector runs.
        """
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self._held.clear()
        self._on_room.clear()
        self._close_when_released = None
        self._is_held = _never
        self.wait_for_turn = None
        self.tls = self.websocket = None

    def _end_layers(self) -> None:
        """Send the close of the WebSocket and the end of TLS, as far as the connection uses them."""
        if self.websocket is not None and (closing := self.websocket.close()):
            self.write_outside_messages([closing])
        if self.tls is not None:
            self.tls.end()
            self.write_raw(self.tls.outgoing())

    def _abort_after(self, seconds: float) -> None:
        if self._abort_timer is None:
            self._abort_timer = asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    # --- back-pressure -------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether callers must write no more until the peer has read some of the bytes that wait."""
        return self._is_buffer_full or self._held_bytes > _MAX_HELD_BYTES

    @property
    def unsent_bytes(self) -> int:
        """Bytes in the socket's buffer, and bytes that a fault holds."""
        return self._transport.get_write_buffer_size() + self._held_bytes

    def when_room(self, call: Callable[[], None]) -> None:
        """Call `call` once, when the stream is not full any more."""
        self._on_room.append(call)

    def buffer_full(self) -> None:
        """Note that the socket's buffer has reached its limit."""
        self._is_buffer_full = True
        self._charge()

    def buffer_drained(self) -> None:
        """Note that the socket's buffer has room again, and make the calls that `when_room` registered."""
        self._is_buffer_full = False
        self._account.hold("unsent bytes", self._held_bytes)
        self.resume_reading("unsent")
        calls, self._on_room = self._on_room, []
        for call in calls:
            call()

    def take_turn(self, call: Callable[[], None]) -> None:
        """Call `call` when it is this connection's turn. An authenticated connection does not wait for turns."""
        if self.wait_for_turn is None:
            call()
        else:
            self.wait_for_turn(call)

    def pause_reading(self, reason: str) -> None:
        """Stop reading until `resume_reading` was called for every reason."""
        if not self._transport.is_closing() and not self.is_discarding:
            self._paused_for.add(reason)
            self._transport.pause_reading()

    def resume_reading(self, reason: str) -> None:
        """Remove a reason to pause. Reading continues when no reason is left."""
        if reason in self._paused_for:
            self._paused_for.discard(reason)
            if not self._paused_for and not self._transport.is_closing():
                self._transport.resume_reading()

    def _charge(self) -> None:
        unsent = self.unsent_bytes
        self._account.hold("unsent bytes", unsent)
        # Bytes held by a fault are left out: while a fault holds the connection, reading is paused for that reason.
        if unsent - self._held_bytes > self._max_unsent:
            self.pause_reading("unsent")


def _never() -> bool:
    return False
