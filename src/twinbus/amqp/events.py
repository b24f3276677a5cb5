"""Events: each event reports one action of the peer. `Connection.receive` returns the events in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinbus.amqp.negotiation import SaslReceived
from twinbus.amqp.performatives import DeliveryState, Error, Open

if TYPE_CHECKING:
    from twinbus.amqp.link import Link
    from twinbus.amqp.session import Session


@dataclass(slots=True)
class Opened:
    """The peer's open arrived, and our open was sent."""

    remote: Open


@dataclass(slots=True)
class SessionBegun:
    """The peer began a session, and the core has already sent the answer; or the peer answered our begin."""

    session: Session


@dataclass(slots=True)
class SessionEnded:
    """The session ended, and so did its `links`. No LinkDetached is reported for these links."""

    session: Session
    error: Error | None
    links: list[Link]


@dataclass(slots=True)
class LinkAttached:
    """The peer requests a link. The application answers with `link.accept` or `link.refuse`, at any time."""

    link: Link


@dataclass(slots=True)
class LinkAccepted:
    """The peer accepted a link that we requested."""

    link: Link


@dataclass(slots=True)
class LinkFlowed:
    """The peer changed the link's credit, drain mode or number of available messages."""

    link: Link
    properties: dict[Any, Any] | None = None
    echo: bool = False


@dataclass(slots=True)
class Delivered:
    """A message arrived completely."""

    link: Link
    delivery_id: int
    tag: bytes
    message_format: int
    payload: bytes
    settled: bool
    state: DeliveryState | None


@dataclass(slots=True)
class Disposed:
    """The peer reported the state of deliveries `first` to `last`.

    `role` is the peer's role: as a receiver, the peer reports on deliveries that we sent. `delivery_ids` are the ids
    from `first` to `last` that were unsettled.
    """

    session: Session
    role: bool
    first: int
    last: int
    settled: bool
    state: DeliveryState | None
    delivery_ids: list[int]


@dataclass(slots=True)
class LinkDetached:
    """The link ended: the peer detached it, answered our detach, or violated a rule of the link (`error`)."""

    link: Link
    closed: bool
    error: Error | None


@dataclass(slots=True)
class ConnectionClosed:
    """The connection ended. The driver must send the bytes that `data_to_send` returns, then close the transport."""

    error: Error | None


ConnectionEvent = (
    SaslReceived
    | Opened
    | SessionBegun
    | SessionEnded
    | LinkAttached
    | LinkAccepted
    | LinkFlowed
    | Delivered
    | Disposed
    | LinkDetached
    | ConnectionClosed
)
