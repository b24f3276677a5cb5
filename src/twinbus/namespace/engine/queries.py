"""Requests about stored messages by number or by place: peek, receive deferred ones, delete many; session state.

Each asks for its rows first and then decides. None of them moves a lock that exists.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from twinbus.ledger.entries import billable_units  # pure: the face also loads what writes to the disk
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.effects import (
    AnswerRequest,
    EngineDecision,
    Meter,
    MeteredOperation,
    Refusal,
    disabled,
    messages_not_found,
    not_allowed,
    session_lock_lost,
)
from twinbus.namespace.engine.events import (
    BatchDeleted,
    DeferredRequested,
    MessagesPeeked,
    SessionsListed,
    SessionStateRequested,
    SessionStateSet,
)
from twinbus.namespace.engine.receive_state import HeldSession, ReceiveState
from twinbus.namespace.engine.settlement import drop, expire
from twinbus.namespace.engine.storage_protocol import (
    BrowseRows,
    NextRows,
    PutSessionState,
    QueueLane,
    Row,
    RowsBySeq,
    StoredSessions,
    StoredSessionState,
    StoreRead,
    distinct,
)
from twinbus.values import Condition

Asking = Generator[StoreRead, Any, None]

PEEK_BYTES: Final = limits.MIB
# Deferred messages of one request: read so many at a time, and together not more than so many bytes.
DEFERRED_ROWS: Final = 64
DEFERRED_BYTES: Final = 16 * limits.MIB
_PAGE: Final = 256
_MAIN_LANES: Final = (QueueLane.ACTIVE, QueueLane.DEFERRED, QueueLane.SCHEDULED)
_DEAD_LANES: Final = (QueueLane.DEAD, QueueLane.DEAD_DEFERRED)
_TRANSFER_LANES: Final = (QueueLane.TRANSFER_DEAD, QueueLane.TRANSFER_DEAD_DEFERRED)


def is_expired(row: Row, now: int) -> bool:
    """Whether the message is over by itself: a deferred one is only when it is asked for by its number."""
    return row.lane == QueueLane.ACTIVE and is_overdue(row, now)


def is_overdue(row: Row, now: int) -> bool:
    return row.expires is not None and row.expires <= now


def _lanes(event: MessagesPeeked | DeferredRequested | BatchDeleted) -> tuple[QueueLane, ...]:
    """Of the queue or sub-queue an event is about: first what is given out, then what is deferred."""
    return _TRANSFER_LANES if event.transfer else _DEAD_LANES if event.dead_letter else _MAIN_LANES


def peek(state: ReceiveState, event: MessagesPeeked, now: int, step: EngineDecision) -> Asking:
    if not state.settings.status.gives_receives:
        step.effects.append(AnswerRequest(event.reply, disabled(state.path, "receives")))
        return
    lanes = _lanes(event)
    start, rows = event.start, list[Row]()
    while event.count > 0:
        page: list[Row] = yield BrowseRows(state.counters.queue, lanes, start, event.count, PEEK_BYTES, event.session)
        rows = [row for row in page if not is_expired(row, now)]
        if rows or not page:
            break
        start = page[-1].seq + 1
    bytes_ = sum(row.size for row in rows)
    step.effects += (
        AnswerRequest(event.reply, rows),
        Meter(state.path, MeteredOperation.PEEK, 1, bytes_, billable_units(1, bytes_) - 1),
    )


def receive_deferred(state: ReceiveState, event: DeferredRequested, now: int, step: EngineDecision) -> Asking:
    refusal, held = _deferred_access(state, event, now)
    if refusal is not None:
        step.effects.append(AnswerRequest(event.reply, refusal))
        return
    lane = _lanes(event)[1]
    seqs = distinct(event.seqs)
    stored: list[Row] = []
    for start in range(0, len(seqs), DEFERRED_ROWS):
        stored += yield RowsBySeq(state.counters.queue, (lane,), seqs[start : start + DEFERRED_ROWS])
        if sum(row.size for row in stored) > DEFERRED_BYTES:
            text = f"The messages asked for have more than {DEFERRED_BYTES} bytes together. Ask for fewer at a time."
            step.effects.append(AnswerRequest(event.reply, Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text)))
            return
    free = [row for row in stored if row.seq not in state.locks.by_seq and (held is None or row.session == held.id)]
    rows = [row for row in free if not is_overdue(row, now)]
    for row in free:
        if is_overdue(row, now):
            expire(state, row, step)
    if len(rows) < len(seqs):
        found = {row.seq for row in rows}
        missing = [seq for seq in seqs if seq not in found]
        step.effects.append(AnswerRequest(event.reply, messages_not_found("deferred", missing)))
        return
    until = held.until if held is not None else now + state.settings.lock_duration
    received: list[tuple[Row, bytes | None, int | None]] = []
    for row in rows:
        if event.peek_lock:
            token = state.supplies.new_token()
            state.locks.take(token, row, until, held)
            received.append((row, token, until))
        else:
            drop(state, row, step)
            received.append((row, None, None))
    state.arm(until)
    sizes = [row.size for row in rows]
    more = billable_units(len(rows), sizes) - len(rows)
    step.effects += (
        AnswerRequest(event.reply, received),
        Meter(state.path, MeteredOperation.RECEIVE_DEFERRED, len(rows), sum(sizes), more),
    )


def _deferred_access(
    state: ReceiveState, event: DeferredRequested, now: int
) -> tuple[Refusal | None, HeldSession | None]:
    """A session's deferred messages are for the holder of the session; those of a dead-letter queue for anyone."""
    if not state.settings.status.gives_receives:
        return disabled(state.path, "receives"), None
    if not state.settings.requires_session or event.dead_letter or event.transfer:
        return None, None
    if event.session is None:
        return not_allowed(f"'{state.path}' takes sessions: deferred messages are received with their session."), None
    held = state.sessions.held.get(event.session)
    if held is None or held.until <= now:
        return session_lock_lost(event.session), None
    return None, held


def delete_batch(state: ReceiveState, event: BatchDeleted, now: int, step: EngineDecision) -> Asking:
    if not state.settings.status.gives_receives:
        step.effects.append(AnswerRequest(event.reply, disabled(state.path, "receives")))
        return
    lane = _lanes(event)[0]
    after, chosen, more = 0, list[Row](), True
    while more and len(chosen) < event.count:
        page: list[Row] = yield NextRows(state.counters.queue, lane, after, _PAGE, limits.MIB)
        more = bool(page)
        for row in page:
            more = row.enqueued < event.before and len(chosen) < event.count
            if not more:
                break
            after = row.seq
            if row.seq not in state.locks.by_seq:
                chosen.append(row._replace(raw=b""))
    for row in chosen:
        drop(state, row, step)
    state.forget({row.seq for row in chosen})
    step.effects += (AnswerRequest(event.reply, len(chosen)), Meter(state.path, MeteredOperation.DELETE_BATCH, 1))


def get_state(state: ReceiveState, event: SessionStateRequested, now: int, step: EngineDecision) -> Asking:
    refusal = _session_refusal(state, event.session, now)
    if refusal is not None:
        step.effects.append(AnswerRequest(event.reply, refusal))
        return
    stored: bytes | None = yield StoredSessionState(state.counters.queue, event.session)
    size = len(stored or b"")
    step.effects += (
        AnswerRequest(event.reply, stored),
        Meter(state.path, MeteredOperation.GET_SESSION_STATE, 1, size, billable_units(1, size) - 1),
    )


def set_state(state: ReceiveState, event: SessionStateSet, now: int, step: EngineDecision) -> None:
    refusal = _session_refusal(state, event.session, now)
    size = len(event.state or b"")
    if refusal is None and size > limits.MAX_SESSION_STATE_BYTES:
        text = f"The session state of {size} bytes is larger than {limits.MAX_SESSION_STATE_BYTES} bytes."
        refusal = Refusal(Condition.ARGUMENT_OUT_OF_RANGE, text)
    if refusal is not None:
        step.effects.append(AnswerRequest(event.reply, refusal))
        return
    step.writes.append(PutSessionState(state.counters.queue, event.session, event.state, now))
    more = billable_units(1, size) - 1
    step.effects += (
        AnswerRequest(event.reply, None),
        Meter(state.path, MeteredOperation.SET_SESSION_STATE, 1, size, more),
    )


def list_sessions(state: ReceiveState, event: SessionsListed, step: EngineDecision) -> Asking:
    if not state.settings.requires_session:
        step.effects.append(AnswerRequest(event.reply, not_allowed(f"'{state.path}' does not take sessions.")))
        return
    found: list[str] = yield StoredSessions(state.counters.queue, event.skip, event.top, event.updated_since)
    step.effects += (AnswerRequest(event.reply, found), Meter(state.path, MeteredOperation.LIST_SESSIONS, 1))


def _session_refusal(state: ReceiveState, session: str, now: int) -> Refusal | None:
    if not state.settings.requires_session:
        return not_allowed(f"'{state.path}' does not take sessions.")
    held = state.sessions.held.get(session)
    return session_lock_lost(session) if held is None or held.until <= now else None
