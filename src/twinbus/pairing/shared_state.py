"""The entities and the rotation of a pair where all its senders find them, replaced under a lock, read without one.

What follows from an event is decided by `failover` and `rotation`; timers and pings are the driver's. Time, which is
monotonic, and chance may come from elsewhere: a simulation has its own.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Protocol

from twinbus.backlog import FailureKind
from twinbus.pairing.decide import failover, rotation
from twinbus.pairing.decide.failover import (
    ArmFailoverTimer,
    ArmPing,
    DisarmFailoverTimer,
    Entity,
    FailoverPolicy,
    FailoverTimerFired,
    PairClosed,
    PingDue,
    PrimarySendSucceeded,
    PublishNotice,
    RaiseToCaller,
    RaiseUnusable,
    SendPing,
    SendToBacklog,
    StopPings,
)
from twinbus.pairing.decide.rotation import ArmProbation, ProbationEnded, Rotation
from twinbus.pairing.errors import QueueCause

FailedCallEffect = RaiseToCaller | SendToBacklog | RaiseUnusable
Now = Callable[[], float]
Chance = Callable[[], float]


class DriverTimer(Protocol):
    """Calls back once, at a time on the monotonic clock; armed anew it forgets the time before."""

    def arm(self, at: float) -> None: ...

    def disarm(self) -> None: ...


class PairDriver(Protocol):
    """What a driver does for the cells. None of it may block: it is asked for under a cell's lock."""

    def timer(self, due: Callable[[], object]) -> DriverTimer: ...

    def ping(self, cell: SharedEntity, episode: int) -> None: ...

    def stop_ping(self, cell: SharedEntity) -> None: ...

    def emit(self, notice: failover.FailoverNotice | rotation.QueueLeft | rotation.QueueReturned) -> None: ...


class SharedEntity:
    """One entity of one pair: `entity` is read without a lock, and replaced by `advance` alone."""

    def __init__(
        self,
        path: str,
        policy: FailoverPolicy,
        driver: PairDriver,
        *,
        now: Now = time.monotonic,
        chance: Chance = random.random,
    ) -> None:
        self.entity = Entity(path, policy, now())
        self._driver = driver
        self._now = now
        self._chance = chance
        self._lock = threading.Lock()
        # Called when calls go another way than before, in the thread that found out: no waiting there (S5).
        self.rerouted: set[Callable[[], None]] = set()
        self._failover_timer = driver.timer(lambda: self.advance(FailoverTimerFired()))
        self._ping_timer = driver.timer(lambda: self.advance(PingDue()))

    def advance(self, event: failover.Event) -> FailedCallEffect | None:
        """What becomes of the call that failed, if the event is one."""
        verdict: FailedCallEffect | None = None
        notices: list[failover.FailoverNotice] = []
        with self._lock:
            before = self.entity.route
            step = failover.advance(self.entity, event, self._now(), self._chance())
            self.entity = step.entity
            for effect in step.effects:
                match effect:
                    case RaiseToCaller() | SendToBacklog() | RaiseUnusable():
                        verdict = effect
                    case PublishNotice(notice):
                        notices.append(notice)
                    case _:
                        self._arrange(effect)
        # Outside the lock: a callback may ask for this entity's state. Those who wait come before those who are told.
        if step.entity.route is not before:
            self.wake()
        for notice in notices:
            self._driver.emit(notice)
        return verdict

    def wake(self) -> None:
        """Whoever waits to try again looks whether it still may."""
        for wake in tuple(self.rerouted):
            wake()

    def succeeded(self) -> None:
        """A call on the primary did. Only the first after a failure has news in it."""
        if self.entity.deadline is not None:
            self.advance(PrimarySendSucceeded())

    def forked(self) -> None:
        self._lock = threading.Lock()
        self.entity = failover.advance(self.entity, PairClosed(), self.entity.since).entity

    def _arrange(self, effect: ArmFailoverTimer | DisarmFailoverTimer | ArmPing | SendPing | StopPings) -> None:
        match effect:
            case ArmFailoverTimer(at):
                self._failover_timer.arm(at)
            case DisarmFailoverTimer():
                self._failover_timer.disarm()
            case ArmPing(at):
                self._ping_timer.arm(at)
            case SendPing(episode):
                self._driver.ping(self, episode)
            case StopPings():
                self._ping_timer.disarm()
                self._driver.stop_ping(self)


class SharedRotation:
    """The backlog queues, for all senders of a pair. `rotation` is read without a lock."""

    def __init__(
        self, queues: tuple[str, ...], probation: float, driver: PairDriver, *, now: Now = time.monotonic
    ) -> None:
        self.rotation = Rotation(queues, probation)
        self._driver = driver
        self._now = now
        self._lock = threading.Lock()
        self._timer = driver.timer(self._ended)

    def advance(self, event: rotation.Event) -> bool:
        """Whether the call that failed, if the event is one, should try another queue."""
        another = False
        notices: list[rotation.QueueLeft | rotation.QueueReturned] = []
        with self._lock:
            step = rotation.advance(self.rotation, event, self._now())
            self.rotation = step.rotation
            for effect in step.effects:
                match effect:
                    case rotation.TryAnother():
                        another = True
                    case rotation.RaiseSendError():
                        another = False
                    case ArmProbation(at):
                        self._timer.arm(at)
                    case rotation.PublishQueueNotice(notice):
                        notices.append(notice)
        for notice in notices:
            self._driver.emit(notice)
        return another

    def missing(self, causes: tuple[QueueCause, ...]) -> None:
        """Those that provisioning could neither find nor create (P7)."""
        for cause in causes:
            self.advance(rotation.QueueMissing(*cause))

    def failed(self, queue: str, kind: FailureKind, detail: str) -> bool:
        return self.advance(rotation.BacklogSendFailed(queue, kind, detail))

    def close(self) -> None:
        self._timer.disarm()

    def _ended(self) -> None:
        self.advance(ProbationEnded())
