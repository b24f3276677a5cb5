"""Attempts of a sync pair, each within its deadline (S12).

On an open link the SDK is called in the caller's thread, one try, and its socket is shut at the deadline. Opening and
trying again, which no socket can end (names, connecting, tokens), is done by a worker that the caller can leave behind.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.pairing.calls import FailedOverMeanwhileError
from twinbus.pairing.decide.failover import Route
from twinbus.pairing.retrying import pause_before_next
from twinbus.pairing.shared_state import EntityCell
from twinbus.pairing.sync.timeout_thread import Timekeeper
from twinbus.pairing.sync.workers import Workers
from twinbus.sdk.handlers import (
    RetrySettings,
    disable_retries,
    interrupt,
    interrupt_at_deadline,
    is_closed,
    is_open,
    keep_alive_of,
    refuse_calls,
    speed_up_opening,
)
from twinbus.sdk.sender_credentials import SenderCredential, TokenIssuer, timeout_error, uses_token_issuer

T = TypeVar("T")
_CLOSING_SECONDS: Final = 2.5
# How long a closing sender lets a call end that is under way on it.
_PATIENCE_SECONDS: Final = 1.0
# Of a sender, and the time-out to give it: none on an open link, where ours holds and the SDK's own costs 10 µs.
Call = Callable[[Any, float | None], T]


class Attempts:
    """Those of one pair, with its threads: they end with it (C3)."""

    def __init__(self, name: str, seconds: float) -> None:
        self.seconds = seconds
        self.workers = Workers(f"twinbus-work-{name}")
        self.keeper = Timekeeper(f"twinbus-time-{name}", self.workers.run)
        self._process = os.getpid()
        self._issuers: dict[int, TokenIssuer] = {}

    @property
    def ours(self) -> bool:
        """False in the child of a fork: connections and threads are the parent's, and none of it may be touched."""
        return os.getpid() == self._process

    def ready(self, sender: Any) -> Any:
        """The same sender or receiver of the SDK, as attempts need it: one try, quick to open, no endless wait."""
        credential = sender._credential
        if uses_token_issuer(credential):
            issuer = self._issuers.setdefault(id(credential), TokenIssuer(credential, self.workers.run))
            sender._credential = SenderCredential(issuer)
        return disable_retries(speed_up_opening(sender))

    def attempt(
        self, sender: Any, call: Call[T], seconds: float, retries: RetrySettings, cell: EntityCell | None = None
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
        job = Job(self, sender, call, until, retries, pause, cell)
        self.workers.run(job.run)
        result: T = job.result(seconds)
        return result

    def discard(self, sender: Any) -> None:
        """Give up a sender of the SDK at once; what is left of it is closed in the background."""
        if self.ours:
            refuse_calls(sender)
            interrupt(sender)
            self.keeper.soon(lambda: self.closed(sender))

    def retire(self, current: Callable[[], Any], turn: threading.Lock, cell: EntityCell) -> None:
        """Close a sender of the SDK in the background and with a word, after the call that has the turn on it."""
        if self.ours:
            self.keeper.soon(lambda: self._retired(current, turn, cell))

    def _retired(self, current: Callable[[], Any], turn: threading.Lock, cell: EntityCell) -> None:
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


class Job:
    """An attempt, or what is left of it, in a worker: try after try until the deadline, or until it is left behind."""

    def __init__(
        self,
        attempts: Attempts,
        sender: Any,
        call: Call[Any],
        until: float,
        retries: RetrySettings,
        pause: float | None,
        cell: EntityCell | None,
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
        routed = self._cell is None or self._cell.entity.route is Route.PRIMARY
        return routed and not self._left and not is_closed(self._sender)
