"""One link of a paired sender to the primary, on which the calls of many tasks overlap, and how it ends.

Whoever gives up on it retires it: those in flight go on to their own end, the next get another link (S13).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.pairing.aio.timeouts import PATIENCE_SECONDS, TaskTimeouts, cancel, closed, wait
from twinbus.sdk import abort_connection, allow_concurrent_sends, keep_alive_of, open_aio_link


class PrimaryLink:
    """`calls` are in flight on it, or wait for it to open: whoever comes adds one, and leaves."""

    def __init__(self, sender: Any, attempts: TaskTimeouts, episode: int) -> None:
        self.sender = sender
        self.episode = episode
        self.calls = 0
        self.is_open = False
        self.retired = False
        self._attempts = attempts
        self._opening: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._failure: Exception | None = None
        self._given_up = False
        self._empty = asyncio.Event()

    async def opened(self) -> None:
        """One task opens it for all, and goes on when those who wait have given up."""
        if self._opening is None:
            # Counted as a call: what the SDK opens while it is being closed stays open.
            self.calls += 1
            self._opening = self._attempts.start(self._open())
        await self._opened.wait()
        if self._failure is not None:
            raise _copy(self._failure) from self._failure

    def leave(self) -> None:
        self.calls -= 1
        if self.retired and not self.calls:
            self._empty.set()

    def give_up(self) -> None:
        """By a call that nobody answered in time, or whose caller left it. While it opens that is nobody's fault."""
        if self.is_open:
            self._given_up = True
            self.retire()

    def retire(self) -> None:
        """No other call comes; when the last has left it is closed, in the background."""
        if not self.retired:
            self.retired = True
            if not self.calls:
                self._empty.set()
            if self._attempts.has_loop:
                self._attempts.start(self._ended())
            else:
                abort_connection(self.sender)

    def end(self) -> None:
        """Its sender is being closed: calls on it may end first, if they are quick."""
        self.retire()
        if self.calls and self._attempts.has_loop:
            self._attempts.start(self._cut())

    def drop(self) -> None:
        """Its sender was dropped: neither the connection nor the task that keeps it alive stays behind."""
        self.retired = True
        if self._opening is not None:
            cancel(self._opening)
        if (keep_alive := keep_alive_of(self.sender)) is not None:
            cancel(keep_alive)
            abort_connection(self.sender)

    async def _open(self) -> None:
        seconds = self._attempts.seconds
        try:
            await self._attempts.bound(open_aio_link(self.sender, seconds), seconds, self.sender)
            allow_concurrent_sends(self.sender, self.retire)
            self.is_open = True
        except Exception as error:
            self._failure = error
        finally:
            if not self.is_open:
                self._failure = self._failure or OperationTimeoutError(message="closed while it was being opened")
                self.retire()
            self._opened.set()
            self.leave()

    async def _ended(self) -> None:
        try:
            await self._empty.wait()
        except asyncio.CancelledError:
            self._given_up = True
            raise
        finally:
            if self._given_up:
                # Without a word: nothing of what was given up leaves this process any more.
                abort_connection(self.sender)
        await closed(self.sender)

    async def _cut(self) -> None:
        await wait(self._empty, PATIENCE_SECONDS)
        if self.calls:
            if self._opening is not None:
                self._opening.cancel()
            with contextlib.suppress(Exception):
                abort_connection(self.sender)


def _copy(error: Exception) -> Exception:
    """One for each who waited: raising adds to it. The SDK's own cannot be made from `args` alone."""
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    return made
