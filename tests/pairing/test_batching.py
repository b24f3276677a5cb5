"""S9: batches that no longer fit."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from twinbus.amqp import batch_payload
from twinbus.pairing.message_copies import Parts, section_size, split_batch, tally

sizes_of_messages = st.lists(st.integers(1, 400), max_size=30)


@given(sizes_of_messages, st.integers(50, 600), st.integers(0, 40))
def test_s9_every_message_is_in_one_part_in_order_or_too_large_for_any(
    sizes: list[int], limit: int, envelope: int
) -> None:
    parts = split_batch(sizes, limit, envelope=envelope)
    assert [position for group in parts.groups for position in group] == [
        position for position in range(len(sizes)) if position not in parts.oversized
    ]
    assert all(sizes[position] > limit for position in parts.oversized)
    assert all(parts.groups)


@given(sizes_of_messages, st.integers(50, 600), st.integers(0, 40))
def test_s9_every_part_fits(sizes: list[int], limit: int, envelope: int) -> None:
    for group in split_batch(sizes, limit, envelope=envelope).groups:
        alone = len(group) == 1 and sizes[group[0]] <= limit
        assert alone or envelope + sum(section_size(sizes[position]) for position in group) <= limit


@given(sizes_of_messages, st.integers(50, 600), st.integers(0, 40))
def test_s9_no_part_could_have_taken_the_next_one_too(sizes: list[int], limit: int, envelope: int) -> None:
    groups = split_batch(sizes, limit, envelope=envelope).groups
    for group, following in pairwise(groups):
        together = [*group, following[0]]
        assert envelope + sum(section_size(sizes[position]) for position in together) > limit


def test_s9_a_batch_that_fits_is_one_part() -> None:
    assert split_batch([100, 100], 210) == Parts(((0, 1),), ())
    assert split_batch([100, 100], 209) == Parts(((0,), (1,)), ())
    assert split_batch([], 10) == Parts((), ())


def test_s9_a_message_that_fits_only_alone_goes_alone() -> None:
    assert split_batch([10, 100, 10], 100) == Parts(((0,), (1,), (2,)), ())
    assert split_batch([10, 101, 10], 100) == Parts(((0, 2),), (1,))


@pytest.mark.parametrize("size", [1, 255, 256, 5000])
def test_s9_a_section_is_as_large_as_on_the_wire(size: int) -> None:
    message = bytes(size)
    payload = batch_payload([message])
    assert len(payload) - len(batch_payload([message, message])) == -section_size(size)


def test_s9_the_ids_that_are_safe_and_those_that_are_not() -> None:
    ids = ["a", "b", "c", "d"]
    parts = Parts(((0, 1), (3,)), (2,))
    assert tally(ids, parts, 0) == ((), ("a", "b", "c", "d"))
    assert tally(ids, parts, 1) == (("a", "b"), ("c", "d"))
    assert tally(ids, parts, 2) == (("a", "b", "d"), ("c",))
    assert [tally(ids, parts, taken).partial for taken in (0, 1, 2)] == [False, True, True]
    assert not tally(["a"], Parts(((0,),), ()), 1).partial
