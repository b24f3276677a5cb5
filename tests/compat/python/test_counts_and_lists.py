"""Runtime counts and lists of the administration client, also lists of more than one page."""

import itertools
from datetime import UTC, datetime, timedelta

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.management import QueueRuntimeProperties, SubscriptionRuntimeProperties

from tests.compat.python.bus import Bus, both_flavours, few_at_a_time, from_now, numbered, receive_all, until
from tests.compat.python.flavours import SideBySide
from twinbus.testing import LocalNamespace

MORE_THAN_A_PAGE = 102


@both_flavours
async def test_the_messages_of_a_queue_are_counted_by_their_state(bus: Bus) -> None:
    queue = await bus.make_queue()
    empty = await bus.admin.get_queue_runtime_properties(queue)
    assert (empty.name, empty.total_message_count, empty.size_in_bytes) == (queue, 0, 0)
    sender, receiver = await bus.open_pair(queue)
    await sender.send_messages(numbered(6))
    await sender.schedule_messages(numbered(2), from_now(3600))
    dead, deferred, done, _ = await receive_all(receiver, 4)
    await receiver.dead_letter_message(dead)
    await receiver.defer_message(deferred)
    await receiver.complete_message(done)

    def settled(found: QueueRuntimeProperties) -> bool:
        counts = (found.active_message_count, found.dead_letter_message_count, found.scheduled_message_count)
        return counts == (4, 1, 2)  # locked and deferred messages count as active

    runtime = await until(lambda: bus.admin.get_queue_runtime_properties(queue), settled)
    assert runtime.total_message_count == 7
    assert runtime.transfer_message_count == runtime.transfer_dead_letter_message_count == 0
    assert runtime.size_in_bytes
    assert runtime.size_in_bytes > 7


@both_flavours
async def test_an_entity_knows_when_it_was_made_changed_and_used(bus: Bus) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    topic = await bus.make_topic("a")
    queue = await bus.make_queue()
    sender, _ = await bus.open_pair(queue)
    await sender.send_messages(ServiceBusMessage("x"))
    await bus.admin.update_queue(await bus.admin.get_queue(queue), max_delivery_count=3)

    of_queue = await bus.admin.get_queue_runtime_properties(queue)
    of_topic = await bus.admin.get_topic_runtime_properties(topic)
    of_subscription = await bus.admin.get_subscription_runtime_properties(topic, "a")

    for runtime in (of_queue, of_topic, of_subscription):
        assert runtime.created_at_utc
        assert runtime.updated_at_utc
        assert runtime.accessed_at_utc
        assert before < runtime.created_at_utc < from_now(1)
        assert runtime.updated_at_utc >= runtime.created_at_utc
    assert of_queue.created_at_utc
    assert of_queue.updated_at_utc
    assert of_queue.updated_at_utc > of_queue.created_at_utc


@both_flavours
async def test_topics_and_subscriptions_are_counted_too(bus: Bus) -> None:
    topic = await bus.make_topic("a", "b")
    sender = bus.client.get_topic_sender(topic)
    receiver = bus.client.get_subscription_receiver(topic, "a")
    await bus.open(sender, receiver)
    await sender.send_messages(numbered(3))
    await sender.schedule_messages(ServiceBusMessage("later"), from_now(3600))
    dead, _, _ = await receive_all(receiver, 3)
    await receiver.dead_letter_message(dead)

    def counts(runtime: SubscriptionRuntimeProperties) -> tuple[int | None, int | None, int | None]:
        return runtime.active_message_count, runtime.dead_letter_message_count, runtime.total_message_count

    of_a = await until(
        lambda: bus.admin.get_subscription_runtime_properties(topic, "a"), lambda found: counts(found) == (2, 1, 3)
    )
    assert (of_a.name, of_a.transfer_message_count, of_a.transfer_dead_letter_message_count) == ("a", 0, 0)
    of_topic = await bus.admin.get_topic_runtime_properties(topic)
    assert (of_topic.name, of_topic.subscription_count, of_topic.scheduled_message_count) == (topic, 2, 1)
    assert of_topic.size_in_bytes
    listed = {found.name: counts(found) async for found in bus.admin.list_subscriptions_runtime_properties(topic)}
    assert listed == {"a": (2, 1, 3), "b": (3, 0, 3)}


@pytest.fixture(scope="session")
def crowd(namespace: LocalNamespace, side_by_side: SideBySide) -> list[str]:
    """The names of queues, of topics (behind `0-t-`), and of the subscriptions of the first topic.

    They sort before the names of all other tests, so entities of other tests do not move them in a list by offset.
    """
    names = [f"0-{number:03}" for number in range(MORE_THAN_A_PAGE)]

    async def make() -> None:
        bus = Bus("sync", namespace)
        await few_at_a_time(
            [bus.admin.create_queue(name, max_delivery_count=7) for name in names]
            + [bus.admin.create_topic(f"0-t-{name}") for name in names]
        )
        await few_at_a_time(bus.admin.create_subscription(f"0-t-{names[0]}", name) for name in names)
        await bus.close()

    side_by_side.run(make())
    return names


@pytest.mark.thorough
@both_flavours
async def test_more_than_a_page_of_queues_is_listed(bus: Bus, crowd: list[str]) -> None:
    queues = {queue.name: queue async for queue in bus.admin.list_queues()}
    runtimes = {runtime.name: runtime async for runtime in bus.admin.list_queues_runtime_properties()}

    assert set(crowd) <= set(queues)
    assert set(crowd) <= set(runtimes)
    assert {queues[name].max_delivery_count for name in crowd} == {7}
    assert {runtimes[name].total_message_count for name in crowd} == {0}


@both_flavours
async def test_more_than_a_page_of_topics_is_listed(bus: Bus, crowd: list[str]) -> None:
    topics = {topic.name async for topic in bus.admin.list_topics()}
    runtimes = {runtime.name: runtime async for runtime in bus.admin.list_topics_runtime_properties()}

    assert {f"0-t-{name}" for name in crowd} <= topics
    assert topics.isdisjoint(crowd), "queues are not among them"
    assert runtimes[f"0-t-{crowd[0]}"].subscription_count == MORE_THAN_A_PAGE
    assert runtimes[f"0-t-{crowd[1]}"].subscription_count == 0


@both_flavours
async def test_more_than_a_page_of_subscriptions_is_listed_and_only_those_of_the_topic(
    bus: Bus, crowd: list[str]
) -> None:
    first, second = f"0-t-{crowd[0]}", f"0-t-{crowd[1]}"
    pages = [[found.name async for found in page] async for page in bus.admin.list_subscriptions(first).by_page()]

    assert sorted(itertools.chain(*pages)) == crowd
    assert [len(page) for page in pages] == [100, MORE_THAN_A_PAGE - 100]
    assert [found.name async for found in bus.admin.list_subscriptions(second)] == []
    runtimes = [runtime.name async for runtime in bus.admin.list_subscriptions_runtime_properties(first)]
    assert sorted(runtimes) == crowd


@both_flavours
async def test_the_size_of_a_page_can_be_chosen(bus: Bus) -> None:
    topic = await bus.make_topic("a", "b", "c", "d", "e")
    paged = bus.admin.list_subscriptions(topic, max_page_size=2, start_index=1)
    pages = [[found.name async for found in page] async for page in paged.by_page()]
    assert [page for page in pages if page] == [["b", "c"], ["d", "e"]]
