"""Links on which the peer receives: pass credit to the engine, and send the engine's deliveries as transfers.

The peer's credit goes to the engine in portions of deliveries and bytes. So a peer that grants credit faster than it
reads messages does not fill the memory (see `backpressure`). `LockedDeliveries` reports the peer's settlements.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from uuid import UUID

from twinbus.amqp import (
    KIB,
    MIB,
    NO_LOCK_TOKEN,
    DeliveryState,
    Disposed,
    Link,
    Rejected,
    Source,
    broker_annotations,
    consecutive_runs,
    lock_token_annotation,
    splice_delivery,
    splice_locked_delivery,
    splice_unlocked_delivery,
)
from twinbus.ledger import UNIT_BYTES, billable_units
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.engine.effects import Deliver, MeteredOperation, Refusal
from twinbus.namespace.engine.events import (
    CreditGranted,
    MessageOutcome,
    MessagesSettled,
    ReceiverDetached,
    Release,
)
from twinbus.namespace.engine.registry import Entity
from twinbus.namespace.engine.storage_protocol import QueueLane, Row, overlay_properties
from twinbus.namespace.engine.topic import Topic
from twinbus.namespace.faults import Fault, FaultPoint
from twinbus.namespace.front import refusals
from twinbus.namespace.front.addresses import LinkAddress
from twinbus.namespace.front.context import LinkContext
from twinbus.namespace.front.fault_effects import FaultableOperation
from twinbus.namespace.front.unsettled import LockedDelivery
from twinbus.values import Long, Symbol, ticks_from_milliseconds

_log = logging.getLogger(__name__)

SESSION_FILTER = Symbol("com.microsoft:session-filter")
_LOCKED_UNTIL = Symbol("com.microsoft:locked-until-utc")
# One portion of credit: the most deliveries, and the most and the fewest bytes. The links of a connection share
# _CONNECTION_BYTES.
_PORTION = 500
_PORTION_BYTES = 2 * MIB
_MIN_PORTION_BYTES = 64 * KIB
_CONNECTION_BYTES = 8 * MIB
# The fewest bytes that `ConnectionOutput` counts for a portion. Even a small portion may be exceeded by one message.
_MIN_COUNTED_BYTES = 256 * KIB
# The largest ttl in a header, a uint of milliseconds: 49 days (AMQP 3.2.1).
_MAX_TTL = 0xFFFF_FFFF
# A stored message up to this size is delivered in one billable unit, unless it has an overlay: deliveries add less than
# a kilobyte to other messages.
_SURELY_ONE_UNIT = UNIT_BYTES // 2
_HeldDelivery = tuple[Row, bytes | None, int | None]
"""A delivery that was not sent yet: its row, its lock token, and the instant at which its lock ends."""
# The value of the annotation x-opt-message-state; 0 is active.
_STATES = {
    QueueLane.DEFERRED: 1,
    QueueLane.DEAD_DEFERRED: 1,
    QueueLane.TRANSFER_DEAD_DEFERRED: 1,
    QueueLane.SCHEDULED: 2,
}


def encode_delivery(row: Row, *, token: bytes | None, locked_until: int | None) -> list[bytes]:
    """Return the parts of the encoded message for a receiver. `token` is None for receive-and-delete and for peek."""
    if _is_plain(row) and (token is None) == (locked_until is None):
        if token is not None and locked_until is not None:
            spliced = splice_locked_delivery(
                row.raw, row.delivery_count, token, row.seq, row.enqueued, locked_until, row.origin_seq
            )
        else:
            spliced = splice_unlocked_delivery(row.raw, row.delivery_count, row.seq, row.enqueued, row.origin_seq)
        if spliced is not None:
            return spliced
    annotations = broker_annotations(
        row.seq, row.enqueued, locked_until, enqueued_seq=row.origin_seq, state=_STATES.get(QueueLane(row.lane), 0)
    )
    # The time to live of a scheduled message starts when the message is due.
    starts = row.enqueued if row.due is None else row.due
    ttl = None if row.expires is None else min(max(0, row.expires - starts), _MAX_TTL)
    return splice_delivery(
        row.raw,
        delivery_count=row.delivery_count,
        ttl=ttl,
        # Never None: without a lock, the service sends an empty map.
        delivery_annotations=NO_LOCK_TOKEN if token is None else lock_token_annotation(UUID(bytes_le=token)),
        message_annotations=annotations,
        overlay=overlay_properties(row.overlay),
    )


def units_added(stored: int, delivered: int) -> int:
    """Return how many billable units more an operation has by its delivered size than by its stored size (M2)."""
    return billable_units(1, delivered) - billable_units(1, stored)


def _is_plain(row: Row) -> bool:
    return row.lane == QueueLane.ACTIVE and row.expires is None and row.overlay is None


class OutgoingLink:
    """A receiver of one entity: passes the peer's credit to the engine, and the engine's deliveries to the peer."""

    def __init__(self, context: LinkContext, link: Link, entity: Entity, address: LinkAddress) -> None:
        self._context = context
        self._output = context.output
        self._runtime = context.runtime
        self._link = link
        self.entity = entity
        self.required_claim = (Claim.LISTEN, address.path)
        self.session: str | None = None
        """The session that this receiver holds."""
        self._open = True
        # These three count deliveries since the link was attached. Drained credit counts as decided.
        self._decided = 0  # decided by the engine
        self._limit = 0  # allowed by the peer
        self._granted = 0  # passed on to the engine
        self._room = 0  # bytes that the engine may still deliver; at 0 or less, the engine waits for a grant
        self._held: deque[_HeldDelivery] = deque()  # deliveries that a black hole holds, or that wait for credit
        self._swallowed_by: Fault | None = None
        self._owes_drain = False
        self._waits_to_drain = False
        self._output.add_receiver(self)

    # --- from the peer -------------------------------------------------------------------------------------------

    def flowed(self) -> None:
        """Handle a flow of the peer: credit that the peer granted or took back, or a request to drain."""
        self._send_held()
        fault = self._context.faults.trigger(FaultPoint.RECEIVE, self.entity.path, self._link.name)
        if fault is None:
            self._take_credit()
            return
        detach = partial(self._context.links.detach, self._link)
        operation = FaultableOperation(
            proceed=self._take_credit,
            refuse=detach,
            detach=detach,
            proceed_without_answer=lambda _: self._take_credit(),
        )
        self._context.faults.apply(fault, operation)

    def detached(self) -> None:
        """End the receiver in the engine, because the link is gone."""
        self._held.clear()
        self._output.remove_receiver(self)
        if self._open:
            self._open = False
            self._runtime.submit(self.entity, ReceiverDetached(self))

    def settled(
        self, disposition: Disposed, outcome: MessageOutcome, ids: list[int], tokens: tuple[bytes, ...]
    ) -> None:
        """Settle deliveries with one outcome."""
        reply = _ignore if disposition.settled else partial(self._answer_settled, disposition, ids)

        def settle(answer: Callable[[list[Refusal | None] | Refusal], None]) -> None:
            self._runtime.submit(self.entity, MessagesSettled(answer, tokens, outcome, self.session))

        fault = self._context.faults.trigger(FaultPoint.SETTLE, self.entity.path, self._link.name)
        if fault is None:
            settle(reply)
            return
        operation = FaultableOperation(
            proceed=lambda: settle(reply),
            refuse=reply,
            detach=partial(self._context.links.detach, self._link),
            proceed_without_answer=lambda call: settle(lambda _: call()),
        )
        self._context.faults.apply(fault, operation)

    def settled_in_transaction(
        self, transaction: bytes, disposition: Disposed, outcome: MessageOutcome, tokens: dict[int, bytes]
    ) -> None:
        """Make the settlement of deliveries part of a transaction. They stay locked until the transaction ends."""
        operation = (self.entity, MessagesSettled(None, tuple(tokens.values()), outcome, self.session))
        session = self._link.session

        def ended(committed: bool) -> None:
            if committed:
                self._context.unsettled.transaction_committed(session, list(tokens), disposition)

        refusal = self._context.transactions.add(transaction, operation, len(tokens), ended, claim=self.required_claim)
        if not disposition.settled:
            state = disposition.state if refusal is None else Rejected(refusals.amqp_error(refusal))
            for first, last in consecutive_runs(list(tokens)):
                self._output.dispose_sent(session, first, last, state, settled=False)

    def is_locked(self, token: bytes) -> bool:
        """Return whether a delivery can still be settled."""
        return not isinstance(self.entity, Topic) and token in self.entity.receive_state.locks.by_token

    def _answer_settled(self, disposition: Disposed, ids: list[int], results: list[Refusal | None] | Refusal) -> None:
        """Confirm settlements, one disposition for each run of ids that have the same result."""
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
                    state = Rejected(None)  # with the error in the answer, clients would report that the call failed
                else:
                    state = disposition.state
                self._output.dispose_sent(self._link.session, ids[first], ids[index - 1], state)
                first = index

    # --- credit --------------------------------------------------------------------------------------------------

    def _take_credit(self) -> None:
        if not self._open:
            return
        self._limit = self._decided + self._link.flow_credit
        self._waits_to_drain = self._link.drain and not self._output.has_room
        if self._waits_to_drain:
            self._output.stall(self)
        elif self._link.drain:
            self._pass_on(self._limit)
        else:
            self._grant(lowered=self._limit < self._granted)

    def _grant(self, *, lowered: bool = False) -> None:
        """Pass the next portion of credit to the engine, or stall if too many bytes wait until the peer reads."""
        if not self._open or self._held:
            return
        limit = min(self._limit, self._decided + _PORTION)
        if lowered or limit > self._granted or self._is_starved:
            if not lowered and (not self._output.has_room or self._link.pending_bytes > _PORTION_BYTES):
                self._output.stall(self)
                return
            self._pass_on(limit if lowered else max(limit, self._granted))

    @property
    def _is_starved(self) -> bool:
        """Whether the engine may deliver more messages by their number, but not by their bytes."""
        return self._room <= 0 and self._decided < self._granted

    def _pass_on(self, limit: int) -> None:
        share = _CONNECTION_BYTES // max(1, len(self._context.links))
        self._granted, self._room = limit, min(_PORTION_BYTES, max(_MIN_PORTION_BYTES, share))
        self._runtime.submit(self.entity, CreditGranted(self, limit, self._link.drain, self._room))
        self._output.deciding(self._runtime, self.entity, max(_MIN_COUNTED_BYTES, self._room))

    def pause(self) -> None:
        """Stop the engine's deliveries on this link until `resume`, because the peer leaves too many bytes unread."""
        if self._open and self._decided < self._granted and not self._link.drain:
            self._room = 0
            self._runtime.submit(self.entity, CreditGranted(self, self._granted, False, 0))
            self._output.stall(self)

    def resume(self) -> None:
        """Pass credit to the engine again, because the connection has room."""
        if self._waits_to_drain:
            self._take_credit()
        else:
            self._grant()

    # --- from the engine -----------------------------------------------------------------------------------------

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
                self._hold_or_release(rows[sent:], tokens[sent:])
        if self._is_starved or (self._granted < self._limit and self._granted - self._decided <= _PORTION // 2):
            self._grant()

    def drain(self) -> None:
        """Use up the remaining credit, because the peer asked to drain and the entity has no more messages."""
        self._owes_drain = bool(self._held) and self._link.credit > 0
        if self._open and self._link.drain and not self._owes_drain:
            self._decided += self._link.flow_credit
            self._link.drained()
            self._output.flush_soon()

    def accept_session(self, session: str, locked_until: int) -> None:
        """Accept the attach, because the engine gave this receiver a session. `locked_until` is in milliseconds."""
        self.session = session
        if self._open:
            source = self._link.source
            assert isinstance(source, Source), "checked when the link was attached"
            self._link.accept(
                source=replace(source, filter={**(source.filter or {}), SESSION_FILTER: session}),
                properties={_LOCKED_UNTIL: Long(ticks_from_milliseconds(locked_until))},
                max_message_size=limits.MAX_MESSAGE_BYTES,
            )
            self._output.flush_soon()

    def detach(self, refusal: Refusal) -> None:
        """Detach the link, because the engine ended this receiver."""
        if self._open:
            self._open = False
            self._context.links.detach(self._link, refusal)

    def _hold_or_release(self, rows: list[Row], tokens: list[bytes | None]) -> None:
        """Release locked deliveries that cannot be sent, because the link is gone or has no credit any more.

        Deliveries without a lock wait for credit.
        """
        if locked := tuple(token for token in tokens if token is not None):
            # The messages are available again, as if the engine had not delivered them.
            self._runtime.submit(self.entity, MessagesSettled(_ignore, locked, Release(), self.session))
        elif self._open:
            # The messages are deleted from the entity already, so this receiver must get them.
            self._held.extend((row, None, None) for row in rows)
        else:
            _log.warning(
                "%d messages received and deleted found their receiver gone",
                len(rows),
                extra={"entity": self.entity.path},
            )

    def _is_swallowed(self) -> bool:
        """Return whether a black hole holds the deliveries to the peer. They are sent when the black hole ends."""
        fault = self._context.faults.black_hole(FaultPoint.RECEIVE, self.entity.path, self._link.name)
        if fault is None or not self._open:
            return False
        if fault is not self._swallowed_by:
            self._swallowed_by = fault
            self._context.faults.hold(fault, self._black_hole_ended)
        return True

    def _black_hole_ended(self) -> None:
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
        unsettled: dict[int, LockedDelivery] = {}
        more_units = 0
        for row, token in zip(rows, tokens, strict=True):
            try:
                parts = encode_delivery(row, token=token, locked_until=until)
                if row.size > _SURELY_ONE_UNIT or row.overlay is not None:
                    more_units += units_added(row.size, sum(map(len, parts)))
                if token is None:
                    send(link.delivery_count.to_bytes(8, "big"), parts, settled=True)
                else:
                    unsettled[send(token, parts)] = (self, token)
            except Exception:  # a message that cannot be sent must not prevent that the others are sent
                _log.exception("a message could not be sent", extra={"entity": self.entity.path})
                self._limit += 1  # the message used none of the peer's credit
        self._runtime.count_units(self.entity, MeteredOperation.RECEIVE, more_units)
        self._output.delivering(sum(row.size for row in rows))
        self._context.unsettled.add(link.session, unsettled)
        self._output.flush_soon()


def _ignore(_: object) -> None:
    """Ignore an answer that nobody needs."""
