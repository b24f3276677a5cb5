"""What happened to an entity (events), and what the driver must do then (effects), as `failover` decides.

Each event and each effect is one small class. Effects that report something to the outside carry a notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from twinbus.backlog import FailureKind


class DrillCause(StrEnum):
    """The cause of a failover that an operator forced."""

    FORCED = "forced"


Cause = FailureKind | DrillCause


# --- events: what happened -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrimarySendSucceeded:
    """A call on the primary succeeded. Opening, creating a batch and scheduling are calls like sends (S3).

    `restores` is `Entity.restores` when the call began; None if the call began after the last restore. `with_message`
    is False for a call that gives no message to the primary: opening, creating a batch, cancelling (S14).
    """

    restores: int | None = None
    with_message: bool = True


@dataclass(frozen=True, slots=True)
class PrimarySendFailed:
    """A call on the primary failed, after its retries. The effects say whether the call raises or is diverted.

    `restores` and `with_message` are those of `PrimarySendSucceeded`.
    """

    kind: FailureKind
    restores: int | None = None
    with_message: bool = True


@dataclass(frozen=True, slots=True)
class FailoverTimerFired:
    """The failover timer fired. If the timer was disarmed just before it fired, the event changes nothing."""


@dataclass(frozen=True, slots=True)
class PingDue:
    """The ping timer fired. If the pings were stopped just before the timer fired, the event changes nothing."""


@dataclass(frozen=True, slots=True)
class PingSucceeded:
    """A ping succeeded. `episode` is the number of the failover for which it was sent."""

    episode: int


@dataclass(frozen=True, slots=True)
class PingFailed:
    """A ping failed. `episode` is the number of the failover for which it was sent."""

    episode: int
    kind: FailureKind


@dataclass(frozen=True, slots=True)
class BacklogAccepted:
    """The backlog accepted messages."""

    messages: int = 1


@dataclass(frozen=True, slots=True)
class FailoverForced:
    """An operator forced the failover. With `hold` it stays until `RestoreForced`, and no pings are sent (S15)."""

    hold: bool = False


@dataclass(frozen=True, slots=True)
class RestoreForced:
    """An operator forced the return to the primary."""


@dataclass(frozen=True, slots=True)
class FailoverKnown:
    """Another process has failed the entity over, or an operator holds the failover there (S15, S16).

    `engaged` and `next_ping` are on this process's monotonic clock. A hold has no pings and needs no `next_ping`.
    """

    cause: Cause
    engaged: float
    next_ping: float = 0.0
    failed_trials: int = 0
    hold: bool = False


@dataclass(frozen=True, slots=True)
class PairClosed:
    """The pair, or the side that calls need, closed or faulted (C1). The driver makes the error of the next calls."""


Event = (
    PrimarySendSucceeded
    | PrimarySendFailed
    | FailoverTimerFired
    | PingDue
    | PingSucceeded
    | PingFailed
    | BacklogAccepted
    | FailoverForced
    | RestoreForced
    | FailoverKnown
    | PairClosed
)


# --- effects: what the driver must do --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArmFailoverTimer:
    """Deliver `FailoverTimerFired` at the time `at`. This time replaces the time that was set before."""

    at: float


@dataclass(frozen=True, slots=True)
class DisarmFailoverTimer:
    """Stop the failover timer."""


@dataclass(frozen=True, slots=True)
class ArmPing:
    """Deliver `PingDue` at the time `at`. This time replaces the time that was set before."""

    at: float


@dataclass(frozen=True, slots=True)
class SendPing:
    """Send a ping and always report `PingSucceeded` or `PingFailed`: the next ping is armed only after this report."""

    episode: int


@dataclass(frozen=True, slots=True)
class StopPings:
    """Disarm the ping timer, and cancel a ping in progress."""


@dataclass(frozen=True, slots=True)
class RaiseToCaller:
    """Raise the failed call's own error."""


@dataclass(frozen=True, slots=True)
class SendToBacklog:
    """Divert the failed call to the backlog. The caller gets the result of the diverted call (S4, S5)."""


@dataclass(frozen=True, slots=True)
class RaiseUnusable:
    """Raise PrimaryUnusableError instead of the failed call's own error (G4)."""

    cause: FailureKind


@dataclass(frozen=True, slots=True)
class FailoverEngaged:
    """An entity failed over.

    Example: `pair.on("failover_engaged", lambda event: alert(event.entity, event.cause))`.
    """

    name: ClassVar[str] = "failover_engaged"
    entity: str
    at: float
    episode: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Restored:
    """An entity returned to the primary: by an operator if `forced`, otherwise because a ping succeeded.

    `outage` is the time since the failover in seconds. `diverted` is the number of messages diverted until now. Calls
    that are being diverted at the restore are added later: `EntityState.diverted` and the ledger have the final number.

    Example: `pair.on("restored", lambda event: print(event.entity, event.outage, event.diverted))`.
    """

    name: ClassVar[str] = "restored"
    entity: str
    at: float
    episode: int
    outage: float
    diverted: int
    forced: bool


@dataclass(frozen=True, slots=True)
class PrimaryUnusable:
    """A ping failed because the entity is gone from the primary or the primary refused the credential.

    Example: `pair.on("primary_unusable", lambda event: alert(event.entity, event.cause))`.
    """

    name: ClassVar[str] = "primary_unusable"
    entity: str
    at: float
    episode: int
    cause: FailureKind


@dataclass(frozen=True, slots=True)
class TrialPassed:
    """The primary accepted a message after a restore. `lasted` is the time since the restore in seconds.

    Example: `pair.on("trial_passed", lambda event: print(event.entity, event.lasted))`.
    """

    name: ClassVar[str] = "trial_passed"
    entity: str
    at: float
    episode: int
    lasted: float


@dataclass(frozen=True, slots=True)
class TrialFailed:
    """A call with messages failed after a restore. `failover_engaged` follows.

    `episode` is the number of the failover before the restore. `ping_interval` is that of the failover that follows.

    Example: `pair.on("trial_failed", lambda event: print(event.entity, event.cause))`.
    """

    name: ClassVar[str] = "trial_failed"
    entity: str
    at: float
    episode: int
    cause: FailureKind
    ping_interval: float


@dataclass(frozen=True, slots=True)
class FailoverHeld:
    """An operator holds a failover until force_restore.

    Example: `pair.on("failover_held", lambda event: print(event.entity))`.
    """

    name: ClassVar[str] = "failover_held"
    entity: str
    at: float
    episode: int


@dataclass(frozen=True, slots=True)
class FailoverTakenOver:
    """The failover that just engaged was known from another process. `outage` is the seconds since it engaged.

    Example: `pair.on("failover_taken_over", lambda event: print(event.entity, event.outage))`.
    """

    name: ClassVar[str] = "failover_taken_over"
    entity: str
    at: float
    episode: int
    outage: float


FailoverNotice = (
    FailoverEngaged | FailoverHeld | FailoverTakenOver | Restored | PrimaryUnusable | TrialPassed | TrialFailed
)


@dataclass(frozen=True, slots=True)
class PublishNotice:
    """Publish the notice to callbacks, log, metrics and ledger (S11)."""

    notice: FailoverNotice


Effect = (
    ArmFailoverTimer
    | DisarmFailoverTimer
    | ArmPing
    | SendPing
    | StopPings
    | RaiseToCaller
    | SendToBacklog
    | RaiseUnusable
    | PublishNotice
)
