"""Processes that live for seconds, during an outage (S16): real processes, counted by what is in the backlog."""

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.tiers import budget
from twinbus.connect import connect
from twinbus.testing import LocalNamespace

PROCESSES = budget(3, 20)
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
import sys
from azure.servicebus import ServiceBusMessage
from twinbus import SendAvailabilityOptions, pair_connection_strings

primary, secondary, queue, number, name, state = sys.argv[1:]
options = SendAvailabilityOptions.for_short_lived_processes(
    backlog_queue_count=1, primary_name=name, state=state or None
)
heard = []
with pair_connection_strings(primary, secondary, options=options) as pair:
    pair.on("failover_taken_over", heard.append)
    with pair.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage("x", message_id=number))
print(len(heard))
"""


async def run(*arguments: str) -> tuple[str, str]:
    """Return what a job printed, and its errors if it failed."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", JOB, *arguments, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    printed, errors = await child.communicate()
    return printed.decode(), "" if child.returncode == 0 else errors.decode()


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
    name = f"jobs-{state or 'alone'}"
    place = str(tmp_path / "state") if state == "folder" else state
    common = (primary.connection_string, secondary.connection_string, queue)
    ended = [await run(*common, ids[0], name, place)]
    # Two at a time: the machine may have two processors.
    for first in range(1, PROCESSES, 2):
        ended += await asyncio.gather(*(run(*common, one, name, place) for one in ids[first : first + 2]))
    assert "".join(errors for _, errors in ended) == ""
    # With a state, only the first process had to find out by itself.
    assert [printed.strip() for printed, _ in ended] == ["0"] + ["1" if state else "0"] * (PROCESSES - 1)
    async with connect(secondary.connection_string, timeout=10) as bus:
        found = await bus.management(f"{name}/x-servicebus-transfer/0").peek(0, 100)
    assert Counter(one.message_id for one in found) == Counter(ids)
