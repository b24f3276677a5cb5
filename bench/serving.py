"""The server to be measured: `twinbus serve` as a user starts it, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bench.measuring import ProcessMeter, Samples

QUEUES: Final = ("sends", "receives", "deep")
_LARGEST_MEGABYTES: Final = 5120


class Server:
    """A server on a data folder, which is ready when the constructor returns. Measures the seconds from its start."""

    def __init__(self, data: Path, topics: Sequence[dict[str, Any]] = (), queues: Sequence[str] = QUEUES) -> None:
        config = data.with_suffix(".json")
        large = {"max_size_in_megabytes": _LARGEST_MEGABYTES}
        namespace = {
            "name": "bench",
            "queues": [{"name": name, **large} for name in queues],
            "topics": [topic | large for topic in topics],
        }
        config.write_text(json.dumps({"namespaces": [namespace]}))
        command = [sys.executable, "-m", "twinbus", "serve", "--json", "--data", str(data), "--config", str(config)]
        # Compiled modules are kept, as they are where the package is installed, whatever holds for this process.
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(data.parent / "compiled")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [*command, "--namespace", "bench=0", "--exit-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdout is not None
        first = self._process.stdout.readline()
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("the server did not start")
        self.seconds_to_ready = time.perf_counter() - started
        told = json.loads(first)
        self.connection_string: str = told["connection_string"]
        self.meter = ProcessMeter(self._process.pid)
        self.cpu_seconds_to_ready = self.meter.cpu_seconds()
        self._metrics = f"http://127.0.0.1:{told['port']}/metrics"

    def commits(self) -> int:
        """Return the number of commits so far."""
        return sum(self._metric("twinbus_commit_seconds_count"))

    def held(self, queue: str) -> int:
        """Return the number of messages in any state."""
        return sum(self._metric(f'twinbus_messages{{entity="{queue}"'))

    def _metric(self, start: str) -> Iterator[int]:
        with urllib.request.urlopen(self._metrics) as answer:  # noqa: S310 - our own server
            lines = answer.read().decode().splitlines()
        return (int(float(line.split()[-1])) for line in lines if line.startswith(start))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@contextmanager
def watched(server: Server, interval: float = 0.1) -> Iterator[Samples]:
    """Yields the memory of a server (MiB), measured again and again inside the `with` block."""
    seen, stop = Samples([server.meter.rss_megabytes()]), threading.Event()

    def watch() -> None:
        while not stop.wait(interval):
            seen.values.append(server.meter.rss_megabytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
