"""Time to live, scheduled messages, and timers at their exact instant."""

from __future__ import annotations

import pytest

from twinbus.amqp import RoutingFields
from twinbus.namespace.engine import events
from twinbus.namespace.engine.effects import MeteredOperation
from twinbus.namespace.engine.send_checks import time_to_live
from twinbus.namespace.engine.storage_protocol import DueRows, ExpiredRows
from twinbus.values import Condition

from .bus import Bus, envelope, overlay_of, queue, text_of

NEVER = None


@pytest.mark.parametrize(
    ("own", "default", "effective"),
    [(None, None, NEVER), (5_000, None, 5_000), (None, 7_000, 7_000), (5_000, 7_000, 5_000), (9_000, 7_000, 7_000)],
)
def test_the_shorter_time_to_live_counts(own: int | None, default: int | None, effective: int | None) -> None:
    bus = Bus(queue(default_time_to_live=default))
    bus.send("q", envelope("m", ttl=own))
    [row] = bus.peek("q")
    assert row.expires == (None if effective is None else bus.now + effective)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            RoutingFields(b"", ttl=0xFFFF_FFFF, absolute_expiry_time=9_000_000_000_000, creation_time=1_000),
            8_999_999_999_000,
        ),
        (RoutingFields(b"", ttl=0xFFFF_FFFF), 0xFFFF_FFFF),
        (RoutingFields(b"", absolute_expiry_time=5_000), 4_000),
        (RoutingFields(b"", absolute_expiry_time=500), 0),
        (RoutingFields(b"", ttl=10, absolute_expiry_time=5_000, creation_time=1_000), 10),
    ],
)
def test_a_time_to_live_too_long_for_the_header_comes_from_the_absolute_expiry_time(
    message: RoutingFields, expected: int
) -> None:
    assert time_to_live(message, None, 1_000) == expected


def test_an_expired_message_is_dropped_by_itself() -> None:
    bus = Bus(queue())
    bus.send("q", envelope("short", ttl=1_000), envelope("long", ttl=2_000))
    bus.wait(999)
    assert bus.counts("q") == (2, 0, 0, 0)
    bus.wait(1)
    assert bus.counts("q") == (1, 0, 0, 0)
    bus.wait(1_000)
    assert bus.counts("q") == (0, 0, 0, 0)


def test_an_expired_message_is_dead_lettered_where_the_queue_says_so_and_lives_on_there() -> None:
    bus = Bus(queue(dead_lettering_on_expiration=True))
    bus.send("q", envelope("m", ttl=1_000))
    bus.wait(1_000)
    assert bus.counts("q") == (0, 0, 0, 1)
    bus.wait(10_000_000)
    [row] = bus.receive("q", dead=True).rows
    assert overlay_of(row)["DeadLetterReason"] == "TTLExpiredException"
    assert row.expires is None


def test_an_expired_message_is_neither_delivered_nor_peeked_before_its_timer_comes() -> None:
    bus = Bus(queue())
    bus.send("q", envelope("old", ttl=1_000), envelope("new", ttl=60_000))
    receiver = bus.receiver("q")
    bus.now += 1_000
    bus.carry_out(bus.entity("q").advance(events.MessagesPeeked("reply", 0, 1, False), bus.now))
    assert [text_of(row) for row in bus.answers[-1]] == ["new"]
    bus.carry_out(bus.entity("q").advance(events.CreditGranted(receiver, 2, False), bus.now))
    assert receiver.bodies == ["new"]
    bus.settle()
    assert bus.counts("q") == (1, 0, 0, 0)


def test_a_held_message_does_not_expire_until_it_comes_back() -> None:
    bus = Bus(queue(dead_lettering_on_expiration=True))
    bus.send("q", envelope("kept", ttl=1_000), envelope("abandoned", ttl=1_000), envelope("lost", ttl=1_000))
    kept, abandoned, _ = bus.receive("q").tokens
    bus.wait(10_000)
    assert bus.counts("q") == (3, 0, 0, 0)
    assert bus.settle_tokens("q", [kept], events.Complete()) == [None]
    bus.settle_tokens("q", [abandoned], events.Abandon())
    assert bus.counts("q") == (1, 0, 0, 1)
    bus.wait(50_000)
    assert bus.counts("q") == (0, 0, 0, 2)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("dead_letters", [False, True])
def test_a_deferred_message_expires_only_when_it_is_requested(dead_letters: bool, restarts: bool) -> None:
    bus = Bus(queue(dead_lettering_on_expiration=dead_letters))
    bus.send("q", envelope("m", ttl=10_000), envelope("n", ttl=90_000))
    bus.settle_tokens("q", bus.receive("q").tokens, events.Defer())
    if restarts:
        bus.restart()
    bus.wait(20_000)
    assert bus.counts("q") == (0, 2, 0, 0)
    assert [text_of(row) for row in bus.peek("q")] == ["m", "n"]
    refusal = bus.deferred("q", 1, 2)
    assert refusal.condition is Condition.MESSAGE_NOT_FOUND
    assert "1" in refusal.description
    assert bus.counts("q") == (0, 1, 0, int(dead_letters))
    reasons = [overlay_of(row)["DeadLetterReason"] for row in bus.receive("q", dead=True).rows]
    assert reasons == ["TTLExpiredException"] * dead_letters
    assert [text_of(row) for row, _, _ in bus.deferred("q", 2)] == ["n"]


@pytest.mark.parametrize("outcome", [events.Abandon(), events.Release(), events.Defer(), None])
def test_a_deferred_message_that_comes_back_after_its_time_stays_deferred(
    outcome: events.MessageOutcome | None,
) -> None:
    bus = Bus(queue())
    bus.send("q", envelope("m", ttl=70_000))
    bus.settle_tokens("q", bus.receive("q").tokens, events.Defer())
    bus.wait(60_000)
    [(_, token, _)] = bus.deferred("q", 1)
    assert token is not None
    bus.wait(20_000)
    if outcome is None:
        bus.wait(40_000)
    else:
        assert bus.settle_tokens("q", [token], outcome) == [None]
    assert bus.counts("q") == (0, 1, 0, 0)
    assert bus.deferred("q", 1).condition is Condition.MESSAGE_NOT_FOUND
    assert bus.counts("q") == (0, 0, 0, 0)


def test_a_held_message_deferred_after_its_time_is_deferred() -> None:
    bus = Bus(queue())
    bus.send("q", envelope("m", ttl=1_000))
    [token] = bus.receive("q").tokens
    bus.wait(10_000)
    assert bus.settle_tokens("q", [token], events.Defer()) == [None]
    assert bus.counts("q") == (0, 1, 0, 0)


def test_thousands_expire_together_although_hundreds_of_the_oldest_are_held() -> None:
    bus = Bus(queue())
    bus.send("q", *[envelope("m", ttl=10_000) for _ in range(400)])
    held = bus.receive("q", 400)
    bus.send("q", *[envelope("m", ttl=10_000) for _ in range(1_000)])
    bus.wait(10_000)
    assert bus.counts("q") == (400, 0, 0, 0)
    assert max(need.limit for need in bus.reads if isinstance(need, ExpiredRows)) <= 256 + 400
    assert bus.settle_tokens("q", held.tokens, events.Complete()) == [None] * 400


def test_expiry_is_known_after_a_restart() -> None:
    bus = Bus(queue())
    bus.send("q", envelope("m", ttl=5_000))
    bus.restart()
    bus.wait(5_000)
    assert bus.counts("q") == (0, 0, 0, 0)


@pytest.mark.parametrize("plain_send", [True, False])
def test_a_scheduled_message_comes_when_it_is_due_and_not_before(plain_send: bool) -> None:
    bus = Bus(queue())
    receiver = bus.receiver("q", 5)
    message = envelope("m", due=bus.now + 5_000)
    if plain_send:
        assert bus.send("q", message) is None
        number = 1
    else:
        [number] = bus.schedule("q", message)
    assert bus.counts("q") == (0, 0, 1, 0)
    bus.wait(4_999)
    assert receiver.bodies == []
    bus.wait(1)
    assert receiver.bodies == ["m"]
    assert receiver.rows[0].seq > number, "it enters the queue under a new number"
    assert receiver.rows[0].enqueued == bus.now
    assert receiver.rows[0].due is None
    assert bus.counts("q") == (1, 0, 0, 0)


@pytest.mark.parametrize("late", [0, 1, 100_000])
def test_a_message_scheduled_for_the_past_is_active_at_once(late: int) -> None:
    bus = Bus(queue())
    bus.send("q", envelope("m", due=bus.now - late))
    assert bus.receive("q").bodies == ["m"]


def test_the_time_to_live_of_a_scheduled_message_starts_when_it_is_due() -> None:
    bus = Bus(queue(dead_lettering_on_expiration=True))
    bus.schedule("q", envelope("m", due=bus.now + 10_000, ttl=2_000))
    bus.wait(10_000)
    assert bus.counts("q") == (1, 0, 0, 0)
    bus.wait(1_999)
    assert bus.counts("q") == (1, 0, 0, 0)
    bus.wait(1)
    assert bus.counts("q") == (0, 0, 0, 1)


def test_a_late_timer_does_not_shorten_the_time_to_live_of_a_scheduled_message() -> None:
    bus = Bus(queue())
    bus.schedule("q", envelope("m", due=bus.now + 1_000, ttl=2_000))
    bus.now += 3_600_000
    bus.settle()
    assert bus.receive("q").bodies == ["m"]


def test_scheduled_messages_survive_a_restart_and_come_in_the_order_of_their_time() -> None:
    bus = Bus(queue())
    start = bus.now
    bus.schedule("q", envelope("third", due=start + 3_000), envelope("first", due=start + 1_000))
    bus.schedule("q", envelope("second", due=start + 2_000))
    bus.restart()
    receiver = bus.receiver("q", 5)
    bus.wait(10_000)
    assert receiver.bodies == ["first", "second", "third"]


@pytest.mark.parametrize("plain_send", [True, False])
def test_a_message_scheduled_later_for_an_earlier_time_is_punctual(plain_send: bool) -> None:
    bus = Bus(queue())
    take = bus.send if plain_send else bus.schedule
    take("q", envelope("second", due=bus.now + 20_000))
    take("q", envelope("first", due=bus.now + 10_000))
    bus.wait(10_000)
    assert bus.counts("q") == (1, 0, 1, 0)


def test_many_scheduled_messages_fall_due_at_once() -> None:
    bus = Bus(queue())
    for _ in range(7):
        bus.schedule("q", *[envelope("m", due=bus.now + 1_000) for _ in range(100)])
    bus.wait(1_000)
    assert bus.counts("q") == (700, 0, 0, 0)
    assert len(bus.receive("q").deliveries) == 700


def test_cancelling_takes_back_all_or_nothing() -> None:
    bus = Bus(queue())
    one, two, three = bus.schedule("q", *[envelope(each, due=bus.now + 1_000) for each in "abc"])
    refusal = bus.cancel("q", one, 99)
    assert refusal.condition is Condition.MESSAGE_NOT_FOUND
    assert "99" in refusal.description
    assert bus.counts("q") == (0, 0, 3, 0)
    assert bus.cancel("q", one, three, one) is None
    assert bus.counts("q") == (0, 0, 1, 0)
    assert bus.metered(MeteredOperation.CANCEL_SCHEDULED) == 2
    bus.wait(1_000)
    assert bus.receive("q").bodies == ["b"]
    assert bus.cancel("q", two).condition is Condition.MESSAGE_NOT_FOUND


def test_peeking_shows_scheduled_messages_with_their_number() -> None:
    bus = Bus(queue())
    [number] = bus.schedule("q", envelope("m", due=bus.now + 1_000, ttl=1))
    [row] = bus.peek("q")
    assert (row.seq, row.due) == (number, bus.now + 1_000)


def test_expired_messages_are_dropped_although_due_messages_cannot_be_read() -> None:
    bus = Bus(queue(dead_lettering_on_expiration=True))
    bus.send("q", envelope("old", ttl=1_000), envelope("due", due=bus.now + 1_000))
    bus.now += 1_000
    decision = bus.entity("q").advance(events.EntityTimerFired(), bus.now)
    need = next(decision)
    assert isinstance(need, ExpiredRows)
    assert isinstance(decision.send(bus.store.load(need)), DueRows)
    with pytest.raises(StopIteration) as decided:
        decision.throw(OSError("disk"))
    bus.apply(decided.value.value)
    assert bus.counts("q") == (0, 0, 1, 1)
    bus.wait(0)
    assert bus.receive("q").bodies == ["due"]
    assert bus.receive("q", dead=True).bodies == ["old"]
