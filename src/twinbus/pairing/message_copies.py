"""Make the messages that a pair sends in the application's place: copies for the backlog (S7, S9), and pings (G1).

A copy for the backlog carries the destination and the fields that the backlog queue must not see as application
properties (`backlog.message_format`). It is larger than the original. A copy that is too large for the link is
compressed; if it is still too large, MessageTooLargeForBacklogError says by how many bytes. A batch is split into as
few transfers as the limits of the link allow.

The application's objects are never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import uuid4

from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageHeader, AmqpMessageProperties

from twinbus.backlog import BATCH_ENVELOPE_BYTES, DEFLATE, MessageFields, compress_body, divert, split_batch
from twinbus.pairing.decide.send_flow import Diversion, DivertedTransfer
from twinbus.pairing.errors import MessageTooLargeForBacklogError
from twinbus.sdk import (
    LinkLimits,
    amqp_messages,
    encoded_body,
    encoded_size,
    new_batch,
    outgoing_message,
    sdk_value,
    set_data_body,
)

_SCHEDULED_ENQUEUE_TIME: Final = b"x-opt-scheduled-enqueue-time"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

PING_CONTENT_TYPE: Final = "application/vnd.ms-servicebus-ping"
PING_TIME_TO_LIVE: Final = timedelta(seconds=1)

Payload = ServiceBusMessage | ServiceBusMessageBatch


# --- the copies of one call ------------------------------------------------------------------------------------------

FitToLink = Callable[
    [tuple[AmqpAnnotatedMessage, ...], str, LinkLimits, datetime | None],
    tuple[DivertedTransfer, ...],
]


def fit_to_link(
    messages: tuple[AmqpAnnotatedMessage, ...], path: str, limits: LinkLimits, scheduled: datetime | None = None
) -> tuple[DivertedTransfer, ...]:
    """Return copies of the messages for entity `path`, in as few transfers as the limits of the link allow.

    `scheduled` replaces the messages' own scheduled time. Raises MessageTooLargeForBacklogError or AliasInUseError if
    one of the messages cannot be diverted.
    """
    copies = [_fitted(message, path, limits.message, scheduled) for message in messages]
    if len(copies) == 1:
        return (DivertedTransfer(outgoing_message(copies[0][0]), (0,)),)
    parts = split_batch([size for _, size in copies], limits.batch, envelope=BATCH_ENVELOPE_BYTES)
    # A message that is too large for a batch, but not for the link, goes alone.
    groups = (*parts.groups, *((position,) for position in parts.oversized))
    return tuple(
        DivertedTransfer(_payload([copies[position][0] for position in group], limits), group) for group in groups
    )


def next_payload(diversion: Diversion, limits: LinkLimits, *, fit: FitToLink = fit_to_link) -> Payload:
    """Return the payload that a link with these limits sends next. Makes all copies at the first call.

    Raises the errors that `fit_to_link` raises.
    """
    if not diversion.transfers:
        messages = tuple(amqp_messages(diversion.message))
        diversion.ids = tuple([id_of(message) for message in messages])
        diversion.transfers = fit(messages, diversion.path, limits, diversion.scheduled)
    payload: Payload = diversion.transfers[diversion.accepted].payload
    return payload


def id_of(message: AmqpAnnotatedMessage) -> object:
    """Return the message id. An id in bytes is returned as text."""
    found = message.properties.message_id if message.properties else None
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else found


def _payload(messages: list[AmqpAnnotatedMessage], limits: LinkLimits) -> Payload:
    return outgoing_message(messages[0]) if len(messages) == 1 else new_batch(messages, limits)


def _fitted(
    message: AmqpAnnotatedMessage, path: str, limit: int, scheduled: datetime | None
) -> tuple[AmqpAnnotatedMessage, int]:
    """Return a copy of at most `limit` bytes, and its size."""
    plain = copy_for_backlog(message, path, scheduled)
    size = encoded_size(plain)
    if size <= limit:
        return plain, size
    compressed = copy_for_backlog(message, path, scheduled, compress=True)
    compressed_size = encoded_size(compressed)
    if compressed_size <= limit:
        return compressed, compressed_size
    raise MessageTooLargeForBacklogError(id_of(message), min(size, compressed_size), limit)


# --- one copy (S7) ---------------------------------------------------------------------------------------------------


def copy_for_backlog(
    message: AmqpAnnotatedMessage, path: str, scheduled: datetime | None = None, *, compress: bool = False
) -> AmqpAnnotatedMessage:
    """Return the copy of a message for the backlog. `scheduled` replaces the message's own scheduled time."""
    properties = message.properties or AmqpMessageProperties()
    header = message.header or AmqpMessageHeader()
    annotations = dict(message.annotations or {})
    own = [annotations.pop(name, None) for name in (_SCHEDULED_ENQUEUE_TIME, _SCHEDULED_ENQUEUE_TIME.decode())]
    due = scheduled if scheduled is not None else next((time for time in own if time is not None), None)
    fields = divert(
        MessageFields(
            session_id=_text(properties.group_id),
            time_to_live=header.time_to_live,
            scheduled_enqueue_time=_milliseconds(due),
            absolute_expiry_time=properties.absolute_expiry_time,
            application_properties=message.application_properties or {},
        ),
        path,
        DEFLATE if compress else None,
    )
    made = copy.copy(message)
    made.annotations = annotations or None
    made.header = AmqpMessageHeader(**{**dict(header.items()), "time_to_live": None})
    changed = {"group_id": None, "absolute_expiry_time": fields.absolute_expiry_time}
    made.properties = AmqpMessageProperties(**{**dict(properties.items()), **changed})
    made.application_properties = {name: sdk_value(value) for name, value in fields.application_properties.items()}
    if compress:
        set_data_body(made, compress_body(encoded_body(message)))
    return made


def _text(value: Any) -> str | None:
    return value.decode("utf-8") if isinstance(value, bytes) else value


def _milliseconds(value: Any) -> int | None:
    if isinstance(value, datetime):
        # The SDK encodes a naive time as UTC.
        aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return (aware - _EPOCH) // timedelta(milliseconds=1)
    return None if value is None else int(value)


# --- pings (G1) ------------------------------------------------------------------------------------------------------


def ping_message() -> ServiceBusMessage:
    """Return an empty message that expires after a second. It has a session id, for entities that require one."""
    return ServiceBusMessage(
        None, content_type=PING_CONTENT_TYPE, time_to_live=PING_TIME_TO_LIVE, session_id=str(uuid4())
    )
