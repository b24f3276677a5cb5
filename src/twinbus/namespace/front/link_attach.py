"""Handles the attach of a link: finds the entity or node, checks whether the peer may attach to it, and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from twinbus.namespace.front.context import LinkContext
from twinbus.namespace.front.fault_effects import FaultableOperation
from twinbus.namespace.front.incoming_link import IncomingLink
from twinbus.namespace.front.outgoing_link import SESSION_FILTER, OutgoingLink
from twinbus.namespace.front.request_response import NodeReplyLink, NodeRequest, NodeRequestLink
from twinbus.namespace.front.transaction_coordinator import CoordinatorLink
from twinbus.values import Condition, Described, Symbol, ULong

_TIMEOUT = Symbol("com.microsoft:timeout")
_SEND_VIA = Symbol("com.microsoft:transfer-destination-address")
_BATCH_SIZE = Symbol("com.microsoft:max-message-batch-size")
_DEFAULT_SESSION_WAIT = 60_000
_MAX_SESSION_WAIT = limits.DAY
_SETTLED = 1
_MAX_TRANSFER_BYTES = 4 * limits.MIB
# The most characters of an address. An entity's path has at most 260; host, sub-queue and percent-encoding add more.
_MAX_ADDRESS = 4096


def attach_link(context: LinkContext, link: Link, handle_request: Callable[[NodeRequest], None]) -> None:
    """Accept or refuse an attach. If a fault hits the attach, the fault is applied first.

    `handle_request` is called with each request to a node.
    """
    peer_receives = link.is_sender
    node = link.source if peer_receives else link.target
    if is_coordinator(node) and not peer_receives:
        _attach_coordinator(context, link)
    elif isinstance(node, Described):
        _refuse(link, Refusal(Condition.NOT_IMPLEMENTED, "Only a coordinator of transactions can be attached to so."))
    elif node is None or not isinstance(node.address, str):
        _refuse(link, Refusal(Condition.INVALID_FIELD, "The link names no address to attach to."))
    elif len(node.address) > _MAX_ADDRESS:
        text = f"The address of the link has {len(node.address)} characters; at most {_MAX_ADDRESS} are taken."
        _refuse(link, Refusal(Condition.INVALID_FIELD, text))
    else:
        address = parse_address(node.address)
        if address.node is NodeKind.ENTITY:
            _attach_to_entity(context, link, address)
        elif peer_receives:
            _attach_reply_link(context, link, address)
        else:
            _attach_request_link(context, link, address, handle_request)


def _refuse(link: Link, refusal: Refusal) -> None:
    link.refuse(refusals.amqp_error(refusal))


def _attach_reply_link(context: LinkContext, link: Link, address: LinkAddress) -> None:
    link.accept(max_message_size=limits.MIB)
    reply_link = NodeReplyLink(link, address, context.output, context.replies)
    context.replies.links.add(link, reply_link)
    context.links.add(link, reply_link)


def _attach_request_link(
    context: LinkContext, link: Link, address: LinkAddress, handle: Callable[[NodeRequest], None]
) -> None:
    link.accept(max_message_size=limits.MIB)
    request_link = NodeRequestLink(link, address, handle, context.output, context.replies, context.transactions)
    request_link.grant()
    context.links.add(link, request_link)


def _attach_coordinator(context: LinkContext, link: Link) -> None:
    if not context.account.is_authenticated:
        text = "A coordinator of transactions is for peers whose token was accepted. Put a token on $cbs first."
        _refuse(link, Refusal(Condition.UNAUTHORIZED_ACCESS, text))
        return
    link.accept(max_message_size=limits.MIB)
    coordinator = CoordinatorLink(link, context.transactions, context.output)
    coordinator.grant()
    context.links.add(link, coordinator)


def _attach_to_entity(context: LinkContext, link: Link, address: LinkAddress) -> None:
    peer_receives = link.is_sender
    claim = Claim.LISTEN if peer_receives else Claim.SEND
    if not context.claims.allow(claim, address.path, context.runtime.now()):
        # The claim is checked before the entity is looked up, so that peers without a claim do not learn which entities
        # exist.
        _refuse(link, refusals.unauthorized(claim, address.entity))
        return
    entity = context.runtime.namespace.find(address.entity)
    if entity is None:
        _refuse(link, refusals.not_found(address.entity))
        return

    def proceed() -> None:
        if link.state is not LinkState.ATTACH_RECEIVED:
            return  # the peer detached the link while a fault held the attach
        refusal = (_attach_receiver if peer_receives else _attach_sender)(context, link, entity, address)
        if refusal is not None:
            _refuse(link, refusal)
        context.output.flush_soon()

    def refuse(refusal: Refusal) -> None:
        _refuse(link, refusal)
        context.output.flush_soon()

    def proceed_later() -> None:
        """Attach after a fault, if the key was not rotated meanwhile (X4)."""
        if context.claims.allow(claim, address.path, context.runtime.now()):
            proceed()
        else:
            refuse(refusals.unauthorized(claim, address.entity))

    fault = context.faults.trigger(FaultPoint.ATTACH, entity.path, link.name)
    if fault is None:
        proceed()
    else:
        operation = FaultableOperation(
            proceed=proceed_later, refuse=refuse, detach=refuse, proceed_without_answer=lambda _: proceed_later()
        )
        context.faults.apply(fault, operation)


def _attach_sender(context: LinkContext, link: Link, entity: Entity, address: LinkAddress) -> Refusal | None:
    if address.dead_letter or address.transfer or isinstance(entity, Subscription):
        return Refusal(
            Condition.NOT_ALLOWED, f"Messages cannot be sent to '{address.path}': it is neither a queue nor a topic."
        )
    if _SEND_VIA in link.properties:
        # If this code ignored the property, the messages would stay in this entity and never reach the other entity.
        text = f"Sending via '{address.path}' to another entity is not supported: send to it in the same transaction."
        return Refusal(Condition.NOT_IMPLEMENTED, text)
    size = limits.MAX_MESSAGE_BYTES
    link.accept(max_message_size=size, properties={_BATCH_SIZE: ULong(size)})
    # `IncomingLink` rejects a single message that is too large. With the same limit in the core, the core would detach
    # the link, and other messages would fail, too.
    link.limit_messages(_MAX_TRANSFER_BYTES)
    incoming = IncomingLink(context, link, entity, address)
    incoming.grant()
    context.links.add(link, incoming)
    return None


def _attach_receiver(context: LinkContext, link: Link, entity: Entity, address: LinkAddress) -> Refusal | None:
    if isinstance(entity, Topic):
        return Refusal(
            Condition.NOT_ALLOWED, f"'{entity.path}' is a topic: receive from one of its subscriptions instead."
        )
    filters = (link.source.filter if isinstance(link.source, Source) else None) or {}
    if SESSION_FILTER in filters and not (address.dead_letter or address.transfer):
        return _attach_session_receiver(context, link, entity, address, filters[SESSION_FILTER])
    receiver = OutgoingLink(context, link, entity, address)

    def answered(refusal: Refusal | None) -> None:
        if refusal is not None:
            receiver.detach(refusal)
        else:
            link.accept(max_message_size=limits.MAX_MESSAGE_BYTES)
            context.output.flush_soon()

    context.links.add(link, receiver)
    attached = ReceiverAttached(answered, receiver, address.dead_letter, _peek_lock(link), address.transfer)
    context.runtime.submit(entity, attached)
    return None


def _attach_session_receiver(
    context: LinkContext, link: Link, entity: Entity, address: LinkAddress, session_filter: Any
) -> Refusal | None:
    session = session_filter.value if isinstance(session_filter, Described) else session_filter
    if session is not None and (not isinstance(session, str) or len(session) > limits.MAX_SESSION_ID_CHARACTERS):
        return Refusal(
            Condition.INVALID_FIELD,
            f"The session of '{SESSION_FILTER}' has to be null or a string of at most "
            f"{limits.MAX_SESSION_ID_CHARACTERS} characters.",
        )
    wait = link.properties.get(_TIMEOUT, _DEFAULT_SESSION_WAIT)
    if not isinstance(wait, int) or wait < 0:
        return Refusal(Condition.INVALID_FIELD, f"'{_TIMEOUT}' has to be a number of milliseconds.")
    receiver = OutgoingLink(context, link, entity, address)
    context.links.add(link, receiver)
    deadline = context.runtime.now() + min(int(wait), _MAX_SESSION_WAIT)
    context.runtime.submit(entity, SessionReceiverAttached(receiver, session, deadline, _peek_lock(link)))
    return None


def _peek_lock(link: Link) -> bool:
    """Return whether messages are locked until the peer settles them. If not, they are deleted when they are sent."""
    return link.snd_settle_mode != _SETTLED
