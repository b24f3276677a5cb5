"""Checks of sent messages: limits, quota, duplicates, message ids, pings, status of the entity."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from twinbus.amqp import Properties as MessageProperties
from twinbus.amqp import RoutingFields, build_message, read_routing_fields
from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import EntityStatus, SubscriptionDescription, TopicDescription
from twinbus.namespace.engine.effects import MeteredOperation
from twinbus.namespace.engine.storage_protocol import ForgetSeenIds, KnownIds
from twinbus.values import Condition

from .bus import Bus, envelope, ping, queue

BIG = "x" * (256 * 1024)


@pytest.mark.parametrize(
    ("settings", "sent", "condition"),
    [
        ({}, envelope(BIG), Condition.MESSAGE_SIZE_EXCEEDED),
        ({}, envelope(properties={"a": "x" * 33_000}), Condition.ARGUMENT_OUT_OF_RANGE),
        ({}, envelope(properties={f"p{n}": "x" * 30_000 for n in range(3)}), Condition.ARGUMENT_OUT_OF_RANGE),
        ({}, envelope(message_id="x" * 129), Condition.ARGUMENT_ERROR),
        ({}, envelope(session="x" * 129), Condition.ARGUMENT_ERROR),
        ({}, envelope(session="a", partition_key="b"), Condition.ARGUMENT_ERROR),
        ({"requires_session": True}, envelope(), Condition.NOT_ALLOWED),
        ({"requires_session": True}, envelope(session=""), Condition.NOT_ALLOWED),
        ({"status": EntityStatus.DISABLED}, envelope(), Condition.ENTITY_DISABLED),
        ({"status": EntityStatus.SEND_DISABLED}, envelope(), Condition.ENTITY_DISABLED),
        ({"status": EntityStatus.DISABLED}, ping(), Condition.ENTITY_DISABLED),
        ({"requires_session": True}, ping(session=None), Condition.NOT_ALLOWED),
    ],
)
def test_a_refused_message_is_refused_with_all_of_its_batch(
    settings: dict[str, Any], sent: RoutingFields, condition: Condition
) -> None:
    bus = Bus(queue(**settings))
    good = envelope("good", session="s")
    for answer in (bus.send("q", good, sent), bus.schedule("q", good, sent)):
        assert answer is not None
        assert answer.condition is condition
        assert answer.description
    assert bus.counts("q") == (0, 0, 0, 0)
    assert bus.meters == []


@pytest.mark.parametrize(
    "sent",
    [
        envelope("x" * 261_000),
        envelope(properties={"a": "x" * 32_000}),
        envelope(properties={"a": "x" * 31_000, "b": "x" * 31_000}),
        envelope(message_id="x" * 128, session="y" * 128),
        envelope(session="a", partition_key="a"),
        envelope(partition_key="b"),
    ],
)
def test_a_message_within_the_limits_is_taken(sent: RoutingFields) -> None:
    bus = Bus(queue())
    assert bus.send("q", sent) is None
    assert bus.counts("q") == (1, 0, 0, 0)


@pytest.mark.parametrize("status", [EntityStatus.ACTIVE, EntityStatus.RECEIVE_DISABLED])
def test_an_entity_that_is_not_disabled_for_sends_accepts_them(status: EntityStatus) -> None:
    bus = Bus(queue(status=status))
    assert bus.send("q", "m") is None


def full(bus: Bus, path: str = "q") -> None:
    """Set the size of the entity to one kilobyte below its quota."""
    bus.entity(path).counters.size = 1024 * 1024 * 1024 - 1024


def test_a_full_queue_refuses_whole_batches_pings_and_schedules_until_there_is_room() -> None:
    bus = Bus(queue())
    full(bus)
    too_much = [envelope("x" * 600), envelope("x" * 600)]
    for answer in (bus.send("q", *too_much), bus.schedule("q", *too_much)):
        assert answer is not None
        assert answer.condition is Condition.RESOURCE_LIMIT_EXCEEDED
    assert bus.send("q", too_much[0]) is None
    bus.entity("q").counters.size = 1024 * 1024 * 1024
    refusal = bus.send("q", ping())
    assert refusal is not None
    assert refusal.condition is Condition.RESOURCE_LIMIT_EXCEEDED
    bus.receive("q", peek_lock=False)
    assert bus.send("q", "small") is None


def test_every_settled_message_gives_its_bytes_back() -> None:
    bus = Bus(queue())
    bus.send("q", *["some text"] * 5)
    bus.schedule("q", envelope("m", due=bus.now + 1_000))
    info = bus.namespace.info("q")
    assert info is not None
    assert info.counts.size_bytes > 0
    bus.wait(1_000)
    bus.settle_tokens("q", bus.receive("q").tokens, events.Complete())
    info = bus.namespace.info("q")
    assert info is not None
    assert info.counts.size_bytes == 0


def test_a_message_without_an_id_is_given_one_of_32_hexadecimal_digits() -> None:
    bus = Bus(queue())
    bus.send("q", "a", envelope("b", message_id="mine"))
    ids = [read_routing_fields(row.raw).message_id for row in bus.receive("q").rows]
    assert ids[1] == "mine"
    assert isinstance(ids[0], str)
    assert len(ids[0]) == 32
    assert int(ids[0], 16) > 0


# --- pings (G3) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sessions", [False, True])
def test_a_ping_is_accepted_metered_and_never_seen(sessions: bool) -> None:
    bus = Bus(queue(requires_session=sessions, dead_lettering_on_expiration=True))
    waiting = bus.session("q", None, 5, wait=60_000) if sessions else bus.receiver("q", 5)
    dead = bus.receiver("q", 5, dead=True)
    assert bus.send("q", ping()) is None
    assert bus.send("q", ping(), envelope("real", session="s"), ping()) is None
    [number] = bus.schedule("q", ping())
    assert number > 0
    assert bus.metered(MeteredOperation.PING) == 4
    assert bus.metered(MeteredOperation.SEND) == 1
    assert bus.metered(MeteredOperation.SCHEDULE) == 0
    bus.credit("q", waiting, 5)
    assert waiting.bodies == ["real"]
    assert bus.counts("q") == (1, 0, 0, 0)
    assert len(bus.peek("q")) == 1
    bus.wait(5_000)
    assert dead.bodies == []


def test_a_ping_to_a_topic_reaches_no_subscription() -> None:
    bus = Bus(TopicDescription(path="t"), SubscriptionDescription(topic="t", name="s"))
    assert bus.send("t", ping()) is None
    assert bus.schedule("t", ping(), envelope(due=bus.now + 1_000)) == [2, 1]
    assert bus.metered(MeteredOperation.PING) == 2
    assert bus.counts("t") == (0, 0, 1, 0)
    assert bus.counts("t/subscriptions/s") == (0, 0, 0, 0)


# --- duplicates --------------------------------------------------------------------------------------------------


def detecting(**settings: Any) -> Bus:
    return Bus(queue(requires_duplicate_detection=True, duplicate_window=20_000, **settings))


def test_a_duplicate_within_the_window_is_accepted_metered_and_dropped() -> None:
    bus = detecting()
    for _ in range(3):
        assert bus.send("q", envelope("m", message_id="one")) is None
    assert bus.counts("q") == (1, 0, 0, 0)
    assert bus.metered(MeteredOperation.SEND) == 3


def test_two_equal_ids_of_one_batch_are_one_message() -> None:
    bus = detecting()
    bus.send("q", *[envelope(body, message_id=body[0]) for body in ("a1", "b1", "a2")])
    assert bus.receive("q").bodies == ["a1", "b1"]


def test_an_id_can_be_used_again_after_the_window_and_a_duplicate_does_not_prolong_it() -> None:
    bus = detecting()
    bus.send("q", envelope("1", message_id="one"))
    bus.wait(20_000)
    bus.send("q", envelope("2", message_id="one"))
    bus.wait(1)
    bus.send("q", envelope("3", message_id="one"))
    assert bus.receive("q").bodies == ["1", "3"]


def test_a_completed_message_is_still_remembered_also_after_a_restart() -> None:
    bus = detecting()
    bus.send("q", envelope("m", message_id="one"))
    bus.settle_tokens("q", bus.receive("q").tokens, events.Complete())
    bus.restart()
    bus.wait(10_000)
    bus.send("q", envelope("m", message_id="one"), envelope("other", message_id="two"))
    assert bus.receive("q").bodies == ["other"]


def test_ids_seen_before_a_restart_are_duplicates_within_the_window() -> None:
    bus = detecting()
    bus.send("q", envelope("m", message_id="one"))
    bus.wait(1_000)
    bus.restart()
    bus.send("q", envelope("other", message_id="two"))
    bus.wait(19_000)
    bus.send("q", envelope("m", message_id="one"))
    assert bus.counts("q") == (2, 0, 0, 0)
    bus.wait(1)
    bus.send("q", envelope("m", message_id="one"))
    assert bus.counts("q") == (3, 0, 0, 0)


def test_messages_without_an_id_are_never_duplicates() -> None:
    bus = detecting()
    bus.send("q", "same", "same")
    assert bus.counts("q") == (2, 0, 0, 0)


def test_ids_of_different_types_are_different() -> None:
    bus = detecting()
    value = UUID(int=7)
    for message_id in (str(value), value, 7, b"7"):
        raw = build_message(data=b"m", properties=MessageProperties(message_id=message_id))
        for _ in range(2):
            bus.send("q", read_routing_fields(raw))
    assert bus.counts("q") == (4, 0, 0, 0)


def test_a_scheduled_message_counts_as_seen_and_its_duplicate_gets_a_number() -> None:
    bus = detecting()
    one, two = bus.schedule("q", *[envelope("m", message_id="one", due=bus.now + 1_000) for _ in range(2)])
    assert one != two
    assert bus.counts("q") == (0, 0, 1, 0)
    bus.send("q", envelope("m", message_id="one"))
    assert bus.counts("q") == (0, 0, 1, 0)


def test_the_store_is_read_only_for_times_that_memory_does_not_cover() -> None:
    bus = detecting()
    bus.send("q", envelope(message_id="one"))
    assert not [need for need in bus.reads if isinstance(need, KnownIds)]
    bus.restart()
    bus.send("q", envelope(message_id="two"))
    assert len([need for need in bus.reads if isinstance(need, KnownIds)]) == 1
    bus.wait(20_001)
    bus.send("q", envelope(message_id="three"))
    assert len([need for need in bus.reads if isinstance(need, KnownIds)]) == 1


def test_more_ids_than_memory_remembers_are_still_found() -> None:
    bus = detecting()
    bus.namespace._resources.seen_id_budget.limit = 10
    for number in range(30):
        bus.send("q", envelope(message_id=str(number)))
        bus.wait(1)
    for number in range(30):
        bus.send("q", envelope(message_id=str(number)))
    assert bus.counts("q") == (30, 0, 0, 0)


def test_all_entities_share_the_seen_id_budget_and_find_every_duplicate() -> None:
    detects: dict[str, Any] = {"requires_duplicate_detection": True, "duplicate_window": 20_000}
    bus = Bus(queue("a", **detects), queue("b", **detects), TopicDescription(path="t", **detects))
    ids = bus.namespace._resources.seen_id_budget
    ids.limit = 10
    for path in ("a", "b", "t"):
        for number in range(8):
            bus.send(path, envelope(message_id=str(number)))
            bus.wait(1)
            assert ids.used <= 10
    assert ids.used == 10
    for path in ("t", "b", "a"):
        for number in range(8):
            bus.send(path, envelope(message_id=str(number)))
    assert bus.counts("a") == bus.counts("b") == (8, 0, 0, 0)
    asked = len([need for need in bus.reads if isinstance(need, KnownIds)])
    bus.send("t", envelope(message_id="7"))
    assert len([need for need in bus.reads if isinstance(need, KnownIds)]) == asked, "the newest are in memory"
    bus.wait(50_000)
    for path in ("a", "b", "t"):
        queue_id = bus.entity(path).counters.queue
        assert bus.store.load(KnownIds(queue_id, tuple(map(str, range(8))), 0)) == set(), "also where none was left"
    assert ids.used == 0


@pytest.mark.parametrize("path", ["a", "t"])
def test_a_deleted_entity_frees_its_share_of_the_seen_id_budget(path: str) -> None:
    bus = Bus(
        queue("a", requires_duplicate_detection=True), TopicDescription(path="t", requires_duplicate_detection=True)
    )
    bus.send(path, *[envelope(message_id=str(number)) for number in range(5)])
    assert bus.namespace._resources.seen_id_budget.used == 5
    bus.delete(path)
    assert bus.namespace._resources.seen_id_budget.used == 0


@pytest.mark.parametrize("restarted", [False, True])
def test_ids_the_window_has_passed_are_forgotten_in_the_store(restarted: bool) -> None:
    bus = detecting()
    bus.send("q", envelope(message_id="one"))
    if restarted:
        bus.restart()
    bus.wait(60_000)
    queue_id = bus.entity("q").counters.queue
    assert bus.store.load(KnownIds(queue_id, ("one",), 0)) == set()
    assert bus.next_timer() is None, "nothing is left to forget"


def test_a_purge_keeps_ids_within_the_window() -> None:
    bus = detecting()
    bus.send("q", envelope(message_id="old"))
    bus.wait(15_000)
    bus.send("q", envelope(message_id="young"))
    queue_id = bus.entity("q").counters.queue
    bus.wait(5_000)
    decision = bus.carry_out(bus.entity("q").advance(events.EntityTimerFired(), bus.now))
    assert not [write for write in decision.writes if isinstance(write, ForgetSeenIds)]
    assert bus.store.load(KnownIds(queue_id, ("old", "young"), 0)) == {"old", "young"}
    bus.wait(1)
    assert bus.store.load(KnownIds(queue_id, ("old", "young"), 0)) == {"young"}
    bus.wait(25_000)
    assert bus.store.load(KnownIds(queue_id, ("old", "young"), 0)) == set()
