"""The official SDK works while other peers use up all memory that peers without a token may use (X1)."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from twinbus.amqp.frames import AMQP_HEADER, performative_frame
from twinbus.amqp.performatives import Open
from twinbus.testing import LocalNamespace

# 600 of these are more than the 16 MB that all peers without a token may hold together.
HALF_FRAME = AMQP_HEADER + performative_frame(0, Open("hostile")) + (65_000).to_bytes(4) + b"\2\0\0\0" + bytes(62_000)


@pytest.fixture
def hostile(namespace: LocalNamespace) -> Iterator[Callable[[int], None]]:
    with ExitStack() as sockets:

        def connect(count: int) -> None:
            for _ in range(count):
                one = sockets.enter_context(socket.create_connection(("127.0.0.1", namespace.port)))
                one.sendall(HALF_FRAME)

        yield connect


def test_x1_the_sdk_connects_sends_and_receives_beside_hostile_peers(
    client: ServiceBusClient, make_queue: Callable[..., str], hostile: Callable[[int], None]
) -> None:
    queue = make_queue()
    with client.get_queue_sender(queue) as early:
        hostile(600)
        early.send_messages([ServiceBusMessage(bytes(100_000)) for _ in range(2)])
        with client.get_queue_sender(queue) as late:
            late.send_messages(ServiceBusMessage("late"))
        with client.get_queue_receiver(queue, max_wait_time=20) as receiver:
            found = [message for _, message in zip(range(3), receiver, strict=False)]
            for message in found:
                receiver.complete_message(message)
    assert len(found) == 3
