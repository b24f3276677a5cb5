"""Serial numbers: distance and runs, also across the end of the 32 bits."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from twinbus.amqp.serial_numbers import MASK, consecutive_runs, distance


@given(st.integers(0, MASK), st.integers(-(2**31) + 1, 2**31 - 1))
def test_serial_distance_undoes_serial_steps(start: int, steps: int) -> None:
    assert distance(start, (start + steps) & MASK) == steps


def test_no_ids_make_no_run() -> None:
    assert consecutive_runs([]) == []


@given(st.sets(st.integers(0, 60)))
def test_runs_cover_exactly_their_ids_with_gaps_between_them(ids: set[int]) -> None:
    found = consecutive_runs(sorted(ids))
    assert {number for first, last in found for number in range(first, last + 1)} == ids
    assert all(later[0] > earlier[1] + 1 for earlier, later in pairwise(found))


def test_a_run_that_wraps_around_is_one_run() -> None:
    assert consecutive_runs([MASK, 0, 1]) == [(MASK, 1)]


def test_a_run_that_wraps_around_makes_two_runs_when_its_ids_are_sorted() -> None:
    assert consecutive_runs(sorted([MASK, 0, 1])) == [(0, 1), (MASK, MASK)]
