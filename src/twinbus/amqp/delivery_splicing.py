"""Splicing: writing the broker's additions into an encoded message, without decoding and encoding the other bytes.

When a message arrives, the broker may add a message id. When the broker delivers the message, it adds a header with the
delivery count, delivery annotations and message annotations, and may change application properties. The other bytes
remain as the sender wrote them. `read_routing_fields` checked all lengths when the message arrived, so this module does
not check lengths.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from struct import Struct
from uuid import UUID

from twinbus.amqp.decoding import WIDTHS, skip
from twinbus.amqp.encoding import (
    encode,
    encode_fields,
    encode_list_of,
    encode_map_of,
    encode_str,
    encode_symbol,
    encode_uint,
)
from twinbus.amqp.message_sections import (
    APPLICATION_PROPERTIES,
    DELIVERY_ANNOTATIONS,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    read_list_header,
    read_map_header,
    section_at,
)
from twinbus.values import ULong


@dataclass(slots=True)
class EncodedEntries:
    """Encoded entries of a map. `count` counts keys and values, as AMQP does.

    An entry of the sender's map with one of the keys in `names` is left out.
    """

    count: int
    raw: bytes
    names: frozenset[bytes] = field(default=frozenset(), compare=False, repr=False)


NO_ENTRIES = EncodedEntries(0, b"")


def encode_annotations(values: Mapping[str, object]) -> EncodedEntries:
    """Encode annotations: a map whose keys are symbols."""
    raw = b"".join(encode_symbol(key) + encode(value) for key, value in values.items())
    return EncodedEntries(2 * len(values), raw, frozenset(key.encode() for key in values))


def lock_token_annotation(token: UUID) -> EncodedEntries:
    """Return the delivery annotation with the lock token."""
    return EncodedEntries(2, LOCK_TOKEN + token.bytes, _LOCK_TOKEN_NAME)


_LOCK_TOKEN_NAME = frozenset((b"x-opt-lock-token",))
NO_LOCK_TOKEN = EncodedEntries(0, b"", _LOCK_TOKEN_NAME)
"""The delivery annotations of a message that is not locked."""
LOCK_TOKEN = encode_symbol("x-opt-lock-token") + b"\x98"
SEQUENCE_KEY = encode_symbol("x-opt-sequence-number") + b"\x81"
ENQUEUED_KEY = encode_symbol("x-opt-enqueued-time") + b"\x83"
LOCKED_UNTIL_KEY = encode_symbol("x-opt-locked-until") + b"\x83"
ENQUEUED_SEQUENCE_KEY = encode_symbol("x-opt-enqueue-sequence-number") + b"\x81"
_PARTITION_KEY = encode_symbol("x-opt-partition-key")
_SCHEDULED_KEY = encode_symbol("x-opt-scheduled-enqueue-time") + b"\x83"
STATE_KEY = encode_symbol("x-opt-message-state") + b"\x71"
_DEADLETTER_SOURCE_KEY = encode_symbol("x-opt-deadletter-source")
_FIRST_TWO = Struct(f">{len(SEQUENCE_KEY)}sq{len(ENQUEUED_KEY)}sq").pack
_LOCKED = Struct(f">{len(LOCKED_UNTIL_KEY)}sq").pack
_I64 = Struct(">q").pack
_I32 = Struct(">i").pack


def broker_annotations(
    seq: int,
    enqueued_ms: int,
    locked_until_ms: int | None = None,
    enqueued_seq: int | None = None,
    partition_key: str | None = None,
    scheduled_ms: int | None = None,
    state: int | None = None,
    deadletter_source: str | None = None,
) -> EncodedEntries:
    """Return the message annotations that a broker adds. An annotation whose argument is None is left out.

    A message that its receiver sent on has the annotations of its first delivery. The instant at which the first lock
    ended never remains.
    """
    raw = _FIRST_TWO(SEQUENCE_KEY, seq, ENQUEUED_KEY, enqueued_ms)
    given = 0
    if locked_until_ms is not None:
        raw += _LOCKED(LOCKED_UNTIL_KEY, locked_until_ms)
        given |= 1
    if enqueued_seq is not None:
        raw += ENQUEUED_SEQUENCE_KEY + _I64(enqueued_seq)
        given |= 2
    if partition_key is not None:
        raw += _PARTITION_KEY + encode_str(partition_key)
        given |= 4
    if scheduled_ms is not None:
        raw += _SCHEDULED_KEY + _I64(scheduled_ms)
        given |= 8
    if state is not None:
        raw += STATE_KEY + _I32(state)
        given |= 16
    if deadletter_source is not None:
        raw += _DEADLETTER_SOURCE_KEY + encode_str(deadletter_source)
        given |= 32
    return EncodedEntries(4 + 2 * given.bit_count(), raw, _NAMES[given])


_OPTIONAL_NAMES = (
    b"x-opt-locked-until",
    b"x-opt-enqueue-sequence-number",
    b"x-opt-partition-key",
    b"x-opt-scheduled-enqueue-time",
    b"x-opt-message-state",
    b"x-opt-deadletter-source",
)
# Names of the annotations. The index is a bit set: one bit for each optional annotation that is present.
_NAMES = tuple(
    frozenset((b"x-opt-sequence-number", b"x-opt-enqueued-time", b"x-opt-locked-until"))
    | {name for bit, name in enumerate(_OPTIONAL_NAMES) if given & 1 << bit}
    for given in range(64)
)

_HEADER = b"\x00\x53\x70"
_NULL = b"\x40"
_SHORT_TEXT = frozenset((0xA1, 0xA3))
_LONG_TEXT = frozenset((0xB1, 0xB3))
# Encoded headers by delivery count, for messages that arrived without a header.
PLAIN_HEADERS = tuple(_HEADER + encode_list_of([_NULL] * 4 + [encode_uint(count)]) for count in range(256))


def splice_delivery(
    raw: bytes,
    *,
    delivery_count: int,
    ttl: int | None = None,
    delivery_annotations: EncodedEntries | None = None,
    message_annotations: EncodedEntries = NO_ENTRIES,
    overlay: Mapping[str, object] | None = None,
) -> list[bytes]:
    """Return the parts of the encoded message for a receiver.

    `ttl=None` leaves the sender's ttl unchanged. `delivery_annotations=None` adds no delivery annotations. `overlay`
    has application properties: each replaces the sender's property of the same name, or is added.
    """
    pos = 0
    header = user_delivery = user_message = None
    code, start, end = _section(raw, 0)
    if code == HEADER:
        header = start
        pos = end
        code, start, end = _section(raw, pos)
    if code == DELIVERY_ANNOTATIONS:
        user_delivery = start
        pos = end
        code, start, end = _section(raw, pos)
    if code == MESSAGE_ANNOTATIONS:
        user_message = start
        pos = end
    if header is None and ttl is None and delivery_count < 256:
        head = PLAIN_HEADERS[delivery_count]
    else:
        head = _header(raw, header, delivery_count, ttl)
    if delivery_annotations is not None or user_delivery is not None:
        ours = delivery_annotations or NO_ENTRIES
        if user_delivery is not None:
            ours = _merged(raw, user_delivery, ours)
        head += b"\x00\x53\x71" + encode_map_of(ours.count, ours.raw)
    if user_message is not None:
        message_annotations = _merged(raw, user_message, message_annotations)
    if message_annotations.count:
        head += b"\x00\x53\x72" + encode_map_of(message_annotations.count, message_annotations.raw)
    if overlay:
        return _overlaid(raw, pos, head, overlay)
    return [head, raw[pos:]] if pos else [head, raw]


def with_message_id(raw: bytes, message_id: str | UUID | bytes | int) -> bytes:
    """Return the message with this message id, and otherwise unchanged."""
    field = encode(ULong(message_id) if type(message_id) is int else message_id)
    pos = 0
    while True:
        code, start, end = _section(raw, pos)
        if code == PROPERTIES:
            count, first = read_list_header(raw, start)
            rest = raw[skip(raw, first) : end] if count else b""
            return raw[:pos] + b"\x00\x53\x73" + encode_fields(max(1, count), field + rest) + raw[end:]
        if code > PROPERTIES or code == 0:
            return raw[:pos] + b"\x00\x53\x73" + encode_list_of([field]) + raw[pos:]
        pos = end


def _section(raw: bytes, pos: int) -> tuple[int, int, int]:
    if pos >= len(raw):
        return 0, pos, pos
    if raw[pos + 2] > APPLICATION_PROPERTIES and raw[pos + 1] == 0x53:
        return raw[pos + 2], pos, pos  # Body or footer: the broker adds nothing here, so the end is not needed.
    return section_at(raw, pos)


def list_field_slices(raw: bytes, start: int) -> list[bytes]:
    """Return the encoded fields of the list whose constructor is at `start`."""
    count, pos = read_list_header(raw, start)
    fields = []
    for _ in range(count):
        after = pos + 1 if raw[pos] == 0x40 else skip(raw, pos)
        fields.append(raw[pos:after])
        pos = after
    return fields


def _header(raw: bytes, start: int | None, delivery_count: int, ttl: int | None) -> bytes:
    fields = list_field_slices(raw, start)[:4] if start is not None else []
    fields += [_NULL] * (4 - len(fields))
    if ttl is not None:
        fields[2] = encode_uint(ttl)
    return _HEADER + encode_list_of([*fields, encode_uint(delivery_count)])


def drop_keys(raw: bytes, start: int, names: Container[bytes]) -> tuple[EncodedEntries, dict[bytes, int]]:
    """Return the entries of the map whose constructor is at `start`, except the entries with the given names.

    The second result has, for each name that was left out, the position of its value.
    """
    count, pos = read_map_header(raw, start)
    kept, run = [], pos
    found: dict[bytes, int] = {}
    for _ in range(count >> 1):
        form = raw[pos]
        if form in _SHORT_TEXT:
            middle = pos + 2 + raw[pos + 1]
            name = raw[pos + 2 : middle]
        else:
            middle = skip(raw, pos)
            name = raw[pos + 5 : middle] if form in _LONG_TEXT else raw[pos:middle]
        width = WIDTHS[raw[middle]]
        end = middle + 1 + width if width >= 0 else skip(raw, middle)
        if name in names:
            kept.append(raw[run:pos])
            run = end
            count -= 2
            found[name] = middle
        pos = end
    kept.append(raw[run:pos])
    return EncodedEntries(count, b"".join(kept)), found


def _merged(raw: bytes, start: int, ours: EncodedEntries) -> EncodedEntries:
    """Merge the sender's map with our entries. Our entry replaces an entry of the sender with the same key."""
    kept, _ = drop_keys(raw, start, ours.names)
    return EncodedEntries(kept.count + ours.count, kept.raw + ours.raw)


def _overlaid(raw: bytes, pos: int, head: bytes, overlay: Mapping[str, object]) -> list[bytes]:
    encoded = b"".join(encode_str(key) + encode(value) for key, value in overlay.items())
    added = EncodedEntries(2 * len(overlay), encoded, frozenset(key.encode() for key in overlay))
    code, start, end = _section(raw, pos)
    before = pos
    if code == PROPERTIES:
        before = end
        code, start, end = _section(raw, end)
    after = before
    if code == APPLICATION_PROPERTIES:
        added = _merged(raw, start, added)
        after = end
    return [head, raw[pos:before], b"\x00\x53\x74" + encode_map_of(added.count, added.raw), raw[after:]]
