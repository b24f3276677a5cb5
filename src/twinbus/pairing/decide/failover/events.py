"""What happened to an entity, as far as its failover is concerned, in the past tense."""

from __future__ import annotations

from dataclasses import dataclass

from twinbus.backlog import FailureKind


@dataclass(frozen=True, slots=True)
class PrimarySendSucceeded:
    """A call on the primary; opening, entering, making a batch and scheduling are calls like sends (S3)."""


@dataclass(frozen=True, slots=True)
class PrimarySendFailed:
    """Such a call failed for good. The step says what becomes of it."""

    kind: FailureKind


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The failover timer. One that was disarmed too late does no harm."""


@dataclass(frozen=True, slots=True)
class PingDue:
    """The ping timer. One that was stopped too late does no harm."""


@dataclass(frozen=True, slots=True)
class PingSucceeded:
    episode: int


@dataclass(frozen=True, slots=True)
class PingFailed:
    episode: int
    kind: FailureKind


@dataclass(frozen=True, slots=True)
class MessagesDiverted:
    """The backlog has taken them."""

    messages: int = 1


@dataclass(frozen=True, slots=True)
class FailoverForced:
    pass


@dataclass(frozen=True, slots=True)
class RestoreForced:
    pass


@dataclass(frozen=True, slots=True)
class PairClosed:
    """Closed or faulted (C1): the driver knows which, and with what error sends are refused."""


Event = (
    PrimarySendSucceeded
    | PrimarySendFailed
    | TimerFired
    | PingDue
    | PingSucceeded
    | PingFailed
    | MessagesDiverted
    | FailoverForced
    | RestoreForced
    | PairClosed
)
