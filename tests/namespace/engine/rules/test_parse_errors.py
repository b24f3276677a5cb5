"""Syntax errors name their position, and what is expected there."""

from __future__ import annotations

import pytest

from twinbus.namespace.engine.rules.actions import compile_action
from twinbus.namespace.engine.rules.compiler import compile_filter
from twinbus.namespace.engine.rules.errors import RuleSyntaxError

FILTERS = [
    ("", 1, "a condition is expected, not the end"),
    ("   ", 4, "a condition is expected, not the end"),
    ("color", 6, "a comparison or an operator is expected, not the end"),
    ("color =", 8, "a value is expected, not the end"),
    ("color = = 1", 9, "a value is expected, not '='"),
    ("color == 1", 8, "a value is expected, not '='"),
    ("= 1", 1, "a condition is expected, not '='"),
    ("color = 'a' AND", 16, "a condition is expected, not the end"),
    ("color = 'a' AND OR 1=1", 17, "a condition is expected, not 'OR'"),
    ("a AND b = 1", 3, "a comparison or an operator is expected, not 'AND'"),
    ("color = 'a' color", 13, "AND, OR, an operator or the end is expected, not 'color'"),
    ("(color = 'a'", 13, ")"),
    ("color = 'a')", 12, "the end is expected, not ')'"),
    ("color = 'a", 9, "the string that begins here does not end"),
    ("[color = 1", 1, "the name that begins here does not end"),
    ('"color = 1', 1, "the name that begins here does not end"),
    ("_color = 1", 1, "a name begins with a letter"),
    ("color # 1", 7, "'#' has no meaning here"),
    ("[] = 1", 1, "the name of a property cannot be empty"),
    ("color IS 1", 10, "NOT or NULL is expected, not '1'"),
    ("1 IS NULL", 3, "is expected, not 'IS'"),
    ("color IN 1", 10, "( is expected, not '1'"),
    ("color IN ()", 11, "a value is expected, not ')'"),
    ("color IN (1, )", 14, "a value is expected, not ')'"),
    ("color NOT 1", 11, "IN or LIKE is expected, not '1'"),
    ("color LIKE", 11, "a value is expected, not the end"),
    ("EXISTS color", 8, "( is expected, not 'color'"),
    ("EXISTS('color')", 8, "a property is expected"),
    ("NOT", 4, "a condition is expected, not the end"),
    ("order.id = 1", 1, "'order' is no scope: it is sys or user"),
    ("a.b.c = 1", 4, "is expected, not '.'"),
    ("upper(color) = 'A'", 1, "there is no function 'upper'"),
    ("newid(1) = 'A'", 1, "newid() takes no argument, not 1"),
    ("p() = 'A'", 1, "p() takes one argument, the name of a property, not 0"),
    ("9223372036854775808 = n", 1, "does not fit a 64-bit integer"),
    ("SET a = 1", 1, "a condition is expected, not 'SET'"),
    ("and = 1", 1, "a condition is expected, not 'and'"),
    ("n = " + "-" * 300 + "k", 155, "nested more than 150 deep"),
]

ACTIONS = [
    ("", 1, "REMOVE or SET is expected, not the end"),
    ("color = 1", 1, "REMOVE or SET is expected, not 'color'"),
    ("SET color", 10, "is expected, not the end"),
    ("SET color =", 12, "a value is expected, not the end"),
    ("SET color <> 1", 11, "is expected, not '<>'"),
    ("SET 'color' = 1", 5, "a property is expected, not ''color''"),
    ("SET a = 1, b = 2", 10, "is expected, not ','"),
    ("SET a = 1 b = 2", 11, "is expected, not 'b'"),
    ("REMOVE", 7, "a property is expected, not the end"),
    ("REMOVE a = 1", 10, "is expected, not '='"),
    ("SET a = b = c", 11, "is expected, not '='"),
    ("SET sys.Nope = 1", 9, "there is no system property 'Nope'"),
    ("SET sys.SequenceNumber = 1", 9, "the system property 'SequenceNumber' cannot be changed"),
    ("REMOVE sys.Size", 12, "the system property 'Size' cannot be changed"),
    ("REMOVE sys.MessageId", 12, "the system property 'MessageId' cannot be removed"),
    ("SET a = 1;" * 33, 321, "an action has at most 32 statements"),
]


@pytest.mark.parametrize(("text", "position", "expected"), FILTERS)
def test_an_invalid_filter_is_refused_with_its_position(text: str, position: int, expected: str) -> None:
    with pytest.raises(RuleSyntaxError) as caught:
        compile_filter(text, {})
    assert expected in str(caught.value)
    assert caught.value.position == position


@pytest.mark.parametrize(("text", "position", "expected"), ACTIONS)
def test_an_invalid_action_is_refused_with_its_position(text: str, position: int, expected: str) -> None:
    with pytest.raises(RuleSyntaxError) as caught:
        compile_action(text, {})
    assert expected in str(caught.value)
    assert caught.value.position == position


def test_a_syntax_error_in_a_text_of_several_lines_names_the_line() -> None:
    with pytest.raises(RuleSyntaxError, match="At line 2, column 9: a value is expected"):
        compile_filter("color = 'a'\n AND n =", {})
