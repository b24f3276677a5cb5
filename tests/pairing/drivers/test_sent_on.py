"""Messages that were received and are sent on through a pair: diverted, brought home by a syphon, and resubmitted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiveMode
from azure.servicebus.aio import ServiceBusClient

from tests.compat.python.random_messages import differences, random_message, seen
from tests.syphon.fixed_queues import FixedQueues
from tests.tiers import budget
from twinbus.connect import connect
from twinbus.syphon.context import SyphonOptions
from twinbus.syphon.dead_letters import DeadLetters
from twinbus.syphon.native_transport import NativeTransport
from twinbus.syphon.sdk_transport import SdkTransport
from twinbus.syphon.syphon import Syphon
from twinbus.syphon.transport import Transport

from .conftest import World

MESSAGES = budget(20, 60, 400)
# A syphon removes these: the service writes them on delivery.
OF_A_DELIVERY = (b"x-opt-deadletter-source", b"x-opt-message-state")


async def received(client: ServiceBusClient, queue: str) -> list[ServiceBusReceivedMessage]:
    found: list[ServiceBusReceivedMessage] = []
    async with client.get_queue_receiver(queue, receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE) as receiver:
        while len(found) < MESSAGES:
            more = await receiver.receive_messages(MESSAGES - len(found), max_wait_time=10)
            assert more, f"only {len(found)} of {MESSAGES} messages came"
            found += more
    return found


def carried(message: ServiceBusReceivedMessage) -> dict[str, Any]:
    found = seen(message)
    found["annotations"] = {key: value for key, value in found["annotations"].items() if key not in OF_A_DELIVERY}
    return found


def number(found: dict[str, Any]) -> int:
    return int(found["application properties"][b"seed"])


@asynccontextmanager
async def transport(kind: str, world: World) -> AsyncIterator[Transport]:
    strings = (world.primary.connection_string, world.secondary.connection_string)
    if kind == "native":
        yield NativeTransport(*strings, try_timeout=10.0)
        return
    options: dict[str, Any] = {"connection_verify": str(world.primary.ca)}
    primary, secondary = [ServiceBusClient.from_connection_string(one, **options) for one in strings]
    async with primary, secondary:
        yield SdkTransport(primary, secondary)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["native", "sdk"])
async def test_n1_received_messages_that_are_diverted_and_syphoned_keep_what_they_carry(
    world: World, queue: str, kind: str
) -> None:
    async with ServiceBusClient.from_connection_string(world.primary.connection_string) as client:
        async with client.get_queue_sender(queue) as plain:
            await plain.send_messages([random_message(seed) for seed in range(MESSAGES)])
        messages = await received(client, queue)
        before = [carried(message) for message in messages]
        pair = await world.pair(backlog_queue_count=1)
        await world.do(pair.force_failover, queue)
        sender = await world.sender(pair, queue)
        half = MESSAGES // 2
        for message in messages[:half]:
            await world.send(sender, message)
        await world.send(sender, messages[half:])
        assert len(await world.backlog(pair)) == MESSAGES

        async with (
            connect(world.secondary.connection_string) as bus,
            await bus.receiver(pair.backlog_queues[0], prefetch=0) as backlog,
        ):
            held = await backlog.receive(5, 10)
            await backlog.dead_letter(held, "a reason", "a description")
            dead = DeadLetters(bus, pair.backlog_queues)
            assert await dead.resubmit(await dead.census(lambda letter: True)) == len(held)

        async with (
            transport(kind, world) as moving,
            Syphon(
                moving,
                FixedQueues(pair.backlog_queues),
                primary="primary",
                secondary="secondary",
                options=SyphonOptions(drain=True),
            ) as syphon,
        ):
            await syphon.run()
        after = {number(each): each for each in map(carried, await received(client, queue))}
    assert differences(before, [after[number(each)] for each in before]) == []
