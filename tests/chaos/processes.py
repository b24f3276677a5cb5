"""The processes of one run: senders, and syphons that are killed and started again.

They are forked from a server that has imported everything, so that a process starts within milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Final

from tests.chaos import syphoning
from tests.chaos.entities import LOCK_SECONDS
from tests.chaos.syphoning import StopPoint, Syphoning

FROZEN_SECONDS: Final = LOCK_SECONDS + 0.5
END_SECONDS: Final = 60.0


def forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.sending", "tests.chaos.syphoning"])
    return context


def started(context: ForkServerContext, target: Callable[[Any], None], work: Any) -> ForkServerProcess:
    process = context.Process(target=target, args=(work,), daemon=True)
    process.start()
    return process


def ended(process: ForkServerProcess, seconds: float = END_SECONDS) -> int:
    """Return the exit code. If the process does not end, kill it and raise an error."""
    process.join(seconds)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
        raise AssertionError(f"process {process.pid} did not end within {seconds:g} s")
    return code


@dataclass(slots=True)
class SyphonLife:
    work: Syphoning
    process: ForkServerProcess
    frozen_at: float | None = None
    thawed: bool = False

    @property
    def is_stopped(self) -> bool:
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1][0]
        except OSError:
            return False
        return state == "T"


@dataclass(slots=True)
class SyphonSlot:
    """One syphon, which runs several times (lives). Each life ends at its stop point, until no stop point is left."""

    name: str
    make: Callable[[str, StopPoint], Syphoning]
    fates: list[StopPoint]
    lives: list[SyphonLife] = field(default_factory=list)


class SyphonProcesses:
    """Call `tend` repeatedly: it starts the next life of a killed syphon, and resumes a frozen one after its locks."""

    def __init__(self, context: ForkServerContext, members: list[SyphonSlot]) -> None:
        self._context = context
        self._members = members
        self.over: list[tuple[SyphonLife, int]] = []
        """The lives that have ended, with their exit codes."""

    def start(self) -> None:
        for member in self._members:
            self._next(member)

    def tend(self) -> None:
        for member in self._members:
            life = member.lives[-1]
            if life.process.exitcode is not None:
                self.over.append((life, life.process.exitcode))
                self._next(member)
            elif life.frozen_at is None:
                if life.is_stopped:
                    life.frozen_at = time.monotonic()
            elif not life.thawed and time.monotonic() - life.frozen_at > FROZEN_SECONDS:
                life.thawed = True
                self._signal(life, signal.SIGCONT)

    @property
    def struck(self) -> bool:
        """Whether every stop point was reached."""
        lasts = [member.lives[-1] for member in self._members]
        return not any(member.fates for member in self._members) and all(
            life.work.fate.place is None or life.frozen_at is not None for life in lasts
        )

    @property
    def thawed(self) -> bool:
        return all(life.frozen_at is None or life.thawed for life in (member.lives[-1] for member in self._members))

    def strike(self) -> None:
        """Kill the first syphon with -9 at its present step. Its next life gets the same stop point."""
        self.tend()
        member = self._members[0]
        life = member.lives[-1]
        if life.work.fate.place is not None:
            member.fates.insert(0, life.work.fate)
        life.process.kill()
        life.process.join()

    def stop(self) -> None:
        """Stop the syphons with SIGTERM: they finish what is in flight."""
        for member in self._members:
            self._signal(member.lives[-1], signal.SIGCONT)
            self._signal(member.lives[-1], signal.SIGTERM)
        for member in self._members:
            self.over.append((member.lives[-1], ended(member.lives[-1].process)))

    def kill(self) -> None:
        for member in self._members:
            for life in member.lives[-1:]:
                life.process.kill()
                life.process.join()

    def _next(self, member: SyphonSlot) -> None:
        fate = member.fates.pop(0) if member.fates else StopPoint()
        work = member.make(f"{member.name}-{len(member.lives)}", fate)
        member.lives.append(SyphonLife(work, started(self._context, syphoning.run, work)))

    @staticmethod
    def _signal(life: SyphonLife, number: signal.Signals) -> None:
        if life.process.exitcode is None and life.process.pid is not None:
            os.kill(life.process.pid, number)
