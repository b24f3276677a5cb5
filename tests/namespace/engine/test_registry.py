"""The registry: creating, finding, changing, listing and deleting entities, and restarts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.namespace.engine import events
from twinbus.namespace.engine.description_json import kind_of, read_description, write_description
from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    Description,
    EntityStatus,
    QueueDescription,
    RuleDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.effects import Refusal
from twinbus.values import Condition

from .bus import Bus, Receiver, envelope, queue

TOPIC = TopicDescription(path="News/Today")
SUBSCRIPTION = SubscriptionDescription(topic="news/today", name="Sub")


def condition(refusal: Refusal | None) -> Condition | None:
    return refusal.condition if refusal is not None else None


@pytest.mark.parametrize("path", ["Orders", "orders", "ORDERS"])
def test_a_queue_is_found_whatever_the_case_and_keeps_its_spelling(path: str) -> None:
    bus = Bus(queue("Orders"))
    assert bus.entity(path).path == "Orders"
    assert bus.send(path, "m") is None
    assert bus.namespace.find("other") is None


@pytest.mark.parametrize("path", ["News/Today/Subscriptions/Sub", "news/today/subscriptions/sub"])
def test_a_subscription_is_found_below_its_topic_and_spells_it_as_created(path: str) -> None:
    bus = Bus(TOPIC, SUBSCRIPTION)
    assert bus.entity(path).path == "News/Today/Subscriptions/Sub"
    assert bus.entity(path).root is bus.entity("news/today")
    assert bus.entity("news/today").root.entities == [bus.entity("news/today"), bus.entity(path)]


@pytest.mark.parametrize("second", [queue("Q"), TopicDescription(path="q")])
def test_a_path_is_taken_once_by_a_queue_or_a_topic(second: Description) -> None:
    bus = Bus(queue("q"))
    assert condition(bus.create(second)) is Condition.ENTITY_ALREADY_EXISTS


def test_a_subscription_needs_a_topic_and_a_name_of_its_own() -> None:
    bus = Bus(queue("q"))
    assert condition(bus.create(SUBSCRIPTION)) is Condition.NOT_FOUND
    assert condition(bus.create(replace(SUBSCRIPTION, topic="q"))) is Condition.NOT_FOUND
    bus.create(TOPIC)
    assert bus.create(SUBSCRIPTION) is None
    assert condition(bus.create(replace(SUBSCRIPTION, name="SUB"))) is Condition.ENTITY_ALREADY_EXISTS


def test_a_description_that_is_not_valid_makes_no_entity() -> None:
    bus = Bus()
    assert condition(bus.create(queue(lock_duration=1))) is Condition.ARGUMENT_OUT_OF_RANGE
    assert bus.namespace.queues() == []


def test_an_update_changes_the_entity_and_survives_a_restart() -> None:
    bus = Bus(queue("Orders"))
    bus.wait(500)
    assert bus.update("Orders", path="ORDERS", max_delivery_count=3, user_metadata="x") is None
    for _ in range(2):
        info = bus.namespace.info("orders")
        assert info is not None
        assert info.description == queue("Orders", max_delivery_count=3, user_metadata="x")
        assert (info.updated, info.created) == (bus.now, bus.now - 500)
        bus.restart()


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        (queue("missing"), Condition.NOT_FOUND),
        (TopicDescription(path="q"), Condition.NOT_FOUND),
        (queue(requires_session=True), Condition.ARGUMENT_ERROR),
        (queue(lock_duration=1), Condition.ARGUMENT_OUT_OF_RANGE),
        (replace(SUBSCRIPTION, name="missing"), Condition.NOT_FOUND),
    ],
)
def test_an_update_that_is_not_possible_is_refused(description: Description, expected: Condition) -> None:
    bus = Bus(queue(), TOPIC, SUBSCRIPTION)
    refusal = bus.namespace.update(description, bus.now)
    assert isinstance(refusal, Refusal)
    assert refusal.condition is expected


def test_updates_of_topics_and_subscriptions_are_kept() -> None:
    bus = Bus(TOPIC, SUBSCRIPTION)
    path = SUBSCRIPTION.path
    bus.update("news/today", user_metadata="topic", duplicate_window=30_000)
    bus.update(path, topic="NEWS/TODAY", name="SUB", user_metadata="subscription")
    bus.restart()
    assert bus.entity("news/today").description.user_metadata == "topic"
    kept = replace(SUBSCRIPTION, topic="News/Today", rules=(RuleDescription("$Default", created=bus.now),))
    assert bus.entity(path).description == replace(kept, user_metadata="subscription")


def test_removing_a_queue_detaches_its_receivers_and_frees_the_path() -> None:
    bus = Bus(queue(requires_session=True), read_ahead_bytes=10_000)
    bus.send("q", envelope("m", session="s"), envelope("n", session="other"))
    holder, waiting = bus.session("q", "s", 1), bus.session("q", "unknown")
    dead = bus.receiver("q", 1, dead=True)
    old = bus.entity("q")
    assert bus.delete("Q") is None
    for receiver in (holder, waiting, dead):
        assert condition(receiver.refusal) is Condition.NOT_FOUND
    assert condition(bus.delete("q")) is Condition.NOT_FOUND
    assert old.root.next_timer is None
    assert bus.namespace._resources.read_ahead_budget.used == 0
    assert bus.create(queue()) is None
    assert bus.counts("q") == (0, 0, 0, 0)
    assert bus.entity("q").counters.queue != old.counters.queue
    bus.restart()
    assert bus.counts("q") == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "event",
    [
        events.MessagesSent("reply", (envelope(),)),
        events.ReceiverAttached("reply", Receiver(), False, True),
        events.MessagesPeeked("reply", 0, 1, False),
        events.SessionStateRequested("reply", "s"),
    ],
)
@pytest.mark.parametrize("description", [queue("e"), TopicDescription(path="e")])
def test_events_of_a_deleted_entity_are_refused(description: Description, event: events.Event) -> None:
    bus = Bus(description)
    entity = bus.entity("e")
    bus.delete("e")
    assert bus.submit(entity, event).condition is Condition.NOT_FOUND


def test_a_session_receiver_of_a_removed_entity_is_detached_and_other_events_are_ignored() -> None:
    bus = Bus(queue())
    entity = bus.entity("q")
    bus.delete("q")
    receiver = Receiver()
    bus.submit(entity, events.SessionReceiverAttached(receiver, None, bus.now, True))
    assert condition(receiver.refusal) is Condition.NOT_FOUND
    for event in (
        events.EntityTimerFired(),
        events.ReceiverDetached(receiver),
        events.CreditGranted(receiver, 1, False),
    ):
        assert bus.carry_out(entity.advance(event, bus.now)).writes == []


def test_entities_are_listed_by_name_with_their_figures() -> None:
    bus = Bus(queue("b"), queue("A"), TOPIC, SUBSCRIPTION)
    bus.send("a", "m")
    bus.send("news/today", "m")
    assert [info.description.path for info in bus.namespace.queues()] == ["A", "b"]
    assert [info.counts.active for info in bus.namespace.queues()] == [1, 0]
    [topic] = bus.namespace.topics()
    assert topic.subscriptions == 1
    [subscription] = bus.namespace.subscriptions("NEWS/today")
    assert subscription.counts.active == 1
    assert bus.namespace.subscriptions("a") == bus.namespace.subscriptions("missing") == []
    assert bus.namespace.info("missing") is None
    assert set(bus.namespace.root_entities()) == {bus.entity(path) for path in ("a", "b", "news/today")}


def test_sequence_numbers_go_on_after_a_restart() -> None:
    bus = Bus(queue())
    bus.send("q", "a", "b")
    bus.receive("q", peek_lock=False)
    bus.restart()
    bus.send("q", "c")
    assert bus.receive("q").seqs == [3]


def test_the_ids_of_removed_entities_are_not_given_again_after_a_restart() -> None:
    bus = Bus(queue("a"), queue("b"))
    removed = bus.entity("b").counters.queue
    bus.delete("b")
    bus.restart()
    bus.create(queue("c"))
    assert bus.entity("c").counters.queue > removed


# --- auto-delete on idle -----------------------------------------------------------------------------------------

IDLE = 300_000


def idle_bus() -> Bus:
    return Bus(queue(auto_delete_on_idle=IDLE))


def test_an_idle_entity_is_removed_exactly_when_its_time_is_over() -> None:
    bus = idle_bus()
    entity = bus.entity("q")
    bus.wait(IDLE - 1)
    assert bus.namespace.find("q") is entity
    bus.wait(1)
    assert bus.namespace.find("q") is None
    assert bus.store.open().entities == []
    assert bus.create(queue()) is None


@pytest.mark.parametrize("access", ["send", "receive", "peek", "update", "schedule"])
def test_every_use_of_an_entity_postpones_its_idle_deletion(access: str) -> None:
    bus = idle_bus()
    uses: dict[str, Any] = {
        "send": lambda: bus.send("q", "m"),
        "receive": lambda: bus.receive("q"),
        "peek": lambda: bus.peek("q"),
        "update": lambda: bus.update("q", user_metadata="x"),
        "schedule": lambda: bus.schedule("q", envelope(due=bus.now)),
    }
    bus.wait(IDLE - 1)
    uses[access]()
    bus.wait(IDLE - 1)
    assert bus.namespace.find("q") is not None
    bus.wait(1)
    assert bus.namespace.find("q") is None


def test_an_attached_receiver_and_a_scheduled_message_keep_an_entity() -> None:
    bus = idle_bus()
    receiver = bus.receiver("q", 1)
    bus.wait(3 * IDLE)
    bus.detach("q", receiver)
    bus.schedule("q", envelope(due=bus.now + 3 * IDLE))
    bus.wait(3 * IDLE - 1)
    assert bus.namespace.find("q") is not None
    bus.wait(3 * IDLE)
    assert bus.namespace.find("q") is None


def test_a_restart_counts_as_an_access() -> None:
    bus = idle_bus()
    bus.now += 10 * IDLE
    bus.restart()
    bus.settle()
    assert bus.namespace.find("q") is not None
    bus.wait(IDLE)
    assert bus.namespace.find("q") is None


def test_auto_delete_can_be_set_later() -> None:
    bus = Bus(queue())
    bus.update("q", auto_delete_on_idle=IDLE)
    bus.wait(IDLE)
    assert bus.namespace.find("q") is None


def test_a_subscription_goes_alone_and_keeps_its_topic_only_while_it_is_used() -> None:
    bus = Bus(replace(TOPIC, auto_delete_on_idle=2 * IDLE), replace(SUBSCRIPTION, auto_delete_on_idle=IDLE))
    bus.wait(IDLE - 1)
    bus.send("news/today", "a send is no access to the subscription")
    bus.wait(1)
    assert bus.namespace.find(SUBSCRIPTION.path) is None
    assert bus.namespace.find("news/today") is not None
    bus.create(SUBSCRIPTION)
    bus.wait(IDLE)
    receiver = bus.receiver(SUBSCRIPTION.path, 1)
    bus.wait(10 * IDLE)
    assert receiver.refusal is None
    bus.detach(SUBSCRIPTION.path, receiver)
    bus.wait(2 * IDLE)
    assert bus.namespace.find("news/today") is None
    assert bus.namespace.find(SUBSCRIPTION.path) is None


# --- records -----------------------------------------------------------------------------------------------------

milliseconds = st.none() | st.integers(1_000, 10**12)
rules = st.builds(
    AuthorizationRule,
    st.text(max_size=9),
    st.text(max_size=9),
    st.text(max_size=9),
    st.frozensets(st.sampled_from(Claim)),
)
shared: dict[str, Any] = {
    "default_time_to_live": milliseconds,
    "auto_delete_on_idle": milliseconds,
    "status": st.sampled_from(EntityStatus),
    "user_metadata": st.none() | st.text(),
}
descriptions = st.one_of(
    st.builds(
        QueueDescription,
        path=st.text(max_size=20),
        authorization_rules=st.lists(rules, max_size=3).map(tuple),
        requires_session=st.booleans(),
        forward_to=st.none() | st.text(),
        **shared,
    ),
    st.builds(TopicDescription, path=st.text(), authorization_rules=st.lists(rules, max_size=3).map(tuple), **shared),
    st.builds(SubscriptionDescription, topic=st.text(), name=st.text(), **shared),
)


@given(descriptions)
def test_a_record_reads_back_as_the_description_it_was_written_from(description: Description) -> None:
    assert read_description(kind_of(description), write_description(description)) == description


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("relay", "{}", "relay"),
        ("queue", '{"path":"q","status":"Active","colour":"red"}', "colour"),
    ],
)
def test_a_record_that_is_not_understood_is_refused_by_name(kind: str, text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_description(kind, text)
