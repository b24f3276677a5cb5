"""The pipeline beside DuckDB on the same cores: the ingest of lines, the jobs over entries; what verbs and demo take.

    python bench/pipeline.py [ingest jobs verbs demo] [--lines 1_000_000 10_000_000] [--entries 1_000_000 20_000_000]
                             [--rounds 3] [--folder DIR] [--json]

Prints seconds, processor time, memory at the peak and the ratio to DuckDB, whose answers must be the same. Ten million
lines take 5 GB of the disk while they are ingested, and a hundred million entries take 2 GB.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import pipeline_demo, pipeline_ingest, pipeline_jobs, pipeline_verbs
from bench.measuring import Figure, show, write_json
from twinbus.pipeline.session import session

PARTS: Final = ("ingest", "jobs", "verbs", "demo")
NOTES: Final = (
    "Median of the rounds (lowest–highest). Spark runs with local[*], warm. The same rows and answers in every round.",
    "Growth 1: linear, in processor time. DuckDB and Spark take turns.",
)


def figures(asked: argparse.Namespace, folder: Path) -> Iterator[Figure]:
    if "ingest" in asked.parts or "jobs" in asked.parts:
        spark = session("bench")
        if "ingest" in asked.parts:
            yield from pipeline_ingest.figures(spark, folder, asked.lines, asked.rounds)
        if "jobs" in asked.parts:
            yield from pipeline_jobs.figures(spark, folder, asked.entries, asked.rounds)
        spark.stop()
    if "verbs" in asked.parts:
        yield from pipeline_verbs.figures(folder / "verbs", asked.lines, asked.rounds)
    if "demo" in asked.parts:
        yield from pipeline_demo.figures(asked.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--lines", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--entries", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the files; on the disk that is to be measured")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="twinbus-bench-", dir=asked.folder) as folder:
        made = list(figures(asked, Path(folder)))
    loads = f"{os.cpu_count()} cores for all; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    write_json(made, [*NOTES, loads]) if asked.json else show("The pipeline", made, [*NOTES, loads])


if __name__ == "__main__":
    main()
