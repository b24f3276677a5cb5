"""The runtime: one decision at a time for each root entity, effects in their order, after their writes are on disk."""

import asyncio
import gc
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from twinbus.amqp import Properties, RoutingFields, build_message, read_routing_fields, split_sections
from twinbus.clock import Clock, SystemClock
from twinbus.namespace.engine.descriptions import (
    QueueDescription,
    RuleDescription,
    SqlAction,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
)
from twinbus.namespace.engine.effects import Deliver, Refusal
from twinbus.namespace.engine.events import (
    BatchDeleted,
    Complete,
    CreditGranted,
    MessagesPeeked,
    MessagesSent,
    MessagesSettled,
    ReceiverAttached,
    RuleChanged,
)
from twinbus.namespace.engine.storage_protocol import DueRows, KnownIds, StoreRead
from twinbus.namespace.engine.transactions import commit_transaction
from twinbus.namespace.entity_locks import EntityLock
from twinbus.namespace.meter import OperationMeter
from twinbus.namespace.runtime import NamespaceRuntime
from twinbus.namespace.store import MemoryStore, SqliteStore, Store
from twinbus.values import Timestamp

Answers = asyncio.Queue[Any]


class StillClock:
    """A clock that shows the same instant until a test sets it."""

    def __init__(self) -> None:
        self.instant = 1_000_000

    def now(self) -> int:
        return self.instant


class UnreadableStore(MemoryStore):
    """A store that fails to read scheduled messages that are due."""

    def __init__(self) -> None:
        super().__init__()
        self.tried = 0
        self.asked = asyncio.Event()

    def load(self, need: StoreRead) -> Any:
        if isinstance(need, DueRows):
            self.tried += 1
            self.asked.set()
            raise OSError("unreadable")
        return super().load(need)


def open_runtime(store: Store, clock: Clock | None = None) -> NamespaceRuntime:
    numbers = count(1)
    failures: list[Exception] = []
    return NamespaceRuntime(
        store,
        clock or SystemClock(),
        OperationMeter(),
        new_token=lambda: next(numbers).to_bytes(16, "big"),
        failed=failures.append,
    )


@pytest.fixture(params=["memory", "sqlite"])
async def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[NamespaceRuntime]:
    runtime = open_runtime(MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "n.sqlite"))
    yield runtime
    await runtime.close()


async def ask(runtime: NamespaceRuntime, path: str, event: type, *fields: Any) -> Any:
    """Submit an event and wait for its answer."""
    entity = runtime.namespace.find(path)
    assert entity is not None
    answer = asyncio.get_running_loop().create_future()
    runtime.submit(entity, event(answer.set_result, *fields))
    return await asyncio.wait_for(answer, 10)


async def send(runtime: NamespaceRuntime, path: str, *bodies: str) -> None:
    envelopes = tuple(
        read_routing_fields(build_message(properties=Properties(message_id=body), data=body.encode()))
        for body in bodies
    )
    assert await ask(runtime, path, MessagesSent, envelopes) is None


class Greedy:
    """A receiver that grants new credit while it is given messages, as a link does."""

    def __init__(self, runtime: NamespaceRuntime, path: str, wanted: int) -> None:
        self._runtime, self._path, self._wanted = runtime, path, wanted
        self.limit = 2
        self.seqs: list[int] = []
        self.tokens: list[bytes] = []
        self.done = asyncio.Event()

    def deliver(self, effect: Deliver) -> None:
        self.limit += len(effect.rows)
        entity = self._runtime.namespace.find(self._path)
        assert entity is not None
        self._runtime.submit(entity, CreditGranted(self, self.limit, drain=False))
        self.seqs += [row.seq for row in effect.rows]
        self.tokens += [token for token in effect.tokens if token is not None]
        assert len(self.tokens) == len(self.seqs)
        if len(self.seqs) == self._wanted:
            self.done.set()

    def drain(self) -> None:
        raise AssertionError("no receiver asked for a drain")

    def detach(self, refusal: Refusal) -> None:
        raise AssertionError(refusal)


async def test_an_event_submitted_by_an_effect_does_not_overtake_the_effects_after_it(
    runtime: NamespaceRuntime,
) -> None:
    await runtime.create(QueueDescription(path="q"))
    total = 900
    receiver = Greedy(runtime, "q", total)
    await ask(runtime, "q", ReceiverAttached, receiver, False, True)
    entity = runtime.namespace.find("q")
    assert entity is not None
    runtime.submit(entity, CreditGranted(receiver, 2, drain=False))
    await asyncio.gather(*(send(runtime, "q", *(f"{part}-{n}" for n in range(9))) for part in range(total // 9)))
    await asyncio.wait_for(receiver.done.wait(), 10)
    assert receiver.seqs == list(range(1, total + 1))
    assert len(set(receiver.tokens)) == total


async def test_a_backlog_on_disk_is_delivered_once_and_in_order(runtime: NamespaceRuntime) -> None:
    await runtime.create(QueueDescription(path="q"))
    for part in range(10):
        await send(runtime, "q", *(f"{part}-{n}" for n in range(100)))
    receiver = Greedy(runtime, "q", 1000)
    await ask(runtime, "q", ReceiverAttached, receiver, False, True)
    entity = runtime.namespace.find("q")
    assert entity is not None
    runtime.submit(entity, CreditGranted(receiver, 2, drain=False))
    await asyncio.wait_for(receiver.done.wait(), 10)
    assert receiver.seqs == list(range(1, 1001))
    results = await ask(runtime, "q", MessagesSettled, tuple(receiver.tokens), Complete())
    assert results == [None] * 1000
    assert await ask(runtime, "q", MessagesPeeked, 0, 10, False) == []


async def test_created_updated_and_deleted_entities_are_on_disk_after_a_restart(tmp_path: Path) -> None:
    runtime = open_runtime(SqliteStore(tmp_path / "n.sqlite"))
    await runtime.create(TopicDescription(path="news"))
    await runtime.create(SubscriptionDescription(topic="news", name="all"))
    await runtime.create(QueueDescription(path="gone"))
    updated = await runtime.update(SubscriptionDescription(topic="news", name="all", max_delivery_count=3))
    assert not isinstance(updated, Refusal)
    deleted = await runtime.delete("gone")
    assert not isinstance(deleted, Refusal)
    assert isinstance(await runtime.delete("gone"), Refusal)
    await runtime.close()

    again = open_runtime(SqliteStore(tmp_path / "n.sqlite"))
    assert [info.description.path for info in again.topics()] == ["news"]
    assert again.queues() == []
    (subscription,) = again.subscriptions("news")
    assert isinstance(subscription.description, SubscriptionDescription)
    assert subscription.description.max_delivery_count == 3
    await again.close()


async def test_two_deletions_at_the_same_time_are_both_answered(runtime: NamespaceRuntime) -> None:
    await runtime.create(QueueDescription(path="q"))
    first, second = await asyncio.gather(runtime.delete("q"), runtime.delete("q"))
    assert sorted(isinstance(outcome, Refusal) for outcome in (first, second)) == [False, True]


def entity_locks() -> int:
    gc.collect()
    return sum(type(found) is EntityLock for found in gc.get_objects())


async def test_a_deleted_entity_leaves_no_lock_and_no_timer_behind(runtime: NamespaceRuntime) -> None:
    before = entity_locks(), len(runtime._timers)
    for number in range(10):
        await runtime.create(QueueDescription(path=f"q{number}"))
        entity = runtime.namespace.find(f"q{number}")
        assert entity is not None
        await send(runtime, f"q{number}", "message")
        await runtime.delete(f"q{number}")
        # A caller that still has the entity is refused, and its lock is forgotten again.
        answer = asyncio.get_running_loop().create_future()
        runtime.submit(entity, MessagesPeeked(answer.set_result, 0, 1, False))
        assert isinstance(await asyncio.wait_for(answer, 10), Refusal)
        del entity
    assert (entity_locks(), len(runtime._timers)) == before


async def test_a_read_that_fails_is_repeated_only_after_a_pause() -> None:
    store, clock = UnreadableStore(), StillClock()
    runtime = open_runtime(store, clock)
    await runtime.create(QueueDescription(path="q"))
    later = build_message(
        properties=Properties(message_id="later"),
        message_annotations={"x-opt-scheduled-enqueue-time": Timestamp(clock.instant + 5)},
        data=b"",
    )
    assert await ask(runtime, "q", MessagesSent, (read_routing_fields(later),)) is None
    clock.instant += 10
    await asyncio.wait_for(store.asked.wait(), 10)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert store.tried == 1
    store.asked.clear()
    clock.instant += 1000
    await asyncio.wait_for(store.asked.wait(), 10)
    await runtime.close()


async def test_a_rule_that_changes_under_load_applies_to_whole_messages_and_to_all_later_ones(
    runtime: NamespaceRuntime,
) -> None:
    await runtime.create(TopicDescription(path="t"))
    await runtime.create(SubscriptionDescription(topic="t", name="s"))
    path, bodies = "t/Subscriptions/s", [str(number) for number in range(60)]

    async def change(version: int) -> None:
        action = SqlAction(f"SET version = {version}")
        assert await ask(runtime, path, RuleChanged, RuleDescription("$Default", TrueFilter(), action)) is None

    await change(0)
    work = []
    for at in range(0, len(bodies), 3):
        work += [send(runtime, "t", *bodies[at : at + 3]), change(at)]
    await asyncio.gather(*work)
    rows = await ask(runtime, path, MessagesPeeked, 0, 100, False)
    found = [split_sections(row.raw) for row in rows]
    assert sorted(str(each.properties.message_id) for each in found) == sorted(bodies)
    versions = [each.application_properties["version"] for each in found]
    assert versions == sorted(versions)
    assert len(set(versions)) > 1


async def test_a_topic_is_not_charged_for_a_body_after_its_last_copy_was_deleted(
    runtime: NamespaceRuntime,
) -> None:
    await runtime.create(TopicDescription(path="t"))
    for name in ("a", "b"):
        await runtime.create(SubscriptionDescription(topic="t", name=name))
    await send(runtime, "t", "x" * 100)
    assert await ask(runtime, "t/Subscriptions/a", BatchDeleted, 10, runtime.now() + 1_000, False) == 1
    assert size_of(runtime, "t") > 100
    await runtime.delete("t/Subscriptions/b")  # its rows are deleted in pieces, while there is nothing to commit
    for _ in range(1_000):
        if size_of(runtime, "t") == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{size_of(runtime, 't')} bytes are still charged")


def size_of(runtime: NamespaceRuntime, path: str) -> int:
    info = runtime.info(path)
    assert info is not None
    return info.counts.size_bytes


def envelope(name: str) -> RoutingFields:
    return read_routing_fields(build_message(properties=Properties(message_id=name), data=b"x"))


async def message_count(runtime: NamespaceRuntime, path: str) -> int:
    return len(await ask(runtime, path, MessagesPeeked, 0, 1000, False))


async def until(runtime: NamespaceRuntime, path: str, number: int) -> None:
    for _ in range(500):
        if await message_count(runtime, path) == number:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{path} has {await message_count(runtime, path)} messages, not {number}")


def commit(runtime: NamespaceRuntime, *paths: str, name: str) -> asyncio.Future[Any]:
    """Commit a transaction that sends one message to each of these entities, in their order."""
    entities = [entity for path in paths if (entity := runtime.namespace.find(path)) is not None]
    operations = [(entity, MessagesSent(None, (envelope(name),))) for entity in entities]
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    runtime.submit_together(entities, lambda now: commit_transaction(operations, done.set_result, now), done.set_result)
    return done


async def test_transactions_over_the_same_entities_in_any_order_all_finish(runtime: NamespaceRuntime) -> None:
    for path in ("a", "b", "c"):
        await runtime.create(QueueDescription(path=path, requires_duplicate_detection=True))
    orders = (("a", "b", "c"), ("c", "b", "a"), ("b", "c"), ("c", "a"))
    waiting = [commit(runtime, *orders[number % 4], name=f"{number}") for number in range(100)]
    sends = [ask(runtime, "b", MessagesSent, (envelope(f"between {number}"),)) for number in range(20)]
    async with asyncio.timeout(20):
        assert await asyncio.gather(*waiting) == [None] * 100
        await asyncio.gather(*sends)
    assert [await message_count(runtime, path) for path in ("a", "b", "c")] == [75, 75 + 20, 100]


async def test_a_forwarding_chain_moves_every_message_while_all_its_entities_are_sent_to(
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
    assert await message_count(runtime, "first") == await message_count(runtime, "t/Subscriptions/on") == 0


class OnceUnreadable(MemoryStore):
    """A store that fails the first read of known message ids."""

    failed = False

    def load(self, need: StoreRead) -> Any:
        if isinstance(need, KnownIds) and not self.failed:
            self.failed = True
            raise OSError("unreadable")
        return super().load(need)


@pytest.fixture
async def shaky() -> NamespaceRuntime:
    """A runtime that was restarted: the message ids that `target` knows are only in the store."""
    store = OnceUnreadable()
    first = open_runtime(store)
    await first.create(QueueDescription(path="target", requires_duplicate_detection=True))
    await first.create(QueueDescription(path="source", forward_to="target"))
    await first.group_commit.flushed()
    return open_runtime(store)


async def test_a_forward_that_failed_is_repeated_later(shaky: NamespaceRuntime) -> None:
    await ask(shaky, "source", MessagesSent, (envelope("a"),))
    await until(shaky, "target", 1)
    assert await message_count(shaky, "source") == 0
    await shaky.close()


async def test_a_transaction_that_failed_changes_nothing_and_its_entities_go_on(shaky: NamespaceRuntime) -> None:
    assert isinstance(await commit(shaky, "target", name="a"), Refusal)
    assert await message_count(shaky, "target") == 0
    assert await commit(shaky, "target", name="a") is None
    assert await message_count(shaky, "target") == 1
    await shaky.close()
