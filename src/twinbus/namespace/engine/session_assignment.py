"""Gives sessions to receivers and takes them back: by id, the next available one, or after a wait.

The store is searched for free sessions only when one may have become free; a message that arrives for a free
session seats the first who waits at once.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from twinbus.namespace.engine import limits
from twinbus.namespace.engine.delivery import end_grant
from twinbus.namespace.engine.effects import (
    AcceptSession,
    AnswerRequest,
    DetachReceiver,
    EngineDecision,
    Meter,
    MeteredOperation,
    Refusal,
    disabled,
    not_allowed,
    session_lock_lost,
)
from twinbus.namespace.engine.events import SessionLockRenewed, SessionReceiverAttached
from twinbus.namespace.engine.read_ahead import ReadAhead
from twinbus.namespace.engine.receive_state import PAGE, AttachedReceiver, DeliveryLane, HeldSession, ReceiveState
from twinbus.namespace.engine.settlement import give_back
from twinbus.namespace.engine.storage_protocol import QueueLane, StoreRead, WaitingSessions
from twinbus.values import Condition


def attach(state: ReceiveState, event: SessionReceiverAttached, now: int, step: EngineDecision) -> None:
    refusal = _refusal(state, event.session, now)
    if refusal is not None:
        step.effects.append(DetachReceiver(event.receiver, refusal))
        return
    consumer = AttachedReceiver(event.receiver, event.peek_lock)
    state.consumers[event.receiver] = consumer
    if event.session is not None:
        _hold(state, consumer, event.session, now, step)
        return
    # Whoever waits already has seen that nothing is free.
    state.sessions.search |= not state.sessions.waiting
    state.sessions.wait(consumer, event.deadline)
    state.arm(max(now, event.deadline))


def _refusal(state: ReceiveState, session: str | None, now: int) -> Refusal | None:
    if not state.settings.requires_session:
        return not_allowed(f"'{state.path}' does not take sessions; a session receiver cannot be made for it.")
    if not state.settings.status.gives_receives:
        return disabled(state.path, "receives")
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


def seat_for(state: ReceiveState, session: str, now: int, step: EngineDecision) -> None:
    """A message came for this session, which is free: it goes to the first who waits."""
    _hold(state, state.sessions.first_waiting(), session, now, step)


def search(state: ReceiveState, now: int, step: EngineDecision) -> Generator[StoreRead, Any, None]:
    """Seat those who wait on free sessions with messages, in turn through all of them."""
    sessions = state.sessions
    while sessions.search and sessions.waiting:
        if step.writes or (state.next_expiry is not None and state.next_expiry <= now):
            state.arm(now)  # what is expired, or being written, must not pass for a waiting message
            return
        session = yield from _free_session(state)
        if session is None:
            break
        _hold(state, sessions.first_waiting(), session, now, step)
    sessions.search = False


def _free_session(state: ReceiveState) -> Generator[StoreRead, Any, str | None]:
    held, start = state.sessions.held, state.sessions.rotation
    after, wrapped = start, not start
    while True:
        page: list[str] = yield WaitingSessions(state.counters.queue, after, PAGE)
        for session in page:
            if session not in held:
                return session
        if len(page) == PAGE:
            after = page[-1]
        elif wrapped:
            return None
        else:
            after, wrapped = "", True


def _hold(state: ReceiveState, consumer: AttachedReceiver, session: str, now: int, step: EngineDecision) -> None:
    if session in state.sessions.held:  # its time is up, only nobody has noticed yet
        lose(state, session, now, step)
    until = now + state.settings.lock_duration
    held = HeldSession(session, consumer, until)
    empty = state.counters.lanes[QueueLane.ACTIVE] == 0
    window = ReadAhead(state.counters.queue, QueueLane.ACTIVE, state.supplies.budget, session=session, empty=empty)
    held.feed = consumer.feed = DeliveryLane(window, held)
    state.sessions.held[session] = held
    state.sessions.deadlines.set(session, until)
    state.sessions.rotation = session
    state.arm(until)
    step.effects += (
        AcceptSession(consumer.receiver, session, until),
        Meter(state.path, MeteredOperation.ACCEPT_SESSION, 1),
    )
    if consumer.limit > consumer.taken and consumer.room > 0:
        held.feed.queue_up(consumer)
        state.wake(held.feed)


def give_up(state: ReceiveState, held: HeldSession, now: int, step: EngineDecision, *, failed: bool) -> None:
    """The session is free again, with all its holder had not settled."""
    sessions = state.sessions
    del sessions.held[held.id]
    sessions.deadlines.clear(held.id)
    held.feed.window.close()
    for lock in list(held.locks.values()):
        state.locks.drop(lock)
        give_back(state, lock.row, now, step, failed=failed)
    sessions.search |= bool(sessions.waiting)


def lose(state: ReceiveState, session: str, now: int, step: EngineDecision) -> None:
    """The lock of the session ran out: its receiver is told and gone."""
    held = state.sessions.held[session]
    consumer = held.consumer
    if consumer.limit > consumer.taken:
        end_grant(state, consumer, step)
    give_up(state, held, now, step, failed=True)
    del state.consumers[consumer.receiver]
    step.effects.append(DetachReceiver(consumer.receiver, session_lock_lost(session)))


def time_out(state: ReceiveState, now: int, step: EngineDecision) -> None:
    """Whoever waited long enough goes without a session, exactly at its deadline."""
    for number in state.sessions.wait_deadlines.take_due(now):
        consumer = state.sessions.waiting.pop(number).consumer
        del state.consumers[consumer.receiver]
        text = f"No session of '{state.path}' with messages became available in time."
        step.effects.append(DetachReceiver(consumer.receiver, Refusal(Condition.TIMEOUT, text)))


def renew(state: ReceiveState, event: SessionLockRenewed, now: int, step: EngineDecision) -> None:
    held = state.sessions.held.get(event.session)
    if held is None or held.until <= now:
        step.effects.append(AnswerRequest(event.reply, session_lock_lost(event.session)))
        return
    held.until = now + state.settings.lock_duration
    state.sessions.deadlines.set(event.session, held.until)
    step.effects += (AnswerRequest(event.reply, held.until), Meter(state.path, MeteredOperation.RENEW_SESSION_LOCK, 1))
