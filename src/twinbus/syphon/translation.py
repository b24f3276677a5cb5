"""Translates a backlog message back to the message that its sender sent (Y3).

Aliases become properties again (S7), the broker's annotations are removed, a compressed body is decompressed (S9).

The translation works on the encoded bytes and copies every part that must not change. Pure: the time is an argument.
"""

from __future__ import annotations

from collections.abc import Container
from enum import StrEnum
from typing import Final, NamedTuple

from twinbus.amqp import (
    APPLICATION_PROPERTIES,
    DELIVERY_ANNOTATIONS,
    HEADER,
    MESSAGE_ANNOTATIONS,
    NO_ENTRIES,
    PROPERTIES,
    AmqpError,
    EncodedEntries,
    Sections,
    decode,
    drop_keys,
    encode_list_of,
    encode_map_of,
    encode_str,
    encode_symbol,
    encode_timestamp,
    encode_uint,
    list_field_slices,
    split_sections,
)
from twinbus.backlog import (
    COMPRESSION_PROPERTY,
    PATH_PROPERTY,
    RESERVED_PROPERTIES,
    AliasError,
    MessageFields,
    decompress_body,
    restore,
)
from twinbus.syphon.transport import NeverDeliverableError, TimeToLive


class DeadLetterReason(StrEnum):
    """The dead-letter reason of a message that can never be delivered (Y6)."""

    NO_DESTINATION = "NoDestination"
    WRONG_ALIAS = "WrongAlias"
    MALFORMED = "MalformedMessage"
    EXPIRED = "TTLExpiredException"  # the reason that the service itself gives for an expired message


class TranslatedMessage(NamedTuple):
    path: str
    raw: bytes
    enqueued: int | None = None
    """When the backlog enqueued the message by the broker's clock, in ms since the epoch."""


MAX_HEADER_TTL: Final = 0xFFFF_FFFF  # ms; a longer time to live is written as absolute-expiry-time
MAX_EXPIRY: Final = 253_402_300_800_000  # ms since the epoch: the end of .NET's DateTime, which the service uses
MAX_BODY: Final = 100 * 1024 * 1024  # bytes, the largest of any tier

# The broker writes these annotations on delivery. The sender wrote all others.
BROKER_ANNOTATIONS: Final = frozenset(
    (
        b"x-opt-sequence-number",
        b"x-opt-enqueued-time",
        b"x-opt-locked-until",
        b"x-opt-enqueue-sequence-number",
        b"x-opt-message-state",
        b"x-opt-deadletter-source",
        b"x-opt-partition-id",
    )
)
DEAD_LETTER_PROPERTIES: Final = frozenset((b"DeadLetterReason", b"DeadLetterErrorDescription"))
_LOCK_TOKEN: Final = frozenset((b"x-opt-lock-token",))
_ENQUEUED: Final = b"x-opt-enqueued-time"
_SCHEDULED: Final = b"x-opt-scheduled-enqueue-time"
_SCHEDULED_KEY: Final = encode_symbol(_SCHEDULED.decode())
_BROKER_AND_SCHEDULED: Final = BROKER_ANNOTATIONS | {_SCHEDULED}
_PATH_NAME: Final = PATH_PROPERTY.encode()
_PATH: Final = frozenset((_PATH_NAME,))
_PATH_KEY: Final = encode_str(PATH_PROPERTY)
_RESERVED: Final = {name.encode(): name for name in RESERVED_PROPERTIES}
_TTL, _HEADER_OF_SENDER = 2, 4  # the broker wrote the fifth field of a header, the delivery count
_EXPIRY, _CREATION, _GROUP = 8, 9, 10
_NULL: Final = b"\x40"


def translate(raw: bytes, now: int, ttl: TimeToLive = "restart") -> TranslatedMessage:
    """Returns the destination and the message for it. `now` is the broker's time (L5), in ms since the epoch.

    Raises NeverDeliverableError if the message can never be delivered (Y6) or has expired (Y7).
    """
    try:
        return _translate(split_sections(raw), now, ttl)
    except AliasError as error:
        reason = DeadLetterReason.NO_DESTINATION if error.name == PATH_PROPERTY else DeadLetterReason.WRONG_ALIAS
        raise NeverDeliverableError(reason, error.text, destination_of(raw)) from error
    except (AmqpError, IndexError) as error:
        raise NeverDeliverableError(DeadLetterReason.MALFORMED, str(error), destination_of(raw)) from error


def destination_of(raw: bytes) -> str | None:
    """Return the destination of a backlog message; None if the message has no readable destination."""
    try:
        _, found = _drop(split_sections(raw), APPLICATION_PROPERTIES, _PATH)
        path = decode(raw, found[_PATH_NAME])[0]
    except (AmqpError, IndexError, KeyError):
        return None
    return path if type(path) is str and path else None


def resubmittable(raw: bytes, path: str | None = None) -> bytes:
    """Return the message that resubmits a dead letter to its backlog queue, with its aliases.

    If `path` is given, `path` becomes the destination.
    """
    sections = split_sections(raw)
    dropped = DEAD_LETTER_PROPERTIES if path is None else DEAD_LETTER_PROPERTIES | _PATH
    properties, _ = _drop(sections, APPLICATION_PROPERTIES, dropped)
    if path is not None:
        properties = _with(properties, _PATH_KEY + encode_str(path))
    annotations, _ = _drop(sections, MESSAGE_ANNOTATIONS, BROKER_ANNOTATIONS)
    fields = _section(sections, PROPERTIES)
    return _message(sections, _header(sections, None), annotations, fields, properties)


def _translate(sections: Sections, now: int, ttl: TimeToLive) -> TranslatedMessage:
    raw = sections.raw
    properties, found = _drop(sections, APPLICATION_PROPERTIES, _RESERVED)
    restored = restore(
        MessageFields(application_properties={_RESERVED[name]: decode(raw, pos)[0] for name, pos in found.items()})
    )
    annotations, enqueued = _annotations(sections, restored.message.scheduled_enqueue_time)
    lifetime = _lifetime(restored.path, restored.message, enqueued, now, ttl)
    body = None if restored.compression is None else _decompressed(sections, restored.compression)
    return TranslatedMessage(
        restored.path,
        _message(
            sections,
            _header(sections, lifetime),
            annotations,
            _properties(sections, restored.message.session_id, lifetime, now),
            properties,
            body,
        ),
        enqueued,
    )


# --- each section ----------------------------------------------------------------------------------------------------


def _annotations(sections: Sections, scheduled: int | None) -> tuple[EncodedEntries, int | None]:
    """Return the sender's annotations with the scheduled time, and when the backlog enqueued the message, in ms."""
    dropped = BROKER_ANNOTATIONS if scheduled is None else _BROKER_AND_SCHEDULED
    kept, found = _drop(sections, MESSAGE_ANNOTATIONS, dropped)
    if scheduled is not None:
        kept = _with(kept, _SCHEDULED_KEY + encode_timestamp(scheduled))
    return kept, decode(sections.raw, found[_ENQUEUED])[0] if _ENQUEUED in found else None


def _lifetime(path: str, message: MessageFields, enqueued: int | None, now: int, ttl: TimeToLive) -> int | None:
    """Return the rest of the time to live, in ms (Y7).

    The time to live starts when the message was enqueued, or at the scheduled time if that is later.
    """
    given = message.time_to_live
    if given is None or ttl == "restart" or enqueued is None:
        return given
    left = given - max(0, now - max(enqueued, message.scheduled_enqueue_time or 0))
    if left <= 0:
        raise NeverDeliverableError(
            DeadLetterReason.EXPIRED, f"its time to live of {given} ms ended in the backlog", path
        )
    return left


def _header(sections: Sections, lifetime: int | None) -> bytes:
    """Return the sender's header with the time to live `lifetime`.

    If `lifetime` is None, the sender gave no time to live, and a value in the header is the backlog queue's default.
    """
    span = sections.spans.get(HEADER)
    fields: list[bytes] = [] if span is None else list_field_slices(sections.raw, span[1])[:_HEADER_OF_SENDER]
    if lifetime is not None or len(fields) > _TTL:
        _set(fields, _TTL, _NULL if lifetime is None else encode_uint(min(lifetime, MAX_HEADER_TTL)))
    return _list_section(b"\x00\x53\x70", fields)


def _properties(sections: Sections, session_id: str | None, lifetime: int | None, now: int) -> bytes:
    long_lived = lifetime is not None and lifetime > MAX_HEADER_TTL
    if session_id is None and not long_lived:
        return _section(sections, PROPERTIES)
    span = sections.spans.get(PROPERTIES)
    fields = [] if span is None else list_field_slices(sections.raw, span[1])
    if session_id is not None:
        _set(fields, _GROUP, encode_str(session_id))
    if lifetime is not None and long_lived:
        # This time to live is too large for the field in the header, so it is written as expiry minus creation.
        created = decode(fields[_CREATION])[0] if len(fields) > _CREATION else None
        created = now if created is None else created
        _set(fields, _CREATION, encode_timestamp(created))
        _set(fields, _EXPIRY, encode_timestamp(min(created + lifetime, MAX_EXPIRY)))
    return _list_section(b"\x00\x53\x73", fields)


def _decompressed(sections: Sections, mark: str) -> bytes:
    """Return the body sections as they were before compression (S9)."""
    if sections.body_kind != "data" or len(sections.body) != 1:
        raise AliasError(COMPRESSION_PROPERTY, "marks a body that is not one data section")
    body = decompress_body(sections.data[0], mark, MAX_BODY)
    if split_sections(body).spans:
        raise AliasError(COMPRESSION_PROPERTY, "marks a body that holds more than body sections")
    return body


def _message(
    sections: Sections,
    header: bytes,
    annotations: EncodedEntries,
    fields: bytes,
    properties: EncodedEntries,
    body: bytes | None = None,
) -> bytes:
    raw = sections.raw
    delivery, _ = _drop(sections, DELIVERY_ANNOTATIONS, _LOCK_TOKEN)
    return b"".join(
        (
            header,
            _map_section(b"\x00\x53\x71", delivery),
            _map_section(b"\x00\x53\x72", annotations),
            fields,
            _map_section(b"\x00\x53\x74", properties),
            raw[sections.body_start : sections.body_end] if body is None else body,
            raw[sections.body_end :],
        )
    )


# --- encoding; an empty section is left out, as the official clients do ----------------------------------------------


def _section(sections: Sections, code: int) -> bytes:
    span = sections.spans.get(code)
    return b"" if span is None else sections.raw[span[0] : span[2]]


def _drop(sections: Sections, code: int, names: Container[bytes]) -> tuple[EncodedEntries, dict[bytes, int]]:
    """Return the entries of a map section whose keys are not in `names`, and the positions of the removed values."""
    span = sections.spans.get(code)
    return (NO_ENTRIES, {}) if span is None else drop_keys(sections.raw, span[1], names)


def _with(entries: EncodedEntries, key_and_value: bytes) -> EncodedEntries:
    return EncodedEntries(entries.count + 2, entries.raw + key_and_value)


def _map_section(start: bytes, entries: EncodedEntries) -> bytes:
    return start + encode_map_of(entries.count, entries.raw) if entries.count else b""


def _set(fields: list[bytes], index: int, value: bytes) -> None:
    fields += [_NULL] * (index + 1 - len(fields))
    fields[index] = value


def _list_section(start: bytes, fields: list[bytes]) -> bytes:
    while fields and fields[-1] == _NULL:
        fields.pop()
    return start + encode_list_of(fields) if fields else b""
