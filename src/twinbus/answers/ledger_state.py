"""Looks at a ledger: does it have lines that were not ingested, and which writers are dead?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from twinbus.answers.freshness import LedgerState
from twinbus.ledger import ShippedLedger, dead_writers, list_segments
from twinbus.object_store import StorageError
from twinbus.pipeline.ingested_segments import IngestedLedger, has_unread_lines
from twinbus.storage_location import StorageLocation


def ledger_states(
    ledgers: Iterable[IngestedLedger], given: StorageLocation | None, dead: Sequence[str], silence: timedelta
) -> list[LedgerState]:
    """Returns the state of each ledger that went into the tables, and of the ledger that the user gave.

    `dead` has the writers that the results take for dead. A ledger that cannot be read here is not at hand. It is left
    out if it was moved: another ledger has all its segments, and was looked at later.
    """
    known = {StorageLocation.parse(one.ledger): one for one in ledgers}
    states = [_state(location, ingested, dead, silence) for location, ingested in known.items()]
    found = [
        state
        for state, ingested in zip(states, known.values(), strict=True)
        if state.at_hand or not any(_has_all_of(ingested, other) for other in known.values())
    ]
    if given is None or given.canonical() in {location.canonical() for location in known}:
        return found
    return [*found, LedgerState(str(given.absolute()), None)]


def _has_all_of(moved: IngestedLedger, other: IngestedLedger) -> bool:
    """Returns whether everything that was ingested of a ledger was later ingested of another one."""
    if not moved.segments or other.looked_at <= moved.looked_at:
        return False
    return all(other.segments.get(name, 0) >= size for name, size in moved.segments.items())


class _Segments(NamedTuple):
    """The segments of a ledger."""

    names: set[str]
    """The names that the files have when they are sealed."""
    writers: set[str]
    unread_sealed: str | None
    """The name of a sealed segment with lines that were not ingested."""
    unread_open: str | None
    """The same of an open segment."""


def _state(location: StorageLocation, ingested: IngestedLedger, dead: Sequence[str], silence: timedelta) -> LedgerState:
    state = LedgerState(str(location), ingested.looked_at)
    try:
        # Before the segments are read: a writer that ends in between has then written everything that is read.
        dead_now = dead_writers(location, silence=silence)
        found = _shipped(location, ingested.segments) if location.is_url else _local(Path(location), ingested.segments)
    except (OSError, StorageError):
        return state
    has_unread = found.unread_sealed is not None or found.unread_open is not None
    if not has_unread and found.names.isdisjoint(ingested.segments):
        return state  # an empty folder, as of a volume that is not mounted
    return replace(
        state,
        at_hand=True,
        unread_sealed=found.unread_sealed,
        unread_open=found.unread_open,
        same_writers=dead_now & found.writers == found.writers.intersection(dead),
    )


def _local(directory: Path, ingested: Mapping[str, int]) -> _Segments:
    segments = list(list_segments(directory))
    unread = {one.is_open: one.path.name for one in segments if has_unread_lines(one, ingested)}
    names, writers = {one.sealed_path.name for one in segments}, {one.writer for one in segments}
    return _Segments(names, writers, unread_sealed=unread.get(False), unread_open=unread.get(True))


def _shipped(location: StorageLocation, ingested: Mapping[str, int]) -> _Segments:
    """Returns the segments in an object store: all of them are sealed."""
    segments = ShippedLedger(location).segments()
    unread = [one.name for one in segments if one.stored.size > ingested.get(one.name, 0)]
    names, writers = {one.name for one in segments}, {one.writer for one in segments}
    return _Segments(names, writers, unread_sealed=unread[0] if unread else None, unread_open=None)
