"""Peek, receive deferred messages by sequence number, delete many messages."""

from __future__ import annotations

import pytest

from twinbus.namespace.engine import events
from twinbus.namespace.engine.effects import MeteredOperation
from twinbus.values import Condition

from .bus import Bus, envelope, queue, text_of


def test_peeking_shows_what_is_active_held_deferred_and_scheduled_by_number() -> None:
    bus = Bus(queue())
    bus.send("q", "deferred", "held", "active")
    bus.schedule("q", envelope("scheduled", due=bus.now + 1_000))
    first, _ = (receiver := bus.receiver("q", 2)).tokens
    bus.settle_tokens("q", [first], events.Defer())
    assert [text_of(row) for row in bus.peek("q")] == ["deferred", "held", "active", "scheduled"]
    assert [text_of(row) for row in bus.peek("q", 2, 2)] == ["held", "active"]
    assert bus.peek("q", count=0) == []
    assert len(receiver.deliveries) == 2
    assert bus.metered(MeteredOperation.PEEK) == 3


def test_peeking_the_dead_letter_queue_shows_dead_letters_only() -> None:
    bus = Bus(queue())
    bus.send("q", "dead", "alive")
    first, _ = bus.receive("q").tokens
    bus.settle_tokens("q", [first], events.MoveToDeadLetter())
    assert [text_of(row) for row in bus.peek("q", dead=True)] == ["dead"]
    assert [text_of(row) for row in bus.peek("q")] == ["alive"]


def test_peeking_a_session_shows_that_session_only() -> None:
    bus = Bus(queue(requires_session=True))
    bus.send("q", envelope("a", session="red"), envelope("b", session="blue"))
    assert [text_of(row) for row in bus.peek("q", session="blue")] == ["b"]
    assert len(bus.peek("q")) == 2


def test_a_peek_goes_on_past_a_page_of_expired_messages() -> None:
    bus = Bus(queue())
    bus.send("q", *[envelope("old", ttl=1_000) for _ in range(5)], envelope("new"))
    bus.now += 1_000
    bus.carry_out(bus.entity("q").advance(events.MessagesPeeked("reply", 0, 2, False), bus.now))
    assert [text_of(row) for row in bus.answers[-1]] == ["new"]


def test_a_peek_is_bounded_in_bytes() -> None:
    bus = Bus(queue())
    for _ in range(10):
        bus.send("q", "x" * 200_000)
    assert 1 <= len(bus.peek("q")) <= 6


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("peek_lock", [False, True])
def test_a_deferred_message_is_received_by_its_number(peek_lock: bool, dead: bool) -> None:
    bus = Bus(queue())
    bus.send("q", "a", "b", "c")
    tokens = bus.receive("q").tokens
    if dead:
        bus.settle_tokens("q", tokens, events.MoveToDeadLetter())
        tokens = bus.receive("q", dead=True).tokens
    bus.settle_tokens("q", tokens, events.Defer())
    assert bus.receive("q", dead=dead).bodies == []
    received = bus.deferred("q", 3, 1, peek_lock=peek_lock, dead=dead)
    assert [text_of(row) for row, _, _ in received] == ["c", "a"]
    if peek_lock:
        assert {until for _, _, until in received} == {bus.now + 60_000}
        tokens = [token for _, token, _ in received]
        assert bus.settle_tokens("q", tokens, events.Complete()) == [None, None]
    else:
        assert {(token, until) for _, token, until in received} == {(None, None)}
    assert sum(bus.counts("q")) == 1
    assert bus.metered(MeteredOperation.RECEIVE_DEFERRED) == 2


def test_a_request_with_a_number_that_is_not_deferred_receives_nothing() -> None:
    bus = Bus(queue())
    bus.send("q", "deferred", "held deferred", "active")
    one, two, _ = bus.receive("q").tokens
    bus.settle_tokens("q", [one, two], events.Defer())
    bus.deferred("q", 2)
    for wrong in (2, 3, 99):
        refusal = bus.deferred("q", 1, wrong)
        assert refusal.condition is Condition.MESSAGE_NOT_FOUND
        assert str(wrong) in refusal.description
    assert bus.deferred("q", 1, dead=True).condition is Condition.MESSAGE_NOT_FOUND
    assert len(bus.deferred("q", 1, 1)) == 1


def test_a_deferred_message_whose_lock_is_lost_stays_deferred_until_it_failed_too_often() -> None:
    bus = Bus(queue(lock_duration=5_000, max_delivery_count=2))
    bus.send("q", "m")
    bus.settle_tokens("q", bus.receive("q").tokens, events.Defer())
    bus.deferred("q", 1)
    bus.wait(5_000)
    assert bus.counts("q") == (0, 1, 0, 0)
    [(row, _, _)] = bus.deferred("q", 1)
    assert row.delivery_count == 1
    bus.wait(5_000)
    assert bus.counts("q") == (0, 0, 0, 1)


@pytest.mark.parametrize("read_ahead_bytes", [0, 1 << 20])
@pytest.mark.parametrize("dead", [False, True])
def test_deleting_a_batch_spares_held_and_younger_messages(dead: bool, read_ahead_bytes: int) -> None:
    bus = Bus(queue(), read_ahead_bytes=read_ahead_bytes)
    bus.send("q", "held", "a", "b", "c", "d")
    bus.wait(10)
    bus.send("q", "young")
    if dead:
        bus.settle_tokens("q", bus.receive("q").tokens, events.MoveToDeadLetter())
    receiver = bus.receiver("q", 1, dead=dead)
    assert bus.submit("q", events.BatchDeleted("reply", 2, bus.now, dead)) == 2
    assert bus.submit("q", events.BatchDeleted("reply", 100, bus.now, dead)) == 2
    assert bus.submit("q", events.BatchDeleted("reply", 100, bus.now, dead)) == 0
    bus.credit("q", receiver, 10)
    assert receiver.bodies == ["held", "young"]
    assert sum(bus.counts("q")) == 2


def test_deleting_a_batch_of_thousands_goes_through_the_store_in_pages() -> None:
    bus = Bus(queue())
    for _ in range(10):
        bus.send("q", *["m"] * 100)
    assert bus.submit("q", events.BatchDeleted("reply", 4_000, bus.now + 1, False)) == 1_000
    assert bus.counts("q") == (0, 0, 0, 0)
    bus.send("q", "after")
    assert bus.receive("q").bodies == ["after"]
