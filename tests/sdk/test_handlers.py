"""Links of azure-servicebus that are ended from outside: their sockets are closed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient

from twinbus.sdk import close_sync_handler, interrupt
from twinbus.testing import LocalNamespace


@pytest.fixture(scope="module")
def namespace() -> Iterator[LocalNamespace]:
    config = {"namespaces": [{"name": "ends", "queues": [{"name": "q"}]}]}
    with LocalNamespace("ends", memory=True, config=config) as local:
        yield local


@pytest.mark.parametrize("interrupted", [False, True])
def test_closing_a_sync_handler_closes_its_socket_also_after_an_interrupt(
    namespace: LocalNamespace, interrupted: bool
) -> None:
    with ServiceBusClient.from_connection_string(namespace.connection_string) as client:
        sender = client.get_queue_sender("q")
        with sender:
            connection: Any = sender._handler._connection
            sock = connection._transport.sock
            if interrupted:
                interrupt(sender)
            close_sync_handler(sender)
            assert sock.fileno() == -1
