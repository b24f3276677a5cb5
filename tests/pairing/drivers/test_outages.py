"""Faults of a real primary, with the official SDK's senders: each has the consequence that its clause demands."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import (
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusAuthenticationError,
    ServiceBusError,
    ServiceBusServerBusyError,
)
from azure.servicebus.management import ServiceBusAdministrationClient

from twinbus import BacklogUnavailableError, PrimaryUnusableError
from twinbus.backlog import FailureKind, failure_kind
from twinbus.testing import LocalNamespace

from .conftest import ALL, BRIEF, KEY, World, config, set_stored_size, state_of

# try_timeout is 1 s; the rest is for a busy machine. Without our deadline the SDK takes minutes.
AT_ONCE = 8.0
BACKLOG_BYTES = 5120 * 1024 * 1024  # P5


@pytest.fixture(autouse=True)
def brief(world: World) -> None:
    world.try_timeout = BRIEF


def killed(primary: LocalNamespace, _: str) -> None:
    primary.kill()


def frozen(primary: LocalNamespace, _: str) -> None:
    os.kill(primary.pid, signal.SIGSTOP)


def black_holed(primary: LocalNamespace, _: str) -> None:
    primary.faults.set("black-hole")


def detached(primary: LocalNamespace, queue: str) -> None:
    primary.faults.set("detach", entity=queue)


def failing_inside(primary: LocalNamespace, queue: str) -> None:
    primary.faults.set("internal-error", entity=queue)


def disabled(primary: LocalNamespace, queue: str) -> None:
    _set_status(primary, queue, "Disabled")


def mend(primary: LocalNamespace, queue: str) -> None:
    if not primary.running:
        primary.start()
    os.kill(primary.pid, signal.SIGCONT)
    primary.faults.clear()
    _set_status(primary, queue, "Active")


def _set_status(primary: LocalNamespace, queue: str, status: str) -> None:
    with ServiceBusAdministrationClient.from_connection_string(primary.connection_string) as admin:
        found = admin.get_queue(queue, connection_verify=str(primary.ca))
        found.status = status
        admin.update_queue(found, connection_verify=str(primary.ca))


OUTAGES = [killed, frozen, black_holed, detached, failing_inside, disabled]


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda outage: outage.__name__)
async def test_s4_s5_s12_g2_the_failing_call_diverts_and_a_ping_brings_the_entity_back(
    world: World, queue: str, outage: Callable[[LocalNamespace, str], None]
) -> None:
    pair = await world.pair(ping_interval=timedelta(seconds=1))
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before", message_id="before"))
    await asyncio.to_thread(outage, world.primary, queue)
    async with asyncio.timeout(AT_ONCE):
        await world.send(sender, ServiceBusMessage("during", message_id="during"))
    assert [one.message_id for one in await world.backlog(pair)] == ["during"]
    assert state_of(pair, queue) == "failed_over"
    await asyncio.to_thread(mend, world.primary, queue)
    await world.state(pair, queue, "on_trial")
    await world.send(sender, ServiceBusMessage("after", message_id="after"))
    assert "after" in [one.message_id for one in await world.held(queue)]
    assert [one.message_id for one in await world.backlog(pair)] == ["during"]


async def test_s3_the_timer_fires_without_traffic_and_until_then_errors_reach_the_caller(
    world: World, queue: str
) -> None:
    pair = await world.pair(failover_interval=timedelta(seconds=0.5), keywords={"retry_total": 0})
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before"))
    world.primary.faults.set("internal-error", entity=queue)
    with pytest.raises(ServiceBusError):
        await world.send(sender, ServiceBusMessage("refused"))
    assert state_of(pair, queue) == "failing"
    await world.state(pair, queue, "failed_over")
    await world.send(sender, ServiceBusMessage("diverted", message_id="diverted"))
    assert [one.message_id for one in await world.backlog(pair)] == ["diverted"]


async def test_s3_a_success_stops_the_timer(world: World, queue: str) -> None:
    pair = await world.pair(failover_interval=timedelta(seconds=1), keywords={"retry_total": 0})
    sender = await world.sender(pair, queue)
    world.primary.faults.set("internal-error", entity=queue, points=["send"], count=1)
    with pytest.raises(ServiceBusError):
        await world.send(sender, ServiceBusMessage("refused"))
    await world.send(sender, ServiceBusMessage("taken"))
    assert state_of(pair, queue) == "healthy"


async def test_s2_server_busy_reaches_the_caller_and_never_fails_over(world: World, queue: str) -> None:
    pair = await world.pair(keywords={"retry_total": 0})
    sender = await world.sender(pair, queue)
    world.primary.faults.set("server-busy", entity=queue, points=["send"])
    with pytest.raises(ServiceBusServerBusyError):
        await world.send(sender, ServiceBusMessage("busy"))
    assert state_of(pair, queue) == "healthy"
    assert await world.backlog(pair) == []


async def test_s2_server_busy_that_lasts_fails_over_where_the_option_says_so(world: World, queue: str) -> None:
    pair = await world.pair(server_busy_counts_after=timedelta(seconds=1), keywords={"retry_total": 0})
    engaged: list[Any] = []
    pair.on("failover_engaged", engaged.append)
    sender = await world.sender(pair, queue)
    world.primary.faults.set("server-busy", entity=queue, points=["send"])
    with pytest.raises(ServiceBusServerBusyError):
        await world.send(sender, ServiceBusMessage("busy"))
    while True:
        try:
            await world.send(sender, ServiceBusMessage("busy", message_id="diverted"))
        except ServiceBusServerBusyError:
            assert state_of(pair, queue) == "healthy"
            continue
        break
    assert state_of(pair, queue) == "failed_over"
    assert [one.cause for one in engaged] == [FailureKind.SERVER_BUSY]
    assert [one.message_id for one in await world.backlog(pair)] == ["diverted"]
    world.primary.faults.clear()
    await world.do(pair.force_restore, queue)
    await world.send(sender, ServiceBusMessage("taken"))
    assert state_of(pair, queue) == "healthy"


async def test_s2_an_entity_that_is_not_there_reaches_the_caller(world: World) -> None:
    pair = await world.pair()
    sender = await world.sender(pair, "nowhere")
    with pytest.raises(MessagingEntityNotFoundError) as raised:
        await world.send(sender, ServiceBusMessage("lost"))
    # The SDK raises an authentication error: `$cbs` refuses the token with 404.
    assert isinstance(raised.value.__cause__, ServiceBusAuthenticationError)
    assert failure_kind(raised.value) is FailureKind.ENTITY_NOT_FOUND
    assert state_of(pair, "nowhere") == "healthy"


async def test_s2_a_revoked_key_reaches_the_caller(world: World, queue: str) -> None:
    wrong = world.primary.connection_string.replace(KEY, "revoked")
    assert ALL in wrong
    pair = await world.pair(keywords={"strings": (wrong, world.secondary.connection_string), "retry_total": 0})
    sender = await world.sender(pair, queue)
    with pytest.raises(ServiceBusAuthenticationError):
        await world.send(sender, ServiceBusMessage("refused"))
    assert state_of(pair, queue) == "healthy"


def _create(primary: LocalNamespace, queue: str) -> None:
    with ServiceBusAdministrationClient.from_connection_string(primary.connection_string) as admin:
        admin.create_queue(queue, connection_verify=str(primary.ca))


def _delete(primary: LocalNamespace, queue: str) -> None:
    with ServiceBusAdministrationClient.from_connection_string(primary.connection_string) as admin:
        admin.delete_queue(queue, connection_verify=str(primary.ca))


async def test_s2_an_entity_deleted_under_an_open_sender_reaches_the_caller_and_never_fails_over(world: World) -> None:
    queue = f"deleted-{world.driver}"
    await asyncio.to_thread(_create, world.primary, queue)
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before"))
    await asyncio.to_thread(_delete, world.primary, queue)
    for _ in range(2):
        with pytest.raises(MessagingEntityNotFoundError, match=queue) as raised:
            await world.send(sender, ServiceBusMessage("lost"))
        assert failure_kind(raised.value) is FailureKind.ENTITY_NOT_FOUND
        assert state_of(pair, queue) == "healthy"
    assert await world.backlog(pair) == []


async def test_g4_an_entity_deleted_while_failed_over_is_unusable_and_its_sends_still_divert(world: World) -> None:
    queue = f"deleted-while-failed-over-{world.driver}"
    await asyncio.to_thread(_create, world.primary, queue)
    pair = await world.pair(ping_interval=timedelta(seconds=1))
    heard: list[Any] = []
    pair.on("primary_unusable", heard.append)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before"))
    # The order is certain: no ping can restore an entity that is gone before the failover begins.
    await asyncio.to_thread(_delete, world.primary, queue)
    await world.do(pair.force_failover, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="failed over"))
    await world.state(pair, queue, "unusable")
    await world.send(sender, ServiceBusMessage("x", message_id="unusable"))
    assert {one.message_id for one in await world.backlog(pair)} == {"failed over", "unusable"}
    await world.until(lambda: bool(heard))
    assert next(one.cause for one in pair.entities()) is FailureKind.ENTITY_NOT_FOUND
    # Pings continue: one succeeds when the entity exists again.
    await asyncio.to_thread(_create, world.primary, queue)
    await world.state(pair, queue, "on_trial")


@pytest.mark.parametrize("on_unusable", ["divert", "raise"])
async def test_g4_a_ping_that_finds_the_entity_gone_makes_it_unusable_and_sends_divert_or_raise(
    world: World, on_unusable: str
) -> None:
    pair = await world.pair(on_unusable=on_unusable, ping_interval=timedelta(seconds=1))
    sender = await world.sender(pair, "gone")
    await world.do(pair.force_failover, "gone")
    await world.state(pair, "gone", "unusable")
    assert next(one.cause for one in pair.entities()) is FailureKind.ENTITY_NOT_FOUND
    if on_unusable == "divert":
        await world.send(sender, ServiceBusMessage("kept"))
        assert len(await world.backlog(pair)) == 1
    else:
        with pytest.raises(PrimaryUnusableError, match="gone"):
            await world.send(sender, ServiceBusMessage("refused"))


async def test_s6_a_queue_that_fails_leaves_for_all_senders(world: World, queue: str) -> None:
    pair = await world.pair(keywords={"retry_total": 0}, probation=timedelta(minutes=1))
    await world.do(pair.force_failover, queue)
    on: dict[str, list[Any]] = {name: [] for name in pair.backlog_queues}
    # Two of three senders use the same one of two queues.
    for number in range(3):
        sender = await world.sender(pair, queue)
        await world.send(sender, ServiceBusMessage("x", message_id=f"where-{number}"))
        on[await world.backlog_queue_of(on, f"where-{number}")].append(sender)
    bad, good = sorted(on, key=lambda name: len(on[name]), reverse=True)
    first, second = on[bad][:2]
    world.secondary.faults.set("internal-error", entity=bad)
    await world.send(first, ServiceBusMessage("x", message_id="found out"))
    assert pair.backlog_queues == (good,)
    # The queue accepts messages again, but also the sender that got no error from it does not use it.
    world.secondary.faults.clear()
    await world.send(second, ServiceBusMessage("x", message_id="was told"))
    assert [await world.backlog_queue_of(on, name) for name in ("found out", "was told")] == [good, good]


async def test_s6_a_queue_that_left_comes_back_after_its_probation_and_takes_messages(world: World, queue: str) -> None:
    pair = await world.pair(keywords={"retry_total": 0}, backlog_queue_count=1)
    sender = await world.sender(pair, queue)
    only = pair.backlog_queues
    heard: list[Any] = []
    pair.on("backlog_queue_left", heard.append)
    pair.on("backlog_queue_returned", heard.append)
    await world.do(pair.force_failover, queue)
    world.secondary.faults.set("internal-error", entity=only[0], points=["send"], count=1)
    with pytest.raises(BacklogUnavailableError):
        await world.send(sender, ServiceBusMessage("refused"))
    await world.until(lambda: len(heard) == 2)
    assert [one.name for one in heard] == ["backlog_queue_left", "backlog_queue_returned"]
    assert pair.backlog_queues == only
    await world.send(sender, ServiceBusMessage("taken", message_id="taken"))
    assert [one.message_id for one in await world.backlog(pair)] == ["taken"]


async def test_s6_none_left_raises_with_the_causes_and_the_message_stays_the_callers(world: World, queue: str) -> None:
    pair = await world.pair(keywords={"retry_total": 0}, probation=timedelta(minutes=1))
    sender = await world.sender(pair, queue)
    queues = pair.backlog_queues
    await world.do(pair.force_failover, queue)
    world.secondary.faults.set("internal-error")
    with pytest.raises(BacklogUnavailableError) as raised:
        await world.send(sender, ServiceBusMessage("kept"))
    assert {cause.queue for cause in raised.value.causes} == set(queues)
    assert {cause.kind for cause in raised.value.causes} == {FailureKind.INTERNAL}
    assert pair.backlog_queues == ()


async def test_s6_diverting_works_again_when_the_secondary_is_back_and_not_when_a_probation_ends(
    world: World, queue: str
) -> None:
    pair = await world.pair(probation=timedelta(hours=1), keywords={"retry_total": 0})
    sender, other = await world.sender(pair, queue), await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    world.secondary.faults.set("internal-error")
    with pytest.raises(BacklogUnavailableError):
        await world.send(sender, ServiceBusMessage("kept"))
    # A probe fails, and the call that waits for it raises with it.
    failed = await asyncio.gather(
        world.send(sender, ServiceBusMessage("kept")),
        world.send(other, ServiceBusMessage("kept")),
        return_exceptions=True,
    )
    assert [type(one) for one in failed] == [BacklogUnavailableError, BacklogUnavailableError]
    assert pair.backlog_queues == ()
    world.secondary.faults.clear()
    names = [f"after {number}" for number in range(8)]
    await asyncio.gather(
        *(world.send((sender, other)[n % 2], ServiceBusMessage("x", message_id=name)) for n, name in enumerate(names))
    )
    assert sorted(str(one.message_id) for one in await world.backlog(pair)) == names


async def test_s6_a_backlog_queue_that_takes_nothing_leaves_the_rotation_and_the_message_goes_to_another(
    world: World, queue: str
) -> None:
    pair = await world.pair(probation=timedelta(minutes=1))
    shut, other = pair.backlog_queues
    await asyncio.to_thread(_set_status, world.secondary, shut, "SendDisabled")
    await world.do(pair.force_failover, queue)
    # So many senders that very probably one of them picks the queue.
    for position in range(12):
        await world.send(await world.sender(pair, queue), ServiceBusMessage("x", message_id=str(position)))
    assert pair.backlog_queues == (other,)
    assert len(await world.backlog(pair)) == 12


async def test_s5_a_call_in_flight_that_fails_after_the_failover_diverts_and_succeeds(world: World, queue: str) -> None:
    pair = await world.pair(failover_interval=timedelta(minutes=1))
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before"))
    world.primary.faults.set("black-hole", entity=queue)
    flying = asyncio.create_task(world.send(sender, ServiceBusMessage("x", message_id="in flight")))
    await asyncio.wait([flying], timeout=0.2)
    await world.do(pair.force_failover, queue)
    await flying
    assert [one.message_id for one in await world.backlog(pair)] == ["in flight"]
    assert state_of(pair, queue) == "failed_over"


async def test_s2_s10_scheduling_that_is_thrown_off_again_and_again_diverts(world: World, queue: str) -> None:
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    world.primary.faults.set("detach", entity=queue, points=["request"])
    later = datetime.now(UTC) + timedelta(hours=1)
    async with asyncio.timeout(AT_ONCE):
        await world.do(sender.schedule_messages, ServiceBusMessage("x", message_id="later"), later)
    assert state_of(pair, queue) == "failed_over"
    assert [one.message_id for one in await world.backlog(pair)] == ["later"]


@pytest.mark.parametrize("call", ["send_messages", "create_message_batch", "schedule_messages", "open"])
async def test_s12_every_call_ends_on_a_port_that_accepts_and_says_nothing(world: World, queue: str, call: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = f"Endpoint=sb://localhost:{silent.getsockname()[1]};SharedAccessKeyName=a;SharedAccessKey=b;"
        strings = (f"{nobody}UseDevelopmentEmulator=true;", world.secondary.connection_string)
        pair = await world.pair(keywords={"strings": strings}, failover_interval=timedelta(minutes=1))
        sender = await world.sender(pair, queue)
        later = datetime.now(UTC) + timedelta(days=1)
        calls = {
            "send_messages": lambda: sender.send_messages(ServiceBusMessage("x")),
            "create_message_batch": sender.create_message_batch,
            "schedule_messages": lambda: sender.schedule_messages(ServiceBusMessage("x"), later),
            "open": sender.__aenter__ if world.driver == "aio" else sender.__enter__,
        }
        async with asyncio.timeout(AT_ONCE):
            with pytest.raises(OperationTimeoutError):
                await world.do(calls[call])
        assert state_of(pair, queue) == "failing"


async def test_s12_the_callers_own_time_out_is_kept_where_it_is_shorter(world: World, queue: str) -> None:
    pair = await world.pair(failover_interval=timedelta(minutes=1), try_timeout=timedelta(minutes=1))
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("before"))
    world.primary.faults.set("black-hole", entity=queue)
    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(OperationTimeoutError):
            await world.send(sender, ServiceBusMessage("x"), timeout=0.5)


@pytest.mark.thorough
async def test_s6_a_call_ends_though_queues_come_back_from_probation_while_it_tries_the_others(
    world: World, queue: str
) -> None:
    pair = await world.pair(backlog_queue_count=3, try_timeout=timedelta(seconds=1), probation=timedelta(seconds=1))
    sender = await world.sender(pair, queue)
    queues = pair.backlog_queues
    await world.do(pair.force_failover, queue)
    os.kill(world.secondary.pid, signal.SIGSTOP)
    with pytest.raises(BacklogUnavailableError) as raised:
        async with asyncio.timeout(2 * AT_ONCE):
            await world.send(sender, ServiceBusMessage("kept"))
    assert {cause.queue for cause in raised.value.causes} == set(queues)


def _fill(secondary: LocalNamespace, file: Path, queue: str) -> None:
    """Stop the namespace, set the queue's size in the store to its quota, and start the namespace.

    The queue is not really filled: the smallest quota is 1 GB, which would take minutes and disk space.
    """
    secondary.stop()
    set_stored_size(file, queue, BACKLOG_BYTES)
    secondary.start()


@pytest.mark.thorough
async def test_s6_a_backlog_queue_that_is_full_leaves_the_rotation_and_the_message_goes_to_another(
    world: World, queue: str, tmp_path: Path
) -> None:
    with LocalNamespace("filled", data=tmp_path, config=config("filled", 0)) as filled:
        world.secondary = filled
        # Time for a second try: the first try after the restart uses the broken connection.
        pair = await world.pair(probation=timedelta(minutes=1), try_timeout=timedelta(seconds=10))
        heard: list[Any] = []
        pair.on("backlog_queue_left", heard.append)
        sender = await world.sender(pair, queue)
        queues = pair.backlog_queues
        await world.do(pair.force_failover, queue)
        await world.send(sender, ServiceBusMessage("x", message_id="before"))
        # A sender stays with its queue, so its next message goes to this queue first.
        full = await world.backlog_queue_of(queues, "before")
        await asyncio.to_thread(_fill, filled, tmp_path / "filled.sqlite", full)
        await world.send(sender, ServiceBusMessage("x", message_id="after"))
        (other,) = pair.backlog_queues
        assert await world.backlog_queue_of(queues, "after") == other != full
        await world.until(lambda: bool(heard))
        assert [(one.queue, one.kind) for one in heard] == [(full, FailureKind.QUOTA_EXCEEDED)]
        await world.do(pair.close)
