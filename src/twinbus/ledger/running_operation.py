"""One operation in flight, from `Ledger.begin` to `end`, and the lines that it becomes.

Theory of operation. A RunningOperation appends itself to the writer's queue. When the writer's thread takes all items
of the queue, most operations have ended: each of these becomes one `operation` line. An operation that is still in
flight becomes an `intent` line now, and an `outcome` line after it has ended.

With durability "process", `end` writes the operation itself, under the lock of the segments, and the writer's thread
finds it in the queue with all its lines written.

With durability "lazy", the caller's thread and the writer's thread share the operation without a lock, because a lock
would cost more than the rest of the entry. Two rules make this safe:

- The writer first marks the operation as taken (`_state`), and then reads the ending.
- `end` first stores the ending, and then reads the mark. If the operation is marked, `end` queues the operation again.

So either the writer sees the ending, or `end` sees the mark, and the ending is written in both cases. If both happen,
the operation is queued again although all its lines are written; `next_line` then returns "".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from twinbus.ledger.entries import OK, Metered, Movement, Operation, State, billable_units
from twinbus.ledger.json_lines import (
    OK_FIELDS,
    id_text,
    intent_line,
    operation_line,
    outcome_line,
    quoted,
    quoted_ids,
    result_fields,
)

NOTIFY_EVERY: Final = 256

# How far the writer's thread has processed an operation.
_QUEUED, _TAKEN, _INTENT_WRITTEN, _ALL_WRITTEN = range(4)

_Ending = tuple[str, str | None, Sequence[object]]
"""Result, cause and failed ids: the arguments of `RunningOperation.end`."""
_OK_ENDING: Final[_Ending] = (OK, None, ())


class OperationQueue(Protocol):
    """The attributes of the writer that an operation uses.

    After an append to `queue`, the caller must call `notify` if `is_asleep` is True, and at least after every
    NOTIFY_EVERY-th append.
    """

    writer_id: str
    now: Callable[[], float]
    numbers: Iterator[int]
    queue: list[QueueItem]
    is_asleep: bool
    writes_through: bool
    """Whether `end` must call `write_through`: durability "process"."""

    def notify(self) -> None: ...

    def write_through(self, item: QueueItem, /) -> None: ...


class RunningOperation:
    """An operation in flight: the result of `Ledger.begin`. Call `end` once. Without `end`, the outcome is unknown."""

    __slots__ = ("_begun", "_ended", "_ending", "_ids", "_number", "_prefix", "_size", "_state", "_writer")

    _ended: float

    def __init__(
        self, writer: OperationQueue, prefix: str, ids: str | Sequence[object], size: int | Sequence[int]
    ) -> None:
        """Begins the operation: stores the current time and appends the operation to the queue.

        `prefix` is the result of `operation_prefix`; `ids` and `size` are arguments of `Ledger.begin`. This code runs
        in every send, where each function call costs about a microsecond, because its code is not in the processor's
        caches. So this method appends to the queue without calling a function of the writer.
        """
        self._writer = writer
        self._number = number = next(writer.numbers)
        self._prefix = prefix
        self._ids = ids
        self._size = size
        self._ending: _Ending | None = None
        self._state = _QUEUED
        self._begun = writer.now()
        writer.queue.append(self)
        if writer.is_asleep or not number % NOTIFY_EVERY:
            writer.notify()

    @property
    def id(self) -> str:
        """The operation id."""
        return f"{self._writer.writer_id}-{self._number}"

    def end(self, result: str = OK, *, cause: str | None = None, failed: Sequence[object] = ()) -> None:
        """Records how the operation ended. Calls after the first one have no effect.

        `result` is "ok", or "unknown" if the operation may have happened (then `cause` is the reason), or the reason
        why the operation did not happen. If `failed` is not empty, `result` is only for the message ids in `failed`,
        and the operation succeeded for the other ids.
        """
        if self._ending is None:
            writer = self._writer
            self._ended = writer.now()
            # After this line the writer's thread may see the ending. `_state` must be read after it, not before.
            self._ending = _OK_ENDING if result is OK and not failed else (result, cause, failed)
            if writer.writes_through:
                writer.write_through(self)
            elif self._state != _QUEUED:
                writer.queue.append(self)
                writer.notify()

    def next_line(self, clock_offset: float) -> str:
        """Returns the next line of this operation, or "" if there is none. The caller has the lock of the segments.

        A time of the operation's clock plus `clock_offset` is the time since the epoch.
        """
        if self._state == _QUEUED:
            self._state = _TAKEN  # before the ending is read
        state, ending, begun = self._state, self._ending, self._begun
        if state == _ALL_WRITTEN or (state == _INTENT_WRITTEN and ending is None):
            return ""
        id_ = f"{self._writer.writer_id}-{self._number}"
        fields = OK_FIELDS
        if ending is not None and ending is not _OK_ENDING:
            result, cause, failed = ending
            fields = result_fields(result, cause, [id_text(one) for one in failed])
        if state == _INTENT_WRITTEN:
            self._state = _ALL_WRITTEN
            return outcome_line(int((clock_offset + self._ended) * 1000), id_, self._ended - begun, fields)
        ids, size, at = self._ids, self._size, int((clock_offset + begun) * 1000)
        total = size if isinstance(size, int) else sum(size)
        if isinstance(ids, str):
            count, array = 1, quoted(id_text(ids))
        else:
            count, array = len(ids), quoted_ids(map(id_text, ids))
        # `_state` changes only after this: if the ids or the size cannot be encoded, no line of the operation is
        # written.
        units = billable_units(count, size)
        if ending is None:
            self._state = _INTENT_WRITTEN
            return intent_line(at, id_, self._prefix, array, total, units)
        self._state = _ALL_WRITTEN
        return operation_line(at, id_, self._prefix, array, total, units, self._ended - begun, fields)

    def give_up(self) -> None:
        """Makes `next_line` return "" from now on: this operation cannot be encoded."""
        self._state = _ALL_WRITTEN


QueueItem = RunningOperation | Operation | State | Movement | Metered
