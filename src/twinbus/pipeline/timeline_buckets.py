"""The timeline of a report from counts by bucket. Needs no Spark.

`timeline` counts on Spark. From the counts that it stores for all time, `stored_timeline` makes the timeline of any
window of whole hours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

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


def stored_timeline(rows: Sequence[Mapping[str, Any]], since: int, until: int) -> Timeline | None:
    """Returns the timeline of whole hours from the stored counts of all time; None if nothing happened in them.

    Both ends of the window are in milliseconds.
    """
    inside = [row for row in rows if since <= row["bucket"] < until and row["first"] is not None]
    if not inside:
        return None
    first, last = min(row["first"] for row in inside), max(row["last"] for row in inside)
    width = width_for(first, last, BUCKETS)
    start = first - first % width
    by_bucket: dict[int, Counter[str]] = {}
    for row in rows:
        bucket = max(row["bucket"] - row["bucket"] % width, start - width)
        if bucket > last:
            continue
        names = COUNTS if bucket >= start else ("came", "left")
        by_bucket.setdefault(bucket, Counter()).update({name: row[name] for name in names})
    return timeline_of(by_bucket, first, last, width)
