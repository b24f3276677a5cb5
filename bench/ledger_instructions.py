"""What the ledger costs a paired sender, in instructions of the whole process, its writer's thread included: a figure
that a busy machine does not blur. Groups are as large as at full speed, which valgrind does not have: about a thousand.

Needs valgrind, and several minutes. Run: python bench/ledger_instructions.py [--kinds sync,aio]
[--durabilities process,lazy]
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal

from azure.servicebus import ServiceBusMessage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.pairing_instructions import BODY, CONFIG, QUEUE, instructions_of
from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.ledger import Ledger, LedgerOptions
from twinbus.testing import LocalNamespace

AIMS = {"process": 1.06, "lazy": 1.03}
# A group more in the one than in the other.
FEW, MANY = 100, 1100


def options(folder: str) -> SendAvailabilityOptions:
    """The ledger is in a folder that has the name of its durability."""
    slow = timedelta(minutes=1)
    durability: Literal["process", "lazy"] = "lazy" if Path(folder).name == "lazy" else "process"
    ledger = Ledger(folder, options=LedgerOptions(group_interval=slow, durability=durability)) if folder else None
    return SendAvailabilityOptions(provision="assume", ledger=ledger)


def send(messages: int, folder: str, primary: str, secondary: str) -> None:
    pair = pair_connection_strings(primary, secondary, options=options(folder))
    sender = pair.get_queue_sender(QUEUE)
    for _ in range(messages):
        sender.send_messages(ServiceBusMessage(BODY))
    if pair._state.ledger is not None:
        pair._state.ledger.flush()


async def send_aio(messages: int, folder: str, primary: str, secondary: str) -> None:
    pair = await aio.pair_connection_strings(primary, secondary, options=options(folder))
    sender = pair.get_queue_sender(QUEUE)
    for _ in range(messages):
        await sender.send_messages(ServiceBusMessage(BODY))
    if pair._state.ledger is not None:
        await pair._state.ledger.flushed()


def compare(kind: str, durabilities: Sequence[str], *strings: str) -> None:
    def instructions(folder: str) -> float:
        # Two lengths, so that starting and opening fall out.
        many, few = (instructions_of(__file__, kind, str(count), folder, *strings) for count in (MANY, FEW))
        return (many - few) / (MANY - FEW)

    off = instructions("")
    for durability in durabilities:
        with tempfile.TemporaryDirectory() as folder:
            on = instructions(str(Path(folder) / durability))
        verdict = "met" if on / off <= AIMS[durability] else "missed"
        print(
            f"{kind:5} without {off:9.0f}  with the ledger, {durability:7} {on:9.0f} instructions a message  "
            f"ratio {on / off:.4f}, aim ≤ {AIMS[durability]}: {verdict}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="sync,aio")
    parser.add_argument("--durabilities", default="process,lazy")
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        kind, messages, folder, *strings = given.run
        if kind == "aio":
            asyncio.run(send_aio(int(messages), folder, *strings))
        else:
            send(int(messages), folder, *strings)
        os._exit(0)  # What closing costs is not asked.
    with LocalNamespace("primary", memory=True, config=CONFIG) as primary, LocalNamespace("secondary") as secondary:
        for kind in given.kinds.split(","):
            compare(kind, given.durabilities.split(","), primary.connection_string, secondary.connection_string)


if __name__ == "__main__":
    main()
