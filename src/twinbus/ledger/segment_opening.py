"""What is done when a segment is begun: its header, the disk budget, and segments whose writer is gone.

What was removed is told by an entry, so that a balance knows what it cannot know.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from importlib import metadata
from pathlib import Path
from typing import Final

from twinbus.ledger.entries import Dropped, Role, SegmentHeader
from twinbus.ledger.json_lines import encode_entry
from twinbus.ledger.options import LedgerOptions
from twinbus.ledger.segments import Segment, list_segments, sync_folder

_log = logging.getLogger("twinbus.ledger")

_CHUNK: Final = 64 * 1024


class Opening:
    """Makes the first lines of a writer's segments."""

    def __init__(self, directory: Path, writer: str, role: Role, host: str, options: LedgerOptions) -> None:
        self._directory = directory
        self._writer = writer
        self._role = role
        self._host = host
        self._options = options
        self._number = -1
        self._told = ""

    def __call__(self, number: int) -> str:
        options, at = self._options, int(time.time() * 1000)
        if number != self._number:
            # The same number again: that segment could not be made, and what was removed for it is not told yet.
            self._number, self._told = number, ""
        name = f"{self._writer.rpartition('-')[2]}-segment-{number}"
        seal_abandoned(self._directory, self._host, 2 * options.segment_age.total_seconds())
        self._told += keep_to_budget(
            self._directory, f"{self._role}-{self._host}", options.budget_bytes, options.segment_bytes, at, name
        )
        header = SegmentHeader(
            at=at, id=name, writer=self._writer, role=self._role, host=self._host, pid=os.getpid(), version=_version(),
            segment=number,
        )  # fmt: skip
        return encode_entry(header) + self._told


def _version() -> str:
    try:
        return metadata.version("twinbus")
    except metadata.PackageNotFoundError:
        return "unknown"


def keep_to_budget(directory: Path, group: str, budget: int, wanted: int, at: int, number: str) -> str:
    """Make room for so many bytes more: the group's oldest sealed segments go. The line that tells of it, or none."""
    found = sorted(_sized(directory, group), key=lambda one: one[1].st_mtime)
    excess = sum(stat.st_size for _, stat in found) + wanted - budget
    gone: list[os.stat_result] = []
    for segment, stat in found:
        if excess > 0 and not segment.open:
            segment.path.unlink(missing_ok=True)
            excess -= stat.st_size
            gone.append(stat)
    if not gone:
        return ""
    size = sum(stat.st_size for stat in gone)
    _log.warning("ledger: %d segments (%d bytes) removed from %s for its disk budget", len(gone), size, directory)
    since, until = (int(stat.st_mtime * 1000) for stat in (gone[0], gone[-1]))
    return encode_entry(Dropped(at=at, id=number, count=len(gone), bytes=size, since=since, until=until))


def seal_abandoned(directory: Path, host: str, silent_seconds: float) -> None:
    """Seal the open segments whose writer is gone: on this host nobody locks them.

    A lock may not be seen from another host: there the file must have been silent for so long, too.
    """
    for segment in list_segments(directory):
        if not segment.open:
            continue
        try:
            if segment.host == host or time.time() - segment.path.stat().st_mtime > silent_seconds:
                _seal(segment)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("ledger: %s is left open by its writer and cannot be sealed: %s", segment.path, error)


def _seal(segment: Segment) -> None:
    file = os.open(segment.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if os.fstat(file).st_ino != segment.path.stat().st_ino:
            return
        os.ftruncate(file, _whole_lines(file))
        os.fsync(file)
        segment.path.rename(segment.sealed_path)
        sync_folder(segment.path.parent)
    finally:
        os.close(file)


def _whole_lines(file: int) -> int:
    """Where the last whole line ends."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _CHUNK)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _sized(directory: Path, group: str) -> list[tuple[Segment, os.stat_result]]:
    found = []
    for segment in list_segments(directory):
        if segment.group == group:
            try:
                found.append((segment, segment.path.stat()))
            except FileNotFoundError:
                continue
    return found
