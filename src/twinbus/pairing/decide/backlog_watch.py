"""Whether anybody brings the backlog home (Y1): when a pair looks at queues it diverted to, and what it makes of that.

Peeking and telling are the driver's. Time is in seconds on any clock that only goes forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final, NamedTuple, assert_never

from twinbus.backlog import CREDENTIAL_REFUSED, FailureKind

_MOST_AT_ONCE: Final = 256


class Oldest(NamedTuple):
    """The oldest active message of a queue: its sequence number, how long it has been there, and for which entity."""

    number: int
    seconds: float
    entity: str
    failed_over: bool


@dataclass(frozen=True, slots=True)
class Watch:
    """A backlog queue that messages were diverted to.

    `oldest` and `unattended` are as it was last seen. `waits_since`: since when the message at its `front` could have
    been brought home. `start` and `count`: what is peeked next; what syphons have put aside is behind `start`.
    """

    queue: str
    empty: bool = False
    used_meanwhile: bool = False
    start: int = 1
    count: int = 1
    looked: bool = False
    front: int | None = None
    waits_since: float = 0.0
    oldest: float = 0.0
    unattended: bool = False
    told: bool = False


@dataclass(frozen=True, slots=True)
class Attendance:
    """It is never altered, only replaced. `interval` 0: never look. `patience`: how long a message may wait."""

    interval: float
    patience: float
    watches: tuple[Watch, ...] = ()
    looking: bool = False
    ended: bool = False

    def has_news(self, queue: str) -> bool:
        """Whether QueueUsed would change anything: most diverted messages tell nothing new."""
        if self.ended or not self.interval:
            return False
        return self.looking or all(watch.queue != queue or watch.empty for watch in self.watches)


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueUsed:
    """The queue has taken a diverted message."""

    queue: str


@dataclass(frozen=True, slots=True)
class LookDue:
    """The timer that ArmLook asked for."""


@dataclass(frozen=True, slots=True)
class QueueSeen:
    """What a peek found. `past`: the sequence number after those that are put aside, where there is nothing else."""

    queue: str
    oldest: Oldest | None
    past: int | None = None


@dataclass(frozen=True, slots=True)
class QueueNotSeen:
    queue: str
    kind: FailureKind


@dataclass(frozen=True, slots=True)
class LookEnded:
    """After every Look, whatever came of it."""


@dataclass(frozen=True, slots=True)
class PairClosed:
    """Either side: nothing is diverted any more."""


Event = QueueUsed | LookDue | QueueSeen | QueueNotSeen | LookEnded | PairClosed


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArmLook:
    """In place of any earlier one."""

    at: float


class Peek(NamedTuple):
    queue: str
    start: int
    most: int


@dataclass(frozen=True, slots=True)
class Look:
    """Peek at each, report QueueSeen or QueueNotSeen, and LookEnded when all are done."""

    peeks: tuple[Peek, ...]


@dataclass(frozen=True, slots=True)
class TellRefused:
    """The credential may not Listen: nobody will look any more, so it is said, once."""

    queue: str
    kind: FailureKind


@dataclass(frozen=True, slots=True)
class BacklogUnattended:
    """The oldest message of a backlog queue waits, its entity is not failed over, and nobody takes it home."""

    name: ClassVar[str] = "backlog_unattended"
    queue: str
    at: float
    entity: str
    oldest: float


@dataclass(frozen=True, slots=True)
class Emit:
    notice: BacklogUnattended


Effect = ArmLook | Look | TellRefused | Emit


class Step(NamedTuple):
    attendance: Attendance
    effects: tuple[Effect, ...] = ()


# --- decisions -------------------------------------------------------------------------------------------------------


def advance(attendance: Attendance, event: Event, now: float) -> Step:
    if attendance.ended or not attendance.interval:
        return Step(attendance)
    match event:
        case QueueUsed():
            return _used(attendance, event.queue, now)
        case LookDue():
            peeks = tuple(Peek(one.queue, one.start, one.count) for one in attendance.watches if not one.empty)
            if attendance.looking or not peeks:
                return Step(attendance)
            return Step(replace(attendance, looking=True), (Look(peeks),))
        case QueueSeen():
            return _seen(attendance, event, now)
        case QueueNotSeen():
            if event.kind not in CREDENTIAL_REFUSED:
                return Step(attendance)
            return Step(_ended(attendance), (TellRefused(event.queue, event.kind),))
        case LookEnded():
            watches = tuple(replace(watch, used_meanwhile=False) for watch in attendance.watches)
            after = replace(attendance, looking=False, watches=watches)
            return Step(after, _arm(after, now))
        case PairClosed():
            return Step(_ended(attendance))
        case _:
            assert_never(event)


def _used(attendance: Attendance, queue: str, now: float) -> Step:
    known = _watch(attendance, queue)
    # A message that came while the queue was being peeked at need not be in what the peek shows.
    after = _with(attendance, replace(known or Watch(queue), empty=False, used_meanwhile=attendance.looking))
    armed = attendance.looking or any(not watch.empty for watch in attendance.watches)
    return Step(after, () if armed else _arm(after, now))


def _seen(attendance: Attendance, seen: QueueSeen, now: float) -> Step:
    watch = _watch(attendance, seen.queue)
    if watch is None:
        return Step(attendance)
    oldest = seen.oldest
    if oldest is None and seen.past is None:
        return Step(_with(attendance, Watch(watch.queue, empty=not watch.used_meanwhile, start=watch.start)))
    if oldest is None:
        count = min(watch.count * 2, _MOST_AT_ONCE)
        return Step(_with(attendance, Watch(watch.queue, start=seen.past or 1, count=count, looked=True)))
    stayed = watch.front == oldest.number
    if oldest.failed_over or (watch.looked and not stayed):
        # It could not have gone home until now; or somebody took what was before it.
        since = now
    else:
        since = watch.waits_since if stayed else now - oldest.seconds
    unattended = not oldest.failed_over and now - since > attendance.patience
    told = watch.told and stayed
    after = Watch(
        watch.queue,
        used_meanwhile=watch.used_meanwhile,
        start=oldest.number,
        looked=True,
        front=oldest.number,
        waits_since=since,
        oldest=oldest.seconds,
        unattended=unattended,
        told=told or unattended,
    )
    tell = Emit(BacklogUnattended(watch.queue, now, oldest.entity, oldest.seconds))
    return Step(_with(attendance, after), (tell,) if unattended and not told else ())


def _arm(attendance: Attendance, now: float) -> tuple[Effect, ...]:
    wanted = any(not watch.empty for watch in attendance.watches)
    return (ArmLook(now + attendance.interval),) if wanted else ()


def _ended(attendance: Attendance) -> Attendance:
    return replace(attendance, watches=(), looking=False, ended=True)


def _watch(attendance: Attendance, queue: str) -> Watch | None:
    return next((watch for watch in attendance.watches if watch.queue == queue), None)


def _with(attendance: Attendance, watch: Watch) -> Attendance:
    others = tuple(one for one in attendance.watches if one.queue != watch.queue)
    return replace(attendance, watches=(*others, watch))
