"""Receive and send encoded messages through azure-servicebus.

The SDK decodes each received message, and encodes a message when it sends the message. This changes some messages: the
SDK has no Python type for several AMQP types. The syphon must deliver every message unchanged (Y10), so this module
receives and sends the bytes without the SDK's codec.

Receiving: `EncodedReceiver` takes the bytes from the link before the SDK decodes them. The SDK still handles link,
credit and settlement. For settlement the SDK receives a `ServiceBusReceivedMessage` with only the annotations that
settlement needs.

Sending: a batch is a message whose data sections are encoded messages, so `encoded_batch` adds the bytes unchanged. A
message too large for a batch must be sent as an SDK object. `lossless_message` builds this object with an explicit
type for every value, encodes the object, and compares the result with the original. It returns None if a value or a
type would change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar
from uuid import UUID

from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch, ServiceBusReceivedMessage

from twinbus.amqp import HEADER, PROPERTIES, AmqpError, Sections, decode, encode, read_routing_fields, split_sections
from twinbus.sdk.handlers import LinkLimits, has_credit
from twinbus.sdk.private_names import (
    REQUEST_RESPONSE_PEEK_OPERATION,
    REQUEST_RESPONSE_RECEIVE_BY_SEQUENCE_NUMBER,
    TYPE,
    VALUE,
    AMQPTypes,
    Header,
    Message,
    Properties,
    encode_payload,
    mgmt_handlers,
)
from twinbus.values import (
    Byte,
    Described,
    Float32,
    Int,
    Long,
    NumberKeyedMap,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


# --- receiving -------------------------------------------------------------------------------------------------------


class EncodedMessage(Protocol):
    """Interface of the objects that the caller's factory makes, one per received message, from bytes and lock token."""

    handle: ServiceBusReceivedMessage
    """The SDK's object for the message, set by the receiver. `complete_message(handle)` settles the message."""

    @property
    def sequence_number(self) -> int: ...

    @property
    def locked_until(self) -> datetime: ...

    def lock_renewed(self, until: int) -> None:
        """Set `locked_until` to `until`, which is in milliseconds since the epoch."""


M = TypeVar("M", bound=EncodedMessage)


class EncodedReceiver(Generic[M]):
    """An asyncio receiver of azure-servicebus whose messages stay encoded.

    `make(raw, lock_token)` makes the caller's object for each message. `sdk` is the SDK's receiver. Its settlement
    methods, such as `complete_message`, take `EncodedMessage.handle`.
    """

    def __init__(self, receiver: Any, make: Callable[[bytes, bytes], M]) -> None:
        self.sdk = receiver
        self._make = make
        self._open = receiver._open
        receiver._open = self._open_undecoded
        receiver._build_received_message = self._received_message

    @property
    def has_credit(self) -> bool:
        """Whether the link has credit, so that the service may still send messages to this receiver."""
        return has_credit(self.sdk)

    async def open(self, seconds: float) -> None:
        """Open the link in one try. The SDK's own way would retry, with pauses, if the queue does not exist."""
        try:
            await self.sdk._open(seconds)
        except Exception as error:
            raise await self.sdk._handle_exception(error) from error

    async def receive(self, count: int, wait: float) -> list[M]:
        """Return up to `count` messages; an empty list if no message arrives within `wait` seconds."""
        return [one.encoded for one in await self.sdk.receive_messages(max_message_count=count, max_wait_time=wait)]

    async def receive_deferred(self, numbers: Sequence[int], seconds: float) -> list[M]:
        """Return the deferred messages with these numbers. Raises MessageNotFoundError if a message is missing."""
        transport = self.sdk._amqp_transport
        body = {
            "sequence-numbers": transport.AMQP_ARRAY_VALUE([transport.AMQP_LONG_VALUE(number) for number in numbers]),
            "receiver-settle-mode": transport.AMQP_UINT_VALUE(1),
        }
        entries = await self._request(REQUEST_RESPONSE_RECEIVE_BY_SEQUENCE_NUMBER, body, seconds)
        return [
            self._message(bytes(entry[b"message"]), token.bytes_le, lock_token=token, is_deferred_message=True)
            for entry in entries
            for token in (entry[b"lock-token"],)
        ]

    async def peek(self, start: int, count: int, seconds: float) -> list[bytes]:
        """Return up to `count` encoded messages, from sequence number `start` on, without locking the messages."""
        body = {"from-sequence-number": self.sdk._amqp_transport.AMQP_LONG_VALUE(start), "message-count": count}
        entries = await self._request(REQUEST_RESPONSE_PEEK_OPERATION, body, seconds)
        return [bytes(entry[b"message"]) for entry in entries]

    async def renew_locks(self, messages: Sequence[M], seconds: float) -> None:
        """Renew the locks of all messages in one request. Raises MessageLockLostError if a lock is lost."""
        tokens = (message.handle.lock_token for message in messages)
        answer = await self.sdk._renew_locks(*tokens, timeout=seconds)
        for message, expiry in zip(messages, answer[b"expirations"], strict=True):
            message.lock_renewed(int(expiry))
            # The SDK refuses to settle a message whose lock has expired.
            message.handle._expiry = message.locked_until

    async def drain(self) -> None:
        """Take the link's credit back until the next `receive`. Messages that still arrive go back to the queue."""
        if self.sdk._running:
            await self.sdk._amqp_transport.drain_and_release_messages_async(self.sdk._handler)

    async def _open_undecoded(self, timeout: float | None = None) -> None:
        await self._open(timeout)
        # A link has no credit before it is open, so no message can have arrived yet.
        link = self.sdk._handler._link
        link._incoming_transfer = partial(_take_transfer, link)

    def _received_message(self, received: tuple[Any, bytes]) -> ServiceBusReceivedMessage:
        frame, raw = received
        message = self._message(raw, frame[2], frame=frame)
        message.handle.encoded = message  # type: ignore[attr-defined] # the SDK returns only its own objects
        return message.handle

    def _message(self, raw: bytes, token: bytes, **handle: Any) -> M:
        made = self._make(raw, token)
        annotations = {
            b"x-opt-locked-until": (made.locked_until - _EPOCH) // _MILLISECOND,
            b"x-opt-sequence-number": made.sequence_number,
        }
        made.handle = ServiceBusReceivedMessage(
            Message(message_annotations=annotations),  # type: ignore[arg-type] # the SDK's own kind of message
            receive_mode=self.sdk._receive_mode,
            receiver=self.sdk,
            amqp_transport=self.sdk._amqp_transport,
            **handle,
        )
        return made

    async def _request(self, operation: bytes, body: dict[str, Any], seconds: float) -> list[dict[bytes, Any]]:
        def entries(status: int, message: Any, description: Any, amqp_transport: Any) -> list[dict[bytes, Any]]:
            if status in (202, 204):
                return []
            checked: Callable[..., Any] = mgmt_handlers.default
            value = checked(status, message, description, amqp_transport)
            return list(value[b"messages"]) if value else []

        request: Callable[..., Any] = self.sdk._mgmt_request_response_with_retry
        found: list[dict[bytes, Any]] = await request(operation, body, entries, timeout=seconds)
        return found


async def _take_transfer(link: Any, frame: Any) -> None:
    """Handle a transfer as the SDK's `_incoming_transfer` does, but without decoding the message."""
    link.received_delivery_id = frame[1]
    if frame[1] is not None:
        link._first_frame = frame
    link._received_payload.extend(frame[11])
    if frame[5]:  # more frames of this message follow
        return
    link.delivery_count += 1
    link.current_link_credit -= 1
    raw, link._received_payload = bytes(link._received_payload), bytearray()
    link._received_delivery_tags.add(link._first_frame[2])
    await link._process_incoming_message(link._first_frame, raw)


# --- sending ---------------------------------------------------------------------------------------------------------


def encoded_batch(messages: Sequence[bytes], limits: LinkLimits) -> ServiceBusMessageBatch:
    """Return a batch that holds these encoded messages unchanged."""
    batch = ServiceBusMessageBatch(max_size_in_bytes=limits.batch, amqp_transport=limits.transport)
    batch._message[5].extend(messages)
    batch._count = len(messages)
    first = read_routing_fields(messages[0])
    limits.transport.set_batch_envelope_properties(
        batch._message, first.message_id, first.group_id, first.partition_key
    )
    return batch


async def send_message(sender: Any, message: Message, seconds: float) -> None:
    """Send an object from `lossless_message`, without the SDK's tracing, which would change the message."""
    wrapped = ServiceBusMessage(None, message=message)
    send: Callable[..., Any] = sender._do_retryable_operation
    await send(
        sender._send,
        message=wrapped,
        timeout=seconds,
        operation_requires_timeout=True,
        apply_try_timeout=True,
        require_last_exception=True,
    )


_TYPES: Final[dict[type, str]] = {
    type(None): AMQPTypes.null,
    bool: AMQPTypes.boolean,
    UByte: AMQPTypes.ubyte,
    UShort: AMQPTypes.ushort,
    UInt: AMQPTypes.uint,
    ULong: AMQPTypes.ulong,
    Byte: AMQPTypes.byte,
    Short: AMQPTypes.short,
    Int: AMQPTypes.int,
    Long: AMQPTypes.long,
    Float32: AMQPTypes.float,
    float: AMQPTypes.double,
    Timestamp: AMQPTypes.timestamp,
    UUID: AMQPTypes.uuid,
    bytes: AMQPTypes.binary,
    str: AMQPTypes.string,
    Symbol: AMQPTypes.symbol,
}
_EMPTY: Final[tuple[object, ...]] = (None, [], {})


def lossless_message(raw: bytes) -> Message | None:
    """Return the SDK's object for an encoded message, or None if the SDK would change a value or its type."""
    sections = split_sections(raw)
    try:
        made = _sdk_message(sections)
        return made if _canonical(bytes(encode_payload(bytearray(), made))) == _canonical(raw) else None
    except (AmqpError, KeyError, TypeError, ValueError):
        return None


def _sdk_message(sections: Sections) -> Message:
    """Return the SDK's object for the sections. Raises KeyError if a value has a type that the SDK does not have."""
    kind = sections.body_kind
    header, properties = sections.header, sections.properties
    fields = {name: getattr(properties, name) for name in Properties._fields}
    return Message(
        header=Header(header.durable, header.priority, header.ttl, header.first_acquirer, None),
        delivery_annotations=_typed_values(sections.delivery_annotations),
        message_annotations=_typed_values(sections.message_annotations),
        properties=Properties(**fields),
        application_properties=_typed_values(sections.application_properties),
        data=sections.data if kind == "data" else None,
        sequence=[_body_value(row) for row in sections.sequences] if kind == "sequence" else None,
        value=_body_value(sections.value) if kind == "value" else None,
        footer=_typed_values(sections.footer),
    )


def _typed_values(values: dict[Any, Any]) -> dict[Any, Any]:
    return {key: _typed(value) for key, value in values.items()}


def _typed(value: Any) -> dict[str, Any]:
    if type(value) is list:
        return {TYPE: AMQPTypes.list, VALUE: [_typed(one) for one in value]}
    if type(value) in (dict, NumberKeyedMap):
        return {TYPE: AMQPTypes.map, VALUE: [(_typed(key), _typed(one)) for key, one in value.items()]}
    if isinstance(value, Described):
        return {TYPE: AMQPTypes.described, VALUE: (_typed(value.descriptor), _typed(value.value))}
    return {TYPE: _TYPES[type(value)], VALUE: value}


def _body_value(value: Any) -> Any:
    """Return the body value with explicit types for the values inside it. The SDK itself chooses the outermost type."""
    if type(value) is list:
        return [_typed(one) for one in value]
    if type(value) is dict:
        return _typed_values(value)
    return (_typed(value.descriptor), _typed(value.value)) if isinstance(value, Described) else value


def _canonical(raw: bytes) -> list[tuple[int, bytes]]:
    """Return code and contents of each section in Twinbus's own encoding.

    Two messages with equal types and values then have equal results, whichever encoding their senders chose.
    """
    sections = split_sections(read_routing_fields(raw).raw)
    found: list[tuple[int, bytes]] = []
    for code, (_, start, _end) in sections.spans.items():
        value = decode(sections.raw, start)[0]
        while code in (HEADER, PROPERTIES) and value and value[-1] is None:
            value.pop()
        if value not in _EMPTY:
            found.append((code, encode(value)))
    return [*found, *((0, encode(decode(sections.raw, start)[0])) for _, start, _end in sections.body)]
