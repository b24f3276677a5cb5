"""How a pair begins, is asked, and ends: P1, P3, P8, S3, S11, S13, G1, G3, C1 to C3."""

import asyncio
import gc
import os
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
from azure.core.credentials import AzureNamedKeyCredential
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient
from azure.servicebus.exceptions import ServiceBusError

from twinbus import (
    BacklogUnavailableError,
    PairClosedError,
    PairFaultedError,
    PairingRefusedError,
    ProvisioningError,
    SendAvailabilityOptions,
    aio,
    pair_connection_strings,
    pair_namespaces,
)
from twinbus.connect import connect
from twinbus.pairing.sides import OTHER_SIDE_SECONDS, OtherSideLostError
from twinbus.testing import LocalNamespace

from .conftest import ALL, KEY, World, state_of

NOBODY = "Endpoint=sb://localhost:1;SharedAccessKeyName=a;SharedAccessKey=b;UseDevelopmentEmulator=true;"
ASSUMED = SendAvailabilityOptions(provision="assume", backlog_queue_count=1)


def clients(world: World) -> list[Any]:
    made = AioServiceBusClient if world.driver == "aio" else ServiceBusClient
    credential = AzureNamedKeyCredential(ALL, KEY)
    return [
        made(f"localhost:{namespace.port}", credential, use_tls=False) for namespace in (world.primary, world.secondary)
    ]


def open_sockets(port: int) -> int:
    """Connections of this process to a port, as the kernel counts them."""
    wanted = f":{port:04X}"
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - links that vanish while they are listed
        try:
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - no file is behind it
        except OSError:
            continue
    found = 0
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(table, encoding="ascii") as lines:  # noqa: PTH123 - a table of the kernel's
            for line in list(lines)[1:]:
                fields = line.split()
                found += fields[2].endswith(wanted) and f"socket:[{fields[9]}]" in own
    return found


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


async def test_p8_the_application_starts_while_the_secondary_is_away_and_the_queues_come_later(
    world: World, queue: str
) -> None:
    world.secondary.kill()
    pair = await world.pair(on_secondary_down="background")
    assert pair.backlog_queues == ()
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("healthy"))
    await world.do(pair.force_failover, queue)
    with pytest.raises(BacklogUnavailableError):
        await world.send(sender, ServiceBusMessage("too early"))
    await asyncio.to_thread(world.secondary.start)
    await world.until(lambda: len(pair.backlog_queues) == 2, 20)
    await world.send(sender, ServiceBusMessage("in time"))


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
    beside, diverting = await world.sender(pair, "plain-79"), await world.sender(pair, queue)
    await world.send(beside, ServiceBusMessage("direct", message_id="beside"))
    await world.send(diverting, ServiceBusMessage("diverted"))
    assert "beside" in [one.message_id for one in await world.held("plain-79")]
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


@pytest.mark.parametrize("ping", ["message", "link"])
async def test_g1_g3_a_ping_restores_a_session_queue_and_nobody_sees_it(world: World, ping: str) -> None:
    entity = f"sessions-{('message', 'link').index(ping) * 2 + ('sync', 'aio').index(world.driver)}"
    pair = await world.pair(ping=ping, ping_interval=timedelta(seconds=1))
    await world.do(pair.force_failover, entity)
    await world.state(pair, entity, "healthy")
    async with connect(world.primary.connection_string, timeout=10) as bus:
        assert await bus.management(entity).peek(0, 10) == []
    sender = await world.sender(pair, entity)
    await world.send(sender, ServiceBusMessage("x", session_id="s"))


async def test_s6_a_thousand_senders_share_the_links_to_the_backlog(world: World, queue: str) -> None:
    # Whatever a busy machine takes for a thousand sends at once: none of the queues may leave for that.
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


async def test_c1_a_side_that_faults_refuses_with_its_cause(world: World, queue: str) -> None:
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    pair.primary.fault(RuntimeError("told to"))
    assert (pair.primary.state, pair.secondary.state) == ("faulted", "open")
    with pytest.raises(PairFaultedError, match="told to"):
        pair.get_queue_sender(queue)
    with pytest.raises(PairFaultedError, match="told to"):
        await world.send(sender, ServiceBusMessage("refused"))


async def test_c1_a_client_closed_behind_the_pairs_back_counts_as_closed(world: World, queue: str) -> None:
    primary, secondary = clients(world)
    make = aio.pair_namespaces if world.driver == "aio" else pair_namespaces
    pair = await world.do(make, primary, secondary, options=ASSUMED)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x"))
    await world.do(primary.close)
    with pytest.raises(PairClosedError):
        await world.send(sender, ServiceBusMessage("refused"))
    assert pair.primary.state == "closed"
    await world.do(pair.close)
    await world.do(secondary.close)


class RunningSyphon:
    state = "running"

    def start(self) -> None:
        self.state = "running"

    def stop(self) -> None:
        self.state = "stopped"

    def ended(self) -> None:
        assert self.state == "stopped"


async def test_c2_where_the_syphon_runs_the_side_left_open_faults_after_a_while(world: World) -> None:
    pair = await world.pair()
    pair.syphon = RunningSyphon()
    await world.do(pair.primary.close)
    assert pair.secondary.state == "open"
    await world.until(lambda: pair.secondary.state == "faulted", OTHER_SIDE_SECONDS + 5)
    assert isinstance(pair.secondary.cause, OtherSideLostError)
    assert pair.syphon.state == "stopped"


# --- S13 -------------------------------------------------------------------------------------------------------------


async def test_s13_a_sender_is_shared_by_threads_and_every_message_reported_safe_is_there(
    primary: LocalNamespace, secondary: LocalNamespace, queue: str
) -> None:
    options = SendAvailabilityOptions(
        backlog_queue_count=1,
        failover_interval=timedelta(0),
        try_timeout=timedelta(seconds=1),
        primary_name="threads",
    )
    safe: list[str] = []

    def work(sender: Any, number: int) -> None:
        for position in range(20):
            name = f"{number}-{position}"
            sender.send_messages(ServiceBusMessage("x", message_id=name))
            safe.append(name)
            if name == "0-10":
                primary.faults.set("black-hole")

    world = World("sync", primary, secondary)
    with pair_connection_strings(primary.connection_string, secondary.connection_string, options=options) as pair:
        sender = pair.get_queue_sender(queue)
        await asyncio.gather(*(asyncio.to_thread(work, sender, number) for number in range(8)))
        primary.faults.clear()
        found = {one.message_id for one in (*await world.held(queue), *await world.backlog(pair))}
        assert set(safe) <= found
        assert len(safe) == 160


async def test_s13_a_cancelled_send_is_over_and_the_next_one_works(
    primary: LocalNamespace, secondary: LocalNamespace, queue: str
) -> None:
    world = World("aio", primary, secondary)
    async with world.stack:
        pair = await world.pair(try_timeout=timedelta(seconds=30))
        sender = pair.get_queue_sender(queue)
        await sender.send_messages(ServiceBusMessage("x", message_id="before"))
        primary.faults.set("black-hole", entity=queue, points=["send"], count=1)
        sending = asyncio.create_task(sender.send_messages(ServiceBusMessage("x", message_id="cancelled")))
        await asyncio.wait([sending], timeout=0.2)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        primary.faults.clear()
        await sender.send_messages(ServiceBusMessage("x", message_id="after"))
        assert state_of(pair, queue) == "healthy"
        assert {"before", "after"} <= {one.message_id for one in await world.held(queue)}


# Without retries, so that a link which the child had cut would fail the parent's next send.
FORKING = """
import gc, os, sys
from azure.servicebus import ServiceBusMessage
from twinbus import PairForkedError, SendAvailabilityOptions, pair_connection_strings

def sockets():
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return {name for name in map(os.readlink, filter(os.path.islink, links)) if name.startswith("socket:")}

options = SendAvailabilityOptions(backlog_queue_count=1, primary_name="forks")
pair = pair_connection_strings(*sys.argv[1:3], options=options, retry_total=0)
direct, diverting = pair.get_queue_sender(sys.argv[3]), pair.get_queue_sender("elsewhere")
pair.force_failover("elsewhere")
for sender in (direct, diverting):
    sender.send_messages(ServiceBusMessage("x"))
before = sockets()
child = os.fork()
if child == 0:
    for call in (lambda: direct.send_messages(ServiceBusMessage("y")), lambda: pair.get_queue_sender("z")):
        try:
            call()
        except PairForkedError:
            continue
        os._exit(1)
    for sender in (direct, diverting):
        sender.close()
        sender.__exit__()
    pair.primary.close()
    pair.close()
    with pair_connection_strings(*sys.argv[1:3], options=options) as again:
        again.get_queue_sender(sys.argv[3]).send_messages(ServiceBusMessage("from the child"))
    del pair, direct, diverting, sender, call
    gc.collect()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for sender in (direct, diverting):
    sender.send_messages(ServiceBusMessage("from the parent"))
assert sockets() <= before, "another connection was opened"
pair.close()
print("ok")
"""


async def test_s13_the_child_of_a_fork_is_refused_and_may_pair_again_and_the_parent_goes_on(
    primary: LocalNamespace, secondary: LocalNamespace, queue: str
) -> None:
    strings = primary.connection_string, secondary.connection_string
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORKING, *strings, queue, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        told, _ = await process.communicate()
    assert told == b"ok\n"
    assert len(await World("sync", primary, secondary).held(queue)) == 3
