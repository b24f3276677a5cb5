"""M1: the ledgers of an outage hold exactly the operations that the namespaces' meters counted (N5). Y2: an idle syphon
costs its receives only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient

from tests.syphon.two_namespaces import until
from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.backlog import Endpoint, primary_name
from twinbus.connect import connect
from twinbus.ledger import OK, UNIT_BYTES, Intent, Ledger, Metered, Operation, Outcome, Role, Stage, read_ledger
from twinbus.pairing import AioAdministration, OperationRecorder
from twinbus.syphon import Audit, AuditedQueues, AuditResult
from twinbus.syphon.context import SyphonOptions
from twinbus.syphon.dead_letters import DeadLetters
from twinbus.syphon.discovery import Discovery, ListedDiscovery, ListedOrSearchedDiscovery, SearchedDiscovery
from twinbus.syphon.native_transport import NativeTransport
from twinbus.syphon.plan import RetryPolicy
from twinbus.syphon.sdk_transport import SdkTransport
from twinbus.syphon.syphon import Syphon
from twinbus.syphon.transport import Transport
from twinbus.testing import LocalNamespace

COUNTED = {
    Stage.SEND_PRIMARY: "send",
    Stage.RETURN_PRIMARY: "send",
    Stage.SEND_BACKLOG: "send",
    Stage.RESUBMIT_BACKLOG: "send",
    Stage.PING: "ping",
    Stage.RECEIVE_BACKLOG: "receive",
    Stage.RECEIVE_DEFERRED: "receive",
    Stage.RECEIVE_PRIMARY: "receive",
    Stage.EMPTY_RECEIVE: "receive_empty",
    Stage.COMPLETE_BACKLOG: "complete",
    Stage.COMPLETE_PRIMARY: "complete",
    Stage.SETTLE_BACKLOG: "settle",
    Stage.SETTLE_PRIMARY: "settle",
    Stage.RENEW_BACKLOG: "renew_lock",
    Stage.RENEW_PRIMARY: "renew_lock",
    Stage.PEEK_BACKLOG: "peek",
    Stage.PEEK_PRIMARY: "peek",
}
TOGETHER = {**dict.fromkeys(("abandon", "defer", "dead_letter", "release"), "settle"), "receive_deferred": "receive"}
"""Operations that the meter counts separately and a stage does not."""
RULES = [
    {"name": "RootManageSharedAccessKey", "claims": ["Manage", "Send", "Listen"], "primary_key": "SAS_KEY_VALUE"},
    {"name": "listener", "claims": ["Listen"], "primary_key": "SAS_KEY_VALUE"},
]

Figures = Counter[tuple[str, str, str]]
"""Billable units by namespace, entity and operation."""


@dataclass(frozen=True)
class Side:
    """A namespace, the folder of its meter, and its name in a ledger."""

    namespace: LocalNamespace
    folder: Path

    @property
    def text(self) -> str:
        return self.namespace.connection_string

    @property
    def name(self) -> str:
        return primary_name(Endpoint.of("localhost", self.namespace.port))


@dataclass(frozen=True)
class Sides:
    primary: Side
    secondary: Side
    ledger: Path

    def stop(self) -> None:
        """Stop both namespaces: nothing is counted after this."""
        self.primary.namespace.stop()
        self.secondary.namespace.stop()

    def metered(self) -> Figures:
        found: Figures = Counter()
        for side in (self.primary, self.secondary):
            for entry in read_ledger(side.folder):
                if isinstance(entry, Metered):
                    operation = TOGETHER.get(entry.operation, entry.operation)
                    found[side.name, entry.entity.lower(), operation] += entry.units
        return found

    def told(self) -> Figures:
        found: Figures = Counter()
        for operation in self.operations():
            if operation.stage is not Stage.MANAGE and operation.result == OK:
                found[operation.namespace, operation.entity.lower(), COUNTED[operation.stage]] += operation.units
        return found

    def operations(self) -> list[Operation]:
        entries = list(read_ledger(self.ledger))
        outcomes = {entry.id: entry for entry in entries if isinstance(entry, Outcome)}
        found = [entry for entry in entries if isinstance(entry, Operation)]
        for entry in entries:
            if isinstance(entry, Intent):
                ended = outcomes[entry.id]
                known = {name: getattr(entry, name) for name in ("at", "id", "stage", "namespace", "entity", "ids")}
                told = {name: getattr(ended, name) for name in ("seconds", "result", "cause", "failed")}
                found.append(Operation(**known, **told, bytes=entry.bytes, units=entry.units))
        return found

    def agree(self) -> None:
        """Assert that ledger and meters have the same operations.

        An empty receive may be missing in the ledger (decision 15): if the client grants credit while a message that
        uses up the credit before is on its way, the namespace has a new grant, and the client sees the old one go on.
        """
        told, metered = self.told(), self.metered()
        assert told - metered == Counter()
        assert {(operation, units) for (_, _, operation), units in (metered - told).items()} <= {("receive_empty", 1)}

    def requests(self) -> int:
        return sum(one.units for one in self.operations() if one.stage is Stage.MANAGE)

    def bytes(self, stage: Stage) -> int:
        return sum(one.bytes for one in self.operations() if one.stage is stage)


def started(name: str, folder: Path, **more: Any) -> Side:
    meter = folder / f"meter-{name}"
    config = {"namespaces": [{"name": name, "ledger": str(meter), "authorization_rules": RULES, **more}]}
    return Side(LocalNamespace(name, data=folder / name, config=config).start(), meter)


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    queues = [{"name": "orders"}, {"name": "closed", "status": "SendDisabled"}]
    topics = [{"name": "news", "subscriptions": [{"name": "all"}]}]
    primary = started("primary", tmp_path, queues=queues, topics=topics)
    secondary = started("secondary", tmp_path)
    yield Sides(primary, secondary, tmp_path / "ledger")
    for side in (primary, secondary):
        side.namespace.close()


def options(sides: Sides, **given: Any) -> SendAvailabilityOptions:
    usual: dict[str, Any] = {
        "backlog_queue_count": 2,
        "failover_interval": timedelta(0),
        "ping_interval": timedelta(seconds=1),
        "ping": "message",
        "try_timeout": timedelta(seconds=5),
        "ledger": sides.ledger,
    }
    return SendAvailabilityOptions(**{**usual, **given})


def messages(count: int, first: int = 0, size: int = 10) -> list[ServiceBusMessage]:
    return [ServiceBusMessage(b"x" * size, message_id=str(n)) for n in range(first, first + count)]


@asynccontextmanager
async def syphon(sides: Sides, **given: Any) -> AsyncIterator[Syphon]:
    """A syphon as `twinbus syphon` makes it, with short pauses."""
    with Ledger(sides.ledger, Role.SYPHON) as ledger:
        transport = NativeTransport(sides.primary.text, sides.secondary.text, try_timeout=5.0)
        policy = RetryPolicy(first_pause=0.2, longest_pause=0.4, gone_after=0.3)
        async with Syphon(
            transport,
            discovery(sides, transport, ledger),
            primary=sides.primary.name,
            secondary=sides.secondary.name,
            options=SyphonOptions(retry_policy=policy, **given),
            ledger=ledger,
        ) as made:
            yield made


def discovery(sides: Sides, transport: Transport, ledger: Ledger) -> Discovery:
    administration = AioAdministration.from_connection_string(sides.secondary.text)
    administration.recorder = OperationRecorder(ledger, sides.secondary.name)
    return ListedOrSearchedDiscovery(
        ListedDiscovery(sides.primary.name, administration), SearchedDiscovery(sides.primary.name, transport)
    )


async def enable(sides: Sides, queue: str) -> None:
    async with AioAdministration.from_connection_string(sides.primary.text) as administration:
        found = await administration.request(administration.client.get_queue, queue)
        found.status = "Active"
        await administration.request(administration.client.update_queue, found)


async def received(receiver: Any, count: int) -> list[Any]:
    found: list[Any] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += await receiver.receive_messages(count, 1)
    return found


@pytest.mark.thorough
async def test_m1_n5_of_a_whole_outage_the_ledger_holds_what_the_meters_counted(sides: Sides) -> None:
    pair = await aio.pair_connection_strings(sides.primary.text, sides.secondary.text, options=options(sides))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pair.close)
        # Before: sent, received, and settled in every way there is.
        orders, news = pair.get_queue_sender("orders"), pair.get_topic_sender("news")
        await orders.send_messages(messages(5))
        await news.send_messages(messages(2))
        async with pair.get_queue_receiver("orders") as receiver:
            assert len(await receiver.peek_messages(10)) == 5
            found = await received(receiver, 5)
            await receiver.renew_message_lock(found[0])
            await receiver.complete_message(found[0])
            await receiver.complete_message(found[1])
            await receiver.defer_message(found[2])
            await receiver.dead_letter_message(found[3])
            await receiver.abandon_message(found[4])
            [again] = await received(receiver, 1)
            [deferred] = await receiver.receive_deferred_messages([found[2].sequence_number])
            for one in (again, deferred):
                await receiver.complete_message(one)
            assert await receiver.receive_messages(1, 0.2) == []
        async with pair.get_subscription_receiver("news", "all") as receiver:
            for one in await received(receiver, 2):
                await receiver.complete_message(one)
        # The outage: messages are diverted, also for entities that accept none or do not exist.
        await asyncio.to_thread(sides.primary.namespace.stop)
        await orders.send_messages(messages(20, first=100))
        await orders.send_messages(messages(1, first=150, size=100 * 1024))
        for other in ("closed", "gone"):
            pair.force_failover(other)
            await pair.get_queue_sender(other).send_messages(messages(3, first=200))
        await asyncio.to_thread(sides.primary.namespace.start)
        await until(lambda: pair.entities()[0].state.name != "FAILED_OVER")
        # After the outage: the syphon moves what it can, and the rest is resubmitted to another destination.
        async with syphon(sides, drain=True) as syphoning:
            running = asyncio.create_task(syphoning.run())
            await until(lambda: syphoning.progress().total.deferred >= 3)
            await enable(sides, "closed")
            ended = await running
        assert (ended.total.returned, ended.total.dead_lettered) == (24, 3)
        audit = await audited(sides)
        assert (audit.findings.there.total(), audit.look.dead_letters, audit.looks) == (3, 3, 1)
        await resubmitted(sides)
        async with syphon(sides, drain=True) as syphoning:
            assert (await syphoning.run()).total.returned == 3
        async with pair.get_queue_receiver("orders") as receiver:
            for one in await received(receiver, 24):
                await receiver.complete_message(one)
    await asyncio.to_thread(sides.stop)
    sides.agree()
    # A message that was in flight when the primary was killed did not arrive, but the sender cannot know this.
    assert {one.stage for one in sides.operations() if one.result == "unknown"} <= {Stage.SEND_PRIMARY}
    # Found missing and created by the pair, and listed once by each syphon.
    assert sides.requests() == 2 * 2 + 2


async def audited(sides: Sides) -> AuditResult:
    async def find_queues(names: Collection[str]) -> AuditedQueues:
        return AuditedQueues(tuple(f"{name}/x-servicebus-transfer/{index}" for name in names for index in range(2)))

    with Ledger(sides.ledger, Role.AUDIT) as ledger:
        async with connect(sides.secondary.text, timeout=10) as bus:
            return await Audit(bus, ledger, find_queues, secondary=sides.secondary.name).run()


async def resubmitted(sides: Sides) -> None:
    queues = [f"{sides.primary.name}/x-servicebus-transfer/{index}" for index in range(2)]
    with Ledger(sides.ledger, Role.DEADLETTER) as ledger:
        async with connect(sides.secondary.text, timeout=10) as bus:
            names = {"primary": sides.primary.name, "secondary": sides.secondary.name}
            dead = DeadLetters(bus, queues, **names, ledger=ledger)
            assert len([one async for one in dead.found()]) == 3
            few = await dead.census(lambda letter: letter.message_id != "201")
            assert await dead.resubmit(few, to="orders") == 2
            assert await dead.resubmit(await dead.census(lambda letter: True), to="orders") == 1


NEAR_A_UNIT = [UNIT_BYTES - less for less in range(0, 420, 4)]
"""Sizes of bodies. A delivered message also has its properties, and what the service adds."""
NEAR_FOR_SDK = [UNIT_BYTES - less for less in (0, 50, 100, 140, 190, 215, 265, 300, 420)]
"""At least 20 bytes from each size at which the units change: azure-servicebus does not keep the bytes it received."""


@pytest.mark.thorough
async def test_m1_m2_of_messages_of_about_64_kb_the_ledger_holds_the_units_that_the_meters_counted(
    sides: Sides,
) -> None:
    given = options(sides, ping_interval=timedelta(minutes=30))  # the primary is there, but nothing must be restored
    pair = await aio.pair_connection_strings(sides.primary.text, sides.secondary.text, options=given)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pair.close)
        for entity in ("orders", "closed"):
            pair.force_failover(entity)
            sender = pair.get_queue_sender(entity)
            for number, size in enumerate(NEAR_A_UNIT):
                await sender.send_messages(messages(1, first=number, size=size))
        await audited(sides)
        async with syphon(sides, drain=True, window=20) as syphoning:
            running = asyncio.create_task(syphoning.run())
            await until(lambda: syphoning.progress().total.deferred >= len(NEAR_A_UNIT) // 2)
            await enable(sides, "closed")
            assert (await running).total.returned == 2 * len(NEAR_A_UNIT)
    await asyncio.to_thread(sides.stop)
    sides.agree()
    assert {Stage.RECEIVE_BACKLOG, Stage.RECEIVE_DEFERRED, Stage.PEEK_BACKLOG} <= {
        one.stage for one in sides.operations()
    }


@pytest.mark.thorough
async def test_m1_m2_of_messages_of_about_64_kb_a_pairs_receivers_record_the_units_that_the_meter_counted(
    sides: Sides,
) -> None:
    pair = await aio.pair_connection_strings(
        sides.primary.text, sides.secondary.text, options=options(sides, provision="assume")
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pair.close)
        for number, size in enumerate(NEAR_FOR_SDK):
            await pair.get_queue_sender("orders").send_messages(messages(1, first=number, size=size))
        async with pair.get_queue_receiver("orders") as receiver:
            found = await received(receiver, len(NEAR_FOR_SDK))
            for one in found:
                await receiver.peek_messages(1, sequence_number=one.sequence_number)
                await receiver.defer_message(one)
            for one in found:
                [deferred] = await receiver.receive_deferred_messages([one.sequence_number])
                await receiver.complete_message(deferred)
    await asyncio.to_thread(sides.stop)
    sides.agree()


@pytest.mark.parametrize("driver", ["sync", "aio"])
async def test_m1_what_a_pairs_receivers_iterate_over_is_counted_message_by_message(sides: Sides, driver: str) -> None:
    given = options(sides, provision="assume")
    if driver == "aio":
        pair: Any = await aio.pair_connection_strings(sides.primary.text, sides.secondary.text, options=given)
        await pair.get_queue_sender("orders").send_messages(messages(3))
        async with pair.get_queue_receiver("orders", max_wait_time=1) as receiver:
            async for one in receiver:
                await receiver.complete_message(one)
        await pair.close()
    else:
        await asyncio.to_thread(iterated, sides, given)
    await asyncio.to_thread(sides.stop)
    sides.agree()


def iterated(sides: Sides, given: SendAvailabilityOptions) -> None:
    with pair_connection_strings(sides.primary.text, sides.secondary.text, options=given) as pair:
        pair.get_queue_sender("orders").send_messages(messages(3))
        with pair.get_queue_receiver("orders", max_wait_time=1) as receiver:
            for one in receiver:
                receiver.complete_message(one)


@pytest.mark.thorough
@pytest.mark.parametrize("transport", [NativeTransport, SdkTransport])
async def test_y2_an_idle_syphon_costs_its_receives_and_nothing_else(sides: Sides, transport: Any) -> None:
    """With a key that may only listen: backlog queues are searched repeatedly, and every poll is recorded."""
    queues = [f"{sides.primary.name}/x-servicebus-transfer/{index}" for index in range(2)]
    async with AioAdministration.from_connection_string(sides.secondary.text) as administration:
        for queue in queues:
            await administration.request(administration.client.create_queue, queue)
    listening = sides.secondary.text.replace("RootManageSharedAccessKey", "listener")
    async with AsyncExitStack() as stack:
        ledger = stack.enter_context(Ledger(sides.ledger, Role.SYPHON))
        places: list[Any] = [sides.primary.text, listening]
        if transport is SdkTransport:
            made = [AioServiceBusClient.from_connection_string(text) for text in places]
            places = [await stack.enter_async_context(client) for client in made]
        carrier = transport(*places)
        searched = SearchedDiscovery(sides.primary.name, carrier)
        idle = Syphon(
            carrier,
            searched,
            primary=sides.primary.name,
            secondary=sides.secondary.name,
            options=SyphonOptions(poll=0.4),
            ledger=ledger,
        )
        await stack.enter_async_context(idle)
        running = asyncio.create_task(idle.run())
        await until(lambda: idle.progress().operations.get(Stage.EMPTY_RECEIVE, 0) >= 6)
        assert await searched.queues() == queues
        idle.stop()
        await running
    await asyncio.to_thread(sides.stop)
    told = sides.told()
    assert told == sides.metered()
    # The one peek is at the start: it looks for messages that an earlier syphon put aside.
    assert {operation: sum(n for key, n in told.items() if key[2] == operation) for _, _, operation in told} == {
        "receive_empty": idle.progress().operations[Stage.EMPTY_RECEIVE],
        "peek": 2,
    }
