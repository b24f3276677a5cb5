"""Numbers and times as text, and that no text can add markup."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.documents import Document
from twinbus.pipeline import WriterClock
from twinbus.report.charts import area
from twinbus.report.formatting import (
    axis_label,
    axis_top,
    clock_text,
    duration,
    money,
    number,
    rate_unit,
    time_marks,
    time_text,
)
from twinbus.report.markup import Markup, element


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "–"), (0.0, "0 ms"), (0.25, "250 ms"), (0.9996, "1 s"), (4.2, "4.2 s"), (9.96, "10 s"), (59.7, "1 min"),
        (61, "1 min 1 s"), (3600, "1 h"), (7500, "2 h 5 min"), (86_399.9, "1 d"), (90_000, "1 d 1 h"), (-2, "−2 s"),
    ],
)  # fmt: skip
def test_a_duration_has_at_most_two_units(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("clock", "said"),
    [
        (WriterClock("w", 1200.0), "The clock of writer w is 20 min ahead. Its times are corrected."),
        (WriterClock("w", -61.0), "The clock of writer w is 1 min 1 s behind. Its times are corrected."),
        (
            WriterClock("w", -1200.0, 0.0),
            "The clock of writer w was set while it ran: it was between 20 min behind and 0 ms ahead. "
            "Its times are not corrected; latencies do not depend on them.",
        ),
    ],
)
def test_l5_a_wrong_clock_is_named_with_its_writer(clock: WriterClock, said: str) -> None:
    assert clock_text(clock) == said


def test_numbers_and_money_are_short_and_keep_their_size() -> None:
    assert [number(one) for one in (0, 1234567, 0.1234, 12.0, 1234.5)] == ["0", "1,234,567", "0.123", "12", "1,234"]
    assert [axis_label(one) for one in (0.5, 20, 1500, 2e6)] == ["0.5", "20", "1.5k", "2M"]
    assert [money(Decimal(one)) for one in ("0", "0.001", "0.016", "1234.5")] == ["0", "< 0.01", "0.02", "1,234.50"]
    assert [rate_unit(one)[0] for one in (12, 0.5, 0.001, 0)] == ["s", "min", "h", "day"]


@given(st.floats(1e-6, 1e15))
def test_the_top_of_an_axis_is_not_below_what_is_drawn_nor_far_above(most: float) -> None:
    assert most * 0.99999 <= axis_top(most) <= most * 2.01


@given(st.integers(-(2**62), 2**62), st.integers(1, 2**60))
def test_an_axis_has_few_marks_within_it_whatever_instants_a_ledger_holds(first: int, length: int) -> None:
    found = time_marks(first, first + length, 8)
    assert len(found) <= 9
    assert all(first <= mark <= first + length for mark, _ in found)
    assert time_text(first)


def test_marks_show_the_time_and_at_the_start_of_a_day_the_date() -> None:
    midnight = 1_790_035_200_000
    hour = 3_600_000
    assert [said for _, said in time_marks(midnight - hour, midnight + hour, 4)] == [
        "23:00",
        "23:30",
        "22 Sep",
        "00:30",
        "01:00",
    ]


def test_an_area_goes_in_steps_along_its_roof_and_back_along_its_ground() -> None:
    assert area([0, 0, 0], [1, 1, 2], 2) == "M0 100V50H2V0H3V100H0Z"
    assert area([1, 0], [1, 1], 1) == "M0 0V0H2V100H1V0H0Z", "a layer on another"


def test_a_small_value_stays_visible() -> None:
    assert area([0], [1], 1000) == "M0 100V98.5H1V100H0Z"


@given(st.text(), st.text())
def test_text_is_escaped_in_elements_and_attributes(child: str, value: str) -> None:
    found = Document(element("p", child, title=value))
    assert (found.tags, found.handlers, found.unbalanced) == (["p"], [], [])
    str(element("p", child, title=value)).encode("utf-8")


def test_markup_is_kept_and_invisible_characters_are_marked() -> None:
    assert element("p", Markup("<b>x</b>"), hidden=True, id=None) == "<p hidden><b>x</b></p>"
    assert (
        element("p", "a\u202eb\x00\ud800")
        == "<p>a\N{REPLACEMENT CHARACTER}b" + "\N{REPLACEMENT CHARACTER}" * 2 + "</p>"
    )
    assert len(element("p", "x" * 10_000)) < 400
