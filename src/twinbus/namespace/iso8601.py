"""Durations and instants in ISO 8601, as the management API and configuration files write them.

The service stores durations and instants in units of 100 ns, Twinbus in milliseconds. The longest duration of the
service means "never" and is None in Twinbus.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

LONGEST: Final = "P10675199DT2H48M5.4775807S"

_LONGEST_MS: Final = (2**63 - 1) // 10_000
_SECOND: Final = 1000
_MINUTE: Final = 60 * _SECOND
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NOT_YET: Final = "0001-01-01T00:00:00Z"

_PATTERN: Final = re.compile(
    r"(?P<sign>[-+])?P(?=[0-9T])(?:([0-9]{1,9})Y)?(?:([0-9]{1,9})M)?(?:([0-9]{1,9})W)?(?:([0-9]{1,9})D)?"
    r"(?:T(?=[0-9])(?:([0-9]{1,12})H)?(?:([0-9]{1,12})M)?(?:([0-9]{1,12})(?:\.([0-9]{1,12}))?S)?)?"
)
# .NET gives a year and a month these lengths in a TimeSpan.
_UNITS: Final = (365 * _DAY, 30 * _DAY, 7 * _DAY, _DAY, _HOUR, _MINUTE, _SECOND)


def parse_duration(text: str) -> int | None:
    """Return the duration in milliseconds, rounded, or None for the longest duration. Raises ValueError.

    The result is also None for a duration that differs from the longest duration by less than a second: the Python
    client reads the longest duration into a float, and sends it back with an error of up to a millisecond.
    """
    found = _PATTERN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not an ISO 8601 duration such as PT30S or P14D")
    *wholes, fraction = found.groups()[1:]
    total = sum(int(count) * unit for count, unit in zip(wholes, _UNITS, strict=True) if count)
    if fraction:
        total += (int(fraction[:7].ljust(7, "0")) + 5_000) // 10_000
    if found["sign"] == "-" and total:
        raise ValueError(f"{text!r} is a negative duration")
    if total > _LONGEST_MS + _SECOND:
        raise ValueError(f"{text!r} is longer than {LONGEST}")
    return None if total >= _LONGEST_MS - _SECOND else total


def render_duration(milliseconds: int | None) -> str:
    """Return the shortest text for a duration, as the service writes it: PT1M, P14D, PT0.5S."""
    if milliseconds is None:
        return LONGEST
    days, rest = divmod(milliseconds, _DAY)
    hours, rest = divmod(rest, _HOUR)
    minutes, rest = divmod(rest, _MINUTE)
    seconds, rest = divmod(rest, _SECOND)
    fraction = f".{rest:03d}".rstrip("0") if rest else ""
    time = (f"{hours}H" if hours else "") + (f"{minutes}M" if minutes else "")
    if seconds or fraction:
        time += f"{seconds}{fraction}S"
    day = f"{days}D" if days else ""
    return f"P{day}T{time}" if time else f"P{day}" if day else "PT0S"


def render_instant(milliseconds: int) -> str:
    """Return the text for an instant. Zero means "not yet"; the service writes the year 1 for it."""
    if milliseconds <= 0:
        return _NOT_YET
    instant = _EPOCH + timedelta(milliseconds=milliseconds)
    return instant.strftime("%Y-%m-%dT%H:%M:%S.") + f"{milliseconds % _SECOND:03d}Z"
