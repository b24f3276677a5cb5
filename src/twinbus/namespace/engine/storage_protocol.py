"""The protocol between engine and store: stored messages (rows), the reads a decision needs, the writes it makes.

The engine makes reads and writes; a store answers and applies them. All instants are milliseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

from twinbus.amqp import decode_all, encode

COPY_BYTES: Final = 64
"""Bytes charged for a copy that shares its body: a row of the store without a body, as measured (decision 5)."""


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
    """Id of a body that several rows share (topics): `raw` is stored once, under this id. None: the row has its own."""
    raw: bytes
    """The encoded message as accepted. b'' if a read did not ask for it."""

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
        # By position, here only: a named tuple takes four times as long with keywords, and a row is made per message.
        return cls(queue, lane, seq, origin_seq, enqueued, expires, due, session, 0, len(raw), overlay, body, raw)

    @property
    def charge(self) -> int:
        """Bytes charged against the quota of the queue. For a shared body the topic is charged, once."""
        return self.size if self.body is None else COPY_BYTES

    def is_overdue(self, now: int) -> bool:
        """Whether the time to live is over."""
        return self.expires is not None and self.expires <= now

    def is_expired(self, now: int) -> bool:
        """Whether the message expires without a request: a deferred message does so only when it is received."""
        return self.lane == QueueLane.ACTIVE and self.expires is not None and self.expires <= now

    def without_raw(self) -> Row:
        """Return the row without the encoded message, to save memory."""
        return self._replace(raw=b"")


# --- overlays ----------------------------------------------------------------------------------------------------

# An overlay is an AMQP-encoded map beside a message, which is never rewritten itself. It holds application properties
# that settlement set (the front merges them into the message at delivery), and how often the message was forwarded.

_FORWARD_COUNT: Final = 0
"""Key of the number of forwards in an overlay. No application property has an integer as its name."""


def merge_overlay(overlay: bytes | None, properties: Mapping[str, Any] | None) -> bytes | None:
    """Return the overlay with these properties set."""
    if not properties:
        return overlay
    return encode({**(decode_all(overlay) if overlay else {}), **properties})


def overlay_properties(overlay: bytes | None) -> dict[str, Any] | None:
    """Return the application properties in an overlay; None if it has none."""
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
    """Read rows of one lane with seq > after, by seq, at most `limit` and about `max_bytes` (at least one row).

    With `session`, only rows of this session. Answer: list[Row].
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
    """Read rows by sequence number from any of these lanes, in this order; missing ones are left out. list[Row]."""

    queue: int
    lanes: tuple[int, ...]
    seqs: tuple[int, ...]
    with_raw: bool = True


@dataclass(frozen=True, slots=True)
class BrowseRows:
    """Read rows of any of these lanes with seq >= start, by seq, bounded like NextRows. Answer: list[Row]."""

    queue: int
    lanes: tuple[int, ...]
    start: int
    limit: int
    max_bytes: int
    session: str | None = None


@dataclass(frozen=True, slots=True)
class ExpiredRows:
    """Read ACTIVE rows with expires <= at, oldest expiry first, without raw. Answer: DueAnswer.

    Deferred messages are left out: they expire when they are received by number.
    """

    queue: int
    at: int
    limit: int


@dataclass(frozen=True, slots=True)
class DueRows:
    """Read SCHEDULED rows with due <= at, by (due, seq), with raw, bounded like NextRows. Answer: DueAnswer."""

    queue: int
    at: int
    limit: int
    max_bytes: int


class DueAnswer(NamedTuple):
    """Rows that are due, and the instant of the next row that is not in `rows` (None: there is none)."""

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
    """Read the ids of sessions with rows in ACTIVE, DEFERRED or SCHEDULED, or with a state, ascending. list[str].

    With `state_since`, only sessions whose state was set after this instant.
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
    """Write a body that several rows share. The store drops the body with its last row, and reports the freed bytes."""

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
    """Change the key (lane, seq) of a row, and these columns. raw, body, session and size stay."""

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
    """Set the counters of a queue to these figures. Written with every commit that changes the queue."""

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
    """Set the state of a session, or clear it with None."""

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
    """What a store returns about each entity when it is opened: record, counters, and the next instants of interest."""

    entity: PutEntity
    queue: PutCounters
    next_expiry: int | None
    next_due: int | None
    shared_bytes: int = 0
    """Bytes of the bodies that the subscriptions of a topic share."""


class OpenedStore(NamedTuple):
    """What a store returns when it is opened. Its size does not depend on the number of messages."""

    entities: list[StoredEntity]
    next_queue: int
    """Above every storage id ever used. Ids are not reused, so a late write cannot change a newer entity."""
    next_body: int
