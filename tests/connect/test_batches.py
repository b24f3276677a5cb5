"""Packing and runs: nothing is lost, nothing is reordered, nothing is larger than it may be."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.amqp.message_sections import BATCH_FORMAT, batch_messages, split
from twinbus.connect.batches import halving, pack, runs
from twinbus.connect.encoding import encode_message
from twinbus.connect.errors import MessageNotFoundError, MessageSizeExceededError
from twinbus.message import Message


def encoded(size: int, name: str | None = None) -> bytes:
    return encode_message(Message(b"x" * size, message_id=name, session_id=name), 0)


@given(st.lists(st.integers(0, 600), max_size=40), st.integers(700, 4000), st.booleans())
def test_batches_hold_all_messages_in_order_and_keep_to_the_limit(sizes: list[int], limit: int, named: bool) -> None:
    messages = [encoded(size, f"name {index}" if named else None) for index, size in enumerate(sizes)]
    found: list[bytes] = []
    for batch in pack(messages, limit):
        inside = batch_messages(batch.payload) if batch.message_format == BATCH_FORMAT else [batch.payload]
        assert inside == messages[batch.first : batch.end]
        assert len(batch.payload) <= limit
        found += inside
    assert found == messages


def test_as_many_as_fit_go_into_one_batch() -> None:
    messages = [encoded(100)] * 50
    whole = pack(messages, 1_000_000)
    assert len(whole) == 1
    assert len(pack(messages, len(whole[0].payload))) == 1
    assert len(pack(messages, len(whole[0].payload) - 1)) == 2


def test_a_message_alone_is_sent_as_it_is() -> None:
    raw = encoded(10)
    (batch,) = pack([raw], 1000)
    assert (batch.payload, batch.message_format) == (raw, 0)


def test_a_batch_says_id_session_and_partition_of_its_first_message() -> None:
    first = encode_message(Message(b"", message_id="m", session_id="s", partition_key="s"), 0)
    (batch,) = pack([first, encoded(1)], 1000)
    envelope = split(batch.payload)
    assert (envelope.properties.message_id, envelope.properties.group_id) == ("m", "s")
    assert envelope.message_annotations == {"x-opt-partition-key": "s"}


def test_one_message_that_is_too_large_refuses_all() -> None:
    with pytest.raises(MessageSizeExceededError, match="the link takes 500"):
        pack([encoded(10), encoded(600)], 500)


def test_nothing_makes_no_batch_and_no_run() -> None:
    assert pack([], 100) == []
    assert runs([]) == []


@given(st.sets(st.integers(0, 60)))
def test_runs_cover_exactly_their_ids_with_gaps_between_them(ids: set[int]) -> None:
    found = runs(ids)
    assert {number for first, last in found for number in range(first, last + 1)} == ids
    assert all(later[0] > earlier[1] + 1 for earlier, later in pairwise(found))


def test_a_run_that_wraps_around_is_told_in_two() -> None:
    assert runs([0xFFFFFFFF, 0, 1]) == [(0, 1), (0xFFFFFFFF, 0xFFFFFFFF)]


@given(st.sets(st.integers(0, 60)), st.integers(0, 60))
async def test_whatever_is_refused_is_found_and_the_others_are_had(refused: set[int], count: int) -> None:
    async def ask(part: Sequence[int]) -> list[int]:
        if refused.intersection(part):
            raise MessageNotFoundError("one of them")
        return list(part)

    answers = await halving(range(count), ask, MessageNotFoundError)
    assert [one for _, answer in answers for one in answer or ()] == [one for one in range(count) if one not in refused]
    assert [part[0] for part, answer in answers if answer is None] == [one for one in range(count) if one in refused]
