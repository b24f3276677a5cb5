"""The result of a decision: writes for the store and effects for the network side, together in one EngineDecision.

The runtime commits the writes of a decision (and of all decisions before it) to disk first, and then carries out the
effects of the decision. Most effects and writes are named tuples, because some are made for every message and tuples
are fast to make.

A decision is made by a generator (`PendingDecision`), because the decision may need stored rows. The generator yields
`StoreRead`s, is sent the answers, and returns an EngineDecision. It reads before it writes: the store does not show
rows written by the same decision. If a read fails, the runtime throws the error into the generator.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from twinbus.namespace.engine.storage_protocol import Row, StoreRead, StoreWrite
from twinbus.values import Condition

# --- refusals ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not carried out: the AMQP error condition and a text for the client."""

    condition: Condition
    description: str


_MAX_NUMBERS_IN_TEXT: Final = 20

MESSAGE_LOCK_LOST: Final = Refusal(
    Condition.MESSAGE_LOCK_LOST,
    "The lock supplied is invalid. Either the lock expired, or the message has already been removed from the queue.",
)


def session_lock_lost(session: str) -> Refusal:
    return Refusal(
        Condition.SESSION_LOCK_LOST,
        f"The session lock of '{session}' has expired or was given back. Accept the session again.",
    )


def not_found(path: str) -> Refusal:
    return Refusal(Condition.NOT_FOUND, f"The messaging entity '{path}' could not be found.")


def messages_not_found(kind: str, seqs: list[int]) -> Refusal:
    numbers = ", ".join(map(str, seqs[:_MAX_NUMBERS_IN_TEXT]))
    if len(seqs) > _MAX_NUMBERS_IN_TEXT:
        numbers += f" and {len(seqs) - _MAX_NUMBERS_IN_TEXT} more"
    return Refusal(Condition.MESSAGE_NOT_FOUND, f"There is no {kind} message with the sequence number(s) {numbers}.")


def disabled(path: str, side: str) -> Refusal:
    return Refusal(Condition.ENTITY_DISABLED, f"The messaging entity '{path}' is disabled for {side}.")


def not_allowed(text: str) -> Refusal:
    return Refusal(Condition.NOT_ALLOWED, text)


# --- effects -----------------------------------------------------------------------------------------------------


class MeteredOperation(StrEnum):
    """The kinds of operations that the meter counts (N5)."""

    SEND = "send"
    PING = "ping"
    SCHEDULE = "schedule"
    CANCEL_SCHEDULED = "cancel_scheduled"
    RECEIVE = "receive"
    RECEIVE_EMPTY = "receive_empty"
    COMPLETE = "complete"
    ABANDON = "abandon"
    DEFER = "defer"
    DEAD_LETTER = "dead_letter"
    RELEASE = "release"
    RENEW_LOCK = "renew_lock"
    RECEIVE_DEFERRED = "receive_deferred"
    PEEK = "peek"
    DELETE_BATCH = "delete_batch"
    ACCEPT_SESSION = "accept_session"
    RENEW_SESSION_LOCK = "renew_session_lock"
    GET_SESSION_STATE = "get_session_state"
    SET_SESSION_STATE = "set_session_state"
    LIST_SESSIONS = "list_sessions"


class AnswerRequest(NamedTuple):
    """Answer the request that had this `reply`. The docstring of each event says what `result` is."""

    reply: Any
    result: Any


class Deliver(NamedTuple):
    """Send the messages `rows` to a receiver, in this order. `tokens` has the lock token of each message.

    The locks end at `locked_until`. In receive-and-delete mode, all tokens and `locked_until` are None, and the writes
    of the same decision drop the rows.
    """

    receiver: Any
    rows: list[Row]
    tokens: list[bytes | None]
    locked_until: int | None


class Drain(NamedTuple):
    """Report to a receiver that requested a drain: it has no credit left, because of deliveries or of the drain."""

    receiver: Any


class AcceptSession(NamedTuple):
    """Report to the receiver that it holds this session until `locked_until`."""

    receiver: Any
    session: str
    locked_until: int


class DetachReceiver(NamedTuple):
    """Detach the receiver's link: session lock lost, no session in time, entity disabled or deleted."""

    receiver: Any
    refusal: Refusal


@dataclass(slots=True)
class Meter:
    """Count operations of an entity.

    `bytes` is the size of the messages. `more_units` is the number of billed units beyond one for each operation (M2).
    """

    entity: str
    operation: MeteredOperation
    count: int
    bytes: int = 0
    more_units: int = 0


class ForgetEntity(NamedTuple):
    """Drop all data that the meter has about an entity that was deleted."""

    entity: str


Effect = AnswerRequest | Deliver | Drain | AcceptSession | DetachReceiver | Meter | ForgetEntity


# --- decisions ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class EngineDecision:
    """The writes and effects of one event."""

    writes: list[StoreWrite] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.writes or self.effects)


PendingDecision = Generator[StoreRead, Any, EngineDecision]
"""A decision in progress: a generator that yields store reads, is sent the answers, and returns an EngineDecision."""
ReadingPart = Generator[StoreRead, Any, None]
"""A part of a decision: a generator that may read rows, and adds its writes and effects to an EngineDecision."""
