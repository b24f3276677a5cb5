"""Messages before the first attempt: their ids (S8), and what no namespace could take."""

from datetime import timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageHeader, AmqpMessageProperties

from twinbus import TimeToLiveError
from twinbus.pairing.message_copies import LONGEST_TIME_TO_LIVE, id_of, identified
from twinbus.sdk import amqp_messages

DAYS = timedelta(days=1)


def annotated(message_id: Any = None, time_to_live: int | None = None) -> AmqpAnnotatedMessage:
    return AmqpAnnotatedMessage(
        data_body=b"x",
        properties=AmqpMessageProperties(message_id=message_id),
        header=AmqpMessageHeader(time_to_live=time_to_live),
    )


@pytest.mark.parametrize("message_id", [0, "", b"", "id", 7])
def test_s8_an_id_is_kept_whatever_it_is(message_id: object) -> None:
    plain = ServiceBusMessage("x")
    plain.message_id = message_id  # type: ignore[assignment] # AMQP has ids that are no text
    for message in (annotated(message_id), plain):
        assert identified(message) is message


def test_s8_a_message_without_an_id_gets_one_and_the_callers_own_none() -> None:
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
        annotated(time_to_live=LONGEST_TIME_TO_LIVE + 1),
        annotated(time_to_live=-1),
    ],
)
def test_s2_a_time_to_live_that_no_header_can_carry_is_the_callers_error(message: Any) -> None:
    for given in (message, [message]):
        with pytest.raises(TimeToLiveError, match=f"must be 0 to {LONGEST_TIME_TO_LIVE} ms"):
            identified(given)


@pytest.mark.parametrize("milliseconds", [0, LONGEST_TIME_TO_LIVE])
def test_s2_the_longest_time_to_live_is_taken(milliseconds: int) -> None:
    message = annotated("id", milliseconds)
    assert identified(message) is message


@pytest.mark.parametrize(
    ("mapping", "named"), [({"text": "secret"}, "text (str)"), ({"body": ["secret"]}, "body (list)")]
)
def test_a_mapping_that_is_no_message_is_told_by_names_and_types_never_by_what_it_holds(
    mapping: dict[str, Any], named: str
) -> None:
    with pytest.raises(TypeError) as raised:
        identified(mapping)
    assert named in str(raised.value)
    assert "secret" not in str(raised.value)
