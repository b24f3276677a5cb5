"""Run calls that may block for ever in daemon threads, for asyncio.

Such a call keeps neither the event loop nor the process from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Return the result of `call`, which may block for ever. Raises its error.

    The executor of the event loop would wait for such a call when the loop ends.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type] # without an error there is a result

    def run() -> None:
        result, failed = None, None
        try:
            result = call()
        except Exception as error:
            failed = error
        try:
            loop.call_soon_threadsafe(settle, result, failed)
        except RuntimeError:
            # The loop was closed: nobody waits for the result.
            return

    threading.Thread(target=run, name="twinbus-blocking", daemon=True).start()
    return await future
