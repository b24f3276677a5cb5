"""Messages that were received together and are held until each is settled, and their locks, renewed meanwhile (Y4)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from twinbus.syphon.transport import Backlog, BacklogFailedError, HeldMessage

_log = logging.getLogger(__name__)

# Between what a lock may be worth, in seconds, whatever the two clocks say.
_SHORTEST_LOCK: Final = 4.0
_LONGEST_LOCK: Final = 60.0
_AGAIN_SECONDS: Final = 1.0
_AT_A_TIME: Final = 500


class HeldBatch:
    """`lost` are those whose lock is known to be lost, by identity: another receiver has them."""

    __slots__ = ("_settled", "held", "lost", "renew_at", "size")

    def __init__(self, held: Sequence[HeldMessage], now: float, wall: datetime) -> None:
        self.held = held
        self.size = sum(one.size for one in held)
        self.lost: set[int] = set()
        self._settled: set[int] = set()
        self.renew_at = self._half_way(now, wall)

    def settled(self, held: Sequence[HeldMessage]) -> None:
        self._settled.update(map(id, held))

    def unsettled(self) -> list[HeldMessage]:
        return [one for one in self.held if id(one) not in self._settled and id(one) not in self.lost]

    def renewed(self, now: float, wall: datetime) -> None:
        self.renew_at = self._half_way(now, wall)

    def _half_way(self, now: float, wall: datetime) -> float:
        """Locks are given in order of delivery: the first is the first to end. What is settled is renewed no more."""
        held = next(iter(self.unsettled()), None)
        left = _LONGEST_LOCK if held is None else (held.locked_until - wall).total_seconds()
        return now + min(max(left, _SHORTEST_LOCK), _LONGEST_LOCK) / 2


class LockRenewer:
    """Renews the locks of one pump's loads at half their time."""

    def __init__(self, backlog: Backlog, now: Callable[[], float], wall: Callable[[], datetime]) -> None:
        self._backlog = backlog
        self._now = now
        self._wall = wall
        self._loads: dict[HeldBatch, None] = {}
        self._came = asyncio.Event()

    def add(self, load: HeldBatch) -> None:
        self._loads[load] = None
        self._came.set()

    def remove(self, load: HeldBatch) -> None:
        self._loads.pop(load, None)

    async def run(self) -> None:
        while True:
            if not self._loads:
                self._came.clear()
                await self._came.wait()
            now = self._now()
            due = [load for load in self._loads if load.renew_at <= now]
            for load in due:
                await self._renew(load)
            if not due:
                first = min((load.renew_at for load in self._loads), default=now)
                await asyncio.sleep(max(first - now, 0.05))

    async def _renew(self, load: HeldBatch) -> None:
        held = load.unsettled()
        try:
            for first in range(0, len(held), _AT_A_TIME):
                part = held[first : first + _AT_A_TIME]
                lost = await self._backlog.renew(part)
                load.lost.update(map(id, lost))
        except BacklogFailedError as error:
            _log.warning("locks were not renewed, tried again: %s", error)
            load.renew_at = self._now() + _AGAIN_SECONDS
        else:
            load.renewed(self._now(), self._wall())
