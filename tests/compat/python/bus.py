"""What a compat test works with: clients of one flavour, entities of its own, and functions that wait for a result."""

import asyncio
import contextlib
import functools
import inspect
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate, TypeVar, cast

import azure.servicebus as sync_sdk
import azure.servicebus.aio as aio_sdk
import azure.servicebus.aio.management as aio_management
import azure.servicebus.management as sync_management
import pytest
from azure.core.exceptions import ResourceNotFoundError
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage
from azure.servicebus.aio import AutoLockRenewer, ServiceBusClient, ServiceBusReceiver, ServiceBusSender
from azure.servicebus.aio.management import ServiceBusAdministrationClient

from tests.compat.python.flavours import FLAVOURS, Flavour, SideBySide, awaited, in_every_flavour
from twinbus.testing import LocalNamespace

PATIENCE = 15.0
AHEAD = 5
SHORTEST_LOCK = timedelta(seconds=5)
T = TypeVar("T")
Handler = ServiceBusSender | ServiceBusReceiver

_OUR_FIXTURES = ("request", "namespace", "side_by_side")
# A plugin adds this fixture to every test.
_PYTESTS_OWN = ("event_loop_policy",)
_SCENARIOS: dict[Callable[..., None], Callable[..., Coroutine[Any, Any, None]]] = {}


class Bus:
    """One flavour of the SDK on one namespace. The types are those of the aio flavour for both flavours."""

    def __init__(self, flavour: Flavour, namespace: LocalNamespace, connection_string: str | None = None) -> None:
        self.flavour = flavour
        self.namespace = namespace
        self.connection_string = connection_string or namespace.connection_string
        self._handlers: list[Handler] = []
        self._clients: list[ServiceBusClient] = []
        self._queues: list[str] = []
        self._topics: list[str] = []
        self.admin = self.connect_admin()
        self.client = self.connect()

    def connect(self, connection_string: str | None = None, **options: Any) -> ServiceBusClient:
        """Return a client that tries once by default: the SDK's retries would hide an error for eleven seconds."""
        sdk = sync_sdk if self.flavour == "sync" else aio_sdk
        target = connection_string or self.connection_string
        # Nothing is encrypted. But without a CA file the aio SDK reads all certificates of certifi for every link.
        defaults = {"retry_total": 0, "connection_verify": str(self.namespace.ca)}
        return self.keep(sdk.ServiceBusClient.from_connection_string(target, **{**defaults, **options}))

    def keep(self, client: sync_sdk.ServiceBusClient | ServiceBusClient) -> ServiceBusClient:
        """Return the client with the aio interface. The bus closes it."""
        kept = cast(ServiceBusClient, awaited(client))
        self._clients.append(kept)
        return kept

    def connect_admin(self, connection_string: str | None = None, **options: Any) -> ServiceBusAdministrationClient:
        sdk = sync_management if self.flavour == "sync" else aio_management
        target = connection_string or self.connection_string
        defaults = {"connection_verify": str(self.namespace.ca), "retry_total": 0, "read_timeout": PATIENCE}
        # A request would read the proxies from os.environ in its thread, while pytest changes a variable there.
        defaults["use_env_settings"] = False
        admin = sdk.ServiceBusAdministrationClient.from_connection_string(target, **{**defaults, **options})
        return cast(ServiceBusAdministrationClient, awaited(admin))

    def make_renewer(
        self, on_failure: Callable[[Any, Exception | None], None] | None = None, **options: Any
    ) -> AutoLockRenewer:
        async def on_failure_awaited(renewable: Any, error: Exception | None) -> None:
            if on_failure:
                on_failure(renewable, error)

        if self.flavour == "sync":
            sync_renewer = sync_sdk.AutoLockRenewer(on_lock_renew_failure=on_failure, **options)
            return cast(AutoLockRenewer, awaited(sync_renewer))
        return aio_sdk.AutoLockRenewer(on_lock_renew_failure=on_failure_awaited, **options)

    async def make_queue(self, **properties: Any) -> str:
        name = unique("queue")
        await self.admin.create_queue(name, **properties)
        self._queues.append(name)
        return name

    async def make_topic(self, *subscriptions: str, **subscription_properties: Any) -> str:
        """Make a topic with subscriptions of these names, all with the same properties."""
        name = unique("topic")
        await self.admin.create_topic(name)
        self._topics.append(name)
        for subscription in subscriptions:
            await self.admin.create_subscription(name, subscription, **subscription_properties)
        return name

    def forget_later(self, *, queue: str | None = None, topic: str | None = None) -> None:
        """Delete this entity, which the test made itself, when the bus closes."""
        if queue:
            self._queues.append(queue)
        if topic:
            self._topics.append(topic)

    async def open(self, *handlers: Handler) -> None:
        """Open all links at the same time."""
        await asyncio.gather(*map(self._open, handlers))

    async def _open(self, handler: Handler) -> None:
        await handler.__aenter__()
        self._handlers.append(handler)

    async def use(self, handler: Handler) -> None:
        """Open a handler and send or receive. A refused link is attached first and then detached, so it seems open."""
        await self.open(handler)
        if hasattr(handler, "receive_messages"):
            await handler.receive_messages(max_wait_time=PATIENCE)
        else:
            await handler.send_messages(ServiceBusMessage("x"))

    async def open_pair(self, queue: str, **receiver_options: Any) -> tuple[ServiceBusSender, ServiceBusReceiver]:
        sender = self.client.get_queue_sender(queue)
        receiver = self.client.get_queue_receiver(queue, **receiver_options)
        await self.open(sender, receiver)
        return sender, receiver

    async def close(self) -> None:
        # Errors of handlers whose link failed are ignored, as the SDK's own client.close() ignores them.
        await asyncio.gather(*(handler.close() for handler in self._handlers), return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients))
        deletions: list[Coroutine[Any, Any, None]] = [self.admin.delete_queue(name) for name in self._queues]
        deletions += [self.admin.delete_topic(name) for name in self._topics]
        await few_at_a_time(map(unless_gone, deletions))
        await self.admin.close()


def both_flavours(scenario: Callable[Concatenate[Bus, ...], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Turn `async def test_…(bus, …)` into a test that runs with the sync and with the aio SDK at the same time.

    The next few scenarios start together with it, unless they need a fixture that pytest has not made yet.
    """

    async def in_both(namespace: LocalNamespace, side_by_side: SideBySide, asked_for: dict[str, Any]) -> None:
        async def run(flavour: Flavour) -> None:
            bus = Bus(flavour, namespace)
            try:
                await scenario(bus, **asked_for)
            finally:
                side_by_side.leave_to_close(bus.close())

        await in_every_flavour(run, FLAVOURS)

    @functools.wraps(scenario)
    def test(
        request: pytest.FixtureRequest, namespace: LocalNamespace, side_by_side: SideBySide, **asked_for: Any
    ) -> None:
        side_by_side.begin(request.node.nodeid, lambda: in_both(namespace, side_by_side, asked_for))
        for item in _following(request.node):
            side_by_side.begin(
                item.nodeid, functools.partial(_SCENARIOS[item.function], namespace, side_by_side, _parameters(item))
            )
        side_by_side.finish(request.node.nodeid)

    own = list(inspect.signature(scenario).parameters)[1:]
    test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # pytest reads the fixtures from it
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (*_OUR_FIXTURES, *own)]
    )
    _SCENARIOS[test] = in_both
    return test


def _following(item: pytest.Item) -> list[pytest.Function]:
    items = item.session.items
    begun = items.index(item) + 1
    return [
        ahead
        for ahead in items[begun : begun + AHEAD]
        if isinstance(ahead, pytest.Function)
        and ahead.function in _SCENARIOS
        and ahead.get_closest_marker("skip") is None
        and set(ahead.fixturenames) <= {*_OUR_FIXTURES, *_PYTESTS_OWN, *_parameters(ahead)}
    ]


def _parameters(item: pytest.Function) -> dict[str, Any]:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


async def unless_gone(deletion: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(ResourceNotFoundError):
        await deletion


async def few_at_a_time(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run many requests over a few connections."""
    places = asyncio.Semaphore(8)

    async def in_turn(request: Coroutine[Any, Any, T]) -> T:
        async with places:
            return await request

    return await asyncio.gather(*map(in_turn, work))


def unique(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:12]}"


def from_now(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def numbered(count: int, **properties: Any) -> list[ServiceBusMessage]:
    return [ServiceBusMessage(f"{number}", message_id=f"{number}", **properties) for number in range(count)]


def texts(messages: list[ServiceBusReceivedMessage]) -> list[str]:
    return [str(message) for message in messages]


async def receive_all(receiver: ServiceBusReceiver, count: int) -> list[ServiceBusReceivedMessage]:
    """Receive exactly `count` messages. One receive may return fewer than it was asked for."""
    received: list[ServiceBusReceivedMessage] = []
    while len(received) < count:
        more = await receiver.receive_messages(max_message_count=count - len(received), max_wait_time=PATIENCE)
        assert more, f"only {len(received)} of {count} messages came"
        received += more
    return received


async def receive_one(receiver: ServiceBusReceiver) -> ServiceBusReceivedMessage:
    [received] = await receive_all(receiver, 1)
    return received


async def peek_all(receiver: ServiceBusReceiver) -> list[ServiceBusReceivedMessage]:
    """Return everything in the entity, also locked, deferred and scheduled messages."""
    return await receiver.peek_messages(max_message_count=100, sequence_number=1)


async def until(ask: Callable[[], Awaitable[T]], satisfied: Callable[[T], bool]) -> T:
    """Repeat `ask` until `satisfied` accepts the answer. Fails with the last answer after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not satisfied(answer := await ask()):
        assert time.monotonic() < deadline, f"the last answer was {answer!r}"
        await asyncio.sleep(0.05)
    return answer
