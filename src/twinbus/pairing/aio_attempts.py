"""Attempts of an asyncio pair: each within its deadline (S12), and what is given up is closed in the background."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Final

from twinbus.pairing.aio_deadline import Deadlines
from twinbus.pairing.sdk import abort, keep_alive_of

# A link that answers is closed with a word within this; one that does not, without.
_CLOSING_SECONDS: Final = 1.0


class Attempts(Deadlines):
    """The deadlines of a pair, and its tasks: they end with it (C3)."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self._tasks: set[asyncio.Task[Any]] = set()

    def span(self, timeout: float | None) -> float:
        """How long an attempt may take whose caller gave a time-out."""
        return self.seconds if timeout is None else min(self.seconds, timeout)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def discard(self, sender: Any, *, politely: bool = False) -> None:
        """Close a sender of the SDK in the background, without waiting for a peer that may be gone."""
        if not politely:
            abort(sender)
        self.start(_closed(sender))

    async def end(self) -> None:
        """Wait for what is closing; give up the rest."""
        self.close()
        waiting = [task for task in self._tasks if task is not asyncio.current_task()]
        if waiting:
            await asyncio.wait(waiting, timeout=_CLOSING_SECONDS + 0.5)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _closed(sender: Any) -> None:
    keep_alive = keep_alive_of(sender)
    if keep_alive is not None:
        keep_alive.cancel()
    with contextlib.suppress(Exception):
        await asyncio.wait_for(sender.close(), _CLOSING_SECONDS)
    # Whatever closing left open.
    with contextlib.suppress(Exception):
        abort(sender)
