"""Messages and batches of azure-servicebus: sizes, bodies, and batches that change what is added to them."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageBodyType
from hypothesis import given

from twinbus.sdk.messages import (
    TransformingBatch,
    amqp_messages,
    batch_messages,
    encoded_body,
    encoded_size,
    id_and_size,
    message_size,
    outgoing_message,
    sdk_value,
    set_data_body,
)
from twinbus.values import Long, Timestamp

UNIT = 64 * 1024
TEXTS = ("message_id", "subject", "correlation_id", "content_type", "to", "reply_to", "session_id")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
messages = st.builds(
    lambda body, named, properties: ServiceBusMessage(body, application_properties=named, **properties),
    st.binary(max_size=300),
    st.dictionaries(texts, texts | st.integers(-(2**31), 2**31 - 1) | st.booleans(), max_size=4),
    st.fixed_dictionaries({}, optional=dict.fromkeys(TEXTS, texts.filter(len))),
)


@given(messages)
def test_m2_an_estimated_size_is_close_to_the_encoded_size(message: ServiceBusMessage) -> None:
    raw = message.raw_amqp_message
    assert abs(message_size(raw, UNIT) - encoded_size(raw)) < 512


@given(st.integers(-3000, 3000), st.integers(1, 3), st.booleans())
def test_m2_a_size_near_a_limit_between_billing_units_is_exact(distance: int, units: int, subject: bool) -> None:
    properties: dict[str, Any] = {"subject": "x" * 100} if subject else {"message_id": "1"}
    raw = ServiceBusMessage(bytes(units * UNIT + distance), **properties).raw_amqp_message
    assert -(-message_size(raw, UNIT) // UNIT) == -(-encoded_size(raw) // UNIT)


@pytest.mark.parametrize("properties", [{"subject": "x" * 5000}, {"message_id": "1", "subject": "x" * 5000}])
def test_m2_a_long_text_counts_with_and_without_a_message_id(properties: dict[str, Any]) -> None:
    raw = ServiceBusMessage(b"", **properties).raw_amqp_message
    assert message_size(raw, UNIT) > 5000


def test_m2_a_body_that_is_not_data_is_encoded_to_be_measured() -> None:
    raw = AmqpAnnotatedMessage(value_body={"a": 1})
    assert message_size(raw, UNIT) == encoded_size(raw)


def test_m2_the_id_and_the_size_of_a_message_are_those_of_its_raw_message() -> None:
    message = ServiceBusMessage(bytes(100), message_id="one")
    assert id_and_size(message, UNIT) == ("one", message_size(message.raw_amqp_message, UNIT))
    raw: Any = message.raw_amqp_message
    raw.properties = None
    assert id_and_size(message, UNIT) == (None, message_size(raw, UNIT))


@pytest.mark.parametrize("body", [{"data_body": [b"a", b"b"]}, {"value_body": "a"}, {"sequence_body": [["a"], [1]]}])
def test_s9_a_body_of_any_kind_is_encoded_and_replaced_by_one_data_section(body: dict[str, Any]) -> None:
    raw = AmqpAnnotatedMessage(**body)
    assert encoded_body(raw) == encoded_body(AmqpAnnotatedMessage(**body)) != b""
    set_data_body(raw, b"small")
    assert raw.body_type is AmqpMessageBodyType.DATA
    assert list(raw.body) == [b"small"]
    assert encoded_body(raw) == encoded_body(AmqpAnnotatedMessage(data_body=[b"small"]))


@pytest.mark.parametrize(("value", "encoded"), [(Long(5), b"\x55\x05"), (Timestamp(5), b"\x83" + bytes(7) + b"\x05")])
def test_s7_a_long_and_a_timestamp_keep_their_amqp_type_on_the_wire(value: object, encoded: bytes) -> None:
    assert encoded_body(AmqpAnnotatedMessage(value_body={"a": sdk_value(value)})).endswith(b"\xa1\x01a" + encoded)


def test_messages_batches_and_lists_give_their_raw_messages() -> None:
    one, two = ServiceBusMessage("1"), ServiceBusMessage("2")
    batch = ServiceBusMessageBatch(max_size_in_bytes=1000)
    batch.add_message(one)
    batch.add_message(two)
    assert amqp_messages(one) == [one.raw_amqp_message]
    assert amqp_messages([one, two.raw_amqp_message]) == [one.raw_amqp_message, two.raw_amqp_message]
    assert [str(message) for message in batch_messages(batch)] == ["1", "2"]
    assert [bytes(next(iter(raw.body))) for raw in amqp_messages(batch)] == [b"1", b"2"]


class Numbered(TransformingBatch):
    def transform(self, message: Any) -> Any:
        return ServiceBusMessage(f"{message} as {len(self)}")


def test_a_transforming_batch_changes_what_it_is_made_from_and_what_is_added_later() -> None:
    batch = ServiceBusMessageBatch(max_size_in_bytes=1000)
    batch.add_message(ServiceBusMessage("a"))
    made = Numbered.copy_of(batch)
    made.add_message(ServiceBusMessage("b"))
    assert [str(message) for message in batch_messages(made)] == ["a as 0", "b as 1"]
    assert made.max_size_in_bytes == batch.max_size_in_bytes
    assert [str(message) for message in batch_messages(batch)] == ["a"]


def test_an_outgoing_message_wraps_the_raw_message_itself() -> None:
    raw = AmqpAnnotatedMessage(data_body=b"x", properties={"message_id": "1"})
    assert outgoing_message(raw).raw_amqp_message is raw
    assert outgoing_message(raw).message_id == "1"
