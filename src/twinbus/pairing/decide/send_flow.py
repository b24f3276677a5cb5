"""Decide the steps of one call of a sender: the primary first, or the backlog while the entity is failed over.

A call (send, schedule, cancel, create a batch, open) is a generator of steps. A driver carries out each step and sends
the result back in, or throws the error in:

    call()  --- CallPrimary(seconds) ---------------->  the application's call, on the primary
       |
       |    the entity is failed over, or the failure engages the failover
       v
    divert(), schedule(), cannot_cancel(), …           what this call does instead
       |
       +--- DivertTo(queue, diversion, seconds) ----->  one transfer to one backlog queue

`divert` repeats `DivertTo` until every message is accepted. A queue that fails is reported to the rotation. Then the
call tries another queue, while time is left. It tries each queue that fails only once (S6). If no queue is left, the
call probes one, or waits for the probe of another call (`WaitForQueue`).

The drivers do not use `call` for the usual send. They call the primary directly. They start the generator `call` only
if the direct call fails, with its error in `failed`, or if the entity's route is not the primary.

This module is pure. Time, chance, ids and the SDK's error types come with the `SendContext`. This module does not look
into messages: the link to a backlog queue makes the copies that fit its limits, and puts them into the `Diversion`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from twinbus.backlog import FailureKind, failure_kind
from twinbus.errors import CallerError
from twinbus.pairing.decide.failover import Entity, EntityMode, SendRoute
from twinbus.pairing.decide.failover_events import (
    BacklogAccepted,
    Event,
    PrimarySendFailed,
    RaiseToCaller,
    RaiseUnusable,
    SendToBacklog,
)
from twinbus.pairing.decide.rotation import ProbeEffect, ProbeQueue, Rotation, WaitForProbe
from twinbus.pairing.errors import (
    BacklogUnavailableError,
    PartialSendError,
    PrimaryUnusableError,
    QueueCause,
    ScheduledInBacklogError,
)

T = TypeVar("T")
# A call without a timeout may spend at least this time on the backlog, because it may wait for other calls on a link.
_MIN_BACKLOG_SECONDS: Final = 60.0
_MAX_DETAIL: Final = 200


# --- steps: what the driver must do ----------------------------------------------------------------------------------


class CallPrimary(NamedTuple):
    """Call the primary. The attempt may take `seconds`, counted from the time when the driver may use the link."""

    seconds: float


class DivertedTransfer(NamedTuple):
    """One payload for a backlog queue. `positions` says which messages of the call it holds, counted from 0."""

    payload: Any
    positions: tuple[int, ...]


@dataclass(slots=True)
class Diversion:
    """The messages of one call on their way to the backlog, in one or more transfers.

    `message` is the argument that the application gave to send; `scheduled` replaces the messages' own scheduled time.
    The first link that sends the diversion sets `ids`, of all messages, and `transfers`. Another link sends the same
    transfers: all backlog queues of a pair have the same limits. `accepted` is the number of accepted transfers.
    """

    message: Any
    path: str
    scheduled: datetime | None
    ids: tuple[object, ...] = ()
    transfers: tuple[DivertedTransfer, ...] = ()
    accepted: int = 0

    def accept_transfer(self) -> tuple[int, bool]:
        """Mark the current transfer as accepted. Returns its number of messages, and whether no transfer is left."""
        self.accepted += 1
        return len(self.transfers[self.accepted - 1].positions), self.accepted == len(self.transfers)

    def split_ids(self) -> tuple[list[object], list[object]]:
        """Return the ids of the accepted messages, and of the others, each in the order of the call."""
        accepted = {position for transfer in self.transfers[: self.accepted] for position in transfer.positions}
        ids = list(enumerate(self.ids))
        return [one for at, one in ids if at in accepted], [one for at, one in ids if at not in accepted]


class DivertTo(NamedTuple):
    """Send the current transfer of a diversion to `queue`.

    `seconds` is all the time that the call has left (S6): for waiting for the link, for opening it and for sending.
    A `probe` sends to the queue although it is not in the rotation.
    """

    queue: str
    diversion: Diversion
    seconds: float
    probe: bool = False


class WaitForQueue(NamedTuple):
    """Wait until the pair's rotation is another one than `rotation`, or the pair closes, at most for `seconds`."""

    rotation: Rotation
    seconds: float


SendStep = CallPrimary | DivertTo | WaitForQueue
SendSteps = Generator[SendStep, Any, T]


class QueueLeftMeanwhileError(Exception):
    """A driver throws this error into the generator: the queue left the rotation while the call waited for the link."""


class FailedOverMeanwhileError(Exception):
    """A driver throws this error into the generator: the entity failed over while the call waited.

    The call waited for the link to the primary, or for its next try.
    """


# --- what a call needs from its pair ---------------------------------------------------------------------------------


class FlowErrors(NamedTuple):
    """Functions that make the errors of azure-servicebus types, which this module does not import."""

    timed_out: Callable[[str], Exception]
    entity_missing: Callable[[str], Exception]


class FlowEntity(Protocol):
    """The entity of the call. `shared_state.SharedEntity` implements this protocol."""

    @property
    def entity(self) -> Entity: ...

    def advance(self, event: Event) -> RaiseToCaller | SendToBacklog | RaiseUnusable | None: ...

    def succeeded(self, restores: int, with_message: bool) -> None: ...


class FlowRotation(Protocol):
    """The backlog queues. `shared_state.SharedRotation` implements this protocol."""

    @property
    def rotation(self) -> Rotation: ...

    def failed(self, queue: str, kind: FailureKind, detail: str) -> bool: ...

    def ask_probe(self, tried: frozenset[str]) -> ProbeEffect: ...

    def probe_succeeded(self, queue: str) -> None: ...

    def probe_failed(self, queue: str, kind: FailureKind, detail: str) -> bool: ...

    def probe_abandoned(self) -> None: ...


class FlowSide(Protocol):
    """A side of the pair. `pair_sides.Side` implements this protocol."""

    def refusal(self) -> Exception: ...


class FlowPublisher(Protocol):
    """The pair's metrics and telemetry. `events.EventPublisher` implements this protocol."""

    def diverted(self, entity: str, queue: str, messages: int, seconds: float) -> None: ...


class FlowPair(Protocol):
    """The pair of the sender. `pair_state.PairState` implements this protocol."""

    @property
    def primary(self) -> FlowSide: ...

    @property
    def rotation(self) -> FlowRotation: ...

    @property
    def events(self) -> FlowPublisher: ...

    def notice_closed_clients(self) -> None: ...

    def refuse_unless_open(self) -> None: ...

    def backlog_answered(self, queue: str, error: Exception | None = None) -> None: ...


class SendContext:
    """What the calls of one sender need: its entity, its pair, and `queue`, its backlog queue until that fails (S6)."""

    def __init__(
        self,
        path: str,
        entity: FlowEntity,
        pair: FlowPair,
        try_timeout: float,
        *,
        now: Callable[[], float],
        chance: Callable[[], float],
        new_number: Callable[[], int],
        errors: FlowErrors,
    ) -> None:
        self.path = path
        self.shared = entity
        self.pair = pair
        self.try_timeout = try_timeout
        self.now = now
        self.chance = chance
        self.new_number = new_number
        self.errors = errors
        self.queue: str | None = None

    def primary_seconds(self, until: float | None) -> float:
        """Return how many seconds an attempt on the primary may take. `until` is the caller's deadline, or None.

        If a failure of this attempt may divert the call, half of the remaining time is kept for the backlog (S4, S14).
        """
        if until is None:
            return self.try_timeout
        entity, left = self.shared.entity, until - self.now()
        timer_fires = entity.deadline is not None and entity.deadline < until
        on_trial = entity.mode is EntityMode.ON_TRIAL
        may_divert = on_trial or timer_fires or entity.policy.failover_interval < left
        return min(self.try_timeout, left / 2 if may_divert else left)

    def backlog_deadline(self, until: float | None) -> float:
        """Return the caller's deadline. If it is None: now + try_timeout × (usable queues + 1), at least now + 60 s."""
        if until is not None:
            return until
        usable = self.pair.rotation.rotation.usable
        return self.now() + max(self.try_timeout * (len(usable) + 1), _MIN_BACKLOG_SECONDS)

    def pick_queue(self, rotation: Rotation, failed: Mapping[str, QueueCause]) -> str | None:
        """Return the queue for the next transfer, and remember it for the sender's next transfers. None: no queue.

        `failed` are the queues that failed in this call. None of them is picked, even if it has returned to the
        rotation. Raises PairClosedError or PairFaultedError if a side is not open.
        """
        picked = choose_queue([queue for queue in rotation.usable if queue not in failed], self.queue, self.chance())
        self.pair.refuse_unless_open()
        self.queue = picked or self.queue
        return picked

    def unavailable(self, failed: Mapping[str, QueueCause]) -> BacklogUnavailableError:
        causes = {**failed, **{cause.queue: cause for cause in self.pair.rotation.rotation.causes}}
        return BacklogUnavailableError(self.path, tuple(causes.values()))


def choose_queue(usable: Sequence[str], current: str | None, chance: float) -> str | None:
    """Return the queue for a sender: `current` if it is usable, otherwise a random one. None if no queue is usable."""
    if current in usable:
        return current
    return usable[int(chance * len(usable))] if usable else None


# --- the primary, or the backlog -------------------------------------------------------------------------------------


class CallOrigin(NamedTuple):
    """What a trial needs to know about a call (S14).

    `restores` is `Entity.restores` when the call began. `with_message` is True if the call gives the primary messages.
    """

    restores: int
    with_message: bool


def call(
    context: SendContext,
    origin: CallOrigin,
    backlog: Callable[[], SendSteps[T]],
    failed: Exception | None = None,
    until: float | None = None,
) -> SendSteps[T]:
    """Return the steps of any call. `backlog` returns the steps that replace the call while the entity is failed over.

    `failed` is the error of an attempt that the driver made before, or None. `until` is the caller's deadline, or None.
    """
    while failed is None:
        match context.shared.entity.route:
            case SendRoute.PRIMARY:
                try:
                    result: T = yield CallPrimary(context.primary_seconds(until))
                except FailedOverMeanwhileError:
                    continue
                except Exception as error:
                    failed = error
                else:
                    context.shared.succeeded(*origin)
                    return result
            case SendRoute.BACKLOG:
                return (yield from backlog())
            case SendRoute.UNUSABLE:
                raise _unusable(context)
            case SendRoute.CLOSED:
                raise context.pair.primary.refusal()
    return (yield from _after_failure(context, origin, backlog, failed))


def _after_failure(
    context: SendContext, origin: CallOrigin, backlog: Callable[[], SendSteps[T]], failed: Exception
) -> SendSteps[T]:
    context.pair.notice_closed_clients()
    kind = failure_kind(failed)
    match context.shared.advance(PrimarySendFailed(kind, *origin)):
        case SendToBacklog():
            try:
                return (yield from backlog())
            except Exception as error:
                # The traceback shows why the primary failed the call, and then why the backlog did not accept it.
                error.__context__ = failed
                raise
        case RaiseUnusable():
            raise _unusable(context) from failed
        case _:
            if context.shared.entity.route is SendRoute.CLOSED:
                raise context.pair.primary.refusal() from failed
            if kind is FailureKind.ENTITY_NOT_FOUND:
                # The SDK's error often has another type and does not name the entity.
                raise context.errors.entity_missing(context.path) from failed
            raise failed


def _unusable(context: SendContext) -> PrimaryUnusableError:
    cause = context.shared.entity.cause
    return PrimaryUnusableError(context.path, cause if isinstance(cause, FailureKind) else FailureKind.UNKNOWN)


class RetryLimits(Protocol):
    """How often the application's client retries. `sdk.RetrySettings` implements this protocol."""

    @property
    def total(self) -> int: ...

    def pause(self, tried: int) -> float: ...


def pause_before_retry(
    kind: FailureKind, retries: RetryLimits, tried: int, seconds_left: float, *, is_retryable: bool
) -> float | None:
    """Return the seconds before the next try, or None for no other try. `is_retryable` is the SDK's view of the error.

    There is no other try if the pause would take all the time that is left. If a token is refused because the entity is
    missing, the SDK tries again; this function does not. The SDK itself does not retry a link refused for that reason.
    """
    if tried > retries.total or not is_retryable or kind is FailureKind.ENTITY_NOT_FOUND:
        return None
    pause = retries.pause(tried)
    return pause if pause < seconds_left else None


# --- what a call does while failed over ------------------------------------------------------------------------------


def nothing() -> SendSteps[None]:
    """Return steps for opening a sender while failed over: no step, because there is nothing to divert (S3)."""
    yield from ()


def instead(make: Callable[[], T]) -> SendSteps[T]:
    """Return steps for a call that needs no namespace (S3): no step, only the result of `make`, for example a batch."""
    yield from ()
    return make()


def divert(context: SendContext, message: Any, until: float | None) -> SendSteps[None]:
    """Send copies of the messages to the backlog before the deadline (S6, S7, S9)."""
    yield from _transfer_all(context, Diversion(message, context.path, None), until)


def schedule(context: SendContext, message: Any, scheduled: datetime, until: float | None) -> SendSteps[list[int]]:
    """Divert messages that the syphon later schedules on the primary (S10). The result is one handle per message."""
    diversion = Diversion(message, context.path, scheduled)
    yield from _transfer_all(context, diversion, until)
    return [BacklogHandle.of(context.new_number(), message_id) for message_id in diversion.ids]


def cannot_cancel(numbers: Sequence[int]) -> SendSteps[None]:
    """Raise ScheduledInBacklogError: only the primary can cancel, and a failed-over entity sends it no calls (S10)."""
    yield from ()
    raise ScheduledInBacklogError(numbers)


class BacklogHandle(int):
    """The number that the application gets for a message scheduled while the entity was failed over.

    The number is negative, so it is never a sequence number of the primary.

    Example: `isinstance(number, BacklogHandle)` for a number that `schedule_messages` returned.
    """

    message_id: object

    @classmethod
    def of(cls, number: int, message_id: object) -> BacklogHandle:
        """Return the handle for a random `number` from 0 to 2**63 - 1.

        Example: `BacklogHandle.of(7, "id").message_id` is `"id"`.
        """
        handle = cls(-1 - number)
        handle.message_id = message_id
        return handle

    def __repr__(self) -> str:
        return f"BacklogHandle({int(self)})"


def _transfer_all(context: SendContext, diversion: Diversion, until: float | None) -> SendSteps[None]:
    deadline = context.backlog_deadline(until)
    failed: dict[str, QueueCause] = {}
    done = False
    while not done:
        started = context.now()
        try:
            queue = yield from _transfer(context, diversion, deadline, failed)
        except Exception as error:
            accepted, others = diversion.split_ids()
            if accepted:
                raise PartialSendError(accepted, others, error) from error
            raise
        context.pair.backlog_answered(queue)
        messages, done = diversion.accept_transfer()
        context.shared.advance(BacklogAccepted(messages))
        context.pair.events.diverted(context.path, queue, messages, context.now() - started)


def _transfer(
    context: SendContext, diversion: Diversion, deadline: float, failed: dict[str, QueueCause]
) -> SendSteps[str]:
    """Send one transfer to the sender's queue or, if this queue fails, to others (S6).

    Returns the queue that accepted the transfer.
    """
    failed_probes: int | None = None
    while True:
        rotation = context.pair.rotation.rotation
        queue = context.pick_queue(rotation, failed)
        left = deadline - context.now()
        if queue is None:
            if failed_probes is None:
                failed_probes = rotation.failed_probes
            if rotation.usable or rotation.failed_probes > failed_probes or left <= 0:
                # Every queue in the rotation failed in this call, or the probe that this call waited for failed.
                raise context.unavailable(failed)
            match context.pair.rotation.ask_probe(frozenset(failed)):
                case ProbeQueue(probed):
                    if (yield from _probe(context, probed, diversion, deadline, failed)):
                        return probed
                case WaitForProbe(until):
                    yield WaitForQueue(rotation, left if until is None else min(max(until - context.now(), 0.0), left))
                case _:
                    raise context.unavailable(failed)
            continue
        if left <= 0:
            raise context.errors.timed_out("the call's time ended before the backlog had taken the message")
        try:
            yield DivertTo(queue, diversion, left)
        except QueueLeftMeanwhileError:
            continue
        except CallerError:
            # The message cannot be diverted to any queue.
            raise
        except Exception as error:
            _queue_failed(context, queue, error, deadline, failed, context.pair.rotation.failed)
        else:
            return queue


def _probe(
    context: SendContext, queue: str, diversion: Diversion, deadline: float, failed: dict[str, QueueCause]
) -> SendSteps[bool]:
    """Send one transfer to a queue outside the rotation. Returns whether the queue accepted the transfer."""
    is_reported = False

    def report(*cause: *tuple[str, FailureKind, str]) -> bool:
        nonlocal is_reported
        is_reported = True
        return context.pair.rotation.probe_failed(*cause)

    try:
        yield DivertTo(queue, diversion, deadline - context.now(), probe=True)
    except QueueLeftMeanwhileError:
        # The pair closed.
        return False
    except CallerError:
        raise
    except Exception as error:
        _queue_failed(context, queue, error, deadline, failed, report)
        return False
    else:
        is_reported = True
        context.pair.rotation.probe_succeeded(queue)
        context.queue = queue
        return True
    finally:
        if not is_reported:
            # Also if the call was cancelled: the next call must be allowed to probe.
            context.pair.rotation.probe_abandoned()


_WHOLE: Final = "_twinbus_had_a_whole_attempt"


def mark_whole_attempt(error: BaseException) -> None:
    """Note that the attempt that failed with this error had a whole try_timeout, not only the rest of the call's time.

    The clock cannot tell: a busy process notices the end of an attempt late, when the call's time is over too.
    """
    setattr(error, _WHOLE, True)


def _queue_failed(
    context: SendContext,
    queue: str,
    error: Exception,
    deadline: float,
    failed: dict[str, QueueCause],
    report: Callable[[str, FailureKind, str], bool],
) -> None:
    """Report the failure to the rotation. Returns if the call should try another queue; otherwise raises the error."""
    kind = failure_kind(error)
    if kind is FailureKind.NO_TURN:
        # Nothing was sent to the queue: it stays in the rotation.
        raise error
    time_is_up = context.now() >= deadline
    if time_is_up and kind is FailureKind.TIMEOUT and not getattr(error, _WHOLE, False):
        # The call's own time ended, which does not prove that the queue is broken. The next call picks any queue.
        context.queue = None
        raise error
    cause = QueueCause(queue, kind, _first_line(error))
    try_another = report(*cause)
    context.pair.backlog_answered(queue, error)
    if not try_another:
        raise error
    failed[queue] = cause
    if time_is_up:
        raise context.errors.timed_out(f"the call's time ended in the backlog: {error}") from error


def _first_line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:_MAX_DETAIL]
