"""What one task of a read reads: the partitions of a read, and the rows of a partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapreplace
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from twinbus.connect import ReceivedMessage
from twinbus.pipeline.servicebus.broker import Broker
from twinbus.pipeline.servicebus.message_marks import MessageMarks
from twinbus.pipeline.servicebus.offsets import SequenceNumbers
from twinbus.pipeline.servicebus.options import SourceOptions
from twinbus.pipeline.servicebus.rows import check_read_schema, record_batches, row_maker
from twinbus.pipeline.servicebus.session_offsets import BySession


@dataclass
class RangePartition(InputPartition):
    """A range of sequence numbers, both ends included."""

    first: int
    last: int


@dataclass
class NumbersPartition(InputPartition):
    """The sequence numbers of the messages that one task reads."""

    numbers: SequenceNumbers


@dataclass
class SessionsPartition(InputPartition):
    """The sessions that one task reads, one after the other, with the sequence numbers of their messages."""

    sessions: list[tuple[str, SequenceNumbers]]


def split_sessions(sessions: BySession, count: int, sizes: Mapping[str, int] | None = None) -> list[SessionsPartition]:
    """Returns the sessions divided among at most `count` partitions with about the same number of messages.

    `sizes` says how many messages each session has, if the numbers of a session are not all numbers of its messages.
    """
    known = {session: len(numbers) for session, numbers in sessions.items()} if sizes is None else sizes
    parts = [SessionsPartition([]) for _ in range(min(count, len(sessions)))]
    filled = [(0, place) for place in range(len(parts))]
    for session in sorted(sessions, key=lambda one: -known[one]):
        size, place = filled[0]
        parts[place].sessions.append((session, sessions[session]))
        heapreplace(filled, (size + known[session], place))
    return parts


def split_range(first: int, last: int, count: int) -> list[RangePartition]:
    """Returns the range divided into at most `count` ranges of about the same length."""
    length = max(1, -(-(last - first + 1) // count))
    return [RangePartition(start, min(start + length - 1, last)) for start in range(first, last + 1, length)]


class TaskReader:
    """Reads the messages of a partition, without locking them, and returns them as rows of the schema.

    If `is_patient`, it repeats peeks while the namespace cannot be reached (`Broker`). Raises ColumnError if the schema
    has a column that the source does not have.
    """

    def __init__(self, options: SourceOptions, schema: StructType, *, is_patient: bool = False) -> None:
        self._options = options
        self._is_patient = is_patient
        check_read_schema(schema)
        self._names = schema.names
        self._arrow = to_arrow_schema(schema, timezone="UTC")

    def read(
        self, partition: InputPartition, matches: Callable[[MessageMarks], bool] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows of all messages of the partition that match."""
        return record_batches(self._rows(partition, matches), self._arrow)

    def _rows(
        self, partition: InputPartition, matches: Callable[[MessageMarks], bool] | None
    ) -> Iterator[tuple[Any, ...]]:
        row_of = row_maker(self._options.include_raw, self._names)
        with Broker(self._options, is_patient=self._is_patient) as broker:
            messages: Iterator[tuple[MessageMarks, ReceivedMessage]]
            if isinstance(partition, NumbersPartition):
                messages = broker.these(partition.numbers)
            elif isinstance(partition, SessionsPartition):
                messages = chain.from_iterable(
                    broker.these(numbers, session=session) for session, numbers in partition.sessions
                )
            else:
                assert isinstance(partition, RangePartition)
                messages = broker.between(partition.first, partition.last)
            for marks, message in messages:
                if matches is None or matches(marks):
                    yield row_of(message, marks)
