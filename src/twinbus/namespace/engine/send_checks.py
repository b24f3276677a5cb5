"""What a queue or a topic asks of the messages sent to it: limits, quota, duplicates, times; and pings (G3).

Where an accepted message is put is decided by the entity.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final

from twinbus.amqp import RoutingFields
from twinbus.ledger.entries import UNIT_BYTES, billable_units  # pure: the face also loads what writes to the disk
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.descriptions import EntityStatus, QueueDescription, TopicDescription
from twinbus.namespace.engine.duplicate_detection import SeenIds, key_of
from twinbus.namespace.engine.effects import EngineDecision, Meter, MeteredOperation, Refusal, disabled
from twinbus.namespace.engine.storage_protocol import StoreRead
from twinbus.values import Condition

PING_CONTENT_TYPE: Final = "application/vnd.ms-servicebus-ping"
_ACTIVE: Final = EntityStatus.ACTIVE
_UNBOUNDED_TTL: Final = 0xFFFF_FFFF
"""What clients write for a time to live that does not fit the header; then absolute-expiry-time tells it."""


def transfer_refusal(
    messages: Sequence[RoutingFields], description: QueueDescription | TopicDescription, size: int
) -> Refusal | None:
    """Why this transfer is refused as a whole; `size` is what the entity holds already."""
    if description.status is not _ACTIVE and not description.status.takes_sends:
        return disabled(description.path, "sends")
    wants_session = isinstance(description, QueueDescription) and description.requires_session
    for message in messages:
        length = len(message.raw)
        size += length
        message_id, session = message.message_id, message.group_id
        if (
            length > limits.MAX_MESSAGE_BYTES
            or message.properties_size > limits.MAX_PROPERTY_BYTES
            or (message_id.__class__ is str and len(message_id) > limits.MAX_MESSAGE_ID_CHARACTERS)
            or (session is not None and len(session) > limits.MAX_SESSION_ID_CHARACTERS)
            or (message.partition_key is not None and session is not None)
            or (wants_session and not session)
        ):
            refusal = excess_of(message) or _fault(message, wants_session)
            if refusal is not None:
                return refusal
    quota = description.max_size_megabytes * limits.MIB
    if size > quota:
        text = f"'{description.path}' has reached its size of {description.max_size_megabytes} MB."
        return Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text)
    return None


def excess_of(message: RoutingFields) -> Refusal | None:
    """Which limit a message exceeds, if any."""
    message_id, session = message.message_id, message.group_id
    if len(message.raw) > limits.MAX_MESSAGE_BYTES:
        text = f"The message of {len(message.raw)} bytes is larger than {limits.MAX_MESSAGE_BYTES} bytes."
        return Refusal(Condition.MESSAGE_SIZE_EXCEEDED, text)
    if message.properties_size > limits.MAX_PROPERTIES_BYTES:
        text = (
            f"The properties take {message.properties_size} bytes; at most {limits.MAX_PROPERTIES_BYTES} may be used."
        )
        return Refusal(Condition.ARGUMENT_OUT_OF_RANGE, text)
    if message.largest_property > limits.MAX_PROPERTY_BYTES:
        text = f"A property of {message.largest_property} bytes is larger than {limits.MAX_PROPERTY_BYTES} bytes."
        return Refusal(Condition.ARGUMENT_OUT_OF_RANGE, text)
    if isinstance(message_id, str) and len(message_id) > limits.MAX_MESSAGE_ID_CHARACTERS:
        return Refusal(
            Condition.ARGUMENT_ERROR, f"The message id is longer than {limits.MAX_MESSAGE_ID_CHARACTERS} characters."
        )
    if session is not None and len(session) > limits.MAX_SESSION_ID_CHARACTERS:
        return Refusal(
            Condition.ARGUMENT_ERROR, f"The session id is longer than {limits.MAX_SESSION_ID_CHARACTERS} characters."
        )
    return None


def _fault(message: RoutingFields, wants_session: bool) -> Refusal | None:
    """What is wrong with the session of a message."""
    session = message.group_id
    if message.partition_key is not None and session is not None and message.partition_key != session:
        return Refusal(Condition.ARGUMENT_ERROR, "A partition key must be equal to the session id where both are set.")
    if wants_session and not session:
        return Refusal(Condition.NOT_ALLOWED, "The entity requires sessions, and the message has no session id.")
    return None


def time_to_live(message: RoutingFields, default: int | None, now: int) -> int | None:
    """The shorter of the message's own and the entity's, in ms; None for never."""
    ttl, expiry = message.ttl, message.absolute_expiry_time
    if expiry is not None and (ttl is None or ttl == _UNBOUNDED_TTL):
        ttl = max(0, expiry - (message.creation_time or now))
    if ttl is None:
        return default
    return ttl if default is None else min(ttl, default)


def sift(
    messages: Sequence[RoutingFields], seen: SeenIds | None, now: int, step: EngineDecision
) -> Generator[StoreRead, Any, list[RoutingFields | None]]:
    """The accepted messages in their order; None in place of one that is not stored: a ping or a duplicate."""
    kept = without_pings(messages)
    if seen is None:
        return kept
    known = yield from seen.duplicates((message for message in kept if message is not None), now)
    for index, message in enumerate(kept):
        if message is None or message.message_id is None:
            continue
        message_id = key_of(message)
        if message_id in known:
            kept[index] = None
        else:
            known.add(message_id)
            seen.remember(message_id, now, step.writes)
    return kept


def without_pings(messages: Sequence[RoutingFields]) -> list[RoutingFields | None]:
    return [None if message.content_type == PING_CONTENT_TYPE else message for message in messages]


def meter(path: str, operation: MeteredOperation, messages: Sequence[RoutingFields], step: EngineDecision) -> None:
    """A duplicate is an operation like any other; a ping is one of its own kind."""
    size = pings = pinged = more = 0
    for message in messages:
        length = len(message.raw)
        if message.content_type == PING_CONTENT_TYPE:
            pings += 1
            pinged += length
        else:
            size += length
            if length > UNIT_BYTES:
                more += billable_units(1, length) - 1
    if pings:
        step.effects.append(Meter(path, MeteredOperation.PING, pings, pinged))
    if len(messages) > pings:
        step.effects.append(Meter(path, operation, len(messages) - pings, size, more))
