"""Topics: every subscription gets its own copy of a message, and is received from like a queue."""

import asyncio

import pytest
from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusMessage, ServiceBusReceiveMode, ServiceBusSubQueue
from azure.servicebus.exceptions import ServiceBusError
from azure.servicebus.management import TrueRuleFilter

from tests.compat.python.bus import (
    Bus,
    both_flavours,
    numbered,
    peek_all,
    receive_all,
    receive_one,
    texts,
    until,
)
from tests.sdk.installed import since


@both_flavours
async def test_every_subscription_gets_every_message_and_settles_it_alone(bus: Bus) -> None:
    topic = await bus.make_topic("a", "b", "c")
    sender = bus.client.get_topic_sender(topic)
    receivers = [bus.client.get_subscription_receiver(topic, name) for name in ("a", "b", "c")]
    await bus.open(sender, *receivers)
    await sender.send_messages([*numbered(2), ServiceBusMessage("2", application_properties={"kept": True})])

    copies = await asyncio.gather(*(receive_all(receiver, 3) for receiver in receivers))

    for copy in copies:
        assert texts(copy) == ["0", "1", "2"]
        assert copy[2].application_properties == {b"kept": True}
    assert len({received.lock_token for copy in copies for received in copy}) == 9
    first, second, third = receivers
    for received in copies[0]:
        await first.complete_message(received)
    await second.abandon_message(copies[1][0])
    await third.defer_message(copies[2][0])
    assert await peek_all(first) == []
    assert (await receive_one(second)).delivery_count == 1
    [deferred] = await third.receive_deferred_messages(copies[2][0].sequence_number or 0)
    assert (str(deferred), deferred.delivery_count is not None) == ("0", True)


@both_flavours
async def test_a_subscription_gets_nothing_from_before_it_was_made(bus: Bus) -> None:
    topic = await bus.make_topic()
    sender = bus.client.get_topic_sender(topic)
    await bus.open(sender)
    await sender.send_messages(ServiceBusMessage("nobody hears this"))
    await bus.admin.create_subscription(topic, "late")
    await sender.send_messages(ServiceBusMessage("heard"))
    receiver = bus.client.get_subscription_receiver(topic, "late")
    await bus.open(receiver)
    assert texts(await peek_all(receiver)) == ["heard"]


@both_flavours
async def test_a_subscription_has_a_dead_letter_queue_of_its_own(bus: Bus) -> None:
    topic = await bus.make_topic("a", "b", max_delivery_count=1)
    sender = bus.client.get_topic_sender(topic)
    receiver = bus.client.get_subscription_receiver(topic, "a")
    dead_receiver = bus.client.get_subscription_receiver(topic, "a", sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    other_dead_receiver = bus.client.get_subscription_receiver(topic, "b", sub_queue="deadletter")
    await bus.open(sender, receiver, dead_receiver, other_dead_receiver)
    await sender.send_messages(numbered(2))
    by_hand, by_count = await receive_all(receiver, 2)
    await receiver.dead_letter_message(by_hand, reason="by hand", error_description="of the test")
    await receiver.abandon_message(by_count)

    received = await receive_all(dead_receiver, 2)

    assert {str(message): message.dead_letter_reason for message in received} == {
        "0": "by hand",
        "1": "MaxDeliveryCountExceeded",
    }
    assert await peek_all(other_dead_receiver) == []


@both_flavours
async def test_a_subscription_can_be_received_from_with_deletion_and_with_prefetch(bus: Bus) -> None:
    topic = await bus.make_topic("a")
    sender = bus.client.get_topic_sender(topic, client_identifier="my-topic-sender")
    receiver = bus.client.get_subscription_receiver(
        topic, "a", receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE, prefetch_count=10, client_identifier="mine"
    )
    await bus.open(sender, receiver)
    assert (sender.client_identifier, receiver.client_identifier) == ("my-topic-sender", "mine")
    batch = await sender.create_message_batch()
    for message in numbered(10):
        batch.add_message(message)
    await sender.send_messages(batch)
    assert len(await receive_all(receiver, 10)) == 10
    assert await peek_all(receiver) == []


@since("7.15", "cannot list sessions")
@both_flavours
async def test_the_sessions_of_a_subscription_are_accepted_and_listed(bus: Bus) -> None:
    topic = await bus.make_topic("grouped", requires_session=True)
    await bus.admin.create_subscription(topic, "plain")
    sender = bus.client.get_topic_sender(topic)
    plain_receiver = bus.client.get_subscription_receiver(topic, "plain")
    await bus.open(sender, plain_receiver)
    await sender.send_messages([ServiceBusMessage("x", session_id=session_id) for session_id in ("s1", "s2")])

    async def listed() -> set[str]:
        sessions = bus.client.list_subscription_sessions(topic, "grouped", timeout=10)
        return {session_id async for session_id in sessions}

    await until(listed, lambda found: found == {"s1", "s2"})
    receiver = bus.client.get_subscription_receiver(topic, "grouped", session_id="s2")
    next_receiver = bus.client.get_subscription_receiver(
        topic, "grouped", session_id=NEXT_AVAILABLE_SESSION, max_wait_time=10
    )
    await bus.open(receiver)
    await bus.open(next_receiver)
    assert next_receiver.session.session_id == "s1"
    assert (await receive_one(receiver)).session_id == "s2"
    assert len(await receive_all(plain_receiver, 2)) == 2


@both_flavours
async def test_a_plain_subscription_has_one_rule_that_is_always_true(bus: Bus) -> None:
    topic = await bus.make_topic("plain")
    rules = [rule async for rule in bus.admin.list_rules(topic, "plain")]
    assert [rule.name for rule in rules] == ["$Default"]
    rule = await bus.admin.get_rule(topic, "plain", "$Default")
    for found in (rule, rules[0]):
        assert isinstance(found.filter, TrueRuleFilter)
        assert found.filter.sql_expression == "1=1"
        assert found.action is None
        assert found.created_at_utc


@both_flavours
async def test_a_topic_cannot_be_received_from(bus: Bus) -> None:
    topic = await bus.make_topic("a")
    receiver = bus.client.get_queue_receiver(topic)
    with pytest.raises(ServiceBusError):
        await bus.use(receiver)
