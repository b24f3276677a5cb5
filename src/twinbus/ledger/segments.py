"""A writer's segments: lines are appended and brought to the disk in groups; a segment ends by size, age or closing.

One thread. What is being written is `<writer>-<number>.jsonl.open`, locked; sealed, it is `<writer>-<number>.jsonl`.
What a line says does not come in here; what becomes of other writers' segments is in `housekeeping`.

A process does not notice when a file that it has open is removed or replaced: it writes and syncs without an error, and
nobody will ever read that. So each group ends with a look at what is at the segment's path (L7).
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
    """A segment as its name tells it. `group`, role and host, is whose disk budget it counts against."""

    path: Path
    writer: str
    group: str
    host: str
    number: int

    @property
    def open(self) -> bool:
        return self.path.name.endswith(OPEN_SUFFIX)

    @property
    def sealed_path(self) -> Path:
        return self.path.with_name(self.path.name.removesuffix(OPEN_SUFFIX) + SEALED_SUFFIX) if self.open else self.path


def list_segments(directory: Path) -> Iterator[Segment]:
    """Those in a directory, by name; other files are not looked at."""
    for path in sorted(directory.iterdir()):
        if found := _NAME.fullmatch(path.name):
            yield Segment(path, found["writer"], found["group"], found["host"], int(found["number"]))


class SegmentGoneError(OSError):
    """The open segment was removed or replaced, alone or with its folder. `lines`: how many it had, without its first.

    They count as lost, though a folder that was renamed still has them.
    """

    def __init__(self, path: Path, lines: int) -> None:
        super().__init__(errno.ESTALE, "it was removed or replaced while it was being written", str(path))
        self.lines = lines


class SegmentWriter:
    """`first_lines` makes what segment number n begins with, just before it is made.

    `append` returns once its lines are on the disk, or raises OSError; then they are to be given again. The folder is
    made with the first segment. One that is gone later is not made again: where it was a mounted volume, the segments
    would go to the disk below it.
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
        self._size = 0
        self._lines = 0
        self._opened = 0.0

    @property
    def begun(self) -> int:
        """How many segments were begun so far."""
        return self._number

    def append(self, lines: bytes) -> None:
        """Raises SegmentGoneError if what was appended before is lost."""
        if self._size >= self._most_bytes or self.seconds_left() <= 0:
            self.seal()
        self._write(self._file if self._file is not None else self._open(), lines)
        if not self._is_at(self._path):
            # Raises, unless another writer took this one for dead and sealed the segment. Then who reads sealed
            # segments once may have read it already: these lines are written again. Twice does no harm.
            self.seal()
            self._write(self._open(), lines)
        self._size += len(lines)
        self._lines += lines.count(b"\n")

    def check(self) -> None:
        """Raises SegmentGoneError if what was appended is lost."""
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
        """Until the open segment is to be sealed for its age; infinite where none is open."""
        if self._file is None:
            return float("inf")
        return self._most_seconds - (time.monotonic() - self._opened)

    def seal(self) -> None:
        """The open segment, if there is one, is whole: other programs may take it. SegmentGoneError if it is lost."""
        file, self._file = self._file, None
        lines, self._size, self._lines = self._lines, 0, 0
        if file is None:
            return
        sealed = self._path.with_name(self._path.name.removesuffix(OPEN_SUFFIX) + SEALED_SUFFIX)
        try:
            if self._is_at(self._path):
                self._path.rename(sealed)
            elif not self._is_at(sealed):  # where another writer has sealed it
                raise SegmentGoneError(self._path, lines)
            sync_folder(self._directory)
        finally:
            os.close(file)

    def abandon(self) -> None:
        """In the child of a fork: the segment is the parent's."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _is_at(self, path: Path) -> bool:
        """Whether the file at this path is the one that was opened last."""
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
            # Locked, and with its header, before anybody sees it.
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
        self._size, self._lines, self._opened = len(first), 0, time.monotonic()
        self._number += 1
        return file

    def _take_back(self, file: int) -> None:
        """The group goes as a whole, or leaves a torn line, and the segment ends.

        After a sync that failed nobody knows how much of it the disk has, and a second sync would not tell.
        """
        with contextlib.suppress(OSError):
            os.ftruncate(file, self._size)
        try:
            self.seal()
        except SegmentGoneError:
            raise  # what it held must be booked as missing
        except OSError:
            pass  # the error that led here is raised


def write_all(file: int, data: bytes) -> None:
    """All of it, or OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def sync_folder(directory: Path) -> None:
    """A name in it, or a new one, survives a power loss only after this."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class LedgerUnreadableError(OperatorError):
    """A line of a segment is no entry; nothing is passed over in silence."""

    def __init__(self, file: Path, line: int, cause: str) -> None:
        super().__init__(f"{file}, line {line}: {cause}", "Read it with a newer Twinbus, or mend the file by hand.")
        self.file = file
        self.line = line
        self.cause = cause


@dataclass(frozen=True, slots=True)
class LineProblem:
    """A line, counted from 1, that is no entry."""

    file: Path
    line: int
    cause: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.cause}"


def read_ledger(
    directory: str | os.PathLike[str], problem: Callable[[LineProblem], None] | None = None
) -> Iterator[Entry]:
    """Segment by segment, each in the order it was written. Without `problem`: LedgerUnreadableError at the first."""
    for segment in list_segments(Path(directory)):
        yield from _read(segment, problem or _raise)


def _read(segment: Segment, problem: Callable[[LineProblem], None]) -> Iterator[Entry]:
    try:
        path = segment.path
        file = path.open("rb")
    except FileNotFoundError:
        # Sealed since it was listed, or removed for the budget.
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
