"""Decoding takes time linear in the bytes, for any keys of a map and for a map at any place of a frame."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.amqp.joined import bare_server, closing_error
from tests.fuzz import hostile_maps
from twinbus.amqp.connection import Connection
from twinbus.amqp.decoding import MAX_PREDICTABLE_KEYS, PREDICTABLE_TYPES, decode
from twinbus.amqp.described_types import decode_described
from twinbus.amqp.encoding import encode
from twinbus.amqp.errors import AmqpError, DecodeError
from twinbus.amqp.frames import AMQP_HEADER, encode_frame
from twinbus.amqp.message_sections import split_sections
from twinbus.amqp.routing_fields import read_routing_fields
from twinbus.values import Array, Condition, Described, Float32, NumberKeyedMap, Symbol, UInt, ULong

KEYS = 600
# A dict of 600 keys with one hash compares each of them with all before it: 180,000 times, and again to insert it.
MOST_COMPARISONS = KEYS * MAX_PREDICTABLE_KEYS


def comparisons(call: Callable[[], object]) -> int:
    """Counts how often two UUIDs are compared."""
    found = 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal found
        if event == "call" and frame.f_code is UUID.__eq__.__code__:
            found += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def read_everything(raw: bytes) -> None:
    """Reads every section; skips a section that cannot be read."""
    sections = split_sections(raw)
    names = "delivery_annotations", "message_annotations", "application_properties", "footer", "value", "sequences"
    for name in names:
        try:
            getattr(sections, name)
        except DecodeError:
            continue


def dicts_of(value: Any) -> Iterator[dict[Any, Any]]:
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | NumberKeyedMap):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from dicts_of(one)
    if isinstance(value, Described):
        yield from dicts_of(value.value)


@pytest.mark.parametrize("place", hostile_maps.PERFORMATIVES)
def test_x1_colliding_keys_are_not_compared_with_each_other_in_a_frame(place: str) -> None:
    body = hostile_maps.PERFORMATIVES[place](hostile_maps.encoded_map(hostile_maps.uuids(KEYS)))

    def read() -> None:
        with suppress(AmqpError):
            decode_described(body, 0)

    assert comparisons(read) < MOST_COMPARISONS
    server = bare_server()
    assert comparisons(lambda: server.receive(encode_frame(0, body), 0.0)) < MOST_COMPARISONS


@pytest.mark.parametrize("place", hostile_maps.SECTIONS)
def test_x1_colliding_keys_are_not_compared_with_each_other_in_a_message(place: str) -> None:
    raw = hostile_maps.SECTIONS[place](hostile_maps.encoded_map(hostile_maps.uuids(KEYS)))

    def arrive() -> None:
        with suppress(DecodeError):
            read_routing_fields(raw)

    assert comparisons(arrive) == 0
    assert comparisons(lambda: read_everything(raw)) < MOST_COMPARISONS


@pytest.mark.parametrize("kind", hostile_maps.KEYS)
@pytest.mark.parametrize("number", [1, MAX_PREDICTABLE_KEYS, MAX_PREDICTABLE_KEYS + 1, KEYS])
def test_x1_no_decoded_dict_has_many_keys_whose_hash_a_peer_can_predict(kind: str, number: int) -> None:
    keys = hostile_maps.KEYS[kind](number)
    raw = hostile_maps.encoded_map(keys)
    value, end = decode(raw)
    assert end == len(raw)
    assert len(value) == number
    assert [repr(key) for key in value] == [repr(key) for key in keys], "in their order, with their types"
    assert encode(value) == raw
    for found in dicts_of([value]):
        assert sum(isinstance(key, PREDICTABLE_TYPES) for key in found) <= MAX_PREDICTABLE_KEYS


@pytest.mark.parametrize("make", [hostile_maps.maps_of_64, hostile_maps.map_of_size])
def test_x1_maps_inside_lists_arrays_and_maps_are_held_to_the_same_bound(make: Callable[[str, int], bytes]) -> None:
    inner = make("uuid", 40_000)
    outer = encode({"k": None})[:-1] + b"\x00\x53\x05" + inner
    outer = b"\xd1" + (len(outer) - 3 + 4).to_bytes(4) + (2).to_bytes(4) + outer[3:]
    assert comparisons(lambda: decode(outer)) < len(inner) // 18 * MAX_PREDICTABLE_KEYS
    for found in dicts_of(decode(outer)[0]):
        assert sum(isinstance(key, PREDICTABLE_TYPES) for key in found) <= MAX_PREDICTABLE_KEYS


def test_x1_described_keys_with_colliding_values_have_hashes_of_their_own() -> None:
    for kind in ("described uuid", "uuid as descriptor"):
        assert len(set(map(hash, hostile_maps.KEYS[kind](KEYS)))) == KEYS


def test_x1_the_hash_of_a_described_value_is_computed_once_per_level() -> None:
    calls = 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is Described.__hash__.__code__

    deep = hostile_maps.nested(1)[0]
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        hash(deep)
    finally:
        sys.setprofile(before)
    assert calls == 30


def test_equal_described_values_have_equal_hashes() -> None:
    for one, other in ((1, 1.0), (True, ULong(1)), (Float32(0.5), 0.5), (UUID(int=5), UUID(int=5)), ("a", Symbol("a"))):
        assert Described(one, other) == Described(other, one)
        assert hash(Described(one, other)) == hash(Described(other, one))


numbers = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.floats(), st.booleans(), st.uuids(), st.sampled_from([0, 1, 2])
)


@given(st.dictionaries(numbers, st.integers(), max_size=20), st.lists(numbers, max_size=20))
def test_a_number_keyed_map_is_read_like_a_dict(values: dict[Any, int], others: list[Any]) -> None:
    found = NumberKeyedMap(values.items())
    assert list(found.items()) == list(values.items())
    assert len(found) == len(values)
    for key in (*values, *others, "text", b"binary", None):
        assert (key in found) is (key in values)
        assert found.get(key) == values.get(key)
    assert found == NumberKeyedMap(reversed(values.items()))
    assert found == values
    assert values == found
    assert found != {**values, "more": 1}
    assert found != []


def test_a_number_keyed_map_has_the_errors_of_a_dict() -> None:
    found = NumberKeyedMap([(UInt(1), "one")])
    assert found[1] == found[1.0] == found[True] == "one"
    with pytest.raises(KeyError, match="2"):
        found[2]
    with pytest.raises(TypeError, match="unhashable"):
        found[[]]
    with pytest.raises(TypeError, match="unhashable"):
        hash(found)
    assert repr(found) == "NumberKeyedMap([(1, 'one')])"


def test_an_array_of_maps_with_many_number_keys_survives_a_round_trip() -> None:
    value = Array(dict, [NumberKeyedMap((UInt(key), None) for key in range(100)), {"few": 1}])
    assert decode(encode(value))[0] == value


@pytest.mark.parametrize("number", [2, 100])
@pytest.mark.parametrize("key", [ULong(1), UUID(int=1), "x" * 1_000_000, Described(ULong(1), b"y" * 100_000)])
def test_x1_a_key_that_is_there_twice_is_refused_with_a_short_text(key: Any, number: int) -> None:
    raw = hostile_maps.encoded_map([*(UInt(1000 + index) for index in range(number)), key, key])
    with pytest.raises(DecodeError, match="twice") as caught:
        decode(raw)
    assert len(caught.value.description) < 200


@pytest.mark.parametrize("number", [2, 100])
def test_a_list_as_the_key_of_a_map_is_refused(number: int) -> None:
    keys: list[Any] = [UInt(index) for index in range(number)]
    for bad in ([1], Described(ULong(1), [1])):
        with pytest.raises(DecodeError, match="is not supported as a map key"):
            decode(hostile_maps.encoded_map([*keys, bad]))


def test_x1_an_open_whose_properties_have_many_number_keys_is_refused() -> None:
    body = hostile_maps.PERFORMATIVES["open properties"](hostile_maps.encoded_map(hostile_maps.uuids(KEYS)))
    server = Connection.server("s", bare_allowed=True)
    events = server.receive(AMQP_HEADER + encode_frame(0, body), 0.0)
    error = closing_error(events)
    assert error is not None
    assert error.condition == Condition.DECODE_ERROR
