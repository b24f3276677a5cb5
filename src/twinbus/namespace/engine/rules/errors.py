"""Errors of rules: a text that cannot be parsed, or a message that a rule cannot be evaluated on."""

from __future__ import annotations


class RuleSyntaxError(ValueError):
    """The text of a filter or action is wrong. Raised when the rule is created. The first `position` is 1."""

    def __init__(self, fault: str, position: int, text: str) -> None:
        line = text.count("\n", 0, position - 1) + 1
        column = position - text.rfind("\n", 0, position - 1) - 1
        where = f"column {column}" if "\n" not in text else f"line {line}, column {column}"
        super().__init__(f"At {where}: {fault}")
        self.position = position


class RuleEvaluationError(Exception):
    """A rule cannot be evaluated on this message, for example because types differ or a divisor is zero."""
