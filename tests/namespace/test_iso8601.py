"""Durations of the management API, both ways."""

import datetime
import re
from contextlib import suppress

import pytest
from azure.servicebus.management._generated._serialization import Deserializer, Serializer
from hypothesis import given
from hypothesis import strategies as st

from twinbus.namespace.iso8601 import LONGEST, parse_duration, render_duration, render_instant

DAY = 86_400_000


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("PT0S", 0),
        ("PT30S", 30_000),
        ("PT1M", 60_000),
        ("PT60S", 60_000),
        ("PT1H30M0.5S", 5_400_500),
        ("P14D", 14 * DAY),
        ("P1DT1S", DAY + 1000),
        ("P2W", 14 * DAY),
        ("P1Y", 365 * DAY),
        ("P1M", 30 * DAY),
        ("PT0.0000001S", 0),
        ("PT0.0005S", 1),
        ("PT0.0004999S", 0),
        ("PT1.9999999S", 2000),
        ("  PT5S\n", 5000),
        ("-PT0S", 0),
        (LONGEST, None),
        # What Python's client makes of the longest when it sends back what it read.
        ("P10675199DT2H48M5.477581S", None),
        ("P10675199DT2H48M5.47758S", None),
        ("P10675199DT10085.477478S", None),
        ("P10675199DT2H48M4S", 922_337_203_684_000),
        ("P10675198D", 10_675_198 * DAY),
    ],
)
def test_a_duration_is_read_to_the_millisecond(text: str, milliseconds: int | None) -> None:
    assert parse_duration(text) == milliseconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "P", "PT", "P1", "1S", "PT1", "PTS", "PT1S1M", "P1H", "PT1.S", "PT.5S", "PT1,5S", "soon", "P-1D", "P1DT"),
        *(
            "-PT1S",
            "-" + LONGEST,
            "P10675200D",
            "P99999999999D",
            "PT9999999999999S",
            "PT\u0661S",
            "PT1S\x00",
            "PT1S 1S",
        ),
    ],
)
def test_what_is_no_duration_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_duration(text)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "PT0S"),
        (1, "PT0.001S"),
        (500, "PT0.5S"),
        (30_000, "PT30S"),
        (60_000, "PT1M"),
        (90_000, "PT1M30S"),
        (3_600_000, "PT1H"),
        (DAY, "P1D"),
        (14 * DAY, "P14D"),
        (DAY + 1, "P1DT0.001S"),
        (None, LONGEST),
    ],
)
def test_a_duration_is_written_as_the_service_writes_it(milliseconds: int | None, text: str) -> None:
    assert render_duration(milliseconds) == text


@given(st.none() | st.integers(0, 922_337_203_684_000))
def test_a_duration_reads_back(milliseconds: int | None) -> None:
    assert parse_duration(render_duration(milliseconds)) == milliseconds


@given(st.timedeltas(min_value=datetime.timedelta(0)))
def test_durations_of_the_python_client_are_read(duration: datetime.timedelta) -> None:
    text = Serializer().serialize_data(duration, "duration")  # type: ignore[no-untyped-call]  # the SDK's own
    whole = duration // datetime.timedelta(milliseconds=1)
    if whole <= 922_337_203_684_000:
        read = parse_duration(text)
        assert read is not None
        assert abs(read - whole) <= 1


@given(st.integers(0, 10**12))
def test_durations_are_read_by_the_python_client(milliseconds: int) -> None:
    read = Deserializer.deserialize_duration(render_duration(milliseconds))  # type: ignore[no-untyped-call]  # theirs
    assert read == datetime.timedelta(milliseconds=milliseconds)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0001-01-01T00:00:00Z"),
        (1, "1970-01-01T00:00:00.001Z"),
        (1_700_000_000_123, "2023-11-14T22:13:20.123Z"),
    ],
)
def test_instants_are_written_in_utc(milliseconds: int, text: str) -> None:
    assert render_instant(milliseconds) == text


@given(st.text(max_size=30))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert (parse_duration(text) or 0) >= 0
