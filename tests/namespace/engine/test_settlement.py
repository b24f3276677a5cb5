"""Settlement, lost locks and too many deliveries, for every lane and outcome."""

from __future__ import annotations

import pytest

from twinbus.namespace.engine import events
from twinbus.namespace.engine.effects import MeteredOperation
from twinbus.values import Condition

from .bus import Bus, Receiver, overlay_of, queue, text_of

COMPLETE = events.Complete()
ABANDON = events.Abandon()
DEFER = events.Defer()
DEAD_LETTER = events.MoveToDeadLetter("reason", "description")
RELEASE = events.Release()


def held_in(bus: Bus, lane: str) -> tuple[bytes, int]:
    """Lock a message in this lane. Returns its token and sequence number."""
    bus.send("q", "m")
    [first] = bus.receive("q").deliveries
    assert first.token is not None
    token, seq = first.token, first.row.seq
    if lane == "deferred":
        bus.settle_tokens("q", [token], DEFER)
        [(_, token, _)] = bus.deferred("q", seq)
    elif lane in ("dead", "dead deferred"):
        bus.settle_tokens("q", [token], DEAD_LETTER)
        [buried] = bus.receive("q", dead=True).deliveries
        assert buried.token is not None
        token = buried.token
        if lane == "dead deferred":
            bus.settle_tokens("q", [token], DEFER)
            [(_, token, _)] = bus.deferred("q", seq, dead=True)
    return token, seq


@pytest.mark.parametrize(
    ("lane", "outcome", "counts"),
    [  # active, deferred, scheduled, dead-lettered
        ("active", COMPLETE, (0, 0, 0, 0)),
        ("active", ABANDON, (1, 0, 0, 0)),
        ("active", DEFER, (0, 1, 0, 0)),
        ("active", DEAD_LETTER, (0, 0, 0, 1)),
        ("active", RELEASE, (1, 0, 0, 0)),
        ("deferred", COMPLETE, (0, 0, 0, 0)),
        ("deferred", ABANDON, (0, 1, 0, 0)),
        ("deferred", DEFER, (0, 1, 0, 0)),
        ("deferred", DEAD_LETTER, (0, 0, 0, 1)),
        ("deferred", RELEASE, (0, 1, 0, 0)),
        ("dead", COMPLETE, (0, 0, 0, 0)),
        ("dead", ABANDON, (0, 0, 0, 1)),
        ("dead", DEFER, (0, 0, 0, 1)),
        ("dead", RELEASE, (0, 0, 0, 1)),
        ("dead deferred", COMPLETE, (0, 0, 0, 0)),
        ("dead deferred", ABANDON, (0, 0, 0, 1)),
        ("dead deferred", DEFER, (0, 0, 0, 1)),
        ("dead deferred", RELEASE, (0, 0, 0, 1)),
    ],
)
def test_a_settled_message_is_in_the_lane_of_its_outcome(
    lane: str, outcome: events.MessageOutcome, counts: tuple[int, int, int, int]
) -> None:
    bus = Bus(queue())
    token, _ = held_in(bus, lane)
    assert bus.settle_tokens("q", [token], outcome) == [None]
    assert bus.counts("q") == counts
    bus.restart()
    assert bus.counts("q") == counts


@pytest.mark.parametrize("lane", ["active", "deferred", "dead", "dead deferred"])
@pytest.mark.parametrize("settle", [events.Abandon, events.Defer], ids=["abandon", "defer"])
def test_properties_set_by_settling_stay_within_the_limit_however_often_it_is_done(
    lane: str, settle: type[events.Abandon | events.Defer]
) -> None:
    bus = Bus(queue(max_delivery_count=100))
    token, seq = held_in(bus, lane)
    dead = lane.startswith("dead")
    number, refusal = 0, None
    for number in range(9):
        [refusal] = bus.settle_tokens("q", [token], settle({f"p{number}": "x" * 30_000}))
        if refusal is not None:
            break
        if settle is events.Defer or "deferred" in lane:
            [(_, token, _)] = bus.deferred("q", seq, dead=dead)
        else:
            [again] = bus.receive("q", dead=dead).deliveries
            assert again.token is not None
            token = again.token
    assert refusal is not None
    assert (refusal.condition, number) == (Condition.ARGUMENT_OUT_OF_RANGE, 2)
    # It is still held, and can be settled within the limit.
    assert bus.settle_tokens("q", [token], COMPLETE) == [None]


def test_a_reason_for_dead_lettering_has_the_same_limit() -> None:
    bus = Bus(queue())
    token, _ = held_in(bus, "active")
    [refusal] = bus.settle_tokens("q", [token], events.MoveToDeadLetter("reason", "x" * 70_000))
    assert refusal is not None
    assert refusal.condition is Condition.ARGUMENT_OUT_OF_RANGE
    assert bus.settle_tokens("q", [token], DEAD_LETTER) == [None]


@pytest.mark.parametrize("lane", ["active", "deferred", "dead", "dead deferred"])
@pytest.mark.parametrize(("outcome", "count"), [(ABANDON, 1), (RELEASE, 0)])
def test_only_a_failed_delivery_counts(lane: str, outcome: events.MessageOutcome, count: int) -> None:
    bus = Bus(queue())
    token, seq = held_in(bus, lane)
    bus.settle_tokens("q", [token], outcome)
    if lane.endswith("deferred"):
        [(row, _, _)] = bus.deferred("q", seq, dead=lane.startswith("dead"))
    else:
        [row] = bus.receive("q", dead=lane == "dead").rows
    assert row.delivery_count == count
    assert row.seq == seq


@pytest.mark.parametrize("lane", ["dead", "dead deferred"])
def test_a_dead_letter_cannot_be_dead_lettered_again_and_stays_held(lane: str) -> None:
    bus = Bus(queue())
    token, _ = held_in(bus, lane)
    [refusal] = bus.settle_tokens("q", [token], DEAD_LETTER)
    assert refusal is not None
    assert refusal.condition is Condition.NOT_ALLOWED
    assert bus.settle_tokens("q", [token], COMPLETE) == [None]


def test_dead_lettering_tells_reason_description_and_properties() -> None:
    bus = Bus(queue())
    bus.send("q", "m")
    [token] = bus.receive("q").tokens
    bus.settle_tokens("q", [token], events.Abandon({"seen": 1}))
    [token] = bus.receive("q").tokens
    bus.settle_tokens("q", [token], events.MoveToDeadLetter("why", "because", {"extra": True}))
    [row] = bus.receive("q", dead=True).rows
    assert overlay_of(row) == {
        "seen": 1,
        "extra": True,
        "DeadLetterReason": "why",
        "DeadLetterErrorDescription": "because",
    }


@pytest.mark.parametrize("outcome", [events.Abandon({"a": 2}), events.Defer({"a": 2})])
def test_properties_set_by_settling_come_with_the_message(outcome: events.MessageOutcome) -> None:
    bus = Bus(queue())
    bus.send("q", "m")
    receiver = bus.receive("q")
    bus.settle_tokens("q", receiver.tokens, events.Abandon({"a": 1, "b": 1}))
    receiver = bus.receive("q")
    bus.settle_tokens("q", receiver.tokens, outcome)
    [row] = bus.peek("q")
    assert overlay_of(row) == {"a": 2, "b": 1}


def test_the_last_allowed_delivery_that_fails_dead_letters_the_message() -> None:
    bus = Bus(queue(max_delivery_count=3))
    bus.send("q", "m")
    for delivered in range(3):
        [row] = (receiver := bus.receive("q")).rows
        assert row.delivery_count == delivered
        bus.settle_tokens("q", receiver.tokens, ABANDON)
    assert bus.receive("q").rows == []
    [row] = bus.receive("q", dead=True).rows
    assert overlay_of(row)["DeadLetterReason"] == "MaxDeliveryCountExceeded"
    assert row.delivery_count == 3


def test_lost_locks_count_towards_the_last_delivery_and_releases_do_not() -> None:
    bus = Bus(queue(max_delivery_count=2, lock_duration=5_000))
    bus.send("q", "m")
    for _ in range(5):
        bus.settle_tokens("q", bus.receive("q").tokens, RELEASE)
    bus.receive("q")
    bus.wait(5_000)
    bus.receive("q")
    assert bus.counts("q") == (1, 0, 0, 0)
    bus.wait(5_000)
    assert bus.counts("q") == (0, 0, 0, 1)


def test_a_dead_letter_can_be_delivered_any_number_of_times() -> None:
    bus = Bus(queue(max_delivery_count=1))
    bus.send("q", "m")
    bus.settle_tokens("q", bus.receive("q").tokens, ABANDON)
    for delivered in range(4):
        [row] = (receiver := bus.receive("q", dead=True)).rows
        assert row.delivery_count == delivered + 1
        bus.settle_tokens("q", receiver.tokens, ABANDON)


def test_a_token_settles_once_and_an_unknown_one_never() -> None:
    bus = Bus(queue())
    bus.send("q", "a", "b")
    one, two = bus.receive("q").tokens
    answers = bus.settle_tokens("q", [one, b"unknown", two, one], COMPLETE)
    assert [answer and answer.condition for answer in answers] == [
        None,
        Condition.MESSAGE_LOCK_LOST,
        None,
        Condition.MESSAGE_LOCK_LOST,
    ]
    assert bus.metered(MeteredOperation.COMPLETE) == 2


def test_a_token_is_good_after_its_link_is_gone_until_the_lock_ends() -> None:
    bus = Bus(queue(lock_duration=5_000))
    bus.send("q", "a", "b")
    receiver = bus.receiver("q", 2)
    bus.detach("q", receiver)
    bus.wait(4_999)
    assert bus.settle_tokens("q", receiver.tokens[:1], COMPLETE) == [None]
    bus.wait(1)
    [refusal] = bus.settle_tokens("q", receiver.tokens[1:], COMPLETE)
    assert refusal is not None
    assert refusal.condition is Condition.MESSAGE_LOCK_LOST


def test_an_expired_lock_is_lost_even_before_its_timer_fires() -> None:
    bus = Bus(queue(lock_duration=5_000))
    bus.send("q", "m")
    [token] = bus.receive("q").tokens
    bus.now += 5_000
    [refusal] = bus.settle_tokens("q", [token], COMPLETE)
    assert refusal is not None
    assert refusal.condition is Condition.MESSAGE_LOCK_LOST
    assert bus.receive("q").bodies == ["m"]


def test_an_abandoned_message_comes_first_again() -> None:
    bus = Bus(queue())
    bus.send("q", "a", "b", "c")
    receiver = bus.receiver("q", 2)
    bus.settle_tokens("q", receiver.tokens[:1], ABANDON)
    bus.credit("q", receiver, 2)
    assert receiver.bodies == ["a", "b", "a", "c"]


def test_messages_given_back_together_come_again_in_order() -> None:
    bus = Bus(queue())
    bus.send("q", *"abcd")
    receiver = bus.receiver("q", 3)
    bus.settle_tokens("q", [receiver.tokens[index] for index in (2, 0, 1)], ABANDON)
    bus.credit("q", receiver, 4)
    assert receiver.bodies == [*"abc", *"abcd"]


def test_a_locked_message_is_not_delivered_again_when_the_queue_is_read_again() -> None:
    bus = Bus(queue())
    bus.send("q", *"abcd")
    holder = bus.receiver("q", 4)
    bus.settle_tokens("q", [holder.tokens[0]], RELEASE)
    reader = bus.receiver("q", 0)
    bus.send("q", "e")
    bus.detach("q", holder)
    bus.detach("q", reader)
    assert bus.receive("q").bodies == ["a", "e"]
    bus.settle_tokens("q", holder.tokens[1:], RELEASE)
    assert bus.receive("q").bodies == ["b", "c", "d"]


def test_an_abandoned_message_goes_to_a_receiver_that_waits() -> None:
    bus = Bus(queue())
    bus.send("q", "a")
    first = bus.receiver("q", 1)
    second = bus.receiver("q", 1)
    bus.settle_tokens("q", first.tokens, ABANDON)
    assert second.bodies == ["a"]
    assert second.rows[0].delivery_count == 1


def test_renewing_a_lock_prolongs_it_from_now() -> None:
    bus = Bus(queue(lock_duration=10_000))
    bus.send("q", "m")
    [token] = bus.receive("q").tokens
    bus.wait(9_000)
    assert bus.submit("q", events.LocksRenewed("reply", (token,))) == [bus.now + 10_000]
    bus.wait(9_999)
    assert bus.settle_tokens("q", [token], COMPLETE) == [None]


def test_renewing_is_refused_as_a_whole_if_one_lock_is_lost() -> None:
    bus = Bus(queue(lock_duration=10_000))
    bus.send("q", "a", "b")
    one, two = bus.receive("q").tokens
    bus.wait(5_000)
    bus.settle_tokens("q", [two], COMPLETE)
    refusal = bus.submit("q", events.LocksRenewed("reply", (one, two)))
    assert refusal.condition is Condition.MESSAGE_LOCK_LOST
    bus.wait(5_000)
    assert bus.receive("q").bodies == ["a"], "its lock ended when it would have"


def test_a_restart_frees_what_was_held_without_counting_a_delivery() -> None:
    bus = Bus(queue())
    bus.send("q", "a", "b")
    receiver = bus.receive("q")
    bus.settle_tokens("q", receiver.tokens[:1], COMPLETE)
    bus.restart()
    after = bus.receive("q")
    assert after.bodies == ["b"]
    assert after.rows[0].delivery_count == 0
    [refusal] = bus.settle_tokens("q", receiver.tokens[1:], COMPLETE)
    assert refusal is not None


@pytest.mark.parametrize("dead", [False, True])
def test_receive_and_delete_leaves_nothing_behind(dead: bool) -> None:
    bus = Bus(queue())
    bus.send("q", "m")
    if dead:
        bus.settle_tokens("q", bus.receive("q").tokens, DEAD_LETTER)
    receiver = bus.receive("q", dead=dead, peek_lock=False)
    [delivery] = receiver.deliveries
    assert text_of(delivery.row) == "m"
    assert delivery.token is None
    assert delivery.locked_until is None
    assert bus.counts("q") == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("outcome", "operation"),
    [
        (COMPLETE, MeteredOperation.COMPLETE),
        (ABANDON, MeteredOperation.ABANDON),
        (DEFER, MeteredOperation.DEFER),
        (DEAD_LETTER, MeteredOperation.DEAD_LETTER),
        (RELEASE, MeteredOperation.RELEASE),
    ],
)
def test_every_settlement_is_metered_as_what_it_is(outcome: events.MessageOutcome, operation: MeteredOperation) -> None:
    bus = Bus(queue())
    bus.send("q", "a", "b")
    bus.settle_tokens("q", bus.receive("q").tokens, outcome)
    assert bus.metered(operation) == 2
    assert bus.metered(MeteredOperation.RECEIVE) == 2


def test_many_returned_messages_are_all_delivered_again_in_order() -> None:
    bus = Bus(queue(lock_duration=5_000, max_delivery_count=100))
    bodies = [f"m{number}" for number in range(5_000)]
    for start in range(0, 5_000, 500):
        bus.send("q", *bodies[start : start + 500])
    assert bus.receive("q", 5_000).bodies == bodies
    bus.wait(5_000)
    receiver: Receiver = bus.receive("q", 6_000)
    assert receiver.bodies == bodies
    assert {row.delivery_count for row in receiver.rows} == {1}
