"""Create, read, update and delete queues through the administration client, and refused requests."""

from datetime import timedelta
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.servicebus import ServiceBusMessage
from azure.servicebus.management import ApiVersion, EntityAvailabilityStatus, EntityStatus, QueueProperties

from tests.compat.python.bus import Bus, both_flavours, receive_one, unique

# "P10675199DT2H48M5.4775807S", the longest span there is, as Python rounds it.
FOREVER = timedelta(days=10675199, hours=2, minutes=48, seconds=5, microseconds=477581)

CHOSEN: dict[str, Any] = {
    "auto_delete_on_idle": timedelta(minutes=10),
    "dead_lettering_on_message_expiration": True,
    "default_message_time_to_live": timedelta(minutes=11),
    "duplicate_detection_history_time_window": timedelta(minutes=12),
    "enable_batched_operations": False,
    "lock_duration": timedelta(seconds=13),
    "max_delivery_count": 14,
    "max_size_in_megabytes": 3072,
    "user_metadata": 'what it is for: <orders> & "more"',
}

INVALID: dict[str, dict[str, Any]] = {
    "a lock of more than five minutes": {"lock_duration": timedelta(minutes=5, seconds=1)},
    "a lock of no time": {"lock_duration": timedelta(0)},
    "a duplicate window of more than seven days": {
        "requires_duplicate_detection": True,
        "duplicate_detection_history_time_window": timedelta(days=8),
    },
    "a duplicate window of less than twenty seconds": {
        "requires_duplicate_detection": True,
        "duplicate_detection_history_time_window": timedelta(seconds=19),
    },
    "no delivery at all": {"max_delivery_count": 0},
    "an idle time of less than five minutes": {"auto_delete_on_idle": timedelta(minutes=4)},
    "no time to live": {"default_message_time_to_live": timedelta(0)},
    "fewer megabytes than there are": {"max_size_in_megabytes": 1},
    "more megabytes than there are": {"max_size_in_megabytes": 6000},
    "too much metadata": {"user_metadata": "x" * 1025},
    "a message size only premium has": {"max_message_size_in_kilobytes": 10240},
}


def settings(queue: QueueProperties, names: dict[str, Any]) -> dict[str, Any]:
    return {name: queue[name] for name in names}


@both_flavours
async def test_a_queue_has_the_defaults_of_the_service(bus: Bus) -> None:
    name = unique("queue")
    created = await bus.admin.create_queue(name)
    bus.forget_later(queue=name)
    found = await bus.admin.get_queue(name)
    for queue in (created, found):
        assert queue.name == name
        assert settings(queue, {"lock_duration": ..., "max_delivery_count": ..., "max_size_in_megabytes": ...}) == {
            "lock_duration": timedelta(minutes=1),
            "max_delivery_count": 10,
            "max_size_in_megabytes": 1024,
        }
        assert queue.default_message_time_to_live == queue.auto_delete_on_idle == FOREVER
        assert queue.enable_batched_operations is True
        for off in ("requires_session", "requires_duplicate_detection", "dead_lettering_on_message_expiration"):
            assert queue[off] is False, off
        assert not queue.enable_partitioning
        assert not queue.enable_express
        assert queue.forward_to is queue.forward_dead_lettered_messages_to is queue.user_metadata is None
        assert queue.status == EntityStatus.ACTIVE
        assert queue.availability_status == EntityAvailabilityStatus.AVAILABLE


@both_flavours
async def test_a_queue_is_made_with_every_property_chosen(bus: Bus) -> None:
    name = unique("queue")
    chosen = {**CHOSEN, "requires_session": True, "requires_duplicate_detection": True}
    created = await bus.admin.create_queue(name, **chosen)
    bus.forget_later(queue=name)
    assert settings(created, chosen) == chosen
    assert settings(await bus.admin.get_queue(name), chosen) == chosen


@both_flavours
async def test_spans_may_be_given_as_text(bus: Bus) -> None:
    name = await bus.make_queue(lock_duration="PT1M30S", default_message_time_to_live="P1DT1H")
    queue = await bus.admin.get_queue(name)
    assert queue.lock_duration == timedelta(seconds=90)
    assert queue.default_message_time_to_live == timedelta(hours=25)


@both_flavours
async def test_every_changeable_property_of_a_queue_is_changed(bus: Bus) -> None:
    name = await bus.make_queue()
    queue = await bus.admin.get_queue(name)
    for property_name, value in CHOSEN.items():
        queue[property_name] = value
    await bus.admin.update_queue(queue)
    changed = await bus.admin.get_queue(name)
    assert settings(changed, CHOSEN) == CHOSEN

    await bus.admin.update_queue(changed, max_delivery_count=3, lock_duration="PT20S")
    changed = await bus.admin.get_queue(name)
    assert settings(changed, CHOSEN) == {**CHOSEN, "max_delivery_count": 3, "lock_duration": timedelta(seconds=20)}

    as_mapping = {**dict(changed.items()), "name": name, "user_metadata": "from a mapping"}
    await bus.admin.update_queue(as_mapping)
    assert (await bus.admin.get_queue(name)).user_metadata == "from a mapping"


@both_flavours
async def test_every_status_can_be_set_and_read_back(bus: Bus) -> None:
    name = await bus.make_queue()
    for status in (
        EntityStatus.DISABLED,
        EntityStatus.SEND_DISABLED,
        EntityStatus.RECEIVE_DISABLED,
        EntityStatus.ACTIVE,
    ):
        await bus.admin.update_queue(await bus.admin.get_queue(name), status=status)
        assert (await bus.admin.get_queue(name)).status == status


@both_flavours
async def test_a_changed_lock_duration_counts_for_the_next_message(bus: Bus) -> None:
    name = await bus.make_queue(lock_duration="PT30S")
    sender, receiver = await bus.open_pair(name)
    await bus.admin.update_queue(await bus.admin.get_queue(name), lock_duration="PT3M")
    await sender.send_messages(ServiceBusMessage("x"))
    received = await receive_one(receiver)
    assert received.locked_until_utc
    assert received.enqueued_time_utc
    assert received.locked_until_utc - received.enqueued_time_utc > timedelta(minutes=2)


@both_flavours
async def test_a_queue_is_made_once_whatever_the_case_of_its_name(bus: Bus) -> None:
    name = await bus.make_queue()
    for same in (name, name.upper()):
        with pytest.raises(ResourceExistsError):
            await bus.admin.create_queue(same)
    with pytest.raises(ResourceExistsError):
        await bus.admin.create_topic(name)
    assert (await bus.admin.get_queue(name.upper())).lock_duration == timedelta(minutes=1)


@both_flavours
async def test_a_deleted_queue_is_gone(bus: Bus) -> None:
    name = unique("queue")
    await bus.admin.create_queue(name)
    await bus.admin.delete_queue(name)
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.get_queue(name)
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.get_queue_runtime_properties(name)
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.delete_queue(name)


@both_flavours
async def test_a_name_may_have_all_the_characters_the_service_allows(bus: Bus) -> None:
    name = f"{unique('Queue')}/sub.path_with-all/123"
    created = await bus.admin.create_queue(name)
    bus.forget_later(queue=name)
    assert created.name == (await bus.admin.get_queue(name)).name == name
    assert name in [queue.name async for queue in bus.admin.list_queues()]
    sender, receiver = await bus.open_pair(name)
    await sender.send_messages(ServiceBusMessage("by its path"))
    assert str(await receive_one(receiver)) == "by its path"


@pytest.mark.parametrize("what", INVALID)
@both_flavours
async def test_a_queue_is_refused_with(bus: Bus, what: str) -> None:
    name = unique("queue")
    with pytest.raises(HttpResponseError) as refusal:
        await bus.admin.create_queue(name, **INVALID[what])
    assert refusal.value.status_code == 400
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.get_queue(name)


@both_flavours
async def test_a_queue_with_an_impossible_name_is_refused(bus: Bus) -> None:
    for name in ("", "q" * 261, "what?", "a b", "/leading", "trailing/", "back\\slash", "a#b", "a@b"):
        with pytest.raises((HttpResponseError, ValueError)):
            await bus.admin.create_queue(name)


@both_flavours
async def test_what_cannot_be_changed_is_refused_and_nothing_is_changed(bus: Bus) -> None:
    name = await bus.make_queue()
    queue = await bus.admin.get_queue(name)
    for change in (
        {"requires_session": True},
        {"requires_duplicate_detection": True},
        {"lock_duration": timedelta(days=25)},
    ):
        with pytest.raises(HttpResponseError):
            await bus.admin.update_queue(queue, **change, max_delivery_count=77)
    assert (await bus.admin.get_queue(name)).max_delivery_count == 10
    queue.name = unique("queue")
    with pytest.raises(HttpResponseError):
        await bus.admin.update_queue(queue)
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.get_queue(queue.name)


@both_flavours
async def test_older_versions_of_the_interface_are_served(bus: Bus) -> None:
    for version in (ApiVersion.V2017_04, ApiVersion.V2021_05):
        admin = bus.connect_admin(api_version=version)
        name = unique("queue")
        await admin.create_queue(name, lock_duration="PT30S")
        bus.forget_later(queue=name)
        assert (await admin.get_queue(name)).lock_duration == timedelta(seconds=30)
        await admin.close()


@both_flavours
async def test_the_namespace_describes_itself(bus: Bus) -> None:
    properties = await bus.admin.get_namespace_properties()
    assert properties.name
    assert properties.messaging_sku == "Standard"
    assert properties.namespace_type == "Messaging"
    assert properties.created_at_utc
    assert properties.modified_at_utc
    assert properties.modified_at_utc >= properties.created_at_utc
