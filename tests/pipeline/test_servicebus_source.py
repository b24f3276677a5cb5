"""D1: `servicebus` as a data source, on a real namespace: what is read, when it is completed, what is written."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageBodyType
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import spark_partition_id
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from tests import tinyproxy
from tests.pipeline.queues import new_queue
from tests.spark_fixtures import CREDENTIALS, NAMED, NAMED_CREDENTIALS
from twinbus.connect import HttpProxy, SessionCannotBeLockedError, TransportType, connect, encode_message
from twinbus.ledger import Metered, read_ledger
from twinbus.message import Message
from twinbus.pipeline.servicebus import ServiceBusDataSource
from twinbus.pipeline.servicebus.options import OPTION_NAMES, SourceOptionError, SourceOptions
from twinbus.pipeline.servicebus.rows import READ_SCHEMA, WRITTEN_COLUMNS
from twinbus.testing import LocalNamespace

_EMPTY_BODY = b"\x00\x53\x75\xa0\x00"
_names = (f"queue-{number}" for number in count())

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def queue(namespace: LocalNamespace) -> str:
    return new_queue(namespace, next(_names))


@pytest.fixture
def client(namespace: LocalNamespace) -> ServiceBusClient:
    return ServiceBusClient.from_connection_string(namespace.connection_string)


def _send(client: ServiceBusClient, queue: str, *messages: Any) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(list(messages))


def _numbered(client: ServiceBusClient, queue: str, first: int, end: int) -> None:
    _send(client, queue, *(ServiceBusMessage(str(number), message_id=str(number)) for number in range(first, end)))


def _ids_left(client: ServiceBusClient, queue: str) -> list[str]:
    with client.get_queue_receiver(queue) as receiver:
        return [str(message.message_id) for message in receiver.peek_messages(1000)]


def _read(spark: SparkSession, namespace: LocalNamespace, queue: str, **options: object) -> DataFrame:
    told = {"connectionString": namespace.connection_string, "entity": queue, **options}
    return spark.read.format("servicebus").options(**{name: str(value) for name, value in told.items()}).load()


def _stream(spark: SparkSession, namespace: LocalNamespace, queue: str, **options: object) -> DataFrame:
    told = {"connectionString": namespace.connection_string, "entity": queue, **options}
    return spark.readStream.format("servicebus").options(**{name: str(value) for name, value in told.items()}).load()


def _writer(stream: DataFrame, folder: Path) -> DataStreamWriter:
    """Returns the writer of a query whose messages `_ids_written` finds."""
    writer = stream.writeStream.format("parquet").option("path", str(folder / "out"))
    return writer.option("checkpointLocation", str(folder / "checkpoint"))


def _run_available(stream: DataFrame, folder: Path) -> None:
    _writer(stream, folder).trigger(availableNow=True).start().awaitTermination()


def _ids_written(spark: SparkSession, folder: Path) -> list[str]:
    found = [row.message_id for row in spark.read.parquet(str(folder / "out")).select("message_id").collect()]
    return sorted(found, key=int)


def _await_tries(namespace: LocalNamespace) -> None:
    """Wait until a query has tried twice to reach the namespace, which was killed."""
    with socket.create_server(("localhost", namespace.port)) as down:
        for _ in range(2):
            down.accept()[0].close()


# --- batch read ------------------------------------------------------------------------------------------------------


def test_d1_a_batch_read_shows_every_message_once_and_takes_none(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str
) -> None:
    _numbered(client, queue, 0, 600)
    read = _read(spark, namespace, queue, partitions=3)
    assert read.rdd.getNumPartitions() == 3
    assert sorted(int(row.message_id) for row in read.collect()) == list(range(600))
    assert len(_ids_left(client, queue)) == 600


def test_d1_a_key_from_the_environment_does_not_travel_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "c2VjcmV0"
    text = f"Endpoint=sb://localhost:1;SharedAccessKeyName=a;SharedAccessKey={key};UseDevelopmentEmulator=true"
    monkeypatch.setenv("THE_CONNECTION", text)
    travels = []
    for option, given in (("connectionString", text), ("connectionStringEnv", "THE_CONNECTION")):
        source = ServiceBusDataSource({option: given, "entity": "q"})
        travels.append(key.encode() in pickle.dumps(source.reader(StructType())))
    assert travels == [True, False]


def test_d1_the_columns_hold_what_the_sender_said(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str
) -> None:
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    _send(
        client,
        queue,
        ServiceBusMessage(
            b"\x00body",
            message_id="id",
            subject="subject",
            content_type="text/plain",
            correlation_id="correlation",
            to="to",
            reply_to="reply",
            reply_to_session_id="reply session",
            partition_key="key",
            time_to_live=timedelta(minutes=90),
            scheduled_enqueue_time_utc=due,
            application_properties={"text": "one", "number": 2, "flag": True},
        ),
    )
    row = _read(spark, namespace, queue).collect()[0].asDict()
    assert row.pop("sequence_number") > 0
    assert abs(row.pop("enqueued_time").timestamp() - datetime.now(UTC).timestamp()) < 60
    assert row.pop("scheduled_enqueue_time").timestamp() == due.timestamp()
    assert row == {
        "state": "scheduled",
        "message_id": "id",
        "session_id": None,
        "subject": "subject",
        "content_type": "text/plain",
        "correlation_id": "correlation",
        "to": "to",
        "reply_to": "reply",
        "reply_to_session_id": "reply session",
        "partition_key": "key",
        "time_to_live": 90 * 60_000,
        "delivery_count": 0,
        "dead_letter_reason": None,
        "dead_letter_error_description": None,
        "application_properties": {"text": "one", "number": "2", "flag": "true"},
        "body_type": "data",
        "body": bytearray(b"\x00body"),
        "raw": None,
        "error": None,
    }


@pytest.mark.thorough
def test_d1_a_body_of_another_kind_is_read_as_json_and_raw_keeps_it_all(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str
) -> None:
    _send(client, queue, AmqpAnnotatedMessage(value_body={"a": [1, "two"]}), AmqpAnnotatedMessage(value_body="text"))
    assert AmqpMessageBodyType.VALUE.value == "value"
    rows = _read(spark, namespace, queue, includeRaw=True).orderBy("sequence_number").collect()
    assert [(row.body_type, bytes(row.body)) for row in rows] == [("value", b'{"a": [1, "two"]}'), ("value", b"text")]
    assert all(b"two" in bytes(row.raw) or b"text" in bytes(row.raw) for row in rows)


@pytest.mark.thorough
def test_d1_an_odd_message_is_a_row_and_one_that_cannot_be_shown_a_row_with_the_reason(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    body = b"\x00\x53\x77\xc1\x05\x02\xc0\x01\x00\x40"  # a map whose key is a list: Python has no such key

    async def send_map_with_list_as_key() -> None:
        async with connect(namespace.connection_string) as bus:
            await (await bus.sender(queue)).send([encode_message(Message(b""), 0).removesuffix(_EMPTY_BODY) + body])

    _send(client, queue, AmqpAnnotatedMessage(value_body={1: 2, b"k": 3}))
    asyncio.run(send_map_with_list_as_key())
    _numbered(client, queue, 2, 3)
    _run_available(_stream(spark, namespace, queue, completeCommitted=False), tmp_path)
    for read in (_read(spark, namespace, queue), spark.read.parquet(str(tmp_path / "out"))):
        odd, unshown, plain = read.orderBy("sequence_number").collect()
        assert (bytes(odd.body), odd.raw, odd.error) == (b'{"1": 2, "6b": 3}', None, None)
        assert (unshown.body, unshown.body_type) == (None, "value")
        assert bytes(unshown.raw).endswith(body)
        assert "a list is not supported as a map key" in unshown.error
        assert (bytes(plain.body), plain.raw, plain.error) == (b"2", None, None)


@pytest.mark.thorough
def test_d1_an_entity_that_requires_sessions_is_read_but_not_streamed(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, tmp_path: Path
) -> None:
    queue = new_queue(namespace, next(_names), requires_session=True)
    _send(client, queue, *(ServiceBusMessage("", message_id=one, session_id=one) for one in "ab"))
    assert sorted(row.session_id for row in _read(spark, namespace, queue).collect()) == ["a", "b"]
    with pytest.raises(Exception, match=r"cannot stream.*requires sessions"):
        _run_available(_stream(spark, namespace, queue), tmp_path)
    assert not list((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"))
    _run_available(_stream(spark, namespace, queue, completeCommitted=False).select("message_id"), tmp_path)
    assert sorted(row.message_id for row in spark.read.parquet(str(tmp_path / "out")).collect()) == ["a", "b"]
    assert sorted(row.session_id for row in _read(spark, namespace, queue).collect()) == ["a", "b"]


@pytest.mark.thorough
def test_d1_sessions_are_read_and_streamed_each_by_one_task_in_order(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, tmp_path: Path
) -> None:
    queue = new_queue(namespace, next(_names), requires_session=True)
    sessions = [f"s{number}" for number in range(5)]
    sent = [(session, number) for number in range(40) for session in sessions]
    _send(client, queue, *(ServiceBusMessage("", message_id=str(number), session_id=one) for one, number in sent))

    def read(frame: DataFrame) -> tuple[int, list[tuple[str, int]]]:
        """Return the number of tasks with messages, and the messages as the tasks have read them."""
        rows = frame.select(spark_partition_id(), "session_id", "message_id").collect()
        tasks = {row.session_id: row[0] for row in rows}
        assert {(row.session_id, row[0]) for row in rows} == set(tasks.items()), "a session was divided"
        return len(set(tasks.values())), [(row.session_id, int(row.message_id)) for row in rows]

    def in_order(found: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        return sorted(found, key=lambda one: one[0])  # stable: the messages of a session stay as they are

    expected = in_order(sent)
    for partitions in (3, 8):
        tasks, found = read(_read(spark, namespace, queue, sessions=True, partitions=partitions))
        assert (tasks, in_order(found)) == (min(partitions, 5), expected)
    batches: list[tuple[int, list[tuple[str, int]]]] = []
    stream = _stream(spark, namespace, queue, sessions=True, maxMessagesPerTrigger=80)
    writer = stream.writeStream.foreachBatch(lambda frame, _: batches.append(read(frame)))
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    assert [tasks for tasks, _ in batches] == [5, 5, 5]
    assert in_order(one for _, found in batches for one in found) == expected
    assert _read(spark, namespace, queue).count() == 0


@pytest.mark.thorough
def test_d1_a_stream_that_is_stopped_or_fails_releases_its_sessions(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, tmp_path: Path
) -> None:
    queue = new_queue(namespace, next(_names), requires_session=True)
    _send(client, queue, *(ServiceBusMessage("", message_id=str(one), session_id="s") for one in range(40)))

    async def accept() -> bool:
        async with connect(namespace.connection_string) as bus:
            try:
                await bus.receiver(queue, session="s", session_timeout=1.0)
            except SessionCannotBeLockedError:
                return False
            return True

    for end in ("stopped", "failed"):
        held: list[bool] = []

        def take(_: DataFrame, batch: int, end: str = end, held: list[bool] = held) -> None:
            held.append(not asyncio.run(accept()))
            if end == "failed" and batch == 1:
                raise ValueError("the sink fails")

        stream = _stream(spark, namespace, queue, sessions=True, maxMessagesPerTrigger=2, pollInterval=1)
        writer = stream.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / end))
        query = writer.trigger(processingTime="0 seconds").start()
        while end == "stopped" and len(held) < 2:
            assert query.isActive, query.exception()
        if end == "stopped":
            query.stop()
        else:
            with pytest.raises(Exception, match="the sink fails"):
                query.awaitTermination()
        assert all(held)
        while not asyncio.run(accept()):  # until the process of the query has ended
            assert not query.isActive


@pytest.mark.thorough
def test_d1_a_range_of_sequence_numbers_is_read_with_both_its_ends(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str
) -> None:
    _numbered(client, queue, 0, 20)
    numbers = sorted(row.sequence_number for row in _read(spark, namespace, queue).collect())
    part = _read(spark, namespace, queue, fromSequenceNumber=numbers[5], toSequenceNumber=numbers[9], partitions=2)
    assert sorted(row.sequence_number for row in part.collect()) == numbers[5:10]


@pytest.mark.thorough
def test_d1_an_empty_entity_is_an_empty_frame(spark: SparkSession, namespace: LocalNamespace, queue: str) -> None:
    assert _read(spark, namespace, queue).collect() == []


@pytest.mark.thorough
def test_d1_dead_letters_are_read_with_their_reason(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str
) -> None:
    _numbered(client, queue, 0, 1)
    with client.get_queue_receiver(queue) as receiver:
        receiver.dead_letter_message(receiver.receive_messages(1)[0], reason="why", error_description="so")
    rows = _read(spark, namespace, queue, deadLetter=True).collect()
    assert [(row.dead_letter_reason, row.dead_letter_error_description) for row in rows] == [("why", "so")]


@pytest.mark.thorough
def test_d1_filters_limit_what_is_read(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str
) -> None:
    _numbered(client, queue, 0, 600)
    later = datetime.now(UTC) + timedelta(hours=1)
    _send(client, queue, ServiceBusMessage("", message_id="600", scheduled_enqueue_time_utc=later))
    rows = _read(spark, namespace, queue).orderBy("sequence_number").collect()
    numbers = [row.sequence_number for row in rows]
    last = round(rows[-1].enqueued_time.timestamp() * 1000)
    since = [row.message_id for row in rows if row.enqueued_time == rows[-1].enqueued_time]

    def ids(condition: str, pushed: bool) -> list[str]:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", str(pushed).lower())
        found = _read(spark, namespace, queue).where(condition).select("message_id")
        plan = found._jdf.queryExecution().executedPlan().toString()
        compared = plan.partition("Filter")[2].partition("BatchScan")[0]
        is_left_to_spark = any(sign in compared for sign in ("=", "<", ">", " IN "))
        assert is_left_to_spark is not pushed
        return sorted((str(row.message_id) for row in found.collect()), key=int)

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    ranged = _read(spark, namespace, queue, fromSequenceNumber=numbers[5], toSequenceNumber=numbers[9])
    listed = ranged.where(f"sequence_number IN ({numbers[4]}, {numbers[5]}, {numbers[9]}, {numbers[10]})")
    assert sorted(row.message_id for row in listed.collect()) == ["5", "9"]
    for condition, wanted in (
        (f"sequence_number = {numbers[300]}", ["300"]),
        (f"sequence_number > {numbers[2]} AND sequence_number <= {numbers[5]}", ["3", "4", "5"]),
        (f"sequence_number IN ({numbers[0]}, {numbers[599]}, 99999999)", ["0", "599"]),
        ("state != 'active'", ["600"]),
        (f"enqueued_time < '1990-01-01' AND sequence_number > {numbers[0]}", []),
        (f"enqueued_time > '1990-01-01' AND sequence_number < {numbers[2]} AND subject IS NULL", ["0", "1"]),
        (f"enqueued_time >= timestamp_millis({last})", since),
        (f"enqueued_time < timestamp_millis({last})", [str(number) for number in range(601 - len(since))]),
    ):
        assert ids(condition, pushed=True) == ids(condition, pushed=False) == wanted


@pytest.mark.thorough
def test_d1_a_limit_ends_the_read_early(spark: SparkSession, tmp_path: Path) -> None:
    """The namespace counts its operations (N5). The two reads are of queues with the same messages."""
    queues = [{"name": "all"}, {"name": "few"}]
    told = {"name": "metered", "ledger": str(tmp_path / "meter"), "queues": queues}
    with LocalNamespace("metered", config={"namespaces": [told]}) as metered:
        with ServiceBusClient.from_connection_string(metered.connection_string) as client:
            for queue, first in product(("all", "few"), range(0, 3000, 1000)):
                _numbered(client, queue, first, first + 1000)
        assert len(_read(spark, metered, "all", partitions=4).collect()) == 3000
        assert len(_read(spark, metered, "few", partitions=4).limit(3).collect()) == 3
    peeks: Counter[str] = Counter()
    for entry in read_ledger(tmp_path / "meter"):
        if isinstance(entry, Metered) and entry.operation == "peek":
            peeks[entry.entity] += entry.count
    # Twelve pages in four tasks; of the limited read one task, and of it not more than two pages for a batch of rows.
    assert peeks["few"] <= peeks["all"] - 8, peeks


@pytest.mark.thorough
def test_d1_a_schema_chooses_columns_and_one_that_does_not_fit_is_refused(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    _numbered(client, queue, 0, 3)
    reader = spark.read.format("servicebus").options(connectionString=namespace.connection_string, entity=queue)
    chosen = reader.schema("body binary, message_id string").load()
    assert chosen.columns == ["body", "message_id"]
    assert sorted(row.message_id for row in chosen.collect()) == ["0", "1", "2"]
    for schema, reason in (
        ("price int", "servicebus has no column 'price'"),
        ("sequence_number int", "'sequence_number' of servicebus is of type bigint, not int"),
        ("subject string not null", "'subject' of servicebus can be null"),
    ):
        with pytest.raises(AnalysisException, match=reason):  # of the driver: no task has run
            reader.schema(schema).load().collect()
    stream = spark.readStream.format("servicebus").options(connectionString=namespace.connection_string, entity=queue)
    with pytest.raises(StreamingQueryException, match="servicebus has no column 'price'"):
        _run_available(stream.schema("price int").load(), tmp_path)
    assert not list((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"))
    assert _ids_left(client, queue) == ["0", "1", "2"]


# --- stream read -----------------------------------------------------------------------------------------------------


def test_d1_available_now_reads_what_is_there_in_batches_and_ends(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    _numbered(client, queue, 0, 250)
    _run_available(_stream(spark, namespace, queue, maxMessagesPerTrigger=100, partitions=2), tmp_path)
    assert _ids_written(spark, tmp_path) == [str(number) for number in range(250)]
    assert _ids_left(client, queue) == []


@pytest.mark.thorough
def test_d1_a_restarted_stream_goes_on_where_it_was_and_completes_what_was_left(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    _numbered(client, queue, 0, 10)
    writer = _writer(_stream(spark, namespace, queue), tmp_path)
    writer.trigger(once=True).start().awaitTermination()  # ends without a further look at the source
    assert len(_ids_left(client, queue)) == 10
    _numbered(client, queue, 10, 20)
    _run_available(_stream(spark, namespace, queue), tmp_path)
    assert _ids_written(spark, tmp_path) == [str(number) for number in range(20)]
    assert _ids_left(client, queue) == []


@pytest.mark.thorough
def test_d1_a_stream_that_is_stopped_before_it_looks_again_completes_when_it_is_started_again(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    _numbered(client, queue, 0, 10)
    writer = _writer(_stream(spark, namespace, queue), tmp_path)
    query = writer.trigger(processingTime="365 days").start()  # one batch now, and the next look much later
    while not (tmp_path / "checkpoint" / "commits" / "0").exists():
        assert query.isActive, query.exception()
    query.stop()
    assert len(_ids_left(client, queue)) == 10
    _run_available(_stream(spark, namespace, queue), tmp_path)
    assert _ids_written(spark, tmp_path) == [str(number) for number in range(10)]
    assert _ids_left(client, queue) == []


@pytest.mark.thorough
def test_d1_a_stream_also_removes_the_messages_that_its_query_filters_out(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    _numbered(client, queue, 0, 10)
    _run_available(_stream(spark, namespace, queue).where("sequence_number < 4"), tmp_path)
    assert _ids_written(spark, tmp_path) == ["0", "1", "2"]
    assert _ids_left(client, queue) == []


@pytest.mark.thorough
def test_d1_nothing_is_completed_while_its_batch_fails(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    _numbered(client, queue, 0, 10)
    stream = _stream(spark, namespace, queue, partitions=1)
    broken = stream.selectExpr(
        "CASE WHEN message_id = '7' THEN raise_error('broken') ELSE message_id END AS message_id"
    )
    with pytest.raises(Exception, match="broken"):
        _run_available(broken, tmp_path)
    assert len(_ids_left(client, queue)) == 10
    _run_available(stream.select("message_id"), tmp_path)
    assert _ids_written(spark, tmp_path) == [str(number) for number in range(10)]


@pytest.mark.thorough
def test_d1_messages_that_are_not_active_wait_for_their_time(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    _send(client, queue, ServiceBusMessage("", message_id="1", scheduled_enqueue_time_utc=later))
    _numbered(client, queue, 2, 3)
    _run_available(_stream(spark, namespace, queue), tmp_path)
    assert _ids_written(spark, tmp_path) == ["2"]


@pytest.mark.thorough
def test_d1_a_stream_may_leave_what_it_read_to_others(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    _numbered(client, queue, 0, 30)
    stream = _stream(spark, namespace, queue, maxMessagesPerTrigger=10, completeCommitted=False)
    _run_available(stream, tmp_path)
    assert len(_ids_written(spark, tmp_path)) == 30
    assert len(_ids_left(client, queue)) == 30


@pytest.mark.thorough
def test_d1_from_latest_only_what_comes_after_the_start_is_read(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    _numbered(client, queue, 0, 5)
    stream = _stream(spark, namespace, queue, startingPosition="latest")
    _run_available(stream, tmp_path)
    _numbered(client, queue, 5, 8)
    _run_available(stream, tmp_path)
    assert _ids_written(spark, tmp_path) == ["5", "6", "7"]
    _numbered(client, queue, 8, 10)
    _run_available(stream, tmp_path)
    assert _ids_written(spark, tmp_path) == ["5", "6", "7", "8", "9"]
    assert _ids_left(client, queue) == ["0", "1", "2", "3", "4"]


@pytest.mark.thorough
def test_d1_a_checkpoint_of_an_earlier_version_opens_and_removes_nothing_unread(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    _numbered(client, queue, 0, 5)
    stream = _stream(spark, namespace, queue, startingPosition="latest")
    _run_available(stream, tmp_path)
    _numbered(client, queue, 5, 7)
    _run_available(_stream(spark, namespace, queue, completeCommitted=False), tmp_path)
    offsets = tmp_path / "checkpoint" / "offsets"
    for offset in offsets.glob("[0-9]*"):
        head, _, last = offset.read_text().rpartition("\n")
        offset.write_text(f"{head}\n" + json.dumps({"through": json.loads(last)["through"]}))
        (offsets / f".{offset.name}.crc").unlink()
    for end in (8, 9):
        _numbered(client, queue, end - 1, end)
        _run_available(stream, tmp_path)
    assert _ids_written(spark, tmp_path) == ["5", "6", "7", "8"]
    # 7 and 8 were read and completed by this version. The earlier version did not record that it read 5 and 6.
    assert _ids_left(client, queue) == ["0", "1", "2", "3", "4", "5", "6"]


# --- progress and outages --------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_d1_the_progress_of_a_query_shows_offsets_lag_and_what_was_completed(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    _numbered(client, queue, 0, 10)
    stream = _stream(spark, namespace, queue, maxMessagesPerTrigger=4)
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).trigger(availableNow=True)
    query = writer.start()
    query.awaitTermination()
    assert query.lastProgress is not None
    assert [progress.numInputRows for progress in query.recentProgress if progress.numInputRows] == [4, 4, 2]
    (first,), (last,) = query.recentProgress[0].sources, query.lastProgress.sources
    assert json.loads(first.endOffset)["read"] == "1-4"
    assert json.loads(first.endOffset)["entity"] == f"localhost:{namespace.port}/{queue}"
    assert json.loads(first.latestOffset) == {"through": 10, "behind": 6, "completed": 0, "uncompleted": 0}
    # The messages of a batch are completed after its progress.
    assert json.loads(last.latestOffset) == {"through": 10, "behind": 0, "completed": 8, "uncompleted": 0}
    assert _ids_left(client, queue) == []
    # What a Python source cannot set:
    assert "PythonMicroBatchStream" in first.description
    assert first.metrics == {}


@pytest.mark.thorough
def test_d1_a_running_query_survives_a_restart_of_its_namespace(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    _numbered(client, queue, 0, 3)
    stream = _stream(spark, namespace, queue, pollInterval=0.1)
    query = _writer(stream, tmp_path).start()
    query.processAllAvailable()
    assert _ids_left(client, queue) == [], "nothing new has arrived"
    namespace.kill()
    _await_tries(namespace)
    namespace.start()
    _numbered(client, queue, 3, 6)
    query.processAllAvailable()
    query.stop()
    assert _ids_written(spark, tmp_path) == [str(number) for number in range(6)]


@pytest.mark.thorough
def test_d1_a_query_is_stopped_while_it_waits_for_its_namespace(spark: SparkSession, tmp_path: Path) -> None:
    with LocalNamespace() as namespace:
        stream = _stream(spark, namespace, new_queue(namespace, "away"), pollInterval=0.1, timeout=3600)
        query = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
        query.processAllAvailable()
        namespace.kill()
        _await_tries(namespace)
        query.stop()  # does not wait for an hour
        assert query.exception() is None


# --- write -----------------------------------------------------------------------------------------------------------


def _write(frame: DataFrame, namespace: LocalNamespace, **options: str) -> None:
    writer = frame.write.format("servicebus").mode("append")
    writer.options(connectionString=namespace.connection_string, **options).save()


@pytest.mark.thorough
def test_d1_each_row_goes_where_its_entity_says(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str
) -> None:
    other = new_queue(namespace, next(_names))
    rows = spark.range(1200).selectExpr(
        f"CASE WHEN id % 3 = 0 THEN '{other}' END AS entity", "CAST(id AS string) AS message_id", "'text' AS body"
    )
    _write(rows, namespace, entity=queue)
    assert sorted(map(int, _ids_left(client, other))) == list(range(0, 1200, 3))
    with client.get_queue_receiver(queue) as receiver:
        assert receiver.peek_messages(1)[0].body is not None
    assert _read(spark, namespace, queue).count() == 800


def test_d1_what_is_read_can_be_written(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str
) -> None:
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    message = ServiceBusMessage(
        b"\x00\xff",
        message_id="id",
        subject="subject",
        time_to_live=timedelta(days=2),
        scheduled_enqueue_time_utc=due,
        application_properties={"a": "b"},
    )
    _send(client, queue, message)
    kept = ("message_id", "subject", "time_to_live", "scheduled_enqueue_time", "application_properties", "body")
    rows = _read(spark, namespace, queue)
    other = new_queue(namespace, next(_names))
    _write(rows, namespace, entity=other)
    assert _read(spark, namespace, other).select(*kept).collect() == rows.select(*kept).collect()


@pytest.mark.thorough
def test_d1_rows_without_an_id_get_one_each_also_when_they_are_alike(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str
) -> None:
    _write(spark.range(50).selectExpr("'same' AS body"), namespace, entity=queue)
    assert len(set(_ids_left(client, queue))) == 50


@pytest.mark.thorough
def test_d1_a_batch_that_is_repeated_sends_the_same_ids(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    spark.range(40).selectExpr("CAST(id AS string) AS body").write.parquet(str(source))

    def run() -> None:
        stream = spark.readStream.schema("body string").parquet(str(source))
        writer = stream.writeStream.format("servicebus").option("connectionString", namespace.connection_string)
        query = writer.option("entity", queue).option("checkpointLocation", str(checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()

    run()
    # As after a crash between the last send and Spark's commit of the batch.
    for note in (checkpoint / "commits").glob("*0*"):
        note.unlink()
    run()
    ids = _ids_left(client, queue)
    assert len(ids) == 80
    assert len(set(ids)) == 40


def test_d1_a_mode_that_would_remove_what_was_sent_before_is_refused_by_name(
    spark: SparkSession, namespace: LocalNamespace, client: ServiceBusClient, queue: str, tmp_path: Path
) -> None:
    rows = spark.sql("SELECT 'x' AS body")
    told = {"connectionString": namespace.connection_string, "entity": queue}
    with pytest.raises(Exception, match=r'mode\("overwrite"\).*mode\("append"\)'):
        rows.write.format("servicebus").mode("overwrite").options(**told).save()
    rows.write.parquet(str(tmp_path / "source"))
    counted = spark.readStream.schema("body string").parquet(str(tmp_path / "source")).groupBy("body").count()
    for mode, reason in (("complete", r'outputMode\("complete"\).*outputMode\("append"\)'), ("update", "Update mode")):
        writer = counted.select("body").writeStream.format("servicebus").outputMode(mode).options(**told)
        query = writer.option("checkpointLocation", str(tmp_path / mode)).trigger(availableNow=True).start()
        with pytest.raises(Exception, match=reason):
            query.awaitTermination()
    assert _ids_left(client, queue) == []


# --- SQL ------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_d1_a_table_is_read_written_and_streamed(
    spark: SparkSession, named_namespace: LocalNamespace, tmp_path: Path
) -> None:
    client = ServiceBusClient.from_connection_string(named_namespace.connection_string)
    queue = new_queue(named_namespace, next(_names))
    _numbered(client, queue, 0, 3)
    spark.sql(
        f"CREATE TABLE orders USING servicebus OPTIONS (connectionStringEnv '{NAMED}', entity '{queue}') "
        "COMMENT 'coffee' TBLPROPERTIES ('owner.team' = 'cafe')"
    )
    try:
        assert spark.sql("SELECT count(*) FROM orders").collect()[0][0] == 3
        spark.sql("INSERT INTO orders (message_id, body) VALUES ('3', CAST('x' AS binary))")
        assert _ids_left(client, queue) == ["0", "1", "2", "3"]
        for statement, reason in (
            ("INSERT OVERWRITE orders (message_id) VALUES ('4')", "INSERT OVERWRITE"),
            ("DELETE FROM orders WHERE message_id = '1'", "does not support deletes"),
            ("TRUNCATE TABLE orders", "does not support truncates"),
        ):
            with pytest.raises(AnalysisException, match=reason):
                spark.sql(statement)
        _run_available(spark.readStream.table("orders"), tmp_path)
        assert _ids_written(spark, tmp_path) == ["0", "1", "2", "3"]
        assert _ids_left(client, queue) == []
    finally:
        spark.sql("DROP TABLE orders")


@pytest.mark.thorough
def test_d1_a_temporary_view_is_read_and_written(spark: SparkSession, named_namespace: LocalNamespace) -> None:
    client = ServiceBusClient.from_connection_string(named_namespace.connection_string)
    queue = new_queue(named_namespace, next(_names))
    _numbered(client, queue, 0, 3)
    for number, option in enumerate(
        (f"connectionString '{named_namespace.connection_string}'", f"connectionStringEnv '{NAMED}'"), 3
    ):
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW waiting USING servicebus OPTIONS ({option}, entity '{queue}')")
        assert spark.sql("SELECT count(*) FROM waiting").collect()[0][0] == number
        spark.sql(f"INSERT INTO waiting (message_id) VALUES ('{number}')")  # noqa: S608 - our own view
    assert _ids_left(client, queue) == ["0", "1", "2", "3", "4"]


def test_d1_a_table_does_not_keep_a_key(spark: SparkSession, namespace: LocalNamespace) -> None:
    options = f"OPTIONS (connectionString '{namespace.connection_string}', entity 'orders')"
    with pytest.raises(Exception, match=r"does not take connectionString for a table.*Use connectionStringEnv"):
        spark.sql(f"CREATE TABLE kept USING servicebus {options}")


@pytest.mark.thorough
def test_d1_a_table_that_was_created_with_columns_says_why_it_has_no_options(
    spark: SparkSession, named_namespace: LocalNamespace
) -> None:
    options = f"OPTIONS (connectionStringEnv '{NAMED}', entity 'orders')"
    spark.sql(f"CREATE TABLE with_columns (body binary) USING servicebus {options}")
    try:
        with pytest.raises(AnalysisException, match="only if it was created without a list of columns"):
            spark.sql("SELECT * FROM with_columns").collect()
        with pytest.raises(AnalysisException, match="only if it was created without a list of columns"):
            spark.sql(f"CREATE TABLE selected USING servicebus {options} AS SELECT 'x' AS body")
        assert not spark.catalog.tableExists("selected")
    finally:
        spark.sql("DROP TABLE with_columns")


# --- what is refused -------------------------------------------------------------------------------------------------


def test_d1_options_that_spark_itself_passes_to_a_writer_are_accepted() -> None:
    options = SourceOptions.parse({"connectionStringEnv": "X", "queryName": "orders", "checkpointLocation": "/c"})
    assert options == SourceOptions(connection_string_env="X")


def test_d1_the_guide_has_every_option_and_the_comparison_too() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    _, _, table = (docs / "guides" / "spark-source.md").read_text(encoding="utf-8").partition("\n## Options\n")
    named = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(OPTION_NAMES)
    _, _, compared = (docs / "source-columns.md").read_text(encoding="utf-8").partition("\n## Beside the connectors")
    assert [name for name in OPTION_NAMES if f"`{name}`" not in compared] == []


def test_d1_the_page_of_columns_has_every_column() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "source-columns.md"
    _, _, columns = page.read_text(encoding="utf-8").partition("\n## Columns\n")
    read, _, written = columns.partition("\nWrite: ")
    assert [name for name in READ_SCHEMA.names if f"`{name}`" not in read] == []
    assert [name for name in WRITTEN_COLUMNS if f"`{name}`" not in written.partition("\n## ")[0]] == []


_OPTIONS: list[tuple[dict[str, str], str]] = [
    ({}, "option entity is missing"),
    ({"entity": " "}, "option entity is empty"),
    ({"entity": "q", "partition": "2"}, "no option 'partition'.*partitions"),
    ({"entity": "q", "partitions": "0"}, "option partitions is 0; the least is 1"),
    ({"entity": "q", "partitions": "many"}, "option partitions is 'many', not a whole number"),
    ({"entity": "q", "timeout": "0"}, "option timeout is 0"),
    ({"entity": "q", "includeRaw": "yes"}, "option includeRaw is 'yes', not true or false"),
    ({"entity": "q", "connectionStringEnv": "X"}, "give one of connectionString, connectionStringEnv and fullyQ"),
]


@pytest.mark.parametrize(("options", "told"), _OPTIONS)
def test_d1_an_option_that_cannot_be_is_refused_by_name(
    spark: SparkSession, namespace: LocalNamespace, options: dict[str, str], told: str
) -> None:
    reader = spark.read.format("servicebus").option("connectionString", namespace.connection_string).options(**options)
    with pytest.raises(Exception, match=told):
        reader.load().collect()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("amqp", TransportType.Amqp),
        ("Amqp", TransportType.Amqp),
        ("websocket", TransportType.AmqpOverWebsocket),
        ("AmqpOverWebsocket", TransportType.AmqpOverWebsocket),
    ],
)
def test_d1_a_transport_type_is_named_as_in_the_sdk_or_in_the_command_line(text: str, kind: TransportType) -> None:
    assert SourceOptions.parse({"connectionStringEnv": "X", "transportType": text}).transport_type is kind


_COLUMNS: list[tuple[Callable[[SparkSession], DataFrame], str]] = [
    (lambda spark: spark.sql("SELECT 1 AS price"), "cannot write the column 'price'"),
    (lambda spark: spark.sql("SELECT 1 AS body"), "column 'body' is of type int"),
    (lambda spark: spark.sql("SELECT 'x' AS body"), "add a column entity, or set the option entity"),
    (lambda spark: spark.sql("SELECT 'x' AS body, CAST(NULL AS string) AS entity"), "a row's entity is null"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("frame", "told"), _COLUMNS)
def test_d1_a_column_that_cannot_be_sent_is_refused_by_name(
    spark: SparkSession, namespace: LocalNamespace, frame: Callable[[SparkSession], DataFrame], told: str
) -> None:
    with pytest.raises(Exception, match=told):
        _write(frame(spark), namespace)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"credential": "default"}, "give one of connectionString, connectionStringEnv and fullyQualifiedNamespace"),
        ({"fullyQualifiedNamespace": "contoso.example"}, "fullyQualifiedNamespace and credential need each other"),
        ({"connectionStringEnv": "X", "credential": "cli"}, "fullyQualifiedNamespace and credential need each other"),
        (
            {"fullyQualifiedNamespace": "sb://contoso", "credential": "cli"},
            "option fullyQualifiedNamespace is not a host",
        ),
        ({"fullyQualifiedNamespace": "contoso.example", "credential": "me"}, "option credential 'me' is not a cred"),
    ],
)
def test_d1_n6_a_credential_that_cannot_be_used_is_named(options: dict[str, str], told: str) -> None:
    with pytest.raises(SourceOptionError, match=re.escape(told)):
        SourceOptions.parse({"entity": "q", **options})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"transportType": "amqps"},
            "option transportType is 'amqps', not Amqp or AmqpOverWebsocket (in short amqp or websocket)",
        ),
        ({"httpProxy": "http://twin:sesame@proxy:3128"}, "option httpProxy cannot be used: the address"),
        ({"httpProxy": "http://twin:sesame@proxy:312x"}, "option httpProxy cannot be used: the address"),
        (
            {"httpProxy": "proxy"},
            "option httpProxy cannot be used: it is not the address of a proxy: write http://HOST",
        ),
        ({"customEndpointAddress": "sb://"}, "option customEndpointAddress cannot be used: custom_endpoint_address is"),
        ({"httpProxyCredentialsEnv": "A"}, "httpProxyCredentialsEnv needs httpProxy"),
    ],
)
def test_d1_a_way_to_the_namespace_that_cannot_be_used_is_named(options: dict[str, str], told: str) -> None:
    with pytest.raises(SourceOptionError, match=re.escape(told)) as refused:
        SourceOptions.parse({"connectionStringEnv": "X", **options})
    assert "sesame" not in str(refused.value)


@pytest.mark.thorough
def test_d1_the_source_reads_and_writes_through_a_proxy_with_credentials(
    spark: SparkSession, namespace: LocalNamespace, queue: str, client: ServiceBusClient, tmp_path: Path
) -> None:
    """Spark's workers have the variable with the credentials from their start (`spark_fixtures`)."""
    user, _, password = CREDENTIALS.partition(":")
    with tinyproxy.running(tmp_path, username=user, password=password) as proxy:
        proxied = {"httpProxy": proxy.url, "httpProxyCredentialsEnv": NAMED_CREDENTIALS}
        rows = spark.range(20).selectExpr("CAST(id AS string) AS message_id", "'text' AS body")
        _write(rows, namespace, entity=queue, **proxied)
        written = proxy.tunnels
        assert written > 0
        assert sorted(map(int, _ids_left(client, queue))) == list(range(20))
        found = _read(spark, namespace, queue, transportType="amqpoverwebsocket", **proxied)
        assert sorted(int(row.message_id) for row in found.select("message_id").collect()) == list(range(20))
        assert proxy.tunnels > written


def test_d1_the_credentials_of_a_proxy_are_read_on_each_machine_and_do_not_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {
        "connectionStringEnv": "X",
        "entity": "q",
        "httpProxy": "http://proxy.example:3128",
        "httpProxyCredentialsEnv": "PROXY_CREDENTIALS",
    }
    options = SourceOptions.parse(given)
    with pytest.raises(SourceOptionError, match=r"PROXY_CREDENTIALS \(option httpProxyCredentialsEnv\) is not set"):
        options.network_options()
    monkeypatch.setenv("PROXY_CREDENTIALS", "twin:sesame")
    assert options.network_options().http_proxy == HttpProxy("proxy.example", 3128, "twin", "sesame")
    assert "sesame" not in repr(options)
    assert b"sesame" not in pickle.dumps(ServiceBusDataSource(given).reader(StructType()))
