"""Decide which backlog queues senders may use now, and when a queue leaves or returns (S6, P7).

The queues that senders may use are *in the rotation*. All senders of a pair share one `Rotation`. A queue that fails
leaves the rotation for the `probation` time and then returns. A queue that could be neither found nor created stays out
until it is found.

This module is pure. Sending, timers and the random number belong to the driver. Times are seconds on a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, assert_never

from twinbus.backlog import EVICTING_FAILURES, FailureKind
from twinbus.pairing.errors import QueueCause


class Absence(NamedTuple):
    """A queue outside the rotation. `until` is the time of its return; None if it was never found or created (P7)."""

    cause: QueueCause
    since: float
    until: float | None


@dataclass(frozen=True, slots=True)
class Rotation:
    """The backlog queues of a pair. Immutable: a sender reads `usable` without a lock."""

    queues: tuple[str, ...]
    probation: float
    absent: tuple[Absence, ...] = ()
    usable: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        away = {absence.cause.queue for absence in self.absent}
        object.__setattr__(self, "usable", tuple(queue for queue in self.queues if queue not in away))

    @property
    def found(self) -> tuple[str, ...]:
        """The queues that exist, in the rotation or on probation."""
        missing = {absence.cause.queue for absence in self.absent if absence.until is None}
        return tuple(queue for queue in self.queues if queue not in missing)

    @property
    def causes(self) -> tuple[QueueCause, ...]:
        """Why the queues outside the rotation are absent, for BacklogUnavailableError."""
        return tuple(absence.cause for absence in self.absent)


# --- events: what happened -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BacklogSendFailed:
    """A queue did not accept a diverted message. The effects say whether to try another queue or to raise."""

    queue: str
    kind: FailureKind
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProbationEnded:
    """The time that `ArmProbation` set has come."""


@dataclass(frozen=True, slots=True)
class QueueFound:
    """The queue was found or created, when the pair was made or in the background after that (P8)."""

    queue: str


@dataclass(frozen=True, slots=True)
class QueueMissing:
    """The queue was neither found nor created: it stays outside the rotation until it is found (P7)."""

    queue: str
    kind: FailureKind
    detail: str = ""


Event = BacklogSendFailed | ProbationEnded | QueueFound | QueueMissing


# --- effects: what the driver must do --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TryAnother:
    """Send the message to another queue, within the call's timeout. If no queue is left: BacklogUnavailableError."""


@dataclass(frozen=True, slots=True)
class RaiseSendError:
    """Raise the error of the failed send: another queue would fail in the same way."""


@dataclass(frozen=True, slots=True)
class ArmProbation:
    """Deliver `ProbationEnded` at the time `at`. This time replaces the time that was set before."""

    at: float


@dataclass(frozen=True, slots=True)
class QueueLeft:
    """A queue left the rotation. `left` is the number of queues that are still usable."""

    name: ClassVar[str] = "backlog_queue_left"
    queue: str
    at: float
    kind: FailureKind
    left: int


@dataclass(frozen=True, slots=True)
class QueueReturned:
    """A queue returned to the rotation."""

    name: ClassVar[str] = "backlog_queue_returned"
    queue: str
    at: float


@dataclass(frozen=True, slots=True)
class PublishQueueNotice:
    """Publish the notice to callbacks, log, metrics and ledger (S11)."""

    notice: QueueLeft | QueueReturned


Effect = TryAnother | RaiseSendError | ArmProbation | PublishQueueNotice


class RotationDecision(NamedTuple):
    """The next state, and the effects. The driver first replaces the state, then carries out the effects."""

    rotation: Rotation
    effects: tuple[Effect, ...] = ()


# --- decisions -------------------------------------------------------------------------------------------------------


def advance(rotation: Rotation, event: Event, now: float) -> RotationDecision:
    """Return the state after `event`, and what the driver must do."""
    match event:
        case BacklogSendFailed():
            if event.kind not in EVICTING_FAILURES:
                return RotationDecision(rotation, (RaiseSendError(),))
            cause = QueueCause(event.queue, event.kind, event.detail)
            left = _leave(rotation, cause, now, now + rotation.probation)
            return RotationDecision(left.rotation, (*left.effects, TryAnother()))
        case ProbationEnded():
            over = [a.cause.queue for a in rotation.absent if a.until is not None and a.until <= now]
            return _return(rotation, over, now)
        case QueueFound():
            return _return(rotation, [event.queue], now)
        case QueueMissing():
            return _leave(rotation, QueueCause(event.queue, event.kind, event.detail), now, None)
        case _:
            assert_never(event)


def _leave(rotation: Rotation, cause: QueueCause, now: float, until: float | None) -> RotationDecision:
    if cause.queue not in rotation.usable:
        # Another call has reported this queue. The failures of other calls in progress do not extend the probation.
        return RotationDecision(rotation)
    after = replace(rotation, absent=(*rotation.absent, Absence(cause, now, until)))
    left = PublishQueueNotice(QueueLeft(cause.queue, now, cause.kind, len(after.usable)))
    return RotationDecision(after, (left, *_arm(after)))


def _return(rotation: Rotation, queues: Iterable[str], now: float) -> RotationDecision:
    known, absent = rotation.queues, rotation.absent
    returned = []
    for queue in queues:
        if queue not in rotation.usable:
            returned.append(PublishQueueNotice(QueueReturned(queue, now)))
            absent = tuple(absence for absence in absent if absence.cause.queue != queue)
            known = known if queue in known else (*known, queue)
    after = replace(rotation, queues=known, absent=absent)
    return RotationDecision(after, (*returned, *_arm(after)))


def _arm(rotation: Rotation) -> tuple[Effect, ...]:
    due = [absence.until for absence in rotation.absent if absence.until is not None]
    return (ArmProbation(min(due)),) if due else ()
