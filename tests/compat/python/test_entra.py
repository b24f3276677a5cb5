"""azure-servicebus with a credential for Entra ID, unmodified: sync and asyncio, messages and management (N6)."""

from collections.abc import Iterator
from typing import Any

import pytest
from azure.core.exceptions import ClientAuthenticationError
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient
from azure.servicebus.aio.management import ServiceBusAdministrationClient as AioAdministrationClient
from azure.servicebus.exceptions import ServiceBusAuthenticationError, ServiceBusAuthorizationError
from azure.servicebus.management import ServiceBusAdministrationClient

from tests.entra import AUDIENCE, ISSUER, OWNER, RECEIVER, SENDER, AioIssuedTokens, IssuedTokens, Issuer
from twinbus.testing import LocalNamespace

pytestmark = pytest.mark.thorough
KEYS = Issuer()
QUEUES = {"namespaces": [{"name": "primary", "queues": [{"name": "orders"}, {"name": "bills"}]}]}


@pytest.fixture(scope="module")
def namespace() -> Iterator[LocalNamespace]:
    with LocalNamespace(memory=True, config=QUEUES, jwks=KEYS.key_set, audience=AUDIENCE, issuer=ISSUER) as started:
        yield started


def client(namespace: LocalNamespace, *roles: str, **fields: Any) -> ServiceBusClient:
    tokens = IssuedTokens(KEYS, *roles, **fields)
    return ServiceBusClient(f"localhost:{namespace.port}", tokens, use_tls=False, retry_total=0)


def test_n6_a_client_with_a_credential_sends_and_receives_what_its_roles_allow(namespace: LocalNamespace) -> None:
    with client(namespace, SENDER, f"{RECEIVER}:orders") as bus:
        with bus.get_queue_sender("orders") as sender, bus.get_queue_receiver("orders") as receiver:
            sender.send_messages(ServiceBusMessage("two coffees"))
            [message] = receiver.receive_messages(max_wait_time=20)
            receiver.complete_message(message)
        with bus.get_queue_sender("bills") as sender:
            sender.send_messages(ServiceBusMessage("a bill"))
        with pytest.raises(ServiceBusAuthorizationError), bus.get_queue_receiver("bills") as receiver:
            receiver.receive_messages(max_wait_time=1)


async def test_n6_an_asyncio_client_with_a_credential_sends_and_receives(namespace: LocalNamespace) -> None:
    tokens = AioIssuedTokens(KEYS, SENDER, RECEIVER)
    async with (
        AioServiceBusClient(f"localhost:{namespace.port}", tokens, use_tls=False) as bus,
        bus.get_queue_sender("orders") as sender,
        bus.get_queue_receiver("orders") as receiver,
    ):
        await sender.send_messages(ServiceBusMessage("tea"))
        [message] = await receiver.receive_messages(max_wait_time=20)
        await receiver.complete_message(message)
    assert tokens.scopes == {f"{AUDIENCE}//.default"}


@pytest.mark.parametrize(
    "wrong",
    [{"aud": "https://elsewhere.example"}, {"iss": "https://elsewhere.example"}, {"seconds": -5}, {"roles": []}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_n6_a_refused_token_is_an_authentication_error(namespace: LocalNamespace, wrong: dict[str, Any]) -> None:
    with client(namespace, SENDER, **wrong) as bus, pytest.raises(ServiceBusAuthenticationError):
        bus.get_queue_sender("orders").send_messages(ServiceBusMessage("x"))


@pytest.mark.parametrize("forward_to", [None, "bills"])
async def test_n6_the_management_clients_work_with_a_credential(
    namespace: LocalNamespace, forward_to: str | None
) -> None:
    place, trust = f"localhost:{namespace.port}", {"connection_verify": str(namespace.ca)}
    with ServiceBusAdministrationClient(place, IssuedTokens(KEYS, OWNER), **trust) as admin:
        admin.create_queue("made", forward_to=forward_to)
        assert "made" in {queue.name for queue in admin.list_queues()}
    async with AioAdministrationClient(place, AioIssuedTokens(KEYS, OWNER), **trust) as aio_admin:
        await aio_admin.delete_queue("made")
    with (
        ServiceBusAdministrationClient(place, IssuedTokens(KEYS, SENDER, RECEIVER), **trust) as admin,
        pytest.raises(ClientAuthenticationError, match="the Manage claim is required"),
    ):
        admin.create_queue("made")


def test_n6_links_outlive_their_tokens(namespace: LocalNamespace) -> None:
    """The SDK puts another token in the last tenth of the lifetime. Otherwise a call would fail: there is no retry."""
    tokens = IssuedTokens(KEYS, SENDER, RECEIVER, seconds=12)
    given = ServiceBusClient(f"localhost:{namespace.port}", tokens, use_tls=False, retry_total=0)
    with given as bus, bus.get_queue_sender("orders") as sender, bus.get_queue_receiver("orders") as receiver:
        while tokens.given < 4:
            sender.send_messages(ServiceBusMessage("x"))
            for message in receiver.receive_messages(max_message_count=10, max_wait_time=0.2):
                receiver.complete_message(message)
