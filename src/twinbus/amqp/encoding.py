"""Encoding AMQP values (amqp-core-types §1.6), each in the smallest encoding of its type.

`encode` chooses the AMQP type by the Python type. Each `encode_…` function writes one AMQP type, and raises
struct.error for a value out of range.
"""

from collections.abc import Callable
from struct import Struct
from struct import error as struct_error
from typing import Any
from uuid import UUID

from twinbus.amqp.errors import EncodeError
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
    NumberKeyedMap,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)

MAX_DEPTH = 64  # most levels of nested values, when encoding and when decoding

_U8 = Struct(">B").pack
_I8 = Struct(">b").pack
_U16 = Struct(">H").pack
_I16 = Struct(">h").pack
_U32 = Struct(">I").pack
_I32 = Struct(">i").pack
_U64 = Struct(">Q").pack
_I64 = Struct(">q").pack
_F32 = Struct(">f").pack
_F64 = Struct(">d").pack

ONE_BYTE = tuple(bytes((i,)) for i in range(256))


def encode(value: Any) -> bytes:
    """Return the encoded value. Raises EncodeError if the Python type has no AMQP type or the value is out of range."""
    try:
        return _encode(value, 0)
    except (struct_error, OverflowError, UnicodeEncodeError) as fault:
        raise EncodeError(f"{type(value).__name__} cannot be encoded: {fault}") from fault


def _encode(value: Any, depth: int) -> bytes:
    kind = type(value)
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        return scalar(value)
    if depth >= MAX_DEPTH:
        raise EncodeError(f"nested deeper than {MAX_DEPTH}")
    compound = _COMPOUNDS.get(kind)
    if compound is not None:
        return compound(value, depth + 1)
    for known in kind.__mro__[1:]:  # A subclass, such as an enum, is written as its base class.
        if known in _SCALARS:
            return _SCALARS[known](value)
        if known in _COMPOUNDS:
            return _COMPOUNDS[known](value, depth + 1)
    raise EncodeError(f"{kind.__name__} is not an AMQP type")


def encode_bool(value: bool) -> bytes:
    return b"\x41" if value else b"\x42"


def encode_uint(value: int) -> bytes:
    if value == 0:
        return b"\x43"
    if 0 < value < 256:
        return b"\x52" + ONE_BYTE[value]
    return b"\x70" + _U32(value)


def encode_ulong(value: int) -> bytes:
    if value == 0:
        return b"\x44"
    if 0 < value < 256:
        return b"\x53" + ONE_BYTE[value]
    return b"\x80" + _U64(value)


def encode_int(value: int) -> bytes:
    return b"\x54" + _I8(value) if -128 <= value < 128 else b"\x71" + _I32(value)


def encode_long(value: int) -> bytes:
    return b"\x55" + _I8(value) if -128 <= value < 128 else b"\x81" + _I64(value)


def encode_ubyte(value: int) -> bytes:
    return b"\x50" + _U8(value)


def encode_ushort(value: int) -> bytes:
    return b"\x60" + _U16(value)


def encode_timestamp(value: int) -> bytes:
    return b"\x83" + _I64(value)


def encode_uuid(value: UUID) -> bytes:
    return b"\x98" + value.bytes


def _variable(code8: bytes, code32: bytes) -> Callable[[bytes], bytes]:
    def write(data: bytes) -> bytes:
        size = len(data)
        return code8 + ONE_BYTE[size] + data if size < 256 else code32 + _U32(size) + data

    return write


encode_binary = _variable(b"\xa0", b"\xb0")


def binary_head(size: int) -> bytes:
    """Return the bytes before the content of a binary of this size."""
    return b"\xa0" + ONE_BYTE[size] if size < 256 else b"\xb0" + _U32(size)


_write_str = _variable(b"\xa1", b"\xb1")
_write_symbol = _variable(b"\xa3", b"\xb3")


def encode_str(value: str) -> bytes:
    return _write_str(value.encode())


def encode_symbol(value: str) -> bytes:
    return _write_symbol(value.encode("ascii"))


def encode_list_of(items: list[bytes]) -> bytes:
    """Encode a list of values that are encoded already."""
    if not items:
        return b"\x45"
    return _compound(0xC0, 0xD0, len(items), b"".join(items))


def encode_fields(count: int, content: bytes) -> bytes:
    """Encode a list of `count` values (at least one) that are encoded and joined already."""
    return _compound(0xC0, 0xD0, count, content)


def encode_map_of(count: int, content: bytes) -> bytes:
    """Encode a map of encoded and joined entries. `count` counts keys and values, as AMQP does."""
    return _compound(0xC1, 0xD1, count, content)


def _compound(code8: int, code32: int, count: int, content: bytes) -> bytes:
    size = len(content)
    if size < 255 and count < 256:
        return bytes((code8, size + 1, count)) + content
    return ONE_BYTE[code32] + _U32(size + 4) + _U32(count) + content


def _encode_char(value: str) -> bytes:
    if len(value) != 1:
        raise EncodeError("a char is one character")
    return b"\x73" + value.encode("utf-32-be")


def _decimal(code: bytes, width: int) -> Callable[[bytes], bytes]:
    def write(value: bytes) -> bytes:
        if len(value) != width:
            raise EncodeError(f"a decimal{width * 8} has {width} bytes, not {len(value)}")
        return code + value

    return write


def _encode_list(value: list[Any] | tuple[Any, ...], depth: int) -> bytes:
    return encode_list_of([_encode(item, depth) for item in value])


def _encode_map(value: dict[Any, Any] | NumberKeyedMap, depth: int) -> bytes:
    parts = []
    for key, item in value.items():
        parts.append(_encode(key, depth))
        parts.append(_encode(item, depth))
    return encode_map_of(len(parts), b"".join(parts))


def _encode_described(value: Described, depth: int) -> bytes:
    return b"\x00" + _encode(value.descriptor, depth) + _encode(value.value, depth)


def _encode_array(value: Array, depth: int) -> bytes:
    constructor = b"".join(b"\x00" + _encode(descriptor, depth) for descriptor in value.descriptors)
    code, items = _array_items(value, depth)
    content = constructor + code + b"".join(items)
    return _compound(0xE0, 0xF0, len(items), content)


def _array_items(value: Array, depth: int) -> tuple[bytes, list[bytes]]:
    """Return the constructor that all elements share, and the elements without a constructor (§1.6.24).

    The constructor is that of the type's widest encoding.
    """
    if value.element is type(None):
        if any(item is not None for item in value):
            raise EncodeError("an array of null can hold only null")
        return b"\x40", [b""] * len(value)
    widest = _WIDEST.get(value.element)
    if widest is None:
        raise EncodeError(f"an array of {value.element.__name__} is not supported")
    code, write = widest
    for item in value:
        if not _fits(item, value.element):
            raise EncodeError(f"an array of {value.element.__name__} cannot hold {type(item).__name__}")
    return code, [write(item, depth) for item in value]


def _fits(item: Any, element: type) -> bool:
    """Return whether an array accepts the item. A symbol array accepts `str`, a uint array `int`."""
    if element is Array or isinstance(item, Array):
        return element is Array and isinstance(item, Array)
    if element is dict and isinstance(item, NumberKeyedMap):
        return True
    python_type = next(known for known in element.__mro__ if known.__module__ in {"builtins", "uuid"})
    return isinstance(item, python_type) and (element is bool or not isinstance(item, bool))


def _wide(content: bytes, count: int) -> bytes:
    return _U32(len(content) + 4) + _U32(count) + content


def _wide_list(value: Any, depth: int) -> bytes:
    return _wide(b"".join(_encode(item, depth + 1) for item in value), len(value))


def _wide_map(value: Any, depth: int) -> bytes:
    content = b"".join(_encode(key, depth + 1) + _encode(item, depth + 1) for key, item in value.items())
    return _wide(content, 2 * len(value))


def _wide_array(value: Any, depth: int) -> bytes:
    if depth >= MAX_DEPTH:
        raise EncodeError(f"nested deeper than {MAX_DEPTH}")
    constructor = b"".join(b"\x00" + _encode(descriptor, depth + 1) for descriptor in value.descriptors)
    code, items = _array_items(value, depth + 1)
    return _wide(constructor + code + b"".join(items), len(items))


def _wide_text(charset: str) -> Callable[[Any, int], bytes]:
    def write(value: Any, depth: int) -> bytes:
        data = value.encode(charset)
        return _U32(len(data)) + bytes(data)

    return write


def _number(pack: Callable[[Any], bytes]) -> Callable[[Any, int], bytes]:
    return lambda value, depth: pack(value)


_WIDEST: dict[type, tuple[bytes, Callable[[Any, int], bytes]]] = {
    bool: (b"\x56", lambda value, depth: b"\x01" if value else b"\x00"),
    UByte: (b"\x50", _number(_U8)),
    UShort: (b"\x60", _number(_U16)),
    UInt: (b"\x70", _number(_U32)),
    ULong: (b"\x80", _number(_U64)),
    Byte: (b"\x51", _number(_I8)),
    Short: (b"\x61", _number(_I16)),
    Int: (b"\x71", _number(_I32)),
    Long: (b"\x81", _number(_I64)),
    int: (b"\x81", _number(_I64)),
    Float32: (b"\x72", _number(_F32)),
    float: (b"\x82", _number(_F64)),
    Decimal32: (b"\x74", lambda value, depth: _SCALARS[Decimal32](value)[1:]),
    Decimal64: (b"\x84", lambda value, depth: _SCALARS[Decimal64](value)[1:]),
    Decimal128: (b"\x94", lambda value, depth: _SCALARS[Decimal128](value)[1:]),
    Char: (b"\x73", lambda value, depth: _encode_char(value)[1:]),
    Timestamp: (b"\x83", _number(_I64)),
    UUID: (b"\x98", lambda value, depth: value.bytes),
    bytes: (b"\xb0", lambda value, depth: _U32(len(value)) + value),
    str: (b"\xb1", _wide_text("utf-8")),
    Symbol: (b"\xb3", _wide_text("ascii")),
    list: (b"\xd0", _wide_list),
    dict: (b"\xd1", _wide_map),
    Array: (b"\xf0", _wide_array),
}

_SCALARS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"\x40",
    bool: encode_bool,
    UByte: encode_ubyte,
    UShort: encode_ushort,
    UInt: encode_uint,
    ULong: encode_ulong,
    Byte: lambda value: b"\x51" + _I8(value),
    Short: lambda value: b"\x61" + _I16(value),
    Int: encode_int,
    Long: encode_long,
    int: encode_long,
    Float32: lambda value: b"\x72" + _F32(value),
    float: lambda value: b"\x82" + _F64(value),
    Decimal32: _decimal(b"\x74", 4),
    Decimal64: _decimal(b"\x84", 8),
    Decimal128: _decimal(b"\x94", 16),
    Char: _encode_char,
    Timestamp: encode_timestamp,
    UUID: encode_uuid,
    bytes: encode_binary,
    bytearray: lambda value: encode_binary(bytes(value)),
    str: encode_str,
    Symbol: encode_symbol,
}

_COMPOUNDS: dict[type, Callable[[Any, int], bytes]] = {
    list: _encode_list,
    tuple: _encode_list,
    dict: _encode_map,
    NumberKeyedMap: _encode_map,
    Described: _encode_described,
    Array: _encode_array,
}
