"""The rows that stand ready in front of one lane (or one session of it), and where the rest must be read from.

Every row of the lane is either in here (ready or returned), locked, or beyond the cursor. Bounded in rows, in
bytes, and by a budget that all windows of the namespace share.
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
_LEAST_BYTES: Final = 16 * KIB  # read even when the budget is spent: whoever has credit must be served
MAX_RETURNED: Final = 4096
"""Beyond this many returned rows it is cheaper to read the lane again from the first of them."""


class ReadAheadBudget:
    """Bytes of messages that may stand ready in memory, all queues together."""

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
        "attended",
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
        self._complete = empty  # nothing is stored beyond the cursor
        self.attended = session is not None
        """Somebody receives from here. Where nobody does, messages stay in memory only while there is plenty."""

    def append(self, row: Row) -> None:
        """A new row came to the tail of the lane. It is kept only if nothing unread stands before it."""
        if not self._complete:
            return
        size = row.size
        budget = self._budget
        limit = budget.limit if self.attended else budget.limit >> 1
        if len(self._rows) < MAX_ROWS and self._bytes + size <= MAX_BYTES and budget.used + size <= limit:
            self._rows.append(row)
            self._bytes += size
            budget.used += size
            self._cursor = row.seq
        else:
            self._complete = False

    def arrived(self, seq: int, size: int) -> None:
        """A row is available (again) that is not in memory: abandoned, or come from another lane."""
        if seq > self._cursor:
            self._complete = False
            return
        heappush(self._returned, (seq, size))
        if len(self._returned) > MAX_RETURNED:
            self._rewind()

    def take(self) -> Row | None:
        """The next row, if it is at hand."""
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
    def exhausted(self) -> bool:
        """Nothing is available, at hand or in the store."""
        return self._complete and not self._rows and not self._returned

    def need(self) -> NextRows | RowsBySeq:
        """What to read when `take` has nothing although the window is not exhausted."""
        if not self._returned:
            room = max(_LEAST_BYTES, min(MAX_BYTES, self._budget.limit - self._budget.used))
            return NextRows(self.queue, self.lane, self._cursor, MAX_ROWS, room, self.session)
        before = self._rows[0].seq if self._rows else self._cursor + 1
        seqs: list[int] = []
        room = MAX_BYTES
        while self._returned and self._returned[0][0] < before and (not seqs or room >= self._returned[0][1]):
            seq, size = heappop(self._returned)
            seqs.append(seq)
            room -= size
        return RowsBySeq(self.queue, (self.lane,), tuple(seqs))

    def fill(self, need: NextRows | RowsBySeq, rows: list[Row], locked: Container[int]) -> None:
        """Take in the answer to `need`, less what is locked."""
        if isinstance(need, RowsBySeq):
            self._rows.extendleft(reversed(rows))
        elif rows:
            self._cursor = rows[-1].seq
            rows = [row for row in rows if row.seq not in locked]
            self._rows.extend(rows)
        else:
            self._complete = True
        self._charge(sum(row.size for row in rows))

    def restore(self, need: NextRows | RowsBySeq) -> None:
        """The need was not answered: what it asked for is to be asked for again."""
        if isinstance(need, RowsBySeq):
            for seq in need.seqs:
                heappush(self._returned, (seq, 0))

    def forget(self, seqs: Container[int]) -> None:
        """These rows are gone. Returned ones need no care: the store leaves out what is missing."""
        kept = [row for row in self._rows if row.seq not in seqs]
        if len(kept) < len(self._rows):
            self._charge(sum(row.size for row in kept) - self._bytes)
            self._rows = deque(kept)

    def attend(self, attended: bool) -> None:
        """Where nobody receives any more, what was read for receivers goes back to where it came from."""
        self.attended = attended
        if not attended and self._rows:
            self._rewind()

    def close(self) -> None:
        self._charge(-self._bytes)
        self._rows.clear()
        self._returned.clear()

    def _rewind(self) -> None:
        first = [self._rows[0].seq] if self._rows else []
        if self._returned:
            first.append(self._returned[0][0])
        self.close()
        self._cursor = min(first) - 1
        self._complete = False

    def _charge(self, size: int) -> None:
        self._bytes += size
        self._budget.used += size
