"""What subscriptions and rules cost: messages published to 1, 10 and 100 subscriptions, with 10 SQL rules each or none.

python bench/topics.py [--quick] [--json] [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.clients import BATCH, BODY
from bench.measuring import Figure, Samples, ratios, show, write_json
from bench.server import Load, under_load
from bench.serving import Server
from twinbus.connect import Sender, connect, encode_message
from twinbus.message import Message

AIM: Final = 4.0
COUNTS: Final = (1, 10, 100)
RULES: Final = 10
_IN_FLIGHT: Final = 4

# Ten rules of shapes that applications have; the message is of color 9, size 100, region eu and label order.
_SHAPES: Final = (
    "color = '1' AND size > 1",
    "color = '2' AND size > 2",
    "color = '3' AND size > 3",
    "size > 500",
    "size + 1 = 50 OR size IS NULL",
    "region LIKE 'us%'",
    "customer IN ('x', 'y', 'z')",
    "sys.Label = 'bill'",
    "EXISTS(urgent) AND size < 10",
)
KINDS: Final = {
    "takes everything": (),
    "takes by the last of 10 rules": (*_SHAPES, "region = 'eu' AND size = 100"),
    "has 10 rules and takes nothing": (*_SHAPES, "region = 'eu' AND size = 99"),
}
MATCHING: Final = "takes by the last of 10 rules"

NOTES: Final = (
    f"Server CPU, all threads, for a message of 1 KB in batches of {BATCH}, {_IN_FLIGHT} batches in flight, each on"
    " disk before its acknowledgement. Median of the repeats (lowest–highest), repeats interleaved.",
    "Where a rule takes the message, each subscription stores a row of its own; the body is stored once. A rule's cost"
    " is what 10 of them add to a subscription that takes the message without, by 10; with it goes a share of the first"
    " look at the properties, which is made once for a message.",
)


def path(kind: str, count: int) -> str:
    return f"{kind.replace(' ', '-')}-{count}"


def topic(kind: str, count: int) -> dict[str, Any]:
    rules = [{"name": f"r{number}", "sql": text} for number, text in enumerate(KINDS[kind])]
    subscriptions = [{"name": f"s{number}", "rules": rules} for number in range(count)]
    return {"name": path(kind, count), "subscriptions": subscriptions}


class Publisher:
    """twinbus.connect, one connection, on a loop of its own."""

    def __init__(self, connection_string: str) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        properties = {"color": "9", "size": 100, "region": "eu", "customer": "a customer"}
        message = Message(BODY, message_id="m", subject="order", application_properties=properties)
        self._batch = [encode_message(message, int(time.time() * 1000))] * BATCH
        self._runner.run(self._open(connection_string))

    async def _open(self, connection_string: str) -> None:
        self._bus = connect(connection_string)
        self._senders = {(kind, count): await self._bus.sender(path(kind, count)) for kind in KINDS for count in COUNTS}

    def publish(self, kind: str, count: int, seconds: float) -> int:
        return self._runner.run(self._flood(self._senders[kind, count], seconds))

    async def _flood(self, sender: Sender, seconds: float) -> int:
        end = time.perf_counter() + seconds

        async def send() -> int:
            sent = 0
            while time.perf_counter() < end:
                await sender.send(self._batch)
                sent += BATCH
            return sent

        return sum(await asyncio.gather(*(send() for _ in range(_IN_FLIGHT))))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._bus.close())
        self._runner.close()


def measure(folder: Path, seconds: float, repeats: int) -> dict[tuple[str, int], Load]:
    loads = {(kind, count): Load() for kind in KINDS for count in COUNTS}
    topics = [topic(kind, count) for kind, count in loads]
    with Server(folder / "topics", topics) as server, Publisher(server.connection_string) as publisher:
        for kind, count in loads:
            publisher.publish(kind, count, 0.2)
        for _ in range(repeats):
            for (kind, count), load in loads.items():
                under_load(server, lambda span, k=kind, c=count: publisher.publish(k, c, span), seconds, load)  # type: ignore[misc]  # its defaults bind the loop's variables
    return loads


def figures_of(loads: dict[tuple[str, int], Load]) -> list[Figure]:
    figures = [Figure("Server CPU for a message, µs, by how many subscriptions the topic has:")]
    for kind in KINDS:
        one = loads[kind, 1].cpu
        for count in COUNTS:
            cpu = loads[kind, count].cpu
            ratio = ratios(cpu, one)
            aimed = count == 10 and kind == MATCHING
            figures.append(
                Figure(
                    f"{count}, each {kind}",
                    cpu.told(),
                    "" if count == 1 else f"one subscription {one.told()}",
                    "" if count == 1 else ratio.told("{:.1f}"),
                    f"< {AIM:g} times one" if aimed else "",
                    ratio.median < AIM if aimed else None,
                    values={"cpu_us": cpu.values, "rate": loads[kind, count].rate.values},
                )
            )
    figures.append(Figure("What one more of them costs a message, µs:"))
    for kind in KINDS:
        more = _each(loads[kind, 100].cpu, loads[kind, 1].cpu, 99)
        figures.append(Figure(f"a subscription that {kind}", more.told("{:.2f}"), values={"us": more.values}))
    for count in COUNTS:
        rule = _each(loads[MATCHING, count].cpu, loads["takes everything", count].cpu, RULES * count)
        what = f"a rule, of a topic with {count} subscriptions"
        figures.append(Figure(what, rule.told("{:.2f}"), values={"us": rule.values}))
    return figures


def _each(many: Samples, few: Samples, by: int) -> Samples:
    return Samples([(one - other) / by for one, other in zip(many.values, few.values, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short and rough")
    parser.add_argument("--json", action="store_true", help="values of every repeat, for programs")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="twinbus-bench-", dir=asked.folder) as name:
        loads = measure(Path(name), 1.0 if asked.quick else 2.0, 2 if asked.quick else 5)
    notes = (*NOTES, f"{os.cpu_count()} cores; load average {os.getloadavg()[0]:.1f} at the end.")
    figures = figures_of(loads)
    if asked.json:
        write_json(figures, notes)
    else:
        show("Topics", figures, notes)


if __name__ == "__main__":
    main()
