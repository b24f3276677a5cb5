"""Windows of whole hours, percentiles of merged histograms, and the timeline of a window (D7)."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from twinbus.answers import HourWindow, Results
from twinbus.answers.results import Histogram, percentile
from twinbus.pipeline.report_data import BUCKET_WIDTHS, Timeline
from twinbus.pipeline.result_tables import RESULTS, TIMELINE
from twinbus.pipeline.snapshots import Snapshots, TablesVersion
from twinbus.pipeline.table_storage import TableStorage
from twinbus.pipeline.timeline_buckets import BUCKETS, COUNTS

DAY = datetime(2026, 9, 22, tzinfo=UTC)
MIDNIGHT = int(DAY.timestamp() * 1000)
HOUR = 3_600_000


@pytest.mark.parametrize(
    ("since", "until", "is_whole"),
    [
        (None, None, True),
        (DAY, None, True),
        (DAY, DAY.replace(hour=7), True),
        (DAY.replace(minute=30), None, False),
        (None, DAY.replace(second=1), False),
        (DAY.replace(microsecond=1), None, False),
        # 5:30 hours before UTC.
        (DAY.replace(tzinfo=timezone(timedelta(hours=5, minutes=30))), None, False),
    ],
)
def test_d7_only_windows_of_whole_hours_are_answered_from_results(
    since: datetime | None, until: datetime | None, is_whole: bool
) -> None:
    assert (HourWindow.of(since, until) is not None) == is_whole


def test_d7_a_window_of_hours_has_the_days_that_overlap_it() -> None:
    window = HourWindow.of(DAY + timedelta(hours=7), DAY + timedelta(hours=25))
    assert window is not None
    assert window.days() == (date(2026, 9, 22), date(2026, 9, 24))
    assert window.whole_days() == HourWindow(MIDNIGHT, MIDNIGHT + 48 * HOUR)
    assert HourWindow().days() == (date.min, date.max)
    assert HourWindow(until=MIDNIGHT).days() == (date.min, date(2026, 9, 22)), "midnight is not in the window"


def exact(values: list[int], share: float) -> float:
    """The percentile of sorted values, with linear interpolation."""
    place = (len(values) - 1) * share
    low, rest = int(place), place - int(place)
    high = values[min(low + 1, len(values) - 1)]
    return (values[low] + rest * (high - values[low])) / 1000


@given(st.lists(st.lists(st.integers(0, 10**9), max_size=20), max_size=5), st.floats(0, 1))
def test_d7_merged_histograms_have_the_percentiles_of_all_values(hours: list[list[int]], share: float) -> None:
    found = Histogram()
    for values in hours:
        counts = {value: values.count(value) for value in sorted(values)}
        row = {"diverted": len(values), "returned": len(values), "unknown_clock": 0, "total": sum(values)}
        found.add({**row, "milliseconds": [*counts], "counts": [*counts.values()]})
    everything = sorted(value for values in hours for value in values)
    result = percentile(sorted(found.counts.items()), share)
    if not everything:
        assert result is None
        assert found.distribution()["mean"] is None
        return
    assert result == pytest.approx(exact(everything, share), rel=1e-9)
    row = found.distribution()
    assert row["diverted"] == len(everything)
    assert (row["least"], row["most"]) == (everything[0] / 1000, everything[-1] / 1000)
    assert row["mean"] == pytest.approx(sum(everything) / len(everything) / 1000, rel=1e-9)


def test_d7_stored_buckets_of_an_hour_lie_within_one_bucket_of_every_wider_timeline() -> None:
    from twinbus.pipeline.timeline import STORED_WIDTHS  # noqa: PLC0415 - needs Spark

    assert [*STORED_WIDTHS] == [width for width in BUCKET_WIDTHS if width <= HOUR // BUCKETS], "an hour needs no more"
    for width, stored in STORED_WIDTHS.items():
        assert all(wider % stored == 0 for wider in BUCKET_WIDTHS if wider >= width)
    assert all(first < second for first, second in pairwise(BUCKET_WIDTHS))


def stored(folder: Path, rows: list[dict[str, int | None]]) -> Results:
    """Results with these buckets of the timeline."""
    storage = TableStorage(folder)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    write_deltalake(storage.uri(RESULTS + TIMELINE), pa.table(columns))
    Snapshots(storage).add(TablesVersion(1, {RESULTS + TIMELINE: 0}))
    return Results(storage)


def bucket(at: int, **counts: int) -> dict[str, int | None]:
    is_send = bool(counts.keys() - {"came", "left"})
    instant = at if is_send else None
    return {"bucket": at, "first": instant, "last": instant, **dict.fromkeys(COUNTS, 0), **counts}


def rates(found: Timeline) -> dict[str, list[int]]:
    return {name: list(counts) for name, counts in found.counts.items() if any(counts)}


def test_d7_the_depth_at_the_begin_of_a_window_has_what_came_before(tmp_path: Path) -> None:
    results = stored(
        tmp_path,
        [
            bucket(-5 * HOUR - 1000, diverted=2, came=2),
            bucket(-HOUR, returned=2, left=2),
            bucket(MIDNIGHT - 2 * HOUR, diverted=5, came=5),
            bucket(MIDNIGHT - HOUR, returned=1, left=1),
            bucket(MIDNIGHT, direct=2),
            bucket(MIDNIGHT + 1000, returned=3, left=3),
            bucket(MIDNIGHT + HOUR, diverted=7, came=7),
        ],
    )
    found = results.timeline(HourWindow(MIDNIGHT, MIDNIGHT + HOUR))
    assert found is not None
    assert (found.start, found.width, list(found.waiting)) == (MIDNIGHT, 1000, [4, 1])
    assert rates(found) == {"direct": [2, 0], "returned": [0, 3]}
    assert results.timeline(HourWindow(MIDNIGHT + 2 * HOUR, MIDNIGHT + 3 * HOUR)) is None
    early = results.timeline(HourWindow(until=0))
    assert early is not None
    assert (early.start, early.width, early.waiting[0], early.waiting[-1]) == (-5 * HOUR - 120_000, 120_000, 2, 0)


def test_d7_wide_buckets_at_both_ends_of_a_window_count_only_what_is_in_it(tmp_path: Path) -> None:
    since, until = MIDNIGHT + HOUR, MIDNIGHT + 30 * 24 * HOUR + HOUR
    results = stored(
        tmp_path,
        [
            bucket(MIDNIGHT, direct=1, diverted=9, came=9),
            bucket(since, direct=10, left=4),
            bucket(until - 15_000, direct=100),
            bucket(until, direct=1000, left=5),
        ],
    )
    found = results.timeline(HourWindow(since, until))
    assert found is not None
    assert (found.start, found.width, len(found.waiting)) == (MIDNIGHT, 6 * HOUR, 121)
    assert rates(found) == {"direct": [10, *[0] * 119, 100]}
    assert set(found.waiting) == {5}
