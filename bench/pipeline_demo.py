"""How long the steps of `twinbus demo` take, and for how long its terminal stands still. A part of `bench/pipeline.py`.

The demo runs as a user runs it: as a new process, on a terminal of 100 columns. Its engine is Spark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from bench.measuring import Figure, Samples

_TERMINAL: Final = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
_CHUNK: Final = 65536
_DEMO_AIM, _STILL_AIM = 60.0, 3.0


def figures(rounds: int) -> Iterator[Figure]:
    """Yields the seconds of the whole demo and of each step, and the longest time without output on the terminal."""
    total, pause = Samples(), Samples()
    steps: defaultdict[str, Samples] = defaultdict(Samples)
    for _ in range(rounds):
        began = time.perf_counter()
        took, longest = _played()
        total.values.append(time.perf_counter() - began)
        pause.values.append(longest)
        for step, seconds in took.items():
            steps[step].values.append(seconds)
    yield Figure("The demo, on Spark:")
    yield _figure("whole demo", total, _DEMO_AIM)
    for step, one in steps.items():
        yield _figure(step, one)
    yield _figure("longest time that the terminal stands still", pause, _STILL_AIM)


def _figure(name: str, seconds: Samples, aim: float | None = None) -> Figure:
    told, values = f"{seconds.told('{:.1f}')} s", {"seconds": seconds.values}
    if aim is None:
        return Figure(name, told, values=values)
    return Figure(name, told, aim=f"{aim:.0f} s", met=seconds.median <= aim, values=values)


def _played() -> tuple[dict[str, float], float]:
    """Plays the demo. Returns the seconds of each step, and the longest time without output."""
    ours, theirs = os.openpty()
    command, environment = [sys.executable, "-m", "twinbus", "demo", "--json"], {**os.environ, **_TERMINAL}
    with tempfile.TemporaryFile() as told:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=told, stderr=theirs, env=environment) as demo:
            os.close(theirs)
            longest, last = 0.0, time.perf_counter()
            while _read(ours):
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
            os.close(ours)
        if demo.returncode:
            raise RuntimeError(f"the demo ended with {demo.returncode}")
        told.seek(0)
        return json.load(told)["took"], longest


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, _CHUNK)
    except OSError:  # the demo has ended
        return b""
