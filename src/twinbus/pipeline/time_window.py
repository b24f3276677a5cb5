"""The time window of a job's result, and the days of the tables that the job has to read for this window."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

HOUR: Final = 3_600_000
"""Milliseconds."""
_EARLIEST: Final = -(2**62)
_LATEST: Final = 2**62
# The clocks of machines differ: the return of a message may have an earlier time than its diversion.
_MARGIN: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A span of time: `since` is in the window, `until` is not. None means no limit at this end."""

    since: datetime | None = None
    until: datetime | None = None

    @property
    def is_unlimited(self) -> bool:
        return self.since is None and self.until is None

    def milliseconds(self) -> tuple[int, int]:
        """Returns both ends in milliseconds since the epoch."""
        since = _EARLIEST if self.since is None else _milliseconds(self.since)
        return since, _LATEST if self.until is None else _milliseconds(self.until)

    def contains(self, at: Column) -> Column:
        """Returns the condition that a time in milliseconds is within the window."""
        since, until = self.milliseconds()
        return (at >= since) & (at < until)

    def days(self) -> Column:
        """Returns the condition on `day` for entries within the window."""
        whole = self.whole_days()
        last = F.lit(True) if whole.until is None else F.col("day") < F.lit(whole.until.date())
        return last & (F.lit(True) if whole.since is None else F.col("day") >= F.lit(whole.since.date()))

    def whole_days(self) -> TimeWindow:
        """Returns the window of all days (UTC) that overlap this one. `until` itself is not in the window."""
        since = None if self.since is None else _midnight(self.since)
        if self.until is None:
            return TimeWindow(since)
        return TimeWindow(since, _midnight(self.until - timedelta(microseconds=1)) + timedelta(days=1))

    def days_onward(self) -> Column:
        """Returns the condition on `day` for all entries about messages of the window.

        Such entries may be on any day after the window, and up to one day before it.
        """
        if self.since is None:
            return F.lit(True)
        return F.col("day") >= F.lit((self.since - _MARGIN).astimezone(UTC).date())


def _milliseconds(instant: datetime) -> int:
    return int(instant.timestamp() * 1000)


def _midnight(instant: datetime) -> datetime:
    return instant.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def hour_of(at: str) -> Column:
    """Returns the begin of the hour (UTC) of a column of times, in milliseconds since the epoch."""
    return F.expr(f"{at} - pmod({at}, {HOUR}L)")
