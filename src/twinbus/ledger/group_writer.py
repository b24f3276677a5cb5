"""The thread that brings a ledger's entries to the disk, in groups, and goes on trying while it cannot.

It hands lines to `segments`, keeps them meanwhile, and says loudly when they cannot be written. Whether an operation
may go on without its entry is not decided here.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from twinbus.ledger.entries import Closed, Gap
from twinbus.ledger.json_lines import encode_entry
from twinbus.ledger.running_operation import Item, lines
from twinbus.ledger.segments import SegmentGoneError, SegmentWriter

_log = logging.getLogger("twinbus.ledger")

RETRY_SECONDS: Final = 1.0
_REMIND_SECONDS: Final = 60.0
# Its lines are made in one go, and other threads wait meanwhile.
_LONGEST_GROUP: Final = 1000
LOOK_EVERY: Final = 256
"""Who puts entries into the queue himself looks at it at every so many of them."""
# A disk that hangs must not fill the memory.
_LONGEST_QUEUE: Final = 100_000


class GroupWriter:
    """One writer's queue and thread. The thread is there from the first entry until `close`."""

    def __init__(
        self,
        directory: Path,
        name: str,
        segments: SegmentWriter,
        *,
        group_seconds: float,
        buffer_bytes: int,
        now: Callable[[], float],
    ) -> None:
        self.directory = directory
        self.name = name
        self.prefix = name.rpartition("-")[2]
        self.failure: str | None = None
        """Why it cannot be written at the moment."""
        self.missing = 0
        """Entries that were never written."""
        self._segments = segments
        self._group_seconds = group_seconds
        self._buffer_bytes = buffer_bytes
        self.now = now
        self.queue: list[Item] = []
        """What is taken for the next group; `put` it there, or `look`."""
        self._waiting: deque[Future[str | None]] = deque()
        # Entered twice where a ledger that nobody holds is collected by its own writer.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self.asleep = True
        """Nothing is written before it is roused, by `look` or `flush`."""
        self._something = threading.Event()
        self._hurry = threading.Event()
        self._closing = False
        self._unwritten = b""
        self._gap = _Gap()
        self._gaps = itertools.count()
        self._booked = 0
        self._booked_in = 0
        """How many missing entries the gaps in the open segment tell of, and which segment that is."""
        self._loss: str | None = None
        """Why entries are gone that were on the disk, until a flush has reported it."""
        self._reminded = -math.inf
        _writers.add(self)

    # --- from any thread ---------------------------------------------------------------------------------------------

    def put(self, item: Item) -> None:
        """Take it for the next group."""
        self.queue.append(item)
        self.look()

    def look(self) -> None:
        """At the queue, after something was put there: at once while `asleep`, and else every LOOK_EVERY at least."""
        length = len(self.queue)
        if length > _LONGEST_QUEUE:
            self._cut_off()
        if self.asleep:
            self._rouse()
        elif length >= _LONGEST_GROUP:
            self._hurry.set()

    def _cut_off(self) -> None:
        """The newest go, which found no room."""
        with self._lock:
            found_no_room = len(self.queue) - _LONGEST_QUEUE
            if found_no_room > 0:
                del self.queue[-found_no_room:]
                self._gap.add(found_no_room, _milliseconds(), "the disk is too slow")

    def flush(self) -> Future[str | None]:
        """Done with None once all that was taken before is on the disk; otherwise with the reason why it is not."""
        future: Future[str | None] = Future()
        self._waiting.append(future)
        self._hurry.set()
        self._rouse()
        return future

    def finish(self) -> threading.Thread | None:
        """Begin to close: the thread writes what is left, seals the segment and ends."""
        with self._lock:
            self._closing = True
            thread = self._thread
        self._hurry.set()
        self._something.set()
        return thread

    def close(self, timeout: float | None = None) -> bool:
        """False: not everything is on the disk."""
        thread = self.finish()
        if thread is not None:
            thread.join(timeout)
        whole = not (self.queue or self._unwritten or self._gap.count or (thread is not None and thread.is_alive()))
        if not whole:
            _log.error("ledger: closed, but not everything is in %s: %s", self.directory, self.failure or "too slow")
        return whole

    def abandon(self) -> None:
        """In the child of a fork: queue, thread and segment are the parent's."""
        self._segments.abandon()
        _writers.discard(self)

    def _rouse(self) -> None:
        with self._lock:
            if not self._closing:
                if self._thread is None or not self._thread.is_alive():
                    thread = threading.Thread(target=self._run, name=f"twinbus-ledger-{self.prefix}", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError as error:
                        # No more threads in this process: the entries wait, and the next one tries again.
                        self._failed(OSError(str(error)))
                        while self._waiting:
                            _tell(self._waiting.popleft(), self.failure)
                        return
                    self._thread = thread
                self.asleep = False
                self._something.set()
                return
        if self._thread is None or not self._thread.is_alive():
            self._refuse()

    def _refuse(self) -> None:
        """It is closed: what comes now is in no segment."""
        if self.queue:
            _log.error("ledger: %d entries came after closing and are not in %s", len(self.queue), self.directory)
            self.queue.clear()
        while self._waiting:
            _tell(self._waiting.popleft(), self.failure or "it was closed")

    def _miss(self, count: int, reason: str) -> None:
        with self._lock:
            self._gap.add(count, _milliseconds(), reason)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._sleep()
            self._turn()
        self._turn()
        self._end()
        self.asleep = True
        self._refuse()

    def _sleep(self) -> None:
        """Until there is something, and then until a group has gathered or somebody waits for it."""
        if self.failure is not None:
            self._hurry.wait(RETRY_SECONDS)
            return
        if not self.queue and not self._waiting:
            self.asleep = True
            # Looked at once more: what came just before this thread was known to be asleep has roused nobody.
            if not self.queue and not self._waiting and not self._closing:
                left = self._segments.seconds_left()
                self._something.wait(None if math.isinf(left) else max(left, 0.0))
            self.asleep = False
            self._something.clear()
        if self.queue:
            self._hurry.wait(self._group_seconds)

    def _turn(self) -> None:
        self._hurry.clear()
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._take()
        reason = None if self._write() else self.failure
        if waiting:
            # Also where it can be written again by now: what was on the disk at the last flush is not there.
            reason, self._loss = reason or self._loss, None
        for future in waiting:
            _tell(future, reason)
        if self._segments.seconds_left() <= 0:
            self._seal()

    def _take(self) -> None:
        """What is queued becomes lines; what the buffer does not hold is missing."""
        with self._lock:  # not cut off meanwhile; that something is added does no harm
            items = self.queue[:]
            del self.queue[: len(items)]
        found = lines(items, self.prefix, time.time() - self.now(), self._wordless)
        group = "".join(found).encode()
        if self.failure is not None and len(self._unwritten) + len(group) > self._buffer_bytes:
            self._miss(len(found), self.failure)
        else:
            # Not added to nothing: a copy of a group costs more than its bytes, as it takes fresh pages.
            self._unwritten = self._unwritten + group if self._unwritten else group

    def _wordless(self, error: Exception) -> None:
        _log.error("ledger: an entry cannot be put down in words", exc_info=error)
        self._miss(1, f"it cannot be put down in words: {error}")

    def _write(self) -> bool:
        """Bring what waits to the disk. False if it is not there, or if what was there before is gone."""
        with self._lock:
            gap = self._gap.copy()
        group = self._unwritten
        if gap.count:
            group += encode_entry(gap.entry(_milliseconds(), self.prefix, next(self._gaps))).encode()
        try:
            if not group:
                self._segments.check()
                return True
            self._segments.append(group)
        except OSError as error:
            self._failed(error)
            return False
        self._unwritten = b""
        self._book(gap)
        if self.failure is not None:
            _log.warning("ledger: %s can be written again; %d entries are missing", self.directory, gap.count)
            self.failure, self._reminded = None, -math.inf
        return True

    def _book(self, gap: _Gap) -> None:
        """The gap is in the open segment."""
        with self._lock:
            self._gap.subtract(gap)
        self.missing += gap.count
        if self._booked_in != self._segments.begun:
            self._booked, self._booked_in = 0, self._segments.begun
        self._booked += gap.count

    def _lost(self, error: SegmentGoneError) -> None:
        """A segment is gone: its entries are missing, and so are those that a gap in it told of."""
        again = self._booked if self._booked_in == self._segments.begun else 0
        self._booked = 0
        self.missing -= again
        self._loss = f"{error.strerror} ({error.filename})"
        self._miss(error.lines + again, self._loss)

    def _failed(self, error: OSError) -> None:
        if isinstance(error, SegmentGoneError):
            self._lost(error)
        self.failure = (
            f"{error.strerror or error} ({error.filename})" if error.filename else str(error.strerror or error)
        )
        if time.monotonic() - self._reminded >= _REMIND_SECONDS:
            self._reminded = time.monotonic()
            held, lost = len(self._unwritten), self._gap.count
            _log.error(
                "ledger: %s cannot be written: %s. %d bytes wait in memory, %d entries are lost."
                " Make room, or put the directory back",
                self.directory, self.failure, held, lost,
            )  # fmt: skip

    def _end(self) -> None:
        if self._segments.begun and self.failure is None:
            closed = Closed(at=_milliseconds(), id=f"{self.prefix}-closed", writer=self.name)
            self._unwritten += encode_entry(closed).encode()
            self._write()
        self._seal()

    def _seal(self) -> None:
        try:
            self._segments.seal()
        except SegmentGoneError as error:
            self._failed(error)
        except OSError as error:
            _log.error("ledger: a segment in %s cannot be sealed: %s", self.directory, error)


class _Gap:
    """Entries that are missing, as long as no segment says so."""

    def __init__(self, count: int = 0, since: int = 0, until: int = 0, reason: str = "") -> None:
        self.count, self.since, self.until, self.reason = count, since, until, reason

    def add(self, count: int, at: int, reason: str) -> None:
        self.since = self.since if self.count else at
        self.count, self.until, self.reason = self.count + count, at, reason

    def copy(self) -> _Gap:
        return _Gap(self.count, self.since, self.until, self.reason)

    def subtract(self, told: _Gap) -> None:
        self.count -= told.count
        self.since = told.until

    def entry(self, at: int, prefix: str, number: int) -> Gap:
        return Gap(
            at=at, id=f"{prefix}-gap-{number}", count=self.count, since=self.since, until=self.until, reason=self.reason
        )


def _tell(future: Future[str | None], reason: str | None) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(reason)


def _milliseconds() -> int:
    return int(time.time() * 1000)


_writers: weakref.WeakSet[GroupWriter] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for writer in tuple(_writers):
        writer.close(10.0)
