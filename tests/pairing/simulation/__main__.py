"""`python -m tests.pairing.simulation --seeds 20000 --start 0` runs this number of worlds and names failing seeds."""

from __future__ import annotations

import argparse
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor

from tests.pairing.simulation.clause_model import ViolationError
from tests.pairing.simulation.world import World

CHUNK = 500


def failing(seeds: range) -> list[tuple[int, str]]:
    found = []
    for seed in seeds:
        try:
            World(seed).settle()
        except (Exception, ViolationError):
            found.append((seed, traceback.format_exc(limit=-3)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pairing.simulation")
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    end = given.start + given.seeds
    chunks = [range(first, min(first + CHUNK, end)) for first in range(given.start, end, CHUNK)]
    failures = 0
    with ProcessPoolExecutor(given.workers) as pool:
        for found in pool.map(failing, chunks):
            for seed, text in found:
                failures += 1
                print(f"seed {seed} (again with --seeds 1 --start {seed}):\n{text}")
    print(f"{given.seeds} worlds, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
