"""Auto-forward: messages and dead letters move in one decision, at most four hops, and none is lost."""

from typing import Any

import pytest

from twinbus.amqp import build_message, read_routing_fields, split_sections
from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import (
    EntityStatus,
    RuleDescription,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.effects import MeteredOperation, Refusal
from twinbus.namespace.engine.forwarding import forward
from twinbus.namespace.engine.storage_protocol import forward_count, overlay_properties
from twinbus.namespace.engine.topic import Topic
from twinbus.values import Condition

from .bus import Bus, envelope, queue, text_of


def forwarding_bus(**settings: Any) -> Bus:
    return Bus(queue("target"), queue("source", forward_to="target", **settings))


def transferred(bus: Bus, path: str) -> list[tuple[str, str]]:
    """Return body and reason of each message in the transfer dead-letter queue."""
    rows = bus.receive(path, transfer=True).rows
    return [(text_of(row), (overlay_properties(row.overlay) or {})["DeadLetterReason"]) for row in rows]


def test_a_message_sent_to_a_forwarding_queue_is_received_from_its_target() -> None:
    bus = forwarding_bus()
    assert bus.send("source", "a", "b") is None
    assert bus.receive("target").bodies == ["a", "b"]
    assert bus.counts("source") == (0, 0, 0, 0)


def test_a_forwarded_message_keeps_the_number_of_its_origin_and_counts_deliveries_anew() -> None:
    bus = forwarding_bus()
    bus.send("target", "before")
    bus.send("source", "a")
    row = bus.receive("target").rows[1]
    assert (row.seq, row.origin_seq, row.delivery_count) == (2, 1, 0)


def test_messages_from_before_forwarding_move_on_and_locked_ones_when_they_are_free() -> None:
    bus = Bus(queue("target"), queue("source"))
    bus.send("source", "locked", "free")
    holder = bus.receiver("source", 1)
    bus.update("source", forward_to="target")
    assert holder.refusal is not None
    assert holder.refusal.condition is Condition.NOT_ALLOWED
    assert bus.receive("target").bodies == ["free"]
    bus.settle_tokens("source", holder.tokens, events.Abandon())
    assert bus.receive("target").bodies == ["locked"]


def test_after_a_restart_forwarding_goes_on_where_it_was() -> None:
    bus = forwarding_bus()
    bus.carry_out(bus.entity("source").advance(events.MessagesSent("reply", (envelope("a"),)), bus.now))
    bus.restart()
    bus.settle()
    assert bus.receive("target").bodies == ["a"]


def test_many_pages_move_in_order() -> None:
    bus = Bus(queue("target"), queue("source"), read_ahead_bytes=4096)
    bodies = [str(number) for number in range(700)]
    bus.send("source", *bodies)
    bus.restart()
    bus.update("source", forward_to="target")
    assert bus.receive("target").bodies == bodies


def test_source_and_target_change_in_one_decision() -> None:
    bus = forwarding_bus()
    bus.carry_out(bus.entity("source").advance(events.MessagesSent("reply", (envelope("a"),)), bus.now))
    ((source, lane, target),) = bus.namespace.pending_forwards()
    decision = bus.carry_out(forward(source, lane, target, bus.now))
    touched = {type(write).__name__ for write in decision.writes}
    assert touched == {"PutRow", "DropRow", "PutCounters"}


def test_a_read_that_fails_leaves_the_messages_where_they_are() -> None:
    bus = Bus(queue("target", requires_duplicate_detection=True), queue("source", forward_to="target"))
    bus.carry_out(bus.entity("source").advance(events.MessagesSent("reply", (envelope("a"),)), bus.now))
    bus.restart()
    ((source, lane, target),) = bus.namespace.pending_forwards()
    decision = forward(source, lane, target, bus.now)
    with pytest.raises(OSError, match="disk"):
        bus.fail(decision)
    bus.carry_out(forward(source, lane, target, bus.now))
    assert bus.receive("target").bodies == ["a"]


def test_four_hops_are_made_and_a_fifth_is_not() -> None:
    chain = [queue("q5")] + [queue(f"q{n}", forward_to=f"q{n + 1}") for n in range(4, -1, -1)]
    bus = Bus(*chain)
    bus.send("q1", "four")
    bus.send("q0", "five")
    assert bus.receive("q5").bodies == ["four"]
    assert transferred(bus, "q4") == [("five", "MaxTransferHopCountExceeded")]


def test_a_circle_ends_in_a_transfer_dead_letter_queue() -> None:
    bus = Bus(queue("a"), queue("b", forward_to="a"))
    bus.update("a", forward_to="b")
    bus.send("a", "round")
    assert transferred(bus, "a") == [("round", "MaxTransferHopCountExceeded")]


def test_a_circle_through_a_topic_ends_for_every_copy() -> None:
    subscriptions = [SubscriptionDescription(topic="t", name=name) for name in ("on", "too", "kept")]
    bus = Bus(TopicDescription(path="t"), queue("back", forward_to="t"), *subscriptions)
    for name in ("on", "too"):
        bus.update(f"t/Subscriptions/{name}", forward_to="back")
    bus.send("t", "round")
    # Each round is two hops and doubles the messages. After four hops no message moves any more.
    assert bus.counts("t/Subscriptions/kept")[0] == 1 + 2 + 4
    assert [len(transferred(bus, f"t/Subscriptions/{name}")) for name in ("on", "too")] == [4, 4]
    assert bus.counts("back") == (0, 0, 0, 0)


def test_a_circle_of_dead_letters_ends() -> None:
    bus = Bus(queue("a"), queue("b", forward_dead_letters_to="a"))
    bus.update("a", forward_dead_letters_to="b")
    bus.send("a", "broken")
    for _ in range(2):
        for path in ("a", "b"):
            bus.settle_tokens(path, bus.receive(path).tokens, events.MoveToDeadLetter("broken"))
    bus.settle_tokens("a", bus.receive("a").tokens, events.MoveToDeadLetter("broken"))
    assert transferred(bus, "a") == [("broken", "MaxTransferHopCountExceeded")]


@pytest.mark.parametrize("wrong", [{"rules": (RuleDescription("r", SqlFilter("n > 1")),)}, {"requires_session": True}])
def test_a_forwarding_circle_of_messages_that_a_subscription_refuses_ends(wrong: dict[str, Any]) -> None:
    bus = Bus(TopicDescription(path="t"), queue("back", forward_to="t"))
    assert bus.create(SubscriptionDescription(topic="t", name="s", forward_dead_letters_to="back", **wrong)) is None
    bus.send("t", envelope("round", properties={"n": "no number"}))
    assert transferred(bus, "t/Subscriptions/s") == [("round", "MaxTransferHopCountExceeded")]


def test_a_full_topic_refuses_forwarded_messages() -> None:
    described = [SubscriptionDescription(topic="t", name=name) for name in "ab"]
    bus = Bus(TopicDescription(path="t"), *described, queue("source", forward_to="t"))
    topic = bus.entity("t")
    assert isinstance(topic, Topic)
    topic.shared_bytes = 1024**3
    bus.send("source", "stuck")
    assert transferred(bus, "source") == [("stuck", "QuotaExceededException")]
    topic.shared_bytes = 0
    bus.send("source", "fits")
    assert [bus.receive(each.path).bodies for each in described] == [["fits"], ["fits"]]


def test_a_dead_letter_whose_properties_cannot_be_read_is_forwarded_as_it_is() -> None:
    bus = Bus(queue("graves"), queue("q", forward_dead_letters_to="graves"))
    key_that_is_no_text = b"\x00\x53\x74\xc1\x05\x02\xa1\x01\xff\x40"
    bus.send("q", read_routing_fields(key_that_is_no_text + build_message(data=b"m")))
    bus.settle_tokens("q", bus.receive("q").tokens, events.MoveToDeadLetter("why"))
    assert bus.receive("graves").bodies == ["m"]


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (lambda bus: bus.delete("target"), "MessagingEntityNotFoundException"),
        (lambda bus: bus.update("target", status=EntityStatus.DISABLED), "MessagingEntityDisabledException"),
        (lambda bus: setattr(bus.entity("target").counters, "size", 1024**3), "QuotaExceededException"),
    ],
)
def test_a_message_that_the_target_refuses_goes_to_the_transfer_dead_letter_queue(trouble: Any, reason: str) -> None:
    bus = forwarding_bus()
    trouble(bus)
    assert bus.send("source", "stuck") is None
    info = bus.namespace.info("source")
    assert info is not None
    assert (info.counts.active, info.counts.transfer_dead_letter) == (0, 1)
    assert transferred(bus, "source") == [("stuck", reason)]


def test_one_forwarded_message_that_a_session_queue_refuses_does_not_stop_the_others() -> None:
    bus = Bus(queue("target", requires_session=True), queue("source", forward_to="target"))
    bus.send("source", envelope("a", session="s"), envelope("none"), envelope("b", session="s"))
    assert bus.session("target", "s", 10).bodies == ["a", "b"]
    assert transferred(bus, "source") == [("none", Condition.NOT_ALLOWED.value)]


def test_transfer_dead_letters_are_settled_deferred_peeked_and_survive_a_restart() -> None:
    bus = forwarding_bus()
    bus.delete("target")
    bus.send("source", "x", "y")
    held = bus.receive("source", transfer=True)
    bus.settle_tokens("source", held.tokens[:1], events.Complete())
    bus.settle_tokens("source", held.tokens[1:], events.Defer())
    bus.restart()
    peeked = bus.submit("source", events.MessagesPeeked("reply", 0, 10, False, None, transfer=True))
    assert [text_of(row) for row in peeked] == ["y"]
    asked = events.DeferredRequested("reply", (peeked[0].seq,), True, False, None, transfer=True)
    ((row, token, _),) = bus.submit("source", asked)
    assert text_of(row) == "y"
    assert bus.settle_tokens("source", [token], events.Complete()) == [None]
    info = bus.namespace.info("source")
    assert info is not None
    assert (info.counts.transfer_dead_letter, info.counts.size_bytes) == (0, 0)


def test_dead_letters_are_forwarded_with_their_reason_and_where_they_come_from() -> None:
    bus = Bus(queue("graves"), queue("q", forward_dead_letters_to="graves"))
    bus.send("q", envelope("a", properties={"kept": 1}))
    bus.settle_tokens("q", bus.receive("q").tokens, events.MoveToDeadLetter("broken", "so it is"))
    (row,) = bus.receive("graves").rows
    sections = split_sections(row.raw)
    expected = {"kept": 1, "DeadLetterReason": "broken", "DeadLetterErrorDescription": "so it is"}
    assert sections.application_properties == expected
    assert (sections.message_annotations or {})["x-opt-deadletter-source"] == "q"
    assert bus.counts("q") == (0, 0, 0, 0)
    assert bus.receiver("q", dead=True).refusal is not None


def test_properties_set_by_abandon_are_forwarded_with_the_message() -> None:
    bus = Bus(queue("target"), queue("source"))
    bus.send("source", "a")
    bus.settle_tokens("source", bus.receive("source").tokens, events.Abandon({"tried": True}))
    bus.update("source", forward_to="target")
    (row,) = bus.receive("target").rows
    assert split_sections(row.raw).application_properties == {"tried": True}
    assert overlay_properties(row.overlay) is None


def test_forwarding_does_not_prolong_the_time_to_live() -> None:
    bus = Bus(queue("target", default_time_to_live=60_000), queue("source"))
    bus.send("source", envelope("short", ttl=5_000), envelope("long"))
    bus.wait(2_000)
    bus.update("source", forward_to="target")
    assert [row.expires and row.expires - bus.now for row in bus.receive("target").rows] == [3_000, 60_000]


def test_the_target_detects_duplicates() -> None:
    bus = Bus(queue("target", requires_duplicate_detection=True), queue("source", forward_to="target"))
    bus.send("target", envelope("first", message_id="1"))
    bus.send("source", envelope("again", message_id="1"))
    assert bus.receive("target").bodies == ["first"]
    assert bus.counts("source") == (0, 0, 0, 0)


def test_a_subscription_forwards_to_a_queue_and_to_another_topic_with_its_rules() -> None:
    bus = Bus(
        queue("q"),
        TopicDescription(path="second"),
        SubscriptionDescription(topic="second", name="one"),
        SubscriptionDescription(topic="second", name="two", forward_to="q"),
        TopicDescription(path="first"),
        SubscriptionDescription(topic="first", name="on", forward_to="second"),
        SubscriptionDescription(topic="first", name="here"),
    )
    bus.send("first", "a")
    assert bus.receive("first/Subscriptions/here").bodies == ["a"]
    assert bus.receive("second/Subscriptions/one").bodies == ["a"]
    assert bus.receive("q").bodies == ["a"]
    assert bus.counts("first/Subscriptions/on") == (0, 0, 0, 0)
    assert forward_count(bus.peek("q")[0].overlay) == 2, "hops are counted through topics"


def test_a_scheduled_message_is_forwarded_when_it_is_due() -> None:
    bus = forwarding_bus()
    bus.send("source", envelope("later", due=bus.now + 1_000))
    assert bus.receive("target").bodies == []
    bus.wait(1_000)
    assert bus.receive("target").bodies == ["later"]


def test_each_hop_is_metered_as_a_send() -> None:
    bus = forwarding_bus()
    bus.send("source", "a")
    assert bus.metered(MeteredOperation.SEND) == 2


def test_a_forwarding_entity_has_no_receivers_except_of_its_dead_letters() -> None:
    bus = forwarding_bus()
    refusal = bus.receiver("source").refusal
    assert isinstance(refusal, Refusal)
    assert refusal.condition is Condition.NOT_ALLOWED
    assert bus.receiver("source", dead=True).refusal is None


def test_a_receive_disabled_source_does_not_forward() -> None:
    bus = forwarding_bus()
    bus.update("source", status=EntityStatus.RECEIVE_DISABLED)
    bus.send("source", "a")
    assert bus.receive("target").bodies == []
    bus.update("source", status=EntityStatus.ACTIVE)
    assert bus.receive("target").bodies == ["a"]


@pytest.mark.parametrize("name", ["forward_to", "forward_dead_letters_to"])
@pytest.mark.parametrize("address", ["missing", "t/Subscriptions/s"])
def test_a_target_has_to_be_a_queue_or_topic_of_the_namespace(name: str, address: str) -> None:
    bus = Bus(queue("q"), TopicDescription(path="t"), SubscriptionDescription(topic="t", name="s"))
    refusal = bus.update("q", **{name: address})
    assert refusal is not None
    assert refusal.condition is Condition.ARGUMENT_ERROR
    assert bus.create(queue("fresh", **{name: "none"})) is not None
    assert bus.update("q", **{name: "sb://host:1/t"}) is None


@pytest.mark.parametrize("name", ["forward_to", "forward_dead_letters_to"])
def test_n1_an_entity_may_forward_to_itself_and_a_subscription_to_its_topic(name: str) -> None:
    bus = Bus(queue("q"), TopicDescription(path="t"), SubscriptionDescription(topic="t", name="s"))
    for address in ("q", "sb://host:1/Q"):
        assert bus.update("q", **{name: address}) is None
    assert bus.update("t/Subscriptions/s", **{name: "T"}) is None
    assert bus.create(queue("fresh", **{name: "fresh"})) is None


@pytest.mark.parametrize("detecting", [False, True])
def test_n1_a_message_of_an_entity_that_forwards_to_itself_is_a_transfer_dead_letter(detecting: bool) -> None:
    bus = Bus(queue("q", requires_duplicate_detection=detecting))
    bus.send("q", envelope("before", message_id="1"))
    bus.update("q", forward_to="q")
    bus.send("q", envelope("after", message_id="2"))
    assert transferred(bus, "q") == [(body, "MaxTransferHopCountExceeded") for body in ("before", "after")]
    assert bus.counts("q")[0] == 0


def test_n1_a_dead_letter_that_is_forwarded_to_its_own_queue_is_received_again() -> None:
    bus = Bus(queue("q"))
    bus.update("q", forward_dead_letters_to="q")
    bus.send("q", "broken")
    for _ in range(4):
        bus.settle_tokens("q", bus.receive("q").tokens, events.MoveToDeadLetter("broken"))
    assert bus.receive("q").bodies == ["broken"]


@pytest.mark.parametrize("detecting", [False, True])
def test_n1_a_subscription_that_forwards_to_its_topic_ends_after_four_hops(detecting: bool) -> None:
    topic = TopicDescription(path="t", requires_duplicate_detection=detecting)
    bus = Bus(topic, *(SubscriptionDescription(topic="t", name=name) for name in ("on", "kept")))
    bus.update("t/Subscriptions/on", forward_to="t")
    bus.send("t", envelope("round", message_id="1"))
    assert bus.counts("t/Subscriptions/kept")[0] == 1 + 4
    assert transferred(bus, "t/Subscriptions/on") == [("round", "MaxTransferHopCountExceeded")]


def test_n1_a_session_queue_forwards_what_it_has_and_what_comes_with_the_session_ids() -> None:
    bus = Bus(queue("target", requires_session=True), queue("source", requires_session=True))
    bus.send("source", envelope("held", session="a"), envelope("free", session="b"))
    holder, waiting = bus.session("source", "a", 1), bus.session("source", None, 1)
    bus.detach("source", waiting)
    assert holder.bodies == ["held"]
    assert bus.update("source", forward_to="target") is None
    assert holder.refusal is not None
    assert "forwards" in holder.refusal.description
    bus.send("source", envelope("new", session="a"))
    refused = bus.session("source", "a", 1)
    assert refused.refusal is not None
    assert bus.session("target", "a", 9).bodies == ["held", "new"]
    assert bus.session("target", "b", 9).bodies == ["free"]
    assert bus.update("source", forward_to=None) is None
    bus.send("source", envelope("kept", session="a"))
    assert bus.session("source", "a", 9).bodies == ["kept"]
    bus.update("source", forward_to="target")
    bus.restart()
    bus.settle()
    assert "kept" in bus.session("target", "a", 9).bodies


def test_a_topic_purges_the_ids_of_forwarded_messages_when_the_window_is_over() -> None:
    window = 20_000
    bus = Bus(
        TopicDescription(path="target", requires_duplicate_detection=True, duplicate_window=window),
        queue("source", forward_to="target"),
    )
    bus.send("source", envelope("a", message_id="one"))
    armed = bus.entity("target").next_timer
    assert armed is not None
    assert armed <= bus.now + window + 1
