"""The mode table of an entity as data: mode × trigger → mode and actions (S3, S4, S5, S11, G2, G4).

`failover_diagram` draws it, a test walks it. How a trigger is told and an action done is `machine`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Final, NamedTuple


class Mode(StrEnum):
    HEALTHY = "healthy"
    FAILING = "failing"
    FAILED_OVER = "failed_over"
    UNUSABLE = "unusable"
    CLOSED = "closed"


class Route(Enum):
    """Where a call goes that begins now."""

    PRIMARY = "primary"
    BACKLOG = "backlog"
    UNUSABLE = "raise PrimaryUnusableError"
    CLOSED = "raise the error of the pair's state"


ROUTES: Final[Mapping[Mode, Route]] = {
    Mode.HEALTHY: Route.PRIMARY,
    Mode.FAILING: Route.PRIMARY,
    Mode.FAILED_OVER: Route.BACKLOG,
    Mode.UNUSABLE: Route.BACKLOG,
    Mode.CLOSED: Route.CLOSED,
}


class Trigger(StrEnum):
    """An event, told apart as far as the table needs it."""

    SENT = "a call succeeds"
    FAILED_COUNTING = "a call fails, counting"
    FAILED_AT_ONCE = "a call fails, counting, and no interval is left"
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
    FORCED_BACK = "force_restore"
    CLOSED = "the pair closes or faults"


class Action(StrEnum):
    ARM_TIMER = "arm the failover timer"
    DISARM_TIMER = "disarm the failover timer"
    ARM_PING = "arm the next ping"
    PING = "send a ping"
    STOP_PINGS = "stop the pings"
    TELL_ENGAGED = "emit failover_engaged"
    TELL_RESTORED = "emit restored"
    TELL_UNUSABLE = "emit primary_unusable"
    RAISE = "raise to the caller"
    DIVERT = "send to the backlog"


class Decision(NamedTuple):
    """The mode that follows, and what is done on the way."""

    mode: Mode
    actions: tuple[Action, ...] = ()


_HEALTHY, _FAILING, _FAILED_OVER, _UNUSABLE, _CLOSED = Mode
_T, _A = Trigger, Action
_ENGAGE: Final = (_A.TELL_ENGAGED, _A.ARM_PING)

# While failed over, and the same while unusable but for what a ping that is refused does.
_DIVERTING: Final = {
    _T.FAILED_COUNTING: (_A.DIVERT,),
    _T.FAILED_AT_ONCE: (_A.DIVERT,),
    _T.FAILED_OTHERWISE: (_A.DIVERT,),
    _T.FAILED_BY_CALLER: (_A.RAISE,),
    _T.PING_DUE: (_A.PING,),
    _T.PING_EARLY: (_A.ARM_PING,),
    _T.PING_FAILED: (_A.ARM_PING,),
}
_RESTORE: Final = Decision(_HEALTHY, (_A.STOP_PINGS, _A.TELL_RESTORED))
_CLOSE_PINGS: Final = Decision(_CLOSED, (_A.STOP_PINGS,))

_CHANGES: Final[Mapping[Mode, Mapping[Trigger, Decision]]] = {
    _HEALTHY: {
        _T.FAILED_COUNTING: Decision(_FAILING, (_A.ARM_TIMER, _A.RAISE)),
        _T.FAILED_AT_ONCE: Decision(_FAILED_OVER, (*_ENGAGE, _A.DIVERT)),
        _T.FORCED_OVER: Decision(_FAILED_OVER, _ENGAGE),
        _T.CLOSED: Decision(_CLOSED),
    },
    _FAILING: {
        _T.SENT: Decision(_HEALTHY, (_A.DISARM_TIMER,)),
        _T.FAILED_AT_ONCE: Decision(_FAILED_OVER, (_A.DISARM_TIMER, *_ENGAGE, _A.DIVERT)),
        _T.TIMER_DUE: Decision(_FAILED_OVER, _ENGAGE),
        _T.TIMER_EARLY: Decision(_FAILING, (_A.ARM_TIMER,)),
        _T.FORCED_OVER: Decision(_FAILED_OVER, (_A.DISARM_TIMER, *_ENGAGE)),
        _T.FORCED_BACK: Decision(_HEALTHY, (_A.DISARM_TIMER,)),
        _T.CLOSED: Decision(_CLOSED, (_A.DISARM_TIMER,)),
    },
    _FAILED_OVER: {
        _T.PING_SUCCEEDED: _RESTORE,
        _T.PING_REFUSED: Decision(_UNUSABLE, (_A.TELL_UNUSABLE, _A.ARM_PING)),
        _T.FORCED_BACK: _RESTORE,
        _T.CLOSED: _CLOSE_PINGS,
    },
    _UNUSABLE: {
        _T.PING_SUCCEEDED: _RESTORE,
        _T.PING_REFUSED: Decision(_UNUSABLE, (_A.ARM_PING,)),
        _T.FORCED_BACK: _RESTORE,
        _T.CLOSED: _CLOSE_PINGS,
    },
    _CLOSED: {},
}


def _stay(mode: Mode, trigger: Trigger) -> Decision:
    """What is not a change of mode: a failed call is answered, pings go on, anything else is passed over."""
    if mode in (_FAILED_OVER, _UNUSABLE):
        return Decision(mode, _DIVERTING.get(trigger, ()))
    return Decision(mode, (_A.RAISE,) if trigger in FAILED else ())


FAILED: Final = frozenset({_T.FAILED_COUNTING, _T.FAILED_AT_ONCE, _T.FAILED_OTHERWISE, _T.FAILED_BY_CALLER})

TABLE: Final[Mapping[tuple[Mode, Trigger], Decision]] = {
    (mode, trigger): _CHANGES[mode].get(trigger) or _stay(mode, trigger) for mode in Mode for trigger in Trigger
}
