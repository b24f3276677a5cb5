"""The cost of a paired sender compared with the bare SDK sender, in instructions. A busy machine does not change it.

Needs valgrind, and several minutes. Run: python bench/pairing_instructions.py [--kinds sync,aio]
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient

from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.testing import LocalNamespace

QUEUE = "orders"
CONFIG = {"namespaces": [{"name": "primary", "queues": [{"name": QUEUE}]}]}
BODY = b"x" * 1024
FEW, MANY = 100, 500
ASSUMED = SendAvailabilityOptions(provision="assume")


def send(paired: bool, messages: int, primary: str, secondary: str) -> None:
    client = ServiceBusClient.from_connection_string(primary)
    source = pair_connection_strings(primary, secondary, options=ASSUMED) if paired else client
    sender = source.get_queue_sender(QUEUE)
    for _ in range(messages):
        sender.send_messages(ServiceBusMessage(BODY))


async def send_aio(paired: bool, messages: int, primary: str, secondary: str) -> None:
    client = AioServiceBusClient.from_connection_string(primary)
    source = await aio.pair_connection_strings(primary, secondary, options=ASSUMED) if paired else client
    sender = source.get_queue_sender(QUEUE)
    for _ in range(messages):
        await sender.send_messages(ServiceBusMessage(BODY))
    os._exit(0)  # The cost of closing is left out.


def instructions_of(script: str, *run: str) -> int:
    """Return the instructions of one run of this script, in all its threads."""
    command = [
        "valgrind",
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        sys.executable,
        script,
        "--run",
        *run,
    ]
    told = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "1"}
    )
    found = re.search(r"Collected : (\d+)", told.stderr)
    assert found is not None, told.stderr
    return int(found[1])


def compare(kind: str, *strings: str) -> None:
    # Two lengths: the difference does not include starting and opening, which are the same in both.
    bare, paired = (
        (
            instructions_of(__file__, kind, shape, str(MANY), *strings)
            - instructions_of(__file__, kind, shape, str(FEW), *strings)
        )
        / (MANY - FEW)
        for shape in ("bare", "paired")
    )
    print(
        f"{kind:5} bare {bare:9.0f}  paired {paired:9.0f} instructions a message  ratio {paired / bare:.4f}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="sync,aio")
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        kind, shape, messages, *strings = given.run
        if kind == "aio":
            asyncio.run(send_aio(shape == "paired", int(messages), *strings))
        send(shape == "paired", int(messages), *strings)
        os._exit(0)
    with LocalNamespace("primary", memory=True, config=CONFIG) as primary, LocalNamespace("secondary") as secondary:
        for kind in given.kinds.split(","):
            compare(kind, primary.connection_string, secondary.connection_string)


if __name__ == "__main__":
    main()
