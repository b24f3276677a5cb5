"""Arrow columns of Python values, without pandas.

`pyarrow.array` imports pandas with its first call, if pandas is installed. This costs each worker of Spark 0.2 s of
processor time. `column` fills Arrow's buffers itself. A property test compares the two.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, Final

import pyarrow as pa

_CODES: Final = {64: "q", 32: "i"}


def column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Returns the values as an array. An instant is a number of microseconds, a map is a dict.

    Raises an error if a value does not have the type.
    """
    nulls = values.count(None)
    if nulls == len(values):
        return pa.nulls(nulls, kind)
    validity = _bits(values) if nulls else None
    if pa.types.is_map(kind):
        return _maps([value or {} for value in values], kind, validity)
    if pa.types.is_string(kind):
        encoded = [b"" if value is None else value.encode() for value in values]
        return pa.Array.from_buffers(kind, len(values), [validity, *_joined(encoded)])
    if pa.types.is_binary(kind):
        return pa.Array.from_buffers(kind, len(values), [validity, *_joined([value or b"" for value in values])])
    assert pa.types.is_integer(kind) or pa.types.is_timestamp(kind), kind
    numbers = [0 if value is None else value for value in values] if nulls else values
    content = pa.py_buffer(array(_CODES[kind.bit_width], numbers))
    return pa.Array.from_buffers(kind, len(values), [validity, content])


def _maps(values: Sequence[dict[str, str | None]], kind: pa.MapType, validity: pa.Buffer | None) -> pa.Array:
    keys = column(list(chain.from_iterable(values)), kind.key_type)
    items = column(list(chain.from_iterable(value.values() for value in values)), kind.item_type)
    entries = pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(kind, len(values), [validity, _offsets(values)], children=[entries])


def _joined(values: Sequence[bytes]) -> tuple[pa.Buffer, pa.Buffer]:
    """Returns the offsets and the bytes of the values."""
    return _offsets(values), pa.py_buffer(b"".join(values))


def _offsets(values: Iterable[Any]) -> pa.Buffer:
    return pa.py_buffer(array("i", accumulate(map(len, values), initial=0)))


def _bits(values: Sequence[Any]) -> pa.Buffer:
    """Returns a bitmap of the values that are not null."""
    bits = bytearray(-(-len(values) // 8))
    for place, value in enumerate(values):
        if value is not None:
            bits[place >> 3] |= 1 << (place & 7)
    return pa.py_buffer(bytes(bits))
