"""What a driver is to do, in the imperative, and what it is to tell the world (S11)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

from twinbus.pairing.failures import FailureKind


class Drill(StrEnum):
    """A cause that is no failure."""

    FORCED = "forced"


Cause = FailureKind | Drill


class ArmFailoverTimer(NamedTuple):
    """In place of any earlier one."""

    at: float


class DisarmFailoverTimer(NamedTuple):
    pass


class ArmPing(NamedTuple):
    """In place of any earlier one."""

    at: float


class SendPing(NamedTuple):
    """Report PingSucceeded or PingFailed with this episode, always: without it no further ping is armed."""

    episode: int


class StopPings(NamedTuple):
    """Disarm the ping timer and give up a ping under way."""


class RaiseToCaller(NamedTuple):
    """The failed call's own error."""


class SendToBacklog(NamedTuple):
    """The failed call goes on to the backlog, and its caller sees what comes of that (S4, S5)."""


class RaiseUnusable(NamedTuple):
    """PrimaryUnusableError instead of the failed call's own error (G4)."""

    cause: FailureKind


@dataclass(frozen=True, slots=True)
class FailoverEngaged:
    name: ClassVar[str] = "failover_engaged"
    entity: str
    at: float
    episode: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Restored:
    """`forced`, or by a ping. `outage` in seconds since the failover."""

    name: ClassVar[str] = "restored"
    entity: str
    at: float
    episode: int
    outage: float
    diverted: int
    forced: bool


@dataclass(frozen=True, slots=True)
class PrimaryUnusable:
    name: ClassVar[str] = "primary_unusable"
    entity: str
    at: float
    episode: int
    cause: FailureKind


Notice = FailoverEngaged | Restored | PrimaryUnusable


class Emit(NamedTuple):
    """To callbacks, log, metrics and ledger (S11)."""

    notice: Notice


Effect = (
    ArmFailoverTimer
    | DisarmFailoverTimer
    | ArmPing
    | SendPing
    | StopPings
    | RaiseToCaller
    | SendToBacklog
    | RaiseUnusable
    | Emit
)
