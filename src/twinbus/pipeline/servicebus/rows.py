"""Messages as rows of Spark, and rows as messages: the columns, their types and their values.

Every message becomes a row, also if parts of the message cannot be decoded: a stream that failed on a message would
fail on the same message after each restart. A column whose value cannot be decoded, or does not fit the column's type,
is null. The column `error` then names the columns and the reasons, and `raw` has the encoded message.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from twinbus.connect import MessageState, ReceivedMessage
from twinbus.errors import CallerError
from twinbus.message import BodyType, Message
from twinbus.pipeline.servicebus.fast_columns import column
from twinbus.pipeline.servicebus.fast_rows import fast_row
from twinbus.pipeline.servicebus.message_marks import (
    ENQUEUED,
    PARTITION_KEY,
    SCHEDULED,
    SEQUENCE_NUMBER,
    STATE,
    STATE_TEXTS,
    MessageMarks,
    broker_annotations,
    microseconds,
)
from twinbus.pipeline.servicebus.value_texts import json_of, property_texts, text_of

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
WRITTEN_COLUMNS: Final[Mapping[str, tuple[type[DataType], ...]]] = {
    "entity": (StringType,),
    "message_id": (StringType,),
    "session_id": (StringType,),
    "subject": (StringType,),
    "content_type": (StringType,),
    "correlation_id": (StringType,),
    "to": (StringType,),
    "reply_to": (StringType,),
    "reply_to_session_id": (StringType,),
    "partition_key": (StringType,),
    "time_to_live": (LongType, IntegerType),
    "scheduled_enqueue_time": (TimestampType,),
    "application_properties": (MapType,),
    "body": (BinaryType, StringType),
}
# The types that a value of the column `application_properties` may have.
_PROPERTY_TYPES: Final = (
    StringType,
    BooleanType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    FloatType,
    DoubleType,
    BinaryType,
    TimestampType,
    NullType,
)
_PLAIN: Final = tuple(
    name
    for name in WRITTEN_COLUMNS
    if name not in {"entity", "time_to_live", "scheduled_enqueue_time", "application_properties", "body"}
)
_ROWS_TOGETHER: Final = 500
# The column in which a read names what it could not decode.
_ERROR: Final = "error"
# Columns that name the message of a row in an error.
_NAMING: Final = ("message_id", "sequence_number")


class ColumnError(CallerError, ValueError):
    """The source has no such column, a writer does not accept a column, or it cannot send a row."""


# --- messages to rows ------------------------------------------------------------------------------------------------


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


def row_maker(
    include_raw: bool, names: Sequence[str] = tuple(_READ)
) -> Callable[[ReceivedMessage, MessageMarks], tuple[Any, ...]]:
    """Returns a function that returns the values of a message for these columns. No content raises an error."""
    chosen = None if tuple(names) == tuple(_READ) else [list(_READ).index(name) for name in names]

    def row_of(message: ReceivedMessage, marks: MessageMarks) -> tuple[Any, ...]:
        values = fast_row(message.raw, include_raw, marks)
        if values is None:
            return any_row(message, include_raw, names)
        return values if chosen is None else tuple([values[index] for index in chosen])

    return row_of


def any_row(message: ReceivedMessage, include_raw: bool, names: Sequence[str] = tuple(_READ)) -> tuple[Any, ...]:
    """Returns the values of a message for these columns, each decoded on its own."""
    annotations = broker_annotations(message.raw)
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
    if SEQUENCE_NUMBER not in annotations:
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
        yield pa.RecordBatch.from_arrays([column(values, field.type) for field, values in columns], schema=schema)


def _whole(value: Any, bits: int) -> int | None:
    """Returns an integer for a column of `bits` bits. Raises ValueError if the value is no integer or too large."""
    if value is None:
        return None
    if not isinstance(value, int):
        raise ValueError(f"a {type(value).__name__} where a whole number is expected")
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError(f"{int(value)} is out of the range of the column")
    return int(value)


def _instant(value: Any) -> int | None:
    millis = _whole(value, 64)
    return None if millis is None else microseconds(millis)


def _body(message: ReceivedMessage, annotations: Mapping[str, Any]) -> bytes:
    """Returns the body as bytes: data unchanged, text as UTF-8, any other AMQP value as JSON."""
    body = message.body
    if type(body) in {bytes, bytearray, memoryview}:
        return bytes(body)
    return (str(body) if isinstance(body, str) else json_of(body)).encode()


# For each column, the function that returns its value from a received message and the broker's annotations.
_COLUMNS: Final[Mapping[str, Callable[[ReceivedMessage, Mapping[str, Any]], Any]]] = {
    "sequence_number": lambda _, annotations: _whole(annotations.get(SEQUENCE_NUMBER), 64),
    "enqueued_time": lambda _, annotations: _instant(annotations.get(ENQUEUED)),
    "state": lambda _, annotations: STATE_TEXTS[MessageState(annotations.get(STATE, 0))],
    "message_id": lambda message, _: text_of(message.message_id),
    "session_id": lambda message, _: text_of(message.session_id),
    "subject": lambda message, _: text_of(message.subject),
    "content_type": lambda message, _: text_of(message.content_type),
    "correlation_id": lambda message, _: text_of(message.correlation_id),
    "to": lambda message, _: text_of(message.to),
    "reply_to": lambda message, _: text_of(message.reply_to),
    "reply_to_session_id": lambda message, _: text_of(message.reply_to_session_id),
    "partition_key": lambda _, annotations: text_of(annotations.get(PARTITION_KEY)),
    "time_to_live": lambda message, _: _whole(message.header.ttl, 64),
    "scheduled_enqueue_time": lambda _, annotations: _instant(annotations.get(SCHEDULED)),
    "delivery_count": lambda message, _: _whole(message.delivery_count, 32),
    "dead_letter_reason": lambda message, _: text_of(message.dead_letter_reason),
    "dead_letter_error_description": lambda message, _: text_of(message.dead_letter_error_description),
    "application_properties": lambda message, _: property_texts(message.application_properties),
    "body_type": lambda message, _: message.body_type.value,
    "body": _body,
}


# --- rows to messages ------------------------------------------------------------------------------------------------


def check_written_schema(schema: StructType, has_entity: bool) -> None:
    """Raises ColumnError if a column is unknown or has a type that cannot be sent. Call it before sending."""
    for field in schema:
        name, wanted = field.name, WRITTEN_COLUMNS.get(field.name)
        if wanted is None and name not in _READ:
            raise ColumnError(
                f"servicebus cannot write the column {name!r}; it takes {', '.join(WRITTEN_COLUMNS)}. "
                "Drop or rename it."
            )
        if wanted is not None and not _can_be_sent(field.dataType, wanted):
            takes = "map<string,T> with T of " if MapType in wanted else ""
            names = (kind().simpleString() for kind in (_PROPERTY_TYPES if takes else wanted))
            raise ColumnError(
                f"the column {name!r} is of type {field.dataType.simpleString()}; "
                f"servicebus takes {takes}{' or '.join(names)}"
            )
    if "entity" not in schema.names and not has_entity:
        raise ColumnError("the destination is missing: add a column entity, or set the option entity")


def _can_be_sent(kind: DataType, wanted: tuple[type[DataType], ...]) -> bool:
    if isinstance(kind, MapType):
        return (
            MapType in wanted and isinstance(kind.keyType, StringType) and isinstance(kind.valueType, _PROPERTY_TYPES)
        )
    return isinstance(kind, wanted)


class RowMessages:
    """Makes messages of the rows of one task.

    A row that a read could not decode is refused: its message would lack a part, such as its body. `raw` is not sent
    instead, because other columns of the row may have been changed on purpose.

    A row without a message id gets an id that is computed from its content, so that a repeated task gives the same id.
    """

    def __init__(self, seed: str, entity: str | None) -> None:
        self._seed = seed
        self._entity = entity
        self._alike: Counter[bytes] = Counter()

    def messages(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, Message]]:
        """Yields the message of each row, with the entity that it is sent to."""
        for batch in batches:
            sent = batch.select([name for name in batch.schema.names if name in WRITTEN_COLUMNS])
            _refuse_undecoded(batch)
            for values in sent.to_pylist():
                entity = values.get("entity") or self._entity
                if not entity:
                    raise ColumnError("a row's entity is null, and there is no option entity for such rows")
                yield entity, self._message(values)

    def _message(self, values: Mapping[str, Any]) -> Message:
        body, properties = values.get("body"), values.get("application_properties")
        made = Message(
            b"" if body is None else body,
            body_type=BodyType.DATA,
            time_to_live=_time_to_live(values),
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


def _refuse_undecoded(batch: pa.RecordBatch) -> None:
    """Raises ColumnError if a row of the batch has an error of a read."""
    if _ERROR not in batch.schema.names or batch.column(_ERROR).null_count == batch.num_rows:
        return
    columns = batch.select([name for name in batch.schema.names if name in {*_NAMING, _ERROR}])
    values = next(row for row in columns.to_pylist() if row[_ERROR] is not None)
    raise ColumnError(
        f"the row of {_row_name(values)} has parts that the read could not decode ({values[_ERROR]}), and would "
        "be sent without them. Leave out such rows with `WHERE error IS NULL`. Or fill the missing columns, and "
        "drop the column error."
    )


def _row_name(values: Mapping[str, Any]) -> str:
    """Returns how an error names the message of a row."""
    return ", ".join(f"{name} {values[name]!r}" for name in _NAMING if values.get(name) is not None) or "a message"


def _time_to_live(values: Mapping[str, Any]) -> timedelta | None:
    """Returns the time to live of a row. Raises ColumnError if a message cannot have it."""
    millis = values.get("time_to_live")
    if millis is None:
        return None
    with suppress(OverflowError):
        life = timedelta(milliseconds=millis)
        datetime.now(UTC) + life  # a message cannot expire after the year 9999
        if life > timedelta():
            return life
    raise ColumnError(
        f"the row of {_row_name(values)} has the time_to_live {millis}: these milliseconds have to be above 0, and "
        "to end before the year 10000. Null stands for the default of the entity."
    )


def _aware(instant: datetime | None) -> datetime | None:
    """Returns a time in UTC. Spark passes times in the time zone of its session."""
    return None if instant is None else instant.astimezone(UTC)
