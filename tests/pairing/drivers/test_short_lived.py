"""Processes that live for seconds, during an outage (S16): real processes, counted by what is in the backlog."""

import asyncio
import sys
from collections import Counter

from tests.tiers import budget
from twinbus.connect import connect
from twinbus.testing import LocalNamespace

PROCESSES = budget(3, 20)
JOB = """
import sys
from azure.servicebus import ServiceBusMessage
from twinbus import SendAvailabilityOptions, pair_connection_strings

primary, secondary, queue, number = sys.argv[1:]
options = SendAvailabilityOptions.for_short_lived_processes(backlog_queue_count=1, primary_name="jobs")
with pair_connection_strings(primary, secondary, options=options) as pair, pair.get_queue_sender(queue) as sender:
    sender.send_messages(ServiceBusMessage("x", message_id=number))
"""


async def run(*arguments: str) -> str:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", JOB, *arguments, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    _, errors = await child.communicate()
    return "" if child.returncode == 0 else errors.decode()


async def test_s16_every_message_of_short_lived_processes_during_an_outage_is_safe(
    primary: LocalNamespace, secondary: LocalNamespace, queue: str
) -> None:
    primary.kill()
    ids = [f"job {number}" for number in range(PROCESSES)]
    strings = (primary.connection_string, secondary.connection_string)
    failed: list[str] = []
    # Two at a time: the machine may have two processors.
    for first in range(0, PROCESSES, 2):
        failed += await asyncio.gather(*(run(*strings, queue, one) for one in ids[first : first + 2]))
    assert "".join(failed) == ""
    async with connect(secondary.connection_string, timeout=10) as bus:
        found = await bus.management("jobs/x-servicebus-transfer/0").peek(0, 100)
    assert Counter(one.message_id for one in found) == Counter(ids)
