"""The same backlog of 1 KB messages, brought home by the native engine and by the one on Spark, both with a ledger.

Both servers are durable. Each repeat runs one engine after the other, with new folders. The time from the first intent
to the last completion in the ledger is compared; the time that Spark takes to start is printed separately.

    python bench/pipeline_syphon.py [--messages 200000] [--repeats 3] [--queues 2] [--lanes N] [--json]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import Figure, Samples, ratios, show, write_json
from bench.syphon import PRIMARY, Ground, ground
from twinbus.ledger import Intent, Operation, Stage, read_ledger

AIM: Final = 0.85
ENGINES: Final = {"native": ("native engine",), "spark": ("on Spark", "--engine", "spark")}
NOTES: Final = (
    "Median of the repeats (lowest–highest), interleaved; what arrived was counted. Every intent was on disk before its"
    " send. Start-up: from the command to the first intent, the JVM's and the query's start included.",
)


@dataclass(slots=True)
class Runs:
    rate: Samples = field(default_factory=Samples)
    start: Samples = field(default_factory=Samples)


def drain(at: Ground, count: int, *options: str) -> tuple[float, float]:
    """Messages a second, and seconds until the first was about to be sent."""
    folder = at.folder / "ledger"
    began = time.time()
    command = [sys.executable, "-m", "twinbus", "syphon", "--drain", "--json", "--ledger", str(folder)]
    ends = ["--primary", at.primary.connection_string, "--secondary", at.secondary.connection_string]
    subprocess.run([*command, *ends, "--primary-name", PRIMARY, *options], stdout=subprocess.DEVNULL, check=True)
    first, last = float("inf"), 0.0
    for entry in read_ledger(folder):
        match entry:
            case Intent(stage=Stage.RETURN_PRIMARY) | Operation(stage=Stage.RETURN_PRIMARY):
                first = min(first, entry.at / 1000)
            case Operation(stage=Stage.COMPLETE_BACKLOG):
                last = max(last, entry.at / 1000 + entry.seconds)
            case _:
                pass
    at.check(count)
    return count / (last - first), first - began


def figures(folder: Path, *, messages: int, repeats: int, queues: int, lanes: int | None = None) -> list[Figure]:
    runs = {engine: Runs() for engine in ENGINES}
    more = () if lanes is None else ("--lanes", str(lanes))
    for _ in range(repeats):
        for engine, found in runs.items():
            with ground(folder, queues, messages) as at:
                rate, start = drain(at, messages, *ENGINES[engine][1:], *(more if engine == "spark" else ()))
            found.rate.values.append(rate)
            found.start.values.append(start)
    native, spark = runs["native"], runs["spark"]
    times = ratios(spark.rate, native.rate)
    return [
        Figure(f"{messages:,} messages, {queues} backlog queue(s), messages a second in steady state:"),
        Figure(ENGINES["native"][0], native.rate.told(), values={"rate": native.rate.values}),
        Figure(
            ENGINES["spark"][0],
            spark.rate.told(),
            f"native {native.rate.told()}",
            times.told("{:.2f}"),
            f"≥ {AIM} × native",
            times.median >= AIM,
            {"rate": spark.rate.values, "times": times.values},
        ),
        Figure("Start-up, seconds:"),
        *(
            Figure(ENGINES[engine][0], found.start.told("{:.1f}"), values={"start_seconds": found.start.values})
            for engine, found in runs.items()
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--queues", type=int, default=2)
    parser.add_argument("--lanes", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="values of every repeat, for programs")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="twinbus-bench-", dir=asked.folder) as name:
        made = figures(
            Path(name), messages=asked.messages, repeats=asked.repeats, queues=asked.queues, lanes=asked.lanes
        )
    loads = f"{os.cpu_count()} cores for all; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after."
    if asked.json:
        write_json(made, (*NOTES, loads))
    else:
        show("The syphon on Spark", made, (*NOTES, loads))


if __name__ == "__main__":
    main()
