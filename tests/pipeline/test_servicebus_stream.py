"""D1: the stream reader against a real namespace, called in Spark's order by this process: what each step removes.

What is in a queue is counted with the official client. `stream_steps.Query` does what Spark does with a stream reader
and its checkpoint, so that a process can end between any two steps; `test_spark_kills.py` ends real ones.
"""

from __future__ import annotations

import gc
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.management import ServiceBusAdministrationClient
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tests.pipeline.queues import new_queue
from tests.pipeline.stream_steps import (
    NO_PAUSE,
    STEPS,
    Entity,
    Killed,
    Query,
    close_opened,
    ids_of,
    keep_open,
    next_names,
    numbered,
    started_at_first_try,
)
from twinbus.connect import ServiceBusCommunicationError, ServiceBusConnectionError
from twinbus.connect.errors import ServiceBusAuthenticationError
from twinbus.pipeline.servicebus import broker as broker_module
from twinbus.pipeline.servicebus import stream_reader as stream_module
from twinbus.pipeline.servicebus.broker import Broker
from twinbus.pipeline.servicebus.offsets import OffsetError, SequenceNumbers
from twinbus.pipeline.servicebus.options import SourceOptionError, SourceOptions
from twinbus.pipeline.servicebus.stream_reader import CompletionError, CreatedAgainError
from twinbus.testing import LocalNamespace

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def client(namespace: LocalNamespace) -> Iterator[ServiceBusClient]:
    with ServiceBusClient.from_connection_string(namespace.connection_string) as made:
        yield made
        close_opened()


@pytest.fixture
def queue(namespace: LocalNamespace, client: ServiceBusClient) -> Entity:
    return Entity(namespace, client)


# --- exactly what was read -------------------------------------------------------------------------------------------


def test_d1_a_stream_from_latest_never_removes_what_it_has_not_read(queue: Entity) -> None:
    queue.send(*numbered("old", 5))
    query = queue.query(startingPosition="latest")
    assert not query.trigger()
    for one in ("new1", "new2", "new3", "new4"):
        queue.send(one)
        query.run()
    assert query.read == [["new1"], ["new2"], ["new3"], ["new4"]]
    assert queue.left() == numbered("old", 5)
    assert queue.delivery_counts() == {0}
    assert ids_of(queue.received(5)) == numbered("old", 5), "one of them is locked"


@pytest.mark.thorough
def test_d1_a_stream_from_a_number_never_removes_what_stands_before(queue: Entity) -> None:
    queue.send(*numbered("", 10))
    query = queue.query(startingPosition=queue.numbers()[6], maxMessagesPerTrigger=2)
    query.run()
    assert query.read == [["6", "7"], ["8", "9"]]
    assert queue.left() == numbered("", 6)
    assert queue.delivery_counts() == {0}


@pytest.mark.thorough
def test_d1_of_two_streams_on_one_queue_each_removes_only_what_it_read(queue: Entity) -> None:
    queue.send(*numbered("old", 4))
    late = queue.query(startingPosition="latest")
    late.trigger()
    early = queue.query(maxMessagesPerTrigger=2)
    queue.send("new1", "new2")
    late.run()
    early.trigger()
    queue.send("new3")
    late.run()
    assert (early.ids, late.ids) == (["old0", "old1"], ["new1", "new2", "new3"])
    assert queue.left() == ["old0", "old1", "old2", "old3"]
    early.run()
    assert early.ids == ["old0", "old1", "old2", "old3"]
    assert queue.left() == []


@pytest.mark.thorough
def test_d1_what_was_not_active_when_its_batch_was_planned_is_not_removed(queue: Entity) -> None:
    queue.send("deferred")
    deferred = queue.received(1)[0]
    queue.receiver.defer_message(deferred)
    queue.send("scheduled", scheduled_enqueue_time_utc=datetime.now(UTC) + timedelta(seconds=4))
    queue.send("active")
    query = queue.query()
    query.run()
    assert query.ids == ["active"]
    numbers = queue.numbers()
    while queue.numbers() == numbers:  # the service gives the scheduled message a new number when it is due
        assert queue.left() == ["deferred", "scheduled"]
    query.run()
    assert query.ids == ["active", "scheduled"]
    assert queue.left() == ["deferred"]
    assert ids_of(queue.receiver.receive_deferred_messages([deferred.sequence_number or 0])) == ["deferred"]


@pytest.mark.thorough
def test_d1_a_message_that_another_receiver_holds_is_removed_once_it_is_given_back(queue: Entity) -> None:
    queue.send("held", "settled", "free")
    query = queue.query()
    held, settled = queue.received(2)
    query.run()
    assert query.ids == ["held", "settled", "free"]
    queue.send("next")
    query.run()
    assert queue.left() == ["held", "settled"]
    queue.receiver.complete_message(settled)
    queue.receiver.abandon_message(held)
    queue.send("last")
    query.run()
    assert query.ids == ["held", "settled", "free", "next", "last"]
    assert queue.left() == []


class Clock:
    """The clock of the stream reader, set by hand; the broker and the namespace have the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(stream_module, "time", self)

    def monotonic(self) -> float:
        return self.now


@pytest.mark.thorough
def test_d1_a_message_that_is_given_back_to_an_idle_queue_is_removed(
    namespace: LocalNamespace, client: ServiceBusClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, clock = Entity(namespace, client, lock_duration=timedelta(seconds=90)), Clock(monkeypatch)
    queue.send("held", "free")
    query = queue.query()
    held = queue.received(1)[0]
    query.run()
    clock.now += 1
    queue.send("last")
    query.run()
    assert query.ids == ["held", "free", "last"]
    assert queue.left() == ["held"]
    queue.receiver.abandon_message(held)
    clock.now += 91
    assert not query.trigger()
    assert queue.left() == [], "nobody holds it, and nothing new arrives"


@pytest.mark.thorough
def test_d1_an_idle_stream_tries_to_complete_once_per_lock_duration(
    namespace: LocalNamespace, client: ServiceBusClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, clock = Entity(namespace, client, lock_duration=timedelta(seconds=90)), Clock(monkeypatch)
    peeks, tries = list[int](), list[float]()
    peek, complete = Broker._peek, Broker.complete

    async def counted_peek(broker: Broker, number: int, *others: Any) -> Any:
        peeks.append(number)
        return await peek(broker, number, *others)

    def counted_complete(broker: Broker, *arguments: Any) -> Any:
        tries.append(clock.now)
        return complete(broker, *arguments)

    monkeypatch.setattr(Broker, "_peek", counted_peek)
    monkeypatch.setattr(Broker, "complete", counted_complete)
    queue.send("held", "free")
    query = queue.query()
    queue.received(1)
    query.run()
    clock.now += 1
    queue.send("last")
    query.run()
    clock.now += 1
    assert not query.trigger()
    peeks.clear()
    tries.clear()
    idle_from = clock.now
    for _ in range(36):  # three minutes, a look each five seconds
        clock.now += 5
        assert not query.trigger()
    assert tries == [idle_from + 90, idle_from + 180]
    assert len(peeks) == 36 + 2 * 2 + 2, "a look each, two for each try, and whether it is the same queue"
    assert queue.left() == ["held"]


@pytest.mark.thorough
def test_d1_a_message_that_another_receiver_defers_after_it_was_read_is_left_to_it(queue: Entity) -> None:
    queue.send("one", "two")
    query = queue.query()
    assert query.trigger()
    taken = queue.received(1)[0]
    queue.receiver.defer_message(taken)
    for one in ("three", "four"):
        queue.send(one)
        query.run()
    assert queue.left() == ["one"]
    number = taken.sequence_number
    assert number is not None
    assert ids_of(queue.receiver.receive_deferred_messages([number])) == ["one"]
    assert all("uncompleted" not in json.loads(offset) for offset in query.offsets)


@pytest.mark.thorough
def test_d1_a_dead_letter_with_a_low_number_is_read_and_not_removed_before(queue: Entity) -> None:
    queue.send(*numbered("", 6))
    held = queue.received(6)
    query = queue.query(deadLetter=True)
    read: list[str] = []
    for number in (4, 1, 5, 0):
        queue.receiver.dead_letter_message(held[number])
        query.run()
        read.append(str(number))
        assert query.ids == read
        assert queue.dead_letters.peek_messages(10, sequence_number=1) == []
    assert queue.left() == ["2", "3"]


def test_d1_a_subscription_is_streamed_like_a_queue(namespace: LocalNamespace, client: ServiceBusClient) -> None:
    topic = next(next_names)
    with ServiceBusAdministrationClient.from_connection_string(
        namespace.connection_string, connection_verify=str(namespace.ca)
    ) as admin:
        admin.create_topic(topic)
        admin.create_subscription(topic, "all")

    sender, receiver = (
        keep_open(client.get_topic_sender(topic)),
        keep_open(client.get_subscription_receiver(topic, "all")),
    )
    sender.send_messages(ServiceBusMessage("", message_id="old"))
    told = {"connectionString": namespace.connection_string, "entity": topic, "subscription": "all"}
    query = Query({**told, "startingPosition": "latest", "pollInterval": NO_PAUSE})
    query.trigger()
    for one in ("a", "b", "c"):
        sender.send_messages(ServiceBusMessage("", message_id=one))
        query.run()
    assert query.ids == ["a", "b", "c"]
    assert ids_of(receiver.peek_messages(10)) == ["old"]


def _create_again(queue: Entity, *ids: str) -> None:
    with ServiceBusAdministrationClient.from_connection_string(
        queue.namespace.connection_string, connection_verify=str(queue.namespace.ca)
    ) as admin:
        admin.delete_queue(queue.name)
        admin.create_queue(queue.name)
    with queue.client.get_queue_sender(queue.name) as sender:
        sender.send_messages([ServiceBusMessage("", message_id=one) for one in ids])


@pytest.mark.thorough
def test_d1_a_queue_that_was_created_again_keeps_its_messages(queue: Entity, client: ServiceBusClient) -> None:
    queue.send("a", "b")
    query = queue.query()
    assert query.trigger()  # a and b are read and not completed
    _create_again(queue, "c", "d", "e")
    query.restart()
    query.run()
    assert query.ids == ["a", "b", "e"], "c and d have the numbers that a and b had"
    with client.get_queue_receiver(queue.name) as receiver:
        assert ids_of(receiver.peek_messages(10)) == ["c", "d"]


@pytest.mark.thorough
@pytest.mark.parametrize("complete", ["true", "false"])
def test_d1_a_stream_of_a_queue_that_was_created_again_stops_with_an_error(queue: Entity, complete: str) -> None:
    queue.send(*numbered("", 5))
    query = queue.query(completeCommitted=complete)
    query.run()
    offset = json.loads(query.offsets[-1])
    query.offsets[-1] = json.dumps({**offset, "newest": offset["newest"] - 600_000})  # as if this was ten minutes ago
    _create_again(queue, "new1", "new2")
    query.restart()
    with pytest.raises(
        CreatedAgainError, match=rf"{queue.name} was created again.*up to sequence number 5.*number 1 "
    ) as e:
        query.trigger()
    assert "Start it with a new checkpoint" in str(e.value)
    with queue.client.get_queue_receiver(queue.name) as receiver:
        assert ids_of(receiver.peek_messages(10)) == ["new1", "new2"]
    fresh = queue.query(completeCommitted=complete)
    fresh.run()
    assert fresh.ids == ["new1", "new2"]


@pytest.mark.thorough
def test_d1_a_running_stream_finds_that_its_queue_was_created_again(
    queue: Entity, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(stream_module, "_CLOCKS_DIFFER", 0)
    queue.send(*numbered("", 5))
    query = queue.query(completeCommitted="false")
    query.run()
    _create_again(queue, "new1", "new2")
    clock.now += 61
    assert not query.trigger(), "this look begins behind the messages that the last one saw"
    clock.now += 61
    with pytest.raises(CreatedAgainError):
        query.trigger()


@pytest.mark.thorough
def test_d1_a_queue_that_is_the_same_is_never_taken_for_one_created_again(
    queue: Entity, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(stream_module, "_CLOCKS_DIFFER", 0)
    queue.send("before")
    queue.send("dead", "deferred", "held")
    query = queue.query(startingPosition=queue.numbers()[1])
    dead_letters = queue.query(deadLetter=True, completeCommitted="false")
    before, dead, deferred, held = queue.received(4)
    queue.receiver.defer_message(deferred)
    queue.send("scheduled", scheduled_enqueue_time_utc=datetime.now(UTC) + timedelta(seconds=3))
    queue.send("active", "high")
    assert query.trigger()
    assert query.ids == ["dead", "held", "active", "high"]
    queue.receiver.dead_letter_message(queue.received(2)[1])
    dead_letters.run()
    queue.receiver.dead_letter_message(dead)
    for one in (before, held):
        queue.receiver.abandon_message(one)

    def look() -> None:
        for _ in range(3):
            clock.now += 61
            query.run()
            dead_letters.run()

    look()
    while "scheduled" not in query.ids:
        look()
    assert query.ids == ["dead", "held", "active", "high", "scheduled"]
    assert dead_letters.ids == ["high"]


@pytest.mark.thorough
def test_d1_a_partitioned_entity_is_refused_before_anything_is_read(
    queue: Entity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_PARTITION", 4)  # a local namespace has no numbers as high as 2^48
    queue.send(*numbered("", 5))
    refused = rf"cannot stream {queue.name}: it is a partitioned entity \(it has the sequence number [45]\)"
    for options in ({}, {"completeCommitted": "false"}, {"startingPosition": "latest"}):
        query = queue.query(**options)
        with pytest.raises(SourceOptionError, match=refused):
            query.run()
        assert query.ids == []
    for one in queue.received(5):
        queue.receiver.dead_letter_message(one)
    dead = queue.query(deadLetter=True)
    dead.run()
    assert dead.ids == numbered("", 5)


# --- the size of a batch ---------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_d1_a_batch_has_so_many_messages_however_their_numbers_lie(queue: Entity) -> None:
    queue.send(*numbered("", 30))
    for one in queue.received(30):
        settle = queue.receiver.complete_message if int(str(one.message_id)) % 3 else queue.receiver.abandon_message
        settle(one)
    query = queue.query(maxMessagesPerTrigger=4, partitions=3)
    query.run()
    assert [len(batch) for batch in query.read] == [4, 4, 2]
    assert query.ids == [str(number) for number in range(0, 30, 3)]
    assert queue.left() == []


@pytest.mark.thorough
def test_d1_a_batch_ends_where_its_offset_would_grow_too_long(queue: Entity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_MOST_RUNS", 2)
    queue.send(*numbered("", 9))
    for one in queue.received(9):
        if str(one.message_id) in {"2", "5"}:
            queue.receiver.complete_message(one)
    query = queue.query()
    assert query.trigger(limit=ReadAllAvailable())
    assert query.read == [["0", "1", "3", "4", "6", "7", "8"]]
    query = queue.query()
    query.run()
    assert query.read == [["0", "1", "3", "4"], ["6", "7", "8"]]


def test_d1_the_progress_shows_how_far_the_stream_is_behind_and_what_it_completed(queue: Entity) -> None:
    queue.send(*numbered("", 10))
    query = queue.query(maxMessagesPerTrigger=4)
    assert query.trigger()
    assert query.reader.reportLatestOffset() == {"through": 10, "behind": 6, "completed": 0, "uncompleted": 0}
    assert query.trigger()
    assert query.reader.reportLatestOffset() == {"through": 10, "behind": 2, "completed": 4, "uncompleted": 0}
    query.run()
    assert query.reader.reportLatestOffset() == {"through": 10, "behind": 0, "completed": 10, "uncompleted": 0}
    query.restart()
    assert not query.trigger()
    assert query.reader.reportLatestOffset() == {"through": 10, "behind": 0, "completed": 0, "uncompleted": 0}


# --- what stands in front --------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_d1_a_stream_that_could_not_complete_what_it_reads_is_refused_at_its_start(
    queue: Entity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "MOST_HELD", 4)
    queue.send(*numbered("old", 5))
    query = queue.query(startingPosition="latest")
    with pytest.raises(SourceOptionError, match=r"stand before those that it reads\..*completeCommitted=false"):
        query.trigger()
    assert not queue.query(startingPosition="latest", completeCommitted="false").trigger()
    queue.receiver.complete_message(queue.received(1)[0])
    assert not query.trigger()


@contextmanager
def _broker(queue: Entity) -> Iterator[Broker]:
    with Broker(
        SourceOptions.parse({"connectionString": queue.namespace.connection_string, "entity": queue.name})
    ) as made:
        yield made


@pytest.mark.thorough
def test_d1_more_messages_in_front_than_may_be_held_are_neither_locked_nor_removed(
    queue: Entity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "MOST_HELD", 20)
    queue.send(*numbered("", 30))
    numbers = queue.numbers()
    with _broker(queue) as broker:
        done = broker.complete(SequenceNumbers.of(numbers[25:]), None)
    assert done.left == SequenceNumbers.of(numbers[25:])
    assert done.stopped is not None
    assert "more than 20 messages" in done.stopped
    assert len(queue.received(30)) == 30


@pytest.mark.thorough
def test_d1_messages_of_others_between_those_meant_are_held_only_up_to_the_limit(
    queue: Entity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "MOST_HELD", 20)
    monkeypatch.setattr(broker_module, "_TAKE", 10)
    queue.send(*numbered("", 60))
    numbers = queue.numbers()
    with _broker(queue) as broker:
        done = broker.complete(SequenceNumbers.of([numbers[0], numbers[59]]), None)
    assert done.left == SequenceNumbers.of(numbers[59:])
    assert 20 < done.held <= 30
    assert done.stopped is not None
    assert queue.left() == [str(number) for number in range(1, 60)]
    assert queue.delivery_counts() == {0}
    assert len(queue.received(59)) == 59


@pytest.mark.thorough
def test_d1_messages_of_others_are_given_back_before_their_locks_end(
    queue: Entity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "_lock_seconds", lambda _: 0.0)
    monkeypatch.setattr(broker_module, "_TAKE", 3)
    queue.send(*numbered("", 9))
    numbers = queue.numbers()
    with _broker(queue) as broker:
        done = broker.complete(SequenceNumbers.of(numbers[8:]), None)
    assert done.stopped is not None
    assert "half of the lock time" in done.stopped
    assert queue.left() == numbered("", 9)
    assert len(queue.received(9)) == 9


@pytest.mark.thorough
def test_d1_a_completion_that_fails_beside_a_receive_leaves_no_error_that_nobody_reads(
    queue: Entity, namespace: LocalNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send("a", "b")
    wanted = SequenceNumbers.of([*queue.numbers(), 99])
    namespace.faults.set("detach", entity=queue.name, points=["settle"], count=1)
    with _broker(queue) as broker, pytest.raises(ServiceBusConnectionError):
        broker.complete(wanted, None)
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
    assert queue.left() == ["a", "b"]


@pytest.mark.thorough
def test_d1_a_stream_that_cannot_complete_stops_before_it_has_read_too_much(
    queue: Entity, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send(*numbered("old", 3))
    query = queue.query(startingPosition="latest", maxMessagesPerTrigger=2)
    query.trigger()
    monkeypatch.setattr(broker_module, "MOST_HELD", 2)
    monkeypatch.setattr(stream_module, "_MOST_UNCOMPLETED", 3)
    queue.send(*numbered("new", 10))
    with pytest.raises(CompletionError, match="cannot complete, the first with sequence number 4"):
        query.run()
    assert query.ids == numbered("new", 4)
    assert queue.left() == [*numbered("old", 3), *numbered("new", 10)]
    query.restart()
    with pytest.raises(CompletionError):
        query.run()
    assert query.ids == numbered("new", 4)
    queue.receiver.complete_message(queue.received(1)[0])
    query.run()
    assert query.ids == numbered("new", 10)
    assert queue.left() == ["old1", "old2"]


@pytest.mark.thorough
def test_d1_available_now_completes_its_last_batch_behind_many_older_messages(queue: Entity) -> None:
    queue.send(*numbered("old", 300))
    query = queue.query(startingPosition="latest", maxMessagesPerTrigger=5)
    query.trigger()
    queue.send(*numbered("new", 10))
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    query.run()
    assert query.ids == numbered("new", 10)
    assert queue.left() == numbered("old", 300)
    assert queue.delivery_counts() == {0}


@pytest.mark.thorough
def test_d1_available_now_ends_beside_another_receiver_and_completes_what_it_held_at_the_next_start(
    queue: Entity,
) -> None:
    queue.send("held", "free")
    query = queue.query(maxMessagesPerTrigger=1)
    held = queue.received(1)[0]
    query.reader.prepareForTriggerAvailableNow()
    query.run()
    assert query.ids == ["held", "free"]
    assert queue.left() == ["held"]
    queue.receiver.abandon_message(held)
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    query.run()
    assert query.ids == ["held", "free"]
    assert queue.left() == []


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_d1_a_checkpoint_of_an_earlier_version_opens_and_removes_nothing_it_did_not_record(queue: Entity) -> None:
    queue.send(*numbered("", 6))
    numbers = queue.numbers()
    query = queue.query()
    # Batch 0 is committed; the end of batch 1 is written and nothing else of it.
    query.offsets = [json.dumps({"through": numbers[one]}) for one in (1, 3)]
    query.read, query.committed = [["0", "1"]], 0
    query.run()
    assert query.read == [["0", "1"], ["2", "3"], ["4", "5"]]
    # Of 0 to 3 no version has recorded who read them.
    assert queue.left() == ["0", "1", "2", "3"]
    assert all(json.loads(offset)["through"] for offset in query.offsets), "an earlier version can go on from there"


@pytest.mark.parametrize("at", ["batch committed", "offset logged"])
def test_d1_a_checkpoint_of_another_entity_is_refused_before_anything_is_read_or_removed(
    namespace: LocalNamespace, client: ServiceBusClient, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    first, second = Entity(namespace, client), Entity(namespace, client)
    second.send(*numbered("b", 10))
    first.send(*numbered("a", 6))
    query = first.query()
    query.run_until_killed(at, monkeypatch)
    read = query.ids
    for change in ({"entity": second.name}, {"deadLetter": "true"}):
        given = query.options.copy()
        query.options.update(change)
        query.restart()
        with pytest.raises(OffsetError) as error:
            query.trigger()
        named = [f"localhost:{namespace.port}/{first.name}", query.reader._options.qualified_address]
        assert [name in str(error.value) for name in named] == [True, True]
        assert "Start this stream with a new checkpoint, or name the entity" in str(error.value)
        query.options = given
    assert query.ids == read
    assert second.left() == numbered("b", 10)
    assert first.left() == numbered("a", 6)
    query.restart()
    query.run()
    assert query.ids == numbered("a", 6)
    assert first.left() == []


@pytest.mark.thorough
def test_d1_a_checkpoint_of_another_namespace_is_refused_before_anything_is_removed(queue: Entity) -> None:
    queue.send(*numbered("a", 6))
    query = queue.query()
    assert query.trigger()
    with LocalNamespace() as other, ServiceBusClient.from_connection_string(other.connection_string) as client:
        new_queue(other, queue.name)
        with client.get_queue_sender(queue.name) as sender, client.get_queue_receiver(queue.name) as receiver:
            sender.send_messages([ServiceBusMessage("", message_id=one) for one in numbered("b", 10)])
            query.options["connectionString"] = other.connection_string
            query.restart()
            with pytest.raises(OffsetError, match=rf"of localhost:{queue.namespace.port}/.*localhost:{other.port}/"):
                query.trigger()
            assert ids_of(receiver.peek_messages(20)) == numbered("b", 10)


@pytest.mark.thorough
def test_d1_a_worker_whose_variable_names_another_namespace_reads_nothing(
    queue: Entity, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send("a")
    monkeypatch.setenv("THE_CONNECTION", queue.namespace.connection_string)
    query = Query({"connectionStringEnv": "THE_CONNECTION", "entity": queue.name})
    end = query.reader.latestOffset(start := query.reader.initialOffset(), query.reader.getDefaultReadLimit())
    parts = query.reader.partitions(start, end)
    elsewhere = queue.namespace.connection_string.replace(str(queue.namespace.port), "1")
    monkeypatch.setenv("THE_CONNECTION", elsewhere)
    with pytest.raises(SourceOptionError, match=r"worker would read localhost:1/.*give the variable THE_CONNECTION"):
        list(query.reader.read(parts[0]))


def test_d1_a_checkpoint_without_a_name_opens_and_gets_the_name_with_the_next_batch(queue: Entity) -> None:
    queue.send(*numbered("", 4))
    query = queue.query(maxMessagesPerTrigger=2)
    assert query.trigger()
    offset = json.loads(query.offsets[-1])
    assert offset.pop("entity") == f"localhost:{queue.namespace.port}/{queue.name}"
    query.offsets[-1] = json.dumps(offset)
    query.restart()
    query.run()
    assert query.ids == numbered("", 4)
    assert queue.left() == []
    assert json.loads(query.offsets[-1])["entity"] == f"localhost:{queue.namespace.port}/{queue.name}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"connectionString": "Endpoint=sb://Contoso.servicebus.Windows.net/;SharedAccessKeyName=a;SharedAccessKey=b"},
        {"fullyQualifiedNamespace": "contoso.servicebus.windows.net", "credential": "default"},
        {"fullyQualifiedNamespace": "contoso.servicebus.windows.net.:5671", "credential": "cli"},
        {
            "connectionString": "Endpoint=sb://contoso.servicebus.windows.net;SharedAccessKeyName=a;SharedAccessKey=b",
            "transportType": "AmqpOverWebsocket",
            "customEndpointAddress": "sb://gateway.contoso.com:443",
        },
    ],
)
@pytest.mark.parametrize("path", [{"entity": "T", "subscription": "all"}, {"entity": "/t/subscriptions/ALL"}])
def test_d1_every_spelling_of_a_namespace_and_an_entity_is_the_same_to_a_checkpoint(
    options: dict[str, str], path: dict[str, str]
) -> None:
    name = SourceOptions.parse({**options, **path}).qualified_address
    assert name == "contoso.servicebus.windows.net:5671/t/subscriptions/all"


@pytest.mark.thorough
def test_d1_what_was_read_with_complete_committed_off_is_never_removed(queue: Entity) -> None:
    queue.send("a", "b")
    query = queue.query(maxMessagesPerTrigger=1)
    assert query.trigger()
    assert query.trigger()  # b is read and not completed
    query.options["completeCommitted"] = "false"
    query.restart()
    queue.send("c", "d")
    query.run()
    assert queue.left() == ["b", "c", "d"]
    query.options["completeCommitted"] = "true"
    query.restart()
    queue.send("e", "f")
    query.run()
    # b was read and committed before; c and d were read to be kept.
    assert query.ids == ["a", "b", "c", "d", "e", "f"]
    assert queue.left() == ["c", "d"]


# --- a process that ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", STEPS)
def test_d1_a_process_that_ends_at_any_step_neither_loses_nor_forgets_a_message(
    queue: Entity, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "_TAKE", 2)
    queue.send(*numbered("old", 3))
    query = queue.query(startingPosition="latest", maxMessagesPerTrigger=4)
    query.trigger()
    queue.send(*numbered("", 12))
    kept = set(numbered("old", 3))

    def gone() -> set[str]:
        return {*kept, *numbered("", 12)} - set(queue.left())

    query.run_until_killed(at, monkeypatch, after=1 if at in {"read", "batch committed"} else 0)
    committed = {one for batch in query.read[: query.committed + 1] for one in batch}
    assert gone() <= committed
    query.restart()
    query.run()
    assert Counter(query.ids) == Counter(numbered("", 12))
    assert set(queue.left()) == kept
    assert queue.delivery_counts() == {0}


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_d1_whatever_ends_and_whoever_else_receives_nothing_unread_is_removed(queue: Entity, seed: int) -> None:
    """Two streams on one queue are killed at random steps, while another receiver settles messages in every way."""
    dice = random.Random(seed)
    queue.send(*numbered("old", 3))
    queries = [queue.query(startingPosition="latest", maxMessagesPerTrigger=3, partitions=2) for _ in range(2)]
    for query in queries:
        query.trigger()
    sent, taken = set(numbered("old", 3)), set[str]()

    def step(_: str) -> None:
        if dice.random() < 0.15:
            raise Killed

    for turn in range(12):
        fresh = [f"{turn}-{one}" for one in range(dice.randrange(4))]
        queue.send(*fresh)
        sent.update(fresh)
        if dice.random() < 0.4:
            other = queue.receiver
            for one in other.receive_messages(2, 1):
                settle = dice.choice([other.complete_message, other.abandon_message, other.defer_message])
                settle(one)
                if settle == other.complete_message:
                    taken.add(str(one.message_id))
        query = dice.choice(queries)
        try:
            query.trigger(step)
        except Killed:
            query.restart()
        read = {one for query in queries for batch in query.read[: query.committed + 1] for one in batch}
        assert sent - set(queue.left()) <= read | taken
    for query in queries:
        query.restart()
        query.run()
    # Each remaining message has a reason: it was deferred, or was before the start.
    read = {one for query in queries for one in query.ids}
    states = {str(one.message_id): one.state.name for one in queue.receiver.peek_messages(1000, sequence_number=1)}
    assert sent - set(states) <= read | taken
    assert {one for one, state in states.items() if state == "ACTIVE"} <= set(numbered("old", 3))


# --- outages ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("at", ["", *STEPS[:-1]])
def test_d1_a_stream_survives_a_namespace_that_is_away_for_less_than_its_timeout(at: str) -> None:
    with LocalNamespace() as namespace, ServiceBusClient.from_connection_string(namespace.connection_string) as client:
        queue = Entity(namespace, client)
        queue.send(*numbered("", 6))
        query = queue.query(maxMessagesPerTrigger=2)
        assert query.trigger()

        def kill(step: str) -> None:
            if step == at and not tried:
                namespace.kill()

        with started_at_first_try(namespace) as tried:
            kill("")
            query.run(kill)
        assert tried == ["trying again"]
        assert query.ids == numbered("", 6)
        assert queue.left() == []
        close_opened()


@pytest.mark.thorough
def test_d1_a_stream_ends_when_the_namespace_is_away_for_longer_than_its_timeout() -> None:
    with LocalNamespace() as namespace, ServiceBusClient.from_connection_string(namespace.connection_string) as client:
        queue = Entity(namespace, client)
        queue.send("a")
        query = queue.query(timeout=0.5)
        assert query.trigger()
        namespace.kill()
        with pytest.raises(ServiceBusCommunicationError, match="cannot connect"):
            query.trigger()
        with pytest.raises(ServiceBusCommunicationError):
            query.restart()
        namespace.start()
        query.restart()
        query.run()
        assert query.ids == ["a"]
        assert queue.left() == []
        close_opened()


@pytest.mark.thorough
@pytest.mark.parametrize("is_completing", [True, False])
def test_d1_a_stream_that_starts_does_not_wait_for_a_namespace_that_is_away(
    caplog: pytest.LogCaptureFixture, is_completing: bool
) -> None:
    with LocalNamespace() as namespace, ServiceBusClient.from_connection_string(namespace.connection_string) as client:
        queue = Entity(namespace, client)
        queue.send("a")
        query = queue.query(timeout=5, completeCommitted=is_completing)
        assert query.trigger()
        namespace.kill()
        with pytest.raises(ServiceBusCommunicationError, match="cannot connect"):
            query.restart()
        assert "trying again" not in caplog.text
        close_opened()


@pytest.mark.thorough
def test_d1_a_stream_whose_key_is_refused_does_not_try_again(
    queue: Entity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("THE_CONNECTION", queue.namespace.connection_string)
    queue.send("a")
    query = Query({"connectionStringEnv": "THE_CONNECTION", "entity": queue.name, "pollInterval": NO_PAUSE})
    assert query.trigger()
    wrong = queue.namespace.connection_string.replace("SharedAccessKey=", "SharedAccessKey=wrong")
    monkeypatch.setenv("THE_CONNECTION", wrong)
    with pytest.raises(ServiceBusAuthenticationError):
        query.trigger()
    with pytest.raises(ServiceBusAuthenticationError):
        query.restart()
    assert "trying again" not in caplog.text


# --- sessions --------------------------------------------------------------------------------------------------------


def test_d1_an_entity_that_requires_sessions_is_refused_before_anything_is_read(
    namespace: LocalNamespace, client: ServiceBusClient
) -> None:
    queue = Entity(namespace, client, requires_session=True)
    queue.send("a", session_id="s")
    with pytest.raises(SourceOptionError, match=r"requires sessions.*spark\.read.*completeCommitted=false"):
        queue.query()
    query = queue.query(completeCommitted="false")
    query.run()
    assert query.ids == ["a"]
    dead = queue.query(deadLetter=True)  # a dead-letter queue has no sessions
    assert not dead.trigger()
