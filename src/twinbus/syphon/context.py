"""What all pumps of one syphon share: options, both namespaces, state of the destinations, rate limit, ledger."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Final

from twinbus.errors import OptionError
from twinbus.syphon.plan import Destinations, RetryPolicy, destination_key
from twinbus.syphon.syphon_ledger import MeteredBacklog, SyphonLedger
from twinbus.syphon.transport import Destination, HeldMessage, OutgoingMessage, TimeToLive, Transport

BURST_SECONDS: Final = 0.5
"""Unused capacity of the last half second may be caught up."""
MIB: Final = 1024 * 1024
MAX_SENDERS: Final = 500
"""Links to destinations that stay open; beyond them, those that have been idle longest are closed."""


class MoveStep(StrEnum):
    """Progress of a message, for a `StepListener` (tests kill a syphon between any two steps)."""

    RECEIVED = "received"
    INTENDED = "intended"
    SENDING = "sending"
    CONFIRMED = "confirmed"
    COMPLETED = "completed"
    PUT_ASIDE = "put aside"
    DEAD_LETTERED = "dead-lettered"


StepListener = Callable[[MoveStep, Sequence[HeldMessage]], None]
EmptiedListener = Callable[[str, int], None]
"""Called when a backlog queue is empty, with its path and how many messages were moved since it was last empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyphonOptions:
    """`rate` is in messages per second, for all pumps together. `drain` ends the run once every queue is empty."""

    rate: float | None = None
    drain: bool = False
    ttl: TimeToLive = "restart"
    poll: float = 900.0
    """Y2: seconds of one long poll."""
    window: int = 4000
    """Messages that one pump holds at most."""
    window_bytes: int = 32 * MIB
    """Bytes that all pumps together hold at most."""
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise OptionError("rate", self.rate, "messages a second, more than 0 and finite")
        if self.ttl not in {"restart", "absolute"}:
            raise OptionError("ttl", self.ttl, "one of restart, absolute")
        if not 0 < self.poll <= 900:
            raise OptionError("poll", self.poll, "seconds, at most 900")
        for option in ("window", "window_bytes"):
            if getattr(self, option) < 1:
                raise OptionError(option, getattr(self, option), "at least 1")


wall_clock: Final[Callable[[], datetime]] = partial(datetime.now, UTC)


class RateLimit:
    """The rate limit of all pumps together (Y9), in messages per second; None is unlimited. Instants are arguments.

    Pumps wait before they receive, never while they hold locks.
    """

    def __init__(self, rate: float | None = None) -> None:
        self._rate = rate
        self._spent_until = float("-inf")

    def set_rate(self, rate: float | None, now: float) -> None:
        self._rate = rate
        self._spent_until = min(self._spent_until, now)

    def batch_size(self, wanted: int, pumps: int = 1) -> int:
        """How many messages one of `pumps` pumps may receive at a time, up to `wanted`."""
        return wanted if self._rate is None else max(1, min(wanted, int(self._rate * BURST_SECONDS / pumps)))

    def delay(self, now: float) -> float:
        """Seconds until the next message may be received."""
        return 0.0 if self._rate is None else max(0.0, self._spent_until - now)

    def spend(self, messages: int, now: float) -> None:
        """Record that so many messages were received."""
        if self._rate is not None:
            self._spent_until = max(self._spent_until, now - BURST_SECONDS) + messages / self._rate


@dataclass(slots=True)
class _Sender:
    destination: Destination
    sending: int = 0


class SyphonContext:
    """Made on the event loop that runs the pumps. Clocks and randomness are arguments, so that tests can simulate them.

    `now` is the loop's clock in seconds, `wall` the time of day.
    """

    def __init__(
        self,
        transport: Transport,
        options: SyphonOptions,
        ledger: SyphonLedger,
        on_step: StepListener | None = None,
        *,
        wall: Callable[[], datetime] = wall_clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.transport = transport
        self.options = options
        self.ledger = ledger
        self.destinations = Destinations(options.retry_policy)
        self.rate_limit = RateLimit(options.rate)
        self.on_step = on_step
        self.on_emptied: EmptiedListener = lambda queue, moved: None
        self.now: Callable[[], float] = asyncio.get_running_loop().time
        self.wall = wall
        self.chance = chance
        self.stopping = False
        self.pump_count = 1
        self.pump_error: BaseException | None = None
        """The first error that ended a pump; the syphon then ends too."""
        self._senders: dict[str, _Sender] = {}
        self._listeners: list[Callable[[], None]] = []

    def backlog(self, queue: str) -> MeteredBacklog:
        """A new connection to a backlog queue. The caller closes it."""
        return MeteredBacklog(self.transport.backlog(queue), queue, self.ledger, self.now)

    async def send(self, path: str, messages: Sequence[OutgoingMessage]) -> None:
        """Send with the one sender that all pumps share for this destination."""
        key = destination_key(path)
        # Taken out and put back, so that the senders are in the order of their last use.
        sender = self._senders.pop(key, None) or _Sender(self.transport.destination(path))
        self._senders[key] = sender
        sender.sending += 1
        try:
            if len(self._senders) > MAX_SENDERS:
                await self._close_idle_senders()
            await sender.destination.send(messages)
        finally:
            sender.sending -= 1

    async def _close_idle_senders(self) -> None:
        idle = [key for key, sender in self._senders.items() if not sender.sending]
        for sender in [self._senders.pop(key) for key in idle[: len(self._senders) - MAX_SENDERS]]:
            await sender.destination.close()

    def add_listener(self, call: Callable[[], None]) -> None:
        """`call` runs whenever a destination becomes ready or is put aside, a probe ends, or a pump breaks."""
        self._listeners.append(call)

    def notify_listeners(self) -> None:
        for call in self._listeners:
            call()

    def pump_broke(self, error: BaseException) -> None:
        """Report that a pump ended by an unexpected error."""
        self.pump_error = self.pump_error or error
        self.notify_listeners()

    async def close(self) -> None:
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            await sender.destination.close()
