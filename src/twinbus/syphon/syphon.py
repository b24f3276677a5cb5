"""A syphon: finds the backlog queues, runs a pump on each, tells how far it is; ends when told, or when all is moved.

Several may run at once, in one process or on many machines: the locks of the broker share the work out (Y1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from enum import StrEnum
from types import TracebackType
from typing import Final, Self

from twinbus.backlog import CREDENTIAL_REFUSED
from twinbus.errors import OperatorError, TwinbusError
from twinbus.ledger import Ledger
from twinbus.syphon.context import EmptiedListener, StepListener, SyphonContext, SyphonOptions, wall_clock
from twinbus.syphon.discovery import Discovery, RemainingMessages
from twinbus.syphon.plan import DestinationStatus, destination_key
from twinbus.syphon.progress import Progress, ProgressCounter
from twinbus.syphon.pump import Pump
from twinbus.syphon.syphon_ledger import SyphonLedger
from twinbus.syphon.transport import Transport

_log = logging.getLogger(__name__)

DISCOVERY_INTERVAL: Final = 3600.0
"""For backlog queues that were created since."""
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
# A right that was given just now may need a moment to be known everywhere.
_REFUSALS: Final = 3
_NAMED: Final = 5


class SyphonState(StrEnum):
    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    ENDED = "ended"


class SyphonBrokenError(TwinbusError):
    """A pump ended by a defect of its own. No message is lost: what it held comes back."""


class PrimaryRefusesError(OperatorError):
    """A drain that would never end: all that is left is for entities that refuse the credential."""

    def __init__(self, states: Sequence[DestinationStatus], messages: int) -> None:
        named = ", ".join(sorted(one.path for one in states)[:_NAMED])
        more = f" and {len(states) - _NAMED} more" if len(states) > _NAMED else ""
        super().__init__(
            f"the primary refuses the credential ({states[0].cause}) for {named}{more}: {messages} messages wait",
            "Look at the key's name, the key itself, and its Send right on the primary. Nothing is lost.",
        )


class Syphon:
    """`async with Syphon(transport, discovery, …) as syphon: await syphon.run()`. What it was given is closed with it.

    `primary` and `secondary` are the namespaces' names for the ledger, which stays the caller's.
    """

    def __init__(
        self,
        transport: Transport,
        discovery: Discovery,
        *,
        primary: str,
        secondary: str,
        options: SyphonOptions | None = None,
        ledger: Ledger | None = None,
        steps: StepListener | None = None,
        emptied: EmptiedListener | None = None,
        wall: Callable[[], datetime] = wall_clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.options = options or SyphonOptions()
        self.state = SyphonState.NEW
        self._transport = transport
        self._discovery = discovery
        self._counts = ProgressCounter(asyncio.get_running_loop().time())
        books = SyphonLedger(ledger, primary, secondary, self._counts)
        self._room = SyphonContext(transport, self.options, books, steps, wall=wall, chance=chance)
        self._room.listen(self._tell)
        if emptied is not None:
            self._room.emptied = emptied
        self._pumps: dict[str, Pump] = {}
        self._told = asyncio.Event()
        self._paused = False
        self._look_at = float("-inf")
        self._pause = _FIRST_PAUSE
        self._remainder = RemainingMessages(discovery)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- what it is told ---------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Takes nothing more; `run` returns once what is in flight is settled."""
        self._room.stopping = True
        self._tell()

    def pause(self) -> None:
        self._paused = True
        self._tell()

    def resume(self) -> None:
        self._paused = False
        self._tell()

    def set_rate(self, rate: float | None) -> None:
        self._room.pacing.set_rate(rate, self._room.now())

    # --- running -----------------------------------------------------------------------------------------------------

    async def run(self) -> Progress:
        """Until `stop`, or, draining, until every backlog queue was found empty."""
        self.state = SyphonState.RUNNING
        try:
            while not self._room.stopping and self._room.broken is None:
                self._told.clear()
                if self._paused:
                    await self._rest(SyphonState.PAUSED)
                else:
                    self.state = SyphonState.RUNNING
                    await self._look()
                    for pump in self._pumps.values():
                        if not pump.drained:
                            pump.start()
                    if self._pumps and all(pump.drained for pump in self._pumps.values()):
                        break
                    self._refuse_to_wait()
                await self._wait()
        finally:
            await self._rest(SyphonState.STOPPING)
            self.state = SyphonState.ENDED
        if self._room.broken is not None:
            raise SyphonBrokenError(f"a pump ended: {self._room.broken!r}") from self._room.broken
        return self.progress()

    async def close(self) -> None:
        self.stop()
        await self._rest(SyphonState.STOPPING)
        for pump in self._pumps.values():
            await pump.close()
        await self._room.close()
        await self._discovery.close()
        await self._transport.close()
        self.state = SyphonState.ENDED

    async def _look(self) -> None:
        """The secondary may be away: then what is known is pumped, and it is asked again, after growing pauses."""
        if self._room.now() < self._look_at:
            return
        try:
            found = await self._discovery.queues()
        except Exception as error:
            _log.warning("the backlog queues could not be looked for, tried again in %g s: %s", self._pause, error)
            self._look_at = self._room.now() + self._pause
            self._pause = min(self._pause * 2, _LONGEST_PAUSE)
            return
        self._look_at, self._pause = self._room.now() + DISCOVERY_INTERVAL, _FIRST_PAUSE
        for queue in found:
            if queue not in self._pumps:
                pump = self._pumps[queue] = Pump(queue, self._room)
                pump.when_drained(self._tell)
        self._room.pumps = max(1, len(self._pumps))
        if not found:
            _log.warning("no backlog queue was found")
            if self.options.drain:
                self.stop()

    def _refuse_to_wait(self) -> None:
        """Draining, and a person has to act before anything more can move."""
        pumps = self._pumps.values()
        if not self.options.drain or any(pump.held or not pump.is_dry for pump in pumps):
            return
        waiting = [
            (destination_key(path), count) for pump in pumps for path, (count, _) in pump.shelf.waiting().items()
        ]
        wanted = {key for key, _ in waiting}
        states = [one for one in self._room.destinations.states() if destination_key(one.path) in wanted]
        if states and all(one.cause in CREDENTIAL_REFUSED and one.failures >= _REFUSALS for one in states):
            raise PrimaryRefusesError(states, sum(count for _, count in waiting))

    async def _wait(self) -> None:
        left = self._look_at - self._room.now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self._paused else max(left, 0.0)):
                await self._told.wait()

    async def _rest(self, state: SyphonState) -> None:
        if self.state is not SyphonState.ENDED:
            self.state = state
        await asyncio.gather(*(pump.rest() for pump in self._pumps.values()))

    def _tell(self) -> None:
        self._told.set()

    # --- how far it is -----------------------------------------------------------------------------------------------

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(self._pumps)

    def progress(self) -> Progress:
        now, counts = self._room.now(), self._counts
        rate = counts.rate(now)
        remaining = self._remainder.told
        return Progress(
            seconds=now - counts.began,
            total=counts.total,
            by_destination=counts.by_destination,
            states=self._room.destinations.states(),
            operations=dict(Counter(counts.operations)),
            rate=rate,
            held=sum(pump.held for pump in self._pumps.values()),
            aside=sum(len(pump.shelf) for pump in self._pumps.values()),
            remaining=remaining,
            seconds_left=None if remaining is None or rate == 0 else remaining / rate,
            state=str(self.state),
        )

    async def count_remaining(self) -> int | None:
        """Asks the secondary, if there may be news; `progress` tells it from then on."""
        return await self._remainder.count(self._counts.total, self._room.now())
