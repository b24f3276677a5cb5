"""The cost of a scenario (M4): operations, units, bytes and money by stage and phase (idle, outage, drain).

`outage_model` describes an outage; this module counts the operations of the outage and computes their cost. Pure.

Counts are fractions until all needs of a stage are added up, and only then rounded. So the sum over the phases of a
stage is exact, and a forecast for what a ledger shows (`Scenario.observed`) has exactly the ledger's messages and
units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from math import ceil
from typing import Final, NamedTuple

from twinbus.ledger.entries import Stage, billable_units  # pure, unlike `twinbus.ledger`
from twinbus.money.billing import Bill, Usage, base_cost, bill, rounded
from twinbus.money.observed import NO_SIZE, MessageMix
from twinbus.money.outage_model import (
    DRAIN_EMPTY_RECEIVES,
    DRAIN_PEEKS,
    DRAIN_REQUESTS,
    PEEK_PAGE_SIZE,
    SCAN_SECONDS,
    STATE_MAX_AGE,
    STATE_PAGES,
    OutageModel,
    backlog_checks,
    model_observed,
    model_outage,
    queues_used,
    state_writes,
)
from twinbus.money.prices import Prices, Tier
from twinbus.money.scenario import OutageKind, PingKind, Scenario, ScenarioError, SharedStateIn, SyphonRuns

ALIAS_BYTES: Final = 64
"""About the number of bytes that the aliases of S7 add to a message."""
RECEIVED_BYTES: Final = 215
"""Bytes that the service adds to a message that is received, as measured on a local namespace."""
PING_BYTES: Final = 150
STATE_WRITES: Final = "clients write failovers, pings and restores for other processes"
"""What a line of the forecast is for that has these writes."""
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
    outages: tuple[tuple[OutageModel, int], ...]
    """The models of the outages, each with the number of such outages in the period."""
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
    def outage(self) -> OutageModel:
        """The model of one outage of a scenario that was not observed: all of its outages are equal."""
        return self.outages[0][0]

    @property
    def cost(self) -> Decimal:
        return self.bill.cost + self.base_cost + self.connections_cost


def forecast(scenario: Scenario, prices: Prices) -> Forecast:
    """Returns the forecast. Raises ScenarioError if the tier lacks a feature or the outages exceed the period."""
    tier = prices.tier(scenario.tier)
    outages = _outages(scenario)
    _check(scenario, tier, outages)
    hours = Decimal(scenario.period.total_seconds()) / _HOUR
    months = max(Decimal(1), hours / prices.hours_in_month)
    connections, connections_cost = _connections(scenario, tier, outages, hours, months)
    receives = _polls(scenario, _HOUR)
    units = scenario.messaging_units

    def billed(needs: Iterable[_Need]) -> Bill:
        other = scenario.other_operations
        used = [one for one in _rounded(needs) if one.operations]
        return bill(used, prices, tier.name, bandwidth=scenario.bandwidth, other_operations=other, months=months)

    return Forecast(
        scenario=scenario,
        prices=prices,
        outages=outages,
        idle=IdleReceives(receives, receives * 24, receives * 24 * 30),
        message_units=tuple(_message_units(scenario)),
        bill=billed(_needs(scenario, outages)),
        base_cost=base_cost(tier, prices, hours, messaging_units=units),
        connections=connections,
        connections_cost=rounded(connections_cost),
        without_pair=billed(_without_pair(scenario, outages)).cost
        + base_cost(tier, prices, hours, messaging_units=units, namespaces=1),
    )


def _outages(scenario: Scenario) -> tuple[tuple[OutageModel, int], ...]:
    if scenario.observed is None:
        return ((model_outage(scenario), scenario.outages),)
    return tuple((model_observed(scenario, one), 1) for one in scenario.observed.outages)


def _check(scenario: Scenario, tier: Tier, outages: tuple[tuple[OutageModel, int], ...]) -> None:
    if scenario.subscriptions and not tier.topics:
        raise ScenarioError("subscriptions", scenario.subscriptions, f"0: the tier {tier.name} has no topics")
    if scenario.message_size > tier.largest_message:
        allowed = f"at most {tier.largest_message}, the largest message of the tier {tier.name}"
        raise ScenarioError("message_size", scenario.message_size, allowed)
    busy = _busy(outages)
    if scenario.observed is None and busy > scenario.period.total_seconds():
        raise ScenarioError(
            "outages", scenario.outages, f"fewer: with their drains they take {busy:,.0f} s of the period"
        )


def _busy(outages: Iterable[tuple[OutageModel, int]]) -> float:
    """Returns the seconds of all outages and their drains."""
    return sum(times * (outage.seconds + outage.drain_seconds) for outage, times in outages)


# --- messages --------------------------------------------------------------------------------------------------------


class _Mixes(NamedTuple):
    """Sizes and copies of the messages: sent directly, and diverted (in the backlog, and after the return)."""

    sent: MessageMix
    stored: MessageMix
    home: MessageMix

    @classmethod
    def of(cls, scenario: Scenario) -> _Mixes:
        size, subscriptions = scenario.message_size, scenario.subscriptions
        usual = MessageMix.uniform(size, subscriptions)
        seen = scenario.observed
        sent = usual if seen is None or seen.sent is None else seen.sent
        if seen is None or seen.diverted is None:
            return cls(sent, MessageMix.uniform(size + ALIAS_BYTES, subscriptions), usual)
        return cls(sent, seen.diverted, seen.home or seen.diverted.with_more_bytes(-ALIAS_BYTES))


def _sent(scenario: Scenario, seconds: float) -> float:
    """Returns how many messages are sent to the primary in all `seconds` without an outage."""
    if scenario.observed is not None:
        return 0 if scenario.observed.sent is None else scenario.observed.sent.messages
    return scenario.rate * seconds if scenario.sent is None else scenario.sent


# --- what is needed --------------------------------------------------------------------------------------------------


class _Need(NamedTuple):
    """Operations of one stage in one phase, not rounded yet."""

    phase: CostPhase
    stage: str
    amount: float
    mix: MessageMix = NO_SIZE
    anyway: bool = False
    fails: bool = False
    why: str = ""


def _rounded(needs: Iterable[_Need]) -> list[Usage]:
    """Adds up equal needs and returns them as whole operations, in the order of the phases.

    The rounded counts of a stage add up to the rounded sum of its counts.
    """
    sums: dict[_Need, float] = {}
    for need in needs:
        key = need._replace(amount=0)
        sums[key] = sums.get(key, 0.0) + need.amount
    order = list(CostPhase)
    found: list[Usage] = []
    exact: dict[tuple[str, MessageMix, bool], float] = {}
    done: dict[tuple[str, MessageMix, bool], int] = {}
    for need in sorted(sums, key=lambda one: order.index(one.phase)):
        mix, of_stage = need.mix, (need.stage, need.mix, need.fails)
        before = done.get(of_stage, 0)
        exact[of_stage] = exact.get(of_stage, 0.0) + sums[need]
        after = done[of_stage] = max(round(exact[of_stage]), before)
        found.append(
            Usage(
                phase=need.phase,
                stage=str(need.stage),
                operations=after - before,
                units=after * mix.units // mix.messages - before * mix.units // mix.messages,
                bytes=after * mix.bytes // mix.messages - before * mix.bytes // mix.messages,
                anyway=need.anyway,
                fails=need.fails,
                why=need.why,
            )
        )
    return found


def _needs(scenario: Scenario, outages: tuple[tuple[OutageModel, int], ...]) -> Iterator[_Need]:
    seconds = max(scenario.period.total_seconds() - _busy(outages), 0.0)
    mixes = _Mixes.of(scenario)
    yield from _traffic(CostPhase.IDLE, _sent(scenario, seconds), mixes.sent)
    yield from _standing(scenario, CostPhase.IDLE, seconds * _standing_share(scenario), 0)
    if scenario.state is SharedStateIn.SECONDARY:
        why = "each client looks at the shared state when it starts"
        yield _Need(CostPhase.IDLE, Stage.PEEK_BACKLOG, scenario.clients, why=why)
    for outage, times in outages:
        if times:
            if scenario.state is SharedStateIn.SECONDARY:
                yield from _shared_state(scenario, outage, times)
            yield from _outage(scenario, outage, times, mixes)
            yield from _drain(scenario, outage, times, mixes)


def _without_pair(scenario: Scenario, outages: tuple[tuple[OutageModel, int], ...]) -> Iterator[_Need]:
    """Yields what the same messages need without a pair, in a period without outages."""
    mixes, period = _Mixes.of(scenario), scenario.period.total_seconds()
    if scenario.sent is None and scenario.observed is None:
        yield from _traffic(CostPhase.IDLE, scenario.rate * period, mixes.sent)
        return
    yield from _traffic(CostPhase.IDLE, _sent(scenario, period), mixes.sent)
    yield from _traffic(CostPhase.IDLE, sum(times * outage.diverted for outage, times in outages), mixes.home)


def _traffic(phase: CostPhase, messages: float, mix: MessageMix) -> Iterator[_Need]:
    """Yields the needs of the application itself: its sends, and the receives of these messages."""
    yield _Need(phase, Stage.SEND_PRIMARY, messages, mix, anyway=True, why="the application's sends")
    yield from _received(phase, messages, mix)


def _received(phase: CostPhase, messages: float, mix: MessageMix) -> Iterator[_Need]:
    copies, copied = messages * mix.copies / mix.messages, mix.as_copies().with_more_bytes(RECEIVED_BYTES)
    yield _Need(
        phase, Stage.RECEIVE_PRIMARY, copies, copied, anyway=True, why="each message once per queue or subscription"
    )
    yield _Need(phase, Stage.COMPLETE_PRIMARY, copies, anyway=True, why="completion of a peek-lock receive")


def _standing_share(scenario: Scenario) -> float:
    """Returns the share of the period in which the standing syphons run."""
    seen, whole = scenario.observed, scenario.syphons * scenario.period.total_seconds()
    return 1.0 if seen is None or seen.syphon_seconds is None or not whole else min(seen.syphon_seconds / whole, 1.0)


def _standing(scenario: Scenario, phase: CostPhase, seconds: float, used: float) -> Iterator[_Need]:
    """Yields the needs of standing syphons on queues without messages. `used` is the number of queues with messages."""
    if scenario.syphon is not SyphonRuns.STANDING or not scenario.syphons:
        return
    quiet = (scenario.backlog_queues - used) / scenario.backlog_queues
    yield _Need(phase, Stage.EMPTY_RECEIVE, _polls(scenario, seconds) * quiet, why="long polls without a message")
    scans = scenario.syphons * scenario.backlog_queues * seconds / SCAN_SECONDS
    yield _Need(phase, Stage.PEEK_BACKLOG, scans, why="a scan for forgotten messages every 6 h")


def _counts(scenario: Scenario, seconds: float) -> float:
    """Returns how often displays of syphons request the number of remaining messages in `seconds` of a drain."""
    every = scenario.count_interval.total_seconds()
    return scenario.syphons * seconds / every if every else 0


def _polls(scenario: Scenario, seconds: float) -> float:
    standing = scenario.syphons if scenario.syphon is SyphonRuns.STANDING else 0
    return standing * scenario.backlog_queues * seconds / scenario.long_poll.total_seconds()


def _outage(scenario: Scenario, outage: OutageModel, times: int, mixes: _Mixes) -> Iterator[_Need]:
    phase = CostPhase.OUTAGE
    failed = times * outage.failed_sends
    yield _Need(
        phase, Stage.SEND_PRIMARY, failed, mixes.sent, fails=True, why="sends that fail before the failover, each try"
    )
    if scenario.ping is PingKind.MESSAGE:
        ping = MessageMix.uniform(PING_BYTES)
        why = "pings that succeed: each client per entity"
        yield _Need(phase, Stage.PING, times * outage.good_pings, ping, why=why)
        if scenario.outage_kind is OutageKind.ANSWERING:
            yield _Need(phase, Stage.PING, times * outage.bad_pings, ping, fails=True, why="pings that fail")
    yield _Need(phase, Stage.SEND_BACKLOG, times * outage.diverted, mixes.stored, why="every diverted message")
    watched = scenario.clients * queues_used(scenario.backlog_queues, scenario.entities)
    checks = watched * backlog_checks(scenario, outage.seconds + outage.drain_seconds if outage.diverted else 0)
    yield _Need(phase, Stage.PEEK_BACKLOG, times * checks, mixes.stored, why="clients check whether a syphon works")
    if scenario.syphon is SyphonRuns.STANDING and scenario.syphons:
        yield from _standing_in_outage(scenario, outage, times, mixes)


def _standing_in_outage(scenario: Scenario, outage: OutageModel, times: int, mixes: _Mixes) -> Iterator[_Need]:
    """Yields the needs of standing syphons in an outage: they put messages aside and probe with growing pauses (Y5)."""
    phase, stored, received = CostPhase.OUTAGE, mixes.stored, mixes.stored.with_more_bytes(RECEIVED_BYTES)
    used = queues_used(scenario.backlog_queues, scenario.entities * scenario.clients) if outage.diverted else 0
    yield from _standing(scenario, phase, times * outage.seconds, used)
    probes = times * outage.probes * scenario.entities * scenario.syphons if outage.diverted else 0
    answering = scenario.outage_kind is OutageKind.ANSWERING
    yield _Need(phase, Stage.RECEIVE_BACKLOG, times * outage.diverted, received, why="diverted messages as they arrive")
    settled = times * outage.put_aside + probes
    yield _Need(phase, Stage.SETTLE_BACKLOG, settled, why="put aside, and again after each probe")
    yield _Need(phase, Stage.RECEIVE_DEFERRED, probes, received, why="one message per probe of an entity")
    yield _Need(phase, Stage.RETURN_PRIMARY, probes if answering else 0, mixes.home, fails=True, why="probes that fail")
    pages = sum(
        outage.put_aside * SCAN_SECONDS * n / outage.seconds / PEEK_PAGE_SIZE
        for n in range(1, int(outage.seconds // SCAN_SECONDS) + 1)
    )
    page = MessageMix.uniform(PEEK_PAGE_SIZE * stored.bytes // stored.messages)
    yield _Need(phase, Stage.PEEK_BACKLOG, times * pages, page, why="the scan, of messages put aside")
    counts = times * _counts(scenario, outage.seconds if outage.diverted else 0)
    yield _Need(phase, Stage.MANAGE, counts, why="display of the remaining messages")
    straight, why = times * (outage.diverted - outage.put_aside), "diverted messages received after the outage"
    yield _Need(phase, Stage.RETURN_PRIMARY, straight, mixes.home, anyway=True, why=why)
    yield _Need(phase, Stage.COMPLETE_BACKLOG, straight, why=why)
    yield from _received(phase, straight, mixes.home)


def _drain(scenario: Scenario, outage: OutageModel, times: int, mixes: _Mixes) -> Iterator[_Need]:
    phase = CostPhase.DRAIN
    if not outage.diverted or not scenario.syphons:
        return
    standing, received = scenario.syphon is SyphonRuns.STANDING, mixes.stored.with_more_bytes(RECEIVED_BYTES)
    moved = times * (outage.put_aside if standing else outage.diverted)
    if standing:
        yield _Need(phase, Stage.RECEIVE_DEFERRED, moved, received, why="messages that were put aside")
        counts = times * _counts(scenario, outage.drain_seconds)
        yield _Need(phase, Stage.MANAGE, counts, why="display of the remaining messages")
    else:
        runs = _drain_runs(scenario, times)
        queues = runs * scenario.backlog_queues
        yield _Need(phase, Stage.RECEIVE_BACKLOG, moved, received, why="every diverted message")
        yield _Need(phase, Stage.EMPTY_RECEIVE, queues * DRAIN_EMPTY_RECEIVES, why="receives that find a queue empty")
        yield _Need(phase, Stage.PEEK_BACKLOG, queues * DRAIN_PEEKS, why="check that nothing was left behind")
        requests = runs * DRAIN_REQUESTS + times * _counts(scenario, outage.drain_seconds)
        yield _Need(phase, Stage.MANAGE, requests, why="list of backlog queues; display of the remaining messages")
    yield _Need(phase, Stage.RETURN_PRIMARY, moved, mixes.home, anyway=True, why="every diverted message")
    yield _Need(phase, Stage.COMPLETE_BACKLOG, moved, why="every diverted message, after its send")
    yield from _received(phase, moved, mixes.home)
    if scenario.sent is None and scenario.observed is None:
        yield from _traffic(phase, times * outage.drain_seconds * scenario.rate, mixes.sent)


def _shared_state(scenario: Scenario, outage: OutageModel, times: int) -> Iterator[_Need]:
    """Yields the needs of pairs and syphons that share their state in the secondary (S15, S16)."""
    yield _Need(CostPhase.OUTAGE, Stage.MANAGE, times * state_writes(scenario, outage), why=STATE_WRITES)
    holds = "a ping that succeeded: does an operator hold the entity?"
    yield _Need(CostPhase.OUTAGE, Stage.PEEK_BACKLOG, times * outage.good_pings * STATE_PAGES, why=holds)
    if not outage.diverted or not scenario.syphons:
        return
    looks, why = times * scenario.syphons * STATE_PAGES, "syphons look for holds before they move messages"
    if scenario.syphon is SyphonRuns.STANDING:
        arriving = min(outage.seconds / STATE_MAX_AGE, outage.diverted)
        yield _Need(CostPhase.OUTAGE, Stage.PEEK_BACKLOG, looks * arriving, why=why)
    yield _Need(CostPhase.DRAIN, Stage.PEEK_BACKLOG, looks * ceil(outage.drain_seconds / STATE_MAX_AGE), why=why)


def _drain_runs(scenario: Scenario, times: int) -> float:
    """Returns how many syphons drain the backlog after `times` outages."""
    seen = scenario.observed
    if seen is None or seen.drains is None:
        return times * scenario.syphons
    return seen.drains / max(sum(1 for one in seen.outages if one.diverted), 1)


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


def _connections(
    scenario: Scenario, tier: Tier, outages: tuple[tuple[OutageModel, int], ...], hours: Decimal, months: Decimal
) -> tuple[Decimal, Decimal]:
    """Returns the mean number of connections, and their cost.

    The service charges the peak of each hour. An outage of n hours can raise the peaks of n + 1 hours.
    """
    links = scenario.entities * (1 + max(scenario.subscriptions, 1))
    standing = 2 * scenario.syphons if scenario.syphon is SyphonRuns.STANDING else 0
    idle = scenario.clients * links + standing
    used = Decimal(scenario.clients * queues_used(scenario.backlog_queues, scenario.entities))
    more = used + 2 * scenario.syphons - standing if any(outage.diverted for outage, _ in outages) else Decimal(0)
    raised = sum(times * (ceil((one.seconds + one.drain_seconds) / _HOUR) + 1) for one, times in outages)
    hourly = idle * hours + more * min(Decimal(raised), hours)
    counted = hourly / tier.connection_hours if tier.connections else Decimal(idle)
    return counted, tier.connections.cost(counted, months) if tier.connections else Decimal(0)
