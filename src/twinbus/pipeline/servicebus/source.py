"""The data source `servicebus`: its batch reader and its writers. `stream_reader` has the reader of streams.

A batch read only peeks, so it changes nothing in the queue.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    Filter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructField, StructType

from twinbus.message import Message
from twinbus.pipeline.servicebus.broker import Broker
from twinbus.pipeline.servicebus.filters import MessageFilter, is_applicable, sessions_of_condition
from twinbus.pipeline.servicebus.message_marks import session_of
from twinbus.pipeline.servicebus.offsets import SequenceNumbers
from twinbus.pipeline.servicebus.options import CONNECTION_OPTIONS, SourceOptionError, SourceOptions, options_of_table
from twinbus.pipeline.servicebus.rows import READ_SCHEMA, RowMessages, check_written_schema
from twinbus.pipeline.servicebus.session_stream_reader import SessionStreamReader
from twinbus.pipeline.servicebus.stream_reader import StreamReader
from twinbus.pipeline.servicebus.task_reader import (
    NumbersPartition,
    RangePartition,
    TaskReader,
    split_range,
    split_sessions,
)

_log = logging.getLogger(__name__)

_SEND_TOGETHER: Final = 500
_OPTIONS: Final = "servicebus.options"
_HIGHEST: Final = 2**63 - 2  # no entity reaches this sequence number
# If a list of partitions were empty, Spark would make a partition itself.
_NOTHING: Final = RangePartition(0, -1)


class ServiceBusDataSource(DataSource):
    """The data source `servicebus`: Spark reads and writes messages of an entity, in batches and streams.

    Example: `spark.dataSource.register(ServiceBusDataSource)`, then `spark.read.format("servicebus")`.
    """

    @classmethod
    def name(cls) -> str:
        return "servicebus"

    def schema(self) -> StructType:
        of_table = options_of_table(self.options)
        if of_table is None:
            SourceOptions.parse(self.options)
            return READ_SCHEMA
        SourceOptions.parse(of_table)
        return _table_schema(of_table)

    def reader(self, schema: StructType) -> BatchReader:
        return BatchReader(self._parsed(schema), schema)

    def streamReader(  # noqa: N802  # Spark's names, here and below
        self, schema: StructType
    ) -> StreamReader | SessionStreamReader:
        options = self._parsed(schema)
        reader = TaskReader(options, schema, is_patient=True)
        with Broker(options) as broker:
            if options.sessions:
                broker.check_sessions()
                return SessionStreamReader(options, reader)
            if options.complete_committed:
                broker.check_receiving()
            else:
                broker.check_reachable()
        return StreamReader(options, reader)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        if overwrite:
            raise SourceOptionError(
                'servicebus cannot write with mode("overwrite") or INSERT OVERWRITE: it only sends. Use mode("append") '
                "or INSERT INTO."
            )
        return BatchWriter(self._written_options(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        if overwrite:
            raise SourceOptionError(
                'servicebus cannot write with outputMode("complete"): it only sends, and would send every row again '
                'with each batch. Use outputMode("append").'
            )
        return StreamWriter(self._written_options(schema))

    def _written_options(self, schema: StructType) -> SourceOptions:
        options = self._parsed(schema)
        check_written_schema(schema, options.entity is not None)
        return options

    def _parsed(self, schema: StructType) -> SourceOptions:
        """Returns the options of this read or write. Adds the options of a table if the schema belongs to a table."""
        options = dict(self.options)
        # Columns that were read from a table keep their metadata. A writer to another namespace must not use it.
        if options.keys().isdisjoint(CONNECTION_OPTIONS):
            of_table = (field.metadata[_OPTIONS] for field in schema.fields if _OPTIONS in field.metadata)
            options = json.loads(next(of_table, "{}")) | options
        return SourceOptions.parse(options)


def _table_schema(options: Mapping[str, str]) -> StructType:
    """Returns the schema of a table, with the options of the table.

    Spark does not pass the options of a table when the table is read or written, but it passes the schema. So the
    options are metadata of the first column.
    """
    first, *others = READ_SCHEMA
    return StructType([StructField(first.name, first.dataType, True, {_OPTIONS: json.dumps(options)}), *others])


class BatchReader(DataSourceReader):
    """Reads all messages of the entity in any state (active, deferred, scheduled), by peeking."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._reader = TaskReader(options, schema)
        self._filter = MessageFilter()
        self._sessions: frozenset[str] | None = None
        """The only sessions that are read; None for all."""
        # An attribute, because Spark must not find a method `pushFilters` in the class: see FilterPushdown.
        self.pushFilters = FilterPushdown(self)  # type: ignore[method-assign]  # it is called like one

    def apply(self, condition: Filter) -> None:
        """Add a condition: only messages that meet all conditions are read."""
        self._filter = MessageFilter((*self._filter.conditions, condition))

    def limit_sessions(self, condition: Filter) -> None:
        """Read no sessions whose messages cannot meet this condition. Spark still has to apply it."""
        listed = sessions_of_condition(condition)
        if listed is not None:
            self._sessions = listed if self._sessions is None else self._sessions & listed

    def partitions(self) -> Sequence[InputPartition]:
        options, wanted = self._options, self._filter
        lowest = max(options.from_sequence_number, wanted.lowest)
        limits = (options.to_sequence_number, wanted.highest)
        last = min((limit for limit in limits if limit is not None), default=None)
        if options.sessions:
            with Broker(options) as broker:
                broker.check_sessions()
            return self._partitions_of_sessions(lowest, last)
        if wanted.numbers is not None:
            within = (number for number in wanted.numbers if lowest <= number and (last is None or number <= last))
            parts = SequenceNumbers.of(within).parts(options.partitions)
            return [NumbersPartition(part) for part in parts] or [_NOTHING]
        with Broker(options) as broker:
            first = broker.first_at_or_after(lowest)
            if first is not None and last is None:
                last = broker.last_after(first - 1)
        if first is None or last is None or first > last:
            return [_NOTHING]
        return split_range(first, last, options.partitions)

    def _partitions_of_sessions(self, lowest: int, highest: int | None) -> Sequence[InputPartition]:
        """Returns partitions with whole sessions. If no sessions are listed, peeks at all messages to find them."""
        if self._sessions is not None:
            whole = SequenceNumbers([(lowest, _HIGHEST if highest is None else highest)])
            listed = dict.fromkeys(sorted(self._sessions), whole) if whole.first <= whole.last else {}
            return split_sessions(listed, self._options.partitions) or [_NOTHING]
        ends: dict[str, tuple[int, int]] = {}
        sizes: Counter[str] = Counter()
        unknown: list[int] = []
        with Broker(self._options) as broker:
            for marks, message in broker.from_number(lowest):
                number = marks.number
                if number is None:
                    _log.warning("%s: a message without a readable sequence number is left out", self._options.address)
                elif highest is not None and number > highest:
                    break
                elif (session := session_of(message)) is None:
                    unknown.append(number)
                else:
                    ends[session] = (ends.get(session, (number, number))[0], number)
                    sizes[session] += 1
        ranges = {session: SequenceNumbers([first_and_last]) for session, first_and_last in ends.items()}
        parts: list[InputPartition] = [*split_sessions(ranges, self._options.partitions, sizes)]
        if unknown:
            parts.append(NumbersPartition(SequenceNumbers.of(unknown)))
        return parts or [_NOTHING]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reader.read(partition, self._filter.matches if self._filter.conditions else None)


class FilterPushdown:
    """The `pushFilters` of a reader. It also works if filter pushdown is off in Spark, which is the default.

    Then Spark refuses a reader that overrides `pushFilters`. Spark finds this out by the attribute `__func__`, so this
    object has the `__func__` of the base class. If filter pushdown is on, Spark calls the object.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __call__(self, filters: Iterable[Filter]) -> Iterator[Filter]:
        """Yields the filters that Spark has to apply. The reader applies the others."""
        for one in filters:
            if is_applicable(one):
                self._reader.apply(one)
            else:
                self._reader.limit_sessions(one)
                yield one


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass
class SentCount(WriterCommitMessage):
    """How many messages a task has sent."""

    count: int


def _send(options: SourceOptions, seed: str, batches: Iterable[pa.RecordBatch]) -> SentCount:
    waiting: defaultdict[str, list[Message]] = defaultdict(list)
    count = 0
    with Broker(options) as broker:
        for entity, message in RowMessages(seed, options.entity).messages(batches):
            waiting[entity].append(message)
            count += 1
            if len(waiting[entity]) >= _SEND_TOGETHER:
                broker.send({entity: waiting.pop(entity)})
        broker.send(waiting)
    return SentCount(count)


class BatchWriter(DataSourceArrowWriter):
    """Sends every row as a message. A repeated task sends its rows again, with the same message ids."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._job = uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SentCount:
        return _send(self._options, f"{self._job}/{_task().partitionId()}", iterator)


class StreamWriter(DataSourceStreamArrowWriter):
    """Sends every row as a message. A repeated batch, also after a restart, sends the same message ids again."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SentCount:
        task = _task()
        query, batch = task.getLocalProperty("sql.streaming.queryId"), task.getLocalProperty("streaming.sql.batchId")
        return _send(self._options, f"{query}/{batch}/{task.partitionId()}", iterator)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "Spark calls a writer within a task"
    return task
