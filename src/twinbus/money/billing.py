"""What was used becomes a bill (M2, M3): units through the bands of a tier, bytes through those of the bandwidth.

Used by the forecast and by what a ledger tells, so that both are priced alike. It knows neither of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from twinbus.money.prices import Prices, PriceScale


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """`operations`: one for every message that was carried, and for every call that carried none. `units`: what is
    charged for them (M2). `anyway`: the application would have had it without a pair, too.
    """

    stage: str
    operations: int
    units: int
    bytes: int = 0
    phase: str = ""
    anyway: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BillLine:
    usage: Usage
    operations_cost: Decimal
    bandwidth_cost: Decimal

    @property
    def cost(self) -> Decimal:
        return self.operations_cost + self.bandwidth_cost


@dataclass(frozen=True, slots=True)
class Bill:
    """Lines in the order of what was used."""

    lines: tuple[BillLine, ...]

    @property
    def operations(self) -> int:
        return sum(line.usage.operations for line in self.lines)

    @property
    def units(self) -> int:
        return sum(line.usage.units for line in self.lines)

    @property
    def bytes(self) -> int:
        return sum(line.usage.bytes for line in self.lines)

    @property
    def cost(self) -> Decimal:
        return sum((line.cost for line in self.lines), Decimal(0))

    def of(self, *, phase: str | None = None, stage: str | None = None) -> Bill:
        """The lines of a phase, of a stage, or of both."""
        return Bill(
            tuple(
                line for line in self.lines if phase in (None, line.usage.phase) and stage in (None, line.usage.stage)
            )
        )


def bill(
    used: Sequence[Usage],
    prices: Prices,
    tier: str = "standard",
    *,
    bandwidth: str = "inter_region",
    other_operations: int = 0,
    months: Decimal = Decimal(1),
) -> Bill:
    """Of one month, or of so many. Phases take the bands one after the other, after the `other_operations`; within one
    the lines share what it costs by their units.
    """
    scale, zone = prices.tier(tier).operations, prices.zone(bandwidth)
    before, carried = other_operations * months, Decimal(0)
    units: dict[str, Decimal] = {}
    bytes_: dict[str, Decimal] = {}
    for phase in dict.fromkeys(one.phase for one in used):
        mine = [one for one in used if one.phase == phase]
        amount, size = Decimal(sum(one.units for one in mine)), Decimal(sum(one.bytes for one in mine))
        units[phase] = _each(scale, before, amount, months)
        bytes_[phase] = _each(zone, carried, size, months)
        before, carried = before + amount, carried + size
    return Bill(
        tuple(
            BillLine(
                usage=one, operations_cost=one.units * units[one.phase], bandwidth_cost=one.bytes * bytes_[one.phase]
            )
            for one in used
        )
    )


def unit_price(
    units: int, prices: Prices, tier: str = "standard", *, other_operations: int = 0, months: Decimal = Decimal(1)
) -> Decimal:
    """What each of so many costs, all bands of a month together."""
    return _each(prices.tier(tier).operations, other_operations * months, Decimal(units), months)


def _each(scale: PriceScale | None, before: Decimal, amount: Decimal, months: Decimal) -> Decimal:
    if scale is None or not amount:
        return Decimal(0)
    return (scale.cost(before + amount, months) - scale.cost(before, months)) / amount
