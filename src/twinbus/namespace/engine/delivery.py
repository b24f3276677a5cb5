"""Gives what stands ready to the receivers with credit, fairly, one message each in turn.

A decision asks before it writes: rows read after a write of the same step would not show it. So where rows must be
read and something is written already, the rest is left for a timer that fires at once.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from twinbus.ledger.entries import UNIT_BYTES, billable_units  # pure: the face also loads what writes to the disk
from twinbus.namespace.engine.effects import Deliver, Drain, EngineDecision, Meter, MeteredOperation
from twinbus.namespace.engine.events import CreditGranted
from twinbus.namespace.engine.limits import SECOND
from twinbus.namespace.engine.receive_state import AttachedReceiver, DeliveryLane, ReceiveState
from twinbus.namespace.engine.settlement import drop, expire
from twinbus.namespace.engine.storage_protocol import StoreRead

_RETRY: Final = SECOND


def grant(state: ReceiveState, event: CreditGranted, step: EngineDecision) -> None:
    consumer = state.consumers.get(event.receiver)
    if consumer is None:
        return
    had_credit = consumer.limit > consumer.taken
    consumer.limit = event.limit
    consumer.room = event.room
    consumer.drain = event.drain
    if event.limit > consumer.taken:
        if not had_credit:
            consumer.fed = False
        if consumer.feed is not None and event.room <= 0:
            consumer.feed.leave(consumer)
        elif consumer.feed is not None:
            consumer.feed.queue_up(consumer)
            state.wake(consumer.feed)
        return
    if had_credit:
        end_grant(state, consumer, step)
    if event.drain:
        step.effects.append(Drain(consumer.receiver))


def end_grant(state: ReceiveState, consumer: AttachedReceiver, step: EngineDecision) -> None:
    """Credit ended. A grant that brought nothing was a receive of its own kind (Y2)."""
    if consumer.feed is not None:
        consumer.feed.leave(consumer)
    if not consumer.fed:
        step.effects.append(Meter(state.path, MeteredOperation.RECEIVE_EMPTY, 1))


def serve(state: ReceiveState, feed: DeliveryLane, now: int, step: EngineDecision) -> Generator[StoreRead, Any, bool]:
    """False if rows must be read that this step may be writing."""
    window = feed.window
    while feed.hungry:
        _deliver_ready(state, feed, now, step)
        if not feed.hungry:
            break
        if window.exhausted:
            _drain(state, feed, step)
            break
        if step.writes:
            return False
        need = window.need()
        try:
            rows = yield need
        except Exception:  # the store could not be read: nothing must be forgotten for that
            window.restore(need)
            state.pending.append(feed)
            state.arm(now + _RETRY)
            raise
        window.fill(need, rows, state.locks.by_seq)
    return True


def _deliver_ready(state: ReceiveState, feed: DeliveryLane, now: int, step: EngineDecision) -> None:
    session, hungry, effects = feed.session, feed.hungry, step.effects
    until = now + state.settings.lock_duration if session is None else session.until
    take, new_token, lock = feed.window.take, state.supplies.new_token, state.locks.take
    runs: dict[AttachedReceiver, Deliver] = {}
    count = size = more = 0
    while hungry and (row := take()) is not None:
        if row.expires is not None and row.expires <= now:
            expire(state, row, step)
            continue
        consumer = hungry[0]
        consumer.taken += 1
        run = runs.get(consumer)
        if run is None:
            consumer.fed = True
            run = runs[consumer] = Deliver(consumer.receiver, [], [], until if consumer.peek_lock else None)
            effects.append(run)
        token = None
        if consumer.peek_lock:
            token = new_token()
            lock(token, row, until, session)
        else:
            drop(state, row, step)
        run.rows.append(row)
        run.tokens.append(token)
        count += 1
        size += row.size
        consumer.room -= row.size
        if row.size > UNIT_BYTES:
            more += billable_units(1, row.size) - 1
        if consumer.taken >= consumer.limit:
            hungry.popleft()
            consumer.hungry = False
            if consumer.drain:
                effects.append(Drain(consumer.receiver))
        elif consumer.room <= 0:
            hungry.popleft()
            consumer.hungry = False
        elif len(hungry) > 1:
            hungry.rotate(-1)
    if count:
        effects.append(Meter(state.path, MeteredOperation.RECEIVE, count, size, more))
        if session is None:
            state.arm(until)


def _drain(state: ReceiveState, feed: DeliveryLane, step: EngineDecision) -> None:
    """Nothing is there: who drains has used up the credit."""
    for consumer in [consumer for consumer in feed.hungry if consumer.drain]:
        consumer.taken = consumer.limit
        end_grant(state, consumer, step)
        step.effects.append(Drain(consumer.receiver))
