"""Marks of writers that cannot write their entries now.

A writer that cannot write keeps its entries in memory. If its process is killed then, the entries are missing, and no
line of the ledger could say so. So a writer makes an empty file beside its segments when a write fails; a full disk has
room for this. It removes the file when all entries are written. Readers take such a file for a `gap` entry. If the
writer is dead, the next writer that opens a segment writes this entry, and removes the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from twinbus.ledger.entries import Gap

_SUFFIX: Final = ".failing"
_REASON: Final = "at least one, and how many is not known: its writer could not write to the disk"


def mark_failing(directory: Path, writer: str) -> None:
    """Makes the mark of a writer. If this fails too, nothing happens: the log has the reason of the first failure."""
    with contextlib.suppress(OSError):
        os.close(os.open(directory / (writer + _SUFFIX), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))


def unmark_failing(directory: Path, writer: str) -> None:
    """Removes the mark of a writer, if there is one."""
    with contextlib.suppress(OSError):
        (directory / (writer + _SUFFIX)).unlink()


def failing_writers(directory: Path) -> list[str]:
    """Returns the names of the writers that have a mark."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in directory.glob(f"*{_SUFFIX}"))


def failing_gaps(directory: Path) -> Iterator[Gap]:
    """Yields a gap entry for each mark."""
    for writer in failing_writers(directory):
        with contextlib.suppress(FileNotFoundError):  # its writer can write again
            yield failing_gap(directory, writer)


def failing_gap(directory: Path, writer: str) -> Gap:
    """Returns the gap entry for the mark of a writer. Its id is always the same."""
    at = int((directory / (writer + _SUFFIX)).stat().st_mtime * 1000)
    id_ = f"{writer.rpartition('-')[2]}-gap-failing"
    return Gap(at=at, id=id_, count=1, since=at, until=at, reason=_REASON)
