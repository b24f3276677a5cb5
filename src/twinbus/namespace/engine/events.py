"""What happens to an entity, in the past tense. Each says what its Answer carries; a Refusal is always possible.

Instants are milliseconds since the epoch. `reply` and `receiver` are opaque to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from twinbus.amqp import RoutingFields
from twinbus.namespace.engine.descriptions import Description, RuleDescription


class MessagesSent(NamedTuple):
    """One transfer arrived: a message, or the messages of a batch; all are stored or none. Answer: None."""

    reply: Any
    messages: tuple[RoutingFields, ...]


@dataclass(frozen=True, slots=True)
class MessagesScheduled:
    """Messages arrived by schedule-message. Answer: list[int], their sequence numbers."""

    reply: Any
    messages: tuple[RoutingFields, ...]


@dataclass(frozen=True, slots=True)
class ScheduleCancelled:
    """Answer: None. Refused (not-found) if any number is not scheduled any more; then none is cancelled."""

    reply: Any
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReceiverAttached:
    """A receiver without session. Answer: None."""

    reply: Any
    receiver: Any
    dead_letter: bool
    peek_lock: bool
    transfer: bool = False
    """From the transfer dead-letter sub-queue; then `dead_letter` says nothing, here and below."""


@dataclass(frozen=True, slots=True)
class SessionReceiverAttached:
    """A receiver for one session, or with `session` None the next available one before `deadline`.

    No Answer: AcceptSession or DetachReceiver follows, perhaps later.
    """

    receiver: Any
    session: str | None
    deadline: int
    peek_lock: bool


ANY_ROOM: Final = 1 << 62


class CreditGranted(NamedTuple):
    """The receiver may have had `limit` messages in all since it attached, drained credit included.

    Cumulative, because deliveries already decided may still wait for their commit. With `drain`, what is there is
    delivered, then a Drain follows and the rest of the credit counts as used. Delivering stops with the message that
    uses up `room`, in bytes, until the next CreditGranted. With no room, nothing is delivered until then.
    """

    receiver: Any
    limit: int
    drain: bool
    room: int = ANY_ROOM


@dataclass(frozen=True, slots=True)
class ReceiverDetached:
    """The link or its connection is gone. Message locks stay until they expire; a session lock is given back."""

    receiver: Any


@dataclass(frozen=True, slots=True)
class Complete:
    """Settle: the message is done."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Settle: back to the queue, delivery count raised."""

    properties: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Defer:
    """Settle: set aside, to be received by sequence number."""

    properties: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MoveToDeadLetter:
    """Settle: to the dead-letter sub-queue."""

    reason: str | None = None
    description: str | None = None
    properties: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Settle: back to the queue as if never delivered."""


MessageOutcome = Complete | Abandon | Defer | MoveToDeadLetter | Release


class MessagesSettled(NamedTuple):
    """Answer: list[None | Refusal], one per token (message-lock-lost, session-lock-lost); what can be settled is."""

    reply: Any
    tokens: tuple[bytes, ...]
    outcome: MessageOutcome
    session: str | None = None


@dataclass(frozen=True, slots=True)
class LocksRenewed:
    """Answer: list[int], the new instants; refused as a whole (message-lock-lost) if any token is not held."""

    reply: Any
    tokens: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class DeferredRequested:
    """receive-by-sequence-number. Answer: list[(Row, token | None, locked_until | None)]; refused if one is missing."""

    reply: Any
    seqs: tuple[int, ...]
    peek_lock: bool
    dead_letter: bool
    session: str | None = None
    transfer: bool = False


@dataclass(frozen=True, slots=True)
class MessagesPeeked:
    """Answer: list[Row], at most `count` (and about 1 MiB), with seq >= start. No pings; expired only if deferred."""

    reply: Any
    start: int
    count: int
    dead_letter: bool
    session: str | None = None
    transfer: bool = False


@dataclass(frozen=True, slots=True)
class BatchDeleted:
    """Delete up to `count` active messages enqueued before an instant. Answer: int, how many."""

    reply: Any
    count: int
    before: int
    dead_letter: bool
    transfer: bool = False


@dataclass(frozen=True, slots=True)
class SessionLockRenewed:
    """Answer: int, the new instant; session-lock-lost if this namespace holds no such lock."""

    reply: Any
    session: str


@dataclass(frozen=True, slots=True)
class SessionStateRequested:
    """Answer: bytes | None."""

    reply: Any
    session: str


@dataclass(frozen=True, slots=True)
class SessionStateSet:
    """Answer: None."""

    reply: Any
    session: str
    state: bytes | None


@dataclass(frozen=True, slots=True)
class SessionsListed:
    """Answer: list[str]. `updated_since` None: sessions with messages or state; else those with state set since."""

    reply: Any
    skip: int
    top: int
    updated_since: int | None


@dataclass(frozen=True, slots=True)
class RuleAdded:
    """To a subscription, as every event on rules. Answer: None."""

    reply: Any
    rule: RuleDescription


@dataclass(frozen=True, slots=True)
class RuleChanged:
    """The rule of that name has this filter and action now. Answer: None."""

    reply: Any
    rule: RuleDescription


@dataclass(frozen=True, slots=True)
class RuleRemoved:
    """Answer: None."""

    reply: Any
    name: str


@dataclass(frozen=True, slots=True)
class RulesListed:
    """Answer: list[RuleDescription], in the order they were made."""

    reply: Any
    skip: int
    top: int


RuleEvent = RuleAdded | RuleChanged | RuleRemoved | RulesListed


@dataclass(frozen=True, slots=True)
class DescriptionChanged:
    """The operator updated the entity; the new description is valid. Answer: None."""

    reply: Any
    description: Description


@dataclass(frozen=True, slots=True)
class Deleted:
    """The entity is removed with all it holds. Answer: None. Receivers are detached (not-found)."""

    reply: Any


@dataclass(frozen=True, slots=True)
class EntityTimerFired:
    """The instant of `next_timer` has come."""


Event = (
    MessagesSent
    | MessagesScheduled
    | ScheduleCancelled
    | ReceiverAttached
    | SessionReceiverAttached
    | CreditGranted
    | ReceiverDetached
    | MessagesSettled
    | LocksRenewed
    | DeferredRequested
    | MessagesPeeked
    | BatchDeleted
    | SessionLockRenewed
    | SessionStateRequested
    | SessionStateSet
    | SessionsListed
    | RuleAdded
    | RuleChanged
    | RuleRemoved
    | RulesListed
    | DescriptionChanged
    | Deleted
    | EntityTimerFired
)
