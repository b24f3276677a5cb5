"""Threads that share a sender, cancelled sends, forks: S13."""

import asyncio
import sys
from datetime import timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage

from twinbus import SendAvailabilityOptions, pair_connection_strings
from twinbus.testing import LocalNamespace

from .conftest import World, state_of


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


# Without retries, so that the parent's next send would fail if the child had closed its link.
SYNC = """
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


AIO = """
import asyncio, gc, os, sys
from azure.servicebus import ServiceBusMessage
from twinbus import PairForkedError, SendAvailabilityOptions
from twinbus.aio import pair_connection_strings

def sockets():
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return {name for name in map(os.readlink, filter(os.path.islink, links)) if name.startswith("socket:")}

options = SendAvailabilityOptions(backlog_queue_count=1, primary_name="aio-forks")

async def in_child(pair, direct, diverting):
    try:
        await direct.send_messages(ServiceBusMessage("y"))
    except PairForkedError:
        pass
    else:
        os._exit(1)
    for sender in (direct, diverting):
        await sender.close()
        await sender.__aexit__()
    await pair.primary.close()
    await pair.close()
    async with pair_connection_strings(*sys.argv[1:3], options=options) as again:
        await again.get_queue_sender(sys.argv[3]).send_messages(ServiceBusMessage("from the child"))
    gc.collect()

async def main():
    pair = await pair_connection_strings(*sys.argv[1:3], options=options, retry_total=0)
    direct, diverting = pair.get_queue_sender(sys.argv[3]), pair.get_queue_sender("elsewhere")
    pair.force_failover("elsewhere")
    for sender in (direct, diverting):
        await sender.send_messages(ServiceBusMessage("x"))
    before = sockets()
    child = os.fork()
    if child == 0:
        try:
            # This loop is the parent's too.
            asyncio.run(in_child(pair, direct, diverting))
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for sender in (direct, diverting):
        await asyncio.wait_for(sender.send_messages(ServiceBusMessage("from the parent")), 20)
    assert sockets() <= before, "another connection was opened"
    await pair.close()
    print("ok")

asyncio.run(main())
"""


@pytest.mark.parametrize("forking", [SYNC, AIO], ids=["sync", "aio"])
async def test_s13_the_child_of_a_fork_is_refused_and_may_pair_again_and_the_parent_goes_on(
    primary: LocalNamespace, secondary: LocalNamespace, queue: str, forking: str
) -> None:
    strings = primary.connection_string, secondary.connection_string
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", forking, *strings, queue, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        told, _ = await process.communicate()
    assert told == b"ok\n"
    assert len(await World("sync", primary, secondary).held(queue)) == 3
