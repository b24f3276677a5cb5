"""Messages as rows of Spark, and rows as messages: the columns, their types and their values.

Every message becomes a row, also if parts of the message cannot be decoded: a stream that failed on a message would
fail on the same message after each restart. A column whose value cannot be decoded, or does not fit the column's type,
is null. The column `error` then names the columns and the reasons, and `raw` has the encoded message.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from math import isfinite
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from twinbus.amqp import (
    MESSAGE_ANNOTATIONS,
    AmqpError,
    decode,
    read_map_header,
    read_routing_fields,
    section_at,
    skip,
)
from twinbus.connect import MessageState, ReceivedMessage
from twinbus.errors import CallerError
from twinbus.message import BodyType, Message
from twinbus.values import Described

READ_SCHEMA: Final = StructType(
    [
        StructField("sequence_number", LongType()),
        StructField("enqueued_time", TimestampType()),
        StructField("state", StringType()),
        StructField("message_id", StringType()),
        StructField("session_id", StringType()),
        StructField("subject", StringType()),
        StructField("content_type", StringType()),
        StructField("correlation_id", StringType()),
        StructField("to", StringType()),
        StructField("reply_to", StringType()),
        StructField("reply_to_session_id", StringType()),
        StructField("partition_key", StringType()),
        StructField("time_to_live", LongType()),
        StructField("scheduled_enqueue_time", TimestampType()),
        StructField("delivery_count", IntegerType()),
        StructField("dead_letter_reason", StringType()),
        StructField("dead_letter_error_description", StringType()),
        StructField("application_properties", MapType(StringType(), StringType())),
        StructField("body_type", StringType()),
        StructField("body", BinaryType()),
        StructField("raw", BinaryType()),
        StructField("error", StringType()),
    ]
)
"""The columns that a reader returns."""
_READ: Final[Mapping[str, DataType]] = {field.name: field.dataType for field in READ_SCHEMA}

# Columns that a writer sends, with their types. It ignores the other columns of READ_SCHEMA, which the broker sets, so
# that rows can be written as they were read.
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
_ROWS_TOGETHER: Final = 500


class ColumnError(CallerError, ValueError):
    """The source has no such column, a writer does not accept a column, or it cannot send a row."""


# --- messages to rows ------------------------------------------------------------------------------------------------

_SEQUENCE_NUMBER: Final = "x-opt-sequence-number"
_ENQUEUED: Final = "x-opt-enqueued-time"
_SCHEDULED: Final = "x-opt-scheduled-enqueue-time"
_PARTITION_KEY: Final = "x-opt-partition-key"
_STATE: Final = "x-opt-message-state"
_LOCKED_UNTIL: Final = "x-opt-locked-until"
_BROKERS: Final = frozenset((_SEQUENCE_NUMBER, _ENQUEUED, _SCHEDULED, _PARTITION_KEY, _STATE, _LOCKED_UNTIL))
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class MessageMarks:
    """The values of a message that a stream read needs before it makes a row of the message."""

    number: int | None
    """The sequence number; None if it cannot be decoded."""
    enqueued: int | None
    """Enqueued time in ms."""
    state: MessageState | None
    """None if the broker reports a state that Twinbus does not know."""
    locked_until: int | None
    """End of the receiver's lock in ms."""

    @property
    def is_active(self) -> bool:
        return self.state is MessageState.ACTIVE

    @property
    def enqueued_time(self) -> datetime | None:
        """The value of the column `enqueued_time`."""
        try:
            return _instant(self.enqueued)
        except ValueError:
            return None


def marks_of(message: ReceivedMessage) -> MessageMarks:
    found = _broker_annotations(message.raw)
    number, enqueued, locked_until = (found.get(name) for name in (_SEQUENCE_NUMBER, _ENQUEUED, _LOCKED_UNTIL))
    return MessageMarks(
        number if isinstance(number, int) else None,
        enqueued if isinstance(enqueued, int) else None,
        _state(found),
        locked_until if isinstance(locked_until, int) else None,
    )


def session_of(message: ReceivedMessage) -> str | None:
    """Returns the session of a message; None if it has none, or if it cannot be decoded."""
    try:
        return read_routing_fields(message.raw).group_id
    except AmqpError:
        return None


def _state(annotations: Mapping[str, Any]) -> MessageState | None:
    try:
        return MessageState(annotations.get(_STATE, 0))
    except ValueError:
        return None


def _broker_annotations(raw: bytes) -> dict[str, Any]:
    """Returns the annotations that the broker sets, without those that cannot be decoded.

    Decodes no other annotations: even if an annotation of the sender cannot be decoded, the sequence number must be
    returned.
    """
    found: dict[str, Any] = {}
    try:
        pos = 0
        while pos < len(raw):
            code, start, pos = section_at(raw, pos)
            if code == MESSAGE_ANNOTATIONS:
                count, at = read_map_header(raw, start)
                for _ in range(count >> 1):
                    at = _take_annotation(raw, at, found)
                break
    except (AmqpError, IndexError):
        pass  # the column `error` of the row names the broken section
    return found


def _take_annotation(raw: bytes, key: int, found: dict[str, Any]) -> int:
    value = skip(raw, key)
    end = skip(raw, value)
    try:
        name = decode(raw, key)[0]
        if isinstance(name, str) and name in _BROKERS:
            found[str(name)] = decode(raw, value)[0]
    except AmqpError:
        pass  # not an annotation of the broker
    return end


def check_read_schema(schema: StructType) -> None:
    """Raises ColumnError if a schema that a user wants to read has a column that the source does not have."""
    for field in schema:
        kind = _READ.get(field.name)
        if kind is None:
            raise ColumnError(f"servicebus has no column {field.name!r}; it has {', '.join(_READ)}")
        if field.dataType != kind:
            wanted, given = kind.simpleString(), field.dataType.simpleString()
            raise ColumnError(f"the column {field.name!r} of servicebus is of type {wanted}, not {given}")
        if not field.nullable:
            raise ColumnError(f"the column {field.name!r} of servicebus can be null: remove NOT NULL from the schema")


def row_of(message: ReceivedMessage, include_raw: bool, names: Sequence[str] = tuple(_READ)) -> tuple[Any, ...]:
    """Returns the values of a message for these columns. No content of a message raises an error."""
    annotations = _broker_annotations(message.raw)
    values: dict[str, Any] = {}
    failures: dict[str, list[str]] = {}
    for name in names:
        take = _COLUMNS.get(name)
        if take is None:  # the columns `raw` and `error`
            continue
        try:
            values[name] = take(message, annotations)
        except MemoryError:
            raise
        except Exception as error:  # any error that the content of a message can cause: the row records it
            failures.setdefault(str(error) or type(error).__name__, []).append(name)
    if _SEQUENCE_NUMBER not in annotations:
        failures.setdefault("the broker's annotations cannot be read", []).append("sequence_number")
    if include_raw or failures:
        values["raw"] = message.raw
    if failures:
        values["error"] = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in failures.items())
    return tuple(map(values.get, names))


def record_batches(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yields rows as Arrow record batches. Spark itself takes ten times longer to make these of rows."""
    remaining = iter(rows)
    while some := list(islice(remaining, _ROWS_TOGETHER)):
        columns = zip(schema, zip(*some, strict=True), strict=True)
        yield pa.RecordBatch.from_arrays([_arrow(values, field.type) for field, values in columns], schema=schema)


def _arrow(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_map(kind):
        values = [None if value is None else list(value.items()) for value in values]
    return pa.array(values, type=kind)


def _whole(value: Any, bits: int) -> int | None:
    """Returns an integer for a column of `bits` bits. Raises ValueError if the value is no integer or too large."""
    if value is None:
        return None
    if not isinstance(value, int):
        raise ValueError(f"a {type(value).__name__} where a whole number is expected")
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError(f"{int(value)} is out of the range of the column")
    return int(value)


def _instant(value: Any) -> datetime | None:
    millis = _whole(value, 64)
    if millis is None:
        return None
    try:
        return _EPOCH + timedelta(milliseconds=millis)
    except OverflowError:
        raise ValueError(f"{millis} ms since 1970 is not within the years 1 to 9999") from None


def _properties(message: ReceivedMessage, annotations: Mapping[str, Any]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for key, value in message.application_properties.items():
        name = _key(key)
        if name in found:
            raise ValueError(f"two keys are both written as {name!r}")
        found[name] = _text(value)
    return found


def _body(message: ReceivedMessage, annotations: Mapping[str, Any]) -> bytes:
    """Returns the body as bytes: data unchanged, text as UTF-8, any other AMQP value as JSON."""
    body = message.body
    if type(body) in {bytes, bytearray, memoryview}:
        return bytes(body)
    return (str(body) if isinstance(body, str) else _json(body)).encode()


# For each column, the function that returns its value from a received message and the broker's annotations.
_COLUMNS: Final[Mapping[str, Callable[[ReceivedMessage, Mapping[str, Any]], Any]]] = {
    "sequence_number": lambda _, annotations: _whole(annotations.get(_SEQUENCE_NUMBER), 64),
    "enqueued_time": lambda _, annotations: _instant(annotations.get(_ENQUEUED)),
    "state": lambda _, annotations: MessageState(annotations.get(_STATE, 0)).name.lower(),
    "message_id": lambda message, _: _text(message.message_id),
    "session_id": lambda message, _: _text(message.session_id),
    "subject": lambda message, _: _text(message.subject),
    "content_type": lambda message, _: _text(message.content_type),
    "correlation_id": lambda message, _: _text(message.correlation_id),
    "to": lambda message, _: _text(message.to),
    "reply_to": lambda message, _: _text(message.reply_to),
    "reply_to_session_id": lambda message, _: _text(message.reply_to_session_id),
    "partition_key": lambda _, annotations: _text(annotations.get(_PARTITION_KEY)),
    "time_to_live": lambda message, _: _whole(message.header.ttl, 64),
    "scheduled_enqueue_time": lambda _, annotations: _instant(annotations.get(_SCHEDULED)),
    "delivery_count": lambda message, _: _whole(message.delivery_count, 32),
    "dead_letter_reason": lambda message, _: _text(message.dead_letter_reason),
    "dead_letter_error_description": lambda message, _: _text(message.dead_letter_error_description),
    "application_properties": _properties,
    "body_type": lambda message, _: message.body_type.value,
    "body": _body,
}


# --- AMQP values as text ---------------------------------------------------------------------------------------------


def _text(value: Any) -> str | None:
    """Returns an AMQP value as text: bytes and decimals in hexadecimal, a compound value as JSON."""
    match value:
        case None:
            return None
        case bool():
            return "true" if value else "false"
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case int():
            return str(int(value))
        case UUID() | str() | float():
            return str(value)
        case _:
            return _json(value)


def _json(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    """Returns any AMQP value as a value of the types that JSON has.

    Bytes and decimals are hexadecimal text, UUIDs are text, timestamps are milliseconds, NaN and the infinities are
    text, arrays are lists, and a described value is an object of `descriptor` and `value`.
    """
    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if isfinite(value) else str(float(value))
        case str():
            return str(value)
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case Described():
            return {"descriptor": _plain(value.descriptor), "value": _plain(value.value)}
        case Mapping():
            return _plain_map(value)
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return str(value)


def _plain_map(entries: Mapping[Any, Any]) -> dict[str, Any] | list[list[Any]]:
    """Returns a map as an object with text keys; as a list of [key, value] if two keys would have the same text."""
    texts = [_key(key) for key in entries]
    if len(set(texts)) < len(texts):
        return [[_plain(key), _plain(item)] for key, item in entries.items()]
    return {text: _plain(item) for text, item in zip(texts, entries.values(), strict=True)}


def _key(key: Any) -> str:
    text = _text(key)
    return "null" if text is None else text


# --- rows to messages ------------------------------------------------------------------------------------------------


def check_written_schema(schema: StructType, has_entity: bool) -> None:
    """Raises ColumnError if a column is unknown or has a type that cannot be sent. Call it before sending."""
    for field in schema:
        name, kind, wanted = field.name, field.dataType.simpleString(), _WRITTEN.get(field.name)
        if wanted is None and name not in _READ:
            raise ColumnError(
                f"servicebus cannot write the column {name!r}; it takes {', '.join(_WRITTEN)}. Drop or rename it."
            )
        if wanted is not None and not kind.startswith(wanted):
            raise ColumnError(f"the column {name!r} is of type {kind}; servicebus takes {' or '.join(wanted)}")
    if "entity" not in schema.names and not has_entity:
        raise ColumnError("the destination is missing: add a column entity, or set the option entity")


class RowMessages:
    """Makes messages of the rows of one task.

    A row without a message id gets an id that is computed from its content, so that a repeated task gives the same id.
    """

    def __init__(self, seed: str, entity: str | None) -> None:
        self._seed = seed
        self._entity = entity
        self._alike: Counter[bytes] = Counter()

    def messages(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, Message]]:
        """Yields the message of each row, with the entity that it is sent to."""
        for batch in batches:
            sent = batch.select([name for name in batch.schema.names if name in _WRITTEN])
            for values in sent.to_pylist():
                entity = values.get("entity") or self._entity
                if not entity:
                    raise ColumnError("a row's entity is null, and there is no option entity for such rows")
                yield entity, self._message(values)

    def _message(self, values: Mapping[str, Any]) -> Message:
        body, life, properties = values.get("body"), values.get("time_to_live"), values.get("application_properties")
        made = Message(
            b"" if body is None else body,
            body_type=BodyType.DATA,
            time_to_live=None if life is None else timedelta(milliseconds=life),
            scheduled_enqueue_time=_aware(values.get("scheduled_enqueue_time")),
            application_properties=dict(properties) if properties else None,
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
    """Returns a time in UTC. Spark passes times in the time zone of its session."""
    return None if instant is None else instant.astimezone(UTC)
