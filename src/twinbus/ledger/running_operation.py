"""One operation in flight, from `Ledger.begin` to `end`, and the lines that it becomes.

Theory of operation. `Ledger.begin` puts a RunningOperation into the writer's queue. When the writer's thread takes the
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

from collections.abc import Callable, Sequence
from typing import Protocol

from twinbus.ledger.entries import OK, billable_units
from twinbus.ledger.json_lines import (
    id_text,
    intent_line,
    operation_ending,
    operation_line,
    outcome_line,
    quoted,
    quoted_ids,
)

_Ending = tuple[str, str | None, Sequence[object]]
"""Result, cause and failed ids, as `RunningOperation.end` takes them."""

# What the writer's thread has done with an operation.
_QUEUED, _TAKEN, _INTENT_WRITTEN, _ALL_WRITTEN = range(4)


class OperationQueue(Protocol):
    """The writer of an operation, as the operation sees it."""

    writer_id: str
    now: Callable[[], float]

    def put(self, item: RunningOperation, /) -> None: ...


class RunningOperation:
    """What `Ledger.begin` returns. Call `end` once. If `end` is never called, the outcome is recorded as unknown."""

    __slots__ = ("_begun", "_ended", "_ending", "_ids", "_number", "_prefix", "_queue", "_size", "_state")

    def __init__(
        self, queue: OperationQueue, number: int, prefix: str, ids: str | Sequence[object], size: int | Sequence[int]
    ) -> None:
        """`prefix` is what `operation_prefix` returns; `ids` and `size` are those of `Ledger.begin`."""
        self._queue = queue
        self._number = number
        self._prefix = prefix
        self._ids = ids
        self._size = size
        self._ending: _Ending | None = None
        self._state = _QUEUED
        self._begun = self._ended = queue.now()

    @property
    def id(self) -> str:
        """The operation id."""
        return f"{self._queue.writer_id}-{self._number}"

    def end(self, result: str = OK, *, cause: str | None = None, failed: Sequence[object] = ()) -> None:
        """Records how the operation ended. Calls after the first one have no effect.

        `result` is "ok"; "unknown" if the operation may have happened, with the reason in `cause`; or the reason why it
        did not happen. `failed`: the result concerns only these message ids, and the others succeeded.
        """
        if self._ending is None:
            self._ended = self._queue.now()
            # From here on the writer may see the ending. The mark must be read after this line, not before.
            self._ending = (result, cause, failed)
            if self._state != _QUEUED:
                self._queue.put(self)

    def next_line(self, clock_offset: float) -> str:
        """Returns the line that is to be written now, or "". Called by the writer's thread only.

        `clock_offset` plus a time of the operation's clock is the time since the epoch.
        """
        if self._state == _QUEUED:
            self._state = _TAKEN  # before the ending is read
        state, ending = self._state, self._ending
        if state == _ALL_WRITTEN or (state == _INTENT_WRITTEN and ending is None):
            return ""
        # The state advances after the line is made: an operation whose ids have no text stays unwritten as a whole.
        line = self._line(ending, clock_offset)
        self._state = _INTENT_WRITTEN if ending is None else _ALL_WRITTEN
        return line

    def _line(self, ending: _Ending | None, clock_offset: float) -> str:
        id_, begun = f"{self._queue.writer_id}-{self._number}", self._begun
        if ending is None:
            return intent_line(int((clock_offset + begun) * 1000), id_, *self._request())
        result, cause, failed = ending
        how = operation_ending(self._ended - begun, result, cause, [id_text(one) for one in failed] if failed else ())
        if self._state == _INTENT_WRITTEN:
            return outcome_line(int((clock_offset + self._ended) * 1000), id_, how)
        return operation_line(int((clock_offset + begun) * 1000), id_, *self._request(), how)

    def _request(self) -> tuple[str, str, int, int]:
        """Prefix, ids, bytes and units of the line."""
        ids, size = self._ids, self._size
        total = size if isinstance(size, int) else sum(size)
        if isinstance(ids, str):
            return self._prefix, quoted(id_text(ids)), total, billable_units(1, size)
        return self._prefix, quoted_ids(map(id_text, ids)), total, billable_units(len(ids), size)
