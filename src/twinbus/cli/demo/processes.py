"""The folder of the demo and the processes in it: `twinbus` commands, shown as they are run, and ended with the demo.

What is run when is decided in `story`. Commands find the connection strings in the folder's twinbus.toml, as anybody's
would: they are on no command line.
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

from twinbus.cli.demo import spark_runner
from twinbus.cli.demo.application import BACKLOG_QUEUES, QUEUES, REGION, SUBSCRIPTIONS, TOPIC
from twinbus.errors import OperatorError
from twinbus.namespace.free_port import free_port

LEDGER: Final = "ledger"
TABLES: Final = "tables"
NAMES: Final = ("primary", "secondary")
_READY_SECONDS: Final = 60.0
_SPARK_SECONDS: Final = 300.0
# Small work for a JVM: half the processor time of one that optimizes for long runs.
_QUICK_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# A copy that arrives twice is dropped; a message that was out when the primary died comes again soon.
_ENTITY: Final = {"requires_duplicate_detection": True}
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
    """`show` is called with every command line before it is run, `wait` with what has to be waited for.

    Leaving ends all that still runs.
    """

    def __init__(self, folder: Path, show: Callable[[str], object], wait: Callable[[str], object]) -> None:
        self.folder = folder
        self.connection_strings: dict[str, str] = {}
        self.ports: dict[str, int] = {}
        self._show = show
        self._wait = wait
        self._processes: list[Process] = []
        self._batch: asyncio.Task[Process] | None = None

    async def __aenter__(self) -> Self:
        self._scratch.mkdir(parents=True)
        (self.folder / "primary.json").write_text(json.dumps(_CONFIG, indent=1), encoding="utf-8")
        self.ports = {name: free_port() for name in NAMES}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._batch is not None:
            self._batch.cancel()
            await asyncio.wait([self._batch])
        # What failed or was broken off waits for nobody.
        await asyncio.gather(*(one.stop(patient=kind is None) for one in self._processes))

    def kill(self) -> None:
        """At once, waiting for nothing."""
        for one in self._processes:
            one.kill_all()

    # --- namespaces --------------------------------------------------------------------------------------------------

    async def serve(self, name: str) -> Process:
        """A namespace, ready; again on its old port and data after it died."""
        config = ["--config", "primary.json"] if name == "primary" else []
        shown = ["serve", "--namespace", f"{name}={self.ports[name]}", "--data", name, *config, "--ledger", LEDGER]
        self._show(shlex.join(["twinbus", *shown]))
        process = await self._start(name, "-m", "twinbus", *shown, "--json", "--exit-with-stdin")
        with _in_time(f"the {name}", _READY_SECONDS, process):
            async with asyncio.timeout(_READY_SECONDS):
                while (line := await process.line()) != "ready":
                    self.connection_strings[name] = json.loads(line)["connection_string"]
        return process

    def connect(self) -> None:
        """For the commands to come."""
        file = self.folder / "twinbus.toml"
        file.touch(mode=0o600)
        lines = [f"{name} = {json.dumps(self.connection_strings[name])}" for name in NAMES]
        table = ["[connections]", *lines, "", "[pairing]", f"backlog_queue_count = {BACKLOG_QUEUES}", ""]
        file.write_text("\n".join(table), encoding="utf-8")

    # --- commands ----------------------------------------------------------------------------------------------------

    def begin_spark(self) -> None:
        """From now on commands run in one process, which has Spark: it starts while other things happen."""
        self._batch = asyncio.create_task(self._spark())

    async def _spark(self) -> Process:
        process = await self._start("spark", "-m", "twinbus.cli.demo.spark_runner")
        with _in_time("Spark", _SPARK_SECONDS, process):
            async with asyncio.timeout(_SPARK_SECONDS):
                while await process.line() != spark_runner.READY:
                    pass
        return process

    async def run(self, *arguments: str, hidden: int = 0, heard: Callable[[str], object]) -> tuple[int, Process]:
        """Its exit code, and the process it ran in. `hidden`: so many of the last arguments are this program's own."""
        self._show(shlex.join(["twinbus", *arguments[: len(arguments) - hidden]]))
        if self._batch is None:
            process = await self._start(arguments[0], "-m", "twinbus", *arguments)
            with contextlib.suppress(EOFError):
                while True:
                    heard(await process.line())
            code = await process.ended()
            await process.stop()
            return code, process
        if not self._batch.done():
            self._wait("Spark is still starting")
        process = await self._batch
        process.tell(json.dumps(arguments))
        try:
            while not (line := await process.line()).startswith(spark_runner.ENDED):
                heard(line)
        except EOFError:
            raise OperatorError("Spark's process has died", process.said()) from None
        return int(line.removeprefix(spark_runner.ENDED)), process

    async def ask(self, *arguments: str, good: Sequence[int] = (0,), hidden: int = 0) -> Any:
        """The last line that the command prints, which is JSON."""
        told: list[str] = []
        code, process = await self.run(*arguments, hidden=hidden, heard=told.append)
        if code not in good or not told:
            raise OperatorError(f"`twinbus {' '.join(arguments[:2])}` ended with {code}", process.said())
        return json.loads(told[-1])

    async def _start(self, name: str, *arguments: str) -> Process:
        log = self.folder / f"{name}-{len(self._processes)}.log"
        made = await start(arguments, self.folder, self._environment(), log)
        self._processes.append(made)
        return made

    @property
    def _scratch(self) -> Path:
        return self.folder / "tmp"

    def _environment(self) -> dict[str, str]:
        """The demo's own, without what would point its commands at other namespaces, or leave files elsewhere."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TWINBUS_")}
        more = {"TMPDIR": str(self._scratch), "SPARK_LOCAL_DIRS": str(self._scratch), "SPARK_SUBMIT_OPTS": _QUICK_JAVA}
        return {**kept, **more, "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def _in_time(what: str, seconds: float, process: Process) -> Any:
    try:
        yield
    except TimeoutError:
        raise OperatorError(f"{what} was not ready in {seconds:.0f} s", process.said()) from None
    except EOFError:
        raise OperatorError(f"{what} did not start", process.said()) from None


_END_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.05
_TOLD_CHARACTERS: Final = 2000
# --json lists every id in one line.
_LONGEST_LINE: Final = 2**26


class Process:
    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._over = False

    @property
    def pid(self) -> int:
        return self._process.pid

    async def line(self) -> str:
        """The next that it prints; EOFError where there is none."""
        assert self._process.stdout is not None
        read = await self._process.stdout.readline()
        if not read:
            raise EOFError(f"process {self.pid} has ended")
        return read.decode().rstrip("\n")

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def said(self) -> str:
        """Its last error, or else the end of what it wrote to stderr."""
        written = self._log.read_text(errors="replace")[-_TOLD_CHARACTERS:].strip()
        _, error, text = written.rpartition("error: ")
        return text if error else written

    async def ended(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        """-9, itself alone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def stop(self, *, patient: bool = True) -> None:
        """In order if it will, else by force, and whatever it has started with it."""
        if self._over:
            return
        if self._process.returncode is None and patient:
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS if patient else 0):
                await self._process.wait()
                while self._left():  # noqa: ASYNC110 - nobody tells when a process of another one has ended
                    await asyncio.sleep(_POLL_SECONDS)
        while self.kill_all():  # noqa: ASYNC110 - as above
            await asyncio.sleep(_POLL_SECONDS)
        # To the end: what is not read holds the pipe open.
        await self._process.communicate()
        self._over = True

    def kill_all(self) -> bool:
        """Itself and what it has started; whether there was anything."""
        left = [] if self._over else self._left()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(left)

    def _left(self) -> list[int]:
        """What is of its session and no zombie: of Spark, the JVM and its Python workers too."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    # Behind the name, which may hold anything but a last bracket: state, parent, group, session.
                    state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(session) == self.pid and state not in "ZX":
                        found.append(int(entry.name))
        return found


async def start(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> Process:
    """This Python with these arguments, in the folder; stderr goes to the log."""
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
