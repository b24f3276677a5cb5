"""A backlog queue with a ledger, for tests of the audit: senders that book what they divert, a syphon, and audits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tests.syphon.fixed_queues import FixedQueues
from twinbus.backlog import backlog_queue_path
from twinbus.connect import ReceivedMessage, ReceiveMode, connect
from twinbus.ledger import Ledger, Role, Stage
from twinbus.message import Message
from twinbus.pairing import AioAdministration
from twinbus.syphon import Audit, AuditedQueues, AuditResult, NativeTransport, Syphon, SyphonOptions
from twinbus.testing import LocalNamespaces

SECONDARY = "paris"
ENOUGH = 40
DEAD_LETTERS = "/$DeadLetterQueue"


def config() -> dict[str, Any]:
    backlog: list[dict[str, Any]] = [
        {
            "name": backlog_queue_path(f"c{number}", 0),
            "max_delivery_count": 2**31 - 1,
            "dead_lettering_on_message_expiration": False,
        }
        for number in range(ENOUGH)
    ]
    orders: list[dict[str, Any]] = [{"name": f"orders-{number}"} for number in range(ENOUGH)]
    orders.append({"name": "closed", "status": "SendDisabled"})
    return {"namespaces": [{"name": "primary", "queues": orders}, {"name": "secondary", "queues": backlog}]}


class AuditedBacklog:
    """The backlog queue, the destination and the ledger of one test."""

    numbers = itertools.count()

    def __init__(self, namespaces: LocalNamespaces, ledger: Path) -> None:
        number = next(self.numbers)
        self.name = f"c{number}"
        self.queue = backlog_queue_path(self.name, 0)
        self.orders = f"orders-{number}"
        self.ledger = ledger
        self.primary, self.secondary = (namespaces[one].connection_string for one in ("primary", "secondary"))

    async def divert(self, *ids: str, path: str = "", ttl: timedelta | None = None, book: bool = True) -> None:
        """Send messages to the backlog queue as a paired sender does, and book the send."""
        path = path or self.orders
        properties = {"x-ms-path": path}
        messages = [Message(b"x", message_id=one, application_properties=properties, time_to_live=ttl) for one in ids]
        async with connect(self.secondary) as bus:
            await (await bus.sender(self.queue)).send(messages)
        if book:
            with Ledger(self.ledger, Role.CLIENT) as ledger:
                self.book(ledger, ids, path)

    def book(self, ledger: Ledger, ids: Sequence[str], path: str = "") -> None:
        destination = f"{self.name}/{path or self.orders}"
        ledger.begin(Stage.SEND_BACKLOG, SECONDARY, self.queue, ids, [1] * len(ids), destination).end()

    @asynccontextmanager
    async def syphon(self, **options: Any) -> AsyncIterator[Syphon]:
        with Ledger(self.ledger, Role.SYPHON) as ledger:
            async with Syphon(
                NativeTransport(self.primary, self.secondary),
                FixedQueues([self.queue]),
                primary=self.name,
                secondary=SECONDARY,
                options=SyphonOptions(**options),
                ledger=ledger,
            ) as found:
                yield found

    async def drain(self) -> None:
        async with self.syphon(drain=True) as syphon:
            await syphon.run()

    async def audit(
        self,
        wait: float = 0.05,
        during_wait: Any = None,
        ledger: Ledger | None = None,
        silence: timedelta | None = None,
    ) -> AuditResult:
        """Run an audit whose looks are `wait` seconds apart. `during_wait` is awaited between them."""

        async def find(names: object) -> AuditedQueues:
            return AuditedQueues((self.queue,), timedelta(seconds=wait))

        async def pause(seconds: float) -> None:
            if during_wait is not None:
                await during_wait()
            await asyncio.sleep(seconds)

        with nullcontext(ledger) if ledger is not None else Ledger(self.ledger, Role.AUDIT) as writer:
            async with connect(self.secondary) as bus:
                return await Audit(
                    bus, writer, find, secondary=SECONDARY, primary=self.name, pause=pause, silence=silence
                ).run()

    # --- what happens behind the ledger's back -----------------------------------------------------------------------

    async def delete_queue(self) -> None:
        await self._administer("delete_queue")

    async def create_queue(self) -> None:
        await self._administer("create_queue")

    async def _administer(self, request: str) -> None:
        administration = AioAdministration.from_connection_string(self.secondary)
        try:
            await administration.request(partial(getattr(administration.client, request), self.queue))
        finally:
            await administration.close()

    async def take(self, count: int, *, dead_letter: bool = False, receive_and_delete: bool = False) -> list[str]:
        """Receive messages as a foreign program does, and complete them."""
        mode = ReceiveMode.RECEIVE_AND_DELETE if receive_and_delete else ReceiveMode.PEEK_LOCK
        async with connect(self.secondary) as bus:
            receiver = await bus.receiver(self.queue, dead_letter=dead_letter, prefetch=0, mode=mode)
            taken: list[ReceivedMessage] = []
            while len(taken) < count and (batch := await receiver.receive(count - len(taken), 5)):
                if not receive_and_delete:
                    await receiver.complete(batch)
                taken += batch
        return [str(one.message_id) for one in taken]

    async def take_deferred(self, *ids: str) -> None:
        async with connect(self.secondary) as bus:
            receiver = await bus.receiver(self.queue, prefetch=0)
            numbers = [one.sequence_number or 0 for one in await receiver.peek(0, 250) if one.message_id in ids]
            await receiver.complete(await receiver.receive_deferred(numbers))

    async def purge(self) -> int:
        async with connect(self.secondary) as bus:
            return await bus.management(self.queue).delete_batch(1000)

    async def dead_letter(self, count: int) -> list[str]:
        async with connect(self.secondary) as bus:
            receiver = await bus.receiver(self.queue, prefetch=0)
            batch = await receiver.receive(count, 5)
            await receiver.dead_letter(batch, "why", "how")
        return [str(one.message_id) for one in batch]

    async def peeked(self, address: str = "") -> list[str]:
        async with connect(self.secondary) as bus:
            page = await bus.management(self.queue, address=self.queue + address).peek(0, 250)
        return sorted(str(one.message_id) for one in page)
