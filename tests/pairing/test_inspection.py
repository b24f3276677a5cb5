"""What `doctor` finds and removes (P6), and whether pings are hidden (G3), on real namespaces."""

import itertools
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
from azure.core.exceptions import HttpResponseError, ServiceRequestError
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient

from twinbus.pairing.administration import Administration, AioAdministration, service_text
from twinbus.pairing.inspection import (
    SCRATCH,
    Cleaned,
    PropertyDifference,
    Visibility,
    check_pings,
    clean_extra,
    clock_of_refusal,
    inspect_backlog,
    orphans,
)
from twinbus.pairing.provisioning import PROPERTIES, provisioning_steps
from twinbus.testing import LocalEndpoint, LocalNamespaces

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    with LocalNamespaces("primary", "secondary", memory=True) as pair:
        yield pair


@pytest.fixture
def secondary(namespaces: LocalNamespaces) -> LocalEndpoint:
    return namespaces["secondary"]


@pytest.fixture
def administration(secondary: LocalEndpoint) -> Iterator[Administration]:
    with Administration.from_connection_string(secondary.connection_string) as made:
        yield made


@pytest.fixture
def name(administration: Administration) -> str:
    """A primary with four backlog queues."""
    made = f"inspected-{next(NUMBERS)}"
    administration.run(provisioning_steps(paths(made, 4)))
    return made


def paths(name: str, count: int) -> list[str]:
    return [f"{name}/x-servicebus-transfer/{index}" for index in range(count)]


def put(secondary: LocalEndpoint, path: str, messages: int = 1) -> None:
    with (
        ServiceBusClient.from_connection_string(secondary.connection_string) as client,
        client.get_queue_sender(path) as sender,
    ):
        sender.send_messages([ServiceBusMessage("x") for _ in range(messages)])


def test_p6_what_provisioning_made_has_nothing_to_be_said_against_it(administration: Administration, name: str) -> None:
    found = inspect_backlog(administration, name, 4)
    assert [queue.path for queue in found.queues] == paths(name, 4)
    assert (found.missing, found.extras) == ((), ())
    assert [(queue.differences, queue.losing) for queue in found.queues] == [((), ())] * 4


def test_p6_missing_queues_and_extras_are_told(
    administration: Administration, secondary: LocalEndpoint, name: str
) -> None:
    more = inspect_backlog(administration, name, 6)
    assert list(more.missing) == paths(name, 6)[4:]
    put(secondary, paths(name, 4)[3], 2)
    fewer = inspect_backlog(administration, name, 2)
    assert [(extra.path, extra.depth.active) for extra in fewer.extras] == [
        (paths(name, 4)[2], 0),
        (paths(name, 4)[3], 2),
    ]


def test_p6_depth_counts_what_was_dead_lettered_too(
    administration: Administration, secondary: LocalEndpoint, name: str
) -> None:
    path = paths(name, 1)[0]
    put(secondary, path, 3)
    with (
        ServiceBusClient.from_connection_string(secondary.connection_string) as client,
        client.get_queue_receiver(path) as receiver,
    ):
        receiver.dead_letter_message(receiver.receive_messages(max_message_count=1, max_wait_time=5)[0])
    depth = inspect_backlog(administration, name, 4).queues[0].depth
    assert (depth.active, depth.dead_lettered, depth.total) == (2, 1, 3)


def test_p6_differing_properties_are_told_with_what_was_wanted(administration: Administration) -> None:
    name = f"inspected-{next(NUMBERS)}"
    unlike = {
        **PROPERTIES,
        "lock_duration": "PT30S",
        "max_delivery_count": 10,
        "auto_delete_on_idle": timedelta(days=1),
    }
    administration.request(administration.client.create_queue, paths(name, 1)[0], **unlike, requires_session=True)
    (queue,) = inspect_backlog(administration, name, 1).queues
    assert set(queue.differences) == {
        PropertyDifference("lock_duration", "PT1M", "0:00:30"),
        PropertyDifference("max_delivery_count", "2147483647", "10"),
        PropertyDifference("auto_delete_on_idle", "P10675199DT2H48M5.4775807S", "1 day, 0:00:00"),
        PropertyDifference("requires_session", "False", "True"),
    }


def test_a_refusal_of_the_management_api_has_a_reason_without_xml_and_tells_the_time(secondary: LocalEndpoint) -> None:
    wrong = secondary.connection_string.replace("SharedAccessKey=", "SharedAccessKey=x")
    with Administration.from_connection_string(wrong) as refused, pytest.raises(HttpResponseError) as raised:
        inspect_backlog(refused, "contoso", 1)
    assert "<" not in service_text(raised.value)
    ahead = clock_of_refusal(raised.value)
    assert ahead is not None
    assert abs(ahead) < 60
    assert clock_of_refusal(ServiceRequestError("nobody answered")) is None


def test_p6_orphans_are_the_backlog_queues_of_other_primaries() -> None:
    found = [
        "Contoso/x-servicebus-transfer/0",
        "fabrikam/X/1",
        "b/x-servicebus-transfer/7",
        "a/x-servicebus-transfer/z",
    ]
    assert orphans("contoso", found) == ["b/x-servicebus-transfer/7"]


def test_p6_an_empty_extra_is_removed_and_one_with_messages_kept(
    administration: Administration, secondary: LocalEndpoint, name: str
) -> None:
    empty, full = paths(name, 4)[2:]
    put(secondary, full)
    assert clean_extra(administration, name, 2, empty) is Cleaned.REMOVED
    assert clean_extra(administration, name, 2, full) is Cleaned.KEPT
    assert clean_extra(administration, name, 2, empty) is Cleaned.GONE
    assert [extra.path for extra in inspect_backlog(administration, name, 2).extras] == [full]


def test_p6_a_message_that_comes_between_looking_and_removing_is_kept(
    administration: Administration, secondary: LocalEndpoint, name: str
) -> None:
    extra = paths(name, 4)[3]

    class Raced(Administration):
        """A race: a sender sends directly before the queue is closed to sends."""

        def request(self, method, *arguments, **keywords):  # type: ignore[no-untyped-def]  # as Administration's
            if method == self.client.update_queue and not raced:
                raced.append(True)
                put(secondary, extra)
            return super().request(method, *arguments, **keywords)

    raced: list[bool] = []
    with Raced.from_connection_string(secondary.connection_string) as racing:
        assert clean_extra(racing, name, 2, extra) is Cleaned.KEPT
    assert raced
    put(secondary, extra)
    found = inspect_backlog(administration, name, 2).extras[-1]
    assert (found.path, found.depth.active, found.differences) == (extra, 2, ())


def test_p6_what_is_no_extra_is_never_removed(administration: Administration, name: str) -> None:
    for path in (paths(name, 1)[0], "orders", "other/x-servicebus-transfer/9"):
        with pytest.raises(ValueError, match="no extra"):
            clean_extra(administration, name, 2, path)


async def test_g3_doctor_finds_that_a_twinbus_namespace_hides_pings_and_leaves_nothing(
    namespaces: LocalNamespaces,
) -> None:
    text = namespaces["primary"].connection_string
    async with (
        AioServiceBusClient.from_connection_string(text) as client,
        AioAdministration.from_connection_string(text) as administration,
    ):
        found = await check_pings(client, administration, entity=None)
    assert found.visibility is Visibility.HIDDEN, found.detail
    with Administration.from_connection_string(text) as sync:
        assert not [queue.name for queue in sync.request(sync.client.list_queues) if queue.name.startswith(SCRATCH)]


async def test_g3_in_a_queue_with_receivers_nothing_is_proved(namespaces: LocalNamespaces) -> None:
    text = namespaces["primary"].connection_string
    with Administration.from_connection_string(text) as sync:
        sync.request(sync.client.create_queue, "named")
    async with (
        AioServiceBusClient.from_connection_string(text) as client,
        AioAdministration.from_connection_string(text) as administration,
    ):
        found = await check_pings(client, administration, entity="named")
    assert found.visibility is Visibility.UNKNOWN
    assert "quicker" in found.detail


async def test_g3_a_primary_that_says_nothing_leaves_it_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        text = (
            f"Endpoint=sb://localhost:{silent.getsockname()[1]};SharedAccessKeyName=a;SharedAccessKey=b;"
            "UseDevelopmentEmulator=true"
        )
        async with (
            AioServiceBusClient.from_connection_string(text) as client,
            AioAdministration.from_connection_string(text, seconds=0.5) as administration,
        ):
            found = await check_pings(client, administration, entity=None, seconds=1)
    assert found.visibility is Visibility.UNKNOWN
    assert "link" in found.advice
