"""Three outages on real namespaces. A pair and a syphon write what they do into the ledger of the outage.

Traffic is given by number, so the numbers of sent and diverted messages do not depend on the speed of the machine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from azure.servicebus import ServiceBusMessage

from tests.syphon.fixed_queues import FixedQueues
from twinbus import SendAvailabilityOptions, aio
from twinbus.backlog import TRANSFER_SEGMENT, FailureKind, state_queue_path
from twinbus.connect import connect
from twinbus.ledger import Intent, Ledger, Metered, Operation, Outcome, Role, read_ledger
from twinbus.money import OutageKind, SharedStateIn, SyphonRuns
from twinbus.syphon import NativeTransport, Syphon, SyphonOptions
from twinbus.testing import LocalNamespace

BACKLOG = 2
PATIENCE = 60.0
SIZE = 300
BATCH = 10
PING = timedelta(seconds=1)
SENT = 200
"""Messages sent before the first outage and after each outage."""


@dataclass(frozen=True)
class Story:
    """The plan of one test run. `diverted` messages are sent in each outage."""

    name: str
    outages: int
    diverted: int
    kind: OutageKind
    syphon: SyphonRuns
    state: SharedStateIn = SharedStateIn.FOLDER

    @property
    def sent(self) -> int:
        return SENT * (self.outages + 1)


STORIES = (
    Story("short", 1, 300, OutageKind.UNREACHABLE, SyphonRuns.AFTER, SharedStateIn.SECONDARY),
    Story("long", 1, 2000, OutageKind.UNREACHABLE, SyphonRuns.STANDING),
    Story("flapping", 3, 400, OutageKind.ANSWERING, SyphonRuns.AFTER),
)


class Run:
    """One story with a ledger of its own, on a queue and backlog queues with the name of the story."""

    def __init__(self, story: Story, folder: Path, primary: LocalNamespace, secondary: LocalNamespace) -> None:
        self.story = story
        self.ledger = folder / story.name
        self._primary = primary
        self._secondary = secondary

    async def happen(self) -> None:
        async with AsyncExitStack() as stack:
            self._books = stack.enter_context(Ledger(self.ledger, Role.CLIENT))
            pair = await stack.enter_async_context(await self._pair())
            self._queues = list(pair.backlog_queues)
            async with pair.get_queue_sender(self.story.name) as sender:
                if self.story.syphon is SyphonRuns.STANDING:
                    async with self._syphon() as syphon:
                        await self._days(pair, sender, syphon)
                else:
                    await self._days(pair, sender, None)

    async def _days(self, pair: Any, sender: Any, standing: Syphon | None) -> None:
        await self._send(sender, SENT)
        await self._receive(SENT)
        for _ in range(self.story.outages):
            with self._outage():
                await self._send(sender, self.story.diverted)
                if standing is not None:
                    await until(lambda: standing.progress().aside == self.story.diverted)
            await until(lambda: pair.entities()[0].state in ("healthy", "on_trial"))
            await self._send(sender, SENT)
            if standing is None:
                async with self._syphon(drain=True) as syphon:
                    await syphon.run()
            await self._receive(SENT + self.story.diverted)
        if standing is not None:
            # The receiver completes the last messages after it has received all of them.
            await until(lambda: standing.progress().held == 0)

    async def _pair(self) -> Any:
        options = SendAvailabilityOptions(
            backlog_queue_count=BACKLOG,
            failover_interval=timedelta(0),
            ping_interval=PING,
            ping_jitter=0,
            ping="message",
            try_timeout=timedelta(seconds=5),
            backlog_check_interval=timedelta(0),
            primary_name=self.story.name,
            ledger=self._books,
            state="secondary" if self.story.state is SharedStateIn.SECONDARY else None,
        )
        strings = (self._primary.connection_string, self._secondary.connection_string)
        # A failed send is diverted in the same call, so that each failure is one call.
        return await aio.pair_connection_strings(*strings, options=options, retry_total=0)

    @asynccontextmanager
    async def _syphon(self, **options: Any) -> AsyncIterator[Syphon]:
        transport = NativeTransport(self._primary.connection_string, self._secondary.connection_string)
        books = Ledger(self.ledger, Role.SYPHON)
        made = Syphon(
            transport,
            FixedQueues(self._queues),
            primary=self.story.name,
            secondary="secondary",
            options=SyphonOptions(**options),
            ledger=books,
        )
        with books:
            async with made:
                running = None if options.get("drain") else asyncio.create_task(made.run())
                try:
                    yield made
                finally:
                    made.stop()
                    if running is not None:
                        await running

    @contextmanager
    def _outage(self) -> Iterator[None]:
        if self.story.kind is OutageKind.UNREACHABLE:
            # The namespace is stopped and not killed, so that its meter writes its counts to the disk.
            self._primary.stop()
            yield
            self._primary.start()
            return
        self._primary.faults.set("internal-error", entity=self.story.name, points=["send"])
        yield
        self._primary.faults.clear()

    async def _send(self, sender: Any, count: int) -> None:
        for _ in range(count // BATCH):
            await sender.send_messages([ServiceBusMessage(b"x" * SIZE) for _ in range(BATCH)])

    async def _receive(self, count: int) -> None:
        async with (
            asyncio.timeout(PATIENCE),
            connect(self._primary.connection_string, timeout=10) as bus,
            await bus.receiver(self.story.name, prefetch=0) as receiver,
        ):
            while count > 0:
                found = await receiver.receive(min(count, 500), 10)
                await receiver.complete(found)
                count -= len(found)


def happened(folder: Path) -> dict[str, Run]:
    """Runs all stories at the same time, each on namespaces of its own, and returns them by name.

    When this returns, the meters of the namespaces have written what they counted to the folder `meters`.
    """
    with ThreadPoolExecutor(len(STORIES)) as pool:
        return {run.story.name: run for run in pool.map(lambda story: _happened(story, folder), STORIES)}


def _happened(story: Story, folder: Path) -> Run:
    meters = str(folder / "meters")
    primary = {"namespaces": [{"name": "primary", "ledger": meters, "queues": [{"name": story.name}]}]}
    secondary = {"namespaces": [{"name": "secondary", "ledger": meters}]}
    with LocalNamespace("primary", config=primary) as one, LocalNamespace("secondary", config=secondary) as other:
        run = Run(story, folder, one, other)
        asyncio.run(run.happen())
    return run


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - what is waited for happens in other tasks and processes
            await asyncio.sleep(0.02)


def metered(folder: Path, story: str) -> Counter[str]:
    """Returns the billable units that the namespaces counted for a story, by stage."""
    stages = {
        ("send", False): "send_primary",  # and return_primary: a namespace does not know who sends
        ("send", True): "send_backlog",
        ("receive", False): "receive_primary",
        ("receive", True): "receive_backlog",
        ("receive_empty", False): "empty_receive_primary",
        ("receive_empty", True): "empty_receive",
        ("complete", False): "complete_primary",
        ("complete", True): "complete_backlog",
        ("defer", True): "settle_backlog",
        ("abandon", True): "settle_backlog",
        ("release", True): "settle_backlog",
        ("receive_deferred", True): "receive_deferred",
        ("peek", True): "peek_backlog",
        ("renew_lock", True): "renew_backlog",
        ("ping", False): "ping",
    }
    found: Counter[str] = Counter()
    for entry in read_ledger(folder):
        if isinstance(entry, Metered) and entry.entity.partition("/")[0] == story:
            is_state = entry.entity == state_queue_path(story)
            stage = stages[entry.operation, is_state or f"/{TRANSFER_SEGMENT}/" in entry.entity]
            # A pair records its sends to the state queue as management calls.
            found["manage" if is_state and entry.operation == "send" else stage] += entry.units
    return found


def operations(ledger: Path) -> list[Operation]:
    """Returns all operations, those of one line and those of an intent and its outcome."""
    entries = list(read_ledger(ledger))
    outcomes = {entry.id: entry for entry in entries if isinstance(entry, Outcome)}
    begun = [entry for entry in entries if isinstance(entry, Intent)]
    met = [Operation(**{**asdict(one), **asdict(outcomes[one.id]), "at": one.at}) for one in begun]
    return [*(entry for entry in entries if isinstance(entry, Operation)), *met]


def unsent(operation: Operation) -> bool:
    """Returns whether the operation found no connection, so that no request was sent."""
    return operation.result in (FailureKind.CONNECTION_LOST, FailureKind.TIMEOUT)
