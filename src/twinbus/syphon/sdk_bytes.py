"""Encoded messages through azure-servicebus, whose own objects would change some of them on the way (Y10).

Reads private parts of its receivers and senders, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch, ServiceBusReceivedMessage

from twinbus.amqp import read_routing_fields
from twinbus.connect import ReceivedMessage, to_millis
from twinbus.sdk.handlers import LinkLimits
from twinbus.sdk.private_names import (
    REQUEST_RESPONSE_PEEK_OPERATION,
    REQUEST_RESPONSE_RECEIVE_BY_SEQUENCE_NUMBER,
    Message,
    mgmt_handlers,
)
from twinbus.syphon.native_transport import NativeHeld


class SdkHeld(NativeHeld):
    """A message as it came, and the SDK's handle by which it is settled."""

    __slots__ = ("sdk",)

    def __init__(self, raw: bytes, token: bytes, receiver: Any, **handle: Any) -> None:
        super().__init__(ReceivedMessage(raw, token))
        told = {b"x-opt-locked-until": to_millis(self.locked_until), b"x-opt-sequence-number": self.sequence_number}
        self.sdk = ServiceBusReceivedMessage(
            Message(message_annotations=told),  # type: ignore[arg-type] # the SDK's own kind of message
            receive_mode=receiver._receive_mode,
            receiver=receiver,
            amqp_transport=receiver._amqp_transport,
            **handle,
        )


# --- receiving -------------------------------------------------------------------------------------------------------


def keeping_bytes(receiver: Any) -> Any:
    """The same aio receiver, whose messages are of SdkHeld: taken off its link before the SDK decodes them."""
    opened = receiver._open

    async def open_and_tap(timeout: float | None = None) -> None:
        await opened(timeout)
        # A link has no credit before it is open, so nothing came by until here.
        link = receiver._handler._link
        link._incoming_transfer = partial(_incoming_transfer, link)

    receiver._open = open_and_tap
    receiver._build_received_message = partial(_built, receiver)
    return receiver


async def _incoming_transfer(link: Any, frame: Any) -> None:
    """As the SDK's own does it, but for the decoding."""
    link.received_delivery_id = frame[1]
    if frame[1] is not None:
        link._first_frame = frame
    link._received_payload.extend(frame[11])
    if frame[5]:  # more is to come
        return
    link.delivery_count += 1
    link.current_link_credit -= 1
    raw, link._received_payload = bytes(link._received_payload), bytearray()
    link._received_delivery_tags.add(link._first_frame[2])
    await link._process_incoming_message(link._first_frame, raw)


def _built(receiver: Any, received: tuple[Any, bytes]) -> ServiceBusReceivedMessage:
    frame, raw = received
    made = SdkHeld(raw, frame[2], receiver, frame=frame)
    made.sdk.held = made  # type: ignore[attr-defined] # the SDK returns its own kind
    return made.sdk


async def received(receiver: Any, count: int, wait: float) -> list[SdkHeld]:
    return [one.held for one in await receiver.receive_messages(max_message_count=count, max_wait_time=wait)]


async def received_deferred(receiver: Any, numbers: Sequence[int], seconds: float) -> list[SdkHeld]:
    """All of them, or MessageNotFoundError."""
    transport = receiver._amqp_transport
    body = {
        "sequence-numbers": transport.AMQP_ARRAY_VALUE([transport.AMQP_LONG_VALUE(number) for number in numbers]),
        "receiver-settle-mode": transport.AMQP_UINT_VALUE(1),
    }
    entries = await _asked(receiver, REQUEST_RESPONSE_RECEIVE_BY_SEQUENCE_NUMBER, body, seconds)
    return [
        SdkHeld(bytes(entry[b"message"]), token.bytes_le, receiver, lock_token=token, is_deferred_message=True)
        for entry in entries
        for token in (entry[b"lock-token"],)
    ]


async def peeked(receiver: Any, start: int, count: int, seconds: float) -> list[ReceivedMessage]:
    body = {"from-sequence-number": receiver._amqp_transport.AMQP_LONG_VALUE(start), "message-count": count}
    entries = await _asked(receiver, REQUEST_RESPONSE_PEEK_OPERATION, body, seconds)
    return [ReceivedMessage(bytes(entry[b"message"]), None, is_settled=True) for entry in entries]


async def renewed(receiver: Any, messages: Sequence[SdkHeld], seconds: float) -> None:
    """All of them in one request, or MessageLockLostError."""
    answer = await receiver._renew_locks(*(message.sdk.lock_token for message in messages), timeout=seconds)
    for message, expiry in zip(messages, answer[b"expirations"], strict=True):
        message.message.renewed(int(expiry))
        message.sdk._expiry = message.locked_until


async def opened(receiver: Any, seconds: float) -> None:
    """In one try: a queue that is not there is not asked for again, with the SDK's pauses."""
    try:
        await receiver._open(seconds)
    except Exception as error:
        raise await receiver._handle_exception(error) from error


def has_credit(receiver: Any) -> bool:
    return receiver._running and receiver._handler._link is not None and receiver._handler._link.current_link_credit > 0


async def drained(receiver: Any) -> None:
    """No more messages come until the next receive; those on their way are given back."""
    if receiver._running:
        await receiver._amqp_transport.drain_and_release_messages_async(receiver._handler)


async def _asked(receiver: Any, operation: bytes, body: dict[str, Any], seconds: float) -> list[dict[bytes, Any]]:
    def entries(status: int, message: Any, description: Any, amqp_transport: Any) -> list[dict[bytes, Any]]:
        if status in (202, 204):
            return []
        checked: Callable[..., Any] = mgmt_handlers.default
        value = checked(status, message, description, amqp_transport)
        return list(value[b"messages"]) if value else []

    answered: Callable[..., Any] = receiver._mgmt_request_response_with_retry
    found: list[dict[bytes, Any]] = await answered(operation, body, entries, timeout=seconds)
    return found


# --- sending ---------------------------------------------------------------------------------------------------------


def batch_of(messages: Sequence[bytes], limits: LinkLimits) -> ServiceBusMessageBatch:
    """The SDK's batch, holding these bytes as they are."""
    batch = ServiceBusMessageBatch(max_size_in_bytes=limits.batch, amqp_transport=limits.transport)
    batch._message[5].extend(messages)
    batch._count = len(messages)
    first = read_routing_fields(messages[0])
    limits.transport.set_batch_envelope_properties(
        batch._message, first.message_id, first.group_id, first.partition_key
    )
    return batch


async def send_single(sender: Any, message: Message, seconds: float) -> None:
    """Past the SDK's tracing, which would write into the message."""
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
