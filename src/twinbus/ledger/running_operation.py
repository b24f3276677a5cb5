"""One operation in flight, from `Ledger.begin` to `end`, and the lines that it becomes.

Theory of operation. A RunningOperation puts itself into the writer's queue. When the writer's thread takes the
queue, most operations have ended: each becomes one `operation` line. An operation that is still in flight becomes an
`intent` line now and an `outcome` line later.

The caller's thread and the writer's thread share the operation without a lock, because a lock would cost more than the
rest of the entry. Two rules make this safe:

- The writer marks the operation as taken (`_state`), and only then reads the ending.
- `end` stores the ending, and only then reads the mark. If the operation is marked, `end` queues it once more.

So at least one of the two threads sees what the other did, and the ending is written. If both see it, the operation is
queued although everything is written; `next_line` then returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from twinbus.ledger.entries import OK, Metered, Movement, Operation, State, billable_units
from twinbus.ledger.json_lines import (
    id_text,
    intent_line,
    operation_ending,
    operation_line,
    outcome_line,
    quoted,
    quoted_ids,
)

NOTIFY_EVERY: Final = 256

# What the writer's thread has done with an operation.
_QUEUED, _TAKEN, _INTENT_WRITTEN, _ALL_WRITTEN = range(4)

_Ending = tuple[str, str | None, Sequence[object]]
"""Result, cause and failed ids, as `RunningOperation.end` takes them."""
_OK_ENDING: Final[_Ending] = (OK, None, ())


class OperationQueue(Protocol):
    """The writer of operations, as an operation sees it.

    Code that appends to `queue` must then call `notify` if `is_asleep`, and at least at every NOTIFY_EVERY-th append.
    """

    writer_id: str
    now: Callable[[], float]
    numbers: Iterator[int]
    queue: list[QueueItem]
    is_asleep: bool

    def notify(self) -> None: ...


class RunningOperation:
    """What `Ledger.begin` returns. Call `end` once. If `end` is never called, the outcome is recorded as unknown."""

    __slots__ = ("_begun", "_ended", "_ending", "_ids", "_number", "_prefix", "_size", "_state", "_writer")

    _ended: float

    def __init__(
        self, writer: OperationQueue, prefix: str, ids: str | Sequence[object], size: int | Sequence[int]
    ) -> None:
        """Begins the operation: takes the time and queues it.

        `prefix` is what `operation_prefix` returns; `ids` and `size` are those of `Ledger.begin`. This runs in every
        send, where each call of a function costs about a microsecond: nothing of it is in the processor's caches. So
        it appends to the queue itself.
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

        `result` is "ok"; "unknown" if the operation may have happened, with the reason in `cause`; or the reason why it
        did not happen. `failed`: the result concerns only these message ids, and the others succeeded.
        """
        if self._ending is None:
            writer = self._writer
            self._ended = writer.now()
            # From here on the writer may see the ending. The mark must be read after this line, not before.
            self._ending = _OK_ENDING if result is OK and not failed else (result, cause, failed)
            if self._state != _QUEUED:
                writer.queue.append(self)
                writer.notify()

    def next_line(self, clock_offset: float) -> str:
        """Returns the line that is to be written now, or "". Called by the writer's thread only.

        `clock_offset` plus a time of the operation's clock is the time since the epoch.
        """
        if self._state == _QUEUED:
            self._state = _TAKEN  # before the ending is read
        state, ending, begun = self._state, self._ending, self._begun
        if state == _ALL_WRITTEN or (state == _INTENT_WRITTEN and ending is None):
            return ""
        id_ = f"{self._writer.writer_id}-{self._number}"
        how = ""
        if ending is not None:
            result, cause, failed = ending
            texts = [id_text(one) for one in failed] if failed else ()
            how = operation_ending(self._ended - begun, result, cause, texts)
            if state == _INTENT_WRITTEN:
                self._state = _ALL_WRITTEN
                return outcome_line(int((clock_offset + self._ended) * 1000), id_, how)
        ids, size, at = self._ids, self._size, int((clock_offset + begun) * 1000)
        total = size if isinstance(size, int) else sum(size)
        if isinstance(ids, str):
            count, array = 1, quoted(id_text(ids))
        else:
            count, array = len(ids), quoted_ids(map(id_text, ids))
        # The state advances after this: an operation whose ids or size cannot be encoded stays unwritten as a whole.
        units = billable_units(count, size)
        if ending is None:
            self._state = _INTENT_WRITTEN
            return intent_line(at, id_, self._prefix, array, total, units)
        self._state = _ALL_WRITTEN
        return operation_line(at, id_, self._prefix, array, total, units, how)


QueueItem = RunningOperation | Operation | State | Movement | Metered
