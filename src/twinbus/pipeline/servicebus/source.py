"""The data source itself: which reader or writer Spark is given, and what each promises.

A batch read looks, and changes nothing. A stream read is at least once: what it has read is completed only when Spark
has committed the batch, and a batch that is repeated reads the same sequence numbers again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from twinbus.message import Message
from twinbus.pipeline.servicebus.broker import Broker
from twinbus.pipeline.servicebus.options import Options
from twinbus.pipeline.servicebus.rows import RAW_COLUMN, READ_SCHEMA, Written, check_columns, row_of

_SEND_TOGETHER: Final = 500
_THROUGH: Final = "through"
"""Of an offset: the last sequence number that was read."""


@dataclass
class Slice(InputPartition):
    """A range of sequence numbers, both ends included."""

    first: int
    last: int


_NOTHING: Final = Slice(0, -1)


class ServiceBusDataSource(DataSource):
    """`spark.read.format("servicebus")` and its kin. The options: `Options`."""

    @classmethod
    def name(cls) -> str:
        return "servicebus"

    def schema(self) -> str:
        options = Options.parse(self.options)
        return f"{READ_SCHEMA}, {RAW_COLUMN}" if options.include_raw else READ_SCHEMA

    def reader(self, schema: StructType) -> BatchReader:
        return BatchReader(Options.parse(self.options))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  # Spark's names, here and below
        return StreamReader(Options.parse(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return BatchWriter(self._written_options(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        return StreamWriter(self._written_options(schema))

    def _written_options(self, schema: StructType) -> Options:
        options = Options.parse(self.options)
        columns = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        check_columns(columns, options.entity is not None)
        return options


def slices(first: int, last: int, count: int) -> list[Slice]:
    """The range in at most `count` parts of about the same length."""
    length = max(1, -(-(last - first + 1) // count))
    return [Slice(start, min(start + length - 1, last)) for start in range(first, last + 1, length)]


def _rows(options: Options, partition: Slice, *, active_only: bool) -> Iterator[tuple[Any, ...]]:
    with Broker(options) as broker:
        for message in broker.between(partition.first, partition.last, active_only=active_only):
            yield row_of(message, options.include_raw)


class BatchReader(DataSourceReader):
    """Everything in the entity now, whatever its state, by peeking."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with Broker(options) as broker:
            first = broker.first_at_or_after(options.from_sequence_number)
            last = options.to_sequence_number
            if first is not None and last is None:
                last = broker.last_after(first - 1)
        if first is None or last is None or first > last:
            return [_NOTHING]  # without a partition, Spark would read one of its own making
        return slices(first, last, options.partitions)

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, Slice)
        return _rows(self._options, partition, active_only=False)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Active messages by their sequence numbers; completed once their batch is committed."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._target: int | None = None
        self._looked = float("-inf")

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        position = self._options.starting_position
        if position is not None:
            return {_THROUGH: position - 1}
        with Broker(self._options) as broker:
            return {_THROUGH: broker.last_after(-1) or 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with Broker(self._options) as broker:
            self._target = broker.last_after(-1) or 0

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.max_messages_per_trigger)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        through = start[_THROUGH]
        # Each look is an operation that is paid for; Spark asks as often as it can.
        if self._target is None and time.monotonic() - self._looked < self._options.poll_interval:
            return start
        with Broker(self._options) as broker:
            end = self._end(broker, through, limit)
        if end is None:
            self._looked = time.monotonic()
            return start
        return {_THROUGH: end}

    def _end(self, broker: Broker, through: int, limit: ReadLimit) -> int | None:
        first = broker.first_at_or_after(through + 1)
        if first is None or (self._target is not None and first > self._target):
            return None
        if isinstance(limit, ReadAllAvailable):
            end = broker.last_after(through)
        else:
            # Numbers are unique, so a range of so many holds at most as many messages.
            end = (
                first
                + (limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_messages_per_trigger)
                - 1
            )
            if broker.first_at_or_after(end) is None:
                end = broker.last_after(through)
        return end if end is None or self._target is None else min(end, self._target)

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return slices(start[_THROUGH] + 1, end[_THROUGH], self._options.partitions)

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, Slice)
        return _rows(self._options, partition, active_only=True)

    def commit(self, end: dict[str, int]) -> None:
        if self._options.complete_committed:
            with Broker(self._options) as broker:
                broker.complete_through(end[_THROUGH])


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass
class Sent(WriterCommitMessage):
    """How many messages a task has sent."""

    count: int


def _send(options: Options, seed: str, rows: Iterator[Row]) -> Sent:
    waiting: defaultdict[str, list[Message]] = defaultdict(list)
    count = 0
    with Broker(options) as broker:
        for entity, message in Written(seed, options.entity).messages(rows):
            waiting[entity].append(message)
            count += 1
            if len(waiting[entity]) >= _SEND_TOGETHER:
                broker.send({entity: waiting.pop(entity)})
        broker.send(waiting)
    return Sent(count)


class BatchWriter(DataSourceWriter):
    """Every row is a message. A task that is repeated sends its rows again under the same ids."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._job = uuid4().hex

    def write(self, iterator: Iterator[Row]) -> Sent:
        return _send(self._options, f"{self._job}/{_task().partitionId()}", iterator)


class StreamWriter(DataSourceStreamWriter):
    """Like the batch writer; a batch that is repeated, also after a restart, sends the same ids."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def write(self, iterator: Iterator[Row]) -> Sent:
        task = _task()
        query, batch = task.getLocalProperty("sql.streaming.queryId"), task.getLocalProperty("streaming.sql.batchId")
        return _send(self._options, f"{query}/{batch}/{task.partitionId()}", iterator)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "Spark calls a writer within a task"
    return task
