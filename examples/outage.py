"""An outage, survived: the primary is killed with -9, the application goes on sending, the primary comes back.

Run: python examples/outage.py
"""

import logging
import time
from datetime import timedelta
from threading import Event

from azure.servicebus import ServiceBusMessage
from azure.servicebus.management import ServiceBusAdministrationClient
from rich.console import Console

from twinbus import SendAvailabilityOptions, pair_connection_strings
from twinbus.testing import LocalNamespace

console = Console(highlight=False, soft_wrap=True)
# Short, so that the tour is quick: the defaults are a minute each.
OPTIONS = SendAvailabilityOptions(
    backlog_queue_count=2,
    failover_interval=timedelta(0),
    ping_interval=timedelta(seconds=1),
    try_timeout=timedelta(seconds=2),
)


def chapter(title: str) -> None:
    console.print(f"\n[bold cyan]{title}[/]")


def say(text: str) -> None:
    console.print(f"  {text}")


def admin_of(namespace: LocalNamespace) -> ServiceBusAdministrationClient:
    return ServiceBusAdministrationClient.from_connection_string(
        namespace.connection_string, connection_verify=str(namespace.ca)
    )


def count(namespace: LocalNamespace) -> dict[str, int | None]:
    """What each queue of a namespace holds."""
    with admin_of(namespace) as admin:
        return {queue.name: queue.total_message_count for queue in admin.list_queues_runtime_properties()}


def main() -> None:
    logging.basicConfig(level=logging.ERROR)  # the callbacks print the events instead of the log
    with LocalNamespace("primary") as primary, LocalNamespace("secondary") as secondary:
        with admin_of(primary) as admin:
            admin.create_queue("orders")
        chapter("Two namespaces are paired: the backlog queues are made, nothing else changes")
        restored = Event()
        with pair_connection_strings(primary.connection_string, secondary.connection_string, options=OPTIONS) as pair:
            pair.on("failover_engaged", lambda notice: say(f"[yellow]failover_engaged[/] {notice.entity}"))
            pair.on("restored", lambda notice: restored.set())
            with pair.get_queue_sender("orders") as sender:
                sender.send_messages(ServiceBusMessage("two coffees"))
                say(f"sent; the primary holds {count(primary)['orders']} order")

                chapter(f"kill -9 {primary.pid}: the primary is gone")
                primary.kill()
                before = time.perf_counter()
                for drink in ("a tea", "three waters", "breakfast"):
                    sender.send_messages(ServiceBusMessage(drink))
                say(f"3 orders sent all the same, in {time.perf_counter() - before:.2f} s, no error")
                say(f"they wait on the secondary: {sum(filter(None, count(secondary).values()))} in the backlog")
                for entity in pair.entities():
                    say(f"[bold]{entity.path}[/] is {entity.state}, {entity.diverted} diverted")

                chapter("The primary comes back")
                primary.restart()
                restored.wait(20)
                sender.send_messages(ServiceBusMessage("supper"))
                say("a ping noticed, and the next order went to the primary:")
                say(f"the primary holds {count(primary)['orders']} orders")
    chapter("What was diverted waits on the secondary until twinbus syphon brings it home")


if __name__ == "__main__":
    main()
