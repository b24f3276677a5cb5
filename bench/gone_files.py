"""The cost of checking for removed or replaced files (L7), compared with a durable commit in the same run.

    python bench/gone_files.py [--rounds 7] [--folder DIR]

`quiet`: nothing changed in the folder for 3 s, which is the usual case. `changing`: every file is checked. For the
ledger: one check of the open segment, compared with a group that is written and synced.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bare_sqlite import some_rows
from twinbus.namespace.engine.storage_protocol import PutCounters, PutRow
from twinbus.namespace.store import SqliteStore
from twinbus.namespace.store.files import StoreFiles

SIZE = 1_024
GROUPS = {1: 400, 100: 60, 256: 40}
LOOKS = 2_000


def seconds(call: Callable[[], object], count: int) -> float:
    """Return the mean seconds of one call."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def one_round(folder: Path, group: int, commits: int) -> tuple[float, float, float]:
    """Return the seconds of a commit, of a check of a quiet folder, and of a check of a changing folder."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "store.sqlite"
        store = SqliteStore(path)
        store.open()
        rows = iter(some_rows(group * commits, SIZE))

        def commit() -> None:
            some = [PutRow(next(rows)) for _ in range(group)]
            store.commit([*some, PutCounters(1, some[-1].row.seq + 1, 0, 0, 0, 0, 0, 0, 0)])
            store.tidy()

        durable = seconds(commit, commits)
        files = StoreFiles(*(path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm", ".lock")))
        changing = seconds(files.check, LOOKS)
        an_hour_ago = time.time() - 3600
        os.utime(name, (an_hour_ago, an_hour_ago))
        quiet = seconds(files.check, LOOKS)
        store.close()
        return durable, quiet, changing


def one_ledger_round(folder: Path) -> tuple[float, float]:
    """Return the seconds of a group of one line that is written and synced, and of the check of its segment."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "segment"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def durable() -> None:
            os.write(file, b"x" * 256)
            os.fdatasync(file)

        found = os.fstat(file)
        identity = (found.st_dev, found.st_ino)

        def look() -> bool:
            there = path.stat()
            return (there.st_dev, there.st_ino) == identity

        return seconds(durable, 200), seconds(look, LOOKS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    table = Table("commit of", "commit µs", "look, quiet µs", "share", "look, changing µs", "share")
    for group, commits in GROUPS.items():
        found = [one_round(options.folder, group, commits) for _ in range(options.rounds)]
        durable, quiet, changing = (statistics.median(column) for column in zip(*found, strict=True))
        shares = [statistics.median(one[index] / one[0] for one in found) for index in (1, 2)]
        table.add_row(
            f"{group} rows", f"{durable * 1e6:.0f}", f"{quiet * 1e6:.2f}", f"{shares[0]:.2%}",
            f"{changing * 1e6:.2f}", f"{shares[1]:.2%}",
        )  # fmt: skip
    ledger = [one_ledger_round(options.folder) for _ in range(options.rounds)]
    durable, look = (statistics.median(column) for column in zip(*ledger, strict=True))
    share = statistics.median(look / durable for durable, look in ledger)
    table.add_row("a ledger group", f"{durable * 1e6:.0f}", f"{look * 1e6:.2f}", f"{share:.2%}", "", "")
    Console().print(table)


if __name__ == "__main__":
    main()
