"""Sessions: orders of two customers, sent in mixed order, are processed customer by customer. A session keeps state.

Run: python examples/sessions.py
"""

from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusClient, ServiceBusMessage

from twinbus.testing import LocalNamespace

# Entities can also come from a configuration, as with `twinbus serve --config`.
CONFIG = {"namespaces": [{"name": "primary", "queues": [{"name": "orders", "requires_session": True}]}]}


def main() -> None:
    with (
        LocalNamespace(config=CONFIG) as namespace,
        ServiceBusClient.from_connection_string(namespace.connection_string) as client,
    ):
        with client.get_queue_sender("orders") as sender:
            for text, customer in (("tea", "ann"), ("coffee", "bob"), ("cake", "ann"), ("water", "bob")):
                sender.send_messages(ServiceBusMessage(text, session_id=customer))

        for _ in range(2):
            with client.get_queue_receiver("orders", session_id=NEXT_AVAILABLE_SESSION, max_wait_time=5) as receiver:
                done: list[str] = []
                while len(done) < 2:
                    for message in receiver.receive_messages(max_message_count=2):
                        done.append(str(message))
                        receiver.complete_message(message)
                receiver.session.set_state(", ".join(done))
                print(f"{receiver.session.session_id} had {' then '.join(done)}")

        with client.get_queue_receiver("orders", session_id="ann", max_wait_time=5) as receiver:
            state = bytes(receiver.session.get_state()).decode()
            print(f"the session of ann remembers: {state}")


if __name__ == "__main__":
    main()
