"""What a scenario costs (M4): operations, units, bytes and money by stage, idle, during outages and while draining.

Pure: the scenario and the prices come in, the same forecast comes out. How an outage goes is in `course`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from math import ceil
from typing import Final

from twinbus.ledger.entries import Stage, billable_units  # pure: the face also loads what writes to the disk
from twinbus.money.billing import Bill, Usage, bill
from twinbus.money.outage_model import (
    DRAIN_EMPTY_RECEIVES,
    DRAIN_PEEKS,
    DRAIN_REQUESTS,
    PAGE,
    SCAN_SECONDS,
    OutageModel,
    course,
    looks,
    queues_used,
)
from twinbus.money.prices import Prices, Tier
from twinbus.money.scenario import OutageKind, PingKind, Scenario, ScenarioError, SyphonRuns

ALIAS_BYTES: Final = 64
"""What the aliases of S7 add to a message, about."""
PING_BYTES: Final = 150
_DAY, _HOUR = 86_400, 3600


class CostPhase(StrEnum):
    IDLE = "idle"
    OUTAGE = "outage"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class IdleReceives:
    """Receives of the syphons while nothing happens (Y2)."""

    hour: float
    day: float
    thirty_days: float


@dataclass(frozen=True, slots=True)
class StageUnits:
    """A stage that a diverted message passes: units as M1 counts them; as a client of today is charged; and so where a
    syphon received it while the primary was away, and had to put it aside.
    """

    stage: str
    clause: int
    billed: int
    put_aside: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """`bill` has a line for each phase and stage. `without_pair`: the same traffic in a period without outages, on the
    primary alone, its base included.
    """

    scenario: Scenario
    prices: Prices
    course: OutageModel
    idle: IdleReceives
    passages: tuple[StageUnits, ...]
    bill: Bill
    base_cost: Decimal
    connections: Decimal
    connections_cost: Decimal
    without_pair: Decimal

    @property
    def cost(self) -> Decimal:
        return self.bill.cost + self.base_cost + self.connections_cost


def forecast(scenario: Scenario, prices: Prices) -> Forecast:
    """ScenarioError where the tier cannot carry it, or the outages do not fit into the period."""
    tier = prices.tier(scenario.tier)
    went = course(scenario)
    _refuse(scenario, tier, went)
    hours = Decimal(scenario.period.total_seconds()) / _HOUR
    months = max(Decimal(1), hours / prices.hours_in_month)
    connections, connections_cost = _connections(scenario, tier, went, hours, months)
    receives = _polls(scenario, _HOUR)

    def billed(used: list[Usage]) -> Bill:
        other = scenario.other_operations
        return bill(used, prices, tier.name, bandwidth=scenario.bandwidth, other_operations=other, months=months)

    return Forecast(
        scenario=scenario,
        prices=prices,
        course=went,
        idle=IdleReceives(receives, receives * 24, receives * 24 * 30),
        passages=tuple(_passages(scenario)),
        bill=billed([one for one in _used(scenario, went) if one.operations]),
        base_cost=_base(scenario, tier, prices, hours, namespaces=2),
        connections=connections,
        connections_cost=connections_cost,
        without_pair=billed(list(_traffic(scenario, CostPhase.IDLE, _messages(scenario, went)))).cost
        + _base(scenario, tier, prices, hours, namespaces=1),
    )


def _refuse(scenario: Scenario, tier: Tier, went: OutageModel) -> None:
    if scenario.subscriptions and not tier.topics:
        raise ScenarioError("subscriptions", scenario.subscriptions, f"0: the tier {tier.name} has no topics")
    if scenario.message_size > tier.largest_message:
        allowed = f"at most {tier.largest_message}, the largest message of the tier {tier.name}"
        raise ScenarioError("message_size", scenario.message_size, allowed)
    taken = scenario.outages * (went.window + went.drain)
    if taken > scenario.period.total_seconds():
        raise ScenarioError(
            "outages", scenario.outages, f"fewer: with their drains they take {taken:,.0f} s of the period"
        )


# --- what is used ----------------------------------------------------------------------------------------------------


def _used(scenario: Scenario, went: OutageModel) -> Iterator[Usage]:
    busy = scenario.outages * (went.window + went.drain)
    seconds = scenario.period.total_seconds() - busy
    yield from _traffic(scenario, CostPhase.IDLE, scenario.rate * seconds if scenario.sent is None else scenario.sent)
    yield from _standing(scenario, CostPhase.IDLE, seconds, 0)
    if scenario.outages:
        yield from _outage(scenario, went)
        yield from _drain(scenario, went)


def _messages(scenario: Scenario, went: OutageModel) -> float:
    """Of the period: all that would have been sent to the primary."""
    if scenario.sent is None:
        return scenario.rate * scenario.period.total_seconds()
    return scenario.sent + scenario.outages * went.diverted


def _traffic(scenario: Scenario, phase: CostPhase, messages: float) -> Iterator[Usage]:
    """The application's own."""
    yield _usage(phase, Stage.SEND_PRIMARY, messages, scenario.message_size, anyway=True, why="the application's sends")
    yield from _received(scenario, phase, messages)


def _received(scenario: Scenario, phase: CostPhase, messages: float) -> Iterator[Usage]:
    copies = messages * max(scenario.subscriptions, 1)
    size = scenario.message_size
    yield _usage(phase, Stage.RECEIVE_PRIMARY, copies, size, anyway=True, why="once for a queue or subscription")
    yield _usage(phase, Stage.COMPLETE_PRIMARY, copies, anyway=True, why="a peek-lock receive is completed (M2)")


def _standing(scenario: Scenario, phase: CostPhase, seconds: float, used: float) -> Iterator[Usage]:
    """What standing syphons do while nothing moves in a queue; `used`: queues that something moves in."""
    if scenario.syphon is not SyphonRuns.STANDING or not scenario.syphons:
        return
    quiet = (scenario.backlog_queues - used) / scenario.backlog_queues
    yield _usage(
        phase, Stage.EMPTY_RECEIVE, _polls(scenario, seconds) * quiet, why="long polls that bring nothing (Y2)"
    )
    scans = scenario.syphons * scenario.backlog_queues * seconds / SCAN_SECONDS
    yield _usage(phase, Stage.PEEK_BACKLOG, scans, why="every 6 h a look for messages that nobody remembers")


def _counts(scenario: Scenario, seconds: float) -> float:
    """A syphon that is looked at asks how much remains, while messages move."""
    every = scenario.count_interval.total_seconds()
    return scenario.syphons * seconds / every if every else 0


def _polls(scenario: Scenario, seconds: float) -> float:
    standing = scenario.syphons if scenario.syphon is SyphonRuns.STANDING else 0
    return standing * scenario.backlog_queues * seconds / scenario.long_poll.total_seconds()


def _outage(scenario: Scenario, went: OutageModel) -> Iterator[Usage]:
    times, phase = scenario.outages, CostPhase.OUTAGE
    answering = scenario.outage_kind is OutageKind.ANSWERING
    size, stored = scenario.message_size, scenario.message_size + ALIAS_BYTES
    yield _usage(phase, Stage.SEND_PRIMARY, times * went.vain, size, why="sends that fail until the failover, each try")
    everywhere = scenario.entities * scenario.clients
    pings = (went.pings if answering else min(went.pings, 1)) if scenario.ping is PingKind.MESSAGE else 0
    yield _usage(phase, Stage.PING, times * everywhere * pings, PING_BYTES, why="of each entity by each client (G2)")
    yield _usage(phase, Stage.SEND_BACKLOG, times * went.diverted, stored, why="every diverted message")
    watched = scenario.clients * queues_used(scenario.backlog_queues, scenario.entities)
    looked = watched * looks(scenario, went.window + went.drain if went.diverted else 0)
    yield _usage(phase, Stage.PEEK_BACKLOG, times * looked, stored, why="clients look whether anybody syphons (Y1)")
    if scenario.syphon is SyphonRuns.STANDING and scenario.syphons:
        yield from _standing_through(scenario, went)


def _standing_through(scenario: Scenario, went: OutageModel) -> Iterator[Usage]:
    """A syphon that finds the primary away puts aside what it receives, and tries again with growing pauses (Y5)."""
    times, phase = scenario.outages, CostPhase.OUTAGE
    size, stored = scenario.message_size, scenario.message_size + ALIAS_BYTES
    used = queues_used(scenario.backlog_queues, scenario.entities * scenario.clients) if went.diverted else 0
    yield from _standing(scenario, phase, times * went.window, used)
    probes = times * went.probes * scenario.entities * scenario.syphons if went.diverted else 0
    answering = scenario.outage_kind is OutageKind.ANSWERING
    yield _usage(phase, Stage.RECEIVE_BACKLOG, times * went.diverted, stored, why="as they come")
    yield _usage(phase, Stage.SETTLE_BACKLOG, times * went.aside + probes, why="put aside, and again after each probe")
    yield _usage(phase, Stage.RECEIVE_DEFERRED, probes, stored, why="one message for each probe of an entity")
    yield _usage(phase, Stage.RETURN_PRIMARY, probes if answering else 0, size, why="probes that fail")
    pages = sum(
        went.aside * SCAN_SECONDS * n / went.window / PAGE for n in range(1, int(went.window // SCAN_SECONDS) + 1)
    )
    yield _usage(phase, Stage.PEEK_BACKLOG, times * pages, PAGE * stored, why="the same looks, at what is put aside")
    counts = times * _counts(scenario, went.window if went.diverted else 0)
    yield _usage(phase, Stage.MANAGE, counts, why="how much remains, shown")
    straight = times * (went.diverted - went.aside)
    yield _usage(phase, Stage.RETURN_PRIMARY, straight, size, anyway=True, why="diverted, though the primary is back")
    yield _usage(phase, Stage.COMPLETE_BACKLOG, straight, why="diverted, though the primary is back")
    yield from _received(scenario, phase, straight)


def _drain(scenario: Scenario, went: OutageModel) -> Iterator[Usage]:
    times, phase = scenario.outages, CostPhase.DRAIN
    if not went.diverted or not scenario.syphons:
        return
    size, stored = scenario.message_size, scenario.message_size + ALIAS_BYTES
    standing = scenario.syphon is SyphonRuns.STANDING
    moved = times * (went.aside if standing else went.diverted)
    if standing:
        yield _usage(phase, Stage.RECEIVE_DEFERRED, moved, stored, why="what was put aside")
        yield _usage(phase, Stage.MANAGE, times * _counts(scenario, went.drain), why="how much remains, shown")
    else:
        queues = times * scenario.syphons * scenario.backlog_queues
        yield _usage(phase, Stage.RECEIVE_BACKLOG, moved, stored, why="every diverted message")
        yield _usage(phase, Stage.EMPTY_RECEIVE, queues * DRAIN_EMPTY_RECEIVES, why="until a queue is seen empty")
        yield _usage(phase, Stage.PEEK_BACKLOG, queues * DRAIN_PEEKS, why="whether anything was left behind")
        requests = times * (scenario.syphons * DRAIN_REQUESTS + _counts(scenario, went.drain))
        yield _usage(phase, Stage.MANAGE, requests, why="backlog queues listed; how much remains, shown")
    yield _usage(phase, Stage.RETURN_PRIMARY, moved, size, anyway=True, why="every diverted message, sent at last")
    yield _usage(phase, Stage.COMPLETE_BACKLOG, moved, why="only then (Y3)")
    yield from _received(scenario, phase, moved)
    if scenario.sent is None:
        yield from _traffic(scenario, phase, times * went.drain * scenario.rate)


def _usage(phase: CostPhase, stage: str, count: float, size: int = 0, *, anyway: bool = False, why: str) -> Usage:
    operations = round(count)
    return Usage(
        phase=phase,
        stage=str(stage),
        operations=operations,
        units=operations * billable_units(1, [size]),
        bytes=operations * size,
        anyway=anyway,
        why=why,
    )


def _passages(scenario: Scenario) -> Iterator[StageUnits]:
    """Of one diverted message."""
    home, stored = billable_units(1, [scenario.message_size]), billable_units(1, [scenario.message_size + ALIAS_BYTES])
    copies = max(scenario.subscriptions, 1)
    yield StageUnits(Stage.SEND_BACKLOG, stored, stored, stored)
    yield StageUnits(Stage.RECEIVE_BACKLOG, stored, stored, stored)
    yield StageUnits(Stage.SETTLE_BACKLOG, 0, 0, 1)
    yield StageUnits(Stage.RECEIVE_DEFERRED, 0, 0, stored)
    yield StageUnits(Stage.RETURN_PRIMARY, home, home, home)
    yield StageUnits(Stage.COMPLETE_BACKLOG, 0, 1, 1)
    yield StageUnits(Stage.RECEIVE_PRIMARY, copies * home, copies * home, copies * home)
    yield StageUnits(Stage.COMPLETE_PRIMARY, 0, copies, copies)


# --- what is not charged by operations -------------------------------------------------------------------------------


def _base(scenario: Scenario, tier: Tier, prices: Prices, hours: Decimal, *, namespaces: int) -> Decimal:
    units_cost = tier.messaging_unit_per_hour * scenario.messaging_units * namespaces * hours
    return tier.base_per_month * hours / prices.hours_in_month + units_cost


def _connections(
    scenario: Scenario, tier: Tier, went: OutageModel, hours: Decimal, months: Decimal
) -> tuple[Decimal, Decimal]:
    """The peaks of all hours over those of a month, and their cost. An outage touches one hour more than it fills."""
    links = scenario.entities * (1 + max(scenario.subscriptions, 1))
    standing = 2 * scenario.syphons if scenario.syphon is SyphonRuns.STANDING else 0
    idle = scenario.clients * links + standing
    diverting = scenario.clients * queues_used(scenario.backlog_queues, scenario.entities) if went.diverted else 0
    more = Decimal(diverting) + (2 * scenario.syphons - standing if went.diverted else 0)
    touched = min(Decimal(scenario.outages * (ceil((went.window + went.drain) / _HOUR) + 1)), hours)
    counted = (idle * hours + more * touched) / tier.connection_hours if tier.connections else Decimal(idle)
    return counted, tier.connections.cost(counted, months) if tier.connections else Decimal(0)
