"""Processes that a test kills: Spark drivers and the processes of a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONG = 300.0


@contextmanager
def process(*command: str, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in its own process group. The group is killed at the end."""
    surroundings = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "SPARK_LOCAL_IP": "127.0.0.1", **environment}
    with log.open("ab") as out:
        made = subprocess.Popen(command, env=surroundings, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
    try:
        yield made
    finally:
        kill(made)


def kill(one: subprocess.Popen[bytes]) -> None:
    if one.poll() is None:
        os.killpg(one.pid, signal.SIGKILL)
    one.wait()


def until(holds: Callable[[], object], alive: subprocess.Popen[bytes], log: Path, patience: float = LONG) -> None:
    end = time.monotonic() + patience
    while not holds():
        assert alive.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
