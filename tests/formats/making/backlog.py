"""Diverts messages with both drivers and takes their bytes out of the secondary's store, as pairing wrote them.

The set also has a message as the retired .NET client wrote it, whose time to live is a described type (S7).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import apsw
from azure.servicebus import ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageHeader, AmqpMessageProperties

from tests.formats.sets import write_expected
from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.amqp import Header, Properties, build_message
from twinbus.testing import LocalNamespaces
from twinbus.values import Described, Long, Symbol, Timestamp

PATH = "orders"
DUE = datetime(2400, 1, 1, tzinfo=UTC)
DUE_MS = int(DUE.timestamp() * 1000)
TICKS = 10_000_000
NEARLY_TOO_LARGE = (b"twinbus " * 32_768)[:-50]
"""A body that fits into a message of 256 KB, but not together with aliases: in the backlog it is compressed (S9)."""

Expected = dict[str, Any]


def make(folder: Path, work: Path) -> None:
    """Write `backlog.json` into `folder`."""
    found: list[Expected] = []
    for driver in ("sync", "aio"):
        expected = _expected(driver)
        raws = asyncio.run(_diverted(driver, work / f"backlog-{driver}"))
        assert len(raws) == len(expected), (len(raws), len(expected))
        # Senders divert one message after the other to one queue, so the queue has them in the order of the sends.
        found += [{**one, "raw": base64.b64encode(raw).decode()} for one, raw in zip(expected, raws, strict=True)]
    dotnet = {**_dotnet_expected(), "raw": base64.b64encode(_dotnet()).decode()}
    write_expected(folder / "backlog.json", [*found, dotnet])


def _messages(driver: str) -> list[Any]:
    """In the order of `_expected`. The last but one is a batch of two, the last is scheduled by a call."""
    return [
        ServiceBusMessage(b"plain", message_id=f"{driver} plain"),
        ServiceBusMessage(b"s", message_id=f"{driver} session", session_id="session"),
        ServiceBusMessage(b"t", message_id=f"{driver} ttl", time_to_live=timedelta(minutes=90)),
        ServiceBusMessage(b"d", message_id=f"{driver} due", scheduled_enqueue_time_utc=DUE),
        ServiceBusMessage(
            b"all \x00\xff",
            message_id=f"{driver} all",
            session_id="session",
            time_to_live=timedelta(days=2),
            scheduled_enqueue_time_utc=DUE,
            subject="subject",
            content_type="text/plain",
            correlation_id="correlation",
            to="to",
            reply_to="reply",
            reply_to_session_id="reply session",
            partition_key="session",
            application_properties={"text": "tëxt", "number": -7, "real": 1.5, "flag": True},
        ),
        AmqpAnnotatedMessage(
            value_body={"a": [1, "two", None]},
            header=AmqpMessageHeader(priority=7, durable=True),
            properties=AmqpMessageProperties(message_id=f"{driver} value", user_id=b"user"),
            annotations={"x-opt-mine": "annotation"},
        ),
        AmqpAnnotatedMessage(
            sequence_body=[[1, 2], ["three"]], properties=AmqpMessageProperties(message_id=f"{driver} sequence")
        ),
        AmqpAnnotatedMessage(
            data_body=[b"one", b"two"], properties=AmqpMessageProperties(message_id=f"{driver} data twice")
        ),
        ServiceBusMessage(NEARLY_TOO_LARGE, message_id=f"{driver} packed"),
        [ServiceBusMessage(name, message_id=f"{driver} {name}", session_id=name) for name in ("first", "second")],
        ServiceBusMessage(b"c", message_id=f"{driver} by a call"),
    ]


def _expected(driver: str) -> list[Expected]:
    packed = {"bytes": len(NEARLY_TOO_LARGE), "sha256": hashlib.sha256(NEARLY_TOO_LARGE).hexdigest()}
    every: dict[str, Any] = {
        "session": "session",
        "ttl": 2 * 86_400_000,
        "due": DUE_MS,
        "subject": "subject",
        "content_type": "text/plain",
        "correlation_id": "correlation",
        "to": "to",
        "reply_to": "reply",
        "reply_to_session": "reply session",
        "partition_key": "session",
        "properties": {"text": "tëxt", "number": -7, "real": 1.5, "flag": True},
    }
    return [
        _one(driver, "plain", ["plain"]),
        _one(driver, "session", ["s"], session="session"),
        _one(driver, "ttl", ["t"], ttl=90 * 60_000),
        _one(driver, "due", ["d"], due=DUE_MS),
        _one(driver, "all", ["all \x00\xff"], **every),
        _one(driver, "value", {"a": [1, "two", None]}, kind="value", priority=7, user_id="user", mine="annotation"),
        _one(driver, "sequence", [[1, 2], ["three"]], kind="sequence"),
        _one(driver, "data twice", ["one", "two"]),
        _one(driver, "packed", packed),
        _one(driver, "first", ["first"], session="first"),
        _one(driver, "second", ["second"], session="second"),
        _one(driver, "by a call", ["c"], due=DUE_MS),
    ]


def _one(driver: str, name: str, body: Any, *, kind: str = "data", **more: Any) -> Expected:
    return {"by": driver, "id": f"{driver} {name}", "path": PATH, "kind": kind, "body": body, **more}


async def _diverted(driver: str, data: Path) -> list[bytes]:
    queues: Mapping[str, Any] = {"name": "primary", "queues": [{"name": PATH}]}
    config = {"namespaces": [queues, {"name": "secondary"}]}
    options = SendAvailabilityOptions(backlog_queue_count=1, primary_name="contoso")
    with LocalNamespaces("primary", "secondary", data=data, config=config) as namespaces:
        strings = [namespaces[name].connection_string for name in ("primary", "secondary")]
        if driver == "aio":
            pair = await aio.pair_connection_strings(*strings, options=options)
            async with pair, pair.get_queue_sender(PATH) as sender:
                pair.force_failover(PATH)
                *sent, scheduled = _messages(driver)
                for one in sent:
                    await sender.send_messages(one)
                await sender.schedule_messages(scheduled, DUE)
        else:
            await asyncio.to_thread(_sync, strings, options)
        assert await asyncio.to_thread(namespaces.stop) == 0
    connection = apsw.Connection(str(data / "secondary.sqlite"))
    raws = [bytes(raw) for (raw,) in connection.execute("SELECT raw FROM message ORDER BY seq")]
    connection.close()
    return raws


def _sync(strings: list[str], options: SendAvailabilityOptions) -> None:
    with pair_connection_strings(*strings, options=options) as pair, pair.get_queue_sender(PATH) as sender:
        pair.force_failover(PATH)
        *sent, scheduled = _messages("sync")
        for one in sent:
            sender.send_messages(one)
        sender.schedule_messages(scheduled, DUE)


def _dotnet() -> bytes:
    return build_message(
        header=Header(durable=True),
        properties=Properties(message_id="dotnet", subject="label"),
        application_properties={
            "x-ms-path": PATH,
            "x-ms-sessionid": "session",
            "x-ms-timetolive": Described(Symbol("com.microsoft:timespan"), Long(90 * 60 * TICKS)),
            "x-ms-scheduledenqueuetimeutc": Timestamp(DUE_MS),
            "number": Long(7),
        },
        data=b"of .NET",
    )


def _dotnet_expected() -> Expected:
    more = {"session": "session", "ttl": 90 * 60_000, "due": DUE_MS, "subject": "label", "properties": {"number": 7}}
    return {"by": "dotnet", "id": "dotnet", "path": PATH, "kind": "data", "body": ["of .NET"], **more}
