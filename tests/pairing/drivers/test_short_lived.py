"""Processes that live for seconds, during an outage (S16): real processes, counted by what is in the backlog."""

import asyncio
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.tiers import budget
from twinbus.connect import connect
from twinbus.testing import LocalNamespace

PROCESSES = budget(3, 20)
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
