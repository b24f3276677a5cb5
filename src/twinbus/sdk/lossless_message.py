"""An encoded message as the object that azure-servicebus sends alone, every value with its type, or not at all (Y10).

Needed only where a message is too large for a batch, in which bytes pass as they are.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from twinbus.amqp import HEADER, PROPERTIES, AmqpError, Sections, decode, encode, read_routing_fields, split_sections
from twinbus.sdk.private_names import TYPE, VALUE, AMQPTypes, Header, Message, Properties, encode_payload
from twinbus.values import (
    Byte,
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

_TYPES: Final[dict[type, str]] = {
    type(None): AMQPTypes.null,
    bool: AMQPTypes.boolean,
    UByte: AMQPTypes.ubyte,
    UShort: AMQPTypes.ushort,
    UInt: AMQPTypes.uint,
    ULong: AMQPTypes.ulong,
    Byte: AMQPTypes.byte,
    Short: AMQPTypes.short,
    Int: AMQPTypes.int,
    Long: AMQPTypes.long,
    Float32: AMQPTypes.float,
    float: AMQPTypes.double,
    Timestamp: AMQPTypes.timestamp,
    UUID: AMQPTypes.uuid,
    bytes: AMQPTypes.binary,
    str: AMQPTypes.string,
    Symbol: AMQPTypes.symbol,
}
_EMPTY: Final[tuple[object, ...]] = (None, [], {})


def lossless_message(raw: bytes) -> Message | None:
    """None where the SDK knows no such type, or would write another."""
    sections = split_sections(raw)
    try:
        made = _message(sections)
        return made if _canonical(bytes(encode_payload(bytearray(), made))) == _canonical(raw) else None
    except (AmqpError, KeyError, TypeError, ValueError):
        return None


def _message(sections: Sections) -> Message:
    """KeyError for a type that the SDK does not have."""
    kind = sections.body_kind
    header, properties = sections.header, sections.properties
    fields = {name: getattr(properties, name) for name in Properties._fields}
    return Message(
        header=Header(header.durable, header.priority, header.ttl, header.first_acquirer, None),
        delivery_annotations=_typed_values(sections.delivery_annotations),
        message_annotations=_typed_values(sections.message_annotations),
        properties=Properties(**fields),
        application_properties=_typed_values(sections.application_properties),
        data=sections.data if kind == "data" else None,
        sequence=[_outermost(row) for row in sections.sequences] if kind == "sequence" else None,
        value=_outermost(sections.value) if kind == "value" else None,
        footer=_typed_values(sections.footer),
    )


def _typed_values(values: dict[Any, Any]) -> dict[Any, Any]:
    return {key: _typed(value) for key, value in values.items()}


def _typed(value: Any) -> dict[str, Any]:
    if type(value) is list:
        return {TYPE: AMQPTypes.list, VALUE: [_typed(one) for one in value]}
    if type(value) in (dict, NumberKeyedMap):
        return {TYPE: AMQPTypes.map, VALUE: [(_typed(key), _typed(one)) for key, one in value.items()]}
    if isinstance(value, Described):
        return {TYPE: AMQPTypes.described, VALUE: (_typed(value.descriptor), _typed(value.value))}
    return {TYPE: _TYPES[type(value)], VALUE: value}


def _outermost(value: Any) -> Any:
    """A body's own type the SDK finds by itself; that of what is inside can be told to it."""
    if type(value) is list:
        return [_typed(one) for one in value]
    if type(value) is dict:
        return _typed_values(value)
    return (_typed(value.descriptor), _typed(value.value)) if isinstance(value, Described) else value


def _canonical(raw: bytes) -> list[tuple[int, bytes]]:
    """Sections in our own encoding, so that only types and values count."""
    sections = split_sections(read_routing_fields(raw).raw)
    found: list[tuple[int, bytes]] = []
    for code, (_, start, _end) in sections.spans.items():
        value = decode(sections.raw, start)[0]
        while code in (HEADER, PROPERTIES) and value and value[-1] is None:
            value.pop()
        if value not in _EMPTY:
            found.append((code, encode(value)))
    return [*found, *((0, encode(decode(sections.raw, start)[0])) for _, start, _end in sections.body)]
