"""When a pair looks at the shared state, when it writes, and what it does if neither works (S15, S16).

The tests play the driver: its timers, its clock, and a state that answers when the test says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError, ServiceRequestError, ServiceResponseError
from azure.servicebus.exceptions import MessagingEntityNotFoundError, ServiceBusAuthorizationError

from twinbus.backlog import FailureKind
from twinbus.pairing.decide import failover as f
from twinbus.pairing.decide import failover_events as e
from twinbus.pairing.decide.known_state import (
    EVERY_ENTITY,
    FailoverRecord,
    HoldRecord,
    KnownState,
    ReleaseRecord,
    RestoreRecord,
    StateChange,
    StateReading,
    apply_changes,
)
from twinbus.pairing.shared_state import SharedEntity
from twinbus.pairing.state_sharing import ReadDone, StateLocation, StateSharing, WriteDone, look_seconds

POLICY = f.FailoverPolicy(failover_interval=0, ping_interval=30, ping_jitter=0.0)
WALL = 1_700_000_000.0
FAILED = e.PrimarySendFailed(FailureKind.TIMEOUT)
REFUSED = ServiceBusAuthorizationError(message="Listen is missing")
MISSING = MessagingEntityNotFoundError(message="no such queue")


class Timer:
    def __init__(self, world: World, due: Callable[[], object]) -> None:
        self.world, self.due, self.at = world, due, float("inf")
        world.timers.append(self)

    def arm(self, at: float) -> None:
        self.at = at

    def disarm(self) -> None:
        self.at = float("inf")


class World:
    """A pair with two entities, its clock and its access to a state."""

    def __init__(self, *, folder: bool = False, may_create: bool = True) -> None:
        self.now = 100.0
        self.timers: list[Timer] = []
        self.reads: list[ReadDone] = []
        self.writes: list[tuple[Sequence[StateChange], WriteDone]] = []
        self.creations: list[WriteDone] = []
        self.pings: list[str] = []
        self.notices: list[str] = []
        self.hold_all = False
        self.is_open = True
        self.acting: World | SimpleNamespace = self
        location = StateLocation("contoso", Path("/state") if folder else None)
        self.sharing = StateSharing(
            location,
            self,
            may_create=may_create,
            watch_interval=30.0,
            longest_ping=12.0,
            now=lambda: self.now,
            wall=lambda: WALL + self.now - 100.0,
        )
        self.entities = [self.entity("orders"), self.entity("bills")]

    def entity(self, path: str) -> SharedEntity:
        return SharedEntity(path, POLICY, self, now=lambda: self.now, chance=lambda: 0.0, on_step=self.sharing.advanced)

    # --- what a driver does

    def timer(self, due: Callable[[], object]) -> Timer:
        return Timer(self, due)

    def ping(self, entity: SharedEntity, episode: int) -> None:
        self.pings.append(entity.entity.path)

    def stop_ping(self, entity: SharedEntity) -> None:
        pass

    def emit(self, notice: Any) -> None:
        self.notices.append(notice.name)

    def all_entities(self) -> list[SharedEntity]:
        return self.entities

    def release_all(self) -> None:
        self.hold_all = False

    def state_access(self) -> Any:
        return self.acting if self.is_open else None

    def read(self, done: ReadDone) -> None:
        self.reads.append(done)

    def write(self, changes: Sequence[StateChange], done: WriteDone) -> None:
        self.writes.append((changes, done))

    def create(self, done: WriteDone) -> None:
        self.creations.append(done)

    # --- what a test does

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while (timer := min(self.timers, key=lambda one: one.at)).at <= end:
            self.now = max(self.now, timer.at)
            timer.disarm()
            timer.due()
        self.now = end

    def modes(self) -> list[str]:
        return [str(one.entity.mode) for one in self.entities]

    def answer(self, *changes: StateChange, unreadable: tuple[str, ...] = ()) -> None:
        hides_holds = any(text.startswith("holds.json") for text in unreadable)
        self.reads.pop(0)(StateReading(apply_changes(changes), unreadable, hides_holds))

    def written(self, error: Exception | None = None) -> Sequence[StateChange]:
        changes, done = self.writes.pop(0)
        done(error)
        return changes


@pytest.fixture
def world() -> World:
    made = World()
    made.sharing.begin()
    return made


def over(entity: str = "orders", *, next_ping: float = 20.0) -> FailoverRecord:
    return FailoverRecord(entity, FailureKind.DNS, WALL - 50, WALL + next_ping, 30.0, 0, WALL - 10, "another")


def hold(entity: str = EVERY_ENTITY) -> HoldRecord:
    return HoldRecord(entity, WALL - 50, "operator")


# --- the first look --------------------------------------------------------------------------------------------------


def test_s16_a_pair_looks_once_and_takes_over_what_it_finds(world: World) -> None:
    looked: list[bool] = []
    world.sharing.on_looked.add(lambda: looked.append(True))
    assert not world.sharing.has_looked
    world.answer(over())
    assert (world.modes(), world.sharing.has_looked, looked) == (["failed_over", "healthy"], True, [True])
    assert world.sharing.event_for("bills") is None
    world.sharing.begin()
    world.sleep(1.0)
    assert (world.reads, world.writes) == ([], [])
    assert world.notices == ["failover_engaged", "failover_taken_over"]


def test_s16_a_look_that_takes_more_than_a_second_finds_nothing(world: World) -> None:
    world.sleep(0.9)
    before = world.sharing.has_looked
    world.sleep(0.2)
    assert not before
    assert world.sharing.has_looked
    world.answer(over())
    assert world.modes() == ["healthy", "healthy"]


def test_s16_an_unreadable_state_counts_as_healthy(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.answer(over(), unreadable=("holds.json: damaged",))
    assert world.modes() == ["failed_over", "healthy"]
    assert "holds.json: damaged" in caplog.text
    other = World()
    other.sharing.begin()
    other.reads.pop()(OSError("no disk"))
    assert (other.modes(), other.sharing.has_looked) == (["healthy", "healthy"], True)


def test_s16_a_folder_that_nobody_has_written_to_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    world = World(folder=True)
    world.sharing.begin()
    world.reads.pop()(FileNotFoundError("/state/contoso"))
    assert (world.sharing.has_looked, caplog.text) == (True, "")


@pytest.mark.parametrize("late", [False, True])
def test_s16_without_the_listen_right_the_pair_warns_once_and_works_unshared(
    world: World, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    caplog.set_level(logging.WARNING)
    world.sleep(2.0 if late else 0.0)
    caplog.clear()
    world.reads.pop()(REFUSED)
    world.entities[0].advance(FAILED)
    world.sharing.hold("bills")
    world.sleep(300.0)
    assert (world.writes, world.reads) == ([], [])
    assert len(caplog.records) == 1
    assert "Listen right" in caplog.text
    assert world.sharing.is_written


def test_p6_a_missing_state_queue_is_created_by_a_pair_that_may(world: World) -> None:
    world.reads.pop()(MISSING)
    world.entities[0].advance(FAILED)
    assert len(world.creations) == 1
    world.creations.pop()(None)
    assert len(world.writes) == 1


@pytest.mark.parametrize("may_create", [True, False])
def test_p8_a_missing_state_queue_that_cannot_be_created_is_reported_once(
    caplog: pytest.LogCaptureFixture, may_create: bool
) -> None:
    world = World(may_create=may_create)
    world.sharing.begin()
    world.reads.pop()(MISSING)
    if may_create:
        world.creations.pop()(REFUSED)
    world.entities[0].advance(FAILED)
    world.sleep(100.0)
    assert world.writes == []
    assert caplog.text.count("twinbus provision --state secondary") == 1


@pytest.mark.parametrize(
    "error",
    [
        ServiceResponseError("no answer"),
        ServiceRequestError("Connection refused"),
        ConnectionAbortedError("the pair closed meanwhile"),
        TimeoutError(),
        HttpResponseError(response=SimpleNamespace(status_code=503, reason="busy")),
    ],
)
def test_s16_a_state_queue_that_could_not_be_created_for_now_is_created_with_the_next_write(
    world: World, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    world.reads.pop()(MISSING)
    world.creations.pop()(error)
    assert "tries again" in caplog.text
    world.entities[0].advance(FAILED)
    world.written(MISSING)
    world.creations.pop()(error)
    world.sleep(40.0)
    world.written(MISSING)
    world.creations.pop()(None)
    assert [one.entity for one in world.written()] == ["orders"]
    assert world.sharing.is_written
    assert "does not share" not in caplog.text


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_s16_a_state_queue_whose_creation_is_refused_is_given_up(
    world: World, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    world.reads.pop()(MISSING)
    world.creations.pop()(HttpResponseError(response=SimpleNamespace(status_code=status, reason="no")))
    world.entities[0].advance(FAILED)
    assert world.writes == []
    assert "does not share" in caplog.text


def test_s16_a_new_entity_gets_what_the_look_found_until_that_is_too_old(world: World) -> None:
    world.answer(over("letters"))
    found = world.sharing.event_for("letters")
    assert found is not None
    assert (found.cause, found.engaged, found.next_ping) == (FailureKind.DNS, 50.0, 120.0)
    world.sleep(81.0)
    assert world.sharing.event_for("letters") is None


def test_s16_a_call_waits_half_of_its_time_for_the_look_and_a_second_at_most() -> None:
    assert look_seconds(None, 100.0) == 1.0
    assert look_seconds(110.0, 100.0) == 1.0
    assert look_seconds(101.0, 100.0) == 0.5
    assert look_seconds(99.0, 100.0) == 0.0


# --- writing ---------------------------------------------------------------------------------------------------------


def test_s16_failovers_pings_and_restores_are_written_and_nothing_else(world: World) -> None:
    world.answer()
    orders = world.entities[0]
    orders.advance(FAILED)
    (first,) = world.written()
    assert isinstance(first, FailoverRecord)
    assert (first.entity, first.next_ping_at) == ("orders", WALL + 30.0)
    orders.advance(e.BacklogAccepted())
    world.sleep(30.0)
    (second,) = world.written()
    assert isinstance(second, FailoverRecord)
    assert (second.engaged_at, second.next_ping_at, second.written_at) == (WALL, WALL + 42.0, WALL + 30.0)
    world.sleep(5.0)
    assert world.writes == []
    orders.advance(e.PingFailed(1, FailureKind.TIMEOUT))
    (third,) = world.written()
    assert isinstance(third, FailoverRecord)
    assert (third.next_ping_at, third.written_at) == (WALL + 60.0, WALL + 35.0)
    world.sleep(5.0)
    assert world.writes == []
    orders.advance(e.RestoreForced())
    (fourth,) = world.written()
    assert isinstance(fourth, RestoreRecord)
    orders.advance(e.PrimarySendSucceeded())
    world.sleep(300.0)
    assert (world.writes, world.reads) == ([], [])


def test_s16_changes_that_wait_for_a_write_are_written_together_and_the_last_one_counts(world: World) -> None:
    world.answer()
    orders, bills = world.entities
    orders.advance(FAILED)
    bills.advance(FAILED)
    orders.advance(e.RestoreForced())
    assert len(world.writes) == 1
    world.written()
    assert world.writes == []
    world.sleep(1.0)
    changes = world.written()
    assert [(type(one), one.entity) for one in changes] == [(FailoverRecord, "bills"), (RestoreRecord, "orders")]
    assert world.sharing.is_written


def test_s16_a_write_that_fails_is_tried_again_without_undoing_newer_changes(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.answer()
    orders, bills = world.entities
    orders.advance(FAILED)
    bills.advance(FAILED)
    orders.advance(e.RestoreForced())
    world.written(OSError("disk full"))
    assert not world.sharing.is_written
    world.sleep(29.0)
    assert len(world.writes) <= 1
    world.sleep(2.0)
    kinds = [(type(one), one.entity) for changes in world.writes for one in changes[0]]
    assert (FailoverRecord, "orders") not in kinds
    assert (RestoreRecord, "orders") in kinds
    world.written(OSError("disk full"))
    assert caplog.text.count("disk full") == 1


def test_s16_closing_writes_what_waits_at_once_and_does_not_try_again(world: World) -> None:
    world.answer()
    told: list[bool] = []
    world.sharing.on_finished.add(lambda: told.append(True))
    orders, bills = world.entities
    orders.advance(FAILED)
    bills.advance(FAILED)
    assert world.sharing.finish() == 1.0
    world.written()
    assert told == []
    world.written(OSError("gone"))
    assert (told, world.sharing.is_written) == ([True], True)
    world.sharing.stop()
    world.sleep(300.0)
    assert world.writes == []


def test_s16_a_healthy_pair_has_nothing_to_finish(world: World) -> None:
    world.answer()
    assert world.sharing.finish() == 0.0


def pinging_world() -> tuple[World, list[bool]]:
    """Return a world in which both entities are pinged and nothing waits to be written, and the list of its ends."""
    world, finished = World(), list[bool]()
    world.sharing.begin()
    world.sharing.on_finished.add(lambda: finished.append(True))
    world.answer(over(next_ping=-1.0), over("bills", next_ping=-1.0))
    world.sleep(2.0)
    while world.writes:
        world.written()
    assert world.pings == ["orders", "bills"]
    return world, finished


def test_s16_closing_waits_for_the_pings_in_progress_and_then_for_what_they_showed() -> None:
    world, finished = pinging_world()
    orders, bills = world.entities
    assert world.sharing.finish() == 5.0
    orders.advance(e.PingFailed(1, FailureKind.TIMEOUT))
    (failed,) = world.written()
    assert isinstance(failed, FailoverRecord)
    assert finished == []
    bills.advance(e.PingSucceeded(1))
    assert finished == []
    (restored,) = world.written()
    assert (type(restored), restored.entity) == (RestoreRecord, "bills")
    assert finished == [True]


def test_s16_closing_waits_no_longer_for_a_ping_whose_result_is_not_shared() -> None:
    world, finished = pinging_world()
    orders, bills = world.entities
    world.sharing.finish()
    # An operator of another process holds the entities: a ping that succeeded looked for it.
    orders.advance(e.FailoverKnown(e.DrillCause.FORCED, 0.0, hold=True))
    assert finished == []
    bills.advance(e.FailoverKnown(e.DrillCause.FORCED, 0.0, hold=True))
    assert (world.writes, finished) == ([], [True])


def test_s16_p3_a_pair_that_closes_does_not_wait_for_what_another_pair_goes_on_with() -> None:
    world, finished = pinging_world()
    world.sharing.finish()
    world.sharing.go_on()
    assert finished == [True]
    world.entities[0].advance(e.PingFailed(1, FailureKind.TIMEOUT))
    world.sleep(1.0)
    world.written(OSError("disk full"))
    world.sleep(30.0)
    assert [one.entity for one in world.written()] == ["orders"]


def test_s16_a_pair_that_shares_no_more_waits_for_no_ping() -> None:
    world, finished = pinging_world()
    world.entities[0].advance(e.PingFailed(1, FailureKind.TIMEOUT))
    world.sharing.finish()
    world.sharing._share_no_more(FailureKind.UNAUTHORIZED, REFUSED)
    assert finished == [True]
    assert world.sharing.finish() == 0.0


def test_s11_s16_closing_waits_for_no_ping_of_a_drill(world: World) -> None:
    world.answer()
    world.entities[0].advance(e.FailoverForced())
    world.sleep(30.0)
    assert world.pings == ["orders"]
    assert world.sharing.finish() == 0.0


def test_p6_a_state_queue_that_was_deleted_is_created_once_more(world: World) -> None:
    world.answer()
    world.entities[0].advance(FAILED)
    world.written(MISSING)
    world.creations.pop()(None)
    assert len(world.writes) == 1
    world.written(MISSING)
    assert (world.creations, world.sharing.is_written) == ([], True)


@pytest.mark.parametrize("order", ["the write ends first", "the creation ends first"])
def test_p6_a_write_that_begins_before_the_state_queue_is_created_does_not_end_the_sharing(
    world: World, order: str
) -> None:
    """A first process that starts in an outage creates the queue while its entities fail over."""
    world.answer()
    world.entities[0].advance(FAILED)
    world.written(MISSING)
    world.sleep(1.0)
    world.entities[1].advance(FAILED)
    if order == "the write ends first":
        world.written(MISSING)
        world.creations.pop()(None)
    else:
        world.sleep(0.5)
        world.creations.pop()(None)
        world.written(MISSING)
        world.sleep(1.0)
    assert [one.entity for one in world.written()] == ["orders", "bills"]
    assert world.creations == []


def test_p3_a_write_whose_event_loop_was_closed_is_made_again(world: World) -> None:
    world.answer()
    world.entities[0].advance(FAILED)
    lost = world.writes.pop()[1]
    world.sleep(400.0)
    assert world.writes != []
    lost(None)
    assert not world.sharing.is_written


# --- holds -----------------------------------------------------------------------------------------------------------


def test_s15_a_hold_and_its_release_are_written(world: World) -> None:
    world.answer()
    world.sharing.hold("orders")
    assert isinstance(world.written()[0], HoldRecord)
    world.sleep(1.0)
    world.sharing.hold(None)
    world.sharing.release("bills")
    world.written()
    world.sleep(1.0)
    assert [(type(one), one.entity) for one in world.written()] == [(ReleaseRecord, "bills")]
    world.sharing.hold("orders")
    world.sharing.release(None)
    world.sleep(1.0)
    assert [(type(one), one.entity) for one in world.written()] == [(ReleaseRecord, EVERY_ENTITY)]


@pytest.mark.parametrize(
    ("first", "then", "held"),
    [
        (("hold all", "release orders"), "hold all", True),
        (("hold all", "hold orders"), "release all", False),
    ],
)
def test_s15_a_hold_or_release_of_all_that_follows_a_failed_write_is_written_last(
    world: World, first: tuple[str, ...], then: str, held: bool
) -> None:
    world.answer()
    for one in first:
        hold_or_release(world, one)
    world.written(OSError("disk full"))
    world.sleep(30.0)
    hold_or_release(world, then)
    world.written(OSError("disk full"))
    world.sleep(30.0)
    assert (apply_changes(world.written()).hold_of("orders") is not None) == held


def hold_or_release(world: World, text: str) -> None:
    what, entity = text.split()
    {"hold": world.sharing.hold, "release": world.sharing.release}[what](None if entity == "all" else entity)


@pytest.mark.parametrize(
    ("entity", "found", "writes"),
    [
        ("orders", (), 0),
        (None, (), 0),
        ("orders", (hold("bills"),), 0),
        ("orders", (hold("orders"),), 1),
        ("orders", (hold(),), 1),
        (None, (hold("bills"),), 1),
    ],
)
def test_s15_a_release_is_written_only_if_the_state_holds_something(
    world: World, entity: str | None, found: tuple[StateChange, ...], writes: int
) -> None:
    world.answer()
    world.sharing.release(entity)
    assert world.writes == []
    world.answer(*found)
    assert len(world.writes) == writes


def test_s15_closing_waits_for_a_release_that_looks_first(world: World) -> None:
    world.answer()
    told: list[bool] = []
    world.sharing.on_finished.add(lambda: told.append(True))
    world.sharing.release("orders")
    assert world.sharing.finish() == 1.0
    world.answer(hold("orders"))
    assert told == []
    assert isinstance(world.written()[0], ReleaseRecord)
    assert (told, world.sharing.is_written) == ([True], True)


def test_s15_a_release_is_written_if_the_state_cannot_be_read(world: World) -> None:
    world.answer()
    world.sharing.release("orders")
    world.reads.pop()(OSError("no disk"))
    assert isinstance(world.written()[0], ReleaseRecord)


def held_world() -> World:
    world = World()
    world.sharing.begin()
    world.answer(hold())
    assert world.modes() == ["held", "held"]
    return world


def test_s15_a_held_pair_looks_every_ping_interval_until_the_release() -> None:
    world = held_world()
    world.sleep(29.0)
    assert world.reads == []
    world.sleep(1.5)
    world.answer(hold(), ReleaseRecord("bills", WALL, "operator"))
    assert world.modes() == ["held", "on_trial"]
    world.sleep(30.5)
    world.answer()
    assert world.modes() == ["on_trial", "on_trial"]
    world.sleep(300.0)
    assert world.reads == []


@pytest.mark.parametrize("failure", ["unreadable", "error", "silent"])
def test_s15_a_state_that_cannot_be_read_ends_no_hold(failure: str) -> None:
    world = held_world()
    world.sleep(30.5)
    if failure == "unreadable":
        world.answer(unreadable=("holds.json: damaged",))
    elif failure == "error":
        world.reads.pop()(FileNotFoundError("/state"))
    else:
        world.sleep(2.0)
        world.reads.clear()
    assert world.modes() == ["held", "held"]
    world.sleep(30.5)
    assert len(world.reads) == 1


def test_s15_beside_damaged_holds_a_new_hold_is_taken_over_and_the_old_ones_stay(world: World) -> None:
    world.answer(hold("orders"))
    world.sleep(30.5)
    world.answer(hold("bills"), unreadable=("holds.json.damaged-1",))
    assert world.modes() == ["held", "held"]


def test_s15_an_unreadable_part_of_the_state_without_holds_does_not_keep_a_hold() -> None:
    world = held_world()
    world.sleep(30.5)
    world.answer(unreadable=("failover-1.json: damaged",))
    assert world.modes() == ["on_trial", "on_trial"]


def test_s15_the_release_of_a_hold_that_was_found_after_a_ping_is_looked_for(world: World) -> None:
    """The pair's syphon delivers nothing to an entity that is known to be held, also if it has no sender here."""
    world.answer()
    world.sharing.check_hold("orders", lambda _: None)
    world.answer(hold("letters"))
    assert world.sharing.known.hold_of("letters") is not None
    world.sleep(30.5)
    assert len(world.reads) == 1
    world.answer()
    assert world.sharing.known.hold_of("letters") is None
    world.sleep(300.0)
    assert world.reads == []


def test_s15_holds_that_a_ping_cannot_read_stay_known() -> None:
    world = held_world()
    world.sharing.check_hold("orders", lambda _: None)
    world.answer(unreadable=("holds.json: damaged",))
    assert world.sharing.known.hold_of("letters") is not None


def test_s15_a_reading_does_not_undo_a_release_that_is_being_written() -> None:
    world = held_world()
    world.sharing.release(None)
    world.sharing.check_hold("orders", lambda _: None)
    world.answer(hold())
    assert world.sharing.event_for("letters") is None
    assert isinstance(world.written()[0], ReleaseRecord)


@pytest.mark.parametrize("begun", [False, True])
def test_s15_a_hold_that_is_written_during_a_reading_is_not_ended_by_the_reading(begun: bool) -> None:
    """The reading begins before the hold is in the state, and ends after it."""
    world = World()
    world.sharing.begin()
    world.answer(hold("bills"))
    world.sleep(29.0)
    if begun:
        world.sleep(1.5)
    world.sharing.hold("orders")
    world.entities[0].advance(e.FailoverForced(hold=True))
    world.sleep(1.0)
    assert len(world.reads) == 1
    assert isinstance(world.written()[0], HoldRecord)
    world.answer(hold("bills"))
    assert world.modes() == ["held", "held"]
    world.sleep(30.5)
    assert len(world.reads) == 1, "the pair goes on looking for the release"


def test_s15_a_hold_of_this_process_is_not_ended_by_a_reading_from_before_it() -> None:
    world = World()
    world.sharing.begin()
    world.answer(hold("bills"))
    world.sleep(30.5)
    world.sharing.hold("orders")
    world.entities[0].advance(e.FailoverForced(hold=True))
    world.written()
    world.answer(hold("bills"))
    assert world.modes() == ["held", "held"]


def test_s15_a_hold_that_was_never_written_is_not_ended_by_its_absence() -> None:
    world = World()
    world.sharing.begin()
    world.answer()
    world.sharing.hold("orders")
    world.entities[0].advance(e.FailoverForced(hold=True))
    world.written(OSError("disk full"))
    world.sleep(60.5)
    while world.reads:
        world.answer()
    assert world.modes() == ["held", "healthy"]


def test_s15_the_release_of_all_entities_ends_the_hold_of_later_ones() -> None:
    world = World()
    world.sharing.begin()
    world.answer()
    world.hold_all = True
    world.sharing.hold(None)
    world.written()
    world.sleep(30.5)
    world.answer()
    assert not world.hold_all


def test_s16_a_pair_that_runs_takes_over_holds_but_no_failovers() -> None:
    world = World()
    world.sharing.begin()
    world.answer(hold("letters"))
    world.sleep(30.5)
    fresh = replace(over("bills"), written_at=WALL + 31)
    world.answer(hold("letters"), hold("orders"), fresh)
    assert world.modes() == ["held", "healthy"]


def test_s15_a_ping_that_succeeds_looks_for_a_hold_first(world: World) -> None:
    world.answer()
    found: list[e.FailoverKnown | None] = []
    world.sharing.check_hold("orders", found.append)
    world.answer(hold("orders"))
    assert [one is not None and one.hold for one in found] == [True]
    world.sharing.check_hold("orders", found.append)
    world.answer(over("orders"))
    world.sharing.check_hold("orders", found.append)
    world.reads.pop()(OSError("no disk"))
    world.sharing.check_hold("orders", found.append)
    world.sleep(1.0)
    world.reads.pop()(OSError("late"))
    assert found[1:] == [None, None, None]


def test_s16_without_an_open_pair_nothing_waits(world: World) -> None:
    world.answer()
    world.is_open = False
    found: list[e.FailoverKnown | None] = []
    world.sharing.check_hold("orders", found.append)
    world.sharing.hold("orders")
    assert (found, world.writes) == ([None], [])


def test_s13_the_child_of_a_fork_shares_nothing(world: World) -> None:
    world.sharing.forked()
    world.sharing.hold("orders")
    world.sharing.begin()
    assert (world.writes, world.sharing.has_looked) == ([], True)


def test_s16_the_state_known_so_far_is_empty() -> None:
    assert World().sharing.known == KnownState()


def test_s16_p3_a_change_does_not_wait_for_a_write_whose_event_loop_was_closed() -> None:
    world = World()
    world.entities[0].advance(FAILED)
    ((first, _),) = world.writes
    world.acting = SimpleNamespace(read=world.read, write=world.write)
    world.sleep(1.0)
    world.entities[1].advance(FAILED)
    assert [one.entity for one in world.writes[-1][0]] == ["orders", "bills"]
    assert first[0] in world.writes[-1][0]


def test_s15_p3_a_hold_whose_writer_has_a_closed_loop_is_written_again_at_once_by_the_next_member() -> None:
    """Written minutes later, it would bring back a hold that another process has released meanwhile."""
    world = World()
    world.sharing.hold("orders")
    ((changes, unanswered),) = world.writes
    world.acting = SimpleNamespace(read=world.read, write=world.write)
    world.now += 30.0
    for timer in world.timers:
        if timer.at <= world.now:
            timer.disarm()
            timer.due()
    assert [list(written) for written, _ in world.writes] == [list(changes), list(changes)]
    # A late answer of the first write changes nothing.
    unanswered(ConnectionError("away"))
    world.writes[1][1](None)
    assert world.sharing.is_written
