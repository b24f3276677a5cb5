"""20,000 worlds; `make simulate` runs any number more. A seed that fails is its own replay."""

from __future__ import annotations

import pytest

from .world import World

SEEDS = 20_000
CHUNK = 500


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_world_loses_doubles_or_misroutes_a_message_and_every_one_settles(first: int) -> None:
    for seed in range(first, first + CHUNK):
        try:
            World(seed).settle()
        except Exception as error:
            error.add_note(f"python -m tests.pairing.simulation --seeds 1 --start {seed}")
            raise


def test_a_seed_replays_exactly() -> None:
    for seed in range(20):
        one, other = World(seed), World(seed)
        one.settle()
        other.settle()
        assert [notice for process in one.processes for notice in process.notices] == [
            notice for process in other.processes for notice in process.notices
        ]
        assert [(m.number, m.accepted, m.refused, m.doubtful) for m in one.messages] == [
            (m.number, m.accepted, m.refused, m.doubtful) for m in other.messages
        ]
