"""A namespace that is loaded, killed, restarted and inspected, many times.

The seed decides when and how it is killed. The oracle records what each life did and reports what is wrong.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, Self

from tests.crash.entities import CONFIG, DELETED, PLAIN, SCHEDULED, SESSIONS, TOPIC, UNIQUE, new_oracle
from tests.crash.inspection import check_file, drain, inspect
from tests.crash.load import Load
from twinbus.message import Message
from twinbus.namespace import NamespaceRequestError
from twinbus.testing import LocalNamespace, LocalNamespaceError

LONGEST_DELAY = 0.25
"""Most seconds from the first acknowledgements to the kill."""
FAULT_SECONDS = 2.0
"""If a crash fault is not hit within this time, the server is killed instead."""
BEGIN_SECONDS = 60.0
LIFE_SECONDS = 120.0
_CRASH_POINTS: dict[str, tuple[str | None, ...]] = {
    "send": (PLAIN, SESSIONS, UNIQUE, TOPIC, None),
    "settle": (PLAIN, SESSIONS, UNIQUE, TOPIC, None),
    "receive": (PLAIN, DELETED, SESSIONS, TOPIC),
    "request": (SCHEDULED, SESSIONS),
}


class KilledServer:
    """`async with KilledServer(seed, folder) as server` starts the namespace. `figures` counts what the kills met."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.data = folder / "data"
        self.oracle = new_oracle()
        self.figures: Counter[str] = Counter()
        self._scratch = folder / "copy"
        self._namespace = LocalNamespace(data=self.data, config=CONFIG, log_level="warning")
        self._unsure: dict[str, Message] = {}

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._namespace.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._namespace.close)

    async def live(self, life: int) -> None:
        """Load the server, kill it, restart it, and check everything."""
        async with asyncio.timeout(LIFE_SECONDS):
            await self.until_killed(life)
            await self.start(life)
            await self.look(f"life {life}")

    async def until_killed(self, life: int) -> None:
        rng = Random(f"{self.seed}-{life}")
        load = Load(self.oracle, self._namespace.connection_string, life, f"{self.seed}-{life}", self._unsure)
        running = asyncio.create_task(load.run())
        began = asyncio.create_task(load.begun.wait())
        try:
            await asyncio.wait((running, began), timeout=BEGIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            assert load.begun.is_set(), f"seed {self.seed}, life {life}: nothing was acknowledged"
            await self._die(load, rng)
            await running
        finally:
            for task in (running, began):
                task.cancel()
            await asyncio.gather(running, began, return_exceptions=True)
        self.oracle.wrong += load.broken
        messages, shared, bodies = check_file(self.data, self._scratch)
        self.figures["messages at a kill"] += messages
        self.figures["copies that share a body"] += shared - bodies

    async def start(self, life: int) -> None:
        """Restart the server on the same data. Sometimes kill it once more before it is ready."""
        rng = Random(f"{self.seed}-{life}-start")
        if rng.random() < 0.1:
            starting = asyncio.create_task(asyncio.to_thread(self._namespace.start))
            await asyncio.sleep(0.1 + rng.random() * 0.3)
            if self._namespace.running:
                # Not with `LocalNamespace.kill`, which would close the pipes that the thread reads from.
                os.kill(self._namespace.pid, signal.SIGKILL)
            try:
                await starting
                self._namespace.kill()
            except LocalNamespaceError:
                self.figures["kills before it was ready"] += 1
        await asyncio.to_thread(self._namespace.start)

    async def look(self, when: str) -> None:
        await inspect(self.oracle, self._namespace.connection_string)
        shown = "\n  ".join(self.oracle.wrong[:20])
        assert not self.oracle.wrong, f"seed {self.seed}, {when}: {len(self.oracle.wrong)} wrong\n  {shown}"

    async def end(self) -> None:
        """Receive all messages and stop the server. Nothing may be left in the file."""
        await drain(self.oracle, self._namespace.connection_string)
        await self.look("the end")
        assert await asyncio.to_thread(self._namespace.stop) == 0
        assert check_file(self.data, self._scratch) == (0, 0, 0)
        assert "Traceback" not in self._namespace.log.read_text()

    async def _die(self, load: Load, rng: Random) -> None:
        if rng.random() < 0.6:
            await asyncio.sleep(rng.random() * LONGEST_DELAY)
            load.is_dying = True
        else:
            load.is_dying = True
            try:
                await asyncio.to_thread(self._set_crash, rng)
                await asyncio.to_thread(self._namespace.wait, FAULT_SECONDS)
                self.figures["crashes at an operation"] += 1
            except LocalNamespaceError:
                self.figures["crashes that were not reached"] += 1
        await asyncio.to_thread(self._namespace.kill)
        self.figures["kills"] += 1

    def _set_crash(self, rng: Random) -> None:
        point = rng.choice(("send", "send", "settle", "settle", "receive", "request"))
        spec: dict[str, Any] = {
            "entity": rng.choice(_CRASH_POINTS[point]),
            "probability": rng.choice((1.0, 0.2, 0.05)),
            "seed": rng.getrandbits(32),
            "after": point != "receive" and rng.random() < 0.5,
        }
        try:
            self._namespace.faults.set("crash", points=[point], count=1, **spec)
        except NamespaceRequestError as error:
            # The fault may crash the server before its own request is answered. `_die` waits for the end.
            if error.status:
                raise
