"""Connections that are refused, whatever they ask for: the peer is told why, in its protocol, and let go.

They are for peers that come when all connections or file descriptors are taken.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from twinbus.amqp.connection import Connection
from twinbus.amqp.events import Opened
from twinbus.amqp.limits import KIB, LimitExceededError, Limits
from twinbus.namespace.front.channel import Channel
from twinbus.namespace.front.http_messages import Request, Response, error

_LIMITS = Limits(max_frame_size=64 * KIB, max_sessions=1, attach_bytes=64 * KIB, partial_bytes=0)


class RefusedAmqp:
    """Answers the peer's open with open and close."""

    def __init__(self, name: str, channel: Channel, refusal: LimitExceededError) -> None:
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


class RefusedHttp:
    """Answers every request with 503."""

    def __init__(self, refusal: LimitExceededError) -> None:
        self._refusal = refusal

    async def handle(self, request: Request) -> Response:
        headers = {"Retry-After": "5", "Connection": "close"}
        return error(HTTPStatus.SERVICE_UNAVAILABLE, self._refusal.description, headers)
