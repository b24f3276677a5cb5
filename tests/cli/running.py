"""Runs the command line as users do: as a process with arguments, output and an exit code."""

import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from twinbus.cli.main import app

SOURCE = Path(__file__).resolve().parents[2] / "src"
COMMAND = [sys.executable, "-m", "twinbus"]
PATIENCE = 30.0


def environment(**more: str) -> dict[str, str]:
    # A wide terminal, so that no text that a test looks for is broken into two lines.
    return {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200", "NO_COLOR": "1", **more}


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=environment(**more), capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def invoke(*arguments: str, input: str | None = None, **more: str) -> Result:
    """Run the command line in the process of the test, which imports the SDK only once. `more` is its environment."""
    return CliRunner().invoke(app, arguments, input=input, env={"COLUMNS": "200", "NO_COLOR": "1", **more})


def in_terminal(
    *arguments: str | bytes,
    typed: str = "",
    columns: int = 80,
    variables: Mapping[str, str] | None = None,
    patience: float = PATIENCE,
) -> tuple[int, str]:
    """Run a verb on a terminal with this number of columns. Returns its exit code and its output."""
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    inherited = environment(TERM="xterm-256color", **(variables or {}))
    for name in ("COLUMNS", "NO_COLOR"):
        del inherited[name]
    process = subprocess.Popen(
        [*COMMAND, *arguments], env=inherited, stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    )
    os.close(follower)
    if typed:
        os.write(leader, typed.encode())
    written, deadline = b"", time.monotonic() + patience
    try:
        while select.select([leader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                read = os.read(leader, 65536)
            except OSError:  # the other end was closed
                break
            written += read
        return process.wait(max(0.1, deadline - time.monotonic())), written.decode("utf-8", "surrogateescape")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(leader)


class Serving:
    """A running `twinbus serve` and what it printed until it was ready."""

    def __init__(self, process: "subprocess.Popen[bytes]", printed: str) -> None:
        self.process = process
        self.printed = printed

    @property
    def namespaces(self) -> dict[str, dict[str, Any]]:
        told = [json.loads(line) for line in self.printed.splitlines()[:-1]]
        return {one["name"]: one for one in told}

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for the end: exit code and stderr."""
        _, stderr = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, stderr.decode()


@contextmanager
def serving(*arguments: str, prefix: Sequence[str] = (), **more: str) -> Iterator[Serving]:
    """Run `twinbus serve` until the end of the block. `prefix` is a command that runs another command."""
    process = subprocess.Popen(
        [*prefix, *COMMAND, "serve", *arguments],
        env=environment(**more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield Serving(process, _read_until_ready(process))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@contextmanager
def serving_config(folder: Path, config: str) -> Iterator[Serving]:
    """Serve the namespaces of a configuration, without files. The configuration is written to the folder."""
    file = folder / "config.toml"
    file.write_text(config)
    with serving("--json", "--memory", "--config", str(file)) as server:
        yield server


def authorization_rule(name: str, *claims: str) -> str:
    """Return the lines of a configuration for an authorization rule. Its key is `key-of-` and its name."""
    return (
        f'[[namespaces.authorization_rules]]\nname = "{name}"\nclaims = {json.dumps(claims)}\n'
        f'primary_key = "key-of-{name}"\n'
    )


def pair_environment(server: Serving, primary_name: str) -> dict[str, str]:
    """Return the connection strings of the namespaces `primary` and `secondary` as environment variables."""
    return {
        "TWINBUS_PRIMARY_CONNECTION_STRING": str(server.namespaces["primary"]["connection_string"]),
        "TWINBUS_SECONDARY_CONNECTION_STRING": str(server.namespaces["secondary"]["connection_string"]),
        "TWINBUS_PRIMARY_NAME": primary_name,
    }


def _read_until_ready(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + PATIENCE
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    text = b""
    while not text.endswith(b"ready\n"):
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        read = os.read(process.stdout.fileno(), 65536) if ready else b""
        if not read:
            process.kill()
            stderr = process.communicate()[1].decode()
            raise AssertionError(f"not ready; it printed {text.decode()!r} and said {stderr!r}")
        text += read
    return text.decode()
