"""The one thread of a sync pair that watches the clock: timers without traffic (S3), calls past their deadline (S12).

A call that ends in time neither takes a lock nor wakes it. It calls nobody that may wait: what a timer does when it is
due, a worker does.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from twinbus.sdk import interrupt_at_deadline

# The SDK may be opening another socket while one is shut: until its call ends, each is shut in turn.
_AGAIN_SECONDS: Final = 0.1
# The process may have as many threads as it is allowed: what needs one is tried again after that long.
_NO_THREAD_SECONDS: Final = 1.0


class TimedCall:
    """One call under way on a sender of the SDK. Set by `begin`: there is one at every send."""

    __slots__ = ("at", "expired", "sender")

    sender: Any
    at: float
    expired: bool


class ThreadTimer:
    """Calls back in a worker (entity.Timer)."""

    def __init__(self, keeper: TimeoutThread, due: Callable[[], object]) -> None:
        self._keeper = keeper
        self.due = due

    def arm(self, at: float) -> None:
        self._keeper.arm(self, at)

    def disarm(self) -> None:
        self._keeper.disarm(self)


class TimeoutThread:
    """Its thread is there while a call or a timer may need it, and begins anew with the next. `run`: in a worker."""

    def __init__(self, name: str, run: Callable[[Callable[[], object]], None]) -> None:
        self._name = name
        self._run_in_worker = run
        self._changed = threading.Condition()
        self._watches: set[TimedCall] = set()
        self._timers: dict[ThreadTimer, float] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._next = math.inf

    # --- calls -----------------------------------------------------------------------------------------------------

    def begin(self, sender: Any, at: float) -> TimedCall:
        watch = TimedCall()
        watch.sender = sender
        watch.at = at
        watch.expired = False
        self._watches.add(watch)
        # All deadlines of a pair are equally long, so a later call hardly ever has an earlier one.
        if at < self._next:
            try:
                self._wake()
            except BaseException:
                # Nobody would end it.
                self._watches.discard(watch)
                raise
        return watch

    def end(self, watch: TimedCall) -> None:
        self._watches.discard(watch)

    # --- timers ----------------------------------------------------------------------------------------------------

    def arm(self, timer: ThreadTimer, at: float) -> None:
        with self._changed:
            if self._stopped:
                return
            self._timers[timer] = at
        if at < self._next:
            # Asked for under a cell's lock. Without a thread it stays armed, and the next call or timer starts one.
            with contextlib.suppress(RuntimeError):
                self._wake()

    def disarm(self, timer: ThreadTimer) -> None:
        with self._changed:
            self._timers.pop(timer, None)

    def soon(self, job: Callable[[], object]) -> None:
        """In a worker: at once, or as soon as a thread can be started. It never raises for the lack of one."""
        try:
            self._run_in_worker(job)
        except RuntimeError:
            self.arm(ThreadTimer(self, job), time.monotonic() + _NO_THREAD_SECONDS)

    def stop(self) -> None:
        """No timer is due any more; a call under way is still ended in time, and then the thread ends too."""
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
            self._end_overdue(time.monotonic())
            with self._changed:
                due = self._due_timers(time.monotonic())
                if not due:
                    # A call that begins after this line compares itself with it, and one before is counted in it.
                    self._next = math.inf
                    self._next = self._earliest()
                    if self._next == math.inf:
                        self._thread = None
                        return
                    self._changed.wait(max(self._next - time.monotonic(), 0))
                    self._next = -math.inf
                    continue
            for timer in due:
                try:
                    self._run_in_worker(timer.due)
                except RuntimeError:
                    self._put_back(timer, time.monotonic() + _NO_THREAD_SECONDS)

    def _put_back(self, timer: ThreadTimer, at: float) -> None:
        """Unless it was armed anew meanwhile."""
        with self._changed:
            if not self._stopped:
                self._timers.setdefault(timer, at)

    def _earliest(self) -> float:
        times = [watch.at for watch in list(self._watches)]
        return min([*times, *self._timers.values()], default=math.inf)

    def _due_timers(self, now: float) -> list[ThreadTimer]:
        due = [timer for timer, at in self._timers.items() if at <= now]
        for timer in due:
            del self._timers[timer]
        return due

    def _end_overdue(self, now: float) -> None:
        for watch in list(self._watches):
            if watch.at <= now:
                watch.expired = True
                watch.at = now + _AGAIN_SECONDS
                interrupt_at_deadline(watch.sender)
