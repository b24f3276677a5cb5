"""Run SDK calls of a sync pair under a deadline (S12), and own the threads for these calls.

The SDK's own timeouts are not reliable: the SDK may block for longer in name resolution, in connecting, in a
credential, or in a socket. There are two ways to call the SDK:

    on an open link        In the caller's thread. The timeout thread shuts the socket at the deadline, and the call
                           fails immediately.
    to open a link,        In a worker thread, because shutting a socket does not end name resolution, connecting or a
    and for every retry    credential. The caller waits for the worker until the deadline. If the worker is not done at
                           the deadline, the caller stops waiting, and the worker ends when the SDK returns.

A handler whose call was interrupted must not be used again: discard it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.backlog import failure_kind
from twinbus.pairing.decide.failover import SendRoute
from twinbus.pairing.decide.send_flow import FailedOverMeanwhileError, pause_before_retry
from twinbus.pairing.shared_state import SharedEntity
from twinbus.pairing.sync.timeout_thread import Call, TimeoutThread
from twinbus.sdk import (
    RetrySettings,
    TokenIssuers,
    close_sync_handler,
    disable_retries,
    drop_connection,
    interrupt,
    interrupt_at_deadline,
    is_closed,
    is_open,
    is_retryable,
    keep_alive_of,
    refuse_calls,
    speed_up_opening,
    timeout_error,
)

T = TypeVar("T")

_log = logging.getLogger("twinbus.pairing")

_NO_RETRIES: Final = RetrySettings(0, 0.0, 0.0, True)
# Seconds that ending the pair waits for worker threads.
_WORKERS_SECONDS: Final = 2.5
# Seconds that closing a sender waits for the call in progress, and that closing a link waits for the namespace.
_LAST_CALL_SECONDS: Final = 1.0
_CLOSING_SECONDS: Final = 1.0
_CLOSING_MANY_SECONDS: Final = 0.25
_IDLE_SECONDS: Final = 2.0
# How many workers close the links of a pair.
_RETIRING_WORKERS: Final = 16
_MIN_TIMEOUT_SECONDS: Final = 0.001


class RetiredLink(NamedTuple):
    """A link to close. `current` returns its handler. A call that uses the link holds `turn`."""

    current: Callable[[], Any]
    turn: threading.Lock
    entity: SharedEntity


class ThreadTimeouts:
    """Runs SDK calls of one pair under a deadline. Owns the pair's threads; `end` ends these threads (C3)."""

    def __init__(self, name: str, try_timeout: float) -> None:
        self.try_timeout = try_timeout
        self.workers = Workers(f"twinbus-work-{name}")
        self.thread = TimeoutThread(f"twinbus-time-{name}", self.workers.run)
        self._process = os.getpid()
        self.closed = threading.Event()
        """Not set while another thread closes the pair."""
        self.closed.set()
        self._issuers = TokenIssuers(self.workers.run)

    @property
    def ours(self) -> bool:
        """False in the child of a fork: threads and connections belong to the parent and must not be touched."""
        return os.getpid() == self._process

    def prepare(self, handler: Any) -> Any:
        """Make a new sender or receiver of the SDK ready for calls under a deadline. Returns the handler."""
        self._issuers.attach(handler)
        return disable_retries(speed_up_opening(handler))

    def call(
        self, handler: Any, call: Call[T], seconds: float, retries: RetrySettings, entity: SharedEntity | None = None
    ) -> T:
        """Run `call` with its retries within `seconds`. Raises OperationTimeoutError at the deadline.

        For a call on the primary `entity` is given: if the entity fails over before a retry, there is no retry, and the
        call raises FailedOverMeanwhileError (S5).
        """
        until = time.monotonic() + seconds
        pause: float | None = None
        if is_open(handler):
            try:
                return self.thread.run(handler, call, until)
            except Exception as error:
                pause = _pause_before_retry(error, retries, 1, until)
                if pause is None:
                    raise
        background = BackgroundCall(self, handler, call, until, retries, pause, entity)
        self.workers.run(background.run)
        result: T = background.result(seconds)
        return result

    def call_once(self, handler: Any, call: Call[T], seconds: float | None = None) -> T:
        """Run `call` within `seconds`, or within try_timeout if it is None, without retries."""
        return self.call(handler, call, self.try_timeout if seconds is None else seconds, _NO_RETRIES)

    def discard(self, handler: Any) -> None:
        """Shut the socket of a handler, which ends a call in progress. A worker then closes the handler."""
        if self.ours:
            refuse_calls(handler)
            interrupt(handler)
            self.thread.soon(lambda: self.close_handler(handler))

    def retire_all(self, links: Sequence[RetiredLink]) -> None:
        """Close links in the background, with few workers: a thread for each of 2,000 links takes seconds.

        A worker waits for the calls that use its links, at most for a second, and then interrupts them.
        """
        if self.ours:
            for first in range(min(_RETIRING_WORKERS, len(links))):
                self.thread.soon(partial(self._retire, links[first::_RETIRING_WORKERS]))

    def _retire(self, links: Sequence[RetiredLink]) -> None:
        now = time.monotonic()
        # One link has a second for the closing frames. Many links have less together, so that closing a pair is quick.
        frames = now + (_CLOSING_SECONDS if len(links) == 1 else _CLOSING_MANY_SECONDS)
        until = now + _LAST_CALL_SECONDS
        in_use = []
        for link in links:
            if not link.turn.acquire(blocking=False):
                in_use.append(link)
                continue
            try:
                self._close_or_drop(link.current(), frames)
            finally:
                link.turn.release()
        for link in in_use:
            has_turn = link.turn.acquire(timeout=max(until - time.monotonic(), 0.0))
            try:
                if has_turn:
                    self._close_or_drop(link.current(), max(frames, until))
                    continue
                refuse_calls(link.current())
                interrupt(link.current())
                link.entity.wake_waiting_calls()
                self.close_handler(link.current())
            finally:
                if has_turn:
                    link.turn.release()

    def _close_or_drop(self, handler: Any, until: float) -> None:
        if time.monotonic() < until:
            self.close_handler(handler, until)
        else:
            drop_connection(handler)

    def close_handler(self, handler: Any, until: float | None = None) -> None:
        """Close a handler in this thread: with the AMQP closing frames, but after `until` by shutting the socket.

        `until` is a second from now if it is not given.
        """
        keep_alive = keep_alive_of(handler)
        if keep_alive is not None:
            keep_alive.cancel()
        if until is None:
            until = time.monotonic() + _CLOSING_SECONDS
        with contextlib.suppress(Exception):
            self.thread.run(handler, lambda it, _: close_sync_handler(it), until)
        with contextlib.suppress(Exception):
            interrupt(handler)

    def end(self) -> None:
        """End all threads, and wait for them, at most for 3.5 s."""
        self.workers.stop(_WORKERS_SECONDS)
        self.thread.stop()


class BackgroundCall:
    """A call, or its retries, in a worker thread. Tries end at the deadline, or when the caller stops waiting."""

    def __init__(
        self,
        timeouts: ThreadTimeouts,
        handler: Any,
        call: Call[Any],
        until: float,
        retries: RetrySettings,
        pause: float | None,
        entity: SharedEntity | None,
    ) -> None:
        """`pause` is the seconds before the next try if the first try was made and failed; otherwise None."""
        self._timeouts = timeouts
        self._handler = handler
        self._call = call
        self._until = until
        self._retries = retries
        self._pause = pause
        self._entity = entity
        self._done = threading.Event()
        self._woken = threading.Event()
        self._abandoned = False
        self._result: Any = None
        self._error: BaseException | None = None

    def result(self, seconds: float) -> Any:
        """Wait in the caller's thread for the result. At the deadline, or if interrupted, abandon the call."""
        try:
            in_time = self._done.wait(max(self._until - time.monotonic(), 0))
        except BaseException:
            self._abandon()
            raise
        if not in_time:
            # Made before `_abandon`, which ends a wait for a token: the error says whether the call waited for a token.
            error = timeout_error(self._handler, f"not answered within {seconds:g} s")
            self._abandon()
            raise error
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        """Make the call and its retries, in the worker thread."""
        if self._entity is not None:
            self._entity.on_reroute.add(self._woken.set)
        try:
            self._result = self._timeouts.thread.run(self._handler, lambda _, __: self._try_and_retry(), self._until)
        except BaseException as error:
            self._error = error
        finally:
            if self._entity is not None:
                self._entity.on_reroute.discard(self._woken.set)
            self._done.set()
        if self._abandoned:
            self._timeouts.close_handler(self._handler)

    def _abandon(self) -> None:
        self._abandoned = True
        self._woken.set()
        interrupt_at_deadline(self._handler)

    def _try_and_retry(self) -> Any:
        pause, tried = self._pause, 0 if self._pause is None else 1
        while True:
            if pause is not None:
                self._wait(pause)
            try:
                return self._call(self._handler, max(self._until - time.monotonic(), _MIN_TIMEOUT_SECONDS))
            except Exception as error:
                tried += 1
                pause = _pause_before_retry(error, self._retries, tried, self._until)
                if self._abandoned or pause is None:
                    raise

    def _wait(self, pause: float) -> None:
        """Wait before the next try. A failover ends the wait, so that the call diverts without delay (S5)."""
        end = time.monotonic() + pause
        while self._may_retry() and (left := end - time.monotonic()) > 0:
            self._woken.wait(left)
            self._woken.clear()
        if self._abandoned:
            raise OperationTimeoutError(message="left behind")
        if not self._may_retry():
            # The handler of a closed sender gets here too. Its PairedSender raises ValueError instead of this error.
            raise FailedOverMeanwhileError

    def _may_retry(self) -> bool:
        on_primary = self._entity is None or self._entity.entity.route is SendRoute.PRIMARY
        return on_primary and not self._abandoned and not is_closed(self._handler)


def _pause_before_retry(error: Exception, retries: RetrySettings, tried: int, until: float) -> float | None:
    left = until - time.monotonic()
    return pause_before_retry(failure_kind(error), retries, tried, left, is_retryable=is_retryable(error))


class Workers:
    """Threads for jobs that may hang: opening a link, retrying, pinging, closing.

    A thread is reused, ends after two seconds without a job, and never keeps the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._stopped = False

    def run(self, job: Callable[[], object]) -> None:
        """Start a job in an idle or new thread. Raises RuntimeError if the process can have no more threads."""
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
        """End every thread after its present job. Waits for the threads, at most for `seconds`."""
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
        # `run` gave a job to this idle thread just before the wait of the thread ended, so a job arrives in the queue.
        return self._jobs.get()
