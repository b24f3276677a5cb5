"""Texts and messages made to break the rule language: each is refused, or fails alone, in bounded time."""

from __future__ import annotations

import pytest

from twinbus.amqp import build_message, read_routing_fields
from twinbus.namespace.engine.descriptions import RuleDescription, SqlFilter
from twinbus.namespace.engine.rules.compiler import compile_filter
from twinbus.namespace.engine.rules.errors import RuleEvaluationError, RuleSyntaxError
from twinbus.namespace.engine.rules.ruleset import RuleSet

from .messages import view


def test_a_like_pattern_from_a_message_has_a_maximum_length() -> None:
    run = compile_filter("t LIKE pattern", {}).evaluate
    text = {"t": "a" * 32_000}
    assert run(view(build_message(application_properties={**text, "pattern": "%" + "_" * 1_022 + "b"}))) is False
    with pytest.raises(RuleEvaluationError, match="the pattern of LIKE is longer than 1024 characters"):
        run(view(build_message(application_properties={**text, "pattern": "%" + "_" * 1_023 + "b"})))


@pytest.mark.parametrize(
    "section",
    [
        b"\x00\x53\x74\xc1\x05\x02\xa1\x01\xff\x40",  # application properties whose key is no UTF-8
        b"\x00\x53\x73\xc0\x06\x04\x40\x40\x40\x54\x05",  # properties whose subject is a number
    ],
)
@pytest.mark.parametrize("expression", ["color = 'blue' AND sys.Label = 'x'", "sys.Label = 'x' OR EXISTS(color)"])
def test_a_message_that_was_accepted_but_cannot_be_read_is_an_error_of_evaluation(
    section: bytes, expression: str
) -> None:
    raw = section + build_message(data=b"x")
    read_routing_fields(raw)
    rules = RuleSet([RuleDescription("r", SqlFilter("color = 'blue'")), RuleDescription("s", SqlFilter(expression))])
    selection = rules.select(view(raw))
    assert not selection.unchanged
    assert "the message cannot be read" in (selection.error or "")


@pytest.mark.parametrize("text", ["(" * 300 + "1=1" + ")" * 300, "NOT " * 140 + "1=1", " OR ".join(["n = 1"] * 100)])
def test_a_deeply_nested_or_long_expression_is_evaluated(text: str) -> None:
    assert compile_filter(text, {}).evaluate(view()) in (True, None)


@pytest.mark.parametrize(
    "text", ["NOT " * 200 + "1=1", "n = " + "+".join("n" * 200), "p(" * 200 + "'x'" + ")" * 200 + "=1"]
)
def test_an_expression_nested_too_deep_is_refused(text: str) -> None:
    with pytest.raises(RuleSyntaxError, match="nested more than 150 deep"):
        compile_filter(text, {})
