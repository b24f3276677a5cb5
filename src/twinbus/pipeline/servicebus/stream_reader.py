"""The stream read of the data source `servicebus`, and what it guarantees.

A stream read delivers each message at least once, and completes exactly the messages of the batches that Spark has
committed. It works as follows:

- What Spark does: it calls `latestOffset` to plan a batch, and writes the result, the end offset of the batch, to the
  checkpoint. `read` runs in other processes. When the batch is processed, Spark writes to the checkpoint that it is
  committed, and only then calls `latestOffset` again, with the end offset of this batch as `start`. If a batch has its
  end offset in the checkpoint but is not committed, Spark repeats the batch after a restart, with the same offsets.
- So `latestOffset` completes the messages of the batch that ends at `start` while it plans the next batch, and returns
  when both are done. Spark also calls `commit`, but later: when the next batch is planned. It never calls `commit` for
  the last batch of a query, and never repeats a call.
- `latestOffset` peeks at the queue and puts the sequence number of each active message of the batch into the offset.
  This set of numbers is the batch: `read` peeks at exactly these numbers, also when the batch is repeated, and `commit`
  completes exactly these messages. The set does not contain messages that were deferred or scheduled when the batch was
  planned, messages before the start of the stream, and messages that arrived after the planning. The set does contain
  messages that another receiver has locked: such a message is read now, and completed when the other receiver has
  released it.
- A process may die after Spark has committed a batch and before the messages of the batch are completed. So an offset
  also names the messages of earlier batches whose completion was not confirmed when the offset was made. After a
  restart, the first `latestOffset` gets the end offset of the last committed batch, and completes all messages of this
  offset that still exist. A message that could not be completed, because another receiver has locked it, is named in
  the next offset again. The completion is tried again with each batch and, while there is nothing to read, once per
  lock duration.
- If a queue is deleted and created again, its sequence numbers start at 1 again, and the numbers in the checkpoint
  belong to messages that do not exist any more. So the offset also has the latest enqueued time of its messages, and a
  message that was enqueued after this time is not completed. A stream that finds no new messages checks whether its
  queue was created again, and raises an error if this is certain (`_check_same_entity`).
- An offset names the entity and its namespace. If the options name others, the reader raises OffsetError before it
  reads or completes anything: the numbers of one entity mean other messages in another one.
- The offset of an earlier version has only `through`. Such an offset does not say which messages were read, so none of
  them is completed: the messages of its last batch stay in the queue.
- A dead letter has the sequence number that it had in its queue, so a new dead letter may have a low number. For a
  dead-letter queue, each batch is therefore planned from the start of the stream, without the messages that were read
  and are not completed yet.

`broker` explains how messages are completed by their sequence numbers, and the limits of this method.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from twinbus.errors import OperatorError
from twinbus.pipeline.servicebus.broker import MOST_HELD, PAGE, Broker
from twinbus.pipeline.servicebus.fast_marks import marks_of
from twinbus.pipeline.servicebus.offsets import NONE, Offset, SequenceNumbers, check_entity, latest
from twinbus.pipeline.servicebus.options import SourceOptionError, SourceOptions
from twinbus.pipeline.servicebus.task_reader import NumbersPartition, RangePartition, TaskReader, split_range

_log = logging.getLogger(__name__)

# An offset is written to the checkpoint with each batch. 1,000 runs of numbers take about 20 KB.
_MOST_RUNS: Final = 1000
# If a stream cannot complete the messages that it reads, its queue grows. With more uncompleted messages than this, the
# stream ends with an error.
_MOST_UNCOMPLETED: Final = 100_000
_MOST_UNCOMPLETED_RUNS: Final = 5 * _MOST_RUNS
# The lock duration of an entity that was created without one, in seconds.
_USUAL_LOCK: Final = 60.0
# In one queue, a higher sequence number means a later enqueued time, except for differences between the clocks of the
# service's nodes. This is the largest such difference that is assumed, in milliseconds.
_CLOCKS_DIFFER: Final = 300_000
# In a partitioned entity, the bits of a sequence number from 2^48 on are the number of the partition.
_PARTITION: Final = 1 << 48


class CompletionError(OperatorError):
    """A stream cannot complete the messages that it has read."""


class CreatedAgainError(OperatorError):
    """The entity of a stream was deleted and created again, so the numbers in the checkpoint are not valid any more."""


class LimitedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream reader whose batches have a limit. With availableNow, it reads what is there when the query starts."""

    def __init__(self, options: SourceOptions, reader: TaskReader) -> None:
        self._options = options
        self._reader = reader
        self._entity = options.qualified_address
        self._target: int | None = None
        """With availableNow: the highest sequence number that is read."""

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's names, here and below
        with Broker(self._options, is_patient=True) as broker:
            self._target = broker.last_after(-1) or 0

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.max_messages_per_trigger)

    def _check_worker(self) -> None:
        """Raises SourceOptionError if this worker would read another entity than the driver, which completes it."""
        here = self._options.qualified_address
        if here != self._entity:
            raise SourceOptionError(
                f"the driver streams {self._entity}, and a worker would read {here}: give the variable "
                f"{self._options.connection_string_env} the same value on the driver and on every executor"
            )

    def _most(self, limit: ReadLimit) -> int | None:
        """Returns how many messages the next batch may have; None if there is no limit."""
        if isinstance(limit, ReadAllAvailable):
            return None
        return limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_messages_per_trigger


class StreamReader(LimitedStreamReader):
    """Reads active messages, and completes them once their batch is committed. The module's docstring explains how."""

    def __init__(self, options: SourceOptions, reader: TaskReader) -> None:
        super().__init__(options, reader)
        self._looked = float("-inf")
        self._peeked_through = -1
        """Peeks found no active message up to this number. A message that is not active never becomes active again
        under the same number."""
        self._is_resumed = False
        self._uncompleted = NONE
        """Messages of committed batches that are not completed yet."""
        self._newest: int | None = None
        self._taken_over = NONE
        """The batch that was last added to `_uncompleted`."""
        self._is_due = False
        """Whether `_uncompleted` has messages whose completion was postponed, or has failed."""
        self._held = 0
        """How many messages that are not part of the stream the last completion had to receive."""
        self._lock_seconds = _USUAL_LOCK
        """The lock duration of the entity in seconds; 60 until it is known."""
        self._tried = float("-inf")
        """When the last completion ended."""
        self._completed = 0
        """How many messages this process has completed, or found gone when it tried."""
        self._latest = -1
        """The highest sequence number that was seen in the queue."""
        self._latest_at = float("-inf")
        """When `reportLatestOffset` last searched for the highest number."""
        self._planned_through = -1
        """The highest number that was planned to be read."""
        self._is_limited = False
        """Whether the last batch had as many messages as a batch may have, so that more may wait."""
        self._checked = float("-inf")
        self._check_from = 0
        """When `_check_same_entity` last peeked, and the number from which it peeks next."""

    # --- planning ----------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        options = self._options
        with Broker(options) as broker:
            start = options.starting_position
            if start is None:
                start = (broker.last_after(-1) or 0) + 1
                self._refuse_partitioned(start - 1)
            if options.complete_committed and start > 0 and broker.is_out_of_reach(start):
                raise SourceOptionError(
                    f"servicebus cannot stream {options.address} from sequence number {start}: {_REACH} "
                    "Start at earliest, remove the messages before, or set completeCommitted=false."
                )
        return Offset(through=start - 1, start=start, entity=self._entity).to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        previous = self._offset(start)
        self._planned_through = max(self._planned_through, previous.through)
        self._latest = max(self._latest, previous.through)
        if not self._is_resumed:
            self._resume(previous)
        is_due = self._is_due or previous.read != self._taken_over
        # Each peek is charged as an operation, and Spark calls `latestOffset` without pauses.
        if self._target is None and time.monotonic() - self._looked < self._options.poll_interval:
            if is_due:
                self.commit(start)
            return start
        first, known = self._first(previous)
        # The next batch is planned while the last one is completed: both mostly wait for the namespace.
        with ThreadPoolExecutor(1, "twinbus-completion") as other_thread:
            completing = other_thread.submit(self.commit, start) if is_due else None
            try:
                with Broker(self._options, is_patient=True) as broker:
                    read, newest = self._planned(broker, first, known, limit)
                    if not read:
                        self._check_same_entity(broker, previous)
            finally:
                if completing is not None:
                    completing.result()
        self._check_uncompleted()
        if not read:
            self._complete_when_idle()
            self._looked = time.monotonic()
            return start
        self._planned_through = max(previous.through, read.last)
        planned = Offset(
            through=self._planned_through,
            start=self._start(previous),
            read=read,
            uncompleted=self._uncompleted_after(previous),
            newest=latest(newest, self._newest, previous.newest),
            keep=not self._options.complete_committed,
            entity=self._entity,
        )
        return planned.to_json()

    def _offset(self, values: Mapping[str, Any]) -> Offset:
        """Returns an offset of the checkpoint. Raises OffsetError if a stream of another entity has written it."""
        offset = Offset.of_json(values)
        check_entity(offset.entity, self._entity)
        return offset

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Returns what StreamingQueryProgress shows as `latestOffset`.

        `through` is the highest sequence number in the queue, `behind` the numbers up to there that were not planned to
        be read, `completed` the messages that this process has completed, and `uncompleted` those that are committed
        and not completed yet. Searches the queue at most once per `pollInterval`, and only if more messages may wait.
        """
        now = time.monotonic()
        if self._is_limited and now - self._latest_at >= self._options.poll_interval:
            with Broker(self._options, is_patient=True) as broker:
                self._latest = broker.last_after(self._latest) or self._latest
            self._latest_at = now
        return {
            "through": self._latest,
            "behind": max(0, self._latest - self._planned_through),
            "completed": self._completed,
            "uncompleted": len(self._uncompleted),
        }

    def _planned(
        self, broker: Broker, first: int, known: SequenceNumbers, limit: ReadLimit
    ) -> tuple[SequenceNumbers, int | None]:
        """Returns the sequence numbers of the next batch, and the latest enqueued time of its messages.

        Peeks from the number `first` on, and leaves out messages that are `known`.
        """
        most = self._most(limit)
        most_runs = None if most is None else _MOST_RUNS
        runs: list[tuple[int, int]] = []
        count, newest = 0, None
        for marks, _ in broker.from_number(first, PAGE if most is None else min(PAGE, most)):
            number = marks.number
            if number is None:
                _log.warning("%s: a message without a readable sequence number is left out", self._options.address)
                continue
            self._refuse_partitioned(number)
            self._latest = max(self._latest, number)
            if self._target is not None and number > self._target:
                break
            if marks.is_active and number not in known:
                if runs and runs[-1][1] == number - 1:
                    runs[-1] = (runs[-1][0], number)
                elif len(runs) == most_runs:
                    break
                else:
                    runs.append((number, number))
                count += 1
                newest = latest(newest, marks.enqueued)
                if count == most:
                    break
            elif not runs:
                self._peeked_through = number
        self._is_limited = count == most
        return SequenceNumbers(runs), newest

    def _refuse_partitioned(self, number: int) -> None:
        """Raises SourceOptionError if a message with this number belongs to a partitioned entity.

        Its partitions number their messages on their own, so new messages can have lower numbers than those that were
        read. A stream of dead letters expects that (`_first`).
        """
        if number >= _PARTITION and not self._reads_low_numbers:
            raise SourceOptionError(
                f"servicebus cannot stream {self._options.address}: it is a partitioned entity (it has the sequence "
                f"number {number}), whose partitions number their messages on their own. Read it with spark.read."
            )

    @property
    def _reads_low_numbers(self) -> bool:
        """Whether a new message may have a lower number than those that were read."""
        return self._options.dead_letter and self._options.complete_committed

    def _first(self, previous: Offset) -> tuple[int, SequenceNumbers]:
        """Returns the number from which to peek, and the numbers after it that were already read."""
        if self._reads_low_numbers:
            return self._start(previous), self._uncompleted_after(previous) | previous.read
        return max(previous.through, self._peeked_through) + 1, NONE

    def _start(self, previous: Offset) -> int:
        """Returns the first number of the stream.

        Messages that were read and must not be completed have lower numbers.
        """
        if previous.start is None or (previous.keep and self._options.complete_committed):
            return previous.through + 1
        return previous.start

    def _check_same_entity(self, broker: Broker, previous: Offset) -> None:
        """Raises CreatedAgainError if the queue has a new message with a number that the stream has already passed.

        Costs at most one peek, of one page, per lock duration. The next call peeks at the next page; after the last
        page it begins at `start` again.

        Why such a message is a proof: if the queue is still the same, a message between `start` and `through` was read,
        or it was deferred or scheduled when the stream passed its number. A deferred message stays deferred, and a
        scheduled message gets a new number when it becomes active. So none of these is an active message that was
        enqueued minutes after all messages that were read. Numbers before `start` are not checked, because the stream
        has not read them. Dead letters and partitioned entities are not checked, because there a higher number does not
        mean a later time.
        """
        start, through, newest = self._start(previous), previous.through, previous.newest
        if newest is None or self._options.dead_letter or not start <= through < _PARTITION:
            return
        if time.monotonic() - self._checked < self._lock_seconds:
            return
        first = max(start, self._check_from)
        self._checked, self._check_from = time.monotonic(), start
        for marks in map(marks_of, broker.page(first)):
            number = marks.number
            if number is None:
                continue
            if number > through:
                self._check_from = start
                return
            self._check_from = number + 1
            if marks.is_active and marks.enqueued is not None and marks.enqueued > newest + _CLOCKS_DIFFER:
                later = (marks.enqueued - newest) // 1000
                raise CreatedAgainError(
                    f"{self._options.address} was created again: the stream has read up to sequence number {through}, "
                    f"and number {number} was enqueued {later} seconds after all that it has read",
                    "The stream would not read this message. Start it with a new checkpoint.",
                )

    # --- reading -----------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        batch = self._offset(end)
        if batch.is_of_earlier_version:
            return split_range(self._offset(start).through + 1, batch.through, self._options.partitions)
        return [NumbersPartition(numbers) for numbers in batch.read.parts(self._options.partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        self._check_worker()
        # A batch of an earlier version has a range. The messages of a batch of this version were active when planned.
        is_range = isinstance(partition, RangePartition)
        return self._reader.read(partition, (lambda marks: marks.is_active) if is_range else None)

    # --- completing --------------------------------------------------------------------------------------------

    def commit(self, end: dict[str, Any]) -> None:
        self._take_over(self._offset(end))
        self._complete()

    def _resume(self, previous: Offset) -> None:
        """Completes the messages that an earlier process of this stream has not completed.

        `previous` is the end offset of the last committed batch.
        """
        self._take_over(previous)
        if self._uncompleted and self._options.complete_committed:
            with Broker(self._options, is_patient=True) as broker:
                self._uncompleted = broker.still_there(self._uncompleted, self._newest)
            self._complete()

    def _take_over(self, batch: Offset) -> None:
        """Adds the messages of a batch that Spark has committed to `_uncompleted`."""
        if not self._is_resumed:
            self._is_resumed = True
            self._uncompleted = batch.uncompleted
        if batch.is_of_earlier_version:
            _log.warning(
                "%s: the batch up to sequence number %s was planned by an earlier version, which did not record what "
                "it read; its messages are not completed and stay in the queue",
                self._options.address,
                batch.through,
            )
        self._uncompleted = self._uncompleted_after(batch)
        self._is_due = self._is_due or batch.read != self._taken_over
        self._taken_over = batch.read
        self._newest = latest(self._newest, batch.newest)

    def _uncompleted_after(self, batch: Offset) -> SequenceNumbers:
        """Returns the messages that have to be completed after the commit of this batch, also those of the batch."""
        if batch.keep or batch.read == self._taken_over:
            return self._uncompleted
        return self._uncompleted | batch.read

    def _complete(self, *, always: bool = False) -> None:
        """Completes the messages in `_uncompleted`. Those that cannot be completed stay there for the next call.

        Each message in front of them that is not part of the stream costs one delivery per call. If there are more than
        PAGE such messages, this method does nothing until `_uncompleted` has at least as many messages. With `always`
        it completes messages in any case.
        """
        if not self._uncompleted or not self._options.complete_committed:
            return
        if self._held > PAGE and len(self._uncompleted) < self._held and not always:
            return
        with Broker(self._options, is_patient=True) as broker:
            done = broker.complete(self._uncompleted, self._newest)
        self._is_due = False
        self._completed += len(self._uncompleted) - len(done.left)
        self._uncompleted, self._held = done.left, done.held
        self._lock_seconds = done.lock_seconds or self._lock_seconds
        self._tried = time.monotonic()
        if done.stopped is not None:
            _log.warning(
                "%s: %s messages that were read and committed are not completed yet: %s. They stay in the queue, and "
                "completing them is tried again.",
                self._options.address,
                len(done.left),
                done.stopped,
            )

    def _complete_when_idle(self) -> None:
        """Tries again to complete messages that another receiver had locked, at most once per lock duration.

        With availableNow, the query ends when there is nothing to read, so this also completes what was postponed.

        If nothing else is in the queue, one try costs a peek, a receive that waits two seconds, and a peek for each 250
        messages that are not completed. Each received message that is not part of the stream costs one more operation.
        """
        is_last = self._is_due and self._target is not None
        if is_last or time.monotonic() - self._tried >= self._lock_seconds:
            self._complete(always=is_last)

    def _check_uncompleted(self) -> None:
        """Raises CompletionError if too many messages could not be completed. Called before more messages are read."""
        if not self._options.complete_committed or not self._is_full():
            return
        self._complete(always=True)
        if self._is_full():
            raise CompletionError(
                f"the stream of {self._options.address} has read and committed {len(self._uncompleted)} messages that "
                f"it cannot complete, the first with sequence number {self._uncompleted.first}",
                f"{_REACH} Remove those messages or let other receivers settle theirs, or set completeCommitted=false.",
            )

    def _is_full(self) -> bool:
        return len(self._uncompleted) > _MOST_UNCOMPLETED or self._uncompleted.run_count > _MOST_UNCOMPLETED_RUNS


_REACH: Final = (
    "Service Bus completes messages only for a receiver that holds them, and a receiver gets the oldest first. "
    f"At most {MOST_HELD} messages that the stream does not read may stand before those that it reads."
)
