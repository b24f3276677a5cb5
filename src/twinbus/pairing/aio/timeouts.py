"""Run SDK calls of an asyncio pair under a deadline (S12), and own the pair's tasks and its event loop.

The SDK's own timeouts are not reliable, and one cancellation does not always end an SDK call. The SDK awaits while it
cleans up after a cancellation. Up to Python 3.11, `asyncio.wait_for`, which the SDK reads frames with, drops a
cancellation that arrives together with the frame. So a call past its deadline is cancelled every 0.1 s until it ends.
`cancel_until_done` does the same to a task that must end.

One timer serves all calls of a pair. A new call arms the timer only if the timer is not armed for an earlier time, so
most calls arm no timer.

A pair belongs to the event loop that runs at its first use. `claim` binds the pair to it and refuses every other loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.backlog import failure_kind
from twinbus.pairing.call_errors import NoTurnError
from twinbus.pairing.decide.send_flow import pause_before_retry
from twinbus.pairing.pair_sides import PairLoopError
from twinbus.sdk import (
    CANCELLED_AT_DEADLINE,
    RetrySettings,
    TokenTimeoutError,
    abort_connection,
    attach_aio_credential,
    disable_retries,
    drop_aio_connection,
    is_retryable,
    keep_alive_of,
    speed_up_opening,
    waits_for_token,
)

T = TypeVar("T")
# Seconds between two cancellations of the same call. A loop is late if it runs a timer more than this time too late.
_AGAIN_SECONDS: Final = 0.1
# Seconds that closing a link waits for the namespace, and for the closing frames of many links together.
_CLOSING_SECONDS: Final = 1.0
_CLOSING_MANY_SECONDS: Final = 0.25
LAST_CALL_SECONDS: Final = 1.0
"""Seconds that closing a sender or pair waits for calls in progress."""


# --- deadlines of calls ----------------------------------------------------------------------------------------------


class CallDeadline:
    """The deadline of one call, in the task that makes the call."""

    __slots__ = ("at", "cancellations", "cancelling_before", "task")

    def __init__(self, task: asyncio.Task[Any], at: float) -> None:
        self.task = task
        self.at = at
        self.cancelling_before = task.cancelling()
        self.cancellations = 0


class CallDeadlines:
    """The deadlines of all calls of one pair."""

    def __init__(self) -> None:
        self._calls: set[CallDeadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._late = False

    async def bound(self, coroutine: Coroutine[Any, Any, T], seconds: float, handler: Any = None) -> T:
        """Await a coroutine. Raises OperationTimeoutError at the deadline. `handler` is the handler of an SDK call.

        If other code cancels the task, CancelledError is raised.
        """
        deadline = self.begin(time.monotonic() + seconds)
        try:
            return await coroutine
        except BaseException as error:
            raised = self.error_of(deadline, error, handler)
            if raised is error:
                raise
            raise raised from None
        finally:
            self.end(deadline)

    def begin(self, at: float) -> CallDeadline:
        """Set a deadline for the running task: it is cancelled every 0.1 s from `at` on, until `end` is called."""
        task = asyncio.current_task()
        assert task is not None
        deadline = CallDeadline(task, at)
        self._calls.add(deadline)
        if self._timer is None or at < self._due:
            self._arm(at)
        return deadline

    def error_of(self, deadline: CallDeadline, error: BaseException, handler: Any) -> BaseException:
        """Return the error to raise for a call that raised `error`.

        It is an OperationTimeoutError if the call ended at its deadline or at a timeout of the SDK, otherwise `error`.
        """
        waits_for_issuer = handler is not None and waits_for_token(handler)
        if not deadline.cancellations:
            return TokenTimeoutError() if waits_for_issuer and isinstance(error, OperationTimeoutError) else error
        if isinstance(error, asyncio.CancelledError):
            by_others = deadline.task.cancelling() - deadline.cancellations > deadline.cancelling_before
            if by_others:
                return error
        elif not isinstance(error, Exception):
            return error
        return TokenTimeoutError() if waits_for_issuer else OperationTimeoutError(message="not answered in time")

    def end(self, deadline: CallDeadline) -> None:
        self._calls.discard(deadline)
        # Take our cancellations back also if the call succeeded: a result that arrived during a cancellation is valid.
        for _ in range(deadline.cancellations):
            deadline.task.uncancel()

    def expire_all(self) -> None:
        """Treat every call in progress as past its deadline."""
        for call in self._calls:
            call.at = 0.0
        self._cancel_overdue()

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = at
        self._timer = asyncio.get_running_loop().call_later(max(at - time.monotonic(), 0), self._fired)

    def _fired(self) -> None:
        """Cancel the overdue calls; if the loop is late, 0.1 s later: first the loop reads answers from the sockets.

        A blocked loop or a frozen process makes the timer late. If the loop is always late, only every second timer
        waits, so the calls still end.
        """
        self._late = not self._late and time.monotonic() - self._due > _AGAIN_SECONDS
        self._cancel_overdue(spare=self._late)

    def _cancel_overdue(self, *, spare: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        for call in list(self._calls):
            if call.at <= now:
                call.at = now + _AGAIN_SECONDS
                if not spare:
                    call.cancellations += 1
                    call.task.cancel(CANCELLED_AT_DEADLINE)
        if self._calls:
            self._arm(min(call.at for call in self._calls))


# --- the pair's tasks and loop ---------------------------------------------------------------------------------------


class TaskTimeouts(CallDeadlines):
    """Runs SDK calls of one pair under a deadline. Owns the pair's tasks; `shut_down` ends these tasks (C3)."""

    def __init__(self, try_timeout: float) -> None:
        super().__init__()
        self.try_timeout = try_timeout
        self._tasks: set[asyncio.Task[Any]] = set()
        self._frames_until = math.inf
        self._process = os.getpid()
        self._claiming = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop of the pair's tasks, timers and connections: the loop that ran at the first use. None before."""

    def claim(self) -> None:
        """Bind the pair to the running loop if the pair has no loop yet. Raises PairLoopError in another loop."""
        loop = asyncio.get_running_loop()
        with self._claiming:
            if self.loop is None:
                self.loop = loop
        # In the child of a fork this is the parent's loop; there the pair's sides refuse the call (S13).
        if self.loop is not loop and self.ours:
            raise PairLoopError

    def claim_to_close(self) -> None:
        """Like `claim`, except that any loop may close the pair after the pair's own loop was closed."""
        if self.loop is None or not self.loop.is_closed():
            self.claim()

    def in_loop(self, change: Callable[[], None]) -> None:
        """Run `change` in the pair's loop. Run it directly if the pair has no open loop, or if its loop calls this."""
        loop = self.loop
        if loop is None or loop.is_closed() or not self.ours or loop is _running_loop():
            change()
            return
        try:
            loop.call_soon_threadsafe(change)
        except RuntimeError:
            if not loop.is_closed():
                raise
            # The loop was closed after the check above.
            change()

    def tell(self, change: Callable[[], None]) -> None:
        """Run `change` in the pair's loop, or not at all if that loop was closed. For any thread.

        Runs it directly if the pair has no loop yet, or if its loop calls this.
        """
        loop = self.loop
        if loop is None or loop is _running_loop():
            change()
        elif self.ours:
            # The loop may be closed. Then its tasks and timers have ended, and there is nobody to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(change)

    @property
    def has_loop(self) -> bool:
        """False before the first use and after the loop was closed: no task runs, and none can be started."""
        return self.loop is not None and not self.loop.is_closed()

    @property
    def ours(self) -> bool:
        """False in the child of a fork: the loop and the connections belong to the parent and must not be touched."""
        return os.getpid() == self._process

    def adopt(self) -> None:
        """Make this process the owner, and claim its running loop. The child of a fork may use an unused pair."""
        if not self.ours:
            self._process = os.getpid()
            self._claiming = threading.Lock()
            self.loop = None
        self.claim()

    def prepare(self, handler: Any) -> Any:
        """Make a new sender or receiver of the SDK ready for calls under a deadline. Returns the handler."""
        attach_aio_credential(handler)
        return disable_retries(speed_up_opening(handler))

    async def take_turn(self, lock: asyncio.Lock, link: str, seconds: float) -> None:
        """Acquire the lock of a link. Raises NoTurnError if it is not free within `seconds`."""
        try:
            await self.bound(lock.acquire(), seconds)
        except OperationTimeoutError:
            raise NoTurnError(link, seconds) from None

    async def retry(
        self,
        failed: Exception,
        try_once: Callable[[float], Coroutine[Any, Any, T]],
        end: float,
        retries: RetrySettings,
        pause: Callable[[float], Awaitable[None]],
    ) -> T:
        """Try again after a first try that failed, until `end`. `pause` waits between two tries."""
        tried = 0
        while True:
            tried += 1
            left = end - time.monotonic()
            seconds = pause_before_retry(failure_kind(failed), retries, tried, left, is_retryable=is_retryable(failed))
            if seconds is None:
                raise failed
            await pause(seconds)
            try:
                return await try_once(end)
            except Exception as error:
                failed = error

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task of the pair."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def discard(self, handler: Any) -> None:
        """End the connection of a handler, without closing frames. A task then closes the handler."""
        abort_connection(handler)
        if self.has_loop:
            self.start(close_handler(handler))

    def retire(self, handler: Any, turn: asyncio.Lock | None = None) -> None:
        """Close a handler in a task, after the call that holds `turn`.

        The handler is not closed during a call: if the SDK opens a link while the link is closed, the link stays open.
        """
        if self.has_loop:
            self.start(close_handler(handler) if turn is None else _close_after_turn(handler, turn))
        else:
            abort_connection(handler)

    def close_many_soon(self) -> None:
        """Close links with closing frames only for a short time from now, so that closing a pair is quick."""
        self._frames_until = time.monotonic() + _CLOSING_MANY_SECONDS

    async def close_or_drop(self, handler: Any) -> None:
        """Close a handler that no call uses. If there is no time left for closing frames, end its connection."""
        if time.monotonic() < self._frames_until:
            await close_handler(handler)
        else:
            with contextlib.suppress(Exception):
                drop_aio_connection(handler)

    async def shut_down(self) -> None:
        """End all tasks. Calls in progress have a second to end; then they are cancelled."""
        if not self.has_loop:
            return
        for patience in (LAST_CALL_SECONDS, _CLOSING_SECONDS + 0.5):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    # A task that ends may start another, which closes a link.
                    while self._tasks:
                        await asyncio.wait(list(self._tasks))
            self.expire_all()
        rest = list(self._tasks)
        for task in rest:
            cancel_until_done(task)
        await asyncio.gather(*rest, return_exceptions=True)


class LoopTimer:
    """A timer that calls `due` in the pair's loop. Implements `shared_state.DriverTimer`, for any thread."""

    def __init__(self, timeouts: TaskTimeouts, due: Callable[[], object]) -> None:
        self._timeouts = timeouts
        self._callback = due
        self._lock = threading.Lock()
        self._at: float | None = None
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, at: float) -> None:
        with self._lock:
            self._at = at
        self._timeouts.tell(self._set)

    def disarm(self) -> None:
        with self._lock:
            self._at = None
        self._timeouts.tell(self._set)

    def _set(self) -> None:
        """Set the loop's timer to the present time of this timer. The loop calls this after every change."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        at = self._at
        if at is not None:
            self._handle = asyncio.get_running_loop().call_later(max(at - time.monotonic(), 0), self._fired, at)

    def _fired(self, at: float) -> None:
        self._handle = None
        with self._lock:
            if self._at != at:
                # Another thread has changed the time just now: `_set` follows.
                return
            self._at = None
        self._callback()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task once. Does nothing if the task's loop was closed: then the task never runs again."""
    if not task.get_loop().is_closed():
        task.cancel()


def cancel_until_done(task: asyncio.Task[Any]) -> None:
    """Cancel a task every 0.1 s until it is done. For tasks that do not await anything after a cancellation.

    One cancellation may get lost in the SDK, and the task would then wait for an answer until its deadline.
    """
    if not task.done() and not task.get_loop().is_closed():
        task.cancel()
        task.get_loop().call_later(_AGAIN_SECONDS, cancel_until_done, task)


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, at most for `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _close_after_turn(handler: Any, turn: asyncio.Lock) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_CALL_SECONDS), turn:
            pass
    if turn.locked():
        # The call in progress takes more than a second: end its connection, so that the call fails.
        abort_connection(handler)
    async with turn:
        await close_handler(handler)


async def close_handler(handler: Any) -> None:
    """Close a handler: with the AMQP closing frames, but after a second by ending the connection."""
    keep_alive = keep_alive_of(handler)
    if keep_alive is not None:
        keep_alive.cancel()
    try:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(handler.close(), _CLOSING_SECONDS)
    finally:
        # This runs also if the closing was cancelled.
        with contextlib.suppress(Exception):
            abort_connection(handler)
