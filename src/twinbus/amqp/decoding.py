"""Decoding AMQP values (amqp-core-types §1.6): `decode` builds a Python value, `skip` finds the end of a value.

Decoding n bytes gives a value or a DecodeError, in time and memory linear in n. Therefore the number of elements that
a list, map or array claims is checked against the number of bytes present, nesting ends at MAX_DEPTH, and a map with
more than MAX_PREDICTABLE_KEYS keys whose hash the peer can predict becomes a NumberKeyedMap instead of a dict
(docs/decisions/0020-linear-decoding.md).

A value starts with a constructor byte, its type code. Code 0 is a described value: a descriptor and a value follow. The
upper four bits of any other code give the width of the value (`WIDTHS`).
"""

from collections.abc import Callable
from struct import Struct
from struct import error as struct_error
from typing import Any, NoReturn
from uuid import UUID

from twinbus.amqp.encoding import MAX_DEPTH
from twinbus.amqp.errors import DecodeError
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
    unpredictable_key,
)

# Elements such as null, true and uint0 need no bytes: a short array could claim four thousand million elements.
MAX_EMPTY_ELEMENTS = 16
# A decoded dict has at most this many keys that are numbers or UUIDs.
MAX_PREDICTABLE_KEYS = 64
PREDICTABLE_TYPES = (int, float, UUID)

_U32 = Struct(">I").unpack_from

Decoder = Callable[[bytes, int, int], tuple[Any, int]]


def decode(buf: bytes, pos: int = 0) -> tuple[Any, int]:
    """Return the value at `pos` and the position after it. Raises DecodeError."""
    try:
        return _decode(buf, pos, 0)
    except (IndexError, struct_error):
        raise DecodeError(f"the bytes end inside the value at {pos}") from None


def decode_all(buf: bytes) -> Any:
    """Return the value that fills all of `buf`. Raises DecodeError."""
    value, pos = decode(buf, 0)
    if pos != len(buf):
        raise DecodeError(f"{len(buf) - pos} bytes are left over after the value")
    return value


def _decode(buf: bytes, pos: int, depth: int) -> tuple[Any, int]:
    return _DECODERS[buf[pos]](buf, pos + 1, depth)


def skip(buf: bytes, pos: int) -> int:
    """Return the position after the value at `pos`. Reads only the value's length and does not check its content."""
    try:
        code = buf[pos]
        if code == 0:
            return _skip_described(buf, pos)
        width = WIDTHS[code]
        if width >= 0:
            pos += 1 + width
        elif width == -1:
            pos += 2 + buf[pos + 1]
        elif width == -4:
            pos += 5 + _U32(buf, pos + 1)[0]
        else:
            _unknown(code)
    except (IndexError, struct_error):
        raise DecodeError(f"the bytes end inside the value at {pos}") from None
    if pos > len(buf):
        raise DecodeError("the bytes end inside a value")
    return pos


def _skip_described(buf: bytes, pos: int) -> int:
    """Return the position after a descriptor and a value, each of which may itself be a described value.

    A counter of the values to skip replaces recursion.
    """
    open_values, descriptors = 1, 0
    while open_values:
        if buf[pos] == 0:
            pos += 1
            open_values += 1
            descriptors += 1
            if descriptors > MAX_DEPTH:
                raise DecodeError("descriptors are nested too deeply")
        else:
            pos = skip(buf, pos)
            open_values -= 1
    return pos


def _unknown(code: int) -> NoReturn:
    raise DecodeError(f"0x{code:02x} is not an AMQP type code")


def _fixed(layout: str, kind: Callable[[Any], Any]) -> Decoder:
    struct = Struct(layout)
    unpack, width = struct.unpack_from, struct.size

    def read(buf: bytes, pos: int, depth: int) -> tuple[Any, int]:
        return kind(unpack(buf, pos)[0]), pos + width

    return read


def _constant(value: Any) -> Decoder:
    return lambda buf, pos, depth: (value, pos)


def _raw(width: int, kind: Callable[[bytes], Any]) -> Decoder:
    def read(buf: bytes, pos: int, depth: int) -> tuple[Any, int]:
        end = pos + width
        if end > len(buf):
            raise DecodeError("the bytes end inside a value")
        return kind(bytes(buf[pos:end])), end

    return read


def _boolean(buf: bytes, pos: int, depth: int) -> tuple[bool, int]:
    value = buf[pos]
    if value > 1:
        raise DecodeError(f"0x{value:02x} is not a boolean")
    return value == 1, pos + 1


def _char(buf: bytes, pos: int, depth: int) -> tuple[Char, int]:
    point = _U32(buf, pos)[0]
    if point > 0x10FFFF or 0xD800 <= point < 0xE000:
        raise DecodeError(f"0x{point:x} is not a Unicode character")
    return Char(chr(point)), pos + 4


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DecodeError("a string is not valid UTF-8") from None


def _symbol(data: bytes) -> Symbol:
    try:
        return Symbol(data.decode("ascii"))
    except UnicodeDecodeError:
        raise DecodeError("a symbol is not ASCII") from None


def _variable(wide: bool, kind: Callable[[bytes], Any]) -> Decoder:
    def read(buf: bytes, pos: int, depth: int) -> tuple[Any, int]:
        if wide:
            start = pos + 4
            end = start + _U32(buf, pos)[0]
        else:
            start = pos + 1
            end = start + buf[pos]
        if end > len(buf):
            raise DecodeError("the bytes end inside a value")
        return kind(bytes(buf[start:end])), end

    return read


def _read_compound_header(buf: bytes, pos: int, wide: bool, depth: int) -> tuple[int, int, int]:
    """Return count, start and end of the content of a list, map or array."""
    if depth >= MAX_DEPTH:
        raise DecodeError(f"nested deeper than {MAX_DEPTH}")
    if wide:
        end = pos + 4 + _U32(buf, pos)[0]
        count = _U32(buf, pos + 4)[0]
        start = pos + 8
    else:
        end = pos + 1 + buf[pos]
        count = buf[pos + 1]
        start = pos + 2
    if end > len(buf) or start > end:
        raise DecodeError("a compound value extends beyond the bytes")
    return count, start, end


def _list(wide: bool) -> Decoder:
    def read(buf: bytes, pos: int, depth: int) -> tuple[list[Any], int]:
        count, pos, end = _read_compound_header(buf, pos, wide, depth)
        if count > end - pos:
            raise DecodeError(f"a list of {count} values in {end - pos} bytes")
        items = []
        for _ in range(count):
            item, pos = _decode(buf, pos, depth + 1)
            items.append(item)
        if pos != end:
            raise DecodeError("the size of a list does not match its values")
        return items, end

    return read


def _map(wide: bool) -> Decoder:
    def read(buf: bytes, pos: int, depth: int) -> tuple[dict[Any, Any] | NumberKeyedMap, int]:
        count, pos, end = _read_compound_header(buf, pos, wide, depth)
        if count & 1 or count > end - pos:
            raise DecodeError(f"a map of {count} keys and values in {end - pos} bytes")
        if count > 2 * MAX_PREDICTABLE_KEYS:
            return _large_map(buf, pos, depth, count, end)
        items: dict[Any, Any] = {}
        for _ in range(count >> 1):
            key, pos = _decode(buf, pos, depth + 1)
            item, pos = _decode(buf, pos, depth + 1)
            try:
                items[key] = item
            except TypeError:
                raise _unhashable_key(key) from None
        _check_map(items, count, pos, end)
        return items, end

    return read


def _large_map(buf: bytes, pos: int, depth: int, count: int, end: int) -> tuple[dict[Any, Any] | NumberKeyedMap, int]:
    """Read a map with many keys. Count the keys whose hash the peer can predict before any key goes into a dict."""
    entries: dict[Any, tuple[Any, Any]] = {}
    predictable = 0
    for _ in range(count >> 1):
        key, pos = _decode(buf, pos, depth + 1)
        item, pos = _decode(buf, pos, depth + 1)
        stand_in = key
        if isinstance(key, PREDICTABLE_TYPES):
            predictable += 1
            stand_in = unpredictable_key(key)
        try:
            entries[stand_in] = key, item
        except TypeError:
            raise _unhashable_key(key) from None
    _check_map(entries, count, pos, end)
    if predictable > MAX_PREDICTABLE_KEYS:
        return NumberKeyedMap(entries.values()), end
    return dict(entries.values()), end


def _check_map(items: dict[Any, Any], count: int, pos: int, end: int) -> None:
    if 2 * len(items) != count:  # §1.6.23: two identical keys make a map invalid.
        raise DecodeError("a map has a key twice")
    if pos != end:
        raise DecodeError("the size of a map does not match its entries")


def _unhashable_key(key: Any) -> DecodeError:
    return DecodeError(f"a {type(key).__name__} is not supported as a map key")


def _described(buf: bytes, pos: int, depth: int) -> tuple[Described, int]:
    if depth >= MAX_DEPTH:
        raise DecodeError(f"nested deeper than {MAX_DEPTH}")
    descriptor, pos = _decode(buf, pos, depth + 1)
    value, pos = _decode(buf, pos, depth + 1)
    return Described(descriptor, value), pos


def _array(wide: bool) -> Decoder:
    def read(buf: bytes, pos: int, depth: int) -> tuple[Array, int]:
        count, pos, end = _read_compound_header(buf, pos, wide, depth)
        descriptors: list[Any] = []
        while buf[pos] == 0:
            if len(descriptors) >= MAX_DEPTH:
                raise DecodeError("descriptors are nested too deeply")
            descriptor, pos = _decode(buf, pos + 1, depth + 1)
            descriptors.append(descriptor)
        code = buf[pos]
        pos += 1
        element = _ELEMENTS.get(code)
        if element is None:
            _unknown(code)
        if count > (MAX_EMPTY_ELEMENTS if code & 0xF0 == 0x40 else end - pos):
            raise DecodeError(f"an array of {count} values in {end - pos} bytes")
        read_item = _DECODERS[code]
        items = []
        for _ in range(count):
            item, pos = read_item(buf, pos, depth + 1)
            items.append(item)
        if pos != end:
            raise DecodeError("the size of an array does not match its values")
        return Array(element, items, tuple(descriptors)), end

    return read


def _unknown_type(code: int) -> Decoder:
    def read(buf: bytes, pos: int, depth: int) -> tuple[Any, int]:
        _unknown(code)

    return read


# By type code: the Python type that `Array.element` names for such values, and the decoder of the value.
_TYPES: dict[int, tuple[type, Decoder]] = {
    0x40: (type(None), _constant(None)),
    0x41: (bool, _constant(True)),
    0x42: (bool, _constant(False)),
    0x43: (UInt, _constant(UInt(0))),
    0x44: (ULong, _constant(ULong(0))),
    0x45: (list, lambda buf, pos, depth: ([], pos)),
    0x50: (UByte, _fixed(">B", UByte)),
    0x51: (Byte, _fixed(">b", Byte)),
    0x52: (UInt, _fixed(">B", UInt)),
    0x53: (ULong, _fixed(">B", ULong)),
    0x54: (Int, _fixed(">b", Int)),
    0x55: (Long, _fixed(">b", Long)),
    0x56: (bool, _boolean),
    0x60: (UShort, _fixed(">H", UShort)),
    0x61: (Short, _fixed(">h", Short)),
    0x70: (UInt, _fixed(">I", UInt)),
    0x71: (Int, _fixed(">i", Int)),
    0x72: (Float32, _fixed(">f", Float32)),
    0x73: (Char, _char),
    0x74: (Decimal32, _raw(4, Decimal32)),
    0x80: (ULong, _fixed(">Q", ULong)),
    0x81: (Long, _fixed(">q", Long)),
    0x82: (float, _fixed(">d", float)),
    0x83: (Timestamp, _fixed(">q", Timestamp)),
    0x84: (Decimal64, _raw(8, Decimal64)),
    0x94: (Decimal128, _raw(16, Decimal128)),
    0x98: (UUID, _raw(16, lambda data: UUID(bytes=data))),
    0xA0: (bytes, _variable(False, bytes)),
    0xA1: (str, _variable(False, _text)),
    0xA3: (Symbol, _variable(False, _symbol)),
    0xB0: (bytes, _variable(True, bytes)),
    0xB1: (str, _variable(True, _text)),
    0xB3: (Symbol, _variable(True, _symbol)),
    0xC0: (list, _list(False)),
    0xD0: (list, _list(True)),
    0xC1: (dict, _map(False)),
    0xD1: (dict, _map(True)),
    0xE0: (Array, _array(False)),
    0xF0: (Array, _array(True)),
}
_ELEMENTS = {code: element for code, (element, _) in _TYPES.items()}
_DECODERS: tuple[Decoder, ...] = tuple(
    _described if code == 0 else _TYPES[code][1] if code in _TYPES else _unknown_type(code) for code in range(256)
)

# Number of bytes after the constructor, by the constructor's upper four bits (§1.2). -1 and -4: the next 1 or 4 bytes
# contain the number of bytes that follow.
_WIDTHS_BY_CLASS = {4: 0, 5: 1, 6: 2, 7: 4, 8: 8, 9: 16, 0xA: -1, 0xB: -4, 0xC: -1, 0xD: -4, 0xE: -1, 0xF: -4}
WIDTHS: tuple[int, ...] = tuple(_WIDTHS_BY_CLASS[code >> 4] if code in _TYPES else -9 for code in range(256))
