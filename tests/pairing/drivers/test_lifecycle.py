"""How a pair starts, what its methods return, and how it ends: P1, P3, P6, P8, S3, S11, S13, G1, G3, C1 to C3."""

import asyncio
import gc
import os
import signal
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import MessagingEntityNotFoundError, ServiceBusError

from twinbus import (
    BacklogUnavailableError,
    PairClosedError,
    PairingRefusedError,
    ProvisioningError,
    SendAvailabilityOptions,
    aio,
    pair_namespaces,
)
from twinbus.backlog import FailureKind, backlog_queue_paths, failure_kind
from twinbus.connect import connect
from twinbus.pairing import Administration
from twinbus.pairing.findings import PrimaryFacts, SecondaryFacts, findings_of
from twinbus.pairing.inspection import differences, inspect_backlog
from twinbus.testing import LocalNamespace

from .conftest import KEY, World, clients, open_sockets, state_of

NOBODY = "Endpoint=sb://localhost:1;SharedAccessKeyName=a;SharedAccessKey=b;UseDevelopmentEmulator=true;"


# --- beginning -------------------------------------------------------------------------------------------------------


async def test_p1_clients_of_any_credential_are_paired_and_stay_the_callers(world: World, queue: str) -> None:
    primary, secondary = clients(world)
    make = aio.pair_namespaces if world.driver == "aio" else pair_namespaces
    options = SendAvailabilityOptions(backlog_queue_count=1, primary_name=f"clients-{world.driver}")
    pair = await world.do(make, primary, secondary, options=options)
    assert pair.backlog_queues == (f"clients-{world.driver}/x-servicebus-transfer/0",)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x"))
    assert (sender.entity_name, sender.fully_qualified_namespace) == (queue, f"localhost:{world.primary.port}")
    await world.do(pair.close)
    bare = primary.get_queue_sender(queue)
    await world.do(bare.send_messages, ServiceBusMessage("y"))
    assert len(await world.held(queue)) == 2
    for client in (primary, secondary):
        await world.do(client.close)


async def test_p1_bad_credentials_surface_from_pairing(world: World) -> None:
    wrong = world.secondary.connection_string.replace(KEY, "wrong")
    with pytest.raises(ProvisioningError):
        await world.pair(keywords={"strings": (world.primary.connection_string, wrong)})


async def test_p3_a_namespace_is_paired_once_and_never_with_itself_or_as_a_secondary(world: World) -> None:
    one, other = world.primary.connection_string, world.secondary.connection_string
    await world.pair()
    for strings in ((one, one), (one, other), (NOBODY, one), (other, NOBODY)):
        with pytest.raises(PairingRefusedError):
            await world.pair(keywords={"strings": strings})


async def test_p8_pairing_does_not_contact_the_primary_and_assume_contacts_nobody(world: World, queue: str) -> None:
    pair = await world.pair(provision="assume", keywords={"strings": (NOBODY, NOBODY.replace(":1;", ":2;"))})
    assert len(pair.backlog_queues) == 2
    assert state_of(pair, queue) == "unknown"


async def test_p1_p8_the_application_starts_while_the_secondary_is_away_and_the_queues_come_later(
    world: World, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.secondary.kill()
    with caplog.at_level("WARNING", "twinbus.pairing"):
        pair = await world.pair()
    assert pair.backlog_queues == ()
    assert [one for one in caplog.messages if one.startswith("secondary_unreachable")] == [
        f"secondary_unreachable secondary=localhost:{world.secondary.port} cause=connection_lost queues=2"
    ]
    heard: list[Any] = []
    pair.on("secondary_unreachable", heard.append)
    await world.until(lambda: [one.cause for one in heard] == [FailureKind.CONNECTION_LOST])
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("healthy"))
    await world.do(pair.force_failover, queue)
    with pytest.raises(BacklogUnavailableError):
        await world.send(sender, ServiceBusMessage("too early"))
    await asyncio.to_thread(world.secondary.start)
    await world.until(lambda: len(pair.backlog_queues) == 2, 20)
    await world.send(sender, ServiceBusMessage("in time"))


async def test_p1_a_silent_secondary_does_not_hold_up_the_start_of_an_application(
    world: World, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The pair is there before the first try has ended, at whose end `secondary_unreachable` is published."""
    os.kill(world.secondary.pid, signal.SIGSTOP)
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("healthy"))
    assert pair.backlog_queues == ()
    assert [one for one in caplog.messages if one.startswith(("secondary_unreachable", "backlog_queue_left"))] == []
    assert len(await world.held(queue)) == 1


async def test_p1_a_call_that_diverts_waits_for_a_slow_secondary(
    world: World, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(world.secondary.pid, signal.SIGSTOP)
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    diverting = asyncio.create_task(world.send(sender, ServiceBusMessage("x", message_id="waited")))
    await asyncio.wait([diverting], timeout=0.2)
    assert not diverting.done()
    os.kill(world.secondary.pid, signal.SIGCONT)
    await diverting
    await world.until(lambda: len(pair.backlog_queues) == 2)
    assert [one.message_id for one in await world.backlog(pair)] == ["waited"]
    assert [one for one in caplog.messages if one.startswith(("secondary_unreachable", "backlog_queue_"))] == []


async def test_p1_a_secondary_that_stays_silent_is_reported_and_diverting_raises(
    world: World, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(world.secondary.pid, signal.SIGSTOP)
    pair = await world.pair(try_timeout=timedelta(seconds=4))
    sender = await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    with pytest.raises(BacklogUnavailableError, match="timeout"):
        await world.send(sender, ServiceBusMessage("x"))
    reported = f"secondary_unreachable secondary=localhost:{world.secondary.port} cause=timeout queues=2"
    await world.until(lambda: [one for one in caplog.messages if one.startswith("secondary_unreachable")] == [reported])
    os.kill(world.secondary.pid, signal.SIGCONT)
    await world.until(lambda: len(pair.backlog_queues) == 2, 30)


async def test_p1_a_credential_that_a_slow_secondary_refuses_is_reported_loudly(
    world: World, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = world.secondary.connection_string.replace(KEY, "wrong")
    os.kill(world.secondary.pid, signal.SIGSTOP)
    pair = await world.pair(keywords={"strings": (world.primary.connection_string, wrong)})
    heard: list[Any] = []
    pair.on("secondary_unreachable", heard.append)
    os.kill(world.secondary.pid, signal.SIGCONT)
    await world.until(lambda: len(heard) == 1)
    assert heard[0].cause in {FailureKind.UNAUTHORIZED, FailureKind.AUTHENTICATION}
    (error,) = [one.getMessage() for one in caplog.records if one.levelname == "ERROR" and "no backlog" in one.message]
    assert "Give the secondary's credential the Manage right" in error
    sender = await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    with pytest.raises(BacklogUnavailableError):
        await world.send(sender, ServiceBusMessage("x"))


async def test_c3_closing_a_pair_does_not_wait_for_a_silent_secondary(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(world.secondary.pid, signal.SIGSTOP)
    heard: list[Any] = []
    pair = await world.pair()
    pair.on("secondary_unreachable", heard.append)
    await world.do(pair.close)
    if world.driver == "sync":
        # The request goes on in a thread that nobody waits for.
        assert [one for one in threading.enumerate() if one.name.startswith("twinbus-provision")]
    os.kill(world.secondary.pid, signal.SIGCONT)
    await world.until(lambda: not [one for one in threading.enumerate() if one.name.startswith("twinbus-provision")])
    assert heard == []


async def test_p1_raise_is_for_those_who_want_it(world: World) -> None:
    world.secondary.faults.set("refuse")
    with pytest.raises(ProvisioningError):
        await world.pair(on_secondary_down="raise", try_timeout=timedelta(seconds=2))


def _admin(namespace: LocalNamespace) -> Administration:
    return Administration.from_connection_string(namespace.connection_string)


async def test_p6_a_deleted_backlog_queue_is_made_again_by_a_running_pair(world: World, queue: str) -> None:
    pair = await world.pair(probation=timedelta(hours=1))
    heard: list[Any] = []
    pair.on("*", heard.append)
    sender = await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    both = pair.backlog_queues
    with _admin(world.secondary) as admin:
        for path in both:
            admin.request(admin.client.delete_queue, path)
    with pytest.raises(BacklogUnavailableError):
        await world.send(sender, ServiceBusMessage("kept"))
    await world.until(lambda: pair.backlog_queues == both)
    await world.send(sender, ServiceBusMessage("x", message_id="after"))
    assert [one.message_id for one in await world.backlog(pair)] == ["after"]
    with _admin(world.secondary) as admin:
        assert [differences(admin.request(admin.client.get_queue, path)) for path in both] == [(), ()]
    assert [one for one in heard if one.name == "backlog_queue_gone"] == []


@pytest.mark.parametrize("provision", ["assume", "create"])
async def test_p6_a_deleted_backlog_queue_that_cannot_be_made_again_is_reported(
    world: World, queue: str, provision: str
) -> None:
    name = f"gone-{provision}-{world.driver}"
    paths = backlog_queue_paths(name, 2)
    with _admin(world.secondary) as admin:
        admin.provision(paths, SendAvailabilityOptions())
        pair = await world.pair(primary_name=name, provision=provision)
        heard: list[Any] = []
        pair.on("backlog_queue_gone", heard.append)
        sender = await world.sender(pair, queue)
        await world.do(pair.force_failover, queue)
        for path in paths:
            admin.request(admin.client.delete_queue, path)
    world.secondary.faults.set("internal-error", points=["http"])
    with pytest.raises(BacklogUnavailableError):
        await world.send(sender, ServiceBusMessage("kept"))
    await world.until(lambda: len(heard) == 2)
    assert {one.queue for one in heard} == set(paths)
    said = {"assume": 'provision="assume"', "create": "internal"}[provision]
    assert all(said in one.cause for one in heard)


async def test_p6_a_backlog_queue_that_would_lose_messages_is_reported_at_pairing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"losing-{world.driver}"
    short, disabled = backlog_queue_paths(name, 2)
    with _admin(world.secondary) as admin:
        admin.request(
            admin.client.create_queue,
            short,
            default_message_time_to_live=timedelta(days=1),
            auto_delete_on_idle=timedelta(days=2),
        )
        admin.request(admin.client.create_queue, disabled, status="ReceiveDisabled")
        with caplog.at_level("WARNING", "twinbus.pairing"):
            pair = await world.pair(primary_name=name)
        heard: list[Any] = []
        pair.on("backlog_queue_unsafe", heard.append)
        await world.until(lambda: len(heard) == 3)
        assert set(pair.backlog_queues) == {short, disabled}
        reported = [one for one in caplog.messages if one.startswith("backlog_queue_unsafe")]
        inspection = inspect_backlog(admin, name, 2)
    said = [(short, "default_message_time_to_live"), (short, "auto_delete_on_idle"), (disabled, "status")]
    assert len(reported) == len(said)
    for line, (path, losing) in zip(reported, said, strict=True):
        assert f"queue={path} property={losing} " in line
    found = findings_of(PrimaryFacts("primary"), SecondaryFacts("secondary", inspection=inspection))
    unsafe = {(one.what, one.cause) for one in found if one.check == "queue_loses_messages"}
    lifetime = "default_message_time_to_live is 1 day, 0:00:00: messages that wait longer are removed."
    assert (f"{short} would lose messages.", lifetime) in unsafe
    assert [what for what, cause in unsafe if "ReceiveDisabled" in cause] == [f"{disabled} would lose messages."]


# --- while it lives --------------------------------------------------------------------------------------------------


async def test_s3_opening_entering_and_batching_do_not_fail_while_failed_over(world: World, queue: str) -> None:
    pair = await world.pair()
    await world.do(pair.force_failover, queue)
    world.primary.kill()
    sender = await world.sender(pair, queue)
    entered = await world.do(sender.__aenter__ if world.driver == "aio" else sender.__enter__)
    batch = await world.do(entered.create_message_batch, 1000)
    batch.add_message(ServiceBusMessage("x"))
    await world.send(entered, batch)
    assert len(await world.backlog(pair)) == 1
    await world.do(entered.close)


async def test_s3_opening_counts_like_a_send(world: World, queue: str) -> None:
    pair = await world.pair(failover_interval=timedelta(minutes=1), keywords={"retry_total": 0})
    world.primary.kill()
    sender = await world.sender(pair, queue)
    with pytest.raises(ServiceBusError):
        await world.do(sender.__aenter__ if world.driver == "aio" else sender.__enter__)
    assert state_of(pair, queue) == "failing"


async def test_s11_a_drill_emits_its_events_and_returns_the_entity(world: World, queue: str) -> None:
    pair = await world.pair()
    heard: list[Any] = []
    pair.on("failover_engaged", heard.append)
    pair.on("restored", heard.append)
    sender = await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    await world.send(sender, ServiceBusMessage("diverted"))
    await world.do(pair.force_restore, queue)
    await world.send(sender, ServiceBusMessage("direct"))
    await world.until(lambda: len(heard) == 2)
    assert [(one.name, one.entity) for one in heard] == [("failover_engaged", queue), ("restored", queue)]
    assert (heard[1].diverted, heard[1].forced) == (1, True)
    assert len(await world.held(queue)) == 1


async def test_s5_failover_is_the_entitys_alone(world: World, queue: str) -> None:
    pair = await world.pair()
    await world.do(pair.force_failover, queue.upper())
    beside, diverting = await world.sender(pair, "beside-it"), await world.sender(pair, queue)
    await world.send(beside, ServiceBusMessage("direct", message_id="beside"))
    await world.send(diverting, ServiceBusMessage("diverted"))
    assert "beside" in [one.message_id for one in await world.held("beside-it")]
    assert len(await world.backlog(pair)) == 1


async def test_s5_topics_and_their_subscriptions_are_served_alike(world: World) -> None:
    topic = f"topic-{('sync', 'aio').index(world.driver)}"
    pair = await world.pair()
    sender = pair.get_topic_sender(topic)
    await world.send(sender, ServiceBusMessage("direct", message_id="direct"))
    await world.do(pair.force_failover, topic)
    await world.send(sender, ServiceBusMessage("diverted", message_id="diverted"))
    receiver = pair.get_subscription_receiver(topic, "all", max_wait_time=5)
    assert [one.message_id for one in await world.do(receiver.receive_messages)] == ["direct"]
    assert [one.message_id for one in await world.backlog(pair)] == ["diverted"]
    await world.do(receiver.close)


async def test_what_is_no_message_is_refused_as_the_sdk_refuses_it(world: World, queue: str) -> None:
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    for wrong in ("text", 7, ["text"], {"unknown": 1}):
        with pytest.raises(TypeError):
            await world.send(sender, wrong)
    nothing: tuple[Any, ...] = ([], await world.do(sender.create_message_batch))
    for empty in nothing:
        await world.send(sender, empty)
    with pytest.raises(ValueError, match="timeout"):
        await world.send(sender, ServiceBusMessage("x"), timeout=0)
    await world.do(sender.close)
    with pytest.raises(ValueError, match="shutdown"):
        await world.send(sender, ServiceBusMessage("x"))
    assert await world.held(queue) == []


async def test_s2_an_entity_that_does_not_exist_is_named_after_one_try(world: World) -> None:
    pair = await world.pair(failover_interval=timedelta(0), keywords={"retry_total": 5, "retry_backoff_factor": 60})
    sender = await world.sender(pair, "nowhere")
    for call in (sender.send_messages, sender.schedule_messages):
        when = () if call == sender.send_messages else (datetime.now(UTC) + timedelta(hours=1),)
        with pytest.raises(MessagingEntityNotFoundError, match="create it, or correct the name") as refused:
            # A second try would start after a minute.
            await asyncio.wait_for(world.do(call, ServiceBusMessage("x"), *when), 30)
        assert f"no queue or topic 'nowhere' on localhost:{world.primary.port}" in str(refused.value)
        assert isinstance(refused.value.__cause__, ServiceBusError)
        assert failure_kind(refused.value) is FailureKind.ENTITY_NOT_FOUND
    assert state_of(pair, "nowhere") == "healthy"


@pytest.mark.parametrize("ping", ["message", "link"])
async def test_g1_g3_a_ping_restores_a_session_queue_and_nobody_sees_it(world: World, ping: str) -> None:
    entity = f"sessions-{('message', 'link').index(ping) * 2 + ('sync', 'aio').index(world.driver)}"
    pair = await world.pair(ping=ping, ping_interval=timedelta(seconds=1))
    await world.do(pair.force_failover, entity)
    await world.state(pair, entity, "on_trial")
    async with connect(world.primary.connection_string, timeout=10) as bus:
        assert await bus.management(entity).peek(0, 10) == []
    sender = await world.sender(pair, entity)
    await world.send(sender, ServiceBusMessage("x", session_id="s"))


async def test_s6_a_thousand_senders_share_the_links_to_the_backlog(world: World, queue: str) -> None:
    # Long enough that no queue leaves the rotation because a busy machine is slow with a thousand sends.
    pair = await world.pair(try_timeout=timedelta(minutes=5))
    await world.do(pair.force_failover, queue)
    senders = [pair.get_queue_sender(queue) for _ in range(1000)]
    before = open_sockets(world.secondary.port)
    if world.driver == "aio":
        await asyncio.gather(*(sender.send_messages(ServiceBusMessage("x")) for sender in senders))
    else:
        await asyncio.to_thread(lambda: [sender.send_messages(ServiceBusMessage("x")) for sender in senders])
    assert open_sockets(world.secondary.port) - before <= 2
    assert next(one.diverted for one in pair.entities()) == 1000


async def test_a_quiet_receiver_gives_nothing_while_the_primary_is_away(world: World, queue: str) -> None:
    pair = await world.pair(keywords={"retry_total": 0})
    loud = pair.get_queue_receiver(queue)
    quiet = pair.get_queue_receiver(queue, quiet_while_down=True)
    world.primary.kill()
    assert await world.do(quiet.receive_messages, max_wait_time=0.1) == []
    with pytest.raises(ServiceBusError):
        await world.do(loud.receive_messages, max_wait_time=0.1)


# --- ending ----------------------------------------------------------------------------------------------------------


async def test_c1_c3_a_closed_pair_refuses_sends_and_leaks_nothing_and_can_be_made_again(
    world: World, queue: str
) -> None:
    for _ in range(2):
        pair = await world.pair(ping_interval=timedelta(seconds=1))
        direct, diverting = await world.sender(pair, queue), await world.sender(pair, "nowhere")
        await world.send(direct, ServiceBusMessage("x"))
        await world.do(pair.force_failover, "nowhere")
        await world.send(diverting, ServiceBusMessage("x"))
        await world.do(pair.close)
        for sender in (direct, diverting):
            with pytest.raises(PairClosedError):
                await world.send(sender, ServiceBusMessage("refused"))
        with pytest.raises(PairClosedError):
            pair.get_queue_sender(queue)
        assert (pair.primary.state, pair.secondary.state) == ("closed", "closed")
    gc.collect()
    await world.until(lambda: open_sockets(world.primary.port) + open_sockets(world.secondary.port) == 0)
    await world.until(lambda: not [one for one in threading.enumerate() if one.name.startswith("twinbus")])
    if world.driver == "aio":
        assert [task for task in asyncio.all_tasks() if "twinbus/pairing" in str(task.get_coro())] == []
