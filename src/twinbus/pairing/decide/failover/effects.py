"""What a driver is to do, in the imperative, and what it is to tell the world (S11)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from twinbus.backlog import FailureKind


class Drill(StrEnum):
    """A cause that is no failure."""

    FORCED = "forced"


Cause = FailureKind | Drill


@dataclass(frozen=True, slots=True)
class ArmFailoverTimer:
    """In place of any earlier one."""

    at: float


@dataclass(frozen=True, slots=True)
class DisarmFailoverTimer:
    pass


@dataclass(frozen=True, slots=True)
class ArmPing:
    """In place of any earlier one."""

    at: float


@dataclass(frozen=True, slots=True)
class SendPing:
    """Report PingSucceeded or PingFailed with this episode, always: without it no further ping is armed."""

    episode: int


@dataclass(frozen=True, slots=True)
class StopPings:
    """Disarm the ping timer and give up a ping under way."""


@dataclass(frozen=True, slots=True)
class RaiseToCaller:
    """The failed call's own error."""


@dataclass(frozen=True, slots=True)
class SendToBacklog:
    """The failed call goes on to the backlog, and its caller sees what comes of that (S4, S5)."""


@dataclass(frozen=True, slots=True)
class RaiseUnusable:
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


@dataclass(frozen=True, slots=True)
class Emit:
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
