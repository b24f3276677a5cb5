"""What the ledger's lines say: one kind per fact. docs/ledger.md is this schema in prose; VERSION counts its versions.

A field has one type in all kinds. How entries become lines is in `encoding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final

SCHEMA_VERSION: Final = 1

OK: Final = "ok"
# The operation may or may not have happened: a time-out, a connection that broke before the answer, a crash.
UNKNOWN: Final = "unknown"


def result_of_failure(kind: str, *, refused: bool) -> tuple[str, str | None]:
    """Result and cause of an operation that failed so: it surely did not happen, or nobody knows."""
    return (kind, None) if refused and kind != UNKNOWN else (UNKNOWN, kind)


Fact = str | int | float | bool


class Role(StrEnum):
    """Who writes."""

    CLIENT = "client"
    SYPHON = "syphon"
    NAMESPACE = "namespace"
    DEADLETTER = "deadletter"


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
    """What became of messages beyond the outcome of one operation."""

    DEAD_LETTERED = "dead_lettered"
    RESUBMITTED = "resubmitted"
    REDIRECTED = "redirected"
    POSSIBLE_DUPLICATE = "possible_duplicate"
    KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """`at`: milliseconds since the epoch. `id`: unique in its kind; a line that was written twice has the same one."""

    at: int
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader(_Entry):
    """The first line of every segment: who wrote the others."""

    kind: ClassVar[str] = "header"
    writer: str
    role: Role
    host: str
    pid: int
    version: str
    segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(_Entry):
    """The last line of a writer that ended in order. Without it, it lives, or what it had not flushed is lost."""

    kind: ClassVar[str] = "closed"
    writer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent(_Entry):
    """An operation that was begun; `id` is its operation id, which the outcome repeats.

    `destination`: `namespace/entity` on the primary of messages that are on their way there, where that is not the
    entity itself.
    """

    kind: ClassVar[str] = "intent"
    stage: Stage
    namespace: str
    entity: str
    ids: tuple[str, ...]
    bytes: int
    units: int
    destination: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(_Entry):
    """How it ended. `result`: "ok", "unknown", or a word for why it did not happen; `cause`: the word behind "unknown".

    `failed`: the result is theirs alone, and the others are well.
    """

    kind: ClassVar[str] = "outcome"
    seconds: float
    result: str
    cause: str | None = None
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(_Entry):
    """Intent and outcome in one line, where it ended before its intent was written. `at` is when it began."""

    kind: ClassVar[str] = "operation"
    stage: Stage
    namespace: str
    entity: str
    ids: tuple[str, ...]
    bytes: int
    units: int
    destination: str | None = None
    seconds: float
    result: str
    cause: str | None = None
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class State(_Entry):
    """Something changed: an event of S11 with its facts."""

    kind: ClassVar[str] = "state"
    event: str
    pair: str
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement(_Entry):
    """`source` and `destination` are `namespace/entity`; the destination is the one the messages are meant for.

    Where they are redirected, the source is the one they were meant for until then.
    """

    kind: ClassVar[str] = "movement"
    move: Move
    ids: tuple[str, ...]
    source: str
    destination: str
    reason: str | None = None
    op: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metered(_Entry):
    """What a namespace served from `since` until `until` (N5): one line per entity and kind with something in it."""

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
    """Entries that could not be written."""

    kind: ClassVar[str] = "gap"
    count: int
    since: int
    until: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(_Entry):
    """Segments that were removed, oldest first, for the disk budget."""

    kind: ClassVar[str] = "dropped"
    count: int
    bytes: int
    since: int
    until: int


Entry = SegmentHeader | Closed | Intent | Outcome | Operation | State | Movement | Metered | Gap | Dropped
ENTRY_KINDS: Final[Mapping[str, type[Entry]]] = {
    kind.kind: kind
    for kind in (SegmentHeader, Closed, Intent, Outcome, Operation, State, Movement, Metered, Gap, Dropped)
}


UNIT_BYTES: Final = 64 * 1024


def billable_units(messages: int, size: int | Sequence[int] = 0) -> int:
    """64 KB or a part of it, of every message; an operation without messages is one.

    `size` is each message's, or all of them together: then the dearest way to share it out.
    """
    if isinstance(size, int):
        return max(messages, 1) + max(size - max(messages, 1), 0) // UNIT_BYTES
    return max(messages, sum(max(1, -(-one // UNIT_BYTES)) for one in size), 1)
