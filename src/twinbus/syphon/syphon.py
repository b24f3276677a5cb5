"""A syphon: finds the backlog queues, runs a pump on each queue, reports progress.

A syphon ends when it is stopped; a draining syphon also ends when no message that is left can move (Y11). Several
syphons may run at the same time, in one process or on many machines: the broker's locks divide the messages among them
(Y1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from math import inf
from types import TracebackType
from typing import Final, Self

from twinbus.errors import OperatorError, TwinbusError
from twinbus.ledger import Ledger
from twinbus.syphon.context import EmptiedListener, StepListener, SyphonContext, SyphonOptions, wall_clock
from twinbus.syphon.discovery import Discovery, RemainingMessages
from twinbus.syphon.left_messages import LeftMessages, QueueCounts, left_by_destination
from twinbus.syphon.plan import DrainEnd, QueueSearches
from twinbus.syphon.progress import Progress, ProgressCounter, messages_that_can_move
from twinbus.syphon.pump import Pump
from twinbus.syphon.shared_holds import SharedHolds
from twinbus.syphon.syphon_ledger import SyphonLedger
from twinbus.syphon.transport import Transport

_log = logging.getLogger(__name__)

# A drain gives up a backlog queue that has not answered for this number of seconds. A destination is given up earlier:
# what waits for it is known, but what is left in such a queue is not.
_QUEUE_PATIENCE: Final = 60.0


class SyphonState(StrEnum):
    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    ENDED = "ended"


class SyphonBrokenError(TwinbusError):
    """A pump ended because of a defect in Twinbus.

    No message is lost: when the locks of the pump's messages end, the broker delivers these messages again.
    """


class SecondaryAwayError(OperatorError):
    """A drain found no backlog queue, because the secondary did not answer."""

    def __init__(self, seconds: float, error: Exception) -> None:
        super().__init__(
            f"the backlog queues could not be found for {seconds:.0f} s: {error}",
            "Check that the secondary can be reached and that the key has the right Listen. Then drain again.",
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
        self._searches = QueueSearches()
        self._search_failing_since: float | None = None
        self._remaining = RemainingMessages(discovery)
        self._drain_end = DrainEnd(self.options.wait_for_destinations)
        self._settled: dict[Pump, int] = {}
        """By pump, how many messages were moved when no message of its queue could move."""
        self._has_drained = False

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

    def search_queues_now(self) -> None:
        """Search for backlog queues at once, because the caller reports that a queue was found or made (Y1)."""
        self._searches.search_now()
        self._wake()

    def set_rate(self, rate: float | None) -> None:
        self._context.rate_limit.set_rate(rate, self._context.now())

    # --- running -----------------------------------------------------------------------------------------------------

    async def run(self) -> Progress:
        """Run until `stop` or, while draining, until no message that is left can move.

        The result of a drain that ended by itself names the messages that are left (`Progress.left`). Raises
        SyphonBrokenError if a pump ended by a defect, SecondaryAwayError if a drain finds no backlog queue, and
        LedgerUnavailableError if a drain must not go on without its ledger, which cannot be written.
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
                        pump.start()
                    if self.options.drain and self._is_drain_over():
                        self._has_drained = True
                        break
                await self._wait()
        finally:
            watching.cancel()
            await self._pause_pumps(SyphonState.STOPPING)
            self.state = SyphonState.ENDED
        if context.pump_error is not None:
            raise SyphonBrokenError(f"a pump ended: {context.pump_error!r}") from context.pump_error
        if context.ledger_error is not None:
            raise context.ledger_error
        return replace(self.progress(), left=self._left()) if self._has_drained else self.progress()

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
        """Look for backlog queues if a search is due."""
        now = self._context.now
        if now() < self._searches.due:
            return
        self._searches.began()
        try:
            found = await self._discovery.queues()
        except Exception as error:
            self._check_search(error)
            pause = self._searches.failed(now())
            _log.warning("the search for backlog queues failed, next try in %g s: %s", pause, error)
            return
        self._search_failing_since = None
        known_before = len(self._pumps)
        for queue in found:
            if queue not in self._pumps:
                pump = self._pumps[queue] = Pump(queue, self._context)
                pump.when_changed(self._wake)
            self._context.broker_clock(queue).lock_seconds = self._discovery.lock_seconds(queue)
        known = len(self._pumps)
        self._context.pump_count = max(1, known)
        pause = self._searches.succeeded(now(), known=known, new=known - known_before)
        if not found:
            _log.warning("no backlog queue was found, next search in %g s", pause)
            if self.options.drain:
                self.stop()

    def _check_search(self, error: Exception) -> None:
        """Raise SecondaryAwayError if a drain has searched for its backlog queues for too long."""
        now = self._context.now()
        if self._search_failing_since is None:
            self._search_failing_since = now
        waited = now - self._search_failing_since
        if self.options.drain and not self._pumps and waited >= self._queue_patience:
            raise SecondaryAwayError(waited, error) from error

    def _is_drain_over(self) -> bool:
        """Return whether the drain ends now. If not, set the times of the next probes."""
        context, total = self._context, self._counts.total
        now, destinations = context.now(), context.destinations
        moved = total.returned + total.dead_lettered + total.kept
        pumps = self._pumps.values()
        # A queue that does not answer is given up, and so are the messages put aside in it: nobody can bring them back.
        answering = [pump for pump in pumps if pump.failing_for < self._queue_patience]
        for pump in answering:
            if pump.is_settled(now):
                self._settled[pump] = moved
        # New messages that are only put aside change nothing: the queue counts as settled while they are.
        is_moving = any(pump.is_moving for pump in pumps)
        is_settled = bool(pumps) and not is_moving and all(self._settled.get(pump) == moved for pump in answering)
        paths = {path for pump in answering for path in pump.deferred.destinations()} if is_settled else set()
        waiting = [destinations.waits(path) for path in paths]
        if self._drain_end.is_over(now, moved, is_settled=is_settled, waiting=waiting):
            return True
        changed = [destinations.retry_by(path, self._drain_end.last_try_at) for path in paths]
        if any(changed):
            context.notify_listeners()
        return False

    @property
    def _queue_patience(self) -> float:
        return max(self.options.wait_for_destinations, _QUEUE_PATIENCE)

    async def _wait(self) -> None:
        """Wait until `_wake` is called, the next search for queues is due, or a drain may be over."""
        now = self._context.now()
        last_try = self._drain_end.last_try_at
        due = min(self._searches.due, last_try if last_try > now else inf)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self._paused else max(due - now, 0.0)):
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
    def has_drained(self) -> bool:
        """Whether a drain ended by itself, not by `stop`. Messages may be left: see `Progress.left`."""
        return self._has_drained

    def progress(self) -> Progress:
        now, counts = self._context.now(), self._counts
        rate = counts.rate(now)
        aside = self._aside()
        remaining = messages_that_can_move(self._remaining.last, self._stuck(aside))
        return Progress(
            seconds=now - counts.began,
            total=counts.total,
            by_destination=counts.by_destination,
            states=self._context.destinations.statuses(),
            operations=dict(Counter(counts.operations)),
            rate=rate,
            held=sum(pump.held for pump in self._pumps.values()),
            aside_by_destination=aside,
            remaining=remaining,
            seconds_left=None if remaining is None or rate == 0 else remaining / rate,
            state=str(self.state),
        )

    def _aside(self) -> Counter[str]:
        """Return by destination how many messages are put aside."""
        aside: Counter[str] = Counter()
        for pump in self._pumps.values():
            aside.update(pump.deferred.counts())
        return aside

    def _stuck(self, aside: Counter[str]) -> int:
        """Return how many messages of the backlog cannot move now: put aside, kept or scheduled."""
        pumps = self._pumps.values()
        not_ready = sum(count for path, count in aside.items() if not self._context.destinations.is_ready(path))
        return not_ready + sum(pump.deferred.kept + pump.deferred.scheduled.total() for pump in pumps)

    def _left(self) -> tuple[LeftMessages, ...]:
        destinations = self._context.destinations
        queues = [
            QueueCounts(
                pump.queue,
                pump.deferred.unavailable(),
                pump.deferred.scheduled,
                None if pump.failing_since is None else pump.failure,
            )
            for pump in self._pumps.values()
        ]
        return left_by_destination(
            self._aside(), destinations.statuses(), self._counts.by_destination, queues, destinations.is_held
        )

    async def count_remaining(self) -> int | None:
        """Return the number of messages that can move; None if it is not known. `progress` then shows this number too.

        Sends a request only if messages were moved since the last request.
        """
        await self._remaining.count(self._counts.total, self._context.now())
        return self.progress().remaining
