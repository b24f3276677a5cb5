"""Read, measure and build messages and batches of azure-servicebus.

A `ServiceBusMessage` wraps an `AmqpAnnotatedMessage` (the "raw" message). The public attributes of both classes do not
show the body sections, and their public methods encode the whole message to compute its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, Final, Self

from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageBodyType, AmqpMessageProperties

from twinbus.sdk.handlers import LinkLimits
from twinbus.sdk.private_names import TYPE, VALUE, AMQPTypes, Message, PyamqpTransport, encode_payload
from twinbus.values import Long, Timestamp

# Encoded size, in bytes, of a message without its body and its texts, but with an id of 36 characters.
_OVERHEAD_BYTES: Final = 64
# Largest error of an estimated size, in bytes.
_DOUBT_BYTES: Final = 2048
_texts: Final = itemgetter(
    "subject", "correlation_id", "group_id", "content_type", "to", "reply_to", "reply_to_group_id", "user_id",
    "content_encoding",
)  # fmt: skip
# Number of properties that are None in a message with exactly one property.
_ALL_BUT_ONE: Final = len(vars(AmqpMessageProperties())) - 1


# --- contents --------------------------------------------------------------------------------------------------------


def amqp_messages(message: Any) -> list[AmqpAnnotatedMessage]:
    """Return the raw messages of a message, a batch, or a list of messages."""
    if isinstance(message, ServiceBusMessageBatch):
        return [one.raw_amqp_message for one in message._messages]
    return [_raw(one) for one in (message if isinstance(message, list) else [message])]


def batch_messages(batch: ServiceBusMessageBatch) -> list[ServiceBusMessage]:
    """Return the messages of a batch, in order."""
    return batch._messages


def outgoing_message(raw: AmqpAnnotatedMessage) -> ServiceBusMessage:
    """Wrap a raw message for a sender."""
    return ServiceBusMessage(None, message=PyamqpTransport.to_outgoing_amqp_message(raw), raw_amqp_message=raw)


def encoded_body(raw: AmqpAnnotatedMessage) -> bytes:
    """Return the encoded body sections of a raw message."""
    sections: dict[str, Any] = {"data": raw._data_body, "sequence": raw._sequence_body, "value": raw._value_body}
    return bytes(encode_payload(bytearray(), Message(**sections)))


def set_data_body(raw: AmqpAnnotatedMessage, data: bytes) -> None:
    """Replace the body of `raw` by one data section."""
    raw._data_body, raw._sequence_body, raw._value_body = [data], None, None
    raw._body_type = AmqpMessageBodyType.DATA


def sdk_value(value: object) -> Any:
    """Return `value` in a form that the SDK encodes with the right AMQP type: Long as long, Timestamp as timestamp."""
    match value:
        case Long():
            return {TYPE: AMQPTypes.long, VALUE: int(value)}
        case Timestamp():
            return {TYPE: AMQPTypes.timestamp, VALUE: int(value)}
        case _:
            return value


def _raw(message: Any) -> AmqpAnnotatedMessage:
    raw: AmqpAnnotatedMessage = message.raw_amqp_message if isinstance(message, ServiceBusMessage) else message
    return raw


# --- batches ---------------------------------------------------------------------------------------------------------


def new_batch(raws: Iterable[AmqpAnnotatedMessage], limits: LinkLimits) -> ServiceBusMessageBatch:
    """Return a batch for a link with these limits. Raises MessageSizeExceededError if the messages do not fit."""
    batch = ServiceBusMessageBatch(max_size_in_bytes=limits.batch, amqp_transport=limits.transport)
    for raw in raws:
        batch.add_message(raw)
    return batch


class TransformingBatch(ServiceBusMessageBatch):
    """A batch that adds `transform(message)` instead of each message. Subclasses define `transform`."""

    @classmethod
    def copy_of(cls, batch: ServiceBusMessageBatch) -> Self:
        """Return a batch with the transformed messages of another batch, and with the same size limit."""
        made = cls(
            max_size_in_bytes=batch.max_size_in_bytes,
            amqp_transport=batch._amqp_transport,
            tracing_attributes=batch._tracing_attributes,
        )
        made._from_list(batch._messages)
        return made

    def transform(self, message: Any) -> Any:
        raise NotImplementedError

    def _add(self, add_message: Any) -> None:
        super()._add(self.transform(add_message))


# --- sizes -----------------------------------------------------------------------------------------------------------


def encoded_size(raw: AmqpAnnotatedMessage) -> int:
    """Return the exact encoded size of a message in bytes. Encodes the whole message."""
    return len(encode_payload(bytearray(), PyamqpTransport.to_outgoing_amqp_message(raw)))


def message_size(raw: AmqpAnnotatedMessage, unit: int) -> int:
    """Return the size of a message in bytes: an estimate, but exact where the number of billing units is in doubt.

    `unit` is the billing unit in bytes (M2). Encoding every message to measure it would take more time than all other
    work for the message's ledger entry.
    """
    body: Any = raw._data_body
    if body is None:
        return encoded_size(raw)
    size = _OVERHEAD_BYTES
    for data in body:
        size += len(data)
    if raw._properties is not None:
        properties = raw._properties.__dict__
        # Most messages have an id and no other property, so there are no texts to measure.
        if properties["message_id"] is None or [*properties.values()].count(None) < _ALL_BUT_ONE:
            size += _texts_length(properties)
    if raw._application_properties:
        size += _named_length(raw._application_properties)
    if raw._annotations:
        size += _named_length(raw._annotations)
    if size < unit - _DOUBT_BYTES or _DOUBT_BYTES < size % unit < unit - _DOUBT_BYTES:
        return size
    return encoded_size(raw)


def id_and_size(message: ServiceBusMessage, unit: int) -> tuple[Any, int]:
    """Return the id of a message, None if it has none, and its `message_size`."""
    raw = message.raw_amqp_message
    properties = raw._properties
    return None if properties is None else properties.message_id, message_size(raw, unit)


def _texts_length(properties: Mapping[str, Any]) -> int:
    texts = _texts(properties)
    try:
        return len("".join(filter(None, texts)).encode())
    except TypeError:  # an id of another type
        return sum(_length(text) for text in texts if text is not None)


def _named_length(values: Mapping[Any, object]) -> int:
    size = 0
    for name, value in values.items():
        # For ASCII text, the most common case, no function is called.
        size += 4 + (len(name) if type(name) is str and name.isascii() else _length(name))
        size += len(value) if type(value) is str and value.isascii() else _length(value)
    return size


def _length(value: object) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode())
    return len(value) if isinstance(value, bytes) else 8
