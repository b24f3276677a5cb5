# pyright: strict
"""An application that is annotated with the types of azure-servicebus, and gets a pair instead of a client."""

from __future__ import annotations

from datetime import UTC, datetime

from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
    ServiceBusSender,
    ServiceBusSubQueue,
)
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient
from azure.servicebus.aio import ServiceBusReceiver as AioServiceBusReceiver
from azure.servicebus.aio import ServiceBusSender as AioServiceBusSender

import twinbus
import twinbus.aio


def send(sender: ServiceBusSender, text: str) -> list[int]:
    batch = sender.create_message_batch()
    batch.add_message(ServiceBusMessage(text))
    sender.send_messages(batch)
    sender.send_messages([ServiceBusMessage(text), ServiceBusMessage(text)], timeout=5)
    return sender.schedule_messages(ServiceBusMessage(text), datetime.now(UTC))


def receive(receiver: ServiceBusReceiver) -> list[ServiceBusReceivedMessage]:
    found = receiver.receive_messages(max_message_count=10, max_wait_time=5)
    for message in receiver:
        receiver.complete_message(message)
    return found


def work(client: ServiceBusClient) -> None:
    with client.get_queue_sender("orders", client_identifier="till") as sender:
        sender.cancel_scheduled_messages(send(sender, client.fully_qualified_namespace))
    with client.get_queue_receiver("orders", sub_queue=ServiceBusSubQueue.DEAD_LETTER, max_wait_time=5) as receiver:
        receive(receiver)
    for session in client.list_queue_sessions("orders"):
        print(session.upper())


async def aio_send(sender: AioServiceBusSender) -> None:
    await sender.send_messages(ServiceBusMessage("tea"))


async def aio_receive(receiver: AioServiceBusReceiver) -> None:
    async for message in receiver:
        await receiver.complete_message(message)


async def aio_work(client: AioServiceBusClient) -> None:
    async with client, client.get_topic_sender("prices") as sender:
        await aio_send(sender)
        await aio_receive(client.get_subscription_receiver("prices", "all", max_wait_time=5))


def main(primary: str, secondary: str) -> None:
    with twinbus.pair_connection_strings(primary, secondary) as pair:
        work(pair)
        sender: ServiceBusSender = pair.get_queue_sender("orders")
        receiver: ServiceBusReceiver = pair.get_queue_receiver("orders", quiet_while_down=True)
        send(sender, str(receive(receiver)))


async def aio_main(primary: str, secondary: str) -> None:
    async with twinbus.aio.pair_connection_strings(primary, secondary) as pair:
        await aio_work(pair)
        await aio_send(pair.get_queue_sender("orders"))
        await aio_receive(pair.get_queue_receiver("orders", quiet_while_down=True))
