"""A client core and a server core joined without a network, with every byte recorded."""

from collections.abc import Iterable, Iterator
from random import Random
from typing import Any, TypeVar

from twinbus.amqp.connection import Connection
from twinbus.amqp.events import ConnectionClosed, ConnectionEvent, Delivered, LinkAttached, LinkFlowed, SessionBegun
from twinbus.amqp.frames import AMQP_HEADER, performative_frame
from twinbus.amqp.link import Link
from twinbus.amqp.performatives import ACCEPTED, RECEIVER, SENDER, Error, Open, Source, Target
from twinbus.amqp.session import Session

E = TypeVar("E")


def only(kind: type[E], events: Iterable[ConnectionEvent]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


class Joined:
    """`exchange` carries bytes in both directions until neither core has bytes to send."""

    def __init__(self, client: Connection | None = None, server: Connection | None = None) -> None:
        self.client = client or Connection.client("client", "host")
        self.server = server or Connection.server("server")
        self.now = 0.0
        self.to_server: list[bytes] = []
        self.to_client: list[bytes] = []

    def exchange(self, chunks: Random | None = None) -> tuple[list[ConnectionEvent], list[ConnectionEvent]]:
        """Return the events of the client and of the server. `chunks` cuts the streams at random places."""
        at_client: list[ConnectionEvent] = []
        at_server: list[ConnectionEvent] = []
        while True:
            up, down = b"".join(self.client.data_to_send()), b"".join(self.server.data_to_send())
            if not up and not down:
                return at_client, at_server
            for piece in cut(up, chunks):
                self.to_server.append(piece)
                at_server += self.server.receive(piece, self.now)
            for piece in cut(down, chunks):
                self.to_client.append(piece)
                at_client += self.client.receive(piece, self.now)

    def begin(self) -> tuple[Session, Session]:
        """Begin a session. Returns the client's and the server's object for it."""
        ours = self.client.begin()
        _, at_server = self.exchange()
        return ours, only(SessionBegun, at_server)[-1].session

    def sender(self, session: Session, credit: int = 100, **options: Any) -> tuple[Link, Link]:
        """Attach a link on which the client sends. `options` are passed to the server's accept."""
        link = session.attach(f"to-{len(session.links)}", SENDER, source=Source("here"), target=Target("queue"))
        _, at_server = self.exchange()
        theirs = only(LinkAttached, at_server)[0].link
        theirs.accept(**options)
        theirs.flow(credit)
        self.exchange()
        return link, theirs

    def receiver(self, session: Session, credit: int = 100, **options: Any) -> tuple[Link, Link]:
        """Attach a link on which the client receives."""
        link = session.attach(
            f"from-{len(session.links)}", RECEIVER, source=Source("queue"), target=Target("here"), **options
        )
        _, at_server = self.exchange()
        theirs = only(LinkAttached, at_server)[0].link
        theirs.accept()
        self.exchange()
        if credit:
            link.flow(credit)
            self.exchange()
        return link, theirs


def cut(data: bytes, chunks: Random | None) -> Iterator[bytes]:
    if chunks is None:
        if data:
            yield data
        return
    start = 0
    while start < len(data):
        end = start + chunks.choice((1, 2, 3, 7, 8, 9, 50, 300))
        yield data[start:end]
        start = end


def opened(**options: Any) -> Joined:
    joined = Joined(**options)
    joined.exchange()
    return joined


def bare_server(**options: Any) -> Connection:
    """A server that has exchanged headers and opens, ready for hand-made frames."""
    server = Connection.server("server", bare_allowed=True, **options)
    server.receive(AMQP_HEADER + performative_frame(0, Open("peer")), 0.0)
    server.data_to_send()
    return server


def closing_error(events: list[ConnectionEvent]) -> Error | None:
    closed = only(ConnectionClosed, events)
    assert len(closed) == 1, events
    return closed[0].error


def payloads(events: list[ConnectionEvent]) -> list[bytes]:
    return [event.payload for event in only(Delivered, events)]


class Accepting:
    """An application that takes every link, settles every delivery and sends on every credit."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def handle(self, events: list[ConnectionEvent]) -> None:
        for event in events:
            match event:
                case LinkAttached(link):
                    link.accept(max_message_size=262144)
                    if not link.is_sender:
                        link.flow(10)
                case Delivered(link, delivery_id, settled=False):
                    link.session.dispose(RECEIVER, delivery_id, settled=True, state=ACCEPTED)
                    link.flow(10)
                case LinkFlowed(link) if link.is_sender:
                    for number in range(min(link.credit, 3)):
                        link.send(bytes((number,)) * 4, b"\x00\x53\x75\xa0\x05hello")
                    link.drained()
                case _:
                    pass
