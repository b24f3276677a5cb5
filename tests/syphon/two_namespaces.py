"""Two real namespaces with a backlog queue and a destination for each test, and steps that tests of a syphon share."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.syphon.fixed_queues import FixedQueues
from twinbus.connect import ReceivedMessage, ServiceBusConnection, connect
from twinbus.ledger import Ledger
from twinbus.message import Message
from twinbus.syphon.context import StepListener, SyphonOptions
from twinbus.syphon.native_transport import NativeTransport
from twinbus.syphon.progress import Progress
from twinbus.syphon.syphon import Syphon
from twinbus.testing import LocalNamespaces

ENOUGH = 40
SHORT = 8  # of them have a short lock
SHORT_LOCK = "PT5S"
LOOK = 0.05


def config() -> dict[str, Any]:
    many = range(ENOUGH)
    backlog: list[dict[str, Any]] = [
        {"name": f"t{n}/x-servicebus-transfer/0", "max_delivery_count": 2**31 - 1} for n in many
    ]
    for queue in backlog[-SHORT:]:
        queue["lock_duration"] = SHORT_LOCK
    orders: list[dict[str, Any]] = [{"name": f"orders-{n}"} for n in many]
    orders += [
        {"name": "sessions", "requires_session": True},
        {"name": "watchful", "requires_duplicate_detection": True, "duplicate_detection_history_time_window": "PT10M"},
        {"name": "closed", "status": "SendDisabled"},
    ]
    return {"namespaces": [{"name": "primary", "queues": orders}, {"name": "secondary", "queues": backlog}]}


class TwoNamespaces:
    """What one test uses: `queue` on the secondary and `orders` on the primary."""

    numbers = itertools.count()
    short = itertools.count(ENOUGH - SHORT)

    def __init__(self, namespaces: LocalNamespaces, *, short_lock: bool = False) -> None:
        number = next(self.short if short_lock else self.numbers)
        self.namespaces = namespaces
        self.queue = f"t{number}/x-servicebus-transfer/0"
        self.orders = f"orders-{number}"
        self.lock = 5.0 if short_lock else 60.0
        self.primary = namespaces["primary"].connection_string
        self.secondary = namespaces["secondary"].connection_string

    async def fill(self, count: int, path: str | None = None, *, first: int = 0, body: bytes = b"x") -> None:
        """Send messages to the backlog queue as a paired sender diverts them. Ids are the numbers from `first` on."""
        async with connect(self.secondary) as bus:
            sender = await bus.sender(self.queue)
            for start in range(first, first + count, 2000):
                await sender.send(
                    [self.diverted(str(n), path, body=body) for n in range(start, min(start + 2000, first + count))]
                )

    def diverted(self, message_id: str, path: str | None = None, *, body: bytes = b"x", **aliases: Any) -> Message:
        properties = {"x-ms-path": path or self.orders, **{f"x-ms-{name}": value for name, value in aliases.items()}}
        return Message(body, message_id=message_id, application_properties=properties)

    async def put(self, *messages: Message) -> None:
        async with connect(self.secondary) as bus:
            await (await bus.sender(self.queue)).send(messages)

    @asynccontextmanager
    async def syphon(
        self,
        *,
        on_step: StepListener | None = None,
        ledger: Ledger | None = None,
        try_timeout: float = 10.0,
        queues: Sequence[str] | None = None,
        **options: Any,
    ) -> AsyncIterator[Syphon]:
        transport = NativeTransport(self.primary, self.secondary, try_timeout=try_timeout)
        async with Syphon(
            transport,
            FixedQueues(queues or [self.queue], self.lock),
            primary="primary",
            secondary="secondary",
            options=SyphonOptions(**options),
            ledger=ledger,
            on_step=on_step,
        ) as found:
            yield found

    async def drain(self, **options: Any) -> Progress:
        async with self.syphon(drain=True, **options) as syphon:
            return await syphon.run()

    async def arrived(self, path: str | None = None, wait: float = 0.3) -> list[ReceivedMessage]:
        """Receive and complete everything in an entity of the primary."""
        async with connect(self.primary) as bus:
            return await taken(bus, path or self.orders, wait)

    async def dead_lettered(self) -> dict[str, tuple[str | None, str | None]]:
        """Reasons and descriptions by message id."""
        async with connect(self.secondary) as bus:
            found = await taken(bus, self.queue, 0.3, dead_letter=True)
        return {str(one.message_id): (one.dead_letter_reason, one.dead_letter_error_description) for one in found}

    async def left(self) -> list[ReceivedMessage]:
        """Peek at everything in the backlog queue, in any state."""
        async with connect(self.secondary) as bus:
            receiver = await bus.receiver(self.queue, prefetch=0)
            return await receiver.peek(0, 250)


async def taken(
    bus: ServiceBusConnection, path: str, wait: float, *, dead_letter: bool = False
) -> list[ReceivedMessage]:
    receiver = await bus.receiver(path, dead_letter=dead_letter)
    found: list[ReceivedMessage] = []
    while batch := await receiver.receive(1000, wait):
        await receiver.complete(batch)
        found += batch
    return found


def ids(messages: Sequence[ReceivedMessage]) -> Counter[str]:
    return Counter(str(message.message_id) for message in messages)


def numbered(count: int, first: int = 0) -> Counter[str]:
    return Counter(str(number) for number in range(first, first + count))


async def until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    """Check the condition repeatedly until it is true. If it never is, the test's timeout ends the wait."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - what is looked at tells nobody when it changes
            await asyncio.sleep(LOOK)


def grounds(namespaces: LocalNamespaces) -> Iterator[TwoNamespaces]:
    yield TwoNamespaces(namespaces)
    for endpoint in namespaces:
        endpoint.faults.clear()
    assert "Traceback" not in namespaces.log.read_text()
