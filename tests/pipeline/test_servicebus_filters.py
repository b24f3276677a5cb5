"""D1: which filters of Spark the data source applies, and that it applies them as SQL does."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from twinbus.connect import MessageState
from twinbus.pipeline.servicebus.filters import MessageFilter, is_applicable
from twinbus.pipeline.servicebus.message_marks import MessageMarks

_NUMBER, _TIME, _STATE = ("sequence_number",), ("enqueued_time",), ("state",)
_NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def _marks(number: int | None = 7, state: MessageState | None = MessageState.ACTIVE) -> MessageMarks:
    return MessageMarks(number, int(_NOON.timestamp() * 1000), state, None)


@pytest.mark.parametrize(
    ("condition", "applied", "is_met"),
    [
        (EqualTo(_NUMBER, 7), True, True),
        (EqualTo(_NUMBER, 8), True, False),
        (EqualNullSafe(_NUMBER, 7), True, True),
        (GreaterThan(_NUMBER, 7), True, False),
        (GreaterThanOrEqual(_NUMBER, 7), True, True),
        (LessThan(_NUMBER, 7), True, False),
        (LessThanOrEqual(_NUMBER, 7), True, True),
        (In(_NUMBER, (1, 7)), True, True),
        (Not(EqualTo(_NUMBER, 7)), True, False),
        (EqualTo(_STATE, "active"), True, True),
        (Not(In(_STATE, ("active", "deferred"))), True, False),
        (LessThanOrEqual(_TIME, _NOON), True, True),
        (GreaterThan(_TIME, _NOON), True, False),
        (EqualTo(_TIME, _NOON.replace(tzinfo=None)), False, None),
        (EqualNullSafe(_NUMBER, None), False, None),
        (In(_NUMBER, (1, None)), False, None),
        (IsNotNull(_NUMBER), False, None),
        (StringStartsWith(_STATE, "act"), False, None),
        (Not(IsNotNull(_STATE)), False, None),
        (EqualTo(("subject",), "x"), False, None),
        (EqualTo(("state", "active"), "x"), False, None),
    ],
)
def test_d1_a_condition_is_applied_as_in_sql_or_left_to_spark(
    condition: Filter, applied: bool, is_met: bool | None
) -> None:
    assert is_applicable(condition) is applied
    if applied:
        assert MessageFilter((condition,)).matches(_marks()) is is_met


def test_d1_a_value_that_is_null_meets_no_condition() -> None:
    unreadable = _marks(number=None, state=None)
    for condition in (EqualTo(_NUMBER, 7), Not(EqualTo(_NUMBER, 7)), Not(EqualTo(_STATE, "active"))):
        assert not MessageFilter((condition,)).matches(unreadable)
    assert MessageFilter().matches(unreadable)


_numbers = st.integers(0, 12)
_conditions = st.one_of(
    st.builds(
        lambda kind, value: kind(_NUMBER, value),
        st.sampled_from([EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual]),
        _numbers,
    ),
    st.builds(lambda values: In(_NUMBER, tuple(values)), st.lists(_numbers, max_size=4)),
    st.builds(lambda value: Not(EqualTo(_NUMBER, value)), _numbers),
)


@given(st.lists(_conditions, max_size=4))
def test_d1_no_number_that_meets_the_conditions_is_outside_the_limits(conditions: list[Any]) -> None:
    wanted = MessageFilter(tuple(conditions))
    meeting = [number for number in range(20) if wanted.matches(_marks(number))]
    limit, listed = wanted.highest, wanted.numbers
    assert all(wanted.lowest <= number and (limit is None or number <= limit) for number in meeting)
    assert listed is None or listed >= set(meeting)
