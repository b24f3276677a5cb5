"""Bodies of every AMQP kind: data in one or several parts, a value of any type, sequences, and none at all."""

import uuid
from datetime import UTC, datetime
from typing import Any

from azure.servicebus import ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageBodyType

from tests.compat.python.bus import Bus, both_flavours, receive_all
from tests.compat.python.test_messages import TYPED, typed

MOMENT = datetime(2024, 2, 29, 12, 30, 15, 250_000, tzinfo=UTC)

# What is sent as the value, and what the SDK makes of it on receiving: strings stay bytes, times are milliseconds.
# No decimal: the SDK encodes decimal128 and fails to decode what it encoded.
VALUES: list[tuple[Any, Any]] = [
    (True, True),
    (-7, -7),
    (2**31 - 1, 2**31 - 1),
    (3.25, 3.25),
    ("Grüße, 世界", "Grüße, 世界".encode()),
    (b"\x00\xff", b"\x00\xff"),
    ("x" * 300, b"x" * 300),
    (uuid.UUID(int=1), uuid.UUID(int=1)),
    (MOMENT, int(MOMENT.timestamp() * 1000)),
    ([1, "two", [3, None]], [1, b"two", [3, None]]),
    ({"a": 1, "b": {"c": ["d"]}}, {b"a": 1, b"b": {b"c": [b"d"]}}),
    ([typed(name) for name in TYPED], list(TYPED.values())),
    ([{"TYPE": "ARRAY", "VALUE": [1, 2, 3]}], [[1, 2, 3]]),
    (({"TYPE": "SYMBOL", "VALUE": b"my:type"}, "described"), b"described"),
]

DATA: list[tuple[Any, list[bytes]]] = [
    ("text", [b"text"]),
    (b"\x00\x01\xff", [b"\x00\x01\xff"]),
    (b"", [b""]),
    ([b"several", b"", b"parts", b"x" * 1000], [b"several", b"", b"parts", b"x" * 1000]),
]

SEQUENCES: list[tuple[list[Any], list[Any]]] = [
    ([1, "two", None], [[1, b"two", None]]),
    ([[1, 2], ["three"], [4.5, {"k": b"v"}]], [[1, 2], [b"three"], [4.5, {b"k": b"v"}]]),
]


@both_flavours
async def test_data_bodies_come_back_part_by_part(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    for sent, _ in DATA:
        await sender.send_messages(AmqpAnnotatedMessage(data_body=sent))
    for received, (_, expected) in zip(await receive_all(receiver, len(DATA)), DATA, strict=True):
        assert received.body_type == AmqpMessageBodyType.DATA
        assert list(received.body) == expected


@both_flavours
async def test_value_bodies_of_every_type_come_back(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    for sent, _ in VALUES:
        await sender.send_messages(AmqpAnnotatedMessage(value_body=sent))
    for received, (_, expected) in zip(await receive_all(receiver, len(VALUES)), VALUES, strict=True):
        assert received.body_type == AmqpMessageBodyType.VALUE
        assert received.body == expected


@both_flavours
async def test_sequence_bodies_come_back_section_by_section(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    for sent, _ in SEQUENCES:
        await sender.send_messages(AmqpAnnotatedMessage(sequence_body=sent))
    for received, (_, expected) in zip(await receive_all(receiver, len(SEQUENCES)), SEQUENCES, strict=True):
        assert received.body_type == AmqpMessageBodyType.SEQUENCE
        assert list(received.body) == expected


@both_flavours
async def test_every_body_kind_survives_a_batch(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    batch = await sender.create_message_batch()
    for annotated in (
        AmqpAnnotatedMessage(data_body=[b"a", b"b"]),
        AmqpAnnotatedMessage(value_body={"k": 1}),
        AmqpAnnotatedMessage(sequence_body=[1, 2]),
    ):
        batch.add_message(annotated)
    await sender.send_messages(batch)

    data, value, sequence = await receive_all(receiver, 3)
    assert (list(data.body), value.body, list(sequence.body)) == ([b"a", b"b"], {b"k": 1}, [[1, 2]])


@both_flavours
async def test_a_message_without_a_body_is_a_message(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    message = ServiceBusMessage(None, message_id="empty")
    assert message.body is None
    assert message.body_type == AmqpMessageBodyType.VALUE
    assert message.raw_amqp_message.body is None
    await sender.send_messages(message)
    [received] = await receive_all(receiver, 1)
    assert received.message_id == "empty"
    assert received.body is None


@both_flavours
async def test_a_body_larger_than_a_frame_of_the_smallest_size_comes_back_whole(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    body = bytes(range(256)) * 1000
    await sender.send_messages(ServiceBusMessage(body))
    [received] = await receive_all(receiver, 1)
    assert b"".join(received.body) == body
