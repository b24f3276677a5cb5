"""What all senders of a pair share: its entities, its rotation of backlog queues, and its watch on the backlog.

Each class here holds one immutable state. Readers read the state without a lock. `advance` replaces the state under a
lock: it gets the next state and the effects from `decide`, and gives the effects to the driver. The driver runs
timers, pings and peeks; `advance` only starts them and does not wait for them, because it holds the lock. Notices are
published after the lock is released: a callback may use the pair, or block.

`now` is a monotonic clock and `chance` returns a number in [0, 1). Both can be replaced, for simulations.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from azure.servicebus import ServiceBusMessageState

from twinbus.backlog import PATH_PROPERTY, FailureKind, failure_kind
from twinbus.pairing.decide import backlog_watch, failover, failover_events, rotation
from twinbus.pairing.decide.backlog_watch import (
    BacklogWatch,
    CheckDue,
    OldestMessage,
    PeekFailed,
    PeekPage,
    PeekQueues,
    QueuePeeked,
    RaiseAlert,
    ReportNoListenRight,
    ScheduleCheck,
)
from twinbus.pairing.decide.failover import Entity, FailoverPolicy
from twinbus.pairing.decide.failover_events import (
    ArmFailoverTimer,
    ArmPing,
    DisarmFailoverTimer,
    FailoverTimerFired,
    PairClosed,
    PingDue,
    PingFailed,
    PrimarySendSucceeded,
    PublishNotice,
    RaiseToCaller,
    RaiseUnusable,
    SendPing,
    SendToBacklog,
    StopPings,
)
from twinbus.pairing.decide.rotation import (
    ArmProbation,
    BacklogSendFailed,
    ProbationEnded,
    PublishQueueNotice,
    QueueMissing,
    RaiseSendError,
    Rotation,
    TryAnother,
)
from twinbus.pairing.errors import QueueCause
from twinbus.pairing.events import BacklogUnattended, Notice

_log = logging.getLogger("twinbus.pairing")

FailedCallEffect = RaiseToCaller | SendToBacklog | RaiseUnusable
ForCall = TryAnother | RaiseSendError | rotation.ProbeEffect
Now = Callable[[], float]
Chance = Callable[[], float]
OnStep = Callable[[Entity, Entity, failover_events.Event, float], None]
"""Gets the entity before and after a step, the event, and the time."""
IsFailedOver = Callable[[str], bool]
"""Returns whether the entity at this path is failed over in this pair."""


class DriverTimer(Protocol):
    """Calls a function once, at a time on the monotonic clock. Arming the timer again replaces the earlier time."""

    def arm(self, at: float) -> None: ...

    def disarm(self) -> None: ...


class PairDriver(Protocol):
    """The methods of a driver that the shared state calls. None may block: the caller may hold the state's lock."""

    def timer(self, due: Callable[[], object]) -> DriverTimer: ...

    def ping(self, entity: SharedEntity, episode: int) -> None: ...

    def stop_ping(self, entity: SharedEntity) -> None: ...

    def emit(self, notice: Notice) -> None: ...


class SharedEntity:
    """The failover state of one entity. Only `advance` and `forked` replace `entity`."""

    def __init__(
        self,
        path: str,
        policy: FailoverPolicy,
        driver: PairDriver,
        *,
        now: Now = time.monotonic,
        chance: Chance = random.random,
        on_step: OnStep | None = None,
    ) -> None:
        """`on_step` is called after each step that changes `entity`. It must not block."""
        self.entity = Entity(path, policy, now())
        self._on_step = on_step
        self._driver = driver
        self._now = now
        self._chance = chance
        self._lock = threading.Lock()
        self.on_reroute: set[Callable[[], None]] = set()
        """Callbacks for a change of `entity.route` (S5), called in the thread that changed it. None may block."""
        self._failover_timer = driver.timer(lambda: self.advance(FailoverTimerFired()))
        self._ping_timer = driver.timer(self._ping_due)
        self._ping_expected_at = math.inf

    def advance(self, event: failover_events.Event) -> FailedCallEffect | None:
        """Apply an event. If the event is a failed call, returns the effect that says what this call must do."""
        failed_call: FailedCallEffect | None = None
        notices: list[failover_events.FailoverNotice] = []
        with self._lock:
            entity, now = self.entity, self._now()
            before = entity.route
            decision = failover.advance(entity, event, now, self._chance())
            self.entity = decision.entity
            if self._on_step is not None and decision.entity is not entity:
                self._on_step(entity, decision.entity, event, now)
            for effect in decision.effects:
                match effect:
                    case RaiseToCaller() | SendToBacklog() | RaiseUnusable():
                        failed_call = effect
                    case PublishNotice(notice):
                        notices.append(notice)
                    case _:
                        self._carry_out(effect)
        # Waiting calls are woken before notices are published, because a callback for a notice may block.
        if decision.entity.route is not before:
            self.wake_waiting_calls()
        for notice in notices:
            self._driver.emit(notice)
        return failed_call

    def expect_ping(self, at: float) -> None:
        """Count the ping that begins now as failed if it has no result at the time `at`. For `PairDriver.ping`."""
        self._ping_expected_at = at
        self._ping_timer.arm(at)

    def _ping_due(self) -> None:
        entity, expected_at = self.entity, self._ping_expected_at
        if entity.pinging and self._now() >= expected_at:
            # The event loop that sent the ping was closed, or is blocked (P3).
            self._ping_expected_at = math.inf
            self.advance(PingFailed(entity.episode, FailureKind.TIMEOUT))
        else:
            self.advance(PingDue())

    def wake_waiting_calls(self) -> None:
        """Let every call that pauses before its next try check whether it may still try."""
        for wake in tuple(self.on_reroute):
            wake()

    def succeeded(self, restores: int, with_message: bool) -> None:
        """Report a successful call on the primary, with what `PrimarySendSucceeded` says about the call."""
        if self.entity.awaits_success:
            self.advance(PrimarySendSucceeded(restores, with_message))

    def forked(self) -> None:
        """Close the entity in the child of a fork, where a copied lock may be held for ever."""
        self._lock = threading.Lock()
        self.entity = failover.advance(self.entity, PairClosed(), self.entity.since).entity

    def _carry_out(self, effect: ArmFailoverTimer | DisarmFailoverTimer | ArmPing | SendPing | StopPings) -> None:
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
    """The backlog queues of a pair and which of them senders may use now."""

    def __init__(
        self,
        queues: tuple[str, ...],
        probation: float,
        driver: PairDriver,
        *,
        sought: tuple[str, ...] = (),
        now: Now = time.monotonic,
    ) -> None:
        """`sought` are the queues that provisioning is about to find or create."""
        self.rotation = Rotation(queues, probation, sought)
        self._driver = driver
        self._now = now
        self._lock = threading.Lock()
        self.on_change: set[Callable[[], None]] = set()
        """Callbacks for a change of `rotation`, called in the thread that changed it. None may block."""
        self._timer = driver.timer(lambda: self.advance(ProbationEnded()))

    def advance(self, event: rotation.Event) -> ForCall | None:
        """Apply an event. If a call asked, or its send failed, returns the effect that says what the call must do."""
        for_call: ForCall | None = None
        notices: list[rotation.QueueNotice] = []
        with self._lock:
            before = self.rotation
            decision = rotation.advance(before, event, self._now())
            self.rotation = decision.rotation
            for effect in decision.effects:
                match effect:
                    case ArmProbation(at):
                        self._timer.arm(at)
                    case PublishQueueNotice(notice):
                        notices.append(notice)
                    case _:
                        for_call = effect
        if decision.rotation is not before:
            self.wake_waiting_calls()
        for notice in notices:
            self._driver.emit(notice)
        return for_call

    def wake_waiting_calls(self) -> None:
        """Let every call that waits for a backlog queue look again."""
        for wake in tuple(self.on_change):
            wake()

    def missing(self, causes: tuple[QueueCause, ...]) -> None:
        """Report queues that provisioning could neither find nor create (P7)."""
        for cause in causes:
            self.advance(QueueMissing(*cause))

    def failed(self, queue: str, kind: FailureKind, detail: str) -> bool:
        """Report a failed send to a backlog queue. Returns whether to try another queue."""
        return isinstance(self.advance(BacklogSendFailed(queue, kind, detail)), TryAnother)

    def ask_probe(self, tried: frozenset[str]) -> rotation.ProbeEffect:
        """Return what a call does that found no queue in the rotation (S6)."""
        effect = self.advance(rotation.ProbeAsked(tried))
        assert isinstance(effect, rotation.ProbeEffect)
        return effect

    def probe_succeeded(self, queue: str) -> None:
        self.advance(rotation.ProbeSucceeded(queue))

    def probe_failed(self, queue: str, kind: FailureKind, detail: str) -> bool:
        """Report a failed probe. Returns False if the call must raise the error of its send."""
        return isinstance(self.advance(rotation.ProbeFailed(queue, kind, detail)), TryAnother)

    def probe_abandoned(self) -> None:
        """Report that a probe ended without a result."""
        self.advance(rotation.ProbeAbandoned())

    def close(self) -> None:
        self._timer.disarm()
        self.wake_waiting_calls()


class SharedBacklogWatch:
    """The checks of one pair whether a syphon empties its backlog (Y1).

    `peek` starts the peeks of a check and does not wait for them.
    """

    def __init__(
        self,
        interval: timedelta,
        alert_after: timedelta,
        timer: Callable[[Callable[[], object]], DriverTimer],
        peek: Callable[[SharedBacklogWatch, tuple[PeekPage, ...]], None],
        emit: Callable[[BacklogUnattended], None],
        *,
        now: Now = time.monotonic,
    ) -> None:
        self.watch = BacklogWatch(interval.total_seconds(), alert_after.total_seconds())
        self._timer = timer(lambda: self.advance(CheckDue()))
        self._peek = peek
        self._emit = emit
        self._now = now
        self._lock = threading.Lock()

    def advance(self, event: backlog_watch.Event) -> None:
        to_publish: list[RaiseAlert | ReportNoListenRight] = []
        with self._lock:
            now = self._now()
            decision = backlog_watch.advance(self.watch, event, now)
            self.watch = decision.watch
            for effect in decision.effects:
                match effect:
                    case ScheduleCheck(at):
                        self._timer.arm(at)
                    case PeekQueues(pages):
                        self._peek(self, pages)
                    case RaiseAlert() | ReportNoListenRight():
                        to_publish.append(effect)
        # Published after the lock is released: a log handler or a callback may block, or close the pair.
        for effect in to_publish:
            self._publish(effect, now)

    def close(self) -> None:
        self._timer.disarm()
        self.advance(PairClosed())

    def forked(self) -> None:
        """End the checks in the child of a fork, where a copied lock may be held for ever."""
        self._lock = threading.Lock()
        self.watch = backlog_watch.advance(self.watch, PairClosed(), 0.0).watch

    def _publish(self, effect: RaiseAlert | ReportNoListenRight, now: float) -> None:
        match effect:
            case RaiseAlert(queue, entity, oldest_age):
                self._emit(BacklogUnattended(queue, now, entity, oldest_age))
            case ReportNoListenRight(queue, kind):
                _log.warning(
                    "%s cannot be checked (%s): this pair cannot tell whether a syphon empties its backlog. Give the "
                    "secondary's key the Listen right, or set backlog_check_interval to 0",
                    queue,
                    kind,
                )


# --- results of a peek, as events ------------------------------------------------------------------------------------


def queue_peeked(queue: str, messages: Sequence[Any], is_failed_over: IsFailedOver) -> QueuePeeked:
    """Return the event for messages that the SDK peeked, in the order of their sequence numbers."""
    active = next((message for message in messages if message.state is ServiceBusMessageState.ACTIVE), None)
    if active is None:
        return QueuePeeked(queue, None, messages[-1].sequence_number + 1 if messages else None)
    path = (active.application_properties or {}).get(PATH_PROPERTY.encode(), b"")
    entity = path.decode("utf-8", "replace") if isinstance(path, bytes) else str(path)
    now = datetime.now(UTC)
    # The enqueued time comes from another machine's clock, which may be ahead of this one.
    age = max((now - (active.enqueued_time_utc or now)).total_seconds(), 0.0)
    return QueuePeeked(queue, OldestMessage(active.sequence_number, age, entity, is_failed_over(entity)))


def peek_failed(queue: str, error: Exception) -> PeekFailed:
    """Log a failed peek and return the event for it."""
    kind = failure_kind(error)
    _log.info("%s could not be peeked: %s", queue, kind)
    return PeekFailed(queue, kind)
