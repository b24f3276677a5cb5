"""Transactions: one decision for all entities; everything is checked and read before anything changes."""

from typing import Any

import pytest

from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import EntityStatus, SubscriptionDescription, TopicDescription
from twinbus.namespace.engine.effects import MeteredOperation as Metered
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.transactions import TransactionOperation, commit_transaction
from twinbus.values import Condition

from .bus import Bus, envelope, ping, queue


def commit(bus: Bus, *operations: TransactionOperation) -> Any:
    bus.answers.clear()
    bus.carry_out(commit_transaction(operations, "reply", bus.now))
    answer = bus.answers[-1]
    bus.settle()
    return answer


def sent(bus: Bus, path: str, *bodies: str, **properties: Any) -> TransactionOperation:
    messages = tuple(envelope(body, message_id=body, **properties) for body in bodies)
    return bus.entity(path), events.MessagesSent(None, messages)


def settled(bus: Bus, path: str, token: bytes, outcome: events.MessageOutcome | None = None) -> TransactionOperation:
    return bus.entity(path), events.MessagesSettled(None, (token,), outcome or events.Complete())


def test_sends_and_settlements_of_several_entities_are_one_decision() -> None:
    bus = Bus(queue("in"), queue("out"), TopicDescription(path="t"), SubscriptionDescription(topic="t", name="s"))
    bus.send("in", "a", "b")
    tokens = bus.receive("in").tokens
    waiting = bus.receiver("out", 10)
    done = commit(
        bus,
        settled(bus, "in", tokens[0]),
        sent(bus, "out", "x"),
        settled(bus, "in", tokens[1], events.MoveToDeadLetter("r")),
        sent(bus, "t", "y"),
        sent(bus, "out", "z"),
    )
    assert done is None
    assert bus.counts("in") == (0, 0, 0, 1)
    assert waiting.bodies == ["x", "z"]
    assert bus.receive("t/Subscriptions/s").bodies == ["y"]


def test_a_settled_message_is_not_delivered_again_by_the_same_decision() -> None:
    bus = Bus(queue(), read_ahead_bytes=1)
    bus.send("q", "a", "b", "c")
    holder = bus.receiver("q", 2)
    hungry = bus.receiver("q", 10)
    done = commit(bus, settled(bus, "q", holder.tokens[0]), settled(bus, "q", holder.tokens[1], events.Release()))
    assert done is None
    assert sorted(hungry.bodies) == ["b", "c"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda bus: sent(bus, "sessions", "x"), Condition.NOT_ALLOWED),
        (lambda bus: sent(bus, "closed", "x"), Condition.ENTITY_DISABLED),
        (lambda bus: sent(bus, "t/Subscriptions/s", "x"), Condition.NOT_ALLOWED),
        (lambda bus: settled(bus, "q", b"nobody's"), Condition.MESSAGE_LOCK_LOST),
        (lambda bus: settled(bus, "t", b"nobody's"), Condition.NOT_ALLOWED),
        (
            lambda bus: (
                bus.entity("sessions"),
                events.MessagesSettled(None, (b"x",), events.Complete(), "s"),
            ),
            Condition.SESSION_LOCK_LOST,
        ),
    ],
)
def test_a_refused_transaction_changes_nothing(spoil: Any, said: Condition) -> None:
    bus = Bus(
        queue(),
        queue("sessions", requires_session=True),
        queue("closed", status=EntityStatus.DISABLED),
        TopicDescription(path="t"),
        SubscriptionDescription(topic="t", name="s"),
    )
    bus.send("q", "held")
    holder = bus.receiver("q", 1)
    refusal = commit(bus, sent(bus, "q", "x"), settled(bus, "q", holder.tokens[0]), spoil(bus))
    assert isinstance(refusal, Refusal)
    assert refusal.condition is Condition.TRANSACTION_ROLLBACK
    assert said.value in refusal.description
    assert bus.counts("q") == (1, 0, 0, 0)
    assert bus.settle_tokens("q", holder.tokens, events.Complete()) == [None]


def test_the_quota_counts_the_whole_transaction() -> None:
    bus = Bus(queue())
    bus.entity("q").counters.size = 1024 * 1024 * 1024 - 300
    refusal = commit(bus, sent(bus, "q", "x" * 100), sent(bus, "q", "y" * 100))
    assert isinstance(refusal, Refusal)
    assert "amqp:resource-limit-exceeded" in refusal.description


def test_a_message_settled_twice_or_a_deleted_entity_rolls_back_the_transaction() -> None:
    bus = Bus(queue(), queue("other"))
    bus.send("q", "held")
    holder = bus.receiver("q", 1)
    twice = [settled(bus, "q", holder.tokens[0])] * 2
    assert isinstance(commit(bus, *twice), Refusal)
    gone = sent(bus, "other", "x")
    bus.delete("other")
    assert isinstance(commit(bus, settled(bus, "q", holder.tokens[0]), gone), Refusal)
    assert bus.counts("q") == (1, 0, 0, 0)


def test_duplicates_are_detected_before_within_and_after_a_transaction() -> None:
    bus = Bus(queue(requires_duplicate_detection=True))
    bus.send("q", envelope("1", message_id="1"))
    bus.restart()
    assert commit(bus, sent(bus, "q", "1", "2"), sent(bus, "q", "2", "3")) is None
    bus.send("q", envelope("again", message_id="3"))
    assert bus.receive("q").bodies == ["1", "2", "3"]


def test_a_read_that_fails_changes_nothing() -> None:
    bus = Bus(queue("plain"), queue(requires_duplicate_detection=True))
    bus.restart()
    with pytest.raises(OSError, match="disk"):
        bus.fail(commit_transaction([sent(bus, "plain", "a"), sent(bus, "q", "b")], "reply", bus.now))
    assert bus.counts("plain") == (0, 0, 0, 0)
    assert commit(bus, sent(bus, "plain", "a"), sent(bus, "q", "b")) is None
    assert bus.receive("plain").bodies == ["a"]


def test_messages_sent_in_a_transaction_are_forwarded() -> None:
    bus = Bus(queue("target"), queue("source", forward_to="target"))
    assert commit(bus, sent(bus, "source", "a")) is None
    assert bus.receive("target").bodies == ["a"]


def test_a_lock_that_expires_before_the_commit_rolls_back_the_transaction() -> None:
    bus = Bus(queue("in", lock_duration=5_000), queue("out"))
    bus.send("in", "held")
    [token] = bus.receive("in").tokens
    operations = (sent(bus, "out", "x"), settled(bus, "in", token))
    bus.now += 5_000  # no timer has fired yet
    refusal = commit(bus, *operations)
    assert isinstance(refusal, Refusal)
    assert Condition.MESSAGE_LOCK_LOST.value in refusal.description
    assert bus.counts("out") == (0, 0, 0, 0)
    assert [row.delivery_count for row in bus.receive("in").rows] == [1]


def test_a_session_lock_that_expires_before_the_commit_rolls_back_the_transaction() -> None:
    bus = Bus(queue("in", lock_duration=5_000, requires_session=True), queue("out"))
    bus.send("in", envelope("held", session="s"))
    holder = bus.session("in", "s", 1)
    settlement = events.MessagesSettled(None, tuple(holder.tokens), events.Complete(), "s")
    operations = (sent(bus, "out", "x"), (bus.entity("in"), settlement))
    bus.now += 5_000
    refusal = commit(bus, *operations)
    assert isinstance(refusal, Refusal)
    assert Condition.SESSION_LOCK_LOST.value in refusal.description
    assert bus.counts("out") == (0, 0, 0, 0)
    assert bus.session("in", "s", 1).bodies == ["held"]


def test_a_scheduled_message_of_a_transaction_waits_for_its_time() -> None:
    bus = Bus(queue(), TopicDescription(path="t"), SubscriptionDescription(topic="t", name="s"))
    due = bus.now + 1_000
    assert commit(bus, sent(bus, "q", "a", due=due), sent(bus, "t", "b", due=due), sent(bus, "q", "now")) is None
    assert (bus.counts("q"), bus.counts("t")) == ((1, 0, 1, 0), (0, 0, 1, 0))
    bus.restart()
    bus.wait(1_000)
    assert bus.receive("q").bodies == ["now", "a"]
    assert bus.receive("t/Subscriptions/s").bodies == ["b"]


def test_a_ping_in_a_transaction_is_hidden_and_counts_for_nothing() -> None:
    bus = Bus(queue(), TopicDescription(path="t"), SubscriptionDescription(topic="t", name="s"))
    pings = [(bus.entity(path), events.MessagesSent(None, (ping(),))) for path in ("q", "t")]
    assert commit(bus, *pings, sent(bus, "q", "a")) is None
    assert (bus.counts("q")[0], bus.counts("t/Subscriptions/s")[0]) == (1, 0)
    assert bus.metered(Metered.PING) == 2


def test_a_topic_and_its_subscription_take_part_in_one_transaction_and_bodies_are_charged_once() -> None:
    bus = Bus(TopicDescription(path="t"), *(SubscriptionDescription(topic="t", name=name) for name in "ab"))
    bus.send("t", "first")
    [token] = bus.receive("t/Subscriptions/a").tokens
    assert commit(bus, settled(bus, "t/Subscriptions/a", token), sent(bus, "t", "second")) is None
    for name in "ab":
        bus.receive(f"t/Subscriptions/{name}", peek_lock=False)
    info = bus.namespace.info("t")
    assert info is not None
    assert info.counts.size_bytes == 0
