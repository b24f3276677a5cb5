"""The demo's folder and processes: shows and runs `twinbus` commands, and ends their processes when the demo ends.

`script` decides which command runs at which time. Commands read the connection strings from the folder's twinbus.toml,
so no command line contains a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from twinbus.cli.demo.application import BACKLOG_QUEUES, QUEUES, REGION, SUBSCRIPTIONS, TOPIC
from twinbus.errors import OperatorError
from twinbus.namespace import find_free_ports

# Lines that `spark_runner` prints: when Spark is ready, before the text about a batch of the pipeline, and before the
# exit code of a command that has ended.
READY: Final = "\x1eready"
BATCH: Final = "\x1ebatch "
ENDED: Final = "\x1eended "
# The command that ends the pipeline.
FINISH: Final = "finish"
FOLLOW_SECONDS: Final = 2.0
LEDGER: Final = "ledger"
TABLES: Final = "tables"
NAMES: Final = ("primary", "secondary")
_READY_SECONDS: Final = 60.0
_SPARK_SECONDS: Final = 300.0
_END_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.05
_ERROR_CHARACTERS: Final = 2000
# The most bytes of an output line. With --json, a command prints every message id in one line.
_LONGEST_LINE: Final = 2**26
# The jobs are small: these options halve the CPU time that the JVM spends on optimisation.
# Without the last one, the machine code would not fit, and the JVM would stop compiling after a minute.
_QUICK_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=160m"
# Duplicate detection drops second copies. On a busy machine, a second copy may come home minutes after the first. Locks
# are short, so that messages that were locked when the primary was killed are received again after 5 seconds.
_ENTITY: Final = {"requires_duplicate_detection": True, "duplicate_detection_history_time_window": "P1D"}
_TAKEN: Final = {"lock_duration": "PT5S"}


def _subscription(name: str) -> dict[str, Any]:
    return {"name": name, **_TAKEN, "rules": [{"name": "own", "sql": f"{REGION} = '{name}'"}]}


_CONFIG: Final = {
    "namespaces": [
        {
            "name": "primary",
            "queues": [{"name": queue, **_ENTITY, **_TAKEN} for queue in QUEUES],
            "topics": [{"name": TOPIC, **_ENTITY, "subscriptions": [_subscription(one) for one in SUBSCRIPTIONS]}],
        }
    ]
}


class DemoProcesses:
    """Starts the demo's processes in `folder`. The end of the `async with` block ends all processes.

    `show` is called with each command line before the command runs, `wait` with a text when the demo has to wait.
    """

    def __init__(self, folder: Path, show: Callable[[str], object], wait: Callable[[str], object]) -> None:
        self.folder = folder
        self.connection_strings: dict[str, str] = {}
        self.ports: dict[str, int] = {}
        self._show = show
        self._wait = wait
        self._processes: list[Process] = []
        self._spark_process: asyncio.Task[Process] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        """What commands print in the process with Spark; None at the end of the process."""

    async def __aenter__(self) -> Self:
        self._scratch.mkdir(parents=True)
        (self.folder / "primary.json").write_text(json.dumps(_CONFIG, indent=1), encoding="utf-8")
        self.ports = dict(zip(NAMES, find_free_ports(len(NAMES)), strict=True))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if tasks := [task for task in (self._spark_process, self._reader) if task is not None]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        # After an error or a signal, do not wait for a clean end.
        await asyncio.gather(*(one.stop(patient=kind is None) for one in self._processes))

    def kill(self) -> None:
        """Kill all processes with -9, without waiting for a clean end."""
        for one in self._processes:
            one.kill_all()

    # --- namespaces --------------------------------------------------------------------------------------------------

    async def serve(self, name: str) -> Process:
        """Start a namespace and wait until the namespace is ready. A second start uses the same port and data."""
        config = ["--config", "primary.json"] if name == "primary" else []
        shown = ["serve", "--namespace", f"{name}={self.ports[name]}", "--data", name, *config, "--ledger", LEDGER]
        self._show(shlex.join(["twinbus", *shown]))
        process = await self._start(name, "-m", "twinbus", *shown, "--json", "--exit-with-stdin")
        with _ready_in_time(f"the {name}", _READY_SECONDS, process):
            async with asyncio.timeout(_READY_SECONDS):
                while (line := await process.line()) != "ready":
                    self.connection_strings[name] = json.loads(line)["connection_string"]
        return process

    def connect(self) -> None:
        """Write twinbus.toml with the connection strings, for later commands."""
        file = self.folder / "twinbus.toml"
        file.touch(mode=0o600)
        lines = [f"{name} = {json.dumps(self.connection_strings[name])}" for name in NAMES]
        table = ["[connections]", *lines, "", "[pairing]", f"backlog_queue_count = {BACKLOG_QUEUES}", ""]
        file.write_text("\n".join(table), encoding="utf-8")

    # --- commands ----------------------------------------------------------------------------------------------------

    def begin_pipeline(self, on_batch: Callable[[str], object]) -> None:
        """Start a process with Spark in the background, which follows the ledger.

        `on_batch` is called with the line about each batch. After this call, `run` sends commands for Spark to this
        process.
        """
        self._show(
            shlex.join(["twinbus", "pipeline", "run", LEDGER, TABLES, "--follow", "--every", f"{FOLLOW_SECONDS:g}"])
        )
        self._spark_process = asyncio.create_task(self._spark(on_batch))

    async def _spark(self, on_batch: Callable[[str], object]) -> Process:
        process = await self._start("spark", "-m", "twinbus.cli.demo.spark_runner")
        with _ready_in_time("Spark", _SPARK_SECONDS, process):
            async with asyncio.timeout(_SPARK_SECONDS):
                while await process.line() != READY:
                    pass
        self._reader = asyncio.create_task(self._read(process, on_batch))
        return process

    async def _read(self, process: Process, on_batch: Callable[[str], object]) -> None:
        """Read what the process with Spark prints: lines of the pipeline, and lines of commands."""
        with contextlib.suppress(EOFError):
            while True:
                line = await process.line()
                if line.startswith(BATCH):
                    on_batch(line.removeprefix(BATCH))
                else:
                    self._lines.put_nowait(line)
        self._lines.put_nowait(None)

    async def finish_pipeline(self) -> None:
        """Wait until the pipeline has ingested all entries of the ledger, and end it."""
        code, process = await self._run_in_spark(FINISH, lambda _: None)
        if code:
            raise OperatorError("the pipeline failed", process.error_text())

    async def run(
        self, *arguments: str, hidden: int = 0, on_line: Callable[[str], object], on_spark: bool = False
    ) -> tuple[int, Process]:
        """Run a command; return its exit code and its process. The last `hidden` arguments are not shown.

        With `on_spark`, the command runs in the process with Spark, if there is one.
        """
        self._show(shlex.join(["twinbus", *arguments[: len(arguments) - hidden]]))
        if on_spark and self._spark_process is not None:
            return await self._run_in_spark(arguments, on_line)
        process = await self._start(arguments[0], "-m", "twinbus", *arguments)
        with contextlib.suppress(EOFError):
            while True:
                on_line(await process.line())
        code = await process.ended()
        await process.stop()
        return code, process

    async def _run_in_spark(
        self, command: Sequence[str] | str, on_line: Callable[[str], object]
    ) -> tuple[int, Process]:
        assert self._spark_process is not None
        if not self._spark_process.done():
            self._wait("Spark is still starting")
        process = await self._spark_process
        process.write_line(json.dumps(command))
        while (line := await self._lines.get()) is not None and not line.startswith(ENDED):
            on_line(line)
        if line is None:
            raise OperatorError("the process with Spark has died", process.error_text())
        return int(line.removeprefix(ENDED)), process

    async def ask(self, *arguments: str, good: Sequence[int] = (0,), hidden: int = 0, on_spark: bool = False) -> Any:
        """Run a command and return the JSON of the last line that it prints."""
        lines: list[str] = []
        code, process = await self.run(*arguments, hidden=hidden, on_line=lines.append, on_spark=on_spark)
        if code not in good or not lines:
            raise OperatorError(f"`twinbus {' '.join(arguments[:2])}` ended with {code}", process.error_text())
        return json.loads(lines[-1])

    async def _start(self, name: str, *arguments: str) -> Process:
        log = self.folder / f"{name}-{len(self._processes)}.log"
        made = await start(arguments, self.folder, self._environment(), log)
        self._processes.append(made)
        return made

    @property
    def _scratch(self) -> Path:
        return self.folder / "tmp"

    def _environment(self) -> dict[str, str]:
        """Return the environment for commands: no TWINBUS_ variables; temporary files go to the demo's folder."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TWINBUS_")}
        more = {"TMPDIR": str(self._scratch), "SPARK_LOCAL_DIRS": str(self._scratch), "SPARK_SUBMIT_OPTS": _QUICK_JAVA}
        return {**kept, **more, "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def _ready_in_time(what: str, seconds: float, process: Process) -> Any:
    try:
        yield
    except TimeoutError:
        raise OperatorError(f"{what} was not ready in {seconds:.0f} s", process.error_text()) from None
    except EOFError:
        raise OperatorError(f"{what} did not start", process.error_text()) from None


class Process:
    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._over = False

    @property
    def pid(self) -> int:
        return self._process.pid

    async def line(self) -> str:
        """Return the next line that the process prints. Raises EOFError at the end of the output."""
        assert self._process.stdout is not None
        read = await self._process.stdout.readline()
        if not read:
            raise EOFError(f"process {self.pid} has ended")
        return read.decode().rstrip("\n")

    def write_line(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def error_text(self) -> str:
        """Return the last error that the process printed, or the end of its stderr if there is no error."""
        written = self._log.read_text(errors="replace")[-_ERROR_CHARACTERS:].strip()
        _, error, text = written.rpartition("error: ")
        return text if error else written

    async def ended(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        """Kill the process with -9. The children of the process are not killed."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def stop(self, *, patient: bool = True) -> None:
        """End the process with SIGTERM, and wait for the process and its children.

        If `patient` is False or the wait takes longer than `_END_SECONDS`, the remaining processes are killed with -9.
        """
        if self._over:
            return
        if self._process.returncode is None and patient:
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS if patient else 0):
                await self._process.wait()
                while self._left():  # noqa: ASYNC110 - there is no event for the end of a grandchild
                    await asyncio.sleep(_POLL_SECONDS)
        while self.kill_all():  # noqa: ASYNC110 - as above
            await asyncio.sleep(_POLL_SECONDS)
        # The output is read to its end, because unread output keeps the pipe open.
        await self._process.communicate()
        self._over = True

    def kill_all(self) -> bool:
        """Kill the process and its children with -9. Returns whether any of these processes was running."""
        left = [] if self._over else self._left()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(left)

    def _left(self) -> list[int]:
        """Return the ids of running processes in the session of this process: also Spark's JVM and Python workers."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    # Fields after the name: state, parent, group, session. The name may contain brackets.
                    state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(session) == self.pid and state not in "ZX":
                        found.append(int(entry.name))
        return found


async def start(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> Process:
    """Start a process in `folder`: this Python interpreter with these arguments. Its stderr goes to the file `log`."""
    with log.open("wb") as stderr:
        made = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env=environment,
            start_new_session=True,
            limit=_LONGEST_LINE,
        )
    return Process(made, log)
