"""Composite types (amqp-core-types §1.4): how a dataclass stands on the wire as a described list.

Written with every field, null where there is nothing: the Python SDK reads some fields by position.
Read with every field checked against its type. Which composites exist is said in `performatives`.
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
    """A field type: how it is written, and how a decoded value becomes it (raising TypeError otherwise)."""

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
    """A field with multiple="true" is one symbol or an array of them."""
    if isinstance(value, Symbol):
        return [str(value)]
    if not isinstance(value, Array) or value.element is not Symbol or value.descriptors:
        raise TypeError
    return [str(item) for item in value]


def _write_symbols(value: list[str]) -> bytes:
    return encode(Array(Symbol, value))


def _write_symbol_map(value: Mapping[Any, Any]) -> bytes:
    """The fields of the standard that are maps have symbols for keys; plain `str` keys are taken as such."""
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
    kind: FieldType
    mandatory: bool
    default: Any


class DescribedTypeSpec(NamedTuple):
    kind: type
    descriptor: bytes
    fields: tuple[FieldSpec, ...]


_BY_TYPE: dict[type, DescribedTypeSpec] = {}
_BY_DESCRIPTOR: dict[int | str, DescribedTypeSpec] = {}


def described_type(code: int, symbol: str, /, **kinds: FieldType) -> Callable[[type[_T]], type[_T]]:
    """Registers a dataclass. Its fields follow the order of `kinds`; one without a default is mandatory."""

    def register(kind: type[_T]) -> type[_T]:
        declared = fields(kind)  # type: ignore[arg-type]  # the decorator stands on dataclasses only
        assert [field.name for field in declared] == list(kinds), kind
        specs = tuple(
            FieldSpec(
                field.name,
                kinds[field.name],
                field.default is MISSING and field.default_factory is MISSING,
                None if field.default is MISSING else field.default,
            )
            for field in declared
        )
        entry = DescribedTypeSpec(kind, b"\x00\x53" + bytes((code,)), specs)
        _BY_TYPE[kind] = _BY_DESCRIPTOR[code] = _BY_DESCRIPTOR[symbol] = entry
        return kind

    return register


def encode_described(value: Any) -> bytes:
    entry = _BY_TYPE.get(type(value))
    if entry is None:
        return encode(value)  # a described type this library has no class for passes as it is
    parts = []
    for name, kind, mandatory, _ in entry.fields:
        item = getattr(value, name)
        if item is None:
            if mandatory:
                raise EncodeError(f"{entry.kind.__name__}.{name} is mandatory")
            parts.append(b"\x40")
            continue
        try:
            parts.append(kind.write(item))
        except (struct_error, AttributeError, TypeError, UnicodeEncodeError, OverflowError) as fault:
            raise EncodeError(f"{entry.kind.__name__}.{name} cannot be encoded: {fault}") from fault
    return entry.descriptor + encode_list_of(parts)


def from_described(value: Any) -> Any:
    """The composite a described list stands for; a described value of an unknown type stays as it is."""
    if not isinstance(value, Described):
        raise TypeError
    descriptor = value.descriptor
    if not isinstance(descriptor, (ULong, Symbol)):
        return value
    entry = _BY_DESCRIPTOR.get(descriptor)
    if entry is None:
        return value
    name = entry.kind.__name__
    if not isinstance(value.value, list) or isinstance(value.value, Array):
        raise DecodeError(f"{name} is no list")
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
            arguments[spec.name] = spec.kind.read(item)
        except TypeError:
            raise DecodeError(f"{name}.{spec.name} has a wrong type") from None
    return entry.kind(**arguments)


def decode_described(buf: bytes, pos: int) -> tuple[Any, int]:
    value, pos = decode(buf, pos)
    if not isinstance(value, Described):
        raise DecodeError("a frame body must begin with a described list")
    return from_described(value), pos


def described_field(*kinds: type) -> FieldType:
    """A field that holds one of these composites; `Described` among them lets types without a class here pass."""

    def read(value: Any) -> Any:
        found = from_described(value)
        if not isinstance(found, kinds):
            raise TypeError
        return found

    return FieldType(encode_described, read)
