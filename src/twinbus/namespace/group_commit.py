"""Group commit: collects writes in a group while the previous group is written to disk.

The event loop adds writes to the open group. A writer thread commits one group at a time. When the commit is finished,
the open group is closed and committed next. In this way, many small decisions share one sync of the disk. The slower
the disk is, the larger the groups become.

Groups are numbered and finish in order. `when(group, call)` runs a call after that group is on disk. The runtime sends
acknowledgements in such calls, which keeps the rule "persist, then acknowledge". A reader thread answers reads while
the writer thread commits.

After a commit has failed, the state in memory contains changes that are not on disk. From then on no group finishes and
no waiting call runs, so no change that is not on disk is acknowledged. The server ends the namespace. It also ends the
namespace after a read that found a damaged message: nobody may receive what is behind the message as if it were not
there.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from twinbus.namespace.engine.storage_protocol import PutBody, PutRow, StoreRead, StoreWrite
from twinbus.namespace.store import Store, StoreDamagedError

_log = logging.getLogger(__name__)

CONGESTED_BYTES = 32 * 1024 * 1024
"""Bytes of messages waiting for the disk above which connections stop reading."""


class GroupCommit:
    """The writer thread and the reader thread of one store, used from the event loop.

    `failed` is called once if a commit fails or a read finds damage. `committed` is called after each commit, with its
    duration in seconds. `freed` is called with the bytes of shared bodies that were deleted, by topic. All three are
    called on the event loop.
    """

    def __init__(
        self,
        store: Store,
        *,
        failed: Callable[[Exception], None],
        committed: Callable[[float], None],
        freed: Callable[[Mapping[int, int]], None],
    ) -> None:
        self._store = store
        self._failed = failed
        self._observe = committed
        self._freed = freed
        self._loop = asyncio.get_running_loop()
        self._open: list[StoreWrite] = []
        self._open_bytes = 0
        self._disk_bytes = 0
        self._group = 1
        self._on_disk = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._started_at = 0.0
        self._waiting: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        self._relieved: list[Callable[[], None]] = []
        self._broken: Exception | None = None
        self._threads: list[threading.Thread] = []
        self._writes: queue.SimpleQueue[list[StoreWrite] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[tuple[StoreRead, Callable[[Any], None]] | None] = queue.SimpleQueue()
        if not store.inline:
            for name, target in (("writer", self._write_forever), ("reader", self._read_forever)):
                thread = threading.Thread(target=target, name=f"twinbus-store-{name}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def add(self, writes: list[StoreWrite]) -> int:
        """Add writes to the open group. Returns the number of the group."""
        if self._broken is not None:
            return self._group  # this group is never committed, so no call that waits for it runs
        self._open += writes
        for write in writes:
            if isinstance(write, PutRow):
                self._open_bytes += len(write.row.raw)
            elif isinstance(write, PutBody):
                self._open_bytes += len(write.raw)
        if self._idle.is_set():
            self._idle.clear()
            # The commit starts in a later turn of the loop, so that all writes after one read of a socket are in one
            # group.
            self._loop.call_soon(self._start)
        return self._group

    def when(self, group: int, call: Callable[[], None]) -> None:
        """Run `call` when the group is on disk, after all earlier calls for this group.

        If the group is on disk already, `call` runs before this method returns.
        """
        if group <= self._on_disk:
            call()
        else:
            self._waiting[group].append(call)

    def load(self, read: StoreRead, answered: Callable[[Any], None]) -> None:
        """Read from the store. Calls `answered` on the loop with the answer, or with the exception of a failed read."""
        if self._store.inline:
            self._loop.call_soon(answered, self._load(read))  # called from the loop, so that the call stack stays flat
        else:
            self._reads.put((read, answered))

    @property
    def is_congested(self) -> bool:
        return self._open_bytes + self._disk_bytes > CONGESTED_BYTES

    def when_relieved(self, call: Callable[[], None]) -> None:
        """Run `call` once, when a commit has finished and `is_congested` is False."""
        self._relieved.append(call)

    async def flushed(self) -> None:
        """Wait until all writes that were added are on disk."""
        await self._idle.wait()

    async def close(self) -> None:
        """Wait until all groups are on disk, and end the threads."""
        await self._idle.wait()
        self._writes.put(None)
        self._reads.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _start(self) -> None:
        writes, self._open = self._open, []
        self._disk_bytes, self._open_bytes = self._open_bytes, 0
        self._group += 1
        self._started_at = time.perf_counter()
        if self._store.inline:
            try:
                self._store.commit(writes)
            except Exception as error:
                self._fail(error)
            else:
                self._freed(self._store.take_freed())
                self._finish()
        else:
            self._writes.put(writes)

    def _finish(self) -> None:
        if self._broken is not None:
            return
        self._observe(time.perf_counter() - self._started_at)
        group = self._on_disk + 1
        self._disk_bytes = 0
        if self._open:
            self._start_soon()
        else:
            self._idle.set()
        # `_on_disk` changes after the loop. So if one of these calls adds a call for the same group, the new call runs
        # last.
        for call in self._waiting[group]:
            try:
                call()
            except Exception:  # the other calls must still run
                _log.exception("a call after a commit failed")
        del self._waiting[group]
        self._on_disk = group
        if self._relieved and not self.is_congested:
            relieved, self._relieved = self._relieved, []
            for call in relieved:
                call()

    def _start_soon(self) -> None:
        if self._store.inline:
            self._loop.call_soon(self._start)
        else:
            self._start()

    def _fail(self, error: Exception) -> None:
        if self._broken is not None:
            return
        # No call that waits for a group may run any more.
        self._broken = error
        self._waiting.clear()
        self._idle.set()
        self._failed(error)

    def _load(self, read: StoreRead) -> Any:
        try:
            return self._store.load(read)
        except StoreDamagedError:
            raise
        except Exception as error:  # the runtime raises this error in the decision that needs the read
            return error

    def _write_forever(self) -> None:
        try:
            self._tidy()
            while (writes := self._writes.get()) is not None:
                self._store.commit(writes)
                self._report_freed()  # before acknowledgements: a client may send as soon as it gets one
                self._call(self._finish)
                self._tidy()
        except Exception as error:
            self._call(self._fail, error)

    def _tidy(self) -> None:
        """Do one step of housekeeping in the store, and further steps while no group waits to be committed."""
        more = True
        while more:
            more = self._store.tidy() and self._writes.empty()
            self._report_freed()

    def _report_freed(self) -> None:
        if freed := self._store.take_freed():
            self._call(self._freed, freed)

    def _read_forever(self) -> None:
        while (request := self._reads.get()) is not None:
            read, answered = request
            try:
                answer = self._load(read)
            except StoreDamagedError as error:
                # No answer: the decision must not go on without the rows that are damaged (X2).
                self._call(self._fail, error)
            else:
                self._call(answered, answer)

    def _call(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed
            _log.debug("store answered after the loop had closed")
