"""The span of time that a job is asked about, and which days of the tables it has to read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

_EARLIEST: Final = -(2**62)
_LATEST: Final = 2**62
# Clocks of many machines: an effect may seem to come before its cause.
_MARGIN: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """From `since` on, and before `until`; None: without an end on that side."""

    since: datetime | None = None
    until: datetime | None = None

    @property
    def whole(self) -> bool:
        return self.since is None and self.until is None

    def milliseconds(self) -> tuple[int, int]:
        since = _EARLIEST if self.since is None else _milliseconds(self.since)
        return since, _LATEST if self.until is None else _milliseconds(self.until)

    def holds(self, at: Column) -> Column:
        since, until = self.milliseconds()
        return (at >= since) & (at < until)

    def days(self) -> Column:
        """For what happens within the window."""
        last = F.lit(True) if self.until is None else F.col("day") <= F.lit(self.until.astimezone(UTC).date())
        return last & (F.lit(True) if self.since is None else F.col("day") >= F.lit(self.since.astimezone(UTC).date()))

    def days_onward(self) -> Column:
        """For messages of the window: what becomes of them is told on later days, and seldom a little before."""
        if self.since is None:
            return F.lit(True)
        return F.col("day") >= F.lit((self.since - _MARGIN).astimezone(UTC).date())


def _milliseconds(instant: datetime) -> int:
    return int(instant.timestamp() * 1000)
