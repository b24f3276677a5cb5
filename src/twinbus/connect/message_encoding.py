"""Encoding messages for sending: `encode_message` encodes one message, `pack_transfers` makes transfers of many.

A transfer carries one message, or several as a batch (message-format 0x80013700).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from twinbus.amqp import (
    BATCH_FORMAT,
    DELIVERY_ANNOTATIONS,
    HEADER,
    MESSAGE_ANNOTATIONS,
    EncodeError,
    Header,
    Properties,
    batch_payload,
    build_message,
    data_section_size,
    encode,
    read_routing_fields,
    split_sections,
)
from twinbus.connect.errors import MessageSizeExceededError
from twinbus.message import BodyType, Message
from twinbus.values import Symbol, Timestamp

MAX_TTL: Final = 0xFFFFFFFF  # ms: the largest ttl of a header. A longer ttl is written as absolute-expiry-time.

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


def to_millis(instant: datetime) -> int:
    """Return milliseconds since the epoch. A datetime without a time zone is UTC."""
    aware = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
    return (aware - _EPOCH) // _MILLISECOND


def to_datetime(millis: int) -> datetime:
    """Return the instant as a datetime, but at most the largest datetime: a lock without end is later than that."""
    try:
        return _EPOCH + timedelta(milliseconds=millis)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


def encode_message(source: Message, now: int) -> bytes:
    """Return the encoded message. `now` is the time in ms since the epoch, needed if time_to_live exceeds MAX_TTL.

    Raises EncodeError if a value has no AMQP type, or time_to_live is not positive.
    """
    lifetime = None if source.time_to_live is None else source.time_to_live // _MILLISECOND
    if lifetime is not None and lifetime <= 0:
        raise EncodeError("time_to_live must be positive")
    return build_message(
        header=_header(source, lifetime),
        delivery_annotations=_plain(source.delivery_annotations),
        message_annotations=_annotations(source),
        properties=_properties(source, lifetime, now),
        application_properties=_plain(source.application_properties),
        footer=_plain(source.footer),
        **_body(source),
    )


def _header(source: Message, lifetime: int | None) -> Header | None:
    if lifetime is None and source.priority is None and source.durable is None:
        return None
    ttl = None if lifetime is None else min(lifetime, MAX_TTL)
    return Header(durable=source.durable, priority=source.priority, ttl=ttl)


def _properties(source: Message, lifetime: int | None, now: int) -> Properties:
    long_lived = lifetime is not None and lifetime > MAX_TTL
    return Properties(
        message_id=source.message_id,
        user_id=source.user_id,
        to=source.to,
        subject=source.subject,
        reply_to=source.reply_to,
        correlation_id=source.correlation_id,
        content_type=source.content_type,
        content_encoding=source.content_encoding,
        absolute_expiry_time=now + lifetime if lifetime is not None and long_lived else None,
        creation_time=now if long_lived else None,
        group_id=source.session_id,
        reply_to_group_id=source.reply_to_session_id,
    )


def _annotations(source: Message) -> Mapping[str, Any] | None:
    annotations = dict(_plain(source.annotations) or {})
    if source.partition_key is not None:
        annotations["x-opt-partition-key"] = source.partition_key
    if source.scheduled_enqueue_time is not None:
        annotations["x-opt-scheduled-enqueue-time"] = Timestamp(to_millis(source.scheduled_enqueue_time))
    return annotations or None


def _body(source: Message) -> dict[str, Any]:
    body = source.body
    match source.body_type:
        case BodyType.VALUE:
            return {"value": _amqp(body)}
        case BodyType.SEQUENCE:
            return {"sequence": _amqp(body)}
        case BodyType.DATA:
            if isinstance(body, str):
                return {"data": body.encode()}
            if isinstance(body, bytes | bytearray | memoryview):
                return {"data": bytes(body)}
            if isinstance(body, list | tuple) and all(isinstance(part, bytes) for part in body):
                return {"data": list(body)}
    raise EncodeError(f"a data body is bytes, text or a list of bytes, not {type(body).__name__}")


def _plain(values: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return {key: _amqp(value) for key, value in values.items()} if values else None


def _amqp(value: Any) -> Any:
    """Replace datetimes by timestamps, also inside lists and maps. The codec refuses values without an AMQP type."""
    if isinstance(value, datetime):
        return Timestamp(to_millis(value))
    if type(value) is dict:
        return {key: _amqp(inner) for key, inner in value.items()}
    if type(value) in {list, tuple}:
        return [_amqp(inner) for inner in value]
    return value


def with_scheduled_time(raw: bytes, millis: int) -> bytes:
    """Return the encoded message with this scheduled enqueue time, in ms since the epoch, and otherwise unchanged."""
    sections = split_sections(raw)
    annotations = {**sections.message_annotations, Symbol("x-opt-scheduled-enqueue-time"): Timestamp(millis)}
    span = sections.spans.get(MESSAGE_ANNOTATIONS)
    if span is not None:
        start, end = span[0], span[2]
    else:
        before = [sections.spans[code][2] for code in (HEADER, DELIVERY_ANNOTATIONS) if code in sections.spans]
        start = end = max(before, default=0)
    return raw[:start] + b"\x00\x53\x72" + encode(annotations) + raw[end:]


# `build_message` ends a message without a body with an AMQP value section that holds null.
_EMPTY_BODY: Final = len(b"\x00\x53\x77\x40")


@dataclass(frozen=True, slots=True)
class PackedTransfer:
    """One transfer with `messages[first:end]`, where `messages` is the argument of `pack_transfers`."""

    payload: bytes
    message_format: int
    first: int
    end: int


def pack_transfers(messages: Sequence[bytes], limit: int) -> list[PackedTransfer]:
    """Pack encoded messages, in their order, into transfers of at most `limit` bytes.

    Raises MessageSizeExceededError if a message alone exceeds the limit.
    """
    if len(messages) == 1 and len(messages[0]) <= limit:
        return [_transfer(messages, 0, 1)]
    transfers: list[PackedTransfer] = []
    first, size = 0, 0
    for index, raw in enumerate(messages):
        length = len(raw)
        if length > limit:
            raise MessageSizeExceededError(f"a message of {length} bytes; the link accepts at most {limit}")
        needed = data_section_size(length)
        if index == first:
            size = len(_batch_sections(raw)) + needed
        elif size + needed > limit:
            transfers.append(_transfer(messages, first, index))
            first, size = index, len(_batch_sections(raw)) + needed
        else:
            size += needed
    if first < len(messages):
        transfers.append(_transfer(messages, first, len(messages)))
    return transfers


def _transfer(messages: Sequence[bytes], first: int, end: int) -> PackedTransfer:
    if end - first == 1:
        return PackedTransfer(messages[first], 0, first, end)
    payload = batch_payload(messages[first:end], before=_batch_sections(messages[first]))
    return PackedTransfer(payload, BATCH_FORMAT, first, end)


def _batch_sections(raw: bytes) -> bytes:
    """Return the sections before a batch's messages: id, session and partition key of `raw`, its first message.

    The service routes the batch by these fields.
    """
    fields = read_routing_fields(raw)
    if fields.message_id is None and fields.group_id is None and fields.partition_key is None:
        return b""
    annotations = None if fields.partition_key is None else {"x-opt-partition-key": fields.partition_key}
    properties = Properties(message_id=fields.message_id, group_id=fields.group_id)
    return build_message(message_annotations=annotations, properties=properties)[:-_EMPTY_BODY]
