"""What the peer did, as a connection reports it to the application. In the past tense, in the order it happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinbus.amqp.performatives import DeliveryState, Error, Open

if TYPE_CHECKING:
    from twinbus.amqp.link import Link
    from twinbus.amqp.session import Session


@dataclass(slots=True)
class SaslReceived:
    """What the client chose, before the verifier's word."""

    mechanism: str
    response: bytes
    hostname: str | None


@dataclass(slots=True)
class Opened:
    """The peer's open arrived; ours was sent."""

    remote: Open


@dataclass(slots=True)
class SessionBegun:
    """The peer began a session (answered already), or answered ours."""

    session: Session


@dataclass(slots=True)
class SessionEnded:
    """`links` are those that ended with it; no LinkDetached is reported for them."""

    session: Session
    error: Error | None
    links: list[Link]


@dataclass(slots=True)
class LinkAttached:
    """The peer asks for a link: answer with `link.accept` or `link.refuse`, now or later."""

    link: Link


@dataclass(slots=True)
class LinkAccepted:
    """The peer took the link we asked for."""

    link: Link


@dataclass(slots=True)
class LinkFlowed:
    """The peer changed the flow state of the link: credit, drain, or what is available."""

    link: Link
    properties: dict[Any, Any] | None = None
    echo: bool = False


@dataclass(slots=True)
class Delivered:
    """A whole message arrived."""

    link: Link
    delivery_id: int
    tag: bytes
    message_format: int
    payload: bytes
    settled: bool
    state: DeliveryState | None


@dataclass(slots=True)
class Disposed:
    """The peer told the state of deliveries. `role` is the peer's: a receiver speaks about what we sent.

    `delivery_ids` are those of the range that are not settled yet; first and last are its ends.
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
    """The link is gone: the peer detached it, answered our detach, or broke a rule of the link (`error`)."""

    link: Link
    closed: bool
    error: Error | None


@dataclass(slots=True)
class ConnectionClosed:
    """Nothing more comes. Send what `data_to_send` still has, then close the transport."""

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
