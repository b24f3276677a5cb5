"""The server is killed and restarted on the same port and data. The SDK reconnects by itself."""

import asyncio

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.management import SqlRuleFilter

from tests.compat.python.bus import Bus, peek_all, receive_all, receive_one, texts
from tests.compat.python.flavours import FLAVOURS, Flavour, in_every_flavour
from twinbus.testing import LocalNamespace


@pytest.mark.timeout(60)
async def test_what_was_accepted_is_there_after_a_kill_and_clients_reconnect() -> None:
    with LocalNamespace() as namespace:
        killed, restarted = asyncio.Barrier(len(FLAVOURS) + 1), asyncio.Event()

        async def scenario(flavour: Flavour) -> None:
            bus = Bus(flavour, namespace)
            queue = await bus.make_queue()
            client = bus.connect(retry_total=5, retry_backoff_factor=0.1)
            sender, receiver = client.get_queue_sender(queue), client.get_queue_receiver(queue)
            await bus.open(sender, receiver)
            await sender.send_messages([ServiceBusMessage("settled"), ServiceBusMessage("kept")])
            await receiver.complete_message(await receive_one(receiver))
            topic = await bus.make_topic("s")
            await bus.admin.create_rule(topic, "s", "red", filter=SqlRuleFilter("color = @c", {"@c": "red"}))
            await bus.admin.delete_rule(topic, "s", "$Default")
            await killed.wait()
            await restarted.wait()

            await sender.send_messages(ServiceBusMessage("after"))

            assert texts(await peek_all(receiver)) == ["kept", "after"]
            assert texts(await receive_all(receiver, 2)) == ["kept", "after"]
            [rule] = [rule async for rule in bus.admin.list_rules(topic, "s")]
            assert isinstance(rule.filter, SqlRuleFilter)
            assert (rule.name, rule.filter.parameters) == ("red", {"@c": "red"})
            await bus.close()

        async def kill_when_all_have_sent() -> None:
            await killed.wait()
            await asyncio.to_thread(namespace.kill)
            await asyncio.to_thread(namespace.restart)
            restarted.set()

        await asyncio.gather(kill_when_all_have_sent(), in_every_flavour(scenario, FLAVOURS))
