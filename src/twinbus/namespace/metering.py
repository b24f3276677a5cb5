"""The meter's way into the ledger (N5): what was served in each interval, a line per entity and operation.

What is counted, the meter says; how lines come to the disk is the ledger's. A ledger that cannot be written stops no
namespace.
"""

from __future__ import annotations

import asyncio
from typing import Final

from twinbus.clock import Clock
from twinbus.ledger.ledger import Ledger
from twinbus.namespace.meter import OperationMeter

INTERVAL_SECONDS: Final = 1.0


class Metering:
    """Runs on the event loop from `start` until `close`, which also closes the ledger."""

    def __init__(self, ledger: Ledger, namespace: str, meter: OperationMeter, clock: Clock) -> None:
        self._ledger = ledger
        self._namespace = namespace
        self._meter = meter
        self._clock = clock
        self._since = clock.now()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_SECONDS, self._next)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._tell()
        await asyncio.to_thread(self._ledger.close)

    def _next(self) -> None:
        self._tell()
        self.start()

    def _tell(self) -> None:
        until = self._clock.now()
        for (entity, operation), (count, size, units) in self._meter.take():
            self._ledger.metered(self._namespace, entity, operation, count, size, units, self._since, until)
        self._since = until
