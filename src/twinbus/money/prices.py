"""Prices as data (M3): a table with a date and an origin, read from TOML, ours or the user's own.

What a table must hold is decided here, and what an amount costs by a scale. No price is written in code.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NoReturn, Self

from twinbus.errors import OperatorError

_START: Final = "Start from a copy of the table that comes with Twinbus: twinbus cost prices --write FILE."


class PricesError(OperatorError):
    """A table of prices that cannot be used; the text names the file and the place in it."""


@dataclass(frozen=True, slots=True)
class PriceBand:
    """Up to so much in a month, from where the band before it ended; None is without end."""

    up_to: Decimal | None
    price: Decimal


@dataclass(frozen=True, slots=True)
class PriceScale:
    """`price` of each band is for every `per`."""

    per: int
    bands: tuple[PriceBand, ...]

    def cost(self, amount: Decimal, months: Decimal = Decimal(1)) -> Decimal:
        """Of so much, spread evenly over so many months; at least one."""
        months = max(months, Decimal(1))
        left, begin, total = amount / months, Decimal(0), Decimal(0)
        for band in self.bands:
            part = left if band.up_to is None else min(left, band.up_to - begin)
            total += part * band.price / self.per
            left -= part
            begin = band.up_to or begin
        return total * months


@dataclass(frozen=True, slots=True)
class Tier:
    """`connections` is None where they are not charged; `connection_hours` is what hourly peaks are divided by."""

    name: str
    topics: bool
    largest_message: int
    base_per_month: Decimal
    messaging_unit_per_hour: Decimal
    operations: PriceScale | None
    connections: PriceScale | None
    connection_hours: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prices:
    """`Prices.default()` came with this version; `Prices.load(path)` is a user's own."""

    date: date
    currency: str
    region: str
    origin: str
    hours_in_month: int
    notes: tuple[str, ...]
    tiers: Mapping[str, Tier]
    bandwidth: Mapping[str, PriceScale]
    bandwidth_notes: Mapping[str, tuple[str, ...]]
    geo_replication: Mapping[str, Decimal]
    file: str

    @classmethod
    def default(cls) -> Self:
        return cls.parse(default_price_text(), "the table that comes with Twinbus")

    @classmethod
    def load(cls, path: Path | None) -> Self:
        """None: the default. PricesError where the file cannot be read or used."""
        if path is None:
            return cls.default()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
            raise PricesError(f"the prices in {path} cannot be read: {why}", _START) from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, file: str) -> Self:
        try:
            found = _Table(file, "", tomllib.loads(text, parse_float=Decimal))
        except tomllib.TOMLDecodeError as error:
            raise PricesError(f"the prices in {file} are no TOML: {error}", _START) from error
        bandwidth = found.tables("bandwidth")
        made = cls(
            date=found.day("date"),
            currency=found.text("currency"),
            region=found.text("region"),
            origin=found.text("origin"),
            hours_in_month=found.whole("hours_in_month"),
            notes=found.texts("notes"),
            tiers={name: _tier(name, table) for name, table in found.tables("tiers").items()},
            bandwidth={name: _scale(table) for name, table in bandwidth.items()},
            bandwidth_notes={name: table.texts("notes") for name, table in bandwidth.items()},
            geo_replication=_zones(found.table("geo_replication")),
            file=file,
        )
        for table in bandwidth.values():
            table.end()
        found.end()
        return made

    def tier(self, name: str) -> Tier:
        if name not in self.tiers:
            raise PricesError(f"{self.file} has no tier {name!r}", f"It has {', '.join(self.tiers)}.")
        return self.tiers[name]

    def zone(self, name: str) -> PriceScale | None:
        """The scale of bandwidth; None for `none`."""
        if name != "none" and name not in self.bandwidth:
            raise PricesError(f"{self.file} has no bandwidth {name!r}", f"It has none, {', '.join(self.bandwidth)}.")
        return self.bandwidth.get(name)


def default_price_text() -> str:
    """The table that comes with Twinbus, to start one's own from."""
    return (files("twinbus.money") / "prices.toml").read_text(encoding="utf-8")


# --- reading ---------------------------------------------------------------------------------------------------------


class _Table:
    """A table of a file; what is asked for is taken out, so that what nobody asked for is found."""

    def __init__(self, file: str, place: str, values: Any) -> None:
        self._file = file
        self._place = place
        if not isinstance(values, dict):
            self._refuse("", "a table")
        self._values = dict(values)

    def text(self, key: str) -> str:
        value = self._take(key, "a text")
        return value if isinstance(value, str) and value.strip() else self._refuse(key, "a text")

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._values.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self._refuse(key, "a list of texts")
        return tuple(value)

    def day(self, key: str) -> date:
        value = self._take(key, "a date: 2026-11-15")
        return value if type(value) is date else self._refuse(key, "a date: 2026-11-15")

    def truth(self, key: str) -> bool:
        value = self._take(key, "true or false")
        return value if isinstance(value, bool) else self._refuse(key, "true or false")

    def whole(self, key: str) -> int:
        value = self._take(key, "a whole number, more than 0")
        return value if type(value) is int and value > 0 else self._refuse(key, "a whole number, more than 0")

    def amount(self, key: str, default: Decimal | None = None) -> Decimal:
        value = self._take(key, "a number, not below 0") if default is None else self._values.pop(key, default)
        found = Decimal(value) if type(value) in (int, Decimal) else None
        if found is None or not found.is_finite() or found < 0:
            self._refuse(key, "a number, not below 0")
        return found

    def table(self, key: str) -> _Table:
        return _Table(self._file, self._at(key), self._take(key, "a table"))

    def tables(self, key: str) -> dict[str, _Table]:
        found = self.table(key)
        if not found._values:
            self._refuse(key, "a table of at least one")
        return {name: found.table(name) for name in list(found._values)}

    def optional(self, key: str) -> _Table | None:
        return self.table(key) if key in self._values else None

    def bands(self, key: str) -> tuple[PriceBand, ...]:
        value = self._take(key, "a list of bands")
        if not isinstance(value, list) or not value:
            self._refuse(key, "a list of bands")
        found: list[PriceBand] = []
        for number, one in enumerate(value, 1):
            table = _Table(self._file, f"{self._at(key)}, band {number}", one)
            last = number == len(value)
            end = None if last else table.amount("up_to")
            found.append(PriceBand(end, table.amount("price")))
            table.end()
            if end is not None and end <= max([Decimal(0), *(band.up_to or 0 for band in found[:-1])]):
                self._refuse(key, "bands that each end beyond the one before")
        return tuple(found)

    def names(self) -> list[str]:
        return list(self._values)

    def end(self) -> None:
        """Nothing else is in it: a name that was mistyped would be a price that is not charged."""
        for key in self._values:
            raise PricesError(f"{self._file}: {self._at(key)} is not known", f"Leave it out. {_START}")

    def _take(self, key: str, wanted: str) -> Any:
        if key not in self._values:
            raise PricesError(f"{self._file}: {self._at(key)} is missing", f"It is {wanted}. {_START}")
        return self._values.pop(key)

    def _at(self, key: str) -> str:
        return f"{self._place}.{key}" if self._place and key else self._place or key

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        raise PricesError(f"{self._file}: {self._at(key)} must be {wanted}", _START)


def _tier(name: str, table: _Table) -> Tier:
    operations, connections = table.optional("operations"), table.optional("connections")
    made = Tier(
        name=name,
        topics=table.truth("topics"),
        largest_message=table.whole("largest_message"),
        base_per_month=table.amount("base_per_month", Decimal(0)),
        messaging_unit_per_hour=table.amount("messaging_unit_per_hour", Decimal(0)),
        operations=None if operations is None else _scale(operations),
        connections=None if connections is None else _scale(connections),
        connection_hours=1 if connections is None else connections.whole("hours_in_month"),
        notes=table.texts("notes"),
    )
    for one in (operations, connections, table):
        if one is not None:
            one.end()
    return made


def _scale(table: _Table) -> PriceScale:
    return PriceScale(table.whole("per"), table.bands("bands"))


def _zones(table: _Table) -> dict[str, Decimal]:
    table.text("tier")
    return {zone: table.amount(zone) for zone in table.names()}
