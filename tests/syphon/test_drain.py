"""The end of a drain on real servers (Y11), over both transports. `simulation/test_drains.py` has the other cases."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from azure.servicebus import ServiceBusClient as SyncClient
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient

from tests.syphon.fixed_queues import FixedQueues
from tests.syphon.two_namespaces import TwoNamespaces, config, ids, numbered, until
from twinbus.ledger import Metered, read_ledger
from twinbus.syphon import (
    LeftMessages,
    NativeTransport,
    Progress,
    RetryPolicy,
    SdkTransport,
    Syphon,
    SyphonOptions,
    Transport,
)
from twinbus.testing import LocalNamespaces


@asynccontextmanager
async def native(ground: TwoNamespaces) -> AsyncIterator[Transport]:
    yield NativeTransport(ground.primary, ground.secondary)


@asynccontextmanager
async def over_sdk(ground: TwoNamespaces) -> AsyncIterator[Transport]:
    async with (
        ServiceBusClient.from_connection_string(ground.primary) as primary,
        ServiceBusClient.from_connection_string(ground.secondary) as secondary,
    ):
        yield SdkTransport(primary, secondary)


TRANSPORTS = [native, pytest.param(over_sdk, marks=pytest.mark.thorough)]


async def drained(ground: TwoNamespaces, transport: Transport, wait: float = 0.0) -> Progress:
    options = SyphonOptions(drain=True, wait_for_destinations=wait)
    queues = FixedQueues([ground.queue], ground.lock)
    async with Syphon(transport, queues, primary="p", secondary="s", options=options) as syphon:
        return await asyncio.wait_for(syphon.run(), 60)


def row(left: LeftMessages) -> tuple[str | None, int | None, str]:
    return left.destination, left.messages, left.cause


@pytest.fixture(scope="module")
def meter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meter")


@pytest.fixture(scope="module")
def namespaces(meter: Path) -> Iterator[LocalNamespaces]:
    given = config()
    given["namespaces"][1]["ledger"] = str(meter)
    with LocalNamespaces("primary", "secondary", memory=True, config=given) as found:
        yield found


def empty_receives(meter: Path, queue: str) -> int:
    """Return how many empty receives the meter of the secondary has counted on a queue."""
    counted: Counter[str] = Counter()
    for entry in read_ledger(meter):
        if isinstance(entry, Metered) and entry.entity == queue:
            counted[entry.operation] += entry.units
    return counted["receive_empty"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_y11_y2_with_a_destination_gone_a_drain_ends_at_the_price_of_a_look(
    namespaces: LocalNamespaces, meter: Path, transport: object
) -> None:
    ground = TwoNamespaces(namespaces)
    await ground.fill(5, "never-made")
    await ground.fill(5, first=5)
    async with transport(ground) as made:  # type: ignore[operator]  # one of TRANSPORTS
        ended = await drained(ground, made)
    assert [row(one) for one in ended.left] == [("never-made", 5, "entity_not_found")]
    assert ids(await ground.arrived()) == numbered(5, 5)
    assert len(await ground.left()) == 5
    # One until the queue was found empty, and the long poll that the end of the drain cut off.
    counted = ended.operations["empty_receive"]
    assert counted <= 2
    await until(lambda: empty_receives(meter, ground.queue) >= counted)
    assert empty_receives(meter, ground.queue) <= 2


async def test_y11_a_credential_that_the_primary_refuses_ends_a_drain_and_is_named(
    namespaces: LocalNamespaces, caplog: pytest.LogCaptureFixture
) -> None:
    ground = TwoNamespaces(namespaces)
    await ground.fill(5)
    wrong = ground.primary.replace("SharedAccessKey=", "SharedAccessKey=wrong")
    ended = await drained(ground, NativeTransport(wrong, ground.secondary))
    assert [row(one) for one in ended.left] == [(ground.orders, 5, "unauthorized")]
    assert "credential" in ended.left[0].why
    logged = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(logged) == 1
    assert ground.orders in logged[0].getMessage()
    assert len(await ground.left()) == 5


@pytest.mark.thorough
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_y11_messages_that_are_scheduled_in_the_backlog_are_named_and_not_waited_for(
    namespaces: LocalNamespaces, transport: object
) -> None:
    ground = TwoNamespaces(namespaces)
    await ground.fill(3)
    later = ServiceBusMessage("x", application_properties={"x-ms-path": ground.orders})
    with (
        SyncClient.from_connection_string(ground.secondary) as client,
        client.get_queue_sender(ground.queue) as sender,
    ):
        sender.schedule_messages([later], datetime.now(UTC) + timedelta(hours=1))
    async with transport(ground) as made:  # type: ignore[operator]  # one of TRANSPORTS
        ended = await drained(ground, made)
    assert ended.total.returned == 3
    assert [row(one) for one in ended.left] == [(ground.orders, 1, "scheduled")]


@pytest.mark.thorough
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_y11_a_destination_that_is_made_while_a_drain_waits_gets_its_messages(
    namespaces: LocalNamespaces, transport: object
) -> None:
    ground = TwoNamespaces(namespaces)
    broken = namespaces["primary"].faults.set("server-busy", entity=ground.orders, points=["send"])
    await ground.fill(300)
    options = SyphonOptions(
        drain=True, wait_for_destinations=60.0, retry_policy=RetryPolicy(first_pause=0.2, longest_pause=0.5)
    )
    queues = FixedQueues([ground.queue], ground.lock)
    async with (
        transport(ground) as made,  # type: ignore[operator]  # one of TRANSPORTS
        Syphon(made, queues, primary="p", secondary="s", options=options) as syphon,
    ):
        running = asyncio.create_task(syphon.run())
        await until(lambda: any(one.failures >= 4 for one in syphon.progress().states))
        namespaces["primary"].faults.clear(broken["id"])
        ended = await running
    assert ended.left == ()
    assert ids(await ground.arrived()) == numbered(300)
