"""A writer's segments: lines are appended and brought to the disk in groups; a segment ends by size, age or closing.

One thread. What is being written is `<writer>-<number>.jsonl.open`, locked; sealed, it is `<writer>-<number>.jsonl`.
What a line says does not come in here; what becomes of other writers' segments is in `housekeeping`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SEALED: Final = ".jsonl"
OPEN: Final = ".jsonl.open"
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
        return self.path.name.endswith(OPEN)

    @property
    def sealed_path(self) -> Path:
        return self.path.with_name(self.path.name.removesuffix(OPEN) + SEALED) if self.open else self.path


def segments(directory: Path) -> Iterator[Segment]:
    """Those in a directory, by name; other files are not looked at."""
    for path in sorted(directory.iterdir()):
        if found := _NAME.fullmatch(path.name):
            yield Segment(path, found["writer"], found["group"], found["host"], int(found["number"]))


class SegmentWriter:
    """`first_lines` makes what segment number n begins with, just before it is made.

    `append` returns once its lines are on the disk, or raises OSError; then they are to be given again.
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
        self._size = 0
        self._opened = 0.0

    @property
    def used(self) -> bool:
        """Whether there ever was a segment."""
        return self._number > 0

    def append(self, lines: bytes) -> None:
        if self._size >= self._most_bytes or self.seconds_left() <= 0:
            self.seal()
        file = self._file if self._file is not None else self._open()
        try:
            write_all(file, lines)
            os.fdatasync(file)
        except OSError:
            self._take_back(file)
            raise
        self._size += len(lines)

    def seconds_left(self) -> float:
        """Until the open segment is to be sealed for its age; infinite where none is open."""
        if self._file is None:
            return float("inf")
        return self._most_seconds - (time.monotonic() - self._opened)

    def seal(self) -> None:
        """The open segment, if there is one, is whole: other programs may take it."""
        file, self._file, self._size = self._file, None, 0
        if file is None:
            return
        try:
            # Another writer may have taken this one for dead and sealed it.
            with contextlib.suppress(FileNotFoundError):
                self._path.rename(self._path.with_name(self._path.name.removesuffix(OPEN) + SEALED))
            sync_folder(self._directory)
        finally:
            os.close(file)

    def abandon(self) -> None:
        """In the child of a fork: the segment is the parent's."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _open(self) -> int:
        self._directory.mkdir(parents=True, exist_ok=True)
        first = self._first_lines(self._number).encode()
        path = self._directory / f"{self._writer}-{self._number}{OPEN}"
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
        self._file, self._path, self._size, self._opened = file, path, len(first), time.monotonic()
        self._number += 1
        return file

    def _take_back(self, file: int) -> None:
        """The group goes as a whole, or leaves a torn line, and the segment ends.

        After a sync that failed nobody knows how much of it the disk has, and a second sync would not tell.
        """
        with contextlib.suppress(OSError):
            os.ftruncate(file, self._size)
        with contextlib.suppress(OSError):
            self.seal()


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
