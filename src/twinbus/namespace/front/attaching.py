"""What happens when a peer attaches a link: to which entity or node, whether it may, and with which answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from twinbus.amqp.conditions import Condition
from twinbus.amqp.link import Link
from twinbus.amqp.performatives import Source
from twinbus.amqp.types import Described, Long, Symbol, ULong
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.events import ReceiverAttached, SessionReceiverAttached
from twinbus.namespace.engine.namespace import Entity
from twinbus.namespace.engine.subscription import Subscription
from twinbus.namespace.engine.topic import Topic
from twinbus.namespace.faults import FaultKind, Point
from twinbus.namespace.front import refusals
from twinbus.namespace.front.addresses import Address, Node, parse_address
from twinbus.namespace.front.receiving import OutgoingLink
from twinbus.namespace.front.requests import ReplyLink, RequestLink
from twinbus.namespace.front.sending import IncomingLink

if TYPE_CHECKING:
    from twinbus.namespace.front.amqp import AmqpConnection, Attached

_SESSION_FILTER = Symbol("com.microsoft:session-filter")
_TIMEOUT = Symbol("com.microsoft:timeout")
_LOCKED_UNTIL = Symbol("com.microsoft:locked-until-utc")
_BATCH_SIZE = Symbol("com.microsoft:max-message-batch-size")
_DEFAULT_SESSION_WAIT = 60_000
# .NET ticks (100 ns since year 1) at the Unix epoch.
_EPOCH_TICKS = 621_355_968_000_000_000
_SETTLED = 1
_LARGEST_TRANSFER = 4 * limits.MIB


def attach(connection: AmqpConnection, link: Link) -> Attached | Refusal | None:
    """Attach, refuse, or (None) leave the answer to a fault."""
    receives = link.is_sender
    node = link.source if receives else link.target
    if isinstance(node, Described):
        return Refusal(Condition.NOT_IMPLEMENTED, "Transactions are not supported yet.")
    if node is None or not isinstance(node.address, str):
        return Refusal(Condition.INVALID_FIELD, "The link names no address to attach to.")
    address = parse_address(node.address)
    if address.node is not Node.ENTITY:
        return _attach_node(connection, link, address, receives=receives)
    entity = connection.driver.namespace.find(address.entity)
    if entity is None:
        return refusals.not_found(address.entity)
    claim = Claim.LISTEN if receives else Claim.SEND
    if not connection.claims.allow(claim, address.path, connection.driver.now()):
        return refusals.unauthorized(claim, entity.path)
    fault = connection.strike(Point.ATTACH, entity.path, link.name)
    match fault.kind if fault is not None else None:
        case FaultKind.SERVER_BUSY:
            return refusals.busy()
        case FaultKind.INTERNAL_ERROR:
            return refusals.INTERNAL
        case FaultKind.DETACH:
            return refusals.DETACHED
        case FaultKind.BLACK_HOLE:
            return None
        case FaultKind.CRASH:
            connection.crash()
    if receives:
        return _attach_receiver(connection, link, entity, address)
    return _attach_sender(connection, link, entity, address)


def accept_session(link: Link, session: str, locked_until: int) -> None:
    """Answer the attach of a session receiver: the session in the filter, its lock in .NET ticks."""
    ticks = _EPOCH_TICKS + locked_until * 10_000
    assert isinstance(link.source, Source), "checked when it attached"
    source = replace(link.source, filter={**(link.source.filter or {}), _SESSION_FILTER: session})
    link.accept(source=source, properties={_LOCKED_UNTIL: Long(ticks)}, max_message_size=limits.MAX_MESSAGE_BYTES)


def claim_of(attached: Attached) -> tuple[Claim, str] | None:
    """What an attached link keeps needing."""
    if isinstance(attached, IncomingLink):
        return Claim.SEND, attached.address.path
    if isinstance(attached, OutgoingLink):
        return Claim.LISTEN, attached.address.path
    return None


def _attach_node(connection: AmqpConnection, link: Link, address: Address, *, receives: bool) -> Attached:
    link.accept(max_message_size=limits.MIB)
    if receives:
        return ReplyLink(link, address)
    request_link = RequestLink(connection, link, address)
    request_link.grant()
    return request_link


def _attach_sender(connection: AmqpConnection, link: Link, entity: Entity, address: Address) -> Attached | Refusal:
    if address.dead_letter or address.transfer or isinstance(entity, Subscription):
        return Refusal(
            Condition.NOT_ALLOWED, f"Messages cannot be sent to '{address.path}': it is neither a queue nor a topic."
        )
    size = limits.MAX_MESSAGE_BYTES
    link.accept(max_message_size=size, properties={_BATCH_SIZE: ULong(size)})
    # A message too large is rejected by itself: a detach would take the link from its neighbours.
    link.limit_messages(_LARGEST_TRANSFER)
    incoming = IncomingLink(connection, link, entity, address)
    incoming.grant()
    return incoming


def _attach_receiver(connection: AmqpConnection, link: Link, entity: Entity, address: Address) -> Attached | Refusal:
    if isinstance(entity, Topic):
        return Refusal(
            Condition.NOT_ALLOWED, f"'{entity.path}' is a topic: receive from one of its subscriptions instead."
        )
    if address.transfer:
        return Refusal(Condition.NOT_IMPLEMENTED, "Transfer dead-letter queues come with auto-forwarding.")
    peek_lock = link.snd_settle_mode != _SETTLED
    receiver = OutgoingLink(connection, link, entity, address)
    filters = (link.source.filter if isinstance(link.source, Source) else None) or {}
    if _SESSION_FILTER in filters and not address.dead_letter:
        wanted = filters[_SESSION_FILTER]
        session = wanted.value if isinstance(wanted, Described) else wanted
        wait = link.properties.get(_TIMEOUT, _DEFAULT_SESSION_WAIT)
        deadline = connection.driver.now() + int(wait)
        event = SessionReceiverAttached(receiver, session, deadline, peek_lock)
        connection.driver.submit(entity, event)
        return receiver

    def answered(refusal: Refusal | None) -> None:
        if refusal is not None:
            receiver.detach(refusal)
        else:
            link.accept(max_message_size=limits.MAX_MESSAGE_BYTES)
            connection.flush_soon()

    connection.driver.submit(entity, ReceiverAttached(answered, receiver, address.dead_letter, peek_lock))
    return receiver
