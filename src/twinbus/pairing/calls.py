"""A sender's calls, one description for both drivers: each is a generator that yields what to try next.

A driver tries it and sends the result, or throws the error, back in. Nothing here waits, sends or knows threads; time,
chance and the making of copies come with the Place.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar
from uuid import uuid4

from azure.servicebus.amqp import AmqpAnnotatedMessage
from azure.servicebus.exceptions import MessagingEntityNotFoundError, OperationTimeoutError

from twinbus.backlog import FailureKind, failure_kind
from twinbus.pairing.decide.failover import MessagesDiverted, PrimarySendFailed, RaiseUnusable, SendRoute, SendToBacklog
from twinbus.pairing.decide.rotation import choose
from twinbus.pairing.errors import (
    BacklogUnavailableError,
    PartialSendError,
    PrimaryUnusableError,
    QueueCause,
    ScheduledInBacklogError,
)
from twinbus.pairing.events import EventPublisher
from twinbus.pairing.message_copies import Diversion, Payload, fit, id_of, tally
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.pair_sides import Side, SideState
from twinbus.pairing.shared_state import Chance, Now, SharedEntity, SharedRotation
from twinbus.sdk import LinkLimits

T = TypeVar("T")
_LEAST_SECONDS: Final = 60.0


class OnPrimary(NamedTuple):
    """The call itself, on the primary: an attempt of at most so many seconds, once its turn has come."""

    seconds: float


class LimitsOf(NamedTuple):
    """What this backlog queue takes; its link is opened for it. `seconds` is all that is left of the call (S6).

    Waiting for a turn on the link and the attempt share them; the attempt takes `try_timeout` at most.
    """

    queue: str
    seconds: float


class ToBacklog(NamedTuple):
    """Send this to that queue. `seconds` as for LimitsOf."""

    queue: str
    payload: Payload
    seconds: float


SendStep = OnPrimary | LimitsOf | ToBacklog
SendSteps = Generator[SendStep, Any, T]


class QueueLeftMeanwhileError(Exception):
    """Thrown in by a driver whose turn on a queue came after the queue had left the rotation."""


class FailedOverMeanwhileError(Exception):
    """Thrown in by a driver that came to its turn, or to its next try, on the primary after the entity failed over."""


class NoTurnError(OperationTimeoutError):
    """Other calls of this process held the link for all of this one's time: neither namespace was asked (S2, S6)."""

    def __init__(self, link: str, seconds: float) -> None:
        super().__init__(message=f"other calls held the link to {link} for {seconds:g} s: send again, or share it less")


class BacklogHandle(int):
    """What stands for a message scheduled while failed over: negative, and no sequence number of the primary (S10)."""

    message_id: object

    @classmethod
    def new(cls, message_id: object) -> BacklogHandle:
        handle = cls(-1 - (uuid4().int >> 66))
        handle.message_id = message_id
        return handle

    def __repr__(self) -> str:
        return f"BacklogHandle({int(self)})"


class Shared(Protocol):
    """What a sender needs of its pair."""

    primary: Side
    secondary: Side
    rotation: SharedRotation
    events: EventPublisher
    options: SendAvailabilityOptions

    def notice_closed_clients(self) -> None: ...

    def backlog_answered(self, queue: str, error: Exception | None = None) -> None: ...


class SendContext:
    """Where a sender stands: its entity, its pair, the backlog queue it stays on (S6)."""

    def __init__(
        self,
        path: str,
        cell: SharedEntity,
        pair: Shared,
        *,
        now: Now = time.monotonic,
        chance: Chance = random.random,
        fit: Callable[..., Diversion] = fit,
    ) -> None:
        self.now = now
        self.chance = chance
        self.fit = fit
        self.path = path
        self.cell = cell
        self.rotation = pair.rotation
        self.primary = pair.primary
        self.secondary = pair.secondary
        self.events = pair.events
        self.notice_closed_clients = pair.notice_closed_clients
        self.backlog_answered = pair.backlog_answered
        self.try_timeout = pair.options.try_timeout.total_seconds()
        self.queue: str | None = None

    def primary_seconds(self, until: float | None) -> float:
        """How long an attempt on the primary may take whose call ends at `until`, None where its caller set no end.

        Where its failure may be diverted, half of the time is the backlog's: else there were none left to do it (S4).
        """
        if until is None:
            return self.try_timeout
        entity, left = self.cell.entity, until - self.now()
        fires = entity.deadline is not None and entity.deadline < until
        may_divert = fires or entity.policy.failover_interval < left
        return min(self.try_timeout, left / 2 if may_divert else left)

    def end_in_backlog(self, until: float | None) -> float:
        """Without an end of its caller's, a call has time to find every queue silent and to be taken after that.

        A minute at least: others may come before it on a link.
        """
        if until is not None:
            return until
        return self.now() + max(self.try_timeout * (len(self.rotation.rotation.usable) + 1), _LEAST_SECONDS)

    def pick(self, failed: Mapping[str, QueueCause]) -> str:
        """`failed` are those that this call has tried: one that comes back meanwhile is for later calls."""
        self.notice_closed_clients()
        for side in (self.primary, self.secondary):
            if side.state is not SideState.OPEN:
                raise side.refusal()
        rotation = self.rotation.rotation
        found = choose(rotation, self.queue, self.chance())
        if found in failed:
            others = [queue for queue in rotation.usable if queue not in failed]
            found = others[int(self.chance() * len(others))] if others else None
        if found is None:
            causes = {**failed, **{cause.queue: cause for cause in rotation.causes}}
            raise BacklogUnavailableError(self.path, tuple(causes.values()))
        self.queue = found
        return found


# --- beginning -------------------------------------------------------------------------------------------------------


def end_of_call(closed: bool, timeout: float | None) -> float | None:
    """Where a call that begins now must be over, on the monotonic clock, if its caller said so. Of a closed sender none
    begins."""
    if closed:
        raise closed_error()
    if timeout is None:
        return None
    if timeout <= 0:
        raise ValueError("The timeout must be greater than 0.")
    return time.monotonic() + timeout


def closed_error() -> ValueError:
    """As the SDK's own sender refuses."""
    return ValueError("The handler has already been shutdown. Please use the pair to create a new instance.")


# --- the primary, or else --------------------------------------------------------------------------------------------


def call(
    place: SendContext, backlog: Callable[[], SendSteps[T]], failed: Exception | None = None, until: float | None = None
) -> SendSteps[T]:
    """Any call of a sender. `backlog` is what it does instead while failed over; `failed`: it was tried already.

    `until` is where the caller's time-out ends, on the monotonic clock.
    """
    while failed is None:
        match place.cell.entity.route:
            case SendRoute.PRIMARY:
                try:
                    result: T = yield OnPrimary(place.primary_seconds(until))
                except FailedOverMeanwhileError:
                    continue
                except Exception as error:
                    failed = error
                else:
                    place.cell.succeeded()
                    return result
            case SendRoute.BACKLOG:
                return (yield from backlog())
            case SendRoute.UNUSABLE:
                raise _unusable(place)
            case SendRoute.CLOSED:
                raise place.primary.refusal()
    return (yield from _after(place, backlog, failed))


def _after(place: SendContext, backlog: Callable[[], SendSteps[T]], failed: Exception) -> SendSteps[T]:
    place.notice_closed_clients()
    match place.cell.advance(PrimarySendFailed(failure_kind(failed))):
        case SendToBacklog():
            try:
                return (yield from backlog())
            except Exception as error:
                # The caller sees why the backlog did not take it, and behind that why the primary had not.
                error.__context__ = failed
                raise
        case RaiseUnusable():
            raise _unusable(place) from failed
        case _:
            if place.cell.entity.route is SendRoute.CLOSED:
                raise place.primary.refusal() from failed
            if failure_kind(failed) is FailureKind.ENTITY_NOT_FOUND:
                raise _missing(place) from failed
            raise failed


def _missing(place: SendContext) -> MessagingEntityNotFoundError:
    """The SDK's error often has another type, does not name the entity and does not say that it is missing."""
    where = f"{place.primary.endpoint.host}:{place.primary.endpoint.port}"
    return MessagingEntityNotFoundError(
        message=f"There is no queue or topic {place.path!r} on {where}: create it, or correct the name."
    )


def _unusable(place: SendContext) -> PrimaryUnusableError:
    cause = place.cell.entity.cause
    return PrimaryUnusableError(place.path, cause if isinstance(cause, FailureKind) else FailureKind.UNKNOWN)


# --- what a call does while failed over ------------------------------------------------------------------------------


def nothing() -> SendSteps[None]:
    """Opening and entering: there is nothing to divert (S3)."""
    yield from ()


def instead(make: Callable[[], T]) -> SendSteps[T]:
    """Something that needs no namespace: a batch (S3)."""
    yield from ()
    return make()


def divert(
    place: SendContext, raws: Sequence[AmqpAnnotatedMessage], until: float | None, at: datetime | None = None
) -> SendSteps[None]:
    """Send copies to the backlog, in as many transfers as it takes, all of them by then (S6, S7, S9)."""
    end = place.end_in_backlog(until)
    failed: dict[str, QueueCause] = {}
    limits: LinkLimits
    _, limits = yield from _on_a_queue(place, LimitsOf, end, failed)
    diversion = place.fit(raws, place.path, limits, at)
    for taken, payload in enumerate(diversion.payloads):
        begun = place.now()
        try:
            queue, _ = yield from _on_a_queue(place, partial(_to_backlog, payload), end, failed)
        except Exception as error:
            told = tally([id_of(raw) for raw in raws], diversion.parts, taken)
            if told.partial:
                raise PartialSendError(told.safe, told.unsafe, error) from error
            raise
        place.backlog_answered(queue)
        messages = len(diversion.parts.groups[taken])
        place.cell.advance(MessagesDiverted(messages))
        place.events.diverted(place.path, queue, messages, place.now() - begun)


def _to_backlog(payload: Payload, queue: str, seconds: float) -> SendStep:
    return ToBacklog(queue, payload, seconds)


def schedule(
    place: SendContext, raws: Sequence[AmqpAnnotatedMessage], until: float | None, at: datetime
) -> SendSteps[list[int]]:
    """The messages wait in the backlog; the syphon schedules them on the primary (S10)."""
    yield from divert(place, raws, until, at)
    return [BacklogHandle.new(id_of(raw)) for raw in raws]


def cannot_cancel(numbers: Sequence[int]) -> SendSteps[None]:
    """Nothing is sent to the primary now, so nothing can be cancelled there: that is said, not passed over (S10)."""
    yield from ()
    raise ScheduledInBacklogError(numbers)


def in_backlog(numbers: int | Sequence[int]) -> list[int]:
    """Those among the numbers given to cancel that never were the primary's."""
    given = [numbers] if isinstance(numbers, int) else list(numbers)
    return [number for number in given if number < 0 or isinstance(number, BacklogHandle)]


def _on_a_queue(
    place: SendContext, step: Callable[[str, float], SendStep], end: float, failed: dict[str, QueueCause]
) -> SendSteps[tuple[str, Any]]:
    """The sender's queue, or another while there is one and time is left, each once in a call (S6); and its answer."""
    while True:
        queue = place.pick(failed)
        left = end - place.now()
        if left <= 0:
            raise OperationTimeoutError(message="the call's time ended before the backlog had taken the message")
        try:
            return queue, (yield step(queue, left))
        except QueueLeftMeanwhileError:
            continue
        except NoTurnError:
            # The queue was not asked: it stays in the rotation.
            raise
        except Exception as error:
            over = place.now() >= end
            if over and failure_kind(error) is FailureKind.TIMEOUT:
                # The call's own time ended, which says nothing sure about the queue; the next call picks anew.
                place.queue = None
                raise
            cause = QueueCause(queue, failure_kind(error), _first_line(error))
            another = place.rotation.failed(*cause)
            place.backlog_answered(queue, error)
            if not another:
                raise
            failed[queue] = cause
            if over:
                raise OperationTimeoutError(message=f"the call's time ended in the backlog: {error}") from error


def _first_line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]
