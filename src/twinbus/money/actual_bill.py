"""The bill of the operations in a ledger (L4, M4): always in units, and in money if the prices are known.

`twinbus.pipeline` reads the use of each month from a ledger; this module adds it up and computes its cost. Pure.

The units of a stage have three parts, which add up to them: one unit for each message or call that succeeded, further
units of messages above 64 KB, and the units of calls that failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from twinbus.money.billing import Usage, base_cost, bill
from twinbus.money.prices import Prices, PricesError
from twinbus.money.scenario import Scenario

_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpending:
    """The use and the cost of one stage, from a ledger."""

    stage: str
    units: int
    bytes: int = 0
    large_units: int = 0
    """Units of successful calls beyond one for each message or call. They are part of `units`."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """Units of calls that were refused or whose outcome is unknown, by result. They are part of `units`."""
    unsent_units: int = 0
    """Units of calls that found no connection, so that no request was sent. They are not part of `units`."""
    operations_cost: Decimal = Decimal(0)
    bandwidth_cost: Decimal = Decimal(0)

    @property
    def failed_units(self) -> int:
        return sum(self.failed.values())

    @property
    def single_units(self) -> int:
        """One unit for each message or call that succeeded."""
        return self.units - self.large_units - self.failed_units

    @property
    def cost(self) -> Decimal:
        return self.operations_cost + self.bandwidth_cost

    def plus(self, other: StageSpending) -> StageSpending:
        """Returns the sum of the spending of two months in the same stage."""
        return StageSpending(
            stage=self.stage,
            units=self.units + other.units,
            bytes=self.bytes + other.bytes,
            large_units=self.large_units + other.large_units,
            failed=Counter(self.failed) + Counter(other.failed),
            unsent_units=self.unsent_units + other.unsent_units,
            operations_cost=self.operations_cost + other.operations_cost,
            bandwidth_cost=self.bandwidth_cost + other.bandwidth_cost,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActualBill:
    """What the operations of a ledger cost. `currency` is None if the prices are not known: then it is in units."""

    stages: tuple[StageSpending, ...]
    seconds: float
    """Length of the period, for the base cost."""
    base_cost: Decimal = Decimal(0)
    """The tier's base and messaging units, for the length of the period."""
    currency: str | None = None
    notes: tuple[str, ...] = ()
    """What the reader must know about this bill: entries that are missing, prices that are not known."""

    @property
    def units(self) -> int:
        return sum(one.units for one in self.stages)

    @property
    def operations_cost(self) -> Decimal:
        return sum((one.operations_cost for one in self.stages), Decimal(0))

    @property
    def bandwidth_cost(self) -> Decimal:
        return sum((one.bandwidth_cost for one in self.stages), Decimal(0))

    @property
    def cost(self) -> Decimal:
        return self.operations_cost + self.bandwidth_cost + self.base_cost


def actual_bill(
    months: Mapping[str, Sequence[StageSpending]],
    seconds: float,
    prices: Prices | None,
    scenario: Scenario,
    notes: Sequence[str] = (),
) -> ActualBill:
    """Returns the bill of the use of each month. Always returns a bill: without prices, a bill in units.

    Of `scenario`, the tier, the bandwidth, the messaging units and the other operations are used. The price bands start
    again with each month. All units of a month have the same price: the mean of that month.
    """
    try:
        if prices is not None:
            priced = {month: _priced(used, prices, scenario) for month, used in months.items()}
            hours = Decimal(seconds) / _HOUR
            base = base_cost(prices.tier(scenario.tier), prices, hours, messaging_units=scenario.messaging_units)
            return ActualBill(
                stages=_sums(priced),
                seconds=seconds,
                base_cost=base,
                currency=prices.currency,
                notes=tuple(notes),
            )
    except PricesError as error:
        notes = [*notes, f"no prices: {error}"]
    return ActualBill(stages=_sums(months), seconds=seconds, notes=tuple(notes))


def _priced(used: Sequence[StageSpending], prices: Prices, scenario: Scenario) -> list[StageSpending]:
    usage = [Usage(stage=one.stage, operations=0, units=one.units, bytes=one.bytes) for one in used]
    other, bandwidth = scenario.other_operations, scenario.bandwidth
    lines = bill(usage, prices, scenario.tier, bandwidth=bandwidth, other_operations=other).lines
    return [
        replace(one, operations_cost=line.operations_cost, bandwidth_cost=line.bandwidth_cost)
        for one, line in zip(used, lines, strict=True)
    ]


def _sums(months: Mapping[str, Sequence[StageSpending]]) -> tuple[StageSpending, ...]:
    found: dict[str, StageSpending] = {}
    for used in months.values():
        for one in used:
            found[one.stage] = found[one.stage].plus(one) if one.stage in found else one
    return tuple(found.values())
