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


def attach(shelf: ReceiveState, event: SessionReceiverAttached, now: int, step: EngineDecision) -> None:
    refusal = _refusal(shelf, event.session, now)
    if refusal is not None:
        step.effects.append(DetachReceiver(event.receiver, refusal))
        return
    consumer = AttachedReceiver(event.receiver, event.peek_lock)
    shelf.consumers[event.receiver] = consumer
    if event.session is not None:
        _hold(shelf, consumer, event.session, now, step)
        return
    # Whoever waits already has seen that nothing is free.
    shelf.sessions.search |= not shelf.sessions.waiting
    shelf.sessions.wait(consumer, event.deadline)
    shelf.arm(max(now, event.deadline))


def _refusal(shelf: ReceiveState, session: str | None, now: int) -> Refusal | None:
    if not shelf.settings.requires_session:
        return not_allowed(f"'{shelf.path}' does not take sessions; a session receiver cannot be made for it.")
    if not shelf.settings.status.gives_receives:
        return disabled(shelf.path, "receives")
    if session is None:
        return None
    if not 0 < len(session) <= limits.MAX_SESSION_ID_CHARACTERS:
        text = f"A session id has 1 to {limits.MAX_SESSION_ID_CHARACTERS} characters; this one has {len(session)}."
        return Refusal(Condition.ARGUMENT_ERROR, text)
    held = shelf.sessions.held.get(session)
    if held is not None and held.until > now:
        return Refusal(
            Condition.SESSION_CANNOT_BE_LOCKED,
            f"The requested session '{session}' cannot be accepted. It may be locked by another receiver.",
        )
    return None


def seat_for(shelf: ReceiveState, session: str, now: int, step: EngineDecision) -> None:
    """A message came for this session, which is free: it goes to the first who waits."""
    _hold(shelf, shelf.sessions.first_waiting(), session, now, step)


def search(shelf: ReceiveState, now: int, step: EngineDecision) -> Generator[StoreRead, Any, None]:
    """Seat those who wait on free sessions with messages, in turn through all of them."""
    sessions = shelf.sessions
    while sessions.search and sessions.waiting:
        if step.writes or (shelf.next_expiry is not None and shelf.next_expiry <= now):
            shelf.arm(now)  # what is expired, or being written, must not pass for a waiting message
            return
        session = yield from _free_session(shelf)
        if session is None:
            break
        _hold(shelf, sessions.first_waiting(), session, now, step)
    sessions.search = False


def _free_session(shelf: ReceiveState) -> Generator[StoreRead, Any, str | None]:
    held, start = shelf.sessions.held, shelf.sessions.rotation
    after, wrapped = start, not start
    while True:
        page: list[str] = yield WaitingSessions(shelf.counters.queue, after, PAGE)
        for session in page:
            if session not in held:
                return session
        if len(page) == PAGE:
            after = page[-1]
        elif wrapped:
            return None
        else:
            after, wrapped = "", True


def _hold(shelf: ReceiveState, consumer: AttachedReceiver, session: str, now: int, step: EngineDecision) -> None:
    if session in shelf.sessions.held:  # its time is up, only nobody has noticed yet
        lose(shelf, session, now, step)
    until = now + shelf.settings.lock_duration
    held = HeldSession(session, consumer, until)
    empty = shelf.counters.lanes[QueueLane.ACTIVE] == 0
    window = ReadAhead(shelf.counters.queue, QueueLane.ACTIVE, shelf.supplies.budget, session=session, empty=empty)
    held.feed = consumer.feed = DeliveryLane(window, held)
    shelf.sessions.held[session] = held
    shelf.sessions.deadlines.set(session, until)
    shelf.sessions.rotation = session
    shelf.arm(until)
    step.effects += (
        AcceptSession(consumer.receiver, session, until),
        Meter(shelf.path, MeteredOperation.ACCEPT_SESSION, 1),
    )
    if consumer.limit > consumer.taken and consumer.room > 0:
        held.feed.queue_up(consumer)
        shelf.wake(held.feed)


def give_up(shelf: ReceiveState, held: HeldSession, now: int, step: EngineDecision, *, failed: bool) -> None:
    """The session is free again, with all its holder had not settled."""
    sessions = shelf.sessions
    del sessions.held[held.id]
    sessions.deadlines.clear(held.id)
    held.feed.window.close()
    for lock in list(held.locks.values()):
        shelf.locks.drop(lock)
        give_back(shelf, lock.row, now, step, failed=failed)
    sessions.search |= bool(sessions.waiting)


def lose(shelf: ReceiveState, session: str, now: int, step: EngineDecision) -> None:
    """The lock of the session ran out: its receiver is told and gone."""
    held = shelf.sessions.held[session]
    consumer = held.consumer
    if consumer.limit > consumer.taken:
        end_grant(shelf, consumer, step)
    give_up(shelf, held, now, step, failed=True)
    del shelf.consumers[consumer.receiver]
    step.effects.append(DetachReceiver(consumer.receiver, session_lock_lost(session)))


def time_out(shelf: ReceiveState, now: int, step: EngineDecision) -> None:
    """Whoever waited long enough goes without a session, exactly at its deadline."""
    for number in shelf.sessions.wait_deadlines.take_due(now):
        consumer = shelf.sessions.waiting.pop(number).consumer
        del shelf.consumers[consumer.receiver]
        text = f"No session of '{shelf.path}' with messages became available in time."
        step.effects.append(DetachReceiver(consumer.receiver, Refusal(Condition.TIMEOUT, text)))


def renew(shelf: ReceiveState, event: SessionLockRenewed, now: int, step: EngineDecision) -> None:
    held = shelf.sessions.held.get(event.session)
    if held is None or held.until <= now:
        step.effects.append(AnswerRequest(event.reply, session_lock_lost(event.session)))
        return
    held.until = now + shelf.settings.lock_duration
    shelf.sessions.deadlines.set(event.session, held.until)
    step.effects += (AnswerRequest(event.reply, held.until), Meter(shelf.path, MeteredOperation.RENEW_SESSION_LOCK, 1))
