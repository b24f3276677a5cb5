"""Deadlines for coroutines that cannot be trusted to come back (S12): past it a call is cancelled until it ends.

One timer for all calls of a pair, armed only when none is: a call that ends in time costs it nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from azure.servicebus.exceptions import OperationTimeoutError

T = TypeVar("T")
# What the SDK cleans up after a cancellation is itself cut short by the next one.
_AGAIN_SECONDS: Final = 0.1


class _Call:
    __slots__ = ("at", "cancelled", "task")

    def __init__(self, task: asyncio.Task[Any], at: float) -> None:
        self.task = task
        self.at = at
        self.cancelled = 0


class Deadlines:
    """Those of one pair."""

    def __init__(self) -> None:
        self._calls: set[_Call] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    async def bound(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """OperationTimeoutError past the deadline. A cancellation by anyone else goes through."""
        task = asyncio.current_task()
        assert task is not None
        call = _Call(task, time.monotonic() + seconds)
        self._calls.add(call)
        if self._timer is None or call.at < self._due:
            self._arm(call.at)
        before = task.cancelling()
        try:
            return await coroutine
        except asyncio.CancelledError:
            if not call.cancelled or task.cancelling() - call.cancelled > before:
                raise
            raise OperationTimeoutError(message=f"not answered within {seconds:g} s") from None
        except Exception as error:
            if not call.cancelled:
                raise
            raise OperationTimeoutError(message=f"not answered within {seconds:g} s") from error
        finally:
            self._calls.discard(call)
            # Ours are taken back however it ended: what it answered in the last moment stands.
            for _ in range(call.cancelled):
                task.uncancel()

    def expire(self) -> None:
        """All calls under way are past their deadlines."""
        for call in self._calls:
            call.at = 0.0
        self._fired()

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = at
        self._timer = asyncio.get_running_loop().call_later(max(at - time.monotonic(), 0), self._fired)

    def _fired(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        for call in list(self._calls):
            if call.at <= now:
                call.at = now + _AGAIN_SECONDS
                call.cancelled += 1
                call.task.cancel()
        if self._calls:
            self._arm(min(call.at for call in self._calls))


class AioTimer:
    """Calls back in the loop (entity.Timer)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, due: Callable[[], object]) -> None:
        self._loop = loop
        self._callback = due
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, at: float) -> None:
        self.disarm()
        self._handle = self._loop.call_later(max(at - time.monotonic(), 0), self._fired)

    def disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fired(self) -> None:
        self._handle = None
        self._callback()
