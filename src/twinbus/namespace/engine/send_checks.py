"""Checks of messages that are sent to a queue or topic: limits, quota, sessions, duplicates, pings (G3).

The module `send_target` decides what happens to an accepted message.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final

from twinbus.amqp import RoutingFields
from twinbus.ledger.entries import UNIT_BYTES, billable_units  # not twinbus.ledger: it imports code that writes
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.descriptions import EntityStatus, QueueDescription, TopicDescription
from twinbus.namespace.engine.duplicate_detection import SeenIds, id_key
from twinbus.namespace.engine.effects import EngineDecision, Meter, MeteredOperation, Refusal, disabled
from twinbus.namespace.engine.storage_protocol import StoreRead
from twinbus.values import Condition

PING_CONTENT_TYPE: Final = "application/vnd.ms-servicebus-ping"
_ACTIVE: Final = EntityStatus.ACTIVE
_TTL_TOO_LARGE: Final = 0xFFFF_FFFF
"""The ttl in a header whose real time to live does not fit into 32 bits. Then absolute-expiry-time has the real end."""


def transfer_refusal(
    messages: Sequence[RoutingFields], description: QueueDescription | TopicDescription, size: int
) -> Refusal | None:
    """Return why the entity refuses these messages; None if it accepts all of them. One bad message refuses all.

    `size` is the number of bytes that the entity holds already.
    """
    if description.status is not _ACTIVE and not description.status.takes_sends:
        return disabled(description.path, "sends")
    needs_session = isinstance(description, QueueDescription) and description.requires_session
    for message in messages:
        length = len(message.raw)
        size += length
        message_id, session = message.message_id, message.group_id
        # This cheap test is false for almost every valid message. Only if it is true, the exact reason is looked for.
        if (
            length > limits.MAX_MESSAGE_BYTES
            or message.properties_size > limits.MAX_PROPERTY_BYTES
            or (message_id.__class__ is str and len(message_id) > limits.MAX_MESSAGE_ID_CHARACTERS)
            or (session is not None and len(session) > limits.MAX_SESSION_ID_CHARACTERS)
            or (message.partition_key is not None and session is not None)
            or (needs_session and not session)
        ):
            refusal = limit_refusal(message) or _session_refusal(message, needs_session)
            if refusal is not None:
                return refusal
    quota = description.max_size_megabytes * limits.MIB
    if size > quota:
        text = f"'{description.path}' has reached its size of {description.max_size_megabytes} MB."
        return Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text)
    return None


def limit_refusal(message: RoutingFields) -> Refusal | None:
    """Return which limit of the service the message exceeds; None if it exceeds none."""
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


def _session_refusal(message: RoutingFields, needs_session: bool) -> Refusal | None:
    session = message.group_id
    if message.partition_key is not None and session is not None and message.partition_key != session:
        return Refusal(Condition.ARGUMENT_ERROR, "A partition key must be equal to the session id where both are set.")
    if needs_session and not session:
        return Refusal(Condition.NOT_ALLOWED, "The entity requires sessions, and the message has no session id.")
    return None


def time_to_live(message: RoutingFields, default: int | None, now: int) -> int | None:
    """Return the shorter of the message's time to live and the entity's `default`, in ms; None for never."""
    ttl, expiry = message.ttl, message.absolute_expiry_time
    if expiry is not None and (ttl is None or ttl == _TTL_TOO_LARGE):
        ttl = max(0, expiry - (message.creation_time or now))
    return shorter_ttl(ttl, default)


def shorter_ttl(ttl: int | None, other: int | None) -> int | None:
    """Return the shorter of two times to live; None stands for never."""
    if ttl is None:
        return other
    return ttl if other is None else min(ttl, other)


def without_pings_and_duplicates(
    messages: Sequence[RoutingFields], seen_ids: SeenIds | None, now: int, decision: EngineDecision
) -> Generator[StoreRead, Any, list[RoutingFields | None]]:
    """Return the messages in their order, with None in place of a ping or a duplicate: neither is stored.

    The ids of all other messages are added to `seen_ids`, which is None for an entity without duplicate detection.
    """
    kept = [None if message.content_type == PING_CONTENT_TYPE else message for message in messages]
    if seen_ids is None:
        return kept
    known = yield from seen_ids.duplicates((message for message in kept if message is not None), now)
    for index, message in enumerate(kept):
        if message is None or message.message_id is None:
            continue
        message_id = id_key(message)
        if message_id in known:
            kept[index] = None
        else:
            known.add(message_id)
            seen_ids.add(message_id, now, decision.writes)
    return kept


def meter_sent(
    path: str, operation: MeteredOperation, messages: Sequence[RoutingFields], decision: EngineDecision
) -> None:
    """Add the Meter effects of sent messages. A duplicate is metered like any other message, a ping as PING."""
    size = pings = ping_bytes = extra_units = 0
    for message in messages:
        length = len(message.raw)
        if message.content_type == PING_CONTENT_TYPE:
            pings += 1
            ping_bytes += length
        else:
            size += length
            if length > UNIT_BYTES:
                extra_units += billable_units(1, length) - 1
    if pings:
        decision.effects.append(Meter(path, MeteredOperation.PING, pings, ping_bytes))
    if len(messages) > pings:
        decision.effects.append(Meter(path, operation, len(messages) - pings, size, extra_units))
