"""A message that is encoded by a sender has the same values after a receiver has decoded it."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.amqp import EncodeError, split_sections
from twinbus.connect.message_encoding import MAX_TTL, encode_message, to_datetime, to_millis, with_scheduled_time
from twinbus.connect.received_message import MessageState, ReceivedMessage
from twinbus.message import BodyType, Message
from twinbus.values import Symbol, Timestamp, UByte

NOW = 1_700_000_000_000


def received(message: Message) -> ReceivedMessage:
    return ReceivedMessage(encode_message(message, NOW), None)


def test_every_property_comes_back_as_it_was_given() -> None:
    got = received(
        Message(
            b"body",
            message_id=UUID(int=7),
            session_id="session",
            subject="subject",
            content_type="text/plain",
            correlation_id="correlation",
            to="to",
            reply_to="reply",
            reply_to_session_id="reply session",
            partition_key="session",
            user_id=b"user",
            time_to_live=timedelta(seconds=3),
            application_properties={"number": 1, "instant": datetime(2024, 1, 2, tzinfo=UTC)},
            annotations={"mine": UByte(3)},
            footer={"sum": "x"},
            priority=7,
        )
    )
    assert got.message_id == UUID(int=7)
    assert (got.session_id, got.subject, got.content_type) == ("session", "subject", "text/plain")
    assert (got.correlation_id, got.to, got.reply_to) == ("correlation", "to", "reply")
    assert (got.reply_to_session_id, got.partition_key) == ("reply session", "session")
    assert got.properties.user_id == b"user"
    assert got.time_to_live == timedelta(seconds=3)
    assert got.application_properties == {"number": 1, "instant": Timestamp(1_704_153_600_000)}
    assert got.annotations["mine"] == UByte(3)
    assert got.footer == {"sum": "x"}
    assert got.header.priority == 7


@pytest.mark.parametrize(
    ("message", "kind", "body"),
    [
        (Message(b"bytes"), BodyType.DATA, b"bytes"),
        (Message("text"), BodyType.DATA, b"text"),
        (Message([b"one", b"two"]), BodyType.DATA, b"onetwo"),
        (Message(), BodyType.DATA, b""),
        (Message({"a": [1, None]}, body_type=BodyType.VALUE), BodyType.VALUE, {"a": [1, None]}),
        (Message(None, body_type=BodyType.VALUE), BodyType.VALUE, None),
        (Message([[1, 2], ["x"]], body_type=BodyType.SEQUENCE), BodyType.SEQUENCE, [[1, 2], ["x"]]),
    ],
)
def test_a_body_of_each_kind_comes_back(message: Message, kind: BodyType, body: Any) -> None:
    got = received(message)
    assert got.body_type is kind
    assert got.body == body


def test_a_message_without_a_body_has_an_empty_one() -> None:
    assert ReceivedMessage(b"", None).body == b""


def test_a_body_that_is_neither_bytes_nor_text_is_refused_as_data() -> None:
    with pytest.raises(EncodeError, match="dict"):
        encode_message(Message({"a": 1}), NOW)


def test_a_time_to_live_beyond_the_header_is_written_as_an_expiry_time() -> None:
    long = timedelta(days=100)
    got = received(Message(b"", time_to_live=long))
    assert got.header.ttl == MAX_TTL
    assert got.properties.creation_time == NOW
    assert got.properties.absolute_expiry_time == NOW + long // timedelta(milliseconds=1)


def test_a_time_to_live_within_the_header_sets_no_expiry_time() -> None:
    got = received(Message(b"", time_to_live=timedelta(days=1)))
    assert got.properties.absolute_expiry_time is None


def test_a_time_to_live_that_is_not_positive_is_refused() -> None:
    with pytest.raises(EncodeError, match="time_to_live"):
        encode_message(Message(b"", time_to_live=timedelta(0)), NOW)


def test_an_instant_without_a_zone_is_utc() -> None:
    assert to_millis(datetime(1970, 1, 1, 0, 0, 1)) == 1000  # noqa: DTZ001 (that is the point)
    assert to_millis(datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))) == 0


@given(st.integers(-62_135_596_800_000, 253_402_300_799_999))
def test_instants_survive_the_way_there_and_back(millis: int) -> None:
    assert to_millis(to_datetime(millis)) == millis


def test_an_instant_beyond_datetime_is_the_largest_datetime() -> None:
    assert to_datetime(2**62) == datetime.max.replace(tzinfo=UTC)


def test_a_message_is_scheduled_by_an_annotation() -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    assert received(Message(b"", scheduled_enqueue_time=at)).scheduled_enqueue_time == at


@pytest.mark.parametrize(
    "message",
    [
        Message(b"body"),
        Message(b"body", priority=3),
        Message(b"body", delivery_annotations={"d": 1}),
        Message(b"body", annotations={"mine": UByte(3)}, application_properties={"a": 1}),
        Message(b"body", scheduled_enqueue_time=datetime(2020, 1, 1, tzinfo=UTC)),
    ],
)
def test_an_encoded_message_is_scheduled_and_otherwise_left_as_it_is(message: Message) -> None:
    raw = encode_message(message, NOW)
    scheduled = split_sections(with_scheduled_time(raw, NOW))
    before = split_sections(raw)
    name = Symbol("x-opt-scheduled-enqueue-time")
    assert scheduled.message_annotations == {**before.message_annotations, name: Timestamp(NOW)}
    assert (scheduled.header, scheduled.properties) == (before.header, before.properties)
    assert scheduled.delivery_annotations == before.delivery_annotations
    assert scheduled.raw[scheduled.body_start :] == raw[before.body_start :]


def test_the_brokers_fields_are_read_from_the_annotations() -> None:
    raw = encode_message(
        Message(
            b"",
            annotations={
                "x-opt-sequence-number": 12,
                "x-opt-enqueue-sequence-number": 11,
                "x-opt-enqueued-time": Timestamp(1000),
                "x-opt-locked-until": Timestamp(2000),
                "x-opt-message-state": 1,
                "x-opt-deadletter-source": "orders",
            },
            application_properties={"DeadLetterReason": "r", "DeadLetterErrorDescription": "d"},
        ),
        NOW,
    )
    token = UUID("00010203-0405-0607-0809-0a0b0c0d0e0f")
    got = ReceivedMessage(raw, token.bytes_le)
    assert (got.sequence_number, got.enqueued_sequence_number) == (12, 11)
    assert got.enqueued_time == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert got.locked_until == datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)
    assert got.lock_token == token
    assert got.state is MessageState.DEFERRED
    assert (got.dead_letter_source, got.dead_letter_reason) == ("orders", "r")
    assert got.dead_letter_error_description == "d"
    got.lock_renewed(3000)
    assert got.locked_until == datetime(1970, 1, 1, 0, 0, 3, tzinfo=UTC)


def test_a_message_without_annotations_has_no_number_and_no_lock() -> None:
    got = received(Message(b""))
    assert (got.sequence_number, got.enqueued_time, got.locked_until, got.lock_token) == (None, None, None, None)
    assert (got.delivery_count, got.state) == (0, MessageState.ACTIVE)
