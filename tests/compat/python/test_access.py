"""Access: keys, signatures, authorization rules of a queue, and TLS. test_claims.py has the namespace's own rules."""

import asyncio
import base64
import hashlib
import hmac
import time
import urllib.parse
from typing import Any

import azure.servicebus as sync_sdk
import azure.servicebus.aio as aio_sdk
import pytest
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.core.exceptions import ClientAuthenticationError
from azure.servicebus import ServiceBusMessage, TransportType, parse_connection_string
from azure.servicebus.exceptions import ServiceBusAuthenticationError, ServiceBusAuthorizationError, ServiceBusError
from azure.servicebus.management import AccessRights, AuthorizationRule

from tests.compat.python.bus import PATIENCE, Bus, Handler, both_flavours, receive_one, unique
from tests.sdk.installed import since

REFUSED = (ServiceBusAuthenticationError, ServiceBusAuthorizationError)

RULES_OF_THE_QUEUE: dict[str, AccessRights] = {"send-only": AccessRights.SEND, "listen-only": AccessRights.LISTEN}


def with_parts(connection_string: str, **parts: str | None) -> str:
    """The connection string with some of its parts replaced, or left out where the new one is None."""
    current: dict[str, str | None] = {}
    for part in connection_string.strip(";").split(";"):
        name, value = part.split("=", 1)
        current[name] = value
    return ";".join(f"{name}={value}" for name, value in {**current, **parts}.items() if value is not None)


def with_signature(bus: Bus, token: str) -> str:
    return with_parts(
        bus.connection_string, SharedAccessKeyName=None, SharedAccessKey=None, SharedAccessSignature=token
    )


def signature(uri: str, key_name: str, key: str, *, expires_in: float = 600) -> str:
    resource = urllib.parse.quote_plus(uri)
    expiry = str(int(time.time() + expires_in))
    digest = hmac.new(key.encode(), f"{resource}\n{expiry}".encode(), hashlib.sha256).digest()
    signed = urllib.parse.quote_plus(base64.b64encode(digest))
    return f"SharedAccessSignature sr={resource}&sig={signed}&se={expiry}&skn={key_name}"


def host_of(bus: Bus) -> str:
    return parse_connection_string(bus.connection_string).fully_qualified_namespace


def key_of(bus: Bus) -> tuple[str, str]:
    parsed = parse_connection_string(bus.connection_string)
    assert parsed.shared_access_key_name
    assert parsed.shared_access_key
    return parsed.shared_access_key_name, parsed.shared_access_key


async def refused(bus: Bus, *handlers: Handler) -> None:
    for outcome in await asyncio.gather(*map(bus.use, handlers), return_exceptions=True):
        assert isinstance(outcome, REFUSED)


async def send_and_receive(bus: Bus, client: aio_sdk.ServiceBusClient, queue: str) -> None:
    sender, receiver = client.get_queue_sender(queue), client.get_queue_receiver(queue)
    await bus.open(sender, receiver)
    await sender.send_messages(ServiceBusMessage("allowed"))
    await receiver.complete_message(await receive_one(receiver))


@both_flavours
async def test_a_wrong_key_and_an_unknown_key_name_are_refused(bus: Bus) -> None:
    queue = await bus.make_queue()
    wrong_strings = [
        with_parts(bus.connection_string, SharedAccessKey="bm90IHRoZSBrZXk="),
        with_parts(bus.connection_string, SharedAccessKeyName="nobody"),
    ]
    wrong_clients = [bus.connect(wrong) for wrong in wrong_strings]
    senders = [client.get_queue_sender(queue) for client in wrong_clients]
    receivers = [client.get_queue_receiver(queue) for client in wrong_clients]
    await refused(bus, *senders, *receivers)
    for wrong in wrong_strings:
        admin = bus.connect_admin(wrong)
        with pytest.raises(ClientAuthenticationError):
            await admin.get_queue(queue)
        await admin.close()


@both_flavours
async def test_a_signature_stands_in_for_the_key_until_it_expires(bus: Bus) -> None:
    queue = await bus.make_queue()
    uri = f"sb://{host_of(bus)}/{queue}"
    good = bus.connect(with_signature(bus, signature(uri, *key_of(bus))))
    expired = bus.connect(with_signature(bus, signature(uri, *key_of(bus), expires_in=-60)))
    torn = bus.connect(with_signature(bus, signature(uri, key_of(bus)[0], "bm90IHRoZSBrZXk=")))
    await asyncio.gather(
        send_and_receive(bus, good, queue),
        refused(bus, expired.get_queue_sender(queue), torn.get_queue_sender(queue)),
    )


@both_flavours
async def test_a_signature_for_one_queue_opens_no_other(bus: Bus) -> None:
    mine, other = await asyncio.gather(bus.make_queue(), bus.make_queue())
    client = bus.connect(with_signature(bus, signature(f"sb://{host_of(bus)}/{mine}", *key_of(bus))))
    await asyncio.gather(send_and_receive(bus, client, mine), refused(bus, client.get_queue_sender(other)))


@both_flavours
async def test_a_key_of_a_queue_does_what_its_claims_allow(bus: Bus) -> None:
    queue = unique("queue")
    key = base64.b64encode(hashlib.sha256(queue.encode()).digest()).decode()
    rules = [
        AuthorizationRule(
            type="SharedAccessAuthorizationRule",
            claim_type="SharedAccessKey",
            claim_value="None",
            rights=[right],
            key_name=name,
            primary_key=key,
            secondary_key=key,
        )
        for name, right in RULES_OF_THE_QUEUE.items()
    ]
    await bus.admin.create_queue(queue, authorization_rules=rules)
    bus.forget_later(queue=queue)
    stored = (await bus.admin.get_queue(queue)).authorization_rules
    assert stored
    assert {rule.key_name: rule.rights for rule in stored} == {"send-only": ["Send"], "listen-only": ["Listen"]}
    send_only, listen_only = (
        bus.connect(with_parts(bus.connection_string, SharedAccessKeyName=name, SharedAccessKey=key, EntityPath=queue))
        for name in RULES_OF_THE_QUEUE
    )
    sender = send_only.get_queue_sender(queue)
    receiver = listen_only.get_queue_receiver(queue)
    await bus.open(sender, receiver)
    await sender.send_messages(ServiceBusMessage("allowed"))
    assert str(await receive_one(receiver)) == "allowed"
    await refused(bus, send_only.get_queue_receiver(queue), listen_only.get_queue_sender(queue))


def queue_rule(key: str) -> AuthorizationRule:
    return AuthorizationRule(
        type="SharedAccessAuthorizationRule",
        claim_type="SharedAccessKey",
        claim_value="None",
        rights=[AccessRights.MANAGE, AccessRights.SEND, AccessRights.LISTEN],
        key_name="owner",
        primary_key=key,
        secondary_key=key,
    )


@both_flavours
async def test_x4_a_rotated_key_of_a_queue_ends_the_links_that_it_opened(bus: Bus) -> None:
    queue, old, new = unique("queue"), unique("old-key"), unique("new-key")
    await bus.admin.create_queue(queue, authorization_rules=[queue_rule(old)])
    bus.forget_later(queue=queue)
    by_old, by_new = (
        with_parts(bus.connection_string, SharedAccessKeyName="owner", SharedAccessKey=key, EntityPath=queue)
        for key in (old, new)
    )
    client = bus.connect(by_old)
    sender, receiver = client.get_queue_sender(queue), client.get_queue_receiver(queue)
    untouched = bus.client.get_queue_sender(queue)
    await bus.open(sender, receiver, untouched)
    await sender.send_messages(ServiceBusMessage("before"))
    described = await bus.admin.get_queue(queue)
    described.authorization_rules = [queue_rule(new)]
    await bus.admin.update_queue(described)
    with pytest.raises(ServiceBusError):
        await sender.send_messages(ServiceBusMessage("refused"))
    with pytest.raises(ServiceBusError):
        await receiver.receive_messages(max_wait_time=PATIENCE)
    await refused(bus, client.get_queue_sender(queue), client.get_queue_receiver(queue))
    await untouched.send_messages(ServiceBusMessage("after"))
    taken = bus.connect(by_new).get_queue_receiver(queue)
    await bus.open(taken)
    assert [str(await receive_one(taken)), str(await receive_one(taken))] == ["before", "after"]


@both_flavours
async def test_x4_a_key_of_a_queue_cannot_forward_to_another_queue(bus: Bus) -> None:
    mine, key = unique("queue"), unique("key")
    other = await bus.make_queue()
    await bus.admin.create_queue(mine, authorization_rules=[queue_rule(key)])
    bus.forget_later(queue=mine)
    owner = with_parts(bus.connection_string, SharedAccessKeyName="owner", SharedAccessKey=key)
    admin = bus.connect_admin(owner)
    described = await admin.get_queue(mine)
    for name in ("forward_to", "forward_dead_lettered_messages_to"):
        setattr(described, name, other)
        with pytest.raises(ClientAuthenticationError, match="no key named 'owner'"):
            await admin.update_queue(described)
        setattr(described, name, None)
    described.max_delivery_count = 3
    await admin.update_queue(described)
    await admin.close()
    described.forward_to = other
    await bus.admin.update_queue(described)
    shown = await bus.admin.get_queue(mine)
    assert (shown.max_delivery_count, (shown.forward_to or "").endswith(f"/{other}")) == (3, True)


@since("7.15", "sets TCP_MAXSEG to a value that Linux refuses on loopback, so asyncio cannot use TLS there")
@both_flavours
async def test_amqp_inside_tls_is_answered_on_the_same_port(bus: Bus) -> None:
    queue = await bus.make_queue()
    sdk = sync_sdk if bus.flavour == "sync" else aio_sdk
    host = host_of(bus).split(":")[0]
    encrypted: dict[str, Any] = {
        "custom_endpoint_address": f"sb://{host}:{bus.namespace.port}",
        "transport_type": TransportType.Amqp,
        "connection_verify": str(bus.namespace.ca),
        "retry_total": 0,
    }
    by_key = sdk.ServiceBusClient(host, AzureNamedKeyCredential(*key_of(bus)), **encrypted)
    by_signature = sdk.ServiceBusClient(host, AzureSasCredential(signature(f"sb://{host}/", *key_of(bus))), **encrypted)
    for client in (by_key, by_signature):
        await send_and_receive(bus, bus.keep(client), queue)
