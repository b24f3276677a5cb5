"""A peer that speaks AMQP and is controlled by a test: it accepts tokens, grants credit, answers or stays silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from twinbus.amqp import (
    ACCEPTED,
    RECEIVER,
    SENDER,
    Connection,
    ConnectionEvent,
    Delivered,
    DeliveryState,
    Disposed,
    Error,
    Link,
    LinkAttached,
    LinkFlowed,
    Properties,
    Source,
    build_message,
    split_sections,
)
from twinbus.connect import ConnectionString
from twinbus.values import Int


@dataclass
class Peer:
    """One listening socket. `lines` has all connections to it. Tests change the other fields to control the peer."""

    port: int = 0
    lines: list[Line] = field(default_factory=list)
    credit: int = 100
    max_message_size: int | None = 10_000
    answers: bool = True  # deliveries are answered with `outcome`
    outcome: DeliveryState = field(default_factory=lambda: ACCEPTED)
    token_status: int = 202
    answers_requests: bool = True
    attach_error: Error | None = None
    tokens: list[str] = field(default_factory=list)  # the audience of each token put
    received: list[Delivered] = field(default_factory=list)
    settled: list[Disposed] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # operations requested from `$management`
    attaches: list[str] = field(default_factory=list)  # addresses
    notes: list[str] = field(default_factory=list)  # the test's own
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def endpoint(self) -> ConnectionString:
        return ConnectionString("127.0.0.1", self.port, "name", "key", emulator=True)

    @property
    def line(self) -> Line:
        return self.lines[-1]

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


class Line(asyncio.Protocol):
    """One connection to the peer."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.core = Connection.server("peer", idle_timeout=None)
        self.transport: asyncio.Transport | None = None
        self.is_frozen = False
        self._replies: dict[Any, Link] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.peer.lines.append(self)

    def data_received(self, data: bytes) -> None:
        if self.is_frozen:
            return
        for event in self.core.receive(data, 0.0):
            self._handle(event)
        self.flush()
        self.peer.changed.set()

    def flush(self) -> None:
        assert self.transport is not None
        self.transport.writelines(self.core.data_to_send())
        if self.core.is_closed:
            self.transport.close()

    def abort(self) -> None:
        assert self.transport is not None
        self.transport.abort()

    def link(self, address: str) -> Link:
        """Return the link that a client attached to an entity."""
        return next(link for link in self.core.links if _address(link) == address)

    def deliver(self, address: str, *payloads: bytes) -> None:
        link = self.link(address)
        for payload in payloads:
            link.send(link.delivery_count.to_bytes(16, "little"), payload)
        self.flush()

    def _handle(self, event: ConnectionEvent) -> None:
        match event:
            case LinkAttached():
                self._attach(event.link)
            case Delivered():
                self._take(event)
            case Disposed():
                self.peer.settled.append(event)
                if self.peer.answers and event.role is RECEIVER and not event.settled:
                    event.session.dispose(SENDER, event.first, event.last, settled=True, state=event.state)
            case LinkFlowed() if event.link.drain:
                event.link.drained()
            case _:
                pass

    def _attach(self, link: Link) -> None:
        address = _address(link)
        self.peer.attaches.append(address)
        if self.peer.attach_error is not None and "$" not in address:
            link.refuse(self.peer.attach_error)
            return
        link.accept(max_message_size=self.peer.max_message_size)
        if link.is_sender:
            if "$" in address:
                self._replies[cast(Any, link.target).address] = link
        else:
            link.flow(100 if "$" in address else self.peer.credit)

    def _take(self, event: Delivered) -> None:
        address = _address(event.link)
        if "$" in address:
            self._reply(address, event.payload)
            return
        self.peer.received.append(event)
        if self.peer.answers:
            event.link.session.dispose(RECEIVER, event.delivery_id, settled=True, state=self.peer.outcome)

    def _reply(self, address: str, payload: bytes) -> None:
        request = split_sections(payload)
        if address == "$cbs":
            self.peer.tokens.append(request.application_properties["name"])
        else:
            self.peer.requests.append(request.application_properties["operation"])
            if not self.peer.answers_requests:
                return
        status = self.peer.token_status if address == "$cbs" else 200
        self._replies[request.properties.reply_to].send(
            b"reply",
            build_message(
                properties=Properties(correlation_id=request.properties.message_id),
                application_properties={"statusCode": Int(status), "statusDescription": "as told"},
                value=request.value if address != "$cbs" else None,
            ),
            settled=True,
        )


def _address(link: Link) -> str:
    terminus = link.source if link.is_sender else link.target
    assert terminus is not None
    return str(cast(Source, terminus).address)


@asynccontextmanager
async def listening(peer: Peer | None = None) -> AsyncIterator[Peer]:
    peer = peer or Peer()
    server = await asyncio.get_running_loop().create_server(lambda: Line(peer), "127.0.0.1", peer.port)
    peer.port = server.sockets[0].getsockname()[1]
    try:
        yield peer
    finally:
        server.close()
        for line in peer.lines:
            line.abort()
        await server.wait_closed()


@asynccontextmanager
async def silent() -> AsyncIterator[ConnectionString]:
    """Listen on a port that accepts connections and sends nothing."""
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    try:
        yield ConnectionString("127.0.0.1", server.sockets[0].getsockname()[1], "name", "key", emulator=True)
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()
