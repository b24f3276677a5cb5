"""A model of one outage: the pings, the diverted messages, and what a syphon does during the outage (G2, S3, Y5).

The constants are copies of intervals and counts in other packages of Twinbus. A test checks that both are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from typing import Final

from twinbus.money.observed import ObservedOutage
from twinbus.money.scenario import OutageKind, Scenario, SyphonRuns

SCAN_SECONDS: Final = 6 * 3600.0
"""Seconds between two scans, in which a standing syphon peeks at a queue for deferred messages with unknown numbers."""
PEEK_PAGE_SIZE: Final = 250
"""The most messages that one peek returns."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 300.0
"""Y5: the pauses between a syphon's probes of a destination double, from the first to the longest."""
PAUSE_SHARE: Final = 0.75
"""Jitter shortens a pause by up to a half. So on average a pause is this share of its full length."""
DRAIN_EMPTY_RECEIVES: Final = 2
DRAIN_PEEKS: Final = 1
DRAIN_REQUESTS: Final = 2
"""A drain begins with DRAIN_REQUESTS requests: a list of the queues, and a count of their messages. At the end of each
queue it makes DRAIN_EMPTY_RECEIVES empty receives and DRAIN_PEEKS peeks."""
STATE_PAGES: Final = 2
"""Peeks of a look at a state queue with up to PEEK_PAGE_SIZE messages: the last peek finds nothing."""
STATE_WRITE_PAUSE: Final = 1.0
"""Seconds between two writes of a process. Changes of entities within this time are one message."""
STATE_MAX_AGE: Final = 2.0
"""Seconds for which a syphon believes what it has read, while it moves messages."""


@dataclass(frozen=True, slots=True)
class OutageModel:
    """What happens in one outage."""

    seconds: float
    """From the beginning of the outage until sends go to the primary again."""
    drain_seconds: float
    failed_sends: float
    """Messages in sends that fail before the failover; a message counts once per try. At least the first call of each
    client to each entity fails."""
    diverted: float
    """Number of diverted messages."""
    put_aside: float
    """Number of diverted messages that a standing syphon receives during the outage, and puts aside."""
    pings: int
    """Number of pings per entity and client. The last ping succeeds."""
    probes: int
    """Number of probes of a syphon that fail, per entity."""
    good_pings: int
    """Number of pings that succeed, of all entities and clients."""
    bad_pings: int
    """Number of pings that fail, of all entities and clients."""
    failovers: int = 0
    """Number of failovers, of all entities and clients."""


def model_outage(scenario: Scenario) -> OutageModel:
    """Returns the model of one outage of the scenario."""
    length, interval = scenario.outage.total_seconds(), scenario.failover_interval.total_seconds()
    failovers = scenario.clients * scenario.entities
    failed_sends = _failed_sends(scenario, length, failovers)
    if length <= interval or not scenario.rate:
        # The outage ends before the failover timer fires, or nobody sends (S3): nothing is diverted.
        return OutageModel(length, 0.0, failed_sends, 0.0, 0.0, 0, 0, 0, 0)
    every = scenario.ping_interval.total_seconds()
    # Jitter delays the first ping; half of the largest delay is the mean.
    late = every * scenario.ping_jitter / 2
    pings = max(1, ceil((length - interval - late) / every))
    seconds = interval + late + pings * every
    diverted = scenario.rate * (seconds - interval)
    if scenario.diverted is not None:
        diverted = scenario.diverted / max(scenario.outages, 1)
    put_aside, probes = 0.0, 0
    if scenario.syphon is SyphonRuns.STANDING and scenario.syphons:
        probes, noticed = _failed_probes(length - interval)
        put_aside = diverted * min(noticed / (seconds - interval), 1)
    drained = put_aside if scenario.syphon is SyphonRuns.STANDING else diverted
    drain_seconds = drained / scenario.drain_rate if scenario.syphons else 0.0
    bad_pings = failovers * (pings - 1)
    return OutageModel(
        seconds, drain_seconds, failed_sends, diverted, put_aside, pings, probes, failovers, bad_pings, failovers
    )


def model_observed(scenario: Scenario, seen: ObservedOutage) -> OutageModel:
    """Returns the model of an outage whose failover, restore and diverted messages a ledger shows."""
    interval, every = scenario.failover_interval.total_seconds(), scenario.ping_interval.total_seconds()
    pings = [floor(one.seconds / (every * (1 + scenario.ping_jitter / 2))) for one in seen.failovers]
    good = sum(one.processes for one in seen.failovers if one.restored)
    # The last ping of a failover that was restored is the one that succeeded.
    bad = sum(
        one.processes * (max(count, 1) - 1 if one.restored else count)
        for one, count in zip(seen.failovers, pings, strict=True)
    )
    put_aside, probes = 0.0, 0
    if scenario.syphon is SyphonRuns.STANDING and scenario.syphons and seen.failovers:
        # On average the primary is back half a ping interval before the ping that finds it.
        away = max(seen.seconds - every / 2, 0.0)
        probes, noticed = _failed_probes(away)
        put_aside = seen.diverted * min(noticed / seen.seconds, 1) if seen.seconds else float(seen.diverted)
    return OutageModel(
        seen.seconds,
        seen.drain_seconds,
        _failed_sends(scenario, interval, seen.processes),
        seen.diverted,
        put_aside,
        max(pings, default=0),
        probes,
        good,
        bad,
        seen.processes,
    )


def _failed_sends(scenario: Scenario, seconds: float, failovers: int) -> float:
    """Returns how many messages fail in the `seconds` until the failover. A message counts once per try."""
    until = min(seconds, scenario.failover_interval.total_seconds())
    answered = scenario.rate * until if scenario.outage_kind is OutageKind.ANSWERING and failovers else 0.0
    return max(answered, scenario.batch * failovers if scenario.rate else 0) * scenario.tries


def _failed_probes(seconds: float) -> tuple[int, float]:
    """Returns how many probes of a syphon fail in an outage of `seconds`, and the time of the first that succeeds."""
    at, pause, failed = 0.0, FIRST_PAUSE, 1
    while True:
        at += pause * PAUSE_SHARE
        if at >= seconds:
            return failed, at
        failed += 1
        pause = min(pause * 2, LONGEST_PAUSE)


def queues_used(queues: int, senders: int) -> float:
    """Returns how many queues have a sender on average, if every sender chooses a queue at random (S6)."""
    return queues * (1 - (1 - 1 / queues) ** senders)


def state_writes(scenario: Scenario, outage: OutageModel) -> float:
    """Returns the messages that all clients send to the state queue in one outage (S16).

    A client writes each failover, each ping when it begins and when it fails, and each restore. It writes the first
    change at once, and all others of the next STATE_WRITE_PAUSE in one message. The changes of a client's entities are
    spread over time by the jitter of the first ping.
    """
    changes = outage.failovers + 2 * (outage.bad_pings + outage.good_pings)
    spread = scenario.ping_interval.total_seconds() * scenario.ping_jitter / STATE_WRITE_PAUSE
    return changes * queues_used(ceil(spread) + 2, scenario.entities) / scenario.entities


def backlog_checks(scenario: Scenario, seconds: float) -> int:
    """Returns how often a client peeks at a backlog queue that it used, if the queue is empty after `seconds` (Y1)."""
    every = scenario.backlog_check_interval.total_seconds()
    return floor(seconds / every) + 1 if every and seconds else 0
