"""Prices as data (M3): a table with a date and an origin, read from TOML.

Twinbus contains a price table, and users may write their own. This module checks a table and computes the cost of an
amount. No price is written in code.
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
    """A price table cannot be used. The text names the file and the key."""


@dataclass(frozen=True, slots=True)
class PriceBand:
    """The price for a part of the amount of one month: from the end of the previous band up to `up_to`."""

    up_to: Decimal | None
    """The upper end of the band; None in the last band."""
    price: Decimal


@dataclass(frozen=True, slots=True)
class PriceScale:
    """Price bands of one quantity."""

    per: int
    """The number of units or bytes to which the price of a band applies, for example 1,000,000."""
    bands: tuple[PriceBand, ...]

    def cost(self, amount: Decimal, months: Decimal = Decimal(1)) -> Decimal:
        """Returns the cost of an amount that is used evenly over `months` months. Less than one month counts as one."""
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
    """A tier of Service Bus with its limits and prices."""

    name: str
    topics: bool
    largest_message: int
    base_per_month: Decimal
    messaging_unit_per_hour: Decimal
    operations: PriceScale | None
    """None if operations are not charged."""
    connections: PriceScale | None
    """None if connections are not charged."""
    connection_hours: int
    """Connections are charged by the sum of the peaks of each hour, divided by this number."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prices:
    """A price table.

    `Prices.default()` is the table of this Twinbus version, `Prices.load(path)` the table of a user.
    """

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
        """Returns the table in a file; if `path` is None, the default. Raises PricesError if the file is not usable."""
        if path is None:
            return cls.default()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise PricesError(f"the prices in {path} cannot be read: {why}", _START) from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, file: str) -> Self:
        try:
            found = _Table(file, "", tomllib.loads(text, parse_float=Decimal))
        except tomllib.TOMLDecodeError as error:
            raise PricesError(f"the prices in {file} are not TOML: {error}", _START) from error
        bandwidth = found.read_tables("bandwidth")
        made = cls(
            date=found.read_date("date"),
            currency=found.read_text("currency"),
            region=found.read_text("region"),
            origin=found.read_text("origin"),
            hours_in_month=found.read_positive("hours_in_month"),
            notes=found.read_texts("notes"),
            tiers={name: _tier(name, table) for name, table in found.read_tables("tiers").items()},
            bandwidth={name: _scale(table) for name, table in bandwidth.items()},
            bandwidth_notes={name: table.read_texts("notes") for name, table in bandwidth.items()},
            geo_replication=_zones(found.read_table("geo_replication")),
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
        """Returns the bandwidth prices with this name; None for the name `none`."""
        if name != "none" and name not in self.bandwidth:
            raise PricesError(f"{self.file} has no bandwidth {name!r}", f"It has none, {', '.join(self.bandwidth)}.")
        return self.bandwidth.get(name)


def default_price_text() -> str:
    """Returns the text of the table that comes with Twinbus. A user can begin with a copy of this text."""
    return (files("twinbus.money") / "prices.toml").read_text(encoding="utf-8")


# --- reading ---------------------------------------------------------------------------------------------------------


class _Table:
    """A table of a TOML file. Each read removes its key, so that `end` finds the keys that were not read."""

    def __init__(self, file: str, path: str, values: Any) -> None:
        self._file = file
        self._path = path
        if not isinstance(values, dict):
            self._refuse("", "a table")
        self._values = dict(values)

    def read_text(self, key: str) -> str:
        value = self._take(key, "a text")
        return value if isinstance(value, str) and value.strip() else self._refuse(key, "a text")

    def read_texts(self, key: str) -> tuple[str, ...]:
        value = self._values.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self._refuse(key, "a list of texts")
        return tuple(value)

    def read_date(self, key: str) -> date:
        value = self._take(key, "a date: 2026-11-15")
        return value if type(value) is date else self._refuse(key, "a date: 2026-11-15")

    def read_flag(self, key: str) -> bool:
        value = self._take(key, "true or false")
        return value if isinstance(value, bool) else self._refuse(key, "true or false")

    def read_positive(self, key: str) -> int:
        value = self._take(key, "a whole number, more than 0")
        return value if type(value) is int and value > 0 else self._refuse(key, "a whole number, more than 0")

    def read_amount(self, key: str, default: Decimal | None = None) -> Decimal:
        value = self._take(key, "a number, not below 0") if default is None else self._values.pop(key, default)
        found = Decimal(value) if type(value) in (int, Decimal) else None
        if found is None or not found.is_finite() or found < 0:
            self._refuse(key, "a number, not below 0")
        return found

    def read_table(self, key: str) -> _Table:
        return _Table(self._file, self._at(key), self._take(key, "a table"))

    def read_tables(self, key: str) -> dict[str, _Table]:
        found = self.read_table(key)
        if not found._values:
            self._refuse(key, "a table of at least one")
        return {name: found.read_table(name) for name in list(found._values)}

    def read_optional_table(self, key: str) -> _Table | None:
        return self.read_table(key) if key in self._values else None

    def read_bands(self, key: str) -> tuple[PriceBand, ...]:
        value = self._take(key, "a list of bands")
        if not isinstance(value, list) or not value:
            self._refuse(key, "a list of bands")
        found: list[PriceBand] = []
        for number, one in enumerate(value, 1):
            table = _Table(self._file, f"{self._at(key)}, band {number}", one)
            last = number == len(value)
            end = None if last else table.read_amount("up_to")
            found.append(PriceBand(end, table.read_amount("price")))
            table.end()
            if end is not None and end <= max([Decimal(0), *(band.up_to or 0 for band in found[:-1])]):
                self._refuse(key, "bands that each end beyond the one before")
        return tuple(found)

    def names(self) -> list[str]:
        return list(self._values)

    def end(self) -> None:
        """Raises PricesError if a key was not read: if a key is mistyped, its price would not be charged."""
        for key in self._values:
            raise PricesError(f"{self._file}: {self._at(key)} is not known", f"Leave it out. {_START}")

    def _take(self, key: str, wanted: str) -> Any:
        if key not in self._values:
            raise PricesError(f"{self._file}: {self._at(key)} is missing", f"It is {wanted}. {_START}")
        return self._values.pop(key)

    def _at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path and key else self._path or key

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        raise PricesError(f"{self._file}: {self._at(key)} must be {wanted}", _START)


def _tier(name: str, table: _Table) -> Tier:
    operations, connections = table.read_optional_table("operations"), table.read_optional_table("connections")
    made = Tier(
        name=name,
        topics=table.read_flag("topics"),
        largest_message=table.read_positive("largest_message"),
        base_per_month=table.read_amount("base_per_month", Decimal(0)),
        messaging_unit_per_hour=table.read_amount("messaging_unit_per_hour", Decimal(0)),
        operations=None if operations is None else _scale(operations),
        connections=None if connections is None else _scale(connections),
        connection_hours=1 if connections is None else connections.read_positive("hours_in_month"),
        notes=table.read_texts("notes"),
    )
    for one in (operations, connections, table):
        if one is not None:
            one.end()
    return made


def _scale(table: _Table) -> PriceScale:
    return PriceScale(table.read_positive("per"), table.read_bands("bands"))


def _zones(table: _Table) -> dict[str, Decimal]:
    table.read_text("tier")
    return {zone: table.read_amount(zone) for zone in table.names()}
