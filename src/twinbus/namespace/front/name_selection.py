"""Connections to a port that several namespaces share: the name that the peer uses chooses the namespace.

In HTTP and for a WebSocket the name is in the Host header, in AMQP in `hostname` of the peer's open. Until then the
connection belongs to no namespace. An open with an unknown name, or without a name, is answered, and every token on the
connection is refused with the reason: official clients report that at once, without a retry (decision 8).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from twinbus.amqp import Connection, ConnectionEvent, LimitExceededError, Opened
from twinbus.namespace.front.amqp_connection import server_core
from twinbus.namespace.front.backpressure import HELD_BY_CORE
from twinbus.namespace.front.byte_stream import ByteStream
from twinbus.namespace.front.context import NamespaceContext, SharedPort
from twinbus.namespace.front.http_connection import HttpRequestHandler
from twinbus.namespace.front.http_messages import HttpRequest, HttpResponse, error_response
from twinbus.namespace.resources import ConnectionAccount

_CONTAINER = "twinbus"


class AmqpSelector:
    """Speaks AMQP on one byte stream until the peer's open has arrived. Then calls `opened`, once."""

    def __init__(
        self,
        stream: ByteStream,
        account: ConnectionAccount,
        limit_exceeded: Callable[[LimitExceededError], None],
        authentication_seconds: float,
        opened: Callable[[AmqpSelector, list[ConnectionEvent], str | None], None],
    ) -> None:
        """`opened` gets the events so far and the hostname of the open. It takes over `core`."""
        self._stream = stream
        self._account = account
        self._limit_exceeded = limit_exceeded
        self._opened = opened
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.plain: bytes | None = None
        """The response of SASL PLAIN. It is checked when the namespace is known."""
        self.core: Connection = server_core(_CONTAINER, authentication_seconds, self._keep_plain)

    def data_received(self, data: bytes) -> None:
        events = self.core.receive(data, self._loop.time())
        opened = next((event for event in events if isinstance(event, Opened)), None)
        self._cancel_timer()
        if opened is not None and not self.core.is_closed:
            self._opened(self, events, opened.remote.hostname)
        else:
            self._flush()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self) -> None:
        self._cancel_timer()
        self.core.drop()

    def shut_down(self) -> None:
        self._stream.abort()

    def evict(self, exceeded: LimitExceededError) -> None:
        self.core.fail(exceeded)
        self.core.exceeded.clear()  # the caller has counted this refusal
        self._flush()

    def _keep_plain(self, mechanism: str, response: bytes) -> bool:
        if mechanism == "PLAIN":
            self.plain = response
        return True

    def _flush(self) -> None:
        if parts := self.core.data_to_send():
            self._stream.write(parts)
        for exceeded in self.core.exceeded:
            self._limit_exceeded(exceeded)
        self.core.exceeded.clear()
        self._account.hold(HELD_BY_CORE, self.core.held_bytes)
        if self.core.is_closed:
            self._stream.close_after_error()
        elif (at := self.core.next_timer()) is not None:
            self._timer = self._loop.call_at(at, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self.core.handle_timer(self._loop.time())
        self._flush()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class SharedHttpHandler:
    """Passes each request to the handler of the namespace that its Host header names."""

    def __init__(self, port: SharedPort, choose: Callable[[NamespaceContext], HttpRequestHandler]) -> None:
        self._port = port
        self._choose = choose

    async def handle(self, request: HttpRequest) -> HttpResponse:
        host = request.headers.get("host", "").strip()
        namespace = self._port.find(host)
        if namespace is None:
            return error_response(HTTPStatus.MISDIRECTED_REQUEST, self._port.names.refusal(host, None))
        return await self._choose(namespace).handle(request)
