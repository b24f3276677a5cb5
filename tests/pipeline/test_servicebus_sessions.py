"""D1: streams of an entity that requires sessions, called in Spark's order by this process.

The messages in a queue are counted by plain peeks, which need no session. Other receivers are those of the official
client. `test_spark_kills.py` kills real drivers.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceiver
from azure.servicebus.management import EntityStatus, ServiceBusAdministrationClient
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, In, LessThanOrEqual

from tests.pipeline.stream_steps import NO_PAUSE, STEPS, Entity, Killed, Query, close_opened, started_at_first_try
from tests.tiers import budget
from twinbus.connect import MessageState, ReceivedMessage, Receiver, SessionCannotBeLockedError, connect
from twinbus.pipeline.servicebus import broker as broker_module
from twinbus.pipeline.servicebus import held_sessions as held_module
from twinbus.pipeline.servicebus import session_stream_reader as reader_module
from twinbus.pipeline.servicebus.broker import Broker, Completion
from twinbus.pipeline.servicebus.held_sessions import HeldSessions
from twinbus.pipeline.servicebus.offsets import OffsetError
from twinbus.pipeline.servicebus.options import SourceOptionError, SourceOptions
from twinbus.pipeline.servicebus.rows import READ_SCHEMA
from twinbus.pipeline.servicebus.session_stream_reader import SessionHeldError, SessionStreamReader
from twinbus.pipeline.servicebus.source import ServiceBusDataSource
from twinbus.pipeline.servicebus.stream_reader import CompletionError
from twinbus.testing import LocalNamespace

pytestmark = pytest.mark.timeout(120)


class SessionQueue(Entity):
    """A queue that requires sessions. The id of a message is SESSION/NUMBER."""

    def __init__(self, namespace: LocalNamespace, client: ServiceBusClient, **settings: Any) -> None:
        super().__init__(namespace, client, requires_session=True, **settings)
        self._sent: Counter[str] = Counter()
        self.queries: list[Query] = []

    def put(self, sessions: Iterable[str], count: int = 1, **properties: Any) -> list[str]:
        """Send messages to each session in turn. Returns their ids."""
        ids: list[str] = []
        for _ in range(count):
            for session in sessions:
                ids.append(f"{session}/{self._sent[session]}")
                self._sent[session] += 1
                self.send(ids[-1], session_id=session, **properties)
        return ids

    def messages(self) -> list[ReceivedMessage]:
        async def peeked() -> list[ReceivedMessage]:
            async with connect(self.namespace.connection_string) as bus:
                return await bus.management(self.name).peek(0, 1000)

        return asyncio.run(peeked())

    def left(self) -> list[str]:
        return [str(one.message_id) for one in self.messages()]

    def delivery_counts(self) -> set[int]:
        return {one.delivery_count or 0 for one in self.messages()}

    def source(self, **options: str) -> ServiceBusDataSource:
        return ServiceBusDataSource(
            {"connectionString": self.namespace.connection_string, "entity": self.name, **options}
        )

    def stream(self, **options: object) -> Query:
        self.queries.append(self.query(sessions="true", **options))
        return self.queries[-1]

    def holder(self, session: str) -> ServiceBusReceiver:
        """Another receiver, which holds a session."""
        return self.client.get_queue_receiver(self.name, session_id=session)

    def is_free(self, session: str) -> bool:
        async def accept() -> bool:
            async with connect(self.namespace.connection_string) as bus:
                try:
                    await bus.receiver(self.name, session=session, session_timeout=1.0)
                except SessionCannotBeLockedError:
                    return False
                return True

        return asyncio.run(accept())

    @contextmanager
    def _admin(self) -> Iterator[ServiceBusAdministrationClient]:
        text, ca = self.namespace.connection_string, str(self.namespace.ca)
        with ServiceBusAdministrationClient.from_connection_string(text, connection_verify=ca) as admin:
            yield admin

    def create_again(self) -> None:
        """Delete the queue, and create it again."""
        with self._admin() as admin:
            admin.delete_queue(self.name)
            admin.create_queue(self.name, requires_session=True)
        self.__dict__.pop("_sender", None)  # its link has ended

    def cut_off(self) -> None:
        """End the links of all receivers, and so the locks of all sessions."""
        with self._admin() as admin:
            described = admin.get_queue(self.name)
            for status in (EntityStatus.RECEIVE_DISABLED, EntityStatus.ACTIVE):
                admin.update_queue(described, status=status)


@pytest.fixture(scope="module")
def client(namespace: LocalNamespace) -> Iterator[ServiceBusClient]:
    with ServiceBusClient.from_connection_string(namespace.connection_string, retry_total=0) as made:
        yield made
        close_opened()


@contextmanager
def _queue(namespace: LocalNamespace, client: ServiceBusClient, **settings: Any) -> Iterator[SessionQueue]:
    made = SessionQueue(namespace, client, **settings)
    yield made
    for query in made.queries:
        query.reader.stop()


@pytest.fixture
def queue(namespace: LocalNamespace, client: ServiceBusClient) -> Iterator[SessionQueue]:
    with _queue(namespace, client) as made:
        yield made


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_WAIT_IDLE", 0.2)
    monkeypatch.setattr(reader_module, "_WAIT_BUSY", 0.1)


def _by_session(ids: Iterable[str]) -> dict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for one in ids:
        session, number = one.split("/")
        found[session].append(int(number))
    return dict(found)


def _is_in_order(ids: Iterable[str]) -> bool:
    return all(numbers == sorted(numbers) for numbers in _by_session(ids).values())


# --- sessions, tasks and order ---------------------------------------------------------------------------------------


def test_d1_each_session_is_read_by_one_task_in_order_and_completed(queue: SessionQueue) -> None:
    sent = queue.put("abc", 6)
    query = queue.stream(maxMessagesPerTrigger=9)
    assert query.trigger()
    assert sorted(query.tasks) == [[f"{session}/{number}" for number in range(3)] for session in "abc"]
    assert not queue.is_free("a")
    assert queue.left() == sent, "the batch is not committed for the source yet"
    assert query.reader.reportLatestOffset() == {"held": 3, "completed": 0, "uncompleted": 0}
    assert query.trigger()
    assert query.reader.reportLatestOffset() == {"held": 3, "completed": 9, "uncompleted": 0}
    assert queue.left() == sent[9:]
    query.run()
    assert Counter(query.ids) == Counter(sent)
    assert _is_in_order(query.ids)
    assert queue.left() == []
    assert all(map(queue.is_free, "abc")), "sessions without messages are not held"


@pytest.mark.thorough
def test_d1_more_sessions_than_may_be_held_get_their_turns(queue: SessionQueue) -> None:
    sessions = [f"s{number}" for number in range(7)]
    sent = queue.put(sessions, 4)
    query = queue.stream(maxSessions=2, maxMessagesPerTrigger=4)
    held = []
    for _ in range(4):
        assert query.trigger()
        held.append(set(_by_session(query.read[-1])))
    assert set.union(*held) == set(sessions), "each session had its turn before the first one was read to its end"
    assert max(map(len, held)) == 2
    query.run()
    assert Counter(query.ids) == Counter(sent)
    assert _is_in_order(query.ids)
    assert queue.left() == []


@pytest.mark.thorough
def test_d1_a_long_session_does_not_keep_others_from_being_read(queue: SessionQueue) -> None:
    queue.put("a", 20)
    query = queue.stream(maxMessagesPerTrigger=4)
    assert query.trigger()
    queue.put("b", 2)
    assert query.trigger()
    assert sorted(query.read[-1]) == ["a/4", "a/5", "b/0", "b/1"]


@pytest.mark.thorough
def test_d1_partitions_limit_the_tasks_and_a_session_is_never_divided(queue: SessionQueue) -> None:
    queue.put("abcde", 3)
    query = queue.stream(partitions=2)
    assert query.trigger()
    assert len(query.tasks) == 2
    assert sorted(session for task in query.tasks for session in _by_session(task)) == list("abcde")
    assert all(_is_in_order(task) for task in query.tasks)


@pytest.mark.thorough
def test_d1_of_a_session_only_active_messages_are_read_and_removed(queue: SessionQueue) -> None:
    queue.put("a", 3)
    with queue.holder("a") as other:
        other.defer_message(other.receive_messages(1, 5)[0])
    queue.put("a", scheduled_enqueue_time_utc=datetime.now(UTC) + timedelta(hours=1))
    query = queue.stream()
    query.run()
    assert query.ids == ["a/1", "a/2"]
    assert {one.state for one in queue.messages()} == {MessageState.DEFERRED, MessageState.SCHEDULED}
    assert queue.left() == ["a/0", "a/3"]


@pytest.mark.thorough
def test_d1_available_now_reads_the_sessions_that_are_there_and_ends(queue: SessionQueue) -> None:
    sessions = [f"s{number}" for number in range(5)]
    sent = queue.put(sessions, 3)
    query = queue.stream(maxSessions=2, maxMessagesPerTrigger=3)
    with queue.holder("s1"):
        query.reader.prepareForTriggerAvailableNow()
        later = queue.put(["s0", "new"], 2)
        query.run()
        others = [one for one in sent if one.startswith("s1/")]
        assert Counter(query.ids) == Counter(sent) - Counter(others)
        assert _is_in_order(query.ids)
        assert Counter(queue.left()) == Counter([*others, *later])


@pytest.mark.thorough
def test_d1_available_now_reads_its_sessions_to_the_end_after_their_locks_were_lost(queue: SessionQueue) -> None:
    sent = queue.put("abcd", 3)
    query = queue.stream(maxSessions=3, maxMessagesPerTrigger=2)
    query.reader.prepareForTriggerAvailableNow()

    def step(name: str) -> None:
        if name == "read" and query.committed < 2:
            queue.cut_off()

    query.run(step)
    assert Counter(query.ids) == Counter(sent)
    assert _is_in_order(query.ids)
    assert queue.left() == []


def test_d1_available_now_goes_on_after_the_locks_were_lost_during_a_look(
    queue: SessionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = queue.put("ab", 2)
    query = queue.stream()
    reader = query.reader
    assert isinstance(reader, SessionStreamReader)
    reader.prepareForTriggerAvailableNow()
    peek, losses = Broker.from_number, iter([True])

    def losing(broker: Broker, *given: Any, session: str | None = None) -> Iterator[Any]:
        yield from peek(broker, *given, session=session)
        if session is not None and next(losses, False):
            queue.cut_off()
            while reader.reportLatestOffset()["held"]:
                time.sleep(0.01)
            reader._sessions.release("b")  # as the task that renews its lock does, before the stream looks at "b"

    monkeypatch.setattr(Broker, "from_number", losing)
    query.run()
    assert Counter(query.ids) == Counter(sent)
    assert queue.left() == []


@pytest.mark.thorough
def test_d1_a_subscription_with_sessions_is_streamed(namespace: LocalNamespace, client: ServiceBusClient) -> None:
    with ServiceBusAdministrationClient.from_connection_string(
        namespace.connection_string, connection_verify=str(namespace.ca)
    ) as admin:
        admin.create_topic("sessions")
        admin.create_subscription("sessions", "all", requires_session=True)
        with client.get_topic_sender("sessions") as sender:
            sent = [(str(number % 2), str(number)) for number in range(6)]
            sender.send_messages(
                [ServiceBusMessage("", message_id=f"{one}/{two}", session_id=one) for one, two in sent]
            )
        told = {"entity": "sessions", "subscription": "all", "sessions": "true", "pollInterval": NO_PAUSE}
        query = Query({"connectionString": namespace.connection_string, **told})
        query.run()
        query.reader.stop()
        assert sorted(query.ids) == ["0/0", "0/2", "0/4", "1/1", "1/3", "1/5"]
        assert _is_in_order(query.ids)
        assert admin.get_subscription_runtime_properties("sessions", "all").active_message_count == 0


@pytest.mark.thorough
def test_d1_a_batch_read_of_listed_sessions_peeks_at_no_other(
    queue: SessionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = queue.put("abc", 4)
    session, number, peeked = ("session_id",), ("sequence_number",), list[str]()
    peek = Broker._peek

    async def recorded(broker: Broker, *arguments: Any) -> list[ReceivedMessage]:
        found = await peek(broker, *arguments)
        peeked.extend(str(one.session_id) for one in found)
        return found

    def read(*conditions: Filter) -> list[str]:
        peeked.clear()
        reader = queue.source(sessions="true").reader(READ_SCHEMA)
        left_to_spark = [one for one in conditions if getattr(one, "attribute", None) == session]
        assert list(reader.pushFilters(list(conditions))) == left_to_spark
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        return [str(one) for batch in batches for one in batch["message_id"].to_pylist()]

    monkeypatch.setattr(Broker, "_peek", recorded)
    assert read(EqualTo(session, "b")) == [f"b/{one}" for one in range(4)]
    assert set(peeked) == {"b"}
    assert sorted(read(In(session, ("a", "c", "z")), In(session, ("c", "z")))) == [f"c/{one}" for one in range(4)]
    assert set(peeked) == {"c"}
    assert read(EqualTo(session, "a"), GreaterThan(number, 1), LessThanOrEqual(number, 7)) == ["a/1", "a/2"]
    assert read(EqualTo(session, "a"), GreaterThan(number, 7), LessThanOrEqual(number, 1)) == []
    assert read(EqualTo(session, "z")) == []
    assert sorted(read()) == sorted(sent)
    assert queue.left() == sent


# --- locks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def renewed(monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    """Collects the ends of locks after each renewal."""
    ends: list[datetime] = []
    renew = Receiver.renew_session_lock

    async def recorded(receiver: Receiver, **options: Any) -> datetime:
        ends.append(await renew(receiver, **options))
        return ends[-1]

    monkeypatch.setattr(Receiver, "renew_session_lock", recorded)
    return ends


@pytest.mark.thorough
def test_d1_the_locks_of_a_batch_are_renewed_for_as_long_as_it_takes(
    namespace: LocalNamespace, client: ServiceBusClient, renewed: list[datetime]
) -> None:
    with _queue(namespace, client, lock_duration=timedelta(seconds=5)) as queue:
        sent = queue.put("a", 4)
        query = queue.stream(maxMessagesPerTrigger=2)

        def step(name: str) -> None:
            while name == "read" and len(renewed) < 3:  # more than the lock duration
                assert not queue.is_free("a")

        assert query.trigger(step)
        query.run()
        assert query.ids == sent
        assert queue.left() == []


@pytest.mark.thorough
def test_d1_a_clock_that_is_behind_costs_one_lock_and_not_each(
    namespace: LocalNamespace,
    client: ServiceBusClient,
    renewed: list[datetime],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A lock of 5 seconds seems to last for 13. After it was lost, locks are renewed twice as often."""

    class Clock:
        def time(self) -> float:
            return time.time() - 8.0

    monkeypatch.setattr(held_module, "time", Clock())
    with _queue(namespace, client, lock_duration=timedelta(seconds=5)) as queue:
        sent = queue.put("a", 4)
        query = queue.stream(maxMessagesPerTrigger=2)

        def step(name: str) -> None:
            while name == "read" and query.committed < 0 and "session 'a' was lost" not in caplog.text:
                assert not renewed
            while name == "read" and query.committed == 0 and len(renewed) < 2:
                assert caplog.text.count("session 'a' was lost") == 1

        query.run(step)
        assert query.ids == sent
        assert queue.left() == []


@pytest.mark.thorough
def test_d1_a_link_that_breaks_does_not_make_renewals_more_frequent(
    namespace: LocalNamespace, client: ServiceBusClient, renewed: list[datetime], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_module, "SHORTEST_LOCK", 0.1)
    with _queue(namespace, client, lock_duration=timedelta(seconds=5)) as queue:
        given = {"connectionString": namespace.connection_string, "entity": queue.name, "sessions": "true"}
        held = HeldSessions(SourceOptions.parse(given))
        held.accept(["a"])
        queue.cut_off()
        while held.get("a") is not None:
            time.sleep(0.01)
        held.accept(["a"])
        began = time.monotonic()
        while not renewed:
            time.sleep(0.01)
        assert time.monotonic() - began > 2.0, "half of the lock duration, less what the answer took"
        held.close()


@pytest.mark.thorough
@pytest.mark.parametrize("at", ["planned", "read", "batch committed"])
def test_d1_a_lock_that_is_lost_at_any_step_is_accepted_again(queue: SessionQueue, at: str) -> None:
    sent = queue.put("ab", 4)
    query = queue.stream(maxMessagesPerTrigger=4)

    def step(name: str) -> None:
        if name == at:
            queue.cut_off()

    query.run(step)
    assert Counter(query.ids) == Counter(sent)
    assert _is_in_order(query.ids)
    assert queue.left() == []


@pytest.mark.thorough
def test_d1_a_lock_that_is_lost_during_the_completion_is_accepted_again(
    queue: SessionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = queue.put("ab", 4)
    query = queue.stream(maxMessagesPerTrigger=4)
    complete, lost = broker_module.complete_received, list[object]()

    async def cut_off_first(*arguments: Any) -> Completion:
        if not lost:
            lost.append(arguments[0])
            queue.cut_off()  # blocks this event loop, so the client learns of it while it receives
        return await complete(*arguments)

    monkeypatch.setattr(held_module, "complete_received", cut_off_first)
    query.run()
    assert lost
    assert Counter(query.ids) == Counter(sent)
    assert _is_in_order(query.ids)
    assert queue.left() == []


def test_d1_a_lock_that_is_lost_just_before_the_completion_is_accepted_again(
    queue: SessionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = queue.put("ab", 2)
    query = queue.stream()
    reader, accept, losses = query.reader, HeldSessions.accept, iter([True])

    def losing(held: HeldSessions, sessions: Iterable[str]) -> list[str]:
        accepted = accept(held, sessions)
        if next(losses, False):
            queue.cut_off()
            while reader.reportLatestOffset()["held"]:
                time.sleep(0.01)
        return accepted

    monkeypatch.setattr(HeldSessions, "accept", losing)
    query.run()
    assert next(losses, False) is False
    assert Counter(query.ids) == Counter(sent)
    assert queue.left() == []


@pytest.mark.thorough
def test_d1_a_namespace_that_is_killed_at_any_step_of_a_stream_of_sessions_loses_nothing() -> None:
    with LocalNamespace() as namespace:
        for at in ("planned", "read", "batch committed"):
            with (
                ServiceBusClient.from_connection_string(namespace.connection_string) as client,
                _queue(namespace, client) as queue,
            ):
                sent = queue.put("ab", 4)
                query = queue.stream(maxMessagesPerTrigger=4)
                kills: list[str] = []

                def step(name: str, at: str = at, kills: list[str] = kills) -> None:
                    if name == at and not kills:
                        namespace.kill()
                        namespace.start()
                        kills.append(name)

                query.run(step)
                assert kills
                assert Counter(query.ids) == Counter(sent)
                assert _is_in_order(query.ids)
                assert queue.left() == []
                close_opened()


@pytest.mark.thorough
@pytest.mark.parametrize("at", ["", *STEPS[:-1]])
def test_d1_a_stream_of_sessions_survives_a_namespace_that_is_away_for_less_than_its_timeout(at: str) -> None:
    with (
        LocalNamespace() as namespace,
        ServiceBusClient.from_connection_string(namespace.connection_string) as client,
        _queue(namespace, client) as queue,
    ):
        sent = queue.put("ab", 4)
        query = queue.stream(maxMessagesPerTrigger=4)
        assert query.trigger()

        def kill(step: str) -> None:
            if step == at and not tried:
                namespace.kill()

        with started_at_first_try(namespace) as tried:
            kill("")
            query.run(kill)
        assert tried == ["trying again"]
        assert Counter(query.ids) == Counter(sent)
        assert _is_in_order(query.ids)
        assert queue.left() == []
        close_opened()


@pytest.mark.thorough
def test_d1_what_another_receiver_holds_after_a_lost_lock_is_completed_when_it_is_free(
    queue: SessionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_TRY_AGAIN", 0.0)
    queue.put("ab", 2)
    query = queue.stream()
    assert query.trigger()
    queue.cut_off()
    with queue.holder("a") as other:
        taken = other.receive_messages(2, 5)
        queue.put("ab")
        assert query.trigger()
        assert query.read[-1] == ["b/2"], "the other receiver has session a"
        assert "a/0" in queue.left()
        with monkeypatch.context() as few:
            few.setattr(reader_module, "_MOST_UNCOMPLETED", 1)
            with pytest.raises(
                CompletionError, match=r"2 messages that it cannot complete.*hold session 'a'\. End those"
            ):
                query.trigger()
        other.complete_message(taken[0])
        assert not query.trigger()
        assert queue.left() == ["a/1", "a/2"]
    query.restart()
    query.run()
    assert query.ids == ["a/0", "a/1", "b/0", "b/1", "b/2", "a/2"]
    assert queue.left() == []


@pytest.mark.thorough
@pytest.mark.parametrize("restarts", [False, True])
def test_d1_a_queue_that_was_created_again_while_a_session_was_refused_keeps_its_messages(
    queue: SessionQueue, restarts: bool
) -> None:
    """Messages of the new queue get the numbers of messages that the stream has read and could not complete yet."""
    queue.put("a", 2)
    query = queue.stream()
    assert query.trigger()
    queue.cut_off()
    with queue.holder("a"):
        queue.put("b")
        assert query.trigger()
    assert query.ids == ["a/0", "a/1", "b/0"]
    queue.create_again()
    with queue.holder("a"):
        new = queue.put("a", 2)
        queue.put("b")
        assert query.trigger(), "the stream reads a message that is newer than those of session a"
    if restarts:
        query.restart()
    query.run()
    assert query.ids == ["a/0", "a/1", "b/0", "b/1", *new]
    assert queue.left() == []


@pytest.mark.thorough
def test_d1_a_session_that_another_receiver_released_is_completed_and_read_on_at_once(queue: SessionQueue) -> None:
    queue.put("ab", 2)
    query = queue.stream()
    assert query.trigger()
    queue.cut_off()
    with queue.holder("a"):
        queue.put("ab")
        assert query.trigger()
        assert query.read[-1] == ["b/2"]
    query.run()
    assert query.ids == ["a/0", "a/1", "b/0", "b/1", "b/2", "a/2"]
    assert queue.left() == []


@pytest.mark.thorough
def test_d1_a_session_that_was_completed_in_part_is_not_read_before_the_rest_is_completed(
    queue: SessionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = queue.put("ab", 4)
    query = queue.stream(maxMessagesPerTrigger=4)
    completed, refused = broker_module._completed, list[str]()

    async def refuse_the_second(receiver: Receiver, messages: Sequence[ReceivedMessage]) -> set[int]:
        if receiver.session_id == "a" and not refused:
            refused.extend(str(one.message_id) for one in messages[1:])
            await receiver.release(messages[1:])
            messages = messages[:1]
        return await completed(receiver, messages)

    monkeypatch.setattr(broker_module, "_completed", refuse_the_second)
    assert query.trigger()
    assert query.trigger()
    assert refused == ["a/1"]
    assert query.read[-1] == ["b/2", "b/3"]
    assert queue.left() == ["a/1", "a/2", "b/2", "a/3", "b/3"]
    query.run()
    assert query.ids == ["a/0", "a/1", "b/0", "b/1", "b/2", "b/3", "a/2", "a/3"]
    assert sorted(query.ids) == sorted(sent)
    assert queue.left() == []


@pytest.mark.thorough
def test_d1_a_batch_waits_for_a_session_that_another_receiver_took(
    queue: SessionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = queue.put("ab", 3)
    query = queue.stream()

    query.run_until_killed("offset logged", monkeypatch)
    query.restart()
    other = queue.holder("a")
    with other:
        taken = other.receive_messages(3, 5)
        monkeypatch.setattr(reader_module, "_MOST_WAIT", 0.0)
        with pytest.raises(SessionHeldError, match=r"holds session 'a' of .*3 messages.*Start the stream again when"):
            query.trigger()
        assert queue.left() == sent
        other.complete_message(taken[0])
        other.complete_message(taken[1])
        query.restart()
        with pytest.raises(SessionHeldError, match="1 messages of session 'a', from sequence number 5"):
            query.trigger()
        other.complete_message(taken[2])
        query.restart()
        assert query.trigger(), "the other receiver still holds the session, and its messages are settled"
    assert query.ids == ["b/0", "b/1", "b/2"]
    query.run()
    assert queue.left() == []


@pytest.mark.thorough
def test_d1_a_batch_goes_on_when_the_other_receiver_releases_its_session(
    queue: SessionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = queue.put("a", 3)
    query = queue.stream()

    query.run_until_killed("offset logged", monkeypatch)
    query.restart()
    other = queue.holder("a")
    other.receive_messages(1, 5)
    waits: list[str] = []

    def released() -> float:
        waits.append("waited")
        other.close()
        return 0.0

    monkeypatch.setattr(reader_module, "_pause", released)
    assert query.trigger()
    assert waits
    query.run()
    assert query.ids == sent
    assert queue.left() == []


# --- a process that ends ---------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("at", STEPS)
def test_d1_a_process_that_ends_at_any_step_of_a_stream_of_sessions_loses_and_repeats_nothing(
    queue: SessionQueue, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "_TAKE", 1)
    sent = queue.put("ab", 5)
    query = queue.stream(maxMessagesPerTrigger=4)
    query.run_until_killed(at, monkeypatch, after=1 if at in {"read", "batch committed"} else 0)
    assert set(sent) - set(queue.left()) <= {one for batch in query.read[: query.committed + 1] for one in batch}
    query.restart()
    query.run()
    assert Counter(query.ids) == Counter(sent)
    assert _is_in_order(query.ids)
    assert queue.left() == []


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(budget(1, 2, 20)))
def test_d1_streams_that_compete_for_sessions_and_are_killed_lose_nothing_and_keep_the_order(
    queue: SessionQueue, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three streams with few slots, which are killed and cut off at random steps, and another receiver.

    What is gone was read in a committed batch or settled by the other receiver. No stream commits a message twice. Two
    streams may read the same message, but none is first read before an earlier message of its session.
    """
    dice = random.Random(seed)
    monkeypatch.setattr(reader_module, "_TRY_AGAIN", 0.0)
    monkeypatch.setattr(reader_module, "_MOST_WAIT", 0.0)
    sessions = [f"s{number}" for number in range(5)]
    streams = [queue.stream(maxSessions=2, maxMessagesPerTrigger=4) for _ in range(3)]
    sent, first_read = set[str](), dict[str, None]()

    def step(_: str) -> None:
        if (drawn := dice.random()) < 0.12:
            raise Killed
        if drawn < 0.16:
            queue.cut_off()

    def check() -> None:
        for query in streams:
            first_read.update(dict.fromkeys(query.ids))  # keeps the place of those that are there
            assert max(Counter(query.ids).values(), default=1) == 1
        assert _is_in_order(first_read)
        assert sent - set(queue.left()) <= set(first_read)

    for _ in range(25):
        sent.update(queue.put(dice.sample(sessions, dice.randrange(3)), dice.randrange(1, 4)))
        if dice.random() < 0.2 and queue.is_free(session := dice.choice(sessions)):
            with queue.holder(session) as other:
                for one in other.receive_messages(2, 0.2):
                    other.complete_message(one)
                    first_read.setdefault(str(one.message_id))
        query = dice.choice(streams)
        try:
            query.trigger(step)
        except (Killed, SessionHeldError):
            query.restart()
        check()
    for query in streams * 3:
        with suppress(SessionHeldError):
            query.run()
        query.restart()
        check()
    assert set(first_read) == sent
    assert queue.left() == []


# --- options and checkpoints -----------------------------------------------------------------------------------------


def test_d1_an_entity_and_the_option_sessions_have_to_fit(
    queue: SessionQueue, namespace: LocalNamespace, client: ServiceBusClient
) -> None:
    with pytest.raises(SourceOptionError, match=r"requires sessions.*set the option sessions=true"):
        queue.query()
    plain = Entity(namespace, client)
    refusal = rf"sessions of {plain.name}.*does not take sessions.*Remove the option"
    with pytest.raises(SourceOptionError, match=refusal):
        plain.query(sessions="true")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"maxSessions": "2"}, "maxSessions is only for sessions=true"),
        ({"sessions": "true", "maxSessions": "0"}, "maxSessions is 0; the least is 1"),
        ({"sessions": "yes"}, "sessions is 'yes', not true or false"),
        ({"sessions": "true", "deadLetter": "true"}, "a dead-letter queue has no sessions"),
        ({"sessions": "true", "completeCommitted": "false"}, "completeCommitted=false do not fit together"),
        ({"sessions": "true", "startingPosition": "latest"}, "startingPosition has to be earliest"),
    ],
)
def test_d1_options_that_do_not_fit_sessions_are_refused_by_name(options: dict[str, str], text: str) -> None:
    with pytest.raises(SourceOptionError, match=text):
        SourceOptions.parse({"connectionStringEnv": "X", "entity": "q", **options})


def test_d1_by_default_there_are_as_many_tasks_as_sessions() -> None:
    def partitions(**options: str) -> int:
        return SourceOptions.parse({"connectionStringEnv": "X", "entity": "q", **options}).partitions

    assert partitions() == partitions(sessions="false") == 4
    assert partitions(sessions="true") == 8
    assert partitions(sessions="true", maxSessions="30") == 30
    assert partitions(sessions="true", maxSessions="30", partitions="3") == 3


@pytest.mark.parametrize("at", ["batch committed", "offset logged"])
def test_d1_a_checkpoint_of_another_entity_with_sessions_is_refused_before_anything_is_removed(
    namespace: LocalNamespace, client: ServiceBusClient, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    with _queue(namespace, client) as first, _queue(namespace, client) as second:
        there = second.put(["s"], 5)
        first.put(["s"], 3)
        query = first.stream()
        query.run_until_killed(at, monkeypatch)
        read, query.options = query.ids, {**query.options, "entity": second.name}
        query.restart()
        with pytest.raises(OffsetError, match=rf"/{first.name}, and the options name .*/{second.name}\. Start this"):
            query.trigger()
        assert query.ids == read
        assert second.left() == there


@pytest.mark.thorough
def test_d1_a_checkpoint_of_sessions_without_a_name_opens_and_gets_the_name(queue: SessionQueue) -> None:
    sent = queue.put("a", 2)
    query = queue.stream(maxMessagesPerTrigger=1)
    assert query.trigger()
    offset = json.loads(query.offsets[-1])
    named = offset.pop("entity")
    query.offsets[-1] = json.dumps(offset)
    query.restart()
    query.run()
    assert query.ids == sent
    assert queue.left() == []
    assert json.loads(query.offsets[-1])["entity"] == named == f"localhost:{queue.namespace.port}/{queue.name}"


@pytest.mark.thorough
def test_d1_a_checkpoint_belongs_to_a_stream_with_or_without_sessions(queue: SessionQueue) -> None:
    queue.put("a")
    with_sessions, without = queue.stream(), queue.query(completeCommitted="false")
    assert with_sessions.trigger()
    assert without.trigger()
    with_sessions.offsets, without.offsets = without.offsets, with_sessions.offsets
    with pytest.raises(OffsetError, match=r"started without the option sessions\. Start this stream with a new"):
        with_sessions.trigger()
    with pytest.raises(OffsetError, match=r"started with sessions=true\. Set this option"):
        without.trigger()
    assert queue.left() == ["a/0"]
