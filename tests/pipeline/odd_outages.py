"""Three outages with messages of odd sizes, several subscriptions and dead letters, on two metered namespaces (L4).

The pair, its syphons and the meters of both namespaces write one ledger. Traffic is given by number, so the numbers of
sent and diverted messages do not depend on the speed of the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from azure.servicebus import ServiceBusMessage, ServiceBusSubQueue

from twinbus import SendAvailabilityOptions, aio
from twinbus.backlog import Endpoint, primary_name
from twinbus.connect import connect
from twinbus.ledger import Ledger, Role
from twinbus.pairing import AioAdministration, OperationRecorder
from twinbus.syphon import ListedDiscovery, NativeTransport, RetryPolicy, Syphon, SyphonOptions
from twinbus.testing import LocalNamespace

KB = 1024
HEALTHY = (*[200] * 10, 63 * KB, 65 * KB)
"""Sizes of the bodies that are sent to the queue while the primary is up."""
FIRST = (*[130_000] * 7, *[100] * 20)
SECOND = (*[65 * KB] * 3, *[63 * KB] * 2)
THIRD = (200_000, 200_000, *[100] * 15)
NEWS = 4
"""Messages to the topic before the first outage and in each outage."""
BODY = 64 * KB - 64 - 8
"""A message to the topic takes 64 more bytes: one unit, and two with the properties that diverting adds."""
SUBSCRIPTIONS = ("all", "audit", "few")
GONE = 3
"""Messages to a queue that does not exist: the syphon dead-letters them."""
PATIENCE = 60.0


class OddOutages:
    """The scenario. `run` returns when both namespaces have written their meters."""

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger

    def run(self) -> None:
        queues = [{"name": "orders"}]
        topics = [{"name": "news", "subscriptions": [{"name": name} for name in SUBSCRIPTIONS]}]
        first = {"name": "primary", "ledger": str(self.ledger), "queues": queues, "topics": topics}
        second = {"name": "secondary", "ledger": str(self.ledger)}
        with (
            LocalNamespace("primary", config={"namespaces": [first]}) as self._primary,
            LocalNamespace("secondary", config={"namespaces": [second]}) as self._secondary,
        ):
            asyncio.run(self._happen())

    async def _happen(self) -> None:
        options = SendAvailabilityOptions(
            backlog_queue_count=2,
            failover_interval=timedelta(0),
            ping_interval=timedelta(seconds=1),
            ping_jitter=0,
            ping="message",
            try_timeout=timedelta(seconds=5),
            backlog_check_interval=timedelta(0),
            ledger=self.ledger,
        )
        strings = (self._primary.connection_string, self._secondary.connection_string)
        # A send that fails goes to the backlog at once, so that each failure is one call.
        async with await aio.pair_connection_strings(*strings, options=options, retry_total=0) as pair:
            async with pair.get_queue_sender("orders") as self._orders, pair.get_topic_sender("news") as self._news:
                await self._send(HEALTHY)
                await self._outage(pair, FIRST, stop=True)
                await self._outage(pair, SECOND, stop=False)
                await self._outage(pair, THIRD, stop=True, gone=True)
            await self._receive(pair)

    async def _outage(self, pair: Any, sizes: tuple[int, ...], *, stop: bool, gone: bool = False) -> None:
        with self._broken(stop=stop):
            await self._send(sizes)
            if gone:
                pair.force_failover("gone")
                async with pair.get_queue_sender("gone") as sender:
                    await sender.send_messages([ServiceBusMessage(b"x") for _ in range(GONE)])
        async with asyncio.timeout(PATIENCE):
            while any(one.state == "failed_over" and one.path != "gone" for one in pair.entities()):  # noqa: ASYNC110 - in the pair's tasks
                await asyncio.sleep(0.02)
        async with self._syphon() as syphon:
            await syphon.run()

    @contextmanager
    def _broken(self, *, stop: bool) -> Iterator[None]:
        if stop:
            # Not killed: what its meter has counted is to be on the disk.
            self._primary.stop()
            yield
            self._primary.start()
        else:
            self._primary.faults.set("internal-error", points=["send"])
            yield
            self._primary.faults.clear()

    async def _send(self, sizes: tuple[int, ...]) -> None:
        small = [size for size in sizes if size < KB]
        await self._orders.send_messages([ServiceBusMessage(b"x" * size) for size in small])
        for size in sizes:
            if size >= KB:
                await self._orders.send_messages(ServiceBusMessage(b"x" * size))
        for _ in range(NEWS):
            await self._news.send_messages(ServiceBusMessage(b"x" * BODY))

    @asynccontextmanager
    async def _syphon(self) -> AsyncIterator[Syphon]:
        strings = (self._primary.connection_string, self._secondary.connection_string)
        names = [primary_name(Endpoint.of("localhost", one.port)) for one in (self._primary, self._secondary)]
        administration = AioAdministration.from_connection_string(strings[1])
        with Ledger(self.ledger, Role.SYPHON) as ledger:
            administration.recorder = OperationRecorder(ledger, names[1])
            policy = RetryPolicy(first_pause=0.2, longest_pause=0.4, gone_after=0.3)
            async with Syphon(
                NativeTransport(*strings, try_timeout=5.0),
                ListedDiscovery(names[0], administration),
                primary=names[0],
                secondary=names[1],
                options=SyphonOptions(drain=True, wait_for_destinations=1.0, retry_policy=policy),
                ledger=ledger,
            ) as made:
                yield made

    async def _receive(self, pair: Any) -> None:
        """Receives everything: from the queue with the pair's receivers, from the topic with receivers of its own."""
        count = sum(map(len, (HEALTHY, FIRST, SECOND, THIRD)))
        async with pair.get_queue_receiver("orders") as receiver:
            found = await _received(receiver, count)
            await receiver.abandon_message(found[0])
            await receiver.dead_letter_message(found[1])
            for one in [*found[2:], *await _received(receiver, 1)]:
                await receiver.complete_message(one)
        async with pair.get_queue_receiver("orders", sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver:
            [dead] = await _received(receiver, 1)
            await receiver.complete_message(dead)
        async with connect(self._primary.connection_string, timeout=10) as bus:
            for name in SUBSCRIPTIONS:
                left = 4 * NEWS
                async with asyncio.timeout(PATIENCE), await bus.receiver(f"news/Subscriptions/{name}") as plain:
                    while left:
                        batch = await plain.receive(left, 10)
                        await plain.complete(batch)
                        left -= len(batch)


async def _received(receiver: Any, count: int) -> list[Any]:
    found: list[Any] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < count:
            found += await receiver.receive_messages(count - len(found), 1)
    return found
