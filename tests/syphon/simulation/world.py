"""A simulated world of two namespaces and several syphons, made from a seed. After its outages, all messages must move.

Runs the pumps of the product, on a simulated clock.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from random import Random

from tests.syphon.fixed_queues import FixedQueues
from tests.syphon.simulation.simulated_namespaces import (
    CERTAIN,
    UNCERTAIN,
    MessagePlace,
    SimulatedEntity,
    SimulatedMessage,
    SimulatedOutage,
    SimulatedProcess,
    SimulatedQueue,
    SimulatedTransport,
    ViolationError,
    now,
    wall,
)
from twinbus.backlog import FailureKind
from twinbus.syphon.context import SyphonOptions
from twinbus.syphon.plan import RetryPolicy
from twinbus.syphon.syphon import Syphon

from .loop import run

HORIZON = 900.0
GONE_AFTER = 60.0
LOCK = 60.0
LATEST = 24 * 3600.0
LONGEST_DRAIN = 300.0
"""Y11, in seconds: a drain that begins after the last outage waits only for locks of syphons that were killed."""


@dataclass
class Summary:
    letters: int
    operations: int
    most: int
    duplicates: int
    dead: int
    kept: int


class Ear(logging.Handler):
    """A log handler that records defects of pumps, but not refused credentials of a destination."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "is not ready" not in record.getMessage():
            self.heard.append(record.getMessage())


class World:
    """`World(seed).live()` raises ViolationError if a message is lost, repeated without a reason, or costs too much."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = chance = Random(seed)
        self.calm = chance.random() < 0.3
        paths = [f"q{index}" for index in range(chance.randint(1, 4))]
        self.entities = {path: SimulatedEntity(path, chance) for path in paths}
        self.queues = {f"b{index}": self._queue(f"b{index}", paths) for index in range(chance.randint(1, 3))}
        self.policy = RetryPolicy(first_pause=1.0, longest_pause=chance.choice((4.0, 60.0)), gone_after=GONE_AFTER)
        self.syphons = chance.randint(1, 3)
        self.lives: list[SimulatedProcess] = []
        self.calm_from = 0.0

    def _queue(self, name: str, paths: list[str]) -> SimulatedQueue:
        chance = self.chance
        letters = [
            SimulatedMessage(number, chance.choice(paths), chance.choice((None,) * 30 + ("large", "no path", "odd")))
            for number in range(1, chance.randint(1, 60))
        ]
        for letter in letters:
            # Left over from an earlier run.
            letter.where = MessagePlace.DEFERRED if chance.random() < 0.1 else MessagePlace.ACTIVE
        return SimulatedQueue(name, chance, letters, lock=chance.choice((5.0, 30.0, LOCK)))

    def live(self) -> Summary:
        ear, log = Ear(), logging.getLogger("twinbus.syphon")
        log.addHandler(ear)
        try:
            summary = run(self._live())
        finally:
            log.removeHandler(ear)
        if ear.heard:
            raise ViolationError(f"seed {self.seed}: {ear.heard}")
        return summary

    async def _live(self) -> Summary:
        begin = now()
        self.calm_from = begin + HORIZON
        self._plan_outages(begin)
        for queue in self.queues.values():
            times = sorted(self.chance.choice((0.0, self.chance.uniform(0, HORIZON))) for _ in queue.letters)
            for letter, time in zip(queue.letters, times, strict=True):
                letter.comes = begin + (time if letter.where is MessagePlace.ACTIVE else 0.0)
        syphons = [asyncio.create_task(self._syphon(begin)) for _ in range(self.syphons)]
        if not self.calm:
            for queue in self.queues.values():
                queue.trouble = self.chance.choice((0.0, 0.0, 0.02, 0.1))
        await asyncio.sleep(HORIZON)
        for queue in self.queues.values():
            queue.trouble = 0.0
        async with asyncio.timeout(LATEST):
            await asyncio.gather(*syphons)
        return self._judge()

    def _plan_outages(self, begin: float) -> None:
        chance = self.chance
        for entity in self.entities.values():
            for _ in range(chance.choice((0, 1, 1, 3))):
                first = begin + chance.choice((0.0, chance.uniform(0, HORIZON)))
                kind = chance.choice(UNCERTAIN + CERTAIN)
                entity.outages.append(
                    SimulatedOutage(first, min(first + chance.expovariate(1 / 100), begin + HORIZON), kind)
                )

    async def _syphon(self, begin: float) -> None:
        """Run a syphon that is killed at random times and started again. The last run is a drain."""
        chance = self.chance
        for _ in range(0 if self.calm else chance.choice((0, 1, 3))):
            await self._life(drain=False, seconds=chance.expovariate(1 / 100))
        left = begin + HORIZON - now()
        if left > 0 and (self.calm or chance.random() < 0.5):
            await self._life(drain=False, seconds=left + chance.uniform(0, 100), killed=False)
        elif left > 0:
            # This syphon runs through all outages, and is killed while it brings back messages that were put aside.
            await self._life(drain=True)
            await self._life(drain=False, seconds=max(begin + HORIZON - now(), 0) + chance.uniform(0, 5))
        await self._life(drain=True)

    async def _life(self, *, drain: bool, seconds: float | None = None, killed: bool = True) -> None:
        chance, life = self.chance, SimulatedProcess()
        self.lives.append(life)
        syphon = Syphon(
            SimulatedTransport(self.queues, self.entities, life),
            FixedQueues(list(self.queues)),
            primary="p",
            secondary="s",
            options=SyphonOptions(
                drain=drain,
                retry_policy=self.policy,
                window=chance.choice((5, 50, 4000)),
                rate=chance.choice((None, None, 20.0)),
            ),
            wall=wall,
            chance=chance.random,
        )
        running = asyncio.create_task(syphon.run())
        if seconds is None:
            began = now()
            await running
            if began > self.calm_from and now() - began > LONGEST_DRAIN:
                raise ViolationError(f"seed {self.seed}: a drain after the last outage took {now() - began:.0f} s")
            return
        await asyncio.sleep(seconds)
        if killed:
            life.dead = True
            running.cancel()
            for letter in (one for queue in self.queues.values() for one in queue.letters):
                letter.excuses += letter.locked_until > now()
        else:
            syphon.stop()
            await running

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _judge(self) -> Summary:
        letters = [letter for queue in self.queues.values() for letter in queue.letters]
        for letter in letters:
            self._judge_letter(letter)
        outages = [outage for entity in self.entities.values() for outage in entity.outages]
        operations = sum(letter.operations for letter in letters)
        if self.calm:
            # Y5: receive, defer, receive_deferred, send, complete; a few for each time a destination failed; and three
            # for each probe of each syphon, of which there is one in half a pause at most.
            probes = sum(10 + 2 * (outage.end - outage.begin) / self.policy.longest_pause for outage in outages)
            bound = 5 * len(letters) + self.syphons * (20 * len(outages) + 3 * probes)
            if operations > bound:
                raise ViolationError(f"seed {self.seed}: {operations} operations for {len(letters)} messages, {bound}")
        return Summary(
            len(letters),
            operations,
            max((letter.operations for letter in letters), default=0),
            sum(letter.arrivals > 1 for letter in letters),
            sum(letter.where is MessagePlace.DEAD for letter in letters),
            sum(letter.where is MessagePlace.DEFERRED for letter in letters),
        )

    def _judge_letter(self, letter: SimulatedMessage) -> None:
        where = {
            None: MessagePlace.GONE,
            "large": MessagePlace.DEAD,
            "no path": MessagePlace.DEAD,
            "odd": MessagePlace.DEFERRED,
        }[letter.flaw]
        gone = any(
            outage.kind is FailureKind.ENTITY_NOT_FOUND and outage.end - outage.begin >= GONE_AFTER
            for outage in self.entities[letter.path].outages
        )
        allowed = {where, MessagePlace.DEAD} if gone and letter.flaw is None else {where}
        if letter.where not in allowed:
            raise ViolationError(f"seed {self.seed}: {letter} should be {where}")
        if letter.wronged:
            raise ViolationError(f"seed {self.seed}: {letter} was completed before it arrived")
        if letter.where is MessagePlace.GONE and not letter.arrivals:
            raise ViolationError(f"seed {self.seed}: {letter} is lost")
        if self.calm and letter.arrivals and letter.arrived > self._latest(letter):
            raise ViolationError(f"seed {self.seed}: {letter} arrived late")
        if letter.arrivals > 1 + letter.excuses:
            raise ViolationError(f"seed {self.seed}: {letter} arrived {letter.arrivals} times without a reason")

    def _latest(self, letter: SimulatedMessage) -> float:
        """Return the latest time for a message: without waiting for another syphon, or for the next scan."""
        ends = [outage.end for outage in self.entities[letter.path].outages]
        return max(letter.comes, *ends, 0.0) + 2 * self.policy.longest_pause + 2 * LOCK + 60.0
