"""Create, read, update and delete topics and subscriptions through the administration client."""

from datetime import timedelta
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.servicebus.management import EntityAvailabilityStatus, EntityStatus

from tests.compat.python.bus import Bus, both_flavours, unique
from tests.compat.python.test_queue_properties import FOREVER

OF_A_TOPIC: dict[str, Any] = {
    "auto_delete_on_idle": timedelta(minutes=10),
    "default_message_time_to_live": timedelta(minutes=11),
    "duplicate_detection_history_time_window": timedelta(minutes=12),
    "enable_batched_operations": False,
    "max_size_in_megabytes": 3072,
    "support_ordering": True,
    "user_metadata": "a topic",
}

OF_A_SUBSCRIPTION: dict[str, Any] = {
    "auto_delete_on_idle": timedelta(minutes=10),
    "dead_lettering_on_filter_evaluation_exceptions": False,
    "dead_lettering_on_message_expiration": True,
    "default_message_time_to_live": timedelta(minutes=11),
    "enable_batched_operations": False,
    "lock_duration": timedelta(seconds=13),
    "max_delivery_count": 14,
    "user_metadata": "a subscription",
}

INVALID: dict[str, dict[str, Any]] = {
    "a lock of more than five minutes": {"lock_duration": timedelta(minutes=6)},
    "no delivery at all": {"max_delivery_count": 0},
    "an idle time of less than five minutes": {"auto_delete_on_idle": timedelta(minutes=4)},
    "too much metadata": {"user_metadata": "x" * 1025},
}


@both_flavours
async def test_a_topic_has_the_defaults_of_the_service(bus: Bus) -> None:
    name = unique("topic")
    created = await bus.admin.create_topic(name)
    bus.forget_later(topic=name)
    for topic in (created, await bus.admin.get_topic(name)):
        assert topic.name == name
        assert topic.max_size_in_megabytes == 1024
        assert topic.requires_duplicate_detection is False
        assert topic.enable_batched_operations is True
        assert topic.default_message_time_to_live == topic.auto_delete_on_idle == FOREVER
        assert topic.status == EntityStatus.ACTIVE
        assert topic.availability_status == EntityAvailabilityStatus.AVAILABLE


@both_flavours
async def test_a_topic_is_made_with_what_was_chosen_and_changed_to_it(bus: Bus) -> None:
    made, changed = unique("topic"), unique("topic")
    await bus.admin.create_topic(made, requires_duplicate_detection=True, **OF_A_TOPIC)
    await bus.admin.create_topic(changed)
    bus.forget_later(topic=made)
    bus.forget_later(topic=changed)
    topic = await bus.admin.get_topic(changed)
    for name, value in OF_A_TOPIC.items():
        topic[name] = value
    await bus.admin.update_topic(topic)

    for path in (made, changed):
        found = await bus.admin.get_topic(path)
        assert {name: found[name] for name in OF_A_TOPIC} == OF_A_TOPIC
    await bus.admin.update_topic(topic, status=EntityStatus.SEND_DISABLED)
    assert (await bus.admin.get_topic(changed)).status == EntityStatus.SEND_DISABLED


@both_flavours
async def test_a_subscription_has_the_defaults_of_the_service(bus: Bus) -> None:
    topic = await bus.make_topic()
    created = await bus.admin.create_subscription(topic, "plain")
    for subscription in (created, await bus.admin.get_subscription(topic, "plain")):
        assert subscription.name == "plain"
        assert subscription.lock_duration == timedelta(minutes=1)
        assert subscription.max_delivery_count == 10
        assert subscription.requires_session is False
        assert subscription.dead_lettering_on_message_expiration is False
        assert subscription.dead_lettering_on_filter_evaluation_exceptions is True
        assert subscription.default_message_time_to_live == subscription.auto_delete_on_idle == FOREVER
        assert subscription.status == EntityStatus.ACTIVE
        assert subscription.forward_to is None


@both_flavours
async def test_a_subscription_is_made_with_what_was_chosen_and_changed_to_it(bus: Bus) -> None:
    topic = await bus.make_topic("changed")
    await bus.admin.create_subscription(topic, "made", requires_session=True, **OF_A_SUBSCRIPTION)
    subscription = await bus.admin.get_subscription(topic, "changed")
    for name, value in OF_A_SUBSCRIPTION.items():
        subscription[name] = value
    await bus.admin.update_subscription(topic, subscription)

    for path in ("made", "changed"):
        found = await bus.admin.get_subscription(topic, path)
        assert {name: found[name] for name in OF_A_SUBSCRIPTION} == OF_A_SUBSCRIPTION
    assert (await bus.admin.get_subscription(topic, "made")).requires_session is True


@both_flavours
async def test_topics_and_subscriptions_are_made_once(bus: Bus) -> None:
    topic = await bus.make_topic("once")
    for same in (topic, topic.upper()):
        with pytest.raises(ResourceExistsError):
            await bus.admin.create_topic(same)
    for same in ("once", "ONCE"):
        with pytest.raises(ResourceExistsError):
            await bus.admin.create_subscription(topic, same)
    with pytest.raises(ResourceExistsError):
        await bus.admin.create_queue(topic)


@both_flavours
async def test_a_deleted_topic_takes_its_subscriptions_with_it(bus: Bus) -> None:
    topic = await bus.make_topic("kept", "deleted")
    await bus.admin.delete_subscription(topic, "deleted")
    assert [subscription.name async for subscription in bus.admin.list_subscriptions(topic)] == ["kept"]
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.get_subscription(topic, "deleted")
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.delete_subscription(topic, "deleted")

    await bus.admin.delete_topic(topic)
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.get_topic(topic)
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.delete_topic(topic)
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.get_subscription(topic, "kept")
    await bus.admin.create_topic(topic)
    assert [subscription async for subscription in bus.admin.list_subscriptions(topic)] == []


@pytest.mark.parametrize("what", INVALID)
@both_flavours
async def test_a_subscription_is_refused_with(bus: Bus, what: str) -> None:
    topic = await bus.make_topic()
    with pytest.raises(HttpResponseError) as refusal:
        await bus.admin.create_subscription(topic, "bad", **INVALID[what])
    assert refusal.value.status_code == 400


@both_flavours
async def test_a_subscription_wants_a_topic_and_a_name_of_at_most_fifty_characters(bus: Bus) -> None:
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.create_subscription("no-such-topic", "a")
    topic = await bus.make_topic("s" * 50)
    for name in ("", "s" * 51, "with/slash", "what?"):
        with pytest.raises((HttpResponseError, ValueError)):
            await bus.admin.create_subscription(topic, name)


@both_flavours
async def test_what_cannot_be_changed_of_a_topic_or_a_subscription_is_refused(bus: Bus) -> None:
    topic = await bus.make_topic("a")
    with pytest.raises(HttpResponseError):
        await bus.admin.update_topic(await bus.admin.get_topic(topic), requires_duplicate_detection=True)
    with pytest.raises(HttpResponseError):
        await bus.admin.update_subscription(topic, await bus.admin.get_subscription(topic, "a"), requires_session=True)
    subscription = await bus.admin.get_subscription(topic, "a")
    subscription.name = "b"
    with pytest.raises(HttpResponseError):
        await bus.admin.update_subscription(topic, subscription)
    with pytest.raises(HttpResponseError):
        await bus.admin.create_topic(unique("topic"), max_message_size_in_kilobytes=10240)
