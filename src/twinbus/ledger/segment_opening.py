"""What a writer does for a new segment: write a header, seal segments of dead writers, keep the disk budget.

The header is written when the segment is opened. The rest needs many accesses to the disk, and an application may be
waiting for its entry to be written. So the writer's thread does it afterwards, before the first sync of the segment.

If segments were removed for the disk budget, a `dropped` entry reports this, so that a balance shows that entries are
missing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from twinbus.ledger.dead_writers import dead_writers, seal_abandoned
from twinbus.ledger.entries import Dropped, Role, SegmentHeader
from twinbus.ledger.failing_marks import failing_gap, failing_writers, unmark_failing
from twinbus.ledger.json_lines import encode_entry
from twinbus.ledger.options import LedgerOptions
from twinbus.ledger.segments import Segment, list_segments

_log = logging.getLogger("twinbus.ledger")


class SegmentOpening:
    """Makes the header of a writer's segments, and room for them. See `SegmentOpener`."""

    def __init__(self, directory: Path, writer: str, role: Role, host: str, options: LedgerOptions) -> None:
        self._directory = directory
        self._writer = writer
        self._role = role
        self._host = host
        self._options = options
        self._version = _version()
        self._unsealed: Iterator[Segment] | None = None
        """The open segments that `make_room` has not looked at yet; None before and after this work."""
        self._reported: list[str] = []
        """Dead writers whose marks the lines of `make_room` report."""

    def header(self, number: int) -> str:
        """Returns the first line of segment `number`."""
        return encode_entry(
            SegmentHeader(
                at=int(time.time() * 1000),
                id=self._id(number),
                writer=self._writer,
                role=self._role,
                host=self._host,
                pid=os.getpid(),
                version=self._version,
                segment=number,
                durability=self._options.durability,
            )
        )

    def make_room(self, number: int) -> str | None:
        """Seals segments of dead writers and keeps the disk budget. Returns lines that report what is missing.

        Seals only some of the segments, and returns None, if there are many: a flush may be waiting.
        """
        options, at = self._options, int(time.time() * 1000)
        if self._unsealed is None:
            self._unsealed = iter([segment for segment in list_segments(self._directory) if segment.is_open])
        if not seal_abandoned(self._unsealed, self._host, 2 * options.segment_age.total_seconds(), self._writer):
            return None
        self._unsealed = None
        group = f"{self._role}-{self._host}"
        budget, wanted = options.budget_bytes, options.segment_bytes
        dropped = keep_to_budget(self._directory, group, budget, wanted, at, self._id(number))
        return dropped + self._gaps_of_dead_writers()

    def room_made(self) -> None:
        """Removes the marks that the lines of `make_room` have replaced."""
        for writer in self._reported:
            unmark_failing(self._directory, writer)
        self._reported.clear()

    def _gaps_of_dead_writers(self) -> str:
        """Returns gap entries for dead writers that could not write when they ended."""
        if not (failing := failing_writers(self._directory)):
            return ""
        dead = dead_writers(self._directory)
        self._reported, lines = [], []
        for writer in failing:
            if writer in dead:
                with contextlib.suppress(FileNotFoundError):  # another writer has just reported it and removed its mark
                    lines.append(encode_entry(failing_gap(self._directory, writer)))
                    self._reported.append(writer)
        return "".join(lines)

    def _id(self, number: int) -> str:
        return f"{self._writer.rpartition('-')[2]}-segment-{number}"


@cache
def _version() -> str:
    """Returns the version of Twinbus. Reads it from the disk, so the header of a segment must not call this."""
    try:
        return metadata.version("twinbus")
    except (ImportError, OSError):  # not installed, or this process cannot read it, or cannot open any more files
        return "unknown"


def keep_to_budget(directory: Path, group: str, budget: int, wanted: int, at: int, id_: str) -> str:
    """Removes the oldest sealed segments of a group until `wanted` more bytes fit into the budget.

    Returns the line of a `dropped` entry with the time `at` and the id `id_`, or "" if nothing was removed.
    """
    found = sorted(_with_status(directory, group), key=lambda one: one[1].st_mtime)
    excess = sum(status.st_size for _, status in found) + wanted - budget
    removed: list[os.stat_result] = []
    for segment, status in found:
        if excess > 0 and not segment.is_open:
            try:
                segment.path.unlink(missing_ok=True)
            except OSError as error:  # such as a segment of another user: no reason to stop writing
                _log.warning("ledger: %s cannot be removed for the disk budget: %s", segment.path, error)
                continue
            excess -= status.st_size
            removed.append(status)
    if not removed:
        return ""
    size = sum(status.st_size for status in removed)
    _log.warning("ledger: %d segments (%d bytes) removed from %s for its disk budget", len(removed), size, directory)
    since, until = (int(status.st_mtime * 1000) for status in (removed[0], removed[-1]))
    return encode_entry(Dropped(at=at, id=id_, count=len(removed), bytes=size, since=since, until=until))


def _with_status(directory: Path, group: str) -> list[tuple[Segment, os.stat_result]]:
    found = []
    for segment in list_segments(directory):
        if segment.group == group:
            try:
                found.append((segment, segment.path.stat()))
            except FileNotFoundError:
                continue
    return found
