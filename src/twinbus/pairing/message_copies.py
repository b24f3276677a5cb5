"""Make the messages that a pair sends in the application's place: copies for the backlog (S7, S9), and pings (G1).

A copy for the backlog carries the destination and the fields that the backlog queue must not see as application
properties (`backlog.message_format`). It is larger than the original. A copy that the link does not take is compressed;
if it still does not fit, MessageTooLargeForBacklogError says by how much. A batch is split into as few transfers as the
link takes.

The application's objects are never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import uuid4

from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageHeader, AmqpMessageProperties

from twinbus.backlog import DEFLATE, MessageFields, compress_body, divert
from twinbus.pairing.decide.batch_split import split_batch
from twinbus.pairing.errors import MessageTooLargeForBacklogError
from twinbus.sdk import (
    LinkLimits,
    encoded_body,
    encoded_size,
    new_batch,
    outgoing_message,
    sdk_value,
    set_data_body,
)

BATCH_ENVELOPE_BYTES: Final = 1024
"""What a batch takes beside its messages: the ids of the first message, each of at most 128 characters."""

_SCHEDULED_ENQUEUE_TIME: Final = b"x-opt-scheduled-enqueue-time"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

PING_CONTENT_TYPE: Final = "application/vnd.ms-servicebus-ping"
PING_TIME_TO_LIVE: Final = timedelta(seconds=1)

Payload = ServiceBusMessage | ServiceBusMessageBatch


# --- the copies of one call ------------------------------------------------------------------------------------------


class Transfer(NamedTuple):
    """One payload for a backlog queue. `positions` are those of its messages in the call."""

    payload: Payload
    positions: tuple[int, ...]


FitToLink = Callable[
    [tuple[AmqpAnnotatedMessage, ...], str, LinkLimits, datetime | None],
    tuple[Transfer, ...],
]


def fit_to_link(
    messages: tuple[AmqpAnnotatedMessage, ...], path: str, limits: LinkLimits, scheduled: datetime | None = None
) -> tuple[Transfer, ...]:
    """Return copies of the messages for entity `path`, in as few transfers as a link with these limits takes.

    `scheduled` replaces the messages' own scheduled time. Raises MessageTooLargeForBacklogError or AliasInUseError if
    one of the messages cannot be diverted.
    """
    copies = [_fitted(message, path, limits.message, scheduled) for message in messages]
    if len(copies) == 1:
        return (Transfer(outgoing_message(copies[0][0]), (0,)),)
    parts = split_batch([size for _, size in copies], limits.batch, envelope=BATCH_ENVELOPE_BYTES)
    # A message that is too large for a batch, but not for the link, goes alone.
    groups = (*parts.groups, *((position,) for position in parts.oversized))
    return tuple(Transfer(_payload([copies[position][0] for position in group], limits), group) for group in groups)


class BacklogCopies:
    """The copies of one call's messages (`send_flow.DivertedCopies`). The first link that sends them fits them.

    Other queues of the pair have the same limits, so the copies are not made again for another link.
    """

    def __init__(
        self,
        messages: Sequence[AmqpAnnotatedMessage],
        path: str,
        scheduled: datetime | None = None,
        *,
        fit: FitToLink = fit_to_link,
    ) -> None:
        self._messages = tuple(messages)
        self._path = path
        self._scheduled = scheduled
        self._fit = fit
        self._transfers: tuple[Transfer, ...] | None = None
        self._accepted = 0

    def next_payload(self, limits: LinkLimits) -> Payload:
        """Return the payload of the current transfer. Raises what `fit_to_link` raises."""
        if self._transfers is None:
            self._transfers = self._fit(self._messages, self._path, limits, self._scheduled)
        return self._transfers[self._accepted].payload

    def accept_transfer(self) -> int:
        """Mark the current transfer as accepted by a queue. Returns its number of messages."""
        assert self._transfers is not None
        self._accepted += 1
        return len(self._transfers[self._accepted - 1].positions)

    @property
    def done(self) -> bool:
        """Whether every transfer was accepted."""
        return self._transfers is not None and self._accepted == len(self._transfers)

    @property
    def ids(self) -> list[object]:
        return [id_of(message) for message in self._messages]

    def split_ids(self) -> tuple[list[object], list[object]]:
        """Return the ids of the accepted messages, and of the others, each in the order of the call."""
        transfers = (self._transfers or ())[: self._accepted]
        accepted = {position for transfer in transfers for position in transfer.positions}
        ids = list(enumerate(self.ids))
        return [one for at, one in ids if at in accepted], [one for at, one in ids if at not in accepted]


def id_of(message: AmqpAnnotatedMessage) -> object:
    """Return the message id; one in bytes as text."""
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
