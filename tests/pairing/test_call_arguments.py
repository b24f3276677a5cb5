"""The arguments of a sender's calls: ids before the first attempt (S8), and arguments that no namespace accepts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageHeader, AmqpMessageProperties

from twinbus import BacklogHandle, ScheduledInBacklogError, TimeToLiveError
from twinbus.pairing.call_arguments import MAX_TIME_TO_LIVE, check_cancel, check_schedule, check_send, identified
from twinbus.pairing.message_copies import id_of
from twinbus.sdk import amqp_messages

DAYS = timedelta(days=1)


def annotated(message_id: Any = None, time_to_live: int | None = None) -> AmqpAnnotatedMessage:
    return AmqpAnnotatedMessage(
        data_body=b"x",
        properties=AmqpMessageProperties(message_id=message_id),
        header=AmqpMessageHeader(time_to_live=time_to_live),
    )


# --- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message_id", [0, "", b"", "id", 7])
def test_s8_an_id_is_kept_whatever_it_is(message_id: object) -> None:
    plain = ServiceBusMessage("x")
    plain.message_id = message_id  # type: ignore[assignment] # AMQP has ids that are no text
    for message in (annotated(message_id), plain):
        assert identified(message) is message


def test_s8_a_message_without_an_id_gets_one_and_the_callers_message_stays_as_it_is() -> None:
    message = annotated()
    (raw,) = amqp_messages(identified(message))
    assert id_of(raw)
    assert message.properties is not None
    assert message.properties.message_id is None


@pytest.mark.parametrize(
    "message",
    [
        ServiceBusMessage("x", time_to_live=60 * DAYS),
        {"body": "x", "time_to_live": 60 * DAYS},
        annotated(time_to_live=MAX_TIME_TO_LIVE + 1),
        annotated(time_to_live=-1),
    ],
)
def test_s2_a_time_to_live_that_no_header_can_carry_is_the_callers_error(message: Any) -> None:
    for given in (message, [message]):
        with pytest.raises(TimeToLiveError, match=f"must be 0 to {MAX_TIME_TO_LIVE} ms"):
            identified(given)


@pytest.mark.parametrize("milliseconds", [0, MAX_TIME_TO_LIVE])
def test_s2_the_longest_time_to_live_is_accepted(milliseconds: int) -> None:
    message = annotated("id", milliseconds)
    assert identified(message) is message


@pytest.mark.parametrize(
    ("mapping", "named"), [({"text": "secret"}, "text (str)"), ({"body": ["secret"]}, "body (list)")]
)
def test_the_error_for_a_bad_mapping_shows_names_and_types_and_never_contents(
    mapping: dict[str, Any], named: str
) -> None:
    with pytest.raises(TypeError) as raised:
        identified(mapping)
    assert named in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("given", [42, None, "text", b"bytes", [None], ["text"], object()])
def test_what_is_no_message_is_a_type_error_as_with_the_sdk(given: Any) -> None:
    with pytest.raises(TypeError, match="Only AmqpAnnotatedMessage, ServiceBusMessage instances or Mappings"):
        identified(given)


# --- checks ----------------------------------------------------------------------------------------------------------


def messages(count: int) -> Iterator[ServiceBusMessage]:
    return (ServiceBusMessage("x") for _ in range(count))


@pytest.mark.parametrize("given", [[], (), {}, "", messages(0)])
def test_s1_an_empty_argument_sends_nothing_as_with_the_sdk(given: Any) -> None:
    assert check_send(False, given, None) is None


def test_s1_an_iterator_of_messages_is_a_list_of_them() -> None:
    checked = check_send(False, messages(2), None)
    assert checked is not None
    assert [type(one) for one in checked.message] == [ServiceBusMessage] * 2


@pytest.mark.parametrize("check", [check_send, check_schedule])
def test_s6_a_timeout_becomes_a_deadline_on_the_monotonic_clock(check: Any) -> None:
    before = time.monotonic()
    checked = check(False, ServiceBusMessage("x"), 5.0)
    assert before + 5.0 <= checked.until <= time.monotonic() + 5.0
    assert check(False, ServiceBusMessage("x"), None).until is None


def test_s10_a_negative_number_was_never_the_primarys_whatever_its_type() -> None:
    with pytest.raises(ScheduledInBacklogError) as raised:
        check_cancel(False, [-3, 0, 1, BacklogHandle(-7)], None)
    assert raised.value.handles == (-3, -7)
    with pytest.raises(ScheduledInBacklogError):
        check_cancel(False, -3, None)


def test_s10_one_number_or_several_are_a_list_and_none_are_nothing() -> None:
    assert check_cancel(False, 4, None) == ([4], None)
    assert check_cancel(False, [4, 5], None) == ([4, 5], None)
    assert check_cancel(False, [], None) is None
