"""Requests about stored messages and sessions: peek, receive deferred messages, delete many, session state and list.

Each function reads its rows first and then decides. No function changes a lock that exists already.
"""

from __future__ import annotations

from typing import Final

from twinbus.ledger.entries import billable_units  # not from twinbus.ledger, which imports code that writes to disk
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.effects import (
    AnswerRequest,
    EngineDecision,
    Meter,
    MeteredOperation,
    ReadingPart,
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
from twinbus.namespace.engine.settlement import drop_row, expire_row
from twinbus.namespace.engine.storage_protocol import (
    BrowseRows,
    NextRows,
    PutSessionState,
    QueueLane,
    Row,
    RowsBySeq,
    StoredSessions,
    StoredSessionState,
    distinct,
)
from twinbus.values import Condition

PEEK_BYTES: Final = limits.MIB
DEFERRED_ROWS: Final = 64
"""The number of deferred messages that one `RowsBySeq` reads."""
DEFERRED_BYTES: Final = 16 * limits.MIB
"""The number of bytes that one request for deferred messages may receive."""
_PAGE: Final = 256
# In each tuple, first the lane whose rows are delivered to receivers, then the lane of deferred messages.
_MAIN_LANES: Final = (QueueLane.ACTIVE, QueueLane.DEFERRED, QueueLane.SCHEDULED)
_DEAD_LANES: Final = (QueueLane.DEAD, QueueLane.DEAD_DEFERRED)
_TRANSFER_LANES: Final = (QueueLane.TRANSFER_DEAD, QueueLane.TRANSFER_DEAD_DEFERRED)


def _lanes(event: MessagesPeeked | DeferredRequested | BatchDeleted) -> tuple[QueueLane, ...]:
    """Return the lanes of the queue or sub-queue that an event is about."""
    return _TRANSFER_LANES if event.transfer else _DEAD_LANES if event.dead_letter else _MAIN_LANES


def peek(state: ReceiveState, event: MessagesPeeked, now: int, decision: EngineDecision) -> ReadingPart:
    if not state.settings.status.gives_receives:
        decision.effects.append(AnswerRequest(event.reply, disabled(state.path, "receives")))
        return
    lanes = _lanes(event)
    start, rows = event.start, list[Row]()
    while event.count > 0:
        page: list[Row] = yield BrowseRows(state.counters.queue, lanes, start, event.count, PEEK_BYTES, event.session)
        rows = [row for row in page if not row.is_expired(now)]
        if rows or not page:
            break
        start = page[-1].seq + 1
    size = sum(row.size for row in rows)
    decision.effects += (
        AnswerRequest(event.reply, rows),
        Meter(state.path, MeteredOperation.PEEK, 1, size, billable_units(1, size) - 1),
    )


def receive_deferred(state: ReceiveState, event: DeferredRequested, now: int, decision: EngineDecision) -> ReadingPart:
    """Lock the deferred messages with these numbers, or drop them (receive-and-delete). Refuses if one is missing."""
    refusal, held = _deferred_access(state, event, now)
    if refusal is not None:
        decision.effects.append(AnswerRequest(event.reply, refusal))
        return
    lane = _lanes(event)[1]
    seqs = distinct(event.seqs)
    stored: list[Row] = []
    for start in range(0, len(seqs), DEFERRED_ROWS):
        stored += yield RowsBySeq(state.counters.queue, (lane,), seqs[start : start + DEFERRED_ROWS])
        if sum(row.size for row in stored) > DEFERRED_BYTES:
            text = f"The messages asked for have more than {DEFERRED_BYTES} bytes together. Ask for fewer at a time."
            decision.effects.append(AnswerRequest(event.reply, Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text)))
            return
    free = [row for row in stored if row.seq not in state.locks.by_seq and (held is None or row.session == held.id)]
    rows = [row for row in free if not row.is_overdue(now)]
    for row in free:
        if row.is_overdue(now):
            expire_row(state, row, decision)
    if len(rows) < len(seqs):
        found = {row.seq for row in rows}
        missing = [seq for seq in seqs if seq not in found]
        decision.effects.append(AnswerRequest(event.reply, messages_not_found("deferred", missing)))
        return
    until = held.until if held is not None else now + state.settings.lock_duration
    received: list[tuple[Row, bytes | None, int | None]] = []
    for row in rows:
        if event.peek_lock:
            token = state.resources.new_token()
            state.locks.add(token, row, until, held)
            received.append((row, token, until))
        else:
            drop_row(state, row, decision)
            received.append((row, None, None))
    state.arm_timer(until)
    sizes = [row.size for row in rows]
    extra_units = billable_units(len(rows), sizes) - len(rows)
    decision.effects += (
        AnswerRequest(event.reply, received),
        Meter(state.path, MeteredOperation.RECEIVE_DEFERRED, len(rows), sum(sizes), extra_units),
    )


def _deferred_access(
    state: ReceiveState, event: DeferredRequested, now: int
) -> tuple[Refusal | None, HeldSession | None]:
    """Return why the request is refused (None if it is not), and the session that it is for (None for no session).

    Only the receiver that holds a session can receive the deferred messages of this session. Dead-letter queues have
    no sessions.
    """
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


def delete_batch(state: ReceiveState, event: BatchDeleted, decision: EngineDecision) -> ReadingPart:
    """Drop the oldest unlocked messages, at most `event.count`, that were enqueued before `event.before`."""
    if not state.settings.status.gives_receives:
        decision.effects.append(AnswerRequest(event.reply, disabled(state.path, "receives")))
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
                chosen.append(row.without_raw())
    for row in chosen:
        drop_row(state, row, decision)
    state.forget_rows({row.seq for row in chosen})
    decision.effects += (
        AnswerRequest(event.reply, len(chosen)),
        Meter(state.path, MeteredOperation.DELETE_BATCH, 1),
    )


def get_session_state(
    state: ReceiveState, event: SessionStateRequested, now: int, decision: EngineDecision
) -> ReadingPart:
    refusal = _session_refusal(state, event.session, now)
    if refusal is not None:
        decision.effects.append(AnswerRequest(event.reply, refusal))
        return
    stored: bytes | None = yield StoredSessionState(state.counters.queue, event.session)
    size = len(stored or b"")
    decision.effects += (
        AnswerRequest(event.reply, stored),
        Meter(state.path, MeteredOperation.GET_SESSION_STATE, 1, size, billable_units(1, size) - 1),
    )


def set_session_state(state: ReceiveState, event: SessionStateSet, now: int, decision: EngineDecision) -> None:
    refusal = _session_refusal(state, event.session, now)
    size = len(event.state or b"")
    if refusal is None and size > limits.MAX_SESSION_STATE_BYTES:
        text = f"The session state of {size} bytes is larger than {limits.MAX_SESSION_STATE_BYTES} bytes."
        refusal = Refusal(Condition.ARGUMENT_OUT_OF_RANGE, text)
    if refusal is not None:
        decision.effects.append(AnswerRequest(event.reply, refusal))
        return
    decision.writes.append(PutSessionState(state.counters.queue, event.session, event.state, now))
    extra_units = billable_units(1, size) - 1
    decision.effects += (
        AnswerRequest(event.reply, None),
        Meter(state.path, MeteredOperation.SET_SESSION_STATE, 1, size, extra_units),
    )


def list_sessions(state: ReceiveState, event: SessionsListed, decision: EngineDecision) -> ReadingPart:
    if not state.settings.requires_session:
        decision.effects.append(AnswerRequest(event.reply, not_allowed(f"'{state.path}' does not take sessions.")))
        return
    found: list[str] = yield StoredSessions(state.counters.queue, event.skip, event.top, event.updated_since)
    decision.effects += (AnswerRequest(event.reply, found), Meter(state.path, MeteredOperation.LIST_SESSIONS, 1))


def _session_refusal(state: ReceiveState, session: str, now: int) -> Refusal | None:
    """Return why the state of this session cannot be read or set; None if the session is held."""
    if not state.settings.requires_session:
        return not_allowed(f"'{state.path}' does not take sessions.")
    held = state.sessions.held.get(session)
    return session_lock_lost(session) if held is None or held.until <= now else None
