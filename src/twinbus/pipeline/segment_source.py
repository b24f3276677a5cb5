"""The Spark data source `ledger`: streams the lines of a ledger's segments, also of open segments, each line once.

The offset of the stream has for each segment the number of bytes that were read, so a repeated batch reads the same
bytes. It also has the time at which the source looked for segments (`looked_at`). A last line without a newline is read
when its newline is there. The source does not parse the lines.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from twinbus.ledger import OPEN_SUFFIX, SEALED_SUFFIX, ShippedLedger, list_segments
from twinbus.object_store import ObjectFolder
from twinbus.pipeline.ingested_segments import LOOKED_AT
from twinbus.pipeline.line_parsing import parse_lines
from twinbus.pipeline.packed_lines import PACKED_LINES_SCHEMA, packed_lines
from twinbus.storage_location import StorageLocation

# A task reads so many bytes, from the least to the most. Large tasks have both halves of more operations.
_LEAST_TASK_BYTES: Final = 16 * 1024 * 1024
_MOST_TASK_BYTES: Final = 64 * 1024 * 1024
_READ_BYTES: Final = 4 * 1024 * 1024
_TRIGGER_BYTES: Final = 512 * 1024 * 1024

SegmentOffset = dict[str, int]
"""How many bytes of each segment were read. The keys are the names that the files have when they are sealed.

LOOKED_AT is the time in milliseconds at which all lines of the ledger were in these bytes. An offset that leaves out
lines has the time of an earlier offset, or none.
"""


@dataclass(frozen=True)
class SegmentRange:
    """A range of bytes of a segment. A line belongs to the range in which it begins."""

    segment: str
    begin: int
    end: int


@dataclass
class SegmentPartition(InputPartition):
    """The byte ranges that one task reads."""

    ranges: tuple[SegmentRange, ...]


class LedgerDataSource(DataSource):
    """The data source of `spark.readStream.format("ledger")`.

    Options: `directory`, the folder of the ledger, or its URL; `maxBytesPerTrigger`, about 512 MB by default.
    """

    @classmethod
    def name(cls) -> str:
        return "ledger"

    def schema(self) -> str:
        return PACKED_LINES_SCHEMA

    def streamReader(self, schema: StructType) -> SegmentReader:  # noqa: N802  # Spark's names, here and below
        most = int(self.options.get("maxBytesPerTrigger", _TRIGGER_BYTES))
        return SegmentReader(StorageLocation.parse(self.options["directory"]), most)


class SegmentReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads the batches of a stream."""

    def __init__(self, directory: StorageLocation, most_bytes: int) -> None:
        self._directory = directory
        self._most_bytes = most_bytes
        self._target: SegmentOffset | None = None
        self._looked_at = 0

    def initialOffset(self) -> SegmentOffset:  # noqa: N802
        return {}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._available({})

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable()

    def latestOffset(self, start: SegmentOffset, limit: ReadLimit) -> SegmentOffset:  # noqa: N802
        available = self._available(start) if self._target is None else self._target
        end, room, has_all = dict(start), self._most_bytes, True
        for segment, size in available.items():
            new = size - start.get(segment, 0)
            if new > 0:
                if room <= 0:
                    has_all = False
                    break
                end[segment] = size
                room -= new
        if end == start:
            return start
        # Leave out segments whose files were removed for the disk budget. Otherwise the offset would grow forever.
        gone = start.keys() - available.keys() - {LOOKED_AT}
        found = {segment: end[segment] for segment in sorted(end.keys() - gone)}
        return found | {LOOKED_AT: self._looked_at} if has_all else found

    def partitions(self, start: SegmentOffset, end: SegmentOffset) -> Sequence[InputPartition]:
        shares: list[SegmentPartition] = []
        ranges: list[SegmentRange] = []
        new = {segment: (start.get(segment, 0), last) for segment, last in end.items() if segment != LOOKED_AT}
        half = sum(last - first for first, last in new.values()) // 2
        most, size = min(max(half, _LEAST_TASK_BYTES), _MOST_TASK_BYTES), 0
        for segment, (first, last) in new.items():
            for begin in range(first, last, most):
                found = SegmentRange(segment, begin, min(begin + most, last))
                ranges.append(found)
                size += found.end - found.begin
                if size >= most:
                    shares.append(SegmentPartition(tuple(ranges)))
                    ranges, size = [], 0
        return [*shares, SegmentPartition(tuple(ranges))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SegmentPartition)
        # Packed together: the lines of many small segments are one row.
        yield from packed_lines(batch for part in partition.ranges for batch in _lines(self._directory, part))

    def _available(self, start: SegmentOffset) -> SegmentOffset:
        self._looked_at = int(time.time() * 1000)
        return available_bytes(self._directory, start)


def available_bytes(directory: StorageLocation, start: SegmentOffset) -> SegmentOffset:
    """Returns the position after the last line of each segment in a ledger. `start` has earlier positions.

    In an object store there are only sealed segments, and they never change. There, a last line without a newline
    counts; the reader drops it.
    """
    if directory.is_url:
        return {one.name: one.stored.size for one in ShippedLedger(directory).segments()}
    found: SegmentOffset = {}
    for segment in list_segments(Path(directory)):
        name = segment.sealed_path.name
        try:
            found[name] = _end_of_last_line(segment.path, start.get(name, 0))
        except FileNotFoundError:
            # The segment was sealed or removed since the listing. The next call finds a sealed segment by its new name.
            continue
    return found


def open_segment(directory: StorageLocation, segment: str) -> BinaryIO | None:
    """Opens the file of a segment, which is open or sealed. Returns None if there is no such file."""
    if directory.is_url:
        with contextlib.suppress(FileNotFoundError):
            return ObjectFolder(directory).open(segment)
        return None
    for name in (segment.removesuffix(SEALED_SUFFIX) + OPEN_SUFFIX, segment):
        with contextlib.suppress(FileNotFoundError):
            return (Path(directory) / name).open("rb")
    return None


def _end_of_last_line(path: Path, known: int) -> int:
    """Returns the position after the last newline. `known` is a position after an earlier newline, or 0."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        while end > known:
            begin = max(known, end - 65536)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
    return known


def _lines(directory: StorageLocation, part: SegmentRange) -> Iterator[pa.RecordBatch]:
    """Yields the parsed lines that begin in the range."""
    found = open_segment(directory, part.segment)
    if found is None:
        return  # the segment was removed for the disk budget; a `dropped` entry reports this
    with found as file:
        position = part.begin
        if position:
            file.seek(position - 1)
            position += len(file.readline()) - 1  # skip the rest of a line that begins before this range
        while position < part.end:
            file.seek(position)
            data = file.read(min(_READ_BYTES, part.end - position))
            # The read ended within a line, or the file was truncated.
            data += file.readline() if not data.endswith(b"\n") else b""
            whole = data.rfind(b"\n") + 1
            if not whole:
                return
            yield from parse_lines(part.segment, data[:whole], partial(_count_lines, file, position))
            position += whole


def _count_lines(file: BinaryIO, end: int) -> int:
    """Returns the number of lines before a position."""
    file.seek(0)
    return sum(file.read(min(_READ_BYTES, end - begin)).count(b"\n") for begin in range(0, end, _READ_BYTES))
