"""Composite types (amqp-core-types §1.4): dataclasses that are described lists on the wire.

`described_type` registers a dataclass with its descriptor and the AMQP type of each field. Encoding writes every field,
and null for a field without a value: the Python SDK reads some fields by position. Decoding checks the type of every
field. The dataclasses are in `performatives`.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from struct import error as struct_error
from typing import Any, NamedTuple, TypeVar

from twinbus.amqp.decoding import decode
from twinbus.amqp.encoding import (
    encode,
    encode_binary,
    encode_bool,
    encode_list_of,
    encode_map_of,
    encode_str,
    encode_symbol,
    encode_ubyte,
    encode_uint,
    encode_ulong,
    encode_ushort,
)
from twinbus.amqp.errors import AmqpError, DecodeError, EncodeError
from twinbus.values import Array, Condition, Described, Symbol, UByte, UInt, ULong, UShort

_T = TypeVar("_T")


class FieldType(NamedTuple):
    """AMQP type of a field. `write` encodes a value. `read` converts a decoded value, or raises TypeError."""

    write: Callable[[Any], bytes]
    read: Callable[[Any], Any]


def _exactly(expected: type, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not expected:
            raise TypeError
        return convert(value)

    return read


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str(value)


def _read_symbols(value: Any) -> list[str]:
    """Return the symbols of a field with multiple="true", whose value is one symbol or an array of symbols."""
    if isinstance(value, Symbol):
        return [str(value)]
    if not isinstance(value, Array) or value.element is not Symbol or value.descriptors:
        raise TypeError
    return [str(item) for item in value]


def _write_symbols(value: list[str]) -> bytes:
    return encode(Array(Symbol, value))


def _write_symbol_map(value: Mapping[Any, Any]) -> bytes:
    """Encode a map whose keys must be symbols, as in all map fields of the standard. A `str` key becomes a symbol."""
    parts = []
    for key, item in value.items():
        parts.append(encode_symbol(key) if isinstance(key, str) else encode(key))
        parts.append(encode(item))
    return encode_map_of(len(parts), b"".join(parts))


def _anything(value: Any) -> Any:
    return value


STRING = FieldType(encode_str, _read_text)
SYMBOL = FieldType(encode_symbol, _read_text)
SYMBOLS = FieldType(_write_symbols, _read_symbols)
BOOLEAN = FieldType(encode_bool, _exactly(bool, bool))
UBYTE = FieldType(encode_ubyte, _exactly(UByte, int))
USHORT = FieldType(encode_ushort, _exactly(UShort, int))
UINT = FieldType(encode_uint, _exactly(UInt, int))
ULONG = FieldType(encode_ulong, _exactly(ULong, int))
BINARY = FieldType(encode_binary, _exactly(bytes, bytes))
MAP = FieldType(_write_symbol_map, _exactly(dict, dict))
ANY = FieldType(encode, _anything)


class FieldSpec(NamedTuple):
    name: str
    field_type: FieldType
    mandatory: bool
    default: Any


class DescribedTypeSpec(NamedTuple):
    python_type: type
    descriptor: bytes
    fields: tuple[FieldSpec, ...]


_BY_TYPE: dict[type, DescribedTypeSpec] = {}
_BY_DESCRIPTOR: dict[int | str, DescribedTypeSpec] = {}


def described_type(code: int, symbol: str, /, **field_types: FieldType) -> Callable[[type[_T]], type[_T]]:
    """Register a dataclass whose fields have the order of `field_types`. A field without a default is mandatory."""

    def register(python_type: type[_T]) -> type[_T]:
        declared = fields(python_type)  # type: ignore[arg-type]  # used on dataclasses only
        assert [field.name for field in declared] == list(field_types), python_type
        specs = tuple(
            FieldSpec(
                field.name,
                field_types[field.name],
                field.default is MISSING and field.default_factory is MISSING,
                None if field.default is MISSING else field.default,
            )
            for field in declared
        )
        entry = DescribedTypeSpec(python_type, b"\x00\x53" + bytes((code,)), specs)
        _BY_TYPE[python_type] = _BY_DESCRIPTOR[code] = _BY_DESCRIPTOR[symbol] = entry
        return python_type

    return register


def encode_described(value: Any) -> bytes:
    """Encode a registered dataclass, or a `Described` whose type has no registered dataclass. Raises EncodeError."""
    entry = _BY_TYPE.get(type(value))
    if entry is None:
        return encode(value)
    parts = []
    for name, field_type, mandatory, _ in entry.fields:
        item = getattr(value, name)
        if item is None:
            if mandatory:
                raise EncodeError(f"{entry.python_type.__name__}.{name} is mandatory")
            parts.append(b"\x40")
            continue
        try:
            parts.append(field_type.write(item))
        except (struct_error, AttributeError, TypeError, UnicodeEncodeError, OverflowError) as fault:
            raise EncodeError(f"{entry.python_type.__name__}.{name} cannot be encoded: {fault}") from fault
    return entry.descriptor + encode_list_of(parts)


def from_described(value: Any) -> Any:
    """Return the dataclass object for a decoded described list; a described value of an unknown type unchanged.

    Raises TypeError if the value is not described, DecodeError or AmqpError if its fields are not valid.
    """
    if not isinstance(value, Described):
        raise TypeError
    descriptor = value.descriptor
    if not isinstance(descriptor, (ULong, Symbol)):
        return value
    entry = _BY_DESCRIPTOR.get(descriptor)
    if entry is None:
        return value
    name = entry.python_type.__name__
    if not isinstance(value.value, list) or isinstance(value.value, Array):
        raise DecodeError(f"{name} is not a list")
    given = value.value
    if len(given) > len(entry.fields):
        raise DecodeError(f"{name} has {len(given)} fields")
    arguments = {}
    for index, spec in enumerate(entry.fields):
        item = given[index] if index < len(given) else None
        if item is None:
            if spec.mandatory:
                raise AmqpError(Condition.INVALID_FIELD, f"{name}.{spec.name} is missing")
            arguments[spec.name] = spec.default
            continue
        try:
            arguments[spec.name] = spec.field_type.read(item)
        except TypeError:
            raise DecodeError(f"{name}.{spec.name} has a wrong type") from None
    return entry.python_type(**arguments)


def decode_described(buf: bytes, pos: int) -> tuple[Any, int]:
    """Return the described type at `pos` and the position after it."""
    value, pos = decode(buf, pos)
    if not isinstance(value, Described):
        raise DecodeError("a frame body does not start with a described list")
    return from_described(value), pos


def described_field(*python_types: type) -> FieldType:
    """Return the type of a field whose value has one of `python_types`.

    `Described` in `python_types` also allows described values that have no registered dataclass.
    """

    def read(value: Any) -> Any:
        found = from_described(value)
        if not isinstance(found, python_types):
            raise TypeError
        return found

    return FieldType(encode_described, read)
