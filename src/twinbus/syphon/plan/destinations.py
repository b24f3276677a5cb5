"""Which entities of the primary take messages now, and what follows from a send that failed (Y5, Y6). Pure.

A destination starts *ready*. A send that fails puts it *aside* for a pause; the pause doubles with every failure. After
the pause one message is sent as a probe: if it arrives the destination is ready again, otherwise the next pause starts.
A destination that was not found for `gone_after` seconds is *gone*, and its messages are dead-lettered, but it is still
probed.

All pumps of a syphon share one `Destinations`, so one probe is enough for all of them. Each change of a destination
starts a new *epoch*. Outcomes report the epoch of the decision they came from, and those of an earlier epoch change
nothing: a send that was in flight when its destination was put aside neither brings it back nor prolongs its pause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final, NamedTuple, assert_never

from twinbus.backlog import FailureKind

MAX_DESTINATIONS: Final = 10_000
"""Destinations that are remembered; more only if more were ever put aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Seconds. A destination is put aside for `first_pause`, then twice as long each time, up to `longest_pause`."""

    first_pause: float = 1.0
    longest_pause: float = 300.0
    gone_after: float = 600.0


class Readiness(Enum):
    READY = "ready"
    ASIDE = "aside"
    GONE = "gone"


class DestinationRoute(Enum):
    """What to do with messages for a destination."""

    SEND = "send"
    PROBE = "probe"  # send one of them and put the others aside
    PUT_ASIDE = "put aside"
    DEAD_LETTER = "dead-letter"


class RoutingDecision(NamedTuple):
    route: DestinationRoute
    epoch: int


class FailedSendAction(Enum):
    """What to do with messages whose send failed."""

    RETRY = "retry"  # once, at once: the connection broke and is made again
    SPLIT = "split"  # one of them makes the whole request fail
    PUT_ASIDE = "put aside"
    DEAD_LETTER = "dead-letter"
    ABANDON = "abandon"  # the syphon itself was stopped


# All other kinds put the destination aside.
_ACTIONS: Final = {
    FailureKind.CONNECTION_LOST: FailedSendAction.RETRY,
    FailureKind.DETACHED: FailedSendAction.RETRY,
    FailureKind.MESSAGE_TOO_LARGE: FailedSendAction.DEAD_LETTER,
    FailureKind.BAD_MESSAGE: FailedSendAction.DEAD_LETTER,
    FailureKind.CANCELLED: FailedSendAction.ABANDON,
    FailureKind.CLOSED: FailedSendAction.ABANDON,
}


class _Destination:
    """`pause` is the last one. It starts again from the first only after the destination was ready for as long."""

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
    """For people. A destination that is not ready is probed at `until`; `failures` counts since it was last ready."""

    path: str
    readiness: Readiness
    cause: FailureKind | None
    until: float
    failures: int = 0


class DestinationMemory(NamedTuple):
    """What a syphon knows of a destination, for a syphon with another clock: durations in seconds, not instants.

    `age`: since its readiness changed. `left`: until it is probed. `missing`: since it was first not found.
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
    """The state of all destinations, by path."""

    def __init__(self, policy: RetryPolicy | None = None) -> None:
        self.policy = policy or RetryPolicy()
        self._found: dict[str, _Destination] = {}
        self._limit = MAX_DESTINATIONS

    def route(self, path: str, now: float) -> RoutingDecision:
        """Decide what to do with messages for `path`.

        PROBE starts the probe: the caller has to report its outcome (`succeeded`, `failed`) or that it is `void`.
        """
        destination = self._of(path)
        match destination.readiness:
            case Readiness.READY:
                return RoutingDecision(DestinationRoute.SEND, destination.epoch)
            case Readiness.ASIDE:
                otherwise = DestinationRoute.PUT_ASIDE
            case Readiness.GONE:
                # Nothing is dead-lettered while a probe may find that it is back.
                otherwise = DestinationRoute.PUT_ASIDE if destination.probing else DestinationRoute.DEAD_LETTER
            case _:
                assert_never(destination.readiness)
        if destination.probing or now < destination.until:
            return RoutingDecision(otherwise, destination.epoch)
        destination.probing = True
        return RoutingDecision(DestinationRoute.PROBE, destination.epoch)

    def succeeded(self, path: str, epoch: int, now: float) -> bool:
        """Report a send that was accepted. Returns whether it made the destination ready."""
        destination = self._of(path)
        if epoch != destination.epoch or destination.readiness is Readiness.READY:
            return False
        self._enter(destination, Readiness.READY, now)
        destination.missing_since = destination.cause = None
        destination.failures = 0
        return True

    def void(self, path: str, epoch: int) -> None:
        """Report a probe that showed nothing: its message was gone, or was itself the only fault."""
        destination = self._of(path)
        if epoch == destination.epoch:
            destination.probing = False

    def failed(
        self, path: str, epoch: int, kind: FailureKind, now: float, chance: float, *, retried: bool, messages: int
    ) -> FailedSendAction:
        """Report a send that failed; returns what to do with its messages.

        `chance`, from 0 to 1, shortens the pause by up to a half, so that many syphons do not probe in step.
        """
        destination = self._of(path)
        action = _ACTIONS.get(kind, FailedSendAction.PUT_ASIDE)
        is_current = epoch == destination.epoch
        match action:
            case FailedSendAction.DEAD_LETTER:
                self.void(path, epoch)
                return action if messages == 1 else FailedSendAction.SPLIT
            case FailedSendAction.ABANDON:
                self.void(path, epoch)
                return action
            case FailedSendAction.RETRY if destination.readiness is Readiness.READY and is_current and not retried:
                return action
            case _:
                pass
        if is_current:
            self._put_aside(destination, kind, now, chance)
        gone = destination.readiness is Readiness.GONE and kind is FailureKind.ENTITY_NOT_FOUND
        return FailedSendAction.DEAD_LETTER if gone else FailedSendAction.PUT_ASIDE

    def due(self, path: str) -> float:
        """When messages that were put aside for `path` can be brought back; -inf is now, inf while a probe runs."""
        destination = self._of(path)
        if destination.probing:
            return inf
        return destination.until if destination.readiness is Readiness.ASIDE else -inf

    def failures(self, path: str) -> int:
        """How often the destination was tried since it last took a message."""
        return self._of(path).failures

    def statuses(self) -> tuple[DestinationStatus, ...]:
        return tuple(
            DestinationStatus(one.path, one.readiness, one.cause, one.until, one.failures)
            for one in self._found.values()
        )

    def memories(self, now: float) -> tuple[DestinationMemory, ...]:
        """Of all destinations that were ever put aside."""
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
        """Take over what another syphon knew."""
        for memory in memories:
            one = self._of(memory.path)
            one.readiness, one.cause, one.pause = memory.readiness, memory.cause, memory.pause
            one.since, one.until = now - memory.age, now + memory.left
            one.missing_since = None if memory.missing is None else now - memory.missing

    def _of(self, path: str) -> _Destination:
        key = destination_key(path)
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= self._limit:
                self._forget_never_put_aside()
            found = self._found[key] = _Destination(path)
        return found

    def _forget_never_put_aside(self) -> None:
        """Forget destinations of which nothing is known but their path."""
        self._found = {key: one for key, one in self._found.items() if one.epoch}
        self._limit = max(MAX_DESTINATIONS, 2 * len(self._found))

    def _put_aside(self, one: _Destination, kind: FailureKind, now: float, chance: float) -> None:
        policy = self.policy
        was_ready_long_enough = one.readiness is Readiness.READY and now - one.since >= one.pause
        if was_ready_long_enough:
            one.pause = policy.first_pause
        else:
            one.pause = min(max(one.pause, policy.first_pause / 2) * 2, policy.longest_pause)
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
