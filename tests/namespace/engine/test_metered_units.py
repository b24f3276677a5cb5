"""M2: the units that the engine meters beyond one for each operation."""

from __future__ import annotations

from twinbus.ledger import UNIT_BYTES
from twinbus.namespace.engine import events
from twinbus.namespace.engine.effects import MeteredOperation

from .bus import Bus, envelope, queue

LARGE = envelope("x" * UNIT_BYTES)
"""With its properties a little more than one unit."""


def units(bus: Bus, operation: MeteredOperation) -> int:
    return sum(meter.count + meter.more_units for meter in bus.meters if meter.operation is operation)


def test_m2_each_message_of_a_send_or_receive_is_rounded_up_by_itself() -> None:
    bus = Bus(queue())
    bus.send("q", "small", LARGE, "small")
    assert units(bus, MeteredOperation.SEND) == 4
    assert len(bus.receive("q").deliveries) == 3
    assert units(bus, MeteredOperation.RECEIVE) == 4


def test_m2_a_peek_is_one_operation_charged_by_its_total_size() -> None:
    bus = Bus(queue())
    bus.send("q", *[envelope("x" * (UNIT_BYTES // 2))] * 3)
    assert len(bus.peek("q")) == 3
    assert units(bus, MeteredOperation.PEEK) == 2


def test_m2_deferred_and_scheduled_messages_are_rounded_up_too() -> None:
    bus = Bus(queue())
    bus.schedule("q", envelope("x" * UNIT_BYTES, due=bus.now + 1000))
    assert units(bus, MeteredOperation.SCHEDULE) == 2
    bus.send("q", LARGE)
    (delivery,) = bus.receive("q").deliveries
    assert delivery.token is not None
    bus.settle_tokens("q", [delivery.token], events.Defer(None))
    assert len(bus.deferred("q", delivery.row.seq)) == 1
    assert units(bus, MeteredOperation.RECEIVE_DEFERRED) == 2


def test_m2_session_state_is_rounded_up_too() -> None:
    bus = Bus(queue(requires_session=True))
    bus.send("q", envelope(session="s"))
    bus.session("q", "s")
    bus.submit("q", events.SessionStateSet("reply", "s", b"x" * (UNIT_BYTES + 1)))
    bus.submit("q", events.SessionStateRequested("reply", "s"))
    assert units(bus, MeteredOperation.SET_SESSION_STATE) == 2
    assert units(bus, MeteredOperation.GET_SESSION_STATE) == 2
