"""What can be wrong with a rule: its text, which is told when it is made; or a message that it makes no sense of."""

from __future__ import annotations


class RuleSyntaxError(ValueError):
    """The text of a rule cannot be understood. `position` counts characters from 1."""

    def __init__(self, fault: str, position: int, text: str) -> None:
        line = text.count("\n", 0, position - 1) + 1
        column = position - text.rfind("\n", 0, position - 1) - 1
        where = f"column {column}" if "\n" not in text else f"line {line}, column {column}"
        super().__init__(f"At {where}: {fault}")
        self.position = position


class RuleEvaluationError(Exception):
    """A rule cannot be evaluated on this message: types that do not go together, a division by zero."""
