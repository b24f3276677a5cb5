"""A syphon: finds the backlog queues, runs a pump on each queue, reports progress.

A syphon ends when it is stopped; a draining syphon also ends when all messages are moved. Several syphons may run at
the same time, in one process or on many machines: the broker's locks divide the messages among them (Y1).
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
from twinbus.syphon.shared_holds import SharedHolds
from twinbus.syphon.syphon_ledger import SyphonLedger
from twinbus.syphon.transport import Transport

_log = logging.getLogger(__name__)

DISCOVERY_INTERVAL: Final = 3600.0
"""Seconds between two searches for new backlog queues."""
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
# A drain gives up after this number of refusals, not after the first: a new right takes effect only after some seconds.
_REFUSALS: Final = 3
_NAMED_PATHS: Final = 5


class SyphonState(StrEnum):
    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    ENDED = "ended"


class SyphonBrokenError(TwinbusError):
    """A pump ended because of a defect in Twinbus.

    No message is lost: the broker delivers the messages that the pump held again when their locks end.
    """


class PrimaryRefusesError(OperatorError):
    """A drain cannot end: all messages that are left are for entities that refuse the credential."""

    def __init__(self, statuses: Sequence[DestinationStatus], messages: int) -> None:
        paths = ", ".join(sorted(one.path for one in statuses)[:_NAMED_PATHS])
        more = f" and {len(statuses) - _NAMED_PATHS} more" if len(statuses) > _NAMED_PATHS else ""
        super().__init__(
            f"the primary refuses the credential ({statuses[0].cause}) for {paths}{more}: {messages} messages wait",
            "Check the key's name, the key itself, and its Send right on the primary. Nothing is lost.",
        )


class Syphon:
    """A syphon. Use: `async with Syphon(transport, discovery, …) as syphon: await syphon.run()`.

    Closes the transport and the discovery; the caller closes the ledger. `primary` and `secondary` are the names of
    the namespaces in the ledger. Nothing is sent to a destination for which `is_held` returns True (S15); the caller
    calls `destination_restored` when that ends. Nothing is sent to a destination that `shared_holds` holds either; the
    syphon itself notices when that ends.
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
        on_step: StepListener | None = None,
        on_emptied: EmptiedListener | None = None,
        is_held: Callable[[str], bool] | None = None,
        shared_holds: SharedHolds | None = None,
        wall: Callable[[], datetime] = wall_clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.options = options or SyphonOptions()
        self.state = SyphonState.NEW
        self._transport = transport
        self._discovery = discovery
        self._counts = ProgressCounter(asyncio.get_running_loop().time())
        syphon_ledger = SyphonLedger(ledger, primary, secondary, self._counts)
        self._context = SyphonContext(transport, self.options, syphon_ledger, on_step, wall=wall, chance=chance)
        self._context.add_listener(self._wake)
        if on_emptied is not None:
            self._context.on_emptied = on_emptied
        checks = [] if is_held is None else [is_held]
        if shared_holds is not None:
            checks.append(shared_holds.is_held)
        if checks:
            self._context.destinations.is_held = lambda path: any(check(path) for check in checks)
        self._context.shared_holds = shared_holds
        self._pumps: dict[str, Pump] = {}
        self._woken = asyncio.Event()
        self._paused = False
        self._discover_at = float("-inf")
        self._discovery_pause = _FIRST_PAUSE
        self._remaining = RemainingMessages(discovery)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- control -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop receiving. `run` returns once all messages in flight are settled."""
        self._context.stopping = True
        self._wake()

    def pause(self) -> None:
        self._paused = True
        self._wake()

    def resume(self) -> None:
        self._paused = False
        self._wake()

    def destination_restored(self, path: str) -> None:
        """Send at once to a destination that was put aside, because the caller reports that it works again (Y12)."""
        self._context.destinations.retry_now(path, self._context.now())
        self._context.notify_listeners()

    def set_rate(self, rate: float | None) -> None:
        self._context.rate_limit.set_rate(rate, self._context.now())

    # --- running -----------------------------------------------------------------------------------------------------

    async def run(self) -> Progress:
        """Run until `stop` or, while draining, until every backlog queue was found empty.

        Raises PrimaryRefusesError if a drain cannot end, SyphonBrokenError if a pump ended by a defect.
        """
        context = self._context
        self.state = SyphonState.RUNNING
        shares_state = context.shared_holds is not None
        context.ledger.started({"poll": self.options.poll, "drain": self.options.drain, "state": shares_state})
        watching = asyncio.create_task(self._watch_holds())
        try:
            while not context.stopping and context.pump_error is None:
                self._woken.clear()
                if self._paused:
                    await self._pause_pumps(SyphonState.PAUSED)
                else:
                    self.state = SyphonState.RUNNING
                    await self._discover()
                    for pump in self._pumps.values():
                        if not pump.drained:
                            pump.start()
                    if self.is_drained:
                        break
                    self._check_refusals()
                await self._wait()
        finally:
            watching.cancel()
            await self._pause_pumps(SyphonState.STOPPING)
            self.state = SyphonState.ENDED
        if context.pump_error is not None:
            raise SyphonBrokenError(f"a pump ended: {context.pump_error!r}") from context.pump_error
        return self.progress()

    async def close(self) -> None:
        self.stop()
        await self._pause_pumps(SyphonState.STOPPING)
        for pump in self._pumps.values():
            await pump.close()
        await self._context.close()
        if self._context.shared_holds is not None:
            await self._context.shared_holds.close()
        await self._discovery.close()
        await self._transport.close()
        self.state = SyphonState.ENDED

    async def _watch_holds(self) -> None:
        """Read the shared state before the first message, and wake the pumps when its holds change (S15)."""
        holds = self._context.shared_holds
        if holds is not None:
            await holds.refresh()
            await holds.watch(self._context.notify_listeners)

    async def _discover(self) -> None:
        """Look for backlog queues if a search is due. If the search fails, set the next one after a growing pause."""
        now = self._context.now
        if now() < self._discover_at:
            return
        try:
            found = await self._discovery.queues()
        except Exception as error:
            pause = self._discovery_pause
            _log.warning("the search for backlog queues failed, next try in %g s: %s", pause, error)
            self._discover_at = now() + pause
            self._discovery_pause = min(pause * 2, _LONGEST_PAUSE)
            return
        self._discover_at, self._discovery_pause = now() + DISCOVERY_INTERVAL, _FIRST_PAUSE
        for queue in found:
            if queue not in self._pumps:
                pump = self._pumps[queue] = Pump(queue, self._context)
                pump.when_drained(self._wake)
            self._context.broker_clock(queue).lock_seconds = self._discovery.lock_seconds(queue)
        self._context.pump_count = max(1, len(self._pumps))
        if not found:
            _log.warning("no backlog queue was found")
            if self.options.drain:
                self.stop()

    def _check_refusals(self) -> None:
        """Raise PrimaryRefusesError if a drain waits only for entities that refuse the credential."""
        pumps = self._pumps.values()
        if not self.options.drain or any(pump.held or not pump.is_empty for pump in pumps):
            return
        waiting = [(destination_key(path), n) for pump in pumps for path, (n, _) in pump.deferred.waiting().items()]
        keys = {key for key, _ in waiting}
        statuses = [one for one in self._context.destinations.statuses() if destination_key(one.path) in keys]
        if statuses and all(one.cause in CREDENTIAL_REFUSED and one.failures >= _REFUSALS for one in statuses):
            raise PrimaryRefusesError(statuses, sum(count for _, count in waiting))

    async def _wait(self) -> None:
        """Wait until `_wake` is called or the next search for queues is due."""
        left = self._discover_at - self._context.now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self._paused else max(left, 0.0)):
                await self._woken.wait()

    async def _pause_pumps(self, state: SyphonState) -> None:
        if self.state is not SyphonState.ENDED:
            self.state = state
        await asyncio.gather(*(pump.pause() for pump in self._pumps.values()))

    def _wake(self) -> None:
        self._woken.set()

    # --- progress ----------------------------------------------------------------------------------------------------

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(self._pumps)

    @property
    def is_drained(self) -> bool:
        """Whether every backlog queue was drained: `run` ended by itself, not by `stop`."""
        return bool(self._pumps) and all(pump.drained for pump in self._pumps.values())

    def progress(self) -> Progress:
        now, counts = self._context.now(), self._counts
        rate = counts.rate(now)
        remaining = self._remaining.last
        return Progress(
            seconds=now - counts.began,
            total=counts.total,
            by_destination=counts.by_destination,
            states=self._context.destinations.statuses(),
            operations=dict(Counter(counts.operations)),
            rate=rate,
            held=sum(pump.held for pump in self._pumps.values()),
            aside_by_destination=self._aside(),
            remaining=remaining,
            seconds_left=None if remaining is None or rate == 0 else remaining / rate,
            state=str(self.state),
        )

    def _aside(self) -> Counter[str]:
        """Return by destination how many messages are put aside."""
        aside: Counter[str] = Counter()
        for pump in self._pumps.values():
            aside.update({path: count for path, (count, _) in pump.deferred.waiting().items()})
        return aside

    async def count_remaining(self) -> int | None:
        """Return the number of messages in the backlog; None if it is not known. `progress` then shows this number too.

        Sends a request only if messages were moved since the last request.
        """
        return await self._remaining.count(self._counts.total, self._context.now())
