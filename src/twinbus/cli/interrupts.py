"""Ctrl-C: a verb ends with one line and 130, within seconds. No traceback is printed, and no JVM is left.

The first Ctrl-C raises KeyboardInterrupt, so that the verb closes what it opened. Closing may wait: for a thread that
waits for a namespace, or for the JVM. So the process ends by itself a few seconds later, and at once after a second
Ctrl-C. This end is as safe as a crash: ledgers and messages survive it (L1, Y3).

Python runs the handler of a signal in the main thread, when this thread runs Python code again. A request to an object
store is no Python code, and may take minutes. So the thread of a `_SignalWatch` also gets each signal, and ends the
process.

Verbs with `--follow` call `stop_on_signals`. Other verbs that run until they are stopped (`serve`, `syphon`) have their
own handlers.
"""

from __future__ import annotations

import os
import select
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
_CLOSING: Final = b"\0"
"""What the main thread sends to the thread of a `_SignalWatch` when it has handled SIGINT: no number of a signal."""
# Reentrant: a second signal may arrive while the main thread ends the process.
_ending = threading.RLock()
_watch: _SignalWatch | None = None


@contextmanager
def interrupts_bounded() -> Iterator[None]:
    """Bound the time from Ctrl-C to the end of the process, inside the `with` block."""
    global _watch  # noqa: PLW0603  # signals are for the whole process
    if threading.current_thread() is not threading.main_thread() or _watch is not None:
        yield
        return
    _watch = watch = _SignalWatch()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        watch.ending = frozenset({signal.SIGINT})
        signal.signal(signal.SIGINT, watch.interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) == watch.interrupt:
            signal.signal(signal.SIGINT, before)
        _watch = None
        watch.close()


def stop_on_signals() -> threading.Event:
    """Return an event that Ctrl-C or SIGTERM sets from now on, instead of ending the verb.

    A second signal ends the process at once. Call this in the main thread, inside `interrupts_bounded`.
    """
    assert _watch is not None, "a verb runs inside `errors_reported`"
    stopping = threading.Event()
    _watch.stopping, _watch.ending = stopping, frozenset({signal.SIGINT, signal.SIGTERM})
    for number in _watch.ending:
        signal.signal(number, _watch.stop)
    return stopping


class _SignalWatch:
    """A thread that gets the number of each signal, also while the main thread runs no Python code.

    An event loop of uvloop takes these numbers away from the thread while it runs. So the handlers of the main thread
    do the same as the thread.
    """

    def __init__(self) -> None:
        self.ending: frozenset[signal.Signals] = frozenset()
        """The signals that end the process."""
        self.stopping: threading.Event | None = None
        """Is set by the first signal. Without it, the process ends a few seconds after the first signal."""
        self._handled = 0
        """How many signals the main thread has handled."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="twinbus-signals", daemon=True)
        self._thread.start()

    def interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Handle SIGINT in the main thread."""
        self._handle()
        os.write(self._writer, _CLOSING)
        raise KeyboardInterrupt

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a signal in the main thread after `stop_on_signals`.

        It may arrive during a call of the JVM, so this must not make another call.
        """
        self._handle()
        assert self.stopping is not None
        self.stopping.set()

    def _handle(self) -> None:
        self._handled += 1
        if self._handled > 1:
            end_interrupted()

    def close(self) -> None:
        if (current := signal.set_wakeup_fd(self._before)) != self._writer:
            signal.set_wakeup_fd(current)  # of an event loop
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _run(self) -> None:
        count, seconds = 0, None  # signals so far, and how long the verb may still close
        while True:
            if not select.select([self._reader], [], [], seconds)[0]:
                end_interrupted()
            numbers = os.read(self._reader, 64)
            if not numbers:
                return  # closed
            count += sum(number in self.ending for number in numbers)
            if count > 1:
                end_interrupted()
            if count and self.stopping is not None:
                self.stopping.set()
            elif count or _CLOSING in numbers:
                seconds = _CLOSING_SECONDS


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
    _ending.acquire()  # never released: of two threads, one ends the process
    for child in _children() if "pyspark" in sys.modules else ():
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: a signal has interrupted another flush
        sys.stdout.flush()
    # On a terminal, the characters ^C stand at the start of the line.
    with suppress(OSError):
        os.write(2, b"\ninterrupted\n" if os.isatty(2) else b"interrupted\n")
    os._exit(SIGNALLED + signal.SIGINT)


def _children() -> list[int]:
    """Return the processes that this process has started. The JVM of Spark is one of them."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(number) for task in tasks for number in task.read_text().split()]
