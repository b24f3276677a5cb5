"""The failover machine of one entity: an event and the time in, the next state and the effects out.

No message, queue, clock or lock comes in here. Time is in seconds on any clock that only goes forward; chance is a
number in [0, 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, assert_never

from twinbus.backlog import CALLER_FAILURES, COUNTING_FAILURES, UNUSABLE_FAILURES, FailureKind
from twinbus.pairing.decide.failover.effects import (
    ArmFailoverTimer,
    ArmPing,
    Cause,
    DisarmFailoverTimer,
    Drill,
    Effect,
    Emit,
    FailoverEngaged,
    PrimaryUnusable,
    RaiseToCaller,
    RaiseUnusable,
    Restored,
    SendPing,
    SendToBacklog,
    StopPings,
)
from twinbus.pairing.decide.failover.events import (
    Event,
    FailoverForced,
    MessagesDiverted,
    PairClosed,
    PingDue,
    PingFailed,
    PingSucceeded,
    PrimarySendFailed,
    PrimarySendSucceeded,
    RestoreForced,
    TimerFired,
)
from twinbus.pairing.decide.failover.table import ROUTES, TABLE, Action, Mode, Route, Trigger


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What of the options this machine needs."""

    failover_interval: float = 60.0
    ping_interval: float = 60.0
    ping_jitter: float = 0.1
    counting: frozenset[FailureKind] = COUNTING_FAILURES
    divert_while_unusable: bool = True


@dataclass(frozen=True, slots=True)
class Entity:
    """One entity of one pair. It is never altered, only replaced: a sender reads `route` without a lock.

    `since` is when the mode began, `engaged` when the failover did; `episode` counts failovers, `diverted` the messages
    of the present or last one. While `deadline` is None a success tells the machine nothing new.
    """

    path: str
    policy: Policy
    since: float
    mode: Mode = Mode.HEALTHY
    cause: Cause | None = None
    deadline: float | None = None
    engaged: float | None = None
    episode: int = 0
    next_ping: float | None = None
    pinging: bool = False
    diverted: int = 0
    route: Route = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "route", route_of(self.mode, self.policy))


def route_of(mode: Mode, policy: Policy) -> Route:
    if mode is Mode.UNUSABLE and not policy.divert_while_unusable:
        return Route.UNUSABLE
    return ROUTES[mode]


class Step(NamedTuple):
    """The entity as it is now, and what to do, in this order, after it has taken the old one's place."""

    entity: Entity
    effects: tuple[Effect, ...] = ()


def advance(entity: Entity, event: Event, now: float, chance: float = 0.0) -> Step:
    """`chance` spreads the first ping of many processes that failed over together (P2)."""
    trigger = trigger_of(entity, event, now)
    decision = TABLE[entity.mode, trigger]
    if decision.mode is entity.mode:
        after = _stayed(entity, trigger, event, now)
    else:
        after = _entered(entity, decision.mode, event, now, chance)
    return Step(after, tuple([_effect(action, entity, after, event, now) for action in decision.actions]))


# --- which trigger an event is ---------------------------------------------------------------------------------------


def trigger_of(entity: Entity, event: Event, now: float) -> Trigger:
    match event:
        case PrimarySendSucceeded():
            return Trigger.SENT
        case PrimarySendFailed():
            return _failure(entity, event.kind, now)
        case TimerFired():
            return Trigger.TIMER_DUE if _reached(entity.deadline, now) else Trigger.TIMER_EARLY
        case PingDue():
            if entity.pinging:
                return Trigger.PING_BUSY
            return Trigger.PING_DUE if _reached(entity.next_ping, now) else Trigger.PING_EARLY
        case PingSucceeded() | PingFailed() if not entity.pinging or event.episode != entity.episode:
            return Trigger.PING_STALE
        case PingSucceeded():
            return Trigger.PING_SUCCEEDED
        case PingFailed():
            return Trigger.PING_REFUSED if event.kind in UNUSABLE_FAILURES else Trigger.PING_FAILED
        case MessagesDiverted():
            return Trigger.DIVERTED
        case FailoverForced():
            return Trigger.FORCED_OVER
        case RestoreForced():
            return Trigger.FORCED_BACK
        case PairClosed():
            return Trigger.CLOSED
        case _:
            assert_never(event)


def _failure(entity: Entity, kind: FailureKind, now: float) -> Trigger:
    if kind in entity.policy.counting:
        # A timer whose time has come, only not its turn, has fired for this call.
        at_once = entity.policy.failover_interval <= 0 or _reached(entity.deadline, now)
        return Trigger.FAILED_AT_ONCE if at_once else Trigger.FAILED_COUNTING
    return Trigger.FAILED_BY_CALLER if kind in CALLER_FAILURES else Trigger.FAILED_OTHERWISE


def _reached(at: float | None, now: float) -> bool:
    return at is not None and now >= at


# --- the state that follows ------------------------------------------------------------------------------------------


def _entered(entity: Entity, mode: Mode, event: Event, now: float, chance: float) -> Entity:
    match mode:
        case Mode.FAILING:
            assert isinstance(event, PrimarySendFailed)
            deadline = now + entity.policy.failover_interval
            return replace(entity, mode=mode, since=now, cause=event.kind, deadline=deadline)
        case Mode.FAILED_OVER:
            # The first ping comes one interval after the failover (G2), never sooner; spread, not synchronised.
            wait = entity.policy.ping_interval * (1 + entity.policy.ping_jitter * chance)
            return replace(
                entity,
                mode=mode,
                since=now,
                cause=_cause_of(entity, event),
                deadline=None,
                engaged=now,
                episode=entity.episode + 1,
                next_ping=now + wait,
                diverted=0,
            )
        case Mode.UNUSABLE:
            assert isinstance(event, PingFailed)
            return replace(entity, mode=mode, since=now, cause=event.kind, pinging=False)
        case Mode.HEALTHY | Mode.CLOSED:
            return Entity(entity.path, entity.policy, now, mode, episode=entity.episode, diverted=entity.diverted)
        case _:
            assert_never(mode)


def _stayed(entity: Entity, trigger: Trigger, event: Event, now: float) -> Entity:
    if trigger is Trigger.PING_DUE:
        return replace(entity, pinging=True, next_ping=now + entity.policy.ping_interval)
    if trigger is Trigger.PING_FAILED:
        return replace(entity, pinging=False)
    if trigger is Trigger.PING_REFUSED:
        assert isinstance(event, PingFailed)
        return replace(entity, pinging=False, cause=event.kind)
    if isinstance(event, MessagesDiverted):
        return replace(entity, diverted=entity.diverted + event.messages)
    return entity


def _cause_of(entity: Entity, event: Event) -> Cause:
    if isinstance(event, FailoverForced):
        return Drill.FORCED
    if entity.cause is None:
        assert isinstance(event, PrimarySendFailed)
        return event.kind
    # The failure that started the timer, not the last before it fired.
    return entity.cause


# --- the effects -----------------------------------------------------------------------------------------------------


def _effect(action: Action, before: Entity, after: Entity, event: Event, now: float) -> Effect:
    match action:
        case Action.ARM_TIMER:
            assert after.deadline is not None
            return ArmFailoverTimer(after.deadline)
        case Action.DISARM_TIMER:
            return DisarmFailoverTimer()
        case Action.ARM_PING:
            assert after.next_ping is not None
            # A ping may take longer than its interval: the next one follows at once, never beside it.
            return ArmPing(max(after.next_ping, now))
        case Action.PING:
            return SendPing(after.episode)
        case Action.STOP_PINGS:
            return StopPings()
        case Action.RAISE:
            return RaiseToCaller()
        case Action.DIVERT:
            if after.route is Route.UNUSABLE:
                assert isinstance(after.cause, FailureKind)
                return RaiseUnusable(after.cause)
            return SendToBacklog()
        case Action.TELL_ENGAGED:
            assert after.cause is not None
            return Emit(FailoverEngaged(after.path, now, after.episode, after.cause))
        case Action.TELL_RESTORED:
            assert before.engaged is not None
            forced = isinstance(event, RestoreForced)
            outage = now - before.engaged
            return Emit(Restored(after.path, now, after.episode, outage, after.diverted, forced))
        case Action.TELL_UNUSABLE:
            assert isinstance(after.cause, FailureKind)
            return Emit(PrimaryUnusable(after.path, now, after.episode, after.cause))
        case _:
            assert_never(action)
