"""Pairs whose clients sign in with Entra ID: made, through an outage, and longer than their tokens (P1, N6)."""

from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient

from tests.entra import OWNER, RECEIVER, SENDER, AioIssuedTokens, IssuedTokens
from twinbus import ProvisioningError, SendAvailabilityOptions, aio, pair_namespaces
from twinbus.testing import LocalNamespace

from .conftest import KEYS, PATIENCE, World, state_of

pytestmark = pytest.mark.thorough


def tokens(world: World, *roles: str, seconds: float = 3600) -> IssuedTokens:
    return (AioIssuedTokens if world.driver == "aio" else IssuedTokens)(KEYS, *roles, seconds=seconds)


def client(world: World, namespace: LocalNamespace, credential: IssuedTokens) -> Any:
    made: Any = AioServiceBusClient if world.driver == "aio" else ServiceBusClient
    return made(f"localhost:{namespace.port}", credential, use_tls=False, retry_backoff_factor=0.05)


async def paired(world: World, primary: IssuedTokens, secondary: IssuedTokens, **options: Any) -> Any:
    clients = [client(world, world.primary, primary), client(world, world.secondary, secondary)]
    for one in clients:
        world.stack.push_async_callback(world.do, one.close)
    make = aio.pair_namespaces if world.driver == "aio" else pair_namespaces
    short = {"backlog_queue_count": 2, "failover_interval": timedelta(0), "try_timeout": timedelta(seconds=20)}
    given = SendAvailabilityOptions(**{**short, "primary_name": f"entra-{world.driver}", **options})
    pair = await world.do(make, *clients, options=given)
    world.stack.push_async_callback(world.do, pair.close)
    return pair


async def test_p1_a_pair_that_signs_in_goes_through_an_outage_and_outlives_its_tokens(world: World, queue: str) -> None:
    """The backlog queues are made, filled and emptied with tokens that are valid for 3 seconds each."""
    primary, secondary = tokens(world, SENDER, seconds=3), tokens(world, OWNER, seconds=3)
    pair = await paired(world, primary, secondary, enable_syphon=True, ping_interval=timedelta(seconds=1))
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="before"))
    world.primary.kill()
    before, sent = secondary.given, []
    for number in count():
        sent.append(f"during-{number}")
        await world.send(sender, ServiceBusMessage("x", message_id=sent[-1]))
        if secondary.given >= before + 8:
            break
    world.primary.start(PATIENCE)
    await world.until(lambda: state_of(pair, queue) != "failed_over", PATIENCE)
    await world.send(sender, ServiceBusMessage("x", message_id="after"))
    arrived: set[Any] = set()
    while not arrived >= {*sent, "after"}:
        arrived = {one.message_id for one in await world.held(queue)}
    assert await world.backlog(pair) == []


async def test_p7_without_the_role_data_owner_the_missing_right_is_named(world: World) -> None:
    given = tokens(world, SENDER), tokens(world, SENDER, RECEIVER)
    with pytest.raises(ProvisioningError, match="the Manage claim is required"):
        await paired(world, *given, primary_name="entra-refused")
