"""The store of `--memory`: gives the same answers as the durable store, and has all data in dictionaries.

A commit applies its writes one by one, in order. If a write conflicts with a stored row, the commit undoes all changes
that it has made so far.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, Generic, TypeVar, assert_never

from twinbus.namespace.engine.storage_protocol import (
    BrowseRows,
    DropEntity,
    DropRow,
    DueAnswer,
    DueRows,
    ExpiredRows,
    ForgetSeenIds,
    KnownIds,
    MoveRow,
    NextRows,
    OpenedStore,
    PutBody,
    PutCounters,
    PutEntity,
    PutRow,
    PutSeenId,
    PutSessionState,
    QueueLane,
    Row,
    RowsBySeq,
    StoredEntity,
    StoredSessions,
    StoredSessionState,
    StoreRead,
    StoreWrite,
    WaitingSessions,
)
from twinbus.namespace.store.errors import StoreConflictError
from twinbus.namespace.store.interface import empty_answer
from twinbus.namespace.store.write_batch import moved

_LISTED = (QueueLane.ACTIVE, QueueLane.DEFERRED, QueueLane.SCHEDULED)

K = TypeVar("K", bound=Any)

_MOST_KEYS = 1_024


class SortedKeys(Generic[K]):
    """A sorted set of keys: a list of sorted lists of up to 1,024 keys.

    Adding, removing and finding a key are fast also in a set of millions of keys: only one list and the list of last
    keys are searched.
    """

    __slots__ = ("_last", "_lists")

    def __init__(self) -> None:
        self._lists: list[list[K]] = []
        self._last: list[K] = []
        """The last key of each list."""

    def __bool__(self) -> bool:
        return bool(self._lists)

    def add(self, key: K) -> None:
        """Add a key that is not in the set."""
        if not self._lists:
            self._lists.append([key])
            self._last.append(key)
            return
        at = min(bisect_left(self._last, key), len(self._last) - 1)
        keys = self._lists[at]
        insort(keys, key)
        if len(keys) > _MOST_KEYS:
            # Keys that are added in ascending order leave full lists behind.
            cut = _MOST_KEYS if key == keys[-1] else _MOST_KEYS // 2
            self._lists[at : at + 1] = keys[:cut], keys[cut:]
            self._last[at : at + 1] = keys[cut - 1], keys[-1]
        else:
            self._last[at] = keys[-1]

    def remove(self, key: K) -> None:
        """Remove a key that is in the set."""
        at = bisect_left(self._last, key)
        keys = self._lists[at]
        del keys[bisect_left(keys, key)]
        if keys:
            self._last[at] = keys[-1]
        else:
            del self._lists[at], self._last[at]

    def first(self) -> K | None:
        return self._lists[0][0] if self._lists else None

    def after(self, key: K) -> Iterator[K]:
        """Yield the keys greater than `key`, in order. The set must not change until the iteration ends."""
        at = bisect_right(self._last, key)
        if at < len(self._lists):
            keys = self._lists[at]
            yield from islice(keys, bisect_right(keys, key), None)
            for keys in islice(self._lists, at + 1, None):
                yield from keys

    def __iter__(self) -> Iterator[K]:
        for keys in self._lists:
            yield from keys


class _Queue:
    """The rows of one queue and the indexes over them."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], Row] = {}
        self.lanes: dict[int, SortedKeys[int]] = {}
        self.sessions: dict[int, SortedKeys[str]] = {}
        self.of_session: dict[tuple[int, str], SortedKeys[int]] = {}
        self.expiring: SortedKeys[tuple[int, int]] = SortedKeys()
        self.due: SortedKeys[tuple[int, int, int]] = SortedKeys()
        self.states: dict[str, tuple[bytes, int]] = {}
        self.seen: dict[str, int] = {}

    def insert(self, row: Row) -> None:
        key = (row.lane, row.seq)
        if key in self.rows:
            raise StoreConflictError(f"A stored row would be overwritten: queue {row.queue}, lane and number {key}")
        self.rows[key] = row
        self.lanes.setdefault(row.lane, SortedKeys()).add(row.seq)
        if row.session is not None:
            numbers = self.of_session.setdefault((row.lane, row.session), SortedKeys())
            if not numbers:
                self.sessions.setdefault(row.lane, SortedKeys()).add(row.session)
            numbers.add(row.seq)
        if row.expires is not None and row.lane == QueueLane.ACTIVE:
            self.expiring.add((row.expires, row.seq))
        if row.due is not None:
            self.due.add((row.due, row.seq, row.lane))

    def remove(self, key: tuple[int, int]) -> Row:
        row = self.rows.pop(key)
        self.lanes[row.lane].remove(row.seq)
        if row.session is not None:
            numbers = self.of_session[row.lane, row.session]
            numbers.remove(row.seq)
            if not numbers:
                del self.of_session[row.lane, row.session]
                self.sessions[row.lane].remove(row.session)
        if row.expires is not None and row.lane == QueueLane.ACTIVE:
            self.expiring.remove((row.expires, row.seq))
        if row.due is not None:
            self.due.remove((row.due, row.seq, row.lane))
        return row

    def walk(self, lane: int, after: int, session: str | None) -> Iterator[Row]:
        numbers = self.lanes.get(lane) if session is None else self.of_session.get((lane, session))
        return (self.rows[lane, seq] for seq in numbers.after(after)) if numbers else iter(())


_Change = tuple[_Queue, Row, bool]
"""A change of one row: the queue, the row, and whether the row was inserted (True) or removed (False)."""


class MemoryStore:
    """The messages and entities of one namespace, in memory: they are lost when the process ends."""

    inline = True

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}
        self._entities: dict[int, PutEntity] = {}
        self._counters: dict[int, PutCounters] = {}
        self._bodies: dict[int, PutBody] = {}
        self._row_counts: dict[int, int] = {}
        """The number of rows that name each body."""
        self._shared: Counter[int] = Counter()
        """Bytes of stored bodies by topic."""
        self._freed: Counter[int] = Counter()
        """Bytes of bodies that were deleted since the last `take_freed`, by topic."""
        self._gone: set[int] = set()
        self._highest = 0

    def open(self) -> OpenedStore:
        entities = []
        for queue, entity in sorted(self._entities.items()):
            counters = self._counters.get(queue) or PutCounters(queue, 1, 0, 0, 0, 0, 0, 0, entity.created)
            stored = self._queues.get(queue) or _Queue()
            expiry, due = stored.expiring.first(), stored.due.first()
            instants = (expiry and expiry[0], due and due[0])
            entities.append(StoredEntity(entity, counters, *instants, self._shared[queue]))
        return OpenedStore(entities, self._highest + 1, max(self._bodies, default=0) + 1)

    def tidy(self) -> bool:
        return False

    def take_freed(self) -> Mapping[int, int]:
        freed, self._freed = self._freed, Counter()
        return freed

    def close(self) -> None:
        """Does nothing: the rows stay for a later `open` of this object."""

    # --- writes -------------------------------------------------------------------------------------------------------

    def commit(self, writes: Sequence[StoreWrite]) -> None:
        undo: list[_Change] = []
        dropped: set[int] = set()
        unnamed: set[int] = set()
        kept: list[StoreWrite] = []
        try:
            for write in writes:
                if isinstance(write, PutBody):
                    kept.append(write)
                    continue
                number = write.row.queue if isinstance(write, PutRow) else write.queue
                if number in self._gone or number in dropped:
                    continue
                kept.append(write)
                if isinstance(write, DropEntity):
                    dropped.add(number)
                elif isinstance(write, PutRow | DropRow | MoveRow):
                    self._change_row(self._queue(number), write, undo, unnamed)
        except BaseException:
            for queue, row, inserted in reversed(undo):
                self._change(queue, row, not inserted)
            raise
        for write in kept:
            if not isinstance(write, PutRow | DropRow | MoveRow):
                self._apply(write, unnamed)
        for body in unnamed:
            if not self._row_counts.get(body):
                self._row_counts.pop(body, None)
                if (gone := self._bodies.pop(body, None)) is not None:
                    self._shared[gone.topic] -= len(gone.raw)
                    self._freed[gone.topic] += len(gone.raw)

    def _change_row(
        self, queue: _Queue, write: PutRow | DropRow | MoveRow, undo: list[_Change], unnamed: set[int]
    ) -> None:
        match write:
            case PutRow(new):
                undo.append(self._change(queue, new if new.body is None else new._replace(raw=b""), True))
            case DropRow(_, lane, seq) if row := queue.rows.get((lane, seq)):
                undo.append(self._change(queue, row, False))
                if row.body is not None:
                    unnamed.add(row.body)
            case MoveRow(_, lane, seq) if row := queue.rows.get((lane, seq)):
                undo.append(self._change(queue, row, False))
                undo.append(self._change(queue, moved(row, write), True))
            case _:
                pass  # there is no such row

    def _change(self, queue: _Queue, row: Row, insert: bool) -> _Change:
        if insert:
            queue.insert(row)
        else:
            queue.remove((row.lane, row.seq))
        if row.body is not None:
            self._count_row(row.body, 1 if insert else -1)
        return queue, row, insert

    def _queue(self, number: int) -> _Queue:
        if (queue := self._queues.get(number)) is None:
            queue = self._queues[number] = _Queue()
        return queue

    def _count_row(self, body: int, change: int) -> None:
        self._row_counts[body] = self._row_counts.get(body, 0) + change

    def _apply(self, write: StoreWrite, unnamed: set[int]) -> None:
        """Apply a write that cannot fail."""
        match write:
            case PutBody():
                self._bodies[write.body] = write
                self._shared[write.topic] += len(write.raw)
            case PutCounters():
                self._counters[write.queue] = write
            case PutEntity():
                self._entities[write.queue] = write
                self._highest = max(self._highest, write.queue)
            case DropEntity():
                self._drop_entity(write.queue, unnamed)
            case PutSessionState():
                states = self._queue(write.queue).states
                states.pop(write.session, None)
                if write.state is not None:
                    states[write.session] = (write.state, write.at)
            case PutSeenId():
                seen = self._queue(write.queue).seen
                seen.pop(write.message_id, None)  # keeps the ids in the order of their time
                seen[write.message_id] = write.at
            case ForgetSeenIds():
                seen = self._queue(write.queue).seen
                while seen and seen[first := next(iter(seen))] < write.before:
                    del seen[first]
            case PutRow() | DropRow() | MoveRow():
                raise AssertionError("rows are changed by _change_row")
            case _:
                assert_never(write)

    def _drop_entity(self, queue: int, unnamed: set[int]) -> None:
        self._gone.add(queue)
        self._entities.pop(queue, None)
        self._counters.pop(queue, None)
        if (stored := self._queues.pop(queue, None)) is not None:
            for row in stored.rows.values():
                if row.body is not None:
                    self._count_row(row.body, -1)
                    unnamed.add(row.body)

    # --- reads --------------------------------------------------------------------------------------------------------

    def load(self, read: StoreRead) -> Any:
        queue = self._queues.get(read.queue)
        if queue is None:
            return empty_answer(read)
        match read:
            case NextRows():
                return self._bounded(queue.walk(read.lane, read.after, read.session), read.limit, read.max_bytes)
            case RowsBySeq():
                found = (queue.rows.get((lane, seq)) for seq in read.seqs for lane in read.lanes)
                return [self._whole(row) if read.with_raw else row._replace(raw=b"") for row in found if row]
            case BrowseRows():
                lanes = (queue.walk(lane, read.start - 1, read.session) for lane in read.lanes)
                return self._bounded(heapq.merge(*lanes, key=_by_seq), read.limit, read.max_bytes)
            case DueRows():
                due = takewhile(lambda key: key[0] <= read.at, queue.due)
                rows = self._bounded((queue.rows[lane, seq] for _, seq, lane in due), read.limit, read.max_bytes)
                return DueAnswer(rows, _instant_after(queue.due, len(rows)))
            case ExpiredRows():
                expired = islice(takewhile(lambda key: key[0] <= read.at, queue.expiring), read.limit)
                rows = [queue.rows[QueueLane.ACTIVE, seq]._replace(raw=b"") for _, seq in expired]
                return DueAnswer(rows, _instant_after(queue.expiring, len(rows)))
            case WaitingSessions():
                sessions = queue.sessions.get(QueueLane.ACTIVE)
                return list(islice(sessions.after(read.after), read.limit)) if sessions else []
            case StoredSessions():
                return _stored_sessions(queue, read)
            case StoredSessionState():
                return queue.states.get(read.session, (None, 0))[0]
            case KnownIds():
                return {name for name in read.ids if queue.seen.get(name, read.since - 1) >= read.since}
            case _:
                assert_never(read)

    def _whole(self, row: Row) -> Row:
        return row if row.body is None else row._replace(raw=self._bodies[row.body].raw)

    def _bounded(self, rows: Iterable[Row], limit: int, max_bytes: int) -> list[Row]:
        taken: list[Row] = []
        total = 0
        for row in islice(rows, limit):
            total += row.size
            if taken and total > max_bytes:
                break
            taken.append(self._whole(row))
        return taken


def _by_seq(row: Row) -> int:
    return row.seq


def _instant_after(keys: Iterable[tuple[int, ...]], taken: int) -> int | None:
    return next((key[0] for key in islice(keys, taken, None)), None)


def _stored_sessions(queue: _Queue, read: StoredSessions) -> list[str]:
    if read.state_since is not None:
        names = {session for session, (_, at) in queue.states.items() if at > read.state_since}
    else:
        names = {session for lane in _LISTED for session in queue.sessions.get(lane, ())} | queue.states.keys()
    return sorted(names)[read.skip : read.skip + read.limit]
