"""One socket with one AMQP connection on it: bytes to the core, its events to the attachments, its bytes out.

Knows sessions only by who attached on them (`LinkSession`). Tokens, entities and reconnecting are not its affair.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, assert_never, cast

from twinbus.amqp import (
    Connection,
    ConnectionClosed,
    ConnectionEvent,
    Delivered,
    Disposed,
    Error,
    LinkAccepted,
    LinkAttached,
    LinkDetached,
    LinkFlowed,
    Opened,
    SaslReceived,
    SessionBegun,
    SessionEnded,
)
from twinbus.connect.errors import ConnectionClosedError, ServiceBusConnectionError, ServiceBusError, error_for

if TYPE_CHECKING:
    from twinbus.connect.link_session import LinkSession

MUCH_BYTES: Final = 256 * 1024  # a caller that never pauses meets the socket's back-pressure here
LAST_WORDS_SECONDS: Final = 5.0  # a peer that does not read what is left is cut off then


def peer_error(error: Error | None, otherwise: str, entity: str | None = None) -> ServiceBusError:
    """What the peer said when it ended a link, a session or the connection."""
    if error is None:
        return ServiceBusConnectionError(otherwise, entity=entity)
    return error_for(error.condition, error.description or otherwise, entity=entity)


class AmqpTransport(asyncio.Protocol):
    """Open until `error` is set. `is_writable` is false while the peer does not read fast enough."""

    def __init__(self, core: Connection, peer: str) -> None:
        self.core = core
        self.loop = asyncio.get_running_loop()
        self.peer = peer
        self.error: ServiceBusError | None = None
        self.is_writable = True
        self.opened: asyncio.Future[None] = self.loop.create_future()
        self.lost: asyncio.Future[None] = self.loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._attachments: dict[LinkSession, None] = {}
        self._when_lost: list[Callable[[], None]] = []
        self._waiting_to_write: deque[asyncio.Future[None]] = deque()
        self._flushing = False
        self._unflushed = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._last_words: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self.error is None and self.opened.done()

    # --- asyncio.Protocol --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._flush()
        self._arm()

    def data_received(self, data: bytes) -> None:
        for event in self.core.receive(data, self.loop.time()):
            self._handle(event)
        self._flush()
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        cause = f": {exc}" if exc is not None else ""
        self._fail(ServiceBusConnectionError(f"the connection to {self.peer} broke{cause}"))
        if self._last_words is not None:
            self._last_words.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        while self._waiting_to_write:
            waiter = self._waiting_to_write.popleft()
            if not waiter.done():
                waiter.set_result(None)

    # --- for the attachments -----------------------------------------------------------------------------------

    def add(self, attachment: LinkSession) -> None:
        self._attachments[attachment] = None

    def remove(self, attachment: LinkSession) -> None:
        self._attachments.pop(attachment, None)

    def when_lost(self, call: Callable[[], None]) -> None:
        self._when_lost.append(call)

    def flush_soon(self, size: int = 0) -> None:
        """Send what is there at the end of this turn of the loop, all in one write; much of it, at once."""
        self._unflushed += size
        if self._unflushed > MUCH_BYTES:
            self._flush()
        elif not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    async def writable(self) -> None:
        while not self.is_writable and self.error is None:
            waiter = self.loop.create_future()
            self._waiting_to_write.append(waiter)
            await waiter

    # --- the end -----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Says close, and waits until the peer has answered and the socket is gone. The caller bounds the wait."""
        if self.error is None:
            self._fail(ConnectionClosedError("the connection was closed by its owner"))
            self.core.close()
            self._flush()
        if self._transport is not None:
            await asyncio.shield(self.lost)

    def abort(self, error: ServiceBusError) -> None:
        """No more words: whatever waits fails now."""
        self._fail(error)
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: ServiceBusError) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._timer is not None:
            self._timer.cancel()
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # whoever waited for it may have given up
        for attachment in list(self._attachments):
            attachment.fail(error)
        self._attachments.clear()
        for call in self._when_lost:
            call()
        self.resume_writing()

    # --- the core ----------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._flushing = False
        self._unflushed = 0
        transport = self._transport
        if transport is None:
            return
        parts = self.core.data_to_send()
        if parts and not transport.is_closing():
            transport.writelines(parts)
        if self.core.is_closed and self._last_words is None:
            transport.close()
            self._last_words = self.loop.call_later(LAST_WORDS_SECONDS, transport.abort)

    def _arm(self) -> None:
        at = self.core.next_timer()
        if at is None or self.error is not None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self.loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        for event in self.core.handle_timer(self.loop.time()):
            # Whatever its condition, it is our own finding here: the peer is slow, silent or gone.
            said = event.error.description if isinstance(event, ConnectionClosed) and event.error else None
            self._fail(ServiceBusConnectionError(f"{self.peer}: {said or 'the peer is gone'}"))
        self._flush()
        self._arm()

    def _handle(self, event: ConnectionEvent) -> None:
        match event:
            case Delivered():
                event.link.session.context.delivered(event)
            case Disposed():
                event.session.context.disposed(event)
            case LinkFlowed():
                event.link.session.context.flowed(event.link)
            case LinkAccepted():
                event.link.session.context.accepted(event.link)
            case LinkDetached():
                event.link.session.context.detached(event.link, event.error)
            case SessionEnded():
                event.session.context.ended(event.error)
            case Opened():
                if not self.opened.done():
                    self.opened.set_result(None)
            case ConnectionClosed():
                self._fail(peer_error(event.error, f"{self.peer} closed the connection"))
            case LinkAttached():
                event.link.refuse(Error("amqp:not-allowed", "this client takes no links"))
            case SessionBegun() | SaslReceived():
                pass
            case _:
                assert_never(event)
