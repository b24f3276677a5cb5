"""A server as a process of its own: started, awaited, ended. It never outlives the process that started it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import twinbus

_DRAIN_SECONDS: Final = 20.0
_TOLD_CHARACTERS: Final = 4000


class LocalNamespaceError(RuntimeError):
    """The server did not start or did not end; the text holds what it wrote to stderr."""


@dataclass(frozen=True, slots=True)
class Served:
    """One namespace as the server told it. `file` is None where everything is in memory."""

    name: str
    connection_string: str
    port: int
    ca: Path
    file: Path | None


class ServerProcess:
    """One server, which may be started again after it ended. `log` takes what it writes to stderr."""

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, request: Mapping[str, Any], timeout: float) -> list[Served]:
        """What it serves, once it says that it is ready."""
        if self.running:
            raise LocalNamespaceError("it is running already")
        told_before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [*_command(), json.dumps(request)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=self._environment,
            )
        try:
            return self._read_until_ready(time.monotonic() + timeout)
        except LocalNamespaceError as error:
            self.kill()
            told = self.log.read_bytes()[told_before:][-_TOLD_CHARACTERS:].decode(errors="replace")
            raise LocalNamespaceError(f"{error}\n{told}".rstrip()) from None
        except BaseException:
            self.kill()
            raise

    def stop(self, timeout: float = _DRAIN_SECONDS) -> int:
        """Drain and end it (SIGTERM); its exit code."""
        process = self._started()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            return self.wait(timeout)
        except LocalNamespaceError:
            self.kill()
            raise

    def kill(self) -> None:
        """End it with SIGKILL and wait until it is gone: its port and its files are free then."""
        process = self._started()
        if process.poll() is None:
            process.kill()
        process.wait()
        self._close_pipes()

    def wait(self, timeout: float) -> int:
        """Wait until it ended by itself; its exit code, negative for a signal."""
        process = self._started()
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise LocalNamespaceError(f"the server did not end in {timeout:g} s") from None
        self._close_pipes()
        return code

    def _read_until_ready(self, deadline: float) -> list[Served]:
        process = self._started()
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        text = b""
        while not text.endswith(b"\nready\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not poll.poll(remaining * 1000):
                raise LocalNamespaceError("the server was not ready in time")
            read = os.read(descriptor, 65536)
            if not read:
                raise LocalNamespaceError(f"the server ended with exit code {process.wait()}")
            text += read
        return [_served(line) for line in text.decode().splitlines()[:-1]]

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise LocalNamespaceError("it was not started")
        return self._process

    def _close_pipes(self) -> None:
        process = self._started()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _command() -> list[str]:
    # Wherever this package was imported from, the child finds the same one, and nothing is put before its own modules.
    place = str(Path(twinbus.__file__).resolve().parents[1])
    return [
        sys.executable,
        "-c",
        f"import sys; sys.path.append({place!r}); from twinbus.testing.child import main; main()",
    ]


def _served(line: str) -> Served:
    told = json.loads(line)
    file = told["data"]
    return Served(
        told["name"], told["connection_string"], told["port"], Path(told["ca"]), None if file is None else Path(file)
    )
