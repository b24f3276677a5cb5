"""A process of the demo: in a session of its own, so that Ctrl-C is the demo's to handle; it ends with all it started.

What a process is for is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

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
