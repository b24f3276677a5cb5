"""How long the verbs on ledgers and tables take, for a small ledger and for large ones. A part of `bench/pipeline.py`.

Each verb runs as a user runs it: as a new process, which starts a JVM if the verb needs one.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.measuring import Figure, Samples
from bench.pipeline_ledgers import make_ledger
from twinbus.ledger import Ledger, Stage

# The second one makes the tables that the next ones read.
VERBS: Final[tuple[tuple[str, ...], ...]] = (
    ("ledger", "ingest", "LEDGER", "NEW"),
    ("pipeline", "run", "LEDGER", "TABLES"),
    ("ledger", "check", "LEDGER"),
    ("ledger", "reconcile", "TABLES"),
    ("ledger", "cost", "TABLES"),
    ("ledger", "incidents", "TABLES"),
    ("ledger", "latency", "TABLES"),
    ("cost", "actual", "TABLES"),
    ("report", "TABLES", "--output", "REPORT"),
)
_MESSAGES: Final = 100
_CODES: Final = (0, 1, 3)
"""Exit codes of a verb that answered: a large ledger has lines that are no entries, so nothing is proven."""


def _make_small_ledger(folder: Path) -> None:
    with Ledger(folder) as ledger:
        for number in range(_MESSAGES):
            one = [f"order-{number}"]
            ledger.begin(Stage.SEND_BACKLOG, "paris", "backlog", one, 100, "contoso/orders").end()
            ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", one, 100).end()
            ledger.begin(Stage.COMPLETE_BACKLOG, "paris", "backlog", one, 100, "contoso/orders").end()


def figures(folder: Path, lines: list[int], rounds: int) -> Iterator[Figure]:
    """Yields the seconds and the processor time of each verb, for a small ledger and for those with so many lines."""
    _make_small_ledger(folder / "small" / "ledger")
    yield from _figures(folder / "small", 3 * _MESSAGES, rounds)
    for count in lines:
        make_ledger(folder / str(count) / "ledger", count)
        yield from _figures(folder / str(count), count, rounds)


def _figures(folder: Path, lines: int, rounds: int) -> Iterator[Figure]:
    """The processor time is that of all processes whose end the verb awaits."""
    yield Figure(f"Verbs on a ledger of {lines:,} lines:")
    for verb in VERBS:
        seconds, cpu = Samples(), Samples()
        for number in range(rounds):
            own = {"LEDGER": "ledger", "TABLES": "tables", "NEW": f"tables-{number}", "REPORT": "report.html"}
            command = [
                sys.executable,
                "-m",
                "twinbus",
                *(str(folder / own[word]) if word in own else word for word in verb),
            ]
            began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            ended = subprocess.run(command, check=False, capture_output=True, cwd=folder)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if ended.returncode not in _CODES:
                raise subprocess.CalledProcessError(ended.returncode, command, ended.stdout, ended.stderr)
            seconds.values.append(time.perf_counter() - began)
            cpu.values.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        yield Figure(
            " ".join(verb),
            f"{seconds.told('{:.1f}')} s",
            f"processor time {cpu.told('{:.1f}')} s",
            values={"seconds": seconds.values, "cpu": cpu.values},
        )
