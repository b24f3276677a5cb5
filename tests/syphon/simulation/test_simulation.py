"""Simulated worlds by seed: destinations fail and return, several syphons run, locks are lost, processes are killed."""

import pytest

from tests.tiers import budget

from .world import World

SEEDS = budget(10, 80, 2_000)


@pytest.mark.parametrize("start", range(0, SEEDS, 20))
def test_nothing_is_lost_and_what_is_repeated_has_a_reason(start: int) -> None:
    summaries = [World(seed).live() for seed in range(start, start + 20)]
    assert sum(summary.letters for summary in summaries) > 300


def test_a_world_repeats_itself_by_its_seed() -> None:
    assert World(7).live() == World(7).live()
