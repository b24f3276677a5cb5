"""The server's figures: traffic of the SDK and of twinbus.connect, durable batches against a bare SQLite loop, latency
against a bare fdatasync, memory and start with millions queued. Each says its aim.

    python bench/server.py [--quick] [--only traffic|batches|latency|deep] [--deep 2000000] [--json] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bare_server import BareServer
from bench.bare_sqlite import BareSqlite, some_rows
from bench.clients import BATCH, Client, ConnectClient, SdkClient
from bench.measuring import MIB, Figure, ProcessMeter, Samples, quantile, ratios, show, write_json
from bench.serving import Server, watched

BUSY_AIM: Final = 0.25
BATCHES_AIM: Final = 0.5
RSS_AIM: Final = 400.0
READY_EMPTY_AIM: Final = 1.0
READY_DEEP_AIM: Final = 3.0
FLOORS: Final = ("a thread writes and syncs each read, no AMQP", "a thread commits each read to bare SQLite, no AMQP")

NOTES: Final = (
    "Median of the repeats (lowest–highest), repeats interleaved. Messages of 1 KB, every one on disk before its"
    " acknowledgement. Client, server and its writer thread share the machine's cores.",
    "Server busy: its CPU time, all threads, as a share of the time that passed. A client that is far from 100 % itself"
    " was waiting: for the disk, or for a core that others had. Where others had it, the share is too low to be held"
    " against its aim: the CPU for a message and the floors under it say more.",
)


@dataclass(frozen=True, slots=True)
class Extent:
    """How long and how often to measure."""

    seconds: float
    repeats: int
    latencies: int
    deep: int


@dataclass(slots=True)
class Load:
    """The results of all repeats of one kind of traffic."""

    rate: Samples = field(default_factory=Samples)
    cpu: Samples = field(default_factory=Samples)
    busy: Samples = field(default_factory=Samples)
    client: Samples = field(default_factory=Samples)


def under_load(server: Server | BareServer, flood: Callable[[float], int], seconds: float, load: Load) -> None:
    own = ProcessMeter(os.getpid())
    cpu, client, before = server.meter.cpu_seconds(), own.cpu_seconds(), time.perf_counter()
    count = flood(seconds)
    passed = time.perf_counter() - before
    used = server.meter.cpu_seconds() - cpu
    load.rate.values.append(count / passed)
    load.cpu.values.append(used / count * 1e6)
    load.busy.values.append(used / passed)
    load.client.values.append((own.cpu_seconds() - client) / passed)


def traffic(folder: Path, extent: Extent) -> list[Figure]:
    """Sends and receives by the SDK and by our client."""
    kinds: dict[str, Callable[[Client], Callable[[float], int]]] = {
        "single sends, one by one": lambda client: client.send_singles,
        f"sends in batches of {BATCH}, one by one": lambda client: client.send_batches,
        "receive and complete": lambda client: client.receive_and_complete,
    }
    loads = {(kind, who): Load() for kind in kinds for who in ("SDK", "connect")}
    pipelined, floors = Load(), {kind: Load() for kind in FLOORS}
    with (
        Server(folder / "traffic") as server,
        BareServer("write", folder / "write") as writing,
        BareServer("sqlite", folder / "sqlite") as inserting,
        SdkClient(server.connection_string) as sdk,
        ConnectClient(server.connection_string) as ours,
    ):
        ours.fill("receives", 10_000)
        clients: dict[str, Client] = {"SDK": sdk, "connect": ours}
        for client in clients.values():  # attach
            for method in kinds.values():
                method(client)(0.2)
        for _ in range(extent.repeats):
            for kind, method in kinds.items():
                for who, client in clients.items():
                    if kind == "receive and complete":
                        ours.fill("receives", int(30_000 * extent.seconds) if who == "connect" else 5_000)
                    under_load(server, method(client), extent.seconds, loads[kind, who])
            under_load(server, ours.send_singles_pipelined, extent.seconds, pipelined)
            sdk_load = loads["single sends, one by one", "SDK"]
            think = sdk_load.client.values[-1] / sdk_load.rate.values[-1]
            for floor, bare in zip(floors.values(), (writing, inserting), strict=True):
                under_load(bare, partial(bare.exchange, think=think), extent.seconds, floor)
    figures = [Figure("Traffic of one client, messages a second:")]
    figures += [rates(kind, loads[kind, "connect"], loads[kind, "SDK"]) for kind in kinds]
    figures.append(
        Figure("single sends, connect, pipelined", _rate(pipelined.rate), values={"rate": pipelined.rate.values})
    )
    figures.append(Figure("Server CPU for a message, µs:"))
    figures += [costs(kind, loads[kind, "connect"], loads[kind, "SDK"]) for kind in kinds]
    figures.append(
        Figure("single sends, connect, pipelined", pipelined.cpu.told(), values={"cpu_us": pipelined.cpu.values})
    )
    figures += [floor_under(what, floors[what], loads["single sends, one by one", "SDK"]) for what in FLOORS]
    figures.append(Figure("Server busy while one SDK client goes flat out, share of a core:"))
    figures += [busy(kind, loads[kind, "SDK"]) for kind in kinds]
    return figures


def _rate(rate: Samples) -> str:
    return f"{rate.told()}/s"


def rates(kind: str, ours: Load, sdk: Load) -> Figure:
    return Figure(
        f"{kind}: connect, beside the SDK",
        _rate(ours.rate),
        f"SDK {_rate(sdk.rate)}",
        ratios(ours.rate, sdk.rate).told("{:.1f}"),
        values={"connect": ours.rate.values, "sdk": sdk.rate.values},
    )


def costs(kind: str, ours: Load, sdk: Load) -> Figure:
    return Figure(
        f"{kind}: connect, beside the SDK",
        ours.cpu.told(),
        f"SDK {sdk.cpu.told()}",
        ratios(ours.cpu, sdk.cpu).told("{:.2f}"),
        values={"connect_us": ours.cpu.values, "sdk_us": sdk.cpu.values},
    )


def floor_under(what: str, floor: Load, sdk: Load) -> Figure:
    return Figure(
        f"floor: {what}",
        f"{floor.cpu.told()}, busy {floor.busy.told('{:.0%}')}",
        f"SDK, single sends {sdk.cpu.told()}",
        ratios(sdk.cpu, floor.cpu).told("{:.2f}"),
        values={"floor_us": floor.cpu.values, "floor_busy": floor.busy.values, "sdk_us": sdk.cpu.values},
    )


def busy(kind: str, load: Load) -> Figure:
    return Figure(
        kind,
        load.busy.told("{:.0%}"),
        f"the client itself {load.client.told('{:.0%}')}",
        aim=f"< {BUSY_AIM:.0%}",
        met=load.busy.median < BUSY_AIM,
        values={"busy": load.busy.values, "client": load.client.values},
    )


def batches(folder: Path, extent: Extent) -> list[Figure]:
    """Durable batches, and a bare loop that inserts the same rows in groups as large as the server's."""
    ours, bare, groups = Samples(), Samples(), Samples()
    load = Load(ours)
    with Server(folder / "batches") as server, ConnectClient(server.connection_string) as client:
        client.send_batches_pipelined(0.5)
        for _ in range(extent.repeats):
            commits = server.commits()
            under_load(server, client.send_batches_pipelined, extent.seconds, load)
            commits = server.commits() - commits
            groups.values.append(ours.values[-1] * extent.seconds / commits)
            bare.values.append(insert(folder, round(groups.values[-1]), client.message_size, extent.seconds))
    found = ratios(ours, bare)
    return [
        Figure("Durable sends in batches against bare SQLite:"),
        Figure(
            f"batches of {BATCH}, connect, 16 in flight",
            _rate(ours),
            f"bare loop {_rate(bare)}",
            found.told("{:.2f}"),
            f"≥ {BATCHES_AIM}",
            found.median >= BATCHES_AIM,
            {"connect": ours.values, "bare": bare.values, "ratio": found.values},
        ),
        Figure("messages in one commit, in both", groups.told(), values={"group": groups.values}),
        Figure(
            "server CPU for a message, µs",
            load.cpu.told(),
            f"server busy {load.busy.told('{:.0%}')}, client {load.client.told('{:.0%}')}",
            values={"cpu_us": load.cpu.values, "busy": load.busy.values, "client": load.client.values},
        ),
    ]


def insert(folder: Path, group: int, size: int, seconds: float) -> float:
    """Rows a second of the bare loop."""
    rows = some_rows(group, size)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        bare = BareSqlite(Path(name) / "bare.db")
        count, before = 0, time.perf_counter()
        while time.perf_counter() < before + seconds:
            bare.commit(rows)
            count += group
        passed = time.perf_counter() - before
        bare.close()
    return count / passed


def latency(folder: Path, extent: Extent) -> list[Figure]:
    """One durable send after the other, and bare writes of the same size with an fdatasync each."""
    found: dict[str, list[list[float]]] = {"bare": [], "connect": [], "SDK": []}
    with (
        Server(folder / "latency") as server,
        SdkClient(server.connection_string) as sdk,
        ConnectClient(server.connection_string) as ours,
        (folder / "bare").open("w+b", buffering=0) as file,
    ):
        file.write(bytes(8 * MIB))
        os.fsync(file.fileno())
        sdk.send_latencies(20)
        ours.send_latencies(20)
        for _ in range(extent.repeats):
            found["bare"].append(write_latencies(file.fileno(), ours.message_size, extent.latencies))
            found["connect"].append(ours.send_latencies(extent.latencies))
            found["SDK"].append(sdk.send_latencies(extent.latencies))
    figures = [Figure("Latency of one durable send, ms:")]
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        told = {who: Samples([quantile(one, share) * 1000 for one in runs]) for who, runs in found.items()}
        figures += [
            Figure(
                f"{name}, {who}",
                told[who].told("{:.2f}"),
                f"bare write and fdatasync {told['bare'].told('{:.2f}')}",
                ratios(told[who], told["bare"]).told("{:.1f}"),
                values={who: told[who].values, "bare": told["bare"].values},
            )
            for who in ("connect", "SDK")
        ]
    return figures


def write_latencies(file: int, size: int, count: int) -> list[float]:
    """Time writes into a file that has its full size already, as SQLite's log has: the cheapest durable write."""
    data, found = os.urandom(size), []
    for index in range(count):
        before = time.perf_counter()
        os.pwrite(file, data, index % 1024 * 8192)
        os.fdatasync(file)
        found.append(time.perf_counter() - before)
    return found


def deep(folder: Path, extent: Extent) -> list[Figure]:
    """Starting and memory: empty, while it is filled through the server, full, and while it is drained."""
    ready: dict[str, Samples] = {name: Samples() for name in ("python", "first", "empty", "deep")}
    cpu = Samples()
    with Server(folder / "compiling"):
        pass
    for number in range(extent.repeats):
        before = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        ready["python"].values.append(time.perf_counter() - before)
        for name in ("first", "empty"):
            with Server(folder / f"empty-{number}") as server:
                ready[name].values.append(server.seconds_to_ready)
                cpu.values.append(server.cpu_seconds_to_ready)
    data = folder / "deep"
    with Server(data) as server, ConnectClient(server.connection_string) as client, watched(server) as filling:
        before = time.perf_counter()
        client.fill("deep", extent.deep)
        took = time.perf_counter() - before
    full = Samples()
    for _ in range(extent.repeats):
        with Server(data) as server:
            ready["deep"].values.append(server.seconds_to_ready)
            full.values.append(server.meter.rss_megabytes())
    with Server(data) as server, ConnectClient(server.connection_string) as client, watched(server) as draining:
        drained = client.drain("deep", extent.seconds * extent.repeats, extent.deep // 2)
    python = f"python -c pass {ready['python'].told('{:.2f}')}"
    return [
        Figure(f"Start and memory with {extent.deep:,} messages of 1 KB queued:"),
        _start("ready, first start: makes its certificates, s", ready["first"], python, READY_EMPTY_AIM),
        _start("ready, empty, s", ready["empty"], f"its CPU time {cpu.told('{:.2f}')}", READY_EMPTY_AIM),
        _start(
            f"ready, {extent.deep:,} queued, s", ready["deep"], f"empty {ready['empty'].told('{:.2f}')}", READY_DEEP_AIM
        ),
        _memory(f"RSS, highest while filled in {took:.0f} s, MB", max(filling.values)),
        _memory("RSS after a start, full, MB", max(full.values)),
        _memory(f"RSS, highest while {drained:,} are received and completed, MB", max(draining.values)),
    ]


def _start(what: str, seconds: Samples, beside: str, aim: float) -> Figure:
    told = seconds.told("{:.2f}")
    return Figure(what, told, beside, "", f"< {aim:g} s", seconds.median < aim, {"seconds": seconds.values})


def _memory(what: str, megabytes: float) -> Figure:
    return Figure(
        what, f"{megabytes:.0f}", "", "", f"< {RSS_AIM:.0f} MB", megabytes < RSS_AIM, {"megabytes": megabytes}
    )


PARTS: Final = {"traffic": traffic, "batches": batches, "latency": latency, "deep": deep}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short and rough")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--deep", type=int, default=None, help="messages queued for memory and start (2,000,000)")
    parser.add_argument("--json", action="store_true", help="values of every repeat, for programs")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    asked = parser.parse_args()
    full = Extent(seconds=3.0, repeats=5, latencies=400, deep=asked.deep or 2_000_000)
    quick = Extent(seconds=1.0, repeats=2, latencies=100, deep=asked.deep or 50_000)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="twinbus-bench-", dir=asked.folder) as name:
        for part in asked.only or PARTS:
            figures += PARTS[part](Path(name), quick if asked.quick else full)
    notes = (*NOTES, f"{os.cpu_count()} cores; load average {os.getloadavg()[0]:.1f} at the end.")
    if asked.json:
        write_json(figures, notes)
    else:
        show("twinbus serve", figures, notes)


if __name__ == "__main__":
    main()
