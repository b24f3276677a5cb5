"""The model of an outage, compared with the constants, state machines and pumps of the product."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from random import Random

import pytest

from tests.syphon.fixed_queues import FixedQueues
from tests.syphon.simulation.loop import run
from tests.syphon.simulation.simulated_namespaces import (
    SimulatedBacklog,
    SimulatedEntity,
    SimulatedMessage,
    SimulatedOutage,
    SimulatedProcess,
    SimulatedQueue,
    SimulatedTransport,
    now,
    wall,
)
from twinbus.backlog import FailureKind
from twinbus.ledger import Stage
from twinbus.money import OutageKind, Prices, Scenario, SyphonRuns, forecast
from twinbus.money import outage_model as habits
from twinbus.money.outage_model import model_outage, queues_used, state_writes
from twinbus.pairing import SendAvailabilityOptions, StateReading, state_queue, state_sharing
from twinbus.pairing.decide import failover, failover_events
from twinbus.pairing.decide.known_state import change_to_share
from twinbus.pairing.decide.rotation import Rotation
from twinbus.pairing.decide.send_flow import choose_queue
from twinbus.syphon import RetryPolicy, SharedHolds, Syphon, SyphonOptions, transport
from twinbus.syphon.plan import deferred
from twinbus.syphon.transport import PeekedMessage

HOUR = timedelta(hours=1)


def test_m4_the_constants_of_the_outage_model_are_those_of_the_syphon_and_the_pair() -> None:
    policy, options, scenario = RetryPolicy(), SendAvailabilityOptions(), Scenario()
    assert (policy.first_pause, policy.longest_pause) == (habits.FIRST_PAUSE, habits.LONGEST_PAUSE)
    assert (deferred.SCAN_INTERVAL, transport.PEEK_PAGE_SIZE) == (habits.SCAN_SECONDS, habits.PEEK_PAGE_SIZE)
    assert scenario.long_poll.total_seconds() == SyphonOptions().poll
    assert scenario.backlog_queues == options.backlog_queue_count
    for name in ("failover_interval", "ping_interval", "ping_jitter", "backlog_check_interval"):
        assert getattr(scenario, name) == getattr(options, name)


async def test_m4_the_constants_of_a_shared_state_are_those_of_pairs_and_syphons() -> None:
    async def read() -> StateReading:
        raise NotImplementedError

    assert (state_queue.PEEK_PAGE, state_sharing._WRITE_PAUSE) == (habits.PEEK_PAGE_SIZE, habits.STATE_WRITE_PAUSE)
    assert SharedHolds.of_state(read, in_secondary=True)._max_age == habits.STATE_MAX_AGE


@pytest.mark.parametrize("seconds", [61, 121, 600, 3600])
def test_s16_m4_a_failover_has_as_many_changes_as_the_failover_machine_shares(seconds: int) -> None:
    scenario = Scenario(outage=timedelta(seconds=seconds), rate=2, ping_jitter=0)
    changes: list[object] = []

    def note(before: failover.Entity, event: failover_events.Event, after: failover.Entity, now: float) -> None:
        changes.append(change_to_share(before, after, event, now, wall=now, writer="a", longest_ping=12.0))

    walked(seconds, chance=0.0, on_step=note)
    assert state_writes(scenario, model_outage(scenario)) == sum(change is not None for change in changes)


@pytest.mark.parametrize("seconds", [61, 119, 121, 600, 3600, 8 * 3600])
def test_g2_s3_pings_and_restore_happen_when_the_failover_machine_has_them(seconds: int) -> None:
    scenario = Scenario(outage=timedelta(seconds=seconds), rate=2)
    pings, restored = walked(seconds, chance=0.5)
    went = model_outage(scenario)
    assert went.pings == pings
    assert went.seconds == pytest.approx(restored)
    assert went.diverted == pytest.approx(2 * (restored - 60))


Step = Callable[[failover.Entity, failover_events.Event, failover.Entity, float], None]


def walked(seconds: float, chance: float, on_step: Step = lambda *_: None) -> tuple[int, float]:
    """Return the number of pings in an outage of `seconds`, and when sends go to the primary again."""
    entity = failover.Entity("orders", failover.FailoverPolicy(), 0.0)

    def advance(event: failover_events.Event, now: float) -> failover.Entity:
        after = failover.advance(entity, event, now, chance).entity
        on_step(entity, event, after, now)
        return after

    entity = advance(failover_events.PrimarySendFailed(FailureKind.TIMEOUT), 0.0)
    entity = advance(failover_events.FailoverTimerFired(), 60.0)
    pings = 0
    while entity.next_ping is not None:
        at, pings = entity.next_ping, pings + 1
        entity = advance(failover_events.PingDue(), at)
        episode = entity.episode
        back = at >= seconds
        answer = (
            failover_events.PingSucceeded(episode) if back else failover_events.PingFailed(episode, FailureKind.TIMEOUT)
        )
        entity = advance(answer, at)
        if back:
            return pings, at
    raise AssertionError("nobody pings any more")


def test_s6_senders_that_pick_at_random_use_so_many_queues_on_average() -> None:
    chance = Random(1)
    rotation = Rotation(tuple(str(number) for number in range(10)), probation=30.0)
    used = [len({choose_queue(rotation.usable, None, chance.random()) for _ in range(5)}) for _ in range(2000)]
    assert sum(used) / len(used) == pytest.approx(queues_used(10, 5), rel=0.03)


# --- hours of a syphon's life, on the simulation's clock --------------------------------------------------------------

QUEUES = 3
SPREAD = 10
"""Allowed difference for small counts: random pauses and the ends of polls change them."""


class WholePages(SimulatedBacklog):
    """A backlog whose peeks return full pages, as those of a namespace do."""

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        found: list[PeekedMessage] = []
        while len(found) < count and (page := await super().peek(start, count - len(found))):
            found += page
            start = page[-1].sequence_number + 1
        return found


class Transport(SimulatedTransport):
    def __init__(
        self, queues: dict[str, SimulatedQueue], entities: dict[str, SimulatedEntity], life: SimulatedProcess
    ) -> None:
        super().__init__(queues, entities, life)
        self._made = {path: WholePages(queue, life) for path, queue in queues.items()}

    def backlog(self, queue: str) -> SimulatedBacklog:
        return self._made[queue]


class Simulated:
    """A standing syphon on three backlog queues. One of the queues gets the messages diverted in the outages."""

    def __init__(self, scenario: Scenario, begins: tuple[float, ...]) -> None:
        went, chance = model_outage(scenario), Random(7)
        first = scenario.failover_interval.total_seconds()
        per_outage = round(went.diverted)
        self.outages = [
            SimulatedOutage(at, at + scenario.outage.total_seconds(), FailureKind.ENTITY_DISABLED) for at in begins
        ]
        letters = [
            SimulatedMessage(number, "orders", comes=at + first + n / scenario.rate)
            for index, at in enumerate(begins)
            for n, number in enumerate(range(1 + index * per_outage, 1 + (index + 1) * per_outage))
        ]
        self.queues = {f"b{n}": SimulatedQueue(f"b{n}", chance, letters if n == 0 else [], 60.0) for n in range(QUEUES)}
        self.entities = {"orders": SimulatedEntity("orders", chance, self.outages)}
        self._chance = chance
        self._seconds = scenario.period.total_seconds()

    async def live(self) -> dict[str, int]:
        """Run the simulation. Returns the operations by stage, as the syphon counts them."""
        start = now()
        for letter in self.queues["b0"].letters:
            letter.comes += start
        for outage in self.outages:
            outage.begin, outage.end = outage.begin + start, outage.end + start
        transport = Transport(self.queues, self.entities, SimulatedProcess())
        syphon = Syphon(
            transport, FixedQueues(list(self.queues)), primary="p", secondary="s", wall=wall, chance=self._chance.random
        )
        running = asyncio.create_task(syphon.run())
        await asyncio.sleep(self._seconds)
        counted = dict(syphon.progress().operations)
        syphon.stop()
        await running
        return counted


@pytest.mark.parametrize(
    ("outage", "begins", "period", "rate"),
    [
        (timedelta(minutes=30), (3600.0,), 8 * HOUR, 0.5),
        (8 * HOUR, (3600.0,), 24 * HOUR, 0.03),
        (timedelta(minutes=10), tuple(1800.0 * n for n in range(1, 9)), 8 * HOUR, 0.2),
    ],
    ids=["short", "long", "flapping"],
)
def test_m4_a_standing_syphon_makes_the_forecast_operations_within_1_percent(
    outage: timedelta, begins: tuple[float, ...], period: timedelta, rate: float
) -> None:
    scenario = Scenario(
        backlog_queues=QUEUES,
        rate=rate,
        outage=outage,
        outages=len(begins),
        period=period,
        count_interval=timedelta(0),
        backlog_check_interval=timedelta(0),
        syphon=SyphonRuns.STANDING,
        outage_kind=OutageKind.ANSWERING,
    )
    counted = run(Simulated(scenario, begins).live())
    found = forecast(scenario, Prices.default()).bill
    stages = (
        Stage.RECEIVE_BACKLOG,
        Stage.EMPTY_RECEIVE,
        Stage.SETTLE_BACKLOG,
        Stage.RECEIVE_DEFERRED,
        Stage.RETURN_PRIMARY,
        Stage.COMPLETE_BACKLOG,
        Stage.PEEK_BACKLOG,
        Stage.RENEW_BACKLOG,
    )
    foreseen = {str(stage): found.of(stage=stage).operations for stage in stages}
    actual = {str(stage): counted.get(stage, 0) for stage in stages}
    assert sum(actual.values()) == pytest.approx(sum(foreseen.values()), rel=0.01), (foreseen, actual)
    # Errors of different stages must not cancel each other.
    for stage, count in foreseen.items():
        assert actual[stage] == pytest.approx(count, rel=0.01, abs=SPREAD), (foreseen, actual)
