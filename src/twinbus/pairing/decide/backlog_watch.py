"""Decide whether any syphon moves the messages of the backlog to the primary (clause Y1).

Why. A pair that diverts messages depends on some syphon, perhaps in another process, to move the messages to the
primary after the failover. If no syphon runs, the messages are safe but nobody ever receives them. The pair detects
that messages wait and raises an alert.

How. The pair remembers every backlog queue that it diverted a message to. Every `interval` seconds it peeks at the
oldest active message of each such queue. Peeking locks nothing and removes nothing.

    queue empty                    -> stop checking the queue until the next message is diverted to it
    oldest message changed         -> a syphon is moving messages; the waiting time restarts
    oldest message's entity is
    still failed over              -> the message cannot be delivered yet; the waiting time restarts
    otherwise                      -> the message waits; after `alert_after` seconds, raise the alert once

Messages that a syphon has deferred are not active. After a peek that returns only deferred messages, the next check
peeks at the messages that follow, with twice the page size. So an active message behind many deferred ones is found
after a number of checks that grows slowly.

This module is pure: `advance` takes the state, an event and the time, and returns the next state and the effects.
Peeking, timers, logging and locking belong to the driver. All times are seconds on a monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple, assert_never

from twinbus.backlog import CREDENTIAL_REFUSED, FailureKind
from twinbus.pairing.decide.failover_events import PairClosed

_MAX_PAGE: Final = 256


# --- state -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """What is known about one backlog queue."""

    queue: str
    empty: bool = False
    diverted_during_check: bool = False
    """A message arrived while a check was running, so an empty peek result does not prove that the queue is empty."""
    peek_from: int = 1
    """Sequence number at which the next peek starts. All messages below this number are deferred or gone."""
    page_size: int = 1
    peeked: bool = False
    front_number: int | None = None
    """Sequence number of the oldest active message at the last peek."""
    waiting_since: float = 0.0
    """The time since which the message at `front_number` could have been delivered."""
    oldest_age: float = 0.0
    unattended: bool = False
    alerted: bool = False
    """The alert for the message at `front_number` was raised already."""


@dataclass(frozen=True, slots=True)
class BacklogWatch:
    """State of one pair's checks. Immutable: `advance` returns the next state. `interval` 0 disables all checks."""

    interval: float
    alert_after: float
    queues: tuple[QueueStatus, ...] = ()
    checking: bool = False
    closed: bool = False

    def needs_event_for(self, queue: str) -> bool:
        """Return whether `MessageDiverted` would change the state. If not, a send need not take the state's lock."""
        if self.closed or not self.interval:
            return False
        return self.checking or all(status.queue != queue or status.empty for status in self.queues)


# --- events: what happened -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageDiverted:
    """A backlog queue accepted a message."""

    queue: str


@dataclass(frozen=True, slots=True)
class CheckDue:
    """The time set by `ScheduleCheck` has come."""


class OldestMessage(NamedTuple):
    """The oldest active message of a queue."""

    number: int
    age: float
    entity: str
    entity_failed_over: bool


@dataclass(frozen=True, slots=True)
class QueuePeeked:
    """A peek succeeded. `oldest` is None if the page held no active message.

    If the page held only deferred messages, `next_number` is the sequence number at which the next peek starts.
    """

    queue: str
    oldest: OldestMessage | None
    next_number: int | None = None


@dataclass(frozen=True, slots=True)
class PeekFailed:
    """A peek failed. After a `kind` that means a refused credential there are no more checks."""

    queue: str
    kind: FailureKind


@dataclass(frozen=True, slots=True)
class CheckFinished:
    """Every queue of a `PeekQueues` effect was peeked, with or without success."""


Event = MessageDiverted | CheckDue | QueuePeeked | PeekFailed | CheckFinished | PairClosed


# --- effects: what the driver must do --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScheduleCheck:
    """Deliver `CheckDue` at the time `at`. This time replaces the time that was set before."""

    at: float


class PeekPage(NamedTuple):
    """The messages to peek at: at most `size` messages of `queue` from sequence number `start` on."""

    queue: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class PeekQueues:
    """Peek each page, report `QueuePeeked` or `PeekFailed` for each, then `CheckFinished`."""

    pages: tuple[PeekPage, ...]


@dataclass(frozen=True, slots=True)
class ReportNoListenRight:
    """Log that the secondary's credential has no Listen right. There are no more checks, so this is logged once."""

    queue: str
    kind: FailureKind


@dataclass(frozen=True, slots=True)
class RaiseAlert:
    """Raise the event `backlog_unattended`."""

    queue: str
    entity: str
    oldest_age: float


Effect = ScheduleCheck | PeekQueues | ReportNoListenRight | RaiseAlert


class WatchDecision(NamedTuple):
    watch: BacklogWatch
    effects: tuple[Effect, ...] = ()


# --- decisions -------------------------------------------------------------------------------------------------------


def advance(watch: BacklogWatch, event: Event, now: float) -> WatchDecision:
    """Return the state after `event`, and what the driver must do."""
    if watch.closed or not watch.interval:
        return WatchDecision(watch)
    match event:
        case MessageDiverted(queue):
            return _message_diverted(watch, queue, now)
        case CheckDue():
            return _start_check(watch)
        case QueuePeeked():
            return _queue_peeked(watch, event, now)
        case PeekFailed(queue, kind) if kind in CREDENTIAL_REFUSED:
            return WatchDecision(_close(watch), (ReportNoListenRight(queue, kind),))
        case PeekFailed():
            return WatchDecision(watch)  # The next check tries again.
        case CheckFinished():
            return _finish_check(watch, now)
        case PairClosed():
            return WatchDecision(_close(watch))
        case _:
            assert_never(event)


def _message_diverted(watch: BacklogWatch, queue: str, now: float) -> WatchDecision:
    status = _find(watch, queue) or QueueStatus(queue)
    after = _store(watch, replace(status, empty=False, diverted_during_check=watch.checking))
    already_scheduled = watch.checking or _has_work(watch)
    return WatchDecision(after, () if already_scheduled else _schedule(after, now))


def _start_check(watch: BacklogWatch) -> WatchDecision:
    pages = tuple(
        PeekPage(status.queue, status.peek_from, status.page_size) for status in watch.queues if not status.empty
    )
    if watch.checking or not pages:
        return WatchDecision(watch)
    return WatchDecision(replace(watch, checking=True), (PeekQueues(pages),))


def _queue_peeked(watch: BacklogWatch, peek: QueuePeeked, now: float) -> WatchDecision:
    status = _find(watch, peek.queue)
    if status is None:
        return WatchDecision(watch)
    if peek.oldest is not None:
        return _oldest_found(watch, status, peek.oldest, now)
    if peek.next_number is None:
        return WatchDecision(_store(watch, _nothing_there(status)))
    return WatchDecision(_store(watch, _only_deferred(status, peek.next_number)))


def _nothing_there(status: QueueStatus) -> QueueStatus:
    # A message that arrived during the check need not be in the peek's result: keep checking in that case.
    return QueueStatus(status.queue, empty=not status.diverted_during_check, peek_from=status.peek_from)


def _only_deferred(status: QueueStatus, next_number: int) -> QueueStatus:
    page_size = min(status.page_size * 2, _MAX_PAGE)
    return QueueStatus(status.queue, peek_from=next_number, page_size=page_size, peeked=True)


def _oldest_found(watch: BacklogWatch, status: QueueStatus, oldest: OldestMessage, now: float) -> WatchDecision:
    same_front = status.front_number == oldest.number
    waiting_since = _waiting_since(status, oldest, same_front, now)
    unattended = not oldest.entity_failed_over and now - waiting_since > watch.alert_after
    alerted = same_front and status.alerted
    after = replace(
        status,
        empty=False,
        peek_from=oldest.number,
        page_size=1,
        peeked=True,
        front_number=oldest.number,
        waiting_since=waiting_since,
        oldest_age=oldest.age,
        unattended=unattended,
        alerted=alerted or unattended,
    )
    alert = RaiseAlert(status.queue, oldest.entity, oldest.age)
    return WatchDecision(_store(watch, after), (alert,) if unattended and not alerted else ())


def _waiting_since(status: QueueStatus, oldest: OldestMessage, same_front: bool, now: float) -> float:
    """Return the time since which the oldest message could have been delivered but was not."""
    if oldest.entity_failed_over:
        return now  # While the entity is failed over, no syphon delivers the message: this time does not count.
    if same_front:
        return status.waiting_since
    if status.peeked:
        return now  # The former oldest message is gone: a syphon is moving messages.
    return now - oldest.age  # First peek: the message may have waited since it arrived.


def _finish_check(watch: BacklogWatch, now: float) -> WatchDecision:
    queues = tuple(replace(status, diverted_during_check=False) for status in watch.queues)
    after = replace(watch, checking=False, queues=queues)
    return WatchDecision(after, _schedule(after, now))


def _schedule(watch: BacklogWatch, now: float) -> tuple[Effect, ...]:
    return (ScheduleCheck(now + watch.interval),) if _has_work(watch) else ()


def _has_work(watch: BacklogWatch) -> bool:
    return any(not status.empty for status in watch.queues)


def _close(watch: BacklogWatch) -> BacklogWatch:
    return replace(watch, queues=(), checking=False, closed=True)


def _find(watch: BacklogWatch, queue: str) -> QueueStatus | None:
    return next((status for status in watch.queues if status.queue == queue), None)


def _store(watch: BacklogWatch, status: QueueStatus) -> BacklogWatch:
    others = tuple(other for other in watch.queues if other.queue != status.queue)
    return replace(watch, queues=(*others, status))
