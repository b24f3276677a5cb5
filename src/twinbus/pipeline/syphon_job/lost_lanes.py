"""What lanes moved that died before they could report, from the segments that they left in the ledger.

A lane records first which try of which task it is. The driver knows from Spark which tries have died, and counts the
entries of their segments. So the numbers of a run are those of its ledger (L6), in particular how many messages were
possibly delivered twice: a killed lane has delivered messages without a recorded completion, and sent messages without
a recorded outcome.

Each of these is a doubt, and several lanes may have a doubt about the same message. If two lanes deliver a message and
die, these are two doubts. The message has arrived twice, so it has one duplicate; it has two only if a third lane
delivers it again. So after a drain `LostLanes.possible_duplicates` counts again, by message and over all lanes, with
the rule of the ledger's balance.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
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
    Segment,
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
        arrived, failed = _arrived_and_failed(intent, outcome)
        counts = self.of(intent.entity)
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
    """The segments of lanes in a ledger. Segments that exist when this object is made are never read.

    The methods read files: call them in a thread, one at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = {segment.writer for segment in list_segments(folder)} if folder.is_dir() else set[str]()
        self._lanes: dict[LaneTry, str] = {}

    def read(self, lanes: Iterable[LaneTry], primary: str) -> list[tuple[LaneTry, EntryCounts]]:
        """Returns what these lanes recorded, without lanes that recorded nothing. `primary` is its name in the ledger.

        An entry that cannot be read is not counted; `twinbus ledger check` names it.
        """
        segments = self._segments()
        found: list[tuple[LaneTry, EntryCounts]] = []
        for lane in lanes:
            writer = self._lanes.get(lane)
            if writer is not None:
                found.append((lane, count_entries(_entries(segments[writer]), primary)))
        return found

    def possible_duplicates(self, primary: str) -> Counter[str]:
        """Returns by path how many messages of this run were possibly delivered twice, as the ledger counts them.

        Call it when no lane runs. Reads all that the lanes of this run have recorded, twice: first which messages are
        in doubt, then all about these. So it keeps only these in memory.
        """
        segments = self._segments()
        lanes = [segments[writer] for writer in self._lanes.values()]
        doubted = {key for lane in lanes for key in doubted_messages(_entries(lane), primary)}
        return count_duplicates(map(_entries, lanes), doubted, primary)

    def _segments(self) -> defaultdict[str, list[Segment]]:
        """Returns the segments of the ledger by writer, and finds out which of them are lanes of this run."""
        found: defaultdict[str, list[Segment]] = defaultdict(list)
        for segment in list_segments(self._folder):
            found[segment.writer].append(segment)
            if not segment.number and segment.writer not in self._seen and segment.writer.startswith(Role.SYPHON):
                self._find_lane(segment)
        return found

    def _find_lane(self, segment: Segment) -> None:
        """Remembers which lane has written this segment, if it was a lane. The segment is the first of its writer.

        A writer that has recorded nothing yet is looked at again.
        """
        first = next((entry for entry in _entries([segment]) if not isinstance(entry, SegmentHeader)), None)
        if first is not None:
            self._seen.add(segment.writer)
        if isinstance(first, State) and first.event == LANE_STARTED:
            found = first.facts
            lane = LaneTry(str(found["plan"]), str(found["queue"]), int(found["lane"]), int(found["try"]))
            self._lanes[lane] = segment.writer


def _entries(segments: Iterable[Segment]) -> Iterator[Entry]:
    return (entry for segment in segments for entry in read_segment(segment, lambda _: None))


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
                    uncompleted[_path(entry, primary)] -= Counter(entry.ids)
            case Movement():
                found.add_move(entry, _path(entry, primary))
            case _:
                pass
    for intent in begun.values():
        found.of(intent.entity).possible_duplicates += len(intent.ids)
    for path, ids in uncompleted.items():
        found.of(path).possible_duplicates += ids.total()
    return found


def _path(entry: Operation | Movement, primary: str) -> str:
    """Returns the path of the destination of an entry about the backlog."""
    return (entry.destination or "").removeprefix(f"{primary}/")


def _arrived_and_failed(intent: Intent | Operation, outcome: Outcome | Operation) -> tuple[Counter[str], Counter[str]]:
    """Returns the ids of the messages of an operation that succeeded, and of the others."""
    failed = Counter(outcome.failed or (() if outcome.result == OK else intent.ids))
    return Counter(intent.ids) - failed, failed


# --- by message ------------------------------------------------------------------------------------------------------

_Key = tuple[str, str]
"""The path of a destination, and the id of a message."""


class _Recorded(Enum):
    """What a lane recorded about a message."""

    DELIVERED = "delivered"
    MAYBE_DELIVERED = "maybe delivered"
    COMPLETED = "completed"
    LOCK_LOST = "lock lost"


def _recorded(entries: Iterable[Entry], primary: str) -> Iterator[tuple[_Key, _Recorded, int]]:
    """Yields what the entries of one lane say about each message, and how often. The lane must have ended."""
    begun: dict[str, Intent] = {}
    for entry in entries:
        match entry:
            case Intent(stage=Stage.RETURN_PRIMARY):
                begun[entry.id] = entry
            case Outcome() if entry.id in begun:
                yield from _recorded_send(begun.pop(entry.id), entry)
            case Operation(stage=Stage.RETURN_PRIMARY):
                yield from _recorded_send(entry, entry)
            case Operation(stage=Stage.COMPLETE_BACKLOG):
                for name, count in _arrived_and_failed(entry, entry)[0].items():
                    yield (_path(entry, primary), name), _Recorded.COMPLETED, count
            case Movement(move=Move.POSSIBLE_DUPLICATE):
                for name in entry.ids:
                    yield (_path(entry, primary), name), _Recorded.LOCK_LOST, 1
            case _:
                pass
    for intent in begun.values():
        for name in intent.ids:
            yield (intent.entity, name), _Recorded.MAYBE_DELIVERED, 1


def _recorded_send(intent: Intent | Operation, outcome: Outcome | Operation) -> Iterator[tuple[_Key, _Recorded, int]]:
    arrived, failed = _arrived_and_failed(intent, outcome)
    for name, count in arrived.items():
        yield (intent.entity, name), _Recorded.DELIVERED, count
    if outcome.result == UNKNOWN:
        for name, count in failed.items():
            yield (intent.entity, name), _Recorded.MAYBE_DELIVERED, count


def doubted_messages(entries: Iterable[Entry], primary: str) -> set[_Key]:
    """Returns the messages of one lane that another lane has possibly delivered too, or will deliver. Pure."""
    doubted: set[_Key] = set()
    uncompleted: Counter[_Key] = Counter()
    for key, recorded, count in _recorded(entries, primary):
        if recorded is _Recorded.DELIVERED:
            uncompleted[key] += count
        elif recorded is _Recorded.COMPLETED:
            uncompleted[key] -= count
            if not uncompleted[key]:
                del uncompleted[key]
        else:
            doubted.add(key)
    return doubted | set(uncompleted)


def count_duplicates(lanes: Iterable[Iterable[Entry]], doubted: Container[_Key], primary: str) -> Counter[str]:
    """Returns by path how often the messages in `doubted` were possibly delivered beyond the first time. Pure.

    `lanes` has the entries of each lane of a run. The rule is that of the balance: a message that the primary certainly
    or possibly accepted n times has n - 1 duplicates. It has at least one if it was delivered and its completion is not
    certain.
    """
    sums: defaultdict[_Key, Counter[_Recorded]] = defaultdict(Counter)
    for entries in lanes:
        for key, recorded, count in _recorded(entries, primary):
            if key in doubted:
                sums[key][recorded] += count
    found: Counter[str] = Counter()
    for (path, _), counts in sums.items():
        delivered = counts[_Recorded.DELIVERED]
        is_uncertain = delivered > 0 and (counts[_Recorded.LOCK_LOST] > 0 or not counts[_Recorded.COMPLETED])
        found[path] += max(delivered + counts[_Recorded.MAYBE_DELIVERED] - 1, int(is_uncertain))
    return found
