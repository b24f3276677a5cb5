"""What happened to an entity, as far as its failover is concerned, in the past tense."""

from __future__ import annotations

from typing import NamedTuple

from twinbus.pairing.failures import FailureKind


class PrimarySendSucceeded(NamedTuple):
    """A call on the primary; opening, entering, making a batch and scheduling are calls like sends (S3)."""


class PrimarySendFailed(NamedTuple):
    """Such a call failed for good. The step says what becomes of it."""

    kind: FailureKind


class TimerFired(NamedTuple):
    """The failover timer. One that was disarmed too late does no harm."""


class PingDue(NamedTuple):
    """The ping timer. One that was stopped too late does no harm."""


class PingSucceeded(NamedTuple):
    episode: int


class PingFailed(NamedTuple):
    episode: int
    kind: FailureKind


class MessagesDiverted(NamedTuple):
    """The backlog has taken them."""

    messages: int = 1


class FailoverForced(NamedTuple):
    pass


class RestoreForced(NamedTuple):
    pass


class PairClosed(NamedTuple):
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
