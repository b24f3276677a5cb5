"""Attempts of an asyncio pair: each within its deadline (S12), and what is given up is closed in the background."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.pairing.aio.deadlines import Deadlines
from twinbus.pairing.calls import NoTurnError
from twinbus.pairing.pair_sides import PairLoopError
from twinbus.pairing.retrying import pause_before_next
from twinbus.sdk.handlers import (
    RetrySettings,
    abort_connection,
    disable_retries,
    keep_alive_of,
    speed_up_opening,
)
from twinbus.sdk.sender_credentials import AioSenderCredential, uses_token_issuer

T = TypeVar("T")
# A link that answers is closed with a word within this; one that does not, without.
_CLOSING_SECONDS: Final = 1.0
# How long a sender or pair that is being closed lets calls end that are under way.
PATIENCE_SECONDS: Final = 1.0


class Attempts(Deadlines):
    """The deadlines of a pair, and its tasks: they end with it (C3)."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self._tasks: set[asyncio.Task[Any]] = set()
        self._process = os.getpid()
        self._claiming = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop of the pair's tasks, timers and connections: the one that ran at the first use."""

    def claim(self) -> None:
        """Binds the pair to the running loop if no loop has it yet. Raises PairLoopError if another loop has it."""
        loop = asyncio.get_running_loop()
        with self._claiming:
            if self.loop is None:
                self.loop = loop
        # A child process has the parent's loop here; there the pair's sides refuse (S13).
        if self.loop is not loop and self.ours:
            raise PairLoopError

    def claim_to_close(self) -> None:
        """Like `claim`, except that any loop may close what a closed loop has left."""
        if self.loop is None or not self.loop.is_closed():
            self.claim()

    def in_loop(self, change: Callable[[], None]) -> None:
        """Runs `change` in the pair's loop: soon, if another thread or loop runs this. At once, if there is no loop."""
        loop = self.loop
        if loop is None or loop.is_closed() or not self.ours or loop is running_loop():
            change()
            return
        try:
            loop.call_soon_threadsafe(change)
        except RuntimeError:
            if not loop.is_closed():
                raise
            # Closed meanwhile.
            change()

    @property
    def has_loop(self) -> bool:
        """False before the first use and after the loop was closed: nothing can be started, and nothing runs."""
        return self.loop is not None and not self.loop.is_closed()

    @property
    def ours(self) -> bool:
        """False in the child of a fork: connections and the loop are the parent's, and none of it may be touched."""
        return os.getpid() == self._process

    def adopt(self) -> None:
        """Makes this process the owner. A pair made before a fork may be paired in the child."""
        if not self.ours:
            self._process = os.getpid()
            self._claiming = threading.Lock()
            self.loop = None
        self.claim()

    def ready(self, sender: Any) -> Any:
        """The same sender or receiver of the SDK, as attempts need it: one try, quick to open, its token waited for."""
        if uses_token_issuer(sender._credential):
            sender._credential = AioSenderCredential(sender._credential)
        return disable_retries(speed_up_opening(sender))

    async def turn(self, lock: asyncio.Lock, link: str, seconds: float) -> None:
        """Wait for it, the lock being the caller's afterwards. NoTurnError where the call's time ends before."""
        try:
            await self.bound(lock.acquire(), seconds)
        except OperationTimeoutError:
            raise NoTurnError(link, seconds) from None

    async def again(
        self,
        failed: Exception,
        once: Callable[[float], Coroutine[Any, Any, T]],
        end: float,
        retries: RetrySettings,
        paused: Callable[[float], Awaitable[None]],
    ) -> T:
        """After a first try that failed: try after try until `end`, which each of them keeps. `paused`: between two."""
        tried = 0
        while True:
            tried += 1
            pause = pause_before_next(failed, retries, tried, end - time.monotonic())
            if pause is None:
                raise failed
            await paused(pause)
            try:
                return await once(end)
            except Exception as error:
                failed = error

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def discard(self, sender: Any) -> None:
        """Give up a sender of the SDK at once; what is left of it is closed in the background."""
        abort_connection(sender)
        if self.has_loop:
            self.start(closed(sender))

    def retire(self, sender: Any, turn: asyncio.Lock | None = None) -> None:
        """Close a sender of the SDK in the background and with a word, after the call that has the turn on it.

        Never under it: what the SDK opens while it is being closed stays open.
        """
        if self.has_loop:
            self.start(closed(sender) if turn is None else _retired(sender, turn))
        else:
            abort_connection(sender)

    async def end(self) -> None:
        """Calls under way may end by themselves for a while; then they are given up, and all is closed."""
        if not self.has_loop:
            return
        for patience in (PATIENCE_SECONDS, _CLOSING_SECONDS + 0.5):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    # What ends may start the closing of something else.
                    while self._tasks:
                        await asyncio.wait(list(self._tasks))
            self.expire()
        rest = list(self._tasks)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def cancel(task: asyncio.Task[Any]) -> None:
    """Cancels a task. One whose loop was closed never runs again, and cannot be cancelled."""
    if not task.get_loop().is_closed():
        task.cancel()


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Until it is set, or for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _retired(sender: Any, turn: asyncio.Lock) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_SECONDS), turn:
            pass
    if turn.locked():
        # That call is not quick, and now nobody answers it.
        abort_connection(sender)
    async with turn:
        await closed(sender)


async def closed(sender: Any) -> None:
    """With a word to the other end if it listens, and all its own gone."""
    keep_alive = keep_alive_of(sender)
    if keep_alive is not None:
        keep_alive.cancel()
    try:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(sender.close(), _CLOSING_SECONDS)
    finally:
        # Whatever closing left open, also where it was itself cut short.
        with contextlib.suppress(Exception):
            abort_connection(sender)
