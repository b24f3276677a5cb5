"""When a drain ends (Y11), on the simulated clock: each reason why a message may not be home."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Any

import pytest

from tests.syphon.fixed_queues import FixedQueues
from tests.syphon.simulation.simulated_namespaces import (
    MessagePlace,
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
from twinbus.syphon.context import SyphonOptions
from twinbus.syphon.discovery import Discovery
from twinbus.syphon.left_messages import HELD, KEPT, UNAVAILABLE, LeftMessages
from twinbus.syphon.progress import Progress
from twinbus.syphon.syphon import SecondaryAwayError, Syphon
from twinbus.syphon.transport import OutgoingMessage

from .loop import run

LOCK = 30.0
GONE = FailureKind.ENTITY_NOT_FOUND


class Drained:
    """One backlog queue, and drains of it. `deliver` adds messages that arrive after so many seconds."""

    def __init__(self) -> None:
        chance = Random(1)
        self.letters: list[SimulatedMessage] = []
        self.queue = SimulatedQueue("b", chance, self.letters, LOCK)
        self.entities = {path: SimulatedEntity(path, chance) for path in ("home", "dead")}

    def deliver(
        self, count: int, path: str, *, flaw: str | None = None, every: float = 0.0, after: float = 0.0
    ) -> None:
        first = len(self.letters) + 1
        self.letters += [
            SimulatedMessage(first + number, path, flaw, comes=now() + after + every * number)
            for number in range(count)
        ]

    def kill(self, path: str, seconds: float = inf, after: float = 0.0, kind: FailureKind = GONE) -> None:
        self.entities[path].outages.append(SimulatedOutage(now() + after, now() + after + seconds, kind))

    def syphon(self, *, is_held: Callable[[str], bool] | None = None, **options: Any) -> Syphon:
        return Syphon(
            SimulatedTransport({"b": self.queue}, self.entities, SimulatedProcess()),
            FixedQueues(["b"], LOCK),
            primary="p",
            secondary="s",
            options=SyphonOptions(drain=True, **options),
            is_held=is_held,
            wall=wall,
            chance=lambda: 0.5,
        )

    async def drain(self, **options: Any) -> Progress:
        async with self.syphon(**options) as syphon:
            ended = await syphon.run()
            assert syphon.has_drained
            return ended

    def count(self, where: MessagePlace) -> int:
        return sum(letter.where is where for letter in self.letters)


def row(left: LeftMessages) -> tuple[str | None, int | None, str]:
    return left.destination, left.messages, left.cause


def test_y11_a_drain_with_a_dead_destination_ends_after_one_more_try_and_says_why() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(5, "dead")
        place.deliver(5, "home")
        place.kill("dead")
        began = now()
        ended = await place.drain()
        assert now() - began < 10.0
        assert [row(one) for one in ended.left] == [("dead", 5, "entity_not_found")]
        assert (ended.total.returned, ended.aside) == (5, 5)
        assert ended.states[0].failures >= 2
        assert place.queue.operations["empty"] <= 1

    run(live())


@pytest.mark.parametrize("seconds", [600.0, 7200.0])
@pytest.mark.parametrize("count", [1, 300])
def test_y11_y2_a_drain_that_waits_costs_its_long_polls_and_one_probe_for_each_pause(
    count: int, seconds: float
) -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(count, "dead")
        place.kill("dead", kind=FailureKind.SERVER_BUSY)
        began = now()
        ended = await place.drain(wait_for_destinations=seconds)
        assert seconds < now() - began < seconds + 20.0
        assert [row(one) for one in ended.left] == [("dead", count, "server_busy")]
        # The pauses grow to 300 s, shortened by a quarter.
        assert place.queue.operations["receive_deferred"] <= 12 + seconds / 225
        assert place.queue.operations["empty"] <= 1 + seconds / 900
        assert place.queue.operations["peek"] <= 2 * (300 // 7 + 2)

    run(live())


def test_y11_the_last_try_is_at_the_end_of_the_wait_not_before() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(10, "dead")
        place.kill("dead", seconds=595.0, kind=FailureKind.SERVER_BUSY)
        began = now()
        ended = await place.drain(wait_for_destinations=600.0)
        assert ended.left == ()
        assert now() - began < 640.0
        assert place.count(MessagePlace.GONE) == 10

    run(live())


def test_y11_a_destination_that_comes_back_during_the_retry_gets_everything() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(1000, "dead")
        place.kill("dead", seconds=1.4)
        ended = await place.drain()
        assert ended.left == ()
        assert place.count(MessagePlace.GONE) == 1000

    run(live())


def test_y6_y11_a_drain_that_waits_ten_minutes_dead_letters_what_has_no_destination() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(50, "dead")
        place.kill("dead")
        ended = await place.drain(wait_for_destinations=600.0)
        assert [(one.destination, one.messages, one.why) for one in ended.left] == [
            ("dead", 50, "they were dead-lettered: DestinationNotFound")
        ]
        assert place.count(MessagePlace.DEAD) == 50

    run(live())


def test_y11_messages_for_a_dead_destination_that_keep_coming_do_not_keep_a_drain_from_ending() -> None:
    """An application diverts to the dead destination while the drain runs, so that the queue is never empty."""

    async def live(every: float) -> None:
        place = Drained()
        place.deliver(50, "home")
        place.deliver(int(3600 / every), "dead", every=every)
        place.kill("dead")
        began = now()
        ended = await place.drain()
        assert now() - began < 60.0
        assert ended.total.returned == 50
        assert [one.cause for one in ended.left] == ["entity_not_found"]
        assert place.count(MessagePlace.DEFERRED) == ended.left[0].messages

    for every in (0.2, 2.0):
        run(live(every))


def test_y11_messages_that_can_move_are_moved_however_late_they_come() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(5, "dead")
        place.deliver(200, "home", every=1.0)
        place.kill("dead", kind=FailureKind.SERVER_BUSY)
        ended = await place.drain(wait_for_destinations=30.0)
        assert ended.total.returned == 200
        assert [row(one) for one in ended.left] == [("dead", 5, "server_busy")]

    run(live())


def test_y11_a_burst_that_is_on_its_way_home_is_not_left_when_the_last_try_fails() -> None:
    """The burst comes while the last try runs, and its destination is slow: nothing has moved when the try fails."""

    async def live() -> None:
        place = Drained()
        place.entities["home"] = SlowEntity("home", Random(1))
        place.deliver(5, "dead")
        place.deliver(500, "home", after=59.5)
        place.kill("dead", kind=FailureKind.SERVER_BUSY)
        ended = await place.drain(wait_for_destinations=60.0, rate=20.0)
        assert ended.total.returned == 500
        assert [row(one) for one in ended.left] == [("dead", 5, "server_busy")]

    run(live())


class SlowEntity(SimulatedEntity):
    async def take(self, messages: Sequence[OutgoingMessage]) -> None:
        await asyncio.sleep(5.0)
        self._arrive(messages)


def test_y11_a_single_message_that_comes_late_and_moves_does_not_hold_the_drain_up() -> None:
    """The pump waits with a long poll by then. The message moves, so that the queue has to be scanned again."""

    async def live() -> None:
        place = Drained()
        place.deliver(5, "dead")
        place.deliver(1, "home", after=20.0)
        place.kill("dead", kind=FailureKind.SERVER_BUSY)
        ended = await place.drain(wait_for_destinations=30.0)
        assert ended.total.returned == 1
        assert ended.seconds < 80.0
        assert [row(one) for one in ended.left] == [("dead", 5, "server_busy")]

    run(live())


def test_y10_y11_kept_messages_are_named_with_the_transport_that_carries_them() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(3, "home", flaw="odd")
        ended = await place.drain(wait_for_destinations=600.0)
        assert ended.seconds < 30.0
        assert [(one.messages, one.cause) for one in ended.left] == [(3, KEPT)]
        assert "--transport native" in ended.left[0].next_step

    run(live())


def test_y6_y11_dead_letters_are_named_with_their_reason() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(2, "home", flaw="no path")
        place.deliver(1, "home", flaw="large")
        ended = await place.drain()
        assert [(one.destination, one.messages, one.why) for one in ended.left] == [
            (None, 2, "they were dead-lettered: NoDestination"),
            ("home", 1, "they were dead-lettered: MessageTooLarge"),
        ]

    run(live())


@pytest.mark.parametrize("where", [MessagePlace.ACTIVE, MessagePlace.DEFERRED])
def test_y11_a_drain_waits_for_the_lock_of_a_receiver_that_died(where: MessagePlace) -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(4, "home")
        for letter in place.letters[:2]:
            letter.where = where
            SimulatedHeld(letter, LOCK)
        ended = await place.drain()
        assert ended.left == ()
        assert place.count(MessagePlace.GONE) == 4
        assert LOCK <= ended.seconds < 2 * LOCK + 10.0
        assert place.queue.operations["empty"] <= 3

    run(live())


@pytest.mark.parametrize("where", [MessagePlace.ACTIVE, MessagePlace.DEFERRED])
def test_y11_messages_whose_holder_renews_the_lock_are_named_and_the_drain_ends(where: MessagePlace) -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(4, "home")
        for letter in place.letters[:2]:
            letter.where = where
            SimulatedHeld(letter, 3600.0)
        ended = await place.drain()
        assert [row(one) for one in ended.left] == [("home", 2, UNAVAILABLE)]
        assert place.count(MessagePlace.GONE) == 2
        assert ended.seconds < 2 * LOCK + 10.0
        assert place.queue.operations["empty"] <= 2
        assert place.queue.operations["peek"] <= 20

    run(live())


def test_y1_y11_several_drains_at_once_bring_everything_home_or_name_it() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(500, "home")
        place.deliver(20, "dead")
        place.kill("dead", kind=FailureKind.SERVER_BUSY)
        ends = await asyncio.gather(*(place.drain(window=50) for _ in range(3)))
        assert place.count(MessagePlace.GONE) == 500
        assert place.count(MessagePlace.DEFERRED) == 20
        for ended in ends:
            assert {one.destination for one in ended.left} == {"dead"}
            assert sum(one.messages or 0 for one in ended.left) == 20

    run(live())


def test_y11_s15_a_destination_that_an_operator_holds_is_not_tried_and_is_named() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(3, "home")
        place.deliver(7, "dead")
        ended = await place.drain(is_held=lambda path: path == "dead", wait_for_destinations=60.0)
        assert [row(one) for one in ended.left] == [("dead", 7, HELD)]
        assert 60.0 <= ended.seconds < 80.0
        assert sum(letter.arrivals for letter in place.letters) == 3

    run(live())


def test_y11_a_backlog_queue_that_does_not_answer_is_given_up_after_a_minute_and_named() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(10, "home")
        place.queue.trouble = 1.0
        ended = await place.drain()
        assert 60.0 <= ended.seconds < 90.0
        assert [(one.queue, one.messages, one.cause) for one in ended.left] == [("b", None, "connection_lost")]

    run(live())


def test_y11_a_backlog_queue_that_answers_again_within_a_minute_is_drained() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(10, "home")
        place.queue.trouble = 1.0
        asyncio.get_running_loop().call_later(50.0, setattr, place.queue, "trouble", 0.0)
        ended = await place.drain()
        assert ended.left == ()
        assert place.count(MessagePlace.GONE) == 10

    run(live())


def test_y11_a_backlog_queue_that_stops_answering_with_messages_put_aside_does_not_keep_a_drain_from_ending() -> None:
    """Its messages cannot be brought back, so their destination cannot be tried once more."""

    async def live() -> None:
        place = Drained()
        place.deliver(5, "dead")
        place.kill("dead")
        loop = asyncio.get_running_loop()
        loop.call_later(30.0, setattr, place.queue, "trouble", 1.0)
        async with asyncio.timeout(3600.0):
            ended = await place.drain(wait_for_destinations=60.0)
        assert [row(one) for one in ended.left] == [("dead", 5, "entity_not_found"), (None, None, "connection_lost")]

    run(live())


class Away:
    """A discovery that never succeeds."""

    async def queues(self) -> Sequence[str]:
        raise ConnectionError("away")

    def lock_seconds(self, queue: str) -> float | None:
        return None

    async def remaining(self) -> int | None:
        return None

    async def close(self) -> None: ...


def test_y11_a_drain_that_finds_no_queue_because_the_secondary_is_away_says_so() -> None:
    async def live() -> None:
        transport = SimulatedTransport({}, {}, SimulatedProcess())
        away: Discovery = Away()
        options = SyphonOptions(drain=True)
        async with Syphon(transport, away, primary="p", secondary="s", options=options) as syphon:
            with pytest.raises(SecondaryAwayError, match=r"could not be found for .* s: away"):
                await syphon.run()

    run(live())


def test_y11_a_drain_that_is_stopped_names_nothing() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(10, "dead")
        place.kill("dead")
        async with place.syphon(wait_for_destinations=600.0) as syphon:
            running = asyncio.create_task(syphon.run())
            await asyncio.sleep(30.0)
            syphon.stop()
            ended = await running
            assert (ended.left, ended.aside, syphon.has_drained) == ((), 10, False)

    run(live())


class Counted(FixedQueues):
    """A discovery that knows how many messages are in the queue."""

    def __init__(self, place: Drained) -> None:
        super().__init__(["b"], LOCK)
        self._place = place

    async def remaining(self) -> int | None:
        return self._place.count(MessagePlace.ACTIVE) + self._place.count(MessagePlace.DEFERRED)


def test_y11_remaining_counts_only_what_can_move() -> None:
    async def live() -> None:
        place = Drained()
        place.deliver(100, "dead")
        place.deliver(3, "home", flaw="odd")
        place.deliver(4000, "home")
        place.kill("dead", kind=FailureKind.SERVER_BUSY)
        async with place.syphon(rate=100.0) as syphon:
            syphon._remaining._discovery = Counted(place)
            running = asyncio.create_task(syphon.run())
            await asyncio.sleep(20.0)
            assert syphon.progress().aside == 100
            can_move = await syphon.count_remaining()
            assert can_move == place.count(MessagePlace.ACTIVE)
            left = syphon.progress().seconds_left
            assert left is not None
            assert left == pytest.approx(can_move / 100.0, rel=0.2)
            ended = await running
        assert ended.total.returned == 4000
        assert sorted(map(row, ended.left), key=str) == [("dead", 100, "server_busy"), (None, 3, KEPT)]

    run(live())
