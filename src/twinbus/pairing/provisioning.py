"""Decide how backlog queues are found or created: requests, retries and errors (P5–P8).

`provisioning_steps` is a generator of requests to the secondary. `administration` carries out the requests and sends
their results into the generator. No request changes or deletes a queue, and no request goes to the primary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Final, NamedTuple

from twinbus.backlog import FailureKind
from twinbus.errors import OperatorError
from twinbus.pairing.errors import QueueCause, listed_causes

# The properties that P5 demands, by their names in the SDK's QueueProperties. All others have the service's defaults.
LONGEST: Final = "P10675199DT2H48M5.4775807S"
PROPERTIES: Final[Mapping[str, int | str | bool]] = {
    "max_size_in_megabytes": 5120,
    "max_delivery_count": 2147483647,
    "default_message_time_to_live": LONGEST,
    "auto_delete_on_idle": LONGEST,
    "lock_duration": "PT1M",
    "dead_lettering_on_message_expiration": True,
    "enable_batched_operations": True,
}

# Pauses in seconds between three tries (P7).
PAUSES: Final = (1.0, 3.0)
# Pauses in seconds between tries in the background: growing, then constant (P8).
BACKGROUND_PAUSES: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
# A pair waits for provisioning while the secondary answers, and no longer than this time for each answer (P1). A silent
# secondary must not use up the life of a function with 5 s to live. A secondary far away needs the time for its first
# answer: a token, a TLS handshake and a request.
SILENCE_SECONDS: Final = 2.0
# The pause in seconds if every queue that is left was refused: only an operator can change this.
REFUSED_PAUSE: Final = 300.0
REFUSED: Final = frozenset({FailureKind.UNAUTHORIZED, FailureKind.AUTHENTICATION})
# The SDK's longest span has more digits than a timedelta. So a span of this length counts as the longest.
_LONGEST_SPAN: Final = timedelta(days=10675199)


# --- requests and results --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GetQueues:
    """Look up each queue. The result is FOUND, FoundUnsafe, MISSING or a QueueFailure for each queue."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CreateQueues:
    """Create each queue with PROPERTIES. The result is CREATED, EXISTS or a QueueFailure for each queue."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for `seconds`. The result is an empty mapping."""

    seconds: float


ProvisioningRequest = GetQueues | CreateQueues | Pause


class QueueAnswer(Enum):
    """What the secondary answered about one queue."""

    FOUND = "found"
    MISSING = "missing"
    CREATED = "created"
    EXISTS = "already exists"


class QueueFailure(NamedTuple):
    """Why a request about one queue failed."""

    kind: FailureKind
    detail: str = ""


class LosingProperty(NamedTuple):
    """A property with which a backlog queue would lose messages, or take none (P6)."""

    property: str
    found: str
    consequence: str

    def __str__(self) -> str:
        return f"{self.property} is {self.found}: {self.consequence}"


class FoundUnsafe(NamedTuple):
    """The queue was found, and would lose messages."""

    losing: tuple[LosingProperty, ...]


QueueOutcome = QueueAnswer | FoundUnsafe | QueueFailure
Outcomes = Mapping[str, QueueOutcome]


class Provisioned(NamedTuple):
    """The result of provisioning. `found` are the queues that exist now, in the order of the request.

    `created` are those queues of `found` that did not exist before. `failed` are the queues not in `found` (P7).
    `losing` has properties of queues in `found` that would make a queue lose messages (P6).
    """

    found: tuple[str, ...] = ()
    failed: tuple[QueueCause, ...] = ()
    created: tuple[str, ...] = ()
    losing: tuple[tuple[str, LosingProperty], ...] = ()


class ProvisioningError(OperatorError):
    """No backlog queue was found or could be created. `causes` has one entry per queue.

    Example: `except ProvisioningError as error: print([cause.kind for cause in error.causes])`.
    """

    def __init__(self, causes: Sequence[QueueCause]) -> None:
        super().__init__(f"no backlog queue was found or could be created: {listed_causes(causes)}", _hint(causes))
        self.causes = tuple(causes)


ProvisioningSteps = Generator[ProvisioningRequest, Outcomes, Provisioned]


# --- decisions -------------------------------------------------------------------------------------------------------


def provisioning_steps(paths: Iterable[str], *, assume: bool = False, background: bool = False) -> ProvisioningSteps:
    """Return the steps of provisioning before a pair is ready (P1). Raises ProvisioningError if all queues failed.

    With `assume` there are no requests. With `background` there is one try, and only a secondary that refuses the
    credential is an error: `provisioning_again` tries the failed queues in the background.
    """
    wanted = tuple(dict.fromkeys(paths))
    if assume:
        return Provisioned(wanted)
    done = yield from _tries(wanted, () if background else PAUSES)
    refused = all(cause.kind in REFUSED for cause in done.failed)
    if not done.found and (refused or not background):
        raise ProvisioningError(done.failed)
    return done


def provisioning_again(paths: Iterable[str]) -> ProvisioningSteps:
    """Return the steps of one more try, in the background (P8). Never raises."""
    return _tries(tuple(dict.fromkeys(paths)), ())


def losing_properties(queue: Any) -> tuple[LosingProperty, ...]:
    """Return the properties of a queue, as the SDK gives them, with which a backlog queue would lose messages (P6)."""
    found = []
    ttl, idle = queue.default_message_time_to_live, queue.auto_delete_on_idle
    if ttl is not None and ttl < _LONGEST_SPAN:
        fate = "dead-lettered" if queue.dead_lettering_on_message_expiration else "removed"
        text = f"messages that wait longer are {fate}"
        found.append(LosingProperty("default_message_time_to_live", str(ttl), text))
    if idle is not None and idle < _LONGEST_SPAN:
        text = "the service deletes the queue with its messages when nobody uses it for this time"
        found.append(LosingProperty("auto_delete_on_idle", str(idle), text))
    status = getattr(queue.status, "value", queue.status)
    if status not in (None, "Active"):
        found.append(LosingProperty("status", str(status), "senders or the syphon cannot use the queue"))
    return tuple(found)


def background_pause(tries: int, failed: Sequence[QueueCause] = ()) -> float:
    """Return the seconds to wait after try number `tries` in the background. `failed`: queues that still fail."""
    if failed and all(cause.kind in REFUSED for cause in failed):
        return REFUSED_PAUSE
    return BACKGROUND_PAUSES[min(tries, len(BACKGROUND_PAUSES)) - 1]


def _tries(wanted: tuple[str, ...], pauses: Sequence[float]) -> ProvisioningSteps:
    """Try all queues together: the queues that failed share one pause before their next try."""
    outcomes: dict[str, QueueOutcome] = {}
    left = wanted
    for number in range(len(pauses) + 1):
        if number:
            yield Pause(pauses[number - 1])
        outcomes.update((yield from _once(left)))
        left = tuple(path for path in left if _is_worth_another_try(outcomes[path]))
        if not left:
            break
    failures = [(path, outcome) for path, outcome in outcomes.items() if isinstance(outcome, QueueFailure)]
    return Provisioned(
        found=tuple(path for path in wanted if not isinstance(outcomes[path], QueueFailure)),
        failed=tuple(QueueCause(path, failure.kind, failure.detail) for path, failure in failures),
        created=tuple(path for path in wanted if outcomes[path] is QueueAnswer.CREATED),
        losing=tuple(
            (path, one)
            for path, outcome in outcomes.items()
            if isinstance(outcome, FoundUnsafe)
            for one in outcome.losing
        ),
    )


def _once(paths: tuple[str, ...]) -> Generator[ProvisioningRequest, Outcomes, dict[str, QueueOutcome]]:
    """Look up the queues, and create only those that are missing (P6)."""
    outcomes = dict((yield GetQueues(paths)))
    if missing := _with_answer(outcomes, QueueAnswer.MISSING):
        outcomes.update((yield CreateQueues(missing)))
    if existing := _with_answer(outcomes, QueueAnswer.EXISTS):
        # If another pair created the queue at the same time, the queue can be used (P7). But if a topic has this name,
        # messages sent to it would be lost.
        again = yield GetQueues(existing)
        for path in _with_answer(again, QueueAnswer.MISSING):
            outcomes[path] = QueueFailure(
                FailureKind.ENTITY_NOT_FOUND, "this name belongs to something that is not a queue"
            )
    return outcomes


def _with_answer(outcomes: Outcomes, answer: QueueAnswer) -> tuple[str, ...]:
    return tuple(path for path, outcome in outcomes.items() if outcome is answer)


def _is_worth_another_try(outcome: QueueOutcome) -> bool:
    return isinstance(outcome, QueueFailure) and outcome.kind not in REFUSED


def _hint(causes: Sequence[QueueCause]) -> str:
    kinds = {cause.kind for cause in causes}
    if kinds & REFUSED:
        return (
            "Give the secondary's credential the Manage right, or let an operator run `twinbus provision` and pair "
            'with provision="assume".'
        )
    if FailureKind.CERTIFICATE in kinds:
        return "Trust the secondary's CA: an admin client with connection_verify=, or a CA bundle."
    return 'Mend the secondary; on_secondary_down="background" lets an application start without it.'
