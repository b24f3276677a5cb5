"""One trouble at a time, on the simulation's clock: what goes wrong with a load, a rate, a syphon that is to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from twinbus.ledger.entries import Stage
from twinbus.pairing.failures import FailureKind
from twinbus.syphon.discovery import Named
from twinbus.syphon.loads import Load
from twinbus.syphon.plan.shelf import RESCAN_AFTER
from twinbus.syphon.room import Step, SyphonOptions
from twinbus.syphon.syphon import Syphon
from twinbus.syphon.transport import BacklogFailedError, Held

from .loop import run
from .places import Entity, Grip, Letter, Life, Outage, Queue, SimulatedBacklog, SimulatedTransport, Where, now, wall

LOCK = 30.0


class Place:
    """One backlog queue of letters for `paths` in turn, and syphons on it. `breaks`: the first call of it fails."""

    def __init__(self, count: int, *paths: str, where: Where = Where.ACTIVE) -> None:
        chance = Random(1)
        self.paths = paths or ("orders",)
        self.letters = [
            Letter(number, self.paths[number % len(self.paths)], where=where) for number in range(1, count + 1)
        ]
        self.queue = Queue("b", chance, self.letters, LOCK)
        self.entities = {path: Entity(path, chance) for path in self.paths}
        self.breaks: str | None = None

    @asynccontextmanager
    async def syphon(self, steps: Any = None, **options: Any) -> AsyncIterator[Syphon]:
        made = Syphon(
            _Transport(self),
            Named(["b"]),
            primary="p",
            secondary="s",
            options=SyphonOptions(**options),
            steps=steps,
            wall=wall,
            chance=lambda: 0.5,
        )
        running = asyncio.create_task(made.run())
        yield made
        made.stop()
        await running

    def count(self, where: Where) -> int:
        return sum(letter.where is where for letter in self.letters)


class _Backlog(SimulatedBacklog):
    def __init__(self, place: Place) -> None:
        super().__init__(place.queue, Life())
        self._place = place

    async def complete(self, held: Sequence[Held]) -> Sequence[Held]:
        if self._place.breaks == "complete":
            self._place.breaks = None
            raise BacklogFailedError("b", FailureKind.CONNECTION_LOST)
        return await super().complete(held)

    async def renew(self, held: Sequence[Held]) -> Sequence[Held]:
        if self._place.breaks == "renew":
            self._place.breaks = None
            for one in held:
                one.letter.holder = None  # type: ignore[attr-defined] # a Grip: its lock is lost
        return await super().renew(held)

    async def receive(self, count: int, wait: float) -> Sequence[Grip]:
        try:
            return await super().receive(count, wait)
        except asyncio.CancelledError:
            if self._place.breaks != "cancel":
                raise
            self._place.breaks = None
            raise BacklogFailedError("b", FailureKind.CONNECTION_LOST) from None


class _Transport(SimulatedTransport):
    def __init__(self, place: Place) -> None:
        super().__init__({"b": place.queue}, place.entities, Life())
        self._place = place

    def backlog(self, queue: str) -> SimulatedBacklog:
        return _Backlog(self._place)


@pytest.mark.parametrize("trouble", ["complete", "renew", "crash"])
def test_y5_what_was_brought_back_and_went_wrong_is_looked_for_again(trouble: str) -> None:
    async def live() -> None:
        place = Place(2, where=Where.DEFERRED)
        crashes = [Step.SENDING] if trouble == "crash" else []

        def steps(step: Step, _: Sequence[Held]) -> None:
            if step in crashes:
                crashes.clear()
                raise SystemError("a crash")

        place.breaks = trouble
        if trouble == "renew":
            # Not sent before the lock is lost, and then not once more.
            place.entities["orders"].outages.append(Outage(now(), now() + 2 * LOCK, FailureKind.TIMEOUT))
            place.queue.lock = 8.0
        async with place.syphon(steps):
            await asyncio.sleep(RESCAN_AFTER + 120)
            assert place.count(Where.GONE) == 2

    run(live())


def test_s11_only_confirmed_completions_are_told_as_moved() -> None:
    async def live() -> None:
        place, told = Place(4), list[int]()
        place.breaks = "complete"
        async with place.syphon() as syphon:
            syphon._room.emptied = lambda _, moved: told.append(moved)
            await asyncio.sleep(LOCK * 3)
        assert sum(told) == 4

    run(live())


def test_y3_a_job_that_fails_leaves_the_rest_of_its_load_held_until_that_is_over() -> None:
    async def live() -> None:
        place, crashed = Place(2, "slow", "orders"), asyncio.Event()
        place.entities["slow"].outages.append(Outage(now(), now() + 8.0, FailureKind.TIMEOUT))

        def steps(step: Step, held: Sequence[Held]) -> None:
            if step is Step.CONFIRMED and not crashed.is_set():
                crashed.set()
                raise SystemError("a crash")

        async with place.syphon(steps) as syphon:
            await crashed.wait()
            await asyncio.sleep(1.0)
            assert syphon.progress().held == 2
            syphon.stop()
        assert place.count(Where.DEFERRED) == 1  # put aside before `run` returned

    run(live())


def test_y4_a_load_whose_first_message_is_settled_is_renewed_no_more_often() -> None:
    async def live() -> None:
        letters = [Letter(number, "orders") for number in (1, 2)]
        first, second = (Grip(letter, LOCK) for letter in letters)
        load = Load([first, second], now(), wall())
        load.settled([first])
        await asyncio.sleep(LOCK / 2)
        letters[1].locked_until = now() + LOCK
        load.renewed(now(), wall())
        assert load.renew_at == now() + LOCK / 2

    run(live())


@pytest.mark.parametrize("where", [Where.ACTIVE, Where.DEFERRED])
def test_y9_a_rate_is_kept_without_hoarding_and_a_stop_is_soon(where: Where) -> None:
    async def live() -> None:
        place, rate, seconds = Place(3000, where=where), 20.0, 60
        async with place.syphon(rate=rate) as syphon:
            while not syphon.progress().total.returned:  # noqa: ASYNC110 - what was deferred is looked for first
                await asyncio.sleep(0.1)
            begin, most = now(), 0
            for second in range(1, seconds + 1):
                await asyncio.sleep(begin + second - now())
                most = max(most, syphon.progress().held)
                assert syphon.progress().total.returned <= rate * (second + 1)
            assert syphon.progress().total.returned >= 0.9 * rate * (seconds - 2)
            assert most <= rate
            assert Stage.RENEW_BACKLOG not in syphon.progress().operations
            stopped = now()
        assert now() - stopped < 1.0

    run(live())


def test_y9_a_low_rate_is_left_at_once_for_a_higher_one_and_for_a_stop() -> None:
    async def live() -> None:
        place = Place(100)
        async with place.syphon(rate=0.01) as syphon:
            await asyncio.sleep(10.0)
            assert syphon.progress().total.returned <= 1
            syphon.set_rate(None)
            await asyncio.sleep(3.0)
            assert place.count(Where.GONE) == 100
            syphon.set_rate(0.01)
            stopped = now()
        assert now() - stopped < 1.0

    run(live())


def test_y9_a_cancellation_that_a_transport_swallows_does_not_keep_a_syphon_from_stopping() -> None:
    async def live() -> None:
        place = Place(0)
        place.breaks = "cancel"
        async with place.syphon():
            await asyncio.sleep(5.0)
            stopped = now()
        assert now() - stopped < 5.0
        assert place.breaks is None

    run(live())
