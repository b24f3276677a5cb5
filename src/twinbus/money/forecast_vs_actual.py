"""A forecast beside what a ledger tells (M4): stage by stage, and what each difference is made of.

The parts of a difference add up to it. Where the ledger's figures come from is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from twinbus.ledger.entries import Stage  # pure: the face also loads what writes to the disk
from twinbus.money.forecast import CostPhase, Forecast

_OWN: Final = frozenset({Stage.RECEIVE_PRIMARY, Stage.COMPLETE_PRIMARY})
"""An application's receivers tell a ledger only where they are a pair's; a namespace's meter tells of all."""
EMPTY_PRIMARY: Final = "empty_receive_primary"
"""Receives of the application on the primary that brought nothing: as all else of its own, not foreseen."""
_DIVERTED: Final = frozenset(
    {
        Stage.SEND_BACKLOG,
        Stage.RECEIVE_BACKLOG,
        Stage.SETTLE_BACKLOG,
        Stage.RECEIVE_DEFERRED,
        Stage.RETURN_PRIMARY,
        Stage.COMPLETE_BACKLOG,
    }
)
_MORE: Final[Mapping[str, str]] = {
    Stage.SEND_PRIMARY: "sends that failed at the edges of the outages",
    Stage.SEND_BACKLOG: "messages that went to a second backlog queue",
    Stage.RECEIVE_BACKLOG: "messages that came again after a lost lock or a syphon's end",
    Stage.RETURN_PRIMARY: "messages sent again, and the probes of Y5",
    Stage.COMPLETE_BACKLOG: "completions repeated",
    Stage.SETTLE_BACKLOG: "put aside again, or given back when a syphon stopped",
    Stage.RECEIVE_DEFERRED: "messages put aside more than once",
    Stage.EMPTY_RECEIVE: "a pump's first poll is short; polls cut off by a stop; a drain asks until it is sure",
    Stage.PEEK_BACKLOG: "looks at a syphon's start and after lost locks, or of clients at another time",
    Stage.RENEW_BACKLOG: "locks renewed while a load waited: not foreseen",
    Stage.PING: "pings of other clients, or at another time",
    Stage.MANAGE: "queues looked for and made by a pair, or listed by a syphon, at their start",
    Stage.RESUBMIT_BACKLOG: "dead letters resubmitted: not foreseen",
    Stage.SCHEDULE_PRIMARY: "scheduled messages: forecast as sends",
    Stage.CANCEL_PRIMARY: "cancelled schedules: not foreseen",
    Stage.RECEIVE_PRIMARY: "messages that came again, or were there before",
    Stage.COMPLETE_PRIMARY: "messages that came again, or were there before",
}
_MOVED: Final = "still in the backlog, or moved by a syphon that tells another ledger"
_PUT_ASIDE: Final = "fewer probes, or messages that came when the primary was back already"
_FEWER: Final[Mapping[str, str]] = {
    Stage.SEND_PRIMARY: "fewer sends failed before the failover",
    Stage.SEND_BACKLOG: "part of what was foreseen failed",
    Stage.RECEIVE_BACKLOG: _MOVED,
    Stage.RETURN_PRIMARY: _MOVED,
    Stage.COMPLETE_BACKLOG: _MOVED,
    Stage.SETTLE_BACKLOG: _PUT_ASIDE,
    Stage.RECEIVE_DEFERRED: _PUT_ASIDE,
    Stage.EMPTY_RECEIVE: "polls under way, queues that were not empty, or syphons that ran for less than the period",
    Stage.PEEK_BACKLOG: "looks that fell beyond the period, or syphons that ran for less of it",
    Stage.PING: "pings that nobody heard, and fewer intervals",
    Stage.MANAGE: "nobody looked how much remained",
    Stage.RECEIVE_PRIMARY: "not received yet, or by receivers that tell another ledger",
    Stage.COMPLETE_PRIMARY: "not completed yet, received and deleted at once, or told to another ledger",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpending:
    """One stage in a ledger. `messages`: of calls that went well. `vain`: units of those that were refused or whose
    outcome is unknown. `unsent`: units of those that were intended and never sent; they are in none of the others.
    """

    stage: str
    messages: int
    units: int
    vain: int
    cost: Decimal
    unsent: int = 0


@dataclass(frozen=True, slots=True)
class DifferencePart:
    why: str
    units: int


@dataclass(frozen=True, slots=True)
class StageDifference:
    """`actual` is None where nobody recorded this stage: then nothing is compared."""

    stage: str
    forecast: int
    actual: int | None
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
        """Of the stages that are compared."""
        return sum(one.forecast for one in self.differences if one.actual is not None)

    @property
    def actual(self) -> int:
        return sum(one.actual or 0 for one in self.differences)

    @property
    def share(self) -> float:
        """By how much the actual units differ from the forecast, of the actual."""
        return abs(self.actual - self.forecast) / max(self.actual, 1)


def compare(forecast: Forecast, spent: Sequence[StageSpending]) -> Comparison:
    """Stages that only one of them has are there too."""
    actual = {one.stage: one for one in spent}
    foreseen = dict.fromkeys(line.usage.stage for line in forecast.bill.lines)
    traffic = _Traffic.of(forecast, actual)
    return Comparison(
        tuple(_difference(forecast, stage, actual.get(stage), traffic) for stage in {**foreseen, **actual})
    )


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Messages diverted, and sent to the primary: as foreseen, and how many more there were."""

    diverted: float
    more_diverted: float
    more_sent: int

    @classmethod
    def of(cls, forecast: Forecast, actual: Mapping[str, StageSpending]) -> _Traffic:
        diverted = forecast.scenario.outages * forecast.course.diverted
        backlog, primary = actual.get(Stage.SEND_BACKLOG), actual.get(Stage.SEND_PRIMARY)
        sends = forecast.bill.of(stage=Stage.SEND_PRIMARY).lines
        foreseen = sum(line.usage.operations for line in sends if line.usage.anyway)
        sent = 0 if primary is None else primary.messages
        return cls(diverted, (0 if backlog is None else backlog.messages) - diverted, sent - foreseen)

    def part(self, stage: str, units: int, sends: int) -> DifferencePart | None:
        """What more messages, or fewer, make of a stage's difference."""
        if stage in _DIVERTED and self.diverted and round(self.more_diverted):
            made = round(units * self.more_diverted / self.diverted)
            return DifferencePart(f"{_more(self.more_diverted)} diverted than foreseen", made)
        if stage == Stage.SEND_PRIMARY and self.more_sent:
            return DifferencePart(f"{_more(self.more_sent)} sent than foreseen", self.more_sent * sends)
        return None


def _more(messages: float) -> str:
    return f"{abs(round(messages)):,} messages {'more' if messages > 0 else 'fewer'} were"


def _difference(forecast: Forecast, stage: str, spent: StageSpending | None, traffic: _Traffic) -> StageDifference:
    mine = forecast.bill.of(stage=stage)
    if spent is None and stage in _OWN:
        why = "nobody told this ledger: receivers that are not the pair's do not; a Twinbus namespace's meter does"
        return StageDifference(stage, mine.units, None, mine.cost, Decimal(0), (DifferencePart(why, 0),))
    units, cost = (0, Decimal(0)) if spent is None else (spent.units, spent.cost)
    parts: list[DifferencePart] = []
    left = units - mine.units
    if (more := traffic.part(stage, mine.units, round(mine.units / max(mine.operations, 1)))) is not None:
        parts.append(more)
        left -= more.units
    vain = 0 if spent is None or _foreseen_in_vain(forecast, stage) else min(spent.vain, max(left, 0))
    if vain:
        parts.append(DifferencePart("calls that were refused, or whose outcome is unknown", vain))
    if left - vain:
        parts.append(DifferencePart((_MORE if left > vain else _FEWER).get(stage, "not foreseen"), left - vain))
    if spent is not None and spent.unsent:
        parts.append(
            DifferencePart(f"{spent.unsent:,} more were intended and found no connection: nobody was asked", 0)
        )
    return StageDifference(stage, mine.units, units, mine.cost, cost, tuple(parts))


def _foreseen_in_vain(forecast: Forecast, stage: str) -> bool:
    lines = forecast.bill.of(phase=CostPhase.OUTAGE, stage=stage).lines
    return any(not line.usage.anyway for line in lines) and stage in (
        Stage.PING,
        Stage.SEND_PRIMARY,
        Stage.RETURN_PRIMARY,
    )
