"""Messages that were received together, and the renewal of their locks until each is settled (Y4).

A lock is renewed after half of its duration. The end of a lock has to be decoded from the message, and most batches are
settled so early that nobody needs the end of their locks. So the renewer ignores a batch until half of the shortest
possible lock (`_SHORTEST_LOCK`) has passed, and decodes the end of the locks only then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from twinbus.syphon.transport import Backlog, BacklogFailedError, HeldMessage

_log = logging.getLogger(__name__)

# Limits for a computed lock duration, in seconds. The computation can be wrong while the lock duration is only assumed.
_SHORTEST_LOCK: Final = 4.0
_LONGEST_LOCK: Final = 60.0
_RETRY_SECONDS: Final = 1.0
_SHORTEST_SLEEP: Final = 0.05
_RENEWAL_SIZE: Final = 500


class HeldBatch:
    """Messages that were received together.

    `lost` has the identities (`id`) of the messages whose lock is known to be lost. At `renew_at` the locks are
    renewed; if the end of the locks is not decoded yet, it is decoded at `renew_at`, and `renew_at` is set again.
    `is_only_put_aside` is True once it is decided that no message of the batch moves now.
    """

    __slots__ = ("_received_at", "_received_time", "_settled", "held", "is_only_put_aside", "lost", "renew_at", "size")

    def __init__(self, held: Sequence[HeldMessage], now: float, time: datetime) -> None:
        """`now` is the monotonic time of the receipt, and `time` the broker's time of the receipt (L5)."""
        self.held = held
        self.size = sum(one.size for one in held)
        self.lost: set[int] = set()
        self.is_only_put_aside = False
        self.renew_at = now + _SHORTEST_LOCK / 2
        self._settled: set[int] = set()
        self._received_at = now
        self._received_time: datetime | None = time
        """None after the end of the locks was decoded."""

    def settled(self, held: Sequence[HeldMessage]) -> None:
        self._settled.update(map(id, held))

    def unsettled(self) -> list[HeldMessage]:
        return [one for one in self.held if id(one) not in self._settled and id(one) not in self.lost]

    def renewed(self, now: float, time: datetime) -> None:
        self._received_time = None
        self.renew_at = now + self._half_of_lock(time)

    def is_due(self, now: float) -> bool:
        """Return whether the locks have to be renewed now. May decode the end of the locks and set `renew_at`."""
        if self._received_time is not None and now >= self.renew_at:
            self.renew_at = self._received_at + self._half_of_lock(self._received_time)
            self._received_time = None
        return now >= self.renew_at

    def _half_of_lock(self, time: datetime) -> float:
        # Locks are granted in the order of delivery, so the lock of the first unsettled message ends first.
        first = next(iter(self.unsettled()), None)
        seconds = _LONGEST_LOCK if first is None else (first.locked_until - time).total_seconds()
        return min(max(seconds, _SHORTEST_LOCK), _LONGEST_LOCK) / 2


class LockRenewer:
    """Renews the locks of one pump's batches. `now` returns the monotonic time, `time` the broker's time (L5)."""

    def __init__(self, backlog: Backlog, now: Callable[[], float], time: Callable[[], datetime]) -> None:
        self._backlog = backlog
        self._now = now
        self._time = time
        self._batches: dict[HeldBatch, None] = {}
        self._added = asyncio.Event()

    def add(self, batch: HeldBatch) -> None:
        self._batches[batch] = None
        self._added.set()

    def remove(self, batch: HeldBatch) -> None:
        self._batches.pop(batch, None)

    async def run(self) -> None:
        while True:
            if not self._batches:
                self._added.clear()
                await self._added.wait()
            now = self._now()
            due = [batch for batch in self._batches if batch.is_due(now)]
            for batch in due:
                await self._renew(batch)
            if not due:
                first = min((batch.renew_at for batch in self._batches), default=now)
                await asyncio.sleep(max(first - now, _SHORTEST_SLEEP))

    async def _renew(self, batch: HeldBatch) -> None:
        held = batch.unsettled()
        try:
            for first in range(0, len(held), _RENEWAL_SIZE):
                lost = await self._backlog.renew(held[first : first + _RENEWAL_SIZE])
                batch.lost.update(map(id, lost))
        except BacklogFailedError as error:
            _log.warning("locks were not renewed, next try in %g s: %s", _RETRY_SECONDS, error)
            batch.renew_at = self._now() + _RETRY_SECONDS
        else:
            batch.renewed(self._now(), self._time())
