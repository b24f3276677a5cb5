"""A message as a row of Spark, and a row as a message: the columns, their types, and what each stands for."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from twinbus.connect import ReceivedMessage
from twinbus.errors import CallerError
from twinbus.message import BodyType, Message

# Name, type in Spark's words, and how it is taken from a received message.
_READ: Final = (
    ("sequence_number", "bigint"),
    ("enqueued_time", "timestamp"),
    ("state", "string"),
    ("message_id", "string"),
    ("session_id", "string"),
    ("subject", "string"),
    ("content_type", "string"),
    ("correlation_id", "string"),
    ("to", "string"),
    ("reply_to", "string"),
    ("reply_to_session_id", "string"),
    ("partition_key", "string"),
    ("time_to_live", "bigint"),
    ("scheduled_enqueue_time", "timestamp"),
    ("delivery_count", "int"),
    ("dead_letter_reason", "string"),
    ("dead_letter_error_description", "string"),
    ("application_properties", "map<string,string>"),
    ("body_type", "string"),
    ("body", "binary"),
)
READ_SCHEMA: Final = ", ".join(f"`{name}` {kind}" for name, kind in _READ)
RAW_COLUMN: Final = "`raw` binary"

# What a writer takes; of the columns that reading gives, those that only the broker sets are not among them.
_WRITTEN: Final[Mapping[str, tuple[str, ...]]] = {
    "entity": ("string",),
    "message_id": ("string",),
    "session_id": ("string",),
    "subject": ("string",),
    "content_type": ("string",),
    "correlation_id": ("string",),
    "to": ("string",),
    "reply_to": ("string",),
    "reply_to_session_id": ("string",),
    "partition_key": ("string",),
    "time_to_live": ("bigint", "int"),
    "scheduled_enqueue_time": ("timestamp",),
    "application_properties": ("map",),
    "body": ("binary", "string"),
}
_PLAIN: Final = tuple(
    name
    for name in _WRITTEN
    if name not in {"entity", "time_to_live", "scheduled_enqueue_time", "application_properties", "body"}
)


class ColumnError(CallerError, ValueError):
    """A column that a writer does not take, or a row that cannot be sent."""


def row_of(message: ReceivedMessage, include_raw: bool) -> tuple[Any, ...]:
    """In the order of READ_SCHEMA."""
    life = message.time_to_live
    row = (
        message.sequence_number,
        message.enqueued_time,
        message.state.name.lower(),
        _text(message.message_id),
        message.session_id,
        message.subject,
        message.content_type,
        _text(message.correlation_id),
        message.to,
        message.reply_to,
        message.reply_to_session_id,
        message.partition_key,
        None if life is None else life // timedelta(milliseconds=1),
        message.scheduled_enqueue_time,
        message.delivery_count,
        message.dead_letter_reason,
        message.dead_letter_error_description,
        {str(name): _text(value) for name, value in message.application_properties.items()},
        message.body_type.value,
        _body(message),
    )
    return (*row, message.raw) if include_raw else row


def _body(message: ReceivedMessage) -> bytes:
    """Data as it is; text as UTF-8; any other AMQP value as JSON."""
    body = message.body
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    text = body if isinstance(body, str) else json.dumps(body, default=_text, ensure_ascii=False)
    return text.encode()


def _text(value: Any) -> str | None:
    match value:
        case None:
            return None
        case bool():
            return "true" if value else "false"
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case datetime():
            return value.astimezone(UTC).isoformat()
        case UUID() | str() | int() | float():
            return str(value)
        case _:
            return json.dumps(value, default=str, ensure_ascii=False)


# --- rows to messages ------------------------------------------------------------------------------------------------


def check_columns(columns: Sequence[tuple[str, str]], has_entity: bool) -> None:
    """Before anything is sent: every column is known and of a type that can be sent."""
    names = [name for name, _ in columns]
    for name, kind in columns:
        wanted = _WRITTEN.get(name)
        if wanted is None:
            raise ColumnError(
                f"servicebus cannot write the column {name!r}; it takes {', '.join(_WRITTEN)}. Drop or rename it."
            )
        if not kind.startswith(wanted):
            raise ColumnError(f"the column {name!r} is of type {kind}; servicebus takes {' or '.join(wanted)}")
    if "entity" not in names and not has_entity:
        raise ColumnError("say where to: a column entity, or the option entity")


class Written:
    """The messages of one task's rows. A row without a message id gets one that a repeated attempt gives it again."""

    def __init__(self, seed: str, entity: str | None) -> None:
        self._seed = seed
        self._entity = entity
        self._alike: Counter[bytes] = Counter()

    def messages(self, rows: Iterator[Any]) -> Iterator[tuple[str, Message]]:
        for row in rows:
            values = row.asDict()
            entity = values.get("entity") or self._entity
            if not entity:
                raise ColumnError("a row's entity is null, and there is no option entity for such rows")
            yield entity, self._message(values)

    def _message(self, values: Mapping[str, Any]) -> Message:
        body, life, properties = values.get("body"), values.get("time_to_live"), values.get("application_properties")
        made = Message(
            b"" if body is None else bytes(body) if isinstance(body, bytearray) else body,
            body_type=BodyType.DATA,
            time_to_live=None if life is None else timedelta(milliseconds=life),
            scheduled_enqueue_time=_aware(values.get("scheduled_enqueue_time")),
            application_properties=properties or None,
            **{name: values[name] for name in _PLAIN if values.get(name) is not None},
        )
        if made.message_id is None:
            made.message_id = self._id(values)
        return made

    def _id(self, values: Mapping[str, Any]) -> str:
        content = hashlib.sha256(repr(sorted(values.items())).encode()).digest()
        self._alike[content] += 1
        return hashlib.sha256(f"{self._seed}/{self._alike[content]}/".encode() + content).hexdigest()[:32]


def _aware(instant: datetime | None) -> datetime | None:
    """Spark hands out instants in the machine's own zone, without saying so."""
    return None if instant is None else instant.astimezone(UTC)
