"""The timeline of a report from counts by bucket. Needs no Spark.

`timeline` counts on Spark. It also stores counts of all time, and `twinbus.answers` adds them up to the buckets of a
window.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Final

from twinbus.pipeline.report_data import BUCKET_WIDTHS, Timeline

BUCKETS: Final = 240
"""A timeline has at most this number of buckets."""
RATES: Final = ("direct", "diverted", "returned", "failed")
COUNTS: Final = (*RATES, "came", "left")


def width_for(first: int, last: int, most: int) -> int:
    """Returns the smallest bucket width with which at most `most` buckets cover both times."""
    return next(width for width in _widths() if last // width - first // width < most)


def _widths() -> tuple[int, ...]:
    longest = BUCKET_WIDTHS[-1]
    return (*BUCKET_WIDTHS, *(longest * 10**power for power in range(1, 12)))


def timeline_of(by_bucket: Mapping[int, Mapping[str, int]], first: int, last: int, width: int) -> Timeline:
    """Returns the timeline from the counts of each bucket. The bucket before the first one has all earlier changes."""
    start = first - first % width
    buckets = range(start, last + 1, width)
    counts = {name: [by_bucket[bucket][name] if bucket in by_bucket else 0 for bucket in buckets] for name in COUNTS}
    before = by_bucket.get(start - width)
    waiting = accumulate(
        (came - left for came, left in zip(counts["came"], counts["left"], strict=True)),
        initial=before["came"] - before["left"] if before else 0,
    )
    return Timeline(start, width, {name: counts[name] for name in RATES}, list(waiting)[1:])
