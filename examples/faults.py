"""Faults on demand: what the official client does when the service misbehaves, always in the same way.

Run: python examples/faults.py
"""

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError

from twinbus.testing import LocalNamespace

CONFIG = {
    "namespaces": [
        {"name": "primary", "queues": [{"name": "orders", "requires_duplicate_detection": True}, {"name": "plain"}]}
    ]
}


def client_of(namespace: LocalNamespace, retries: int) -> ServiceBusClient:
    return ServiceBusClient.from_connection_string(
        namespace.connection_string, retry_total=retries, retry_backoff_factor=0.1, retry_backoff_max=0.5
    )


def busy(namespace: LocalNamespace) -> None:
    namespace.faults.set("server-busy", entity="plain", points=["send"], count=2)
    with client_of(namespace, retries=3) as client, client.get_queue_sender("plain") as sender:
        sender.send_messages(ServiceBusMessage("patience"))
    print("busy twice: the client tried again by itself, and the message arrived")


def lost_acknowledgement(namespace: LocalNamespace) -> None:
    namespace.faults.set("drop-ack", entity="orders", points=["send"], count=1)
    message = ServiceBusMessage("once only", message_id="order-1")
    with client_of(namespace, retries=0) as client, client.get_queue_sender("orders") as sender:
        try:
            sender.send_messages(message, timeout=1)
        except ServiceBusError as error:
            print(f"acknowledgement lost: the client sees {type(error).__name__}, though the message was stored")
    with client_of(namespace, retries=0) as client:
        with client.get_queue_sender("orders") as sender:
            sender.send_messages(message)
        with client.get_queue_receiver("orders", max_wait_time=1) as receiver:
            print(f"sent again under the same id: {len(receiver.receive_messages(max_message_count=5))} in the queue")


def crash(namespace: LocalNamespace) -> None:
    namespace.faults.set("crash", entity="plain", points=["send"], after=True)
    with client_of(namespace, retries=0) as client, client.get_queue_sender("plain") as sender:
        try:
            sender.send_messages(ServiceBusMessage("last words"), timeout=5)
        except ServiceBusError as error:
            print(f"crash after storing, before answering: the client sees {type(error).__name__}")
    namespace.wait()
    namespace.restart()
    with client_of(namespace, retries=0) as client, client.get_queue_receiver("plain", max_wait_time=2) as receiver:
        # A receive gives what is there at once, which may be a part: ask until nothing more comes.
        found: list[str] = []
        while messages := receiver.receive_messages(max_message_count=5, max_wait_time=2):
            found += map(str, messages)
        print(f"after the restart the queue holds: {', '.join(found)}")


def main() -> None:
    with LocalNamespace(config=CONFIG) as namespace:
        busy(namespace)
        lost_acknowledgement(namespace)
        crash(namespace)


if __name__ == "__main__":
    main()
