"""The schema of the ledger: one class per kind of entry. docs/ledger.md describes the same schema in prose.

A field name has one type in all kinds. `json_lines` turns entries into lines of text and back. This module is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final

SCHEMA_VERSION: Final = 1

OK: Final = "ok"
UNKNOWN: Final = "unknown"
"""Result of an operation that may or may not have happened: a timeout, a connection lost before the answer, a crash."""

PAIRED: Final = "paired"
"""Event of a `State` entry: a pair was made. The facts are the options that its cost depends on."""
AUDITED: Final = "audited"
"""Event of a `State` entry: an audit has ended. The facts are its counts (L3)."""
SYPHON_STARTED: Final = "syphon_started"
"""Event of a `State` entry: a syphon starts. The facts are the options that its cost depends on."""

UNIT_BYTES: Final = 64 * 1024
"""Size of a billable unit (M2)."""


def result_of_failure(kind: str, *, refused: bool) -> tuple[str, str | None]:
    """Returns result and cause of an operation that failed with this kind of failure.

    `refused`: the operation was certainly not carried out. If `refused` is False, the result is UNKNOWN.
    """
    return (kind, None) if refused and kind != UNKNOWN else (UNKNOWN, kind)


def billable_units(messages: int, size: int | Sequence[int] = 0) -> int:
    """Returns the billable units of one operation (M2): one per started 64 KB of each message, at least one.

    `size` is a list of message sizes, or the total of all messages. With a total, the result is the most that any
    distribution of the total over the messages could cost.
    """
    if isinstance(size, int):
        count = messages or 1
        return count if size <= UNIT_BYTES else count + max(size - count, 0) // UNIT_BYTES
    return max(messages, sum(max(1, -(-one // UNIT_BYTES)) for one in size), 1)


Fact = str | int | float | bool
"""A value in the facts of a `State` entry."""


class Role(StrEnum):
    """What kind of program wrote a segment."""

    CLIENT = "client"
    SYPHON = "syphon"
    NAMESPACE = "namespace"
    DEADLETTER = "deadletter"
    AUDIT = "audit"


class Stage(StrEnum):
    """What an operation was for (M1)."""

    SEND_PRIMARY = "send_primary"
    SEND_BACKLOG = "send_backlog"
    RECEIVE_BACKLOG = "receive_backlog"
    EMPTY_RECEIVE = "empty_receive"
    COMPLETE_BACKLOG = "complete_backlog"
    SETTLE_BACKLOG = "settle_backlog"
    RENEW_BACKLOG = "renew_backlog"
    RECEIVE_DEFERRED = "receive_deferred"
    PEEK_BACKLOG = "peek_backlog"
    RESUBMIT_BACKLOG = "resubmit_backlog"
    RETURN_PRIMARY = "return_primary"
    RECEIVE_PRIMARY = "receive_primary"
    COMPLETE_PRIMARY = "complete_primary"
    SETTLE_PRIMARY = "settle_primary"
    RENEW_PRIMARY = "renew_primary"
    PEEK_PRIMARY = "peek_primary"
    SCHEDULE_PRIMARY = "schedule_primary"
    CANCEL_PRIMARY = "cancel_primary"
    PING = "ping"
    MANAGE = "manage"


class Move(StrEnum):
    """What happened to messages apart from the outcome of an operation."""

    DEAD_LETTERED = "dead_lettered"
    RESUBMITTED = "resubmitted"
    REDIRECTED = "redirected"
    POSSIBLE_DUPLICATE = "possible_duplicate"
    KEPT = "kept"
    FOUND = "found"
    """An audit saw the message in the backlog, although its place was unknown or nobody had reported it safe (L3)."""
    LOST = "lost"
    """An audit did not find the message where the ledger has it, and no entry explains this (L3)."""
    REAPPEARED = "reappeared"
    """An audit saw the message in the backlog after an earlier audit had recorded it as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    at: int
    """Milliseconds since the epoch."""
    id: str
    """The id is unique among the entries of one kind. If a line was written twice, both lines have the same id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader(_Entry):
    """The first line of every segment: which writer wrote the lines that follow."""

    kind: ClassVar[str] = "header"
    writer: str
    role: Role
    host: str
    pid: int
    version: str
    segment: int
    durability: str | None = None
    """`LedgerOptions.durability` of the writer; None if an older Twinbus wrote the segment: the same as "lazy"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(_Entry):
    """The last line of a writer that was closed.

    If a writer has no such line, the writer is still running, or it ended and its queued entries are lost.
    """

    kind: ClassVar[str] = "closed"
    writer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(_Entry):
    """The last line of a segment that its writer left open. Another writer appended the line, and sealed the segment.

    A writer on another host that was silent for a long time may have been taken for dead. It goes on with its next
    segment: then the ledger has a header of this writer with a higher number than `segment`.
    """

    kind: ClassVar[str] = "ended"
    writer: str
    """The writer that has ended."""
    by: str
    """The writer that appended this line."""
    segment: int
    """The number of the segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent(_Entry):
    """An operation that has begun. `id` is the operation id; the `Outcome` has the same id."""

    kind: ClassVar[str] = "intent"
    stage: Stage
    namespace: str
    entity: str
    ids: tuple[str, ...]
    bytes: int
    units: int
    destination: str | None = None
    """The entity on the primary that the messages are meant for, as `namespace/entity`; None if this is `entity`."""
    broker_at: int | None = None
    """When the operation began by the clock of the broker that holds the backlog (L5), in milliseconds since the epoch.
    Only returns of messages have it, and completions of unknown outcome."""
    waited: tuple[int, ...] = ()
    """For each of `ids`, the milliseconds from its arrival in the backlog to `broker_at`, by the same clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(_Entry):
    """How an operation ended."""

    kind: ClassVar[str] = "outcome"
    seconds: float
    result: str
    """`ok`, `unknown`, or a word for the reason why the operation did not happen."""
    cause: str | None = None
    """The reason for `unknown`."""
    failed: tuple[str, ...] = ()
    """If not empty, `result` is only for these message ids, and the operation succeeded for the other ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(_Entry):
    """Intent and outcome in one line, for an operation that ended before its intent was written.

    `at` is when the operation began. The other fields are the same as in `Intent` and `Outcome`.
    """

    kind: ClassVar[str] = "operation"
    stage: Stage
    namespace: str
    entity: str
    ids: tuple[str, ...]
    bytes: int
    units: int
    destination: str | None = None
    broker_at: int | None = None
    waited: tuple[int, ...] = ()
    seconds: float
    result: str
    cause: str | None = None
    failed: tuple[str, ...] = ()
    count: int | None = None
    """Number of messages, if the operation had messages and does not name their ids; otherwise None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State(_Entry):
    """A change of state: an event of S11 with its facts."""

    kind: ClassVar[str] = "state"
    event: str
    pair: str
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement(_Entry):
    """A move of messages from `source` to `destination`, both `namespace/entity`.

    `destination` is the entity that the messages are meant for. For redirected messages, `source` is the entity that
    the messages were meant for before the redirect.
    """

    kind: ClassVar[str] = "movement"
    move: Move
    ids: tuple[str, ...]
    source: str
    destination: str
    reason: str | None = None
    op: str | None = None
    broker_at: int | None = None
    """A time at which the messages were in the backlog, by the clock of the broker (L5), in milliseconds since the
    epoch. Only moves that show that a message was there have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metered(_Entry):
    """The operations of one kind that a namespace served on one entity from `since` until `until` (N5)."""

    kind: ClassVar[str] = "metered"
    namespace: str
    entity: str
    operation: str
    count: int
    bytes: int
    units: int
    since: int
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(_Entry):
    """A number of entries that could not be written."""

    kind: ClassVar[str] = "gap"
    count: int
    since: int
    until: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(_Entry):
    """A number of segments that were deleted, oldest first, to keep the disk budget."""

    kind: ClassVar[str] = "dropped"
    count: int
    bytes: int
    since: int
    until: int


Entry = SegmentHeader | Closed | Ended | Intent | Outcome | Operation | State | Movement | Metered | Gap | Dropped
ENTRY_KINDS: Final[Mapping[str, type[Entry]]] = {
    entry.kind: entry
    for entry in (SegmentHeader, Closed, Ended, Intent, Outcome, Operation, State, Movement, Metered, Gap, Dropped)
}
