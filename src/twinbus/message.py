"""A message to send, with plain Python values and the field names of azure-servicebus, for `twinbus.connect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

MessageId = str | UUID | bytes | int


class BodyType(Enum):
    """The three kinds of body of an AMQP message."""

    DATA = "data"
    SEQUENCE = "sequence"
    VALUE = "value"


@dataclass(slots=True)
class Message:
    """One message to send.

    The body is bytes, text (sent as UTF-8) or a list of bytes for DATA; a list of lists for SEQUENCE; any value with an
    AMQP type for VALUE. Values of properties and annotations are plain Python values or types of `twinbus.values`.
    """

    body: Any = b""
    _: KW_ONLY
    body_type: BodyType = BodyType.DATA
    message_id: MessageId | None = None
    session_id: str | None = None
    subject: str | None = None
    content_type: str | None = None
    content_encoding: str | None = None
    correlation_id: MessageId | None = None
    to: str | None = None
    reply_to: str | None = None
    reply_to_session_id: str | None = None
    partition_key: str | None = None
    user_id: bytes | None = None
    time_to_live: timedelta | None = None
    scheduled_enqueue_time: datetime | None = None  # a datetime without a time zone is UTC
    application_properties: Mapping[str, Any] | None = None
    annotations: Mapping[str, Any] | None = None
    delivery_annotations: Mapping[str, Any] | None = None
    footer: Mapping[str, Any] | None = None
    priority: int | None = None
    durable: bool | None = None
