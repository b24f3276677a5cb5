"""A pump: three loops that move the messages of one backlog queue.

The first loop receives messages by long polls (Y2). The second loop brings back messages that were put aside, once
their destination is ready (Y5). The third loop renews locks (Y4). Each received batch is moved by a separate task
(`mover`), so that the next batch can be received at the same time. `plan` decides which messages are sent, put aside or
dead-lettered. All pumps of a syphon share one `SyphonContext`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from math import inf, isinf
from typing import Any, Final

from twinbus.backlog import FailureKind
from twinbus.syphon.broker_clock import ASSUMED_LOCK
from twinbus.syphon.context import MIB, SyphonContext
from twinbus.syphon.held_batch import HeldBatch, LockRenewer
from twinbus.syphon.mover import Mover
from twinbus.syphon.plan import DeferredMessages, QueueDrain, Recall
from twinbus.syphon.transport import PEEK_PAGE_SIZE, BacklogFailedError, HeldMessage

_log = logging.getLogger(__name__)

RECEIVE_SIZE: Final = 2000
"""The most messages of one receive."""
MAX_RECALLS: Final = 4
"""The most requests for deferred messages that are in flight at a time."""
_RECALL_SIZE: Final = 500
_RECALL_BYTES: Final = MIB
# Seconds of a poll until the queue is found empty: at the start, and in a drain after each received message. A fast
# answer is worth more there than the price of an empty receive.
_SHORT_POLL: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
# A drain gives up a queue that fails for a minute (`Syphon`). So it has to notice early that the queue answers again.
_LONGEST_DRAIN_PAUSE: Final = 5.0
# A queue counts as emptied when no message arrived for this time after its last message was moved.
_QUIET_SECONDS: Final = 1.0
# A loop that waits for the rate limit checks at this interval whether `set_rate` has changed the rate.
_RATE_SECONDS: Final = 1.0
_SHORTEST_WAIT: Final = 0.05
_CANCELLATIONS: Final = 10
_CANCEL_SECONDS: Final = 1.0
# The assumed size of a message, in bytes, until the first message was received.
_FIRST_SIZE: Final = 16 * 1024
# A drain waits for messages that another receiver has locked for the lock duration and this number of seconds.
_LOCK_MARGIN: Final = 5.0


class Pump:
    """The pump of one backlog queue.

    `start` and `pause` may be called repeatedly, alternately; `close` is the last call.
    """

    def __init__(self, queue: str, context: SyphonContext) -> None:
        self.queue = queue
        self.failure: FailureKind | None = None
        """Why the last request to the queue failed; None if the last request succeeded."""
        self.failing_since: float | None = None
        """When the first request failed of those that failed since the last success; None if the last one succeeded."""
        self.failing_for = 0.0
        """Seconds from that first failure to the last failure."""
        self.deferred = DeferredMessages(context.destinations)
        self.held = 0
        self.is_empty = False
        """Whether the last receive returned no message."""
        self._context = context
        self._backlog = context.backlog(queue)
        self._mover = Mover(queue, self._backlog, self.deferred, context, self._wake_recall)
        self._clock = context.broker_clock(queue)
        self._renewer = LockRenewer(self._backlog, context.now, self._broker_time)
        self._loops: list[asyncio.Task[None]] = []
        self._moves: set[asyncio.Task[None]] = set()
        self._batches: set[HeldBatch] = set()
        self._recall_wanted = asyncio.Event()
        self._capacity_freed = asyncio.Event()
        self._held_bytes = 0
        self._expected_size: float = _FIRST_SIZE
        self._receipts = 0
        self._recalls = 0
        self._was_ever_empty = False
        self._is_caught_up = False
        """Of a drain: whether the last receive found the queue empty, or only messages that arrived after a scan."""
        self._pausing = False
        self._drain = QueueDrain(self.deferred) if context.options.drain else None
        self._on_change: Callable[[], None] = lambda: None
        context.add_listener(self._wake_recall)

    def when_changed(self, call: Callable[[], None]) -> None:
        """From now on, call `call` when the result of `is_settled` may have changed. Only a draining pump calls."""
        if self._drain is not None:
            self._on_change = call

    def idle_until(self, now: float) -> float:
        """Return the time at which the pump will have work, if no message arrives before; -inf if it has work now."""
        return -inf if self._moves or not self.is_empty else self.deferred.due(now)

    @property
    def is_moving(self) -> bool:
        """Whether the pump holds messages that may move now: not only messages that are being put aside."""
        return any(not batch.is_only_put_aside for batch in self._batches)

    def is_settled(self, now: float) -> bool:
        """Return whether no message of the queue can move now (Y11). If only a scan can show this, schedule the scan.

        Only for a draining pump.
        """
        if self._drain is None or self.failing_since is not None or self._moves or not self._is_caught_up:
            return False
        lock = self._clock.lock if self._clock.lock_seconds is not None else max(self._clock.lock, ASSUMED_LOCK)
        settled = self._drain.is_settled(now, self._mover.moved, lock + _LOCK_MARGIN)
        if not settled:
            self._wake_recall()
        return settled

    def start(self) -> None:
        if not self._loops:
            self._pausing = False
            loops = (self._receive_loop(), self._recall_loop(), self._renewer.run())
            self._loops = [asyncio.create_task(loop) for loop in loops]
            for task in self._loops:
                task.add_done_callback(self._loop_ended)

    async def pause(self) -> None:
        """Stop receiving, finish the batches in flight, and release messages that the broker still delivers."""
        loops, self._loops = self._loops, []
        if not loops:
            return
        self._pausing = True
        await self._cancel(loops[:2])
        if self._moves:
            await asyncio.wait(self._moves)
        await self._cancel(loops[2:])
        try:
            await self._backlog.stop_receiving()
        except BacklogFailedError as error:
            # The broker ends the credit with the link, and delivers unsettled messages again when their locks end.
            _log.info("the credit of %s was not taken back: %s", self.queue, error)

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancel the tasks repeatedly until they end: the SDK may ignore a cancellation while a connection breaks."""
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
        while not self._pausing:
            await self._wait_for_rate()
            count = await self._wait_for_capacity()
            wait = context.options.poll
            if not self._was_ever_empty or (self._drain is not None and not self._is_caught_up):
                wait = min(_SHORT_POLL, wait)
            try:
                held = await self._backlog.receive(count, wait)
            except BacklogFailedError as error:
                failures += 1
                self.is_empty = self._is_caught_up = False
                await self._pause_after(error, failures)
                continue
            failures = 0
            self._request_succeeded()
            if held:
                context.rate_limit.spend(len(held), context.now())
                self.is_empty = False
                self._receipts += 1
                if self._drain is not None:
                    self.deferred.received(one.sequence_number for one in held)
                    self._drain.received(held[-1].sequence_number, self._mover.moved, context.now())
                    self._is_caught_up = self._drain.has_passed_scan(self._mover.moved)
                self._start_move(self._move(self._hold(held)))
            else:
                self._found_empty()

    def _found_empty(self) -> None:
        now = self._context.now()
        self._was_ever_empty = self.is_empty = self._is_caught_up = True
        self.deferred.schedule_first_scan(now)
        self._report_if_emptied(self._receipts)
        self._wake_recall()
        self._on_change()

    def _request_succeeded(self) -> None:
        self.failure = self.failing_since = None
        self.failing_for = 0.0

    async def _pause_after(self, error: BacklogFailedError, failures: int) -> None:
        if self.failure is not error.kind:
            _log.warning("%s", error)
        self.failure = error.kind
        now = self._context.now()
        self.failing_since = now if self.failing_since is None else self.failing_since
        self.failing_for = now - self.failing_since
        self._on_change()
        longest = _LONGEST_PAUSE if self._drain is None else _LONGEST_DRAIN_PAUSE
        await asyncio.sleep(min(2.0 ** min(failures - 1, 10), longest) * (1 - self._context.chance() / 2))

    async def _wait_for_rate(self) -> None:
        """Wait for the delay that the rate limit has at the start of this call.

        Messages that other pumps receive during the wait do not make the wait longer.
        """
        limit, now = self._context.rate_limit, self._context.now
        until = now() + limit.delay(now())
        while now() < until and limit.delay(now()):  # noqa: ASYNC110 - `set_rate` raises no event
            await asyncio.sleep(min(until - now(), _RATE_SECONDS))

    async def _wait_for_capacity(self) -> int:
        """Wait until the pump can hold enough messages for a receive. Return the number of messages to request."""
        while True:
            capacity = self._capacity()
            if capacity >= min(RECEIVE_SIZE // 2, self.held):
                return self._context.rate_limit.batch_size(min(capacity, RECEIVE_SIZE), self._context.pump_count)
            self._capacity_freed.clear()
            await self._capacity_freed.wait()

    def _capacity(self) -> int:
        """Return how many more messages the pump may hold: at least 1 if it holds none, however large messages are."""
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
                if self._drain is not None and not start:
                    self._drain.scan_began(self._mover.moved)
                await self._scan(start)
                if self._drain is not None and not self.deferred.is_scanning:
                    self._drain.scan_ended(context.now(), has_failed=not self.deferred.is_known)
                    self._on_change()
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
            self._request_succeeded()
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
            context.notify_listeners()  # if the recall was a probe, other pumps may wait for its end

    async def _scan(self, start: int) -> None:
        try:
            found = await self._backlog.peek(start, PEEK_PAGE_SIZE)
        except BacklogFailedError as error:
            self.deferred.schedule_rescan(self._context.now())
            await self._pause_after(error, 1)
        else:
            self._request_succeeded()
            self.deferred.scanned(found)

    def _wake_recall(self) -> None:
        self._recall_wanted.set()

    # --- batches -----------------------------------------------------------------------------------------------------

    def _hold(self, held: Sequence[HeldMessage]) -> HeldBatch:
        context = self._context
        # The newest message was delivered last: it shows the broker's time best.
        self._clock.observe(held[-1].locked_until, held[-1].enqueued_time, context.now())
        context.ledger.compare_clocks(self.queue, self._clock, context.now(), context.wall())
        batch = HeldBatch(held, context.now(), self._broker_time())
        self._batches.add(batch)
        self.held += len(held)
        self._held_bytes += batch.size
        # Grows with the first large message, and shrinks by 10 % per batch: the next messages may be as large.
        largest = max(one.size for one in held)
        self._expected_size = max(largest, self._expected_size * 0.9 + largest * 0.1)
        return batch

    def _broker_time(self) -> datetime:
        """Return the time by which locks are renewed."""
        return self._clock.latest(self._context.now(), self._context.wall())

    async def _move(self, batch: HeldBatch, recall: Recall | None = None) -> None:
        self._renewer.add(batch)
        try:
            await self._mover.move(batch, recall)
        finally:
            self._renewer.remove(batch)
            self._batches.discard(batch)
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
        self._on_change()
        if not self._moves:
            asyncio.get_running_loop().call_later(_QUIET_SECONDS, self._report_if_emptied, self._receipts)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The broker delivers the messages of this batch again when their locks end. A scan finds deferred messages.
            _log.error("a batch of %s could not be moved", self.queue, exc_info=error)

    def _report_if_emptied(self, receipts: int) -> None:
        """Report that all messages of the queue were moved (S11), if no batch arrived after batch number `receipts`."""
        quiet = receipts == self._receipts and not self._moves and self.failure is None and bool(self._loops)
        if quiet and self._mover.completed and self.deferred.is_empty():
            moved, self._mover.completed = self._mover.completed, 0
            self._context.on_emptied(self.queue, moved)

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        if self._pausing and task.cancelled():
            return
        error = asyncio.CancelledError("not by the pump") if task.cancelled() else task.exception()
        if error is not None:
            # A loop that ends unnoticed would leave its queue without a pump.
            _log.error("the pump of %s broke", self.queue, exc_info=error)
            self._context.pump_broke(error)
