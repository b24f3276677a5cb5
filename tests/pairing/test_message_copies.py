"""The copies of a call's messages for the backlog: in which transfers they go, and which of them are safe (S9)."""

from __future__ import annotations

from random import Random

import pytest
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageProperties

from twinbus import MessageTooLargeForBacklogError
from twinbus.pairing.message_copies import BacklogCopies
from twinbus.sdk import LinkLimits


def message(message_id: str | bytes, size: int) -> AmqpAnnotatedMessage:
    body = Random(0).randbytes(size)
    return AmqpAnnotatedMessage(data_body=body, properties=AmqpMessageProperties(message_id=message_id))


LIMITS = LinkLimits(message=4000, batch=2500, transport=PyamqpTransport)


def test_s9_the_ids_of_accepted_messages_and_of_the_others_after_each_transfer() -> None:
    copies = BacklogCopies([message("a", 300), message(b"b", 300), message("c", 2600), message("d", 300)], "orders")
    assert not copies.done
    assert copies.ids == ["a", "b", "c", "d"]
    assert copies.split_ids() == ([], ["a", "b", "c", "d"])
    copies.next_payload(LIMITS)
    assert copies.accept_transfer() == 3
    assert copies.split_ids() == (["a", "b", "d"], ["c"])
    assert not copies.done
    copies.next_payload(LIMITS)
    assert copies.accept_transfer() == 1
    assert copies.split_ids() == (["a", "b", "c", "d"], [])
    assert copies.done


def test_s9_a_transfer_that_was_not_accepted_is_sent_again_as_it_is() -> None:
    copies = BacklogCopies([message("a", 300)], "orders")
    payload = copies.next_payload(LIMITS)
    assert copies.next_payload(LIMITS._replace(message=10)) is payload


def test_s9_one_message_that_fits_no_queue_fails_the_call_before_any_transfer() -> None:
    copies = BacklogCopies([message("a", 10), message("b", 200_000)], "orders")
    with pytest.raises(MessageTooLargeForBacklogError) as raised:
        copies.next_payload(LIMITS)
    assert raised.value.message_id == "b"
    assert copies.split_ids() == ([], ["a", "b"])
