"""Runs all fuzzers, each in a process of its own, and adds up inputs and memory.

    python -m tests.fuzz --inputs 1000000 --seed 1
    python -m tests.fuzz --inputs 1000000 --only rules,http

The inputs are divided as in `amounts`. Ends with 1 at the first finding, or if a process took too much memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Final

from tests.fuzz.amounts import AMOUNTS, shares
from tests.fuzz.memory import KIB_PER_MIB

MOST_MIB: Final = 500
"""The most memory that one of the processes may take. The fuzzers have narrower bounds for their growth."""


def run_part(part: str, inputs: int, seed: int) -> tuple[int, int]:
    """Run a fuzzer in a process. Returns its exit code and the most memory that it had, in MiB."""
    command = [sys.executable, "-m", f"tests.fuzz.{part}", "--inputs", str(inputs), "--seed", str(seed)]
    process = subprocess.Popen(command)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_maxrss // KIB_PER_MIB


def main() -> int:
    arguments = argparse.ArgumentParser(description="Run all fuzzers.")
    arguments.add_argument("--inputs", type=int, default=100_000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--only", default=",".join(AMOUNTS), help="fuzzers, separated by commas")
    chosen = arguments.parse_args()
    total, peak = 0, 0
    for part in chosen.only.split(","):
        inputs, began = shares(chosen.inputs)[part], time.monotonic()
        code, mib = run_part(part, inputs, chosen.seed)
        print(f"{part}: {inputs} inputs, {mib} MiB, {time.monotonic() - began:.0f} s, exit code {code}", flush=True)
        if code or mib > MOST_MIB:
            print(f"{part}: a finding, or more than {MOST_MIB} MiB, with seed {chosen.seed}", file=sys.stderr)
            return 1
        total, peak = total + inputs, max(peak, mib)
    print(f"{total} inputs, at most {peak} MiB in a process; nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
