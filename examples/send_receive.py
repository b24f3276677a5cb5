"""The smallest use: a namespace of one's own, a queue, a message there and back.

Run: python examples/send_receive.py
"""

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.management import ServiceBusAdministrationClient

from twinbus.testing import LocalNamespace


def main() -> None:
    with LocalNamespace() as namespace:
        connection = namespace.connection_string
        # The admin client always speaks HTTPS, so it has to trust the local CA.
        with ServiceBusAdministrationClient.from_connection_string(
            connection, connection_verify=str(namespace.ca)
        ) as admin:
            admin.create_queue("orders")

        with ServiceBusClient.from_connection_string(connection) as client:
            with client.get_queue_sender("orders") as sender:
                sender.send_messages(ServiceBusMessage("two coffees", message_id="order-1"))
            with client.get_queue_receiver("orders", max_wait_time=5) as receiver:
                for message in receiver.receive_messages():
                    print(f"received {message.message_id}: {message}")
                    receiver.complete_message(message)


if __name__ == "__main__":
    main()
