"""Which writers of a ledger are dead, for the jobs on its tables (L1).

The entries name the writers that closed, and those that another writer sealed. For the other writers, the locks in the
ledger's folder show which are alive, if this machine can read the folder (`WriterStates.in_ledger`). If neither
entries nor locks show the state of a writer, it counts as dead if it has no entry in the tables for some time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import (
    ENTRY_KINDS,
    SILENCE,
    Closed,
    Dropped,
    Ended,
    Entry,
    Gap,
    Role,
    SegmentHeader,
    ShippedLedger,
    balance,
    dead_writers,
    id_of_writer,
    list_segments,
)
from twinbus.pipeline.ingest import day_of
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.tables import ENTRIES, OPERATIONS, PENDING, Tables
from twinbus.storage_location import StorageLocation

WRITER_ID: Final = "substring(id, 1, 16)"
"""SQL expression: the 16 digits of the writer of an entry, as `twinbus.ledger.writer_id` returns them."""
_ABOUT_SEGMENTS: Final = [kind.kind for kind in (SegmentHeader, Closed, Ended, Gap, Dropped)]


@dataclass(frozen=True, slots=True)
class WriterStates:
    """The names of writers that are known to be dead or alive, apart from what the entries say."""

    dead: frozenset[str] = frozenset()
    alive: frozenset[str] = frozenset()
    silence: timedelta = SILENCE
    """The time without an entry after which a writer counts as dead, if nothing else shows its state."""

    @classmethod
    def in_ledger(cls, directory: str | os.PathLike[str], silence: timedelta = SILENCE) -> WriterStates:
        """Looks at the folder of a ledger, or at its URL. Call this before the entries are ingested.

        Otherwise a writer could record an outcome and end after the ingest, and its outcome would seem to be missing.
        """
        dead, location = dead_writers(directory, silence=silence), StorageLocation.parse(directory)
        if location.is_url:
            found = {segment.writer for segment in ShippedLedger(location).segments()}
        else:
            found = {segment.writer for segment in list_segments(Path(location))}
        return cls(dead, frozenset(found - dead), silence)


def dead_in_tables(
    tables: Tables, version: TablesVersion, known: WriterStates, now: float | None = None
) -> frozenset[str]:
    """Returns the names of the writers that will not write again.

    `now` is the time in seconds since the epoch; the default is the current time.
    """
    entries = _entries_about_writers(tables, version)
    at_work = set(balance(entries, known.dead).at_work)
    ended = {entry.writer for entry in entries} - at_work
    if undecided := at_work - known.alive:  # as in `undecided_writers`
        since = int(((time.time() if now is None else now) - known.silence.total_seconds()) * 1000)
        heard = _heard_since(tables, version, since)
        undecided = {writer for writer in undecided if id_of_writer(writer) not in heard}
    return known.dead | ended | undecided


def undecided_writers(tables: Tables, version: TablesVersion, known: WriterStates) -> set[str]:
    """Returns the names of the writers of which only the time since their last entry shows whether they are dead."""
    return set(balance(_entries_about_writers(tables, version), known.dead).at_work) - known.alive


def writers_at_work(tables: Tables, version: TablesVersion, known: WriterStates) -> list[str]:
    """Returns the names of the writers that may still write."""
    dead = dead_in_tables(tables, version, known)
    return sorted({entry.writer for entry in _entries_about_writers(tables, version)} - dead)


def _entries_about_writers(tables: Tables, version: TablesVersion) -> list[SegmentHeader | Closed | Ended]:
    entries = entries_about_segments(tables, version)
    return [entry for entry in entries if isinstance(entry, SegmentHeader | Closed | Ended)]


def entries_about_segments(tables: Tables, version: TablesVersion) -> tuple[Entry, ...]:
    """Returns the entries about segments and their writers, in order. Reads the tables only once for a version."""

    def read() -> tuple[Entry, ...]:
        rows = tables.read(ENTRIES, version=version).where(F.col("kind").isin(_ABOUT_SEGMENTS)).orderBy("at", "id")
        return tuple(entry_of(row.asDict()) for row in rows.collect())

    return tables.remembered(ENTRIES, version, read)


def entry_of(row: Mapping[str, object]) -> Entry:
    """Returns the entry of a row of the table `entries` or `pending`. The row must have no list and no map."""
    kind = ENTRY_KINDS[str(row["kind"])]
    values = {name: row[name] for name in kind.__dataclass_fields__ if name != "kind" and row.get(name) is not None}
    if "role" in values:
        values["role"] = Role(str(values["role"]))
    return kind(**values)  # type: ignore[arg-type] # the columns have the fields' types


def _heard_since(tables: Tables, version: TablesVersion, since: int) -> set[str]:
    """Returns the 16 digits of the writers that have an entry at this time or later."""
    recent = F.col("at") >= since
    parts = [
        tables.read(table, version=version).where(F.col("day") >= day_of(since)).where(recent).selectExpr(WRITER_ID)
        for table in (OPERATIONS, ENTRIES)
    ]
    parts.append(tables.read(PENDING, version=version).where(recent).selectExpr(WRITER_ID))
    return {row[0] for row in parts[0].unionAll(parts[1]).unionAll(parts[2]).distinct().collect()}
