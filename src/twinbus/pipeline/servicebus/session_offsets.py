"""The offset of a stream that reads sessions: for each session, the sequence numbers of the batch.

The messages of one session rarely have consecutive numbers, so the text form of `SequenceNumbers` would be long. Here
each run of numbers is written as its distance from the last number of the run before it (from 0 for the first run),
followed by `+n` if n more numbers follow its first number: the numbers 100 to 103, 110 and 118 are `100+3,7,8`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from twinbus.pipeline.servicebus.offsets import ENTITY, OffsetError, SequenceNumbers

_RUN: Final = re.compile(r"(\d+)(?:\+(\d+))?")
_SESSIONS, _UNCOMPLETED, _NEWEST, _NEWEST_UNCOMPLETED = "sessions", "uncompleted", "newest", "newest_uncompleted"

BySession = Mapping[str, SequenceNumbers]
"""Sequence numbers by the id of their session."""


def to_distances(numbers: SequenceNumbers) -> str:
    """Returns the text form that this module describes."""
    parts: list[str] = []
    before = 0
    for first, last in numbers.runs():
        parts.append(f"{first - before}" if first == last else f"{first - before}+{last - first}")
        before = last
    return ",".join(parts)


def from_distances(text: str) -> SequenceNumbers:
    """Returns the numbers of a text form. Raises OffsetError if the text has another form."""
    runs: list[tuple[int, int]] = []
    before = 0
    for part in text.split(",") if text else ():
        found = _RUN.fullmatch(part)
        if found is None or (runs and found[1].strip("0") == ""):
            raise OffsetError(f"the offset of a servicebus stream has the part {part!r}, which is no distance")
        first = before + int(found[1])
        before = first + int(found[2] or 0)
        runs.append((first, before))
    return SequenceNumbers(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOffset:
    """The end of one batch of a stream that reads sessions."""

    read: BySession = field(default_factory=dict)
    """The messages of the batch."""
    uncompleted: BySession = field(default_factory=dict)
    """Messages of earlier batches whose completion was not confirmed when this batch was planned."""
    newest: int | None = None
    """The latest enqueued time, in ms, of all messages in `read` and `uncompleted`. If a message with one of these
    numbers was enqueued later, it is a different message: the queue was deleted and created again."""
    newest_uncompleted: Mapping[str, int] = field(default_factory=dict)
    """The same for each session in `uncompleted`. For a session that is missing here, `newest` holds: an earlier
    version has written the offset, or no message of the session has an enqueued time."""
    entity: str | None = None
    """`SourceOptions.qualified_address` of the stream; None in an offset of an earlier version."""

    def newest_of(self, session: str) -> int | None:
        """Returns the latest enqueued time of the messages of a session in this offset."""
        return self.newest if session in self.read else self.newest_uncompleted.get(session, self.newest)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """Returns an offset of the checkpoint. Raises OffsetError if it is not the offset of a stream of sessions."""
        sessions, uncompleted, newest = values.get(_SESSIONS), values.get(_UNCOMPLETED, {}), values.get(_NEWEST)
        times = values.get(_NEWEST_UNCOMPLETED, {})
        if sessions is None:
            raise OffsetError(
                "the checkpoint belongs to a servicebus stream that was started without the option sessions",
                "Start this stream with a new checkpoint, or without the option sessions.",
            )
        are_maps = all(isinstance(value, dict) for value in (sessions, uncompleted, times))
        if not are_maps or not all(isinstance(time, int | None) for time in (newest, *times.values())):
            raise OffsetError(f"the checkpoint has no offset of a servicebus stream, but {dict(values)!r}")
        return cls(
            read=_numbers(sessions),
            uncompleted=_numbers(uncompleted),
            newest=newest,
            newest_uncompleted=dict(times),
            entity=values.get(ENTITY),
        )

    def to_json(self) -> dict[str, Any]:
        # Without `through`, which every other offset has: an earlier version refuses this one.
        values: dict[str, Any] = {_SESSIONS: _texts(self.read)}
        if self.uncompleted:
            values[_UNCOMPLETED] = _texts(self.uncompleted)
        if self.newest is not None:
            values[_NEWEST] = self.newest
        if self.newest_uncompleted:
            values[_NEWEST_UNCOMPLETED] = dict(self.newest_uncompleted)
        if self.entity is not None:
            values[ENTITY] = self.entity
        return values


def merged(some: BySession, others: BySession) -> dict[str, SequenceNumbers]:
    """Returns the numbers of both. Sessions without numbers are left out."""
    both = dict(some)
    for session, numbers in others.items():
        both[session] = both[session] | numbers if session in both else numbers
    return {session: numbers for session, numbers in both.items() if numbers}


def _numbers(texts: Mapping[str, str]) -> dict[str, SequenceNumbers]:
    return {session: from_distances(text) for session, text in texts.items()}


def _texts(sessions: BySession) -> dict[str, str]:
    return {session: to_distances(numbers) for session, numbers in sessions.items()}
