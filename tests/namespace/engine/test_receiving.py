"""Credit, fairness, drain and status: which receiver gets which messages."""

from __future__ import annotations

import pytest

from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import EntityStatus
from twinbus.namespace.engine.effects import MeteredOperation
from twinbus.namespace.engine.storage_protocol import NextRows
from twinbus.values import Condition

from .bus import Bus, queue


def test_messages_come_in_order_and_only_as_far_as_credit_reaches() -> None:
    bus = Bus(queue())
    bus.send("q", "a", "b", "c")
    receiver = bus.receiver("q", 2)
    assert receiver.bodies == ["a", "b"]
    bus.credit("q", receiver, 5)
    assert receiver.bodies == ["a", "b", "c"]
    assert receiver.deliveries[0].locked_until == bus.now + 60_000


def test_a_waiting_receiver_gets_a_message_in_the_decision_that_stores_it() -> None:
    bus = Bus(queue())
    receiver = bus.receiver("q", 1)
    bus.reads.clear()
    bus.send("q", "a", "b")
    assert receiver.bodies == ["a"]
    assert bus.reads == [], "it was at hand"


def test_credit_is_cumulative() -> None:
    bus = Bus(queue())
    bus.send("q", "a", "b", "c")
    receiver = bus.receiver("q")
    for _ in range(3):
        bus.submit("q", events.CreditGranted(receiver, 2, False))
    assert receiver.bodies == ["a", "b"]


def test_receivers_with_credit_take_turns() -> None:
    bus = Bus(queue())
    receivers = [bus.receiver("q", 2) for _ in range(3)]
    bus.send("q", *"abcdefgh")
    assert [receiver.bodies for receiver in receivers] == [["a", "d"], ["b", "e"], ["c", "f"]]


def test_a_dead_letter_receiver_and_a_plain_one_do_not_mix() -> None:
    bus = Bus(queue())
    dead = bus.receiver("q", 5, dead=True)
    bus.send("q", "a", "b")
    assert dead.bodies == []
    [first, _] = bus.receive("q").tokens
    bus.settle_tokens("q", [first], events.MoveToDeadLetter())
    assert dead.bodies == ["a"]


@pytest.mark.parametrize(("stored", "delivered"), [(0, 0), (2, 2), (9, 4)])
def test_a_drain_gives_what_is_there_and_ends_the_credit(stored: int, delivered: int) -> None:
    bus = Bus(queue())
    if stored:
        bus.send("q", *["m"] * stored)
    receiver = bus.receiver("q")
    bus.submit("q", events.CreditGranted(receiver, 4, True))
    assert (len(receiver.deliveries), receiver.drained) == (delivered, 1)
    bus.send("q", "late")
    assert len(receiver.deliveries) == delivered
    bus.submit("q", events.CreditGranted(receiver, 5, False))
    assert len(receiver.deliveries) == delivered + 1, "drained credit counts as used"


def test_a_drain_of_a_deep_queue_is_answered_after_the_last_message() -> None:
    bus = Bus(queue(), read_ahead_bytes=0)
    bus.send("q", *["m"] * 700)
    receiver = bus.receiver("q", peek_lock=False)
    bus.submit("q", events.CreditGranted(receiver, 1_000, True))
    assert (len(receiver.deliveries), receiver.drained) == (700, 1)


def test_an_empty_receive_is_metered_once_per_credit_grant() -> None:
    bus = Bus(queue())
    receiver = bus.receiver("q", 5)
    bus.wait(15 * 60_000)
    bus.submit("q", events.CreditGranted(receiver, 5, True))
    assert bus.metered(MeteredOperation.RECEIVE_EMPTY) == 1
    bus.submit("q", events.CreditGranted(receiver, 6, False))
    bus.detach("q", receiver)
    assert bus.metered(MeteredOperation.RECEIVE_EMPTY) == 2


def test_a_credit_grant_can_be_empty_after_one_that_was_not() -> None:
    bus = Bus(queue())
    receiver = bus.receiver("q", 1)
    bus.send("q", "m")
    bus.submit("q", events.CreditGranted(receiver, 2, False))
    bus.submit("q", events.CreditGranted(receiver, 2, True))
    assert bus.metered(MeteredOperation.RECEIVE_EMPTY) == 1


def test_a_receive_with_messages_is_not_metered_as_empty() -> None:
    bus = Bus(queue())
    receiver = bus.receiver("q", 5)
    bus.send("q", "m")
    bus.submit("q", events.CreditGranted(receiver, 5, True))
    bus.detach("q", receiver)
    assert bus.metered(MeteredOperation.RECEIVE_EMPTY) == 0
    assert bus.metered(MeteredOperation.RECEIVE) == 1


def test_taking_credit_back_ends_the_grant() -> None:
    bus = Bus(queue())
    receiver = bus.receiver("q", 5)
    bus.submit("q", events.CreditGranted(receiver, 0, True))
    assert bus.metered(MeteredOperation.RECEIVE_EMPTY) == 1
    assert receiver.drained == 1
    bus.send("q", "m")
    assert receiver.deliveries == []


def test_a_receiver_that_waits_for_hours_is_served_at_the_first_message() -> None:
    bus = Bus(queue())
    receiver = bus.receiver("q", 1)
    bus.wait(6 * 3_600_000)
    bus.send("q", "m")
    assert receiver.bodies == ["m"]


def test_a_detached_receiver_gets_nothing_more() -> None:
    bus = Bus(queue())
    receiver = bus.receiver("q", 5)
    bus.detach("q", receiver)
    bus.send("q", "m")
    bus.submit("q", events.CreditGranted(receiver, 9, False))
    assert receiver.deliveries == []


@pytest.mark.parametrize("read_ahead_bytes", [0, 200, 1 << 20])
def test_a_deep_queue_is_delivered_whole_whatever_fits_in_memory(read_ahead_bytes: int) -> None:
    bus = Bus(queue(), read_ahead_bytes=read_ahead_bytes)
    bodies = [str(number) for number in range(1_500)]
    for start in range(0, 1_500, 100):
        bus.send("q", *bodies[start : start + 100])
    receiver = bus.receiver("q")
    for credit in (1, 10, 300, 2_000):
        bus.credit("q", receiver, credit)
    assert receiver.bodies == bodies
    bus.send("q", "last")
    assert receiver.bodies[-1] == "last"


@pytest.mark.parametrize("returned", [False, True])
def test_a_store_that_cannot_be_read_for_a_while_loses_nothing(returned: bool) -> None:
    bus = Bus(queue())
    bus.send("q", "a", "b")
    if returned:
        bus.settle_tokens("q", bus.receive("q").tokens, events.Release())
    else:
        bus.restart()
    receiver = bus.receiver("q")
    decision = bus.entity("q").advance(events.CreditGranted(receiver, 5, False), bus.now)
    next(decision)
    with pytest.raises(OSError, match="disk"):
        decision.throw(OSError("disk"))
    bus.wait(1_000)
    assert receiver.bodies == ["a", "b"]


def test_a_failed_read_does_not_suppress_the_answer_to_a_settlement() -> None:
    bus = Bus(queue())
    bus.send("q", "a", "b")
    receiver = bus.receiver("q", 5)
    settled = events.MessagesSettled("reply", (receiver.tokens[0],), events.Release())
    bus.fail(bus.entity("q").advance(settled, bus.now))
    assert bus.answers[-1] == [None]
    assert receiver.bodies == ["a", "b"]
    bus.wait(1_000)
    assert receiver.bodies == ["a", "b", "a"]


def test_memory_holds_no_more_than_its_budget_and_gives_it_back() -> None:
    bus = Bus(queue("a"), queue("b"), read_ahead_bytes=10_000)
    for path in ("a", "b"):
        for _ in range(10):
            bus.send(path, *["some forty characters of text, more or less"] * 50)
    budget = bus.namespace._resources.read_ahead_budget
    assert 4_000 < budget.used <= 5_000, "where nobody receives, half of the budget is left alone"
    first, second = bus.receiver("a", 1), bus.receiver("b", 1)
    assert budget.used <= 10_000 + 2 * 16 * 1024
    bus.credit("a", first, 1_000)
    bus.credit("b", second, 1_000)
    assert len(first.deliveries) == len(second.deliveries) == 500
    assert budget.used == 0


def test_rows_in_memory_are_given_up_when_the_last_receiver_leaves() -> None:
    bus = Bus(queue(), read_ahead_bytes=100_000)
    bus.send("q", *["m"] * 100)
    bus.restart()
    one, two = bus.receiver("q", 1), bus.receiver("q", 1)
    budget = bus.namespace._resources.read_ahead_budget
    bus.detach("q", one)
    assert budget.used > 0
    bus.detach("q", two)
    assert budget.used == 0
    assert len(bus.receive("q").deliveries) == 98


def test_reading_ahead_asks_the_store_once_for_many_small_receives() -> None:
    bus = Bus(queue())
    bus.send("q", *["m"] * 200)
    bus.restart()
    receiver = bus.receiver("q")
    bus.reads.clear()
    for _ in range(200):
        bus.credit("q", receiver, 1)
    assert len(receiver.deliveries) == 200
    assert sum(isinstance(need, NextRows) for need in bus.reads) == 1


@pytest.mark.parametrize("status", [EntityStatus.RECEIVE_DISABLED, EntityStatus.DISABLED])
def test_an_entity_closed_for_receives_refuses_receivers_peeks_and_requests(status: EntityStatus) -> None:
    bus = Bus(queue(status=status))
    for dead in (False, True):
        refused = bus.receiver("q", dead=dead).refusal
        assert refused is not None
        assert refused.condition is Condition.ENTITY_DISABLED
    for answer in (
        bus.peek("q"),
        bus.deferred("q", 1),
        bus.submit("q", events.BatchDeleted("reply", 10, bus.now, False)),
    ):
        assert answer.condition is Condition.ENTITY_DISABLED


@pytest.mark.parametrize("status", [EntityStatus.RECEIVE_DISABLED, EntityStatus.DISABLED])
def test_closing_for_receives_detaches_receivers_and_opening_serves_new_ones(status: EntityStatus) -> None:
    bus = Bus(queue())
    bus.send("q", "held")
    holder = bus.receiver("q", 1)
    waiting, dead = bus.receiver("q", 5), bus.receiver("q", 5, dead=True)
    bus.update("q", status=status)
    for receiver in (holder, waiting, dead):
        assert receiver.refusal is not None
        assert receiver.refusal.condition is Condition.ENTITY_DISABLED
    assert bus.settle_tokens("q", holder.tokens, events.Complete()) == [None], "what was received may be finished"
    bus.update("q", status=EntityStatus.ACTIVE)
    bus.send("q", "m")
    assert waiting.deliveries == []
    assert bus.receive("q").bodies == ["m"]


def test_a_send_disabled_queue_still_gives_its_messages() -> None:
    bus = Bus(queue())
    bus.send("q", "m")
    bus.update("q", status=EntityStatus.SEND_DISABLED)
    assert bus.receive("q").bodies == ["m"]


def test_a_shorter_lock_duration_holds_for_locks_taken_from_then_on() -> None:
    bus = Bus(queue(lock_duration=60_000))
    bus.send("q", "long", "short")
    receiver = bus.receiver("q", 1)
    bus.update("q", lock_duration=5_000)
    bus.credit("q", receiver, 1)
    assert [each.locked_until for each in receiver.deliveries] == [bus.now + 60_000, bus.now + 5_000]
    again = bus.receiver("q", 1)
    bus.wait(5_000)
    assert again.bodies == ["short"]
    bus.settle_tokens("q", again.tokens, events.Complete())
    bus.credit("q", again, 1)
    bus.wait(54_999)
    assert again.bodies == ["short"]
    bus.wait(1)
    assert again.bodies == ["short", "long"]


def test_a_plain_receiver_cannot_be_made_for_an_entity_with_sessions() -> None:
    bus = Bus(queue(requires_session=True))
    refusal = bus.receiver("q").refusal
    assert refusal is not None
    assert refusal.condition is Condition.NOT_ALLOWED
    assert bus.receiver("q", dead=True).refusal is None, "its dead-letter queue has no sessions"
