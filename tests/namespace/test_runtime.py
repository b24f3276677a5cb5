"""The runtime: one decision at a time per family, effects in their order, nothing said before it is on disk."""

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
    """A clock that shows one instant until it is set."""

    def __init__(self) -> None:
        self.instant = 1_000_000

    def now(self) -> int:
        return self.instant


class UnreadableStore(MemoryStore):
    """A store that cannot read what is due."""

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
    """A receiver that grants as much credit again in the middle of being delivered to, as a link does."""

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
        raise AssertionError("nobody asked to be drained")

    def detach(self, refusal: Refusal) -> None:
        raise AssertionError(refusal)


async def test_what_an_effect_brings_about_does_not_overtake_the_effects_after_it(runtime: NamespaceRuntime) -> None:
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


async def test_created_updated_and_deleted_entities_are_answered_from_disk(tmp_path: Path) -> None:
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


async def test_two_changes_at_once_are_both_answered(runtime: NamespaceRuntime) -> None:
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


async def test_what_cannot_be_read_is_not_asked_for_without_a_pause() -> None:
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


async def test_a_rule_that_changes_under_load_holds_for_whole_messages_and_for_all_after_it(
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


async def test_a_full_topic_has_room_again_once_the_last_copy_of_a_body_is_off_the_disk(
    runtime: NamespaceRuntime,
) -> None:
    await runtime.create(TopicDescription(path="t"))
    for name in ("a", "b"):
        await runtime.create(SubscriptionDescription(topic="t", name=name))
    await send(runtime, "t", "x" * 100)
    assert await ask(runtime, "t/Subscriptions/a", BatchDeleted, 10, runtime.now() + 1_000, False) == 1
    assert size_of(runtime, "t") > 100
    await runtime.delete("t/Subscriptions/b")  # its rows go by and by, when nothing else is to be done
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
