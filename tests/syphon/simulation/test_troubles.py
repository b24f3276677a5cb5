"""One failure at a time, on the simulated clock: in a batch, with a rate limit, while a syphon stops."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.syphon.fixed_queues import FixedQueues
from tests.syphon.simulation.simulated_namespaces import (
    MessagePlace,
    SimulatedBacklog,
    SimulatedEntity,
    SimulatedHeld,
    SimulatedMessage,
    SimulatedOutage,
    SimulatedProcess,
    SimulatedQueue,
    SimulatedTransport,
    now,
    wall,
)
from twinbus.backlog import FailureKind
from twinbus.ledger import Intent, Ledger, LedgerOptions, Operation, Outcome, Role, Stage, read_ledger
from twinbus.syphon.context import MoveStep, SyphonContext, SyphonOptions
from twinbus.syphon.held_batch import HeldBatch
from twinbus.syphon.mover import Mover
from twinbus.syphon.plan import DeferredMessages
from twinbus.syphon.plan.deferred import RESCAN_AFTER_FAILURE, RESCAN_AFTER_MISSING
from twinbus.syphon.progress import ProgressCounter
from twinbus.syphon.syphon import Syphon, SyphonBrokenError
from twinbus.syphon.syphon_ledger import SyphonLedger
from twinbus.syphon.transport import BacklogFailedError, HeldMessage, OutgoingMessage

from .loop import run

LOCK = 30.0


class Place:
    """One backlog queue with messages for `paths` in turn, and syphons on it. `breaks`: its first call fails."""

    def __init__(self, count: int, *paths: str, where: MessagePlace = MessagePlace.ACTIVE) -> None:
        chance = Random(1)
        self.paths = paths or ("orders",)
        self.letters = [
            SimulatedMessage(number, self.paths[number % len(self.paths)], where=where)
            for number in range(1, count + 1)
        ]
        self.queue = SimulatedQueue("b", chance, self.letters, LOCK)
        self.entities = {path: SimulatedEntity(path, chance) for path in self.paths}
        self.breaks: str | None = None

    @asynccontextmanager
    async def syphon(
        self, on_step: Any = None, *, ahead: timedelta = timedelta(0), lock: float | None = None, **options: Any
    ) -> AsyncIterator[Syphon]:
        """`ahead`: how far the clock of the machine is ahead. `lock`: the lock duration, if the syphon may know it."""
        made = Syphon(
            _Transport(self),
            FixedQueues(["b"], lock),
            primary="p",
            secondary="s",
            options=SyphonOptions(**options),
            on_step=on_step,
            wall=lambda: wall() + ahead,
            chance=lambda: 0.5,
        )
        running = asyncio.create_task(made.run())
        yield made
        made.stop()
        await running

    def count(self, where: MessagePlace) -> int:
        return sum(letter.where is where for letter in self.letters)


class _Backlog(SimulatedBacklog):
    def __init__(self, place: Place) -> None:
        super().__init__(place.queue, SimulatedProcess())
        self._place = place

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        if self._place.breaks == "complete":
            self._place.breaks = None
            raise BacklogFailedError("b", FailureKind.CONNECTION_LOST)
        return await super().complete(held)

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        if self._place.breaks == "renew":
            self._place.breaks = None
            for one in held:
                one.letter.holder = None  # type: ignore[attr-defined] # a Grip: its lock is lost
        return await super().renew(held)

    async def receive(self, count: int, wait: float) -> Sequence[SimulatedHeld]:
        if self._place.breaks == "inside":
            self._place.breaks = None
            raise asyncio.CancelledError
        try:
            return await super().receive(count, wait)
        except asyncio.CancelledError:
            if self._place.breaks != "cancel":
                raise
            self._place.breaks = None
            raise BacklogFailedError("b", FailureKind.CONNECTION_LOST) from None

    async def stop_receiving(self) -> Sequence[SimulatedHeld]:
        if self._place.breaks == "away":
            raise BacklogFailedError("b", FailureKind.CONNECTION_LOST)
        return await super().stop_receiving()


class _Transport(SimulatedTransport):
    def __init__(self, place: Place) -> None:
        super().__init__({"b": place.queue}, place.entities, SimulatedProcess())
        self._place = place

    def backlog(self, queue: str) -> SimulatedBacklog:
        return _Backlog(self._place)


@pytest.mark.parametrize("trouble", ["complete", "renew", "crash"])
def test_y5_messages_of_a_recall_that_failed_are_scanned_for_again(trouble: str) -> None:
    async def live() -> None:
        place = Place(2, where=MessagePlace.DEFERRED)
        crashes = [MoveStep.SENDING] if trouble == "crash" else []

        def steps(step: MoveStep, _: Sequence[HeldMessage]) -> None:
            if step in crashes:
                crashes.clear()
                raise SystemError("a crash")

        place.breaks = trouble
        if trouble == "renew":
            # Not sent before the lock is lost, and not sent after that.
            place.entities["orders"].outages.append(SimulatedOutage(now(), now() + 2 * LOCK, FailureKind.TIMEOUT))
            place.queue.lock = 8.0
        async with place.syphon(steps):
            await asyncio.sleep(RESCAN_AFTER_MISSING + 120)
            assert place.count(MessagePlace.GONE) == 2

    run(live())


def test_s11_only_confirmed_completions_are_reported_as_moved() -> None:
    async def live() -> None:
        place, told = Place(4), list[int]()
        place.breaks = "complete"
        async with place.syphon() as syphon:
            syphon._context.on_emptied = lambda _, moved: told.append(moved)
            await asyncio.sleep(LOCK * 3)
        assert sum(told) == 4

    run(live())


def test_y3_a_settlement_that_fails_leaves_the_rest_of_its_batch_held_until_that_is_over() -> None:
    async def live() -> None:
        place, crashed = Place(2, "slow", "orders"), asyncio.Event()
        place.entities["slow"].outages.append(SimulatedOutage(now(), now() + 8.0, FailureKind.TIMEOUT))

        def steps(step: MoveStep, held: Sequence[HeldMessage]) -> None:
            if step is MoveStep.CONFIRMED and not crashed.is_set():
                crashed.set()
                raise SystemError("a crash")

        async with place.syphon(steps) as syphon:
            await crashed.wait()
            await asyncio.sleep(1.0)
            assert syphon.progress().held == 2
            syphon.stop()
        assert place.count(MessagePlace.DEFERRED) == 1  # put aside before `run` returned

    run(live())


def test_y4_a_batch_whose_first_message_is_settled_is_renewed_no_more_often() -> None:
    async def live() -> None:
        letters = [SimulatedMessage(number, "orders") for number in (1, 2)]
        first, second = (SimulatedHeld(letter, LOCK) for letter in letters)
        load = HeldBatch([first, second], now(), wall())
        load.settled([first])
        await asyncio.sleep(LOCK / 2)
        letters[1].locked_until = now() + LOCK
        load.renewed(now(), wall())
        assert load.renew_at == now() + LOCK / 2

    run(live())


@pytest.mark.parametrize("minutes", [-20, 0, 20])
@pytest.mark.parametrize("where", [MessagePlace.ACTIVE, MessagePlace.DEFERRED])
def test_l5_y4_locks_are_renewed_neither_late_nor_often_whatever_the_clock_shows(
    where: MessagePlace, minutes: int
) -> None:
    async def live() -> None:
        place = Place(1, where=where)
        place.entities["orders"] = _SlowEntity("orders", Random(1))
        async with place.syphon(ahead=timedelta(minutes=minutes), lock=LOCK) as syphon:
            await asyncio.sleep(2 * _SlowEntity.seconds)
            operations = syphon.progress().operations
        assert place.count(MessagePlace.GONE) == 1
        assert [letter.arrivals for letter in place.letters] == [1]
        assert operations[Stage.RENEW_BACKLOG] == _SlowEntity.seconds // (LOCK / 2)

    run(live())


class _SlowEntity(SimulatedEntity):
    seconds = 100.0

    async def take(self, messages: Sequence[OutgoingMessage]) -> None:
        await asyncio.sleep(self.seconds)
        self._arrive(messages)


@pytest.mark.parametrize("where", [MessagePlace.ACTIVE, MessagePlace.DEFERRED])
def test_y9_a_rate_is_kept_without_hoarding_and_a_stop_is_soon(where: MessagePlace) -> None:
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
            assert place.count(MessagePlace.GONE) == 100
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


def test_y1_a_pause_and_a_stop_while_the_secondary_is_away_do_not_end_a_syphon_with_an_error() -> None:
    async def live() -> None:
        place = Place(0)
        place.breaks = "away"
        async with place.syphon() as syphon:
            await asyncio.sleep(5.0)
            syphon.pause()
            await asyncio.sleep(5.0)
            assert syphon.state == "paused"
            place.letters.append(SimulatedMessage(1, "orders", comes=now()))
            syphon.resume()
            await asyncio.sleep(5.0)
            assert place.count(MessagePlace.GONE) == 1
        await syphon.close()

    run(live())


def test_y1_a_loop_of_a_pump_that_is_cancelled_by_another_part_does_not_end_unnoticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def live() -> None:
        place = Place(1)
        place.breaks = "inside"
        with pytest.raises(SyphonBrokenError):
            async with place.syphon():
                await asyncio.sleep(5.0)

    run(live())
    assert "the pump of b broke" in caplog.text


class Failing:
    """A discovery that fails this number of times before it succeeds."""

    def __init__(self, failures: int) -> None:
        self.asked: list[float] = []
        self._failures = failures

    async def queues(self) -> Sequence[str]:
        self.asked.append(now())
        if len(self.asked) <= self._failures:
            raise ConnectionError("away")
        return ["b"]

    def lock_seconds(self, queue: str) -> float | None:
        return None

    async def remaining(self) -> int | None:
        return None

    async def close(self) -> None: ...


def test_y1_discovery_is_retried_after_growing_pauses_while_the_secondary_is_away() -> None:
    async def main() -> None:
        place, discovery = Place(3), Failing(8)
        options = SyphonOptions()
        async with Syphon(
            _Transport(place), discovery, primary="p", secondary="s", options=options, wall=wall, chance=lambda: 0.5
        ) as syphon:
            running = asyncio.create_task(syphon.run())
            await asyncio.sleep(500)
            assert place.count(MessagePlace.GONE) == 3
            # The same once its queues are known, an hour later.
            discovery._failures = len(discovery.asked) + 6
            await asyncio.sleep(3600 + 200)
            syphon.stop()
            await running
        pauses = [round(later - before) for before, later in itertools.pairwise(discovery.asked)]
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 3600, 1, 2, 4, 8, 16, 32]

    run(main())


class Growing(Failing):
    """A discovery that finds the queues that exist: `later` at the given times."""

    def __init__(self, later: dict[str, float]) -> None:
        super().__init__(0)
        self.later = later

    async def queues(self) -> Sequence[str]:
        self.asked.append(now())
        return [queue for queue, made_at in self.later.items() if now() >= made_at]


@asynccontextmanager
async def searching(place: Place, discovery: Growing) -> AsyncIterator[Syphon]:
    async with Syphon(
        _Transport(place), discovery, primary="p", secondary="s", wall=wall, chance=lambda: 0.5
    ) as syphon:
        running = asyncio.create_task(syphon.run())
        yield syphon
        syphon.stop()
        await running


def test_y1_queues_that_are_made_after_the_syphon_started_are_found_within_a_minute() -> None:
    async def main() -> None:
        began = now()
        place, discovery = Place(3), Growing({"b": began + 1000.0})
        async with searching(place, discovery):
            await asyncio.sleep(1000.0 + 60.0 + 1.0)
            assert place.count(MessagePlace.GONE) == 3
        pauses = [round(later - before) for before, later in itertools.pairwise(discovery.asked)]
        assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
        assert set(pauses[8:]) == {60}

    run(main())


def test_y1_queues_that_are_made_while_others_exist_already_are_found_within_a_minute() -> None:
    async def main() -> None:
        began = now()
        place, discovery = Place(3), Growing({"another": began, "b": began + 5.0})
        async with searching(place, discovery) as syphon:
            await asyncio.sleep(61.0)
            assert syphon.queues == ("another", "b")

    run(main())


def test_y1_a_syphon_that_hears_of_new_queues_searches_at_once() -> None:
    async def main() -> None:
        began = now()
        place, discovery = Place(3), Growing({"another": began})
        async with searching(place, discovery) as syphon:
            await asyncio.sleep(2000.0)
            searches = len(discovery.asked)
            discovery.later["b"] = now()
            syphon.search_queues_now()
            await asyncio.sleep(1.0)
            assert len(discovery.asked) == searches + 1
            assert syphon.queues == ("another", "b")

    run(main())


def test_y5_what_was_deferred_without_an_answer_is_found_again_once_its_lock_would_have_ended() -> None:
    async def main() -> None:
        place = Place(4)
        place.entities["orders"].outages.append(SimulatedOutage(now(), now() + 30.0, FailureKind.ENTITY_DISABLED))
        place.breaks = "defer"
        async with place.syphon() as syphon:
            await asyncio.sleep(RESCAN_AFTER_FAILURE + 60.0)
            assert syphon.progress().total.returned == 4

    run(main())


def test_m1_an_intent_that_the_ledger_could_not_take_ends_as_not_tried(tmp_path: Path) -> None:
    """The directory is removed and made again: for intents that failed in between, nothing was sent."""
    folder = tmp_path / "ledger"
    ledger = Ledger(folder, Role.SYPHON, LedgerOptions(on_error="stop"))
    syphon_ledger = SyphonLedger(ledger, "p", "s", ProgressCounter(0.0))

    async def main() -> None:
        place = Place(2)
        transport = _Transport(place)
        context = SyphonContext(transport, SyphonOptions(), syphon_ledger, wall=wall, chance=lambda: 0.5)
        backlog = transport.backlog("b")
        held = await backlog.receive(2, 1.0)
        mover = Mover("b", backlog, DeferredMessages(context.destinations), context, lambda: None)
        folder.rmdir()
        folder.write_bytes(b"in the way")
        context.stopping = True
        await mover.move(HeldBatch(held, now(), wall()))
        assert not any(letter.arrivals for letter in place.letters)

    run(main())
    folder.unlink()
    ledger.flush()
    ledger.close()
    entries = list(read_ledger(folder))
    # One line, or two lines if the intent was written before the operation ended.
    ended = [entry for entry in entries if isinstance(entry, Operation | Outcome)]
    begun = [entry for entry in entries if isinstance(entry, Operation | Intent)]
    assert [(one.id, one.result) for one in ended] == [(one.id, "not_tried") for one in begun]
    assert [one.stage for one in begun] == [Stage.RETURN_PRIMARY]
