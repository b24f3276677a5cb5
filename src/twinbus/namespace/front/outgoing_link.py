"""Links on which the peer receives: credit to the engine, its deliveries out as transfers, settlements back to it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from twinbus.amqp import (
    KIB,
    MIB,
    Accepted,
    DeliveryState,
    Disposed,
    Link,
    Modified,
    Rejected,
    Released,
    broker_annotations,
    consecutive_runs,
    lock_token_annotation,
    splice_delivery,
    splice_locked_delivery,
)
from twinbus.namespace.engine.effects import Deliver, Refusal
from twinbus.namespace.engine.events import (
    Abandon,
    Complete,
    CreditGranted,
    Defer,
    MessageOutcome,
    MessagesSettled,
    MoveToDeadLetter,
    ReceiverDetached,
    Release,
)
from twinbus.namespace.engine.registry import Entity
from twinbus.namespace.engine.settlement import overlay_properties
from twinbus.namespace.engine.storage_protocol import QueueLane, Row
from twinbus.namespace.engine.topic import Topic
from twinbus.namespace.faults import Fault, FaultPoint
from twinbus.namespace.front import refusals
from twinbus.namespace.front.addresses import LinkAddress
from twinbus.namespace.front.fault_effects import FaultableOperation

if TYPE_CHECKING:
    from twinbus.namespace.front.amqp_connection import AmqpConnection

_log = logging.getLogger(__name__)

# The engine decides about this many deliveries and bytes at a time, so that a reader slower than its credit fills no
# memory. The links of a connection share its bytes.
_SLICE = 500
_SLICE_BYTES = 2 * MIB
_LEAST_SLICE_BYTES = 64 * KIB
_CONNECTION_BYTES = 8 * MIB
# What a grant counts at least: the engine may exceed the room by one message.
_LEAST_COUNTED_BYTES = 256 * KIB
# The header's ttl is a uint of milliseconds: 49 days (AMQP 3.2.1).
_LONGEST_TTL = 0xFFFF_FFFF
_Held = tuple[Row, bytes | None, int | None]
"""A delivery that waits: row, token, locked until."""
_STATES = {
    QueueLane.DEFERRED: 1,
    QueueLane.DEAD_DEFERRED: 1,
    QueueLane.TRANSFER_DEAD_DEFERRED: 1,
    QueueLane.SCHEDULED: 2,
}


def encoded(row: Row, *, token: bytes | None, locked_until: int | None) -> list[bytes]:
    """A stored message as a receiver gets it."""
    if token is not None and locked_until is not None and _is_plain(row):
        usual = splice_locked_delivery(
            row.raw, row.delivery_count, token, row.seq, row.enqueued, locked_until, row.origin_seq
        )
        if usual is not None:
            return usual
    annotations = broker_annotations(
        row.seq, row.enqueued, locked_until, enqueued_seq=row.origin_seq, state=_STATES.get(QueueLane(row.lane), 0)
    )
    # The life of a message that is scheduled begins when it is due.
    begins = row.enqueued if row.due is None else row.due
    ttl = None if row.expires is None else min(max(0, row.expires - begins), _LONGEST_TTL)
    return splice_delivery(
        row.raw,
        delivery_count=row.delivery_count,
        ttl=ttl,
        delivery_annotations=None if token is None else lock_token_annotation(UUID(bytes_le=token)),
        message_annotations=annotations,
        overlay=overlay_properties(row.overlay),
    )


def _is_plain(row: Row) -> bool:
    return row.lane == QueueLane.ACTIVE and row.expires is None and row.overlay is None


class OutgoingLink:
    """A receiver of one entity, as the engine and the peer see it."""

    def __init__(self, connection: AmqpConnection, link: Link, entity: Entity, address: LinkAddress) -> None:
        self._connection = connection
        self._link = link
        self.entity = entity
        self.address = address
        # Cumulative since the link was attached: deliveries the engine decided and drained credit; what the peer
        # allows; what of that the engine was told.
        self._decided = 0
        self._limit = 0
        self._granted = 0
        self._held: deque[_Held] = deque()
        self._swallowed_by: Fault | None = None
        self._owes_drain = False
        self._waits_to_drain = False
        self._room = 0  # bytes the engine may still decide about; 0 or less: it waits for the next grant
        self._open = True
        self.session: str | None = None

    # --- from the peer -----------------------------------------------------------------------------------------

    def flowed(self) -> None:
        """The peer granted credit, took it back, or asked to be drained."""
        self._send_held()
        fault = self._connection.trigger(FaultPoint.RECEIVE, self.entity.path, self._link.name)
        if fault is None:
            self._take_credit()
            return
        end = partial(self._connection.detach, self._link)
        struck = FaultableOperation(
            go_on=self._take_credit, refuse=end, detach=end, unanswered=lambda _: self._take_credit()
        )
        self._connection.suffer(fault, struck)

    def detached(self) -> None:
        self._held.clear()
        if self._open:
            self._open = False
            self._connection.runtime.submit(self.entity, ReceiverDetached(self))

    def settled(
        self, disposition: Disposed, outcome: MessageOutcome, ids: list[int], tokens: tuple[bytes, ...]
    ) -> None:
        """The peer settled deliveries of this link, all with one outcome."""
        reply = _ignore if disposition.settled else partial(self._answer_settled, disposition, ids)
        fault = self._connection.trigger(FaultPoint.SETTLE, self.entity.path, self._link.name)
        if fault is None:
            self._connection.runtime.submit(self.entity, MessagesSettled(reply, tokens, outcome, self.session))
            return

        def settle(answer: Callable[[list[Refusal | None] | Refusal], None]) -> None:
            self._connection.runtime.submit(self.entity, MessagesSettled(answer, tokens, outcome, self.session))

        struck = FaultableOperation(
            go_on=lambda: settle(reply),
            refuse=reply,
            detach=partial(self._connection.detach, self._link),
            unanswered=lambda call: settle(lambda _: call()),
        )
        self._connection.suffer(fault, struck)

    def settled_in(
        self, transaction: bytes, disposition: Disposed, outcome: MessageOutcome, held: dict[int, bytes]
    ) -> None:
        """The peer settled deliveries, by id and token, within a transaction: they stay under lock until it ends."""
        operation = (self.entity, MessagesSettled(None, tuple(held.values()), outcome, self.session))

        def ended(carried_out: bool) -> None:
            if carried_out:
                self._connection.settled(self._link.session, list(held), disposition)

        refusal = self._connection.transactions.add(transaction, operation, len(held), ended)
        if not disposition.settled:
            state = disposition.state if refusal is None else Rejected(refusals.amqp_error(refusal))
            for first, last in consecutive_runs(list(held)):
                self._connection.dispose_sent(self._link.session, first, last, state, settled=False)

    def _take_credit(self) -> None:
        if not self._open:
            return
        self._limit = self._decided + self._link.flow_credit
        self._waits_to_drain = self._link.drain and not self._connection.has_room
        if self._waits_to_drain:
            self._connection.stall(self)
        elif self._link.drain:
            self._pass_on(self._limit)
        else:
            self._grant(lowered=self._limit < self._granted)

    def _grant(self, *, lowered: bool = False) -> None:
        """Pass credit on to the engine, a slice at a time and only while the peer reads."""
        if not self._open or self._held:
            return
        limit = min(self._limit, self._decided + _SLICE)
        if lowered or limit > self._granted or self._is_starved:
            if not lowered and (not self._connection.has_room or self._link.pending_bytes > _SLICE_BYTES):
                self._connection.stall(self)
                return
            self._pass_on(limit if lowered else max(limit, self._granted))

    @property
    def _is_starved(self) -> bool:
        """Whether the engine has credit left and no bytes for it."""
        return self._room <= 0 and self._decided < self._granted

    def _pass_on(self, limit: int) -> None:
        share = _CONNECTION_BYTES // self._connection.link_count
        self._granted, self._room = limit, min(_SLICE_BYTES, max(_LEAST_SLICE_BYTES, share))
        granted = CreditGranted(self, limit, self._link.drain, self._room)
        self._connection.runtime.submit(self.entity, granted)
        self._connection.deciding(self.entity, max(_LEAST_COUNTED_BYTES, self._room))

    def is_locked(self, token: bytes) -> bool:
        """Whether a delivery can still be settled."""
        return not isinstance(self.entity, Topic) and token in self.entity.receive_state.locks.by_token

    def pause(self) -> None:
        """The peer leaves too much unread: the engine delivers nothing on this link until `resume`."""
        if self._open and self._decided < self._granted and not self._link.drain:
            self._room = 0
            self._connection.runtime.submit(self.entity, CreditGranted(self, self._granted, False, 0))
            self._connection.stall(self)

    def resume(self) -> None:
        """The peer reads again."""
        if self._waits_to_drain:
            self._take_credit()
        else:
            self._grant()

    # --- from the engine ---------------------------------------------------------------------------------------

    def deliver(self, effect: Deliver) -> None:
        """Send messages to the peer."""
        rows, tokens, until = effect.rows, effect.tokens, effect.locked_until
        self._decided += len(rows)
        for row in rows:
            self._room -= row.size
        if self._held or self._is_swallowed():
            self._held.extend((row, token, until) for row, token in zip(rows, tokens, strict=True))
        else:
            sent = min(len(rows), self._link.credit) if self._open else 0
            self._send(rows[:sent], tokens[:sent], until)
            if sent < len(rows):
                self._keep_or_release(rows[sent:], tokens[sent:])
        if self._is_starved or (self._granted < self._limit and self._granted - self._decided <= _SLICE // 2):
            self._grant()

    def _keep_or_release(self, rows: list[Row], tokens: list[bytes | None]) -> None:
        """The link is gone, or its credit was taken back meanwhile."""
        if locked := tuple(token for token in tokens if token is not None):
            # As if they had not been delivered.
            self._connection.runtime.submit(self.entity, MessagesSettled(_ignore, locked, Release(), self.session))
        elif self._open:
            self._held.extend((row, None, None) for row in rows)  # deleted already: they have to reach this receiver
        else:
            _log.warning(
                "%d messages received and deleted found their receiver gone",
                len(rows),
                extra={"entity": self.entity.path},
            )

    def _is_swallowed(self) -> bool:
        """Whether a black hole lies between this delivery and its receiver; what it holds goes on when it is over."""
        faults = self._connection.site.faults
        fault = faults.black_hole(FaultPoint.RECEIVE, self.entity.path, self._link.name) if faults.active else None
        if fault is None or not self._open:
            return False
        if fault is not self._swallowed_by:
            self._swallowed_by = fault
            self._connection.hold(fault, self._speak_again)
        return True

    def _speak_again(self) -> None:
        self._swallowed_by = None
        self._send_held()
        self._grant()
        if self._owes_drain:
            self.drain()

    def _send_held(self) -> None:
        while self._held and self._link.credit > 0 and not self._is_swallowed():
            row, token, until = self._held.popleft()
            self._send([row], [token], until)

    def _send(self, rows: list[Row], tokens: list[bytes | None], until: int | None) -> None:
        if not rows:
            return
        link, send = self._link, self._link.send
        unsettled: dict[int, tuple[OutgoingLink, bytes]] = {}
        for row, token in zip(rows, tokens, strict=True):
            try:
                parts = encoded(row, token=token, locked_until=until)
                if token is None:
                    send(link.delivery_count.to_bytes(8, "big"), parts, settled=True)
                else:
                    unsettled[send(token, parts)] = (self, token)
            except Exception:  # one message's trouble must not keep others from their receiver
                _log.exception("a message could not be sent", extra={"entity": self.entity.path})
                self._limit += 1  # it took none of the peer's credit
        self._connection.delivering(sum(row.size for row in rows))
        self._connection.remember(link.session, unsettled)
        self._connection.flush_soon()

    def drain(self) -> None:
        """Nothing is there: the rest of the credit is used up."""
        self._owes_drain = bool(self._held) and self._link.credit > 0
        if self._open and self._link.drain and not self._owes_drain:
            self._decided += self._link.flow_credit
            self._link.drained()
            self._connection.flush_soon()

    def accept_session(self, session: str, locked_until: int) -> None:
        """The engine gave this receiver its session."""
        self.session = session
        if self._open:
            self._connection.accept_session(self._link, session, locked_until)

    def detach(self, refusal: Refusal) -> None:
        """The engine ended this receiver."""
        if self._open:
            self._open = False
            self._connection.detach(self._link, refusal)

    def _answer_settled(self, disposition: Disposed, ids: list[int], results: list[Refusal | None] | Refusal) -> None:
        """Confirm in the ranges the peer used; where outcomes differ, each run apart."""
        if isinstance(results, Refusal):
            results = [results] * len(ids)
        first = 0
        for index in range(1, len(ids) + 1):
            run_ends = index == len(ids) or results[index] != results[first] or ids[index] != ids[index - 1] + 1
            if run_ends:
                refusal = results[first]
                if refusal is not None:
                    state: DeliveryState | None = Rejected(refusals.amqp_error(refusal))
                elif isinstance(disposition.state, Rejected):
                    state = Rejected(None)  # clients take an echoed error for a failure of the call
                else:
                    state = disposition.state
                self._connection.dispose_sent(self._link.session, ids[first], ids[index - 1], state)
                first = index


def outcome_of(state: DeliveryState | None, *, settled: bool) -> MessageOutcome | None:
    """What a delivery state asks for; None if it asks for nothing (a mere update)."""
    match state:
        case Accepted():
            return Complete()
        case Released():
            return Release()
        case Modified():
            properties = _text_keys(state.message_annotations)
            return Defer(properties) if state.undeliverable_here else Abandon(properties)
        case Rejected():
            info = _text_keys(state.error.info if state.error is not None else None) or {}
            reason, description = info.pop("DeadLetterReason", None), info.pop("DeadLetterErrorDescription", None)
            return MoveToDeadLetter(reason, description, info or None)
        case _:
            # amqp-core-messaging §3.4.5: who settles without an outcome leaves the message as it was.
            return Release() if settled else None


def _text_keys(entries: dict[Any, Any] | None) -> dict[str, Any] | None:
    return {str(key): value for key, value in entries.items()} if entries else None


def _ignore(_: object) -> None:
    """Nobody waits for this answer."""
