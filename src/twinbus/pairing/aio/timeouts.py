"""Deadlines for coroutines that cannot be trusted to come back (S12): past it a call is cancelled until it ends.

One timer for all calls of a pair, armed only when none is: a call that ends in time costs it nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.pairing.calls import NoTurnError
from twinbus.pairing.pair_sides import PairLoopError
from twinbus.pairing.retrying import pause_before_next
from twinbus.sdk import (
    CANCELLED_AT_DEADLINE,
    RetrySettings,
    TokenTimeoutError,
    abort_connection,
    attach_aio_credential,
    disable_retries,
    keep_alive_of,
    speed_up_opening,
    waits_for_token,
)

T = TypeVar("T")
# What the SDK cleans up after a cancellation is itself cut short by the next one; what a late loop has to read first.
_AGAIN_SECONDS: Final = 0.1


class Deadline:
    """That of one call, in the task that makes it."""

    __slots__ = ("at", "before", "cancelled", "task")

    def __init__(self, task: asyncio.Task[Any], at: float) -> None:
        self.task = task
        self.at = at
        self.before = task.cancelling()
        self.cancelled = 0


class CallDeadlines:
    """Those of one pair."""

    def __init__(self) -> None:
        self._calls: set[Deadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._late = False

    async def bound(self, coroutine: Coroutine[Any, Any, T], seconds: float, sender: Any = None) -> T:
        """OperationTimeoutError past the deadline. A cancellation by anyone else goes through.

        `sender`: that of the SDK which is called, if one is.
        """
        deadline = self.begin(time.monotonic() + seconds)
        try:
            return await coroutine
        except BaseException as error:
            told = self.verdict(deadline, error, sender)
            if told is error:
                raise
            raise told from None
        finally:
            self.lift(deadline)

    def begin(self, at: float) -> Deadline:
        """Until it is lifted this task is cancelled, and cancelled again, past the deadline."""
        task = asyncio.current_task()
        assert task is not None
        deadline = Deadline(task, at)
        self._calls.add(deadline)
        if self._timer is None or at < self._due:
            self._arm(at)
        return deadline

    def verdict(self, deadline: Deadline, error: BaseException, sender: Any) -> BaseException:
        """What the call ended with: OperationTimeoutError where a deadline ended it, ours or the SDK's."""
        late = sender is not None and waits_for_token(sender)
        if not deadline.cancelled:
            return TokenTimeoutError() if late and isinstance(error, OperationTimeoutError) else error
        if isinstance(error, asyncio.CancelledError):
            if deadline.task.cancelling() - deadline.cancelled > deadline.before:
                return error
        elif not isinstance(error, Exception):
            return error
        return TokenTimeoutError() if late else OperationTimeoutError(message="not answered in time")

    def lift(self, deadline: Deadline) -> None:
        self._calls.discard(deadline)
        if deadline.cancelled:
            # Ours are taken back however it ended: what it answered in the last moment stands.
            for _ in range(deadline.cancelled):
                deadline.task.uncancel()

    def expire(self) -> None:
        """All calls under way are past their deadlines."""
        for call in self._calls:
            call.at = 0.0
        self._cancel()

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = at
        self._timer = asyncio.get_running_loop().call_later(max(at - time.monotonic(), 0), self._fired)

    def _fired(self) -> None:
        """A loop that was blocked, or a frozen process, comes late: answers that lie in the sockets are read first.

        Not twice in a row: a loop that is always late keeps its deadlines too.
        """
        self._late = not self._late and time.monotonic() - self._due > _AGAIN_SECONDS
        self._cancel(spare=self._late)

    def _cancel(self, *, spare: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        for call in list(self._calls):
            if call.at <= now:
                call.at = now + _AGAIN_SECONDS
                if not spare:
                    call.cancelled += 1
                    call.task.cancel(CANCELLED_AT_DEADLINE)
        if self._calls:
            self._arm(min(call.at for call in self._calls))


class LoopTimer:
    """Calls back in the loop that runs when it is armed (entity.Timer)."""

    def __init__(self, due: Callable[[], object]) -> None:
        self._callback = due
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, at: float) -> None:
        self.disarm()
        self._handle = asyncio.get_running_loop().call_later(max(at - time.monotonic(), 0), self._fired)

    def disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fired(self) -> None:
        self._handle = None
        self._callback()


# A link that answers is closed with a word within this; one that does not, without.
_CLOSING_SECONDS: Final = 1.0
# How long a sender or pair that is being closed lets calls end that are under way.
PATIENCE_SECONDS: Final = 1.0


class TaskTimeouts(CallDeadlines):
    """The deadlines of a pair, and its tasks: they end with it (C3)."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self._tasks: set[asyncio.Task[Any]] = set()
        self._process = os.getpid()
        self._claiming = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop of the pair's tasks, timers and connections: the one that ran at the first use."""

    def claim(self) -> None:
        """Binds the pair to the running loop if no loop has it yet. Raises PairLoopError if another loop has it."""
        loop = asyncio.get_running_loop()
        with self._claiming:
            if self.loop is None:
                self.loop = loop
        # A child process has the parent's loop here; there the pair's sides refuse (S13).
        if self.loop is not loop and self.ours:
            raise PairLoopError

    def claim_to_close(self) -> None:
        """Like `claim`, except that any loop may close what a closed loop has left."""
        if self.loop is None or not self.loop.is_closed():
            self.claim()

    def in_loop(self, change: Callable[[], None]) -> None:
        """Runs `change` in the pair's loop: soon, if another thread or loop runs this. At once, if there is no loop."""
        loop = self.loop
        if loop is None or loop.is_closed() or not self.ours or loop is running_loop():
            change()
            return
        try:
            loop.call_soon_threadsafe(change)
        except RuntimeError:
            if not loop.is_closed():
                raise
            # Closed meanwhile.
            change()

    @property
    def has_loop(self) -> bool:
        """False before the first use and after the loop was closed: nothing can be started, and nothing runs."""
        return self.loop is not None and not self.loop.is_closed()

    @property
    def ours(self) -> bool:
        """False in the child of a fork: connections and the loop are the parent's, and none of it may be touched."""
        return os.getpid() == self._process

    def adopt(self) -> None:
        """Makes this process the owner. A pair made before a fork may be paired in the child."""
        if not self.ours:
            self._process = os.getpid()
            self._claiming = threading.Lock()
            self.loop = None
        self.claim()

    def ready(self, sender: Any) -> Any:
        """The same sender or receiver of the SDK, as attempts need it: one try, quick to open, its token waited for."""
        attach_aio_credential(sender)
        return disable_retries(speed_up_opening(sender))

    async def turn(self, lock: asyncio.Lock, link: str, seconds: float) -> None:
        """Wait for it, the lock being the caller's afterwards. NoTurnError where the call's time ends before."""
        try:
            await self.bound(lock.acquire(), seconds)
        except OperationTimeoutError:
            raise NoTurnError(link, seconds) from None

    async def again(
        self,
        failed: Exception,
        once: Callable[[float], Coroutine[Any, Any, T]],
        end: float,
        retries: RetrySettings,
        paused: Callable[[float], Awaitable[None]],
    ) -> T:
        """After a first try that failed: try after try until `end`, which each of them keeps. `paused`: between two."""
        tried = 0
        while True:
            tried += 1
            pause = pause_before_next(failed, retries, tried, end - time.monotonic())
            if pause is None:
                raise failed
            await paused(pause)
            try:
                return await once(end)
            except Exception as error:
                failed = error

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def discard(self, sender: Any) -> None:
        """Give up a sender of the SDK at once; what is left of it is closed in the background."""
        abort_connection(sender)
        if self.has_loop:
            self.start(closed(sender))

    def retire(self, sender: Any, turn: asyncio.Lock | None = None) -> None:
        """Close a sender of the SDK in the background and with a word, after the call that has the turn on it.

        Never under it: what the SDK opens while it is being closed stays open.
        """
        if self.has_loop:
            self.start(closed(sender) if turn is None else _retired(sender, turn))
        else:
            abort_connection(sender)

    async def end(self) -> None:
        """Calls under way may end by themselves for a while; then they are given up, and all is closed."""
        if not self.has_loop:
            return
        for patience in (PATIENCE_SECONDS, _CLOSING_SECONDS + 0.5):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    # What ends may start the closing of something else.
                    while self._tasks:
                        await asyncio.wait(list(self._tasks))
            self.expire()
        rest = list(self._tasks)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def cancel(task: asyncio.Task[Any]) -> None:
    """Cancels a task. One whose loop was closed never runs again, and cannot be cancelled."""
    if not task.get_loop().is_closed():
        task.cancel()


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Until it is set, or for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _retired(sender: Any, turn: asyncio.Lock) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_SECONDS), turn:
            pass
    if turn.locked():
        # That call is not quick, and now nobody answers it.
        abort_connection(sender)
    async with turn:
        await closed(sender)


async def closed(sender: Any) -> None:
    """With a word to the other end if it listens, and all its own gone."""
    keep_alive = keep_alive_of(sender)
    if keep_alive is not None:
        keep_alive.cancel()
    try:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(sender.close(), _CLOSING_SECONDS)
    finally:
        # Whatever closing left open, also where it was itself cut short.
        with contextlib.suppress(Exception):
            abort_connection(sender)
