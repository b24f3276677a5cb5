"""Messages of the SDK on their way out: ids before the first attempt (S8), and copies for the backlog (S7, S9).

The caller's objects are never altered here. Which names and how sizes are shared out: `aliases`, `packing`, `batching`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import uuid4

from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch
from azure.servicebus.amqp import (
    AmqpAnnotatedMessage,
    AmqpMessageHeader,
    AmqpMessageProperties,
)

from twinbus.backlog import DEFLATE, MessageFields, compress_body, divert
from twinbus.pairing.errors import MessageTooLargeForBacklogError, TimeToLiveError
from twinbus.sdk import (
    LinkLimits,
    TransformingBatch,
    batch_messages,
    encoded_body,
    encoded_size,
    new_batch,
    outgoing_message,
    sdk_value,
    set_data_body,
)

SCHEDULED_ENQUEUE_TIME: Final = b"x-opt-scheduled-enqueue-time"
# What a batch takes beside its messages: the ids of the first one, each of at most 128 characters.
BATCH_ENVELOPE_BYTES: Final = 1024
# In milliseconds: the header's ttl is a uint (AMQP 3.2.1).
LONGEST_TIME_TO_LIVE: Final = 0xFFFF_FFFF
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_SINGLE: Final = (Mapping, ServiceBusMessageBatch, str, bytes)
_SEVERAL: Final = (list, ServiceBusMessageBatch)

Payload = ServiceBusMessage | ServiceBusMessageBatch


# --- ids (S8) --------------------------------------------------------------------------------------------------------


def identified(message: Any) -> Any:
    """What a caller gave to send, each message with an id: itself where it has one, otherwise a copy."""
    if isinstance(message, ServiceBusMessage):
        raw = message.raw_amqp_message
        return message if _is_ready(raw) else outgoing_message(_with_id(raw))
    if not isinstance(message, Iterable) or isinstance(message, _SINGLE):
        return _identified(message)
    return [_identified(one) for one in message]


def is_empty(message: Any) -> bool:
    """A list or batch with nothing in it, which the SDK does not send either."""
    return isinstance(message, _SEVERAL) and len(message) == 0


def _identified(message: Any) -> Any:
    if isinstance(message, ServiceBusMessage):
        raw = message.raw_amqp_message
        return message if _is_ready(raw) else outgoing_message(_with_id(raw))
    if isinstance(message, IdentifiedBatch):
        return message
    if isinstance(message, ServiceBusMessageBatch):
        return _identified_batch(message)
    if isinstance(message, AmqpAnnotatedMessage):
        return message if _is_ready(message) else _with_id(message)
    if isinstance(message, Mapping):
        # Turned into a message once, so that every attempt carries the same id.
        return _identified(_from_mapping(message))
    return message


def _is_ready(raw: AmqpAnnotatedMessage) -> bool:
    """Whether it has an id, be it 0 or empty. TimeToLiveError, so that the primary and the backlog refuse alike."""
    properties, header = raw.properties, raw.header
    if header is not None and header.time_to_live is not None and not 0 <= header.time_to_live <= LONGEST_TIME_TO_LIVE:
        raise TimeToLiveError(id_of(raw), header.time_to_live, LONGEST_TIME_TO_LIVE)
    return properties is not None and properties.message_id is not None


class IdentifiedBatch(TransformingBatch):
    """A batch whose messages have ids as they come in."""

    def transform(self, message: Any) -> Any:
        return _identified(message)


def _identified_batch(batch: ServiceBusMessageBatch) -> ServiceBusMessageBatch:
    if all(message.message_id is not None for message in batch_messages(batch)):
        return batch
    return IdentifiedBatch.copy_of(batch)


def _with_id(raw: AmqpAnnotatedMessage) -> AmqpAnnotatedMessage:
    made = copy.copy(raw)
    # Its own: the SDK turns bytes among these into text where it finds them.
    made.application_properties = dict(raw.application_properties) if raw.application_properties else None
    given = dict(raw.properties.items()) if raw.properties else {}
    made.properties = AmqpMessageProperties(**{**given, "message_id": str(uuid4())})
    return made


def _from_mapping(message: Mapping[str, Any]) -> ServiceBusMessage:
    try:
        return ServiceBusMessage(**message)
    except TypeError as error:
        # Names and types alone: what a message holds is not for logs.
        held = ", ".join(f"{str(name)[:40]} ({type(value).__name__})" for name, value in message.items())
        raise TypeError(f"no ServiceBusMessage can be made of {held[:400] or 'nothing'}: {error}") from None


# --- copies for the backlog (S7, S9) ---------------------------------------------------------------------------------


class Diversion(NamedTuple):
    """Payloads for one backlog queue each, in order, and which messages, by position, are in which."""

    payloads: tuple[Payload, ...]
    parts: Parts


def id_of(raw: AmqpAnnotatedMessage) -> object:
    found = raw.properties.message_id if raw.properties else None
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else found


def fit(raws: Sequence[AmqpAnnotatedMessage], path: str, limits: LinkLimits, at: datetime | None = None) -> Diversion:
    """Copies that the backlog takes, as few transfers as can be. MessageTooLargeForBacklogError, AliasInUseError."""
    copies = [_fitted(raw, path, limits.message, at) for raw in raws]
    if len(copies) == 1:
        return Diversion((outgoing_message(copies[0][0]),), Parts(((0,),), ()))
    groups, oversized = split_batch([size for _, size in copies], limits.batch, envelope=BATCH_ENVELOPE_BYTES)
    # Too large for a batch, but not for a message: alone.
    groups = (*groups, *((position,) for position in oversized))
    payloads = tuple(_payload([copies[position][0] for position in group], limits) for group in groups)
    return Diversion(payloads, Parts(groups, ()))


def _payload(raws: list[AmqpAnnotatedMessage], limits: LinkLimits) -> Payload:
    if len(raws) == 1:
        return outgoing_message(raws[0])
    return new_batch(raws, limits)


def _fitted(raw: AmqpAnnotatedMessage, path: str, limit: int, at: datetime | None) -> tuple[AmqpAnnotatedMessage, int]:
    made = diverted(raw, path, at)
    size = encoded_size(made)
    if size <= limit:
        return made, size
    packed = diverted(raw, path, at, packed=True)
    packed_size = encoded_size(packed)
    if packed_size <= limit:
        return packed, packed_size
    raise MessageTooLargeForBacklogError(id_of(raw), min(size, packed_size), limit)


def diverted(
    raw: AmqpAnnotatedMessage, path: str, at: datetime | None = None, *, packed: bool = False
) -> AmqpAnnotatedMessage:
    """The changed copy. `at` is the time it was scheduled for, in place of the message's own."""
    properties = raw.properties or AmqpMessageProperties()
    header = raw.header or AmqpMessageHeader()
    annotations = dict(raw.annotations or {})
    own = [annotations.pop(name, None) for name in (SCHEDULED_ENQUEUE_TIME, SCHEDULED_ENQUEUE_TIME.decode())]
    scheduled = at if at is not None else next((time for time in own if time is not None), None)
    sendable = divert(
        MessageFields(
            session_id=_text(properties.group_id),
            time_to_live=header.time_to_live,
            scheduled_enqueue_time=_milliseconds(scheduled),
            absolute_expiry_time=properties.absolute_expiry_time,
            application_properties=raw.application_properties or {},
        ),
        path,
        DEFLATE if packed else None,
    )
    made = copy.copy(raw)
    made.annotations = annotations or None
    made.header = AmqpMessageHeader(**{**dict(header.items()), "time_to_live": None})
    kept = {"group_id": None, "absolute_expiry_time": sendable.absolute_expiry_time}
    made.properties = AmqpMessageProperties(**{**dict(properties.items()), **kept})
    made.application_properties = {name: sdk_value(value) for name, value in sendable.application_properties.items()}
    if packed:
        set_data_body(made, compress_body(encoded_body(raw)))
    return made


def _text(value: Any) -> str | None:
    return value.decode("utf-8") if isinstance(value, bytes) else value


def _milliseconds(value: Any) -> int | None:
    if isinstance(value, datetime):
        # A naive one is UTC, as the SDK encodes it.
        aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return (aware - _EPOCH) // timedelta(milliseconds=1)
    return None if value is None else int(value)


# A batch holds each message as a data section: three bytes for its descriptor, then a binary's constructor and length.
SHORT_SECTION_BYTES: Final = 5
LONG_SECTION_BYTES: Final = 8
LONGEST_SHORT: Final = 255


class Parts(NamedTuple):
    """Groups of positions, in order, each within the limit; and the positions of messages too large for any."""

    groups: tuple[tuple[int, ...], ...]
    oversized: tuple[int, ...]


def section_size(size: int) -> int:
    """What an encoded message of this size takes in a batch."""
    return size + (SHORT_SECTION_BYTES if size <= LONGEST_SHORT else LONG_SECTION_BYTES)


def split_batch(sizes: Sequence[int], limit: int, *, envelope: int = 0) -> Parts:
    """As few parts as keep the order. `envelope` is what a batch takes beside its sections.

    A message that fits alone, but not as a section, goes alone: it needs no envelope.
    """
    groups: list[tuple[int, ...]] = []
    oversized: list[int] = []
    group: list[int] = []
    room = limit - envelope
    for position, size in enumerate(sizes):
        if size > limit:
            oversized.append(position)
            continue
        section = section_size(size)
        if section > room and group:
            groups.append(tuple(group))
            group, room = [], limit - envelope
        group.append(position)
        # Below zero after one that is larger than the room: nothing joins it.
        room -= section
    if group:
        groups.append(tuple(group))
    return Parts(tuple(groups), tuple(oversized))


class Tally(NamedTuple):
    """What became of a batch, by the ids of its messages: what PartialSendError tells when a part fails."""

    safe: tuple[object, ...]
    unsafe: tuple[object, ...]

    @property
    def partial(self) -> bool:
        """Some are safe and some are not; otherwise the part's own error, or success, tells it all."""
        return bool(self.safe) and bool(self.unsafe)


def tally(ids: Sequence[object], parts: Parts, taken: int) -> Tally:
    """After the first `taken` groups were taken and the next one failed, or none is left."""
    safe = {position for group in parts.groups[:taken] for position in group}
    return Tally(
        tuple(identity for position, identity in enumerate(ids) if position in safe),
        tuple(identity for position, identity in enumerate(ids) if position not in safe),
    )


PING_CONTENT_TYPE: Final = "application/vnd.ms-servicebus-ping"
PING_TIME_TO_LIVE: Final = timedelta(seconds=1)


def ping_message() -> ServiceBusMessage:
    """Empty, short-lived, and with a session id, so that it works on session entities."""
    return ServiceBusMessage(
        None, content_type=PING_CONTENT_TYPE, time_to_live=PING_TIME_TO_LIVE, session_id=str(uuid4())
    )
