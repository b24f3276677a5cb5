"""What lanes moved that died before they could report, from the segments that they left in the ledger.

A lane records first which try of which task it is. The driver knows from Spark which tries have died, and counts the
entries of their segments. So the numbers of a run are those of its ledger (L6), in particular how many messages were
possibly delivered twice: a killed lane has delivered messages without a recorded completion, and sent messages without
a recorded outcome.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from twinbus.ledger import (
    OK,
    UNKNOWN,
    Entry,
    Fact,
    Intent,
    Ledger,
    Move,
    Movement,
    Operation,
    Outcome,
    Role,
    SegmentHeader,
    Stage,
    State,
    list_segments,
    read_segment,
)
from twinbus.pipeline.syphon_job.lane_counts import LaneTry
from twinbus.syphon import MessageCounts

LANE_STARTED: Final = "lane_started"
"""Event of the state entry with which the segment of a lane begins."""


def record_start(ledger: Ledger, lane: LaneTry, pair: str) -> None:
    """Records which try of which task writes this segment."""
    facts: dict[str, Fact] = {"plan": lane.plan, "queue": lane.queue, "lane": lane.lane, "try": lane.number}
    ledger.state(LANE_STARTED, facts, pair=pair)


@dataclass(slots=True)
class EntryCounts:
    """What the entries of one dead lane add up to."""

    counts: dict[str, MessageCounts] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)

    def of(self, path: str) -> MessageCounts:
        return self.counts.setdefault(path, MessageCounts())

    def add_send(self, intent: Intent | Operation, outcome: Outcome | Operation) -> Counter[str]:
        """Adds a send to the primary. Returns the ids of the messages that were delivered."""
        failed = Counter(outcome.failed or (() if outcome.result == OK else intent.ids))
        arrived, counts = Counter(intent.ids) - failed, self.of(intent.entity)
        counts.returned += arrived.total()
        counts.bytes += intent.bytes * arrived.total() // max(1, len(intent.ids))
        if outcome.result == UNKNOWN:
            counts.possible_duplicates += failed.total()
        return arrived

    def add_move(self, entry: Movement, path: str) -> None:
        counts, count = self.of(path), len(entry.ids)
        match entry.move:
            case Move.POSSIBLE_DUPLICATE:
                counts.possible_duplicates += count
            case Move.KEPT:
                counts.kept += count
            case Move.DEAD_LETTERED:
                reason = entry.reason or ""
                counts.dead_lettered += count
                counts.dead_letter_reasons[reason] = counts.dead_letter_reasons.get(reason, 0) + count
            case _:
                pass


class LostLanes:
    """The segments of lanes in a ledger. Segments that exist when this object is made are never read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = {segment.writer for segment in list_segments(folder)} if folder.is_dir() else set[str]()
        self._lanes: dict[LaneTry, str] = {}

    def read(self, lanes: Iterable[LaneTry], primary: str) -> list[tuple[LaneTry, EntryCounts]]:
        """Returns what these lanes recorded, without lanes that recorded nothing. `primary` is its name in the ledger.

        Reads files: call it in a thread. An entry that cannot be read is not counted; `twinbus ledger check` names it.
        """
        self._find_new()
        found: list[tuple[LaneTry, EntryCounts]] = []
        for lane in lanes:
            writer = self._lanes.get(lane)
            if writer is not None:
                segments = [segment for segment in list_segments(self._folder) if segment.writer == writer]
                entries = (entry for one in segments for entry in read_segment(one, lambda _: None))
                found.append((lane, count_entries(entries, primary)))
        return found

    def _find_new(self) -> None:
        for segment in list_segments(self._folder):
            if segment.number or segment.writer in self._seen or not segment.writer.startswith(Role.SYPHON):
                continue
            self._seen.add(segment.writer)
            for entry in read_segment(segment, lambda _: None):
                if isinstance(entry, State) and entry.event == LANE_STARTED:
                    found = entry.facts
                    lane = LaneTry(str(found["plan"]), str(found["queue"]), int(found["lane"]), int(found["try"]))
                    self._lanes[lane] = segment.writer
                if not isinstance(entry, SegmentHeader):
                    break


def count_entries(entries: Iterable[Entry], primary: str) -> EntryCounts:
    """Returns the numbers of a lane that died. `primary` is the name of the primary in the ledger. Pure.

    A message that was delivered and whose completion is not recorded, or that was sent and has no recorded outcome, is
    possibly delivered twice, as in the balance of the ledger.
    """
    found = EntryCounts()
    begun: dict[str, Intent] = {}
    uncompleted: defaultdict[str, Counter[str]] = defaultdict(Counter)
    """By path, the ids of messages that were delivered and not completed."""
    for entry in entries:
        match entry:
            case Intent(stage=Stage.RETURN_PRIMARY):
                found.operations[entry.stage] += len(entry.ids)
                begun[entry.id] = entry
            case Outcome() if entry.id in begun:
                intent = begun.pop(entry.id)
                uncompleted[intent.entity] += found.add_send(intent, entry)
            case Operation():
                found.operations[entry.stage] += len(entry.ids) or entry.count or 1
                if entry.stage is Stage.RETURN_PRIMARY:
                    uncompleted[entry.entity] += found.add_send(entry, entry)
                elif entry.stage is Stage.COMPLETE_BACKLOG:
                    uncompleted[(entry.destination or "").removeprefix(f"{primary}/")] -= Counter(entry.ids)
            case Movement():
                found.add_move(entry, entry.destination.removeprefix(f"{primary}/"))
            case _:
                pass
    for intent in begun.values():
        found.of(intent.entity).possible_duplicates += len(intent.ids)
    for path, ids in uncompleted.items():
        found.of(path).possible_duplicates += ids.total()
    return found
