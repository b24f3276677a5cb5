"""Ctrl-C: a verb ends with one line and 130, within seconds. No traceback is printed, and no JVM is left.

The first Ctrl-C raises KeyboardInterrupt, so that the verb closes what it opened. Closing may wait: for a thread that
waits for a namespace, or for the JVM. So the process ends by itself a few seconds later, and at once after a second
Ctrl-C. This end is as safe as a crash: ledgers and messages survive it (L1, Y3).

Verbs that run until they are stopped (`serve`, `syphon`, `--follow`) have their own handlers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

SIGNALLED: Final = 128
"""The exit code after a signal is this number plus the number of the signal, as in shells."""
_CLOSING_SECONDS: Final = 3.0


@contextmanager
def interrupts_bounded() -> Iterator[None]:
    """Bound the time from Ctrl-C to the end of the process, inside the `with` block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, lambda *_: end_interrupted())
    closing = threading.Timer(_CLOSING_SECONDS, end_interrupted)
    closing.daemon = True
    closing.start()
    raise KeyboardInterrupt


def is_interrupted(error: BaseException) -> bool:
    """Return whether the error is a consequence of Ctrl-C, such as a connection that was closed meanwhile."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return True
        seen = seen.__context__
    return False


def end_interrupted() -> NoReturn:
    """Print one line, and end the process and the JVM of its Spark session.

    The process does not end in the usual way: threads and the connection to the JVM would print their own errors.
    """
    for child in _children() if "pyspark" in sys.modules else ():
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    # On a terminal, the characters ^C stand at the start of the line.
    with suppress(OSError):
        os.write(2, b"\ninterrupted\n" if os.isatty(2) else b"interrupted\n")
    os._exit(SIGNALLED + signal.SIGINT)


def _children() -> list[int]:
    """Return the processes that this process has started. The JVM of Spark is one of them."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(number) for task in tasks for number in task.read_text().split()]
