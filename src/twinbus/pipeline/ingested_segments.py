"""The table `segments`: what was ingested of each ledger, and when the ledger was looked at (D7). Needs no Spark.

A batch adds a row for each segment that it read more of. The rows of a segment are merged by their largest number of
bytes. All lines that were in the ledger at its latest `looked_at` are in the tables.

A pipeline that looks at a ledger and finds no new lines makes no commit. It writes the time to a small file, one for
each ledger (`looked_at/`). The file names the version of the table that had all lines then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from twinbus.ledger import Segment
from twinbus.object_store import read_text
from twinbus.pipeline.table_log import TABLE_CONFIGURATION, TableLog
from twinbus.pipeline.table_storage import TableStorage
from twinbus.storage_location import StorageLocation

SEGMENTS: Final = "segments"
LOOKED_AT_FOLDER: Final = "looked_at"
"""The folder with the files that name the last look at each ledger."""
LOOKED_AT: Final = "looked_at"
"""The key of the time in the offset of a stream. No segment has this name."""
_SCHEMA: Final = pa.schema(
    [("ledger", pa.string()), ("segment", pa.string()), ("bytes", pa.int64()), (LOOKED_AT, pa.int64())]
)
_CHUNK: Final = 1 << 16
# Each batch adds a file. This number of files is replaced by one file.
_MOST_FILES: Final = 64


@dataclass(frozen=True, slots=True)
class IngestedLedger:
    """What was ingested of one ledger."""

    ledger: str
    """The absolute path of the ledger, as it was named first, or its URL."""
    looked_at: int
    """All lines that were in the ledger at this time are ingested. In milliseconds since the epoch; 0: not known."""
    segments: Mapping[str, int]
    """How many bytes of each segment were ingested. The keys are the names that the files have when they are sealed."""


class IngestedSegments:
    """The table `segments` of a storage."""

    def __init__(self, storage: TableStorage) -> None:
        self.storage = storage
        self._log = TableLog(storage, SEGMENTS)

    def ledgers(self, version: int | None = None) -> list[IngestedLedger]:
        """Returns what was ingested of each ledger, at a version of the table (default: the latest).

        Merges what was ingested of a ledger under several names. Returns an empty list if there is no such version any
        more.
        """
        found: dict[str, IngestedLedger] = {}
        for one in self._named(version):
            same = StorageLocation.parse(one.ledger).canonical()
            found[same] = _merged(found[same], one) if same in found else one
        return [*found.values()]

    def name_of(self, ledger: StorageLocation) -> str:
        """Returns the name of a ledger in this table: its absolute path, or the name under which it was ingested."""
        own, same = str(ledger.absolute()), ledger.canonical()
        names = [one.ledger for one in self._named()]
        if own in names:
            return own
        return next((name for name in names if StorageLocation.parse(name).canonical() == same), own)

    def _named(self, version: int | None = None) -> list[IngestedLedger]:
        """Returns what was ingested under each name of a ledger, sorted by name."""
        try:
            rows = self._log.query("select * from rows", version).to_pylist()
        except DeltaError:
            return []
        times: dict[str, int] = {}
        segments: dict[str, dict[str, int]] = {}
        for row in rows:
            ledger, known = row["ledger"], segments.setdefault(row["ledger"], {})
            times[ledger] = max(times.get(ledger, 0), row[LOOKED_AT])
            known[row["segment"]] = max(known.get(row["segment"], 0), row["bytes"])
        shown = self._log.version() if version is None else version
        times = {ledger: max(time, self._last_look(ledger, shown)) for ledger, time in times.items()}
        return [IngestedLedger(ledger, times[ledger], found) for ledger, found in sorted(segments.items())]

    def record_look(self, ledger: str, at: int, version: int) -> None:
        """Records that this version of the table has all lines that were in a ledger at this time, in milliseconds."""
        text = json.dumps({"ledger": ledger, LOOKED_AT: at, SEGMENTS: version})
        self.storage.replace_file(LOOKED_AT_FOLDER, _look_name(ledger), text.encode())

    def _last_look(self, ledger: str, version: int | None) -> int:
        """Returns when a pipeline found that this version has all lines of the ledger; 0 if it did not."""
        try:
            look = json.loads(read_text(self.storage.location, f"{LOOKED_AT_FOLDER}/{_look_name(ledger)}"))
            return int(look[LOOKED_AT]) if look[SEGMENTS] == version else 0
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return 0  # none, or not one of ours

    def create(self) -> int:
        """Makes an empty table if there is none. Returns the latest version."""
        version = self._log.version()
        if version is None:
            # Version 0 is empty, so that the first batch can be undone.
            DeltaTable.create(
                self.storage.uri(SEGMENTS),
                _SCHEMA,
                mode="ignore",
                configuration=TABLE_CONFIGURATION,
                storage_options=self.storage.options,
            )
            return 0
        return version

    def add(self, ingested: IngestedLedger | None) -> int:
        """Adds what a batch ingested. Returns the new version."""
        version = self.create()
        if ingested is None or not ingested.segments:
            return version
        is_rewritten = len(self._log.files()) >= _MOST_FILES
        write_deltalake(
            self.storage.uri(SEGMENTS),
            _rows([*self._named(), ingested] if is_rewritten else [ingested]),
            mode="overwrite" if is_rewritten else "append",
            storage_options=self.storage.options,
        )
        if is_rewritten:
            self._log.vacuum()
        return self._log.open().version()


def _merged(one: IngestedLedger, other: IngestedLedger) -> IngestedLedger:
    names = one.segments.keys() | other.segments.keys()
    segments = {name: max(one.segments.get(name, 0), other.segments.get(name, 0)) for name in sorted(names)}
    return IngestedLedger(one.ledger, max(one.looked_at, other.looked_at), segments)


def _look_name(ledger: str) -> str:
    return f"{hashlib.sha256(ledger.encode()).hexdigest()[:16]}.json"


def _rows(ledgers: Iterable[IngestedLedger]) -> pa.Table:
    rows = [
        {"ledger": one.ledger, "segment": segment, "bytes": size, LOOKED_AT: one.looked_at}
        for one in ledgers
        for segment, size in one.segments.items()
    ]
    return pa.Table.from_pylist(rows, _SCHEMA)


def has_unread_lines(segment: Segment, ingested: Mapping[str, int]) -> bool:
    """Returns whether a segment has whole lines after the bytes that were ingested of it."""
    read = ingested.get(segment.sealed_path.name, 0)
    try:
        return segment.path.stat().st_size > read and _has_line(segment.path, read)
    except FileNotFoundError:
        # Sealed since the listing, or removed for the disk budget.
        return segment.sealed_path.exists() and _has_line(segment.sealed_path, read)


def _has_line(path: Path, start: int) -> bool:
    with path.open("rb") as file:
        file.seek(start)
        while data := file.read(_CHUNK):
            if b"\n" in data:
                return True
    return False


def ingested_by_batch(
    ledger: str, checkpoint: StorageLocation, batch: int, *, is_first: bool = False
) -> IngestedLedger:
    """Returns what a batch of a stream ingests of a ledger, from the offsets that Spark keeps in the checkpoint.

    With `is_first`, also what earlier batches have ingested: the tables do not know it yet.
    """
    end, start = _offset(checkpoint, batch), {} if is_first else _offset(checkpoint, batch - 1)
    looked_at = end.pop(LOOKED_AT, 0)
    return IngestedLedger(ledger, looked_at, {name: size for name, size in end.items() if size != start.get(name)})


def _offset(checkpoint: StorageLocation, batch: int) -> dict[str, int]:
    """Returns the offset at the end of a batch; nothing if Spark has no such offset."""
    try:
        lines = read_text(checkpoint, f"offsets/{batch}").splitlines()
    except FileNotFoundError:
        return {}
    # A version, metadata of Spark, and the offset of the source. The first batch of an empty ledger has no offset: `-`.
    found = json.loads(lines[2]) if len(lines) > 2 and lines[2] != "-" else {}
    return dict(found)
