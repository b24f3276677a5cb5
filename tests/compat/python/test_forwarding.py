"""Auto-forward of messages and dead letters, messages that cannot be forwarded, and their counts."""

import pytest
from azure.core.exceptions import HttpResponseError
from azure.servicebus import ServiceBusMessage, ServiceBusSubQueue
from azure.servicebus.exceptions import ServiceBusError
from azure.servicebus.management import EntityStatus

from tests.compat.python.bus import Bus, both_flavours, numbered, receive_all, receive_one, texts, until


@both_flavours
async def test_a_queue_forwards_to_a_queue_in_order(bus: Bus) -> None:
    target = await bus.make_queue()
    source = await bus.make_queue(forward_to=target)
    described = await bus.admin.get_queue(source)
    assert (described.forward_to or "").endswith(f"/{target}")
    sender = bus.client.get_queue_sender(source)
    receiver = bus.client.get_queue_receiver(target)
    await bus.open(sender, receiver)
    await sender.send_messages(numbered(5))
    received = await receive_all(receiver, 5)
    assert texts(received) == ["0", "1", "2", "3", "4"]
    assert [message.enqueued_sequence_number for message in received] == [1, 2, 3, 4, 5]
    assert received[0].application_properties in (None, {})
    for message in received:
        await receiver.complete_message(message)
    left = await bus.admin.get_queue_runtime_properties(source)
    assert (left.total_message_count, left.transfer_dead_letter_message_count) == (0, 0)


@both_flavours
async def test_a_subscription_forwards_and_the_others_keep_theirs(bus: Bus) -> None:
    target = await bus.make_queue()
    topic = await bus.make_topic("kept")
    await bus.admin.create_subscription(topic, "on", forward_to=target)
    sender = bus.client.get_topic_sender(topic)
    receivers = [bus.client.get_queue_receiver(target), bus.client.get_subscription_receiver(topic, "kept")]
    await bus.open(sender, *receivers)
    await sender.send_messages(ServiceBusMessage("x"))
    for receiver in receivers:
        assert str(await receive_one(receiver)) == "x"


@both_flavours
async def test_dead_letters_are_forwarded_and_tell_their_source(bus: Bus) -> None:
    graves = await bus.make_queue()
    queue = await bus.make_queue(forward_dead_lettered_messages_to=graves)
    sender, receiver = await bus.open_pair(queue)
    digger = bus.client.get_queue_receiver(graves)
    await bus.open(digger)
    await sender.send_messages(ServiceBusMessage("x", application_properties={"kept": 1}))
    await receiver.dead_letter_message(await receive_one(receiver), reason="broken", error_description="so it is")
    dead = await receive_one(digger)
    assert (dead.dead_letter_reason, dead.dead_letter_error_description) == ("broken", "so it is")
    assert dead.dead_letter_source == queue
    assert (dead.application_properties or {})[b"kept"] == 1


@both_flavours
async def test_what_cannot_be_moved_is_a_transfer_dead_letter(bus: Bus) -> None:
    target = await bus.make_queue()
    source = await bus.make_queue(forward_to=target)
    disabled = await bus.admin.get_queue(target)
    disabled.status = EntityStatus.DISABLED
    await bus.admin.update_queue(disabled)
    sender = bus.client.get_queue_sender(source)
    receiver = bus.client.get_queue_receiver(source, sub_queue=ServiceBusSubQueue.TRANSFER_DEAD_LETTER)
    await bus.open(sender, receiver)
    await sender.send_messages(ServiceBusMessage("stuck"))
    figures = await until(
        lambda: bus.admin.get_queue_runtime_properties(source),
        lambda found: found.transfer_dead_letter_message_count == 1,
    )
    assert figures.active_message_count == 0
    assert texts(await receiver.peek_messages()) == ["stuck"]
    stuck = await receive_one(receiver)
    assert stuck.dead_letter_reason == "MessagingEntityDisabledException"
    await receiver.complete_message(stuck)
    assert await receiver.peek_messages() == []


@both_flavours
async def test_what_waits_to_be_forwarded_is_counted_as_transfer_until_it_is_moved(bus: Bus) -> None:
    target = await bus.make_queue()
    source = await bus.make_queue(forward_to=target)
    topic = await bus.make_topic()
    await bus.admin.create_subscription(topic, "on", forward_to=target)
    queue, subscription = await bus.admin.get_queue(source), await bus.admin.get_subscription(topic, "on")
    queue.status = subscription.status = EntityStatus.RECEIVE_DISABLED
    await bus.admin.update_queue(queue)
    await bus.admin.update_subscription(topic, subscription)
    senders = [bus.client.get_queue_sender(source), bus.client.get_topic_sender(topic)]
    await bus.open(*senders)
    for sender in senders:
        await sender.send_messages(numbered(3))
    for found in (
        await bus.admin.get_queue_runtime_properties(source),
        await bus.admin.get_subscription_runtime_properties(topic, "on"),
    ):
        assert (found.active_message_count, found.transfer_message_count, found.total_message_count) == (0, 3, 3)
    queue.status = subscription.status = EntityStatus.ACTIVE
    await bus.admin.update_queue(queue)
    await bus.admin.update_subscription(topic, subscription)
    receiver = bus.client.get_queue_receiver(target)
    await bus.open(receiver)
    assert sorted(texts(await receive_all(receiver, 6))) == ["0", "0", "1", "1", "2", "2"]
    for found in (
        await bus.admin.get_queue_runtime_properties(source),
        await bus.admin.get_subscription_runtime_properties(topic, "on"),
    ):
        assert (found.transfer_message_count, found.total_message_count) == (0, 0)


@both_flavours
async def test_the_fifth_hop_is_not_made(bus: Bus) -> None:
    chain = [await bus.make_queue()]
    for _ in range(5):
        chain.append(await bus.make_queue(forward_to=chain[-1]))
    sender = bus.client.get_queue_sender(chain[-1])
    receiver = bus.client.get_queue_receiver(chain[1], sub_queue=ServiceBusSubQueue.TRANSFER_DEAD_LETTER)
    await bus.open(sender, receiver)
    await sender.send_messages(ServiceBusMessage("far"))
    assert (await receive_one(receiver)).dead_letter_reason == "MaxTransferHopCountExceeded"


@both_flavours
async def test_targets_are_checked_and_nobody_receives_from_a_forwarding_queue(bus: Bus) -> None:
    target = await bus.make_queue()
    source = await bus.make_queue(forward_to=target)
    with pytest.raises(HttpResponseError, match="no queue or topic"):
        await bus.make_queue(forward_to="missing")
    with pytest.raises(ServiceBusError, match="forwards its messages"):
        await bus.use(bus.client.get_queue_receiver(source))


@both_flavours
async def test_n1_an_entity_may_forward_to_itself_or_its_topic_and_may_require_sessions(bus: Bus) -> None:
    # The SDK's own tests set all of these, and the service accepts them.
    topic = await bus.make_topic("all")
    queue = await bus.make_queue(requires_session=True, forward_to=topic, forward_dead_lettered_messages_to=topic)
    described = await bus.admin.get_queue(queue)
    described.forward_to = described.forward_dead_lettered_messages_to = queue
    await bus.admin.update_queue(described)
    described = await bus.admin.get_queue(queue)
    for address in (described.forward_to, described.forward_dead_lettered_messages_to):
        assert (address or "").endswith(f"/{queue}")
    subscription = await bus.admin.get_subscription(topic, "all")
    subscription.forward_to = subscription.forward_dead_lettered_messages_to = topic
    await bus.admin.update_subscription(topic, subscription)
    subscription = await bus.admin.get_subscription(topic, "all")
    assert (subscription.forward_to or "").endswith(f"/{topic}")
    senders = bus.client.get_queue_sender(queue), bus.client.get_topic_sender(topic)
    places = (
        bus.client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.TRANSFER_DEAD_LETTER),
        bus.client.get_subscription_receiver(topic, "all", sub_queue=ServiceBusSubQueue.TRANSFER_DEAD_LETTER),
    )
    await bus.open(*senders, *places)
    for sender, place in zip(senders, places, strict=True):
        await sender.send_messages(ServiceBusMessage("round", session_id="s"))
        assert (await receive_one(place)).dead_letter_reason == "MaxTransferHopCountExceeded"
