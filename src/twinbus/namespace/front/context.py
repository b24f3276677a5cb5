"""Objects that parts of the front share: `NamespaceContext` for connections, `LinkContext` for links of a connection.

Links and request handlers get a `LinkContext`, never the connection itself. So there is no circle of imports: the
connection imports the links, the links import the context, the context imports the parts that it contains.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import ItemsView, Iterable, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from twinbus.amqp import LimitExceededError, Link, Session
from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.faults import Faults
from twinbus.namespace.front import refusals
from twinbus.namespace.front.backpressure import ConnectionInput, ConnectionOutput
from twinbus.namespace.front.byte_stream import ByteStream
from twinbus.namespace.front.cbs import GrantedClaims
from twinbus.namespace.front.fault_effects import FaultEffects
from twinbus.namespace.front.http_handler import HttpHandler
from twinbus.namespace.front.request_response import NodeReplies
from twinbus.namespace.front.sas_verifier import SasVerifier
from twinbus.namespace.front.transaction_coordinator import Transactions
from twinbus.namespace.front.unsettled import LockedDeliveries
from twinbus.namespace.meter import OperationMeter
from twinbus.namespace.own_names import OwnNames, SharedNames
from twinbus.namespace.resources import ConnectionAccount, Resources
from twinbus.namespace.runtime import NamespaceRuntime

if TYPE_CHECKING:
    from twinbus.namespace.front.jwt_verifier import JwtVerifier


class OpenConnection(Protocol):
    """An accepted connection, as the server sees it."""

    stream: ByteStream
    gone: asyncio.Future[None]
    """Done when the connection is closed."""

    def faults_changed(self) -> None:
        """Continue the connection and the operations that a fault held, if the fault has ended."""

    def keys_changed(self, entity: str | None) -> None:
        """Detach the links whose key is no longer valid. `entity` is None for the keys of the namespace."""

    def shut_down(self) -> None:
        """Close the connection as the peer's protocol demands, because the namespace stops."""


@dataclass(slots=True)
class NamespaceContext:
    """The objects that all connections of one namespace share."""

    name: str
    runtime: NamespaceRuntime
    verifier: SasVerifier
    faults: Faults
    meter: OperationMeter
    tls: ssl.SSLContext
    http: HttpHandler
    names: OwnNames
    resources: Resources
    jwt_verifier: JwtVerifier | None = None
    """None if the namespace accepts no JSON web tokens."""
    connections: set[OpenConnection] = field(default_factory=set)

    def limit_exceeded(self, exceeded: LimitExceededError) -> None:
        """Count and log that a peer exceeded a limit."""
        self.resources.refuse(exceeded, self.name)


@dataclass(frozen=True, slots=True)
class SharedPort:
    """A port that several namespaces share: its TLS, and the namespaces by name. The port takes TLS only."""

    tls: ssl.SSLContext
    names: SharedNames
    namespaces: Mapping[str, NamespaceContext]

    def find(self, host: str | None) -> NamespaceContext | None:
        """Return the namespace that has this host name, or None."""
        name = None if not host else self.names.namespace_of(host)
        return None if name is None else self.namespaces[name]


class AttachedLink(Protocol):
    """A link of an AMQP connection after its attach was accepted."""

    @property
    def required_claim(self) -> tuple[Claim, str] | None:
        """The claim that a token must grant while the link is attached, and the path for which. None if no claim."""

    def flowed(self) -> None:
        """Handle a flow that the peer sent for this link. The flow has new credit, or the peer's delivery count."""

    def detached(self) -> None:
        """Release the link, which is gone. Called once."""


class AttachedLinks:
    """The attached links of one connection."""

    def __init__(self, output: ConnectionOutput, unsettled: LockedDeliveries) -> None:
        self._output = output
        self._unsettled = unsettled
        self._links: dict[Link, AttachedLink] = {}

    def __len__(self) -> int:
        return len(self._links)

    def get(self, link: Link) -> AttachedLink | None:
        return self._links.get(link)

    def items(self) -> ItemsView[Link, AttachedLink]:
        return self._links.items()

    def values(self) -> ValuesView[AttachedLink]:
        return self._links.values()

    def add(self, link: Link, attached: AttachedLink) -> None:
        self._links[link] = attached

    def detach(self, link: Link, refusal: Refusal) -> None:
        """Send a detach with an error for a link, and remove the link."""
        self.forget([link])
        link.detach(closed=True, error=refusals.amqp_error(refusal))
        self._output.flush_soon()

    def forget(self, links: Iterable[Link]) -> None:
        """Remove links that are gone, and the unsettled deliveries of these links."""
        known = {link: attached for link in links if (attached := self._links.pop(link, None)) is not None}
        senders: defaultdict[Session, set[AttachedLink]] = defaultdict(set)
        for link, attached in known.items():
            if link.is_sender:
                senders[link.session].add(attached)
        # One pass over the deliveries for all links of a session: a pass for each link would take quadratic time (X1).
        for session, gone in senders.items():
            self._unsettled.forget_links(session, gone)
        for attached in known.values():
            attached.detached()

    def clear(self) -> None:
        """Remove all links: the connection is gone."""
        self.forget(list(self._links))


@dataclass(frozen=True, slots=True)
class LinkContext:
    """The parts of an AMQP connection that its links may use."""

    runtime: NamespaceRuntime
    account: ConnectionAccount
    claims: GrantedClaims
    faults: FaultEffects
    links: AttachedLinks
    output: ConnectionOutput
    input: ConnectionInput
    unsettled: LockedDeliveries
    transactions: Transactions
    replies: NodeReplies
