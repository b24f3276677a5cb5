"""Two real namespaces, each in its own process, that tests can make fail, and one interface for both drivers.

The namespaces are started once. Each test has its own queue, and `healed` repairs the namespaces after the test.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.core.credentials import AzureNamedKeyCredential
from azure.servicebus import ServiceBusClient
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient

from tests.entra import Issuer
from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.connect import ReceivedMessage, connect
from twinbus.namespace.store import SqliteStore
from twinbus.testing import LocalNamespace

NUMBERED = 400
"""The number of queues: more than there are tests, because each test uses a new queue."""
KEY = "SAS_KEY_VALUE"
KEYS = Issuer()
"""Both namespaces accept its tokens."""
BRIEF = timedelta(seconds=1)
"""The `try_timeout` of tests that wait for a timeout. Other tests have a longer one, for a busy machine."""
ALL = "RootManageSharedAccessKey"
PATIENCE = 100.0
"""Seconds for a server to start on a busy machine."""
_numbers, _queues = itertools.count(), itertools.count()
SOON = 10.0


def config(name: str, numbered: int = NUMBERED) -> dict[str, object]:
    names = [f"plain-{number}" for number in range(numbered)] + ["beside-it"]
    queues: list[dict[str, object]] = [{"name": one} for one in names]
    queues += [{"name": f"sessions-{number}", "requires_session": True} for number in range(8)]
    topics = [{"name": f"topic-{number}", "subscriptions": [{"name": "all"}]} for number in range(6)]
    claims = {ALL: ["Listen", "Manage", "Send"], "app": ["Listen", "Send"], "reader": ["Listen"], "writer": ["Send"]}
    rules = [{"name": rule, "claims": claim, "primary_key": KEY} for rule, claim in claims.items()]
    return {"namespaces": [{"name": name, "queues": queues, "topics": topics, "authorization_rules": rules}]}


@pytest.fixture(scope="session")
def primary() -> Iterator[LocalNamespace]:
    found = LocalNamespace("primary", memory=True, config=config("primary"), jwks=KEYS.key_set).start(PATIENCE)
    yield found
    found.close()


@pytest.fixture(scope="session")
def secondary() -> Iterator[LocalNamespace]:
    found = LocalNamespace("secondary", memory=True, config=config("secondary"), jwks=KEYS.key_set).start(PATIENCE)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def healed(primary: LocalNamespace, secondary: LocalNamespace) -> Iterator[None]:
    """Clear faults and restart killed namespaces after the test."""
    yield
    for namespace in (primary, secondary):
        if not namespace.running:
            namespace.start(PATIENCE)
        os.kill(namespace.pid, signal.SIGCONT)
        namespace.faults.clear()


@pytest.fixture
def queue() -> str:
    return f"plain-{next(_queues)}"


class World:
    """The two namespaces, and pairs of them with one of the drivers."""

    def __init__(self, driver: str, primary: LocalNamespace, secondary: LocalNamespace) -> None:
        self.driver = driver
        self.primary = primary
        self.secondary = secondary
        self.stack = AsyncExitStack()
        self.try_timeout = timedelta(seconds=20)

    async def do(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a method of a pair or sender: await it, or run it in a thread."""
        if self.driver == "aio":
            result = call(*arguments, **keywords)
            return await result if inspect.isawaitable(result) else result
        return await asyncio.to_thread(call, *arguments, **keywords)

    async def pair(self, *, keywords: dict[str, Any] | None = None, **options: Any) -> Any:
        """Return a pair with short intervals and its own backlog queues."""
        short = {
            "backlog_queue_count": 2,
            "failover_interval": timedelta(0),
            "ping_interval": timedelta(minutes=1),
            "ping_jitter": 0.0,
            "try_timeout": self.try_timeout,
            "probation": timedelta(seconds=1),
            "primary_name": f"t{os.getpid()}-{next(_numbers)}",
        }
        given = SendAvailabilityOptions(**{**short, **options})
        make = aio.pair_connection_strings if self.driver == "aio" else pair_connection_strings
        strings = (keywords or {}).pop("strings", (self.primary.connection_string, self.secondary.connection_string))
        pair = await self.do(make, *strings, options=given, **(keywords or {}))
        self.stack.push_async_callback(self.do, pair.close)
        return pair

    async def sender(self, pair: Any, entity: str) -> Any:
        return await self.do(pair.get_queue_sender, entity)

    async def send(self, sender: Any, message: Any, **keywords: Any) -> None:
        await self.do(sender.send_messages, message, **keywords)

    async def backlog(self, pair: Any) -> list[ReceivedMessage]:
        """Return the messages in the backlog queues of a pair, in the order of the queues."""
        found: list[ReceivedMessage] = []
        async with connect(self.secondary.connection_string, timeout=10) as bus:
            for queue in pair.backlog_queues:
                async with await bus.receiver(queue) as receiver:
                    found += await receiver.peek(count=200)
        return found

    async def backlog_queue_of(self, queues: Iterable[str], message_id: str) -> str:
        """Return the backlog queue that has a diverted message, also if the queue has left the rotation."""
        async with connect(self.secondary.connection_string, timeout=10) as bus:
            for queue in queues:
                async with await bus.receiver(queue) as receiver:
                    if message_id in [one.message_id for one in await receiver.peek(count=200)]:
                        return queue
        raise AssertionError(f"{message_id} is in no backlog queue")

    async def held(self, entity: str) -> list[ReceivedMessage]:
        """Return all messages that an entity of the primary holds."""
        async with connect(self.primary.connection_string, timeout=10) as bus, await bus.receiver(entity) as receiver:
            found: list[ReceivedMessage] = []
            while page := await receiver.peek(1 + max((one.sequence_number or 0 for one in found), default=0), 200):
                found += page
            return found

    async def until(self, holds: Callable[[], bool], seconds: float = SOON) -> None:
        async with asyncio.timeout(seconds):
            while not holds():  # noqa: ASYNC110 - what is waited for happens in threads and other processes
                await asyncio.sleep(0.02)

    async def struck(self, namespace: LocalNamespace) -> None:
        """Wait until a fault with a count is used up."""
        async with asyncio.timeout(SOON):
            while await asyncio.to_thread(namespace.faults.list):  # noqa: ASYNC110 - it happens in another process
                await asyncio.sleep(0.02)

    async def state(self, pair: Any, entity: str, state: str) -> None:
        await self.until(lambda: state_of(pair, entity) == state)


def clients(world: World) -> list[Any]:
    made = AioServiceBusClient if world.driver == "aio" else ServiceBusClient
    credential = AzureNamedKeyCredential(ALL, KEY)
    return [
        made(f"localhost:{namespace.port}", credential, use_tls=False) for namespace in (world.primary, world.secondary)
    ]


def open_sockets(port: int) -> int:
    """Return how many connections this process has to a port, as the kernel counts them."""
    return len(socket_inodes(port))


def socket_inodes(port: int) -> set[str]:
    """Return the inodes of this process's connections to a port."""
    wanted = f":{port:04X}"
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - links that vanish while they are listed
        try:
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - no file is behind it
        except OSError:
            continue
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(table, encoding="ascii") as lines:  # noqa: PTH123 - a table of the kernel's
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[2].endswith(wanted) and f"socket:[{fields[9]}]" in own:
                    found.add(fields[9])
    return found


def state_of(pair: Any, entity: str) -> str:
    return next((str(one.state) for one in pair.entities() if one.path == entity), "unknown")


@pytest.fixture(params=["sync", "aio"])
async def world(
    request: pytest.FixtureRequest, primary: LocalNamespace, secondary: LocalNamespace
) -> AsyncIterator[World]:
    made = World(request.param, primary, secondary)
    async with made.stack:
        yield made


def set_stored_size(file: Path, queue: str, size: int) -> None:
    """Set the size of a queue in the store of a server that is stopped."""
    store = SqliteStore(file)
    try:
        (stored,) = [found for found in store.open().entities if found.entity.path.lower() == queue.lower()]
        store.commit([stored.queue._replace(size=size)])
    finally:
        store.close()
