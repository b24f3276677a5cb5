"""Every property, annotation and section of a message, except the body, is received as it was sent."""

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageHeader, AmqpMessageProperties

from tests.compat.python.bus import Bus, both_flavours, from_now, receive_all, receive_one
from tests.sdk.installed import since

# The SDK encodes a plain int as an AMQP int and has no other way to name a type than this one, which it takes in maps
# and lists.
TYPED = {"UBYTE": 255, "BYTE": -128, "USHORT": 65535, "SHORT": -32768, "UINT": 2**32 - 1, "INT": -(2**31)} | {
    "ULONG": 2**64 - 1,
    "LONG": -(2**63),
    "FLOAT": 0.5,
    "DOUBLE": 1e300,
    "BOOL": True,
    "TIMESTAMP": 1_700_000_000_123,
    "UUID": uuid.UUID(int=7),
    "BINARY": bytes(range(256)),
    "STRING": "καλημέρα".encode(),
    "SYMBOL": b"symbol",
}


def typed(name: str) -> dict[str, Any]:
    return {"TYPE": name, "VALUE": TYPED[name]}


@both_flavours
async def test_the_properties_of_a_message_come_back(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    message = ServiceBusMessage(
        "body",
        application_properties={"colour": "blue"},
        session_id="session",
        message_id="id-1",
        time_to_live=timedelta(hours=1),
        content_type="text/plain; charset=utf-8",
        correlation_id="id-0",
        subject="a subject",
        partition_key="session",
        to="somewhere",
        reply_to="here",
        reply_to_session_id="reply-session",
    )
    await sender.send_messages(message)
    received = await receive_one(receiver)

    assert str(received) == "body"
    assert received.message_id == message.message_id == "id-1"
    assert received.session_id == message.session_id == "session"
    assert received.time_to_live == message.time_to_live == timedelta(hours=1)
    assert received.content_type == message.content_type == "text/plain; charset=utf-8"
    assert received.correlation_id == message.correlation_id == "id-0"
    assert received.subject == message.subject == "a subject"
    assert received.partition_key == message.partition_key == "session"
    assert received.to == message.to == "somewhere"
    assert received.reply_to == message.reply_to == "here"
    assert received.reply_to_session_id == message.reply_to_session_id == "reply-session"
    assert message.application_properties == {"colour": "blue"}
    assert received.application_properties == {b"colour": b"blue"}
    assert received.scheduled_enqueue_time_utc is None


@both_flavours
async def test_a_bare_message_has_no_properties_but_what_the_service_gives_it(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    before = from_now(-1)
    await sender.send_messages([ServiceBusMessage(""), ServiceBusMessage("next")])
    received, following = await receive_all(receiver, 2)

    for absent in (received.session_id, received.content_type, received.correlation_id, received.subject):
        assert absent is None
    for absent in (received.to, received.reply_to, received.reply_to_session_id, received.partition_key):
        assert absent is None
    assert not received.application_properties
    assert received.message_id, "the service names a message that has no id"
    assert received.message_id != following.message_id
    assert received.enqueued_time_utc
    assert before < received.enqueued_time_utc < from_now(1)
    assert received.sequence_number
    assert following.sequence_number == received.sequence_number + 1
    assert received.enqueued_sequence_number in (None, 0, received.sequence_number), "for forwarded messages"
    assert received.locked_until_utc
    assert received.locked_until_utc > received.enqueued_time_utc
    assert isinstance(received.lock_token, uuid.UUID)
    assert received.dead_letter_reason is received.dead_letter_error_description is received.dead_letter_source is None


@both_flavours
async def test_application_properties_of_every_type_come_back(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    moment = datetime(2024, 2, 29, 12, 30, 15, 250_000, tzinfo=UTC)
    plain: dict[str | bytes, Any] = {
        "none": None,
        "false": False,
        "int": -7,
        "float": 3.25,
        "string": "Grüße, 世界",
        "empty": "",
        "uuid": uuid.UUID(int=1),
        "moment": moment,
        "long text": "x" * 3000,
    }
    sent: dict[str | bytes, Any] = {**plain, **{name: typed(name) for name in TYPED}}
    await sender.send_messages(ServiceBusMessage("x", application_properties=sent))

    properties = dict((await receive_one(receiver)).application_properties or {})

    assert properties == {
        b"none": None,
        b"false": False,
        b"int": -7,
        b"float": 3.25,
        b"string": "Grüße, 世界".encode(),
        b"empty": b"",
        b"uuid": uuid.UUID(int=1),
        b"moment": int(moment.timestamp() * 1000),
        b"long text": b"x" * 3000,
        **{name.encode(): value for name, value in TYPED.items()},
    }


@both_flavours
async def test_every_section_of_an_annotated_message_comes_back(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    message_id = uuid.uuid4()
    annotated = AmqpAnnotatedMessage(
        data_body=b"body",
        header=AmqpMessageHeader(priority=7, durable=True, time_to_live=3_600_000),
        properties=AmqpMessageProperties(
            message_id=message_id,
            user_id=b"user",
            to="to",
            subject="subject",
            reply_to="reply-to",
            correlation_id="correlation",
            content_type="application/json",
            content_encoding="utf-8",
            group_id="group",
            group_sequence=42,
            reply_to_group_id="reply-group",
        ),
        application_properties={"kind": "annotated"},
        annotations={"x-opt-mine": "annotation", "x-opt-number": 12},
        delivery_annotations={"x-opt-hop": "delivery annotation"},
        footer={"x-opt-sum": "footer"},
    )
    await sender.send_messages(annotated)

    received = await receive_one(receiver)
    raw = received.raw_amqp_message
    assert received.message_id == message_id
    assert raw.header
    assert (raw.header.priority, raw.header.durable, raw.header.time_to_live) == (7, True, 3_600_000)
    assert raw.properties
    assert (raw.properties.user_id, raw.properties.content_encoding) == (b"user", b"utf-8")
    assert (raw.properties.group_id, raw.properties.group_sequence) == (b"group", 42)
    assert (raw.properties.to, raw.properties.subject, raw.properties.reply_to) == (b"to", b"subject", b"reply-to")
    assert (raw.properties.correlation_id, raw.properties.reply_to_group_id) == (b"correlation", b"reply-group")
    assert raw.properties.content_type == b"application/json"
    assert raw.properties.creation_time
    assert raw.properties.absolute_expiry_time == raw.properties.creation_time + 3_600_000
    assert raw.application_properties == {b"kind": b"annotated"}
    assert (raw.annotations or {})[b"x-opt-mine"] == b"annotation"
    assert (raw.annotations or {})[b"x-opt-number"] == 12
    assert (raw.delivery_annotations or {})[b"x-opt-hop"] == b"delivery annotation"
    assert raw.footer == {b"x-opt-sum": b"footer"}


@both_flavours
async def test_what_the_service_adds_does_not_grow_with_deliveries(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(
        AmqpAnnotatedMessage(value_body="x", annotations={"x-opt-mine": 1}, delivery_annotations={"x-opt-hop": 1})
    )
    first = await receive_one(receiver)
    await receiver.abandon_message(first)
    second = await receive_one(receiver)

    assert set(first.raw_amqp_message.annotations or {}) == set(second.raw_amqp_message.annotations or {})
    assert set(first.raw_amqp_message.delivery_annotations or {}) == set(
        second.raw_amqp_message.delivery_annotations or {}
    )
    assert first.message_id == second.message_id


@both_flavours
async def test_a_mapping_is_sent_as_the_message_it_describes(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages({"body": "described", "subject": "by a dict"})
    received = await receive_one(receiver)
    assert (str(received), received.subject) == ("described", "by a dict")


@both_flavours
async def test_a_received_message_can_be_sent_on(bus: Bus) -> None:
    (sender, receiver), (next_sender, next_receiver) = (
        await bus.open_pair(await bus.make_queue()),
        await bus.open_pair(await bus.make_queue()),
    )
    await sender.send_messages(ServiceBusMessage("on its way", message_id="1", correlation_id="0"))
    received = await receive_one(receiver)
    await next_sender.send_messages(received)
    again = await receive_one(next_receiver)

    assert (str(again), again.message_id, again.correlation_id) == ("on its way", "1", "0")
    assert again.delivery_count == 0
    assert again.lock_token != received.lock_token


@both_flavours
async def test_the_underlying_message_is_still_reachable_though_deprecated(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    message = ServiceBusMessage("old style")
    batch = await sender.create_message_batch()
    batch.add_message(message)
    await sender.send_messages(batch)
    received = await receive_one(receiver)
    with pytest.warns(DeprecationWarning, match="message"):
        assert message.message is not None
    with pytest.warns(DeprecationWarning, match="message"):
        assert batch.message is not None
    with pytest.warns(DeprecationWarning, match="message"):
        assert received.message is not None


@since("7.15", "has no ServiceBusReceivedMessage.from_bytes")
def test_a_received_message_can_be_read_from_its_bytes() -> None:
    # AMQP 1.0 part 3, 3.2.6: one data section.
    received = ServiceBusReceivedMessage.from_bytes(b"\x00\x53\x75\xa0\x05hello")
    assert list(received.body) == [b"hello"]
    assert received.sequence_number is None
