"""Ctrl-C ends every verb with one line and 130: no traceback of Python or Java, and no process is left."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.cli.running import COMMAND, PATIENCE, environment, serving
from twinbus.ledger import Ledger, Role

SPARK_PATIENCE = 240.0


class Verb:
    """A verb in a process group of its own, as a shell starts it. Ctrl-C sends SIGINT to the whole group."""

    def __init__(self, *arguments: str, **more: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            env=environment(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def read_until(self, text: str, patience: float = PATIENCE) -> str:
        """Read stdout and stderr until one of them has this text. Returns all that was read."""
        seen: dict[int, bytes] = {}
        poll = select.poll()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            seen[stream.fileno()] = b""
            poll.register(stream, select.POLLIN)
        deadline = time.monotonic() + patience
        while not any(text.encode() in one for one in seen.values()):
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            assert ready, f"{text!r} did not come; it printed {seen}"
            for number, _ in ready:
                read = os.read(number, 65536)
                assert read, f"it ended before {text!r}; it printed {seen}"
                seen[number] += read
        return b"".join(seen.values()).decode()

    def interrupt(self, patience: float = PATIENCE, code: int = 130) -> str:
        """Press Ctrl-C, and check how the verb ends. Returns what it printed to stderr from then on."""
        os.killpg(self.process.pid, signal.SIGINT)
        _, stderr = self.process.communicate(timeout=patience)
        assert self.process.returncode == code, stderr.decode()
        assert "Traceback" not in stderr.decode()
        assert "\tat " not in stderr.decode()
        self.wait_for_all(patience)
        return stderr.decode()

    def wait_for_all(self, patience: float) -> None:
        """Wait until no process of the group is left: none may go on."""
        deadline = time.monotonic() + patience
        while True:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return
            assert time.monotonic() < deadline, "a process is left"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def until_there(path: Path) -> None:
    deadline = time.monotonic() + SPARK_PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def started(*arguments: str, **more: str) -> Iterator[Verb]:
    verb = Verb(*arguments, **more)
    try:
        yield verb
    finally:
        verb.kill()


@pytest.fixture
def silent() -> Iterator[tuple[dict[str, str], Callable[[], None]]]:
    """Two namespaces that accept connections and never answer, and a function that waits for a connection."""
    servers = [socket.create_server(("localhost", 0)) for _ in range(2)]
    strings = [
        f"Endpoint=sb://localhost:{one.getsockname()[1]};SharedAccessKeyName=a;SharedAccessKey=b;"
        "UseDevelopmentEmulator=true;"
        for one in servers
    ]
    accepted: list[socket.socket] = []

    def wait() -> None:
        ready, _, _ = select.select(servers, [], [], PATIENCE)
        assert ready, "the verb did not connect"
        accepted.append(ready[0].accept()[0])

    sides = {"TWINBUS_PRIMARY_CONNECTION_STRING": strings[0], "TWINBUS_SECONDARY_CONNECTION_STRING": strings[1]}
    yield {**sides, "TWINBUS_CONNECTION_STRING": strings[0]}, wait
    for one in (*servers, *accepted):
        one.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ("entity", "list"),
        ("entity", "peek", "orders"),
        pytest.param(("entity", "purge", "orders", "--yes"), marks=pytest.mark.thorough),
        pytest.param(("provision",), marks=pytest.mark.thorough),
        pytest.param(("doctor",), marks=pytest.mark.thorough),
        pytest.param(("drill", "--entity", "orders", "--yes"), marks=pytest.mark.thorough),
        pytest.param(("syphon", "--drain"), marks=pytest.mark.thorough),
        pytest.param(("syphon", "--dry-run", "--transport", "sdk"), marks=pytest.mark.thorough),
        pytest.param(("deadletter", "list"), marks=pytest.mark.thorough),
        pytest.param(("fault", "list"), marks=pytest.mark.thorough),
        pytest.param(("export",), marks=pytest.mark.thorough),
    ],
    ids=" ".join,
)
def test_a_verb_that_waits_for_a_namespace_is_interrupted(
    arguments: tuple[str, ...], silent: tuple[dict[str, str], Callable[[], None]]
) -> None:
    variables, wait = silent
    patient = () if arguments[0] in ("fault", "export") else ("--timeout", "60")
    with started(*arguments, *patient, **variables) as verb:
        wait()
        told = verb.interrupt()
        assert told.splitlines()[-1] == "interrupted"
        assert [line for line in told.splitlines() if line != "interrupted" and not line.endswith(" …")] == []


@pytest.mark.thorough
def test_a_question_is_interrupted_with_130_and_a_no_is_1(silent: tuple[dict[str, str], Callable[[], None]]) -> None:
    variables, _ = silent
    with started("drill", "--entity", "orders", **variables) as verb:
        verb.read_until("Continue?")
        assert verb.interrupt().split() == ["interrupted"]
    with started("drill", "--entity", "orders", **variables) as verb:
        verb.read_until("Continue?")
        _, stderr = verb.process.communicate(b"n\n", timeout=PATIENCE)
        assert (verb.process.returncode, stderr.decode()) == (1, "Aborted.\n")


@pytest.mark.thorough
def test_a_server_ends_well_after_ctrl_c() -> None:
    with serving("--memory", "--namespace", "one=0") as server:
        server.signal(signal.SIGINT)
        code, stderr = server.end()
        assert (code, stderr) == (0, "")


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_verb_on_spark_is_interrupted_and_leaves_no_jvm(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger", role=Role.SYPHON):
        pass
    arguments = ("ledger", "ingest", str(tmp_path / "ledger"), str(tmp_path / "tables"))
    with started(*arguments) as verb:
        verb.read_until("starting Spark")
        assert verb.interrupt(SPARK_PATIENCE) == "interrupted\n"
    with started(*arguments, "--follow") as verb:
        told = verb.read_until("entries", SPARK_PATIENCE)
        assert verb.interrupt(SPARK_PATIENCE, code=0) == ""
    with started("pipeline", "run", *arguments[2:], "--follow") as follower:
        follower.read_until("snapshot", SPARK_PATIENCE)
        assert follower.interrupt(SPARK_PATIENCE, code=0) == ""
    with started("pipeline", "run", arguments[2], str(tmp_path / "new"), "--follow") as follower:
        follower.read_until("starting Spark")
        until_there(tmp_path / "new" / "entries")  # inside the first batch
        assert follower.interrupt(SPARK_PATIENCE, code=0) == ""
    assert (tmp_path / "new" / "snapshots").is_dir(), "the batch was committed"
    # The JVM prints nothing of its own.
    assert [line for line in told.splitlines() if not re.match(r"(starting|reading) |\w+ +\d+$|operations", line)] == []
