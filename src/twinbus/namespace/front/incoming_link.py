"""Links on which the peer sends: transfers in, MessagesSent to the engine, its answers back as dispositions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from twinbus.amqp import (
    BATCH_FORMAT,
    Accepted,
    DecodeError,
    Delivered,
    DeliveryState,
    Link,
    Rejected,
    batch_messages,
    read_routing_fields,
    read_transactional,
    transactional_state,
)
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.events import MessagesSent
from twinbus.namespace.engine.registry import Entity
from twinbus.namespace.faults import Fault, FaultPoint
from twinbus.namespace.front import refusals
from twinbus.namespace.front.addresses import LinkAddress
from twinbus.namespace.front.fault_effects import FaultableOperation
from twinbus.values import Condition

if TYPE_CHECKING:
    from twinbus.namespace.front.amqp_connection import AmqpConnection

_CREDIT = 1000


class IncomingLink:
    """A link that brings messages to one entity."""

    def __init__(self, connection: AmqpConnection, link: Link, entity: Entity, address: LinkAddress) -> None:
        self._connection = connection
        self._link = link
        self.entity = entity
        self.address = address

    def grant(self) -> None:
        """Let the peer send. Its credit is topped up as it is used."""
        self._link.flow(_CREDIT)

    def flowed(self) -> None:
        """The sending peer told its state; nothing depends on it."""

    def delivered(self, delivery: Delivered) -> None:
        """One transfer arrived in full."""
        if self._link.credit <= _CREDIT // 2:
            self.grant()
        fault = self._connection.trigger(FaultPoint.SEND, self.entity.path, self._link.name)
        if fault is None:
            self._store(delivery, partial(self._answer, delivery))
        else:
            self._suffer(fault, delivery)

    def detached(self) -> None:
        """Messages already handed to the engine are stored all the same."""

    def _store(self, delivery: Delivered, answer: Callable[[Refusal | None], None]) -> None:
        size = len(delivery.payload)
        if size > limits.MAX_MESSAGE_BYTES:
            text = f"The transfer of {size} bytes is larger than {limits.MAX_MESSAGE_BYTES} bytes."
            answer(Refusal(Condition.MESSAGE_SIZE_EXCEEDED, text))
            return
        try:
            batched = delivery.message_format == BATCH_FORMAT
            messages = batch_messages(delivery.payload) if batched else [delivery.payload]
            envelopes = tuple(map(read_routing_fields, messages))
            transactional = None if delivery.state is None else read_transactional(delivery.state)
        except DecodeError as error:
            answer(Refusal(Condition.DECODE_ERROR, error.description))
            return
        if transactional is not None:
            operation = (self.entity, MessagesSent(None, envelopes))
            answer(self._connection.transactions.add(transactional.transaction, operation, len(envelopes), size=size))
            return
        self._connection.storing(size)

        def stored(refusal: Refusal | None) -> None:
            self._connection.stored(size)
            answer(refusal)

        # A batch of nothing is accepted: the JavaScript client sends one for an empty array.
        self._connection.runtime.submit(self.entity, MessagesSent(stored, envelopes))

    def _answer(self, delivery: Delivered, refusal: Refusal | None) -> None:
        transactional = None if delivery.state is None else read_transactional(delivery.state)
        if transactional is not None and refusal is not None:
            self._connection.transactions.doom(transactional.transaction, refusal)
        if delivery.settled:
            return
        if refusal is None and transactional is not None:
            state: DeliveryState = transactional_state(transactional.transaction, Accepted())
            self._connection.dispose_received(self._link.session, delivery.delivery_id, state)
        elif refusal is None:
            self._connection.accept(self._link.session, delivery.delivery_id)
        else:
            state = Rejected(refusals.amqp_error(refusal))
            self._connection.dispose_received(self._link.session, delivery.delivery_id, state)

    def _suffer(self, fault: Fault, delivery: Delivered) -> None:
        answer = partial(self._answer, delivery)
        struck = FaultableOperation(
            go_on=lambda: self._store(delivery, answer),
            refuse=answer,
            detach=partial(self._connection.detach, self._link),
            unanswered=lambda call: self._store(delivery, lambda _: call()),
        )
        self._connection.suffer(fault, struck)
