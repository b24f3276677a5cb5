"""Deadlines for coroutines that cannot be trusted to come back (S12): past it a call is cancelled until it ends.

One timer for all calls of a pair, armed only when none is: a call that ends in time costs it nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.sdk.handlers import CANCELLED_AT_DEADLINE
from twinbus.sdk.sender_credentials import TokenTimeoutError, waits_for_token

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


class Deadlines:
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


class AioTimer:
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
