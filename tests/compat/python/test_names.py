"""Official clients that use another host name than the namespace's own, allowed by the operator or not (X3)."""

import socket
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusAuthenticationError

from tests.compat.python.bus import Bus, receive_one, unique
from tests.compat.python.flavours import FLAVOURS, Flavour, in_every_flavour
from twinbus.testing import LocalNamespace

NAME = "bus.example"


@pytest.fixture(autouse=True)
def resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the name resolve to this machine, for the clients of this test."""
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **options: Any) -> Any:
        return real("127.0.0.1" if host in (NAME, NAME.encode()) else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


async def test_x3_clients_are_refused_under_a_name_that_is_not_the_namespaces_own() -> None:
    # The certificate matches the name, so TLS succeeds and the namespace itself refuses: its name has another port.
    with LocalNamespace(memory=True, host_names=[f"{NAME}:1"]) as namespace:

        async def scenario(flavour: Flavour) -> None:
            own = Bus(flavour, namespace)
            queue = await own.make_queue()
            foreign = namespace.connection_string.replace("localhost", NAME)
            for handler in (
                own.connect(foreign).get_queue_sender(queue),
                own.connect(foreign).get_queue_receiver(queue),
            ):
                with pytest.raises(ServiceBusAuthenticationError) as refused:
                    await own.use(handler)
                assert "--host-name" in str(refused.value.inner_exception)
            admin = own.connect_admin(foreign)
            with pytest.raises(HttpResponseError) as misdirected:
                await admin.create_queue(unique("queue"))
            assert misdirected.value.status_code == 421
            for said in (f"{NAME}:{namespace.port}", f"localhost:{namespace.port}", "--host-name"):
                assert said in str(misdirected.value)
            await admin.close()
            await own.close()

        await in_every_flavour(scenario, FLAVOURS)
        assert f"'{NAME}:{namespace.port}' is not a name of this namespace" in namespace.log.read_text(encoding="utf-8")


async def test_x3_clients_are_served_under_a_name_that_the_operator_gave() -> None:
    with LocalNamespace(memory=True, host_names=[NAME]) as namespace:

        async def scenario(flavour: Flavour) -> None:
            bus = Bus(flavour, namespace, namespace.connection_string.replace("localhost", NAME))
            queue = await bus.make_queue()
            sender, receiver = await bus.open_pair(queue)
            await sender.send_messages(ServiceBusMessage("here"))
            message = await receive_one(receiver)
            assert str(message) == "here"
            await receiver.complete_message(message)
            await bus.close()

        await in_every_flavour(scenario, FLAVOURS)
