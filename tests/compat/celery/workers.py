"""Celery workers as processes of their own, and the record that their tasks write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"
SECONDS = 60.0


class TaskRun(NamedTuple):
    """A line of the record."""

    task: str
    number: str
    event: str
    task_id: str

    @property
    def name(self) -> str:
        return f"{self.task} {self.number}"


class Publisher:
    """A process that publishes tasks `brew` on request."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def publish(self, first: int, last: int) -> None:
        """Publish these tasks, the last one excluded. Returns when Celery has taken all of them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = f"{first} {last}\n".encode()
        self._process.stdin.write(line)
        self._process.stdin.flush()
        assert self._process.stdout.readline() == line, self._log.read_text()[-4000:]


class Shop:
    """The application `shop`, its record, and its environment for each process. `prefix` runs another command."""

    def __init__(self, folder: Path, broker: str, prefix: Sequence[str] = (), **more: str) -> None:
        self.record = folder / "record"
        self.record.touch()
        self.log = folder / "worker.log"
        self._prefix = prefix
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{HERE}:{SOURCE}",
            "SHOP_BROKER": broker,
            "SHOP_RECORD": str(self.record),
            **more,
        }

    def runs(self, event: str = "done") -> list[TaskRun]:
        """Return the runs of tasks that came to this event, in this order. Two runs of a task are two entries.

        A line whose end is not there yet is left out: a worker may be writing it.
        """
        *lines, _ = self.record.read_text().split("\n")
        return [run for run in (TaskRun(*line.split()) for line in lines) if run.event == event]

    def begun(self) -> Counter[str]:
        """Return how often each task was begun."""
        return Counter(run.name for run in self.runs("begun"))

    def done(self) -> Counter[str]:
        """Return how often each task ran to its end."""
        return Counter(run.name for run in self.runs())

    @contextmanager
    def publisher(self) -> Iterator[Publisher]:
        """Run a process of the application that publishes, until the end of the block."""
        with (
            self.log.open("ab") as log,
            subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "shop"],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            ) as process,
        ):
            yield Publisher(process, self.log)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(SECONDS) == 0, self.log.read_text()[-4000:]

    def start_worker(self, *options: str) -> subprocess.Popen[bytes]:
        """Start a worker in a process group of its own, so that `kill -9` reaches it and its children."""
        command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "--concurrency", "1", *options]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*self._prefix, *command], env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    @contextmanager
    def worker(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker until the end of the block. It ends as an operator ends it: with SIGTERM."""
        process = self.start_worker(*options)
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0, self.log.read_text()
        finally:
            kill_group(process)

    def until(self, holds: Callable[[], object], alive: Mapping[str, subprocess.Popen[bytes]], seconds: float) -> None:
        """Wait until something holds. Raises AssertionError with the worker's log if a process ends before."""
        end = time.monotonic() + seconds
        while not holds():
            ended = [name for name, process in alive.items() if process.poll() is not None]
            late = "too late" if time.monotonic() > end else ""
            assert not ended, f"{ended} ended\n{self.log.read_text()[-4000:]}"
            assert not late, f"{late}: {len(self.done())} tasks are done\n{self.log.read_text()[-4000:]}"
            time.sleep(0.01)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children with SIGKILL."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(SECONDS)
