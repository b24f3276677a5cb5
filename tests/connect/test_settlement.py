"""Settlements: which answers confirm a settlement, and how failures are reported."""

import asyncio

import pytest

from twinbus.amqp import ACCEPTED, RELEASED, Accepted, DeliveryState, Error, Modified, Rejected, Released
from twinbus.connect import settlement
from twinbus.connect.errors import (
    MessageLockLostError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusInternalError,
)
from twinbus.connect.message_encoding import encode_message
from twinbus.connect.received_message import ReceivedMessage
from twinbus.message import Message
from twinbus.values import Condition

LOST = Rejected(Error(Condition.MESSAGE_LOCK_LOST, "lost"))


def message(number: int) -> ReceivedMessage:
    raw = encode_message(Message(b"", annotations={"x-opt-sequence-number": number}), 0)
    return ReceivedMessage(raw, None, delivery_id=number)


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        (Accepted(), ACCEPTED),
        (Released(), RELEASED),
        (Modified(True, False), settlement.abandon_outcome(None).state),
        (Rejected(None), settlement.dead_letter_outcome("r", "d", None).state),
        (Rejected(Error(Condition.DEAD_LETTER)), settlement.dead_letter_outcome("r", "d", None).state),
        (None, ACCEPTED),
    ],
)
def test_the_requested_outcome_is_a_confirmation(answer: DeliveryState | None, asked: DeliveryState) -> None:
    assert settlement.settlement_refusal(answer, asked, "q") is None


@pytest.mark.parametrize(
    ("answer", "asked", "kind"),
    [
        (LOST, ACCEPTED, MessageLockLostError),
        (LOST, settlement.dead_letter_outcome("r", "d", None).state, MessageLockLostError),
        (Released(), ACCEPTED, ServiceBusInternalError),
        (Rejected(None), ACCEPTED, ServiceBusInternalError),
    ],
)
def test_any_other_outcome_is_a_refusal(
    answer: DeliveryState, asked: DeliveryState, kind: type[ServiceBusError]
) -> None:
    assert type(settlement.settlement_refusal(answer, asked, "q")) is kind


async def test_a_settlement_is_done_when_each_message_was_answered() -> None:
    held = {number: message(number) for number in (1, 2, 3)}
    progress = settlement.SettlementProgress(ACCEPTED, asyncio.get_running_loop().create_future())
    progress.expect(held)
    progress.answered(2, MessageLockLostError("lost"))
    progress.answered(1, None)
    assert not progress.future.done()
    assert {found.delivery_id for found in progress.unfinished} == {2, 3}
    progress.answered(3, None)
    assert progress.future.done()
    assert [found.delivery_id for found, _ in progress.failures] == [2]
    assert [held[number].is_settled for number in (1, 2, 3)] == [True, False, True]


async def test_a_lost_link_fails_the_unconfirmed_messages() -> None:
    held = {number: message(number) for number in (1, 2)}
    progress = settlement.SettlementProgress(ACCEPTED, asyncio.get_running_loop().create_future())
    progress.expect(held)
    progress.answered(1, None)
    progress.fail(ServiceBusConnectionError("broke"))
    assert progress.future.done()
    assert [found.delivery_id for found, _ in progress.failures] == [2]


def test_the_error_names_the_failed_messages_and_has_the_class_of_the_first() -> None:
    failures = [(message(number), MessageLockLostError("lost")) for number in range(5, 20)]
    error = settlement.settlement_error("complete", failures, 100)
    assert type(error) is MessageLockLostError
    assert "complete failed for 15 of 100 (sequence number 5, 6, 7, 8, 9, 10, 11, 12, 13, 14…): lost" in str(error)
    assert len(error.failed) == 15
