"""Worlds of processes and pairs that share what they know, by seed (P3, S15, S16). A seed that fails is its replay."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.tiers import budget

from .sharing_world import SharingWorld

SEEDS = budget(250, 20_000, 100_000)
CHUNK = 500


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Many worlds have a state that is away or damaged, and the product logs this."""
    logging.getLogger("twinbus.pairing").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("twinbus.pairing").setLevel(logging.NOTSET)


def settled(seed: int) -> SharingWorld:
    world = SharingWorld(seed)
    try:
        world.settle()
    except BaseException as error:
        error.add_note(f"SharingWorld({seed}).settle()")
        raise
    return world


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_s15_s16_p3_processes_and_pairs_that_share_agree_ping_and_settle(first: int) -> None:
    for seed in range(first, first + CHUNK):
        settled(seed)


@pytest.mark.thorough
def test_a_few_worlds_hold_take_overs_holds_and_loops_that_end() -> None:
    seen: Counter[str] = Counter()
    for seed in range(CHUNK):
        world = settled(seed)
        seen["restored while a process ended"] += world.restored_at_end
        for process in (*world.processes, *world.ended):
            seen += process.notices
            seen["loops that were closed"] += sum(not pair.is_alive for pair in process.pairs)
            seen["writes"] += process.writes
    wanted = {"failover_engaged", "failover_taken_over", "failover_held", "restored", "trial_failed", "trial_passed"}
    wanted |= {"loops that were closed", "writes", "restored while a process ended"}
    assert wanted <= {what for what, times in seen.items() if times}


def test_a_seed_replays_exactly() -> None:
    for seed in range(20):
        one, other = settled(seed), settled(seed)
        assert [process.notices for process in one.processes] == [process.notices for process in other.processes]
        assert one.time == other.time
