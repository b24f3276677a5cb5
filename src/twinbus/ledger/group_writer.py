"""Writes the entries of one ledger to its segments. A thread syncs the segments.

Theory of operation. There are two steps: an entry is *written* to the segment (it survives the end of the process), and
*synced* to the disk (it survives a power loss).

With durability "process", `put` and `RunningOperation.end` write the entry themselves, before they return. Only the
intent of an operation in flight is queued. With durability "lazy", every entry is queued. In both cases the writer's
thread sleeps until there is something to do. It waits for one group interval; the entries of this time are a *group*.
Then it writes the queue and syncs the segment. `flush` and a full group end the interval early. `write` writes the
queue in the thread of its caller, and does not wait for a sync (L1).

An entry is turned into a line and written under one lock, `SegmentWriter.lock`: so an intent is always written before
its outcome. No sync happens under this lock. Nothing is logged under it: a handler of the application's logging has a
lock of its own, and may send through a pair and so record an entry.

A signal handler may run at any line of a write, in the same thread, and may record, flush or close. So the locks are
reentrant, and a handler that interrupted a write never waits for the writer's thread (`is_interrupted`).

While the disk cannot be written, the lines are stored in memory, up to `buffer_bytes`, and the thread tries again every
RETRY_SECONDS. Further lines are dropped and counted as missing; as soon as the disk can be written, a `gap` entry
reports the count. Entries of a segment that somebody removed count as missing too (L7).

The writer only reports failures (`failure`, `missing`, the log). The `Ledger` decides whether operations may go on.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from twinbus.ledger.balance import id_of_writer
from twinbus.ledger.entries import Closed, Gap
from twinbus.ledger.failing_marks import FailingMark
from twinbus.ledger.json_lines import encode_entry
from twinbus.ledger.running_operation import QueueItem, RunningOperation
from twinbus.ledger.segments import SegmentGoneError, SegmentWriter

_log = logging.getLogger("twinbus.ledger")

RETRY_SECONDS: Final = 1.0
RENEW_SECONDS: Final = 300.0
"""An idle writer renews the time of its open segment this often: on other hosts only this time shows that it lives."""
_REMIND_SECONDS: Final = 60.0
# The most entries of a group. The lines of a group are made without a pause, and other threads wait for the GIL then.
_GROUP_LIMIT: Final = 1000
# The most entries in the queue, so that they do not fill the memory if the disk does not answer.
_QUEUE_LIMIT: Final = 100_000


class GroupWriter:
    """One writer's queue and thread. The thread runs from the first entry until `close`."""

    def __init__(
        self,
        directory: Path,
        name: str,
        segments: SegmentWriter,
        *,
        writes_through: bool,
        group_seconds: float,
        buffer_bytes: int,
        now: Callable[[], float],
    ) -> None:
        self.directory = directory
        self.name = name
        self.writer_id = id_of_writer(name)
        """The ids of this writer's entries begin with this text."""
        self.now = now
        self.writes_through = writes_through
        """Whether entries are written before `put` returns: durability "process"."""
        self.failure: str | None = None
        """Why the ledger cannot be written now; None if it can be written."""
        self.missing = 0
        """The number of entries that were never written and that a gap entry has reported."""
        self._segments = segments
        self._group_seconds = group_seconds
        self._buffer_bytes = buffer_bytes
        self.numbers: Iterator[int] = itertools.count()
        """Numbers of this writer's entries."""
        self.queue: list[QueueItem] = []
        """Entries for the next group. `OperationQueue` describes what to do after an append."""
        self._flushes: deque[Future[str | None]] = deque()
        # Reentrant: while the writer's thread holds the lock, the garbage collector may run in this thread and call
        # `Ledger.__del__`, which calls `finish`.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._start_turn = threading.Lock()
        """Held while the thread is started. It is not reentrant: a signal handler must not start a second thread."""
        self.is_asleep = True
        """Whether the thread waits for `_wake`, or does not run yet."""
        self._work_queued = _WakeUp()
        self._flush_now = _WakeUp()
        self.is_closing = False
        """Whether `finish` was called."""
        self._ended = False
        """Whether the last line was written. Changed only under the lock of the segments."""
        self._is_blocked = False
        """Whether the last write failed. Then only the thread and `write` try again, not every entry."""
        self._mark = FailingMark(directory, name)
        """The mark that shows readers that this writer cannot write."""
        self._unwritten: list[bytes] = []
        """Lines that are not written yet, or must be written again. Changed only under the lock of the segments.

        This is a list, because it may have many MB, and every entry adds to it while the disk cannot be written.
        """
        self._unwritten_bytes = 0
        self._unreported = _MissingEntries()
        """Missing entries that no gap entry reports yet."""
        self._gap_numbers = itertools.count()
        self._reported_in_segment = 0
        self._reporting_segment = 0
        """Number of missing entries in the synced gap entries of the open segment, and the number of this segment."""
        self._unsynced_reports = 0
        """Number of missing entries in the gap entries that were written since the last sync."""
        self._loss: str | None = None
        """Why entries that were on the disk are lost. A flush returns this reason and then sets it to None."""
        self._reminded = -math.inf
        self._unlogged: deque[tuple[int, str, tuple[object, ...], Exception | None]] = deque()
        """What is to be logged after the lock is released: level, text, arguments and exception."""
        _writers.add(self)

    # --- from any thread ---------------------------------------------------------------------------------------------

    def put(self, item: QueueItem) -> None:
        """Records an entry: writes it, or queues it for the next group."""
        if self.writes_through:
            self.write_through(item)
        else:
            self.queue.append(item)
            self.notify()

    def notify(self) -> None:
        """Wakes the thread if it sleeps or if a group is full, and drops the newest entries if the queue is full."""
        length = len(self.queue)
        if length >= _GROUP_LIMIT and self.writes_through:
            # `write` empties the queue. Operations that are already written stay until then: they must not fill it.
            self.write()
        elif length > _QUEUE_LIMIT:
            self._drop_newest()
        if self.is_asleep:
            self._wake()
        elif length >= _GROUP_LIMIT:
            self._flush_now.set()

    def write_through(self, item: QueueItem) -> None:
        """Writes one entry to the segment, before entries that are queued. Raises nothing if this fails."""
        with self._segments.lock:
            if self._ended:
                self.queue.append(item)
            elif line := self._line(item, time.time() - self.now()).encode():
                if self._is_blocked or self._unwritten or self._unreported.count:
                    self._write_after_others(line)
                else:
                    try:
                        self._segments.write(line, 1)
                    except OSError as error:
                        self._store(line, 1)
                        self._is_blocked = True
                        self._record_failure(error)
                    except BaseException:  # KeyboardInterrupt in this thread: the line may be in the segment or not
                        self._store(line, 1)
                        raise
        if self._unlogged:
            self._log_now()
        if self.is_asleep:
            self._wake()

    def _write_after_others(self, line: bytes) -> None:
        self._store(line, 1)
        if not self._is_blocked:
            self._try_write()

    def write(self) -> str | None:
        """Writes all queued entries to the segment, without waiting for a sync. Returns why this failed, or None."""
        with self._segments.lock:
            if self._ended:
                return self.failure or "it was closed"
            self._take_queue()
            reason = None if self._try_write() else self.failure
        self._log_now()
        if self.is_asleep:
            self._wake()
        return reason

    def _drop_newest(self) -> None:
        with self._lock:
            excess = len(self.queue) - _QUEUE_LIMIT
            if excess > 0:
                del self.queue[-excess:]
                self._unreported.add(excess, _milliseconds(), "the disk is too slow")

    def flush(self) -> Future[str | None]:
        """Returns a future for the time when all entries that are queued now are on the disk.

        The result of the future is None, or the reason why entries are not on the disk.
        """
        future: Future[str | None] = Future()
        if self.is_interrupted():
            future.set_result("a signal handler interrupted a write of the same thread")
            return future
        self._flushes.append(future)
        self._flush_now.set()
        self._wake()
        return future

    def is_interrupted(self) -> bool:
        """Returns whether the calling thread is inside a write already: a signal handler interrupted it.

        The writer's thread needs the locks that this write holds. So the handler must not wait for the thread.
        """
        return any(map(_is_held_here, (self._segments.lock, self._lock)))

    def finish(self) -> threading.Thread | None:
        """Starts to close: the thread will write the queued entries, seal the segment and end. Returns the thread."""
        with self._lock:
            self.is_closing = True
            if self._thread is None and (self._segments.opened or self.queue):
                self._is_started()
            thread = self._thread
        self._flush_now.set()
        self._work_queued.set()
        return thread

    def close(self, timeout: float | None = None) -> bool:
        """Closes the writer. Returns whether all entries are on the disk; logs an error if not."""
        thread = self.finish()
        if thread is not None:
            thread.join(timeout)
        is_running = thread is not None and thread.is_alive()
        is_whole = not (self.queue or self._unwritten or self._unreported.count or is_running)
        if not is_whole:
            _log.error("ledger: closed, but not everything is in %s: %s", self.directory, self.failure or "too slow")
        return is_whole

    def abandon(self) -> None:
        """Closes the file without writing. For the child process of a fork: the parent process writes the entries."""
        self._lock = threading.RLock()  # a thread of the parent may have had the lock
        self.is_closing = self._ended = True
        self.is_asleep = False  # the thread does not exist in this process, so nothing must wake it
        self.queue.clear()
        self._mark.abandon()
        self._segments.abandon()
        _writers.discard(self)

    def _wake(self) -> None:
        """Starts the thread if it does not run, and wakes the thread. If the thread has ended, drops the queue.

        If the writer is closing and the thread never ran, a write in progress may have been the first one. Then the
        thread is started to seal the segment.
        """
        with self._lock:
            is_unused = not (self._segments.opened or self.queue)
            is_refused = self.is_closing and (self._thread is not None or is_unused)
            if not is_refused and self._is_started():
                self.is_asleep = False
                self._work_queued.set()
        self._log_now()
        if is_refused and (self._thread is None or not self._thread.is_alive()):
            self._refuse()

    def _is_started(self) -> bool:
        """Starts the thread if it does not run. Returns False if this fails; the next `_wake` tries again."""
        if not self._start_turn.acquire(blocking=False):  # a signal handler interrupted this method
            return True
        try:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name=f"twinbus-ledger-{self.writer_id}", daemon=True)
                thread.start()
                self._thread = thread
        except RuntimeError as error:  # the process cannot start more threads; the entries stay queued
            self.is_asleep = True
            self._record_failure(OSError(str(error)), is_disk=False)
            while self._flushes:
                _resolve(self._flushes.popleft(), self.failure)
            return False
        finally:
            self._start_turn.release()
        return True

    def _refuse(self) -> None:
        """Logs and drops entries that were queued after closing."""
        if self.queue:
            _log.error("ledger: %d entries came after closing and are not in %s", len(self.queue), self.directory)
            self.queue.clear()
        while self._flushes:
            _resolve(self._flushes.popleft(), self.failure or "it was closed")

    def _log_later(self, level: int, text: str, *arguments: object, error: Exception | None = None) -> None:
        self._unlogged.append((level, text, arguments, error))

    def _log_now(self) -> None:
        """Logs what was noted under a lock. The caller has released the lock."""
        while self._unlogged:
            try:
                level, text, arguments, error = self._unlogged.popleft()
            except IndexError:  # another thread logs the last one
                return
            _log.log(level, text, *arguments, exc_info=error)

    def _count_missing(self, count: int, reason: str) -> None:
        with self._lock:
            self._unreported.add(count, _milliseconds(), reason)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.is_closing:
            self._sleep()
            self._write_group()
        self._write_group()
        self._end()
        self.is_asleep = True
        self._refuse()

    def _sleep(self) -> None:
        """Waits until there is something to do; then for the group interval, a full group or a flush."""
        if self.failure is not None:
            self._flush_now.wait(RETRY_SECONDS)
            return
        if not self._has_work():
            self.is_asleep = True
            # Checked again, because `put` did not wake this thread before the line above was executed.
            if not self._has_work() and not self.is_closing:
                left = self._segments.seconds_left()
                self._work_queued.wait(max(min(left, RENEW_SECONDS), 0.0))
                if not self._has_work():
                    self._segments.renew()
            self.is_asleep = False
            self._work_queued.clear()
        if not self._flushes and self._has_work():
            self._flush_now.wait(self._group_seconds)

    def _has_work(self) -> bool:
        segments = self._segments
        return bool(self.queue or self._flushes or self._unwritten or segments.needs_sync or segments.is_preparing)

    def _write_group(self) -> None:
        self._flush_now.clear()
        flushes = [self._flushes.popleft() for _ in range(len(self._flushes))]
        with self._segments.lock:
            self._take_queue()
            is_written = self._try_write()
        is_synced = self._sync()
        with self._segments.lock:
            reason = None if is_written and is_synced else self.failure
            # A write of another thread may have failed during the sync: then the failure is a new one.
            if reason is None and self.failure is not None and not self._unwritten:
                text = "ledger: %s can be written again; %d entries are missing"
                self._log_later(logging.WARNING, text, self.directory, self.missing)
                self.failure, self._reminded = None, -math.inf
                self._mark.remove()
        self._log_now()
        if flushes:
            # A flush also fails if entries are lost that an earlier flush had reported as written.
            reason, self._loss = reason or self._loss, None
        for future in flushes:
            _resolve(future, reason)
        if self._segments.seconds_left() <= 0:
            self._seal()

    def _sync(self) -> bool:
        """Syncs the segment. Returns whether all lines that were written are on the disk."""
        for _ in range(2):
            error: OSError | None = None
            try:
                self._segments.sync()
            except OSError as caught:
                error = caught
            with self._segments.lock:
                repeated, forgotten = self._segments.take_repeated()
                # First the older lines, so that an intent stays before its outcome.
                if repeated:
                    self._unwritten.insert(0, repeated)
                    self._unwritten_bytes += len(repeated)
                if forgotten:
                    self._count_missing(forgotten, "a sync failed")
                if error is not None:
                    self._record_failure(error)
                    return False
                if not repeated:
                    self._record_synced_reports()
                    return True
                # Another writer sealed the segment: its last lines also go into the next one.
                if not self._try_write():
                    return False
        return not self._segments.needs_sync

    # --- with the lock of the segments -------------------------------------------------------------------------------

    def _take_queue(self) -> None:
        """Turns the queue into lines in `_unwritten`."""
        with self._lock:  # excludes `_drop_newest`; an append by another thread is allowed
            items = self.queue[:]
            del self.queue[: len(items)]
        clock_offset = time.time() - self.now()
        lines = [line for item in items if (line := self._line(item, clock_offset))]
        if lines:
            self._store("".join(lines).encode(), len(lines))

    def _line(self, item: QueueItem, clock_offset: float) -> str:
        """Returns the line of an item, or "" if it has none now. Counts an item that cannot be encoded as missing."""
        try:
            return item.next_line(clock_offset) if isinstance(item, RunningOperation) else encode_entry(item)
        except Exception as error:  # the id or size of a caller may raise any exception
            self._log_later(logging.ERROR, "ledger: an entry cannot be encoded", error=error)
            if isinstance(item, RunningOperation):
                item.give_up()
            self._count_missing(1, f"it cannot be encoded: {error}")
            return ""

    def _store(self, lines: bytes, count: int) -> None:
        """Adds lines to `_unwritten`. If the ledger cannot be written and the buffer is full, drops them."""
        if self.failure is not None and self._unwritten_bytes + len(lines) > self._buffer_bytes:
            self._count_missing(count, self.failure)
        else:
            self._unwritten.append(lines)
            self._unwritten_bytes += len(lines)

    def _try_write(self) -> bool:
        """Writes the unwritten lines, and a gap entry if entries are missing. Returns False if this fails."""
        with self._lock:
            gap = self._unreported.copy()
        chunks = self._unwritten
        if gap.count:
            entry = gap.entry(_milliseconds(), self.writer_id, next(self._gap_numbers))
            chunks = [*chunks, encode_entry(entry).encode()]
        # `join` does not copy a single chunk: a copy would need new memory pages.
        if lines := b"".join(chunks):
            try:
                self._segments.write(lines, lines.count(b"\n"))
            except OSError as error:
                self._is_blocked = True
                self._record_failure(error)
                return False
            self._unwritten, self._unwritten_bytes = [], 0
            with self._lock:
                self._unreported.subtract(gap)
            self.missing += gap.count
            self._unsynced_reports += gap.count
        self._is_blocked = False
        return True

    def _record_synced_reports(self) -> None:
        """Records that the gap entries of the open segment are on the disk."""
        if self._reporting_segment != self._segments.opened:
            self._reported_in_segment, self._reporting_segment = 0, self._segments.opened
        self._reported_in_segment += self._unsynced_reports
        self._unsynced_reports = 0

    def _record_loss(self, error: SegmentGoneError) -> None:
        """Counts the entries of a lost segment as missing.

        Missing entries that only gap entries of this segment reported are counted again: no gap entry reports them now.
        """
        again = self._reported_in_segment if self._reporting_segment == self._segments.opened else 0
        self._reported_in_segment = 0
        self.missing -= again
        self._loss = f"{error.strerror} ({error.filename})"
        self._count_missing(error.lines + again, self._loss)

    def _record_failure(self, error: OSError, *, is_disk: bool = True) -> None:
        if isinstance(error, SegmentGoneError):
            self._record_loss(error)
        if is_disk:
            self._mark.make()
        reason = str(error.strerror or error)
        self.failure = f"{reason} ({error.filename})" if error.filename else reason
        if time.monotonic() - self._reminded >= _REMIND_SECONDS:
            self._reminded = time.monotonic()
            self._log_later(
                logging.ERROR,
                "ledger: %s cannot be written: %s. %d bytes wait in memory, %d entries are lost."
                " Make room, or put the directory back",
                self.directory,
                self.failure,
                self._unwritten_bytes,
                self._unreported.count,
            )

    def _end(self) -> None:
        with self._segments.lock:
            self._take_queue()
            if self._segments.opened and self.failure is None:
                closed = Closed(at=_milliseconds(), id=f"{self.writer_id}-closed", writer=self.name)
                line = encode_entry(closed).encode()
                self._unwritten.append(line)
                self._unwritten_bytes += len(line)
                self._try_write()
            self._ended = True
            self._segments.retire()
        self._sync()
        self._log_now()
        self._mark.abandon()

    def _seal(self) -> None:
        """Seals the segment when it has reached its maximum age.

        The next segment is opened at once: as long as this process locks a segment, nobody takes the writer for dead,
        its operations for interrupted, and its last entries for missing.
        """
        with self._segments.lock:
            try:
                self._segments.rotate()
            except OSError as error:
                self._record_failure(error)
        self._sync()
        self._log_now()


class _WakeUp:
    """Like a `threading.Event`, but `set` may interrupt `set`: an Event's lock is not reentrant.

    Only one thread may call `wait` and `clear`. After `wait`, it must call `clear` before it waits again.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._queue.put(None)

    def wait(self, timeout: float | None) -> None:
        with contextlib.suppress(queue.Empty):
            self._queue.get(timeout=timeout)

    def clear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()


class _MissingEntries:
    """How many entries are missing, the times of the first and the last, and the reason for the last."""

    def __init__(self, count: int = 0, since: int = 0, until: int = 0, reason: str = "") -> None:
        self.count, self.since, self.until, self.reason = count, since, until, reason

    def add(self, count: int, at: int, reason: str) -> None:
        self.since = self.since if self.count else at
        self.count, self.until, self.reason = self.count + count, at, reason

    def copy(self) -> _MissingEntries:
        return _MissingEntries(self.count, self.since, self.until, self.reason)

    def subtract(self, reported: _MissingEntries) -> None:
        self.count -= reported.count
        self.since = reported.until

    def entry(self, at: int, writer_id: str, number: int) -> Gap:
        id_ = f"{writer_id}-gap-{number}"
        return Gap(at=at, id=id_, count=self.count, since=self.since, until=self.until, reason=self.reason)


def _is_held_here(lock: threading.RLock) -> bool:
    """Returns whether the calling thread holds a lock."""
    try:
        threading.Condition(lock).notify()  # nothing waits for this condition
    except RuntimeError:  # it needs the lock
        return False
    return True


def _resolve(future: Future[str | None], reason: str | None) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(reason)


def _milliseconds() -> int:
    return int(time.time() * 1000)


_writers: weakref.WeakSet[GroupWriter] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for writer in tuple(_writers):
        writer.close(10.0)
