"""Sessions: which receiver gets which session, in which order, for how long, and what happens to its messages."""

from __future__ import annotations

from typing import Any

import pytest

from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import EntityStatus, SubscriptionDescription, TopicDescription
from twinbus.namespace.engine.effects import MeteredOperation, Refusal
from twinbus.values import Condition

from .bus import Bus, Receiver, envelope, queue


def sessions(*sent: str, **settings: Any) -> Bus:
    """A queue with sessions; `red1` is a message of session `red`."""
    bus = Bus(queue(requires_session=True, **settings))
    for body in sent:
        send(bus, body)
    return bus


def send(bus: Bus, *bodies: str, **settings: Any) -> None:
    messages = [envelope(body, session=body.rstrip("0123456789"), **settings) for body in bodies]
    assert bus.send("q", *messages) is None


def condition(receiver: Receiver) -> Condition | None:
    return receiver.refusal.condition if receiver.refusal is not None else None


def test_a_receiver_of_a_session_gets_its_messages_in_order_and_no_others() -> None:
    bus = sessions("red1", "blue1", "red2", "blue2")
    receiver = bus.session("q", "red", 10)
    assert receiver.session == "red"
    assert receiver.locked_until == bus.now + 60_000
    send(bus, "blue3", "red3")
    assert receiver.bodies == ["red1", "red2", "red3"]
    assert {each.locked_until for each in receiver.deliveries} == {receiver.locked_until}


def test_a_session_has_one_receiver_at_a_time() -> None:
    bus = sessions("red1")
    bus.session("q", "red")
    assert condition(bus.session("q", "red")) is Condition.SESSION_CANNOT_BE_LOCKED


def test_a_session_without_messages_can_be_accepted_by_its_id() -> None:
    bus = sessions()
    receiver = bus.session("q", "new", 1)
    assert receiver.session == "new"
    send(bus, "new1")
    assert receiver.bodies == ["new1"]


@pytest.mark.parametrize(
    ("settings", "session", "expected"),
    [
        ({"requires_session": False}, "red", Condition.NOT_ALLOWED),
        ({"requires_session": False}, None, Condition.NOT_ALLOWED),
        ({"status": EntityStatus.DISABLED}, None, Condition.ENTITY_DISABLED),
        ({"status": EntityStatus.RECEIVE_DISABLED}, "red", Condition.ENTITY_DISABLED),
        ({}, "x" * 129, Condition.ARGUMENT_ERROR),
        ({}, "", Condition.ARGUMENT_ERROR),
    ],
)
def test_a_session_receiver_is_refused(settings: dict[str, Any], session: str | None, expected: Condition) -> None:
    bus = Bus(queue(**{"requires_session": True, **settings}))
    assert condition(bus.session("q", session, wait=1_000)) is expected


def test_the_next_available_session_rotates_through_all() -> None:
    bus = sessions("c1", "a1", "b1", "a2")
    given = []
    for _ in range(4):
        receiver = bus.session("q", None)
        given.append(receiver.session)
        bus.detach("q", receiver)
    assert given == ["a", "b", "c", "a"]


def test_the_next_available_session_is_not_one_that_is_held() -> None:
    bus = sessions(*[f"s{number:03}x1" for number in range(200)])
    held = [bus.session("q", None).session for _ in range(200)]
    assert len(set(held)) == 200
    late = bus.session("q", None, wait=0)
    assert condition(late) is Condition.TIMEOUT


def test_no_session_in_time_ends_in_a_time_out_exactly_at_the_deadline() -> None:
    bus = sessions()
    receiver = bus.session("q", None, wait=5_000)
    bus.wait(4_999)
    assert receiver.refusal is None
    bus.wait(1)
    assert condition(receiver) is Condition.TIMEOUT
    send(bus, "red1")
    assert receiver.session is None


def test_a_session_at_the_very_deadline_is_still_given() -> None:
    bus = sessions("red1")
    holder = bus.session("q", "red")
    waiting = bus.session("q", None, wait=5_000)
    bus.now += 5_000
    bus.detach("q", holder)
    assert waiting.session == "red"


def test_waiting_receivers_are_served_in_the_order_they_came() -> None:
    bus = sessions()
    waiting = [bus.session("q", None, wait=60_000) for _ in range(3)]
    send(bus, "red1", "red2", "blue1")
    assert [receiver.session for receiver in waiting] == ["red", "blue", None]
    bus.schedule("q", envelope("green1", session="green", due=bus.now + 1_000))
    bus.wait(1_000)
    assert waiting[2].session == "green"
    bus.credit("q", waiting[2], 1)
    assert waiting[2].bodies == ["green1"]


def test_a_receiver_that_stops_waiting_is_passed_over() -> None:
    bus = sessions()
    first, second = (bus.session("q", None, wait=60_000) for _ in range(2))
    bus.detach("q", first)
    send(bus, "red1")
    assert (first.session, second.session) == (None, "red")


def test_a_released_session_goes_to_a_waiting_receiver() -> None:
    bus = sessions("red1")
    holder = bus.session("q", "red", 1)
    waiting = bus.session("q", None, wait=60_000)
    assert not waiting.holds("red")
    bus.detach("q", holder)
    assert waiting.holds("red")
    bus.credit("q", waiting, 1)
    assert waiting.bodies == ["red1"]
    assert waiting.rows[0].delivery_count == 0, "giving a session back is no failed delivery"


def test_a_released_session_without_messages_is_not_assigned_to_a_waiting_receiver() -> None:
    bus = sessions("red1")
    holder = bus.session("q", "red", 1)
    waiting = bus.session("q", None, wait=60_000)
    bus.settle_tokens("q", holder.tokens, events.Complete())
    bus.detach("q", holder)
    assert waiting.session is None


def test_a_session_whose_messages_are_all_expired_is_not_given_out() -> None:
    bus = sessions()
    send(bus, "red1", ttl=1_000)
    bus.now += 1_000
    receiver = bus.session("q", None, wait=1_000)
    assert receiver.session is None
    send(bus, "blue1")
    assert receiver.holds("blue")


def test_a_session_lock_that_ends_detaches_its_receiver_and_counts_a_delivery() -> None:
    bus = sessions("red1", "red2", lock_duration=5_000)
    receiver = bus.session("q", "red", 1)
    bus.wait(4_999)
    assert receiver.refusal is None
    bus.wait(1)
    assert condition(receiver) is Condition.SESSION_LOCK_LOST
    [refusal] = bus.settle_tokens("q", receiver.tokens, events.Complete(), "red")
    assert refusal is not None
    assert refusal.condition is Condition.SESSION_LOCK_LOST
    [refusal] = bus.settle_tokens("q", receiver.tokens, events.Complete())
    assert refusal is not None
    assert refusal.condition is Condition.MESSAGE_LOCK_LOST
    again = bus.session("q", "red", 2)
    assert again.bodies == ["red1", "red2"]
    assert [row.delivery_count for row in again.rows] == [1, 0]


def test_a_session_with_an_expired_lock_can_be_accepted_before_its_timer_fires() -> None:
    bus = sessions("red1", lock_duration=5_000)
    loser = bus.session("q", "red", 1)
    bus.now += 5_000
    winner = bus.session("q", "red", 1)
    assert condition(loser) is Condition.SESSION_LOCK_LOST
    assert winner.session == "red"
    assert [row.delivery_count for row in winner.rows] == [1]


def test_renewing_a_session_holds_its_messages_too() -> None:
    bus = sessions("red1", lock_duration=10_000)
    receiver = bus.session("q", "red", 1)
    for _ in range(5):
        bus.wait(9_000)
        assert bus.submit("q", events.SessionLockRenewed("reply", "red")) == bus.now + 10_000
    assert bus.settle_tokens("q", receiver.tokens, events.Complete(), "red") == [None]
    assert receiver.refusal is None


def test_the_lock_of_a_sessions_message_is_not_renewed_by_itself() -> None:
    bus = sessions("red1")
    receiver = bus.session("q", "red", 1)
    refusal = bus.submit("q", events.LocksRenewed("reply", tuple(receiver.tokens)))
    assert refusal.condition is Condition.NOT_ALLOWED


def test_renewing_a_session_nobody_holds_is_refused() -> None:
    bus = sessions("red1", lock_duration=5_000)
    assert bus.submit("q", events.SessionLockRenewed("reply", "red")).condition is Condition.SESSION_LOCK_LOST
    bus.session("q", "red")
    bus.now += 5_000
    assert bus.submit("q", events.SessionLockRenewed("reply", "red")).condition is Condition.SESSION_LOCK_LOST


def test_too_many_lost_sessions_dead_letter_the_message() -> None:
    bus = sessions("red1", lock_duration=5_000, max_delivery_count=2)
    for _ in range(2):
        bus.session("q", "red", 1)
        bus.wait(5_000)
    assert bus.counts("q") == (0, 0, 0, 1)
    assert bus.receive("q", dead=True).bodies == ["red1"]


def test_an_abandoned_message_of_a_session_comes_back_to_its_holder() -> None:
    bus = sessions("red1", "red2")
    receiver = bus.session("q", "red", 2)
    bus.settle_tokens("q", receiver.tokens[:1], events.Abandon())
    bus.credit("q", receiver, 1)
    assert receiver.bodies == ["red1", "red2", "red1"]


def test_receive_and_delete_works_with_sessions() -> None:
    bus = sessions("red1", "red2", "blue1")
    receiver = bus.session("q", None, 5, peek_lock=False)
    assert receiver.bodies == ["blue1"]
    assert bus.counts("q") == (2, 0, 0, 0)


def test_disabling_detaches_holders_and_waiting_receivers() -> None:
    bus = sessions("red1")
    holder, waiting = bus.session("q", "red", 1), bus.session("q", None, wait=60_000)
    bus.update("q", status=EntityStatus.DISABLED)
    assert condition(holder) is condition(waiting) is Condition.ENTITY_DISABLED
    bus.update("q", status=EntityStatus.ACTIVE)
    assert bus.session("q", "red", 1).bodies == ["red1"]


def test_state_is_kept_for_the_holder_of_the_session() -> None:
    bus = sessions()
    bus.session("q", "red")
    assert bus.submit("q", events.SessionStateRequested("reply", "red")) is None
    assert bus.submit("q", events.SessionStateSet("reply", "red", b"decision 2")) is None
    assert bus.submit("q", events.SessionStateRequested("reply", "red")) == b"decision 2"
    bus.restart()
    assert bus.submit("q", events.SessionStateRequested("reply", "red")).condition is Condition.SESSION_LOCK_LOST
    assert bus.submit("q", events.SessionStateSet("reply", "red", b"")).condition is Condition.SESSION_LOCK_LOST
    bus.session("q", "red")
    assert bus.submit("q", events.SessionStateRequested("reply", "red")) == b"decision 2"
    bus.submit("q", events.SessionStateSet("reply", "red", None))
    assert bus.submit("q", events.SessionStateRequested("reply", "red")) is None


def test_state_beyond_the_limit_is_refused() -> None:
    bus = sessions()
    bus.session("q", "red")
    refusal = bus.submit("q", events.SessionStateSet("reply", "red", bytes(256 * 1024 + 1)))
    assert refusal.condition is Condition.ARGUMENT_OUT_OF_RANGE


def test_sessions_are_listed_with_messages_or_state_and_by_the_time_of_their_state() -> None:
    bus = sessions("red1", "blue1")
    bus.session("q", "green")
    before = bus.now
    bus.wait(10)
    bus.submit("q", events.SessionStateSet("reply", "green", b"x"))
    assert bus.submit("q", events.SessionsListed("reply", 0, 10, None)) == ["blue", "green", "red"]
    assert bus.submit("q", events.SessionsListed("reply", 1, 1, None)) == ["green"]
    assert bus.submit("q", events.SessionsListed("reply", 0, 10, before)) == ["green"]
    assert bus.submit("q", events.SessionsListed("reply", 0, 10, bus.now)) == []


@pytest.mark.parametrize(
    "event",
    [
        events.SessionStateRequested("reply", "red"),
        events.SessionStateSet("reply", "red", b""),
        events.SessionsListed("reply", 0, 10, None),
    ],
)
def test_an_entity_without_sessions_has_no_session_state(event: events.Event) -> None:
    answer = Bus(queue()).submit("q", event)
    assert isinstance(answer, Refusal)
    assert answer.condition is Condition.NOT_ALLOWED


def test_deferred_messages_of_a_session_are_for_its_holder_only() -> None:
    bus = sessions("red1", "blue1")
    red, blue = bus.session("q", "red", 1), bus.session("q", "blue", 1)
    seq = red.seqs[0]
    bus.settle_tokens("q", red.tokens, events.Defer())
    assert bus.deferred("q", seq).condition is Condition.NOT_ALLOWED
    assert bus.deferred("q", seq, session="green").condition is Condition.SESSION_LOCK_LOST
    assert bus.deferred("q", seq, session="blue").condition is Condition.MESSAGE_NOT_FOUND
    [(row, token, until)] = bus.deferred("q", seq, session="red")
    assert (row.seq, until) == (seq, red.locked_until)
    bus.detach("q", red)
    [refusal] = bus.settle_tokens("q", [token], events.Complete())
    assert refusal is not None, "the lock went with the session"
    assert bus.counts("q") == (1, 1, 0, 0)
    assert blue.refusal is None


def test_accepting_a_session_is_metered() -> None:
    bus = sessions("red1")
    receiver = bus.session("q", None)
    bus.submit("q", events.SessionLockRenewed("reply", "red"))
    bus.detach("q", receiver)
    assert bus.metered(MeteredOperation.ACCEPT_SESSION) == 1
    assert bus.metered(MeteredOperation.RENEW_SESSION_LOCK) == 1


def test_a_long_session_is_delivered_whole_to_one_receiver_after_the_other() -> None:
    bus = sessions(max_delivery_count=100)
    bodies = [f"red{number}" for number in range(600)]
    for start in range(0, 600, 100):
        send(bus, *bodies[start : start + 100])
    first = bus.session("q", "red", 400)
    assert first.bodies == bodies[:400]
    bus.settle_tokens("q", first.tokens[:50], events.Complete())
    bus.detach("q", first)
    assert bus.session("q", None, 600).bodies == bodies[50:]


@pytest.mark.parametrize("path", ["q", "t/Subscriptions/s"])
def test_a_receiver_learns_of_its_lost_session_although_the_search_for_the_next_fails(path: str) -> None:
    settings: dict[str, Any] = {"requires_session": True, "lock_duration": 5_000}
    bus = Bus(queue(**settings), TopicDescription(path="t"), SubscriptionDescription(topic="t", name="s", **settings))
    bus.send(path.partition("/")[0], envelope("m", session="red"))
    holder = bus.session(path, "red")
    waiting = bus.session(path, wait=60_000)
    bus.now += 5_000
    bus.fail(bus.entity(path).root.advance(events.EntityTimerFired(), bus.now))
    assert holder.refusal is not None
    assert holder.refusal.condition is Condition.SESSION_LOCK_LOST
    assert waiting.session is None
    bus.wait(1_000)
    assert waiting.session == "red"
