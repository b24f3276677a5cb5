"""How an outage goes, in numbers: when pings go out, how much is diverted, what a syphon does meanwhile (G2, S3, Y5).

The habits of Twinbus that cost something are named here; a test holds them to those of the parts themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from typing import Final

from twinbus.money.scenario import OutageKind, Scenario, SyphonRuns

SCAN_SECONDS: Final = 6 * 3600.0
"""A standing pump peeks at its queue so often, for messages that nobody remembers."""
PAGE: Final = 250
"""Messages in one of these peeks."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 300.0
"""Y5: pauses between a syphon's probes of a destination double from the one to the other …"""
PAUSE_SHARE: Final = 0.75
"""… and are shortened by up to a half, by chance: this is their mean."""
DRAIN_EMPTY_RECEIVES: Final = 2
DRAIN_PEEKS: Final = 1
DRAIN_REQUESTS: Final = 2
"""A drain begins by listing the queues and counting what they hold; it ends each with these receives and this peek."""


@dataclass(frozen=True, slots=True)
class OutageModel:
    """Of one outage. `window`: seconds from its beginning until sends go to the primary again.

    `vain`: messages of sends that failed until the failover, each try; each client's first call for an entity does.
    `diverted`: messages; `aside`: those of them that a standing syphon received while the primary was away, and had to
    put aside. `probes`: its sends that failed, for each entity. `pings`: of each entity and client, the last one good.
    """

    window: float
    drain: float
    vain: float
    diverted: float
    aside: float
    pings: int
    probes: int


def course(scenario: Scenario) -> OutageModel:
    length, interval = scenario.outage.total_seconds(), scenario.failover_interval.total_seconds()
    first = scenario.batch * scenario.clients * scenario.entities
    answered = scenario.rate * min(length, interval) if scenario.outage_kind is OutageKind.ANSWERING else 0.0
    vain = max(answered, first if scenario.rate else 0) * scenario.tries
    if length <= interval or not scenario.rate:
        # Over before the timer fired, or nobody sent (S3): nothing is diverted.
        return OutageModel(length, 0.0, vain, 0.0, 0.0, 0, 0)
    every = scenario.ping_interval.total_seconds()
    # The first ping is put off by up to the jitter; half of it is the mean.
    late = every * scenario.ping_jitter / 2
    pings = max(1, ceil((length - interval - late) / every))
    window = interval + late + pings * every
    diverted = scenario.rate * (window - interval)
    if scenario.diverted is not None:
        diverted = scenario.diverted / max(scenario.outages, 1)
    aside, probes = 0.0, 0
    if scenario.syphon is SyphonRuns.STANDING and scenario.syphons:
        probes, noticed = _probes(length - interval)
        aside = diverted * min(noticed / (window - interval), 1)
    carried = aside if scenario.syphon is SyphonRuns.STANDING else diverted
    drain = carried / scenario.drain_rate if scenario.syphons else 0.0
    return OutageModel(window, drain, vain, diverted, aside, pings, probes)


def _probes(away: float) -> tuple[int, float]:
    """Of a primary that is away for so many seconds more: sends of a syphon that fail, and when one succeeds."""
    at, pause, failed = 0.0, FIRST_PAUSE, 1
    while True:
        at += pause * PAUSE_SHARE
        if at >= away:
            return failed, at
        failed += 1
        pause = min(pause * 2, LONGEST_PAUSE)


def queues_used(queues: int, senders: int) -> float:
    """S6: every sender picks one at random. So many of them have a sender, on average."""
    return queues * (1 - (1 - 1 / queues) ** senders)


def looks(scenario: Scenario, seconds: float) -> int:
    """Y1: how often a client peeks at a backlog queue it used, that is empty again after so long."""
    every = scenario.backlog_check_interval.total_seconds()
    return floor(seconds / every) + 1 if every and seconds else 0
