"""The fields of an incoming message that a broker needs to route and check the message, read in one pass.

The pass checks every length in the message. Therefore `delivery_splicing` need not check lengths when it changes the
message.
"""

from dataclasses import dataclass
from struct import Struct
from struct import error as struct_error
from typing import Any
from uuid import UUID

from twinbus.amqp.decoding import WIDTHS, decode, skip
from twinbus.amqp.delivery_splicing import drop_keys, encode_annotations
from twinbus.amqp.encoding import encode_map_of
from twinbus.amqp.errors import DecodeError
from twinbus.amqp.message_sections import (
    APPLICATION_PROPERTIES,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    PROPERTY_TYPES,
    check_order,
    read_list_header,
    read_map_header,
    section_at,
)
from twinbus.values import Timestamp

_TIMESTAMP = 0x83
_MAX_I64 = 2**63 - 1
_I64 = Struct(">q").unpack_from
_U32 = Struct(">I").unpack_from

_SCHEDULED = b"x-opt-scheduled-enqueue-time"
_PARTITION = b"x-opt-partition-key"
_VIA = b"x-opt-via-partition-key"
_SYSTEM_PREFIX = b"x-opt-"

_MESSAGE_ID, _TO, _CONTENT_TYPE, _EXPIRY, _CREATION, _GROUP = 0, 2, 6, 8, 9, 10
_SHORT_TEXT = frozenset((0xA1, 0xA3))
_STRINGS = frozenset((0xA1, 0xB1))
_TIMES = frozenset((_EXPIRY, _CREATION))
_WANTED = frozenset((_MESSAGE_ID, _TO, _CONTENT_TYPE, _EXPIRY, _CREATION, _GROUP))


# The first four bytes of sections of less than 256 bytes.
_SHORT_SECTIONS = frozenset(
    b"\x00\x53" + bytes(start)
    for start in (
        (0x70, 0xC0),
        (0x71, 0xC1),
        (0x72, 0xC1),
        (0x73, 0xC0),
        (0x74, 0xC1),
        (0x75, 0xA0),
        (0x78, 0xC1),
    )
)


@dataclass(slots=True)
class RoutingFields:
    """Fields of one message. `raw` is the message, with its sections in the order of the standard."""

    raw: bytes
    message_id: str | UUID | bytes | int | None = None
    group_id: str | None = None
    content_type: str | None = None
    to: str | None = None
    ttl: int | None = None  # ms
    absolute_expiry_time: int | None = None  # ms since the epoch, as are the next two fields
    creation_time: int | None = None
    scheduled_enqueue_time: int | None = None
    partition_key: str | None = None
    via_partition_key: str | None = None
    largest_property: int = 0  # encoded size of the largest application property value
    properties_size: int = 0  # of application properties and annotations together


def read_routing_fields(raw: bytes) -> RoutingFields:
    """Return the routing fields of an encoded message, and check the message. Raises DecodeError if it is not valid.

    Some official clients write sections in a wrong order. These sections are moved to their place in the standard. The
    clients also change the types of annotations when they send on a message that they received. The annotations that a
    broker reads get their types again.
    """
    fields = RoutingFields(raw)
    pos, last, total = 0, 0, len(raw)
    try:
        while pos < total:
            if raw[pos : pos + 4] in _SHORT_SECTIONS:
                code, start, end = raw[pos + 2], pos + 3, pos + 5 + raw[pos + 4]
                if end > total:
                    raise DecodeError("the message ends inside a section")
            else:
                code, start, end = section_at(raw, pos)
            if code <= last or last > APPLICATION_PROPERTIES:
                if (code == DELIVERY_ANNOTATIONS and last > code) or (last == FOOTER and code < FOOTER):
                    return read_routing_fields(_in_order(raw))
                check_order(code, last)
            if code <= APPLICATION_PROPERTIES and _read_section(fields, code, start, end):
                return read_routing_fields(_retyped(fields, pos, start, end))
            pos, last = end, code
    except (IndexError, struct_error):
        raise DecodeError("the message ends inside a section") from None
    except UnicodeDecodeError:
        raise DecodeError("a property of the message is not valid UTF-8") from None
    return fields


def _in_order(raw: bytes) -> bytes:
    """Return the message with delivery annotations and footer at their places in the standard (§3.2).

    The Python SDK writes delivery annotations last. The JavaScript SDK writes the footer before the body.
    """
    pos, spans = 0, []
    while pos < len(raw):
        code, _, end = section_at(raw, pos)
        spans.append((code, raw[pos:end]))
        pos = end
    first = [part for code, part in spans if code == HEADER]
    annotations = [part for code, part in spans if code == DELIVERY_ANNOTATIONS]
    footer = [part for code, part in spans if code == FOOTER]
    if len(first) > 1 or len(annotations) > 1 or len(footer) > 1:
        raise DecodeError("the message has a section twice")
    rest = [part for code, part in spans if code not in (HEADER, DELIVERY_ANNOTATIONS, FOOTER)]
    return b"".join((*first, *annotations, *rest, *footer))


def _retyped(fields: RoutingFields, pos: int, start: int, end: int) -> bytes:
    """Return the message whose annotations, the section at `pos`, have the types of the service."""
    raw = fields.raw
    values: dict[str, object] = {}
    if fields.scheduled_enqueue_time is not None:
        values["x-opt-scheduled-enqueue-time"] = Timestamp(fields.scheduled_enqueue_time)
    if fields.partition_key is not None:
        values["x-opt-partition-key"] = fields.partition_key
    if fields.via_partition_key is not None:
        values["x-opt-via-partition-key"] = fields.via_partition_key
    ours = encode_annotations(values)
    kept, _ = drop_keys(raw, start, ours.names)
    section = b"\x00\x53\x72" + encode_map_of(kept.count + ours.count, kept.raw + ours.raw)
    return raw[:pos] + section + raw[end:]


def _read_section(fields: RoutingFields, code: int, start: int, end: int) -> bool:
    """Read one section. Returns whether an annotation has another type than the service writes."""
    if code == PROPERTIES:
        _read_properties(fields, start, end)
    elif code == APPLICATION_PROPERTIES:
        fields.properties_size += end - start
        _measure_properties(fields, start, end)
    elif code == MESSAGE_ANNOTATIONS:
        fields.properties_size += end - start
        return _read_annotations(fields, start, end)
    elif code == HEADER:
        _read_header(fields, start, end)
    elif code == DELIVERY_ANNOTATIONS:
        fields.properties_size += end - start
        _check_map(fields.raw, start, end)
    return False


def _read_header(fields: RoutingFields, start: int, end: int) -> None:
    raw = fields.raw
    count, pos = read_list_header(raw, start)
    if count > 5:
        raise DecodeError("the header has too many fields")
    for index in range(count):
        if index == 2 and raw[pos] != 0x40:
            if raw[pos] == 0x70:
                fields.ttl = _U32(raw, pos + 1)[0]
                pos += 5
            elif raw[pos] in {0x43, 0x52}:
                fields.ttl, pos = decode(raw, pos)
            else:
                raise DecodeError("the ttl of the message is not a uint")
        else:
            width = WIDTHS[raw[pos]]
            pos = pos + 1 + width if width >= 0 else skip(raw, pos)
    if pos != end:
        raise DecodeError("the size of the header does not match its fields")


def _read_properties(fields: RoutingFields, start: int, end: int) -> None:
    raw = fields.raw
    count, pos = read_list_header(raw, start)
    if count > len(PROPERTY_TYPES):
        raise DecodeError("the properties have too many fields")
    for index in range(count):
        form = raw[pos]
        if form == 0x40:
            pos += 1
        elif index not in _WANTED:
            pos = skip(raw, pos)
        elif form in _SHORT_TEXT and index not in _TIMES:
            after = pos + 2 + raw[pos + 1]
            _set_property(fields, index, raw[pos + 2 : after].decode())
            pos = after
        elif form == _TIMESTAMP and index in _TIMES:
            _set_property(fields, index, _I64(raw, pos + 1)[0])
            pos += 9
        else:
            value, pos = decode(raw, pos)
            if not isinstance(value, PROPERTY_TYPES[index]):
                raise DecodeError(f"field {index} of the properties has a wrong type")
            _set_property(fields, index, value)
    if pos != end:
        raise DecodeError("the size of the properties does not match their fields")


def _set_property(fields: RoutingFields, index: int, value: Any) -> None:
    if index == _MESSAGE_ID:
        fields.message_id = value
    elif index == _GROUP:
        fields.group_id = value
    elif index == _CONTENT_TYPE:
        fields.content_type = value
    elif index == _TO:
        fields.to = value
    elif index == _EXPIRY:
        fields.absolute_expiry_time = value
    else:
        fields.creation_time = value


def _measure_properties(fields: RoutingFields, start: int, end: int) -> None:
    raw = fields.raw
    count, pos = read_map_header(raw, start)
    largest = 0
    for _ in range(count >> 1):
        form = raw[pos]
        if form == 0xA1:
            pos += 2 + raw[pos + 1]
        elif form == 0xB1:
            pos = skip(raw, pos)
        else:
            raise DecodeError("the key of an application property is not a string")
        form = raw[pos]
        if form == 0xA1:
            after = pos + 2 + raw[pos + 1]
        else:
            width = WIDTHS[form]
            after = pos + 1 + width if width >= 0 else skip(raw, pos)
        largest = max(largest, after - pos)
        pos = after
    if pos != end:
        raise DecodeError("the size of the application properties does not match their entries")
    fields.largest_property = largest


def _read_annotations(fields: RoutingFields, start: int, end: int) -> bool:
    raw = fields.raw
    count, pos = read_map_header(raw, start)
    is_retyped = False
    for _ in range(count >> 1):
        form = raw[pos]
        after = pos + 2 + raw[pos + 1] if form == 0xA3 else skip(raw, pos)
        key = raw[pos + 2 : after] if form in _SHORT_TEXT else b""
        width = WIDTHS[raw[after]]
        value_end = after + 1 + width if width >= 0 else skip(raw, after)
        if key.startswith(_SYSTEM_PREFIX) and raw[after] != 0x40:
            if key == _SCHEDULED:
                fields.scheduled_enqueue_time = _instant(raw, after)
                is_retyped |= raw[after] != _TIMESTAMP and fields.scheduled_enqueue_time is not None
            elif key == _PARTITION:
                fields.partition_key = _text(raw, after)
                is_retyped |= raw[after] not in _STRINGS and fields.partition_key is not None
            elif key == _VIA:
                fields.via_partition_key = _text(raw, after)
                is_retyped |= raw[after] not in _STRINGS and fields.via_partition_key is not None
        pos = value_end
    if pos != end:
        raise DecodeError("the size of the message annotations does not match their entries")
    return is_retyped


# The Python client sends text on as binary and an instant as an int, the JavaScript client an instant as a long.


def _instant(raw: bytes, pos: int) -> int | None:
    """Return an annotation as milliseconds since the epoch; None if it is neither a timestamp nor an integer."""
    if raw[pos] == _TIMESTAMP:
        instant: int = _I64(raw, pos + 1)[0]
        return instant
    value, _ = decode(raw, pos)
    is_instant = isinstance(value, int) and not isinstance(value, bool) and value <= _MAX_I64
    return int(value) if is_instant else None


def _text(raw: bytes, pos: int) -> str | None:
    """Return an annotation as text; None if it is neither a string, a symbol, a char nor text as binary."""
    value, _ = decode(raw, pos)
    if type(value) is bytes:
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return str(value) if isinstance(value, str) else None


def _check_map(raw: bytes, start: int, end: int) -> None:
    count, pos = read_map_header(raw, start)
    for _ in range(count):
        pos = skip(raw, pos)
    if pos != end:
        raise DecodeError("the size of the delivery annotations does not match their entries")
