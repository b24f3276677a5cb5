"""Authorization rules of the namespace whose keys may only send or only listen."""

from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError
from azure.servicebus import ServiceBusMessage

from tests.compat.python.bus import Bus, receive_one, unique
from tests.compat.python.flavours import FLAVOURS, Flavour, in_every_flavour
from tests.compat.python.test_access import refused, with_parts
from twinbus.testing import LocalNamespace


def rule(name: str, *claims: str) -> dict[str, Any]:
    """A rule whose keys are made from its name."""
    return {"name": name, "claims": list(claims), "primary_key": f"{name}-first", "secondary_key": f"{name}-second"}


RULES = [rule("root", "Manage", "Send", "Listen"), rule("sending", "Send"), rule("listening", "Listen")]


async def test_a_key_of_the_namespace_does_what_its_claims_allow() -> None:
    with LocalNamespace(config={"namespaces": [{"name": "primary", "authorization_rules": RULES}]}) as namespace:

        async def scenario(flavour: Flavour) -> None:
            root = with_parts(namespace.connection_string, SharedAccessKeyName="root", SharedAccessKey="root-first")
            bus = Bus(flavour, namespace, root)
            queue = await bus.make_queue()
            sending, listening = (
                with_parts(root, SharedAccessKeyName=name, SharedAccessKey=key)
                for name, key in (("sending", "sending-first"), ("listening", "listening-second"))
            )
            sending_client, listening_client = bus.connect(sending), bus.connect(listening)
            sender = sending_client.get_queue_sender(queue)
            receiver = listening_client.get_queue_receiver(queue)
            await bus.open(sender, receiver)
            await sender.send_messages(ServiceBusMessage("allowed"))
            await receiver.complete_message(await receive_one(receiver))

            await refused(bus, sending_client.get_queue_receiver(queue), listening_client.get_queue_sender(queue))
            for not_managing in (sending, listening):
                admin = bus.connect_admin(not_managing)
                with pytest.raises(HttpResponseError) as refusal:
                    await admin.create_queue(unique("queue"))
                assert refusal.value.status_code in (401, 403)
                await admin.close()
            await bus.close()

        await in_every_flavour(scenario, FLAVOURS)
