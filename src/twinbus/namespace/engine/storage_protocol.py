"""The protocol between engine and store: stored messages (rows), and the reads and writes of a decision.

The engine makes reads and writes; a store answers and applies them. All instants are milliseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

from twinbus.amqp import decode_all, encode

COPY_BYTES: Final = 64
"""Bytes charged for a row that shares its body: the measured size of such a row on disk (docs/decisions/0005)."""


class QueueLane(IntEnum):
    """Which part of a queue a message is in. A locked message stays in its lane: locks are in memory only."""

    ACTIVE = 0
    DEFERRED = 1
    SCHEDULED = 2
    DEAD = 3
    DEAD_DEFERRED = 4
    TRANSFER_DEAD = 5
    TRANSFER_DEAD_DEFERRED = 6


class Row(NamedTuple):
    """One stored message. Its key is (queue, lane, seq).

    `queue` is the storage id of the entity. `seq` alone is unique within a queue.
    """

    queue: int
    lane: int
    seq: int
    origin_seq: int
    """Sequence number given by the entity that accepted the message first (the topic, for a subscription)."""
    enqueued: int
    expires: int | None
    """When the time to live ends; None for never."""
    due: int | None
    """When a SCHEDULED message becomes active; None in every other lane."""
    session: str | None
    delivery_count: int
    size: int
    """The length of the encoded message."""
    overlay: bytes | None
    """AMQP-encoded map of application properties that settlement set, such as the dead-letter reason."""
    body: int | None
    """Id of a body that several rows share (topics): `raw` is stored once, under this id. None: `raw` is not shared."""
    raw: bytes
    """The encoded message as accepted. b'' in the answer to a read without raw."""

    @classmethod
    def new(
        cls,
        *,
        queue: int,
        lane: int,
        seq: int,
        origin_seq: int,
        enqueued: int,
        expires: int | None,
        due: int | None = None,
        session: str | None,
        overlay: bytes | None = None,
        body: int | None = None,
        raw: bytes,
    ) -> Row:
        """Return the row of a message that was never delivered."""
        # The only call with arguments by position: with keywords, making a named tuple takes four times as long, and
        # every message needs a row.
        return cls(queue, lane, seq, origin_seq, enqueued, expires, due, session, 0, len(raw), overlay, body, raw)

    @property
    def charge(self) -> int:
        """Bytes charged against the quota of the queue. A shared body itself is charged to the topic, once."""
        return self.size if self.body is None else COPY_BYTES

    def is_overdue(self, now: int) -> bool:
        """Whether the time to live is over."""
        return self.expires is not None and self.expires <= now

    def is_expired(self, now: int) -> bool:
        """Whether the time to live of an active message is over. (A deferred message expires when it is received.)"""
        return self.lane == QueueLane.ACTIVE and self.expires is not None and self.expires <= now

    def without_raw(self) -> Row:
        """Return the row without the encoded message, to save memory."""
        return self._replace(raw=b"")


# --- overlays ----------------------------------------------------------------------------------------------------

# An overlay is an AMQP-encoded map that is stored with a message, because the encoded message is never rewritten. The
# overlay contains application properties that settlement set (the front merges these properties into the message at
# delivery), and how often the message was forwarded.

_FORWARD_COUNT: Final = 0
"""Key of the number of forwards in an overlay. No application property has an integer as its name."""


def merge_overlay(overlay: bytes | None, properties: Mapping[str, Any] | None) -> bytes | None:
    """Return the overlay with these properties set."""
    if not properties:
        return overlay
    return encode({**(decode_all(overlay) if overlay else {}), **properties})


def overlay_properties(overlay: bytes | None) -> dict[str, Any] | None:
    """Return the application properties in an overlay; None if the overlay has none."""
    if overlay is None:
        return None
    return {key: value for key, value in decode_all(overlay).items() if key != _FORWARD_COUNT} or None


def forward_count(overlay: bytes | None) -> int:
    """Return how often the message was forwarded."""
    return 0 if overlay is None else int(decode_all(overlay).get(_FORWARD_COUNT, 0))


def forward_count_overlay(count: int) -> bytes:
    """Return the overlay of a message that was forwarded `count` times."""
    return encode({_FORWARD_COUNT: count})


# --- reads -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NextRows:
    """Read rows of one lane with seq > after, in the order of seq. Answer: list[Row].

    The answer has at most `limit` rows and `max_bytes` bytes, but the first row is never left out for its size. With
    `session`, only rows of this session are read.
    """

    queue: int
    lane: int
    after: int
    limit: int
    max_bytes: int
    session: str | None = None


def distinct(seqs: Iterable[int]) -> tuple[int, ...]:
    """Return the sequence numbers without repetitions, in their order."""
    # The keys are texts: a peer could choose integers that all collide in a dict (X1).
    return tuple({str(seq): seq for seq in seqs}.values())


@dataclass(frozen=True, slots=True)
class RowsBySeq:
    """Read the rows with these sequence numbers, in this order, from any of these lanes. Answer: list[Row].

    A number without a row is left out.
    """

    queue: int
    lanes: tuple[int, ...]
    seqs: tuple[int, ...]
    with_raw: bool = True


@dataclass(frozen=True, slots=True)
class BrowseRows:
    """Read rows of all these lanes with seq >= start, in the order of seq. Answer: list[Row].

    `limit`, `max_bytes` and `session` have the same meaning as in NextRows.
    """

    queue: int
    lanes: tuple[int, ...]
    start: int
    limit: int
    max_bytes: int
    session: str | None = None


@dataclass(frozen=True, slots=True)
class ExpiredRows:
    """Read ACTIVE rows with expires <= at, oldest expiry first, without raw. Answer: DueAnswer.

    Deferred messages are left out: a deferred message expires when it is received by its number.
    """

    queue: int
    at: int
    limit: int


@dataclass(frozen=True, slots=True)
class DueRows:
    """Read SCHEDULED rows with due <= at, in the order of (due, seq), with raw. Answer: DueAnswer.

    `limit` and `max_bytes` have the same meaning as in NextRows.
    """

    queue: int
    at: int
    limit: int
    max_bytes: int


class DueAnswer(NamedTuple):
    """The answer to ExpiredRows and DueRows.

    `next_at` is the instant (`expires` or `due`) of the first row that is not in `rows`; None if there is no such row.
    """

    rows: list[Row]
    next_at: int | None


@dataclass(frozen=True, slots=True)
class WaitingSessions:
    """Read the ids of sessions with ACTIVE rows and id > after ('': from the start), ascending. Answer: list[str]."""

    queue: int
    after: str
    limit: int


@dataclass(frozen=True, slots=True)
class StoredSessions:
    """Read the ids of sessions with rows in ACTIVE, DEFERRED or SCHEDULED, or with a state. Answer: list[str], sorted.

    With `state_since`, only sessions whose state was set after this instant are read.
    """

    queue: int
    skip: int
    limit: int
    state_since: int | None = None


@dataclass(frozen=True, slots=True)
class StoredSessionState:
    """Read the state of a session. Answer: bytes | None."""

    queue: int
    session: str


@dataclass(frozen=True, slots=True)
class KnownIds:
    """Read which of these message ids were seen at or after `since` (duplicate detection). Answer: set[str]."""

    queue: int
    ids: tuple[str, ...]
    since: int


StoreRead = (
    NextRows
    | RowsBySeq
    | BrowseRows
    | ExpiredRows
    | DueRows
    | WaitingSessions
    | StoredSessions
    | StoredSessionState
    | KnownIds
)

# --- writes ----------------------------------------------------------------------------------------------------


class PutRow(NamedTuple):
    """Insert a row. If `row.body` is set, a PutBody of the same or an earlier commit writes the body."""

    row: Row


class PutBody(NamedTuple):
    """Write a body that several rows share. When its last row is dropped, the store drops it and reports the bytes."""

    body: int
    raw: bytes
    topic: int
    """The storage id of the topic that is charged for the body."""


class DropRow(NamedTuple):
    """Remove a row."""

    queue: int
    lane: int
    seq: int


class MoveRow(NamedTuple):
    """Change the key (lane, seq) of a row to (to_lane, to_seq), and the columns named by the fields after these.

    The columns raw, body, session and size do not change.
    """

    queue: int
    lane: int
    seq: int
    to_lane: int
    to_seq: int
    enqueued: int
    expires: int | None
    delivery_count: int
    overlay: bytes | None


class PutCounters(NamedTuple):
    """Set the counters of a queue to these numbers. Every commit that changes the queue contains this write."""

    queue: int
    next_seq: int
    active: int
    deferred: int
    scheduled: int
    dead: int
    dead_deferred: int
    size: int
    accessed: int
    transfer_dead: int = 0
    transfer_dead_deferred: int = 0


class PutEntity(NamedTuple):
    """Create or replace the record of an entity. `queue` is its storage id, `text` its description as JSON."""

    queue: int
    kind: str
    path: str
    text: str
    created: int
    updated: int


class DropEntity(NamedTuple):
    """Remove the record of an entity and everything stored under its storage id."""

    queue: int


class PutSessionState(NamedTuple):
    """Set the state of a session; None removes the state."""

    queue: int
    session: str
    state: bytes | None
    at: int


class PutSeenId(NamedTuple):
    """Remember a message id for duplicate detection."""

    queue: int
    message_id: str
    at: int


class ForgetSeenIds(NamedTuple):
    """Drop message ids that were seen before `before`."""

    queue: int
    before: int


StoreWrite = (
    PutRow
    | PutBody
    | DropRow
    | MoveRow
    | PutCounters
    | PutEntity
    | DropEntity
    | PutSessionState
    | PutSeenId
    | ForgetSeenIds
)


class StoredEntity(NamedTuple):
    """What a store returns about each entity when it is opened: record, counters, and when the first rows are due."""

    entity: PutEntity
    queue: PutCounters
    next_expiry: int | None
    next_due: int | None
    shared_bytes: int = 0
    """Bytes of the bodies that the subscriptions of a topic share."""


class OpenedStore(NamedTuple):
    """What a store returns when it is opened. The size of this data does not depend on the number of messages."""

    entities: list[StoredEntity]
    next_queue: int
    """The storage id of the next new entity: greater than all ids ever used. Ids are not reused, so a late write to a
    deleted entity cannot change a newer entity."""
    next_body: int
