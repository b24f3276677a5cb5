"""The words between engine and store: rows, the rows a decision needs, and the writes it makes.

The engine names needs and writes; a store answers and applies them. No SQL, no files, no time in here.
All instants are milliseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

COPY_BYTES: Final = 64
"""What a copy takes besides the body it shares: a row of the store without a body, as measured (decision 5)."""


class QueueLane(IntEnum):
    """Where in a queue a message stands. A locked message stays in its lane: locks live in memory only."""

    ACTIVE = 0
    DEFERRED = 1
    SCHEDULED = 2
    DEAD = 3
    DEAD_DEFERRED = 4
    TRANSFER_DEAD = 5
    TRANSFER_DEAD_DEFERRED = 6


class Row(NamedTuple):
    """One stored message. Key: (queue, lane, seq); seq alone is unique within a queue's lanes."""

    queue: int
    lane: int
    seq: int
    origin_seq: int
    """Sequence number given where the message was first accepted (the topic's, for a subscription)."""
    enqueued: int
    expires: int | None
    """When its time to live ends; None for never. By itself only an ACTIVE message ends then."""
    due: int | None
    """When a scheduled message becomes active; None in every other lane."""
    session: str | None
    delivery_count: int
    size: int
    """The length of the encoded message."""
    overlay: bytes | None
    """AMQP-encoded map of application properties set by settlement (dead-letter reason and the like)."""
    body: int | None
    """Id of a body shared by several rows (topics); then `raw` is stored once, under that id."""
    raw: bytes
    """The encoded message as accepted. b'' where a need did not ask for it."""

    @property
    def charge(self) -> int:
        """Bytes charged against the quota of its queue. For a shared body its topic is charged, once."""
        return self.size if self.body is None else COPY_BYTES


# --- needs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NextRows:
    """Rows of one lane with seq > after, by seq, at most `limit` and about `max_bytes` (never less than one row).

    With `session`, only that session's rows. Answer: list[Row].
    """

    queue: int
    lane: int
    after: int
    limit: int
    max_bytes: int
    session: str | None = None


def distinct(seqs: Iterable[int]) -> tuple[int, ...]:
    """The sequence numbers without repeats, in their order.

    Compared as text: a peer could choose numbers that all collide in a dict (X1).
    """
    return tuple({str(seq): seq for seq in seqs}.values())


@dataclass(frozen=True, slots=True)
class RowsBySeq:
    """The rows with these sequence numbers in any of these lanes, in the order asked, less the missing. list[Row]."""

    queue: int
    lanes: tuple[int, ...]
    seqs: tuple[int, ...]
    with_raw: bool = True


@dataclass(frozen=True, slots=True)
class BrowseRows:
    """Peek: rows of any of these lanes with seq >= start, by seq, bounded like NextRows. list[Row]."""

    queue: int
    lanes: tuple[int, ...]
    start: int
    limit: int
    max_bytes: int
    session: str | None = None


@dataclass(frozen=True, slots=True)
class ExpiredRows:
    """ACTIVE rows with expires <= at, oldest expiry first, without raw. Answer: DueAnswer.

    A deferred message does not expire by itself: its time is looked at when it is received by its number.
    """

    queue: int
    at: int
    limit: int


@dataclass(frozen=True, slots=True)
class DueRows:
    """SCHEDULED rows with due <= at, by (due, seq), with raw, bounded. Answer: DueAnswer."""

    queue: int
    at: int
    limit: int
    max_bytes: int


class DueAnswer(NamedTuple):
    """Rows that are due, and the instant of the next one that is not in `rows` (None: there is none)."""

    rows: list[Row]
    next_at: int | None


@dataclass(frozen=True, slots=True)
class WaitingSessions:
    """Ids of sessions with ACTIVE rows and id > after ('' : from the start), ascending, distinct. list[str]."""

    queue: int
    after: str
    limit: int


@dataclass(frozen=True, slots=True)
class StoredSessions:
    """Ids of all sessions with rows in ACTIVE/DEFERRED/SCHEDULED or with a state, ascending, after skip. list[str].

    With `state_since`: only sessions whose state was set after that instant.
    """

    queue: int
    skip: int
    limit: int
    state_since: int | None = None


@dataclass(frozen=True, slots=True)
class StoredSessionState:
    """Answer: bytes | None."""

    queue: int
    session: str


@dataclass(frozen=True, slots=True)
class KnownIds:
    """Which of these message ids were seen at or after `since` (duplicate detection). Answer: set[str]."""

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
    """Insert a row. If `row.body` is set, its body was or is written by PutBody in the same or an earlier commit."""

    row: Row


class PutBody(NamedTuple):
    """A body that several rows share, written once. The store drops it with the last row that names it, and tells."""

    body: int
    raw: bytes
    topic: int
    """The storage id of the topic that is charged for it."""


class DropRow(NamedTuple):
    """Remove a row."""

    queue: int
    lane: int
    seq: int


class MoveRow(NamedTuple):
    """Change a row in place: its key (lane, seq), and these columns; raw, body, session and size stay."""

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
    """The counters of a queue, absolute. Written with every commit that touches the queue."""

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
    """Create or replace an entity record; `queue` is its storage id, `text` its description as JSON."""

    queue: int
    kind: str
    path: str
    text: str
    created: int
    updated: int


class DropEntity(NamedTuple):
    """Remove an entity record and everything stored under its queue id."""

    queue: int


class PutSessionState(NamedTuple):
    """Set (or with None clear) a session's state."""

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
    """Drop remembered ids older than `before`."""

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
    """What opening a store tells about each entity: its record, its counters, and when something falls due."""

    entity: PutEntity
    queue: PutCounters
    next_expiry: int | None
    next_due: int | None
    shared_bytes: int = 0
    """What a topic is charged for the bodies that its subscriptions share."""


class OpenedStore(NamedTuple):
    """What opening a store tells: quick however deep the queues are."""

    entities: list[StoredEntity]
    next_queue: int
    """Above every queue id ever used: ids are not reused, so late writes cannot hit a newcomer."""
    next_body: int
