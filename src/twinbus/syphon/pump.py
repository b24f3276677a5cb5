"""The loops on one backlog queue: receive (Y2), bring back what was put aside (Y5), keep the locks (Y4).

What goes where is decided in `plan`, how a load moves is in `moving`; what pumps share is the `SyphonContext`.
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
from twinbus.syphon.plan.deferred import Seen
from twinbus.syphon.transport import PEEK_PAGE_SIZE, BacklogFailedError, HeldMessage

_log = logging.getLogger(__name__)

BATCH: Final = 2000
"""The most that are received at a time: while they are on their way, those before them are sent and settled."""
RECALLS: Final = 4
"""Calls for deferred messages in flight."""
_RECALLED: Final = 500
# Until a queue was seen empty, and while draining, an answer is wanted soon.
_SHORT_POLL: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
# A long poll that has brought nothing for so long tells that the queue is empty.
_QUIET_SECONDS: Final = 1.0
# A new rate is heard of so soon.
_RATE_SECONDS: Final = 1.0
_CANCELLATIONS: Final = 10
_CANCEL_SECONDS: Final = 1.0
# Before the first message tells.
_FIRST_SIZE: Final = 16 * 1024
_RECALL_BYTES: Final = MIB


class Pump:
    """`start` and `rest` in turn; `close` at the end. `drained` once the queue was found empty (drain only)."""

    def __init__(self, queue: str, room: SyphonContext) -> None:
        self.queue = queue
        self.drained = False
        self.failure: FailureKind | None = None
        self.shelf = DeferredMessages(room.destinations)
        self.held = 0
        self.is_dry = False
        """The last receive brought nothing."""
        self._room = room
        self._backlog = room.backlog(queue)
        self._mover = Mover(queue, self._backlog, self.shelf, room, self._nudge)
        self._keeper = LockRenewer(self._backlog, room.now, room.wall)
        self._loops: list[asyncio.Task[None]] = []
        self._moves: set[asyncio.Task[None]] = set()
        self._nudged = asyncio.Event()
        self._freed = asyncio.Event()
        self._held_bytes = 0
        self._size: float = _FIRST_SIZE
        self._receipts = 0
        self._recalls = 0
        self._was_dry = False
        self._took = True
        self._resting = False
        self._when_drained: Callable[[], None] | None = None
        room.listen(self._nudge)

    def when_drained(self, call: Callable[[], None]) -> None:
        self._when_drained = call

    def idle_until(self, now: float) -> float:
        """When it has something to do, if no message comes; -inf while it has, or the last receive brought some."""
        return -inf if self._moves or not self.is_dry else self.shelf.due(now)

    def start(self) -> None:
        if not self._loops:
            self._resting = False
            loops = (self._receive(), self._bring_back(), self._keeper.run())
            self._loops = [asyncio.create_task(loop) for loop in loops]
            for task in self._loops:
                task.add_done_callback(self._ended)

    async def rest(self) -> None:
        """Takes nothing more, finishes what is in flight, gives back what is on its way."""
        receiving, self._loops = self._loops, []
        if not receiving:
            return
        self._resting = True
        await self._end(receiving[:2])
        if self._moves:
            await asyncio.wait(self._moves)
        await self._end(receiving[2:])
        await self._backlog.rest()

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Told more than once: what is awaited may swallow a cancellation, as the SDK does when a connection dies."""
        for _ in range(_CANCELLATIONS):
            for task in tasks:
                task.cancel()
            if not (await asyncio.wait(tasks, timeout=_CANCEL_SECONDS))[1]:
                return
        _log.error("the pump of %s does not end: its tasks take no cancellation", self.queue)

    async def close(self) -> None:
        await self.rest()
        await self._backlog.close()

    # --- receiving ---------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        room, failures = self._room, 0
        while not (self.drained or self._resting):
            await self._paced()
            count = await self._room_for_more()
            soon = room.options.drain or not self._was_dry
            try:
                held = await self._backlog.receive(
                    count, min(_SHORT_POLL, room.options.poll) if soon else room.options.poll
                )
            except BacklogFailedError as error:
                failures += 1
                await self._backlog_failed(error, failures)
                continue
            failures, self.failure = 0, None
            if held:
                room.pacing.spend(len(held), room.now())
                self._took, self.is_dry = True, False
                self._receipts += 1
                self._start(self._move(self._load(held)))
            else:
                self._ran_dry()

    def _ran_dry(self) -> None:
        now = self._room.now()
        self._was_dry = self.is_dry = True
        self.shelf.ran_dry(now)
        self._fell_quiet(self._receipts)
        if self._room.options.drain and not self._moves and self.shelf.is_empty():
            if self._took or not self.shelf.clean:
                # Others may hold messages, or have left some behind: looked at before it is called empty.
                self._took = False
                self.shelf.scan_now(now)
            else:
                self.drained = True
                if self._when_drained is not None:
                    self._when_drained()
        self._nudge()

    async def _backlog_failed(self, error: BacklogFailedError, failures: int) -> None:
        if self.failure is not error.kind:
            _log.warning("%s", error)
        self.failure = error.kind
        await asyncio.sleep(min(2.0 ** min(failures - 1, 10), _LONGEST_PAUSE) * (1 - self._room.chance() / 2))

    async def _paced(self) -> None:
        """Until the pace has a place for more. What others take meanwhile is not waited for: each has its turn."""
        pacing, now = self._room.pacing, self._room.now
        until = now() + pacing.delay(now())
        while now() < until and pacing.delay(now()):  # noqa: ASYNC110 - time passes, nothing tells it
            await asyncio.sleep(min(until - now(), _RATE_SECONDS))

    async def _room_for_more(self) -> int:
        while True:
            free = self._free()
            if free >= min(BATCH // 2, self.held):
                return self._room.pacing.most(min(free, BATCH), self._room.pumps)
            self._freed.clear()
            await self._freed.wait()

    def _free(self) -> int:
        """How many more may be held; one, however large, where nothing is."""
        options = self._room.options
        left = max(options.window_bytes // self._room.pumps, MIB) - self._held_bytes
        free = min(options.window - self.held, int(left / self._size))
        return max(free, 0 if self.held else 1)

    # --- bringing back -----------------------------------------------------------------------------------------------

    async def _bring_back(self) -> None:
        room = self._room
        while not self._resting:
            self._nudged.clear()
            now = room.now()
            busy = self._recalls >= RECALLS or self._free() < min(_RECALLED // 2, self.held)
            if (start := self.shelf.scan(now)) is not None:
                await self._peek(start)
                continue
            delay = room.pacing.delay(now)
            recall = None if busy or delay else self.shelf.recall(now, self._recall_count())
            if recall is not None:
                room.pacing.spend(len(recall.numbers), now)
                self._recalls += 1
                self._start(self._recall(recall))
                continue
            due = inf if busy else max(self.shelf.due(now), now + min(delay, _RATE_SECONDS))
            if due <= now:
                due = now + 0.05
            try:
                async with asyncio.timeout(None if isinf(due) else due - now):
                    await self._nudged.wait()
            except TimeoutError:
                pass

    def _recall_count(self) -> int:
        count = max(1, min(_RECALLED, int(_RECALL_BYTES / self._size), self._free()))
        return self._room.pacing.most(count, self._room.pumps)

    async def _recall(self, recall: Recall) -> None:
        room, left_out = self._room, 0
        try:
            held = await self._backlog.receive_deferred(recall.numbers)
            left_out = len(recall.numbers) - len(held)
            if held:
                await self._move(self._load(held), recall)
        except BacklogFailedError as error:
            self.shelf.deferred(recall.path or None, recall.numbers)
            if recall.probe is not None:
                room.destinations.void(recall.path, recall.probe)
            await self._backlog_failed(error, 1)
        except BaseException:
            self.shelf.uncertain(room.now())
            raise
        finally:
            self._recalls -= 1
            self.shelf.recalled(recall, left_out, room.now())
            room.changed()  # a probe is over, whatever came of it: others may wait for their turn

    async def _peek(self, start: int) -> None:
        room = self._room
        try:
            found = await self._backlog.peek(start, PEEK_PAGE_SIZE)
        except BacklogFailedError as error:
            self.shelf.uncertain(room.now())
            await self._backlog_failed(error, 1)
        else:
            self.shelf.peeked([Seen(one.sequence_number, one.deferred, one.path) for one in found])

    # --- loads -------------------------------------------------------------------------------------------------------

    def _load(self, held: Sequence[HeldMessage]) -> HeldBatch:
        room = self._room
        load = HeldBatch(held, room.now(), room.wall())
        self.held += len(held)
        self._held_bytes += load.size
        # Quick to grow, slow to shrink: what is on its way may be as large.
        largest = max(one.size for one in held)
        self._size = max(largest, self._size * 0.9 + largest * 0.1)
        return load

    async def _move(self, load: HeldBatch, recall: Recall | None = None) -> None:
        self._keeper.add(load)
        try:
            await self._mover.move(load, recall)
        finally:
            self._keeper.remove(load)
            self.held -= len(load.held)
            self._held_bytes -= load.size
            self._freed.set()
            self._nudge()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._moves.add(task)
        task.add_done_callback(self._moved)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._moves.discard(task)
        if not self._moves:
            asyncio.get_running_loop().call_later(_QUIET_SECONDS, self._fell_quiet, self._receipts)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its messages come back when their locks end; those that were deferred are found by peeking.
            _log.error("a load of %s could not be moved", self.queue, exc_info=error)

    def _fell_quiet(self, receipts: int) -> None:
        """Everything that was in the queue is moved, and nothing came since: told once (S11)."""
        quiet = receipts == self._receipts and not self._moves and self.failure is None and bool(self._loops)
        if quiet and self._mover.completed and self.shelf.is_empty():
            moved, self._mover.completed = self._mover.completed, 0
            self._room.emptied(self.queue, moved)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the pump of %s broke", self.queue, exc_info=error)
            self._room.broke(error)

    def _nudge(self) -> None:
        self._nudged.set()
