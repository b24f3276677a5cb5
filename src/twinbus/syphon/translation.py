"""A message of the backlog as it goes to the primary: S7's aliases turned back, our marks removed, body unpacked (Y3).

Works on the encoded bytes, so that whatever is not meant to change cannot. Pure: the time comes in.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.decoding import decode
from twinbus.amqp.encoding import (
    encode_list_of,
    encode_map_of,
    encode_str,
    encode_symbol,
    encode_timestamp,
    encode_uint,
)
from twinbus.amqp.layout import (
    APPLICATION_PROPERTIES,
    DELIVERY_ANNOTATIONS,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    map_items,
)
from twinbus.amqp.sections import Sections, split
from twinbus.amqp.splicing import key_text, list_slices, map_slices
from twinbus.pairing import aliases
from twinbus.pairing.aliases import RESERVED, PropertyName, Restored, Sendable, restore
from twinbus.pairing.errors import AliasError
from twinbus.pairing.packing import unpack
from twinbus.syphon.transport import NeverDeliverableError, TimeToLive


class Reason(StrEnum):
    """Why a message can never be delivered, as its dead-letter reason tells it (Y6)."""

    NO_DESTINATION = "NoDestination"
    WRONG_ALIAS = "WrongAlias"
    MALFORMED = "MalformedMessage"
    EXPIRED = "TTLExpiredException"  # the service's own word


class Translated(NamedTuple):
    path: str
    raw: bytes


MOST_TTL: Final = 0xFFFF_FFFF  # ms, in a header; a longer life is told by absolute-expiry-time
END_OF_TIME: Final = 253_402_300_800_000  # ms: the last instant that .NET's services know
LARGEST_BODY: Final = 100 * 1024 * 1024  # of any tier

# What a broker writes on delivery. Whatever else stands there is the sender's.
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
_PATH: Final = frozenset((aliases.PATH.encode(),))
_PATH_KEY: Final = encode_str(aliases.PATH)
_RESERVED: Final = {name.encode(): name for name in RESERVED}
_TTL, _HEADER_OF_SENDER = 2, 4  # the fifth field of a header, the delivery count, is the broker's
_EXPIRY, _CREATION, _GROUP = 8, 9, 10
_NULL: Final = b"\x40"

Pairs = list[tuple[bytes, bytes]]


def translate(raw: bytes, now: int, ttl: TimeToLive = "restart") -> Translated:
    """`now` is in ms since the epoch. NeverDeliverableError where it can never be delivered (Y6, Y7)."""
    try:
        return _translate(split(raw), now, ttl)
    except AliasError as error:
        missing = error.name == aliases.PATH
        raise NeverDeliverableError(Reason.NO_DESTINATION if missing else Reason.WRONG_ALIAS, error.text) from error
    except (AmqpError, IndexError) as error:
        raise NeverDeliverableError(Reason.MALFORMED, str(error)) from error


def destination_of(raw: bytes) -> str | None:
    """Where a message of the backlog is meant to go; None where it does not say so in a way that can be read."""
    try:
        found = {key_text(key): value for key, value in _map(split(raw), APPLICATION_PROPERTIES)}
        path = decode(found[aliases.PATH.encode()])[0]
    except (AmqpError, IndexError, KeyError):
        return None
    return path if type(path) is str and path else None


def resubmittable(raw: bytes, path: str | None = None) -> bytes:
    """A dead-lettered message as it goes back into the backlog: aliases and all, for `path` where one is given."""
    sections = split(raw)
    properties = _without(DEAD_LETTER_PROPERTIES, _map(sections, APPLICATION_PROPERTIES))
    if path is not None:
        properties = [*_without(_PATH, properties), (_PATH_KEY, encode_str(path))]
    annotations = _without(BROKER_ANNOTATIONS, _map(sections, MESSAGE_ANNOTATIONS))
    return _composed(sections, _header(sections, None), annotations, _fields(sections, PROPERTIES), properties)


def _translate(sections: Sections, now: int, ttl: TimeToLive) -> Translated:
    given: dict[PropertyName, object] = {}
    properties: Pairs = []
    for pair in _map(sections, APPLICATION_PROPERTIES):
        alias = _RESERVED.get(key_text(pair[0]))
        if alias is None:
            properties.append(pair)
        else:
            given[alias] = decode(pair[1])[0]
    meant = restore(Sendable(application_properties=given))
    annotations, enqueued = _annotations(sections, meant)
    lifetime = _lifetime(meant.message, enqueued, now, ttl)
    fields = _fields(sections, PROPERTIES)
    if meant.message.session_id is not None:
        _set(fields, _GROUP, encode_str(meant.message.session_id))
    if lifetime is not None and lifetime > MOST_TTL:
        _live_long(fields, lifetime, now)
    body = None if meant.packed is None else _unpacked(sections, meant.packed)
    header = _header(sections, None if lifetime is None else min(lifetime, MOST_TTL))
    return Translated(meant.path, _composed(sections, header, annotations, fields, properties, body))


# --- what becomes of each section ------------------------------------------------------------------------------------


def _annotations(sections: Sections, meant: Restored) -> tuple[Pairs, int | None]:
    """The sender's message annotations with the scheduled time back among them, and when the backlog took it, in ms."""
    enqueued: int | None = None
    scheduled = meant.message.scheduled_enqueue_time
    kept: Pairs = []
    for pair in _map(sections, MESSAGE_ANNOTATIONS):
        name = key_text(pair[0])
        if name == _ENQUEUED:
            enqueued = decode(pair[1])[0]
        elif name not in BROKER_ANNOTATIONS and (scheduled is None or name != _SCHEDULED):
            kept.append(pair)
    if scheduled is not None:
        kept.append((_SCHEDULED_KEY, encode_timestamp(scheduled)))
    return kept, enqueued


def _lifetime(message: Sendable, enqueued: int | None, now: int, ttl: TimeToLive) -> int | None:
    """What is left of its time to live, in ms (Y7). A life begins when the message is enqueued, so at its schedule."""
    given = message.time_to_live
    if given is None or ttl == "restart" or enqueued is None:
        return given
    left = given - max(0, now - max(enqueued, message.scheduled_enqueue_time or 0))
    if left <= 0:
        raise NeverDeliverableError(Reason.EXPIRED, f"its time to live of {given} ms ended in the backlog")
    return left


def _live_long(fields: list[bytes], lifetime: int, now: int) -> None:
    """A life longer than a header can tell stands between creation and expiry."""
    creation = decode(fields[_CREATION])[0] if len(fields) > _CREATION else None
    if creation is None:
        creation = now
        _set(fields, _CREATION, encode_timestamp(now))
    _set(fields, _EXPIRY, encode_timestamp(min(creation + lifetime, END_OF_TIME)))


def _header(sections: Sections, ttl: int | None) -> list[bytes]:
    """Without an alias the sender gave no time to live: one that stands there is the backlog queue's own."""
    fields = _fields(sections, HEADER)[:_HEADER_OF_SENDER]
    if ttl is not None or len(fields) > _TTL:
        _set(fields, _TTL, _NULL if ttl is None else encode_uint(ttl))
    return fields


def _unpacked(sections: Sections, mark: str) -> bytes:
    """S9: the body sections as they were."""
    if sections.body_kind != "data" or len(sections.body) != 1:
        raise AliasError(aliases.PACKED, "marks a body that is not one data section")
    body = unpack(sections.data[0], mark, LARGEST_BODY)
    inner = split(body)
    if inner.spans:
        raise AliasError(aliases.PACKED, "marks a body that holds more than body sections")
    return body


def _composed(
    sections: Sections,
    header: list[bytes],
    annotations: Pairs,
    fields: list[bytes],
    properties: Pairs,
    body: bytes | None = None,
) -> bytes:
    """Sections with nothing in them are left out, as the official clients do."""
    delivery = _without(_LOCK_TOKEN, _map(sections, DELIVERY_ANNOTATIONS))
    raw = sections.raw
    return b"".join(
        (
            _list_section(b"\x00\x53\x70", header),
            _map_section(b"\x00\x53\x71", delivery),
            _map_section(b"\x00\x53\x72", annotations),
            _list_section(b"\x00\x53\x73", fields),
            _map_section(b"\x00\x53\x74", properties),
            raw[sections.body_start : sections.body_end] if body is None else body,
            raw[sections.body_end :],
        )
    )


# --- slices ----------------------------------------------------------------------------------------------------------


def _map(sections: Sections, code: int) -> Pairs:
    span = sections.spans.get(code)
    return [] if span is None else map_slices(sections.raw, *map_items(sections.raw, span[1]))


def _fields(sections: Sections, code: int) -> list[bytes]:
    span = sections.spans.get(code)
    return [] if span is None else list_slices(sections.raw, span[1])


def _without(names: frozenset[bytes], pairs: Pairs) -> Pairs:
    return [pair for pair in pairs if key_text(pair[0]) not in names]


def _set(fields: list[bytes], index: int, value: bytes) -> None:
    fields += [_NULL] * (index + 1 - len(fields))
    fields[index] = value


def _list_section(start: bytes, fields: list[bytes]) -> bytes:
    while fields and fields[-1] == _NULL:
        fields.pop()
    return start + encode_list_of(fields) if fields else b""


def _map_section(start: bytes, pairs: Pairs) -> bytes:
    return start + encode_map_of(2 * len(pairs), b"".join([key + value for key, value in pairs])) if pairs else b""
