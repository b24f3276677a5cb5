"""Filters of a batch read that the data source applies itself, so that fewer messages are read or become rows.

Spark offers the conditions of a query as filters. This module applies those on `sequence_number`, `enqueued_time` and
`state`, and leaves all others to Spark. A filter on `sequence_number` also limits which messages are peeked at. So does
a filter on `session_id` if whole sessions are read; Spark applies it, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    Not,
)

from twinbus.pipeline.servicebus.message_marks import STATE_TEXTS, MessageMarks

_SEQUENCE_NUMBER: Final = "sequence_number"
_COMPARISONS: Final[Mapping[type[Filter], Callable[[Any, Any], bool]]] = {
    EqualTo: operator.eq,
    EqualNullSafe: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    In: lambda value, values: value in values,
}
# The columns with filters that the source applies: the type of their values, and the value of a message.
_COLUMNS: Final[Mapping[str, tuple[type, Callable[[MessageMarks], Any]]]] = {
    _SEQUENCE_NUMBER: (int, lambda marks: marks.number),
    "enqueued_time": (datetime, lambda marks: marks.enqueued_time),
    "state": (str, lambda marks: None if marks.state is None else STATE_TEXTS[marks.state]),
}


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """The conditions that a message must meet to be read. Without conditions, every message is read."""

    conditions: tuple[Filter, ...] = ()

    def matches(self, marks: MessageMarks) -> bool:
        """Returns whether the message meets all conditions. As in SQL, a value that is null meets none."""
        return all(_meets(condition, marks) for condition in self.conditions)

    @property
    def lowest(self) -> int:
        """The lowest sequence number that can meet the conditions."""
        bounds = {EqualTo: 0, EqualNullSafe: 0, GreaterThanOrEqual: 0, GreaterThan: 1}
        return max((one.value + bounds[type(one)] for one in self._on_number(bounds)), default=0)

    @property
    def highest(self) -> int | None:
        """The highest sequence number that can meet the conditions; None if there is no limit."""
        bounds = {EqualTo: 0, EqualNullSafe: 0, LessThanOrEqual: 0, LessThan: -1}
        return min((one.value + bounds[type(one)] for one in self._on_number(bounds)), default=None)

    @property
    def numbers(self) -> frozenset[int] | None:
        """The only sequence numbers that can meet the conditions; None if the conditions list no numbers."""
        listed = [frozenset(one.value) for one in self._on_number((In,))]
        return frozenset.intersection(*listed) if listed else None

    def _on_number(self, kinds: Iterable[type[Filter]]) -> list[Any]:
        chosen = tuple(kinds)
        return [one for one in self.conditions if type(one) in chosen and _column(one) == _SEQUENCE_NUMBER]


def is_applicable(condition: Filter) -> bool:
    """Returns whether a MessageFilter can apply this condition exactly as Spark would."""
    if isinstance(condition, Not):
        return is_applicable(condition.child)
    if type(condition) not in _COMPARISONS or (column := _COLUMNS.get(_column(condition))) is None:
        return False
    value: Any = condition.value  # type: ignore[attr-defined]  # all filters in _COMPARISONS have one
    values = value if isinstance(condition, In) else (value,)
    # A time without a zone depends on the time zone of the session: Spark compares it.
    return all(isinstance(one, column[0]) and not (isinstance(one, datetime) and one.tzinfo is None) for one in values)


def sessions_of_condition(condition: Filter) -> frozenset[str] | None:
    """Returns the only sessions whose messages can meet the condition; None if the condition lists no sessions."""
    if _column(condition) != "session_id" or not isinstance(condition, EqualTo | EqualNullSafe | In):
        return None
    values: Sequence[Any] = condition.value if isinstance(condition, In) else (condition.value,)
    return frozenset(values) if all(isinstance(value, str) for value in values) else None


def _meets(condition: Filter, marks: MessageMarks) -> bool:
    if isinstance(condition, Not):
        return _value(condition.child, marks) is not None and not _meets(condition.child, marks)
    value = _value(condition, marks)
    return value is not None and _COMPARISONS[type(condition)](value, condition.value)  # type: ignore[attr-defined]


def _value(condition: Filter, marks: MessageMarks) -> Any:
    return _COLUMNS[_column(condition)][1](marks)


def _column(condition: Filter) -> str:
    """Returns the name of the column of a condition; an empty text for a field of a column."""
    path: tuple[str, ...] = getattr(condition, "attribute", ())
    return path[0] if len(path) == 1 else ""
