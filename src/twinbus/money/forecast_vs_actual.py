"""Compares a forecast with the actual cost from a ledger (M4), stage by stage, and explains each difference.

A difference is divided into parts, each with a reason; the sum of the parts is the difference. This module is pure;
`twinbus.pipeline` reads the actual figures from a ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from twinbus.ledger.entries import Stage  # pure, unlike `twinbus.ledger`
from twinbus.money.forecast import CostPhase, Forecast

_RECEIVER_STAGES: Final = frozenset({Stage.RECEIVE_PRIMARY, Stage.COMPLETE_PRIMARY})
"""Stages of the application's receivers. A ledger has these stages only if the receivers belong to a pair, or if a
Twinbus namespace metered their operations."""
EMPTY_PRIMARY: Final = "empty_receive_primary"
"""Stage of the application's receives on the primary that returned no message.

The forecast does not have this stage.
"""
_DIVERTED_STAGES: Final = frozenset(
    {
        Stage.SEND_BACKLOG,
        Stage.RECEIVE_BACKLOG,
        Stage.SETTLE_BACKLOG,
        Stage.RECEIVE_DEFERRED,
        Stage.RETURN_PRIMARY,
        Stage.COMPLETE_BACKLOG,
    }
)
_WHY_MORE: Final[Mapping[str, str]] = {
    Stage.SEND_PRIMARY: "sends that failed at the edges of the outages",
    Stage.SEND_BACKLOG: "messages that went to a second backlog queue",
    Stage.RECEIVE_BACKLOG: "messages received again after a lost lock or a syphon's end",
    Stage.RETURN_PRIMARY: "messages sent again, and the probes of Y5",
    Stage.COMPLETE_BACKLOG: "completions repeated",
    Stage.SETTLE_BACKLOG: "put aside again, or given back when a syphon stopped",
    Stage.RECEIVE_DEFERRED: "messages put aside more than once",
    Stage.EMPTY_RECEIVE: "short first polls of a pump, polls ended by a stop, and polls that make a drain sure",
    Stage.PEEK_BACKLOG: "peeks at a syphon's start and after lost locks, or by clients at another time",
    Stage.RENEW_BACKLOG: "locks renewed while a batch waited: not in the forecast",
    Stage.PING: "pings of other clients, or at another time",
    Stage.MANAGE: "queues found or created by a pair, or listed by a syphon, at their start",
    Stage.RESUBMIT_BACKLOG: "dead letters resubmitted: not in the forecast",
    Stage.SCHEDULE_PRIMARY: "scheduled messages: forecast as sends",
    Stage.CANCEL_PRIMARY: "cancelled schedules: not in the forecast",
    Stage.RECEIVE_PRIMARY: "messages received again, or sent before the period",
    Stage.COMPLETE_PRIMARY: "messages received again, or sent before the period",
}
_MOVED: Final = "still in the backlog, or moved by a syphon that writes another ledger"
_PUT_ASIDE: Final = "fewer probes, or messages that came when the primary was already back"
_WHY_FEWER: Final[Mapping[str, str]] = {
    Stage.SEND_PRIMARY: "fewer sends failed before the failover",
    Stage.SEND_BACKLOG: "part of the sends failed",
    Stage.RECEIVE_BACKLOG: _MOVED,
    Stage.RETURN_PRIMARY: _MOVED,
    Stage.COMPLETE_BACKLOG: _MOVED,
    Stage.SETTLE_BACKLOG: _PUT_ASIDE,
    Stage.RECEIVE_DEFERRED: _PUT_ASIDE,
    Stage.EMPTY_RECEIVE: "polls in flight, queues that were not empty, or syphons that ran for less than the period",
    Stage.PEEK_BACKLOG: "peeks that fell outside the period, or syphons that ran for less of it",
    Stage.PING: "pings that reached nothing, and fewer intervals",
    Stage.MANAGE: "no display counted the remaining messages",
    Stage.RECEIVE_PRIMARY: "not received yet, or by receivers that write another ledger",
    Stage.COMPLETE_PRIMARY: "not completed yet, received and deleted at once, or written to another ledger",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpending:
    """The messages, units and cost of one stage, from a ledger."""

    stage: str
    messages: int
    """Messages of successful calls."""
    units: int
    failed_units: int
    """Units of calls that were refused or whose outcome is unknown. They are part of `units`."""
    cost: Decimal
    unsent_units: int = 0
    """Units of calls that found no connection, so that no request was sent. They are not part of `units`."""


@dataclass(frozen=True, slots=True)
class DifferencePart:
    """A part of a difference: a number of units, and the reason."""

    why: str
    units: int


@dataclass(frozen=True, slots=True)
class StageDifference:
    """Forecast and actual units of one stage."""

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


@dataclass(frozen=True, slots=True)
class Comparison:
    differences: tuple[StageDifference, ...]

    @property
    def forecast(self) -> int:
        """Forecast units of the stages that are compared."""
        return sum(one.forecast for one in self.differences if one.actual is not None)

    @property
    def actual(self) -> int:
        return sum(one.actual or 0 for one in self.differences)

    @property
    def share(self) -> float:
        """The difference of forecast and actual units, as a share of the actual units."""
        return abs(self.actual - self.forecast) / max(self.actual, 1)


def compare(forecast: Forecast, spent: Sequence[StageSpending]) -> Comparison:
    """Returns the comparison of all stages, also of stages that only the forecast or only the ledger has."""
    actual = {one.stage: one for one in spent}
    stages = dict.fromkeys([*(line.usage.stage for line in forecast.bill.lines), *actual])
    traffic = _Traffic.of(forecast, actual)
    return Comparison(tuple(_difference(forecast, stage, actual.get(stage), traffic) for stage in stages))


@dataclass(frozen=True, slots=True)
class _Traffic:
    """How many messages the forecast diverts, and how many more were diverted, and sent, than in the forecast."""

    diverted: float
    more_diverted: float
    more_sent: int

    @classmethod
    def of(cls, forecast: Forecast, actual: Mapping[str, StageSpending]) -> _Traffic:
        diverted = forecast.scenario.outages * forecast.outage.diverted
        backlog, primary = actual.get(Stage.SEND_BACKLOG), actual.get(Stage.SEND_PRIMARY)
        sends = forecast.bill.of(stage=Stage.SEND_PRIMARY).lines
        expected = sum(line.usage.operations for line in sends if line.usage.anyway)
        sent = 0 if primary is None else primary.messages
        return cls(diverted, (0 if backlog is None else backlog.messages) - diverted, sent - expected)

    def part(self, stage: str, units: int, sends: int) -> DifferencePart | None:
        """Returns the part of a stage's difference that more or fewer messages explain."""
        if stage in _DIVERTED_STAGES and self.diverted and round(self.more_diverted):
            explained = round(units * self.more_diverted / self.diverted)
            return DifferencePart(f"{_more(self.more_diverted)} diverted than in the forecast", explained)
        if stage == Stage.SEND_PRIMARY and self.more_sent:
            return DifferencePart(f"{_more(self.more_sent)} sent than in the forecast", self.more_sent * sends)
        return None


def _more(messages: float) -> str:
    return f"{abs(round(messages)):,} messages {'more' if messages > 0 else 'fewer'} were"


def _difference(forecast: Forecast, stage: str, spent: StageSpending | None, traffic: _Traffic) -> StageDifference:
    expected = forecast.bill.of(stage=stage)
    if spent is None and stage in _RECEIVER_STAGES:
        why = "this ledger has no record: it needs receivers of the pair, or the meter of a Twinbus namespace"
        return StageDifference(stage, expected.units, None, expected.cost, Decimal(0), (DifferencePart(why, 0),))
    units, cost = (0, Decimal(0)) if spent is None else (spent.units, spent.cost)
    parts: list[DifferencePart] = []
    left = units - expected.units
    units_per_send = round(expected.units / max(expected.operations, 1))
    if (by_traffic := traffic.part(stage, expected.units, units_per_send)) is not None:
        parts.append(by_traffic)
        left -= by_traffic.units
    failed = 0 if spent is None or _expects_failures(forecast, stage) else min(spent.failed_units, max(left, 0))
    if failed:
        parts.append(DifferencePart("calls that were refused or whose outcome is unknown", failed))
    if left - failed:
        reasons = _WHY_MORE if left > failed else _WHY_FEWER
        parts.append(DifferencePart(reasons.get(stage, "not in the forecast"), left - failed))
    if spent is not None and spent.unsent_units:
        parts.append(
            DifferencePart(f"{spent.unsent_units:,} more were tried without a connection: no request was sent", 0)
        )
    return StageDifference(stage, expected.units, units, expected.cost, cost, tuple(parts))


def _expects_failures(forecast: Forecast, stage: str) -> bool:
    """Returns whether the forecast includes failed calls of this stage."""
    lines = forecast.bill.of(phase=CostPhase.OUTAGE, stage=stage).lines
    return any(not line.usage.anyway for line in lines) and stage in (
        Stage.PING,
        Stage.SEND_PRIMARY,
        Stage.RETURN_PRIMARY,
    )
