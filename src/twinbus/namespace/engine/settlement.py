"""Settlement: drops, returns, defers or dead-letters a message that a client settles, or whose lock or time ended.

The encoded message is never rewritten. Properties that settlement sets (reason of dead-lettering, properties given
with abandon or defer) go into the overlay of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, assert_never

from twinbus.namespace.engine.effects import (
    MESSAGE_LOCK_LOST,
    AnswerRequest,
    EngineDecision,
    Meter,
    MeteredOperation,
    Refusal,
    not_allowed,
    session_lock_lost,
)
from twinbus.namespace.engine.events import (
    Abandon,
    Complete,
    Defer,
    LocksRenewed,
    MessageOutcome,
    MessagesSettled,
    MoveToDeadLetter,
    Release,
)
from twinbus.namespace.engine.limits import MAX_PROPERTIES_BYTES
from twinbus.namespace.engine.receive_state import MessageLock, ReceiveState
from twinbus.namespace.engine.storage_protocol import DropRow, MoveRow, QueueLane, Row, merge_overlay
from twinbus.values import Condition

_OPERATIONS: Final[dict[type[MessageOutcome], MeteredOperation]] = {
    Complete: MeteredOperation.COMPLETE,
    Abandon: MeteredOperation.ABANDON,
    Defer: MeteredOperation.DEFER,
    MoveToDeadLetter: MeteredOperation.DEAD_LETTER,
    Release: MeteredOperation.RELEASE,
}
_DEFERRED_LANE: Final = {
    QueueLane.ACTIVE: QueueLane.DEFERRED,
    QueueLane.DEAD: QueueLane.DEAD_DEFERRED,
    QueueLane.TRANSFER_DEAD: QueueLane.TRANSFER_DEAD_DEFERRED,
}


REASON: Final = "DeadLetterReason"
DESCRIPTION: Final = "DeadLetterErrorDescription"


def dead_letter_properties(
    reason: str | None, description: str | None, properties: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the properties that a dead-lettered message gets."""
    found: dict[str, Any] = dict(properties or {})
    if reason is not None:
        found[REASON] = reason
    if description is not None:
        found[DESCRIPTION] = description
    return found


# --- requests ----------------------------------------------------------------------------------------------------


def settle(state: ReceiveState, event: MessagesSettled, now: int, decision: EngineDecision) -> None:
    """Settle messages by lock token. Any link, not only the receiver's, can use a token until the lock expires."""
    lost = MESSAGE_LOCK_LOST
    if event.session is not None:
        held = state.sessions.held.get(event.session)
        if held is None or held.until <= now:
            lost = session_lock_lost(event.session)
            decision.effects.append(AnswerRequest(event.reply, [lost] * len(event.tokens)))
            return
    outcome = event.outcome
    completes = type(outcome) is Complete
    results: list[Refusal | None] = []
    for token in event.tokens:
        lock = state.locks.find(token, now)
        if lock is None:
            results.append(lost)
        elif completes:
            state.locks.remove(lock)
            drop_row(state, lock.row, decision)
            results.append(None)
        else:
            results.append(_settle_one(state, lock, outcome, now, decision))
    decision.effects.append(AnswerRequest(event.reply, results))
    settled = results.count(None)
    if settled:
        decision.effects.append(Meter(state.path, _OPERATIONS[type(outcome)], settled))


def _settle_one(
    state: ReceiveState, lock: MessageLock, outcome: MessageOutcome, now: int, decision: EngineDecision
) -> Refusal | None:
    row = lock.row
    if (refusal := outcome_refusal(row, outcome)) is not None:
        return refusal
    state.locks.remove(lock)
    match outcome:
        case Complete():
            drop_row(state, row, decision)
        case Abandon(properties):
            return_row(state, row, now, decision, failed=True, properties=properties)
        case Defer(properties):
            _defer_row(state, row, decision, properties)
        case MoveToDeadLetter(reason, description, properties):
            dead_letter_row(state, row, decision, dead_letter_properties(reason, description, properties))
        case Release():
            return_row(state, row, now, decision, failed=False)
        case _:
            assert_never(outcome)
    return None


def outcome_refusal(row: Row, outcome: MessageOutcome) -> Refusal | None:
    """Return why a locked message cannot be settled with this outcome; None if the outcome is allowed."""
    if isinstance(outcome, MoveToDeadLetter) and row.lane >= QueueLane.DEAD:
        return not_allowed("A message of a dead-letter queue cannot be dead-lettered again.")
    properties = _properties_set_by(outcome)
    if properties and (size := len(merge_overlay(row.overlay, properties) or b"")) > MAX_PROPERTIES_BYTES:
        text = f"The properties set by settling take {size} bytes; at most {MAX_PROPERTIES_BYTES} may be used."
        return Refusal(Condition.ARGUMENT_OUT_OF_RANGE, text)
    return None


def _properties_set_by(outcome: MessageOutcome) -> Mapping[str, Any] | None:
    match outcome:
        case Abandon(properties) | Defer(properties):
            return properties
        case MoveToDeadLetter(reason, description, properties):
            return dead_letter_properties(reason, description, properties)
        case _:
            return None


def renew_locks(state: ReceiveState, event: LocksRenewed, now: int, decision: EngineDecision) -> None:
    """Renew the locks of the event. If one of them is lost or belongs to a session, renew none."""
    found = [state.locks.find(token, now) for token in event.tokens]
    locks = [lock for lock in found if lock is not None]
    if len(locks) < len(found):
        decision.effects.append(AnswerRequest(event.reply, MESSAGE_LOCK_LOST))
        return
    if any(lock.session for lock in locks):
        refusal = not_allowed("The lock of a session's message is renewed with its session.")
        decision.effects.append(AnswerRequest(event.reply, refusal))
        return
    until = now + state.settings.lock_duration
    for lock in locks:
        state.locks.renew(lock, until)
    decision.effects += (
        AnswerRequest(event.reply, [until] * len(locks)),
        Meter(state.path, MeteredOperation.RENEW_LOCK, len(locks)),
    )


# --- what happens to one row -------------------------------------------------------------------------------------


def drop_row(state: ReceiveState, row: Row, decision: EngineDecision) -> None:
    """Remove an unlocked row from the store."""
    decision.writes.append(DropRow(queue=row.queue, lane=row.lane, seq=row.seq))
    state.counters.drop(row.lane, row.charge)


def expire_row(state: ReceiveState, row: Row, decision: EngineDecision) -> None:
    """Dead-letter or drop an unlocked row whose time to live is over, as `dead_lettering_on_expiration` says."""
    if state.settings.dead_lettering_on_expiration:
        properties = dead_letter_properties("TTLExpiredException", "The message expired and was dead lettered.")
        dead_letter_row(state, row, decision, properties)
    else:
        drop_row(state, row, decision)


def return_row(
    state: ReceiveState,
    row: Row,
    now: int,
    decision: EngineDecision,
    *,
    failed: bool,
    properties: Mapping[str, Any] | None = None,
) -> None:
    """Make a row available again after its lock ended.

    If `failed`, the delivery count rises by 1, and the row is dead-lettered when the count reaches
    `max_delivery_count`. A row whose time to live ended while it was locked expires now.
    """
    if failed:
        row = row._replace(delivery_count=row.delivery_count + 1)
    if row.lane < QueueLane.DEAD:  # a dead-lettered message does not expire, and has no maximum delivery count
        if row.is_expired(now):
            expire_row(state, row, decision)
            return
        if failed and row.delivery_count >= state.settings.max_delivery_count:
            reason = dead_letter_properties(
                "MaxDeliveryCountExceeded",
                f"Message could not be consumed after {state.settings.max_delivery_count} delivery attempts.",
                properties,
            )
            dead_letter_row(state, row, decision, reason)
            return
    if failed or properties:
        decision.writes.append(_move(row, row.lane, row.expires, merge_overlay(row.overlay, properties)))
    if row.lane in _DEFERRED_LANE and (lane := state.lane_of(row)) is not None:
        lane.read_ahead.make_available(row.seq, row.size)
        state.request_delivery(lane)


def dead_letter_row(
    state: ReceiveState,
    row: Row,
    decision: EngineDecision,
    properties: Mapping[str, Any],
    to_lane: QueueLane = QueueLane.DEAD,
) -> None:
    """Move an unlocked row to a dead-letter sub-queue, where messages do not expire."""
    decision.writes.append(_move(row, to_lane, None, merge_overlay(row.overlay, properties)))
    state.counters.move(row.lane, to_lane)
    lane = state.dead_letter if to_lane == QueueLane.DEAD else state.transfer_dead_letter
    lane.read_ahead.make_available(row.seq, row.size)
    state.request_delivery(lane)


def _defer_row(state: ReceiveState, row: Row, decision: EngineDecision, properties: Mapping[str, Any] | None) -> None:
    to_lane = _DEFERRED_LANE.get(QueueLane(row.lane), QueueLane(row.lane))
    decision.writes.append(_move(row, to_lane, row.expires, merge_overlay(row.overlay, properties)))
    state.counters.move(row.lane, to_lane)


def _move(row: Row, to_lane: int, expires: int | None, overlay: bytes | None) -> MoveRow:
    """Return the write that moves a row to the lane `to_lane`, which may be the row's own, under the same number."""
    return MoveRow(
        queue=row.queue,
        lane=row.lane,
        seq=row.seq,
        to_lane=to_lane,
        to_seq=row.seq,
        enqueued=row.enqueued,
        expires=expires,
        delivery_count=row.delivery_count,
        overlay=overlay,
    )
