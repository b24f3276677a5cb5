"""Rows read ahead of delivery: the first rows of one lane, or of one session in a lane, in memory.

A lane can hold millions of rows; only its first rows are in memory. A `ReadAhead` has three parts:

* `_rows`: rows in memory, ready to be delivered, by sequence number;
* `_returned`: sequence numbers of rows that became available again (abandoned, or moved here from another lane) and
  whose bodies are not in memory;
* `_cursor`: the sequence number up to which the lane was read. If `_complete` is true, the store has no row after the
  cursor.

Every row of the lane is in `_rows`, in `_returned`, locked, or after the cursor. `take` returns the next row if this
row is in memory. If `take` returns None and `is_exhausted` is false, the caller loads `next_read()` from the store and
passes the answer to `fill`. If the store fails, the caller passes the read to `restore` instead.

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
"""A read asks for at least this number of bytes, also if the budget is used up: a receiver must get its messages."""
MAX_RETURNED: Final = 4096
"""The greatest number of returned rows. With more, it is faster to read the lane again from the first of them."""


class ReadAheadBudget:
    """The number of bytes that messages of all queues of the namespace together may use in memory."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class ReadAhead:
    """The first rows of one lane, in the order of sequence numbers."""

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
        """Whether a receiver is attached. Without a receiver, new rows may use only half of the budget."""

    def append(self, row: Row) -> None:
        """Add a new row at the end of the lane. The row is added to memory only if all rows before it were read."""
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
        """Note that a stored row can be delivered: it was abandoned, or was moved here from another lane."""
        if seq > self._cursor:
            self._complete = False
            return
        heappush(self._returned, (seq, size))
        if len(self._returned) > MAX_RETURNED:
            self._rewind()

    def take(self) -> Row | None:
        """Remove and return the next row; None if the next row is not in memory."""
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
        """Return the read that loads the next rows. Call this if `take` returned None and the lane is not exhausted."""
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
        """Undo `next_read` after the store failed: the next call of `next_read` asks for the same rows."""
        if isinstance(read, RowsBySeq):
            for seq in read.seqs:
                heappush(self._returned, (seq, 0))

    def forget(self, seqs: Container[int]) -> None:
        """Drop from memory the rows with these sequence numbers, which were removed from the store."""
        # The numbers of removed rows may stay in `_returned`: the store leaves out rows that do not exist.
        kept = [row for row in self._rows if row.seq not in seqs]
        if len(kept) < len(self._rows):
            self._charge(sum(row.size for row in kept) - self._bytes)
            self._rows = deque(kept)

    def set_has_receivers(self, has_receivers: bool) -> None:
        """Note whether a receiver is attached. When the last receiver leaves, the rows are removed from memory."""
        self.has_receivers = has_receivers
        if not has_receivers and self._rows:
            self._rewind()

    def close(self) -> None:
        """Remove all rows from memory, and return their bytes to the budget."""
        self._charge(-self._bytes)
        self._rows.clear()
        self._returned.clear()

    def _rewind(self) -> None:
        """Remove all rows from memory. The lane is then read again from the first row that was available."""
        first = [self._rows[0].seq] if self._rows else []
        if self._returned:
            first.append(self._returned[0][0])
        self.close()
        self._cursor = min(first) - 1
        self._complete = False

    def _charge(self, size: int) -> None:
        self._bytes += size
        self._budget.used += size
