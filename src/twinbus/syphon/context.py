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
from twinbus.ledger import LedgerUnavailableError
from twinbus.syphon.broker_clock import BrokerClock
from twinbus.syphon.plan import Destinations, RetryPolicy, destination_key
from twinbus.syphon.shared_holds import SharedHolds
from twinbus.syphon.syphon_ledger import MeteredBacklog, SyphonLedger
from twinbus.syphon.transport import Destination, HeldMessage, OutgoingMessage, TimeToLive, Transport

BURST_SECONDS: Final = 0.5
"""Seconds. If fewer messages than the rate allows were received in this time, the rest may be received now."""
MIB: Final = 1024 * 1024
MAX_SENDERS: Final = 500
"""The most links to destinations that stay open. Beyond this number, the links that were idle longest are closed."""
LEDGER_PATIENCE: Final = 60.0
"""Seconds after which a drain gives up if its ledger cannot be written and `on_error` is "stop"."""
_LEDGER_RETRY_SECONDS: Final = 1.0


class MoveStep(StrEnum):
    """Progress of a message, for a `StepListener` (tests kill a syphon between any two steps)."""

    RECEIVED = "received"
    INTENDED = "intended"
    SENDING = "sending"
    CONFIRMED = "confirmed"
    RECORDED = "recorded"
    COMPLETED = "completed"
    PUT_ASIDE = "put aside"
    DEAD_LETTERED = "dead-lettered"


StepListener = Callable[[MoveStep, Sequence[HeldMessage]], None]
EmptiedListener = Callable[[str, int], None]
"""A function that is called when a backlog queue is empty.

The arguments are the path of the queue, and the number of messages that were moved since the queue was last empty.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyphonOptions:
    """The options of a syphon."""

    rate: float | None = None
    """The most messages per second for all pumps together; None is unlimited."""
    drain: bool = False
    """Whether the syphon ends once no message that is left can move (Y11)."""
    wait_for_destinations: float = 0.0
    """Seconds that a drain waits for destinations that are not ready, once nothing else can move."""
    ttl: TimeToLive = "restart"
    poll: float = 900.0
    """Y2: seconds of one long poll."""
    window: int = 4000
    """The most messages that one pump holds."""
    window_bytes: int = 32 * MIB
    """The most bytes of messages that all pumps together hold."""
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise OptionError("rate", self.rate, "messages a second, more than 0 and finite")
        if self.ttl not in {"restart", "absolute"}:
            raise OptionError("ttl", self.ttl, "one of restart, absolute")
        if not 0 < self.poll <= 900:
            raise OptionError("poll", self.poll, "seconds, at most 900")
        if not 0 <= self.wait_for_destinations < math.inf:
            raise OptionError("wait_for_destinations", self.wait_for_destinations, "seconds, at least 0 and finite")
        for option in ("window", "window_bytes"):
            if getattr(self, option) < 1:
                raise OptionError(option, getattr(self, option), "at least 1")


wall_clock: Final[Callable[[], datetime]] = partial(datetime.now, UTC)


class RateLimit:
    """The rate limit of all pumps together (Y9), in messages per second; None is unlimited.

    The current time is an argument, in seconds. A pump waits before a receive, never while the pump holds locked
    messages.
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
        """Record that this number of messages was received."""
        if self._rate is not None:
            self._spent_until = max(self._spent_until, now - BURST_SECONDS) + messages / self._rate


@dataclass(slots=True)
class _Sender:
    destination: Destination
    sending: int = 0


class SyphonContext:
    """What all pumps of one syphon share. It is created on the event loop that runs the pumps.

    `now` returns the time of the event loop in seconds, and `wall` returns the date and time. The wall clock and the
    source of random numbers (`chance`) are arguments, so that tests can simulate both.
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
        self.shared_holds: SharedHolds | None = None
        """The holds of the shared state (S15), if the syphon has one."""
        self.stopping = False
        self.pump_count = 1
        self.pump_error: BaseException | None = None
        """The first error that ended a pump. The syphon ends after such an error."""
        self.ledger_error: LedgerUnavailableError | None = None
        """Why a drain gave up: the ledger could not be written."""
        self._clocks: dict[str, BrokerClock] = {}
        self._senders: dict[str, _Sender] = {}
        self._listeners: list[Callable[[], None]] = []

    def broker_clock(self, queue: str) -> BrokerClock:
        """Return the broker's clock (L5) for the messages of a backlog queue: the same object for each call."""
        return self._clocks.setdefault(queue, BrokerClock())

    def backlog(self, queue: str) -> MeteredBacklog:
        """Return a new connection to a backlog queue. The caller closes the connection."""
        return MeteredBacklog(self.transport.backlog(queue), queue, self.ledger, self.now)

    async def send(self, path: str, messages: Sequence[OutgoingMessage]) -> None:
        """Send with the one sender that all pumps share for this destination."""
        key = destination_key(path)
        # `pop`, then insert: this keeps the senders in the order of their last use.
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
        """From now on, call `call` when a destination becomes ready or is put aside, a probe ends or a pump breaks."""
        self._listeners.append(call)

    def notify_listeners(self) -> None:
        for call in self._listeners:
            call()

    async def wait_for_ledger(self, since: float, error: LedgerUnavailableError) -> bool:
        """Wait before the ledger is tried again. It has failed since the time `since`.

        Returns False if the syphon stops instead: it was told to stop, or it drains and the ledger has failed for too
        long.
        """
        if self.options.drain and self.now() - since >= max(self.options.wait_for_destinations, LEDGER_PATIENCE):
            self.ledger_error = error
            self.stopping = True
            self.notify_listeners()
        if self.stopping:
            return False
        await asyncio.sleep(_LEDGER_RETRY_SECONDS)
        return True

    def pump_broke(self, error: BaseException) -> None:
        """Report that a pump ended by an unexpected error."""
        self.pump_error = self.pump_error or error
        self.notify_listeners()

    async def close(self) -> None:
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            await sender.destination.close()
