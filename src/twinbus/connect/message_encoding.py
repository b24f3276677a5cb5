"""Messages to bytes: how a caller's values stand in the sections of an AMQP message. Knows no link and no clock."""

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
    encode,
    read_routing_fields,
    split_sections,
)
from twinbus.connect.errors import MessageSizeExceededError
from twinbus.message import BodyType, Message
from twinbus.values import Symbol, Timestamp

MOST_TTL: Final = 0xFFFFFFFF  # ms, in a header; a longer life is told by absolute-expiry-time

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


def to_millis(instant: datetime) -> int:
    """Milliseconds since the epoch; an instant without a zone is UTC."""
    aware = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
    return (aware - _EPOCH) // _MILLISECOND


def to_datetime(millis: int) -> datetime:
    """As far as datetime reaches: what lies beyond (a lock that never ends) is its largest instant."""
    try:
        return _EPOCH + timedelta(milliseconds=millis)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


def encode_message(source: Message, now: int) -> bytes:
    """The message as it goes on the wire. `now`, in ms, is needed for a life longer than a header can tell."""
    lifetime = None if source.time_to_live is None else source.time_to_live // _MILLISECOND
    if lifetime is not None and lifetime <= 0:
        raise EncodeError("time_to_live has to be positive")
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
    ttl = None if lifetime is None else min(lifetime, MOST_TTL)
    return Header(durable=source.durable, priority=source.priority, ttl=ttl)


def _properties(source: Message, lifetime: int | None, now: int) -> Properties:
    long_lived = lifetime is not None and lifetime > MOST_TTL
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
    """Instants become timestamps, wherever they stand; all else is what the codec takes or refuses."""
    if isinstance(value, datetime):
        return Timestamp(to_millis(value))
    if type(value) is dict:
        return {key: _amqp(inner) for key, inner in value.items()}
    if type(value) in {list, tuple}:
        return [_amqp(inner) for inner in value]
    return value


def with_scheduled_time(raw: bytes, millis: int) -> bytes:
    """The encoded message with this scheduled enqueue time; everything else stays as it is."""
    sections = split_sections(raw)
    annotations = {**sections.message_annotations, Symbol("x-opt-scheduled-enqueue-time"): Timestamp(millis)}
    span = sections.spans.get(MESSAGE_ANNOTATIONS)
    if span is not None:
        start, end = span[0], span[2]
    else:
        before = [sections.spans[code][2] for code in (HEADER, DELIVERY_ANNOTATIONS) if code in sections.spans]
        start = end = max(before, default=0)
    return raw[:start] + b"\x00\x53\x72" + encode(annotations) + raw[end:]


_SMALL: Final = 256  # a data section takes 5 bytes more than its content below this, 8 from there on
_EMPTY_BODY: Final = len(b"\x00\x53\x77\x40")


@dataclass(frozen=True, slots=True)
class PackedTransfer:
    """One transfer; the messages it carries are `messages[first:end]` of what was packed."""

    payload: bytes
    message_format: int
    first: int
    end: int


def pack_transfers(messages: Sequence[bytes], limit: int) -> list[PackedTransfer]:
    """Transfers of at most `limit` bytes that carry all messages, in their order."""
    if len(messages) == 1 and len(messages[0]) <= limit:
        return [_batch(messages, 0, 1)]
    batches: list[PackedTransfer] = []
    first, size = 0, 0
    for index, raw in enumerate(messages):
        length = len(raw)
        if length > limit:
            raise MessageSizeExceededError(f"a message of {length} bytes; the link takes {limit}")
        needed = length + (5 if length < _SMALL else 8)
        if index == first:
            size = len(_envelope(raw)) + needed
        elif size + needed > limit:
            batches.append(_batch(messages, first, index))
            first, size = index, len(_envelope(raw)) + needed
        else:
            size += needed
    if first < len(messages):
        batches.append(_batch(messages, first, len(messages)))
    return batches


def _batch(messages: Sequence[bytes], first: int, end: int) -> PackedTransfer:
    if end - first == 1:
        return PackedTransfer(messages[first], 0, first, end)
    payload = batch_payload(messages[first:end], before=_envelope(messages[first]))
    return PackedTransfer(payload, BATCH_FORMAT, first, end)


def _envelope(raw: bytes) -> bytes:
    """The sections before the messages: who they are for, as the first of them says it; the service routes by it."""
    inner = read_routing_fields(raw)
    if inner.message_id is None and inner.group_id is None and inner.partition_key is None:
        return b""
    annotations = None if inner.partition_key is None else {"x-opt-partition-key": inner.partition_key}
    properties = Properties(message_id=inner.message_id, group_id=inner.group_id)
    return build_message(message_annotations=annotations, properties=properties)[:-_EMPTY_BODY]
