"""X1: the work of rules on one message is bounded, whatever rules and message say.

Work is counted, not measured: bench/hostile_rules.py has the times.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.namespace.engine.bus import Bus, envelope
from tests.namespace.engine.rules.messages import RAW, view
from twinbus.amqp import Sections, build_message, split_sections
from twinbus.namespace.engine import registry
from twinbus.namespace.engine.descriptions import (
    CorrelationFilter,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.rules import like
from twinbus.namespace.engine.rules.actions import MessageDraft
from twinbus.namespace.engine.rules.like import LikePattern
from twinbus.namespace.engine.rules.message_view import MAX_STEPS, MAX_TOPIC_STEPS, MessageView, by_lower_name
from twinbus.namespace.engine.rules.ruleset import RuleSet, Selection
from twinbus.values import Condition

TOO_MUCH = f"take more than {MAX_STEPS} steps"


# --- LIKE ------------------------------------------------------------------------------------------------------------


def by_regular_expression(pattern: str, value: str) -> bool:
    parts = {"%": ".*", "_": "."}
    return re.fullmatch("".join(parts.get(one) or re.escape(one) for one in pattern), value, re.DOTALL) is not None


patterns = st.text("ab_%\n", max_size=12)
texts = st.text("ab\n", max_size=20)


@given(patterns, texts)
def test_like_matches_what_a_regular_expression_matches(pattern: str, value: str) -> None:
    assert LikePattern(pattern).matches(value) is by_regular_expression(pattern, value)


@given(st.lists(st.text("ab_", min_size=1, max_size=6), min_size=1, max_size=3), st.text("ab", max_size=40))
def test_like_finds_the_same_in_long_texts(pieces: list[str], value: str) -> None:
    """All pieces, also the short ones, are searched as in long texts."""
    pattern = "%" + "%".join(pieces) + "%"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(like, "_SHORT", -1)
        assert LikePattern(pattern).matches(value) is by_regular_expression(pattern, value)


def test_like_finds_a_piece_in_the_longest_text() -> None:
    value = "ab" * 15_000 + "axb" + "ab" * 500
    assert LikePattern("%a_b%").matches(value)
    assert LikePattern("%" + "ab" * 100 + "a_b" + "ab" * 100 + "%").matches(value)
    assert not LikePattern("%" + "ab" * 300 + "a_b_" + "ab" * 200 + "%").matches(value)


@given(st.text("ab_%", max_size=60), st.integers(1, 16_000))
def test_x1_the_counted_work_of_like_is_linear_in_the_text(pattern: str, length: int) -> None:
    compiled = LikePattern(pattern)
    assert compiled.steps(2 * length) <= 2 * compiled.steps(length) + 2 * len(pattern)
    assert compiled.steps(length) <= len(pattern) * (2 + length // 2048) + 2 * length


@given(st.text("ab_%", max_size=40), st.text("ab", max_size=300))
def test_x1_searching_by_bits_looks_at_each_character_once(pattern: str, value: str) -> None:
    looked_at = 0

    class Counting(dict[str, int]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal looked_at
            looked_at += 1
            return super().get(key, default)

    compiled = LikePattern(pattern)
    for piece in compiled._middle:
        masks, others = piece._masks
        piece.__dict__["_masks"] = (Counting(masks), others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(like, "_SHORT", -1)
        assert compiled.matches(value) is by_regular_expression(pattern, value)
    assert looked_at <= len(value)


class CountedText(str):
    """A text that counts how often a place in it is tried."""

    tried = 0

    def startswith(self, *arguments: Any) -> bool:
        self.tried += 1
        return super().startswith(*arguments)


@pytest.mark.parametrize(("pattern", "length"), [("%a_b%", 1365), ("%a_a_a_a_a_a_a_b%", 270), ("%aa_ab%", 800)])
def test_x1_a_short_text_is_not_tried_at_each_place(pattern: str, length: int) -> None:
    text = CountedText("a" * length)
    assert not LikePattern(pattern).matches(text)
    assert text.tried < 50
    assert LikePattern(pattern).matches("a" * length + pattern.strip("%").replace("_", "x"))


# --- the work of all rules of a subscription -------------------------------------------------------------------------


def rule(number: int, expression: str, action: str | None = None) -> RuleDescription:
    return RuleDescription(f"rule-{number}", SqlFilter(expression), None if action is None else SqlAction(action))


def often(term: str) -> str:
    return " OR ".join([term] * (1000 // (len(term) + 4)))


LONG = "a" * 32_000
MANY = {f"k{number}": number for number in range(4000)}


@pytest.mark.parametrize(
    ("expression", "action", "properties", "annotations"),
    [
        (often("t LIKE '%a_b%'"), None, {"t": LONG}, {}),
        (often("t LIKE p"), None, {"t": LONG, "p": "%" + "a_" * 500 + "b"}, {}),
        (often("t LIKE p + 'x%'"), None, {"t": LONG, "p": "%" + "a_" * 500 + "b"}, {}),
        (often("t + t = 'x'"), None, {"t": LONG}, {}),
        (often("t = u"), None, {"t": LONG, "u": LONG[:-1] + "b"}, {}),
        ("t IN (" + ",".join("u" * 400) + ")", None, {"t": LONG, "u": LONG[:-1] + "b"}, {}),
        (often("p(t) = 1"), None, {"t": LONG}, {}),
        ("1 = 1", "; ".join(f"SET a{number} = k{number}" for number in range(32)), MANY, {}),
        ("1 = 1", "; ".join(f"REMOVE k{n}; SET a{n} = k1" for n in range(16)), {**MANY, "K1": 1}, {}),
        ("1 = 1", "SET sys.PartitionKey = 'x'", {}, {f"x-opt-{number}": number for number in range(3000)}),
    ],
)
def test_x1_rules_that_take_too_much_work_end_with_an_error(
    expression: str, action: str | None, properties: dict[str, Any], annotations: dict[str, Any]
) -> None:
    raw = build_message(application_properties=properties, message_annotations=annotations or None)
    rules = RuleSet([rule(number, expression, action) for number in range(40)])
    one = view(raw)
    selection = rules.select(one)
    assert not selection.unchanged
    assert TOO_MUCH in (selection.error or "")
    assert one.steps_left < 0
    assert len(selection.copies) < 40


def test_x1_a_subscription_whose_rules_took_too_much_harms_no_other() -> None:
    raw = build_message(application_properties={"t": LONG, "size": 5})
    slow = [rule(number, often("t LIKE '%a_b%'")) for number in range(20)]
    one = view(raw)
    assert RuleSet(slow).select(one).error is not None
    assert RuleSet([rule(0, "t LIKE '%a_b%' OR size = 5")]).select(one).unchanged
    mixed = RuleSet([*slow, rule(20, "size = 5")]).select(one)
    assert (mixed.unchanged, mixed.error) == (True, None), "rules that cost nothing are still evaluated"


def test_x1_ordinary_rules_take_a_small_part_of_what_they_may() -> None:
    rules = RuleSet([rule(number, f"label LIKE '%{number}_x%' OR color + 'x' = 'y'") for number in range(2000)])
    one = view(build_message(application_properties={"label": "a label of usual length", "color": "blue"}))
    assert rules.select(one).error is None
    assert one.steps_left > MAX_STEPS * 0.6


LARGEST = build_message(data=b"x" * 250_000)


def test_x1_copies_for_actions_take_a_bounded_memory() -> None:
    rules = RuleSet([rule(number, "1 = 1", "SET a = 1") for number in range(200)])
    selection = rules.select(view(LARGEST))
    assert TOO_MUCH in (selection.error or "")
    assert sum(len(copy.raw) for copy in selection.copies) <= MAX_STEPS * 64


def test_x1_what_an_action_adds_to_its_copy_counts_too() -> None:
    parameters = {"@long": LONG[:30_000]}
    action = SqlAction("SET a = @long; SET b = @long", parameters)
    rules = RuleSet([RuleDescription(f"rule-{number}", SqlFilter("1 = 1"), action) for number in range(300)])
    selection = rules.select(view(build_message(data=b"x")))
    assert TOO_MUCH in (selection.error or "")
    assert sum(len(copy.raw) for copy in selection.copies) <= MAX_STEPS * 64 + 2 * 30_000


def test_x1_thirty_rules_with_an_action_may_each_copy_a_message_of_250_kb() -> None:
    rules = RuleSet([rule(number, "1 = 1", "SET a = 1; SET sys.Label = 'x'") for number in range(30)])
    selection = rules.select(view(LARGEST))
    assert (len(selection.copies), selection.error) == (30, None)


class CountingSections(Sections):
    """Counts how often a section is decoded."""

    __slots__ = ("decoded",)

    decoded: Counter[str]

    def __getattribute__(self, name: str) -> Any:
        if name.endswith(("properties", "annotations")):
            object.__getattribute__(self, "decoded")[name] += 1
        return super().__getattribute__(name)


def counted(raw: bytes) -> tuple[MessageView, Counter[str]]:
    found = split_sections(raw)
    sections = CountingSections(found.raw, found.spans, found.body)
    sections.decoded = Counter()
    one = view(raw)
    one._sections = sections
    return one, sections.decoded


@pytest.mark.parametrize("damage", [b"", b"\xff"])
def test_x1_each_section_is_decoded_once_for_all_rules(damage: bytes) -> None:
    raw = RAW.replace(b"blue", damage + b"blue"[len(damage) :]).replace(b"Red", damage + b"Red"[len(damage) :])
    raw = raw.replace(b"p1", damage + b"p1"[len(damage) :])
    one, decoded = counted(raw)
    expressions = ("color = 'x' AND size = 2", "sys.Label = 'x' AND sys.To = 'y'", "sys.PartitionKey = 'x'")
    rules = RuleSet(
        [
            *(rule(number, text) for number, text in enumerate(expressions * 5)),
            *(rule(number, "1 = 1", "SET a = 1; SET sys.PartitionKey = 'x'") for number in range(20, 25)),
        ]
    )
    selection = rules.select(one)
    assert (selection.error is not None) is bool(damage)
    assert decoded == {"properties": 1, "application_properties": 1, "message_annotations": 1}


names = st.sampled_from(["a", "A", "b", "c", "Color", "color", "COLOR"])
sent = st.dictionaries(names, st.integers(0, 9) | st.none())


@given(sent, st.lists(st.tuples(names, st.integers(0, 3)), max_size=12))
def test_a_draft_reads_what_its_statements_wrote(properties: dict[str, Any], statements: list[tuple[str, int]]) -> None:
    draft = MessageDraft(view(build_message(application_properties=properties)))
    for name, choice in statements:
        if choice == 0:
            draft.remove_user(name)
        elif choice == 1:
            draft.set_user(name, None)
        else:
            draft.set_user(name, choice)
        assert (draft.user if draft.user is not None else draft.read_user()) == by_lower_name(draft._application)


def test_x1_correlation_filters_take_a_bounded_work_together() -> None:
    names = [f"k{number}" for number in range(100)]
    filters = [CorrelationFilter(properties=dict.fromkeys(names, number)) for number in range(3_000)]
    one = view(build_message(application_properties=dict.fromkeys(names, -1)))
    selection = RuleSet([RuleDescription(f"r{n}", each) for n, each in enumerate(filters)]).select(one)
    assert not selection.unchanged
    assert TOO_MUCH in (selection.error or "")


@pytest.mark.thorough
def test_x1_a_hundred_thousand_correlation_filters_are_not_too_much() -> None:
    wanted = CorrelationFilter(properties={"color": "red"})
    rules = [RuleDescription(f"r{number}", wanted) for number in range(100_000)]
    one = view(build_message(application_properties={"color": "blue"}))
    assert RuleSet(rules).select(one).error is None


# --- the work of all subscriptions of a topic ------------------------------------------------------------------------


def topic(*rules_of: list[RuleDescription], dead_lettering: bool = False) -> Bus:
    """Return a topic with a subscription for each list of rules."""
    described = [
        SubscriptionDescription(
            topic="t", name=str(number), rules=tuple(rules), dead_lettering_on_filter_errors=dead_lettering
        )
        for number, rules in enumerate(rules_of)
    ]
    return Bus(TopicDescription(path="t"), *described)


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that the rules of each subscription took."""
    steps: list[int] = []
    select = RuleSet.select

    def counting(rules: RuleSet, seen: MessageView, most_steps: int = MAX_STEPS) -> Selection:
        found = select(rules, seen, most_steps)
        steps.append(seen.most_steps - max(0, seen.steps_left))
        return found

    monkeypatch.setattr(RuleSet, "select", counting)
    return steps


def test_x1_the_work_of_all_subscriptions_on_one_message_is_bounded_and_each_has_its_share(spent: list[int]) -> None:
    slow = [rule(number, often("t LIKE '%a_b%'")) for number in range(20)]
    few = [rule(0, "t LIKE '%a_b%' OR label LIKE '%ny_x%'")]
    bus = topic(*[slow] * 40, few, dead_lettering=True)
    bus.send("t", envelope("x", properties={"t": LONG[:2_000], "label": "the tiny x"}))
    assert MAX_TOPIC_STEPS // 2 < sum(spent) <= MAX_TOPIC_STEPS
    assert bus.counts("t/Subscriptions/40") == (1, 0, 0, 0), "the last one still has its share"
    (dead,) = bus.peek("t/Subscriptions/39", dead=True)
    assert b"FilterException" in (dead.overlay or b"")
    share = MAX_TOPIC_STEPS // 2 // 41
    assert f"take more than {share} steps" in str(dead.overlay)


def test_x1_a_few_subscriptions_may_each_do_what_one_may(spent: list[int]) -> None:
    slow = [rule(number, often("t LIKE '%a_b%'")) for number in range(20)]
    topic(*[slow] * 8).send("t", envelope("x", properties={"t": LONG}))
    assert spent == [MAX_STEPS] * 8


@pytest.mark.thorough
def test_x1_as_many_ordinary_rules_as_the_service_allows_take_a_small_part_of_what_they_may(spent: list[int]) -> None:
    """2,000 subscriptions, each with one rule with SQL and fifty correlation filters."""
    correlations = [
        RuleDescription(f"c{number}", CorrelationFilter(properties={"color": f"c{number}", "size": number}))
        for number in range(50)
    ]
    bus = topic(*([rule(0, f"label LIKE '%{each}_x%' OR color + 'x' = 'y'"), *correlations] for each in range(2_000)))
    bus.send("t", envelope("x", properties={"label": "a label of usual length", "color": "blue", "size": 99}))
    assert len(spent) == 2_000
    assert sum(spent) < MAX_TOPIC_STEPS * 0.2
    assert max(spent) < MAX_TOPIC_STEPS // 2 // 2_000, "no subscription needs more than its share"


def test_x1_the_number_of_subscriptions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_SUBSCRIPTIONS", 2)
    bus = topic([rule(0, "a = 1")], [rule(0, "a = 1")])
    refusal = bus.namespace.create(SubscriptionDescription(topic="t", name="c"), 0)
    assert isinstance(refusal, Refusal)
    assert refusal.condition is Condition.RESOURCE_LIMIT_EXCEEDED
    assert "The topic 't' has 2 subscriptions. It cannot have more." in refusal.description
