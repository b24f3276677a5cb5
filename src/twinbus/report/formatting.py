"""Numbers, sizes, spans and instants (UTC) as a person reads them, and where an axis has its marks."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from twinbus.pipeline import BUCKET_WIDTHS

_FIRST: Final = -62_135_596_800_000
_LAST: Final = 253_402_300_799_000
_MINUTE, _DAY, _YEAR = 60_000, 86_400_000, 365 * 86_400_000
_SPANS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def number(value: int | float) -> str:
    """Whole where it is large, with three digits where it is small."""
    if isinstance(value, int) or value == int(value) or abs(value) >= 1000:
        return f"{round(value):,}"
    return f"{value:.3g}"


def short(value: float) -> str:
    """For an axis."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def span(seconds: float | None) -> str:
    """At most two units: 250 ms, 4.2 s, 3 min 20 s, 2 d 5 h."""
    if seconds is None:
        return "–"
    if seconds < 0:
        return f"−{span(-seconds)}"
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


def money(amount: Decimal) -> str:
    return "0" if not amount else "< 0.01" if amount < Decimal("0.01") else f"{amount:,.2f}"


def at(milliseconds: int, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Any number may stand in a ledger; beyond the calendar, its end is told."""
    return datetime.fromtimestamp(min(max(milliseconds, _FIRST), _LAST) / 1000, UTC).strftime(form)


def ceiling(most: float) -> float:
    """The least number with one digit, or 1.5 of them, that is not below it: it halves well."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(factor * power for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if factor * power >= most * 0.999999)


def marks(first: int, last: int, most: int) -> list[tuple[int, str]]:
    """Instants of an axis, at most so many, each with its text: the date where a day begins, else the time."""
    years = math.ceil((last - first) / most / _YEAR) * _YEAR
    step = next((step for step in BUCKET_WIDTHS if (last - first) / step <= most), years)
    form = "%H:%M:%S" if step < _MINUTE else "%H:%M"
    day = "%d %b" if step < _YEAR else "%b %Y"
    found = range(first + -first % step, last + 1, step)
    return [(mark, at(mark, day if mark % _DAY == 0 else form)) for mark in found]


def rate_unit(most_a_second: float) -> tuple[str, float]:
    """In which unit rates are told, and how many seconds it has."""
    for unit, seconds in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if most_a_second * seconds >= 1:
            return unit, seconds
    return "day", 86_400.0
