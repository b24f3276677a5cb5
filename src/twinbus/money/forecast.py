"""The cost of a scenario (M4): operations, units, bytes and money by stage and phase (idle, outage, drain).

`outage_model` describes an outage; this module counts the operations of the outage and computes their cost. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from math import ceil
from typing import Final

from twinbus.ledger.entries import Stage, billable_units  # pure, unlike `twinbus.ledger`
from twinbus.money.billing import Bill, Usage, bill
from twinbus.money.outage_model import (
    DRAIN_EMPTY_RECEIVES,
    DRAIN_PEEKS,
    DRAIN_REQUESTS,
    PEEK_PAGE_SIZE,
    SCAN_SECONDS,
    OutageModel,
    backlog_checks,
    model_outage,
    queues_used,
)
from twinbus.money.prices import Prices, Tier
from twinbus.money.scenario import OutageKind, PingKind, Scenario, ScenarioError, SyphonRuns

ALIAS_BYTES: Final = 64
"""About the number of bytes that the aliases of S7 add to a message."""
PING_BYTES: Final = 150
_DAY, _HOUR = 86_400, 3600


class CostPhase(StrEnum):
    """The part of a period that a line of a forecast belongs to."""

    IDLE = "idle"
    OUTAGE = "outage"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class IdleReceives:
    """The number of receives of all syphons in an hour, a day and 30 days without messages (Y2)."""

    hour: float
    day: float
    thirty_days: float


@dataclass(frozen=True, slots=True)
class StageUnits:
    """Billable units of one diverted message in one stage."""

    stage: str
    clause: int
    """Units as clause M1 counts them."""
    billed: int
    """Units that the service charges today."""
    put_aside: int
    """Units that the service charges today if a syphon received the message during the outage and put it aside."""


@dataclass(frozen=True, slots=True)
class Forecast:
    scenario: Scenario
    prices: Prices
    outage: OutageModel
    idle: IdleReceives
    message_units: tuple[StageUnits, ...]
    """The units of one diverted message, stage by stage."""
    bill: Bill
    """One line per phase and stage."""
    base_cost: Decimal
    connections: Decimal
    connections_cost: Decimal
    without_pair: Decimal
    """Cost of the same messages without a pair and without outages: one namespace, with its base cost."""

    @property
    def cost(self) -> Decimal:
        return self.bill.cost + self.base_cost + self.connections_cost


def forecast(scenario: Scenario, prices: Prices) -> Forecast:
    """Returns the forecast. Raises ScenarioError if the tier lacks a feature or the outages exceed the period."""
    tier = prices.tier(scenario.tier)
    outage = model_outage(scenario)
    _check(scenario, tier, outage)
    hours = Decimal(scenario.period.total_seconds()) / _HOUR
    months = max(Decimal(1), hours / prices.hours_in_month)
    connections, connections_cost = _connections(scenario, tier, outage, hours, months)
    receives = _polls(scenario, _HOUR)

    def billed(used: list[Usage]) -> Bill:
        other = scenario.other_operations
        return bill(used, prices, tier.name, bandwidth=scenario.bandwidth, other_operations=other, months=months)

    return Forecast(
        scenario=scenario,
        prices=prices,
        outage=outage,
        idle=IdleReceives(receives, receives * 24, receives * 24 * 30),
        message_units=tuple(_message_units(scenario)),
        bill=billed([one for one in _used(scenario, outage) if one.operations]),
        base_cost=_base(scenario, tier, prices, hours, namespaces=2),
        connections=connections,
        connections_cost=connections_cost,
        without_pair=billed(list(_traffic(scenario, CostPhase.IDLE, _messages(scenario, outage)))).cost
        + _base(scenario, tier, prices, hours, namespaces=1),
    )


def _check(scenario: Scenario, tier: Tier, outage: OutageModel) -> None:
    if scenario.subscriptions and not tier.topics:
        raise ScenarioError("subscriptions", scenario.subscriptions, f"0: the tier {tier.name} has no topics")
    if scenario.message_size > tier.largest_message:
        allowed = f"at most {tier.largest_message}, the largest message of the tier {tier.name}"
        raise ScenarioError("message_size", scenario.message_size, allowed)
    busy = scenario.outages * (outage.seconds + outage.drain_seconds)
    if busy > scenario.period.total_seconds():
        raise ScenarioError(
            "outages", scenario.outages, f"fewer: with their drains they take {busy:,.0f} s of the period"
        )


# --- what is used ----------------------------------------------------------------------------------------------------


def _used(scenario: Scenario, outage: OutageModel) -> Iterator[Usage]:
    busy = scenario.outages * (outage.seconds + outage.drain_seconds)
    seconds = scenario.period.total_seconds() - busy
    yield from _traffic(scenario, CostPhase.IDLE, scenario.rate * seconds if scenario.sent is None else scenario.sent)
    yield from _standing(scenario, CostPhase.IDLE, seconds, 0)
    if scenario.outages:
        yield from _outage(scenario, outage)
        yield from _drain(scenario, outage)


def _messages(scenario: Scenario, outage: OutageModel) -> float:
    """Returns how many messages would be sent to the primary in a period without outages."""
    if scenario.sent is None:
        return scenario.rate * scenario.period.total_seconds()
    return scenario.sent + scenario.outages * outage.diverted


def _traffic(scenario: Scenario, phase: CostPhase, messages: float) -> Iterator[Usage]:
    """Yields the usage of the application itself: its sends, and the receives of these messages."""
    yield _usage(phase, Stage.SEND_PRIMARY, messages, scenario.message_size, anyway=True, why="the application's sends")
    yield from _received(scenario, phase, messages)


def _received(scenario: Scenario, phase: CostPhase, messages: float) -> Iterator[Usage]:
    copies = messages * max(scenario.subscriptions, 1)
    size = scenario.message_size
    yield _usage(
        phase, Stage.RECEIVE_PRIMARY, copies, size, anyway=True, why="each message once per queue or subscription"
    )
    yield _usage(phase, Stage.COMPLETE_PRIMARY, copies, anyway=True, why="completion of a peek-lock receive (M2)")


def _standing(scenario: Scenario, phase: CostPhase, seconds: float, used: float) -> Iterator[Usage]:
    """Yields the usage of standing syphons on queues without messages. `used` is the number of queues with messages."""
    if scenario.syphon is not SyphonRuns.STANDING or not scenario.syphons:
        return
    quiet = (scenario.backlog_queues - used) / scenario.backlog_queues
    yield _usage(phase, Stage.EMPTY_RECEIVE, _polls(scenario, seconds) * quiet, why="long polls without a message (Y2)")
    scans = scenario.syphons * scenario.backlog_queues * seconds / SCAN_SECONDS
    yield _usage(phase, Stage.PEEK_BACKLOG, scans, why="a scan for forgotten messages every 6 h")


def _counts(scenario: Scenario, seconds: float) -> float:
    """Returns how often displays of syphons request the number of remaining messages in `seconds` of a drain."""
    every = scenario.count_interval.total_seconds()
    return scenario.syphons * seconds / every if every else 0


def _polls(scenario: Scenario, seconds: float) -> float:
    standing = scenario.syphons if scenario.syphon is SyphonRuns.STANDING else 0
    return standing * scenario.backlog_queues * seconds / scenario.long_poll.total_seconds()


def _outage(scenario: Scenario, outage: OutageModel) -> Iterator[Usage]:
    times, phase = scenario.outages, CostPhase.OUTAGE
    answering = scenario.outage_kind is OutageKind.ANSWERING
    size, stored = scenario.message_size, scenario.message_size + ALIAS_BYTES
    failed = times * outage.failed_sends
    yield _usage(phase, Stage.SEND_PRIMARY, failed, size, why="sends that fail before the failover, each try")
    everywhere = scenario.entities * scenario.clients
    pings = (outage.pings if answering else min(outage.pings, 1)) if scenario.ping is PingKind.MESSAGE else 0
    yield _usage(phase, Stage.PING, times * everywhere * pings, PING_BYTES, why="pings of each client per entity (G2)")
    yield _usage(phase, Stage.SEND_BACKLOG, times * outage.diverted, stored, why="every diverted message")
    watched = scenario.clients * queues_used(scenario.backlog_queues, scenario.entities)
    checks = watched * backlog_checks(scenario, outage.seconds + outage.drain_seconds if outage.diverted else 0)
    yield _usage(phase, Stage.PEEK_BACKLOG, times * checks, stored, why="clients check whether a syphon works (Y1)")
    if scenario.syphon is SyphonRuns.STANDING and scenario.syphons:
        yield from _standing_in_outage(scenario, outage)


def _standing_in_outage(scenario: Scenario, outage: OutageModel) -> Iterator[Usage]:
    """Yields the usage of standing syphons in an outage: they put messages aside and probe with growing pauses (Y5)."""
    times, phase = scenario.outages, CostPhase.OUTAGE
    size, stored = scenario.message_size, scenario.message_size + ALIAS_BYTES
    used = queues_used(scenario.backlog_queues, scenario.entities * scenario.clients) if outage.diverted else 0
    yield from _standing(scenario, phase, times * outage.seconds, used)
    probes = times * outage.probes * scenario.entities * scenario.syphons if outage.diverted else 0
    answering = scenario.outage_kind is OutageKind.ANSWERING
    yield _usage(phase, Stage.RECEIVE_BACKLOG, times * outage.diverted, stored, why="diverted messages as they arrive")
    settled = times * outage.put_aside + probes
    yield _usage(phase, Stage.SETTLE_BACKLOG, settled, why="put aside, and again after each probe")
    yield _usage(phase, Stage.RECEIVE_DEFERRED, probes, stored, why="one message per probe of an entity")
    yield _usage(phase, Stage.RETURN_PRIMARY, probes if answering else 0, size, why="probes that fail")
    pages = sum(
        outage.put_aside * SCAN_SECONDS * n / outage.seconds / PEEK_PAGE_SIZE
        for n in range(1, int(outage.seconds // SCAN_SECONDS) + 1)
    )
    yield _usage(
        phase, Stage.PEEK_BACKLOG, times * pages, PEEK_PAGE_SIZE * stored, why="the scan, of messages put aside"
    )
    counts = times * _counts(scenario, outage.seconds if outage.diverted else 0)
    yield _usage(phase, Stage.MANAGE, counts, why="display of the remaining messages")
    straight = times * (outage.diverted - outage.put_aside)
    yield _usage(
        phase, Stage.RETURN_PRIMARY, straight, size, anyway=True, why="diverted messages received after the outage"
    )
    yield _usage(phase, Stage.COMPLETE_BACKLOG, straight, why="diverted messages received after the outage")
    yield from _received(scenario, phase, straight)


def _drain(scenario: Scenario, outage: OutageModel) -> Iterator[Usage]:
    times, phase = scenario.outages, CostPhase.DRAIN
    if not outage.diverted or not scenario.syphons:
        return
    size, stored = scenario.message_size, scenario.message_size + ALIAS_BYTES
    standing = scenario.syphon is SyphonRuns.STANDING
    moved = times * (outage.put_aside if standing else outage.diverted)
    if standing:
        yield _usage(phase, Stage.RECEIVE_DEFERRED, moved, stored, why="messages that were put aside")
        counts = times * _counts(scenario, outage.drain_seconds)
        yield _usage(phase, Stage.MANAGE, counts, why="display of the remaining messages")
    else:
        queues = times * scenario.syphons * scenario.backlog_queues
        yield _usage(phase, Stage.RECEIVE_BACKLOG, moved, stored, why="every diverted message")
        yield _usage(phase, Stage.EMPTY_RECEIVE, queues * DRAIN_EMPTY_RECEIVES, why="receives that find a queue empty")
        yield _usage(phase, Stage.PEEK_BACKLOG, queues * DRAIN_PEEKS, why="check that nothing was left behind")
        requests = times * (scenario.syphons * DRAIN_REQUESTS + _counts(scenario, outage.drain_seconds))
        yield _usage(phase, Stage.MANAGE, requests, why="list of backlog queues; display of the remaining messages")
    yield _usage(phase, Stage.RETURN_PRIMARY, moved, size, anyway=True, why="every diverted message")
    yield _usage(phase, Stage.COMPLETE_BACKLOG, moved, why="every diverted message, after its send (Y3)")
    yield from _received(scenario, phase, moved)
    if scenario.sent is None:
        yield from _traffic(scenario, phase, times * outage.drain_seconds * scenario.rate)


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


def _message_units(scenario: Scenario) -> Iterator[StageUnits]:
    """Yields the units of one diverted message, stage by stage."""
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
    scenario: Scenario, tier: Tier, outage: OutageModel, hours: Decimal, months: Decimal
) -> tuple[Decimal, Decimal]:
    """Returns the mean number of connections, and their cost.

    The service charges the peak of each hour. An outage of n hours can raise the peaks of n + 1 hours.
    """
    links = scenario.entities * (1 + max(scenario.subscriptions, 1))
    standing = 2 * scenario.syphons if scenario.syphon is SyphonRuns.STANDING else 0
    idle = scenario.clients * links + standing
    diverting = scenario.clients * queues_used(scenario.backlog_queues, scenario.entities) if outage.diverted else 0
    more = Decimal(diverting) + (2 * scenario.syphons - standing if outage.diverted else 0)
    raised = min(Decimal(scenario.outages * (ceil((outage.seconds + outage.drain_seconds) / _HOUR) + 1)), hours)
    counted = (idle * hours + more * raised) / tier.connection_hours if tier.connections else Decimal(idle)
    return counted, tier.connections.cost(counted, months) if tier.connections else Decimal(0)
