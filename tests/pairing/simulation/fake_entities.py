"""Entities of the primary and backlog queues that fail in every way in which a service can fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import NamedTuple

from azure.servicebus._pyamqp.error import AMQPLinkError, ErrorCondition
from azure.servicebus.exceptions import (
    MessageSizeExceededError,
    MessagingEntityDisabledError,
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusAuthorizationError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusQuotaExceededError,
    ServiceBusServerBusyError,
)

from tests.pairing.simulation.call_messages import SentTransfer
from tests.pairing.simulation.clause_model import TRY_TIMEOUT
from twinbus.backlog import FailureKind

QUICK = 0.01
OVERDUE = 1e-6
"""Seconds between a deadline and the time at which it is noticed."""

K = FailureKind


class Failure(NamedTuple):
    """The error of an attempt, and its kind by S2. The oracle uses this kind, not the table of the product."""

    kind: FailureKind
    error: Exception


_ERRORS: dict[FailureKind, Callable[[], Exception]] = {
    K.CONNECTION_LOST: lambda: ServiceBusConnectionError(message="refused"),
    K.DETACHED: lambda: ServiceBusError("thrown off", error=AMQPLinkError(ErrorCondition.LinkDetachForced)),
    K.INTERNAL: lambda: ServiceBusError("failed"),
    K.ENTITY_DISABLED: lambda: MessagingEntityDisabledError(message="disabled"),
    K.QUOTA_EXCEEDED: lambda: ServiceBusQuotaExceededError(message="full"),
    K.SERVER_BUSY: lambda: ServiceBusServerBusyError(message="busy"),
    K.ENTITY_NOT_FOUND: lambda: MessagingEntityNotFoundError(message="gone"),
    K.UNAUTHORIZED: lambda: ServiceBusAuthorizationError(message="forbidden"),
    K.TIMEOUT: lambda: OperationTimeoutError(message="silence"),
    K.MESSAGE_TOO_LARGE: lambda: MessageSizeExceededError(message="too large"),
    K.CLOSED: lambda: ValueError("The handler has already been shutdown."),
}
KINDS = tuple(_ERRORS)


def failure(kind: FailureKind) -> Failure:
    return Failure(kind, _ERRORS[kind]())


Answer = Callable[[Failure | None], None]
At = Callable[[float, Callable[[], None]], object]
"""A function that calls another function after a number of seconds."""


class Fault(Enum):
    REFUSE = K.CONNECTION_LOST
    DETACH = K.DETACHED
    FAIL = K.INTERNAL
    DISABLE = K.ENTITY_DISABLED
    BUSY = K.SERVER_BUSY
    GONE = K.ENTITY_NOT_FOUND
    FORBID = K.UNAUTHORIZED
    STALL = K.TIMEOUT
    LATE = "late"
    LOSE = "lose"
    FLICKER = "flicker"
    """Each attempt is taken or refused."""
    FULL = "full"
    """A ping is taken and a link opens; every message finds the quota exceeded (S14)."""
    CARRY_NOTHING = "carry nothing"
    """A ping is taken and a link opens; no message is answered, or the link is thrown off (S14)."""


FAULTS = tuple(Fault)
_KIND_OF = {Fault.FLICKER: K.INTERNAL, Fault.FULL: K.QUOTA_EXCEEDED, Fault.CARRY_NOTHING: K.DETACHED}


@dataclass(slots=True)
class DeliveryCounts:
    """Counts of the messages of one world, by id."""

    stored: Counter[str] = field(default_factory=Counter)
    promised: set[str] = field(default_factory=set)
    """Messages whose sends returned without an error."""
    doubtful: set[str] = field(default_factory=set)
    """Messages that may be stored although no send returned: the acknowledgement was lost, late, or unused."""
    endings: Counter[str] = field(default_factory=Counter)
    """Of calls."""


@dataclass(slots=True, eq=False)
class FakeEntity:
    name: str
    chance: Random
    at: At
    stock: DeliveryCounts
    fault: Fault | None = None
    last: SentTransfer | None = None

    def attempt(self, parcel: SentTransfer | None, seconds: float, answer: Answer) -> None:
        """Make one attempt with a deadline (S12). There is exactly one answer. Without a parcel: a ping, or opening."""
        fault = self.fault
        if parcel is not None and parcel.spoilt:
            self._fail(min(QUICK, seconds), K.MESSAGE_TOO_LARGE, answer)
        elif fault is None or (fault is Fault.FLICKER and self.chance.random() < 0.5) or self._lets_in(parcel):
            self._take(QUICK * self.chance.randint(1, 5), parcel, seconds, answer)
        elif fault is Fault.LATE:
            self._take(TRY_TIMEOUT * self.chance.uniform(0.2, 2), parcel, seconds, answer)
        elif fault is Fault.LOSE:
            self._store(parcel, doubtful=True)
            self._fail(min(QUICK, seconds), K.CONNECTION_LOST, answer)
        else:
            # The answer comes quickly, after all retries of an SDK, or never.
            wait = QUICK if self.chance.random() < 0.5 else self.chance.uniform(QUICK, TRY_TIMEOUT)
            silent = fault is Fault.STALL or (fault is Fault.CARRY_NOTHING and self.chance.random() < 0.5)
            if silent or wait >= seconds:
                self._fail(seconds + OVERDUE, K.TIMEOUT, answer)
            else:
                self._fail(wait, _KIND_OF.get(fault) or FailureKind(fault.value), answer)

    def _lets_in(self, parcel: SentTransfer | None) -> bool:
        return parcel is None and self.fault in (Fault.FULL, Fault.CARRY_NOTHING)

    def _take(self, wait: float, parcel: SentTransfer | None, seconds: float, answer: Answer) -> None:
        if wait < seconds:
            self.at(wait, lambda: self._taken(parcel, answer))
        else:
            self._fail(seconds + OVERDUE, K.TIMEOUT, answer)
            self.at(wait, lambda: self._store(parcel, doubtful=True))

    def _taken(self, parcel: SentTransfer | None, answer: Answer) -> None:
        self._store(parcel)
        answer(None)

    def _fail(self, wait: float, kind: FailureKind, answer: Answer) -> None:
        self.at(wait, lambda: answer(failure(kind)))

    def _store(self, parcel: SentTransfer | None, *, doubtful: bool = False) -> None:
        if parcel is not None:
            self.last = parcel
            self.stock.stored.update(parcel.ids)
            if doubtful:
                self.stock.doubtful.update(parcel.ids)
