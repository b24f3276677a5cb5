"""When a syphon reads the shared state, and what it does if it cannot (S15)."""

from __future__ import annotations

import asyncio

import pytest

from twinbus.pairing import HoldRecord, KnownState, StateReading
from twinbus.syphon import SharedHolds

HELD = KnownState(holds={"orders": HoldRecord("orders", 1.0, "operator")})


class State:
    """A shared state whose readings the test controls, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0
        self.result: StateReading | Exception = StateReading(KnownState())
        self.answers = asyncio.Event()
        self.answers.set()

    async def read(self) -> StateReading:
        self.reads += 1
        result = self.result
        await self.answers.wait()
        if isinstance(result, Exception):
            raise result
        return result

    def holds(self, max_age: float = 0.0) -> SharedHolds:
        return SharedHolds(self.read, max_age=max_age, interval=0.0, now=lambda: self.now)


async def test_s15_a_hold_is_known_after_the_next_reading() -> None:
    state = State()
    holds = state.holds()
    assert not holds.is_held("orders")
    await holds.refresh()
    assert not holds.is_held("orders")
    state.result, state.now = StateReading(HELD), 1.0
    await holds.refresh()
    assert (holds.is_held("ORDERS/"), holds.is_held("bills"), state.reads) == (True, False, 2)


@pytest.mark.parametrize(
    "known",
    [
        KnownState(),
        HELD,
        KnownState(holds={"*": HoldRecord("*", 1.0, "operator")}),
        KnownState(
            holds={"*": HoldRecord("*", 1.0, "operator"), "orders": HoldRecord("orders", 2.0, "operator")},
            released=frozenset({"bills"}),
        ),
    ],
    ids=["nothing", "one entity", "all entities", "all but one"],
)
async def test_s15_what_is_held_can_be_given_to_another_process(known: KnownState) -> None:
    state = State()
    state.result = StateReading(known)
    holds = state.holds()
    assert "orders" not in holds.held()
    await holds.refresh()
    for path in ("orders", "Orders/", "bills", "others"):
        assert (path in holds.held()) == holds.is_held(path) == (known.hold_of(path) is not None)


async def test_s15_a_reading_that_is_young_enough_is_not_repeated() -> None:
    state = State()
    holds = state.holds(max_age=2.0)
    for state.now in (0.0, 1.0, 2.0):
        await holds.refresh()
    assert state.reads == 1
    state.now = 2.1
    await holds.refresh()
    assert state.reads == 2


async def test_s15_messages_received_during_a_reading_wait_for_the_next_one() -> None:
    state = State()
    holds = state.holds()
    state.answers.clear()
    first = asyncio.create_task(holds.refresh())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert state.reads == 1
    # The operator sets the hold while the first reading runs, and messages arrive after it.
    state.result, state.now = StateReading(HELD), 1.0
    later = [asyncio.create_task(holds.refresh()) for _ in range(3)]
    await asyncio.sleep(0)
    state.answers.set()
    await asyncio.gather(first, *later)
    assert (holds.is_held("orders"), state.reads) == (True, 2)


@pytest.mark.parametrize(
    "failure",
    [
        OSError("no disk"),
        FileNotFoundError("gone"),
        StateReading(KnownState(), ("holds.json: damaged",), hides_holds=True),
    ],
    ids=["error", "gone", "damaged"],
)
async def test_s15_a_state_that_cannot_be_read_ends_no_hold(failure: StateReading | Exception) -> None:
    state = State()
    holds = state.holds()
    state.result = failure
    await holds.refresh()
    assert not holds.is_held("orders")
    state.result, state.now = StateReading(HELD), 1.0
    await holds.refresh()
    state.result, state.now = failure, 2.0
    await holds.refresh()
    assert holds.is_held("orders")
    state.result, state.now = StateReading(KnownState()), 3.0
    await holds.refresh()
    assert not holds.is_held("orders")


async def test_s15_beside_damaged_holds_a_new_hold_is_known_and_the_old_ones_stay() -> None:
    state = State()
    holds = state.holds()
    state.result = StateReading(HELD)
    await holds.refresh()
    later = KnownState(holds={"bills": HoldRecord("bills", 1.0, "operator")})
    state.result, state.now = StateReading(later, ("holds.json.damaged-1",), hides_holds=True), 1.0
    await holds.refresh()
    assert holds.is_held("orders")
    assert holds.is_held("bills")


async def test_s15_an_unreadable_part_of_the_state_without_holds_does_not_keep_a_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = State()
    holds = state.holds()
    state.result = StateReading(HELD, ("failover-1.json: damaged",))
    await holds.refresh()
    assert holds.is_held("orders")
    for state.now in (1.0, 2.0, 3.0):
        state.result = StateReading(KnownState(), ("failover-1.json: damaged",))
        await holds.refresh()
    assert not holds.is_held("orders")
    assert caplog.text.count("damaged") == 1, "the same file is reported once, not before each batch of messages"


async def test_s15_a_reading_that_answers_after_a_younger_one_changes_nothing() -> None:
    state = State()
    holds = state.holds()
    state.result = StateReading(KnownState(holds={"bills": HoldRecord("bills", 1.0, "operator")}))
    await holds.refresh()
    # The watch reads before the operator sets the hold of orders, and its answer comes late.
    watching = asyncio.create_task(holds.watch(lambda: None))
    state.answers.clear()
    while state.reads < 2:  # noqa: ASYNC110 - a reading tells nobody that it begins
        await asyncio.sleep(0)
    slow, state.answers = state.answers, asyncio.Event()
    state.answers.set()
    state.result, state.now = StateReading(HELD), 1.0
    await holds.refresh()
    state.answers = asyncio.Event()
    slow.set()
    while state.reads < 4:  # noqa: ASYNC110 - a reading tells nobody that it begins
        await asyncio.sleep(0)
    assert holds.is_held("orders")
    watching.cancel()
    await holds.close()


async def test_s15_the_syphon_is_woken_though_a_batch_of_messages_read_the_end_of_the_hold_first() -> None:
    state = State()
    holds = SharedHolds(state.read, max_age=0.0, interval=0.05, now=lambda: state.now)
    woken = asyncio.Event()
    watching = asyncio.create_task(holds.watch(woken.set))
    state.result = StateReading(HELD)
    await holds.refresh()
    for _ in range(5):  # until the watch pauses
        await asyncio.sleep(0)
    state.result, state.now = StateReading(KnownState()), 1.0
    await holds.refresh()
    async with asyncio.timeout(2):
        await woken.wait()
    watching.cancel()
    await holds.close()


async def test_s15_the_syphon_is_woken_when_a_hold_ends_and_reads_only_while_something_is_held() -> None:
    state = State()
    holds = state.holds()
    woken = asyncio.Event()
    watching = asyncio.create_task(holds.watch(woken.set))
    await holds.refresh()
    for _ in range(5):
        await asyncio.sleep(0)
    assert state.reads == 1
    state.result, state.now = StateReading(HELD), 1.0
    await holds.refresh()
    state.result = StateReading(KnownState())
    async with asyncio.timeout(10):
        await woken.wait()
    assert not holds.is_held("orders")
    reads = state.reads
    for _ in range(5):
        await asyncio.sleep(0)
    assert state.reads == reads
    watching.cancel()
    await holds.close()
