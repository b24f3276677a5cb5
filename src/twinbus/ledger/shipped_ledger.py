"""A ledger in an object store: the sealed segments that `twinbus ledger ship` has copied there (D6).

Writers never write there, so there are no open segments and no locks. A sealed segment never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twinbus.ledger.dead_writers import ends_writer
from twinbus.ledger.entries import Entry
from twinbus.ledger.segments import LineProblem, read_lines, segment_at
from twinbus.object_store import ObjectFolder, StoredObject
from twinbus.storage_location import StorageLocation

_TAIL: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class ShippedSegment:
    """A sealed segment in an object store."""

    stored: StoredObject
    writer: str
    number: int

    @property
    def name(self) -> str:
        return self.stored.name


class ShippedLedger:
    """The segments below a URL. All methods raise StorageError if the object store cannot be read."""

    def __init__(self, location: StorageLocation) -> None:
        self.folder = ObjectFolder(location)

    def segments(self) -> list[ShippedSegment]:
        """Returns the segments, ordered by name. Ignores other objects."""
        found = []
        for stored in self.folder.list_folder()[0]:
            segment = segment_at(Path(stored.name))
            if segment is not None and not segment.is_open:
                found.append(ShippedSegment(stored, segment.writer, segment.number))
        return sorted(found, key=lambda segment: segment.name)

    def read(self, problem: Callable[[LineProblem], None]) -> Iterator[Entry]:
        """Yields every entry, one segment after the other, as `read_ledger` does."""
        for segment in self.segments():
            url = str(self.folder.location / segment.name)
            try:
                file = self.folder.open(segment.name, segment.stored.size)
                yield from read_lines(file, url, problem)
            except FileNotFoundError:
                problem(LineProblem(url, 0, "removed while the ledger was read"))

    def dead_writers(self, silent_since: float) -> frozenset[str]:
        """Returns the writers whose last line is `closed` or `ended`, or whose last segment was stored before a time.

        `silent_since` is in seconds since the epoch.
        """
        newest: dict[str, ShippedSegment] = {}
        for segment in self.segments():
            known = newest.get(segment.writer)
            if known is None or segment.number >= known.number:
                newest[segment.writer] = segment
        return frozenset(
            writer
            for writer, segment in newest.items()
            if segment.stored.modified.timestamp() <= silent_since or self._has_ended(segment)
        )

    def _has_ended(self, segment: ShippedSegment) -> bool:
        size = segment.stored.size
        tail = self.folder.read_range(segment.name, max(0, size - _TAIL), size) if size else b""
        return ends_writer(tail[: tail.rfind(b"\n") + 1])
