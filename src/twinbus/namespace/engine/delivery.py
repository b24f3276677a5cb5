"""Delivery: gives available rows to the receivers with credit, one row to each receiver, round after round.

A decision reads before it writes, because the store does not show rows written by the same decision. So if rows must
be read and the decision has writes already, `serve` returns False. The caller then sets the timer to the current
instant, and the decision of the timer continues the delivery.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from twinbus.ledger.entries import UNIT_BYTES, billable_units  # not twinbus.ledger: it imports code that writes
from twinbus.namespace.engine.effects import Deliver, Drain, EngineDecision, Meter, MeteredOperation
from twinbus.namespace.engine.events import CreditGranted
from twinbus.namespace.engine.limits import SECOND
from twinbus.namespace.engine.receive_state import AttachedReceiver, DeliveryLane, ReceiveState
from twinbus.namespace.engine.settlement import drop_row, expire_row
from twinbus.namespace.engine.storage_protocol import StoreRead

_RETRY_READ_AFTER: Final = SECOND


def grant_credit(state: ReceiveState, event: CreditGranted, decision: EngineDecision) -> None:
    """Note the new credit of a receiver. Messages for this credit are delivered at the end of the decision."""
    receiver = state.receivers.get(event.receiver)
    if receiver is None:
        return
    had_credit = receiver.has_credit
    receiver.credit_limit = event.limit
    receiver.room = event.room
    receiver.drain = event.drain
    if receiver.has_credit:
        if not had_credit:
            receiver.got_message = False
        if receiver.lane is not None and event.room <= 0:
            receiver.lane.remove_waiting(receiver)
        elif receiver.lane is not None:
            receiver.lane.add_waiting(receiver)
            state.request_delivery(receiver.lane)
        return
    if had_credit:
        end_credit(state, receiver, decision)
    if event.drain:
        decision.effects.append(Drain(receiver.handle))


def end_credit(state: ReceiveState, receiver: AttachedReceiver, decision: EngineDecision) -> None:
    """End a grant of credit. A grant without any message is metered as an empty receive (Y2)."""
    if receiver.lane is not None:
        receiver.lane.remove_waiting(receiver)
    if not receiver.got_message:
        decision.effects.append(Meter(state.path, MeteredOperation.RECEIVE_EMPTY, 1))


def serve(
    state: ReceiveState, lane: DeliveryLane, now: int, decision: EngineDecision
) -> Generator[StoreRead, Any, bool]:
    """Deliver rows of the lane while receivers wait. Returns False if rows must be read and the decision has writes.

    If a read fails, the lane stays in `lanes_to_serve`, and the timer tries again after 1 s.
    """
    read_ahead = lane.read_ahead
    while lane.waiting:
        _deliver_from_memory(state, lane, now, decision)
        if not lane.waiting:
            break
        if read_ahead.is_exhausted:
            _drain(state, lane, decision)
            break
        if decision.writes:
            return False
        read = read_ahead.next_read()
        try:
            rows = yield read
        except Exception:
            read_ahead.restore(read)
            state.lanes_to_serve.append(lane)
            state.arm_timer(now + _RETRY_READ_AFTER)
            raise
        read_ahead.fill(read, rows, state.locks.by_seq)
    return True


def _deliver_from_memory(state: ReceiveState, lane: DeliveryLane, now: int, decision: EngineDecision) -> None:
    """Deliver rows that are in memory, with one Deliver effect for all messages of a receiver."""
    session, waiting, effects = lane.session, lane.waiting, decision.effects
    until = now + state.settings.lock_duration if session is None else session.until
    take_row, new_token, add_lock = lane.read_ahead.take, state.resources.new_token, state.locks.add
    by_receiver: dict[AttachedReceiver, Deliver] = {}
    count = size = extra_units = 0
    while waiting and (row := take_row()) is not None:
        if row.is_overdue(now):
            expire_row(state, row, decision)
            continue
        receiver = waiting[0]
        receiver.delivered += 1
        deliver = by_receiver.get(receiver)
        if deliver is None:
            receiver.got_message = True
            deliver = Deliver(receiver.handle, [], [], until if receiver.peek_lock else None)
            by_receiver[receiver] = deliver
            effects.append(deliver)
        token = None
        if receiver.peek_lock:
            token = new_token()
            add_lock(token, row, until, session)
        else:
            drop_row(state, row, decision)
        deliver.rows.append(row)
        deliver.tokens.append(token)
        count += 1
        size += row.size
        receiver.room -= row.size
        if row.size > UNIT_BYTES:
            extra_units += billable_units(1, row.size) - 1
        if receiver.delivered >= receiver.credit_limit:
            waiting.popleft()
            receiver.is_waiting = False
            if receiver.drain:
                effects.append(Drain(receiver.handle))
        elif receiver.room <= 0:
            waiting.popleft()
            receiver.is_waiting = False
        elif len(waiting) > 1:
            waiting.rotate(-1)
    if count:
        effects.append(Meter(state.path, MeteredOperation.RECEIVE, count, size, extra_units))
        if session is None:
            state.arm_timer(until)


def _drain(state: ReceiveState, lane: DeliveryLane, decision: EngineDecision) -> None:
    """End the credit of the receivers that requested a drain: no row is available for them."""
    for receiver in [receiver for receiver in lane.waiting if receiver.drain]:
        receiver.delivered = receiver.credit_limit
        end_credit(state, receiver, decision)
        decision.effects.append(Drain(receiver.handle))
