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


def decide(shelf: ReceiveState, event: ReceivingEvent, now: int, step: EngineDecision) -> Asking | None:
    """Decide at once, or return the decision to go through with where rows are needed."""
    match event:
        case MessagesSettled():
            settlement.settle(shelf, event, now, step)
        case CreditGranted():
            delivery.grant(shelf, event, step)
        case LocksRenewed():
            settlement.renew(shelf, event, now, step)
        case ReceiverAttached():
            _attach(shelf, event, step)
        case SessionReceiverAttached():
            session_assignment.attach(shelf, event, now, step)
        case ReceiverDetached():
            _detach(shelf, event, now, step)
        case SessionLockRenewed():
            session_assignment.renew(shelf, event, now, step)
        case MessagesPeeked():
            return queries.peek(shelf, event, now, step)
        case DeferredRequested():
            return queries.receive_deferred(shelf, event, now, step)
        case BatchDeleted():
            return queries.delete_batch(shelf, event, now, step)
        case SessionStateRequested():
            return queries.get_state(shelf, event, now, step)
        case SessionStateSet():
            queries.set_state(shelf, event, now, step)
        case SessionsListed():
            return queries.list_sessions(shelf, event, step)
        case _:
            assert_never(event)
    return None


def follow_up(shelf: ReceiveState, now: int, step: EngineDecision) -> Asking:
    """Give out what the event has made available. A read that fails takes nothing from what is decided already."""
    try:
        yield from _give_out(shelf, now, step)
    except Exception:  # the store could not be read
        if not (step.writes or step.effects):
            raise
        shelf.arm(now)  # the firing that follows decides nothing before it reads, and fails by itself


def _give_out(shelf: ReceiveState, now: int, step: EngineDecision) -> Asking:
    if shelf.sessions.search:
        yield from session_assignment.search(shelf, now, step)
    unfinished: list[DeliveryLane] = []
    while shelf.pending:
        feed = shelf.pending.pop()
        if not (yield from delivery.serve(shelf, feed, now, step)):
            unfinished.append(feed)
    if unfinished:
        shelf.pending = unfinished
        shelf.arm(now)


def _attach(shelf: ReceiveState, event: ReceiverAttached, step: EngineDecision) -> None:
    refusal: Refusal | None = None
    feed = shelf.transfer if event.transfer else shelf.dead if event.dead_letter else shelf.main
    if shelf.settings.requires_session and feed is shelf.main:
        refusal = not_allowed(f"'{shelf.path}' requires sessions; a receiver without one cannot be made for it.")
    elif not shelf.settings.status.gives_receives:
        refusal = disabled(shelf.path, "receives")
    elif feed.onward is not None:
        refusal = _forwards(shelf, feed)
    else:
        consumer = AttachedReceiver(event.receiver, event.peek_lock)
        feed.enter(consumer)
        shelf.consumers[event.receiver] = consumer
    step.effects.append(AnswerRequest(event.reply, refusal))


def _detach(shelf: ReceiveState, event: ReceiverDetached, now: int, step: EngineDecision) -> None:
    consumer = shelf.consumers.pop(event.receiver, None)
    if consumer is None:
        return
    if consumer.limit > consumer.taken:
        delivery.end_grant(shelf, consumer, step)
    if consumer.feed is None:
        shelf.sessions.stop_waiting(consumer)
    elif consumer.feed.session is not None:
        session_assignment.give_up(shelf, consumer.feed.session, now, step, failed=False)
    else:
        consumer.feed.exit()


def detach_all(shelf: ReceiveState, now: int, step: EngineDecision, refusal: Refusal) -> None:
    """The entity does not serve receivers any more."""
    for receiver in list(shelf.consumers):
        _detach(shelf, ReceiverDetached(receiver), now, step)
        step.effects.append(DetachReceiver(receiver, refusal))


def change_settings(shelf: ReceiveState, settings: ReceiveSettings, now: int, step: EngineDecision) -> None:
    shelf.settings = settings
    if not settings.status.gives_receives:
        detach_all(shelf, now, step, disabled(shelf.path, "receives"))
    shelf.direct()
    for receiver, consumer in list(shelf.consumers.items()):
        if consumer.feed is not None and consumer.feed.onward is not None:
            refusal = _forwards(shelf, consumer.feed)
            _detach(shelf, ReceiverDetached(receiver), now, step)
            step.effects.append(DetachReceiver(receiver, refusal))


def _forwards(shelf: ReceiveState, feed: DeliveryLane) -> Refusal:
    what = "its dead letters" if feed is shelf.dead else "its messages"
    return not_allowed(f"'{shelf.path}' forwards {what} to '{feed.onward}': they cannot be received here.")


def close(shelf: ReceiveState, now: int, step: EngineDecision) -> None:
    """The entity is removed with all it holds: what its receivers give back goes with it."""
    last = EngineDecision()
    detach_all(shelf, now, last, not_found(shelf.path))
    shelf.main.window.close()
    shelf.dead.window.close()
    shelf.transfer.window.close()
    shelf.main.onward = shelf.dead.onward = None
    shelf.pending.clear()
    shelf.sessions.search = False
    step.writes[:] = [DropEntity(shelf.counters.queue)]
    step.effects += (*last.effects, ForgetEntity(shelf.path))


# --- time --------------------------------------------------------------------------------------------------------


def read_expired(shelf: ReceiveState, now: int) -> Generator[StoreRead, Any, list[Row]]:
    """The rows whose time to live is over and that nobody holds. A held one is looked at when it comes back."""
    if shelf.next_expiry is None or shelf.next_expiry > now:
        return []
    locked = shelf.locks.by_seq
    held = sum(1 for lock in locked.values() if queries.expired(lock.row, now))
    answer: DueAnswer = yield ExpiredRows(shelf.counters.queue, now, _EXPIRED_PAGE + held)
    shelf.next_expiry = answer.next_at
    return [row for row in answer.rows if row.seq not in locked]


def lapse(shelf: ReceiveState, expired: list[Row], now: int, step: EngineDecision) -> None:
    """Everything that ends by itself: times to live, message locks, session locks, waits for a session."""
    if expired:
        shelf.forget({row.seq for row in expired})
        for row in expired:
            settlement.expire(shelf, row, step)
    for token in shelf.locks.deadlines.take_due(now):
        lock = shelf.locks.by_token[token]
        shelf.locks.drop(lock)
        settlement.give_back(shelf, lock.row, now, step, failed=True)
    for session in shelf.sessions.deadlines.take_due(now):
        session_assignment.lose(shelf, session, now, step)


def time_out(shelf: ReceiveState, now: int, step: EngineDecision) -> None:
    """Last of all: a session that became free at this very instant is still given out."""
    session_assignment.time_out(shelf, now, step)


def next_instant(shelf: ReceiveState, now: int) -> int | None:
    """When something ends by itself next."""
    instants = (
        shelf.next_expiry,
        shelf.locks.deadlines.first(),
        shelf.sessions.deadlines.first(),
        shelf.sessions.wait_deadlines.first(),
        now if shelf.pending or (shelf.sessions.search and shelf.sessions.waiting) else None,
    )
    return min((at for at in instants if at is not None), default=None)


def shelve(shelf: ReceiveState, rows: Iterable[Row], now: int, step: EngineDecision) -> None:
    """Rows new at the tail of the active lane, in order."""
    if shelf.settings.requires_session:
        _shelve_by_session(shelf, rows, now, step)
        return
    append = shelf.main.window.append
    for row in rows:
        append(row)
        if row.expires is not None:
            shelf.expires_at(row.expires)
    shelf.wake(shelf.main)


def _shelve_by_session(shelf: ReceiveState, rows: Iterable[Row], now: int, step: EngineDecision) -> None:
    sessions = shelf.sessions
    for row in rows:
        shelf.expires_at(row.expires)
        session = row.session or ""
        held = sessions.held.get(session)
        if held is not None:
            held.feed.window.append(row)
            shelf.wake(held.feed)
        elif sessions.waiting:
            seat_for(shelf, session, now, step)
