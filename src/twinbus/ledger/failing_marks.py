"""Marks of writers that cannot write their entries now.

A writer that cannot write keeps its entries in memory. If its process is killed then, the entries are missing, and no
line of the ledger could say so. So a writer makes an empty file beside its segments when a write fails; a full disk has
room for this. It removes the file when all entries are written. Readers take such a file for a `gap` entry. If the
writer is dead, the next writer that opens a segment writes this entry, and removes the file.

The writer locks its mark. A writer that cannot write seals its segment and may have no other, so the lock of the mark
is all that shows whether the writer lives. Only a process that cannot open any more files makes its mark without a
lock. Such a writer counts as dead, and its operations in flight as unknown; the gap entry says "not proven" anyway.

If no mark can be made either (no free inode, no directory), nothing shows that entries are missing. docs/ledger.md
names the entries that the ledger then lacks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from twinbus.ledger.entries import Gap
from twinbus.ledger.permissions import file_mode

_SUFFIX: Final = ".failing"
_REASON: Final = "at least one, and how many is not known: its writer could not write to the disk"


class FailingMark:
    """The mark of one writer, from `make` to `remove`."""

    def __init__(self, directory: Path, writer: str) -> None:
        self._path = directory / (writer + _SUFFIX)
        self._file: int | None = None
        self._is_made = False

    def make(self) -> None:
        """Makes and locks the mark. If this fails too, there is none: the log has the reason of the first failure."""
        if self._file is None:
            with contextlib.suppress(OSError):
                try:
                    self._file = self._make_locked()
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE) or self._is_made:
                        raise
                    os.mknod(self._path, stat.S_IFREG | file_mode(self._path.parent))
                self._is_made = True

    def _make_locked(self) -> int:
        hidden = self._path.with_name(f".{self._path.name}")
        file = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, file_mode(self._path.parent))
        try:
            # The rename comes after the lock, so that other processes never see a mark without it.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hidden.rename(self._path)
        except OSError:
            os.close(file)
            raise
        return file

    def remove(self) -> None:
        """Removes the mark, if there is one."""
        if self._is_made:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._is_made = False
            self.abandon()

    def abandon(self) -> None:
        """Closes the file, and leaves the mark. For the child process of a fork, and for a writer that ends."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def is_abandoned(directory: Path, writer: str) -> bool:
    """Returns whether a writer of this host has a mark that no process locks: then the writer is dead."""
    try:
        file = os.open(directory / (writer + _SUFFIX), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Closing is not enough if another thread has forked: its child has the file open, too.
        fcntl.flock(file, fcntl.LOCK_UN)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def unmark_failing(directory: Path, writer: str) -> None:
    """Removes the mark of a dead writer, if there is one."""
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
