"""Make clients, senders and receivers as the documentation shows, and close them."""

from collections.abc import Callable

import azure.servicebus.aio as aio_sdk
import azure.servicebus.aio.management as aio_management
import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError
from azure.servicebus.management import ServiceBusAdministrationClient

from tests.compat.python.bus import Bus, both_flavours, unique
from twinbus.testing import LocalNamespace


def test_the_sync_example_of_the_documentation(namespace: LocalNamespace, make_queue: Callable[..., str]) -> None:
    queue = make_queue()
    seen = []
    with ServiceBusClient.from_connection_string(namespace.connection_string) as client:
        with client.get_queue_sender(queue_name=queue) as sender:
            sender.send_messages(ServiceBusMessage("Single message"))
        with client.get_queue_receiver(queue_name=queue, max_wait_time=1) as receiver:
            for received in receiver:
                seen.append(str(received))
                receiver.complete_message(received)
    assert seen == ["Single message"]


async def test_the_aio_example_of_the_documentation(namespace: LocalNamespace, make_queue: Callable[..., str]) -> None:
    queue = make_queue()
    seen = []
    async with aio_sdk.ServiceBusClient.from_connection_string(namespace.connection_string) as client:
        async with client.get_queue_sender(queue_name=queue) as sender:
            await sender.send_messages(ServiceBusMessage("Single message"))
        async with client.get_queue_receiver(queue_name=queue, max_wait_time=1) as receiver:
            async for received in receiver:
                seen.append(str(received))
                await receiver.complete_message(received)
    assert seen == ["Single message"]


@both_flavours
async def test_senders_and_receivers_open_by_themselves_at_their_first_use(bus: Bus) -> None:
    queue = await bus.make_queue()
    client = bus.connect()
    sender = client.get_queue_sender(queue, client_identifier="sender-1", socket_timeout=0.5)
    receiver = client.get_queue_receiver(queue, client_identifier="receiver-1", socket_timeout=0.5)
    assert (sender.client_identifier, receiver.client_identifier) == ("sender-1", "receiver-1")
    await sender.send_messages(ServiceBusMessage("x"))
    [received] = await receiver.receive_messages(max_wait_time=10)
    await receiver.complete_message(received)
    await client.close()
    with pytest.raises(ValueError, match="shutdown"):
        await sender.send_messages(ServiceBusMessage("after the client closed"))


@both_flavours
async def test_an_entity_path_in_the_connection_string_binds_the_client_to_it(bus: Bus) -> None:
    queue = await bus.make_queue()
    client = bus.connect(f"{bus.connection_string.rstrip(';')};EntityPath={queue}")
    with pytest.raises(ValueError, match="EntityPath"):
        client.get_queue_sender("another")
    sender = client.get_queue_sender(queue)
    await bus.open(sender)
    await sender.send_messages(ServiceBusMessage("x"))


@both_flavours
async def test_names_of_entities_do_not_care_about_case(bus: Bus) -> None:
    queue = await bus.make_queue()
    sender = bus.client.get_queue_sender(queue.upper())
    receiver = bus.client.get_queue_receiver(queue.title())
    await bus.open(sender, receiver)
    await sender.send_messages(ServiceBusMessage("x"))
    assert len(await receiver.receive_messages(max_wait_time=10)) == 1


def test_the_sync_admin_client_needs_only_the_connection_string_and_the_ca(namespace: LocalNamespace) -> None:
    admin = ServiceBusAdministrationClient.from_connection_string(
        namespace.connection_string, connection_verify=str(namespace.ca)
    )
    name = unique("queue")
    assert admin.create_queue(name).name == name
    admin.delete_queue(name)
    admin.close()


async def test_the_aio_admin_client_needs_only_the_connection_string_and_the_ca(namespace: LocalNamespace) -> None:
    admin = aio_management.ServiceBusAdministrationClient.from_connection_string(
        namespace.connection_string, connection_verify=str(namespace.ca)
    )
    name = unique("queue")
    assert (await admin.create_queue(name)).name == name
    await admin.delete_queue(name)
    await admin.close()


@both_flavours
async def test_a_closed_renewer_takes_nothing_more(bus: Bus) -> None:
    sender, receiver = await bus.open_pair(await bus.make_queue())
    await sender.send_messages(ServiceBusMessage("x"))
    [received] = await receiver.receive_messages(max_wait_time=10)
    renewer = bus.make_renewer()
    await renewer.close()
    with pytest.raises(ServiceBusError):
        renewer.register(receiver, received)
