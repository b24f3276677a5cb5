"""The receiving side of a queue or subscription: which decision belongs to which event, and what time brings.

Sending, scheduling and the life of the entity itself are decided by the entity.
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
from twinbus.namespace.engine.session_assignment import seat_for
from twinbus.namespace.engine.storage_protocol import DropEntity, DueAnswer, ExpiredRows, Row, StoreRead

Asking = Generator[StoreRead, Any, None]

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


def decide(state: ReceiveState, event: ReceivingEvent, now: int, step: EngineDecision) -> Asking | None:
    """Decide at once, or return the decision to go through with where rows are needed."""
    match event:
        case MessagesSettled():
            settlement.settle(state, event, now, step)
        case CreditGranted():
            delivery.grant(state, event, step)
        case LocksRenewed():
            settlement.renew(state, event, now, step)
        case ReceiverAttached():
            _attach(state, event, step)
        case SessionReceiverAttached():
            session_assignment.attach(state, event, now, step)
        case ReceiverDetached():
            _detach(state, event, now, step)
        case SessionLockRenewed():
            session_assignment.renew(state, event, now, step)
        case MessagesPeeked():
            return queries.peek(state, event, now, step)
        case DeferredRequested():
            return queries.receive_deferred(state, event, now, step)
        case BatchDeleted():
            return queries.delete_batch(state, event, now, step)
        case SessionStateRequested():
            return queries.get_state(state, event, now, step)
        case SessionStateSet():
            queries.set_state(state, event, now, step)
        case SessionsListed():
            return queries.list_sessions(state, event, step)
        case _:
            assert_never(event)
    return None


def follow_up(state: ReceiveState, now: int, step: EngineDecision) -> Asking:
    """Give out what the event has made available. A read that fails takes nothing from what is decided already."""
    try:
        yield from _give_out(state, now, step)
    except Exception:  # the store could not be read
        if not (step.writes or step.effects):
            raise
        state.arm(now)  # the firing that follows decides nothing before it reads, and fails by itself


def _give_out(state: ReceiveState, now: int, step: EngineDecision) -> Asking:
    if state.sessions.search:
        yield from session_assignment.search(state, now, step)
    unfinished: list[DeliveryLane] = []
    while state.pending:
        feed = state.pending.pop()
        if not (yield from delivery.serve(state, feed, now, step)):
            unfinished.append(feed)
    if unfinished:
        state.pending = unfinished
        state.arm(now)


def _attach(state: ReceiveState, event: ReceiverAttached, step: EngineDecision) -> None:
    refusal: Refusal | None = None
    feed = state.transfer if event.transfer else state.dead if event.dead_letter else state.main
    if state.settings.requires_session and feed is state.main:
        refusal = not_allowed(f"'{state.path}' requires sessions; a receiver without one cannot be made for it.")
    elif not state.settings.status.gives_receives:
        refusal = disabled(state.path, "receives")
    elif feed.onward is not None:
        refusal = _forwards(state, feed)
    else:
        consumer = AttachedReceiver(event.receiver, event.peek_lock)
        feed.enter(consumer)
        state.consumers[event.receiver] = consumer
    step.effects.append(AnswerRequest(event.reply, refusal))


def _detach(state: ReceiveState, event: ReceiverDetached, now: int, step: EngineDecision) -> None:
    consumer = state.consumers.pop(event.receiver, None)
    if consumer is None:
        return
    if consumer.limit > consumer.taken:
        delivery.end_grant(state, consumer, step)
    if consumer.feed is None:
        state.sessions.stop_waiting(consumer)
    elif consumer.feed.session is not None:
        session_assignment.give_up(state, consumer.feed.session, now, step, failed=False)
    else:
        consumer.feed.exit()


def detach_all(state: ReceiveState, now: int, step: EngineDecision, refusal: Refusal) -> None:
    """The entity does not serve receivers any more."""
    for receiver in list(state.consumers):
        _detach(state, ReceiverDetached(receiver), now, step)
        step.effects.append(DetachReceiver(receiver, refusal))


def change_settings(state: ReceiveState, settings: ReceiveSettings, now: int, step: EngineDecision) -> None:
    state.settings = settings
    if not settings.status.gives_receives:
        detach_all(state, now, step, disabled(state.path, "receives"))
    state.direct()
    for receiver, consumer in list(state.consumers.items()):
        if consumer.feed is not None and consumer.feed.onward is not None:
            refusal = _forwards(state, consumer.feed)
            _detach(state, ReceiverDetached(receiver), now, step)
            step.effects.append(DetachReceiver(receiver, refusal))


def _forwards(state: ReceiveState, feed: DeliveryLane) -> Refusal:
    what = "its dead letters" if feed is state.dead else "its messages"
    return not_allowed(f"'{state.path}' forwards {what} to '{feed.onward}': they cannot be received here.")


def close(state: ReceiveState, now: int, step: EngineDecision) -> None:
    """The entity is removed with all it holds: what its receivers give back goes with it."""
    last = EngineDecision()
    detach_all(state, now, last, not_found(state.path))
    state.main.window.close()
    state.dead.window.close()
    state.transfer.window.close()
    state.main.onward = state.dead.onward = None
    state.pending.clear()
    state.sessions.search = False
    step.writes[:] = [DropEntity(state.counters.queue)]
    step.effects += (*last.effects, ForgetEntity(state.path))


# --- time --------------------------------------------------------------------------------------------------------


def read_expired(state: ReceiveState, now: int) -> Generator[StoreRead, Any, list[Row]]:
    """The rows whose time to live is over and that nobody holds. A held one is looked at when it comes back."""
    if state.next_expiry is None or state.next_expiry > now:
        return []
    locked = state.locks.by_seq
    held = sum(1 for lock in locked.values() if queries.is_expired(lock.row, now))
    answer: DueAnswer = yield ExpiredRows(state.counters.queue, now, _EXPIRED_PAGE + held)
    state.next_expiry = answer.next_at
    return [row for row in answer.rows if row.seq not in locked]


def lapse(state: ReceiveState, expired: list[Row], now: int, step: EngineDecision) -> None:
    """Everything that ends by itself: times to live, message locks, session locks, waits for a session."""
    if expired:
        state.forget({row.seq for row in expired})
        for row in expired:
            settlement.expire(state, row, step)
    for token in state.locks.deadlines.take_due(now):
        lock = state.locks.by_token[token]
        state.locks.drop(lock)
        settlement.give_back(state, lock.row, now, step, failed=True)
    for session in state.sessions.deadlines.take_due(now):
        session_assignment.lose(state, session, now, step)


def time_out(state: ReceiveState, now: int, step: EngineDecision) -> None:
    """Last of all: a session that became free at this very instant is still given out."""
    session_assignment.time_out(state, now, step)


def next_instant(state: ReceiveState, now: int) -> int | None:
    """When something ends by itself next."""
    instants = (
        state.next_expiry,
        state.locks.deadlines.first(),
        state.sessions.deadlines.first(),
        state.sessions.wait_deadlines.first(),
        now if state.pending or (state.sessions.search and state.sessions.waiting) else None,
    )
    return min((at for at in instants if at is not None), default=None)


def shelve(state: ReceiveState, rows: Iterable[Row], now: int, step: EngineDecision) -> None:
    """Rows new at the tail of the active lane, in order."""
    if state.settings.requires_session:
        _shelve_by_session(state, rows, now, step)
        return
    append = state.main.window.append
    for row in rows:
        append(row)
        if row.expires is not None:
            state.expires_at(row.expires)
    state.wake(state.main)


def _shelve_by_session(state: ReceiveState, rows: Iterable[Row], now: int, step: EngineDecision) -> None:
    sessions = state.sessions
    for row in rows:
        state.expires_at(row.expires)
        session = row.session or ""
        held = sessions.held.get(session)
        if held is not None:
            held.feed.window.append(row)
            state.wake(held.feed)
        elif sessions.waiting:
            seat_for(state, session, now, step)
