"""A namespace server in its own process: start, stop, kill. The server ends when the process that started it ends."""

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
_MAX_QUOTED_CHARACTERS: Final = 4000


class LocalNamespaceError(RuntimeError):
    """The server did not start or did not end. The text contains what the server wrote to stderr.

    Example: `except LocalNamespaceError as error: print(error)` prints the log of the server.
    """


@dataclass(frozen=True, slots=True)
class ServedNamespace:
    """One namespace of a running server. `file` is the namespace's database, or None if all data is in memory."""

    name: str
    connection_string: str
    port: int
    ca: Path
    file: Path | None


class ServerProcess:
    """A server process. The server can be started again after it has ended. Its stderr goes to the file `log`."""

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

    def start(self, request: Mapping[str, Any], timeout: float) -> list[ServedNamespace]:
        """Start the server and wait until the server is ready. Returns its namespaces. Raises LocalNamespaceError."""
        if self.running:
            raise LocalNamespaceError("the server is running already")
        log_size = self.log.stat().st_size if self.log.exists() else 0
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
            written = self.log.read_bytes()[log_size:][-_MAX_QUOTED_CHARACTERS:].decode(errors="replace")
            raise LocalNamespaceError(f"{error}\n{written}".rstrip()) from None
        except BaseException:
            self.kill()
            raise

    def stop(self, timeout: float = _DRAIN_SECONDS) -> int:
        """Send SIGTERM, after which the server closes its connections and ends. Returns the exit code."""
        process = self._started()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            return self.wait(timeout)
        except LocalNamespaceError:
            self.kill()
            raise

    def kill(self) -> None:
        """End the server with SIGKILL, and wait until the process has ended. Then its port and files are free."""
        process = self._started()
        if process.poll() is None:
            process.kill()
        process.wait()
        self._close_pipes()

    def wait(self, timeout: float) -> int:
        """Wait until the server ends without a call of `stop` or `kill`.

        Returns the exit code of the server. The code is negative if a signal ended the server.
        """
        process = self._started()
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise LocalNamespaceError(f"the server did not end in {timeout:g} s") from None
        self._close_pipes()
        return code

    def _read_until_ready(self, deadline: float) -> list[ServedNamespace]:
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
        return [_read_namespace(line) for line in text.decode().splitlines()[:-1]]

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise LocalNamespaceError("the server was not started: call start() first")
        return self._process

    def _close_pipes(self) -> None:
        process = self._started()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _command() -> list[str]:
    # The child process must import this same package. The folder of the package is the last entry of `sys.path`, so
    # that other modules in this folder do not hide modules of the child process.
    folder = str(Path(twinbus.__file__).resolve().parents[1])
    return [
        sys.executable,
        "-c",
        f"import sys; sys.path.append({folder!r}); from twinbus.testing.server_main import main; main()",
    ]


def _read_namespace(line: str) -> ServedNamespace:
    fields = json.loads(line)
    file = fields["data"]
    return ServedNamespace(
        fields["name"],
        fields["connection_string"],
        fields["port"],
        Path(fields["ca"]),
        None if file is None else Path(file),
    )
