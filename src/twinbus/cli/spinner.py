"""A spinner on stderr for operations that take longer than two seconds. Output on stdout stays unchanged."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from twinbus.cli.terminal import console, still_protected

MOMENT: Final = 2.0


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """Show a spinner with the elapsed time if the `with` block runs longer than `MOMENT` seconds.

    If stderr is not a terminal, print one line instead.
    """
    with shown_meanwhile(partial(_show, what)):
        yield


@contextmanager
def shown_meanwhile(show: Callable[[threading.Event], object]) -> Iterator[None]:
    """Run `show` in a thread beside the `with` block. The end of the block sets its argument, and waits for its end."""
    over = threading.Event()
    shown = threading.Thread(target=show, args=(over,), name="twinbus-shown", daemon=True)
    shown.start()
    try:
        yield
    finally:
        over.set()
        shown.join()


def _show(what: str, over: threading.Event) -> None:
    began = time.monotonic()
    if over.wait(MOMENT):
        return
    if not sys.stderr.isatty():
        sys.stderr.write(f"{what} …\n")
        return
    from rich.text import Text  # noqa: PLC0415 - slow, and needed only here

    with console(stderr=True).status("") as status, still_protected():
        while not over.wait(0.2):
            # Rich would interpret markup in a plain string.
            status.update(Text(f"{what} … {time.monotonic() - began:.0f} s"))
