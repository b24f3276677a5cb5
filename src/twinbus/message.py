"""A message as a caller makes it: plain values, in the words of azure-servicebus. Its encoding is not known here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

MessageId = str | UUID | bytes | int


class BodyType(Enum):
    """The kinds of body that AMQP knows."""

    DATA = "data"
    SEQUENCE = "sequence"
    VALUE = "value"


@dataclass(slots=True)
class Message:
    """One message to send.

    The body is bytes, text (sent as UTF-8) or a list of bytes with DATA; a list of lists with SEQUENCE; anything
    AMQP has a type for with VALUE. Values of properties and annotations are plain Python or AMQP types.
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
    scheduled_enqueue_time: datetime | None = None  # aware, or taken as UTC
    application_properties: Mapping[str, Any] | None = None
    annotations: Mapping[str, Any] | None = None
    delivery_annotations: Mapping[str, Any] | None = None
    footer: Mapping[str, Any] | None = None
    priority: int | None = None
    durable: bool | None = None
