"""M1: kill -9 of a process that sends: its flushed entries are in the ledger."""

import asyncio
import subprocess
import sys
from pathlib import Path

from twinbus.ledger import balance, read_ledger

from .conftest import World

SENDING = """
import asyncio, sys
from azure.servicebus import ServiceBusMessage
from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.ledger import Ledger

primary, secondary, folder, queue, driver = sys.argv[1:]
ledger = Ledger(folder)
options = SendAvailabilityOptions(backlog_queue_count=1, ledger=ledger)

def tell(number):
    if number % 10 == 9:
        ledger.flush()
        print(number, flush=True)

def sync():
    sender = pair_connection_strings(primary, secondary, options=options).get_queue_sender(queue)
    for number in range(10**6):
        sender.send_messages(ServiceBusMessage(b"", message_id=f"m-{number}"))
        tell(number)

async def main():
    sender = (await aio.pair_connection_strings(primary, secondary, options=options)).get_queue_sender(queue)
    for number in range(10**6):
        await sender.send_messages(ServiceBusMessage(b"", message_id=f"m-{number}"))
        tell(number)

sync() if driver == "sync" else asyncio.run(main())
"""


async def test_m1_what_a_sender_had_flushed_survives_its_kill(world: World, queue: str, tmp_path: Path) -> None:
    strings = world.primary.connection_string, world.secondary.connection_string
    command = [sys.executable, "-c", SENDING, *strings, str(tmp_path), queue, world.driver]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 - it is read in threads
    assert child.stdout is not None
    lines = [await asyncio.to_thread(child.stdout.readline) for _ in range(3)]
    child.kill()
    rest = await asyncio.to_thread(child.stdout.read)
    await asyncio.to_thread(child.wait)
    flushed = int([*lines, *rest.splitlines()][-1])
    found = balance(read_ledger(tmp_path))
    assert {message.id for message in found.delivered} >= {f"m-{number}" for number in range(flushed + 1)}
    assert found.lost.total() == 0
    # Entries are in their file before an operation continues, so a killed process leaves no gap (L1).
    assert found.incomplete == []
