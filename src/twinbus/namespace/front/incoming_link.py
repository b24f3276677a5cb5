"""Links on which the peer sends messages.

A transfer becomes a `MessagesSent` event for the engine. The answer of the engine becomes a disposition.

The limit for a batch counts the messages in it, without the sections before them: the Python client fills a batch up to
the limit of the link, and then writes the id, the session and the partition key of its first message before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from twinbus.amqp import (
    BATCH_FORMAT,
    Accepted,
    DecodeError,
    Delivered,
    DeliveryState,
    Link,
    Rejected,
    batch_messages,
    data_section_size,
    read_routing_fields,
    read_transactional,
    transactional_state,
)
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.events import MessagesSent
from twinbus.namespace.engine.registry import Entity
from twinbus.namespace.faults import Fault, FaultPoint
from twinbus.namespace.front import refusals
from twinbus.namespace.front.addresses import LinkAddress
from twinbus.namespace.front.context import LinkContext
from twinbus.namespace.front.fault_effects import FaultableOperation
from twinbus.values import Condition

_CREDIT = 1000


class IncomingLink:
    """A link on which the peer sends messages to one entity."""

    def __init__(self, context: LinkContext, link: Link, entity: Entity, address: LinkAddress) -> None:
        self._context = context
        self._link = link
        self.entity = entity
        self.required_claim = (Claim.SEND, address.path)

    def grant(self) -> None:
        """Grant the peer the full credit. Called at the attach, and whenever half of the credit is used."""
        self._link.flow(_CREDIT)

    def flowed(self) -> None:
        """Do nothing: flows of a peer that sends messages need no reaction."""

    def delivered(self, delivery: Delivered) -> None:
        """Store the messages of one complete transfer."""
        if self._link.credit <= _CREDIT // 2:
            self.grant()
        fault = self._context.faults.trigger(FaultPoint.SEND, self.entity.path, self._link.name)
        if fault is None:
            self._store(delivery, partial(self._answer, delivery))
        else:
            self._apply_fault(fault, delivery)

    def detached(self) -> None:
        """Do nothing: messages that were passed to the engine are stored without the link."""

    def _store(self, delivery: Delivered, answer: Callable[[Refusal | None], None]) -> None:
        size = len(delivery.payload)
        try:
            batched = delivery.message_format == BATCH_FORMAT
            messages = batch_messages(delivery.payload) if batched else [delivery.payload]
            if size > limits.MAX_MESSAGE_BYTES:
                counted = sum(data_section_size(len(message)) for message in messages) if batched else size
                if counted > limits.MAX_MESSAGE_BYTES:
                    text = f"The transfer of {counted} bytes is larger than {limits.MAX_MESSAGE_BYTES} bytes."
                    answer(Refusal(Condition.MESSAGE_SIZE_EXCEEDED, text))
                    return
            envelopes = tuple(map(read_routing_fields, messages))
            transactional = None if delivery.state is None else read_transactional(delivery.state)
        except DecodeError as error:
            answer(Refusal(Condition.DECODE_ERROR, error.description))
            return
        if transactional is not None:
            operation = (self.entity, MessagesSent(None, envelopes))
            transactions = self._context.transactions
            answer(
                transactions.add(
                    transactional.transaction, operation, len(envelopes), claim=self.required_claim, size=size
                )
            )
            return
        incoming = self._context.input
        incoming.storing(size)

        def stored(refusal: Refusal | None) -> None:
            incoming.stored(size)
            answer(refusal)

        # An empty batch is accepted, because the JavaScript client sends an empty batch for an empty array.
        self._context.runtime.submit(self.entity, MessagesSent(stored, envelopes))

    def _answer(self, delivery: Delivered, refusal: Refusal | None) -> None:
        transactional = None if delivery.state is None else read_transactional(delivery.state)
        if transactional is not None and refusal is not None:
            self._context.transactions.mark_rollback_only(transactional.transaction, refusal)
        if delivery.settled:
            return
        output, session = self._context.output, self._link.session
        if refusal is None and transactional is not None:
            state: DeliveryState = transactional_state(transactional.transaction, Accepted())
            output.dispose_received(session, delivery.delivery_id, state)
        elif refusal is None:
            output.accept(session, delivery.delivery_id)
        else:
            output.dispose_received(session, delivery.delivery_id, Rejected(refusals.amqp_error(refusal)))

    def _apply_fault(self, fault: Fault, delivery: Delivered) -> None:
        answer = partial(self._answer, delivery)
        operation = FaultableOperation(
            proceed=lambda: self._store(delivery, answer),
            refuse=answer,
            detach=partial(self._context.links.detach, self._link),
            proceed_without_answer=lambda call: self._store(delivery, lambda _: call()),
        )
        self._context.faults.apply(fault, operation)
