"""The time window that a job is asked about, and the days of the tables that it has to read for it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

_EARLIEST: Final = -(2**62)
_LATEST: Final = 2**62
# The clocks of machines differ: an effect may have an earlier time than its cause.
_MARGIN: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """The time from `since` until before `until`. None: no limit on that side."""

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
        last = F.lit(True) if self.until is None else F.col("day") <= F.lit(self.until.astimezone(UTC).date())
        return last & (F.lit(True) if self.since is None else F.col("day") >= F.lit(self.since.astimezone(UTC).date()))

    def days_onward(self) -> Column:
        """Returns the condition on `day` for all entries of messages of the window: later days, and a margin before."""
        if self.since is None:
            return F.lit(True)
        return F.col("day") >= F.lit((self.since - _MARGIN).astimezone(UTC).date())


def _milliseconds(instant: datetime) -> int:
    return int(instant.timestamp() * 1000)
