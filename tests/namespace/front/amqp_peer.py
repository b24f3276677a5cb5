"""A peer that speaks AMQP frame by frame over a socket, for tests of what a well-behaved client does not do."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from itertools import count
from typing import Any, Self, TypeVar

from twinbus.amqp import (
    RECEIVER,
    SENDER,
    SND_SETTLED,
    SND_UNSETTLED,
    Connection,
    ConnectionClosed,
    ConnectionEvent,
    Delivered,
    Disposed,
    Link,
    LinkAccepted,
    LinkDetached,
    LinkFlowed,
    Properties,
    Session,
    Source,
    Target,
    build_message,
    split_sections,
)
from twinbus.connect import make_sas_token
from twinbus.namespace.front.accepted_connection import AcceptedConnection
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, DEFAULT_KEY_NAME
from twinbus.namespace.server import NamespaceServer
from twinbus.values import Symbol, Timestamp

SECONDS = 20.0
"""The timeout of every wait in these tests."""

SESSION_FILTER = Symbol("com.microsoft:session-filter")
Kind = TypeVar("Kind")


def accepted_connections(server: NamespaceServer) -> list[AcceptedConnection]:
    """Return the open connections of a server, with their private parts."""
    return [connection for connection in server._context.connections if isinstance(connection, AcceptedConnection)]


class Peer(asyncio.Protocol):
    """A client's protocol core on a socket. `events` holds the events that no method has consumed yet."""

    def __init__(self, core: Connection, port: int) -> None:
        self.core = core
        self.port = port
        self.events: list[ConnectionEvent] = []
        self.lost = asyncio.get_running_loop().create_future()
        self._numbers = count(1)
        self._changed = asyncio.Event()
        self._nodes: dict[str, Node] = {}

    @classmethod
    async def to(cls, server: NamespaceServer, tls: ssl.SSLContext | None = None, **options: Any) -> Self:
        core = Connection.client("raw", "localhost", **options)
        loop = asyncio.get_running_loop()
        _, peer = await loop.create_connection(
            lambda: cls(core, server.port),
            "127.0.0.1",
            server.port,
            ssl=tls,
            server_hostname="localhost" if tls is not None else None,
        )
        return peer

    # --- the socket --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.flush()

    def data_received(self, data: bytes) -> None:
        self.events += self.core.receive(data, asyncio.get_running_loop().time())
        self.flush()
        self._changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(error)
        self._changed.set()

    def flush(self) -> None:
        self.transport.writelines(self.core.data_to_send())

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until `condition` returns something true, and return it."""
        async with asyncio.timeout(SECONDS):
            while not (found := condition()):
                self._changed.clear()
                await self._changed.wait()
        return found

    async def event(self, kind: type[Kind], link: Link | None = None) -> Kind:
        """Wait for an event of this kind (on this link), and consume it."""

        def find() -> Kind | None:
            for event in self.events:
                if isinstance(event, kind) and (link is None or getattr(event, "link", None) is link):
                    return event
            return None

        found: Kind = await self.until(find)
        self.events.remove(found)  # type: ignore[arg-type]  # it was found in there
        return found

    async def echo(self) -> None:
        """Return when the namespace has handled everything that was sent before."""
        await self.ask("$cbs", "nothing", {})

    def close(self) -> None:
        self.transport.abort()

    async def closed(self) -> ConnectionClosed:
        """Wait for the namespace's close and the end of the socket. Returns the close."""
        found = await self.event(ConnectionClosed)
        await asyncio.wait_for(self.lost, SECONDS)
        return found

    # --- links -------------------------------------------------------------------------------------------------

    def session(self) -> Session:
        return self.core.begin()

    def attach_sender(
        self,
        target: Any,
        session: Session | None = None,
        name: str | None = None,
        properties: dict[Any, Any] | None = None,
    ) -> Link:
        link = (session or self.session()).attach(
            name or f"sender-{next(self._numbers)}",
            SENDER,
            source=Source("here"),
            target=Target(target) if isinstance(target, str) else target,
            properties=properties,
        )
        self.flush()
        return link

    def attach_receiver(
        self,
        source: Any,
        session: Session | None = None,
        *,
        name: str | None = None,
        delete: bool = False,
        wanted: Any = ...,
        properties: dict[Any, Any] | None = None,
    ) -> Link:
        """`wanted` is the value of the session filter."""
        filters = None if wanted is ... else {SESSION_FILTER: wanted}
        link = (session or self.session()).attach(
            name or f"receiver-{next(self._numbers)}",
            RECEIVER,
            source=Source(source, filter=filters) if isinstance(source, str) else source,
            target=Target("here"),
            snd_settle_mode=SND_SETTLED if delete else SND_UNSETTLED,
            rcv_settle_mode=0 if delete else 1,
            properties=properties,
        )
        self.flush()
        return link

    async def sender(self, entity: str, session: Session | None = None) -> Link:
        link = self.attach_sender(entity, session)
        await self.event(LinkAccepted, link)
        await self.event(LinkFlowed, link)
        return link

    async def receiver(self, entity: str, session: Session | None = None, **options: Any) -> Link:
        link = self.attach_receiver(entity, session, **options)
        await self.event(LinkAccepted, link)
        return link

    async def refused(self, link: Link) -> str:
        """Wait for the detach of a link. Returns the condition and the description of its error."""
        detached = await self.event(LinkDetached, link)
        assert detached.error is not None
        return f"{detached.error.condition} {detached.error.description}"

    def grant(self, link: Link, credit: int, *, drain: bool = False) -> None:
        link.flow(credit, drain=drain)
        self.flush()

    async def received(self, link: Link, number: int) -> list[Delivered]:
        """Wait for so many deliveries of the link, and consume them. Returns them in order."""

        def found() -> list[Delivered]:
            return [event for event in self.events if isinstance(event, Delivered) and event.link is link]

        await self.until(lambda: len(found()) >= number)
        deliveries = found()
        self.events = [event for event in self.events if event not in deliveries]
        return deliveries

    # --- messages and requests ---------------------------------------------------------------------------------

    def send(self, link: Link, *bodies: str, session: str | None = None) -> None:
        for body in bodies:
            properties = Properties(message_id=body, group_id=session)
            link.send(body.encode()[:32], build_message(properties=properties, data=body.encode()))
        self.flush()

    async def answers(self, number: int) -> list[Disposed]:
        """Wait for dispositions of so many deliveries that this side sent or settled. Returns the dispositions."""

        def disposed() -> list[Disposed]:
            return [event for event in self.events if isinstance(event, Disposed)]

        await self.until(lambda: sum(event.last - event.first + 1 for event in disposed()) >= number)
        found = disposed()
        self.events = [event for event in self.events if not isinstance(event, Disposed)]
        return found

    async def put_token(
        self,
        path: str = "",
        *,
        name: str = DEFAULT_KEY_NAME,
        key: str = DEFAULT_KEY,
        expires_at: int = 4_000_000_000,
        audience: str | None = None,
    ) -> int:
        """Put a token that is signed for a path, for that path or another audience. Returns the status of the reply."""
        resource = f"sb://localhost:{self.port}/{path}"
        token = make_sas_token(resource, name, key, expires_at)
        token_audience = resource if audience is None else f"sb://localhost:{self.port}/{audience}"
        properties = {
            "type": "servicebus.windows.net:sastoken",
            "name": token_audience,
            "expiration": Timestamp(expires_at * 1000),
        }
        return int((await self.ask("$cbs", "put-token", token, properties))["statusCode"])

    async def ask(
        self, node: str, operation: str, body: Any, properties: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send a request to a node. Returns the reply's status, description, condition and `body`."""
        if node not in self._nodes:
            self._nodes[node] = Node(self, node)
            await self._nodes[node].attached()
        return await self._nodes[node].ask(operation, body, properties or {})


class Node:
    """The two links to a request/response node."""

    def __init__(self, peer: Peer, address: str, session: Session | None = None) -> None:
        self._peer = peer
        session = session or peer.session()
        self.requests = peer.attach_sender(address, session)
        self.reply_to = f"replies-{self.requests.name}"
        self.replies = session.attach(
            self.reply_to, RECEIVER, source=Source(address), target=Target(self.reply_to), snd_settle_mode=SND_SETTLED
        )
        self._numbers = count(1)

    async def attached(self, credit: int = 100) -> None:
        await self._peer.event(LinkAccepted, self.replies)
        await self._peer.event(LinkFlowed, self.requests)
        if credit:
            self._peer.grant(self.replies, credit)

    def request(self, operation: str, body: Any, properties: dict[str, Any], reply_to: str | None = None) -> str:
        """Send a request. Returns its message id."""
        number = f"{operation}-{next(self._numbers)}"
        payload = build_message(
            properties=Properties(message_id=number, reply_to=reply_to or self.reply_to),
            application_properties={"operation": operation, **properties},
            value=body,
        )
        self.requests.send(number.encode()[-32:], payload, settled=True)
        self._peer.flush()
        return number

    async def reply(self, number: str, link: Link | None = None) -> dict[str, Any]:
        wanted = link or self.replies
        seen: list[Any] = []

        def find() -> dict[str, Any] | None:
            for event in self._peer.events:
                if isinstance(event, Delivered) and event.link is wanted and event not in seen:
                    seen.append(event)
                    sections = split_sections(event.payload)
                    if sections.properties.correlation_id == number:
                        return {**sections.application_properties, "body": sections.value}
            return None

        found: dict[str, Any] = await self._peer.until(find)
        return found

    async def ask(self, operation: str, body: Any, properties: dict[str, Any]) -> dict[str, Any]:
        return await self.reply(self.request(operation, body, properties))
