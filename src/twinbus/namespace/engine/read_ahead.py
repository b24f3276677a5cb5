"""Rows read ahead of delivery: the front of one lane (or of one session of it) in memory.

A lane can hold millions of rows; memory holds only its front. A `ReadAhead` keeps three things:

* `_rows`: rows in memory, ready to be delivered, by sequence number;
* `_returned`: sequence numbers of rows that became available again (abandoned, or moved here from another lane) and
  whose bodies are not in memory;
* `_cursor`: the sequence number up to which the lane was read. `_complete` says that nothing is stored beyond it.

Every row of the lane is in `_rows`, in `_returned`, locked, or beyond the cursor. `take` returns the next row if it
is in memory. If it returns None and `is_exhausted` is false, the caller loads `next_read()` from the store and passes
the answer to `fill` (or the read to `restore`, if the store failed).

The rows in memory are bounded in number, in bytes, and by a budget that the whole namespace shares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from heapq import heappop, heappush
from typing import Final

from twinbus.namespace.engine.limits import KIB
from twinbus.namespace.engine.storage_protocol import NextRows, Row, RowsBySeq

MAX_ROWS: Final = 256
MAX_BYTES: Final = 256 * KIB
_MIN_READ_BYTES: Final = 16 * KIB
"""Read this much even when the budget is spent: a receiver with credit must get its messages."""
MAX_RETURNED: Final = 4096
"""With more returned rows than this, reading the lane again from the first of them is cheaper."""


class ReadAheadBudget:
    """Bytes of messages that all queues of the namespace together may keep in memory."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class ReadAhead:
    """The front of one lane, in the order of sequence numbers."""

    __slots__ = (
        "_budget",
        "_bytes",
        "_complete",
        "_cursor",
        "_returned",
        "_rows",
        "has_receivers",
        "lane",
        "queue",
        "session",
    )

    def __init__(
        self, queue: int, lane: int, budget: ReadAheadBudget, *, session: str | None = None, empty: bool
    ) -> None:
        self.queue = queue
        self.lane = lane
        self.session = session
        self._budget = budget
        self._rows: deque[Row] = deque()
        self._bytes = 0
        self._returned: list[tuple[int, int]] = []  # a heap of (seq, size), all at or before the cursor
        self._cursor = 0
        self._complete = empty
        self.has_receivers = session is not None
        """Whether a receiver is attached. Without one, rows stay in memory only while half of the budget is free."""

    def append(self, row: Row) -> None:
        """Add a row that is new at the tail of the lane. Keeps the row in memory only if nothing unread precedes it."""
        if not self._complete:
            return
        size = row.size
        budget = self._budget
        limit = budget.limit if self.has_receivers else budget.limit >> 1
        if len(self._rows) < MAX_ROWS and self._bytes + size <= MAX_BYTES and budget.used + size <= limit:
            self._rows.append(row)
            self._bytes += size
            budget.used += size
            self._cursor = row.seq
        else:
            self._complete = False

    def make_available(self, seq: int, size: int) -> None:
        """Note that a stored row can be delivered (again): it was abandoned, or came from another lane."""
        if seq > self._cursor:
            self._complete = False
            return
        heappush(self._returned, (seq, size))
        if len(self._returned) > MAX_RETURNED:
            self._rewind()

    def take(self) -> Row | None:
        """Remove and return the next row; None if it is not in memory."""
        rows = self._rows
        if not rows:
            return None
        returned = self._returned
        if returned and returned[0][0] < rows[0].seq:
            return None
        row = rows.popleft()
        self._bytes -= row.size
        self._budget.used -= row.size
        return row

    @property
    def is_exhausted(self) -> bool:
        """Whether no row is available, neither in memory nor in the store."""
        return self._complete and not self._rows and not self._returned

    def next_read(self) -> NextRows | RowsBySeq:
        """Return what to load when `take` returned None and the lane is not exhausted."""
        if not self._returned:
            room = max(_MIN_READ_BYTES, min(MAX_BYTES, self._budget.limit - self._budget.used))
            return NextRows(self.queue, self.lane, self._cursor, MAX_ROWS, room, self.session)
        before = self._rows[0].seq if self._rows else self._cursor + 1
        seqs: list[int] = []
        room = MAX_BYTES
        while self._returned and self._returned[0][0] < before and (not seqs or room >= self._returned[0][1]):
            seq, size = heappop(self._returned)
            seqs.append(seq)
            room -= size
        return RowsBySeq(self.queue, (self.lane,), tuple(seqs))

    def fill(self, read: NextRows | RowsBySeq, rows: list[Row], locked: Container[int]) -> None:
        """Add the rows that the store returned for `read`, except locked ones."""
        if isinstance(read, RowsBySeq):
            self._rows.extendleft(reversed(rows))
        elif rows:
            self._cursor = rows[-1].seq
            rows = [row for row in rows if row.seq not in locked]
            self._rows.extend(rows)
        else:
            self._complete = True
        self._charge(sum(row.size for row in rows))

    def restore(self, read: NextRows | RowsBySeq) -> None:
        """Undo `next_read` after the store failed: the same rows are read again next time."""
        if isinstance(read, RowsBySeq):
            for seq in read.seqs:
                heappush(self._returned, (seq, 0))

    def forget(self, seqs: Container[int]) -> None:
        """Drop rows that were removed from the store."""
        # `_returned` can keep their numbers: the store leaves out rows that are missing.
        kept = [row for row in self._rows if row.seq not in seqs]
        if len(kept) < len(self._rows):
            self._charge(sum(row.size for row in kept) - self._bytes)
            self._rows = deque(kept)

    def set_has_receivers(self, has_receivers: bool) -> None:
        """Note whether a receiver is attached. When the last one leaves, the rows in memory are given up."""
        self.has_receivers = has_receivers
        if not has_receivers and self._rows:
            self._rewind()

    def close(self) -> None:
        """Give up everything in memory, and its share of the budget."""
        self._charge(-self._bytes)
        self._rows.clear()
        self._returned.clear()

    def _rewind(self) -> None:
        """Give up everything in memory; the lane is read again from the first row that was available."""
        first = [self._rows[0].seq] if self._rows else []
        if self._returned:
            first.append(self._returned[0][0])
        self.close()
        self._cursor = min(first) - 1
        self._complete = False

    def _charge(self, size: int) -> None:
        self._bytes += size
        self._budget.used += size
