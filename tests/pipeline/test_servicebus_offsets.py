"""D1: sets of sequence numbers behave like sets of integers, and an offset comes back from the checkpoint as it was."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.pipeline.servicebus.offsets import Offset, OffsetError, SequenceNumbers
from twinbus.pipeline.servicebus.session_offsets import SessionOffset, from_distances, to_distances
from twinbus.pipeline.servicebus.task_reader import split_sessions

# Small numbers, so that runs touch; and numbers of a partition other than the first, which have 64 bits.
_plain = st.frozensets(st.integers(0, 40) | st.integers(2**62, 2**62 + 5), max_size=40)


def _members(numbers: SequenceNumbers) -> list[int]:
    return [number for first, last in numbers.runs() for number in range(first, last + 1)]


@given(_plain)
def test_d1_a_set_of_numbers_has_these_numbers_and_no_other(plain: frozenset[int]) -> None:
    numbers = SequenceNumbers.of(plain)
    assert _members(numbers) == sorted(plain)
    assert len(numbers) == len(plain)
    assert bool(numbers) == bool(plain)
    for number in range(45):
        assert (number in numbers) == (number in plain)
        assert numbers.at_or_after(number) == min((one for one in plain if one >= number), default=None)
    if plain:
        assert (numbers.first, numbers.last) == (min(plain), max(plain))
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(numbers.runs()))


@given(_plain, _plain)
def test_d1_union_and_difference_are_those_of_sets(one: frozenset[int], other: frozenset[int]) -> None:
    assert SequenceNumbers.of(one) | SequenceNumbers.of(other) == SequenceNumbers.of(one | other)
    assert SequenceNumbers.of(one) - SequenceNumbers.of(other) == SequenceNumbers.of(one - other)


@given(_plain, st.integers(1, 7))
def test_d1_the_parts_of_a_set_are_disjoint_and_even(plain: frozenset[int], count: int) -> None:
    parts = SequenceNumbers.of(plain).parts(count)
    assert [number for part in parts for number in _members(part)] == sorted(plain)
    assert len(parts) <= count
    sizes = [len(part) for part in parts]
    assert not sizes or min(sizes) >= 1
    assert len(set(sizes[:-1])) <= 1


_numbers = _plain.map(SequenceNumbers.of)
_offsets = st.builds(
    Offset,
    through=st.integers(-1, 2**63 - 1),
    start=st.integers(0, 2**63 - 1),
    read=_numbers,
    uncompleted=_numbers,
    newest=st.none() | st.integers(0, 2**50),
    keep=st.booleans(),
    entity=st.none() | st.text(),
)


@given(_offsets)
def test_d1_an_offset_comes_back_from_the_checkpoint_as_it_was(offset: Offset) -> None:
    text = json.dumps(offset.to_json())
    assert Offset.of_json(json.loads(text)) == offset
    assert json.dumps(Offset.of_json(json.loads(text)).to_json()) == text


def test_d1_ten_thousand_messages_in_a_row_take_a_few_bytes_of_an_offset() -> None:
    numbers = SequenceNumbers.of(range(1_000_000, 1_010_000))
    assert str(numbers) == "1000000-1009999"


def test_d1_an_offset_of_an_earlier_version_names_no_message() -> None:
    offset = Offset.of_json({"through": 7})
    assert offset.is_of_earlier_version
    assert not offset.read
    assert not offset.uncompleted
    assert not Offset(through=7, start=0).is_of_earlier_version


@pytest.mark.parametrize(
    "values",
    [{}, {"through": "7"}, {"through": 7, "from": "x"}, {"through": 7, "from": 0, "read": "1-"}]
    + [{"through": 7, "from": 0, "read": text} for text in ("a", "5-3", "4,4", "7,2", "1-5,3", "-1")],
)
def test_d1_an_offset_that_no_version_has_written_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(OffsetError):
        Offset.of_json(values)


# --- offsets of sessions ---------------------------------------------------------------------------------------------


@given(_plain)
def test_d1_the_numbers_of_a_session_survive_their_text_form(plain: frozenset[int]) -> None:
    numbers = SequenceNumbers.of(plain)
    assert from_distances(to_distances(numbers)) == numbers


def test_d1_the_offset_of_sessions_in_json() -> None:
    read = {"a": SequenceNumbers([(100, 103), (110, 110), (118, 118)]), "b": SequenceNumbers([(104, 104)])}
    uncompleted = {"c": SequenceNumbers([(7, 8)])}
    offset = SessionOffset(read=read, uncompleted=uncompleted, newest=5, newest_uncompleted={"c": 4}, entity="h/q")
    assert (offset.newest_of("a"), offset.newest_of("c")) == (5, 4)
    written = {
        "sessions": {"a": "100+3,7,8", "b": "104"},
        "uncompleted": {"c": "7+1"},
        "newest": 5,
        "newest_uncompleted": {"c": 4},
        "entity": "h/q",
    }
    assert offset.to_json() == written
    assert SessionOffset.of_json(written) == offset
    assert SessionOffset.of_json(SessionOffset().to_json()) == SessionOffset()


@pytest.mark.parametrize("text", ["x", "5,0", "5,", "5+", "-5", "5+1,00+2", "5 ,3"])
def test_d1_a_text_that_is_no_list_of_distances_is_refused(text: str) -> None:
    with pytest.raises(OffsetError, match="no distance"):
        from_distances(text)


@pytest.mark.parametrize(
    "values",
    [
        {"sessions": []},
        {"sessions": {}, "uncompleted": 3},
        {"sessions": {}, "newest": "x"},
        {"sessions": {}, "newest_uncompleted": {"a": "x"}},
    ],
)
def test_d1_an_offset_that_no_stream_of_sessions_wrote_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(OffsetError, match="has no offset of a servicebus stream"):
        SessionOffset.of_json(values)


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 50), min_size=1), st.integers(1, 10))
def test_d1_sessions_are_divided_whole_and_about_evenly(sizes: dict[str, int], count: int) -> None:
    sessions = {name: SequenceNumbers([(1, size)]) for name, size in sizes.items()}
    parts = split_sessions(sessions, count)
    assert len(parts) == min(count, len(sessions))
    assert sorted(name for part in parts for name, _ in part.sessions) == sorted(sizes)
    loads = [sum(len(numbers) for _, numbers in part.sessions) for part in parts]
    assert max(loads) - min(loads) <= max(sizes.values())
