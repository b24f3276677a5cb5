"""Topics: every subscription gets a copy of each message, and works like a queue."""

from __future__ import annotations

from typing import Any

import pytest

from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import (
    EntityStatus,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.effects import MeteredOperation, Refusal
from twinbus.namespace.engine.storage_protocol import COPY_BYTES, PutBody, PutRow
from twinbus.values import Condition

from .bus import Bus, Receiver, envelope, overlay_of, text_of

A, B = "t/Subscriptions/a", "t/Subscriptions/b"


def topic(*names: str, read_ahead_bytes: int | None = None, **settings: Any) -> Bus:
    subscriptions = [SubscriptionDescription(topic="t", name=name) for name in names]
    return Bus(TopicDescription(path="t", **settings), *subscriptions, read_ahead_bytes=read_ahead_bytes)


def test_a_message_reaches_every_subscription_and_each_settles_its_own() -> None:
    bus = topic("a", "b")
    bus.send("t", "m", "n")
    one, two = bus.receive(A), bus.receive(B)
    assert one.bodies == two.bodies == ["m", "n"]
    bus.settle_tokens(A, one.tokens, events.Complete())
    assert (bus.counts(A)[0], bus.counts(B)[0]) == (0, 2)
    [refusal, _] = bus.settle_tokens(A, two.tokens, events.Complete())
    assert refusal is not None


def test_a_copy_has_a_sequence_number_of_the_subscription_and_keeps_that_of_the_topic() -> None:
    bus = topic("a")
    bus.send("t", "m")
    bus.create(SubscriptionDescription(topic="t", name="b"))
    bus.send("t", "n")
    [row] = bus.receive(B).rows
    assert (row.seq, row.origin_seq) == (1, 2)


@pytest.mark.parametrize(("names", "bodies"), [((), 0), (("a",), 0), (("a", "b"), 1), (("a", "b", "c"), 1)])
def test_a_body_is_stored_once_where_several_subscriptions_take_it(names: tuple[str, ...], bodies: int) -> None:
    bus = topic(*names)
    decision = bus.carry_out(bus.entity("t").advance(events.MessagesSent("reply", (envelope("m"),)), bus.now))
    assert len([write for write in decision.writes if isinstance(write, PutBody)]) == bodies
    rows = [write.row for write in decision.writes if isinstance(write, PutRow)]
    assert len(rows) == len(names)
    assert all((row.body is not None) == bool(bodies) for row in rows)
    bus.restart()
    for name in names:
        assert bus.receive(f"t/subscriptions/{name}").bodies == ["m"]


def test_body_ids_are_not_reused_after_a_restart() -> None:
    bus = topic("a", "b")
    bus.send("t", "old")
    bus.restart()
    bus.send("t", "new")
    bus.restart()
    assert bus.receive(A).bodies == bus.receive(B).bodies == ["old", "new"]


def test_a_waiting_receiver_of_a_subscription_is_served_by_the_send() -> None:
    bus = topic("a", "b")
    receivers = [bus.receiver(A, 1), bus.receiver(B, 1)]
    bus.send("t", "m")
    assert [receiver.bodies for receiver in receivers] == [["m"], ["m"]]


@pytest.mark.parametrize(
    ("status", "taken"),
    [(EntityStatus.ACTIVE, 1), (EntityStatus.RECEIVE_DISABLED, 1), (EntityStatus.DISABLED, 0)],
)
def test_a_disabled_subscription_takes_nothing(status: EntityStatus, taken: int) -> None:
    bus = topic("a", "b")
    bus.update(B, status=status)
    bus.send("t", "m")
    assert (bus.counts(A)[0], bus.counts(B)[0]) == (1, taken)


def test_the_shortest_time_to_live_of_message_topic_and_subscription_counts() -> None:
    bus = topic("a", "b", default_time_to_live=5_000)
    bus.update(B, default_time_to_live=2_000)
    bus.send("t", envelope("m", ttl=10_000), envelope("short", ttl=1_000))
    assert [row.expires - bus.now for row in bus.peek(A)] == [5_000, 1_000]
    assert [row.expires - bus.now for row in bus.peek(B)] == [2_000, 1_000]
    bus.wait(2_000)
    assert (bus.counts(A)[0], bus.counts(B)[0]) == (1, 0)


def test_a_message_without_session_is_dead_lettered_by_a_subscription_that_requires_one() -> None:
    bus = topic("a")
    bus.create(SubscriptionDescription(topic="t", name="b", requires_session=True))
    dead = bus.receiver(B, 5, dead=True)
    bus.send("t", "without", envelope("with", session="s"))
    assert bus.receive(A).bodies == ["without", "with"]
    assert bus.session(B, None, 5).bodies == ["with"]
    assert dead.bodies == ["without"]
    assert overlay_of(dead.rows[0])["DeadLetterReason"] == "Session ID is null"


def test_a_topic_detects_duplicates_before_it_publishes() -> None:
    bus = topic("a", "b", requires_duplicate_detection=True)
    for _ in range(2):
        bus.send("t", envelope("m", message_id="one"))
    assert bus.counts(A) == bus.counts(B) == (1, 0, 0, 0)
    assert bus.metered(MeteredOperation.SEND) == 2


def test_scheduled_messages_wait_in_the_topic_and_go_to_the_subscriptions_of_that_time() -> None:
    bus = topic("a")
    [one, _] = bus.schedule("t", *[envelope(body, due=bus.now + 5_000, ttl=1_000) for body in ("x", "m")])
    assert bus.counts("t") == (0, 0, 2, 0)
    assert bus.cancel("t", one) is None
    bus.create(SubscriptionDescription(topic="t", name="b"))
    receiver = bus.receiver(A, 5)
    bus.restart()
    receiver = bus.receiver(A, 5)
    bus.wait(5_000)
    assert receiver.bodies == ["m"]
    [row] = bus.peek(B)
    assert (row.origin_seq, row.expires, row.enqueued) == (2, bus.now + 1_000, bus.now)
    assert bus.counts("t") == (0, 0, 0, 0)


def test_due_messages_of_a_topic_take_turns_with_the_timers_of_its_subscriptions() -> None:
    bus = topic("a")
    bus.send("t", *[envelope(f"{n}", ttl=1_000 + n) for n in range(10)])
    bus.schedule("t", envelope("due", due=bus.now + 1_000))
    bus.now += 1_000
    for _ in range(2):  # each firing finds something expired
        bus.carry_out(bus.entity("t").advance(events.EntityTimerFired(), bus.now))
        bus.now += 1
    assert bus.counts("t") == (0, 0, 0, 0)
    assert "due" in map(text_of, bus.peek(A))


def test_a_scheduled_message_keeps_its_session_on_its_way() -> None:
    bus = Bus(TopicDescription(path="t"), SubscriptionDescription(topic="t", name="a", requires_session=True))
    bus.send("t", envelope("m", session="s", due=bus.now + 1_000))
    receiver = bus.session(A, None, wait=60_000)
    bus.wait(1_000)
    assert receiver.session == "s"


def size_of(bus: Bus, path: str = "t") -> int:
    info = bus.namespace.info(path)
    assert info is not None
    return info.counts.size_bytes


def test_a_topic_is_charged_for_each_body_once_and_a_little_for_each_copy() -> None:
    bus = topic("a", "b")
    message = envelope("m", message_id="id")
    bus.send("t", message)
    assert size_of(bus) == len(message.raw) + 2 * COPY_BYTES
    bus.receive(A, peek_lock=False)
    assert size_of(bus) == len(message.raw) + COPY_BYTES
    bus.restart()
    assert size_of(bus) == len(message.raw) + COPY_BYTES
    bus.receive(B, peek_lock=False)
    assert size_of(bus) == 0


def test_a_body_that_only_one_subscription_takes_is_charged_as_in_a_queue() -> None:
    bus = topic("a")
    message = envelope("m", message_id="id")
    bus.send("t", message)
    assert size_of(bus) == len(message.raw)
    bus.receive(A, peek_lock=False)
    assert size_of(bus) == 0


def test_a_copy_that_an_action_changed_is_charged_whole() -> None:
    bus = topic("a", "b")
    rule = RuleDescription("changes", SqlFilter("1=1"), SqlAction("SET x = 'changed'"))
    bus.submit(A, events.RuleRemoved("reply", "$Default"))
    bus.submit(A, events.RuleAdded("reply", rule))
    message = envelope("m", message_id="id")
    bus.send("t", message)
    [changed] = bus.peek(A)
    assert size_of(bus) == len(message.raw) + len(changed.raw)


def test_a_dead_letter_is_charged_until_it_is_gone() -> None:
    bus = topic("a", "b")
    bus.send("t", "m")
    whole = size_of(bus)
    bus.settle_tokens(A, bus.receive(A).tokens, events.MoveToDeadLetter("why", "so"))
    assert size_of(bus) == whole
    bus.receive(A, dead=True, peek_lock=False)
    assert size_of(bus) == whole - COPY_BYTES


def test_a_deleted_subscription_frees_the_bodies_that_only_it_held() -> None:
    bus = topic("a", "b")
    bus.send("t", "m")
    whole = size_of(bus)
    bus.delete(A)
    assert size_of(bus) == whole - COPY_BYTES
    bus.delete(B)
    assert size_of(bus) == 0


def test_a_full_topic_refuses_until_the_last_copy_of_a_body_goes() -> None:
    bus = topic("a", "b")
    bus.send("t", "m" * 200)
    bus.entity("t").counters.size = 1024 * 1024 * 1024 - size_of(bus)  # as if so much were scheduled
    for subscription in (A, B):
        refusal = bus.send("t", "n" * 200)
        assert refusal is not None
        assert refusal.condition is Condition.RESOURCE_LIMIT_EXCEEDED
        bus.receive(subscription, peek_lock=False)
    assert bus.send("t", "n" * 200) is None


def test_a_disabled_topic_refuses_sends_while_subscriptions_still_give() -> None:
    bus = topic("a")
    bus.send("t", "m")
    bus.update("t", status=EntityStatus.DISABLED)
    refusal = bus.send("t", "n")
    assert refusal is not None
    assert refusal.condition is Condition.ENTITY_DISABLED
    assert bus.receive(A).bodies == ["m"]


@pytest.mark.parametrize(
    "event",
    [
        events.ReceiverAttached("reply", Receiver(), False, True),
        events.MessagesPeeked("reply", 0, 1, False),
        events.MessagesSettled("reply", (b"",), events.Complete()),
        events.LocksRenewed("reply", (b"",)),
        events.DeferredRequested("reply", (1,), True, False),
        events.SessionsListed("reply", 0, 1, None),
    ],
)
def test_nothing_is_received_from_a_topic(event: events.Event) -> None:
    answer = topic("a").submit("t", event)
    assert isinstance(answer, Refusal)
    assert answer.condition is Condition.NOT_ALLOWED


def test_no_session_is_given_by_a_topic() -> None:
    receiver = topic().session("t", None)
    assert receiver.refusal is not None
    assert receiver.refusal.condition is Condition.NOT_ALLOWED


@pytest.mark.parametrize(
    "event",
    [
        events.MessagesSent("reply", (envelope(),)),
        events.MessagesScheduled("reply", (envelope(),)),
        events.ScheduleCancelled("reply", (1,)),
    ],
)
def test_nothing_is_sent_to_a_subscription(event: events.Event) -> None:
    answer = topic("a").submit(A, event)
    assert isinstance(answer, Refusal)
    assert answer.condition is Condition.NOT_ALLOWED


def test_the_timer_of_a_topic_is_that_of_its_subscriptions_too() -> None:
    bus = topic("a", "b")
    bus.update(B, lock_duration=5_000)
    bus.send("t", "m")
    bus.receive(B)
    waiting = bus.receiver(B, 1)
    bus.wait(5_000)
    assert waiting.bodies == ["m"]


def test_removing_a_topic_removes_its_subscriptions_and_all_they_hold() -> None:
    bus = topic("a", "b")
    bus.send("t", "m")
    receiver = bus.receiver(A, 1)
    gone = bus.entity(A)
    bus.delete("t")
    assert receiver.refusal is not None
    assert receiver.refusal.condition is Condition.NOT_FOUND
    assert bus.namespace.find("t") is bus.namespace.find(A) is bus.namespace.find(B) is None
    assert bus.store.open().entities == []
    answer = bus.submit(gone, events.MessagesSettled("reply", tuple(receiver.tokens), events.Complete()))
    assert answer.condition is Condition.NOT_FOUND


def test_removing_a_subscription_leaves_the_others_alone() -> None:
    bus = topic("a", "b")
    bus.send("t", "m")
    bus.delete(A)
    bus.send("t", "n")
    assert [info.description.path for info in bus.namespace.subscriptions("T")] == [B]
    assert bus.receive(B).bodies == ["m", "n"]


def test_a_failed_read_of_one_subscription_does_not_affect_the_others() -> None:
    bus = Bus(
        TopicDescription(path="t"),
        SubscriptionDescription(topic="t", name="a", max_delivery_count=1),
        SubscriptionDescription(topic="t", name="b", default_time_to_live=60_000),
    )
    bus.send("t", "m")
    bus.receive(A)
    bus.now += 60_000  # a's lock is over and b's copy has expired
    decision = bus.entity("t").advance(events.EntityTimerFired(), bus.now)
    next(decision)
    with pytest.raises(StopIteration) as decided:
        decision.throw(OSError("disk"))
    bus.apply(decided.value.value)
    bus.restart()
    assert bus.counts(A) == (0, 0, 0, 1)
    assert bus.receive(A, dead=True).bodies == ["m"]
    bus.wait(0)
    assert bus.counts(B) == (0, 0, 0, 0)
