"""Decisions over several families: one commit, nobody decides in between, nobody waits for ever."""

import asyncio
from typing import Any

import pytest

from twinbus.amqp import Properties, RoutingFields, build_message, read_routing_fields
from twinbus.namespace.engine.descriptions import QueueDescription, SubscriptionDescription, TopicDescription
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.events import MessagesPeeked, MessagesSent
from twinbus.namespace.engine.storage_protocol import KnownIds, StoreRead
from twinbus.namespace.engine.transactions import commit_transaction
from twinbus.namespace.runtime import NamespaceRuntime
from twinbus.namespace.store import MemoryStore

from .test_runtime import ask, open_runtime
from .test_runtime import runtime as runtime  # noqa: PLC0414  # a fixture: memory and SQLite in turn


def envelope(name: str) -> RoutingFields:
    return read_routing_fields(build_message(properties=Properties(message_id=name), data=b"x"))


async def count(runtime: NamespaceRuntime, path: str) -> int:
    return len(await ask(runtime, path, MessagesPeeked, 0, 1000, False))


async def until(runtime: NamespaceRuntime, path: str, number: int) -> None:
    for _ in range(500):
        if await count(runtime, path) == number:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{path} has {await count(runtime, path)} messages, not {number}")


def commit(runtime: NamespaceRuntime, *paths: str, name: str) -> asyncio.Future[Any]:
    """A transaction that sends one message to each of these, in their order."""
    entities = [entity for path in paths if (entity := runtime.namespace.find(path)) is not None]
    operations = [(entity, MessagesSent(None, (envelope(name),))) for entity in entities]
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    runtime.submit_together(entities, lambda now: commit_transaction(operations, done.set_result, now), done.set_result)
    return done


async def test_many_that_want_the_same_families_in_any_order_all_come_to_an_end(runtime: NamespaceRuntime) -> None:
    for path in ("a", "b", "c"):
        await runtime.create(QueueDescription(path=path, requires_duplicate_detection=True))
    orders = (("a", "b", "c"), ("c", "b", "a"), ("b", "c"), ("c", "a"))
    waiting = [commit(runtime, *orders[number % 4], name=f"{number}") for number in range(100)]
    sends = [ask(runtime, "b", MessagesSent, (envelope(f"between {number}"),)) for number in range(20)]
    async with asyncio.timeout(20):
        assert await asyncio.gather(*waiting) == [None] * 100
        await asyncio.gather(*sends)
    assert [await count(runtime, path) for path in ("a", "b", "c")] == [75, 75 + 20, 100]


async def test_a_chain_through_topics_moves_everything_while_it_is_sent_to_at_every_link(
    runtime: NamespaceRuntime,
) -> None:
    await runtime.create(QueueDescription(path="end"))
    await runtime.create(TopicDescription(path="t"))
    await runtime.create(SubscriptionDescription(topic="t", name="on", forward_to="end"))
    await runtime.create(SubscriptionDescription(topic="t", name="kept"))
    await runtime.create(QueueDescription(path="first", forward_to="t"))
    sends = [
        ask(runtime, path, MessagesSent, (envelope(f"{path} {number}"),))
        for number in range(50)
        for path in ("first", "t", "end")
    ]
    await asyncio.gather(*sends)
    await until(runtime, "end", 150)
    await until(runtime, "t/Subscriptions/kept", 100)
    assert await count(runtime, "first") == await count(runtime, "t/Subscriptions/on") == 0


class OnceUnreadable(MemoryStore):
    """A store that fails the first time it is asked about ids."""

    failed = False

    def load(self, need: StoreRead) -> Any:
        if isinstance(need, KnownIds) and not self.failed:
            self.failed = True
            raise OSError("unreadable")
        return super().load(need)


@pytest.fixture
async def shaky() -> NamespaceRuntime:
    """What its target knows is in the store alone, as after a restart."""
    store = OnceUnreadable()
    first = open_runtime(store)
    await first.create(QueueDescription(path="target", requires_duplicate_detection=True))
    await first.create(QueueDescription(path="source", forward_to="target"))
    await first.group_commit.flushed()
    return open_runtime(store)


async def test_a_forward_that_failed_is_made_later(shaky: NamespaceRuntime) -> None:
    await ask(shaky, "source", MessagesSent, (envelope("a"),))
    await until(shaky, "target", 1)
    assert await count(shaky, "source") == 0
    await shaky.close()


async def test_a_transaction_that_failed_did_nothing_and_leaves_its_families_at_work(shaky: NamespaceRuntime) -> None:
    assert isinstance(await commit(shaky, "target", name="a"), Refusal)
    assert await count(shaky, "target") == 0
    assert await commit(shaky, "target", name="a") is None
    assert await count(shaky, "target") == 1
    await shaky.close()
