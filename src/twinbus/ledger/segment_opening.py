"""What a writer does before it opens a segment: seal segments of dead writers, keep the disk budget, write a header.

If segments were removed for the disk budget, a `dropped` entry reports this, so that a balance shows that entries are
missing.
"""

from __future__ import annotations

import logging
import os
import time
from importlib import metadata
from pathlib import Path

from twinbus.ledger.dead_writers import seal_abandoned
from twinbus.ledger.entries import Dropped, Role, SegmentHeader
from twinbus.ledger.json_lines import encode_entry
from twinbus.ledger.options import LedgerOptions
from twinbus.ledger.segments import Segment, list_segments

_log = logging.getLogger("twinbus.ledger")


class SegmentOpening:
    """A function that returns the first lines of a segment. Its argument is the number of the segment."""

    def __init__(self, directory: Path, writer: str, role: Role, host: str, options: LedgerOptions) -> None:
        self._directory = directory
        self._writer = writer
        self._role = role
        self._host = host
        self._options = options
        self._number = -1
        self._dropped_lines = ""

    def __call__(self, number: int) -> str:
        options, at = self._options, int(time.time() * 1000)
        if number != self._number:
            # A new number. If the number is the same as before, the segment could not be made, and the `dropped` lines
            # that were made for it are not written yet.
            self._number, self._dropped_lines = number, ""
        id_ = f"{self._writer.rpartition('-')[2]}-segment-{number}"
        seal_abandoned(self._directory, self._host, 2 * options.segment_age.total_seconds(), self._writer)
        self._dropped_lines += keep_to_budget(
            self._directory, f"{self._role}-{self._host}", options.budget_bytes, options.segment_bytes, at, id_
        )
        header = SegmentHeader(
            at=at,
            id=id_,
            writer=self._writer,
            role=self._role,
            host=self._host,
            pid=os.getpid(),
            version=_version(),
            segment=number,
        )
        return encode_entry(header) + self._dropped_lines


def _version() -> str:
    try:
        return metadata.version("twinbus")
    except metadata.PackageNotFoundError:
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
            segment.path.unlink(missing_ok=True)
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
