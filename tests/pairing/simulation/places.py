"""Where messages can be: entities of the primary and backlog queues, which fail in every way a service fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any, NamedTuple

from twinbus.pairing.failures import FailureKind

TRY_TIMEOUT = 4.0
QUICK = 0.01

Answer = Callable[[FailureKind | None], None]
At = Callable[[float, Callable[[], None]], object]
"""Do something after so many seconds."""


class Fault(Enum):
    REFUSE = FailureKind.CONNECTION_LOST
    DETACH = FailureKind.DETACHED
    FAIL = FailureKind.INTERNAL
    DISABLE = FailureKind.ENTITY_DISABLED
    FULL = FailureKind.QUOTA_EXCEEDED
    BUSY = FailureKind.SERVER_BUSY
    GONE = FailureKind.ENTITY_NOT_FOUND
    FORBID = FailureKind.UNAUTHORIZED
    STALL = FailureKind.TIMEOUT
    LATE = "late"
    LOSE = "lose"


FAULTS = tuple(Fault)


class Delivery(NamedTuple):
    """What is sent: a message, or the copy that stands for it in the backlog. A ping is None."""

    message: Message
    content: Any


@dataclass(slots=True, eq=False)
class Message:
    """One message of one caller, with what the world knows of it."""

    number: int
    entity: str
    original: Any
    faulty: bool = False
    accepted: bool = False
    refused: bool = False
    doubtful: bool = False
    """It may be stored though nobody was told: the acknowledgement was lost, came too late, or found nobody."""


@dataclass(slots=True, eq=False)
class Place:
    name: str
    chance: Random
    at: At
    fault: Fault | None = None
    stored: list[Delivery] = field(default_factory=list)

    def attempt(self, delivery: Delivery | None, answer: Answer) -> None:
        """One attempt with a deadline of TRY_TIMEOUT (S12): exactly one answer comes, and no later than that."""
        fault = self.fault
        if delivery is not None and delivery.message.faulty:
            self.at(QUICK, lambda: answer(FailureKind.MESSAGE_TOO_LARGE))
        elif fault is None:
            self.at(QUICK * self.chance.randint(1, 5), lambda: self._take(delivery, answer))
        elif fault is Fault.LATE:
            self._late(delivery, answer)
        elif fault is Fault.LOSE:
            self._store(delivery, doubtful=True)
            self.at(QUICK, lambda: answer(FailureKind.CONNECTION_LOST))
        else:
            # Quickly, or after all the retries of an SDK.
            quick = fault is not Fault.STALL and self.chance.random() < 0.5
            wait = QUICK if quick else TRY_TIMEOUT if fault is Fault.STALL else self.chance.uniform(QUICK, TRY_TIMEOUT)
            self.at(wait, lambda: answer(FailureKind(fault.value)))

    def _take(self, delivery: Delivery | None, answer: Answer) -> None:
        self._store(delivery)
        answer(None)

    def _late(self, delivery: Delivery | None, answer: Answer) -> None:
        wait = TRY_TIMEOUT * self.chance.uniform(0.2, 2)
        if wait <= TRY_TIMEOUT:
            self.at(wait, lambda: self._take(delivery, answer))
        else:
            self.at(TRY_TIMEOUT, lambda: answer(FailureKind.TIMEOUT))
            self.at(wait, lambda: self._store(delivery, doubtful=True))

    def _store(self, delivery: Delivery | None, *, doubtful: bool = False) -> None:
        if delivery is not None:
            delivery.message.doubtful |= doubtful
            self.stored.append(delivery)
