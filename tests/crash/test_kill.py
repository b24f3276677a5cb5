"""N2: killed with -9 at any instant under load, a namespace loses nothing acknowledged and repeats nothing settled.

A seed gives the same plan again: the loads, the kinds of kill and their instants. How far each task is at that instant
is the machine's: a failure shows again after some runs of its seed, not always at the first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.crash.inspection import check_file, drain, inspect
from tests.crash.load import CONFIG, DELETED, PLAIN, SCHEDULED, SESSIONS, TOPIC, UNIQUE, Load, new_books
from twinbus.message import Message
from twinbus.testing import LocalNamespace, LocalNamespaceError

LONGEST_DELAY = 0.25
"""Seconds from the first acknowledgements to the kill."""
FAULT_SECONDS = 2.0
"""A crash that waits for an operation which never comes is made a kill."""
BEGIN_SECONDS = 60.0
LIFE_SECONDS = 120.0


class Run:
    """One namespace and its lives."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.books = new_books()
        self.figures: Counter[str] = Counter()
        self._folder = folder
        self._namespace = LocalNamespace(data=folder / "data", config=CONFIG, log_level="warning")
        self._unsure: dict[str, Message] = {}

    async def lives(self, kills: int) -> None:
        try:
            await asyncio.to_thread(self._namespace.start)
            for life in range(kills):
                async with asyncio.timeout(LIFE_SECONDS):
                    await self._live(life)
            await drain(self.books, self._namespace.connection_string)
            await inspect(self.books, self._namespace.connection_string)
            self._judge("after the last")
            assert await asyncio.to_thread(self._namespace.stop) == 0
            assert check_file(self._folder / "data", self._folder / "copy") == (0, 0, 0)
            assert "Traceback" not in self._namespace.log.read_text()
        finally:
            await asyncio.to_thread(self._namespace.close)

    async def _live(self, life: int) -> None:
        rng = Random(f"{self.seed}-{life}")
        load = Load(self.books, self._namespace.connection_string, life, f"{self.seed}-{life}", self._unsure)
        running = asyncio.create_task(load.run())
        began = asyncio.create_task(load.begun.wait())
        try:
            await asyncio.wait((running, began), timeout=BEGIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            assert load.begun.is_set(), f"seed {self.seed}, life {life}: nothing was acknowledged"
            await self._die(load, rng)
            await running
        finally:
            for task in (running, began):
                task.cancel()
            await asyncio.gather(running, began, return_exceptions=True)
        self.books.wrong += load.broken
        messages, shared, bodies = check_file(self._folder / "data", self._folder / "copy")
        self.figures["messages at a kill"] += messages
        self.figures["copies that share a body"] += shared - bodies
        await self._rise(rng)
        await inspect(self.books, self._namespace.connection_string)
        self._judge(str(life))

    async def _die(self, load: Load, rng: Random) -> None:
        delay = rng.random() * LONGEST_DELAY
        if rng.random() < 0.6:
            await asyncio.sleep(delay)
            load.is_dying = True
        else:
            load.is_dying = True
            await asyncio.to_thread(self._set_crash, rng)
            try:
                await asyncio.to_thread(self._namespace.wait, FAULT_SECONDS)
                self.figures["crashes at an operation"] += 1
            except LocalNamespaceError:
                self.figures["crashes that were not reached"] += 1
        await asyncio.to_thread(self._namespace.kill)
        self.figures["kills"] += 1

    def _set_crash(self, rng: Random) -> None:
        point = rng.choice(("send", "send", "settle", "settle", "receive", "request"))
        entity = rng.choice(
            {"request": (SCHEDULED, SESSIONS), "receive": (PLAIN, DELETED, SESSIONS, TOPIC)}.get(
                point, (PLAIN, SESSIONS, UNIQUE, TOPIC, None)
            )
        )
        self._namespace.faults.set(
            "crash",
            entity=entity,
            points=[point],
            count=1,
            probability=rng.choice((1.0, 0.2, 0.05)),
            seed=rng.getrandbits(32),
            after=point == "send" and rng.random() < 0.5,
        )

    async def _rise(self, rng: Random) -> None:
        """Sometimes it is killed again before it is ready."""
        if rng.random() < 0.1:
            starting = asyncio.create_task(asyncio.to_thread(self._namespace.start))
            await asyncio.sleep(0.1 + rng.random() * 0.3)
            self._namespace.kill()
            try:
                await starting
                self._namespace.kill()
            except LocalNamespaceError:
                self.figures["kills before it was ready"] += 1
        await asyncio.to_thread(self._namespace.start)

    def _judge(self, life: str) -> None:
        shown = "\n  ".join(self.books.wrong[:20])
        assert not self.books.wrong, f"seed {self.seed}, life {life}: {len(self.books.wrong)} wrong\n  {shown}"


@pytest.mark.timeout(600)
async def test_nothing_acknowledged_is_lost_and_nothing_settled_comes_again(
    crash_seed: int, kills: int, tmp_path: Path
) -> None:
    print(f"replay with: pytest tests/crash --crash-seed {crash_seed}")
    run = Run(crash_seed, tmp_path)
    await run.lives(kills)
    told = run.books.figures
    print(dict(sorted((run.figures + told).items())))
    assert run.figures["kills"] == kills
    # The kills came while everything was under way.
    if kills >= 10:
        for account in run.books.accounts:
            assert told[f"sends to {account} acknowledged"] > kills
        for figure in ("sends unanswered", "nowhere confirmed", "nowhere unanswered", "active confirmed"):
            assert told[figure] > 0, figure
        for figure in ("deferred confirmed", "dead-letter confirmed", "received and deleted", "cancelled"):
            assert told[figure] > 0, figure
        for figure in ("states set", "ids sent again"):
            assert told[figure] > 0, figure
        assert run.figures["crashes at an operation"] > 0
        assert run.figures["copies that share a body"] > 0
