"""Attempts of a sync pair, each within its deadline (S12).

On an open link the SDK is called in the caller's thread, one try, and its socket is shut at the deadline. Opening and
trying again, which no socket can end (names, connecting, tokens), is done by a worker that the caller can leave behind.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.pairing.sdk import Retries, is_open, keep_alive_of, may_try_again, shut_socket
from twinbus.pairing.timekeeper import Timekeeper, Watch
from twinbus.pairing.workers import Workers

T = TypeVar("T")
_CLOSING_SECONDS: Final = 1.5
# Of a sender, and the time-out to give it: none on an open link, where ours holds and the SDK's own costs 10 µs.
Call = Callable[[Any, float | None], T]


class Attempts:
    """Those of one pair, with its threads: they end with it (C3)."""

    def __init__(self, name: str, seconds: float) -> None:
        self.seconds = seconds
        self.keeper = Timekeeper(f"twinbus-time-{name}")
        self.workers = Workers(f"twinbus-work-{name}")

    def span(self, timeout: float | None) -> float:
        """How long an attempt may take whose caller gave a time-out."""
        return self.seconds if timeout is None else min(self.seconds, timeout)

    def attempt(self, sender: Any, call: Call[T], seconds: float, retries: Retries, timeout: float | None = None) -> T:
        """OperationTimeoutError past the deadline; then the sender must not be used again. `timeout`: the caller's."""
        until = time.monotonic() + seconds
        tried = 0
        if is_open(sender):
            try:
                return self._here(sender, call, until, timeout)
            except Exception as error:
                tried = 1
                if not _again(error, retries, tried, until):
                    raise
        job = Job(self, sender, call, until, retries, tried)
        self.workers.run(job.run)
        result: T = job.result(seconds)
        return result

    def discard(self, sender: Any, *, politely: bool = False) -> None:
        """Close a sender of the SDK in the background, without waiting for a peer that may be gone."""
        if not politely:
            shut_socket(sender)
        self.workers.run(lambda: self.closed(sender))

    def end(self) -> None:
        self.workers.stop(_CLOSING_SECONDS)
        self.keeper.stop()

    def watched(self, sender: Any, until: float, action: Callable[[], T]) -> T:
        """In this thread, with the sender's socket shut at the deadline."""
        watch = Watch(sender, until)
        self.keeper.begin(watch)
        try:
            return action()
        except Exception as error:
            if watch.expired:
                raise OperationTimeoutError(message="not answered in time") from error
            raise
        finally:
            self.keeper.end(watch)

    def _here(self, sender: Any, call: Call[T], until: float, timeout: float | None) -> T:
        # As `watched`, without a function more on the healthy path.
        watch = Watch(sender, until)
        self.keeper.begin(watch)
        try:
            return call(sender, timeout)
        except Exception as error:
            if watch.expired:
                raise OperationTimeoutError(message="not answered in time") from error
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
            shut_socket(sender)


class Job:
    """An attempt, or what is left of it, in a worker: try after try until the deadline, or until it is left behind."""

    def __init__(
        self, attempts: Attempts, sender: Any, call: Call[Any], until: float, retries: Retries, tried: int = 0
    ) -> None:
        self._attempts = attempts
        self._sender = sender
        self._call = call
        self._until = until
        self._retries = retries
        self._tried = tried
        self._done = threading.Event()
        self._left = threading.Event()
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
            self.leave()
            raise OperationTimeoutError(message=f"not answered within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._result

    def leave(self) -> None:
        """Nobody waits for it any longer."""
        self._left.set()
        shut_socket(self._sender)

    def run(self) -> None:
        try:
            self._result = self._attempts.watched(self._sender, self._until, self._try)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
        if self._left.is_set():
            self._attempts.closed(self._sender)

    def _try(self) -> Any:
        while True:
            if self._tried and self._left.wait(self._retries.pause(self._tried)):
                raise OperationTimeoutError(message="left behind")
            try:
                return self._call(self._sender, max(self._until - time.monotonic(), 0.001))
            except Exception as error:
                self._tried += 1
                if self._left.is_set() or not _again(error, self._retries, self._tried, self._until):
                    raise


def _again(error: Exception, retries: Retries, tried: int, until: float) -> bool:
    """Whether the SDK would try again, and its pause would leave time for it."""
    if tried > retries.total or not may_try_again(error):
        return False
    return time.monotonic() + retries.pause(tried) < until
