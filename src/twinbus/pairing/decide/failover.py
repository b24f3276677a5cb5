"""Decide when an entity fails over to the backlog and when it returns to the primary (S3–S5, S11, S14–S16, G2, G4).

An entity is in one mode. The mode says where a call that starts now goes:

    healthy       to the primary
    failing       to the primary; the failover timer runs, which the first counting failure started
    failed_over   to the backlog; the primary gets only pings
    unusable      as failed_over; the last ping failed because the entity is gone or the credential is refused
    held          as failed_over, but without pings: an operator holds the failover until force_restore (S15)
    on_trial      to the primary; the entity was restored, and the primary has accepted no message since (S14)
    closed        nowhere: the call raises the error that says why the pair is closed

`TABLE` holds every decision as data: (mode, trigger) -> next mode and actions. A trigger is the class of an event. For
example, `PrimarySendFailed` becomes one of four triggers, depending on the kind of failure and on whether the failover
timer is due. `advance` looks the trigger up, computes the next `Entity` and turns actions into effects.
`failover_diagram` draws the table for docs/guides/failover-machine.md, and tests/pairing/mutation.py mutates the table.

Each failover is an *episode* with a number. The result of a ping carries the number of the ping's episode, so that a
late result of one episode cannot end the next episode. In the same way, the result of a call carries the number of
restores before the call began: a call from before a restore decides nothing about the trial after it.

A trial fails with the first counting failure of a call with messages. The failover that follows pings half as often as
the failover before it: an entity may accept a ping, or open a link, and refuse every message.

Another process may know of a failover or a hold (S16). `FailoverKnown` takes it over, with its cause, the time at which
it engaged and the time of its next ping. An entity that is failed over already, or on trial, knows better itself; only
a hold is taken over in these modes.

This module is pure. Messages, queues, clocks and locks belong to the driver. Times are seconds on a monotonic clock;
`chance` is a number in [0, 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Final, NamedTuple, assert_never

from twinbus.backlog import CALLER_FAILURES, COUNTING_FAILURES, UNUSABLE_FAILURES, FailureKind
from twinbus.pairing.decide.failover_events import (
    ArmFailoverTimer,
    ArmPing,
    BacklogAccepted,
    Cause,
    DisarmFailoverTimer,
    DrillCause,
    Effect,
    Event,
    FailoverEngaged,
    FailoverForced,
    FailoverHeld,
    FailoverKnown,
    FailoverTakenOver,
    FailoverTimerFired,
    PairClosed,
    PingDue,
    PingFailed,
    PingSucceeded,
    PrimarySendFailed,
    PrimarySendSucceeded,
    PrimaryUnusable,
    PublishNotice,
    RaiseToCaller,
    RaiseUnusable,
    Restored,
    RestoreForced,
    SendPing,
    SendToBacklog,
    StopPings,
    TrialFailed,
    TrialPassed,
)

# --- the table -------------------------------------------------------------------------------------------------------


class EntityMode(StrEnum):
    """The state of an entity in a pair.

    Healthy: sends go to the primary. Failing: a send failed, and the failover timer runs. Failed over: sends divert.
    Unusable: as failed over, and the entity is gone or the credential refused. Held: failed over until an operator
    restores it. On trial: restored, and no message was accepted yet. Closed: the pair is closed.

    Example: `[one.path for one in pair.entities() if one.state is EntityMode.FAILED_OVER]`.
    """

    HEALTHY = "healthy"
    FAILING = "failing"
    FAILED_OVER = "failed_over"
    UNUSABLE = "unusable"
    HELD = "held"
    ON_TRIAL = "on_trial"
    CLOSED = "closed"


class SendRoute(Enum):
    """Where a call that starts now goes."""

    PRIMARY = "primary"
    BACKLOG = "backlog"
    UNUSABLE = "raise PrimaryUnusableError"
    CLOSED = "raise the error of the pair's state"


ROUTES: Final[Mapping[EntityMode, SendRoute]] = {
    EntityMode.HEALTHY: SendRoute.PRIMARY,
    EntityMode.FAILING: SendRoute.PRIMARY,
    EntityMode.FAILED_OVER: SendRoute.BACKLOG,
    EntityMode.UNUSABLE: SendRoute.BACKLOG,
    EntityMode.HELD: SendRoute.BACKLOG,
    EntityMode.ON_TRIAL: SendRoute.PRIMARY,
    EntityMode.CLOSED: SendRoute.CLOSED,
}


class Trigger(StrEnum):
    """The class of an event. The table has one row for each trigger."""

    SENT = "a call succeeds that carries no message or began before the restore"
    SENT_MESSAGE = "a call with messages succeeds"
    FAILED_COUNTING = "a call fails, counting"
    FAILED_AT_ONCE = "a call fails, counting, and no interval is left"
    FAILED_STALE = "a call from before the restore fails, counting"
    FAILED_WITHOUT_MESSAGE = "a call without messages fails on trial, counting"
    FAILED_OTHERWISE = "a call fails, not counting"
    FAILED_BY_CALLER = "a call fails by its caller's fault"
    TIMER_DUE = "the failover timer fires"
    TIMER_EARLY = "the failover timer fires early"
    PING_DUE = "a ping is due"
    PING_EARLY = "a ping is due early"
    PING_BUSY = "a ping is due while one is under way"
    PING_SUCCEEDED = "a ping succeeds"
    PING_REFUSED = "a ping finds the entity gone or the credential refused"
    PING_FAILED = "a ping fails"
    PING_STALE = "a ping of an earlier failover ends"
    DIVERTED = "the backlog takes messages"
    FORCED_OVER = "force_failover"
    FORCED_HOLD = "force_failover with hold"
    FORCED_BACK = "force_restore"
    KNOWN_OVER = "another process has failed over"
    KNOWN_HOLD = "an operator holds the failover in another process"
    CLOSED = "the pair closes or faults"


class Action(StrEnum):
    """What to do at a trigger. `_effect` turns an action into the effect for the driver."""

    ARM_TIMER = "arm the failover timer"
    DISARM_TIMER = "disarm the failover timer"
    ARM_PING = "arm the next ping"
    PING = "send a ping"
    STOP_PINGS = "stop the pings"
    PUBLISH_ENGAGED = "emit failover_engaged"
    PUBLISH_RESTORED = "emit restored"
    PUBLISH_UNUSABLE = "emit primary_unusable"
    PUBLISH_HELD = "emit failover_held"
    PUBLISH_TAKEN_OVER = "emit failover_taken_over"
    PUBLISH_PASSED = "emit trial_passed"
    PUBLISH_FAILED = "emit trial_failed"
    RAISE = "raise to the caller"
    DIVERT = "send to the backlog"


class Transition(NamedTuple):
    """One cell of the table: the next mode and the actions."""

    mode: EntityMode
    actions: tuple[Action, ...] = ()


_HEALTHY, _FAILING, _FAILED_OVER, _UNUSABLE, _HELD, _ON_TRIAL, _CLOSED = EntityMode
_T, _A = Trigger, Action
_ENGAGE: Final = (_A.PUBLISH_ENGAGED, _A.ARM_PING)
_ENGAGE_HELD: Final = (_A.PUBLISH_ENGAGED, _A.PUBLISH_HELD)
_TAKE_OVER: Final = (_A.PUBLISH_ENGAGED, _A.PUBLISH_TAKEN_OVER, _A.ARM_PING)
_TAKE_OVER_HELD: Final = (_A.PUBLISH_ENGAGED, _A.PUBLISH_TAKEN_OVER, _A.PUBLISH_HELD)

# The cells that failed_over, unusable and held share. Failed_over and unusable differ only in what a refused ping does.
# A held entity has no pings: its cells for pings are never used.
_DIVERTING: Final = {
    _T.FAILED_COUNTING: (_A.DIVERT,),
    _T.FAILED_AT_ONCE: (_A.DIVERT,),
    _T.FAILED_STALE: (_A.DIVERT,),
    _T.FAILED_OTHERWISE: (_A.DIVERT,),
    _T.FAILED_BY_CALLER: (_A.RAISE,),
    _T.PING_DUE: (_A.PING,),
    _T.PING_EARLY: (_A.ARM_PING,),
    _T.PING_FAILED: (_A.ARM_PING,),
}
_RESTORE: Final = Transition(_ON_TRIAL, (_A.STOP_PINGS, _A.PUBLISH_RESTORED))
_HOLD_PINGED: Final = Transition(_HELD, (_A.STOP_PINGS, _A.PUBLISH_HELD))
_CLOSE_PINGS: Final = Transition(_CLOSED, (_A.STOP_PINGS,))

_CHANGES: Final[Mapping[EntityMode, Mapping[Trigger, Transition]]] = {
    _HEALTHY: {
        _T.FAILED_COUNTING: Transition(_FAILING, (_A.ARM_TIMER, _A.RAISE)),
        _T.FAILED_AT_ONCE: Transition(_FAILED_OVER, (*_ENGAGE, _A.DIVERT)),
        _T.FORCED_OVER: Transition(_FAILED_OVER, _ENGAGE),
        _T.FORCED_HOLD: Transition(_HELD, _ENGAGE_HELD),
        _T.KNOWN_OVER: Transition(_FAILED_OVER, _TAKE_OVER),
        _T.KNOWN_HOLD: Transition(_HELD, _TAKE_OVER_HELD),
        _T.CLOSED: Transition(_CLOSED),
    },
    _FAILING: {
        _T.SENT: Transition(_HEALTHY, (_A.DISARM_TIMER,)),
        _T.SENT_MESSAGE: Transition(_HEALTHY, (_A.DISARM_TIMER,)),
        _T.FAILED_AT_ONCE: Transition(_FAILED_OVER, (_A.DISARM_TIMER, *_ENGAGE, _A.DIVERT)),
        _T.TIMER_DUE: Transition(_FAILED_OVER, _ENGAGE),
        _T.TIMER_EARLY: Transition(_FAILING, (_A.ARM_TIMER,)),
        _T.FORCED_OVER: Transition(_FAILED_OVER, (_A.DISARM_TIMER, *_ENGAGE)),
        _T.FORCED_HOLD: Transition(_HELD, (_A.DISARM_TIMER, *_ENGAGE_HELD)),
        _T.FORCED_BACK: Transition(_HEALTHY, (_A.DISARM_TIMER,)),
        _T.KNOWN_OVER: Transition(_FAILED_OVER, (_A.DISARM_TIMER, *_TAKE_OVER)),
        _T.KNOWN_HOLD: Transition(_HELD, (_A.DISARM_TIMER, *_TAKE_OVER_HELD)),
        _T.CLOSED: Transition(_CLOSED, (_A.DISARM_TIMER,)),
    },
    _FAILED_OVER: {
        _T.PING_SUCCEEDED: _RESTORE,
        _T.PING_REFUSED: Transition(_UNUSABLE, (_A.PUBLISH_UNUSABLE, _A.ARM_PING)),
        _T.FORCED_HOLD: _HOLD_PINGED,
        _T.KNOWN_HOLD: _HOLD_PINGED,
        _T.FORCED_BACK: _RESTORE,
        _T.CLOSED: _CLOSE_PINGS,
    },
    _UNUSABLE: {
        _T.PING_SUCCEEDED: _RESTORE,
        _T.PING_REFUSED: Transition(_UNUSABLE, (_A.ARM_PING,)),
        _T.FORCED_HOLD: _HOLD_PINGED,
        _T.KNOWN_HOLD: _HOLD_PINGED,
        _T.FORCED_BACK: _RESTORE,
        _T.CLOSED: _CLOSE_PINGS,
    },
    _HELD: {
        _T.FORCED_BACK: Transition(_ON_TRIAL, (_A.PUBLISH_RESTORED,)),
        _T.CLOSED: Transition(_CLOSED),
    },
    _ON_TRIAL: {
        _T.SENT_MESSAGE: Transition(_HEALTHY, (_A.PUBLISH_PASSED,)),
        _T.FAILED_AT_ONCE: Transition(_FAILED_OVER, (_A.PUBLISH_FAILED, *_ENGAGE, _A.DIVERT)),
        _T.FAILED_WITHOUT_MESSAGE: Transition(_ON_TRIAL, (_A.DIVERT,)),
        _T.FORCED_OVER: Transition(_FAILED_OVER, _ENGAGE),
        _T.FORCED_HOLD: Transition(_HELD, _ENGAGE_HELD),
        _T.KNOWN_HOLD: Transition(_HELD, _TAKE_OVER_HELD),
        _T.CLOSED: Transition(_CLOSED),
    },
    _CLOSED: {},
}


def _stay(mode: EntityMode, trigger: Trigger) -> Transition:
    """Return the transition of a trigger that changes no mode: answer a failed call, go on pinging, or do nothing."""
    if mode in (_FAILED_OVER, _UNUSABLE):
        return Transition(mode, _DIVERTING.get(trigger, ()))
    if mode is _HELD:
        return Transition(mode, _DIVERTING.get(trigger, ()) if trigger in FAILED else ())
    if trigger is _T.FAILED_STALE and mode is not _CLOSED:
        # The call failed after a failover engaged, so it diverts (S5). It shows nothing about the primary now.
        return Transition(mode, (_A.DIVERT,))
    return Transition(mode, (_A.RAISE,) if trigger in FAILED else ())


FAILED: Final = frozenset(
    {
        _T.FAILED_COUNTING,
        _T.FAILED_AT_ONCE,
        _T.FAILED_STALE,
        _T.FAILED_WITHOUT_MESSAGE,
        _T.FAILED_OTHERWISE,
        _T.FAILED_BY_CALLER,
    }
)

TABLE: Final[Mapping[tuple[EntityMode, Trigger], Transition]] = {
    (mode, trigger): _CHANGES[mode].get(trigger) or _stay(mode, trigger) for mode in EntityMode for trigger in Trigger
}


# --- state and decisions ---------------------------------------------------------------------------------------------

MAX_PING_INTERVAL: Final = 1800.0
"""Seconds. Failed trials double the ping interval up to this limit (S14)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverPolicy:
    """The options that failover depends on. Times are in seconds."""

    failover_interval: float = 60.0
    ping_interval: float = 60.0
    ping_jitter: float = 0.1
    counting: frozenset[FailureKind] = COUNTING_FAILURES
    divert_while_unusable: bool = True
    server_busy_counts_after: float | None = None


@dataclass(frozen=True, slots=True)
class Entity:
    """The failover state of one entity. Immutable: a sender reads `route` without a lock.

    `since` is the time at which the mode began, and `engaged` the time at which the failover began. `deadline` is the
    time at which the failover timer fires. `episode` is the number of failovers so far. `diverted` is the number of
    messages diverted in the present failover, or in the last one. `failed_trials` is the number of trials that failed
    since the last one that passed. If the policy says when server busy counts, `busy_since` and `busy_at` are the times
    of the first and the last of the server busy answers that belong together. While `awaits_success` is False, a
    success changes nothing.
    """

    path: str
    policy: FailoverPolicy
    since: float
    mode: EntityMode = EntityMode.HEALTHY
    cause: Cause | None = None
    deadline: float | None = None
    engaged: float | None = None
    episode: int = 0
    next_ping: float | None = None
    pinging: bool = False
    diverted: int = 0
    failed_trials: int = 0
    busy_since: float | None = None
    busy_at: float | None = None
    route: SendRoute = field(init=False)
    awaits_success: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "route", route_of(self.mode, self.policy))
        waits = self.mode in (EntityMode.FAILING, EntityMode.ON_TRIAL) or self.busy_since is not None
        object.__setattr__(self, "awaits_success", waits)

    @property
    def restores(self) -> int:
        """The number of failovers that have ended."""
        return self.episode if self.engaged is None else self.episode - 1

    @property
    def ping_interval(self) -> float:
        """Seconds between two pings: doubled by each failed trial, up to 30 minutes (S14)."""
        # The exponent is limited because a float overflows at 2.0**1024. 2**11 s are more than 30 minutes.
        return min(self.policy.ping_interval * 2.0 ** min(self.failed_trials, 11), MAX_PING_INTERVAL)


def route_of(mode: EntityMode, policy: FailoverPolicy) -> SendRoute:
    if mode is EntityMode.UNUSABLE and not policy.divert_while_unusable:
        return SendRoute.UNUSABLE
    return ROUTES[mode]


class FailoverDecision(NamedTuple):
    """The next state, and the effects. The driver first replaces the state, then carries out the effects in order."""

    entity: Entity
    effects: tuple[Effect, ...] = ()


def advance(entity: Entity, event: Event, now: float, chance: float = 0.0) -> FailoverDecision:
    """Return the state after `event`, and what the driver must do.

    `chance` spreads the first pings of many processes that failed over together (P2).
    """
    busy_after = entity.policy.server_busy_counts_after
    if busy_after is not None:
        entity = _with_busy_time(entity, event, now, busy_after)
    trigger = trigger_of(entity, event, now)
    decision = TABLE[entity.mode, trigger]
    if decision.mode is entity.mode:
        after = _stayed(entity, trigger, event, now)
    else:
        after = _entered(entity, decision.mode, event, now, chance)
    return FailoverDecision(after, tuple([_effect(action, entity, after, event, now) for action in decision.actions]))


# --- classifying events ----------------------------------------------------------------------------------------------


def trigger_of(entity: Entity, event: Event, now: float) -> Trigger:
    """Return the row of the table for an event."""
    match event:
        case PrimarySendSucceeded():
            return Trigger.SENT_MESSAGE if event.with_message and not _is_stale(entity, event) else Trigger.SENT
        case PrimarySendFailed():
            return _failure(entity, event, now)
        case FailoverTimerFired():
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
        case BacklogAccepted():
            return Trigger.DIVERTED
        case FailoverForced():
            return Trigger.FORCED_HOLD if event.hold else Trigger.FORCED_OVER
        case RestoreForced():
            return Trigger.FORCED_BACK
        case FailoverKnown():
            return Trigger.KNOWN_HOLD if event.hold else Trigger.KNOWN_OVER
        case PairClosed():
            return Trigger.CLOSED
        case _:
            assert_never(event)


def _failure(entity: Entity, event: PrimarySendFailed, now: float) -> Trigger:
    if event.kind not in entity.policy.counting and not _busy_counts(entity, event, now):
        return Trigger.FAILED_BY_CALLER if event.kind in CALLER_FAILURES else Trigger.FAILED_OTHERWISE
    if _is_stale(entity, event):
        return Trigger.FAILED_STALE
    if entity.mode is EntityMode.ON_TRIAL:
        return Trigger.FAILED_AT_ONCE if event.with_message else Trigger.FAILED_WITHOUT_MESSAGE
    # A timer that is due, but has not been delivered yet, counts as fired.
    at_once = entity.policy.failover_interval <= 0 or _reached(entity.deadline, now)
    return Trigger.FAILED_AT_ONCE if at_once else Trigger.FAILED_COUNTING


def _busy_counts(entity: Entity, event: PrimarySendFailed, now: float) -> bool:
    """Return whether this is a server busy, and the primary has been busy for as long as the policy says (S2)."""
    after = entity.policy.server_busy_counts_after
    if event.kind is not FailureKind.SERVER_BUSY or after is None or entity.busy_since is None:
        return False
    return now - entity.busy_since >= after


def _is_stale(entity: Entity, event: PrimarySendSucceeded | PrimarySendFailed) -> bool:
    """Return whether the call began before the last restore."""
    return event.restores is not None and event.restores < entity.restores


def _reached(at: float | None, now: float) -> bool:
    return at is not None and now >= at


# --- the next state --------------------------------------------------------------------------------------------------


def _with_busy_time(entity: Entity, event: Event, now: float, busy_after: float) -> Entity:
    """Return the entity with the time since which the primary is busy.

    An accepted message ends this time. Other successes do not: links open although the service refuses messages as
    busy. A server busy after a silence longer than `busy_after` begins a new time: nothing shows that the primary was
    busy meanwhile.
    """
    match event:
        case PrimarySendSucceeded(with_message=True) if entity.busy_since is not None:
            return entity if _is_stale(entity, event) else replace(entity, busy_since=None, busy_at=None)
        case PrimarySendFailed(FailureKind.SERVER_BUSY):
            if entity.route is not SendRoute.PRIMARY or _is_stale(entity, event):
                return entity
            goes_on = entity.busy_at is not None and now - entity.busy_at <= busy_after
            return replace(entity, busy_since=entity.busy_since if goes_on else now, busy_at=now)
    return entity


def _entered(entity: Entity, mode: EntityMode, event: Event, now: float, chance: float) -> Entity:
    match mode:
        case EntityMode.FAILING:
            assert isinstance(event, PrimarySendFailed)
            deadline = now + entity.policy.failover_interval
            return replace(entity, mode=mode, since=now, cause=event.kind, deadline=deadline)
        case EntityMode.HELD if entity.engaged is not None:
            return replace(entity, mode=mode, since=now, next_ping=None, pinging=False)
        case EntityMode.HELD:
            return replace(_engaged(entity, event, now), mode=mode)
        case EntityMode.FAILED_OVER if isinstance(event, FailoverKnown):
            # The clocks of two machines may differ: the next ping is due after one interval at the latest.
            entity = replace(entity, failed_trials=event.failed_trials)
            next_ping = min(event.next_ping, now + entity.ping_interval)
            return replace(_engaged(entity, event, now), mode=mode, next_ping=next_ping)
        case EntityMode.FAILED_OVER:
            # The first ping is due one interval after the failover (G2), plus a random delay, so that processes do not
            # all ping at the same time.
            failed_trial = entity.mode is EntityMode.ON_TRIAL and isinstance(event, PrimarySendFailed)
            entity = replace(entity, failed_trials=entity.failed_trials + failed_trial)
            wait = entity.ping_interval * (1 + entity.policy.ping_jitter * chance)
            return replace(_engaged(entity, event, now), mode=mode, next_ping=now + wait)
        case EntityMode.UNUSABLE:
            assert isinstance(event, PingFailed)
            return replace(entity, mode=mode, since=now, cause=event.kind, pinging=False)
        case EntityMode.ON_TRIAL:
            fresh = _without_failover(entity, mode, now)
            # No call went to the primary while it was failed over: that is no silence of the primary.
            busy_at = None if entity.busy_since is None else now
            return replace(fresh, failed_trials=entity.failed_trials, busy_at=busy_at)
        case EntityMode.HEALTHY | EntityMode.CLOSED:
            return _without_failover(entity, mode, now)
        case _:
            assert_never(mode)


def _engaged(entity: Entity, event: Event, now: float) -> Entity:
    return replace(
        entity,
        since=now,
        cause=_cause_of(entity, event),
        deadline=None,
        engaged=min(event.engaged, now) if isinstance(event, FailoverKnown) else now,
        episode=entity.episode + 1,
        diverted=0,
    )


def _without_failover(entity: Entity, mode: EntityMode, now: float) -> Entity:
    return Entity(
        entity.path,
        entity.policy,
        now,
        mode,
        episode=entity.episode,
        diverted=entity.diverted,
        busy_since=entity.busy_since,
        busy_at=entity.busy_at,
    )


def _stayed(entity: Entity, trigger: Trigger, event: Event, now: float) -> Entity:
    if trigger is Trigger.PING_DUE:
        return replace(entity, pinging=True, next_ping=now + entity.ping_interval)
    if trigger is Trigger.PING_FAILED:
        return replace(entity, pinging=False)
    if trigger is Trigger.PING_REFUSED:
        assert isinstance(event, PingFailed)
        return replace(entity, pinging=False, cause=event.kind)
    if isinstance(event, BacklogAccepted):
        return replace(entity, diverted=entity.diverted + event.messages)
    return entity


def _cause_of(entity: Entity, event: Event) -> Cause:
    if isinstance(event, FailoverForced):
        return DrillCause.FORCED
    if isinstance(event, FailoverKnown):
        return event.cause
    if entity.cause is None:
        assert isinstance(event, PrimarySendFailed)
        return event.kind
    # The cause is the failure that started the timer, not the last failure before the timer fired.
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
            # A ping may take longer than the interval. Then the next ping starts when this ping has ended.
            return ArmPing(max(after.next_ping, now))
        case Action.PING:
            return SendPing(after.episode)
        case Action.STOP_PINGS:
            return StopPings()
        case Action.RAISE:
            return RaiseToCaller()
        case Action.DIVERT:
            if after.route is SendRoute.UNUSABLE:
                assert isinstance(after.cause, FailureKind)
                return RaiseUnusable(after.cause)
            return SendToBacklog()
        case Action.PUBLISH_ENGAGED:
            assert after.cause is not None
            return PublishNotice(FailoverEngaged(after.path, now, after.episode, after.cause))
        case Action.PUBLISH_RESTORED:
            assert before.engaged is not None
            forced = isinstance(event, RestoreForced)
            outage = now - before.engaged
            return PublishNotice(Restored(after.path, now, after.episode, outage, after.diverted, forced))
        case Action.PUBLISH_UNUSABLE:
            assert isinstance(after.cause, FailureKind)
            return PublishNotice(PrimaryUnusable(after.path, now, after.episode, after.cause))
        case Action.PUBLISH_HELD:
            return PublishNotice(FailoverHeld(after.path, now, after.episode))
        case Action.PUBLISH_TAKEN_OVER:
            assert after.engaged is not None
            return PublishNotice(FailoverTakenOver(after.path, now, after.episode, now - after.engaged))
        case Action.PUBLISH_PASSED:
            return PublishNotice(TrialPassed(after.path, now, after.episode, now - before.since))
        case Action.PUBLISH_FAILED:
            assert isinstance(after.cause, FailureKind)
            return PublishNotice(TrialFailed(after.path, now, before.episode, after.cause, after.ping_interval))
        case _:
            assert_never(action)
