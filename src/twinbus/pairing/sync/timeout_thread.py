"""The thread of a sync pair that waits for deadlines of calls (S12) and for timers (S3). A pair has one such thread.

A call that ends in time takes no lock and does not wake the thread: `run` adds the call to a set, and removes it at the
end. The thread sleeps until the earliest deadline or timer. Most calls of a pair have the same time limit, so that a
new call rarely has the earliest deadline and rarely has to wake the thread.

The thread itself runs nothing that may block: worker threads run the callbacks of timers.
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
"""An SDK call on a handler, with a timeout in seconds.

The timeout is None on an open link: the timeout thread ends the call there, and a timeout of the SDK would take 10 µs.
"""

# The SDK may open another socket after one was shut down: every 0.1 s the present socket is shut down, until the call
# ends.
_AGAIN_SECONDS: Final = 0.1
# If the process can have no more threads, a job is tried again after this time.
_NO_THREAD_SECONDS: Final = 1.0


class TimedCall:
    """One call in progress on a handler of the SDK. `at` is its deadline; `expired` is True after the deadline."""

    __slots__ = ("at", "expired", "handler")

    def __init__(self, handler: Any, at: float) -> None:
        self.handler = handler
        self.at = at
        self.expired = False


class ThreadTimer:
    """A timer that calls `due` in a worker thread. Implements `shared_state.DriverTimer`."""

    def __init__(self, thread: TimeoutThread, due: Callable[[], object]) -> None:
        self._thread = thread
        self.due = due

    def arm(self, at: float) -> None:
        self._thread.arm(self, at)

    def disarm(self) -> None:
        self._thread.disarm(self)


class TimeoutThread:
    """Interrupts calls at their deadlines and runs timers, with one thread.

    The thread starts when a call or timer needs it, and ends when no call and no timer is left. `run_in_worker` starts
    a job in a worker thread, or raises RuntimeError if the process can have no more threads.
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

        Raises OperationTimeoutError if the call was interrupted, and RuntimeError if no thread can be started.
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
            # The caller holds the lock of a shared state and must get no error. If no thread can be started, the timer
            # stays armed, and the next call or timer tries to start the thread.
            with contextlib.suppress(RuntimeError):
                self._wake()

    def disarm(self, timer: ThreadTimer) -> None:
        with self._changed:
            self._timers.pop(timer, None)

    def soon(self, job: Callable[[], object]) -> None:
        """Run a job in a worker. If no thread can be started, try again every second. Never raises for this reason."""
        try:
            self._run_in_worker(job)
        except RuntimeError:
            self.arm(ThreadTimer(self, job), time.monotonic() + _NO_THREAD_SECONDS)

    def stop(self) -> None:
        """Drop all timers. Calls in progress still end at their deadlines; then the thread ends. Waits at most 1 s."""
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
                    # `run` takes no lock. If `run` adds a call before the second line, `_earliest` includes the call.
                    # If `run` adds a call after the first line, it compares the deadline with infinity, and wakes this
                    # thread.
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
        """Arm a timer that could not be run, if it was not armed again since it became due."""
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
