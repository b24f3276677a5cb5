"""Processes that live for seconds (S16): real processes, counted by what is in the backlog and on the primary."""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from azure.servicebus.aio import ServiceBusClient

from tests.tiers import budget
from twinbus.backlog import FailureKind, state_queue_path
from twinbus.connect import ReceivedMessage, connect
from twinbus.pairing.decide.known_state import FailoverRecord
from twinbus.pairing.state_folder import FolderState
from twinbus.pairing.state_queue import state_messages
from twinbus.testing import LocalNamespace

PROCESSES = budget(3, 20)
MOST_JOBS = 5
"""Jobs after which a failover has ended, if a ping is due. On a busy machine, a job may read the state too late."""
SENDS = {
    "sync": """
with pair_connection_strings(*sys.argv[1:3], options=options) as pair, pair.get_queue_sender(sys.argv[3]) as sender:
    sender.send_messages(ServiceBusMessage("x"))
""",
    "aio": """
async def main():
    async with aio.pair_connection_strings(*sys.argv[1:3], options=options) as pair:
        async with pair.get_queue_sender(sys.argv[3]) as sender:
            await sender.send_messages(ServiceBusMessage("x"))

asyncio.run(main())
""",
}
PATIENT = """
import asyncio, sys
from datetime import timedelta
from azure.servicebus import ServiceBusMessage
from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.pairing import administration

options = SendAvailabilityOptions(try_timeout=timedelta(minutes=5))
"""
WITHOUT_AIOHTTP = "administration.is_installed = lambda name: False\n"
JOB = """
import asyncio, sys
from datetime import timedelta
from azure.servicebus import ServiceBusMessage
from twinbus import SendAvailabilityOptions, aio, pair_connection_strings

driver, primary, secondary, queue, name, state, ping_interval, try_timeout, number = sys.argv[1:]
options = SendAvailabilityOptions.for_short_lived_processes(
    backlog_queue_count=1,
    primary_name=name,
    state=state or None,
    ping_interval=timedelta(seconds=float(ping_interval)),
    try_timeout=timedelta(seconds=float(try_timeout)),
)
heard = []

def sync():
    with pair_connection_strings(primary, secondary, options=options) as pair:
        pair.on("*", lambda event: heard.append(event.name))
        with pair.get_queue_sender(queue) as sender:
            sender.send_messages(ServiceBusMessage("x", message_id=number))

async def asyncio_job():
    async with aio.pair_connection_strings(primary, secondary, options=options) as pair:
        pair.on("*", lambda event: heard.append(event.name))
        async with pair.get_queue_sender(queue) as sender:
            await sender.send_messages(ServiceBusMessage("x", message_id=number))

sync() if driver == "sync" else asyncio.run(asyncio_job())
print(*heard)
"""


class Jobs:
    """Jobs that send one message each to the same queue, with the same options."""

    def __init__(
        self,
        namespaces: tuple[LocalNamespace, LocalNamespace],
        queue: str,
        state: str,
        *,
        driver: str = "sync",
        ping_interval: float = 60.0,
        try_timeout: float = 3.0,
    ) -> None:
        self.primary, self.secondary = namespaces
        self.queue = queue
        self.name = f"jobs-{driver}-{queue}"
        self._state = state
        strings = [one.connection_string for one in namespaces]
        self._arguments = (driver, *strings, queue, self.name, state, str(ping_interval), str(try_timeout))

    async def start(self, number: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", JOB, *self._arguments, number, stderr=pipe, stdout=pipe
        )

    async def run(self, number: str) -> list[str]:
        """Run a job, and return the names of its events."""
        child = await self.start(number)
        printed, errors = await child.communicate()
        assert child.returncode == 0, errors.decode()
        return printed.decode().split()

    async def share(self, record: FailoverRecord) -> None:
        """Write to the state as another process does."""
        if self._state != "secondary":
            FolderState(self._state, self.name).write([record])
            return
        strings = self.secondary.connection_string
        async with (
            ServiceBusClient.from_connection_string(strings) as client,
            client.get_queue_sender(state_queue_path(self.name)) as sender,
        ):
            await sender.send_messages(state_messages([record]))

    async def backlog(self) -> list[ReceivedMessage]:
        return await _peeked(self.secondary, f"{self.name}/x-servicebus-transfer/0")

    async def held(self) -> list[ReceivedMessage]:
        return await _peeked(self.primary, self.queue)


def due_ping(queue: str, interval: float) -> FailoverRecord:
    """Return the failover of a process that has ended, and whose next ping is due."""
    now = time.time()
    return FailoverRecord(queue, FailureKind.TIMEOUT, now - 9, now - 1, interval, 0, now - 9, "another")


async def _peeked(namespace: LocalNamespace, queue: str) -> list[ReceivedMessage]:
    async with connect(namespace.connection_string, timeout=10) as bus:
        return await bus.management(queue).peek(0, 100)


@pytest.mark.parametrize("driver", ["sync", "aio", "aio without aiohttp"])
async def test_p1_a_silent_secondary_keeps_no_process_from_ending(
    primary: LocalNamespace, secondary: LocalNamespace, queue: str, driver: str
) -> None:
    """The requests that have no answer would last for minutes."""
    os.kill(secondary.pid, signal.SIGSTOP)
    program = PATIENT + (WITHOUT_AIOHTTP if "without" in driver else "") + SENDS[driver.partition(" ")[0]]
    arguments = (primary.connection_string, secondary.connection_string, queue)
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *arguments)
    try:
        assert await asyncio.wait_for(child.wait(), 60) == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.parametrize(
    "state",
    [
        "folder",
        pytest.param("secondary", marks=pytest.mark.thorough),
        pytest.param("", marks=pytest.mark.thorough, id="no state"),
    ],
)
async def test_s16_every_message_of_short_lived_processes_during_an_outage_is_safe(
    primary: LocalNamespace, secondary: LocalNamespace, queue: str, state: str, tmp_path: Path
) -> None:
    primary.kill()
    ids = [f"job {number}" for number in range(PROCESSES)]
    jobs = Jobs((primary, secondary), queue, str(tmp_path / "state") if state == "folder" else state)
    heard = [await jobs.run(ids[0])]
    # Two at a time: the machine may have two processors.
    for first in range(1, PROCESSES, 2):
        heard += await asyncio.gather(*(jobs.run(one) for one in ids[first : first + 2]))
    # With a state, only the first process had to find out by itself.
    taken_over = ["failover_taken_over" in events for events in heard]
    assert taken_over == [False] + [bool(state)] * (PROCESSES - 1)
    assert Counter(one.message_id for one in await jobs.backlog()) == Counter(ids)


@pytest.mark.parametrize("state", ["folder", pytest.param("secondary", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("driver", ["sync", "aio"])
async def test_s16_short_lived_processes_return_to_the_primary_once_it_is_back(
    primary: LocalNamespace, secondary: LocalNamespace, queue: str, driver: str, state: str, tmp_path: Path
) -> None:
    place = str(tmp_path / "state") if state == "folder" else state
    jobs = Jobs((primary, secondary), queue, place, driver=driver)
    # It creates the state queue.
    await jobs.run("first")
    await jobs.share(due_ping(queue, 60.0))
    for number in range(MOST_JOBS):
        if "restored" in await jobs.run(str(number)):
            break
    else:
        pytest.fail(f"still failed over after {MOST_JOBS} jobs")
    assert "failover_engaged" not in await jobs.run("last")
    assert "last" in [one.message_id for one in await jobs.held()]


@pytest.mark.parametrize("driver", ["sync", "aio"])
async def test_s16_the_claim_of_a_process_that_is_killed_during_its_ping_ends_soon(
    primary: LocalNamespace, secondary: LocalNamespace, queue: str, driver: str, tmp_path: Path
) -> None:
    jobs = Jobs((primary, secondary), queue, str(tmp_path), driver=driver, ping_interval=1800.0, try_timeout=60.0)
    state = FolderState(tmp_path, jobs.name)
    await jobs.share(due_ping(queue, 1800.0))
    os.kill(primary.pid, signal.SIGSTOP)
    child = await jobs.start("killed")
    async with asyncio.timeout(60):
        while (claim := state.read().state.failovers[queue]).writer == "another":  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    child.kill()
    await child.communicate()
    assert state.read().state.failovers[queue] == claim
    # The longest time of a ping: 60 s, and 2 s for what follows it. Without the claim it was 30 minutes.
    assert claim.next_ping_at - claim.written_at == pytest.approx(62.0, abs=0.1)
