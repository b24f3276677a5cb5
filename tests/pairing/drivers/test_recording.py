"""M1, S8, S11: the ledger of a pair has all its operations on real servers, and its balance is true."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import OperationTimeoutError, ServiceBusError, ServiceBusServerBusyError
from typer.testing import CliRunner

from twinbus import PartialSendError
from twinbus.backlog import Endpoint, primary_name
from twinbus.cli.main import app
from twinbus.ledger import (
    UNKNOWN,
    Closed,
    Gap,
    Intent,
    Ledger,
    LedgerOptions,
    LedgerUnavailableError,
    Operation,
    Outcome,
    Stage,
    State,
    balance,
    billable_units,
    read_ledger,
)
from twinbus.pairing.recording import size_of
from twinbus.sdk import encoded_size
from twinbus.testing import LocalNamespace

from .conftest import BRIEF, World

SECONDARY_LIMIT = 256 * 1024


@pytest.fixture(autouse=True)
def brief(world: World) -> None:
    world.try_timeout = BRIEF


async def closed(world: World, pair: Any, folder: Path) -> list[Operation]:
    """Close the pair, and return the operations in its ledger."""
    await world.do(pair.close)
    return operations(folder)


def operations(folder: Path) -> list[Operation]:
    """Return the operations on messages. An intent and its outcome become one operation."""
    entries = [one for one in read_ledger(folder) if getattr(one, "stage", None) is not Stage.MANAGE]
    outcomes = {entry.id: entry for entry in entries if isinstance(entry, Outcome)}
    found = [entry for entry in entries if isinstance(entry, Operation)]
    for entry in entries:
        if isinstance(entry, Intent):
            found.append(Operation(**{**asdict(entry), **asdict(outcomes[entry.id]), "at": entry.at}))
    return sorted(found, key=lambda one: int(one.id.rpartition("-")[2]))


def told(operation: Operation) -> tuple[str, str, tuple[str, ...], str]:
    return operation.stage, operation.entity, operation.ids, operation.result


def name_of(namespace: LocalNamespace) -> str:
    host, _, port = namespace.connection_string.split("//")[1].split("/")[0].split(";")[0].rpartition(":")
    return primary_name(Endpoint.of(host, int(port)))


# --- operations ------------------------------------------------------------------------------------------------------


async def test_m1_a_send_is_one_operation_with_its_id_its_bytes_and_its_units(
    world: World, queue: str, tmp_path: Path
) -> None:
    pair = await world.pair(ledger=tmp_path, primary_name=None)
    sender = await world.sender(pair, queue)
    small = ServiceBusMessage(
        b"x" * 1000, message_id="s" * 36, subject="s" * 50, application_properties={"k": "v" * 40}
    )
    # One byte below and above a unit: an estimate of the size would not be exact enough.
    large = ServiceBusMessage(b"", message_id="large")
    large = ServiceBusMessage(b"x" * (64 * 1024 - encoded_size(large.raw_amqp_message) - 2), message_id="large")
    assert encoded_size(large.raw_amqp_message) == 64 * 1024 + 1
    numbered = ServiceBusMessage(b"2")
    numbered.raw_amqp_message.properties.message_id = 2  # type: ignore[union-attr] # AMQP has such ids too
    for message in (small, large, [ServiceBusMessage(b"1", message_id="one"), numbered]):
        await world.send(sender, message)
    found = await closed(world, pair, tmp_path)
    assert [told(one) for one in found] == [
        ("send_primary", queue, ("s" * 36,), "ok"),
        ("send_primary", queue, ("large",), "ok"),
        ("send_primary", queue, ("one", "ulong:2"), "ok"),
    ]
    assert {one.namespace for one in found} == {name_of(world.primary)}
    assert [one.units for one in found] == [1, 2, 2]
    assert abs(found[0].bytes - encoded_size(small.raw_amqp_message)) < 16
    assert found[1].bytes == 64 * 1024 + 1
    assert all(0 < one.seconds < 60 for one in found)


@pytest.mark.parametrize(
    "text", ["subject", "to", "reply_to", "correlation_id", "content_type", "group_id", "reply_to_group_id"]
)
def test_m2_a_long_text_in_the_properties_is_a_unit_more(text: str) -> None:
    message = ServiceBusMessage(b"x" * 55_000, message_id="a")
    setattr(message.raw_amqp_message.properties, text, "s" * 12_000)
    size = size_of(message.raw_amqp_message)
    assert abs(size - encoded_size(message.raw_amqp_message)) < 64
    assert billable_units(1, [size]) == 2


async def test_s8_a_send_that_timed_out_and_arrived_is_unknown_and_its_id_finds_it(
    world: World, queue: str, tmp_path: Path
) -> None:
    pair = await world.pair(ledger=tmp_path, failover_interval=timedelta(minutes=1))
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage(b"", message_id="before"))
    world.primary.faults.set("drop-ack", entity=queue)
    with pytest.raises(OperationTimeoutError):
        await world.send(sender, {"body": b"without an id"})
    [before, arrived] = await world.held(queue)
    world.primary.faults.clear()
    [_, unknown] = await closed(world, pair, tmp_path)
    assert before.message_id == "before"
    assert told(unknown) == ("send_primary", queue, (arrived.message_id,), UNKNOWN)
    assert unknown.cause == "timeout"
    found = balance(read_ledger(tmp_path))
    assert [message.id for message in found.unconfirmed] == [arrived.message_id]
    assert (found.accepted.total(), found.lost.total()) == (1, 0)


async def test_m1_each_try_is_an_operation_and_one_that_was_refused_has_surely_not_happened(
    world: World, queue: str, tmp_path: Path
) -> None:
    pair = await world.pair(
        ledger=tmp_path, try_timeout=timedelta(seconds=5), keywords={"retry_total": 1, "retry_backoff_factor": 0.1}
    )
    sender = await world.sender(pair, queue)
    world.primary.faults.set("server-busy", entity=queue, points=["send"])
    with pytest.raises(ServiceBusServerBusyError):
        await world.send(sender, ServiceBusMessage(b"", message_id="1"))
    found = await closed(world, pair, tmp_path)
    assert [told(one) for one in found] == [("send_primary", queue, ("1",), "server_busy")] * 2
    assert balance(read_ledger(tmp_path)).unconfirmed.total() == 0


async def test_m1_a_primary_that_cannot_be_reached_was_asked_for_nothing(
    world: World, queue: str, tmp_path: Path
) -> None:
    pair = await world.pair(ledger=tmp_path, primary_name=None, keywords={"retry_total": 0})
    sender = await world.sender(pair, queue)
    await asyncio.to_thread(world.primary.kill)
    await world.send(sender, ServiceBusMessage(b"", message_id="1"))
    [diverted] = await closed(world, pair, tmp_path)
    assert (diverted.stage, diverted.ids, diverted.result) == ("send_backlog", ("1",), "ok")
    assert diverted.namespace == name_of(world.secondary)
    assert diverted.destination == f"{name_of(world.primary)}/{queue}"
    found = balance(read_ledger(tmp_path))
    assert found.in_backlog.total() == found.accepted.total() == 1
    assert found.possibly_duplicated.total() == 0


async def test_m1_a_diverted_batch_is_an_operation_for_every_part_and_a_compressed_body_has_its_bytes(
    world: World, queue: str, tmp_path: Path
) -> None:
    pair = await world.pair(ledger=tmp_path)
    pair.force_failover(queue)
    sender = await world.sender(pair, queue)
    # Too large together with its aliases, and much smaller when compressed (S9).
    large = ServiceBusMessage(b"x" * (SECONDARY_LIMIT - 100), session_id="s" * 100, message_id="packed")
    await world.send(sender, large)
    await world.send(sender, [ServiceBusMessage(os.urandom(100_000), message_id=f"part-{n}") for n in range(4)])
    packed, *parts = await closed(world, pair, tmp_path)
    assert packed.ids == ("packed",)
    assert (packed.bytes < 10_000, packed.units) == (True, 1)
    assert len(parts) >= 2
    assert [name for part in parts for name in part.ids] == [f"part-{n}" for n in range(4)]
    assert sum(part.units for part in parts) == 4 * 2
    assert {one.stage for one in (packed, *parts)} == {Stage.SEND_BACKLOG}
    assert balance(read_ledger(tmp_path)).in_backlog.total() == 5


async def test_m1_of_a_batch_that_failed_in_part_the_safe_ones_are_accepted_and_the_others_not(
    world: World, queue: str, tmp_path: Path
) -> None:
    pair = await world.pair(ledger=tmp_path, backlog_queue_count=1, keywords={"retry_total": 0})
    pair.force_failover(queue)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage(b"", message_id="before"))
    [backlog] = pair.backlog_queues
    # The first part is accepted after a delay. During the delay the queue becomes busy for the other parts.
    world.secondary.faults.set("delay", entity=backlog, points=["send"], delay=0.5, count=1)
    messages = [ServiceBusMessage(os.urandom(150_000), message_id=f"part-{number}") for number in range(3)]
    sending = asyncio.create_task(world.send(sender, messages))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(world.secondary.faults.set, "server-busy", entity=backlog)
    with pytest.raises(PartialSendError) as caught:
        await sending
    world.secondary.faults.clear()
    await world.do(pair.close)
    found = balance(read_ledger(tmp_path))
    assert {message.id for message in found.in_backlog} == {"before", *caught.value.safe}
    assert found.accepted == found.in_backlog


async def test_m1_scheduling_and_cancelling_are_operations(world: World, queue: str, tmp_path: Path) -> None:
    pair = await world.pair(ledger=tmp_path)
    sender = await world.sender(pair, queue)
    at = datetime.now(UTC) + timedelta(hours=1)
    [number] = await world.do(sender.schedule_messages, ServiceBusMessage(b"", message_id="later"), at)
    await world.do(sender.cancel_scheduled_messages, number)
    pair.force_failover(queue)
    await world.do(sender.schedule_messages, ServiceBusMessage(b"", message_id="diverted"), at)
    scheduled, cancelled, diverted = await closed(world, pair, tmp_path)
    assert told(scheduled) == ("schedule_primary", queue, ("later",), "ok")
    assert told(cancelled) == ("cancel_primary", queue, (), "ok")
    assert cancelled.units == 1
    assert (diverted.stage, diverted.ids) == ("send_backlog", ("diverted",))


async def test_m1_scheduling_under_way_when_its_link_is_taken_away_may_have_happened(
    world: World, queue: str, tmp_path: Path
) -> None:
    pair = await world.pair(ledger=tmp_path, failover_interval=timedelta(minutes=1), keywords={"retry_total": 0})
    sender = await world.sender(pair, queue)
    world.primary.faults.set("detach", entity=queue, points=["request"])
    at = datetime.now(UTC) + timedelta(hours=1)
    with pytest.raises(ServiceBusError):
        await world.do(sender.schedule_messages, ServiceBusMessage(b"", message_id="later"), at)
    [scheduled] = await closed(world, pair, tmp_path)
    assert told(scheduled) == ("schedule_primary", queue, ("later",), UNKNOWN)
    assert [message.id for message in balance(read_ledger(tmp_path)).unconfirmed] == ["later"]


@pytest.mark.parametrize(("ping", "operations_"), [("message", ["ping"]), ("link", [])])
async def test_m1_a_ping_is_an_operation_where_it_sends_a_message(
    world: World, queue: str, tmp_path: Path, ping: str, operations_: list[str]
) -> None:
    pair = await world.pair(ledger=tmp_path, ping=ping, ping_interval=timedelta(seconds=1))
    await world.sender(pair, queue)
    pair.force_failover(queue)
    await world.state(pair, queue, "on_trial")
    found = await closed(world, pair, tmp_path)
    assert [str(one.stage) for one in found] == operations_
    assert all((one.entity, one.units, one.result) == (queue, 1, "ok") for one in found)


async def test_s11_every_event_of_a_pair_is_in_its_ledger(world: World, queue: str, tmp_path: Path) -> None:
    pair = await world.pair(ledger=tmp_path, keywords={"retry_total": 0})
    events: list[str] = []
    pair.on("*", lambda notice: events.append(notice.name))
    sender = await world.sender(pair, queue)
    pair.force_failover(queue)
    world.secondary.faults.set("detach", entity=pair.backlog_queues[0])
    world.secondary.faults.set("detach", entity=pair.backlog_queues[1])
    with contextlib.suppress(Exception):
        await world.send(sender, ServiceBusMessage(b""))
    world.secondary.faults.clear()
    await world.until(lambda: events.count("backlog_queue_returned") == 2)
    pair.force_restore(queue)
    pair.secondary.fault(RuntimeError("told by a test"))
    await world.do(pair.close)
    states = [entry for entry in read_ledger(tmp_path) if isinstance(entry, State)]
    assert Counter(state.event for state in states) == {
        "paired": 1, "failover_engaged": 1, "backlog_queue_left": 2, "backlog_queue_returned": 2, "restored": 1,
        "faulted": 1, "closed": 1,
    }  # fmt: skip
    assert {state.pair for state in states} == {pair.options.primary_name}
    [engaged] = [state for state in states if state.event == "failover_engaged"]
    assert engaged.facts["entity"] == queue
    [paired] = [state for state in states if state.event == "paired"]
    assert paired.facts["backlog_queues"] == 2
    assert paired.facts["ping_interval"] == pair.options.ping_interval.total_seconds()
    assert paired.facts["failover_interval"] == pair.options.failover_interval.total_seconds()
    assert isinstance(list(read_ledger(tmp_path))[-1], Closed)


# --- the balance -----------------------------------------------------------------------------------------------------


async def test_m1_the_balance_of_an_outage_is_what_the_receivers_get(world: World, queue: str, tmp_path: Path) -> None:
    pair = await world.pair(ledger=tmp_path, ping_interval=timedelta(seconds=1))
    sender = await world.sender(pair, queue)
    reported: set[str] = set()

    async def send(names: range) -> None:
        for name in names:
            with contextlib.suppress(OperationTimeoutError):
                await world.send(sender, ServiceBusMessage(b"x" * 100, message_id=f"m-{name}"))
                reported.add(f"m-{name}")

    await send(range(20))
    os.kill(world.primary.pid, signal.SIGSTOP)
    await send(range(20, 40))
    os.kill(world.primary.pid, signal.SIGCONT)
    await world.state(pair, queue, "on_trial")
    await send(range(40, 60))
    there, waiting = await world.held(queue), await world.backlog(pair)
    await world.do(pair.close)
    checked = CliRunner().invoke(app, ["ledger", "check", str(tmp_path)])
    assert checked.exit_code == 0, checked.output
    found = balance(read_ledger(tmp_path))
    assert {message.id for message in found.accepted} == reported == {f"m-{name}" for name in range(60)}
    assert {message.id for message in found.in_backlog} == {one.message_id for one in waiting}
    delivered = {message.id for message in found.delivered}
    arrived = {one.message_id for one in there}
    assert delivered <= arrived
    # The other messages were sent without an answer: the ledger records each of them as unknown.
    assert arrived - delivered <= {message.id for message in found.possibly_duplicated | found.unconfirmed} | {
        message.id for message in found.in_backlog
    }
    assert (found.lost.total(), found.incomplete) == (0, [])


@pytest.mark.parametrize("diverted", [False, True])
async def test_l2_a_send_that_returned_is_in_the_ledger(
    world: World, queue: str, tmp_path: Path, diverted: bool
) -> None:
    pair = await world.pair(ledger=tmp_path)
    sender = await world.sender(pair, queue)
    if diverted:
        pair.force_failover(queue)
    for number in range(20):
        await world.send(sender, ServiceBusMessage(b"", message_id=str(number)))
        # Without a flush: what is in the file now is there whatever happens to the process.
        accepted = {message.id for message in balance(read_ledger(tmp_path)).accepted}
        assert accepted == {str(one) for one in range(number + 1)}
    at = datetime.now(UTC) + timedelta(hours=1)
    await world.do(sender.schedule_messages, ServiceBusMessage(b"", message_id="later"), at)
    assert "later" in {message.id for message in balance(read_ledger(tmp_path)).accepted}


# --- where it cannot be written --------------------------------------------------------------------------------------


def unwritable(folder: Path) -> Path:
    """Replace the directory of a ledger by a file."""
    shutil.rmtree(folder)
    folder.write_text("")
    return folder


async def test_m1_a_ledger_that_cannot_be_written_stops_every_call_before_it_is_tried(
    world: World, queue: str, tmp_path: Path
) -> None:
    folder = tmp_path / "ledger"
    pair = await world.pair(ledger=folder, ledger_on_error="stop")
    sender = await world.sender(pair, queue)
    unwritable(folder)
    # The failure is only noticed when an entry is written.
    await world.send(sender, ServiceBusMessage(b"", message_id="first"))

    async def refused() -> bool:
        try:
            await world.send(sender, ServiceBusMessage(b"", message_id="tried"))
        except LedgerUnavailableError:
            return True
        return False

    async with asyncio.timeout(10):
        while not await refused():
            pass
    held = len(await world.held(queue))
    at = datetime.now(UTC) + timedelta(hours=1)
    tries: list[Callable[[], Any]] = [
        lambda: world.send(sender, ServiceBusMessage(b"")),
        lambda: world.do(sender.schedule_messages, ServiceBusMessage(b""), at),
        lambda: world.do(sender.cancel_scheduled_messages, 5),
    ]
    for attempt in tries:
        with pytest.raises(LedgerUnavailableError, match=str(folder)):
            await attempt()
    pair.force_failover(queue)
    with pytest.raises(LedgerUnavailableError, match=str(folder)):
        await world.send(sender, ServiceBusMessage(b""))
    assert len(await world.held(queue)) == held
    assert await world.backlog(pair) == []
    folder.unlink()
    folder.mkdir()
    # The writer tries again every second.
    async with asyncio.timeout(10):
        while await refused():  # noqa: ASYNC110 - a thread of the ledger makes it so
            await asyncio.sleep(0.1)


async def test_m1_a_ledger_that_cannot_be_written_lets_calls_go_on_and_is_told_loudly(
    world: World, queue: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "ledger"
    with caplog.at_level(logging.ERROR, "twinbus.ledger"):
        pair = await world.pair(ledger=folder)
        sender = await world.sender(pair, queue)
        unwritable(folder)
        await world.send(sender, ServiceBusMessage(b"", message_id="1"))
        await world.until(lambda: "cannot be written" in caplog.text)
        await world.send(sender, ServiceBusMessage(b"", message_id="2"))
        await world.do(pair.close)
    assert {one.message_id for one in await world.held(queue)} >= {"1", "2"}
    assert "not everything is in" in caplog.text


async def test_m1_a_ledger_that_is_given_stays_open_and_is_shared(world: World, queue: str, tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        for number in range(2):
            pair = await world.pair(ledger=ledger)
            sender = await world.sender(pair, queue)
            await world.send(sender, ServiceBusMessage(b"", message_id=str(number)))
            await world.do(pair.close)
        assert ledger.flush() is True
        assert [one.ids for one in operations(tmp_path)] == [("0",), ("1",)]
        assert not [entry for entry in read_ledger(tmp_path) if isinstance(entry, Closed)]


async def test_l7_a_ledger_whose_folder_is_gone_stops_sends_until_it_is_back(
    world: World, queue: str, tmp_path: Path
) -> None:
    folder = tmp_path / "ledger"
    options = LedgerOptions(on_error="stop", group_interval=timedelta(milliseconds=20))
    with Ledger(folder, options=options) as ledger:
        pair = await world.pair(ledger=ledger)
        sender = await world.sender(pair, queue)
        accepted = Counter[str]()

        async def accepts(name: str) -> bool:
            try:
                await world.send(sender, ServiceBusMessage(b"", message_id=name))
            except LedgerUnavailableError:
                return False
            accepted[name] += 1
            return True

        for number in range(5):
            assert await accepts(f"before-{number}")
        assert ledger.flush()
        shutil.rmtree(folder)
        async with asyncio.timeout(10):
            while await accepts("until the next flush"):
                pass
        for number in range(20):
            assert not await accepts(f"after-{number}")
        assert Counter(str(one.message_id) for one in await world.held(queue)) == accepted
        folder.mkdir()
        async with asyncio.timeout(10):
            while not await accepts("again"):  # noqa: ASYNC110 - a thread of the ledger makes it so
                await asyncio.sleep(0.05)
        await world.do(pair.close)
    sent = [one for one in operations(folder) if one.stage is Stage.SEND_PRIMARY and one.result == "ok"]
    gaps = [entry for entry in read_ledger(folder) if isinstance(entry, Gap)]
    assert "again" in {name for one in sent for name in one.ids}
    # Every accepted send is in the ledger, or is counted in a gap.
    assert len(sent) + sum(gap.count for gap in gaps) >= accepted.total()
    assert balance(read_ledger(folder)).incomplete
