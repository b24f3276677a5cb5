"""Worlds of two namespaces, by seed. A seed that fails is its own replay; `make simulate` runs any number."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.pairing.simulation.call_messages import LETTERS, contents
from tests.pairing.simulation.fake_entities import KINDS, failure
from tests.tiers import budget
from twinbus.backlog import failure_kind

from .world import World

SEEDS = budget(1_000, 20_000, 100_000)
CHUNK = 500
AS_MADE = contents(LETTERS)
ENDINGS = {
    "returned",
    "returned in the backlog",
    "PartialSendError in the backlog",
    "MessageTooLargeForBacklogError in the backlog",
    "AliasInUseError in the backlog",
    "BacklogUnavailableError",
    "BacklogUnavailableError in the backlog",
    "OperationTimeoutError",
    "OperationTimeoutError in the backlog",
    "NoTurnError",
    "NoTurnError in the backlog",
    "ServiceBusServerBusyError in the backlog",
    "ScheduledInBacklogError",
    "PrimaryUnusableError",
    "PairClosedError",
    "PairFaultedError",
    *(f"cancelled at step {number}" for number in (1, 2, 3, 4)),
}


@pytest.fixture(scope="module", autouse=True)
def modules_are_no_garbage() -> Iterator[None]:
    """Exclude imported modules from the garbage collector, which would use a tenth of the time on them."""
    gc.freeze()
    yield
    gc.unfreeze()


def settled(seed: int) -> World:
    world = World(seed)
    try:
        world.settle()
    except BaseException as error:
        error.add_note(f"python -m tests.pairing.simulation --seeds 1 --start {seed}")
        raise
    return world


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_world_loses_doubles_or_misroutes_a_message_and_every_one_settles(first: int) -> None:
    for seed in range(first, first + CHUNK):
        settled(seed)
    assert contents(LETTERS) == AS_MADE  # S7: the caller's objects are never altered


def test_a_few_worlds_hold_every_end_that_a_call_can_come_to() -> None:
    endings: Counter[str] = Counter()
    for seed in range(2 * CHUNK):
        endings += settled(seed).stock.endings
    assert ENDINGS - endings.keys() == set()


def test_s14_a_few_worlds_hold_trials_of_every_outcome_and_calls_from_before_a_restore() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(CHUNK):
        world = settled(seed)
        for process in (*world.processes, *world.closed):
            outcomes.update(notice.name for notice in process.notices)
            outcomes["failed late"] += process.failed_late
    assert {"trial_passed", "trial_failed", "restored", "failover_held", "failed late"} <= set(+outcomes)


def test_a_seed_replays_exactly() -> None:
    for seed in range(20):
        one, other = settled(seed), settled(seed)
        assert [process.notices for process in one.processes] == [process.notices for process in other.processes]
        assert (one.time, one.stock) == (other.time, other.stock)


def test_the_places_fail_as_s2_names_it() -> None:
    assert [failure_kind(failure(kind).error) for kind in KINDS] == list(KINDS)
