"""A received message: its unchanged bytes, and its fields. A field is decoded when a caller first reads the field.

The message also has the link that delivered it and its delivery id, with which the receiver settles the message.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any
from uuid import UUID

from twinbus.amqp import Header, Properties, Sections, split_sections
from twinbus.connect.link_session import LinkSession
from twinbus.connect.message_encoding import to_datetime
from twinbus.message import BodyType, MessageId


class MessageState(IntEnum):
    """State of a message in its queue, as the broker reports it."""

    ACTIVE = 0
    DEFERRED = 1
    SCHEDULED = 2


class ReceivedMessage:
    """One received or peeked message.

    `raw` is the encoded message. `is_settled` is true if the message is settled, or was delivered without a lock.
    """

    __slots__ = (
        "_annotations",
        "_application_properties",
        "_locked_until",
        "_properties",
        "_sections",
        "_token",
        "delivery_id",
        "is_settled",
        "link",
        "raw",
    )

    def __init__(
        self,
        raw: bytes,
        token: bytes | None,
        link: LinkSession | None = None,
        delivery_id: int = 0,
        is_settled: bool = False,
    ) -> None:
        self.raw = raw
        # None: the message came through `$management`, or its delivery has ended on the link. The receiver then settles
        # the message by its lock token.
        self.link = link
        self.delivery_id = delivery_id
        self.is_settled = is_settled
        self._token = token
        self._sections: Sections | None = None
        self._annotations: dict[Any, Any] | None = None
        self._properties: Properties | None = None
        self._application_properties: dict[str, Any] | None = None
        self._locked_until: int | None = None

    def __repr__(self) -> str:
        return f"ReceivedMessage(sequence_number={self.sequence_number}, message_id={self.message_id!r})"

    # --- sections, each decoded once ---------------------------------------------------------------------------

    @property
    def sections(self) -> Sections:
        if self._sections is None:
            self._sections = split_sections(self.raw)
        return self._sections

    @property
    def annotations(self) -> dict[Any, Any]:
        if self._annotations is None:
            self._annotations = self.sections.message_annotations
        return self._annotations

    @property
    def properties(self) -> Properties:
        if self._properties is None:
            self._properties = self.sections.properties
        return self._properties

    @property
    def application_properties(self) -> dict[str, Any]:
        if self._application_properties is None:
            self._application_properties = self.sections.application_properties
        return self._application_properties

    @property
    def header(self) -> Header:
        return self.sections.header

    @property
    def delivery_annotations(self) -> dict[Any, Any]:
        return self.sections.delivery_annotations

    @property
    def footer(self) -> dict[Any, Any]:
        return self.sections.footer

    # --- the body ----------------------------------------------------------------------------------------------

    @property
    def body_type(self) -> BodyType:
        return BodyType(self.sections.body_kind or "data")

    @property
    def body(self) -> Any:
        """The body: the data sections joined into bytes, a list of sequences, or the value; b"" if there is no body."""
        match self.sections.body_kind:
            case "data":
                parts = self.sections.data
                return parts[0] if len(parts) == 1 else b"".join(parts)
            case "sequence":
                return self.sections.sequences
            case "value":
                return self.sections.value
            case _:
                return b""

    # --- set by the broker -------------------------------------------------------------------------------------

    @property
    def sequence_number(self) -> int | None:
        value = self.annotations.get("x-opt-sequence-number")
        return None if value is None else int(value)

    @property
    def enqueued_sequence_number(self) -> int | None:
        value = self.annotations.get("x-opt-enqueue-sequence-number")
        return None if value is None else int(value)

    @property
    def enqueued_time(self) -> datetime | None:
        return self._instant("x-opt-enqueued-time")

    @property
    def scheduled_enqueue_time(self) -> datetime | None:
        return self._instant("x-opt-scheduled-enqueue-time")

    @property
    def locked_until(self) -> datetime | None:
        """The time at which the lock expires, as the delivery or the last renewal set it."""
        return self._instant("x-opt-locked-until") if self._locked_until is None else to_datetime(self._locked_until)

    @property
    def lock_token(self) -> UUID | None:
        return UUID(bytes_le=self._token) if self._token is not None and len(self._token) == 16 else None

    @property
    def delivery_count(self) -> int:
        """Number of deliveries that failed before this one."""
        return self.header.delivery_count or 0

    @property
    def state(self) -> MessageState:
        return MessageState(self.annotations.get("x-opt-message-state", 0))

    @property
    def partition_key(self) -> str | None:
        return self.annotations.get("x-opt-partition-key")

    @property
    def dead_letter_source(self) -> str | None:
        return self.annotations.get("x-opt-deadletter-source")

    @property
    def dead_letter_reason(self) -> str | None:
        return self.application_properties.get("DeadLetterReason")

    @property
    def dead_letter_error_description(self) -> str | None:
        return self.application_properties.get("DeadLetterErrorDescription")

    @property
    def time_to_live(self) -> timedelta | None:
        ttl = self.header.ttl
        return None if ttl is None else timedelta(milliseconds=ttl)

    # --- set by the sender -------------------------------------------------------------------------------------

    @property
    def message_id(self) -> MessageId | None:
        return self.properties.message_id

    @property
    def session_id(self) -> str | None:
        return self.properties.group_id

    @property
    def subject(self) -> str | None:
        return self.properties.subject

    @property
    def content_type(self) -> str | None:
        return self.properties.content_type

    @property
    def correlation_id(self) -> MessageId | None:
        return self.properties.correlation_id

    @property
    def to(self) -> str | None:
        return self.properties.to

    @property
    def reply_to(self) -> str | None:
        return self.properties.reply_to

    @property
    def reply_to_session_id(self) -> str | None:
        return self.properties.reply_to_group_id

    def lock_renewed(self, locked_until: int) -> None:
        """Record that the lock was renewed until this instant, in ms since the epoch."""
        self._locked_until = locked_until

    def _instant(self, name: str) -> datetime | None:
        value = self.annotations.get(name)
        return None if value is None else to_datetime(value)
