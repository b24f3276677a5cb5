"""The receive side of a queue or subscription: dispatches events, adds new rows, and handles the timer.

One decision of the entity uses this module in three steps:

1. `decide` carries out an event, `enqueue` adds new rows, or `expire` ends messages and locks whose time is over. A
   lane that may now have both rows and receivers is added to `lanes_to_serve`.
2. `follow_up` delivers from these lanes and assigns free sessions.
3. `rearm` computes `next_timer`, the instant of the next EntityTimerFired. (Only after a timer or a changed setting.)
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, Final, assert_never

from twinbus.namespace.engine import delivery, queries, session_assignment, settlement
from twinbus.namespace.engine.effects import (
    AnswerRequest,
    DetachReceiver,
    EngineDecision,
    ForgetEntity,
    ReadingPart,
    Refusal,
    disabled,
    not_allowed,
    not_found,
)
from twinbus.namespace.engine.events import (
    BatchDeleted,
    CreditGranted,
    DeferredRequested,
    LocksRenewed,
    MessagesPeeked,
    MessagesSettled,
    ReceiverAttached,
    ReceiverDetached,
    SessionLockRenewed,
    SessionReceiverAttached,
    SessionsListed,
    SessionStateRequested,
    SessionStateSet,
)
from twinbus.namespace.engine.receive_state import AttachedReceiver, DeliveryLane, ReceiveSettings, ReceiveState
from twinbus.namespace.engine.storage_protocol import DropEntity, DueAnswer, ExpiredRows, Row, StoreRead

_EXPIRED_PAGE: Final = 256

ReceivingEvent = (
    ReceiverAttached
    | SessionReceiverAttached
    | CreditGranted
    | ReceiverDetached
    | MessagesSettled
    | LocksRenewed
    | DeferredRequested
    | MessagesPeeked
    | BatchDeleted
    | SessionLockRenewed
    | SessionStateRequested
    | SessionStateSet
    | SessionsListed
)


def decide(state: ReceiveState, event: ReceivingEvent, now: int, decision: EngineDecision) -> ReadingPart | None:
    """Carry out an event. Returns None, or a part of the decision that the caller must run because it reads rows."""
    match event:
        case MessagesSettled():
            settlement.settle(state, event, now, decision)
        case CreditGranted():
            delivery.grant_credit(state, event, decision)
        case LocksRenewed():
            settlement.renew_locks(state, event, now, decision)
        case ReceiverAttached():
            _attach(state, event, decision)
        case SessionReceiverAttached():
            session_assignment.attach_session_receiver(state, event, now, decision)
        case ReceiverDetached():
            _detach(state, event.receiver, now, decision)
        case SessionLockRenewed():
            session_assignment.renew_session_lock(state, event, now, decision)
        case MessagesPeeked():
            return queries.peek(state, event, now, decision)
        case DeferredRequested():
            return queries.receive_deferred(state, event, now, decision)
        case BatchDeleted():
            return queries.delete_batch(state, event, decision)
        case SessionStateRequested():
            return queries.get_session_state(state, event, now, decision)
        case SessionStateSet():
            queries.set_session_state(state, event, now, decision)
        case SessionsListed():
            return queries.list_sessions(state, event, decision)
        case _:
            assert_never(event)
    return None


# --- new rows and delivery ---------------------------------------------------------------------------------------


def enqueue(state: ReceiveState, rows: Iterable[Row], now: int, decision: EngineDecision) -> None:
    """Add new rows at the end of the active lane, in order. The caller makes the writes that store the rows."""
    if state.delivers_by_session:
        _enqueue_by_session(state, rows, now, decision)
        return
    append = state.main.read_ahead.append
    for row in rows:
        append(row)
        if row.expires is not None:
            state.note_expiry(row.expires)
    state.request_delivery(state.main)


def _enqueue_by_session(state: ReceiveState, rows: Iterable[Row], now: int, decision: EngineDecision) -> None:
    sessions = state.sessions
    for row in rows:
        state.note_expiry(row.expires)
        session = row.session or ""
        held = sessions.held.get(session)
        if held is not None:
            held.lane.read_ahead.append(row)
            state.request_delivery(held.lane)
        elif sessions.waiting:
            session_assignment.assign_to_first_waiting(state, session, now, decision)


def follow_up(state: ReceiveState, now: int, decision: EngineDecision) -> ReadingPart:
    """Deliver the rows and assign the sessions that the event has made available (`state.has_work`).

    If a read fails while the decision already has writes or effects, these are kept, and the timer delivers the rest.
    """
    try:
        if state.sessions.search_needed:
            yield from session_assignment.search_free_sessions(state, now, decision)
        yield from _serve_lanes(state, now, decision)
    except Exception:
        if decision.is_empty:
            raise
        state.arm_timer(now)  # the decision of the timer reads while it is empty: a new failure affects it alone


def _serve_lanes(state: ReceiveState, now: int, decision: EngineDecision) -> ReadingPart:
    unfinished: list[DeliveryLane] = []
    while state.lanes_to_serve:
        lane = state.lanes_to_serve.pop()
        if not (yield from delivery.serve(state, lane, now, decision)):
            unfinished.append(lane)
    if unfinished:
        state.lanes_to_serve = unfinished
        state.arm_timer(now)


# --- attach and detach -------------------------------------------------------------------------------------------


def _attach(state: ReceiveState, event: ReceiverAttached, decision: EngineDecision) -> None:
    refusal: Refusal | None = None
    lane = state.transfer_dead_letter if event.transfer else state.dead_letter if event.dead_letter else state.main
    if state.settings.requires_session and lane is state.main:
        refusal = not_allowed(f"'{state.path}' requires sessions; a receiver without one cannot be made for it.")
    elif not state.settings.status.gives_receives:
        refusal = disabled(state.path, "receives")
    elif lane.forward_to is not None:
        refusal = state.forwarding_refusal(lane)
    else:
        receiver = AttachedReceiver(event.receiver, event.peek_lock)
        lane.attach(receiver)
        state.receivers[event.receiver] = receiver
    decision.effects.append(AnswerRequest(event.reply, refusal))


def _detach(state: ReceiveState, handle: Any, now: int, decision: EngineDecision) -> None:
    receiver = state.receivers.pop(handle, None)
    if receiver is None:
        return
    if receiver.has_credit:
        delivery.end_credit(state, receiver, decision)
    if receiver.lane is None:
        state.sessions.remove_waiting(receiver)
    elif receiver.lane.session is not None:
        session_assignment.release_session(state, receiver.lane.session, now, decision, failed=False)
    else:
        receiver.lane.detach()


def _detach_with(state: ReceiveState, handle: Any, refusal: Refusal, now: int, decision: EngineDecision) -> None:
    """Detach a receiver although its client did not request this. The client gets the reason."""
    _detach(state, handle, now, decision)
    decision.effects.append(DetachReceiver(handle, refusal))


def change_settings(state: ReceiveState, settings: ReceiveSettings, now: int, decision: EngineDecision) -> None:
    """Apply a changed description. Receivers that the new description does not allow are detached."""
    state.settings = settings
    if not settings.status.gives_receives:
        for handle in list(state.receivers):
            _detach_with(state, handle, disabled(state.path, "receives"), now, decision)
    state.apply_forwarding()
    for handle, receiver in list(state.receivers.items()):
        # A receiver of a session, or one that waits for a session, receives what the main lane now forwards.
        lane = state.main if receiver.lane is None or receiver.lane.session is not None else receiver.lane
        if lane.forward_to is not None:
            _detach_with(state, handle, state.forwarding_refusal(lane), now, decision)


def close(state: ReceiveState, now: int, decision: EngineDecision) -> None:
    """Delete the entity with all its messages, and detach its receivers."""
    detaching = EngineDecision()
    for handle in list(state.receivers):
        _detach_with(state, handle, not_found(state.path), now, detaching)
    for lane in (state.main, state.dead_letter, state.transfer_dead_letter):
        lane.read_ahead.close()
    state.main.forward_to = state.dead_letter.forward_to = None
    state.lanes_to_serve.clear()
    state.sessions.search_needed = False
    # The writes of `detaching` are left out: they return rows to the queue, and all rows are deleted with the entity.
    decision.writes[:] = [DropEntity(state.counters.queue)]
    decision.effects += (*detaching.effects, ForgetEntity(state.path))


# --- timers ------------------------------------------------------------------------------------------------------


def read_expired(state: ReceiveState, now: int) -> Generator[StoreRead, Any, list[Row]]:
    """Read the unlocked rows whose time to live is over. A locked row is checked when its lock ends."""
    if state.next_expiry is None or state.next_expiry > now:
        return []
    locked = state.locks.by_seq
    locked_and_expired = sum(1 for lock in locked.values() if lock.row.is_expired(now))
    answer: DueAnswer = yield ExpiredRows(state.counters.queue, now, _EXPIRED_PAGE + locked_and_expired)
    state.next_expiry = answer.next_at
    return [row for row in answer.rows if row.seq not in locked]


def expire(state: ReceiveState, expired: list[Row], now: int, decision: EngineDecision) -> None:
    """Expire these rows, and all message locks and session locks whose time is over."""
    if expired:
        state.forget_rows({row.seq for row in expired})
        for row in expired:
            settlement.expire_row(state, row, decision)
    for token in state.locks.deadlines.take_due(now):
        lock = state.locks.by_token[token]
        state.locks.remove(lock)
        settlement.return_row(state, lock.row, now, decision, failed=True)
    for session in state.sessions.deadlines.take_due(now):
        session_assignment.expire_session_lock(state, session, now, decision)


def finish_timer(state: ReceiveState, now: int, decision: EngineDecision) -> ReadingPart:
    """Deliver what the timer has made available, then detach the receivers that waited for a session too long.

    The order matters: a session that becomes free exactly at the deadline of a receiver is still assigned.
    """
    yield from follow_up(state, now, decision)
    session_assignment.time_out_waiting(state, now, decision)


def rearm(state: ReceiveState, idle_at: int | None, now: int) -> None:
    """Compute `next_timer` anew. `idle_at` is the instant at which the entity is deleted if it is not used before."""
    instants = (
        state.next_expiry,
        state.locks.deadlines.first(),
        state.sessions.deadlines.first(),
        state.sessions.wait_deadlines.first(),
        now if state.lanes_to_serve or (state.sessions.search_needed and state.sessions.waiting) else None,
        idle_at,
    )
    state.next_timer = min((at for at in instants if at is not None), default=None)
