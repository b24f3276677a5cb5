"""What becomes of a message that was held: settled, given back, or taken back when its lock ran out.

Who may be given it next is decided in `serving`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, assert_never

from twinbus.amqp import decode_all, encode
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
from twinbus.namespace.engine.storage_protocol import DropRow, MoveRow, QueueLane, Row
from twinbus.values import Condition

_OPERATIONS: Final[dict[type[MessageOutcome], MeteredOperation]] = {
    Complete: MeteredOperation.COMPLETE,
    Abandon: MeteredOperation.ABANDON,
    Defer: MeteredOperation.DEFER,
    MoveToDeadLetter: MeteredOperation.DEAD_LETTER,
    Release: MeteredOperation.RELEASE,
}
_DEFERRED_TWIN: Final = {
    QueueLane.ACTIVE: QueueLane.DEFERRED,
    QueueLane.DEAD: QueueLane.DEAD_DEFERRED,
    QueueLane.TRANSFER_DEAD: QueueLane.TRANSFER_DEAD_DEFERRED,
}


def settle(state: ReceiveState, event: MessagesSettled, now: int, step: EngineDecision) -> None:
    """Settle by token: whoever has the token may, from any link, until the lock runs out."""
    lost = MESSAGE_LOCK_LOST
    if event.session is not None:
        held = state.sessions.held.get(event.session)
        if held is None or held.until <= now:
            lost = session_lock_lost(event.session)
            step.effects.append(AnswerRequest(event.reply, [lost] * len(event.tokens)))
            return
    outcome = event.outcome
    completes = type(outcome) is Complete
    results: list[Refusal | None] = []
    for token in event.tokens:
        lock = state.locks.held(token, now)
        if lock is None:
            results.append(lost)
        elif completes:
            state.locks.drop(lock)
            drop(state, lock.row, step)
            results.append(None)
        else:
            results.append(_settle_one(state, lock, outcome, now, step))
    step.effects.append(AnswerRequest(event.reply, results))
    settled = results.count(None)
    if settled:
        step.effects.append(Meter(state.path, _OPERATIONS[type(outcome)], settled))


def _settle_one(
    state: ReceiveState, lock: MessageLock, outcome: MessageOutcome, now: int, step: EngineDecision
) -> Refusal | None:
    row = lock.row
    if (refusal := refusal_of_outcome(row, outcome)) is not None:
        return refusal
    state.locks.drop(lock)
    match outcome:
        case Complete():
            drop(state, row, step)
        case Abandon(properties):
            give_back(state, row, now, step, failed=True, properties=properties)
        case Defer(properties):
            _defer(state, row, step, properties)
        case MoveToDeadLetter(reason, description, properties):
            bury(state, row, step, dead_letter_properties(reason, description, properties))
        case Release():
            give_back(state, row, now, step, failed=False)
        case _:
            assert_never(outcome)
    return None


def refusal_of_outcome(row: Row, outcome: MessageOutcome) -> Refusal | None:
    """Why a message that is held cannot be settled so."""
    if isinstance(outcome, MoveToDeadLetter) and row.lane >= QueueLane.DEAD:
        return not_allowed("A message of a dead-letter queue cannot be dead-lettered again.")
    told = _told_by(outcome)
    if told and (size := len(merged(row.overlay, told) or b"")) > MAX_PROPERTIES_BYTES:
        text = f"The properties set by settling take {size} bytes; at most {MAX_PROPERTIES_BYTES} may be used."
        return Refusal(Condition.ARGUMENT_OUT_OF_RANGE, text)
    return None


def _told_by(outcome: MessageOutcome) -> Mapping[str, Any] | None:
    """The properties an outcome sets."""
    match outcome:
        case Abandon(properties) | Defer(properties):
            return properties
        case MoveToDeadLetter(reason, description, properties):
            return dead_letter_properties(reason, description, properties)
        case _:
            return None


def renew(state: ReceiveState, event: LocksRenewed, now: int, step: EngineDecision) -> None:
    locks = [state.locks.held(token, now) for token in event.tokens]
    held = [lock for lock in locks if lock is not None]
    if len(held) < len(locks):
        step.effects.append(AnswerRequest(event.reply, MESSAGE_LOCK_LOST))
        return
    if any(lock.session for lock in held):
        refusal = not_allowed("The lock of a session's message is renewed with its session.")
        step.effects.append(AnswerRequest(event.reply, refusal))
        return
    until = now + state.settings.lock_duration
    for lock in held:
        state.locks.renew(lock, until)
    step.effects += (
        AnswerRequest(event.reply, [until] * len(held)),
        Meter(state.path, MeteredOperation.RENEW_LOCK, len(held)),
    )


def drop(state: ReceiveState, row: Row, step: EngineDecision) -> None:
    step.writes.append(tuple.__new__(DropRow, row[:3]))  # the key is how a row begins
    state.counters.drop(row.lane, row.charge)


def expire(state: ReceiveState, row: Row, step: EngineDecision) -> None:
    """The time to live of an unlocked message is over."""
    if state.settings.dead_lettering_on_expiration:
        told = dead_letter_properties("TTLExpiredException", "The message expired and was dead lettered.")
        bury(state, row, step, told)
    else:
        drop(state, row, step)


def give_back(
    state: ReceiveState,
    row: Row,
    now: int,
    step: EngineDecision,
    *,
    failed: bool,
    properties: Mapping[str, Any] | None = None,
) -> None:
    """A message that was held is free again. A failed delivery counts; after too many it is dead-lettered."""
    if failed:
        row = row._replace(delivery_count=row.delivery_count + 1)
    if row.lane < QueueLane.DEAD:  # neither time nor the number of deliveries ends a message of the dead-letter queue
        if row.lane == QueueLane.ACTIVE and row.expires is not None and row.expires <= now:
            expire(state, row, step)
            return
        if failed and row.delivery_count >= state.settings.max_delivery_count:
            told = dead_letter_properties(
                "MaxDeliveryCountExceeded",
                f"Message could not be consumed after {state.settings.max_delivery_count} delivery attempts.",
                properties,
            )
            bury(state, row, step, told)
            return
    if failed or properties:
        overlay = merged(row.overlay, properties)
        place = (row.queue, row.lane, row.seq, row.lane, row.seq)
        step.writes.append(MoveRow(*place, row.enqueued, row.expires, row.delivery_count, overlay))
    if row.lane in _DEFERRED_TWIN and (feed := state.feed_of(row)) is not None:
        feed.window.arrived(row.seq, row.size)
        state.wake(feed)


def bury(
    state: ReceiveState, row: Row, step: EngineDecision, told: Mapping[str, Any], lane: QueueLane = QueueLane.DEAD
) -> None:
    """To a dead-letter sub-queue, where nothing expires."""
    overlay = merged(row.overlay, told)
    place = (row.queue, row.lane, row.seq, lane, row.seq)
    step.writes.append(MoveRow(*place, row.enqueued, None, row.delivery_count, overlay))
    state.counters.move(row.lane, lane)
    feed = state.dead if lane == QueueLane.DEAD else state.transfer
    feed.window.arrived(row.seq, row.size)
    state.wake(feed)


def _defer(state: ReceiveState, row: Row, step: EngineDecision, properties: Mapping[str, Any] | None) -> None:
    to_lane = _DEFERRED_TWIN.get(QueueLane(row.lane), QueueLane(row.lane))
    overlay = merged(row.overlay, properties)
    place = (row.queue, row.lane, row.seq, to_lane, row.seq)
    step.writes.append(MoveRow(*place, row.enqueued, row.expires, row.delivery_count, overlay))
    state.counters.move(row.lane, to_lane)


REASON: Final = "DeadLetterReason"
DESCRIPTION: Final = "DeadLetterErrorDescription"
_HOPS: Final = 0
"""The key under which an overlay tells how often its message was forwarded. No application property has such a key."""


def merged(overlay: bytes | None, properties: Mapping[str, Any] | None) -> bytes | None:
    """The overlay with these properties set; a later one wins."""
    if not properties:
        return overlay
    return encode({**(decode_all(overlay) if overlay else {}), **properties})


def overlay_properties(overlay: bytes | None) -> dict[str, Any] | None:
    """The application properties in it."""
    if overlay is None:
        return None
    return {key: value for key, value in decode_all(overlay).items() if key != _HOPS} or None


def hops_of(overlay: bytes | None) -> int:
    """How often the message was forwarded."""
    return 0 if overlay is None else int(decode_all(overlay).get(_HOPS, 0))


def of_hops(hops: int) -> bytes:
    """The overlay of a message that was forwarded so often."""
    return encode({_HOPS: hops})


def dead_letter_properties(
    reason: str | None, description: str | None, properties: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a dead-lettered message tells about why it is there."""
    told: dict[str, Any] = dict(properties or {})
    if reason is not None:
        told[REASON] = reason
    if description is not None:
        told[DESCRIPTION] = description
    return told
