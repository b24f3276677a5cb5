"""The oracle of one call: computes what the clauses demand from what happened to the call, without `send_flow`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from azure.servicebus.exceptions import MessagingEntityNotFoundError, OperationTimeoutError

from tests.pairing.simulation.call_messages import CallMessages, SentTransfer
from tests.pairing.simulation.clause_model import (
    LONGEST_IN_BACKLOG,
    REFUSED,
    SLACK,
    TRY_TIMEOUT,
    BacklogModel,
    EntityModel,
    ViolationError,
)
from tests.pairing.simulation.fake_entities import DeliveryCounts, Failure
from twinbus.backlog import FailureKind
from twinbus.pairing.call_arguments import check_cancel
from twinbus.pairing.call_errors import NoTurnError
from twinbus.pairing.decide.send_flow import BacklogHandle, CallPrimary, DivertTo, SendStep, WaitForQueue
from twinbus.pairing.errors import (
    BacklogUnavailableError,
    PartialSendError,
    PrimaryUnusableError,
    ScheduledInBacklogError,
)
from twinbus.pairing.pair_sides import PairClosedError, PairFaultedError


class CallKind(Enum):
    """The method that is called."""

    SEND = "send_messages"
    SCHEDULE = "schedule_messages"
    OPEN = "entering a sender"
    BATCH = "create_message_batch"
    CANCEL = "cancel_scheduled_messages"


class StepKind(Enum):
    PRIMARY = "on the primary"
    BACKLOG = "on a backlog queue"
    PROBE = "on a backlog queue that left, because none is left"
    WAIT = "it waits for the probe of another call"
    RETURN = "it returns"
    RAISE = "it raises"


class ExpectedStep(NamedTuple):
    """The next step that the clauses demand. For an error: the error, its type, or the side whose state it reports."""

    on: StepKind
    error: Exception | type[Exception] | str | None = None
    queues: tuple[str, ...] = ()
    value: object = None


NOTHING = ExpectedStep(StepKind.RETURN)
INSTEAD, HANDLES = "a batch, though nobody was asked", "handles"
NUMBERS = (4, 5)
"""Sequence numbers of the primary, for calls that cancel."""


class Sides(NamedTuple):
    """Whether each side is closed or lost, also if the pair does not know it yet."""

    primary: Callable[[], bool]
    secondary: Callable[[], bool]


@dataclass(slots=True, eq=False)
class CallOracle:
    what: CallKind
    letter: CallMessages
    path: str
    sender: str
    belief: EntityModel
    shelf: BacklogModel
    sides: Sides
    stock: DeliveryCounts
    until: float | None
    restores: int = 0
    """Of its entity, when it began."""
    end: float = 0.0
    """The deadline of the call's attempts in the backlog."""
    due: ExpectedStep = NOTHING
    failed: Exception | None = None
    """The error of the primary before the call was diverted."""
    opened: bool = False
    """Whether a link to a backlog queue is open for it, so that copies can be made."""
    diverting: bool = False
    """Whether it was given to a backlog queue."""
    probing: bool = False
    probes_seen: int | None = None
    """How many probes had failed when it found no queue."""
    tried: set[str] = field(default_factory=set)
    safe: set[str] = field(default_factory=set)

    # --- what happened, and what follows -----------------------------------------------------------------------------

    def begins(self, now: float) -> None:
        """The call starts, or starts again because its turn came too late."""
        if self.belief.closed:
            self.due = ExpectedStep(StepKind.RAISE, "primary")
        elif self.belief.over:
            self._diverts(now)
        else:
            self.due = ExpectedStep(StepKind.PRIMARY)

    def primary_answered(self, failure: Failure | None, now: float) -> None:
        if failure is None:
            self.belief.sent(self.restores, with_message=self.with_message)
            self.due = ExpectedStep(StepKind.RETURN, value=self.result)
        elif self.sides.primary():
            self.due = ExpectedStep(StepKind.RAISE, "primary")
        elif not self.belief.failed(failure.kind, now, self.restores, with_message=self.with_message):
            self.due = ExpectedStep(StepKind.RAISE, failure.error)
        else:
            self.failed = failure.error
            self._diverts(now)

    def _diverts(self, now: float) -> None:
        if self.belief.unusable and self.belief.rules.raise_while_unusable:
            self.due = ExpectedStep(StepKind.RAISE, PrimaryUnusableError)
        elif self.what in (CallKind.OPEN, CallKind.BATCH):
            self.due = ExpectedStep(StepKind.RETURN, value=INSTEAD if self.what is CallKind.BATCH else None)
        elif self.what is CallKind.CANCEL:
            self.due = ExpectedStep(StepKind.RAISE, ScheduledInBacklogError)
        else:
            self.end = now + LONGEST_IN_BACKLOG if self.until is None else self.until
            self.seeks(now)

    def seeks(self, now: float) -> None:
        """The call looks for a backlog queue: the first, or another after one that failed."""
        if self.sides.primary():
            self.due = ExpectedStep(StepKind.RAISE, "primary")
        elif self.sides.secondary():
            self.due = ExpectedStep(StepKind.RAISE, "secondary")
        elif not (queues := self.shelf.choices(self.sender, self.tried)):
            self._finds_none(now)
        elif now >= self.end:
            self.due = ExpectedStep(StepKind.RAISE, OperationTimeoutError)
        else:
            self.due = ExpectedStep(StepKind.BACKLOG, None, queues)

    def _finds_none(self, now: float) -> None:
        shelf = self.shelf
        if self.probes_seen is None:
            self.probes_seen = shelf.failed_probes
        left = [queue for queue in shelf.away if queue not in self.tried]
        if shelf.usable() or not left or now >= self.end or shelf.failed_probes > self.probes_seen:
            self.due = ExpectedStep(StepKind.RAISE, BacklogUnavailableError)
        elif shelf.probing or now < shelf.next_probe:
            self.due = ExpectedStep(StepKind.WAIT)
        else:
            self.due = ExpectedStep(StepKind.PROBE, None, (left[0],))

    def abandons_probe(self) -> None:
        """It is cancelled, its time is over, or its message cannot be diverted."""
        if self.probing:
            self.probing = self.shelf.probing = False

    def link_is_open(self) -> None:
        """The link to a backlog queue is open, so copies can be made."""
        self.opened = True
        if self.letter.undivertible is not None:
            self.abandons_probe()
            self.due = ExpectedStep(StepKind.RAISE, self.letter.undivertible)

    def queue_took(self, queue: str, parcel: SentTransfer, now: float) -> None:
        if self.probing:
            self.probing = False
            self.shelf.probe_succeeded(queue)
            self.shelf.places[self.sender] = queue
        self.probes_seen = None
        self.safe.update(parcel.ids)
        self.belief.diverted += len(parcel.ids)
        self.shelf.diverted += len(parcel.ids)
        self.shelf.answers += 1
        if len(self.safe) == len(self.letter.ids):
            self.due = ExpectedStep(StepKind.RETURN, value=HANDLES if self.what is CallKind.SCHEDULE else None)
        else:
            self.seeks(now)

    def queue_failed(self, queue: str, failure: Failure, now: float) -> None:
        over = now >= self.end
        if failure.kind is FailureKind.NO_TURN:
            self.abandons_probe()
            self.due = ExpectedStep(StepKind.RAISE, failure.error)
        elif over and failure.kind is FailureKind.TIMEOUT:
            # The call's own time was too short to show that the queue fails (S6).
            self.abandons_probe()
            self.shelf.places.pop(self.sender, None)
            self.due = ExpectedStep(StepKind.RAISE, failure.error)
        else:
            self.shelf.answers += 1
            judge = self.shelf.probe_failed if self.probing else self.shelf.failed
            self.probing = False
            if not judge(queue, failure.kind, now):
                self.due = ExpectedStep(StepKind.RAISE, failure.error)
                return
            self.tried.add(queue)
            if over:
                self.due = ExpectedStep(StepKind.RAISE, OperationTimeoutError)
            else:
                self.seeks(now)

    # --- what the product does ---------------------------------------------------------------------------------------

    def tries(self, step: SendStep, now: float) -> None:
        match step:
            case CallPrimary(seconds):
                self._must(self.due.on is StepKind.PRIMARY, step)
                self._must(abs(seconds - self._primary_seconds(now)) < SLACK, step)
            case DivertTo(queue, _, seconds, probe):
                self._must(self.due.on is (StepKind.PROBE if probe else StepKind.BACKLOG), step)
                self._must(queue in self.due.queues, step)
                self._must(seconds > 0 and abs(now + seconds - self.end) < SLACK, step)
                self.diverting = True
                self.probing = probe
                if probe:
                    self.shelf.probe_begins(now)
                else:
                    self.shelf.places[self.sender] = queue
            case WaitForQueue(_, seconds):
                until = self.end if self.shelf.probing else min(self.shelf.next_probe, self.end)
                self._must(self.due.on is StepKind.WAIT and abs(now + seconds - until) < SLACK, step)

    def sends(self, parcel: SentTransfer) -> None:
        """Check what a link is about to send to a backlog queue."""
        self._must(self.opened and self.safe.isdisjoint(parcel.ids), parcel)
        self._must(set(parcel.ids) <= set(self.letter.ids) and parcel.path == self.path, parcel)

    def _primary_seconds(self, now: float) -> float:
        """Return the seconds for the primary: half of the time if the entity may fail over during the attempt (S4)."""
        if self.until is None:
            return TRY_TIMEOUT
        interval, left = self.belief.rules.failover_interval, self.until - now
        fires = now + interval if self.belief.armed is None else self.belief.armed + interval
        return min(TRY_TIMEOUT, left / 2 if fires < self.until or self.belief.trial else left)

    def ends(self, value: Any, error: Exception | None, now: float) -> None:
        if self.until is not None and now > self.until + SLACK:
            raise ViolationError(f"a call ends {now - self.until} s after its time-out")
        where = " in the backlog" if self.diverting else ""
        self.stock.endings[("returned" if error is None else type(error).__name__) + where] += 1
        if error is None:
            self._must(self.due.on is StepKind.RETURN, value)
            self._returned(value)
            return
        self._must(self.due.on is StepKind.RAISE, error)
        if self.failed is not None:
            self._must(self.failed in (error.__cause__, error.__context__), error)
        if self.safe:
            self._must(isinstance(error, PartialSendError), error)
            assert isinstance(error, PartialSendError)
            self._must(error.safe == tuple([one for one in self.letter.ids if one in self.safe]), error)
            self._must(error.unsafe == tuple([one for one in self.letter.ids if one not in self.safe]), error)
            self._promise(self.safe)
            error = error.cause  # type: ignore[assignment] # an Exception: what `send_flow` caught
        self._must(self._is_due(error), error)

    def _is_due(self, error: Exception | None) -> bool:
        expected = self.due.error
        if isinstance(expected, str):
            return isinstance(error, PairClosedError | PairFaultedError) and error.side == expected
        if not isinstance(expected, type):
            # The primary's error for a missing entity is the cause of one that names the entity (S2).
            named = isinstance(error, MessagingEntityNotFoundError) and repr(self.path) in str(error)
            return error is expected or (named and error is not None and error.__cause__ is expected)
        match error:
            case BacklogUnavailableError():
                whole = {cause.queue for cause in error.causes} == set(self.shelf.queues)
            case PrimaryUnusableError():
                whole = error.entity == self.path and error.cause in REFUSED
            case ScheduledInBacklogError():
                whole = error.handles == NUMBERS
            case _:
                whole = True
        return type(error) is expected and whole

    def _returned(self, value: Any) -> None:
        if self.due.value is HANDLES:
            # No handle may look like a sequence number of the primary (S10).
            self._must(handles_among(value) == value and handles_among(value[0]) == value[:1], value)
            self._must([one.message_id for one in value] == list(self.letter.ids), value)
            self._must(len(set(value)) == len(value) and all(type(one) is BacklogHandle for one in value), value)
        else:
            self._must(value == self.due.value, value)
        if self.with_message:
            self._promise(self.letter.ids)

    @property
    def with_message(self) -> bool:
        return self.what in (CallKind.SEND, CallKind.SCHEDULE)

    @property
    def result(self) -> object:
        """Return the result that the primary returns."""
        match self.what:
            case CallKind.SCHEDULE:
                return list(range(1, len(self.letter.ids) + 1))
            case CallKind.BATCH:
                return "a batch"
            case _:
                return None

    def _promise(self, ids: Any) -> None:
        self._must(all(self.stock.stored[one] for one in ids), ids)
        self.stock.promised.update(ids)

    def _must(self, holds: bool, found: object) -> None:
        if not holds:
            raise ViolationError(f"{self.what.value}: {self.due} by the clauses, but {found!r}")


def no_turn(link: str, seconds: float) -> Failure:
    return Failure(FailureKind.NO_TURN, NoTurnError(link, seconds))


def handles_among(numbers: int | list[int]) -> list[int]:
    """Return the numbers that cancelling refuses as handles of the backlog."""
    try:
        check_cancel(False, numbers, None)
    except ScheduledInBacklogError as error:
        return list(error.handles)
    return []
