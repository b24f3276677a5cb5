"""Events: what happens to an entity. Each docstring says what the answer (`AnswerRequest.result`) is.

Every answer may be a Refusal instead. Instants are milliseconds since the epoch. `reply` and `receiver` are opaque to
the engine: they return unchanged in effects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from twinbus.amqp import RoutingFields
from twinbus.namespace.engine.descriptions import Description, RuleDescription


class MessagesSent(NamedTuple):
    """A transfer arrived: one message, or the messages of a batch. All are stored or none. Answer: None."""

    reply: Any
    messages: tuple[RoutingFields, ...]


@dataclass(frozen=True, slots=True)
class MessagesScheduled:
    """Messages arrived with a schedule-message request. Answer: list[int], their sequence numbers."""

    reply: Any
    messages: tuple[RoutingFields, ...]


@dataclass(frozen=True, slots=True)
class ScheduleCancelled:
    """A client cancelled scheduled messages: all of them, or none if one is not scheduled any more. Answer: None."""

    reply: Any
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReceiverAttached:
    """A client attached a receiver that takes no session. Answer: None."""

    reply: Any
    receiver: Any
    dead_letter: bool
    peek_lock: bool
    transfer: bool = False
    """Whether the receiver is for the transfer dead-letter sub-queue. If true, `dead_letter` is ignored. Other events
    have the same two fields."""


@dataclass(frozen=True, slots=True)
class SessionReceiverAttached:
    """A client attached a receiver for one session, or (`session` None) for any session available before `deadline`.

    There is no answer. This decision or a later one has the effect AcceptSession or DetachReceiver.
    """

    receiver: Any
    session: str | None
    deadline: int
    peek_lock: bool


UNLIMITED_ROOM: Final = 1 << 62


class CreditGranted(NamedTuple):
    """A receiver granted credit: it may get `limit` messages in all since its attach. Drained credit is included.

    The limit is cumulative, because deliveries that are decided already may still wait for their commit. With `drain`,
    available messages are delivered, then the effect Drain follows and the rest of the credit counts as used. `room` is
    a number of bytes. As soon as the delivered messages have this size or more, no message is delivered until the next
    CreditGranted. With a room of 0, no message is delivered.
    """

    receiver: Any
    limit: int
    drain: bool
    room: int = UNLIMITED_ROOM


@dataclass(frozen=True, slots=True)
class ReceiverDetached:
    """The link of a receiver, or its connection, ended. Message locks stay until they expire; a session lock ends."""

    receiver: Any


@dataclass(frozen=True, slots=True)
class Complete:
    """The outcome of settling: remove the message."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """The outcome of settling: return the message to the queue, and raise its delivery count."""

    properties: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Defer:
    """The outcome of settling: move the message to the deferred lane, to be received by its sequence number."""

    properties: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MoveToDeadLetter:
    """The outcome of settling: move the message to the dead-letter sub-queue."""

    reason: str | None = None
    description: str | None = None
    properties: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """The outcome of settling: return the message to the queue, with the same delivery count as before."""


MessageOutcome = Complete | Abandon | Defer | MoveToDeadLetter | Release


class MessagesSettled(NamedTuple):
    """A client settled messages. The refusal of one message does not affect the others.

    Answer: list[None | Refusal], one for each token.
    """

    reply: Any
    tokens: tuple[bytes, ...]
    outcome: MessageOutcome
    session: str | None = None


@dataclass(frozen=True, slots=True)
class LocksRenewed:
    """A client renewed message locks. Answer: list[int], the new end of each lock. Refused if one lock is lost."""

    reply: Any
    tokens: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class DeferredRequested:
    """A client asked for deferred messages by sequence number. The request is refused if one of them is missing.

    Answer: list[(Row, token | None, locked_until | None)].
    """

    reply: Any
    seqs: tuple[int, ...]
    peek_lock: bool
    dead_letter: bool
    session: str | None = None
    transfer: bool = False


@dataclass(frozen=True, slots=True)
class MessagesPeeked:
    """A client peeked at messages. Answer: list[Row] with seq >= start, at most `count` rows and about 1 MiB.

    Expired messages are left out unless they are deferred.
    """

    reply: Any
    start: int
    count: int
    dead_letter: bool
    session: str | None = None
    transfer: bool = False


@dataclass(frozen=True, slots=True)
class BatchDeleted:
    """A client deleted up to `count` active messages enqueued before the instant `before`. Answer: int, the number."""

    reply: Any
    count: int
    before: int
    dead_letter: bool
    transfer: bool = False


@dataclass(frozen=True, slots=True)
class SessionLockRenewed:
    """A client renewed a session lock. Answer: int, the new end of the lock."""

    reply: Any
    session: str


@dataclass(frozen=True, slots=True)
class SessionStateRequested:
    """A client asked for the state of a session. Answer: bytes | None."""

    reply: Any
    session: str


@dataclass(frozen=True, slots=True)
class SessionStateSet:
    """A client set the state of a session, or removed the state (None). Answer: None."""

    reply: Any
    session: str
    state: bytes | None


@dataclass(frozen=True, slots=True)
class SessionsListed:
    """A client listed sessions. Answer: list[str], their ids.

    With `updated_since`, only sessions whose state was set after this instant; else all sessions with messages or a
    state.
    """

    reply: Any
    skip: int
    top: int
    updated_since: int | None


@dataclass(frozen=True, slots=True)
class RuleAdded:
    """A rule was added to a subscription. Answer: None."""

    reply: Any
    rule: RuleDescription


@dataclass(frozen=True, slots=True)
class RuleChanged:
    """The rule with this name was given another filter and action. Answer: None."""

    reply: Any
    rule: RuleDescription


@dataclass(frozen=True, slots=True)
class RuleRemoved:
    """A rule was removed. Answer: None."""

    reply: Any
    name: str


@dataclass(frozen=True, slots=True)
class RulesListed:
    """A client listed the rules. Answer: list[RuleDescription], in the order in which the rules were created."""

    reply: Any
    skip: int
    top: int


RuleEvent = RuleAdded | RuleChanged | RuleRemoved | RulesListed


@dataclass(frozen=True, slots=True)
class DescriptionChanged:
    """The operator updated the entity. The new description is valid. Answer: None."""

    reply: Any
    description: Description


@dataclass(frozen=True, slots=True)
class Deleted:
    """The operator deleted the entity with everything it holds. Its receivers are detached. Answer: None."""

    reply: Any


@dataclass(frozen=True, slots=True)
class EntityTimerFired:
    """The instant `next_timer` of the entity has come."""


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
