"""The backlog queues a pair now considers usable: who is picked, who leaves, who comes back (S6, P7).

All senders of a pair share one Rotation. Sending, and the random number, are the driver's. Time is in seconds on any
clock that only goes forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, NamedTuple, assert_never

from twinbus.backlog import EVICTING_FAILURES, FailureKind
from twinbus.pairing.errors import QueueCause


class Absence(NamedTuple):
    """A queue outside the rotation. `until` is None for one that was never found or created (P7)."""

    cause: QueueCause
    since: float
    until: float | None


@dataclass(frozen=True, slots=True)
class Rotation:
    """It is never altered, only replaced: a sender reads `usable` without a lock."""

    queues: tuple[str, ...]
    probation: float
    absent: tuple[Absence, ...] = ()
    usable: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        away = {absence.cause.queue for absence in self.absent}
        object.__setattr__(self, "usable", tuple(queue for queue in self.queues if queue not in away))

    @property
    def found(self) -> tuple[str, ...]:
        """Those that exist, in the rotation or on probation."""
        missing = {absence.cause.queue for absence in self.absent if absence.until is None}
        return tuple(queue for queue in self.queues if queue not in missing)

    @property
    def causes(self) -> tuple[QueueCause, ...]:
        """Why the others are missing: what BacklogUnavailableError carries when none is left."""
        return tuple(absence.cause for absence in self.absent)


def choose(rotation: Rotation, current: str | None, chance: float) -> str | None:
    """The queue of a sender that was on `current`: it stays there as long as it may. None: none is left."""
    usable = rotation.usable
    if current in usable:
        return current
    return usable[int(chance * len(usable))] if usable else None


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BacklogSendFailed:
    """A diverted message was not taken. The step says what becomes of it."""

    queue: str
    kind: FailureKind
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProbationEnded:
    """The timer that ArmProbation asked for."""


@dataclass(frozen=True, slots=True)
class QueueFound:
    """Found or created, perhaps only after others (P8)."""

    queue: str


@dataclass(frozen=True, slots=True)
class QueueMissing:
    """Neither found nor created: it drops out until it is found (P7)."""

    queue: str
    kind: FailureKind
    detail: str = ""


Event = BacklogSendFailed | ProbationEnded | QueueFound | QueueMissing


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TryAnother:
    """`choose` again and send there, within the call's time-out; none left is BacklogUnavailableError."""


@dataclass(frozen=True, slots=True)
class RaiseSendError:
    """The failed send's own error: another queue would fare no better."""


@dataclass(frozen=True, slots=True)
class ArmProbation:
    """In place of any earlier one."""

    at: float


@dataclass(frozen=True, slots=True)
class QueueLeft:
    """`left` queues are still usable."""

    name: ClassVar[str] = "backlog_queue_left"
    queue: str
    at: float
    kind: FailureKind
    left: int


@dataclass(frozen=True, slots=True)
class QueueReturned:
    name: ClassVar[str] = "backlog_queue_returned"
    queue: str
    at: float


@dataclass(frozen=True, slots=True)
class PublishQueueNotice:
    notice: QueueLeft | QueueReturned


Effect = TryAnother | RaiseSendError | ArmProbation | PublishQueueNotice


class RotationDecision(NamedTuple):
    rotation: Rotation
    effects: tuple[Effect, ...] = ()


# --- decisions -------------------------------------------------------------------------------------------------------

_TRY_ANOTHER: Final = TryAnother()


def advance(rotation: Rotation, event: Event, now: float) -> RotationDecision:
    match event:
        case BacklogSendFailed():
            if event.kind not in EVICTING_FAILURES:
                return RotationDecision(rotation, (RaiseSendError(),))
            step = _leave(rotation, QueueCause(event.queue, event.kind, event.detail), now, now + rotation.probation)
            return RotationDecision(step.rotation, (*step.effects, _TRY_ANOTHER))
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
        # Another sender was told first; its probation is not drawn out by those that were still under way.
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
