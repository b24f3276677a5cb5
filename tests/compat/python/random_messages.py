"""Messages with anything that the SDK can write and read back, and what a receiver sees of them."""

import random
import uuid
from typing import Any

from azure.servicebus import ServiceBusReceivedMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageHeader, AmqpMessageProperties

# What the service adds to each delivery.
BROKERS = (b"x-opt-sequence-number", b"x-opt-enqueued-time", b"x-opt-locked-until", b"x-opt-enqueue-sequence-number")
# Types that the SDK reads back, with values that it can write again: it writes every integer as an int of 32 bits.
TYPED: dict[str, tuple[Any, ...]] = {
    "BOOL": (True, False),
    "UBYTE": (0, 255),
    "BYTE": (-128, 127),
    "USHORT": (0, 65_535),
    "SHORT": (-32_768, 32_767),
    "UINT": (0, 1, 256, 2**31 - 1),
    "INT": (-(2**31), -1, 0, 2**31 - 1),
    "ULONG": (0, 255, 2**31 - 1),
    "LONG": (-(2**31), 0, 2**31 - 1),
    "FLOAT": (-1.5, 0.0),
    "DOUBLE": (1e300, -0.25),
    "TIMESTAMP": (0, 1_700_000_000),
    "UUID": (uuid.UUID(int=7), uuid.UUID(int=2**128 - 1)),
    "BINARY": (b"", b"bytes", "Grüße".encode()),
    "STRING": (b"", b"text", "世界".encode(), b"x" * 300),
    "SYMBOL": (b"symbol",),
    "NULL": (None,),
}
# The standard allows these in annotations and in a footer, and not in application properties.
NESTED: dict[str, tuple[Any, ...]] = {
    "LIST": ([], [1, "text", b"bytes", True, None], [[-1], {"key": [1.5, uuid.UUID(int=7)]}], [2**31 - 1] * 300),
    "MAP": ({}, {"key": "text", "other": 1}, {"key": {"key": [False, {}]}}),
}


def value(draw: random.Random, types: dict[str, tuple[Any, ...]]) -> Any:
    kind = draw.choice(list(types))
    return {"TYPE": kind, "VALUE": draw.choice(types[kind])}


def text(draw: random.Random, longest: int = 128) -> str:
    return "".join(draw.choice("aZ09 /é世") for _ in range(draw.choice((1, 5, longest))))


def values(
    draw: random.Random, *names: str, types: dict[str, tuple[Any, ...]] = TYPED | NESTED
) -> dict[str, Any] | None:
    return {name: value(draw, types) for name in names if draw.random() < 0.5} or None


def random_message(seed: int, session: str | None = None) -> AmqpAnnotatedMessage:
    """Return a message with any of the sections, properties, annotations and types that the SDK can write."""
    draw = random.Random(seed)

    def sometimes(make: Any) -> Any:
        return make() if draw.random() < 0.5 else None

    group = session or sometimes(lambda: text(draw))
    annotations = values(draw, "x-opt-mine", "mine", "x-opt-deadletter-source", "x-opt-message-state") or {}
    if key := sometimes(lambda: group or text(draw)):
        annotations["x-opt-partition-key"] = key
    if key := sometimes(lambda: text(draw)):
        annotations["x-opt-via-partition-key"] = key
    bodies: tuple[dict[str, Any], ...] = (
        {"data_body": [b"two", b"parts"]},
        {"value_body": "text"},
        {"value_body": [1, "a", [b"b", True]]},
        {"value_body": {"key": {"other": [1]}}},
        {"sequence_body": [[1, "a", {"key": [2]}], [2]]},
    )
    body = draw.choice(bodies)
    ids = (text(draw), uuid.UUID(int=seed), seed + 1, b"binary")
    return AmqpAnnotatedMessage(
        **body,
        header=sometimes(lambda: AmqpMessageHeader(priority=7, durable=True, time_to_live=3_600_000)),
        properties=AmqpMessageProperties(
            message_id=sometimes(lambda: draw.choice(ids)),
            correlation_id=sometimes(lambda: draw.choice(ids)),
            user_id=sometimes(lambda: b"user"),
            to=sometimes(lambda: text(draw)),
            subject=sometimes(lambda: text(draw)),
            reply_to=sometimes(lambda: text(draw)),
            content_type=sometimes(lambda: "text/plain"),
            content_encoding=sometimes(lambda: "gzip"),
            group_id=group,
            group_sequence=sometimes(lambda: 42),
            reply_to_group_id=sometimes(lambda: text(draw)),
        ),
        application_properties={**(values(draw, "one", "two", "three", types=TYPED) or {}), "seed": seed},
        annotations=annotations,
        delivery_annotations=values(draw, "x-opt-hop"),
        footer=values(draw, "x-opt-sum"),
    )


def seen(message: ServiceBusReceivedMessage) -> dict[str, Any]:
    """Return what a receiver sees of a message, without what belongs to this delivery."""
    raw = message.raw_amqp_message
    properties, header = raw.properties, raw.header
    assert header
    assert properties
    of_delivery = {"creation_time", "absolute_expiry_time"}
    return {
        "body": (raw.body_type, list(raw.body) if raw.body_type.value != "value" else raw.body),
        "properties": {name: part for name, part in properties.items() if name not in of_delivery},
        "header": (header.priority, header.durable, header.time_to_live),
        "application properties": {
            key: each.encode() if isinstance(each, str) else each
            for key, each in (raw.application_properties or {}).items()
        },
        "annotations": {key: each for key, each in (raw.annotations or {}).items() if key not in BROKERS},
        "delivery annotations": {
            key: each for key, each in (raw.delivery_annotations or {}).items() if key != b"x-opt-lock-token"
        },
        "footer": raw.footer,
        "partition key": message.partition_key,
        "session": message.session_id,
    }


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    scheduled = b"x-opt-scheduled-enqueue-time"
    found = []
    for seed, (one, other) in enumerate(zip(before, after, strict=True)):
        for part, was in one.items():
            now = other[part]
            if part == "annotations":
                now = {key: each for key, each in now.items() if key != scheduled}
            if was != now:
                found.append(f"seed {seed}, {part}: {was!r} became {now!r}")
    return found
