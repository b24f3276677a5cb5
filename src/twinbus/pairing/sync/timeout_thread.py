"""The one thread of a sync pair that watches the clock: deadlines of calls (S12), and timers (S3).

A call that ends in time takes no lock and does not wake the thread: `run` adds it to a set, and removes it at the end.
The thread sleeps until the earliest time that it knows. All deadlines of a pair are equally long, so a new call hardly
ever has to wake it.

The thread itself runs nothing that may block: workers run what is due.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from twinbus.sdk import interrupt_at_deadline, timeout_error

T = TypeVar("T")
Call = Callable[[Any, float | None], T]
"""An SDK call on a handler. The timeout is None on an open link: our deadline holds there, the SDK's costs 10 µs."""

# The SDK may open another socket while one is shut down: until its call ends, each is shut down in turn.
_AGAIN_SECONDS: Final = 0.1
# If the process can have no more threads, a job is tried again after this time.
_NO_THREAD_SECONDS: Final = 1.0


class TimedCall:
    """One call in progress on a handler of the SDK. `expired` tells whether its deadline has passed."""

    __slots__ = ("at", "expired", "handler")

    def __init__(self, handler: Any, at: float) -> None:
        self.handler = handler
        self.at = at
        self.expired = False


class ThreadTimer:
    """Calls back in a worker thread (`shared_state.DriverTimer`)."""

    def __init__(self, thread: TimeoutThread, due: Callable[[], object]) -> None:
        self._thread = thread
        self.due = due

    def arm(self, at: float) -> None:
        self._thread.arm(self, at)

    def disarm(self) -> None:
        self._thread.disarm(self)


class TimeoutThread:
    """Starts its thread when a call or timer needs it; the thread ends when nothing is left to watch.

    `run_in_worker` starts a job in a worker thread, or raises RuntimeError if there can be none.
    """

    def __init__(self, name: str, run_in_worker: Callable[[Callable[[], object]], None]) -> None:
        self._name = name
        self._run_in_worker = run_in_worker
        self._changed = threading.Condition()
        self._calls: set[TimedCall] = set()
        self._timers: dict[ThreadTimer, float] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._wakes_at = math.inf

    # --- calls -----------------------------------------------------------------------------------------------------

    def run(self, handler: Any, call: Call[T], at: float) -> T:
        """Run an SDK call in the caller's thread, on an open link. Interrupt its handler at the time `at`.

        Raises OperationTimeoutError if the call was interrupted, and RuntimeError if no thread can watch it.
        """
        timed = TimedCall(handler, at)
        self._calls.add(timed)
        try:
            if at < self._wakes_at:
                self._wake()
            return call(handler, None)
        except Exception as error:
            if timed.expired:
                raise timeout_error(handler, "not answered in time") from error
            raise
        finally:
            self._calls.discard(timed)

    # --- timers ----------------------------------------------------------------------------------------------------

    def arm(self, timer: ThreadTimer, at: float) -> None:
        with self._changed:
            if self._stopped:
                return
            self._timers[timer] = at
        if at < self._wakes_at:
            # The caller holds the lock of a shared state and must get no error. Without a thread the timer stays armed,
            # and the next call or timer starts one.
            with contextlib.suppress(RuntimeError):
                self._wake()

    def disarm(self, timer: ThreadTimer) -> None:
        with self._changed:
            self._timers.pop(timer, None)

    def soon(self, job: Callable[[], object]) -> None:
        """Run a job in a worker: now, or as soon as a thread can be started. Never raises for lack of a thread."""
        try:
            self._run_in_worker(job)
        except RuntimeError:
            self.arm(ThreadTimer(self, job), time.monotonic() + _NO_THREAD_SECONDS)

    def stop(self) -> None:
        """Drop all timers. Calls in progress still end at their deadlines; then the thread ends."""
        with self._changed:
            self._stopped = True
            self._timers.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()

    def _run(self) -> None:
        while True:
            self._interrupt_overdue(time.monotonic())
            with self._changed:
                due = self._take_due_timers(time.monotonic())
                if not due:
                    # `run` takes no lock. A call that it adds before the second line is counted there. A call that it
                    # adds after the first line compares itself with infinity, and wakes this thread.
                    self._wakes_at = math.inf
                    self._wakes_at = self._earliest()
                    if self._wakes_at == math.inf:
                        self._thread = None
                        return
                    self._changed.wait(max(self._wakes_at - time.monotonic(), 0))
                    self._wakes_at = -math.inf
                    continue
            for timer in due:
                try:
                    self._run_in_worker(timer.due)
                except RuntimeError:
                    self._put_back(timer, time.monotonic() + _NO_THREAD_SECONDS)

    def _put_back(self, timer: ThreadTimer, at: float) -> None:
        """Arm a timer again, unless somebody else has armed it meanwhile."""
        with self._changed:
            if not self._stopped:
                self._timers.setdefault(timer, at)

    def _earliest(self) -> float:
        times = [call.at for call in list(self._calls)]
        return min([*times, *self._timers.values()], default=math.inf)

    def _take_due_timers(self, now: float) -> list[ThreadTimer]:
        due = [timer for timer, at in self._timers.items() if at <= now]
        for timer in due:
            del self._timers[timer]
        return due

    def _interrupt_overdue(self, now: float) -> None:
        for call in list(self._calls):
            if call.at <= now:
                call.expired = True
                call.at = now + _AGAIN_SECONDS
                interrupt_at_deadline(call.handler)
