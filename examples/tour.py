"""The tour: a durable local Service Bus, used by the official SDK, killed with -9, and found as it was left.

Run: python examples/tour.py
"""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceivedMessage, ServiceBusSubQueue
from azure.servicebus.management import ServiceBusAdministrationClient
from rich.console import Console
from rich.table import Table

from twinbus.testing import LocalEndpoint, LocalNamespaces

console = Console(highlight=False, soft_wrap=True)


def chapter(title: str) -> None:
    console.print(f"\n[bold cyan]{title}[/]")


def say(text: str) -> None:
    console.print(f"  {text}")


def admin_of(namespace: LocalEndpoint) -> ServiceBusAdministrationClient:
    return ServiceBusAdministrationClient.from_connection_string(
        namespace.connection_string, connection_verify=str(namespace.ca)
    )


def start(namespaces: LocalNamespaces) -> float:
    before = time.perf_counter()
    namespaces.restart()
    return time.perf_counter() - before


def create(namespace: LocalEndpoint) -> None:
    with admin_of(namespace) as admin:
        admin.create_queue("orders", max_delivery_count=3)
        admin.create_topic("events")
        admin.create_subscription("events", "audit")
        admin.create_subscription("events", "billing")
    say("queue [bold]orders[/], topic [bold]events[/] with subscriptions [bold]audit[/] and [bold]billing[/]")


def send(namespace: LocalEndpoint, due: datetime) -> None:
    with ServiceBusClient.from_connection_string(namespace.connection_string) as client:
        with client.get_queue_sender("orders") as orders:
            drinks = ("two coffees", "a tea with no cup", "three waters")
            orders.send_messages([ServiceBusMessage(text, message_id=f"order-{i}") for i, text in enumerate(drinks, 1)])
            say(f"sent {len(drinks)} orders in one batch")
            (number,) = orders.schedule_messages(ServiceBusMessage("breakfast", message_id="order-4"), due)
            say(f"scheduled breakfast (sequence number {number})")
        with client.get_topic_sender("events") as events:
            events.send_messages(ServiceBusMessage("the shop is open"))
            say("told the topic that the shop is open")


def work(namespace: LocalEndpoint) -> None:
    with (
        ServiceBusClient.from_connection_string(namespace.connection_string) as client,
        client.get_queue_receiver("orders", max_wait_time=5) as receiver,
    ):
        received: list[ServiceBusReceivedMessage] = []
        while len(received) < 2:
            received += receiver.receive_messages(max_message_count=2 - len(received))
        first, second = received
        receiver.complete_message(first)
        say(f"completed    [green]{first}[/]")
        receiver.dead_letter_message(second, reason="NoCup", error_description="tea needs a cup")
        say(f"dead-lettered [red]{second}[/]")


def show_counts(namespace: LocalEndpoint) -> None:
    table = Table("entity", "active", "scheduled", "dead-lettered", box=None, padding=(0, 2))
    with admin_of(namespace) as admin:
        queue = admin.get_queue_runtime_properties("orders")
        counts = (queue.active_message_count, queue.scheduled_message_count, queue.dead_letter_message_count)
        table.add_row("orders", *map(str, counts))
        for name in ("audit", "billing"):
            found = admin.get_subscription_runtime_properties("events", name)
            counts = (found.active_message_count, 0, found.dead_letter_message_count)
            table.add_row(f"events/{name}", *map(str, counts))
    console.print(table)


def drain_orders(client: ServiceBusClient) -> None:
    with client.get_queue_receiver("orders", max_wait_time=10) as receiver:
        for _ in range(2):
            (message,) = receiver.receive_messages()
            receiver.complete_message(message)
            say(f"received [green]{message}[/]" + (", now that it is due" if message.message_id == "order-4" else ""))


def take_dead_letter(client: ServiceBusClient) -> str:
    with client.get_queue_receiver("orders", sub_queue=ServiceBusSubQueue.DEAD_LETTER, max_wait_time=5) as receiver:
        (message,) = receiver.receive_messages()
        receiver.complete_message(message)
        return f"found [red]{message}[/] among the dead letters: {message.dead_letter_error_description}"


def take_event(client: ServiceBusClient, subscription: str) -> str:
    with client.get_subscription_receiver("events", subscription, max_wait_time=5) as receiver:
        (message,) = receiver.receive_messages()
        receiver.complete_message(message)
        return f"{subscription} heard that [green]{message}[/]"


def collect(namespace: LocalEndpoint) -> None:
    with ServiceBusClient.from_connection_string(namespace.connection_string) as client:
        # Each receiver is a connection of its own, and the SDK takes its time to open one: side by side they cost one.
        with ThreadPoolExecutor() as pool:
            found = [
                pool.submit(take_dead_letter, client),
                pool.submit(take_event, client, "audit"),
                pool.submit(take_event, client, "billing"),
            ]
            drain_orders(client)
        for one in found:
            say(one.result())


def main() -> None:
    with LocalNamespaces("primary", "secondary") as namespaces:
        chapter("Two namespaces, one process, no Docker")
        for one in namespaces:
            say(f"[bold]{one.name}[/] {one.connection_string}")

        primary = namespaces["primary"]
        chapter("The official SDK makes a queue, and a topic with two subscriptions")
        create(primary)
        chapter("It sends, schedules and publishes")
        due = datetime.now(UTC) + timedelta(seconds=6)
        send(primary, due)
        chapter("It completes one order and dead-letters another")
        work(primary)
        show_counts(primary)

        chapter(f"kill -9 {namespaces.pid}")
        namespaces.kill()
        say(f"and again, on the same port and data: ready after {start(namespaces):.2f} s")
        show_counts(namespaces["primary"])
        chapter("Nothing acknowledged was lost, nothing settled comes back")
        collect(namespaces["primary"])
        say("[dim]what was completed before the crash did not come back[/]")


if __name__ == "__main__":
    main()
