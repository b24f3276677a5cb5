"""Decide which backlog queues senders may use now, and when a queue leaves or returns (S6, P7).

The queues that senders may use are *in the rotation*. All senders of a pair share one `Rotation`. A queue that fails
leaves the rotation for the `probation` time and then returns. A queue that could be neither found nor created stays out
until it is found. A queue is *sought* until the first try to find or create it has ended: a call that finds no other
queue waits for that.

If no queue is left, a call may *probe* one: it sends its messages to the queue that left first, on probation or not.
One call at a time probes, at most once a second for the pair. The other calls wait for its result. A queue whose probe
fails moves behind the others, so that the next probe tries another queue.

This module is pure. Sending, timers and the random number belong to the driver. Times are seconds on a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, NamedTuple, assert_never

from twinbus.backlog import EVICTING_FAILURES, FailureKind
from twinbus.pairing.errors import QueueCause

PROBE_SECONDS: Final = 1.0
"""The least time between the beginnings of two probes of a pair."""


class Absence(NamedTuple):
    """A queue outside the rotation. `until` is the time of its return; None if it was never found or created (P7)."""

    cause: QueueCause
    since: float
    until: float | None


@dataclass(frozen=True, slots=True)
class Rotation:
    """The backlog queues of a pair. Immutable: a sender reads `usable` without a lock.

    `absent` is in the order in which queues are probed. `next_probe` is the earliest time of the next probe. The first
    try to find or create the queues `sought` has not ended.
    """

    queues: tuple[str, ...]
    probation: float
    sought: tuple[str, ...] = ()
    absent: tuple[Absence, ...] = ()
    probing: bool = False
    next_probe: float = 0.0
    failed_probes: int = 0
    usable: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        away = {*self.sought, *(absence.cause.queue for absence in self.absent)}
        object.__setattr__(self, "usable", tuple(queue for queue in self.queues if queue not in away))

    @property
    def found(self) -> tuple[str, ...]:
        """The queues that exist, in the rotation or on probation."""
        missing = {*self.sought, *(absence.cause.queue for absence in self.absent if absence.until is None)}
        return tuple(queue for queue in self.queues if queue not in missing)

    @property
    def next_return(self) -> float | None:
        """The time at which the next probation ends, or None if no queue is on probation."""
        return min((absence.until for absence in self.absent if absence.until is not None), default=None)

    @property
    def causes(self) -> tuple[QueueCause, ...]:
        """Why the queues outside the rotation are absent, for BacklogUnavailableError."""
        sought = (QueueCause(queue, FailureKind.TIMEOUT, "the secondary has not answered yet") for queue in self.sought)
        return (*(absence.cause for absence in self.absent), *sought)


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


@dataclass(frozen=True, slots=True)
class ProbeAsked:
    """A call found no queue in the rotation. It has tried the queues `tried` itself. The effect says what it does."""

    tried: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ProbeSucceeded:
    """The queue accepted the message of the call that probed it."""

    queue: str


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """The queue did not accept the message of the call that probed it."""

    queue: str
    kind: FailureKind
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProbeAbandoned:
    """A probe ended without a result: the call was cancelled, its time ended, or its message cannot be diverted."""


Event = (
    BacklogSendFailed
    | ProbationEnded
    | QueueFound
    | QueueMissing
    | ProbeAsked
    | ProbeSucceeded
    | ProbeFailed
    | ProbeAbandoned
)


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
    """A queue left the rotation. `left` is the number of queues that are still usable.

    Example: `pair.on("backlog_queue_left", lambda event: print(event.queue, event.kind, event.left))`.
    """

    name: ClassVar[str] = "backlog_queue_left"
    queue: str
    at: float
    kind: FailureKind
    left: int


@dataclass(frozen=True, slots=True)
class QueueReturned:
    """A queue returned to the rotation.

    Example: `pair.on("backlog_queue_returned", lambda event: print(event.queue))`.
    """

    name: ClassVar[str] = "backlog_queue_returned"
    queue: str
    at: float


QueueNotice = QueueLeft | QueueReturned


@dataclass(frozen=True, slots=True)
class PublishQueueNotice:
    """Publish the notice to callbacks, log, metrics and ledger (S11)."""

    notice: QueueNotice


@dataclass(frozen=True, slots=True)
class ProbeQueue:
    """Send the message to this queue. Always report ProbeSucceeded, ProbeFailed or ProbeAbandoned."""

    queue: str


@dataclass(frozen=True, slots=True)
class WaitForProbe:
    """Wait until the rotation changes, at most until the time `until` (None: no limit). Then look for a queue again."""

    until: float | None


@dataclass(frozen=True, slots=True)
class RaiseUnavailable:
    """Raise BacklogUnavailableError: no queue can be probed by this call."""


ProbeEffect = ProbeQueue | WaitForProbe | RaiseUnavailable
Effect = TryAnother | RaiseSendError | ArmProbation | PublishQueueNotice | ProbeEffect


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
            return _return(_no_longer_sought(rotation, event.queue), [event.queue], now)
        case QueueMissing():
            cause = QueueCause(event.queue, event.kind, event.detail)
            return _leave(_no_longer_sought(rotation, event.queue), cause, now, None)
        case ProbeAsked():
            return _probe(rotation, event.tried, now)
        case ProbeSucceeded():
            return _return(replace(rotation, probing=False), [event.queue], now)
        case ProbeFailed():
            ended = replace(rotation, probing=False)
            if event.kind not in EVICTING_FAILURES:
                return RotationDecision(ended, (RaiseSendError(),))
            return _probe_failed(ended, QueueCause(event.queue, event.kind, event.detail), now)
        case ProbeAbandoned():
            return RotationDecision(replace(rotation, probing=False))
        case _:
            assert_never(event)


def _probe(rotation: Rotation, tried: frozenset[str], now: float) -> RotationDecision:
    if rotation.usable:
        # A queue has returned since the call looked.
        return RotationDecision(rotation, (WaitForProbe(now),))
    # A queue that was never found is not probed: provisioning looks for it (P8).
    left = [one.cause.queue for one in rotation.absent if one.until is not None and one.cause.queue not in tried]
    if not left:
        return RotationDecision(rotation, (WaitForProbe(None) if rotation.sought else RaiseUnavailable(),))
    if rotation.probing:
        return RotationDecision(rotation, (WaitForProbe(None),))
    if now < rotation.next_probe:
        return RotationDecision(rotation, (WaitForProbe(rotation.next_probe),))
    return RotationDecision(replace(rotation, probing=True, next_probe=now + PROBE_SECONDS), (ProbeQueue(left[0]),))


def _probe_failed(rotation: Rotation, cause: QueueCause, now: float) -> RotationDecision:
    others = tuple(one for one in rotation.absent if one.cause.queue != cause.queue)
    failed = tuple(one._replace(cause=cause) for one in rotation.absent if one.cause.queue == cause.queue)
    counted = replace(rotation, absent=(*others, *failed), failed_probes=rotation.failed_probes + 1)
    # If the queue returned during the probe, it leaves again.
    left = _leave(counted, cause, now, now + rotation.probation)
    return RotationDecision(left.rotation, (*left.effects, TryAnother()))


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


def _no_longer_sought(rotation: Rotation, queue: str) -> Rotation:
    return replace(rotation, sought=tuple(one for one in rotation.sought if one != queue))


def _arm(rotation: Rotation) -> tuple[Effect, ...]:
    due = rotation.next_return
    return () if due is None else (ArmProbation(due),)
