"""Which copies the rules of a subscription make of one message; correlation, true and false filters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.amqp import build_message, split_sections
from twinbus.namespace.engine.descriptions import (
    CorrelationFilter,
    FalseFilter,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.namespace.engine.rules.errors import RuleSyntaxError
from twinbus.namespace.engine.rules.ruleset import RuleSet, Selection
from twinbus.values import Int, Timestamp

from .messages import GUID, NOW, view


def rule(name: str, condition: RuleFilter | str, action: str | None = None) -> RuleDescription:
    chosen = SqlFilter(condition) if isinstance(condition, str) else condition
    return RuleDescription(name, chosen, None if action is None else SqlAction(action))


def select(*rules: RuleDescription) -> Selection:
    return RuleSet(rules).select(view())


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        (TrueFilter(), True),
        (FalseFilter(), False),
        (SqlFilter("color = 'blue'"), True),
        (SqlFilter("color = 'red'"), False),
        (SqlFilter("missing = 1"), False),
        (SqlFilter("NOT missing = 1"), False),
        (SqlFilter("color = @c", {"@c": "blue"}), True),
        (CorrelationFilter(), True),
        (CorrelationFilter(label="Red"), True),
        (CorrelationFilter(label="red"), False),
        (CorrelationFilter(label="Red", to="Store5"), True),
        (CorrelationFilter(label="Red", to="Store6"), False),
        (CorrelationFilter(message_id=str(GUID)), True),
        (CorrelationFilter(correlation_id="c-1", session_id="s1", content_type="text/plain"), True),
        (CorrelationFilter(reply_to="r"), False),
        (CorrelationFilter(reply_to_session_id="r"), False),
        (CorrelationFilter(properties={"color": "blue"}), True),
        (CorrelationFilter(properties={"COLOR": "blue"}), True),
        (CorrelationFilter(properties={"color": "Blue"}), False),
        (CorrelationFilter(properties={"color": "blue", "quantity": 10}), True),
        (CorrelationFilter(properties={"color": "blue", "quantity": 11}), False),
        (CorrelationFilter(properties={"quantity": Int(10)}), True),
        (CorrelationFilter(properties={"quantity": 10.0}), True),
        (CorrelationFilter(properties={"quantity": "10"}), False),
        (CorrelationFilter(properties={"digits": 10}), False),
        (CorrelationFilter(properties={"yes": True}), True),
        (CorrelationFilter(properties={"yes": 1}), False),
        (CorrelationFilter(properties={"when": Timestamp(NOW)}), True),
        (CorrelationFilter(properties={"when": NOW}), False),
        (CorrelationFilter(properties={"id": GUID}), True),
        (CorrelationFilter(properties={"missing": "x"}), False),
        (CorrelationFilter(properties={"nothing": None}), False),
        (CorrelationFilter(label="Red", properties={"color": "red"}), False),
    ],
)
def test_a_filter_selects_the_message_or_not(condition: RuleFilter, taken: bool) -> None:
    assert select(rule("r", condition)) == Selection(taken)


def test_without_rules_nothing_is_taken() -> None:
    assert select() == Selection(False)


def test_rules_without_action_give_one_copy_together() -> None:
    assert select(
        rule("a", "1=1 AND color = 'blue'"), rule("b", TrueFilter()), rule("c", "quantity = 10")
    ) == Selection(True)


def test_each_rule_with_an_action_gives_a_copy_of_its_own() -> None:
    """The example of the documentation: five rules that match, two of them with actions, make three messages."""
    found = select(
        rule("one", TrueFilter()),
        rule("two", "color = 'blue'"),
        rule("three", CorrelationFilter(label="Red")),
        rule("four", TrueFilter(), "SET x = 4"),
        rule("five", "quantity = 10", "SET x = 5; SET sys.SessionId = 'five'"),
        rule("six", "quantity = 11", "SET x = 6"),
        rule("seven", FalseFilter(), "SET x = 7"),
    )
    told: list[Any] = []
    for copy in found.copies:
        properties = split_sections(copy.raw).application_properties
        told.append((properties["RuleName"], properties["x"], copy.session))
    assert (found.unchanged, told, found.error) == (True, [("four", 4, "s1"), ("five", 5, "five")], None)


@pytest.mark.parametrize("good", ["quantity = 10", "color = 'blue'"])
def test_if_one_rule_matches_the_failure_of_another_does_not_matter(good: str) -> None:
    bad = rule("bad", "color = 5")
    assert select(bad, rule("good", good)) == select(rule("good", good), bad) == Selection(True)


def test_the_selection_reports_the_first_rule_that_cannot_be_evaluated() -> None:
    found = select(rule("no", "color = 'red'"), rule("bad", "color = 5"), rule("worse", "shape = 6"))
    assert not found.unchanged
    assert found.error == "Rule 'bad' could not be evaluated: a string cannot be compared (=) with an integer."


def test_an_action_that_fails_makes_no_copy() -> None:
    found = select(rule("bad", TrueFilter(), "SET sys.MessageId = missing"), rule("good", TrueFilter(), "SET a = 1"))
    assert [split_sections(copy.raw).application_properties["RuleName"] for copy in found.copies] == ["good"]
    assert found.error is not None
    assert "'bad'" in found.error


def test_rules_that_stay_are_not_compiled_again() -> None:
    parameters = {"@c": "blue"}
    kept = RuleDescription("kept", SqlFilter("color = @c", parameters))
    before = RuleSet([kept, rule("gone", TrueFilter())])
    parameters["@c"] = "red"
    assert RuleSet([rule("new", FalseFilter()), kept], before).select(view()).unchanged
    assert not RuleSet([kept]).select(view()).unchanged


MANY = [f"color = '{color}' AND quantity > {most}" for color in ("red", "blue", "green") for most in (5, 50)]


@given(st.lists(st.sampled_from([*MANY, "color = 'blue'", "quantity = 10", "size = 's'", "missing = 'a'"]), max_size=6))
@pytest.mark.parametrize(
    "properties",
    [
        {"color": "blue", "quantity": 10},
        {"color": "red", "quantity": 1, "size": "s"},
        {"color": 5, "quantity": 10},
        {"quantity": 10},
        {"color": None, "quantity": "many"},
        {"color": "blue", "quantity": "many"},
        {},
    ],
)
def test_rules_indexed_by_a_text_select_the_same_as_each_rule_alone(
    properties: dict[str, Any], filters: list[str]
) -> None:
    raw = build_message(application_properties=properties)
    alone = [RuleSet([rule("r", text)]).select(view(raw)) for text in filters]
    together = RuleSet([rule("r", text) for text in filters]).select(view(raw))
    assert together.unchanged == any(one.unchanged for one in alone)
    failed = any(one.error is not None for one in alone)
    assert (together.error is not None) == (failed and not together.unchanged)


@pytest.mark.parametrize("always", [TrueFilter(), SqlFilter("1=1"), SqlFilter(" 2 > 1 ")])
def test_a_rule_set_that_takes_everything_is_recognized_without_a_message(always: RuleFilter) -> None:
    assert RuleSet([rule("a", "color = 'red'"), rule("b", always)]).takes_everything
    assert not RuleSet([rule("b", always), rule("c", TrueFilter(), "SET a = 1")]).takes_everything


@pytest.mark.parametrize("wrong", [rule("r", "color ="), rule("r", TrueFilter(), "SET")])
def test_a_rule_that_cannot_be_understood_is_refused(wrong: RuleDescription) -> None:
    with pytest.raises(RuleSyntaxError):
        RuleSet([wrong])
