"""Sets of sequence numbers, and the offset of a stream read, which contains such sets.

After a restart, the offsets in the checkpoint are all that a stream read knows about its past. So the offset at the end
of a batch names every sequence number of that batch: a repeated batch reads the same messages, and a commit completes
these messages and no others. `source` explains when each part of an offset is used.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from twinbus.errors import OperatorError

_TEXT: Final = re.compile(r"(\d+)(?:-(\d+))?")


class OffsetError(OperatorError, ValueError):
    """An offset in the checkpoint that this version cannot read."""


class SequenceNumbers:
    """An immutable set of sequence numbers, stored as runs of consecutive numbers.

    The sequence numbers of a queue are consecutive, so 10,000 messages are often one run. The text form is `5-9,12`:
    first and last number of each run, or only one number if both are equal.
    """

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """`runs` are pairs (first, last) in ascending order. Runs that touch or overlap become one run."""
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in runs:
            if self._lasts and first <= self._lasts[-1] + 1:
                self._lasts[-1] = max(last, self._lasts[-1])
            else:
                self._firsts.append(first)
                self._lasts.append(last)

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Self:
        return cls((number, number) for number in sorted(numbers))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the set of a text form. Raises OffsetError if the text has another form."""
        runs: list[tuple[int, int]] = []
        for part in text.split(",") if text else ():
            found = _TEXT.fullmatch(part)
            if found is None:
                raise OffsetError(f"the offset of a servicebus stream has the part {part!r}, which is no range")
            first = int(found[1])
            last = first if found[2] is None else int(found[2])
            if last < first or (runs and first <= runs[-1][1]):
                raise OffsetError(f"the ranges of a servicebus offset are out of order at {part!r}")
            runs.append((first, last))
        return cls(runs)

    def __str__(self) -> str:
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.runs())

    def __repr__(self) -> str:
        return f"Numbers({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequenceNumbers) and (self._firsts, self._lasts) == (other._firsts, other._lasts)

    def __hash__(self) -> int:
        return hash(tuple(self._firsts))

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.runs())

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._firsts, number) - 1
        return place >= 0 and number <= self._lasts[place]

    def __or__(self, other: SequenceNumbers) -> SequenceNumbers:
        return SequenceNumbers(sorted([*self.runs(), *other.runs()]))

    def __sub__(self, other: SequenceNumbers) -> SequenceNumbers:
        return SequenceNumbers(self._without(other))

    def _without(self, other: SequenceNumbers) -> Iterator[tuple[int, int]]:
        place = 0
        for first, last in self.runs():
            start = first
            while place < len(other._firsts) and other._lasts[place] < start:
                place += 1
            at = place
            while at < len(other._firsts) and other._firsts[at] <= last:
                if other._firsts[at] > start:
                    yield start, other._firsts[at] - 1
                start = other._lasts[at] + 1
                at += 1
            if start <= last:
                yield start, last

    def runs(self) -> Iterator[tuple[int, int]]:
        """Returns the first and last number of each run, in ascending order."""
        return zip(self._firsts, self._lasts, strict=True)

    @property
    def run_count(self) -> int:
        return len(self._firsts)

    @property
    def first(self) -> int:
        """The lowest number. The set must not be empty."""
        return self._firsts[0]

    @property
    def last(self) -> int:
        """The highest number. The set must not be empty."""
        return self._lasts[-1]

    def at_or_after(self, number: int) -> int | None:
        """Returns the lowest number of the set that is not below `number`; None if there is none."""
        place = bisect_right(self._firsts, number) - 1
        if place >= 0 and number <= self._lasts[place]:
            return number
        return self._firsts[place + 1] if place + 1 < len(self._firsts) else None

    def parts(self, count: int) -> list[SequenceNumbers]:
        """Returns the set divided into at most `count` sets of about the same size. None of these is empty."""
        size = max(1, -(-len(self) // count))
        parts: list[list[tuple[int, int]]] = []
        room = 0
        for first, last in self.runs():
            start = first
            while start <= last:
                if not room:
                    parts.append([])
                    room = size
                end = min(last, start + room - 1)
                parts[-1].append((start, end))
                room -= end - start + 1
                start = end + 1
        return [SequenceNumbers(part) for part in parts]


NONE: Final = SequenceNumbers()

_THROUGH, _FROM, _READ, _UNCOMPLETED, _NEWEST, _KEEP = "through", "from", "read", "uncompleted", "newest", "keep"
ENTITY: Final = "entity"
"""The field of an offset that names the entity of the stream."""
_SESSIONS: Final = "sessions"  # only in a SessionOffset


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """The end of one batch of a stream read."""

    through: int
    """The highest sequence number that was read. An offset of an earlier version has only this field."""
    start: int | None = None
    """The first sequence number that the stream reads; None in an offset of an earlier version."""
    read: SequenceNumbers = field(default=NONE)
    """The sequence numbers of all messages of the batch."""
    uncompleted: SequenceNumbers = field(default=NONE)
    """Messages of earlier batches whose completion was not confirmed when this batch was planned."""
    newest: int | None = None
    """The latest enqueued time, in ms, of all messages in `read` and `uncompleted`. If a message with one of these
    numbers was enqueued later, it is a different message: the queue was deleted and created again."""
    keep: bool = False
    """Whether the batch was planned with completeCommitted=false: its messages are never completed."""
    entity: str | None = None
    """`SourceOptions.qualified_address` of the stream; None in an offset of an earlier version."""

    @property
    def is_of_earlier_version(self) -> bool:
        return self.start is None

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """Returns an offset of the checkpoint. Raises OffsetError if no version of Twinbus has written it."""
        through, start, newest = values.get(_THROUGH), values.get(_FROM), values.get(_NEWEST)
        if _SESSIONS in values:
            raise OffsetError(
                "the checkpoint belongs to a servicebus stream that was started with sessions=true",
                "Set this option, or start the stream with a new checkpoint.",
            )
        if not isinstance(through, int) or not isinstance(start, int | None) or not isinstance(newest, int | None):
            raise OffsetError(f"the checkpoint has no offset of a servicebus stream, but {dict(values)!r}")
        return cls(
            through=through,
            start=start,
            read=SequenceNumbers.parse(values.get(_READ, "")),
            uncompleted=SequenceNumbers.parse(values.get(_UNCOMPLETED, "")),
            newest=newest,
            keep=bool(values.get(_KEEP, False)),
            entity=values.get(ENTITY),
        )

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {_THROUGH: self.through}
        if self.start is not None:
            values[_FROM] = self.start
        if self.read:
            values[_READ] = str(self.read)
        if self.uncompleted:
            values[_UNCOMPLETED] = str(self.uncompleted)
        if self.newest is not None:
            values[_NEWEST] = self.newest
        if self.keep:
            values[_KEEP] = True
        if self.entity is not None:
            values[ENTITY] = self.entity
        return values


def check_entity(recorded: str | None, entity: str) -> None:
    """Raises OffsetError if an offset was recorded by a stream of another entity.

    Sequence numbers mean other messages there: a stream that used them would complete messages that it has not read.
    """
    if recorded is None or recorded == entity:
        return
    raise OffsetError(
        f"the checkpoint belongs to a servicebus stream of {recorded}, and the options name {entity}",
        "Start this stream with a new checkpoint, or name the entity and the namespace as before. "
        "A local namespace on another port is another namespace: `twinbus serve --port` sets the port.",
    )


def latest(*instants: int | None) -> int | None:
    """Returns the latest of these times; None if there is none."""
    return max((instant for instant in instants if instant is not None), default=None)
