"""The time window of an answer, in milliseconds. `twinbus.pipeline.TimeWindow` is the same for Spark."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

HOUR: Final = 3_600_000
_DAY: Final = 24 * HOUR
_EARLIEST: Final = -(2**62)
_LATEST: Final = 2**62


@dataclass(frozen=True, slots=True)
class HourWindow:
    """A span of time: `since` is in the window, `until` is not. Milliseconds since the epoch; None: no limit."""

    since: int | None = None
    until: int | None = None

    @classmethod
    def of(cls, since: datetime | None, until: datetime | None) -> HourWindow | None:
        """Returns the window between two times; None if it does not begin and end on whole hours (UTC)."""
        ends = [None if one is None else round(one.timestamp() * 1000) for one in (since, until)]
        if any(one is not None and one % HOUR for one in ends) or any(
            one is not None and one.microsecond for one in (since, until)
        ):
            return None
        return cls(*ends)

    @property
    def limits(self) -> tuple[int, int]:
        """Both ends as numbers."""
        return _EARLIEST if self.since is None else self.since, _LATEST if self.until is None else self.until

    def whole_days(self) -> HourWindow:
        """Returns the window of all days (UTC) that overlap this one."""
        since = None if self.since is None else self.since - self.since % _DAY
        return HourWindow(since, None if self.until is None else self.until + -self.until % _DAY)

    def days(self) -> tuple[date, date]:
        """Returns the first day of `whole_days`, and the day after its last."""
        whole = self.whole_days()
        first = date.min if whole.since is None else _day(whole.since)
        return first, date.max if whole.until is None else _day(whole.until)


def _day(instant: int) -> date:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=instant)).date()
