"""A pump: the loops on one backlog queue.

One loop receives messages by long polls (Y2), one brings back messages that were put aside once their destination is
ready (Y5), one renews locks (Y4). Each batch that is received is moved by a task of its own (`mover`), so that the next
batch is on its way meanwhile. `plan` decides what goes where; `SyphonContext` is what pumps share.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from math import inf, isinf
from typing import Any, Final

from twinbus.backlog import FailureKind
from twinbus.syphon.context import MIB, SyphonContext
from twinbus.syphon.held_batch import HeldBatch, LockRenewer
from twinbus.syphon.mover import Mover
from twinbus.syphon.plan import DeferredMessages, Recall
from twinbus.syphon.transport import PEEK_PAGE_SIZE, BacklogFailedError, HeldMessage

_log = logging.getLogger(__name__)

RECEIVE_SIZE: Final = 2000
"""Messages of one receive at most."""
MAX_RECALLS: Final = 4
"""Requests for deferred messages that are in flight at most."""
_RECALL_SIZE: Final = 500
_RECALL_BYTES: Final = MIB
# Used until a queue was seen empty, and while draining: then an early answer is worth an empty receive.
_SHORT_POLL: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
# A queue counts as emptied when nothing arrived for so long after its last message was moved.
_QUIET_SECONDS: Final = 1.0
# A waiting loop looks this often whether the rate was changed.
_RATE_SECONDS: Final = 1.0
_SHORTEST_WAIT: Final = 0.05
_CANCELLATIONS: Final = 10
_CANCEL_SECONDS: Final = 1.0
# Reckoned with before the first message shows its size.
_FIRST_SIZE: Final = 16 * 1024


class Pump:
    """`start` and `pause` in turn, `close` at the end. A draining pump sets `drained` once its queue is empty."""

    def __init__(self, queue: str, context: SyphonContext) -> None:
        self.queue = queue
        self.drained = False
        self.failure: FailureKind | None = None
        """Why the last request to the queue failed, if it did."""
        self.deferred = DeferredMessages(context.destinations)
        self.held = 0
        self.is_empty = False
        """The last receive returned nothing."""
        self._context = context
        self._backlog = context.backlog(queue)
        self._mover = Mover(queue, self._backlog, self.deferred, context, self._wake_recall)
        self._renewer = LockRenewer(self._backlog, context.now, context.wall)
        self._loops: list[asyncio.Task[None]] = []
        self._moves: set[asyncio.Task[None]] = set()
        self._recall_wanted = asyncio.Event()
        self._capacity_freed = asyncio.Event()
        self._held_bytes = 0
        self._expected_size: float = _FIRST_SIZE
        self._receipts = 0
        self._recalls = 0
        self._was_ever_empty = False
        self._received_since_scan = True
        self._pausing = False
        self._on_drained: Callable[[], None] | None = None
        context.add_listener(self._wake_recall)

    def when_drained(self, call: Callable[[], None]) -> None:
        self._on_drained = call

    def idle_until(self, now: float) -> float:
        """When the pump has work even if no message arrives; -inf while it has work."""
        return -inf if self._moves or not self.is_empty else self.deferred.due(now)

    def start(self) -> None:
        if not self._loops:
            self._pausing = False
            loops = (self._receive_loop(), self._recall_loop(), self._renewer.run())
            self._loops = [asyncio.create_task(loop) for loop in loops]
            for task in self._loops:
                task.add_done_callback(self._loop_ended)

    async def pause(self) -> None:
        """Receive nothing more, finish the batches in flight, and release messages that are on their way."""
        loops, self._loops = self._loops, []
        if not loops:
            return
        self._pausing = True
        await self._cancel(loops[:2])
        if self._moves:
            await asyncio.wait(self._moves)
        await self._cancel(loops[2:])
        await self._backlog.stop_receiving()

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancel repeatedly: the SDK may swallow a cancellation when a connection dies."""
        for _ in range(_CANCELLATIONS):
            for task in tasks:
                task.cancel()
            if not (await asyncio.wait(tasks, timeout=_CANCEL_SECONDS))[1]:
                return
        _log.error("the pump of %s does not end: its tasks ignore cancellation", self.queue)

    async def close(self) -> None:
        await self.pause()
        await self._backlog.close()

    # --- receiving ---------------------------------------------------------------------------------------------------

    async def _receive_loop(self) -> None:
        context, failures = self._context, 0
        while not (self.drained or self._pausing):
            await self._wait_for_rate()
            count = await self._wait_for_capacity()
            wait = context.options.poll
            if context.options.drain or not self._was_ever_empty:
                wait = min(_SHORT_POLL, wait)
            try:
                held = await self._backlog.receive(count, wait)
            except BacklogFailedError as error:
                failures += 1
                await self._pause_after(error, failures)
                continue
            failures, self.failure = 0, None
            if held:
                context.rate_limit.spend(len(held), context.now())
                self._received_since_scan, self.is_empty = True, False
                self._receipts += 1
                self._start_move(self._move(self._hold(held)))
            else:
                self._found_empty()

    def _found_empty(self) -> None:
        now = self._context.now()
        self._was_ever_empty = self.is_empty = True
        self.deferred.schedule_first_scan(now)
        self._report_if_emptied(self._receipts)
        if self._context.options.drain and not self._moves and self.deferred.is_empty():
            if self._received_since_scan or not self.deferred.clean:
                # Other receivers may hold messages, or have deferred some: only a scan shows that it is empty.
                self._received_since_scan = False
                self.deferred.schedule_scan(now)
            else:
                self.drained = True
                if self._on_drained is not None:
                    self._on_drained()
        self._wake_recall()

    async def _pause_after(self, error: BacklogFailedError, failures: int) -> None:
        if self.failure is not error.kind:
            _log.warning("%s", error)
        self.failure = error.kind
        await asyncio.sleep(min(2.0 ** min(failures - 1, 10), _LONGEST_PAUSE) * (1 - self._context.chance() / 2))

    async def _wait_for_rate(self) -> None:
        """Wait as long as the rate limit demands now. What other pumps receive meanwhile does not prolong it."""
        limit, now = self._context.rate_limit, self._context.now
        until = now() + limit.delay(now())
        while now() < until and limit.delay(now()):  # noqa: ASYNC110 - `set_rate` raises no event
            await asyncio.sleep(min(until - now(), _RATE_SECONDS))

    async def _wait_for_capacity(self) -> int:
        """Wait until a receive is worthwhile; returns how many messages it may request."""
        while True:
            capacity = self._capacity()
            if capacity >= min(RECEIVE_SIZE // 2, self.held):
                return self._context.rate_limit.batch_size(min(capacity, RECEIVE_SIZE), self._context.pump_count)
            self._capacity_freed.clear()
            await self._capacity_freed.wait()

    def _capacity(self) -> int:
        """How many more messages may be held. If none is held it is at least one, however large that is."""
        options = self._context.options
        free_bytes = max(options.window_bytes // self._context.pump_count, MIB) - self._held_bytes
        capacity = min(options.window - self.held, int(free_bytes / self._expected_size))
        return max(capacity, 0 if self.held else 1)

    # --- bringing back -----------------------------------------------------------------------------------------------

    async def _recall_loop(self) -> None:
        context = self._context
        while not self._pausing:
            self._recall_wanted.clear()
            now = context.now()
            busy = self._recalls >= MAX_RECALLS or self._capacity() < min(_RECALL_SIZE // 2, self.held)
            if (start := self.deferred.next_scan(now)) is not None:
                await self._scan(start)
                continue
            recall, delay = None, 0.0
            if len(self.deferred):
                delay = context.rate_limit.delay(now)
                recall = None if busy or delay else self.deferred.recall(now, self._recall_size())
            if recall is not None:
                context.rate_limit.spend(len(recall.numbers), now)
                self._recalls += 1
                self._start_move(self._recall(recall))
                continue
            due = inf if busy else max(self.deferred.due(now), now + min(delay, _RATE_SECONDS))
            if due <= now:
                due = now + _SHORTEST_WAIT
            try:
                async with asyncio.timeout(None if isinf(due) else due - now):
                    await self._recall_wanted.wait()
            except TimeoutError:
                pass

    def _recall_size(self) -> int:
        size = max(1, min(_RECALL_SIZE, int(_RECALL_BYTES / self._expected_size), self._capacity()))
        return self._context.rate_limit.batch_size(size, self._context.pump_count)

    async def _recall(self, recall: Recall) -> None:
        context, left_out = self._context, 0
        try:
            held = await self._backlog.receive_deferred(recall.numbers)
            left_out = len(recall.numbers) - len(held)
            if held:
                await self._move(self._hold(held), recall)
        except BacklogFailedError as error:
            self.deferred.add(recall.path or None, recall.numbers)
            if recall.probe is not None:
                context.destinations.void(recall.path, recall.probe)
            await self._pause_after(error, 1)
        except BaseException:
            self.deferred.schedule_rescan(context.now())
            raise
        finally:
            self._recalls -= 1
            self.deferred.recall_ended(recall, left_out, context.now())
            context.notify_listeners()  # if it was a probe it is over: other pumps may wait for it

    async def _scan(self, start: int) -> None:
        try:
            found = await self._backlog.peek(start, PEEK_PAGE_SIZE)
        except BacklogFailedError as error:
            self.deferred.schedule_rescan(self._context.now())
            await self._pause_after(error, 1)
        else:
            self.deferred.scanned(found)

    def _wake_recall(self) -> None:
        self._recall_wanted.set()

    # --- batches -----------------------------------------------------------------------------------------------------

    def _hold(self, held: Sequence[HeldMessage]) -> HeldBatch:
        context = self._context
        batch = HeldBatch(held, context.now(), context.wall())
        self.held += len(held)
        self._held_bytes += batch.size
        # Grows at once and shrinks slowly: messages on their way may be as large as the largest so far.
        largest = max(one.size for one in held)
        self._expected_size = max(largest, self._expected_size * 0.9 + largest * 0.1)
        return batch

    async def _move(self, batch: HeldBatch, recall: Recall | None = None) -> None:
        self._renewer.add(batch)
        try:
            await self._mover.move(batch, recall)
        finally:
            self._renewer.remove(batch)
            self.held -= len(batch.held)
            self._held_bytes -= batch.size
            self._capacity_freed.set()
            self._wake_recall()

    def _start_move(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._moves.add(task)
        task.add_done_callback(self._move_ended)

    def _move_ended(self, task: asyncio.Task[None]) -> None:
        self._moves.discard(task)
        if not self._moves:
            asyncio.get_running_loop().call_later(_QUIET_SECONDS, self._report_if_emptied, self._receipts)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its messages come again when their locks end; a scan finds those that were deferred.
            _log.error("a batch of %s could not be moved", self.queue, exc_info=error)

    def _report_if_emptied(self, receipts: int) -> None:
        """Report once that everything in the queue was moved (S11), unless messages arrived after `receipts`."""
        quiet = receipts == self._receipts and not self._moves and self.failure is None and bool(self._loops)
        if quiet and self._mover.completed and self.deferred.is_empty():
            moved, self._mover.completed = self._mover.completed, 0
            self._context.on_emptied(self.queue, moved)

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the pump of %s broke", self.queue, exc_info=error)
            self._context.pump_broke(error)
