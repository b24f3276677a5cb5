"""What happens when a peer attaches a link: to which entity or node, whether it may, and with which answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twinbus.amqp import Link, LinkState, Source, is_coordinator
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.events import ReceiverAttached, SessionReceiverAttached
from twinbus.namespace.engine.registry import Entity
from twinbus.namespace.engine.topic import Subscription, Topic
from twinbus.namespace.faults import FaultPoint
from twinbus.namespace.front import refusals
from twinbus.namespace.front.addresses import LinkAddress, NodeKind, parse_address
from twinbus.namespace.front.fault_effects import FaultableOperation
from twinbus.namespace.front.incoming_link import IncomingLink
from twinbus.namespace.front.outgoing_link import OutgoingLink
from twinbus.namespace.front.request_response import NodeReplyLink, NodeRequestLink
from twinbus.namespace.front.transactions import CoordinatorLink
from twinbus.values import Condition, Described, Long, Symbol, ULong

if TYPE_CHECKING:
    from twinbus.namespace.front.amqp_connection import AmqpConnection, AttachedLink

_SESSION_FILTER = Symbol("com.microsoft:session-filter")
_TIMEOUT = Symbol("com.microsoft:timeout")
_LOCKED_UNTIL = Symbol("com.microsoft:locked-until-utc")
_SEND_VIA = Symbol("com.microsoft:transfer-destination-address")
_BATCH_SIZE = Symbol("com.microsoft:max-message-batch-size")
_DEFAULT_SESSION_WAIT = 60_000
_LONGEST_SESSION_WAIT = limits.DAY
# .NET ticks (100 ns since year 1) at the Unix epoch.
_EPOCH_TICKS = 621_355_968_000_000_000
_SETTLED = 1
_LARGEST_TRANSFER = 4 * limits.MIB
# An entity's path has at most 260 characters; host, sub-queue and percent-encoding make an address longer.
_LONGEST_ADDRESS = 4096


def attach(connection: AmqpConnection, link: Link) -> None:
    """Attach or refuse; a fault may come in between."""
    receives = link.is_sender
    node = link.source if receives else link.target
    if is_coordinator(node) and not receives:
        _attach_to_coordinator(connection, link)
    elif isinstance(node, Described):
        _refuse(link, Refusal(Condition.NOT_IMPLEMENTED, "Only a coordinator of transactions can be attached to so."))
    elif node is None or not isinstance(node.address, str):
        _refuse(link, Refusal(Condition.INVALID_FIELD, "The link names no address to attach to."))
    elif len(node.address) > _LONGEST_ADDRESS:
        text = f"The address of the link has {len(node.address)} characters; at most {_LONGEST_ADDRESS} are taken."
        _refuse(link, Refusal(Condition.INVALID_FIELD, text))
    else:
        address = parse_address(node.address)
        if address.node is NodeKind.ENTITY:
            _attach_to_entity(connection, link, address, receives=receives)
        else:
            _attach_to_node(connection, link, address, receives=receives)


def accept_session(link: Link, session: str, locked_until: int) -> None:
    """Answer the attach of a session receiver: the session in the filter, its lock in .NET ticks."""
    ticks = _EPOCH_TICKS + locked_until * 10_000
    assert isinstance(link.source, Source), "checked when it attached"
    source = replace(link.source, filter={**(link.source.filter or {}), _SESSION_FILTER: session})
    link.accept(source=source, properties={_LOCKED_UNTIL: Long(ticks)}, max_message_size=limits.MAX_MESSAGE_BYTES)


def claim_of(attached: AttachedLink) -> tuple[Claim, str] | None:
    """What an attached link keeps needing."""
    if isinstance(attached, IncomingLink):
        return Claim.SEND, attached.address.path
    if isinstance(attached, OutgoingLink):
        return Claim.LISTEN, attached.address.path
    return None


def _refuse(link: Link, refusal: Refusal) -> None:
    link.refuse(refusals.amqp_error(refusal))


def _attach_to_node(connection: AmqpConnection, link: Link, address: LinkAddress, *, receives: bool) -> None:
    link.accept(max_message_size=limits.MIB)
    if receives:
        connection.attached(link, NodeReplyLink(connection, link, address))
    else:
        request_link = NodeRequestLink(connection, link, address)
        request_link.grant()
        connection.attached(link, request_link)


def _attach_to_coordinator(connection: AmqpConnection, link: Link) -> None:
    if not connection.account.is_authenticated:
        text = "A coordinator of transactions is for peers whose token was accepted. Put a token on $cbs first."
        _refuse(link, Refusal(Condition.UNAUTHORIZED_ACCESS, text))
        return
    link.accept(max_message_size=limits.MIB)
    coordinator = CoordinatorLink(connection, link)
    coordinator.grant()
    connection.attached(link, coordinator)


def _attach_to_entity(connection: AmqpConnection, link: Link, address: LinkAddress, *, receives: bool) -> None:
    claim = Claim.LISTEN if receives else Claim.SEND
    if not connection.claims.allow(claim, address.path, connection.runtime.now()):
        # Before it is looked up, and in the peer's spelling: which names there are is not for everyone.
        _refuse(link, refusals.unauthorized(claim, address.entity))
        return
    entity = connection.runtime.namespace.find(address.entity)
    if entity is None:
        _refuse(link, refusals.not_found(address.entity))
        return

    def go_on() -> None:
        if link.state is not LinkState.ATTACH_RECEIVED:
            return  # the peer left while a fault held it
        end = (_attach_receiver if receives else _attach_sender)(connection, link, entity, address)
        if end is not None:
            _refuse(link, end)
        connection.flush_soon()

    def refuse(refusal: Refusal) -> None:
        _refuse(link, refusal)
        connection.flush_soon()

    fault = connection.trigger(FaultPoint.ATTACH, entity.path, link.name)
    if fault is None:
        go_on()
    else:
        connection.suffer(
            fault, FaultableOperation(go_on=go_on, refuse=refuse, detach=refuse, unanswered=lambda _: go_on())
        )


def _attach_sender(connection: AmqpConnection, link: Link, entity: Entity, address: LinkAddress) -> Refusal | None:
    if address.dead_letter or address.transfer or isinstance(entity, Subscription):
        return Refusal(
            Condition.NOT_ALLOWED, f"Messages cannot be sent to '{address.path}': it is neither a queue nor a topic."
        )
    if _SEND_VIA in link.properties:
        # Taken without it, the messages would stay in the entity they were only to pass through.
        text = f"Sending via '{address.path}' to another entity is not supported: send to it in the same transaction."
        return Refusal(Condition.NOT_IMPLEMENTED, text)
    size = limits.MAX_MESSAGE_BYTES
    link.accept(max_message_size=size, properties={_BATCH_SIZE: ULong(size)})
    # A message too large is rejected by itself: a detach would take the link from its neighbours.
    link.limit_messages(_LARGEST_TRANSFER)
    incoming = IncomingLink(connection, link, entity, address)
    incoming.grant()
    connection.attached(link, incoming)
    return None


def _attach_receiver(connection: AmqpConnection, link: Link, entity: Entity, address: LinkAddress) -> Refusal | None:
    if isinstance(entity, Topic):
        return Refusal(
            Condition.NOT_ALLOWED, f"'{entity.path}' is a topic: receive from one of its subscriptions instead."
        )
    peek_lock = link.snd_settle_mode != _SETTLED
    receiver = OutgoingLink(connection, link, entity, address)
    filters = (link.source.filter if isinstance(link.source, Source) else None) or {}
    if _SESSION_FILTER in filters and not (address.dead_letter or address.transfer):
        return _attach_session_receiver(connection, link, receiver, filters[_SESSION_FILTER], peek_lock)

    def answered(refusal: Refusal | None) -> None:
        if refusal is not None:
            receiver.detach(refusal)
        else:
            link.accept(max_message_size=limits.MAX_MESSAGE_BYTES)
            connection.flush_soon()

    connection.attached(link, receiver)
    attached = ReceiverAttached(answered, receiver, address.dead_letter, peek_lock, address.transfer)
    connection.runtime.submit(entity, attached)
    return None


def _attach_session_receiver(
    connection: AmqpConnection, link: Link, receiver: OutgoingLink, wanted: Any, peek_lock: bool
) -> Refusal | None:
    session = wanted.value if isinstance(wanted, Described) else wanted
    if session is not None and (not isinstance(session, str) or len(session) > limits.MAX_SESSION_ID_CHARACTERS):
        return Refusal(
            Condition.INVALID_FIELD,
            f"The session of '{_SESSION_FILTER}' has to be null or a string of at most "
            f"{limits.MAX_SESSION_ID_CHARACTERS} characters.",
        )
    wait = link.properties.get(_TIMEOUT, _DEFAULT_SESSION_WAIT)
    if not isinstance(wait, int) or not 0 <= wait <= _LONGEST_SESSION_WAIT:
        return Refusal(Condition.INVALID_FIELD, f"'{_TIMEOUT}' has to be a number of milliseconds, up to a day.")
    connection.attached(link, receiver)
    deadline = connection.runtime.now() + int(wait)
    connection.runtime.submit(receiver.entity, SessionReceiverAttached(receiver, session, deadline, peek_lock))
    return None
