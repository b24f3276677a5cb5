"""Makes a bill of used units and bytes (M2, M3), with the price bands of a tier for units and of bandwidth for bytes.

The forecast and the actual cost of a ledger both use this module, so that both have the same prices. Every cost is
rounded to 18 decimal places. So sums of costs are exact, and the parts of a difference add up to it (L4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Final

from twinbus.money.prices import Prices, PriceScale, Tier

_PLACES: Final = Decimal("1e-18")
_PRECISE: Final = Context(prec=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The operations, units and bytes of one stage in one phase."""

    stage: str
    operations: int
    """One operation per message, and one per call without a message."""
    units: int
    """Billable units of these operations (M2)."""
    bytes: int = 0
    phase: str = ""
    anyway: bool = False
    """Whether the application would need these operations without a pair, too."""
    fails: bool = False
    """Whether these operations fail and are charged, too."""
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
    """A bill: usage with costs. The lines have the same order as the usage from which the bill was made."""

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
        """Returns a bill with only the lines of a phase, of a stage, or of both."""
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
    """Returns the bill of the usage in `months` months.

    The first units of a month's price bands go to the `other_operations` of the month, the next units to the phases in
    their order. All lines of a phase have the same price per unit: the mean over the bands that the phase uses.
    """
    scale, zone = prices.tier(tier).operations, prices.zone(bandwidth)
    units_before, bytes_before = other_operations * months, Decimal(0)
    unit_prices: dict[str, Decimal] = {}
    byte_prices: dict[str, Decimal] = {}
    for phase in dict.fromkeys(one.phase for one in used):
        of_phase = [one for one in used if one.phase == phase]
        units, size = Decimal(sum(one.units for one in of_phase)), Decimal(sum(one.bytes for one in of_phase))
        unit_prices[phase] = _mean_price(scale, units_before, units, months)
        byte_prices[phase] = _mean_price(zone, bytes_before, size, months)
        units_before, bytes_before = units_before + units, bytes_before + size
    return Bill(
        tuple(
            BillLine(
                usage=one,
                operations_cost=rounded(one.units * unit_prices[one.phase]),
                bandwidth_cost=rounded(one.bytes * byte_prices[one.phase]),
            )
            for one in used
        )
    )


def _mean_price(scale: PriceScale | None, before: Decimal, amount: Decimal, months: Decimal) -> Decimal:
    if scale is None or not amount:
        return Decimal(0)
    return (scale.cost(before + amount, months) - scale.cost(before, months)) / amount


def base_cost(tier: Tier, prices: Prices, hours: Decimal, *, messaging_units: int, namespaces: int = 2) -> Decimal:
    """Returns what a tier costs without any operation: its base, and the messaging units of the namespaces."""
    units_cost = tier.messaging_unit_per_hour * messaging_units * namespaces * hours
    return rounded(tier.base_per_month * hours / prices.hours_in_month + units_cost)


def rounded(amount: Decimal) -> Decimal:
    """Returns an amount with at most 18 decimal places."""
    return amount.quantize(_PLACES, context=_PRECISE)
