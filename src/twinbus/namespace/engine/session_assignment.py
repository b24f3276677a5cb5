"""Session assignment: locks a session for a receiver, and frees the session when the receiver leaves or the lock ends.

A receiver names a session, or takes any session. A receiver that takes any session waits in `EntitySessions.waiting`
until a session with messages is free or the receiver's deadline passes. The store is searched for a free session only
when a session may have become free (`search_needed`). A message that arrives for a free session assigns the session
to the first waiting receiver without a search.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from twinbus.namespace.engine import limits
from twinbus.namespace.engine.delivery import end_credit
from twinbus.namespace.engine.effects import (
    AcceptSession,
    AnswerRequest,
    DetachReceiver,
    EngineDecision,
    Meter,
    MeteredOperation,
    ReadingPart,
    Refusal,
    disabled,
    not_allowed,
    session_lock_lost,
)
from twinbus.namespace.engine.events import SessionLockRenewed, SessionReceiverAttached
from twinbus.namespace.engine.read_ahead import ReadAhead
from twinbus.namespace.engine.receive_state import AttachedReceiver, HeldSession, ReceiveState
from twinbus.namespace.engine.settlement import return_row
from twinbus.namespace.engine.storage_protocol import QueueLane, StoreRead, WaitingSessions
from twinbus.values import Condition

_PAGE: Final = 64
"""The number of session ids that a search reads with one `WaitingSessions`."""


def attach_session_receiver(
    state: ReceiveState, event: SessionReceiverAttached, now: int, decision: EngineDecision
) -> None:
    """Assign the session that the receiver names. If it names none, let the receiver wait for any session."""
    refusal = _attach_refusal(state, event.session, now)
    if refusal is not None:
        decision.effects.append(DetachReceiver(event.receiver, refusal))
        return
    receiver = AttachedReceiver(event.receiver, event.peek_lock)
    state.receivers[event.receiver] = receiver
    if event.session is not None:
        _assign(state, receiver, event.session, now, decision)
        return
    # If another receiver waits already, the search for that receiver has found no free session.
    state.sessions.search_needed |= not state.sessions.waiting
    state.sessions.add_waiting(receiver, event.deadline)
    state.arm_timer(max(now, event.deadline))


def _attach_refusal(state: ReceiveState, session: str | None, now: int) -> Refusal | None:
    if not state.settings.requires_session:
        return not_allowed(f"'{state.path}' does not take sessions; a session receiver cannot be made for it.")
    if not state.settings.status.gives_receives:
        return disabled(state.path, "receives")
    if state.main.forward_to is not None:
        return state.forwarding_refusal(state.main)
    if session is None:
        return None
    if not 0 < len(session) <= limits.MAX_SESSION_ID_CHARACTERS:
        text = f"A session id has 1 to {limits.MAX_SESSION_ID_CHARACTERS} characters; this one has {len(session)}."
        return Refusal(Condition.ARGUMENT_ERROR, text)
    held = state.sessions.held.get(session)
    if held is not None and held.until > now:
        return Refusal(
            Condition.SESSION_CANNOT_BE_LOCKED,
            f"The requested session '{session}' cannot be accepted. It may be locked by another receiver.",
        )
    return None


def assign_to_first_waiting(state: ReceiveState, session: str, now: int, decision: EngineDecision) -> None:
    """Assign a free session, for which a message arrived, to the receiver that has waited longest."""
    _assign(state, state.sessions.take_first_waiting(), session, now, decision)


def search_free_sessions(state: ReceiveState, now: int, decision: EngineDecision) -> ReadingPart:
    """Assign free sessions with messages to the waiting receivers, in the order of ids after the last assigned one."""
    sessions = state.sessions
    while sessions.search_needed and sessions.waiting:
        # Expired messages, and rows that this decision removes, must not count as messages of a session. So the search
        # is left to the next decision, which the timer starts.
        if decision.writes or (state.next_expiry is not None and state.next_expiry <= now):
            state.arm_timer(now)
            return
        session = yield from _next_free_session(state)
        if session is None:
            break
        _assign(state, sessions.take_first_waiting(), session, now, decision)
    sessions.search_needed = False


def _next_free_session(state: ReceiveState) -> Generator[StoreRead, Any, str | None]:
    held, start = state.sessions.held, state.sessions.last_assigned
    after, wrapped = start, not start
    while True:
        page: list[str] = yield WaitingSessions(state.counters.queue, after, _PAGE)
        for session in page:
            if session not in held:
                return session
        if len(page) == _PAGE:
            after = page[-1]
        elif wrapped:
            return None
        else:
            after, wrapped = "", True


def _assign(state: ReceiveState, receiver: AttachedReceiver, session: str, now: int, decision: EngineDecision) -> None:
    if session in state.sessions.held:  # the lock of the session has expired, and the timer has not fired yet
        expire_session_lock(state, session, now, decision)
    until = now + state.settings.lock_duration
    read_ahead = ReadAhead(
        state.counters.queue,
        QueueLane.ACTIVE,
        state.resources.read_ahead_budget,
        session=session,
        empty=state.counters.lanes[QueueLane.ACTIVE] == 0,
    )
    held = HeldSession(session, receiver, until, read_ahead)
    receiver.lane = held.lane
    state.sessions.held[session] = held
    state.sessions.deadlines.set(session, until)
    state.sessions.last_assigned = session
    state.arm_timer(until)
    decision.effects += (
        AcceptSession(receiver.handle, session, until),
        Meter(state.path, MeteredOperation.ACCEPT_SESSION, 1),
    )
    if receiver.has_credit and receiver.room > 0:
        held.lane.add_waiting(receiver)
        state.request_delivery(held.lane)


def release_session(
    state: ReceiveState, held: HeldSession, now: int, decision: EngineDecision, *, failed: bool
) -> None:
    """Free a session, and return to the queue the messages that the receiver of the session has not settled."""
    sessions = state.sessions
    del sessions.held[held.id]
    sessions.deadlines.cancel(held.id)
    held.lane.read_ahead.close()
    for lock in list(held.locks.values()):
        state.locks.remove(lock)
        return_row(state, lock.row, now, decision, failed=failed)
    sessions.search_needed |= bool(sessions.waiting)


def expire_session_lock(state: ReceiveState, session: str, now: int, decision: EngineDecision) -> None:
    """Free a session whose lock has expired, and detach the receiver of the session."""
    held = state.sessions.held[session]
    receiver = held.receiver
    if receiver.has_credit:
        end_credit(state, receiver, decision)
    release_session(state, held, now, decision, failed=True)
    del state.receivers[receiver.handle]
    decision.effects.append(DetachReceiver(receiver.handle, session_lock_lost(session)))


def time_out_waiting(state: ReceiveState, now: int, decision: EngineDecision) -> None:
    """Detach the receivers that still wait for a session at their deadline."""
    for number in state.sessions.wait_deadlines.take_due(now):
        receiver = state.sessions.waiting.pop(number)
        del state.receivers[receiver.handle]
        text = f"No session of '{state.path}' with messages became available in time."
        decision.effects.append(DetachReceiver(receiver.handle, Refusal(Condition.TIMEOUT, text)))


def renew_session_lock(state: ReceiveState, event: SessionLockRenewed, now: int, decision: EngineDecision) -> None:
    """Extend the lock of a held session."""
    held = state.sessions.held.get(event.session)
    if held is None or held.until <= now:
        decision.effects.append(AnswerRequest(event.reply, session_lock_lost(event.session)))
        return
    held.until = now + state.settings.lock_duration
    state.sessions.deadlines.set(event.session, held.until)
    decision.effects += (
        AnswerRequest(event.reply, held.until),
        Meter(state.path, MeteredOperation.RENEW_SESSION_LOCK, 1),
    )
