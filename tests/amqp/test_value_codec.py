import math
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.amqp import strategies
from twinbus.amqp.decoding import decode, decode_all, skip
from twinbus.amqp.encoding import encode
from twinbus.amqp.errors import DecodeError, EncodeError
from twinbus.values import (
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
    Float32,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)

NUMBER = UUID("12345678-1234-5678-1234-567812345678")

# value, smallest encoding (amqp-core-types §1.6)
TABLE: list[tuple[Any, str]] = [
    (None, "40"),
    (True, "41"),
    (False, "42"),
    (UByte(0), "50 00"),
    (UByte(255), "50 ff"),
    (UShort(0), "60 0000"),
    (UShort(65535), "60 ffff"),
    (UInt(0), "43"),
    (UInt(1), "52 01"),
    (UInt(255), "52 ff"),
    (UInt(256), "70 00000100"),
    (UInt(2**32 - 1), "70 ffffffff"),
    (ULong(0), "44"),
    (ULong(255), "53 ff"),
    (ULong(256), "80 0000000000000100"),
    (ULong(2**64 - 1), "80 ffffffffffffffff"),
    (Byte(-128), "51 80"),
    (Byte(127), "51 7f"),
    (Short(-32768), "61 8000"),
    (Short(32767), "61 7fff"),
    (Int(-128), "54 80"),
    (Int(127), "54 7f"),
    (Int(128), "71 00000080"),
    (Int(-(2**31)), "71 80000000"),
    (Long(-128), "55 80"),
    (Long(127), "55 7f"),
    (Long(-129), "81 ffffffffffffff7f"),
    (Long(2**63 - 1), "81 7fffffffffffffff"),
    (Float32(1.5), "72 3fc00000"),
    (1.5, "82 3ff8000000000000"),
    (Decimal32(b"\x01\x02\x03\x04"), "74 01020304"),
    (Decimal64(b"\x01" * 8), "84 0101010101010101"),
    (Decimal128(b"\x02" * 16), "94 02020202020202020202020202020202"),
    (Char("a"), "73 00000061"),
    (Char("\U0010ffff"), "73 0010ffff"),
    (Timestamp(0), "83 0000000000000000"),
    (Timestamp(-1), "83 ffffffffffffffff"),
    (NUMBER, "98 12345678123456781234567812345678"),
    (b"", "a0 00"),
    (b"x" * 255, "a0 ff" + "78" * 255),
    (b"x" * 256, "b0 00000100" + "78" * 256),
    ("", "a1 00"),
    ("é", "a1 02 c3a9"),
    ("a" * 256, "b1 00000100" + "61" * 256),
    (Symbol("a"), "a3 01 61"),
    (Symbol("a" * 256), "b3 00000100" + "61" * 256),
    ([], "45"),
    ([None], "c0 02 01 40"),
    ([None] * 255, "d0 00000103 000000ff" + "40" * 255),
    ({}, "c1 01 00"),
    ({Symbol("k"): UInt(1)}, "c1 06 02 a3 01 6b 52 01"),
    (Described(ULong(0x24), []), "00 53 24 45"),
    (Described(Symbol("x:y"), "z"), "00 a3 03 783a79 a1 01 7a"),
    (Array(UByte, [UByte(1), UByte(2)]), "e0 04 02 50 01 02"),
    (Array(bool, [True, False]), "e0 04 02 56 01 00"),
    (Array(Symbol, [Symbol("a")]), "e0 07 01 b3 00000001 61"),
    (Array(UInt, []), "e0 02 00 70"),
    (Array(ULong, [ULong(1)], (Symbol("d"),)), "e0 0e 01 00 a3 01 64 80 0000000000000001"),
    (Array(list, [[UInt(0)]]), "e0 0b 01 d0 00000005 00000001 43"),
    (Array(Array, [Array(UByte, [UByte(7)])]), "e0 0c 01 f0 00000006 00000001 50 07"),
]


def types_of(value: Any) -> Any:
    """Return the types of a value and of the values inside it: `==` does not compare types."""
    if isinstance(value, Described):
        return Described, types_of(value.descriptor), types_of(value.value)
    if isinstance(value, Array):
        return Array, value.element, [types_of(item) for item in value], [types_of(item) for item in value.descriptors]
    if isinstance(value, list):
        return [types_of(item) for item in value]
    if isinstance(value, dict):
        return [(types_of(key), types_of(item)) for key, item in value.items()]
    return type(value)


@pytest.mark.parametrize(("value", "wire"), TABLE, ids=lambda part: repr(part)[:40])
def test_each_type_has_its_smallest_encoding_and_comes_back_as_itself(value: Any, wire: str) -> None:
    expected = bytes.fromhex(wire)
    assert encode(value) == expected
    found, end = decode(expected)
    assert found == value
    assert types_of(found) == types_of(value)
    assert end == skip(expected, 0) == len(expected)


WIDER: list[tuple[str, Any]] = [
    ("56 01", True),
    ("56 00", False),
    ("70 00000000", UInt(0)),
    ("53 00", ULong(0)),
    ("80 0000000000000000", ULong(0)),
    ("71 00000001", Int(1)),
    ("81 0000000000000001", Long(1)),
    ("b0 00000001 78", b"x"),
    ("b1 00000001 78", "x"),
    ("b3 00000001 78", Symbol("x")),
    ("c0 01 00", []),
    ("d0 00000004 00000000", []),
    ("d1 00000004 00000000", {}),
    ("f0 00000005 00000000 50", Array(UByte, [])),
    ("e0 02 03 40", Array(type(None), [None, None, None])),
    ("e0 02 02 41", Array(bool, [True, True])),
    ("e0 02 02 43", Array(UInt, [UInt(0), UInt(0)])),
    ("e0 02 02 45", Array(list, [[], []])),
    ("00 00 53 01 43 41", Described(Described(ULong(1), UInt(0)), True)),
]


@pytest.mark.parametrize(("wire", "value"), WIDER, ids=lambda part: repr(part)[:40])
def test_encodings_that_we_never_write_are_read(wire: str, value: Any) -> None:
    raw = bytes.fromhex(wire)
    found, end = decode(raw)
    assert found == value
    assert types_of(found) == types_of(value)
    assert end == skip(raw, 0) == len(raw)


@given(strategies.values)
@settings(max_examples=120, deadline=None)
def test_any_value_round_trips_with_its_type(value: Any) -> None:
    raw = encode(value)
    found, end = decode(raw)
    assert found == value
    assert types_of(found) == types_of(value)
    assert end == skip(raw, 0) == len(raw)
    assert encode(found) == raw


@given(strategies.values, st.binary(max_size=8), st.binary(max_size=8))
@settings(max_examples=40, deadline=None)
def test_a_value_is_decoded_between_other_bytes(value: Any, before: bytes, behind: bytes) -> None:
    raw = encode(value)
    assert decode(before + raw + behind, len(before)) == (value, len(before) + len(raw))


@given(strategies.values)
@settings(max_examples=40, deadline=None)
def test_every_truncation_is_a_decode_error(value: Any) -> None:
    raw = encode(value)
    for end in range(0, len(raw), max(1, len(raw) // 40)):
        with pytest.raises(DecodeError):
            decode_all(raw[:end])
        with pytest.raises(DecodeError):
            skip(raw[:end], 0)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_random_bytes_give_a_value_or_a_decode_error(raw: bytes) -> None:
    try:
        value, end = decode(raw)
    except DecodeError:
        return
    assert end <= len(raw)
    assert skip(raw, 0) == end
    assert types_of(decode(encode(value))[0]) == types_of(value)


def test_not_a_number_survives() -> None:
    assert math.isnan(decode_all(encode(float("nan"))))
    assert math.isnan(decode_all(encode(Float32("nan"))))


def test_a_plain_int_is_a_long() -> None:
    found = decode_all(encode(5))
    assert (found, type(found)) == (5, Long)


MALFORMED = {
    "nothing": "",
    "an unknown constructor": "3f",
    "an unknown constructor of a known width": "4f",
    "a list of four thousand million values in ten bytes": "d0 00000005 ffffffff 40",
    "an array of four thousand million nulls": "f0 00000005 ffffffff 40",
    "an array of more bytes than there are": "f0 00000006 ffffffff 50 01",
    "a map with an odd count": "c1 03 01 40 40",
    "a map with the same key twice": "c1 09 04 a1 01 61 40 a1 01 61 40",
    "a list as a key": "c1 03 02 45 40",
    "a map as a key": "c1 05 02 c1 01 00 40",
    "an array as a key": "c1 06 02 e0 02 00 40 40",
    "a list longer than its bytes": "c0 05 01 40",
    "a list that ends too early": "c0 03 01 40 40",
    "a list whose value runs over its end": "c0 02 01 52 01",
    "a list without room for its count": "c0 00 00",
    "a boolean of two": "56 02",
    "a string that is not UTF-8": "a1 01 ff",
    "a symbol that is not ASCII": "a3 02 c3a9",
    "a surrogate as a character": "73 0000d800",
    "a character beyond Unicode": "73 00110000",
    "an array of described nothing": "e0 02 00 00",
    "an array of an unknown type": "e0 02 00 3f",
    "a descriptor without a value": "00 53 01",
}


@pytest.mark.parametrize("wire", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bytes_are_a_decode_error(wire: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_all(bytes.fromhex(wire))
    assert caught.value.condition == "amqp:decode-error"


def nest(levels: int, opening: bytes, core: bytes = b"\x40") -> bytes:
    for _ in range(levels):
        core = opening[:1] + (len(core) + 4).to_bytes(4) + opening[1:] + core
    return core


@pytest.mark.parametrize("opening", [b"\xd0\x00\x00\x00\x01", b"\xf0\x00\x00\x00\x01"], ids=["lists", "arrays"])
def test_nesting_without_end_is_a_decode_error(opening: bytes) -> None:
    raw = nest(3000, opening) if opening[0] == 0xD0 else nest(3000, opening, b"\x50\x01")
    with pytest.raises(DecodeError):
        decode_all(raw)


@pytest.mark.parametrize("raw", [b"\x00" * 5000, b"\x00\x44" * 5000 + b"\x40"], ids=["open", "filled"])
def test_descriptors_without_end_are_a_decode_error(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_all(raw)
    with pytest.raises(DecodeError):
        skip(raw, 0)


UNENCODABLE: list[Any] = [
    UByte(256),
    UByte(-1),
    UShort(65536),
    UInt(2**32),
    UInt(-1),
    ULong(2**64),
    Byte(128),
    Short(-32769),
    Int(2**31),
    2**63,
    Timestamp(2**63),
    Float32(1e300),
    Symbol("é"),
    "\ud800",
    Char("ab"),
    Decimal32(b"123"),
    Decimal128(b""),
    ...,
    Array(UInt, ["a"]),
    Array(UInt, [True]),
    Array(object, []),
    Array(type(None), [1]),
    Array(list, [Array(UInt, [])]),
    Array(Array, [[]]),
]


@pytest.mark.parametrize("value", UNENCODABLE, ids=repr)
def test_a_value_out_of_range_is_the_callers_error(value: Any) -> None:
    with pytest.raises(EncodeError):
        encode(value)


def test_nesting_that_cannot_be_decoded_is_not_encoded() -> None:
    value: Any = []
    for _ in range(100):
        value = [value]
    with pytest.raises(EncodeError):
        encode(value)


def test_arrays_differ_by_element_type_and_descriptors() -> None:
    assert Array(UInt, [1]) == Array(UInt, [1])
    assert Array(UInt, [1]) != Array(ULong, [1])
    assert Array(UInt, [1]) != Array(UInt, [1], (Symbol("a"),))
    assert Array(UInt, [1]) != [1]
