"""Batches that no longer fit are split (S9)."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from twinbus.amqp import batch_payload
from twinbus.backlog.batch_split import BatchParts, section_size, split_batch

sizes_of_messages = st.lists(st.integers(1, 400), max_size=30)


@given(sizes_of_messages, st.integers(50, 600), st.integers(0, 40))
def test_s9_every_message_is_in_one_batch_in_order_or_too_large_for_any(
    sizes: list[int], limit: int, envelope: int
) -> None:
    parts = split_batch(sizes, limit, envelope=envelope)
    assert [position for group in parts.groups for position in group] == [
        position for position in range(len(sizes)) if position not in parts.oversized
    ]
    assert all(sizes[position] > limit for position in parts.oversized)
    assert all(parts.groups)


@given(sizes_of_messages, st.integers(50, 600), st.integers(0, 40))
def test_s9_every_batch_fits(sizes: list[int], limit: int, envelope: int) -> None:
    for group in split_batch(sizes, limit, envelope=envelope).groups:
        alone = len(group) == 1 and sizes[group[0]] <= limit
        assert alone or envelope + sum(section_size(sizes[position]) for position in group) <= limit


@given(sizes_of_messages, st.integers(50, 600), st.integers(0, 40))
def test_s9_no_batch_could_have_taken_the_next_message_too(sizes: list[int], limit: int, envelope: int) -> None:
    groups = split_batch(sizes, limit, envelope=envelope).groups
    for group, following in pairwise(groups):
        together = [*group, following[0]]
        assert envelope + sum(section_size(sizes[position]) for position in together) > limit


def test_s9_a_batch_that_fits_is_not_split() -> None:
    assert split_batch([100, 100], 210) == BatchParts(((0, 1),), ())
    assert split_batch([100, 100], 209) == BatchParts(((0,), (1,)), ())
    assert split_batch([], 10) == BatchParts((), ())


def test_s9_a_message_that_fits_only_alone_goes_alone() -> None:
    assert split_batch([10, 100, 10], 100) == BatchParts(((0,), (1,), (2,)), ())
    assert split_batch([10, 101, 10], 100) == BatchParts(((0, 2),), (1,))


@pytest.mark.parametrize("size", [1, 255, 256, 5000])
def test_s9_a_section_is_as_large_as_on_the_wire(size: int) -> None:
    message = bytes(size)
    payload = batch_payload([message])
    assert len(payload) - len(batch_payload([message, message])) == -section_size(size)
