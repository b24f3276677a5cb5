"""Hypothesis strategies: every AMQP value, and messages made of them."""

from typing import Any

from hypothesis import strategies as st

from twinbus.amqp.message_sections import Header, Properties
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


def _whole(kind: type, bits: int, *, signed: bool) -> st.SearchStrategy[Any]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    near_edges = st.sampled_from([low, high, 0, 1, min(127, high), min(128, high), min(255, high), min(256, high)])
    return st.one_of(st.integers(low, high), near_edges).map(kind)


text = st.text(max_size=300)
ascii_text = st.text(st.characters(min_codepoint=0, max_codepoint=127), max_size=40)
characters = st.characters(exclude_categories=["Cs"])

BY_TYPE: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    UByte: _whole(UByte, 8, signed=False),
    UShort: _whole(UShort, 16, signed=False),
    UInt: _whole(UInt, 32, signed=False),
    ULong: _whole(ULong, 64, signed=False),
    Byte: _whole(Byte, 8, signed=True),
    Short: _whole(Short, 16, signed=True),
    Int: _whole(Int, 32, signed=True),
    Long: _whole(Long, 64, signed=True),
    Timestamp: _whole(Timestamp, 64, signed=True),
    Float32: st.floats(width=32, allow_nan=False).map(Float32),
    float: st.floats(allow_nan=False),
    Decimal32: st.binary(min_size=4, max_size=4).map(Decimal32),
    Decimal64: st.binary(min_size=8, max_size=8).map(Decimal64),
    Decimal128: st.binary(min_size=16, max_size=16).map(Decimal128),
    Char: characters.map(Char),
    type(None): st.none(),
    bytes: st.binary(max_size=300),
    str: text,
    Symbol: ascii_text.map(Symbol),
}
uuids = st.uuids()
scalars = st.one_of(*BY_TYPE.values(), uuids)


def arrays_of(element: type, items: st.SearchStrategy[Any], descriptors: st.SearchStrategy[Any]) -> Any:
    return st.builds(
        lambda values, described: Array(element, values, tuple(described)),
        st.lists(items, max_size=5),
        st.lists(descriptors, max_size=2),
    )


descriptor_values = st.one_of(BY_TYPE[ULong], BY_TYPE[Symbol])
scalar_arrays = st.one_of(*(arrays_of(kind, items, descriptor_values) for kind, items in BY_TYPE.items()))


def typed_key(key: Any) -> tuple[type, Any]:
    return type(key), key


def _maps(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, Any]]:
    # Keys of one type: equal numbers of different types are one key to a Python dict.
    keys = st.sampled_from([BY_TYPE[Symbol], BY_TYPE[str], BY_TYPE[ULong], BY_TYPE[Timestamp], uuids])
    return keys.flatmap(lambda kind: st.dictionaries(kind, values, max_size=4))


def _nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(values, max_size=4)
    return st.one_of(
        lists,
        _maps(values),
        st.builds(Described, descriptor_values, values),
        arrays_of(list, lists, descriptor_values),
        arrays_of(dict, _maps(values), descriptor_values),
        arrays_of(Array, scalar_arrays, descriptor_values),
    )


values = st.recursive(st.one_of(scalars, scalar_arrays), _nested, max_leaves=12)

ids = st.one_of(text, uuids, BY_TYPE[bytes], BY_TYPE[ULong])
headers = st.builds(
    Header,
    durable=st.none() | st.booleans(),
    priority=st.none() | st.integers(0, 255),
    ttl=st.none() | st.integers(0, 2**32 - 1),
    first_acquirer=st.none() | st.booleans(),
    delivery_count=st.none() | st.integers(0, 2**32 - 1),
)
properties = st.builds(
    Properties,
    message_id=st.none() | ids,
    user_id=st.none() | st.binary(max_size=20),
    to=st.none() | text,
    subject=st.none() | text,
    reply_to=st.none() | text,
    correlation_id=st.none() | ids,
    content_type=st.none() | ascii_text,
    content_encoding=st.none() | ascii_text,
    absolute_expiry_time=st.none() | st.integers(-(2**63), 2**63 - 1),
    creation_time=st.none() | st.integers(-(2**63), 2**63 - 1),
    group_id=st.none() | text,
    group_sequence=st.none() | st.integers(0, 2**32 - 1),
    reply_to_group_id=st.none() | text,
)
annotations = st.dictionaries(ascii_text, scalars, max_size=3)
application_properties = st.dictionaries(text, scalars, max_size=3)
bodies = st.one_of(
    st.builds(lambda data: {"data": data}, st.binary(max_size=600)),
    st.builds(lambda data: {"data": data}, st.lists(st.binary(max_size=30), min_size=1, max_size=3)),
    st.builds(lambda value: {"value": value}, values),
    st.builds(lambda lists: {"sequence": lists}, st.lists(st.lists(scalars, max_size=3), min_size=1, max_size=3)),
)
parts = st.fixed_dictionaries(
    {},
    optional={
        "header": headers,
        "delivery_annotations": annotations,
        "message_annotations": annotations,
        "properties": properties,
        "application_properties": application_properties,
        "footer": annotations,
    },
)
