"""One look of an audit at the backlog queues, as Spark tasks (L3): how many copies of which messages are there.

A look peeks with the same `Broker` as a batch read of the data source `servicebus`, and changes nothing in the queues.
Unlike a batch read, a look reads many queues at once, it returns only the destination and the id of a message, and it
records each peek in the ledger (M1). No body and no property leaves the task.

The driver divides each queue into ranges of sequence numbers, and each range is a task. The last range of a queue has
no end: a scheduled message that becomes active during the look gets a new number behind all others. The rows of a task
count only if the task succeeds; the peeks of a task that failed are in the ledger too.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from twinbus.backlog import TRANSFER_SEGMENT, FailureKind, failure_kind, was_refused
from twinbus.connect import ConnectionString, NetworkOptions, ReceivedMessage, ServiceBusError
from twinbus.ledger import OK, Ledger, MessageKey, Role, Stage, id_text, result_of_failure
from twinbus.pipeline.servicebus.broker import Broker
from twinbus.pipeline.servicebus.options import SourceOptions
from twinbus.syphon import destination_of

LOOK_SCHEMA: Final = "destination string, id string, copies long, peeks long, is_partial boolean, failure string"
"""A row with an id is about one message. Each task ends with a row without an id, which has the sums of the task."""
# A queue with fewer sequence numbers than this from its first to its last message is one task.
_RANGE: Final = 50_000
_MOST_RANGES: Final = 64
# Messages of a task that are counted in memory before rows are made of them.
_COUNTED: Final = 20_000
# In a partitioned queue the upper bits of a number are the partition. Whether a peek goes on from partition to
# partition is not documented.
_FIRST_OF_A_PARTITION: Final = 1 << 48


@dataclass
class QueueRange(InputPartition):
    """The messages of a queue from one sequence number to another, both included; to the end if `last` is None."""

    queue: str
    first: int
    last: int | None = None


@dataclass(frozen=True, slots=True)
class LookJob:
    """What the tasks of a look need. The JSON contains the key of the namespace, unless a credential is used."""

    connection_string: str = field(repr=False)
    ledger: str
    """The folder of the ledger, on a disk that all machines share."""
    namespace: str
    """The name of the secondary in the ledger."""
    timeout: float
    network: NetworkOptions | None = field(default=None, repr=False)
    credential: str | None = None
    """The name of the credential, if `connection_string` is a host name."""
    is_dead_letters: bool = False
    ranges: tuple[QueueRange, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Self:
        values: dict[str, Any] = json.loads(text)
        ranges = tuple(QueueRange(**one) for one in values["ranges"])
        return cls(**values | {"network": NetworkOptions.of_dict(values["network"]), "ranges": ranges})

    def options(self, queue: str) -> SourceOptions:
        is_host = not ConnectionString.of(self.connection_string).has_key
        return SourceOptions(
            connection_string=None if is_host else self.connection_string,
            fully_qualified_namespace=self.connection_string if is_host else None,
            credential=self.credential,
            entity=queue,
            dead_letter=self.is_dead_letters,
            timeout=self.timeout,
            network=self.network or NetworkOptions(),
        )


class RecordingBroker(Broker):
    """A broker that records its peeks in a ledger, and counts them. A queue that does not exist is empty."""

    def __init__(self, job: LookJob, queue: str, ledger: Ledger) -> None:
        super().__init__(job.options(queue))
        self._ledger = ledger
        self._place = (job.namespace, queue)
        self.peeks = 0

    async def _peek(self, number: int, count: int, session: str | None = None) -> list[ReceivedMessage]:
        began = time.monotonic()
        try:
            page = await super()._peek(number, count, session)
        except ServiceBusError as error:
            kind = failure_kind(error)
            if kind is FailureKind.ENTITY_NOT_FOUND:  # the link was refused, so nothing was requested
                return []
            self._record(0, began, *result_of_failure(kind, refused=was_refused(error)))
            raise
        self._record(sum(len(message.raw) for message in page), began)
        return page

    def _record(self, size: int, began: float, result: str = OK, cause: str | None = None) -> None:
        seconds = time.monotonic() - began
        self._ledger.done(Stage.PEEK_BACKLOG, *self._place, (), size, seconds=seconds, result=result, cause=cause)
        self.peeks += 1


def plan_ranges(job: LookJob, queues: Iterable[str], ledger: Ledger) -> tuple[list[QueueRange], int]:
    """Returns the ranges of these queues, or of their dead-letter queues, and the number of peeks that this took.

    A queue without messages has no range. Raises ServiceBusError if a queue cannot be peeked.
    """
    ranges: list[QueueRange] = []
    peeks = 0
    for queue in queues:
        with RecordingBroker(job, queue, ledger) as broker:
            first = broker.first_at_or_after(0)
            if first is not None:
                ranges += _divided(broker, queue, first)
            peeks += broker.peeks
    return ranges, peeks


def _divided(broker: Broker, queue: str, first: int) -> list[QueueRange]:
    beyond = broker.first_at_or_after(first + _RANGE)
    if beyond is None or beyond >= _FIRST_OF_A_PARTITION:
        return [QueueRange(queue, first)]
    last = broker.last_after(beyond - 1) or beyond
    length = max(_RANGE, -(-(last - first + 1) // _MOST_RANGES))
    starts = range(first, last + 1, length)
    return [QueueRange(queue, start, start + length - 1 if start != starts[-1] else None) for start in starts]


class BacklogLookSource(DataSource):
    """The data source of a look. Option: `secret`, the job as JSON. Spark does not show the value of such an option."""

    @classmethod
    def name(cls) -> str:
        return "twinbus-look"

    def schema(self) -> str:
        return LOOK_SCHEMA

    def reader(self, schema: StructType) -> LookReader:
        return LookReader(LookJob.of_json(self.options["secret"]))


class LookReader(DataSourceReader):
    """Peeks at the ranges of a job."""

    def __init__(self, job: LookJob) -> None:
        self._job = job

    def partitions(self) -> Sequence[InputPartition]:
        return [*self._job.ranges]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, QueueRange)
        job = self._job
        with Ledger(Path(job.ledger), Role.AUDIT) as ledger, RecordingBroker(job, partition.queue, ledger) as broker:
            yield from _look_at(broker, partition)


def _look_at(broker: RecordingBroker, part: QueueRange) -> Iterator[tuple[Any, ...]]:
    primary = part.queue.rpartition(f"/{TRANSFER_SEGMENT}/")[0]
    seen: Counter[MessageKey] = Counter()
    total, is_partial, failure = 0, False, None
    try:
        for marks, message in broker.from_number(part.first):
            number = marks.number
            if number is not None and part.last is not None and number > part.last:
                break
            destination = f"{primary}/{destination_of(message.raw) or ''}".lower()
            seen[MessageKey(destination, id_text(message.message_id))] += 1
            total += 1
            is_partial |= number is not None and number >= _FIRST_OF_A_PARTITION
            if len(seen) >= _COUNTED:
                yield from _rows(seen)
                seen.clear()
    except ServiceBusError as error:
        # An error would let Spark try the task again, three times, whatever the cause is.
        failure = f"{part.queue}: {error}"
    yield from _rows(seen)
    yield None, None, total, broker.peeks, is_partial, failure


def _rows(seen: Counter[MessageKey]) -> Iterator[tuple[Any, ...]]:
    for message, copies in seen.items():
        yield message.destination, message.id, copies, None, None, None
