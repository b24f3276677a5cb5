"""Fixtures: one namespace per worker, in its own process `twinbus serve`, and clients of the official SDK for it."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import azure.servicebus.aio as aio_sdk
import pytest
from azure.servicebus import ServiceBusClient
from azure.servicebus.management import ServiceBusAdministrationClient

from tests.compat.python.bus import unique
from tests.compat.python.flavours import SideBySide
from twinbus.testing import LocalNamespace


@pytest.fixture(scope="session")
def namespace() -> Iterator[LocalNamespace]:
    with LocalNamespace() as local:
        yield local


@pytest.fixture(scope="session")
def side_by_side(namespace: LocalNamespace) -> Iterator[SideBySide]:
    """Depends on the namespace, so that the namespace outlives the last links."""
    loop = SideBySide()
    yield loop
    loop.stop()


@pytest.fixture(scope="session")
def admin(namespace: LocalNamespace) -> Iterator[ServiceBusAdministrationClient]:
    with ServiceBusAdministrationClient.from_connection_string(
        namespace.connection_string, connection_verify=str(namespace.ca)
    ) as client:
        yield client


@pytest.fixture
def client(namespace: LocalNamespace) -> Iterator[ServiceBusClient]:
    with ServiceBusClient.from_connection_string(namespace.connection_string, retry_total=0) as sync_client:
        yield sync_client


@pytest.fixture
async def aio_client(namespace: LocalNamespace) -> AsyncIterator[aio_sdk.ServiceBusClient]:
    async with aio_sdk.ServiceBusClient.from_connection_string(namespace.connection_string, retry_total=0) as client:
        yield client


@pytest.fixture
def make_queue(admin: ServiceBusAdministrationClient) -> Iterator[Callable[..., str]]:
    made: list[str] = []

    def make(**properties: Any) -> str:
        name = unique("queue")
        admin.create_queue(name, **properties)
        made.append(name)
        return name

    yield make
    for name in made:
        admin.delete_queue(name)


@pytest.fixture
def make_topic(admin: ServiceBusAdministrationClient) -> Iterator[Callable[..., str]]:
    made: list[str] = []

    def make(*subscriptions: str, **subscription_properties: Any) -> str:
        name = unique("topic")
        admin.create_topic(name)
        made.append(name)
        for subscription in subscriptions:
            admin.create_subscription(name, subscription, **subscription_properties)
        return name

    yield make
    for name in made:
        admin.delete_topic(name)
