"""The refusals that several decisions share, each with the condition the clients know and a text that says why."""

from __future__ import annotations

from typing import Final

from twinbus.namespace.engine.effects import Refusal
from twinbus.values import Condition

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
