"""The segment files of a ledger: their names, appending to them, and reading them.

A segment that is being written has the name `<writer>-<number>.jsonl.open`, and is locked. A sealed segment has the
name `<writer>-<number>.jsonl`, and is never written again. A segment is sealed when it reaches a size or an age, or
when its writer closes. `segment_opening` makes the first lines of a segment, and seals or removes segments of other
writers.

If an open file is removed or replaced, its process gets no error: writes and syncs succeed, but no reader ever sees the
lines. So after each group the writer checks that the file at the segment's path is the file that the writer has open
(L7).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twinbus.errors import OperatorError
from twinbus.ledger.entries import Entry
from twinbus.ledger.json_lines import EntryError, decode_entry

SEALED_SUFFIX: Final = ".jsonl"
OPEN_SUFFIX: Final = ".jsonl.open"
_NAME: Final = re.compile(
    r"(?P<writer>(?P<group>[a-z]+-(?P<host>.+))-\d+-[0-9a-f]{16})-(?P<number>\d+)\.jsonl(\.open)?"
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment file, and the parts of its name."""

    path: Path
    writer: str
    group: str
    """Role and host. All segments of a group share one disk budget."""
    host: str
    number: int

    @property
    def is_open(self) -> bool:
        return self.path.name.endswith(OPEN_SUFFIX)

    @property
    def sealed_path(self) -> Path:
        return _sealed(self.path)


def _sealed(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(OPEN_SUFFIX).removesuffix(SEALED_SUFFIX) + SEALED_SUFFIX)


def list_segments(directory: Path) -> Iterator[Segment]:
    """Yields the segments in a directory, ordered by name. Ignores other files."""
    for path in sorted(directory.iterdir()):
        if found := _NAME.fullmatch(path.name):
            yield Segment(path, found["writer"], found["group"], found["host"], int(found["number"]))


# --- writing ---------------------------------------------------------------------------------------------------------


class SegmentGoneError(OSError):
    """The open segment was removed or replaced, alone or with its folder.

    `lines` is the number of lines that were appended to the segment. These lines count as lost, even if the folder was
    only renamed and still has the segment.
    """

    def __init__(self, path: Path, lines: int) -> None:
        super().__init__(errno.ESTALE, "it was removed or replaced while it was being written", str(path))
        self.lines = lines


class SegmentWriter:
    """Appends lines to the segments of one writer, and starts the next segment when one is full. For one thread only.

    `first_lines(n)` returns the first lines of segment number n, and is called just before the segment is made.

    The first segment makes the folder if it does not exist. If the folder is removed after that, it is not made again:
    if the folder was a mounted volume, the segments would be written to the disk below the mount point.
    """

    def __init__(
        self, directory: Path, writer: str, first_lines: Callable[[int], str], *, most_bytes: int, most_seconds: float
    ) -> None:
        self._directory = directory
        self._writer = writer
        self._first_lines = first_lines
        self._most_bytes = most_bytes
        self._most_seconds = most_seconds
        self._number = 0
        self._file: int | None = None
        self._path = directory
        self._identity = (0, 0)
        """Device and inode of the open segment."""
        self._size = 0
        self._lines = 0
        self._opened_at = 0.0

    @property
    def opened(self) -> int:
        """How many segments were opened so far."""
        return self._number

    def append(self, lines: bytes) -> None:
        """Appends lines, and returns when the lines are on the disk.

        Raises OSError if the lines are not on the disk; the caller then has to append the same lines again. Raises
        SegmentGoneError if lines of earlier calls are lost too.
        """
        if self._size >= self._most_bytes or self.seconds_left() <= 0:
            self.seal()
        self._write(self._file if self._file is not None else self._open(), lines)
        if not self._is_at(self._path):
            # `seal` raises SegmentGoneError, except if another writer has sealed the segment because it took this
            # writer for dead. A program that reads each sealed segment once may have read the segment before these
            # lines were appended, so the lines are also written to the next segment. Readers ignore the second copy of
            # a line.
            self.seal()
            self._write(self._open(), lines)
        self._size += len(lines)
        self._lines += lines.count(b"\n")

    def check(self) -> None:
        """Raises SegmentGoneError if appended lines are lost."""
        if self._file is not None and not self._is_at(self._path):
            self.seal()

    def _write(self, file: int, lines: bytes) -> None:
        try:
            write_all(file, lines)
            os.fdatasync(file)
        except OSError:
            self._take_back(file)
            raise

    def seconds_left(self) -> float:
        """Returns the time until the open segment reaches its age limit; infinite if none is open."""
        if self._file is None:
            return float("inf")
        return self._most_seconds - (time.monotonic() - self._opened_at)

    def seal(self) -> None:
        """Seals the open segment, if there is one. Raises SegmentGoneError if the segment was removed or replaced."""
        file, self._file = self._file, None
        lines, self._size, self._lines = self._lines, 0, 0
        if file is None:
            return
        sealed = _sealed(self._path)
        try:
            if self._is_at(self._path):
                self._path.rename(sealed)
            elif not self._is_at(sealed):  # if it is at `sealed`, another writer has sealed it
                raise SegmentGoneError(self._path, lines)
            sync_folder(self._directory)
        finally:
            os.close(file)

    def abandon(self) -> None:
        """Closes the file without sealing the segment.

        For the child process of a fork: the parent writes the segment.
        """
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _is_at(self, path: Path) -> bool:
        """Returns whether the file at this path is the segment that was opened last."""
        try:
            found = path.stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def _open(self) -> int:
        if not self._number:
            self._directory.mkdir(parents=True, exist_ok=True)
        first = self._first_lines(self._number).encode()
        path = self._directory / f"{self._writer}-{self._number}{OPEN_SUFFIX}"
        hidden = path.with_name(f".{path.name}")
        file = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            # The rename comes after the lock and the header, so that other processes never see a segment without both.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(file, first)
            os.fsync(file)
            hidden.rename(path)
            sync_folder(self._directory)
        except OSError:
            os.close(file)
            hidden.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise
        found = os.fstat(file)
        self._file, self._path, self._identity = file, path, (found.st_dev, found.st_ino)
        self._size, self._lines, self._opened_at = len(first), 0, time.monotonic()
        self._number += 1
        return file

    def _take_back(self, file: int) -> None:
        """Removes a partly written group from the segment, and seals the segment.

        After a failed sync it is not known how much of the group is on the disk, and a second sync would not show it.
        """
        with contextlib.suppress(OSError):
            os.ftruncate(file, self._size)
        try:
            self.seal()
        except SegmentGoneError:
            raise  # the lines of the segment must be counted as missing
        except OSError:
            pass  # the caller raises the error of the write


def write_all(file: int, data: bytes) -> None:
    """Writes all of `data`, or raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def sync_folder(directory: Path) -> None:
    """Syncs a folder. Without this sync, a new or changed file name in the folder may be lost at a power failure."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# --- reading ---------------------------------------------------------------------------------------------------------


class LedgerUnreadableError(OperatorError):
    """A line of a segment is not an entry."""

    def __init__(self, file: Path, line: int, cause: str) -> None:
        super().__init__(f"{file}, line {line}: {cause}", "Read it with a newer Twinbus, or mend the file by hand.")
        self.file = file
        self.line = line
        self.cause = cause


@dataclass(frozen=True, slots=True)
class LineProblem:
    """A line that is not an entry. Lines are counted from 1; `line` is 0 if the file itself cannot be read."""

    file: Path
    line: int
    cause: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.cause}"


def read_ledger(
    directory: str | os.PathLike[str], problem: Callable[[LineProblem], None] | None = None
) -> Iterator[Entry]:
    """Yields every entry of every segment, also of open segments, one segment after the other.

    Calls `problem` for each line that is not an entry; without `problem`, raises LedgerUnreadableError. Skips a last
    line without a newline: a crash may leave such an incomplete line.
    """
    for segment in list_segments(Path(directory)):
        yield from _read_segment(segment, problem or _raise)


def _read_segment(segment: Segment, problem: Callable[[LineProblem], None]) -> Iterator[Entry]:
    try:
        path = segment.path
        file = path.open("rb")
    except FileNotFoundError:
        # Since the listing the segment was sealed, or removed to keep the disk budget.
        path = segment.sealed_path
        try:
            file = path.open("rb")
        except FileNotFoundError:
            problem(LineProblem(path, 0, "removed while the ledger was read"))
            return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decode_entry(line)
            except EntryError as error:
                problem(LineProblem(path, number, str(error)))


def _raise(problem: LineProblem) -> None:
    raise LedgerUnreadableError(problem.file, problem.line, problem.cause)
