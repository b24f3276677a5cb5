"""The cost of checksums and of the commit counter (X2), compared with durable batches in the same run.

    python bench/checksums.py [--rounds 5] [--seconds 3] [--folder DIR]

All figures are CPU time, so a busy machine changes them little. Measured alone: the checksums of a batch of 100 rows of
1 KB with their counters, and one write of the commit counter. Compared with: the same batch sent to a server by the
official SDK and by twinbus.connect, one batch after the other, until it is acknowledged (CPU of the server, and of
server and client); and one commit of the same rows by the store alone. Reading: the checks of 256 rows compared with
loading them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bare_sqlite import some_rows
from bench.clients import BATCH, ConnectClient, SdkClient
from bench.serving import Server
from twinbus.namespace.engine.storage_protocol import NextRows, PutCounters, PutRow, QueueLane, Row
from twinbus.namespace.store import SqliteStore
from twinbus.namespace.store.checksums import Inventory, counters_crc, row_crc, row_key
from twinbus.namespace.store.commit_counter import CommitCounter

SIZE = 1_024
COMMITS = 60
PAGE = 256


def seconds(call: Callable[[], object], count: int) -> float:
    """Return the mean CPU seconds of one call, in all threads of this process."""
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count


def batch_seconds(server: Server, send: Callable[[float], int], length: float) -> tuple[float, float]:
    """Return the CPU seconds of one batch: of the server, and of server and client. Sends for `length` seconds."""
    served, own = server.meter.cpu_seconds(), time.process_time()
    batches = send(length) / BATCH
    served, own = server.meter.cpu_seconds() - served, time.process_time() - own
    return served / batches, (served + own) / batches


def own_work(rows: Sequence[Row], counter: CommitCounter, counters: PutCounters) -> None:
    """Do what a commit does only for the checksums and the counter."""
    keys = 0
    for row in rows:
        row_crc(row)
        keys += row_key(row.lane, row.seq)
    counters_crc(counters, Inventory(len(rows), keys), 1)
    counter.write(1)


def store_round(folder: Path) -> tuple[float, float, float, float]:
    """Return the CPU seconds of the own work of a batch, of a commit, of the checks of 256 rows, and of their load."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        counter = CommitCounter(Path(name) / "other", 1, 1)
        store = SqliteStore(Path(name) / "store.sqlite")
        store.open()
        rows = some_rows(BATCH * COMMITS, SIZE)
        batches = iter([rows[start : start + BATCH] for start in range(0, len(rows), BATCH)])
        counters = PutCounters(1, 1, 0, 0, 0, 0, 0, 0, 0)

        def commit() -> None:
            store.commit([*map(PutRow, next(batches)), counters])
            store.tidy()

        durable = seconds(commit, COMMITS)
        work = seconds(lambda: own_work(rows[:BATCH], counter, counters), 200)
        load = seconds(lambda: store.load(NextRows(1, QueueLane.ACTIVE, 0, PAGE, 1 << 30)), 100)
        checks = seconds(lambda: [row_crc(row) for row in rows[:PAGE]], 100)
        store.close()
        counter.close()
    return work, durable, checks, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    shares: dict[str, list[tuple[float, float]]] = {}
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as name,
        Server(Path(name) / "data") as server,
        SdkClient(server.connection_string) as sdk,
        ConnectClient(server.connection_string) as ours,
    ):
        for _ in range(options.rounds):
            work, durable, checks, load = store_round(options.folder)
            for client, send in (("the SDK", sdk.send_batches), ("twinbus.connect", ours.send_batches)):
                served, both = batch_seconds(server, send, options.seconds)
                shares.setdefault(f"a batch of 100 sent by {client}: the server", []).append((work, served))
                shares.setdefault(f"a batch of 100 sent by {client}: server and client", []).append((work, both))
            shares.setdefault("a commit of 100 rows, the store alone", []).append((work, durable))
            shares.setdefault("reading 256 rows, the store alone", []).append((checks, load))
    table = Table("compared with", "it takes, µs of CPU", "checksums, µs", "share (lowest to highest)")
    for what, found in shares.items():
        ratios = sorted(work / whole for work, whole in found)
        work, whole = (statistics.median(column) * 1e6 for column in zip(*found, strict=True))
        span = f"{statistics.median(ratios):.2%} ({ratios[0]:.2%} to {ratios[-1]:.2%})"
        table.add_row(what, f"{whole:,.0f}", f"{work:.0f}", span)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
