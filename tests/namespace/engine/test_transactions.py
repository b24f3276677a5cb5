"""A transaction in the engine: one step for all entities, everything checked and read before anything changes."""

from typing import Any

import pytest

from twinbus.amqp.conditions import Condition
from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import EntityStatus, SubscriptionDescription, TopicDescription
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.transactions import Operation, discharge

from .bus import Bus, envelope, queue


def commit(bus: Bus, *operations: Operation) -> Any:
    bus.answers.clear()
    bus.carry_out(discharge(operations, "reply", bus.now))
    answer = bus.answers[-1]
    bus.settle()
    return answer


def sent(bus: Bus, path: str, *bodies: str, **properties: Any) -> Operation:
    messages = tuple(envelope(body, message_id=body, **properties) for body in bodies)
    return bus.entity(path), events.MessagesSent(None, messages)


def settled(bus: Bus, path: str, token: bytes, outcome: events.Outcome | None = None) -> Operation:
    return bus.entity(path), events.MessagesSettled(None, (token,), outcome or events.Complete())


def test_sends_and_settlements_of_several_entities_are_one_step() -> None:
    bus = Bus(queue("in"), queue("out"), TopicDescription(path="t"), SubscriptionDescription(topic="t", name="s"))
    bus.send("in", "a", "b")
    tokens = bus.receive("in").tokens
    waiting = bus.receiver("out", 10)
    done = commit(
        bus,
        settled(bus, "in", tokens[0]),
        sent(bus, "out", "x"),
        settled(bus, "in", tokens[1], events.DeadLetter("r")),
        sent(bus, "t", "y"),
        sent(bus, "out", "z"),
    )
    assert done is None
    assert bus.counts("in") == (0, 0, 0, 1)
    assert waiting.bodies == ["x", "z"]
    assert bus.receive("t/Subscriptions/s").bodies == ["y"]


def test_a_settled_message_is_not_given_out_again_by_the_same_step() -> None:
    bus = Bus(queue(), hot_bytes=1)
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
def test_whatever_is_refused_leaves_everything_as_it_was(spoil: Any, said: Condition) -> None:
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


def test_a_message_settled_twice_or_a_deleted_entity_undoes_the_whole() -> None:
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
        bus.fail(discharge([sent(bus, "plain", "a"), sent(bus, "q", "b")], "reply", bus.now))
    assert bus.counts("plain") == (0, 0, 0, 0)
    assert commit(bus, sent(bus, "plain", "a"), sent(bus, "q", "b")) is None
    assert bus.receive("plain").bodies == ["a"]


def test_what_a_transaction_sends_is_forwarded() -> None:
    bus = Bus(queue("target"), queue("source", forward_to="target"))
    assert commit(bus, sent(bus, "source", "a")) is None
    assert bus.receive("target").bodies == ["a"]
