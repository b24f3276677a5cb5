"""Links on which the peer sends: transfers in, MessagesSent to the engine, its answers back as dispositions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from twinbus.amqp.conditions import Condition, DecodeError
from twinbus.amqp.events import Delivered
from twinbus.amqp.link import Link
from twinbus.amqp.performatives import Accepted, Rejected
from twinbus.amqp.sections import batch_messages, read_envelope
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.events import MessagesSent
from twinbus.namespace.engine.namespace import Entity
from twinbus.namespace.faults import Fault, FaultKind, Point
from twinbus.namespace.front import refusals
from twinbus.namespace.front.addresses import Address

if TYPE_CHECKING:
    from twinbus.namespace.front.amqp import AmqpConnection

BATCH_FORMAT = 0x80013700
_CREDIT = 1000


class IncomingLink:
    """A link that brings messages to one entity."""

    def __init__(self, connection: AmqpConnection, link: Link, entity: Entity, address: Address) -> None:
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
        fault = self._connection.strike(Point.SEND, self.entity.path, self._link.name)
        if fault is None:
            self._store(delivery, drop_answer=False)
        else:
            self._suffer(fault, delivery)

    def detached(self) -> None:
        """Messages already handed to the engine are stored all the same."""

    def _store(self, delivery: Delivered, *, drop_answer: bool) -> None:
        try:
            batched = delivery.message_format == BATCH_FORMAT
            messages = batch_messages(delivery.payload) if batched else [delivery.payload]
            envelopes = tuple(map(read_envelope, messages))
        except DecodeError as error:
            self._answer(delivery, Refusal(Condition.DECODE_ERROR, error.description))
            return
        reply = _ignore if drop_answer or delivery.settled else partial(self._answer, delivery)
        self._connection.driver.submit(self.entity, MessagesSent(reply, envelopes))

    def _answer(self, delivery: Delivered, refusal: Refusal | None) -> None:
        if refusal is None:
            self._connection.accept(self._link.session, delivery.delivery_id)
        elif not delivery.settled:
            state = Rejected(refusals.error_of(refusal))
            self._connection.dispose_received(self._link.session, delivery.delivery_id, state)

    def _suffer(self, fault: Fault, delivery: Delivered) -> None:
        match fault.kind:
            case FaultKind.SERVER_BUSY:
                self._answer(delivery, refusals.busy())
            case FaultKind.INTERNAL_ERROR:
                self._answer(delivery, refusals.INTERNAL)
            case FaultKind.DETACH:
                self._connection.detach(self._link, refusals.DETACHED)
            case FaultKind.DROP_ACK:
                self._store(delivery, drop_answer=True)
            case FaultKind.DELAY:
                self._connection.later(fault.delay, lambda: self._store(delivery, drop_answer=False))
            case FaultKind.CRASH:
                self._crash(fault, delivery)
            case FaultKind.BLACK_HOLE | FaultKind.REFUSE:
                pass  # neither stored nor answered

    def _crash(self, fault: Fault, delivery: Delivered) -> None:
        if fault.after:
            envelopes = (read_envelope(delivery.payload),)
            self._connection.driver.submit(self.entity, MessagesSent(lambda _: self._connection.crash(), envelopes))
        else:
            self._connection.crash()


def _ignore(_: object) -> None:
    """Nobody waits for this answer."""


ACCEPTED = Accepted()
