"""The segment files of a ledger: their names, appending to them, and reading them.

A segment that is being written has the name `<writer>-<number>.jsonl.open`, and is locked. A sealed segment has the
name `<writer>-<number>.jsonl`, and is never written again. A segment is sealed when it reaches a size or an age, or
when its writer closes. `segment_opening` makes the first lines of a segment, and seals or removes segments of other
writers.

If an open file is removed or replaced, its process gets no error: writes and syncs succeed, but no reader ever sees the
lines. So with each sync the writer checks that the file at the segment's path is the file that the writer has open
(L7).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Protocol

from twinbus.errors import OperatorError
from twinbus.ledger.entries import Entry
from twinbus.ledger.failing_marks import failing_gaps
from twinbus.ledger.json_lines import EntryError, decode_entry
from twinbus.ledger.permissions import file_mode, make_ledger_folder
from twinbus.storage_location import StorageLocation

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
        if (segment := segment_at(path)) is not None:
            yield segment


def segment_size(segment: Segment) -> int:
    """Returns the size of a segment in bytes. If it was sealed since the listing, looks there; if it was removed, 0."""
    for path in (segment.path, segment.sealed_path):
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_size
    return 0


def segment_at(path: Path) -> Segment | None:
    """Returns the segment with the file name of this path; None if this is the name of another file."""
    if (found := _NAME.fullmatch(path.name)) is None:
        return None
    return Segment(path, found["writer"], found["group"], found["host"], int(found["number"]))


# --- writing ---------------------------------------------------------------------------------------------------------


class SegmentGoneError(OSError):
    """The open segment was removed or replaced, alone or with its folder.

    `lines` is the number of lines that were synced to the segment. These lines count as lost, even if the folder was
    only renamed and still has the segment.
    """

    def __init__(self, path: Path, lines: int) -> None:
        super().__init__(errno.ESTALE, "it was removed or replaced while it was being written", str(path))
        self.lines = lines


class SegmentOpener(Protocol):
    """What a SegmentWriter needs to know about a new segment."""

    def header(self, number: int) -> str:
        """Returns the first line of segment `number`. Does no I/O."""

    def make_room(self, number: int) -> str | None:
        """Prepares the directory for segment `number`, which exists already. Returns lines to append to the segment.

        Returns None if a part of this work is left: the next sync calls again.
        """

    def room_made(self) -> None:
        """Is called when the lines of `make_room` are written."""


@dataclass(slots=True, eq=False)
class _WrittenSegment:
    """A segment that this writer has open."""

    file: int
    path: Path
    number: int
    identity: tuple[int, int]
    """Device and inode."""
    opened_at: float
    """When it got its first entry; until then, when it was opened."""
    size: int
    has_entries: bool = False
    """Whether it has more than its header."""
    synced_lines: int = 0
    is_prepared: bool = False
    """Whether `make_room` has done all its work for this segment."""
    is_durable: bool = False
    """Whether the file name and the header were synced."""
    unsynced: list[bytes] = field(default_factory=list)
    """Lines since the last sync, in case the next sync fails."""
    unsynced_bytes: int = 0
    unsynced_lines: int = 0
    """The number of lines since the last sync, also of those that `unsynced` has no room for."""

    def take_unsynced(self) -> _UnsyncedLines:
        taken = _UnsyncedLines(b"".join(self.unsynced), self.unsynced_lines)
        self.unsynced, self.unsynced_bytes, self.unsynced_lines = [], 0, 0
        return taken


class _UnsyncedLines(NamedTuple):
    lines: bytes
    number: int

    @property
    def forgotten(self) -> int:
        """How many of the lines are not in memory any more."""
        return self.number - self.lines.count(b"\n")


class SegmentWriter:
    """Appends lines to the segments of one writer, and starts the next segment when one is full.

    `write` appends lines and never waits for a sync. Any thread may call `write` while it holds `lock`. `sync` brings
    the written lines to the disk, and seals the segments that are full; only one thread may call it, without `lock`.

    Nothing that was written is ever removed. After a failed sync it is not known which lines are on the disk, and a
    second sync would not show it. So the segment is sealed, and the lines since the last successful sync are written
    again, to the next segment (`take_repeated`). A failed write ends the segment too: it may have left an incomplete
    line, and readers skip such a line only at the end of a segment.

    The first segment makes the folder if it does not exist. If the folder is removed after that, it is not made again:
    if the folder was a mounted volume, the segments would be written to the disk below the mount point.
    """

    def __init__(
        self,
        directory: Path,
        writer: str,
        opener: SegmentOpener,
        *,
        most_bytes: int,
        most_seconds: float,
        most_unsynced: int,
    ) -> None:
        # Reentrant: a signal handler or the garbage collector may record an entry while this thread writes another.
        self.lock = threading.RLock()
        self._directory = directory
        self._writer = writer
        self._opener = opener
        self._most_bytes = most_bytes
        self._most_seconds = most_seconds
        self._most_unsynced = most_unsynced
        self._number = 0
        self._current: _WrittenSegment | None = None
        self._retired: list[_WrittenSegment] = []
        """Segments that are not written any more, but not sealed yet."""
        self._repeated: list[bytes] = []
        self._forgotten = 0

    @property
    def opened(self) -> int:
        """How many segments were opened so far."""
        return self._number

    @property
    def needs_sync(self) -> bool:
        """Whether `sync` has something to do."""
        current = self._current
        return bool(self._retired) or (current is not None and current.unsynced_lines > 0)

    @property
    def is_preparing(self) -> bool:
        """Whether work for the open segment is left that every `sync` does a part of."""
        current = self._current
        return current is not None and not current.is_prepared

    def seconds_left(self) -> float:
        """Returns the time until the open segment reaches its age limit; infinite if there is no entry in it."""
        current = self._current
        if current is None or not current.has_entries:
            return math.inf
        return self._most_seconds - (time.monotonic() - current.opened_at)

    def renew(self) -> None:
        """Sets the time of the open segment's file to now, without a write."""
        with self.lock:
            if self._current is not None:
                with contextlib.suppress(OSError):  # a write reports what is wrong with the disk
                    os.utime(self._current.file)

    # --- with the lock -----------------------------------------------------------------------------------------------

    def write(self, lines: bytes, count: int) -> None:
        """Appends lines. `count` is their number. The caller has the lock.

        Raises OSError if not all lines were appended; the caller then has to write all of them again.
        """
        segment = self._current
        if segment is None or segment.size >= self._most_bytes:
            self.retire()
            segment = self._open()
        try:
            if (written := os.write(segment.file, lines)) != len(lines):
                write_all(segment.file, lines[written:])
        except OSError:
            self.retire()
            raise
        if not segment.has_entries:
            segment.opened_at, segment.has_entries = time.monotonic(), True
        segment.size += len(lines)
        segment.unsynced_lines += count
        if segment.unsynced_bytes < self._most_unsynced:
            segment.unsynced.append(lines)
            segment.unsynced_bytes += len(lines)

    def retire(self) -> None:
        """Ends the open segment, if there is one: `write` opens the next, and `sync` seals this one."""
        if self._current is not None:
            self._retired.append(self._current)
            self._current = None

    def rotate(self) -> None:
        """Ends the open segment, and opens the next."""
        self.retire()
        self._open()

    def take_repeated(self) -> tuple[bytes, int]:
        """Returns the lines that must be written again, and how many more lines are perhaps lost."""
        repeated, forgotten = b"".join(self._repeated), self._forgotten
        self._repeated, self._forgotten = [], 0
        return repeated, forgotten

    def _open(self) -> _WrittenSegment:
        """Opens the next segment, without a sync: `sync` does that."""
        # Taken at once: a signal handler that records an entry meanwhile opens a segment, too.
        number, self._number = self._number, self._number + 1
        path = self._directory / f"{self._writer}-{number}{OPEN_SUFFIX}"
        hidden = path.with_name(f".{path.name}")
        file = -1
        try:
            if not number:
                make_ledger_folder(self._directory)
            header = self._opener.header(number).encode()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC
            file = os.open(hidden, flags, file_mode(self._directory))
            # The rename comes after the lock and the header, so that other processes never see a segment without both.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(file, header)
            hidden.rename(path)
            found = os.fstat(file)
        except BaseException:  # also KeyboardInterrupt
            if self._number == number + 1:
                self._number = number
            if file >= 0:
                os.close(file)
            for left in (hidden, path):
                with contextlib.suppress(OSError):
                    left.unlink()
            raise
        segment = _WrittenSegment(file, path, number, (found.st_dev, found.st_ino), time.monotonic(), len(header))
        if self._current is not None:  # a signal handler has opened a later segment
            self._retired.append(segment)
            return self._current
        self._current = segment
        return segment

    # --- without the lock, one thread --------------------------------------------------------------------------------

    def sync(self) -> None:
        """Waits until the lines that were written before the call are on the disk, except those in `take_repeated`.

        Seals the segments that are not written any more. Raises OSError if a sync failed. Raises SegmentGoneError if
        lines are lost that an earlier sync brought to the disk (L7).
        """
        with self.lock:
            # Both at once: a segment that becomes full while the older ones are sealed has lines from before the call.
            retired, current = list(self._retired), self._current
        problems = [error for segment in retired if (error := self._finish(segment)) is not None]
        if current is not None:
            for step in (self._prepare, self._sync_segment):
                try:
                    step(current)
                except OSError as error:
                    problems.append(error)
        if problems:
            raise next((error for error in problems if isinstance(error, SegmentGoneError)), problems[0])

    def seal(self) -> None:
        """Seals the open segment, if there is one. Raises what `sync` raises."""
        with self.lock:
            self.retire()
        self.sync()

    def _prepare(self, segment: _WrittenSegment) -> None:
        if segment.is_prepared:
            return
        text = self._opener.make_room(segment.number)
        if text is None:
            return
        segment.is_prepared = True
        if lines := text.encode():
            with self.lock:
                try:
                    self.write(lines, lines.count(b"\n"))
                except OSError:
                    self._repeated.append(lines)
                    raise
        self._opener.room_made()

    def _sync_segment(self, segment: _WrittenSegment) -> None:
        """Syncs one segment, and checks that it is at its path. If not, or if this fails, the segment is dropped."""
        with self.lock:
            pending = segment.take_unsynced()
        try:
            if not segment.is_durable:
                os.fsync(segment.file)
                sync_folder(self._directory)
            elif pending.number:
                os.fdatasync(segment.file)
        except OSError:
            self._drop(segment, pending)
            raise
        if not _is_at(segment.path, segment.identity):
            self._drop(segment, pending)
            return
        segment.is_durable = True
        segment.synced_lines += pending.number

    def _finish(self, segment: _WrittenSegment) -> OSError | None:
        """Syncs and seals a segment that is not written any more. Returns why this failed."""
        try:
            self._sync_segment(segment)
            if segment in self._retired:
                segment.path.rename(_sealed(segment.path))
                sync_folder(self._directory)
        except OSError as error:
            return error
        finally:
            with self.lock:
                if segment in self._retired:
                    self._retired.remove(segment)
                    os.close(segment.file)
        return None

    def _drop(self, segment: _WrittenSegment, pending: _UnsyncedLines) -> None:
        """Seals a segment whose last lines must be written again. Raises SegmentGoneError if the segment is gone.

        If another writer took this writer for dead and sealed the segment, the lines are in the segment. But a program
        that reads each sealed segment once may have read it before the lines were written.
        """
        with self.lock:
            if self._current is segment:
                self._current = None
            elif segment in self._retired:
                self._retired.remove(segment)
            later = segment.take_unsynced()
            self._repeated += [pending.lines, later.lines]
            self._forgotten += pending.forgotten + later.forgotten
        try:
            sealed = _sealed(segment.path)
            if _is_at(segment.path, segment.identity):
                with contextlib.suppress(OSError):  # the caller raises the error of the sync
                    segment.path.rename(sealed)
                    sync_folder(self._directory)
            elif not _is_at(sealed, segment.identity):
                raise SegmentGoneError(segment.path, segment.synced_lines)
        finally:
            os.close(segment.file)

    def abandon(self) -> None:
        """Closes the files without sealing the segments.

        For the child process of a fork: the parent writes the segments.
        """
        self.lock = threading.RLock()  # a thread of the parent may have had the lock
        for segment in (*self._retired, *((self._current,) if self._current is not None else ())):
            os.close(segment.file)
        self._retired, self._current = [], None
        _close_files_of(self._writer)


def _close_files_of(writer: str) -> None:
    """Closes every file of a writer that this process has open, whoever opened it. The writer's name is unique.

    A thread of the parent may have been in the middle of opening a file when another thread forked: then no object
    knows the file's number. While a child has the file open, its lock holds, and a writer that was killed looks alive.
    """
    with contextlib.suppress(OSError):  # there is no /proc
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the file is not open any more, such as the listing's own
                if link.readlink().name.removeprefix(".").startswith(writer):
                    os.close(int(link.name))


def _is_at(path: Path, identity: tuple[int, int]) -> bool:
    """Returns whether the file at this path has this device and inode."""
    try:
        found = path.stat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == identity


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

    def __init__(self, file: Path | str, line: int, cause: str) -> None:
        super().__init__(f"{file}, line {line}: {cause}", "Read it with a newer Twinbus, or mend the file by hand.")
        self.file = file
        self.line = line
        self.cause = cause


@dataclass(frozen=True, slots=True)
class LineProblem:
    """A line that is not an entry. Lines are counted from 1; `line` is 0 if the file itself cannot be read."""

    file: Path | str
    """A path, or a URL."""
    line: int
    cause: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.cause}"


def read_ledger(
    directory: str | os.PathLike[str], problem: Callable[[LineProblem], None] | None = None
) -> Iterator[Entry]:
    """Yields every entry of every segment, also of open segments, one segment after the other.

    Before these, yields a gap entry for each writer that cannot write its entries now, or could not when it ended.

    Calls `problem` for each line that is not an entry; without `problem`, raises LedgerUnreadableError. Skips a last
    line without a newline: a crash may leave such an incomplete line.

    `directory` may be the URL of an object store that has sealed segments (`twinbus ledger ship`).
    """
    if (location := StorageLocation.parse(directory)).is_url:
        from twinbus.ledger.shipped_ledger import ShippedLedger  # noqa: PLC0415 - rarely needed

        yield from ShippedLedger(location).read(problem or _raise)
        return
    directory = Path(location)
    yield from failing_gaps(directory)
    for segment in list_segments(directory):
        yield from read_segment(segment, problem or _raise)


def read_segment(segment: Segment, problem: Callable[[LineProblem], None]) -> Iterator[Entry]:
    """Yields every entry of one segment. Calls `problem` for each line that is not an entry."""
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
        yield from read_lines(file, path, problem)


def read_lines(file: BinaryIO, path: Path | str, problem: Callable[[LineProblem], None]) -> Iterator[Entry]:
    """Yields the entries of an opened segment. `path` names it in problems."""
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield decode_entry(line)
        except EntryError as error:
            problem(LineProblem(path, number, str(error)))


def _raise(problem: LineProblem) -> None:
    raise LedgerUnreadableError(problem.file, problem.line, problem.cause)
