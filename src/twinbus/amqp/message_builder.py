"""Writing messages (amqp-core-messaging §3.2): a new message from its sections, or a message with replaced sections.

Every field is written with its AMQP type from the standard.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from struct import error as struct_error
from typing import Any
from uuid import UUID

from twinbus.amqp.delivery_splicing import encode_annotations
from twinbus.amqp.encoding import (
    binary_head,
    encode,
    encode_binary,
    encode_bool,
    encode_list_of,
    encode_map_of,
    encode_str,
    encode_symbol,
    encode_timestamp,
    encode_ubyte,
    encode_uint,
)
from twinbus.amqp.errors import EncodeError
from twinbus.amqp.message_sections import (
    APPLICATION_PROPERTIES,
    DELIVERY_ANNOTATIONS,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    Header,
    Properties,
    Sections,
)
from twinbus.values import ULong


def _id(value: str | UUID | bytes | int) -> bytes:
    return encode(ULong(value) if type(value) is int else value)


_HEADER_FIELDS: tuple[tuple[str, Callable[[Any], bytes]], ...] = (
    ("durable", encode_bool),
    ("priority", encode_ubyte),
    ("ttl", encode_uint),
    ("first_acquirer", encode_bool),
    ("delivery_count", encode_uint),
)
_PROPERTY_FIELDS: tuple[tuple[str, Callable[[Any], bytes]], ...] = (
    ("message_id", _id),
    ("user_id", encode_binary),
    ("to", encode_str),
    ("subject", encode_str),
    ("reply_to", encode_str),
    ("correlation_id", _id),
    ("content_type", encode_symbol),
    ("content_encoding", encode_symbol),
    ("absolute_expiry_time", encode_timestamp),
    ("creation_time", encode_timestamp),
    ("group_id", encode_str),
    ("group_sequence", encode_uint),
    ("reply_to_group_id", encode_str),
)


def build_message(
    *,
    data: bytes | Sequence[bytes] | None = None,
    value: object = None,
    sequence: Iterable[list[Any]] | None = None,
    header: Header | None = None,
    delivery_annotations: Mapping[str, object] | None = None,
    message_annotations: Mapping[str, object] | None = None,
    properties: Properties | None = None,
    application_properties: Mapping[str, object] | None = None,
    footer: Mapping[str, object] | None = None,
) -> bytes:
    """Return an encoded message. The body is `data`, `sequence` or `value`: a null value if all three are None.

    Raises EncodeError if a value has no AMQP type or is out of range.
    """
    parts = []
    if header is not None:
        parts.append(b"\x00\x53\x70" + _fields(header, _HEADER_FIELDS))
    if delivery_annotations is not None:
        parts.append(b"\x00\x53\x71" + _annotations(delivery_annotations))
    if message_annotations is not None:
        parts.append(b"\x00\x53\x72" + _annotations(message_annotations))
    if properties is not None:
        parts.append(b"\x00\x53\x73" + _fields(properties, _PROPERTY_FIELDS))
    if application_properties is not None:
        parts.append(b"\x00\x53\x74" + _application_properties(application_properties))
    if data is not None:
        payloads = [data] if isinstance(data, bytes) else data
        parts.extend(b"\x00\x53\x75" + encode_binary(payload) for payload in payloads)
    elif sequence is not None:
        parts.extend(b"\x00\x53\x76" + encode(list(values)) for values in sequence)
    else:
        parts.append(b"\x00\x53\x77" + encode(value))
    if footer is not None:
        parts.append(b"\x00\x53\x78" + _annotations(footer))
    return b"".join(parts)


def with_sections(
    sections: Sections,
    *,
    header: Header | None = None,
    message_annotations: Mapping[Any, object] | None = None,
    properties: Properties | None = None,
    application_properties: Mapping[str, object] | None = None,
) -> bytes:
    """Return the message with the given sections replaced. A section whose argument is None remains unchanged.

    Body and footer always remain unchanged.
    """
    written = {
        HEADER: None if header is None else _fields(header, _HEADER_FIELDS),
        DELIVERY_ANNOTATIONS: None,
        MESSAGE_ANNOTATIONS: None if message_annotations is None else encode(dict(message_annotations)),
        PROPERTIES: None if properties is None else _fields(properties, _PROPERTY_FIELDS),
        APPLICATION_PROPERTIES: (
            None if application_properties is None else _application_properties(application_properties)
        ),
    }
    parts: list[bytes] = []
    for code, value in written.items():
        if value is not None:
            parts += (b"\x00\x53", bytes((code,)), value)
        elif code in sections.spans:
            start, _, end = sections.spans[code]
            parts.append(sections.raw[start:end])
    return b"".join((*parts, sections.raw[sections.body_start :]))


def data_section_size(length: int) -> int:
    """Return the size of a data section of a batch that holds an encoded message of `length` bytes."""
    return length + (5 if length < 256 else 8)


def batch_payload(messages: Iterable[bytes], before: bytes = b"") -> bytes:
    """Return the payload of a batch (message-format 0x80013700) of encoded messages.

    `before` has encoded sections to write before the messages.
    """
    parts = [before]
    for raw in messages:
        parts += (b"\x00\x53\x75" + binary_head(len(raw)), raw)
    return b"".join(parts)


def _annotations(values: Mapping[str, object]) -> bytes:
    encoded = encode_annotations(values)
    return encode_map_of(encoded.count, encoded.raw)


def _application_properties(values: Mapping[str, object]) -> bytes:
    content = b"".join([encode_str(key) + encode(value) for key, value in values.items()])
    return encode_map_of(2 * len(values), content)


def _fields(section: Header | Properties, fields: tuple[tuple[str, Callable[[Any], bytes]], ...]) -> bytes:
    encoded = []
    for name, write in fields:
        value = getattr(section, name)
        try:
            encoded.append(b"\x40" if value is None else write(value))
        except (struct_error, AttributeError, TypeError, UnicodeEncodeError) as fault:
            raise EncodeError(f"{name} cannot be encoded: {fault}") from fault
    return encode_list_of(encoded)
