"""Diverted messages of every kind, as they are in the backlog (S7 to S10)."""

import asyncio
import os
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageBodyType

from twinbus import (
    AliasInUseError,
    BacklogHandle,
    MessageTooLargeForBacklogError,
    PartialSendError,
    ScheduledInBacklogError,
    TimeToLiveError,
)
from twinbus.backlog import DEFLATE, decompress_body
from twinbus.message import BodyType
from twinbus.values import Long, Timestamp

from .conftest import BRIEF, World

LIMIT = 262_144
IN_A_YEAR = datetime.now(UTC).replace(microsecond=0) + timedelta(days=365)


async def diverting(world: World, queue: str, **options: Any) -> tuple[Any, Any]:
    pair = await world.pair(**{"backlog_queue_count": 1, **options})
    await world.do(pair.force_failover, queue)
    return pair, await world.sender(pair, queue)


async def test_s7_what_cannot_travel_becomes_an_alias_and_all_else_is_untouched(world: World, queue: str) -> None:
    pair, sender = await diverting(world, queue)
    message = ServiceBusMessage(
        b"body",
        message_id="id",
        session_id="session",
        partition_key="session",
        time_to_live=timedelta(seconds=90),
        scheduled_enqueue_time_utc=IN_A_YEAR,
        subject="subject",
        to="to",
        reply_to="reply",
        reply_to_session_id="reply session",
        correlation_id="correlation",
        content_type="text/plain",
        application_properties={"text": "x", "number": 7, "yes": True},
    )
    before = repr(message)
    await world.send(sender, message)
    (stored,) = await world.backlog(pair)
    assert repr(message) == before
    assert stored.application_properties == {
        "text": "x",
        "number": 7,
        "yes": True,
        "x-ms-path": queue,
        "x-ms-sessionid": "session",
        "x-ms-timetolive": 90 * 10_000_000,
        "x-ms-scheduledenqueuetimeutc": int(IN_A_YEAR.timestamp()) * 1000,
    }
    assert isinstance(stored.application_properties["x-ms-timetolive"], Long)
    assert isinstance(stored.application_properties["x-ms-scheduledenqueuetimeutc"], Timestamp)
    assert (stored.session_id, stored.header.ttl, stored.scheduled_enqueue_time) == (None, None, None)
    assert stored.properties.absolute_expiry_time is None
    assert (stored.message_id, stored.body, stored.subject, stored.to) == ("id", b"body", "subject", "to")
    assert (stored.reply_to, stored.correlation_id, stored.content_type) == ("reply", "correlation", "text/plain")
    assert stored.properties.reply_to_group_id == "reply session"
    assert stored.partition_key == "session"


@pytest.mark.parametrize(
    ("body", "kind", "stored"),
    [
        ({"data_body": [b"a", b"b"]}, BodyType.DATA, b"ab"),
        ({"sequence_body": [["a", 1], ["b", 2]]}, BodyType.SEQUENCE, [["a", 1], ["b", 2]]),
        ({"value_body": {"a": [1, 2]}}, BodyType.VALUE, {"a": [1, 2]}),
    ],
    ids=["data", "sequence", "value"],
)
async def test_s7_s8_an_annotated_message_of_any_body_is_diverted_with_an_id_and_not_altered(
    world: World, queue: str, body: dict[str, Any], kind: BodyType, stored: object
) -> None:
    pair, sender = await diverting(world, queue)
    message = AmqpAnnotatedMessage(**body, annotations={"x-mine": "kept"}, application_properties={"a": b"bytes"})
    await world.send(sender, message)
    (found,) = await world.backlog(pair)
    assert message.properties is None
    assert message.application_properties == {"a": b"bytes"}
    assert found.message_id
    assert (found.body_type, found.body) == (kind, stored)
    assert found.annotations["x-mine"] == "kept"


async def test_s7_an_absolute_expiry_without_a_time_to_live_is_carried_however_far_away(
    world: World, queue: str
) -> None:
    pair, sender = await diverting(world, queue)
    due = int(IN_A_YEAR.timestamp()) * 1000
    await world.send(sender, AmqpAnnotatedMessage(data_body=b"x", properties={"absolute_expiry_time": due}))
    (stored,) = await world.backlog(pair)
    assert stored.properties.absolute_expiry_time == due


async def test_s8_a_mapping_has_one_id_on_the_primary_and_in_the_backlog(world: World, queue: str) -> None:
    pair = await world.pair(backlog_queue_count=1, try_timeout=BRIEF)
    sender = await world.sender(pair, queue)
    world.primary.faults.set("drop-ack", entity=queue, points=["send"], count=1)
    await world.send(sender, {"body": "stored twice"})
    (diverted,) = await world.backlog(pair)
    assert [one.message_id for one in await world.held(queue)] == [diverted.message_id]


@pytest.mark.parametrize("given", ["list", "batch", "generator"])
async def test_s9_many_messages_are_diverted_together(world: World, queue: str, given: str) -> None:
    pair, sender = await diverting(world, queue)
    messages: list[Any] = [
        ServiceBusMessage("a", message_id="a"),
        {"body": "b", "message_id": "b"},
        AmqpAnnotatedMessage(data_body=b"c", properties={"message_id": "c"}),
    ]
    if given == "batch":
        batch = await world.do(sender.create_message_batch)
        for message in messages:
            batch.add_message(message)
        await world.send(sender, batch)
    else:
        await world.send(sender, messages if given == "list" else (one for one in messages))
    assert [one.message_id for one in await world.backlog(pair)] == ["a", "b", "c"]
    assert {one.application_properties["x-ms-path"] for one in await world.backlog(pair)} == {queue}
    assert next(one.diverted for one in pair.entities()) == 3


async def test_s9_a_batch_that_no_longer_fits_is_split(world: World, queue: str) -> None:
    pair = await world.pair(backlog_queue_count=1)
    sender = await world.sender(pair, queue)
    batch = await world.do(sender.create_message_batch)
    for number in range(10):
        batch.add_message(ServiceBusMessage(os.urandom(26_000), message_id=str(number), session_id="s" * 100))
    await world.do(pair.force_failover, queue)
    await world.send(sender, batch)
    assert [one.message_id for one in await world.backlog(pair)] == [str(number) for number in range(10)]


async def test_s9_a_message_just_under_the_limit_is_stored_compressed(world: World, queue: str) -> None:
    pair, sender = await diverting(world, queue)
    body = b"compressible " * 20_158
    assert LIMIT - 250 < len(body) < LIMIT
    await world.send(sender, ServiceBusMessage(body, session_id="s" * 100, message_id="large"))
    (stored,) = await world.backlog(pair)
    assert stored.application_properties["x-twinbus-packed"] == DEFLATE
    sections = decompress_body(stored.body, DEFLATE, LIMIT)
    assert sections.endswith(body)
    assert zlib.decompress(stored.body) == sections


async def test_s9_one_that_cannot_be_made_to_fit_says_by_how_much(world: World, queue: str) -> None:
    pair, sender = await diverting(world, queue)
    with pytest.raises(MessageTooLargeForBacklogError, match="bytes too large") as raised:
        await world.send(sender, ServiceBusMessage(os.urandom(LIMIT - 100), session_id="s" * 100, message_id="large"))
    assert raised.value.limit == LIMIT
    assert 0 < raised.value.excess < 1000
    assert await world.backlog(pair) == []


async def test_s9_a_part_that_fails_names_the_safe_and_the_unsafe(world: World, queue: str) -> None:
    pair, sender = await diverting(world, queue, probation=timedelta(minutes=1), keywords={"retry_total": 0})
    await world.send(sender, ServiceBusMessage("warm"))
    (backlog,) = pair.backlog_queues
    # The first of three parts is accepted. The others get an error.
    messages = [ServiceBusMessage(os.urandom(150_000), message_id=str(number)) for number in range(3)]
    world.secondary.faults.set("delay", entity=backlog, points=["send"], delay=0.3, count=1)

    async def break_it() -> None:
        await asyncio.sleep(0.1)  # within the first part's delay
        await asyncio.to_thread(world.secondary.faults.set, "internal-error", entity=backlog)

    breaking = asyncio.create_task(break_it())
    with pytest.raises(PartialSendError) as raised:
        await world.send(sender, messages)
    await breaking
    assert raised.value.safe == ("0",)
    assert raised.value.unsafe == ("1", "2")


async def test_s7_a_message_that_uses_a_reserved_name_is_refused_by_name(world: World, queue: str) -> None:
    pair, sender = await diverting(world, queue)
    with pytest.raises(AliasInUseError, match="x-ms-path"):
        await world.send(sender, ServiceBusMessage("x", application_properties={"x-ms-path": "mine"}))
    assert await world.backlog(pair) == []


async def test_s10_scheduling_while_failed_over_gives_handles_that_cannot_be_cancelled_in_silence(
    world: World, queue: str
) -> None:
    pair, sender = await diverting(world, queue)
    message = ServiceBusMessage("later", message_id="later")
    handles = await world.do(sender.schedule_messages, [message, {"body": "too"}], IN_A_YEAR)
    assert message.scheduled_enqueue_time_utc is None
    assert len(set(handles)) == 2
    assert all(isinstance(handle, BacklogHandle) and handle < 0 for handle in handles)
    stored = await world.backlog(pair)
    due = int(IN_A_YEAR.timestamp()) * 1000
    assert [one.application_properties["x-ms-scheduledenqueuetimeutc"] for one in stored] == [due, due]
    for numbers in (handles, handles[0], [5], 5):
        with pytest.raises(ScheduledInBacklogError):
            await world.do(sender.cancel_scheduled_messages, numbers)


async def test_s10_scheduling_and_cancelling_on_a_healthy_primary_is_the_primarys(world: World, queue: str) -> None:
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    numbers = await world.do(sender.schedule_messages, ServiceBusMessage("later"), IN_A_YEAR)
    assert numbers[0] > 0
    await world.do(sender.cancel_scheduled_messages, numbers)
    assert await world.held(queue) == []
    with pytest.raises(ScheduledInBacklogError):
        await world.do(sender.cancel_scheduled_messages, [BacklogHandle(-7)])


async def test_s1_a_healthy_message_arrives_unchanged(world: World, queue: str) -> None:
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    message = ServiceBusMessage("body", session_id="s", message_id="m", application_properties={"a": 1})
    await world.send(sender, message)
    (found,) = await world.held(queue)
    assert (found.message_id, found.session_id, found.application_properties) == ("m", "s", {"a": 1})
    assert message.raw_amqp_message.body_type is AmqpMessageBodyType.DATA
    assert await world.backlog(pair) == []


async def test_s8_an_id_of_0_is_kept_on_the_primary_and_in_the_backlog(world: World, queue: str) -> None:
    pair = await world.pair(backlog_queue_count=1)
    sender = await world.sender(pair, queue)
    message = ServiceBusMessage("x")
    message.message_id = 0  # type: ignore[assignment] # AMQP has ids that are no text
    await world.send(sender, message)
    await world.do(pair.force_failover, queue)
    await world.send(sender, message)
    (direct,), (diverted,) = await world.held(queue), await world.backlog(pair)
    assert direct.message_id == diverted.message_id == 0


async def test_s2_a_time_to_live_that_no_header_can_carry_is_refused_alike_on_the_primary_and_on_diverting(
    world: World, queue: str
) -> None:
    pair = await world.pair(backlog_queue_count=1)
    sender = await world.sender(pair, queue)
    for _ in range(2):
        with pytest.raises(TimeToLiveError, match="49 days"):
            await world.send(sender, ServiceBusMessage("x", time_to_live=timedelta(days=60)))
        assert (await world.held(queue), await world.backlog(pair)) == ([], [])
        await world.do(pair.force_failover, queue)
