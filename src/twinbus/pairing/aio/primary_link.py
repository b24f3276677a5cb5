"""One link of an asyncio sender to the primary, on which the calls of many tasks overlap (S13).

A link on which a call fails is *retired*: new calls get another link, and calls in progress on the retired link go on.
A background task closes the retired link after its last call has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.pairing.aio.timeouts import LAST_CALL_SECONDS, TaskTimeouts, cancel, wait_for_event
from twinbus.sdk import abort_connection, allow_concurrent_sends, keep_alive_of, open_aio_link


class PrimaryLink:
    """A link to the primary. `calls` is the number of calls in progress on it, or waiting for it to open.

    A call adds 1 to `calls` when it starts, and calls `leave` when it ends.
    """

    def __init__(self, sender: Any, timeouts: TaskTimeouts, episode: int) -> None:
        self.sender = sender
        self.episode = episode
        self.calls = 0
        self.is_open = False
        self.retired = False
        self._timeouts = timeouts
        self._opening: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._failure: Exception | None = None
        self._given_up = False
        self._empty = asyncio.Event()

    async def wait_until_open(self) -> None:
        """Open the link, once for all calls. The opening continues even if the calls that wait for it are cancelled."""
        if self._opening is None:
            # Opening counts as a call, so that the link is not closed during it: the SDK would leave such a link open.
            self.calls += 1
            self._opening = self._timeouts.start(self._open())
        await self._opened.wait()
        if self._failure is not None:
            raise _copy_error(self._failure) from self._failure

    def leave(self) -> None:
        self.calls -= 1
        if self.retired and not self.calls:
            self._empty.set()

    def give_up(self) -> None:
        """Retire the link because a call on it timed out or was cancelled. Does nothing before the link is open."""
        if self.is_open:
            self._given_up = True
            self.retire()

    def retire(self) -> None:
        """Accept no new call. A background task closes the link after the last call has ended."""
        if not self.retired:
            self.retired = True
            if not self.calls:
                self._empty.set()
            if self._timeouts.has_loop:
                self._timeouts.start(self._close_when_empty())
            else:
                abort_connection(self.sender)

    def end(self) -> None:
        """Retire the link because its sender closes. Calls in progress have a second to end."""
        self.retire()
        if self.calls and self._timeouts.has_loop:
            self._timeouts.start(self._abort_after_last_calls())

    def drop(self) -> None:
        """End the connection and its keep-alive task, because the sender was dropped without closing."""
        self.retired = True
        if self._opening is not None:
            cancel(self._opening)
        if (keep_alive := keep_alive_of(self.sender)) is not None:
            cancel(keep_alive)
            abort_connection(self.sender)

    async def _open(self) -> None:
        seconds = self._timeouts.try_timeout
        try:
            await self._timeouts.bound(open_aio_link(self.sender, seconds), seconds, self.sender)
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

    async def _close_when_empty(self) -> None:
        try:
            await self._empty.wait()
        except asyncio.CancelledError:
            self._given_up = True
            raise
        finally:
            if self._given_up:
                # Without closing frames, because no byte of a call that was given up may still be sent.
                abort_connection(self.sender)
        await self._timeouts.close_or_drop(self.sender)

    async def _abort_after_last_calls(self) -> None:
        await wait_for_event(self._empty, LAST_CALL_SECONDS)
        if self.calls:
            if self._opening is not None:
                self._opening.cancel()
            with contextlib.suppress(Exception):
                abort_connection(self.sender)


def _copy_error(error: Exception) -> Exception:
    """Return a copy of an error for one waiting call, because raising an error object changes this object.

    The SDK's errors have attributes beside `args`, which are copied too.
    """
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    return made
