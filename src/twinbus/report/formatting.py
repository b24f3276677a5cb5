"""Numbers, durations, times (UTC) and money as text, and the marks of an axis."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from twinbus.pipeline import BUCKET_WIDTHS, WriterClock

_FIRST_TIME: Final = -62_135_596_800_000
_LAST_TIME: Final = 253_402_300_799_000
_MINUTE, _DAY, _YEAR = 60_000, 86_400_000, 365 * 86_400_000
_SPANS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def number(value: int | float) -> str:
    """Returns a number as text: an integer or a value from 1000 on without decimals, other values with three digits."""
    if isinstance(value, int) or value == int(value) or abs(value) >= 1000:
        return f"{round(value):,}"
    return f"{value:.3g}"


def axis_label(value: float) -> str:
    """Returns a number as a short text for an axis, such as 1.5k or 2M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def duration(seconds: float | None) -> str:
    """Returns a duration in at most two units: 250 ms, 4.2 s, 3 min 20 s, 2 d 5 h."""
    if seconds is None:
        return "–"
    if seconds < 0:
        return f"−{duration(-seconds)}"
    if seconds < 0.9995:
        return f"{round(seconds * 1000)} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    left = round(seconds)
    found: list[tuple[int, str]] = []
    for length, unit in _SPANS:
        if left >= length or found:
            found.append((left // length, unit))
            left %= length
    return " ".join(f"{count:,} {unit}" for count, unit in found[:2] if count)


def clock_text(clock: WriterClock) -> str:
    """Returns a sentence about a writer whose clock differs from the broker's (L5)."""

    def ahead(seconds: float) -> str:
        return f"{duration(abs(seconds))} {'ahead' if seconds >= 0 else 'behind'}"

    if clock.most is None:
        return f"The clock of writer {clock.writer} is {ahead(clock.least)}. Its times are corrected."
    return (
        f"The clock of writer {clock.writer} was set while it ran: it was between {ahead(clock.least)} and "
        f"{ahead(clock.most)}. Its times are not corrected; latencies do not depend on them."
    )


def unknown_clock_text(messages: int) -> str:
    """Returns a sentence about messages without a latency (L5)."""
    return (
        f"{messages:,} messages are left out: the clocks of the machines that diverted and returned them contradict "
        "each other, and the ledger does not have the broker's."
    )


def money(amount: Decimal) -> str:
    return "0" if not amount else "< 0.01" if amount < Decimal("0.01") else f"{amount:,.2f}"


def time_text(milliseconds: int, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Returns a time as text.

    For a number outside of the calendar (years 1 to 9999), returns its first or last time.
    """
    return datetime.fromtimestamp(min(max(milliseconds, _FIRST_TIME), _LAST_TIME) / 1000, UTC).strftime(form)


def axis_top(most: float) -> float:
    """Returns the top of an axis: the smallest round number that is not below `most`.

    Half of it is a round number too.
    """
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(factor * power for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if factor * power >= most * 0.999999)


def time_marks(first: int, last: int, most: int) -> list[tuple[int, str]]:
    """Returns times for the marks of an axis, each with its text: the date at the start of a day, otherwise the time.

    There are about `most` marks at most.
    """
    years = math.ceil((last - first) / most / _YEAR) * _YEAR
    step = next((step for step in BUCKET_WIDTHS if (last - first) / step <= most), years)
    form = "%H:%M:%S" if step < _MINUTE else "%H:%M"
    day = "%d %b" if step < _YEAR else "%b %Y"
    found = range(first + -first % step, last + 1, step)
    return [(mark, time_text(mark, day if mark % _DAY == 0 else form)) for mark in found]


def rate_unit(most_a_second: float) -> tuple[str, float]:
    """Returns the time unit in which a rate is shown, and the length of this unit in seconds."""
    for unit, seconds in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if most_a_second * seconds >= 1:
            return unit, seconds
    return "day", 86_400.0
