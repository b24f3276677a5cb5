"""What all pumps of one syphon share: the two namespaces, what is known of the destinations, the pace, the books."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from twinbus.errors import OptionError
from twinbus.syphon.plan import Destinations, RetryPolicy, destination_key
from twinbus.syphon.rate_limit import RateLimit
from twinbus.syphon.syphon_ledger import MeteredBacklog, SyphonLedger
from twinbus.syphon.transport import Destination, HeldMessage, OutgoingMessage, TimeToLive, Transport

MIB: Final = 1024 * 1024
MOST_SENDERS: Final = 500
"""Links to destinations that stay open though nothing is sent by them."""


class MoveStep(StrEnum):
    """Where a message is on its way, for whoever watches (tests that kill a syphon between any two)."""

    RECEIVED = "received"
    INTENDED = "intended"
    SENDING = "sending"
    CONFIRMED = "confirmed"
    COMPLETED = "completed"
    PUT_ASIDE = "put aside"
    DEAD_LETTERED = "dead-lettered"


StepListener = Callable[[MoveStep, Sequence[HeldMessage]], None]
EmptiedListener = Callable[[str, int], None]
"""Told when a backlog queue is empty again, and how many messages were moved since it was last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyphonOptions:
    """`rate` in messages a second, for all pumps together. `drain` ends once every backlog queue is empty."""

    rate: float | None = None
    drain: bool = False
    ttl: TimeToLive = "restart"
    poll: float = 900.0
    """Y2: seconds of one long poll."""
    window: int = 4000
    """Messages one pump holds at most."""
    window_bytes: int = 32 * MIB
    """What all pumps together hold at most."""
    policy: RetryPolicy = field(default_factory=RetryPolicy)

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


def wall_clock() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class _Sender:
    destination: Destination
    sending: int = 0


class SyphonContext:
    """Time and chance come from outside, so that a simulation can drive the very pumps."""

    def __init__(
        self,
        transport: Transport,
        options: SyphonOptions,
        books: SyphonLedger,
        steps: StepListener | None = None,
        *,
        wall: Callable[[], datetime] = wall_clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.transport = transport
        self.options = options
        self.books = books
        self.destinations = Destinations(options.policy)
        self.pacing = RateLimit(options.rate)
        self.steps = steps
        self.wall = wall
        self.chance = chance
        self.stopping = False
        self.pumps = 1
        self.broken: BaseException | None = None
        self.emptied: EmptiedListener = lambda queue, moved: None
        self._senders: dict[str, _Sender] = {}
        self._listeners: list[Callable[[], None]] = []

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    def backlog(self, queue: str) -> MeteredBacklog:
        """Every one is a connection of its own."""
        return MeteredBacklog(self.transport.backlog(queue), queue, self.books, self.now)

    async def send(self, path: str, messages: Sequence[OutgoingMessage]) -> None:
        """One sender for each destination, however many pumps send to it; of those that are idle, the latest ones."""
        key = destination_key(path)
        found = self._senders.pop(key, None) or _Sender(self.transport.destination(path))
        self._senders[key] = found  # the latest is the last
        found.sending += 1
        try:
            if len(self._senders) > MOST_SENDERS:
                await self._close_idle()
            await found.destination.send(messages)
        finally:
            found.sending -= 1

    async def _close_idle(self) -> None:
        idle = [key for key, sender in self._senders.items() if not sender.sending]
        for sender in [self._senders.pop(key) for key in idle[: len(self._senders) - MOST_SENDERS]]:
            await sender.destination.close()

    def listen(self, call: Callable[[], None]) -> None:
        """Called when a destination has become ready, or was put aside."""
        self._listeners.append(call)

    def changed(self) -> None:
        for call in self._listeners:
            call()

    def broke(self, error: BaseException) -> None:
        """A pump ended that never should."""
        self.broken = self.broken or error
        self.changed()

    async def close(self) -> None:
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            await sender.destination.close()
