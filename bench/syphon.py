"""A backlog of 1 KB messages brought home, both ends durable: by our native pumps, with a ledger and without, over
WebSockets, through a proxy, by our pumps over the SDK, by a loop on azure-servicebus as one would write it, by a
RabbitMQ shovel where that is installed (`make bench-peers`). One after the other in each repeat, from fresh folders.

    python bench/syphon.py [--messages 200000] [--repeats 3] [--queues 1] [--only native …] [--growth] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from bench import shovel
from bench.measuring import Figure, ProcessMeter, Samples, ratios, show, write_json
from bench.serving import Server
from bench.shovel import Shovel
from tests import tinyproxy
from twinbus.backlog import PATH_PROPERTY, backlog_queue_paths
from twinbus.connect import connect, encode_message
from twinbus.message import Message

NATIVE, LEDGER, SDK, LOOP, SHOVEL = "native", "ledger", "sdk", "loop", "shovel"
WEBSOCKET, PROXY = "websocket", "proxy"
NAMES: Final = {
    NATIVE: "native pumps",
    LEDGER: "native pumps, every intent in a ledger and on disk before its send",
    WEBSOCKET: "native pumps over WebSockets",
    PROXY: "native pumps over WebSockets, through tinyproxy with credentials",
    SDK: "the same pumps over azure-servicebus (--transport sdk)",
    LOOP: "a loop on azure-servicebus: receive, send, complete",
    SHOVEL: "RabbitMQ shovel, on-confirm, prefetch 1000",
}
SHOVEL_AIM: Final = 5.0
LOOP_AIM: Final = 20.0
RSS_AIM: Final = 200.0
GROWTH_AIM: Final = 1.2
GROWTH: Final = (10_000, 100_000, 1_000_000)
SIZE: Final = 1024
PRIMARY: Final = "home"
HOME: Final = "orders"
_BATCH: Final = 100
_LANES: Final = 8
# The share of the messages that the loop gets: its rate does not depend on their number.
_LOOP_SHARE: Final = 50
_COMPLETED: Final = "complete_backlog"

NOTES: Final = (
    "Median of the repeats (lowest–highest), interleaved. Each began with fresh servers and a full backlog,"
    " every message on disk before it was acknowledged; what arrived was counted.",
    "Time counts from the first connection to the last confirmed completion. CPU for a message: who moves it, and both"
    " servers; RabbitMQ's broker is all three. The loop moved fewer messages; its rate stands for any number.",
)


@dataclass(frozen=True, slots=True)
class Drained:
    """One drain. `cpu` in seconds: the mover, the secondary, the primary."""

    messages: int
    seconds: float
    cpu: tuple[float, ...]
    rss: float = 0.0


@dataclass(slots=True)
class Runs:
    """The repeats of one mover."""

    rate: Samples = field(default_factory=Samples)
    cpu: Samples = field(default_factory=Samples)
    rss: Samples = field(default_factory=Samples)
    shares: list[Samples] = field(default_factory=list)

    def add(self, one: Drained) -> None:
        self.rate.values.append(one.messages / one.seconds)
        self.cpu.values.append(sum(one.cpu) / one.messages * 1e6)
        self.rss.values.append(one.rss)
        self.shares = self.shares or [Samples() for _ in one.cpu]
        for share, seconds in zip(self.shares, one.cpu, strict=True):
            share.values.append(seconds / one.messages * 1e6)


# --- the ground ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ground:
    """Two namespaces, and backlog queues on the second."""

    folder: Path
    primary: Server
    secondary: Server
    queues: Sequence[str]

    def cpu_seconds(self) -> tuple[float, float]:
        return self.secondary.meter.cpu_seconds(), self.primary.meter.cpu_seconds()

    def check(self, count: int) -> None:
        arrived, left = self.primary.held(HOME), sum(map(self.secondary.held, self.queues))
        if (arrived, left) != (count, 0):
            raise RuntimeError(f"{arrived} of {count} messages arrived, {left} are in the backlog still")


@contextmanager
def ground(folder: Path, queues: int, count: int) -> Iterator[Ground]:
    """Yield two namespaces with this number of messages in the backlog."""
    paths = backlog_queue_paths(PRIMARY, queues)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        here = Path(name)
        with (
            Server(here / "primary", queues=[HOME]) as primary,
            Server(here / "secondary", queues=paths) as secondary,
        ):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(fill(secondary.connection_string, paths, count))
            yield Ground(here, primary, secondary, paths)


async def fill(connection_string: str, queues: Sequence[str], count: int) -> None:
    """Fill the backlog as paired senders do: each message has an id and the alias of its destination."""
    some_id = str(uuid.uuid4())
    message = Message(
        os.urandom(SIZE), message_id=some_id, application_properties={"kind": "order", PATH_PROPERTY: HOME}
    )
    before, _, after = encode_message(message, int(time.time() * 1000)).partition(some_id.encode())
    async with connect(connection_string) as bus:
        senders = [await bus.sender(queue) for queue in queues]
        batches = iter(range(0, count, _BATCH))

        async def lane() -> None:
            for first in batches:
                ids = (str(uuid.uuid4()).encode() for _ in range(min(_BATCH, count - first)))
                await senders[first // _BATCH % len(senders)].send([before + one + after for one in ids])

        await asyncio.gather(*(lane() for _ in range(_LANES)))


# --- who moves it ----------------------------------------------------------------------------------------------------


def syphon(at: Ground, count: int, *options: str) -> Drained:
    """Run `twinbus syphon --drain` as a user does. Its output shows when it started and its progress."""
    command = [sys.executable, "-m", "twinbus", "syphon", "--drain", "--json", "--every", "0.1"]
    ends = ["--primary", at.primary.connection_string, "--secondary", at.secondary.connection_string]
    process = subprocess.Popen(
        [*command, *ends, "--primary-name", PRIMARY, *options], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    meter, rss = ProcessMeter(process.pid), 0.0
    before: tuple[float, ...] | None = None
    drained: Drained | None = None
    for line in process.stdout:
        told = json.loads(line)
        cpu = (meter.cpu_seconds(), *at.cpu_seconds())
        if told["ended"]:
            break
        rss = max(rss, meter.peak_rss_megabytes())
        before = before or cpu
        if drained is None and told["operations"].get(_COMPLETED, 0) >= count:
            used = tuple(now - then for now, then in zip(cpu, before, strict=True))
            drained = Drained(count, told["seconds"], used)
    process.stdout.close()
    if process.wait() != 0 or drained is None:
        raise RuntimeError(f"the syphon ended with {process.returncode}")
    return Drained(count, drained.seconds, drained.cpu, rss)


def straightforward(at: Ground, count: int) -> Drained:
    """A loop as a user without a syphon would write it."""
    own = ProcessMeter(os.getpid())
    with (
        ServiceBusClient.from_connection_string(at.secondary.connection_string) as secondary,
        ServiceBusClient.from_connection_string(at.primary.connection_string) as primary,
        secondary.get_queue_receiver(at.queues[0]) as receiver,
        primary.get_queue_sender(HOME) as sender,
    ):
        before, began, left = (own.cpu_seconds(), *at.cpu_seconds()), time.perf_counter(), count
        while left:
            for message in receiver.receive_messages(max_message_count=_BATCH, max_wait_time=5):
                properties = dict(message.application_properties or {})
                properties.pop(PATH_PROPERTY.encode(), None)
                copy = ServiceBusMessage(
                    b"".join(message.body), application_properties=properties, message_id=message.message_id
                )
                sender.send_messages(copy)
                receiver.complete_message(message)
                left -= 1
        took = time.perf_counter() - began
        cpu = (own.cpu_seconds(), *at.cpu_seconds())
    return Drained(count, took, tuple(now - then for now, then in zip(cpu, before, strict=True)))


def shoveled(broker: Shovel, count: int) -> Drained:
    broker.fill(count, SIZE)
    before = broker.meter.cpu_seconds()
    took = broker.drain(count)
    return Drained(count, took, (broker.meter.cpu_seconds() - before,))


def drain(who: str, folder: Path, queues: int, count: int) -> Drained:
    if who == SHOVEL:
        with tempfile.TemporaryDirectory(dir=folder) as name, Shovel(Path(name) / "rabbitmq") as broker:
            return shoveled(broker, count)
    count = max(count // _LOOP_SHARE, _BATCH) if who == LOOP else count
    with ground(folder, 1 if who == LOOP else queues, count) as at:
        match who:
            case "native":
                found = syphon(at, count)
            case "ledger":
                found = syphon(at, count, "--ledger", str(at.folder / "ledger"))
            case "websocket":
                found = syphon(at, count, "--transport-type", "websocket")
            case "proxy":
                with tinyproxy.running(at.folder, username="twin", password="sesame") as proxy:
                    os.environ["TWINBUS_PROXY_CREDENTIALS"] = "twin:sesame"
                    found = syphon(at, count, "--proxy", proxy.url)
            case "sdk":
                found = syphon(at, count, "--transport", "sdk")
            case _:
                found = straightforward(at, count)
        at.check(count)
    return found


# --- figures ---------------------------------------------------------------------------------------------------------


def compare(folder: Path, asked: argparse.Namespace) -> list[Figure]:
    who = [one for one in NAMES if not asked.only or one in asked.only or one == NATIVE]
    if not shovel.installed():
        who = [one for one in who if one != SHOVEL]
    if shutil.which("tinyproxy") is None:
        who = [one for one in who if one != PROXY]
    runs = {one: Runs() for one in who}
    for _ in range(asked.repeats):
        for one, found in runs.items():
            found.add(drain(one, folder, asked.queues, asked.messages))
    figures = [
        Figure(f"{asked.messages:,} messages of {SIZE} bytes, {asked.queues} backlog queue(s), messages a second:")
    ]
    figures += [_rate(one, found, runs[NATIVE]) for one, found in runs.items()]
    figures.append(Figure("CPU for a message, µs, mover + secondary + primary:"))
    figures += [_cpu(one, found, runs[NATIVE]) for one, found in runs.items()]
    figures.append(Figure("Memory of the process that moves, highest, MB:"))
    figures += [_memory(NAMES[one], runs[one].rss) for one in (NATIVE, LEDGER, WEBSOCKET, PROXY, SDK) if one in runs]
    return figures


def _rate(who: str, found: Runs, native: Runs) -> Figure:
    values = {"rate": found.rate.values}
    if who == NATIVE:
        return Figure(NAMES[who], found.rate.told(), values=values)
    aim = {SHOVEL: SHOVEL_AIM, LOOP: LOOP_AIM}.get(who)
    times = ratios(native.rate, found.rate)
    return Figure(
        NAMES[who],
        found.rate.told(),
        f"native {native.rate.told()}",
        times.told("{:.1f}"),
        "" if aim is None else f"native ≥ {aim:g} ×",
        None if aim is None else times.median >= aim,
        {**values, "native_times": times.values},
    )


def _cpu(who: str, found: Runs, native: Runs) -> Figure:
    shares = " + ".join(f"{share.median:.0f}" for share in found.shares)
    ratio = "" if who == NATIVE else ratios(native.cpu, found.cpu).told("{:.2f}")
    values = {"cpu_us": found.cpu.values, "shares_us": [share.values for share in found.shares]}
    return Figure(NAMES[who], found.cpu.told(), shares if len(found.shares) > 1 else "", ratio, values=values)


def _memory(what: str, rss: Samples) -> Figure:
    highest = max(rss.values)
    return Figure(what, rss.told(), "", "", f"< {RSS_AIM:.0f} MB", highest < RSS_AIM, {"rss_megabytes": rss.values})


def growth(folder: Path, asked: argparse.Namespace) -> list[Figure]:
    """Move backlogs ten and a hundred times as long. The growth is linear if the cost of a message stays the same."""
    runs = {count: Runs() for count in GROWTH}
    for _ in range(asked.repeats):
        for count, found in runs.items():
            found.add(drain(NATIVE, folder, asked.queues, count))
    least = runs[GROWTH[0]]
    figures = [Figure("Growth of the backlog, native pumps; CPU for a message, µs, all three processes:")]
    for count, found in runs.items():
        times = ratios(found.cpu, least.cpu)
        first = count == GROWTH[0]
        figures.append(
            Figure(
                f"{count:,} messages",
                found.cpu.told(),
                f"{found.rate.told()}/s",
                "" if first else times.told("{:.2f}"),
                "" if first else f"≤ {GROWTH_AIM} × that of {GROWTH[0]:,}",
                None if first else times.median <= GROWTH_AIM,
                {"cpu_us": found.cpu.values, "rate": found.rate.values},
            )
        )
    figures.append(Figure("Memory of the syphon, highest, MB:"))
    figures += [_memory(f"{count:,} messages", found.rss) for count, found in runs.items()]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--queues", type=int, default=1, help="backlog queues that hold them; the shovel has one")
    parser.add_argument("--only", choices=NAMES, action="append", help="beside the native pumps; may be repeated")
    parser.add_argument("--growth", action="store_true", help=f"native pumps alone, {GROWTH[0]:,} to {GROWTH[-1]:,}")
    parser.add_argument("--json", action="store_true", help="values of every repeat, for programs")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="twinbus-bench-", dir=asked.folder) as name:
        figures = (growth if asked.growth else compare)(Path(name), asked)
    loads = (
        f"{os.cpu_count()} cores for all; load average {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end."
    )
    without = () if shovel.installed() or asked.growth else ("No RabbitMQ here: `make bench-peers` installs it.",)
    notes = (*NOTES, *without, loads)
    if asked.json:
        write_json(figures, notes)
    else:
        show("twinbus syphon", figures, notes)


if __name__ == "__main__":
    main()
