"""Sections of an encoded message (amqp-core-messaging §3.2).

`split_sections` finds the sections and checks their types and their order, without copying or changing the message.
`Sections` decodes a section when a caller first reads the section.
"""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from twinbus.amqp.decoding import decode, skip
from twinbus.amqp.errors import DecodeError
from twinbus.values import ULong

HEADER = 0x70
DELIVERY_ANNOTATIONS = 0x71
MESSAGE_ANNOTATIONS = 0x72
PROPERTIES = 0x73
APPLICATION_PROPERTIES = 0x74
DATA = 0x75
SEQUENCE = 0x76
VALUE = 0x77
FOOTER = 0x78

_SYMBOLS = {
    "amqp:header:list": HEADER,
    "amqp:delivery-annotations:map": DELIVERY_ANNOTATIONS,
    "amqp:message-annotations:map": MESSAGE_ANNOTATIONS,
    "amqp:properties:list": PROPERTIES,
    "amqp:application-properties:map": APPLICATION_PROPERTIES,
    "amqp:data:binary": DATA,
    "amqp:amqp-sequence:list": SEQUENCE,
    "amqp:amqp-value:*": VALUE,
    "amqp:footer:map": FOOTER,
}
_LIST = frozenset((0x45, 0xC0, 0xD0))
_MAP = frozenset((0xC1, 0xD1))
_BINARY = frozenset((0xA0, 0xB0))
_ANYTHING = frozenset(range(256))
# Type codes that a section's value may have, by section code - HEADER.
_CONTENT = (_LIST, _MAP, _MAP, _LIST, _MAP, _BINARY, _LIST, _ANYTHING, _MAP)

BATCH_FORMAT = 0x80013700  # message-format of a transfer whose data sections are messages

BODY_KINDS = {DATA: "data", SEQUENCE: "sequence", VALUE: "value"}

Span = tuple[int, int, int]  # start of the section, start of its value, end


@dataclass(slots=True)
class Header:
    durable: bool | None = None
    priority: int | None = None
    ttl: int | None = None
    first_acquirer: bool | None = None
    delivery_count: int | None = None


@dataclass(slots=True)
class Properties:
    message_id: str | UUID | bytes | int | None = None
    user_id: bytes | None = None
    to: str | None = None
    subject: str | None = None
    reply_to: str | None = None
    correlation_id: str | UUID | bytes | int | None = None
    content_type: str | None = None
    content_encoding: str | None = None
    absolute_expiry_time: int | None = None
    creation_time: int | None = None
    group_id: str | None = None
    group_sequence: int | None = None
    reply_to_group_id: str | None = None


HEADER_TYPES: tuple[type | tuple[type, ...], ...] = (bool, int, int, bool, int)
PROPERTY_TYPES: tuple[type | tuple[type, ...], ...] = (
    (str, UUID, bytes, ULong),
    bytes,
    str,
    str,
    str,
    (str, UUID, bytes, ULong),
    str,
    str,
    int,
    int,
    str,
    int,
    str,
)

# The usual start of a body of 256 bytes or more.
_LARGE_DATA = b"\x00\x53\x75\xb0"


def section_at(raw: bytes, pos: int) -> tuple[int, int, int]:
    """Return the code of the section at `pos`, the start of its value, and its end.

    Raises DecodeError if no known section starts at `pos`, or the value has a type that the section does not allow.
    """
    if raw[pos : pos + 4] == _LARGE_DATA and pos + 8 <= len(raw):
        end = pos + 8 + int.from_bytes(raw[pos + 4 : pos + 8])
        if end <= len(raw):
            return DATA, pos + 3, end
    try:
        if raw[pos] != 0:
            raise DecodeError(f"no section starts at byte {pos} of the message")
        form = raw[pos + 1]
        if form == 0x53:
            code, start = raw[pos + 2], pos + 3
        elif form in {0x80, 0xA3, 0xB3}:
            descriptor, start = decode(raw, pos + 1)
            code = _SYMBOLS.get(descriptor, -1) if isinstance(descriptor, str) else int(descriptor)
        else:
            code, start = -1, pos
        if not HEADER <= code <= FOOTER:
            raise DecodeError(f"the section at byte {pos} of the message is unknown")
        if raw[start] not in _CONTENT[code - HEADER]:
            raise DecodeError(f"section 0x{code:02x} of the message has a value of a wrong type")
    except IndexError:
        raise DecodeError("the message ends inside a section") from None
    return code, start, skip(raw, start)


def check_order(code: int, last: int) -> None:
    """Raise DecodeError if section `code` may not follow section `last`.

    §3.2: each section at most once and in order; the body is data sections, sequence sections, or one value section.
    """
    in_body = DATA <= code <= VALUE
    if code < last or (code == last and code not in {DATA, SEQUENCE}) or (in_body and last >= DATA and code != last):
        raise DecodeError(f"section 0x{code:02x} of the message may not follow section 0x{last:02x}")


def read_list_header(raw: bytes, start: int) -> tuple[int, int]:
    """Return the number of fields of the list whose constructor is at `start`, and the start of the first field."""
    form = raw[start]
    if form == 0xC0:
        if raw[start + 1] < 1 or raw[start + 2] > raw[start + 1]:
            raise DecodeError("a list has more fields than bytes")
        return raw[start + 2], start + 3
    if form == 0xD0:
        size = int.from_bytes(raw[start + 1 : start + 5])
        count = int.from_bytes(raw[start + 5 : start + 9])
        if size < 4 or count > size:
            raise DecodeError("a list has more fields than bytes")
        return count, start + 9
    return 0, start + 1


def read_map_header(raw: bytes, start: int) -> tuple[int, int]:
    """Return the number of keys and values of the map whose constructor is at `start`, and the first key's position."""
    if raw[start] == 0xC1:
        size, count, pos = raw[start + 1], raw[start + 2], start + 3
        content_size = size - 1
    else:
        size = int.from_bytes(raw[start + 1 : start + 5])
        count, pos = int.from_bytes(raw[start + 5 : start + 9]), start + 9
        content_size = size - 4
    if content_size < 0 or count & 1 or count > content_size:
        raise DecodeError("a map has an odd number of keys and values, or more of them than bytes")
    return count, pos


class Sections:
    """Sections of one message. `raw` is the whole message; `spans` and `body` are positions in `raw`."""

    __slots__ = ("body", "raw", "spans")

    def __init__(self, raw: bytes, spans: dict[int, Span], body: list[Span]) -> None:
        self.raw = raw
        self.spans = spans
        self.body = body

    @property
    def body_kind(self) -> str | None:
        """One of "data", "sequence" and "value"; None for a message without a body."""
        return BODY_KINDS[section_at(self.raw, self.body[0][0])[0]] if self.body else None

    @property
    def body_start(self) -> int:
        """Start of the first body section; for a message without a body, the position where a body would start."""
        if self.body:
            return self.body[0][0]
        return self.spans[FOOTER][0] if FOOTER in self.spans else len(self.raw)

    @property
    def body_end(self) -> int:
        return self.body[-1][2] if self.body else self.body_start

    @property
    def header(self) -> Header:
        return Header(*self._fields(HEADER, HEADER_TYPES))

    @property
    def properties(self) -> Properties:
        return Properties(*self._fields(PROPERTIES, PROPERTY_TYPES))

    @property
    def delivery_annotations(self) -> dict[Any, Any]:
        return self._map(DELIVERY_ANNOTATIONS)

    @property
    def message_annotations(self) -> dict[Any, Any]:
        return self._map(MESSAGE_ANNOTATIONS)

    @property
    def application_properties(self) -> dict[Any, Any]:
        return self._map(APPLICATION_PROPERTIES)

    @property
    def footer(self) -> dict[Any, Any]:
        return self._map(FOOTER)

    @property
    def data(self) -> list[bytes]:
        """Contents of the data sections. Raises DecodeError if the body is of another kind."""
        if self.body_kind != "data":
            raise DecodeError(f"the body of the message is {self.body_kind}, not data")
        return [decode(self.raw, start)[0] for _, start, _ in self.body]

    @property
    def value(self) -> Any:
        """Value of an amqp-value body. Raises DecodeError if the body is of another kind."""
        if self.body_kind != "value":
            raise DecodeError(f"the body of the message is {self.body_kind}, not a value")
        return decode(self.raw, self.body[0][1])[0]

    @property
    def sequences(self) -> list[list[Any]]:
        if self.body_kind != "sequence":
            raise DecodeError(f"the body of the message is {self.body_kind}, not a sequence")
        return [decode(self.raw, start)[0] for _, start, _ in self.body]

    def _map(self, code: int) -> dict[Any, Any]:
        span = self.spans.get(code)
        if span is None:
            return {}
        found = decode(self.raw, span[1])[0]
        # Not a dict but a NumberKeyedMap: §3.2 allows only symbols, strings and (reserved) ulongs as keys here.
        if not isinstance(found, dict):
            raise DecodeError(f"section 0x{code:02x} of the message has too many keys that are numbers or UUIDs")
        return found

    def _fields(self, code: int, types: tuple[type | tuple[type, ...], ...]) -> list[Any]:
        span = self.spans.get(code)
        values: list[Any] = decode(self.raw, span[1])[0] if span else []
        if len(values) > len(types):
            raise DecodeError(f"section 0x{code:02x} of the message has {len(values)} fields")
        for value, kind in zip(values, types, strict=False):
            if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
                raise DecodeError(f"section 0x{code:02x} of the message has a field of a wrong type")
        return values


def split_sections(raw: bytes) -> Sections:
    """Return the sections of an encoded message. Raises DecodeError for invalid sections or a wrong order."""
    spans: dict[int, Span] = {}
    body: list[Span] = []
    pos, last, total = 0, 0, len(raw)
    while pos < total:
        code, start, end = section_at(raw, pos)
        check_order(code, last)
        if DATA <= code <= VALUE:
            body.append((pos, start, end))
        else:
            spans[code] = (pos, start, end)
        pos, last = end, code
    return Sections(raw, spans, body)


def batch_messages(raw: bytes) -> list[bytes]:
    """Return the messages of a batch (message-format 0x80013700): each data section holds one encoded message."""
    found = []
    pos, last, total = 0, 0, len(raw)
    while pos < total:
        code, start, end = section_at(raw, pos)
        if last != DATA or code != DATA:
            check_order(code, last)
        if code == DATA:
            found.append(raw[start + 2 : end] if raw[start] == 0xA0 else raw[start + 5 : end])
        elif SEQUENCE <= code <= VALUE:
            raise DecodeError("the body of a batch has a section that is not data")
        pos, last = end, code
    return found
