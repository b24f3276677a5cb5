"""A message as it was received: the bytes untouched, each field read from them when it is asked for.

Holds where the message came from, so that it can be settled; how that is done is the receiver's.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any
from uuid import UUID

from twinbus.amqp import Header, Properties, Sections, split_sections
from twinbus.connect.message_encoding import to_datetime
from twinbus.message import BodyType, MessageId

if TYPE_CHECKING:
    from twinbus.connect.receiver import ReceiverLink


class MessageState(IntEnum):
    ACTIVE = 0
    DEFERRED = 1
    SCHEDULED = 2


class ReceivedMessage:
    """`raw` is the encoded message. `is_settled` is true once it was settled, or when it came so."""

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
        link: ReceiverLink | None = None,
        delivery_id: int = 0,
        is_settled: bool = False,
    ) -> None:
        self.raw = raw
        self.link = link  # None: it came through `$management`, or its link is done with it; it is settled there
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
        """Bytes (data sections joined), a list of lists, or the value; empty bytes where there is no body."""
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

    # --- what the broker says ----------------------------------------------------------------------------------

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
        """As delivered, or as last renewed."""
        return self._instant("x-opt-locked-until") if self._locked_until is None else to_datetime(self._locked_until)

    @property
    def lock_token(self) -> UUID | None:
        return UUID(bytes_le=self._token) if self._token is not None and len(self._token) == 16 else None

    @property
    def delivery_count(self) -> int:
        """How many deliveries failed before this one."""
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

    # --- what the sender said ----------------------------------------------------------------------------------

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

    def renewed(self, locked_until: int) -> None:
        """The lock was renewed, until this instant in ms."""
        self._locked_until = locked_until

    def _instant(self, name: str) -> datetime | None:
        value = self.annotations.get(name)
        return None if value is None else to_datetime(value)
