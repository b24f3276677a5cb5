"""Attempts of a sync pair, each within its deadline (S12).

On an open link the SDK is called in the caller's thread, one try, and its socket is shut at the deadline. Opening and
trying again, which no socket can end (names, connecting, tokens), is done by a worker that the caller can leave behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.pairing.calls import FailedOverMeanwhileError
from twinbus.pairing.decide.failover import SendRoute
from twinbus.pairing.retrying import pause_before_next
from twinbus.pairing.shared_state import SharedEntity
from twinbus.pairing.sync.timeout_thread import TimeoutThread
from twinbus.sdk import (
    RetrySettings,
    TokenIssuers,
    disable_retries,
    interrupt,
    interrupt_at_deadline,
    is_closed,
    is_open,
    keep_alive_of,
    refuse_calls,
    speed_up_opening,
    timeout_error,
)

T = TypeVar("T")
_CLOSING_SECONDS: Final = 2.5
# How long a closing sender lets a call end that is under way on it.
_PATIENCE_SECONDS: Final = 1.0
# Of a sender, and the time-out to give it: none on an open link, where ours holds and the SDK's own costs 10 µs.
Call = Callable[[Any, float | None], T]


class ThreadTimeouts:
    """Those of one pair, with its threads: they end with it (C3)."""

    def __init__(self, name: str, seconds: float) -> None:
        self.seconds = seconds
        self.workers = Workers(f"twinbus-work-{name}")
        self.keeper = TimeoutThread(f"twinbus-time-{name}", self.workers.run)
        self._process = os.getpid()
        self._issuers = TokenIssuers(self.workers.run)

    @property
    def ours(self) -> bool:
        """False in the child of a fork: connections and threads are the parent's, and none of it may be touched."""
        return os.getpid() == self._process

    def ready(self, sender: Any) -> Any:
        """The same sender or receiver of the SDK, as attempts need it: one try, quick to open, no endless wait."""
        self._issuers.attach(sender)
        return disable_retries(speed_up_opening(sender))

    def attempt(
        self, sender: Any, call: Call[T], seconds: float, retries: RetrySettings, cell: SharedEntity | None = None
    ) -> T:
        """OperationTimeoutError past the deadline; then the sender must not be used again.

        `cell` is that of an attempt on the primary: no second try is made there once it is failed over (S5).
        """
        until = time.monotonic() + seconds
        pause: float | None = None
        if is_open(sender):
            try:
                # As `watched`, without a function more on the healthy path.
                watch = self.keeper.begin(sender, until)
                try:
                    return call(sender, None)
                except Exception as error:
                    if watch.expired:
                        raise timeout_error(sender, "not answered in time") from error
                    raise
                finally:
                    self.keeper.end(watch)
            except Exception as error:
                pause = pause_before_next(error, retries, 1, until - time.monotonic())
                if pause is None:
                    raise
        job = BackgroundCall(self, sender, call, until, retries, pause, cell)
        self.workers.run(job.run)
        result: T = job.result(seconds)
        return result

    def discard(self, sender: Any) -> None:
        """Give up a sender of the SDK at once; what is left of it is closed in the background."""
        if self.ours:
            refuse_calls(sender)
            interrupt(sender)
            self.keeper.soon(lambda: self.closed(sender))

    def retire(self, current: Callable[[], Any], turn: threading.Lock, cell: SharedEntity) -> None:
        """Close a sender of the SDK in the background and with a word, after the call that has the turn on it."""
        if self.ours:
            self.keeper.soon(lambda: self._retired(current, turn, cell))

    def _retired(self, current: Callable[[], Any], turn: threading.Lock, cell: SharedEntity) -> None:
        ended = turn.acquire(timeout=_PATIENCE_SECONDS)
        try:
            if not ended:
                refuse_calls(current())
                interrupt(current())
                cell.wake()
            self.closed(current())
        finally:
            if ended:
                turn.release()

    def end(self) -> None:
        self.workers.stop(_CLOSING_SECONDS)
        self.keeper.stop()

    def watched(self, sender: Any, until: float, action: Callable[[], T]) -> T:
        """In this thread, with the sender's socket shut at the deadline."""
        watch = self.keeper.begin(sender, until)
        try:
            return action()
        except Exception as error:
            if watch.expired:
                raise timeout_error(sender, "not answered in time") from error
            raise
        finally:
            self.keeper.end(watch)

    def closed(self, sender: Any) -> None:
        """In this thread: with a word to the other end if it listens, and all its own gone."""
        keep_alive = keep_alive_of(sender)
        if keep_alive is not None:
            keep_alive.cancel()
        with contextlib.suppress(Exception):
            self.watched(sender, time.monotonic() + 1.0, sender.close)
        with contextlib.suppress(Exception):
            interrupt(sender)


class BackgroundCall:
    """An attempt, or what is left of it, in a worker: try after try until the deadline, or until it is left behind."""

    def __init__(
        self,
        attempts: ThreadTimeouts,
        sender: Any,
        call: Call[Any],
        until: float,
        retries: RetrySettings,
        pause: float | None,
        cell: SharedEntity | None,
    ) -> None:
        self._attempts = attempts
        self._sender = sender
        self._call = call
        self._until = until
        self._retries = retries
        self._pause = pause
        self._cell = cell
        self._done = threading.Event()
        self._woken = threading.Event()
        self._left = False
        self._result: Any = None
        self._error: BaseException | None = None

    def result(self, seconds: float) -> Any:
        """Waited for in the caller's thread."""
        try:
            ended = self._done.wait(max(self._until - time.monotonic(), 0))
        except BaseException:
            self.leave()
            raise
        if not ended:
            told = timeout_error(self._sender, f"not answered within {seconds:g} s")
            self.leave()
            raise told
        if self._error is not None:
            raise self._error
        return self._result

    def leave(self) -> None:
        """Nobody waits for it any longer."""
        self._left = True
        self._woken.set()
        interrupt_at_deadline(self._sender)

    def run(self) -> None:
        if self._cell is not None:
            self._cell.rerouted.add(self._woken.set)
        try:
            self._result = self._attempts.watched(self._sender, self._until, self._try)
        except BaseException as error:
            self._error = error
        finally:
            if self._cell is not None:
                self._cell.rerouted.discard(self._woken.set)
            self._done.set()
        if self._left:
            self._attempts.closed(self._sender)

    def _try(self) -> Any:
        pause, tried = self._pause, 0 if self._pause is None else 1
        while True:
            if pause is not None:
                self._wait(pause)
            try:
                return self._call(self._sender, max(self._until - time.monotonic(), 0.001))
            except Exception as error:
                tried += 1
                pause = pause_before_next(error, self._retries, tried, self._until - time.monotonic())
                if self._left or pause is None:
                    raise

    def _wait(self, pause: float) -> None:
        """Cut short when the entity fails over: nothing more is sent to it, and the call diverts at once (S5)."""
        end = time.monotonic() + pause
        while self._may_go_on() and (left := end - time.monotonic()) > 0:
            self._woken.wait(left)
            self._woken.clear()
        if self._left:
            raise OperationTimeoutError(message="left behind")
        if not self._may_go_on():
            # Or its sender was closed, which whoever closed it knows.
            raise FailedOverMeanwhileError

    def _may_go_on(self) -> bool:
        routed = self._cell is None or self._cell.entity.route is SendRoute.PRIMARY
        return routed and not self._left and not is_closed(self._sender)


_log = logging.getLogger("twinbus.pairing")

_IDLE_SECONDS: Final = 2.0


class Workers:
    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._stopped = False

    def run(self, job: Callable[[], object]) -> None:
        """In a thread of ours, at once. RuntimeError where the process may have no more threads."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._work, args=(job,), name=self._name, daemon=True)
                thread.start()
                self._threads.add(thread)
                return
        self._jobs.put(job)

    def stop(self, seconds: float) -> None:
        """Let them end: those at work when their job does. It waits for them so long at most."""
        with self._lock:
            self._stopped = True
            threads = list(self._threads)
            for _ in range(self._idle):
                self._jobs.put(None)
            self._idle = 0
        until = time.monotonic() + seconds
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0))

    def _work(self, job: Callable[[], object]) -> None:
        following: Callable[[], object] | None = job
        while following is not None:
            try:
                following()
            except Exception:
                _log.exception("a worker of the pair failed")
            following = self._next()
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            if self._stopped:
                return None
            self._idle += 1
        try:
            return self._jobs.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            pass
        with self._lock:
            if self._idle:
                self._idle -= 1
                return None
        # Counted on at the last moment: the job is on its way.
        return self._jobs.get()
