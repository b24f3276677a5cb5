"""Which entities of the primary take messages now, and what follows from a send that failed (Y5, Y6).

Shared by all pumps of a syphon, so that one probe tells them all. It neither sends nor waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final, NamedTuple, assert_never

from twinbus.backlog import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Seconds. A destination is left aside for `first_pause`, then twice as long each time, up to `longest_pause`."""

    first_pause: float = 1.0
    longest_pause: float = 300.0
    gone_after: float = 600.0


MOST: Final = 10_000
"""So many destinations are known at a time, and more only where more were ever left aside."""


class Readiness(Enum):
    READY = "ready"
    ASIDE = "aside"
    GONE = "gone"


class DestinationRoute(Enum):
    """What becomes of messages for a destination."""

    SEND = "send"
    PROBE = "probe"  # one of them is sent, the rest put aside: what comes of it decides
    PUT_ASIDE = "put aside"
    DEAD_LETTER = "dead-letter"


class RoutingDecision(NamedTuple):
    """`epoch` goes with what is sent, and back with its outcome."""

    route: DestinationRoute
    epoch: int


class FailedSendAction(Enum):
    """What becomes of messages whose send failed."""

    RETRY = "retry"  # once, at once: a connection that broke is made again
    SPLIT = "split"  # one of them spoils the others
    PUT_ASIDE = "put aside"
    DEAD_LETTER = "dead-letter"
    GIVE_BACK = "give back"  # the syphon itself was stopped


_VERDICTS: Final = {
    FailureKind.CONNECTION_LOST: FailedSendAction.RETRY,
    FailureKind.DETACHED: FailedSendAction.RETRY,
    FailureKind.MESSAGE_TOO_LARGE: FailedSendAction.DEAD_LETTER,
    FailureKind.BAD_MESSAGE: FailedSendAction.DEAD_LETTER,
    FailureKind.CANCELLED: FailedSendAction.GIVE_BACK,
    FailureKind.CLOSED: FailedSendAction.GIVE_BACK,
}


class _Destination:
    """`pause` is the last one; it begins anew only once the destination was ready for as long as that."""

    __slots__ = (
        "cause", "epoch", "failures", "missing_since", "path", "pause", "probing", "readiness", "since", "until",
    )  # fmt: skip

    def __init__(self, path: str) -> None:
        self.path = path
        self.readiness = Readiness.READY
        self.since = -inf
        self.until = -inf
        self.pause = 0.0
        self.epoch = 0
        self.probing = False
        self.missing_since: float | None = None
        self.cause: FailureKind | None = None
        self.failures = 0


class DestinationStatus(NamedTuple):
    """For people. One that is not ready is asked again at `until`; `failures`: how often it was, in vain."""

    path: str
    readiness: Readiness
    cause: FailureKind | None
    until: float
    failures: int = 0


class DestinationMemory(NamedTuple):
    """What one syphon knows of a destination, for another whose clock is not the same: spans, in seconds.

    `age`: since it became so; `left`: until it is asked again; `missing`: since it was first not found.
    """

    path: str
    readiness: Readiness
    cause: FailureKind | None
    pause: float
    age: float
    left: float
    missing: float | None


def destination_key(path: str) -> str:
    """Paths are case-insensitive."""
    return path.strip("/").lower()


class Destinations:
    """By path. Outcomes of an epoch that is over change nothing: what was in flight when a destination was put aside
    neither brings it back nor makes its pause longer.
    """

    def __init__(self, policy: RetryPolicy | None = None) -> None:
        self.policy = policy or RetryPolicy()
        self._found: dict[str, _Destination] = {}
        self._most = MOST

    def route(self, path: str, now: float) -> RoutingDecision:
        """A probe is begun here: its outcome, or that it was void, has to be told."""
        one = self._of(path)
        match one.readiness:
            case Readiness.READY:
                return RoutingDecision(DestinationRoute.SEND, one.epoch)
            case Readiness.ASIDE:
                otherwise = DestinationRoute.PUT_ASIDE
            case Readiness.GONE:
                # While it is being asked again nothing is dead-lettered.
                otherwise = DestinationRoute.PUT_ASIDE if one.probing else DestinationRoute.DEAD_LETTER
            case _:
                assert_never(one.readiness)
        if one.probing or now < one.until:
            return RoutingDecision(otherwise, one.epoch)
        one.probing = True
        return RoutingDecision(DestinationRoute.PROBE, one.epoch)

    def succeeded(self, path: str, epoch: int, now: float) -> bool:
        """True if it made the destination ready."""
        one = self._of(path)
        if epoch != one.epoch or one.readiness is Readiness.READY:
            return False
        self._enter(one, Readiness.READY, now)
        one.missing_since = one.cause = None
        one.failures = 0
        return True

    def void(self, path: str, epoch: int) -> None:
        """The message of a probe was not there to be sent, or was the only fault: nothing was learned."""
        one = self._of(path)
        if epoch == one.epoch:
            one.probing = False

    def failed(
        self, path: str, epoch: int, kind: FailureKind, now: float, chance: float, *, retried: bool, messages: int
    ) -> FailedSendAction:
        """`chance`, from 0 to 1, shortens the pause by up to a half, so that many syphons do not ask in step."""
        one = self._of(path)
        verdict = _VERDICTS.get(kind, FailedSendAction.PUT_ASIDE)
        match verdict:
            case FailedSendAction.DEAD_LETTER:
                self.void(path, epoch)
                return verdict if messages == 1 else FailedSendAction.SPLIT
            case FailedSendAction.GIVE_BACK:
                self.void(path, epoch)
                return verdict
            case FailedSendAction.RETRY if one.readiness is Readiness.READY and epoch == one.epoch and not retried:
                return verdict
            case _:
                pass
        if epoch == one.epoch:
            self._put_aside(one, kind, now, chance)
        gone = one.readiness is Readiness.GONE and kind is FailureKind.ENTITY_NOT_FOUND
        return FailedSendAction.DEAD_LETTER if gone else FailedSendAction.PUT_ASIDE

    def due(self, path: str) -> float:
        """When messages put aside for it can be brought back, if nothing else happens first: -inf is at any time."""
        one = self._of(path)
        return inf if one.probing else one.until if one.readiness is Readiness.ASIDE else -inf

    def failures(self, path: str) -> int:
        """How often it was asked in vain since it last took a message."""
        return self._of(path).failures

    def states(self) -> tuple[DestinationStatus, ...]:
        return tuple(
            DestinationStatus(one.path, one.readiness, one.cause, one.until, one.failures)
            for one in self._found.values()
        )

    def memories(self, now: float) -> tuple[DestinationMemory, ...]:
        """Of all that were ever left aside."""
        return tuple(
            DestinationMemory(
                one.path,
                one.readiness,
                one.cause,
                one.pause,
                now - one.since,
                one.until - now,
                None if one.missing_since is None else now - one.missing_since,
            )
            for one in self._found.values()
            if one.pause
        )

    def remember(self, memories: Iterable[DestinationMemory], now: float) -> None:
        for memory in memories:
            one = self._of(memory.path)
            one.readiness, one.cause, one.pause = memory.readiness, memory.cause, memory.pause
            one.since, one.until = now - memory.age, now + memory.left
            one.missing_since = None if memory.missing is None else now - memory.missing

    def _of(self, path: str) -> _Destination:
        key = destination_key(path)
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= self._most:
                self._forget_some()
            found = self._found[key] = _Destination(path)
        return found

    def _forget_some(self) -> None:
        """Those of which nothing is known but that they were asked for: never left aside."""
        self._found = {key: one for key, one in self._found.items() if one.epoch}
        self._most = max(MOST, 2 * len(self._found))

    def _put_aside(self, one: _Destination, kind: FailureKind, now: float, chance: float) -> None:
        policy = self.policy
        lasted = one.readiness is Readiness.READY and now - one.since >= one.pause
        one.pause = (
            policy.first_pause if lasted else min(max(one.pause, policy.first_pause / 2) * 2, policy.longest_pause)
        )
        if kind is not FailureKind.ENTITY_NOT_FOUND:
            one.missing_since = None
        elif one.missing_since is None:
            one.missing_since = now
        gone = one.missing_since is not None and now - one.missing_since >= policy.gone_after
        one.cause = kind
        one.failures += 1
        one.until = now + one.pause * (1 - chance / 2)
        self._enter(one, Readiness.GONE if gone else Readiness.ASIDE, now)

    @staticmethod
    def _enter(one: _Destination, readiness: Readiness, now: float) -> None:
        one.readiness = readiness
        one.since = now
        one.epoch += 1
        one.probing = False
