"""What the engine decides: writes for the store and effects for the front, in one Step.

Effects leave only after the writes of the same step, and all before it, are on disk. They are tuples because some are
made for every message.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from twinbus.namespace.engine.storage_protocol import Row, StoreRead, StoreWrite
from twinbus.values import Condition


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not carried out, in the words of the wire."""

    condition: Condition
    description: str


class MeteredOperation(StrEnum):
    """What the meter counts (N5)."""

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
    """Answer the request that carried this reply. `result` is documented at the event."""

    reply: Any
    result: Any


class Deliver(NamedTuple):
    """Send messages to a receiver, in this order, each under its token until `locked_until`.

    In receive-and-delete (tokens and `locked_until` None) they were dropped by this step's writes.
    """

    receiver: Any
    rows: list[Row]
    tokens: list[bytes | None]
    locked_until: int | None


class Drain(NamedTuple):
    """Tell the receiver that its credit is used up: nothing is there."""

    receiver: Any


class AcceptSession(NamedTuple):
    """The receiver holds this session until `locked_until`."""

    receiver: Any
    session: str
    locked_until: int


class DetachReceiver(NamedTuple):
    """The receiver's link ends: session lock lost, no session in time, entity disabled or deleted."""

    receiver: Any
    refusal: Refusal


@dataclass(slots=True)
class Meter:
    """Count operations of an entity. `bytes`: what they carried; `more_units`: what it costs beyond one each (M2)."""

    entity: str
    operation: MeteredOperation
    count: int
    bytes: int = 0
    more_units: int = 0


class ForgetEntity(NamedTuple):
    """The entity is gone: nothing about it is kept."""

    entity: str


Effect = AnswerRequest | Deliver | Drain | AcceptSession | DetachReceiver | Meter | ForgetEntity


@dataclass(slots=True)
class EngineDecision:
    """The outcome of one event."""

    writes: list[StoreWrite] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)


PendingDecision = Generator[StoreRead, Any, EngineDecision]
"""A decision under way: yields the rows it needs, is sent the answers, returns its Step."""


_MOST_NUMBERS: Final = 20  # of messages that a text names

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
    numbers = ", ".join(map(str, seqs[:_MOST_NUMBERS]))
    if len(seqs) > _MOST_NUMBERS:
        numbers += f" and {len(seqs) - _MOST_NUMBERS} more"
    return Refusal(Condition.MESSAGE_NOT_FOUND, f"There is no {kind} message with the sequence number(s) {numbers}.")


def disabled(path: str, side: str) -> Refusal:
    return Refusal(Condition.ENTITY_DISABLED, f"The messaging entity '{path}' is disabled for {side}.")


def not_allowed(text: str) -> Refusal:
    return Refusal(Condition.NOT_ALLOWED, text)
