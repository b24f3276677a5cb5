"""The store's figures: commits against a bare SQLite loop in the same run, with a quiet and with a busy interpreter;
opening, memory and purging with two million messages. Prints a small table.

    python bench/store.py [--messages 2000000] [--rounds 5] [--folder DIR]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bare_sqlite import BareSqlite, some_rows
from twinbus.namespace.engine.storage_protocol import (
    DropEntity,
    DropRow,
    NextRows,
    PutCounters,
    PutEntity,
    PutRow,
    QueueLane,
    Row,
    StoreWrite,
)
from twinbus.namespace.store import SqliteStore

SIZE = 1_024
GROUPS = {1: 600, 100: 20_000, 256: 40_960}
BUSY_GROUPS = {1: 60, 100: 2_000, 256: 5_120}
WINDOW = (256, 256 * 1_024)


@contextmanager
def busy_interpreter(on: bool) -> Iterator[None]:
    """Run Python code in another thread without a pause, as an event loop under full load does."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin)
    if on:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if on:
            thread.join()


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def groups_of(rows: list[Row], group: int) -> list[list[Row]]:
    return [rows[start : start + group] for start in range(0, len(rows), group)]


def counters(next_seq: int, depth: int) -> PutCounters:
    return PutCounters(1, next_seq, depth, 0, 0, 0, 0, depth * SIZE, 1_790_000_000_000)


def one_round(folder: Path, group: int, total: int, busy: bool) -> tuple[float, float, float, float]:
    """Rows per second: bare inserts, the store's puts, loads and drops."""
    rows = groups_of(some_rows(total, SIZE), group)
    with tempfile.TemporaryDirectory(dir=folder) as name, busy_interpreter(busy):
        bare = BareSqlite(Path(name) / "bare.db")
        peer = timed(lambda: insert(bare, rows))
        bare.close()
        store = SqliteStore(Path(name) / "store.db")
        store.open()
        store.commit([PutEntity(1, "queue", "bench", "{}", 1, 1)])
        puts: list[list[StoreWrite]] = [[*map(PutRow, part), counters(part[-1].seq + 1, part[-1].seq)] for part in rows]
        drops: list[list[StoreWrite]] = [
            [*(DropRow(1, QueueLane.ACTIVE, row.seq) for row in part), counters(total + 1, total)] for part in rows
        ]
        put = timed(lambda: commit(store, puts))
        loaded = timed(lambda: load(store))
        dropped = timed(lambda: commit(store, drops))
        store.close()
    return total / peer, total / put, total / loaded, total / dropped


def insert(bare: BareSqlite, parts: list[list[Row]]) -> None:
    for part in parts:
        bare.commit(part)


def commit(store: SqliteStore, parts: Sequence[Sequence[StoreWrite]]) -> None:
    for part in parts:
        store.commit(part)
        store.tidy()


def load(store: SqliteStore) -> None:
    after = 0
    while found := store.load(NextRows(1, QueueLane.ACTIVE, after, *WINDOW)):
        after = found[-1].seq


def commits(folder: Path, rounds: int) -> Table:
    table = Table(title=f"rows of {SIZE} bytes a second (median of {rounds} rounds, interleaved)")
    for heading in (
        "interpreter",
        "rows in a commit",
        "bare insert",
        "put",
        "put/bare (lowest to highest)",
        "load",
        "drop",
    ):
        table.add_column(heading, justify="right")
    for busy, sizes in ((False, GROUPS), (True, BUSY_GROUPS)):
        results: dict[int, list[tuple[float, float, float, float]]] = {group: [] for group in sizes}
        for _ in range(rounds):
            for group, total in sizes.items():
                results[group].append(one_round(folder, group, total, busy))
        for group, found in results.items():
            bare, put, loaded, dropped = (statistics.median(column) for column in zip(*found, strict=True))
            ratios = sorted(result[1] / result[0] for result in found)
            table.add_row(
                "busy" if busy else "quiet",
                str(group),
                f"{bare:,.0f}",
                f"{put:,.0f}",
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                f"{loaded:,.0f}",
                f"{dropped:,.0f}",
            )
    return table


def fill(path: Path, messages: int) -> None:
    """Fill a store with many messages, in a few large commits."""
    store = SqliteStore(path)
    store.open()
    store.commit([PutEntity(1, "queue", "deep", "{}", 1, 1)])
    for start in range(1, messages + 1, 50_000):
        rows = some_rows(min(50_000, messages + 1 - start), SIZE, start)
        store.commit([*map(PutRow, rows), counters(start + len(rows), start + len(rows) - 1)])
        store.tidy()
    store.close()


OPEN_DEEP = """
import resource, sys, time
from pathlib import Path
from twinbus.namespace.engine.storage_protocol import NextRows
from twinbus.namespace.store.sqlite import SqliteStore
def rss():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024
before = rss()
start = time.perf_counter()
store = SqliteStore(Path(sys.argv[1]))
opened = store.open()
took = time.perf_counter() - start
after = 0
for _ in range(400):
    rows = store.load(NextRows(1, 0, after, 256, 262144))
    after = rows[-1].seq
print(took, before, rss(), opened.entities[0].queue.active)
store.close()
"""


def deep(folder: Path, messages: int) -> Table:
    path = folder / "deep.db"
    fill(path, messages)
    table = Table(title=f"{messages:,} messages of {SIZE} bytes in one queue ({path.stat().st_size / 1e9:.2f} GB)")
    table.add_column("what")
    table.add_column("figure", justify="right")
    run = subprocess.run([sys.executable, "-c", OPEN_DEEP, str(path)], check=True, capture_output=True, text=True)
    took, before, after, _active = map(float, run.stdout.split())
    table.add_row("open", f"{took * 1000:.0f} ms")
    table.add_row("RSS before opening", f"{before:.0f} MB")
    table.add_row("RSS after reading 100,000 of them", f"{after:.0f} MB")
    store = SqliteStore(path)
    store.open()
    table.add_row("commit that drops the entity", f"{timed(lambda: store.commit([DropEntity(1)])) * 1000:.1f} ms")
    store.commit([PutEntity(2, "queue", "other", "{}", 1, 1)])
    rows = [row._replace(queue=2) for row in some_rows(500, SIZE)]
    beside = sorted(timed(lambda row=row: store.commit([PutRow(row)])) * 1000 for row in rows)  # type: ignore[misc]  # the default binds the row
    table.add_row("commit of 1 row while it is purged, median", f"{beside[250]:.1f} ms")
    table.add_row("the same, the slowest of 500", f"{beside[-1]:.1f} ms")
    steps = 0
    start = time.perf_counter()
    while store.tidy():
        steps += 1
    table.add_row("purging the rest when idle", f"{time.perf_counter() - start:.1f} s in {steps:,} steps")
    store.close()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="twinbus-store-", dir=arguments.folder))
    console = Console(width=140)
    try:
        console.print(commits(folder, arguments.rounds))
        if arguments.messages:
            console.print(deep(folder, arguments.messages))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
