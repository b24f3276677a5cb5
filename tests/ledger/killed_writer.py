"""A program that writes a ledger and dies with kill -9 at one call of the operating system, for every call in turn.

`python -m tests.ledger.killed_writer LEDGER TOLD DURABILITY MODE FIRST STEP` forks one writer after the other. Writer n
kills itself at its n-th call that changes a file: before the call, after it, or, for a write, in the middle of it. Each
writer appends the ids of its finished operations to a file in TOLD, and forks a child of its own that writes too. With
durability "lazy", it calls `Ledger.write` first, as a syphon does before a completion. The program prints the number of
the first writer that lived to its end.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from twinbus.ledger import Ledger, LedgerOptions, Stage

BEFORE, AFTER, TORN = "before", "after", "torn"
MODES: Final = (BEFORE, AFTER, TORN)
_CALLS: Final = ("open", "write", "fsync", "fdatasync", "rename", "ftruncate", "unlink", "close")
_OPERATIONS: Final = 12
_FORK_AT: Final = 5
# Long ids fill a segment after a few operations.
_PADDING: Final = "x" * 500
_write = os.write


class Countdown:
    """Kills the process at its n-th call of the operating system."""

    def __init__(self, number: int, mode: str) -> None:
        self._left = number
        self._mode = mode
        for name in ("write",) if mode == TORN else _CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left:
                return call(*arguments, **named)
            if self._mode == TORN:
                file, data = arguments
                call(file, bytes(data)[: len(data) // 2])
            elif self._mode == AFTER:
                call(*arguments, **named)
            return os.kill(os.getpid(), signal.SIGKILL)

        return counted


def write_some(ledger: Ledger, name: str, told: Path) -> None:
    file = os.open(told / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in range(_OPERATIONS):
        id_ = f"{name}-{number}-{_PADDING}"
        ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", [id_], 10).end()
        if ledger.options.durability == "lazy":
            ledger.write()
        _write(file, f"{id_}\n".encode())
        if number == _FORK_AT and "-" not in name:
            child = os.fork()
            if not child:
                write_some(ledger, f"{name}-child", told)
                os._exit(0)
            os.waitpid(child, 0)
        if number % 5 == 0:
            ledger.flush()


def live(directory: Path, told: Path, durability: str, mode: str, number: int) -> None:
    Countdown(number, mode)
    options = LedgerOptions(segment_bytes=4096, durability="lazy" if durability == "lazy" else "process")
    with Ledger(directory, options=options) as ledger:
        write_some(ledger, f"{mode}{number}", told)
    os._exit(0)


def main(directory: Path, told: Path, durability: str, mode: str, first: int, step: int) -> None:
    logging.disable(logging.CRITICAL)
    # Every writer and its child have `alive` open until they end.
    all_ended, alive = os.pipe()
    number = first
    while True:
        process = os.fork()
        if not process:
            live(directory, told, durability, mode, number)
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        if not code:
            # A writer that was killed while it waited for its child has left the child behind.
            os.close(alive)
            os.read(all_ended, 1)
            print(number)
            return
        assert code == -signal.SIGKILL, f"writer {number} ended with {code}"
        number += step


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
