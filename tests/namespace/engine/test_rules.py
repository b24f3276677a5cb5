"""Rules of subscriptions: which messages each takes, restarts, adding and removing rules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twinbus.amqp import split_sections
from twinbus.namespace.engine import events, validation
from twinbus.namespace.engine.description_json import read_description, write_description
from twinbus.namespace.engine.descriptions import (
    CorrelationFilter,
    EntityStatus,
    FalseFilter,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
)
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.limits import MAX_MESSAGE_BYTES
from twinbus.namespace.engine.rules.values import Duration, ZonelessTime
from twinbus.namespace.engine.storage_protocol import PutBody
from twinbus.values import Condition, Int, Timestamp

from .bus import Bus, envelope, overlay_of, ping, queue

A, B, C = (f"t/Subscriptions/{name}" for name in "abc")


def rule(name: str, condition: RuleFilter | str = "1=1", action: str | None = None) -> RuleDescription:
    chosen = SqlFilter(condition) if isinstance(condition, str) else condition
    return RuleDescription(name, chosen, None if action is None else SqlAction(action))


def topic(**subscriptions: list[RuleDescription] | RuleDescription) -> Bus:
    described = [
        SubscriptionDescription(topic="t", name=name, rules=tuple(rules) if isinstance(rules, list) else (rules,))
        for name, rules in subscriptions.items()
    ]
    return Bus(TopicDescription(path="t"), *described)


def colored(color: Any, body: str = "x", **more: Any) -> Any:
    return envelope(body, properties={"color": color}, **more)


def properties_of(bus: Bus, path: str) -> list[dict[str, Any]]:
    return [split_sections(row.raw).application_properties for row in bus.peek(path)]


def names(bus: Bus, path: str) -> list[str]:
    return [each.name for each in bus.submit(path, events.RulesListed("reply", 0, 100))]


def test_a_subscription_takes_the_messages_that_its_rules_select() -> None:
    bus = topic(a=rule("red", "color = 'red'"), b=rule("blue", "color = 'blue'"), c=rule("all"))
    bus.send("t", colored("red", "r"), colored("blue", "b"), colored("green", "g"))
    assert [bus.receive(path).bodies for path in (A, B, C)] == [["r"], ["b"], ["r", "b", "g"]]


def test_a_subscription_without_rules_takes_nothing() -> None:
    bus = topic(a=[])
    bus.send("t", "m")
    assert bus.counts(A) == (0, 0, 0, 0)


def test_several_rules_without_action_give_one_copy_and_each_action_one_more() -> None:
    bus = topic(
        a=[
            rule("one"),
            rule("two", "color = 'red'"),
            rule("three", "color = 'red'", "SET n = 3"),
            rule("four", CorrelationFilter(properties={"color": "red"}), "SET n = 4; REMOVE color"),
            rule("five", "color = 'blue'", "SET n = 5"),
        ]
    )
    bus.send("t", colored("red"))
    assert properties_of(bus, A) == [
        {"color": "red"},
        {"color": "red", "n": 3, "RuleName": "three"},
        {"n": 4, "RuleName": "four"},
    ]
    assert [row.seq for row in bus.peek(A)] == [1, 2, 3]
    assert {row.origin_seq for row in bus.peek(A)} == {1}


def test_a_changed_copy_is_private_to_its_subscription() -> None:
    bus = topic(a=rule("r", TrueFilter(), "SET color = 'mine'"), b=rule("r"))
    bus.send("t", colored("red"))
    assert properties_of(bus, A) == [{"color": "mine", "RuleName": "r"}]
    assert properties_of(bus, B) == [{"color": "red"}]


def test_a_body_is_shared_by_subscriptions_that_take_the_message_unchanged() -> None:
    bus = topic(a=rule("r", "color = 'red'"), b=rule("r", "color <> 'blue'"), c=rule("r", TrueFilter(), "SET n = 1"))
    decision = bus.carry_out(bus.entity("t").advance(events.MessagesSent(None, (colored("red"),)), bus.now))
    assert len([write for write in decision.writes if isinstance(write, PutBody)]) == 1
    [one], [two], [three] = (bus.peek(path) for path in (A, B, C))
    assert one.body is not None
    assert one.body == two.body
    assert three.body is None
    decision = bus.carry_out(bus.entity("t").advance(events.MessagesSent(None, (colored("blue"),)), bus.now))
    assert not [write for write in decision.writes if isinstance(write, PutBody)]


def test_an_action_decides_session_and_time_to_live_of_its_copy() -> None:
    act = SqlAction("SET sys.SessionId = color; SET sys.TimeToLive = @ttl", {"@ttl": Duration(5_000)})
    bus = Bus(
        TopicDescription(path="t"),
        SubscriptionDescription(
            topic="t", name="a", requires_session=True, rules=(RuleDescription("r", TrueFilter(), act),)
        ),
    )
    bus.send("t", colored("red"))
    [row] = bus.peek(A)
    assert (row.session, row.expires) == ("red", bus.now + 5_000)
    assert bus.session(A, "red", 5).seqs == [1]


def test_a_scheduled_message_is_filtered_when_it_is_due_by_the_rules_of_then() -> None:
    bus = topic(a=rule("red", "color = 'red'"))
    bus.schedule("t", colored("blue", due=bus.now + 1_000))
    bus.submit(A, events.RuleAdded("reply", rule("blue", "color = 'blue' AND sys.SequenceNumber = 1")))
    bus.wait(1_000)
    assert properties_of(bus, A) == [{"color": "blue"}]


@pytest.mark.parametrize(
    "rules",
    [
        [rule("all")],
        [rule("sql", "sys.ContentType LIKE '%ping'")],
        [rule("correlation", CorrelationFilter(content_type="application/vnd.ms-servicebus-ping"))],
        [rule("action", TrueFilter(), "SET sys.ContentType = 'text/plain'")],
        [rule("error", "color = 5")],
    ],
)
def test_g3_a_ping_reaches_no_subscription_whatever_its_rules(rules: list[RuleDescription]) -> None:
    bus = topic(a=rules)
    assert bus.send("t", ping(), ping()) is None
    bus.schedule("t", ping())
    assert bus.counts(A) == (0, 0, 0, 0)


# --- rules that cannot be evaluated ------------------------------------------------------------------------------


def test_a_message_that_a_filter_fails_on_is_dead_lettered_with_the_reason() -> None:
    bus = topic(a=rule("number", "color > 5"), b=rule("all"))
    bus.send("t", colored("red"), colored(6), colored(4))
    assert bus.counts(A) == (1, 0, 0, 1)
    [dead] = bus.peek(A, dead=True)
    told = overlay_of(dead)
    assert told["DeadLetterReason"] == "FilterException"
    assert "'number'" in told["DeadLetterErrorDescription"]
    assert "a string cannot be compared (>) with an integer" in told["DeadLetterErrorDescription"]
    assert split_sections(dead.raw).application_properties == {"color": "red"}


def test_a_message_that_a_filter_fails_on_is_dropped_without_dead_lettering_on_filter_errors() -> None:
    bus = Bus(
        TopicDescription(path="t"),
        SubscriptionDescription(
            topic="t", name="a", dead_lettering_on_filter_errors=False, rules=(rule("number", "color > 5"),)
        ),
    )
    bus.send("t", colored("red"), colored(6))
    assert bus.counts(A) == (1, 0, 0, 0)


def test_an_action_that_fails_dead_letters_the_message_as_it_was() -> None:
    bus = topic(a=rule("r", TrueFilter(), "SET n = color * 2"))
    bus.send("t", colored("red"))
    assert bus.counts(A) == (0, 0, 0, 1)
    assert split_sections(bus.peek(A, dead=True)[0].raw).application_properties == {"color": "red"}


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("SET a = text + text", "A property of "),
        ("SET a = text; SET b = text; SET c = text; SET d = text", "The properties take "),
        ("SET sys.MessageId = text", "The message id is longer than 128 characters"),
        ("SET sys.SessionId = text", "The session id is longer than 128 characters"),
    ],
)
def test_a_copy_beyond_the_limits_is_not_made(action: str, told: str) -> None:
    bus = topic(a=rule("r", TrueFilter(), action), b=rule("all"))
    bus.send("t", envelope("m", properties={"text": "x" * 20_000}))
    assert (bus.counts(A), bus.counts(B)) == ((0, 0, 0, 1), (1, 0, 0, 0))
    [dead] = bus.peek(A, dead=True)
    assert overlay_of(dead)["DeadLetterReason"] == "FilterException"
    assert f"its action makes a message beyond the limits: {told}" in overlay_of(dead)["DeadLetterErrorDescription"]
    assert split_sections(dead.raw).application_properties == {"text": "x" * 20_000}


def test_a_copy_larger_than_a_message_may_be_is_not_made() -> None:
    bus = topic(a=rule("r", TrueFilter(), "SET a = text"), b=rule("all"))
    bus.send("t", envelope("m" * (MAX_MESSAGE_BYTES - 20_000), properties={"text": "x" * 15_000}))
    assert (bus.counts(A), bus.counts(B)) == ((0, 0, 0, 1), (1, 0, 0, 0))
    assert "is larger than" in overlay_of(bus.peek(A, dead=True)[0])["DeadLetterErrorDescription"]


def test_a_copy_beyond_the_limits_is_dropped_without_dead_lettering_on_filter_errors() -> None:
    rules = (rule("r", TrueFilter(), "SET a = text + text"), rule("s", TrueFilter(), "SET a = 1"))
    described = SubscriptionDescription(topic="t", name="a", dead_lettering_on_filter_errors=False, rules=rules)
    bus = Bus(TopicDescription(path="t"), described)
    bus.send("t", envelope("m", properties={"text": "x" * 20_000}))
    assert bus.counts(A) == (1, 0, 0, 0)
    assert properties_of(bus, A)[0]["RuleName"] == "s"


def test_a_disabled_subscription_takes_nothing_and_its_rules_are_not_evaluated() -> None:
    bus = topic(a=rule("number", "color > 5"))
    bus.update(A, status=EntityStatus.DISABLED)
    bus.send("t", colored("red"), colored(6))
    assert bus.counts(A) == (0, 0, 0, 0)


# --- making, changing, removing ----------------------------------------------------------------------------------


def test_a_subscription_is_created_with_the_default_rule() -> None:
    bus = Bus(TopicDescription(path="t"), SubscriptionDescription(topic="t", name="a"))
    assert bus.submit(A, events.RulesListed("reply", 0, 100)) == [
        RuleDescription("$Default", TrueFilter(), None, bus.now)
    ]


def test_rules_are_added_changed_removed_and_listed_in_pages() -> None:
    bus = topic(a=rule("one", FalseFilter()))
    bus.now += 5
    assert bus.submit(A, events.RuleAdded("reply", rule("two", "color = 'red'"))) is None
    bus.send("t", colored("red"), colored("blue"))
    assert properties_of(bus, A) == [{"color": "red"}]
    assert bus.submit(A, events.RuleChanged("reply", rule("TWO", "color = 'blue'"))) is None
    bus.send("t", colored("red"), colored("blue"))
    assert properties_of(bus, A) == [{"color": "red"}, {"color": "blue"}]
    [second] = bus.submit(A, events.RulesListed("reply", 1, 1))
    assert second == RuleDescription("two", SqlFilter("color = 'blue'"), None, bus.now)
    assert bus.submit(A, events.RuleRemoved("reply", "Two")) is None
    bus.send("t", colored("red"), colored("blue"))
    assert len(bus.peek(A)) == 2
    assert names(bus, A) == ["one"]
    assert bus.submit(A, events.RulesListed("reply", 1, 5)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        rule("r", CorrelationFilter(properties={"n": 2**70})),
        rule("r", SqlFilter("n = @n", {"n": 2**70})),
        RuleDescription("r", TrueFilter(), SqlAction("SET n = @n", {"@n": -(2**70)})),
    ],
)
def test_a_value_that_no_message_could_have_is_refused_in_rules_too(wrong: RuleDescription) -> None:
    bus = topic(a=rule("all"))
    refusal = bus.submit(A, events.RuleAdded("reply", wrong))
    assert isinstance(refusal, Refusal)
    assert refusal.condition is Condition.ARGUMENT_ERROR
    assert "A value of rule 'r' is no value of a message" in refusal.description
    assert isinstance(bus.create(SubscriptionDescription(topic="t", name="b", rules=(wrong,))), Refusal)
    assert names(bus, A) == ["all"]


def test_two_thousand_rules_of_one_subscription_select_and_survive_a_restart() -> None:
    bus = topic(a=[rule(f"r{n}", CorrelationFilter(properties={"color": f"{n}"})) for n in range(2_000)])
    assert bus.submit(A, events.RuleAdded("reply", rule("sql", "color = 'red'"))) is None
    assert bus.submit(A, events.RuleRemoved("reply", "r7")) is None
    bus.send("t", colored("1999"), colored("7"), colored("red"), colored("blue"))
    assert [each["color"] for each in properties_of(bus, A)] == ["1999", "red"]
    bus.restart()
    bus.send("t", colored("1998"), colored("7"))
    assert [each["color"] for each in properties_of(bus, A)] == ["1999", "red", "1998"]
    assert names(bus, A) == [f"r{n}" for n in range(2_000) if n != 7][:100]


@pytest.mark.parametrize(
    ("limit", "at_most", "kind", "text"),
    [
        ("MAX_SQL_RULES", 3, "color = 'red'", "at most 3 rules with a SQL expression"),
        ("MAX_CORRELATION_RULES", 2, CorrelationFilter(label="x"), "at most 2 rules with a correlation filter"),
        ("MAX_RULES_CHARACTERS", 3_400, CorrelationFilter(properties={"a": "x" * 500}), "at most 3400 characters"),
    ],
)
def test_x1_the_number_and_the_size_of_rules_is_limited(
    monkeypatch: pytest.MonkeyPatch, limit: str, at_most: int, kind: RuleFilter | str, text: str
) -> None:
    monkeypatch.setattr(validation, limit, at_most)
    bus = topic(a=rule("one"))
    answers = [bus.submit(A, events.RuleAdded("reply", rule(f"r{number}", kind))) for number in range(4)]
    assert answers[:2] == [None, None]
    assert isinstance(answers[-1], Refusal)
    assert answers[-1].condition is Condition.RESOURCE_LIMIT_EXCEEDED
    assert text in answers[-1].description
    known = names(bus, A)
    assert len(known) == 3
    assert bus.submit(A, events.RuleRemoved("reply", known[-1])) is None
    assert bus.submit(A, events.RuleAdded("reply", rule("again", kind))) is None


def test_the_last_rule_may_be_removed() -> None:
    bus = Bus(TopicDescription(path="t"), SubscriptionDescription(topic="t", name="a"))
    assert bus.submit(A, events.RuleRemoved("reply", "$Default")) is None
    bus.send("t", "m")
    assert bus.counts(A) == (0, 0, 0, 0)


def test_an_invalid_rule_is_refused_and_changes_nothing() -> None:
    bus = topic(a=rule("one"))
    refused: list[tuple[events.Event, Condition, str]] = [
        (events.RuleAdded("reply", rule("ONE")), Condition.ENTITY_ALREADY_EXISTS, "already exists"),
        (events.RuleAdded("reply", rule("x", "color =")), Condition.ARGUMENT_ERROR, "At column 8: a value is expected"),
        (events.RuleAdded("reply", rule("x", TrueFilter(), "SET")), Condition.ARGUMENT_ERROR, "The action of rule 'x'"),
        (events.RuleAdded("reply", rule("")), Condition.ARGUMENT_ERROR, "cannot be empty"),
        (events.RuleAdded("reply", rule("a/b")), Condition.ARGUMENT_ERROR, "one of @ ? # * / \\"),
        (events.RuleAdded("reply", rule("x" * 51)), Condition.ARGUMENT_OUT_OF_RANGE, "longer than 50"),
        (events.RuleAdded("reply", rule("x", f"a = '{'x' * 1024}'")), Condition.ARGUMENT_OUT_OF_RANGE, "1024"),
        (events.RuleChanged("reply", rule("two")), Condition.NOT_FOUND, "could not be found"),
        (events.RuleChanged("reply", rule("one", "a")), Condition.ARGUMENT_ERROR, "is expected"),
        (events.RuleRemoved("reply", "two"), Condition.NOT_FOUND, "could not be found"),
    ]
    for event, condition, told in refused:
        answer = bus.submit(A, event)
        assert isinstance(answer, Refusal)
        assert answer.condition is condition
        assert told in answer.description
    assert names(bus, A) == ["one"]
    bus.restart()
    assert names(bus, A) == ["one"]


@pytest.mark.parametrize(
    "event",
    [
        events.RuleAdded("reply", rule("r")),
        events.RuleChanged("reply", rule("r")),
        events.RuleRemoved("reply", "r"),
        events.RulesListed("reply", 0, 1),
    ],
)
@pytest.mark.parametrize("path", ["q", "t"])
def test_queues_and_topics_have_no_rules(event: events.Event, path: str) -> None:
    bus = Bus(queue(), TopicDescription(path="t"))
    answer = bus.submit(path, event)
    assert isinstance(answer, Refusal)
    assert answer.condition is Condition.NOT_ALLOWED


def test_a_subscription_with_invalid_rules_is_not_created() -> None:
    bus = Bus(TopicDescription(path="t"))
    for rules in ((rule("a"), rule("A")), (rule("a", "color ="),)):
        assert isinstance(bus.create(SubscriptionDescription(topic="t", name="a", rules=rules)), Refusal)
    assert bus.namespace.find(A) is None


def test_an_update_of_the_subscription_leaves_its_rules() -> None:
    bus = topic(a=rule("red", "color = 'red'"))
    assert bus.update(A, max_delivery_count=3, rules=(rule("other"),)) is None
    assert names(bus, A) == ["red"]
    bus.submit(A, events.RuleAdded("reply", rule("blue")))
    assert bus.entity(A).description.max_delivery_count == 3  # type: ignore[union-attr]  # it is a subscription


def test_a_topic_reports_the_number_of_filters_of_each_kind() -> None:
    bus = topic(a=[rule("one"), rule("two", FalseFilter()), rule("three", CorrelationFilter(label="x"))], b=rule("all"))
    info = bus.namespace.info("t")
    assert info is not None
    assert (info.subscriptions, info.sql_filters, info.correlation_filters) == (2, 3, 1)


# --- on disk -----------------------------------------------------------------------------------------------------

EVERY_KIND = (
    RuleDescription("true", TrueFilter(), None, 1),
    RuleDescription("false", FalseFilter(), None, 2),
    RuleDescription(
        "sql",
        SqlFilter("a = @a", {"@a": Int(1), "@b": 2, "@c": 1.5, "@d": True, "@e": Timestamp(5), "@f": Duration(7)}),
        SqlAction("SET a = @x", {"@x": "y"}),
        3,
    ),
    RuleDescription("some", CorrelationFilter(label="l", properties={"p": Int(1), "q": "ü"}), SqlAction("REMOVE a"), 4),
    RuleDescription(
        "all",
        CorrelationFilter(
            correlation_id="1",
            message_id="2",
            to="3",
            reply_to="4",
            label="5",
            session_id="6",
            reply_to_session_id="7",
            content_type="8",
        ),
    ),
)


def test_every_kind_of_rule_is_read_as_it_was_written() -> None:
    described = SubscriptionDescription(topic="t", name="a", rules=EVERY_KIND)
    read = read_description("subscription", write_description(described))
    assert read == described
    assert isinstance(read, SubscriptionDescription)
    for before, after in zip(EVERY_KIND, read.rules, strict=True):
        for name, value in getattr(before.filter, "parameters", {}).items():
            kept = getattr(after.filter, "parameters", {})[name]
            assert isinstance(kept, type(value))


def test_a_record_from_before_there_were_rules_has_the_default_rule() -> None:
    values = json.loads(write_description(SubscriptionDescription(topic="t", name="a")))
    del values["rules"]
    assert read_description("subscription", json.dumps(values)) == SubscriptionDescription(topic="t", name="a")


def test_an_unknown_kind_of_filter_in_a_record_is_refused() -> None:
    values = json.loads(write_description(SubscriptionDescription(topic="t", name="a")))
    values["rules"][0]["filter"] = {"kind": "newer"}
    with pytest.raises(ValueError, match="'newer' is no kind of filter"):
        read_description("subscription", json.dumps(values))


def test_rules_survive_a_restart() -> None:
    bus = topic(a=rule("red", "color = 'red'"))
    bus.submit(A, events.RuleAdded("reply", rule("blue", "color = 'blue'", "SET n = 1")))
    bus.restart()
    assert names(bus, A) == ["red", "blue"]
    bus.send("t", colored("red"), colored("blue"), colored("green"))
    assert properties_of(bus, A) == [{"color": "red"}, {"color": "blue", "n": 1, "RuleName": "blue"}]


def test_n1_a_time_without_a_zone_counts_as_utc_and_stays_without_a_zone() -> None:
    moment = 1_593_947_533_000
    condition = SqlFilter("at = @at", {"@at": ZonelessTime(moment)})
    bus = topic(s=rule("r", condition))
    bus.restart()
    bus.send("t", envelope("then", properties={"at": Timestamp(moment)}), envelope("later", properties={"at": 1}))
    assert bus.receive("t/Subscriptions/s").bodies == ["then"]
    (kept,) = bus.entity("t/Subscriptions/s").description.rules  # type: ignore[union-attr] # a subscription
    assert isinstance(kept.filter, SqlFilter)
    assert type(kept.filter.parameters["@at"]) is ZonelessTime
