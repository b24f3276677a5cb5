"""Compares a forecast with the bill of a ledger (L4, M4), and takes each difference apart, in units and in money.

Theory of operation. In a forecast and in a ledger (`StageSpending`), a stage has three kinds of units: one for each
message or call that succeeded, further units of messages above 64 KB, and units of failed calls. So a difference has
three parts. The first one, the messages and calls, is divided further with the counts of `LedgerFacts`: messages that
came again, that were dead-lettered, and so on. A part is named only if entries of the ledger show its number. What is
left of a stage is called `unexplained`, so that the parts always add up to the difference.

In money, a part in units has the mean price of a unit in the bill. A difference in bytes is a part of its own, and so
is what is left: a unit in the forecast had another mean price, because it fell into other price bands. The base cost
has one part, the length of the period.

This module is pure; `twinbus.pipeline` reads the bill and the facts from a ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, NamedTuple

from twinbus.ledger.entries import Role, Stage  # pure, unlike `twinbus.ledger`
from twinbus.money.actual_bill import ActualBill, StageSpending
from twinbus.money.billing import Bill, rounded
from twinbus.money.facts import SHORT_POLL, CopyFacts, LedgerFacts
from twinbus.money.forecast import STATE_WRITES, Forecast, forecast
from twinbus.money.prices import Prices, PricesError
from twinbus.money.scenario import Scenario, ScenarioError, SyphonRuns

EMPTY_PRIMARY: Final = "empty_receive_primary"
"""Stage of the application's receives on the primary that returned no message. The forecast does not have it."""
SESSIONS_PRIMARY: Final = "sessions_primary"
"""Stage of session operations and other requests that only the meter of a namespace shows."""
UNEXPLAINED: Final = "unexplained"
_ROUNDING: Final = Decimal("1e-9")
"""A smaller remainder in money comes from the rounding of costs, not from a price."""
_TRAFFIC: Final = frozenset({"rate", "outage", "outages", "sent", "diverted"})
"""Fields of a scenario with which a user describes traffic and outages of an earlier forecast."""

_RECEIVER_STAGES: Final = frozenset({Stage.RECEIVE_PRIMARY, Stage.COMPLETE_PRIMARY})
"""Stages of the application's receivers. A ledger has these stages only if the receivers belong to a pair, or if a
Twinbus namespace metered their operations."""
_NO_RECEIVERS: Final = "this ledger has no record: it needs receivers of the pair, or the meter of a Twinbus namespace"


@dataclass(frozen=True, slots=True)
class DifferencePart:
    """A part of a difference: units, money, and what the entries show."""

    why: str
    units: int
    cost: Decimal = Decimal(0)

    @property
    def explained(self) -> bool:
        return self.why != UNEXPLAINED


@dataclass(frozen=True, slots=True)
class StageDifference:
    """Forecast and actual units and cost of one stage. The parts add up to the difference, in units and in money."""

    stage: str
    forecast: int
    actual: int | None
    """None if the ledger has no record of this stage. Then the stage is not compared."""
    forecast_cost: Decimal
    actual_cost: Decimal
    parts: tuple[DifferencePart, ...]

    @property
    def units(self) -> int:
        return 0 if self.actual is None else self.actual - self.forecast

    @property
    def cost(self) -> Decimal:
        return Decimal(0) if self.actual is None else self.actual_cost - self.forecast_cost


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of all stages, and of the base cost."""

    differences: tuple[StageDifference, ...]
    forecast_base: Decimal
    actual_base: Decimal
    base_why: str
    """The parts of the difference between the base costs."""

    @property
    def compared(self) -> tuple[StageDifference, ...]:
        """The stages of which the ledger has a record."""
        return tuple(one for one in self.differences if one.actual is not None)

    @property
    def forecast(self) -> int:
        """Forecast units of the stages that are compared."""
        return sum(one.forecast for one in self.compared)

    @property
    def actual(self) -> int:
        return sum(one.actual or 0 for one in self.compared)

    @property
    def share(self) -> float:
        """The difference of forecast and actual units, as a share of the actual units."""
        return abs(self.actual - self.forecast) / max(self.actual, 1)

    @property
    def forecast_cost(self) -> Decimal:
        """Forecast cost of the compared stages and the base. Without connections: a ledger has no entries for them."""
        return sum((one.forecast_cost for one in self.compared), self.forecast_base)

    @property
    def actual_cost(self) -> Decimal:
        return sum((one.actual_cost for one in self.compared), self.actual_base)

    @property
    def unexplained(self) -> int:
        """Sum of the unexplained units of all stages, each without its sign."""
        return sum(abs(part.units) for one in self.differences for part in one.parts if not part.explained)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostResult:
    """The bill of a ledger, and the forecast beside it. There always is a bill."""

    bill: ActualBill
    scenario: Scenario
    """The scenario of the forecast. Without a forecast: the tier and bandwidth of the bill."""
    forecast: Forecast | None = None
    comparison: Comparison | None = None
    """None if there is no forecast. The notes have the reason."""
    from_ledger: frozenset[str] = frozenset()
    """The fields of the scenario that were read from the ledger."""
    notes: tuple[str, ...] = ()


def cost_result(
    bill: ActualBill, facts: LedgerFacts, seen: Mapping[str, Any], asked: Mapping[str, Any], prices: Prices | None
) -> CostResult:
    """Returns the bill with a forecast beside it. A forecast that cannot be made is a note. Raises nothing.

    `seen` has the fields of a Scenario from the ledger, `asked` those that the user gave, which replace them. If the
    user gave traffic or outages, the forecast is for these, and not for what the ledger shows.
    """
    values = dict(seen)
    if _TRAFFIC & set(asked):
        values = {field: value for field, value in values.items() if field not in ("sent", "diverted", "observed")}
    elif (observed := values.get("observed")) is not None:
        options = {name: asked[name] for name in ("message_size", "subscriptions") if name in asked}
        values["observed"] = observed.with_options(**options)
    taken = frozenset(values) - frozenset(asked) - {"observed"}
    plain = Scenario(**{name: value for name, value in asked.items() if name in ("tier", "bandwidth")})
    if not bill.stages or prices is None or bill.currency is None:
        why = "nothing to forecast" if not bill.stages else "a forecast needs prices"
        return CostResult(bill=bill, scenario=plain, notes=(*bill.notes, f"no forecast: {why}"))
    try:
        found = forecast(Scenario(**{**values, **asked}), prices)
    except (ScenarioError, PricesError) as error:
        return CostResult(bill=bill, scenario=plain, notes=(*bill.notes, f"no forecast: {error}"))
    return CostResult(
        bill=bill,
        scenario=found.scenario,
        forecast=found,
        comparison=compare(found, bill, facts),
        from_ledger=taken,
        notes=bill.notes,
    )


def compare(foreseen: Forecast, actual: ActualBill, facts: LedgerFacts) -> Comparison:
    """Returns the comparison of all stages, also of stages that only the forecast or only the ledger has."""
    spent = {one.stage: one for one in actual.stages}
    stages = dict.fromkeys([*(line.usage.stage for line in foreseen.bill.lines), *spent])
    explained = _Explanations(foreseen, facts, spent)
    unit = _mean(actual.operations_cost, actual.units) or _mean(_operations_cost(foreseen.bill), foreseen.bill.units)
    base = foreseen.base_cost if actual.currency is not None else Decimal(0)
    return Comparison(
        tuple(_difference(foreseen, stage, spent.get(stage), explained, unit, actual.currency) for stage in stages),
        base,
        actual.base_cost,
        f"{actual.seconds:,.0f} s in the ledger, {foreseen.scenario.period.total_seconds():,.0f} s in the forecast",
    )


def _mean(cost: Decimal, units: int) -> Decimal:
    return cost / units if units else Decimal(0)


def _operations_cost(bill: Bill) -> Decimal:
    return sum((line.operations_cost for line in bill.lines), Decimal(0))


def _difference(
    foreseen: Forecast,
    stage: str,
    found: StageSpending | None,
    explained: _Explanations,
    unit: Decimal,
    currency: str | None,
) -> StageDifference:
    expected = _Expected.of(foreseen.bill.of(stage=stage))
    forecast_cost = Decimal(0) if currency is None else expected.bill.cost
    if found is None and stage in _RECEIVER_STAGES:
        return StageDifference(
            stage, expected.units, None, forecast_cost, Decimal(0), (DifferencePart(_NO_RECEIVERS, 0),)
        )
    spent = found or StageSpending(stage=stage, units=0)
    parts = [DifferencePart(why, units, rounded(units * unit)) for why, units in explained.of(expected, spent)]
    if currency is not None:
        parts += list(_money_parts(expected, spent, sum((part.cost for part in parts), Decimal(0))))
    if spent.unsent_units:
        unsent = f"{spent.unsent_units:,} more were tried without a connection: no request was sent"
        parts.append(DifferencePart(unsent, 0))
    return StageDifference(stage, expected.units, spent.units, forecast_cost, spent.cost, tuple(parts))


def _money_parts(expected: _Expected, spent: StageSpending, units_cost: Decimal) -> Iterator[DifferencePart]:
    """Yields the parts of a difference in money beside `units_cost`: bytes, and the price of a unit."""
    bandwidth = sum((line.bandwidth_cost for line in expected.bill.lines), Decimal(0))
    if spent.bandwidth_cost != bandwidth:
        why = f"bytes: {spent.bytes:,} in the ledger, {expected.bill.bytes:,} in the forecast"
        yield DifferencePart(why, 0, spent.bandwidth_cost - bandwidth)
    operations = _operations_cost(expected.bill)
    left = spent.operations_cost - operations - units_cost
    if 0 < abs(left) < _ROUNDING:
        yield DifferencePart("rounding", 0, left)
    elif left:
        prices = (_mean(spent.operations_cost, spent.units), _mean(operations, expected.units))
        texts = [f"{1_000_000 * price:,.4f}" for price in prices]
        yield DifferencePart(f"price of a million units: {texts[0]} in the bill, {texts[1]} in the forecast", 0, left)


class _Expected(NamedTuple):
    """What a forecast has of one stage, in the three kinds of units."""

    bill: Bill
    units: int
    single: int
    """One unit for each message or call that succeeds."""
    large: int
    """Further units of messages above 64 KB."""
    failed: int
    """Units of calls that fail."""

    @classmethod
    def of(cls, bill: Bill) -> _Expected:
        good = [line.usage for line in bill.lines if not line.usage.fails]
        single, units = sum(one.operations for one in good), sum(one.units for one in good)
        return cls(bill, bill.units, single, units - single, bill.units - units)


# --- what explains a difference --------------------------------------------------------------------------------------


Explanation = tuple[str, int]
"""What the entries show, and its units."""


class _Explanations:
    """Divides the difference of one stage into parts that entries of the ledger show, and the unexplained rest."""

    def __init__(self, foreseen: Forecast, facts: LedgerFacts, spent: dict[str, StageSpending]) -> None:
        self._facts = facts
        self._scenario = foreseen.scenario
        self._expected = {stage: _Expected.of(foreseen.bill.of(stage=stage)) for stage in Stage}
        self._spent = spent

    def of(self, expected: _Expected, spent: StageSpending) -> Iterator[Explanation]:
        """Yields the parts. Their units add up to the difference of the stage."""
        left = spent.units - expected.units
        for why, units in self._parts(expected, spent):
            if units:
                yield why, units
                left -= units
        if left:
            yield UNEXPLAINED, left

    def _parts(self, expected: _Expected, spent: StageSpending) -> Iterator[Explanation]:
        yield from self._single_parts(expected, spent)
        large, failed = spent.large_units, spent.failed_units
        yield f"units beyond the first 64 KB: {_both(large, expected.large)}", large - expected.large
        words = ", ".join(f"{word} {units:,}" for word, units in sorted(spent.failed.items()))
        named = f" ({words})" if words else ""
        yield f"calls that failed: {_both(failed, expected.failed, named)}", failed - expected.failed

    def _single_parts(self, expected: _Expected, spent: StageSpending) -> Iterator[Explanation]:
        """Yields the parts of the messages and calls that succeeded."""
        stage, facts, single = spent.stage, self._facts, spent.single_units
        match stage:
            case Stage.SEND_PRIMARY:
                yield _more("sent to the primary", facts.sent, expected.single)
            case Stage.SEND_BACKLOG:
                yield _more("diverted", facts.diverted, expected.single)
            case Stage.MANAGE:
                yield from self._management()
            case _ if not expected.units:
                yield "in the ledger, and the forecast has none", single
            case Stage.RECEIVE_BACKLOG:
                yield self._more_diverted(expected)
                yield from self._backlog_receives(single)
            case Stage.RETURN_PRIMARY | Stage.COMPLETE_BACKLOG:
                yield self._more_diverted(expected)
                found = facts.copies.get(stage, CopyFacts())
                yield "dead-lettered in the backlog, so not sent on", -found.dead_lettered
                yield from self._copies(found, "sent on" if stage == Stage.RETURN_PRIMARY else "completed")
            case Stage.SETTLE_BACKLOG:
                yield self._more_diverted(expected)
                yield "dead-lettered in the backlog", facts.dead_lettered
            case Stage.RECEIVE_DEFERRED:
                yield self._more_diverted(expected)
            case Stage.EMPTY_RECEIVE:
                yield from self._polls()
            case Stage.RECEIVE_PRIMARY:
                yield from self._receives(expected, single)
            case Stage.COMPLETE_PRIMARY:
                yield from self._completions(single)

    def _more_diverted(self, expected: _Expected) -> Explanation:
        """Returns the part of a stage that follows from more or fewer diverted messages than in the forecast."""
        foreseen, diverted = self._expected[Stage.SEND_BACKLOG].single, self._facts.diverted
        why, more = _more("diverted", diverted, foreseen)
        return why, round(expected.single * more / foreseen) if foreseen and expected.single != foreseen else more

    def _copies(self, found: CopyFacts, done: str) -> Iterator[Explanation]:
        """Yields what entries with message ids show for a stage that each diverted message passes once."""
        yield "resubmitted from a dead-letter queue", self._facts.resubmitted
        yield f"copies in the backlog that were not {done} in this ledger", found.dead_lettered - found.missing
        yield "sends to the backlog with an unknown outcome, which did arrive", found.unsure
        yield "messages that this ledger did not divert in this window", found.foreign
        yield f"messages that were {done} again, by their ids", found.again

    def _backlog_receives(self, single: int) -> Iterator[Explanation]:
        """Yields the parts of the receives: those of the sends to the primary, and receives that no send followed.

        A receive names no ids. A message is received again after it was given back, or after its lock ended.
        """
        found = self._facts.copies.get(Stage.RETURN_PRIMARY, CopyFacts())
        yield from self._copies(found, "sent on")
        # A dead-lettered message was received, too.
        more = single - self._facts.returned - found.dead_lettered
        yield (
            "receives that no send to the primary followed" if more > 0 else "sent on, and no receive in this ledger",
            more,
        )

    def _polls(self) -> Iterator[Explanation]:
        """Yields the polls of standing syphons that were cut short. A forecast has only whole ones."""
        if self._scenario.syphon is SyphonRuns.STANDING:
            limit = SHORT_POLL * self._scenario.long_poll.total_seconds()
            yield f"polls that ended before {limit:,.0f} s", self._facts.short_polls

    def _management(self) -> Iterator[Explanation]:
        """Yields the calls of clients and of the dead-letter tool.

        A forecast has calls of syphons, and the writes of clients to a shared state, which are recorded as such calls.
        """
        calls, lines = self._facts.manage, self._expected[Stage.MANAGE].bill.lines
        writes = sum(line.usage.units for line in lines if line.usage.why == STATE_WRITES)
        for role in sorted({*calls, str(Role.CLIENT)} - {str(Role.SYPHON)}):
            found, foreseen = calls.get(role, 0), writes if role == Role.CLIENT else 0
            shared = f", and writes to the shared state: {_both(found, foreseen)}" if foreseen else ""
            yield f"management calls of a {role}{shared}", found - foreseen

    def _receives(self, expected: _Expected, single: int) -> Iterator[Explanation]:
        facts = self._facts
        foreseen = self._expected[Stage.SEND_PRIMARY].single + self._expected[Stage.RETURN_PRIMARY].single
        delivered = facts.sent + facts.returned + facts.scheduled
        each = expected.single // foreseen if foreseen else 1
        if self._scenario.observed is None and expected.single == each * foreseen:
            why, more = _more("delivered to the primary", delivered, foreseen)
            yield why, more * each
            subscriptions = max(self._scenario.subscriptions, 1)
            further = f"receives of {facts.subscriptions:,} subscriptions; {subscriptions:,} in the forecast"
            yield further, facts.deliverable - delivered * each
        else:
            to = f"queues and {facts.subscriptions:,} subscriptions" if facts.subscriptions else "queues"
            more = facts.deliverable - expected.single
            yield f"deliveries to {to}: {_both(facts.deliverable, expected.single)}", more
        left = single - facts.deliverable
        if left > 0:
            why = "received again after they were abandoned, deferred, released or dead-lettered"
            yield why, min(left, facts.settled)
        else:
            yield "deliveries without a receive in this ledger", left

    def _completions(self, single: int) -> Iterator[Explanation]:
        receives = self._spent.get(Stage.RECEIVE_PRIMARY)
        received = 0 if receives is None else receives.single_units
        yield _more("received", received, self._expected[Stage.RECEIVE_PRIMARY].single)
        left = single - received
        if left < 0:
            settled = max(left, -self._facts.settled)
            yield "abandoned, deferred, released or dead-lettered instead of completed", settled
            yield "receives without a completion in this ledger", left - settled


def _more(what: str, actual: int, foreseen: int) -> Explanation:
    more = actual - foreseen
    messages = "1 message" if abs(more) == 1 else f"{abs(more):,} messages"
    verb = "was" if abs(more) == 1 else "were"
    return f"{messages} {'more' if more > 0 else 'fewer'} {verb} {what} than in the forecast", more


def _both(actual: int, foreseen: int, named: str = "") -> str:
    return f"{actual:,} in the ledger{named}, {foreseen:,} in the forecast"
