"""The copies of a call's messages for the backlog: in which transfers they are sent, and which were accepted (S9)."""

from __future__ import annotations

from random import Random

import pytest
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageProperties

from twinbus import MessageTooLargeForBacklogError
from twinbus.pairing.decide.send_flow import Diversion
from twinbus.pairing.message_copies import next_payload
from twinbus.sdk import LinkLimits


def message(message_id: str | bytes, size: int) -> AmqpAnnotatedMessage:
    body = Random(0).randbytes(size)
    return AmqpAnnotatedMessage(data_body=body, properties=AmqpMessageProperties(message_id=message_id))


LIMITS = LinkLimits(message=4000, batch=2500, transport=PyamqpTransport)


def test_s9_the_ids_of_accepted_messages_and_of_the_others_after_each_transfer() -> None:
    messages = [message("a", 300), message(b"b", 300), message("c", 2600), message("d", 300)]
    diversion = Diversion(messages, "orders", None)
    assert diversion.split_ids() == ([], [])
    next_payload(diversion, LIMITS)
    assert diversion.ids == ("a", "b", "c", "d")
    assert diversion.split_ids() == ([], ["a", "b", "c", "d"])
    assert diversion.accept_transfer() == (3, False)
    assert diversion.split_ids() == (["a", "b", "d"], ["c"])
    next_payload(diversion, LIMITS)
    assert diversion.accept_transfer() == (1, True)
    assert diversion.split_ids() == (["a", "b", "c", "d"], [])


def test_s9_a_transfer_that_was_not_accepted_is_sent_again_as_it_is() -> None:
    diversion = Diversion([message("a", 300)], "orders", None)
    payload = next_payload(diversion, LIMITS)
    assert next_payload(diversion, LIMITS._replace(message=10)) is payload


def test_s9_one_message_that_fits_no_queue_fails_the_call_before_any_transfer() -> None:
    diversion = Diversion([message("a", 10), message("b", 200_000)], "orders", None)
    with pytest.raises(MessageTooLargeForBacklogError) as raised:
        next_payload(diversion, LIMITS)
    assert raised.value.message_id == "b"
    assert diversion.split_ids() == ([], ["a", "b"])
