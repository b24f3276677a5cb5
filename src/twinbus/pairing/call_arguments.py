"""Check the arguments of a sender's calls, once for both drivers, and give every message an id (S8).

The checks, their order and their errors are those of azure-servicebus 7.15, so that a program sees the same errors with
a client and with a pair:

    every call                  closed sender: ValueError
    send_messages               timeout ≤ 0: ValueError · nothing to send: returns · bad message: TypeError
    schedule_messages           bad message: TypeError · timeout ≤ 0: ValueError · nothing to schedule: returns []
    cancel_scheduled_messages   timeout ≤ 0: ValueError · no numbers: returns

The SDK does not make the other two checks. The check of a message also raises TimeToLiveError, for a time to live that
AMQP cannot carry. The last check raises ScheduledInBacklogError, for numbers that are handles of the backlog (S10).

A message gets its id before the first attempt, so that every attempt, and every copy in the backlog, carries the same
id. The caller's objects are never changed: a message without an id is copied.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sized
from typing import Any, Final, NamedTuple
from uuid import uuid4

from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageProperties

from twinbus.pairing.call_errors import closed_error
from twinbus.pairing.decide.send_flow import BacklogHandle
from twinbus.pairing.errors import ScheduledInBacklogError, TimeToLiveError
from twinbus.pairing.message_copies import id_of
from twinbus.sdk import TransformingBatch, batch_messages, outgoing_message

MessageTypes = (
    Mapping[str, Any]
    | ServiceBusMessage
    | AmqpAnnotatedMessage
    | Iterable[Mapping[str, Any]]
    | Iterable[ServiceBusMessage]
    | Iterable[AmqpAnnotatedMessage]
)
"""What a sender takes, as the SDK's own senders."""
MAX_TIME_TO_LIVE: Final = 0xFFFF_FFFF
"""The longest time to live, in milliseconds: the header's ttl is a uint (AMQP 3.2.1)."""
# Iterables that are one message or one batch, not several messages.
_SINGLE: Final = (Mapping, ServiceBusMessageBatch, str, bytes)


class CheckedMessages(NamedTuple):
    """The messages to send, each with an id. `until` is the call's deadline on the monotonic clock, or None."""

    message: Any
    until: float | None


class CheckedNumbers(NamedTuple):
    """The sequence numbers to cancel. `until` is the call's deadline on the monotonic clock, or None."""

    numbers: list[int]
    until: float | None


# --- checks ----------------------------------------------------------------------------------------------------------


def check_open(closed: bool) -> None:
    """Check a call without arguments: entering a sender, creating a batch."""
    if closed:
        raise closed_error()


def check_send(closed: bool, message: Any, timeout: float | None) -> CheckedMessages | None:
    """Check a call of send_messages. Returns None if there is nothing to send."""
    if closed:
        raise closed_error()
    until = None if timeout is None else _deadline(timeout)
    # Nearly every message has this type. It is checked first, because `isinstance` of an abstract class takes longer
    # than all the rest of this function.
    if type(message) is not ServiceBusMessage:
        if isinstance(message, Sized) and len(message) == 0:
            return None
        message = identified(message)
        # An iterator has no length before it is read.
        return None if _is_empty(message) else CheckedMessages(message, until)
    raw = message.raw_amqp_message
    return CheckedMessages(message if _has_id(raw) else outgoing_message(_copy_with_id(raw)), until)


def check_schedule(closed: bool, messages: Any, timeout: float | None) -> CheckedMessages | None:
    """Check a call of schedule_messages. Returns None if there is nothing to schedule."""
    if closed:
        raise closed_error()
    messages = identified(messages)
    until = None if timeout is None else _deadline(timeout)
    return None if _is_empty(messages) else CheckedMessages(messages, until)


def check_cancel(closed: bool, numbers: int | list[int], timeout: float | None) -> CheckedNumbers | None:
    """Check a call of cancel_scheduled_messages. Returns None if there is nothing to cancel.

    Raises ScheduledInBacklogError if a number is negative: it is then a handle of the backlog, not a sequence number of
    the primary.
    """
    if closed:
        raise closed_error()
    until = None if timeout is None else _deadline(timeout)
    given = [numbers] if isinstance(numbers, int) else list(numbers)
    if in_backlog := [number for number in given if number < 0 or isinstance(number, BacklogHandle)]:
        raise ScheduledInBacklogError(in_backlog)
    return CheckedNumbers(given, until) if given else None


def _deadline(timeout: float) -> float:
    if timeout <= 0:
        raise ValueError("The timeout must be greater than 0.")
    return time.monotonic() + timeout


def _is_empty(message: Any) -> bool:
    return isinstance(message, list | ServiceBusMessageBatch) and len(message) == 0


# --- ids (S8) --------------------------------------------------------------------------------------------------------


def identified(message: Any) -> Any:
    """Return the argument of a send (a message, a batch, or a list of messages) with an id for every message.

    Raises TypeError for an object that is not a message, TimeToLiveError for a time to live that AMQP cannot carry.
    """
    if not isinstance(message, Iterable) or isinstance(message, _SINGLE):
        return _identified(message)
    return [_identified(one) for one in message]


class IdentifiedBatch(TransformingBatch):
    """A batch that gives an id to every message that has no id when it is added."""

    def transform(self, message: Any) -> Any:
        return _identified(message)


def _identified(message: Any) -> Any:
    if isinstance(message, ServiceBusMessage):
        return _with_id(message)
    if isinstance(message, IdentifiedBatch):
        return message
    if isinstance(message, ServiceBusMessageBatch):
        has_ids = all(one.message_id is not None for one in batch_messages(message))
        return message if has_ids else IdentifiedBatch.copy_of(message)
    if isinstance(message, AmqpAnnotatedMessage):
        return message if _has_id(message) else _copy_with_id(message)
    if isinstance(message, Mapping):
        return _with_id(_message_from(message))
    if not hasattr(message, "raw_amqp_message"):
        raise TypeError(
            "Only AmqpAnnotatedMessage, ServiceBusMessage instances or Mappings representing messages are supported. "
            f"Received instead: {type(message).__name__}"
        )
    return message


def _with_id(message: ServiceBusMessage) -> ServiceBusMessage:
    raw = message.raw_amqp_message
    return message if _has_id(raw) else outgoing_message(_copy_with_id(raw))


def _has_id(raw: AmqpAnnotatedMessage) -> bool:
    """Return whether the message has an id; 0 and the empty text are ids. Raises TimeToLiveError."""
    properties, header = raw.properties, raw.header
    if header is not None and header.time_to_live is not None and not 0 <= header.time_to_live <= MAX_TIME_TO_LIVE:
        raise TimeToLiveError(id_of(raw), header.time_to_live, MAX_TIME_TO_LIVE)
    return properties is not None and properties.message_id is not None


def _copy_with_id(raw: AmqpAnnotatedMessage) -> AmqpAnnotatedMessage:
    made = copy.copy(raw)
    # The copy gets its own dictionary, because the SDK replaces bytes in the dictionary by text.
    made.application_properties = dict(raw.application_properties) if raw.application_properties else None
    given = dict(raw.properties.items()) if raw.properties else {}
    made.properties = AmqpMessageProperties(**{**given, "message_id": str(uuid4())})
    return made


def _message_from(fields: Mapping[str, Any]) -> ServiceBusMessage:
    try:
        return ServiceBusMessage(**fields)
    except TypeError as error:
        # Names and types only: the contents of a message must not get into logs.
        held = ", ".join(f"{str(name)[:40]} ({type(value).__name__})" for name, value in fields.items())
        raise TypeError(f"no ServiceBusMessage can be made of {held[:400] or 'nothing'}: {error}") from None
