"""Which runs of the table `steps` a batch merges (D5)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twinbus.pipeline.message_steps import MOST_RUNS, merged_runs


def runs_after(batches: list[int]) -> tuple[list[int], int]:
    """Return the runs after these batches, and how many rows were written in all."""
    runs: list[int] = []
    written = 0
    for rows in batches:
        merged = merged_runs(runs, rows)
        kept, gone = runs[: len(runs) - merged], runs[len(runs) - merged :]
        runs = [*kept, sum(gone) + rows]
        written += runs[-1]
        assert len(runs) <= MOST_RUNS
    return runs, written


@given(st.lists(st.integers(0, 1_000_000), max_size=100))
def test_d5_there_are_never_more_than_three_runs_and_no_row_is_lost(batches: list[int]) -> None:
    runs, _ = runs_after(batches)
    assert sum(runs) == sum(batches)


def test_d5_a_row_is_seldom_rewritten() -> None:
    _, written = runs_after([100] * 1000)
    assert written / 100_000 < 2.5 * 1000 ** (1 / 3)
