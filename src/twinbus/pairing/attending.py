"""Looks at the backlog queues (Y1): what both drivers share, and those of a sync pair.

When to look and what it means is decided in `attendance`. Peeks lock nothing and take no message.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusMessageState

from twinbus.backlog import PATH_PROPERTY, failure_kind
from twinbus.pairing.decide import backlog_watch
from twinbus.pairing.decide.backlog_watch import (
    ArmLook,
    Attendance,
    BacklogUnattended,
    Emit,
    Look,
    LookDue,
    LookEnded,
    Oldest,
    Peek,
    QueueNotSeen,
    QueueSeen,
    TellRefused,
)
from twinbus.pairing.recording import OperationRecorder
from twinbus.pairing.retrying import ONCE
from twinbus.pairing.shared_state import DriverTimer, Now
from twinbus.pairing.sync.timeouts import ThreadTimeouts
from twinbus.sdk import interrupt, open_sync_link, refuse_calls

_log = logging.getLogger("twinbus.pairing")

# Of an entity's path: whether it is failed over in this pair.
FailedOver = Callable[[str], bool]


class SharedBacklogWatch:
    """Of one pair. `attendance` is read without a lock, and replaced by `advance` alone. `look` only begins it."""

    def __init__(
        self,
        interval: timedelta,
        patience: timedelta,
        timer: Callable[[Callable[[], object]], DriverTimer],
        look: Callable[[SharedBacklogWatch, tuple[Peek, ...]], None],
        emit: Callable[[BacklogUnattended], None],
        *,
        now: Now = time.monotonic,
    ) -> None:
        self.attendance = Attendance(interval.total_seconds(), patience.total_seconds())
        self._timer = timer(lambda: self.advance(LookDue()))
        self._look = look
        self._emit = emit
        self._now = now
        self._lock = threading.Lock()

    def used(self, queue: str) -> None:
        """It has taken a diverted message."""
        if self.attendance.has_news(queue):
            self.advance(backlog_watch.QueueUsed(queue))

    def advance(self, event: backlog_watch.Event) -> None:
        notices: list[BacklogUnattended] = []
        refused: list[TellRefused] = []
        with self._lock:
            step = backlog_watch.advance(self.attendance, event, self._now())
            self.attendance = step.attendance
            for effect in step.effects:
                match effect:
                    case ArmLook(at):
                        self._timer.arm(at)
                    case Look(peeks):
                        self._look(self, peeks)
                    case TellRefused():
                        refused.append(effect)
                    case Emit(notice):
                        notices.append(notice)
        # Outside the lock: whoever is told may hold it up, or ask for more.
        for one in refused:
            _log.warning(
                "%s may not be looked at (%s): whether anybody syphons it will not be known here. Give the secondary's "
                "key Listen, or set backlog_check_interval to 0",
                one.queue,
                one.kind,
            )
        for notice in notices:
            self._emit(notice)

    def close(self) -> None:
        self._timer.disarm()
        self.advance(backlog_watch.PairClosed())

    def forked(self) -> None:
        self._lock = threading.Lock()
        self.attendance = backlog_watch.advance(self.attendance, backlog_watch.PairClosed(), 0.0).attendance


def seen(queue: str, messages: Sequence[Any], failed_over: FailedOver) -> QueueSeen:
    """What a peek of the SDK shows."""
    active = next((one for one in messages if one.state is ServiceBusMessageState.ACTIVE), None)
    if active is None:
        return QueueSeen(queue, None, messages[-1].sequence_number + 1 if messages else None)
    path = (active.application_properties or {}).get(PATH_PROPERTY.encode(), b"")
    entity = path.decode("utf-8", "replace") if isinstance(path, bytes) else str(path)
    now = datetime.now(UTC)
    # Two machines' clocks: a message of the future has come just now.
    age = max((now - (active.enqueued_time_utc or now)).total_seconds(), 0.0)
    return QueueSeen(queue, Oldest(active.sequence_number, age, entity, failed_over(entity)))


def not_seen(queue: str, error: Exception) -> QueueNotSeen:
    kind = failure_kind(error)
    _log.info("%s could not be looked at: %s", queue, kind)
    return QueueNotSeen(queue, kind)


class BacklogPeeker:
    """Those of a sync pair, one queue after the other in one worker."""

    def __init__(
        self, client: ServiceBusClient, attempts: ThreadTimeouts, recording: OperationRecorder, failed_over: FailedOver
    ) -> None:
        self._client = client
        self._attempts = attempts
        self._recording = recording
        self._failed_over = failed_over
        self._receiver: Any = None
        self._stopped = False

    def begin(self, cell: SharedBacklogWatch, peeks: tuple[Peek, ...]) -> None:
        self._attempts.keeper.soon(lambda: self._look(cell, peeks))

    def stop(self) -> None:
        """A peek under way is given up."""
        self._stopped = True
        receiver = self._receiver
        if receiver is not None:
            refuse_calls(receiver)
            interrupt(receiver)

    def _look(self, cell: SharedBacklogWatch, peeks: tuple[Peek, ...]) -> None:
        for peek in peeks:
            if self._stopped or cell.attendance.ended:
                break
            cell.advance(self._peeked(peek))
        cell.advance(LookEnded())

    def _peeked(self, peek: Peek) -> QueueSeen | QueueNotSeen:
        receiver: Any = None
        told: QueueSeen | QueueNotSeen
        try:
            receiver = self._attempts.ready(self._client.get_queue_receiver(peek.queue))
            self._receiver = receiver
            found = self._attempts.attempt(
                receiver, lambda link, left: self._peek(link, peek, left), self._attempts.seconds, ONCE
            )
            told = seen(peek.queue, found, self._failed_over)
        except Exception as error:
            told = not_seen(peek.queue, error)
        finally:
            self._receiver = None
        if isinstance(told, QueueSeen):
            self._attempts.closed(receiver)
        elif receiver is not None:
            self._attempts.discard(receiver)
        return told

    def _peek(self, receiver: Any, peek: Peek, seconds: float | None) -> list[Any]:
        open_sync_link(receiver, seconds)
        with self._recording.peeked(peek.queue) as found:
            found.extend(receiver.peek_messages(peek.most, sequence_number=peek.start))
        return found
