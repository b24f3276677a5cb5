"""Which copies the rules of a subscription make of one message; correlation filters and the two that need no text."""

from __future__ import annotations

from typing import Any

import pytest

from twinbus.amqp.sections import split
from twinbus.amqp.types import Int, Timestamp
from twinbus.namespace.engine.rules.descriptions import (
    CorrelationFilter,
    FalseFilter,
    Filter,
    RuleDescription,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.namespace.engine.rules.errors import RuleSyntaxError
from twinbus.namespace.engine.rules.ruleset import RuleSet, Selection

from .messages import GUID, NOW, view


def rule(name: str, condition: Filter | str, action: str | None = None) -> RuleDescription:
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
def test_a_filter_takes_the_message_or_not(condition: Filter, taken: bool) -> None:
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
        properties = split(copy.raw).application_properties
        told.append((properties["RuleName"], properties["x"], copy.session))
    assert (found.as_it_is, told, found.fault) == (True, [("four", 4, "s1"), ("five", 5, "five")], None)


def test_a_rule_that_cannot_be_evaluated_is_told_and_the_others_count() -> None:
    found = select(rule("bad", "color = 5"), rule("good", "quantity = 10"))
    assert (found.as_it_is, found.copies) == (True, ())
    assert found.fault is not None
    assert "'bad'" in found.fault
    assert "cannot be compared" in found.fault


def test_an_action_that_fails_makes_no_copy() -> None:
    found = select(rule("bad", TrueFilter(), "SET sys.MessageId = missing"), rule("good", TrueFilter(), "SET a = 1"))
    assert [split(copy.raw).application_properties["RuleName"] for copy in found.copies] == ["good"]
    assert found.fault is not None
    assert "'bad'" in found.fault


def test_a_fault_without_a_match_takes_nothing() -> None:
    assert not select(rule("bad", "color = 5"), rule("no", "quantity = 11")).as_it_is


@pytest.mark.parametrize("always", [TrueFilter(), SqlFilter("1=1"), SqlFilter(" 2 > 1 ")])
def test_what_takes_everything_is_known_without_a_message(always: Filter) -> None:
    assert RuleSet([rule("a", "color = 'red'"), rule("b", always)]).takes_everything
    assert not RuleSet([rule("b", always), rule("c", TrueFilter(), "SET a = 1")]).takes_everything


@pytest.mark.parametrize("wrong", [rule("r", "color ="), rule("r", TrueFilter(), "SET")])
def test_a_rule_that_cannot_be_understood_is_refused(wrong: RuleDescription) -> None:
    with pytest.raises(RuleSyntaxError):
        RuleSet([wrong])
