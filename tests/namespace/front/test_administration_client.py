"""The official administration client, sync and aio and unmodified, against the management API over TLS."""

import asyncio
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ResourceExistsError,
    ResourceNotFoundError,
)
from azure.servicebus.aio.management import ServiceBusAdministrationClient as AioClient
from azure.servicebus.management import (
    AccessRights,
    AuthorizationRule,
    CorrelationRuleFilter,
    EntityStatus,
    ServiceBusAdministrationClient,
    SqlRuleFilter,
    TrueRuleFilter,
)

from tests.namespace.front.http_peer import Served, served
from twinbus.amqp import RoutingFields, read_routing_fields
from twinbus.namespace.engine.descriptions import QueueDescription
from twinbus.namespace.engine.events import MessagesSent
from twinbus.namespace.front.certificates import ca_path, server_context
from twinbus.namespace.runtime import NamespaceRuntime

# One data section.
HELLO = b"\x00\x53\x75\xa0\x05hello"
NEVER = datetime.timedelta(days=10675199, hours=2, minutes=48, seconds=5, microseconds=477581)


class Place(NamedTuple):
    served: Served
    connection_string: str
    ca: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory: Path = tmp_path_factory.mktemp("tls")
    with served(server_context(directory)) as at:
        text = (
            f"Endpoint=sb://localhost:{at.port};SharedAccessKeyName=RootManageSharedAccessKey;"
            "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true;"
        )
        yield Place(at, text, str(ca_path(directory)))


@pytest.fixture
def client(place: Place) -> Iterator[ServiceBusAdministrationClient]:
    with ServiceBusAdministrationClient.from_connection_string(
        place.connection_string, connection_verify=place.ca, retry_total=0
    ) as made:
        yield made


def test_a_new_queue_has_the_defaults_of_the_service(client: ServiceBusAdministrationClient) -> None:
    queue = client.create_queue("defaults")
    assert queue.name == "defaults"
    assert queue.lock_duration == datetime.timedelta(minutes=1)
    assert queue.max_delivery_count == 10
    assert queue.max_size_in_megabytes == 1024
    assert queue.default_message_time_to_live == NEVER
    assert queue.auto_delete_on_idle == NEVER
    assert queue.duplicate_detection_history_time_window == datetime.timedelta(minutes=1)
    assert queue.status == EntityStatus.ACTIVE
    assert queue.availability_status == "Available"
    assert queue.enable_batched_operations is True
    assert queue.requires_session is False
    assert queue.authorization_rules is None
    assert queue.forward_to is None
    assert queue.user_metadata is None


def test_everything_set_on_a_queue_comes_back(client: ServiceBusAdministrationClient) -> None:
    rule = AuthorizationRule(
        type="SharedAccessAuthorizationRule",
        claim_type="SharedAccessKey",
        claim_value="None",
        rights=[AccessRights.SEND, AccessRights.LISTEN],
        key_name="mine",
        primary_key="p",
        secondary_key="s",
    )
    client.create_queue(
        "orders/new",
        authorization_rules=[rule],
        lock_duration=datetime.timedelta(seconds=30),
        default_message_time_to_live="PT1H30M0.5S",
        auto_delete_on_idle=datetime.timedelta(days=2),
        max_delivery_count=7,
        max_size_in_megabytes=5120,
        requires_session=True,
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window=datetime.timedelta(minutes=5),
        dead_lettering_on_message_expiration=True,
        enable_batched_operations=False,
        enable_partitioning=True,
        enable_express=True,
        user_metadata="a < b & ü\r\n",
    )
    queue = client.get_queue("orders/new")
    assert queue.lock_duration == datetime.timedelta(seconds=30)
    assert queue.default_message_time_to_live == datetime.timedelta(hours=1, minutes=30, milliseconds=500)
    assert queue.auto_delete_on_idle == datetime.timedelta(days=2)
    assert (queue.max_delivery_count, queue.max_size_in_megabytes) == (7, 5120)
    assert queue.requires_session
    assert queue.requires_duplicate_detection
    assert queue.dead_lettering_on_message_expiration
    assert queue.enable_partitioning
    assert queue.enable_express
    assert queue.enable_batched_operations is False
    assert queue.duplicate_detection_history_time_window == datetime.timedelta(minutes=5)
    assert queue.user_metadata is not None
    assert queue.user_metadata.startswith("a < b & ü")
    assert queue.authorization_rules is not None
    kept = queue.authorization_rules[0]
    assert (kept.key_name, kept.primary_key, kept.secondary_key) == ("mine", "p", "s")
    assert {str(right) for right in kept.rights or ()} == {"Send", "Listen"}


def test_properties_that_were_read_can_be_sent_back_as_an_update(client: ServiceBusAdministrationClient) -> None:
    client.create_queue("updated", requires_session=True, user_metadata="old")
    queue = client.get_queue("updated")
    queue.max_delivery_count = 3
    queue.status = EntityStatus.SEND_DISABLED
    queue.user_metadata = None
    client.update_queue(queue)
    after = client.get_queue("updated")
    assert (after.max_delivery_count, after.status, after.user_metadata) == (3, EntityStatus.SEND_DISABLED, None)
    assert after.requires_session
    assert after.default_message_time_to_live == NEVER


def test_an_update_of_a_fixed_property_is_refused(client: ServiceBusAdministrationClient) -> None:
    queue = client.create_queue("fixed")
    queue.requires_session = True
    with pytest.raises(HttpResponseError, match="RequiresSession"):
        client.update_queue(queue)


async def send(runtime: NamespaceRuntime, path: str, *messages: RoutingFields) -> None:
    entity = runtime.namespace.find(path)
    assert entity is not None
    done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    runtime.submit(entity, MessagesSent(done.set_result, messages))
    assert await done is None


def test_counts_are_runtime_properties(client: ServiceBusAdministrationClient, place: Place) -> None:
    client.create_queue("counted")
    place.served.call(send(place.served.runtime, "counted", read_routing_fields(HELLO), read_routing_fields(HELLO)))
    seen = client.get_queue_runtime_properties("counted")
    assert (seen.active_message_count, seen.total_message_count) == (2, 2)
    assert seen.scheduled_message_count == 0
    assert seen.dead_letter_message_count == 0
    assert seen.transfer_message_count == 0
    assert seen.transfer_dead_letter_message_count == 0
    assert seen.size_in_bytes is not None
    assert seen.size_in_bytes >= 2 * len(HELLO)
    assert seen.created_at_utc is not None
    assert seen.created_at_utc.year == 2023


def test_topics_subscriptions_and_their_rule(client: ServiceBusAdministrationClient) -> None:
    topic = client.create_topic("news/all", support_ordering=True, filtering_messages_before_publishing=True)
    assert topic.support_ordering
    client.create_subscription("news/all", "first", lock_duration="PT10S", requires_session=True)
    client.create_subscription("news/all", "second", dead_lettering_on_filter_evaluation_exceptions=False)
    first = client.get_subscription("news/all", "first")
    assert (first.name, first.lock_duration, first.requires_session) == ("first", datetime.timedelta(seconds=10), True)
    assert first.dead_lettering_on_filter_evaluation_exceptions
    assert not client.get_subscription("news/all", "second").dead_lettering_on_filter_evaluation_exceptions
    assert [one.name for one in client.list_subscriptions("news/all")] == ["first", "second"]
    assert client.get_topic_runtime_properties("news/all").subscription_count == 2
    assert client.get_subscription_runtime_properties("news/all", "first").total_message_count == 0
    assert [one.name for one in client.list_subscriptions_runtime_properties("news/all")] == ["first", "second"]
    (rule,) = client.list_rules("news/all", "first")
    assert rule.name == "$Default"
    assert isinstance(rule.filter, TrueRuleFilter)
    assert isinstance(client.get_rule("news/all", "first", "$Default").filter, TrueRuleFilter)
    first.max_delivery_count = 2
    client.update_subscription("news/all", first)
    assert client.get_subscription("news/all", "first").max_delivery_count == 2
    topic.user_metadata = "changed"
    client.update_topic(topic)
    assert client.get_topic("news/all").user_metadata == "changed"
    client.delete_subscription("news/all", "first")
    assert [one.name for one in client.list_subscriptions("news/all")] == ["second"]
    client.delete_topic("news/all")
    with pytest.raises(ResourceNotFoundError):
        client.get_topic("news/all")


def test_rules_are_made_read_changed_and_removed(client: ServiceBusAdministrationClient) -> None:
    client.create_topic("ruled")
    client.create_subscription("ruled", "s")
    made = client.create_rule("ruled", "s", "mine", filter=SqlRuleFilter("a = @b", {"@b": 1}))
    assert isinstance(made.filter, SqlRuleFilter)
    assert (made.name, made.filter.parameters) == ("mine", {"@b": 1})
    made.filter = CorrelationRuleFilter(correlation_id="x")
    client.update_rule("ruled", "s", made)
    changed = client.get_rule("ruled", "s", "mine").filter
    assert isinstance(changed, CorrelationRuleFilter)
    assert changed.correlation_id == "x"
    client.delete_rule("ruled", "s", "$Default")
    assert [rule.name for rule in client.list_rules("ruled", "s")] == ["mine"]
    with pytest.raises(HttpResponseError, match="At column 4: a value is expected, not the end"):
        client.create_rule("ruled", "s", "wrong", filter=SqlRuleFilter("a ="))
    with pytest.raises(ResourceNotFoundError):
        client.get_rule("ruled", "s", "wrong")
    with pytest.raises(ResourceNotFoundError):
        list(client.list_rules("ruled", "absent"))


def test_lists_come_in_pages(client: ServiceBusAdministrationClient, place: Place) -> None:
    names = [f"paged-{number:03d}" for number in range(120)]
    for name in names:
        place.served.call(place.served.runtime.create(QueueDescription(path=name)))
    found = [queue.name for queue in client.list_queues()]
    assert [name for name in found if name.startswith("paged-")] == names
    assert len(list(client.list_queues_runtime_properties())) == len(found)
    small = [queue.name for queue in client.list_queues(start_index=found.index("paged-000"), max_page_size=7)]
    assert small == found[found.index("paged-000") :]


def test_errors_are_the_errors_of_the_service(client: ServiceBusAdministrationClient) -> None:
    client.create_queue("there")
    with pytest.raises(ResourceExistsError):
        client.create_queue("THERE")
    for missing in (client.get_queue, client.delete_queue, client.get_topic, client.get_queue_runtime_properties):
        with pytest.raises(ResourceNotFoundError):
            missing("nowhere")
    with pytest.raises(ResourceNotFoundError):
        client.create_subscription("nowhere", "s")
    with pytest.raises(ResourceNotFoundError):
        list(client.list_subscriptions("there"))
    queue = client.get_queue("there")
    queue.name = "nowhere"
    with pytest.raises(ResourceNotFoundError):
        client.update_queue(queue)
    with pytest.raises(HttpResponseError, match="MaxMessageSizeInKilobytes"):
        client.create_queue("large", max_message_size_in_kilobytes=2048)
    with pytest.raises(HttpResponseError, match="LockDuration cannot be unlimited"):
        client.create_queue("odd", lock_duration="P10675199DT2H48M5.4775807S")
    with pytest.raises(HttpResponseError, match="LockDuration"):
        client.create_queue("odd", lock_duration="PT6M")
    with pytest.raises(HttpResponseError, match="ForwardTo"):
        client.create_queue("odd", forward_to="elsewhere")
    with pytest.raises(HttpResponseError):
        client.create_queue("")


@pytest.mark.parametrize(("part", "other"), [("SAS_KEY_VALUE", "other"), ("RootManageSharedAccessKey", "SomebodyElse")])
def test_a_wrong_key_is_refused(place: Place, part: str, other: str) -> None:
    text = place.connection_string.replace(part, other)
    with (
        ServiceBusAdministrationClient.from_connection_string(
            text, connection_verify=place.ca, retry_total=0
        ) as stranger,
        pytest.raises(ClientAuthenticationError),
    ):
        stranger.create_queue("intruder")
    assert place.served.runtime.namespace.info("intruder") is None


def test_the_namespace_describes_itself(client: ServiceBusAdministrationClient) -> None:
    properties = client.get_namespace_properties()
    assert (properties.name, properties.messaging_sku) == ("primary", "Standard")
    assert properties.created_at_utc is not None
    assert properties.created_at_utc.year == 2023


async def test_the_aio_client_creates_lists_updates_and_deletes(place: Place) -> None:
    async with AioClient.from_connection_string(
        place.connection_string, connection_verify=place.ca, retry_total=0
    ) as client:
        await client.create_topic("aio")
        await client.create_subscription("aio", "s")
        assert [one.name async for one in client.list_subscriptions("aio")] == ["s"]
        assert [rule.name async for rule in client.list_rules("aio", "s")] == ["$Default"]
        queue = await client.create_queue("aio-queue")
        queue.max_delivery_count = 2
        await client.update_queue(queue)
        assert (await client.get_queue("aio-queue")).max_delivery_count == 2
        await client.delete_queue("aio-queue")
        with pytest.raises(ResourceNotFoundError):
            await client.get_queue("aio-queue")
