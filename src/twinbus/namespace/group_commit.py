"""Group commit off the event loop: writes gather in one group while the group before it goes to disk.

Groups are numbered and finish in order. `when(group, call)` runs a call once that group is on disk: this is where
"persist, then speak" is kept. What is written, and what is said afterwards, is not decided here.
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
from twinbus.namespace.store import Store

_log = logging.getLogger(__name__)

# Bytes of messages that may wait for the disk before connections are asked to hold back.
CONGESTED_BYTES = 32 * 1024 * 1024


class GroupCommit:
    """The writer thread and the reader thread of one store, as seen from the event loop."""

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
        self._needs: queue.SimpleQueue[tuple[StoreRead, Callable[[Any], None]] | None] = queue.SimpleQueue()
        if not store.inline:
            for name, target in (("writer", self._write_forever), ("reader", self._read_forever)):
                thread = threading.Thread(target=target, name=f"twinbus-store-{name}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def add(self, writes: list[StoreWrite]) -> int:
        """Put writes into the open group and return its number."""
        if self._broken is not None:
            return self._group  # which never comes to disk: what waits for it is never said
        self._open += writes
        for write in writes:
            if isinstance(write, PutRow):
                self._open_bytes += len(write.row.raw)
            elif isinstance(write, PutBody):
                self._open_bytes += len(write.raw)
        if self._idle.is_set():
            self._idle.clear()
            # At the end of this turn of the loop, so that all of one read goes into one group.
            self._loop.call_soon(self._start)
        return self._group

    def when(self, group: int, call: Callable[[], None]) -> None:
        """Run `call` once the group is on disk and all said of it before: now, if so."""
        if group <= self._on_disk:
            call()
        else:
            self._waiting[group].append(call)

    def load(self, need: StoreRead, answered: Callable[[Any], None]) -> None:
        """Read rows and hand the answer, or the exception that reading ended in, to `answered` on the loop."""
        if self._store.inline:
            self._loop.call_soon(answered, self._attempt(need))  # never deeper into the caller's stack
        else:
            self._needs.put((need, answered))

    @property
    def is_congested(self) -> bool:
        return self._open_bytes + self._disk_bytes > CONGESTED_BYTES

    def when_relieved(self, call: Callable[[], None]) -> None:
        """Run `call` when the congestion is over."""
        self._relieved.append(call)

    async def flushed(self) -> None:
        """Until nothing waits for the disk."""
        await self._idle.wait()

    async def close(self) -> None:
        """Bring all groups to disk and end the threads."""
        await self._idle.wait()
        self._writes.put(None)
        self._needs.put(None)
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
        # What these calls bring about takes its place behind them: said at once, it would overtake the rest.
        for call in self._waiting[group]:
            try:
                call()
            except Exception:  # the others are not to wait for ever because of one
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
        # What is in memory is now ahead of the disk: nothing more may be said. The server ends the namespace.
        self._broken = error
        self._waiting.clear()
        self._idle.set()
        self._failed(error)

    def _attempt(self, need: StoreRead) -> Any:
        try:
            return self._store.load(need)
        except Exception as error:  # handed to the decision that asked, on the loop
            return error

    def _write_forever(self) -> None:
        try:
            self._tidy()
            while (writes := self._writes.get()) is not None:
                self._store.commit(writes)
                self._tell_freed()  # before what waits for the commit: who completed the last copy finds room
                self._call(self._finish)
                self._tidy()
        except Exception as error:
            self._call(self._fail, error)

    def _tidy(self) -> None:
        """Housekeeping between commits: a piece after each, the rest while nothing waits to be written."""
        more = True
        while more:
            more = self._store.tidy() and self._writes.empty()
            self._tell_freed()

    def _tell_freed(self) -> None:
        if freed := self._store.take_freed():
            self._call(self._freed, freed)

    def _read_forever(self) -> None:
        while (request := self._needs.get()) is not None:
            need, answered = request
            self._call(answered, self._attempt(need))

    def _call(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            _log.debug("store answered after the loop had closed")
