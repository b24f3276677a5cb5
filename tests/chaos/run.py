"""One run: two namespaces, paired senders, syphons, and the outages of a plan. At the end, checks every message.

`outage_plan` decides what happens. `message_accounts` decides what must hold.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final, Self

from typer.testing import CliRunner

from tests.chaos import event_log, sending, syphoning
from tests.chaos.entities import DESTINATIONS, PRIMARY_CONFIG, QUEUES, SECONDARY_CONFIG
from tests.chaos.message_accounts import MessageAccounts
from tests.chaos.outage_plan import Outage, OutagePlan, Trouble
from tests.chaos.processes import SyphonProcesses, SyphonSlot, ended, forks, started
from tests.chaos.receiving import receive_all
from tests.chaos.sending import Sending
from tests.chaos.syphoning import StopPoint, Syphoning
from twinbus.cli.main import app
from twinbus.ledger import balance, dead_writers, read_ledger
from twinbus.testing import LocalNamespace

_LOOK_SECONDS: Final = 0.02
_BEGIN_SECONDS: Final = 90.0
_DRAIN_SECONDS: Final = 60.0
_STRIKE_SECONDS: Final = 1.5
_WAVES: Final = 8
"""The most outages until every stop point is reached: a backlog may be too small to reach all of them."""
_SETTLE_SECONDS: Final = 1.3
"""Seconds after an outage: until pings have restored the entities, and for some more sends."""


class ChaosNamespaces:
    """The two servers of all runs. After a run that failed, new servers are started."""

    def __init__(self) -> None:
        self.used = False
        self._make()

    def _make(self) -> None:
        self.primary = LocalNamespace("primary", config=PRIMARY_CONFIG, log_level="warning")
        self.secondary = LocalNamespace("secondary", config=SECONDARY_CONFIG, log_level="warning")

    def __enter__(self) -> Self:
        self.primary.start()
        self.secondary.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self.primary, self.secondary):
            if one.running:
                os.kill(one.pid, signal.SIGCONT)
            one.close()

    @contextmanager
    def clean(self) -> Iterator[None]:
        if self.used:
            self.__exit__()
            self._make()
            self.__enter__()
        self.used = True
        yield
        self.used = False


class ChaosRun:
    """One run: `ChaosRun(ground, story, folder).live()`. After that, `books` has the accounts of the run."""

    def __init__(self, ground: ChaosNamespaces, story: OutagePlan, folder: Path, *, variant: str | None = None) -> None:
        self.books = MessageAccounts()
        self._ground = ground
        self._story = story
        self._folder = folder
        self._ledgers = folder / "ledger"
        self._variant = variant
        self._context = forks()
        self._last = self._syphoning("drain", StopPoint(), drain=True)
        self._senders = {
            name: Sending(*self._strings, self._ledgers, folder / f"{name}.sent", name, story.seed)
            for name in story.senders
        }
        self._crew = SyphonProcesses(
            self._context,
            [SyphonSlot(f"syphon-{number}", self._syphoning, list(fates)) for number, fates in enumerate(story.fates)],
        )

    @property
    def _strings(self) -> tuple[str, str]:
        return self._ground.primary.connection_string, self._ground.secondary.connection_string

    def _syphoning(self, name: str, fate: StopPoint, *, drain: bool = False) -> Syphoning:
        return Syphoning(*self._strings, self._ledgers, self._folder / f"{name}.steps", fate, drain, self._variant)

    # --- what happens ------------------------------------------------------------------------------------------------

    def live(self) -> None:
        senders = [started(self._context, sending.KINDS[name], work) for name, work in self._senders.items()]
        self._crew.start()
        try:
            self._until(lambda: self._begun(senders), _BEGIN_SECONDS, "the senders have not begun")
            for wave in range(_WAVES):
                self._suffer(first=not wave)
                if self._holds_within(lambda: self._crew.struck, _STRIKE_SECONDS):
                    break
            assert self._crew.struck, f"a place was never reached: {self._story.text}"
            for process in senders:
                process.terminate()
            for process in senders:
                assert ended(process) == 0, f"a sender ended with {process.exitcode}"
            self._until(lambda: self._crew.thawed, _BEGIN_SECONDS, "a syphon is still frozen")
            self._crew.stop()
        finally:
            for process in senders:
                process.kill()
                process.join()
            self._crew.kill()
        self._drain()
        self._look()

    def _begun(self, senders: list[ForkServerProcess]) -> bool:
        assert all(process.exitcode is None for process in senders), "a sender ended before it was told to"
        return all(
            {line[2] for line in event_log.read(work.log) if line[0] == "safe"} >= set(DESTINATIONS)
            for work in self._senders.values()
        )

    def _suffer(self, *, first: bool) -> None:
        primary, secondary, story = self._ground.primary, self._ground.secondary, self._story
        trouble = story.trouble if first else Trouble.NONE
        match story.outage:
            case Outage.KILL:
                primary.kill()
            case Outage.BLACK_HOLE:
                primary.faults.set("black-hole", duration=story.seconds)
            case Outage.FREEZE:
                os.kill(primary.pid, signal.SIGSTOP)
        self._pass(story.seconds / 2)
        self._meet(trouble, away=True)
        self._pass(story.seconds / 2)
        match story.outage:
            case Outage.KILL:
                primary.start()
            case Outage.BLACK_HOLE:
                primary.faults.clear()
            case Outage.FREEZE:
                os.kill(primary.pid, signal.SIGCONT)
        if first and story.struck:
            self._crew.strike()
        self._meet(trouble, away=False)
        self._pass(_SETTLE_SECONDS)
        secondary.faults.clear()
        primary.faults.clear()

    def _meet(self, trouble: Trouble, *, away: bool) -> None:
        primary, secondary, seed = self._ground.primary, self._ground.secondary, self._story.seed
        match trouble:
            case Trouble.SECONDARY_KILLED if away:
                secondary.kill()
                self._pass(0.2)
                secondary.start()
            case Trouble.SECONDARY_KILLED_AFTER if not away:
                secondary.kill()
                secondary.start()
            case Trouble.QUEUE_BROKEN if away:
                secondary.faults.set("internal-error", entity=QUEUES[seed % len(QUEUES)], duration=1.5)
            case Trouble.SENDS_UNANSWERED if not away:
                primary.faults.set("drop-ack", points=["send"], probability=0.2, count=12, seed=seed)
            case Trouble.COMPLETIONS_UNANSWERED if not away:
                secondary.faults.set("drop-ack", points=["settle"], probability=0.2, count=12, seed=seed)
            case Trouble.PRIMARY_BUSY if not away:
                primary.faults.set("server-busy", points=["send"], duration=0.7)
            case Trouble.PRIMARY_AGAIN if not away:
                self._pass(0.3)
                primary.kill()
                self._pass(0.3)
                primary.start()
            case _:
                pass

    def _pass(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._crew.tend()
            time.sleep(_LOOK_SECONDS)

    def _until(self, holds: Callable[[], bool], seconds: float, otherwise: str) -> None:
        assert self._holds_within(holds, seconds), otherwise

    def _holds_within(self, holds: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (found := holds()) and time.monotonic() < end:
            self._pass(_LOOK_SECONDS)
        return found

    # --- what came of it ---------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Drain the backlog with a syphon that is not killed."""
        process = started(self._context, syphoning.run, self._last)
        assert ended(process, _DRAIN_SECONDS) == 0, f"the last syphon ended with {process.exitcode}"

    def _look(self) -> None:
        books = self.books
        for work in self._senders.values():
            for event, ids, destination, *_ in event_log.read(work.log):
                match event:
                    case "asked":
                        books.asked(destination, ids)
                    case "safe":
                        books.safe(ids)
                    case _:
                        books.figures["sends that failed"] += 1
        books.clients_ledger(entry for entry in read_ledger(self._ledgers))
        for life, code in [*((life.work, code) for life, code in self._crew.over), (self._last, 0)]:
            books.figures[f"syphons that ended with {code}"] += 1
            books.life(((event, ids) for event, ids in event_log.read(life.log)), killed=code == -signal.SIGKILL)
        asyncio.run(receive_all(books, *self._strings))
        books.judge()
        self._check_ledger()

    def _check_ledger(self) -> None:
        """Check that `twinbus ledger check` prints the sums of the balance."""
        dead = dead_writers(self._ledgers)
        found = balance(read_ledger(self._ledgers), dead)
        self.books.judge_ledger(found)
        answer = CliRunner().invoke(app, ["ledger", "check", str(self._ledgers), "--json"])
        told = json.loads(answer.stdout)
        assert answer.exit_code == (1 if found.lost else 0)
        for name in ("accepted", "delivered", "in_backlog", "lost", "duplicated"):
            assert told[name] == getattr(found, name).total()
