"""Which entities of the primary can receive messages now, and what to do after a send that failed (Y5, Y6). Pure.

A destination starts *ready*. A send that fails puts the destination *aside* for a pause; the pause doubles with every
failure. After the pause one message is sent as a probe. If the probe is accepted, the destination is ready again;
otherwise the next pause starts. A destination that was not found for `gone_after` seconds is *gone*: its messages are
dead-lettered, but the probes go on.

All pumps of a syphon share one `Destinations` object, so one probe is enough for all pumps. Each change of a
destination starts a new *epoch*. The outcome of a send is reported with the epoch of its routing decision, and an
outcome of an earlier epoch is ignored. So a send that was in flight when its destination was put aside does not make
the destination ready, and does not make the pause longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final, NamedTuple, assert_never

from twinbus.backlog import FailureKind
from twinbus.syphon.plan.drain_end import WaitingDestination

MAX_DESTINATIONS: Final = 10_000
"""The most destinations that are remembered. The limit is exceeded only if more destinations were put aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The pauses of a destination, in seconds: first `first_pause`, then twice as long each time up to `longest_pause`.

    `gone_after` is the time without being found after which a destination counts as gone.
    """

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
    PROBE = "probe"  # send one message and put the others aside
    PUT_ASIDE = "put aside"
    DEAD_LETTER = "dead-letter"


class RoutingDecision(NamedTuple):
    route: DestinationRoute
    epoch: int


class FailedSendAction(Enum):
    """What to do with messages whose send failed."""

    RETRY = "retry"  # one time, after half a second: the connection broke, and the retry opens a new one
    SPLIT = "split"  # send each half separately: one message makes the whole request fail
    PUT_ASIDE = "put aside"
    DEAD_LETTER = "dead-letter"
    ABANDON = "abandon"  # the send was cancelled or the client closed, because the syphon stops


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
    """The state of one destination. `pause` is the length of the last pause, in seconds.

    If the destination was ready for at least `pause` seconds, the next pause is the shortest one again.
    """

    __slots__ = (
        "cause", "epoch", "failures", "missing_since", "path", "pause", "probe_again", "probing", "readiness", "since",
        "until",
    )  # fmt: skip

    def __init__(self, path: str) -> None:
        self.path = path
        self.readiness = Readiness.READY
        self.since = -inf
        self.until = -inf
        self.pause = 0.0
        self.epoch = 0
        self.probing = False
        self.probe_again = False
        self.missing_since: float | None = None
        self.cause: FailureKind | None = None
        self.failures = 0


class DestinationStatus(NamedTuple):
    """The state of a destination, for display.

    A destination that is not ready is probed at time `until`. `failures` is the number of failures since it was ready.
    """

    path: str
    readiness: Readiness
    cause: FailureKind | None
    until: float
    failures: int = 0


class DestinationMemory(NamedTuple):
    """What a syphon knows about a destination, in a form for other processes: durations in seconds, no clock times.

    `age`: since the readiness changed. `left`: until the next probe. `missing`: since the destination was first not
    found.
    """

    path: str
    readiness: Readiness
    cause: FailureKind | None
    pause: float
    age: float
    left: float
    missing: float | None


def destination_key(path: str) -> str:
    """Return the same key for all spellings of a path: paths are case-insensitive."""
    return path.strip("/").lower()


@dataclass(frozen=True, slots=True)
class HeldEntities:
    """The entities that an operator holds (S15), in a form for other processes. Paths are keys (`destination_key`).

    `every`: all entities are held but those in `released`.
    """

    paths: frozenset[str] = frozenset()
    every: bool = False
    released: frozenset[str] = frozenset()

    def __contains__(self, path: object) -> bool:
        """Return whether the entity is held. Messages without a destination have an empty path, which nobody holds."""
        key = destination_key(str(path))
        return key in self.paths or (self.every and key != "" and key not in self.released)


class Destinations:
    """The state of all destinations, by path."""

    def __init__(self, policy: RetryPolicy | None = None) -> None:
        self.policy = policy or RetryPolicy()
        self.is_held: Callable[[str], bool] = lambda path: False
        """Returns whether an operator holds the destination: nothing is sent to it (S15)."""
        self._found: dict[str, _Destination] = {}
        self._limit = MAX_DESTINATIONS

    def route(self, path: str, now: float) -> RoutingDecision:
        """Decide what to do with messages for `path`.

        If the route is PROBE, the probe starts: the caller has to call `succeeded`, `failed` or `void` at its end.
        """
        destination = self._of(path)
        if self.is_held(path):
            return RoutingDecision(DestinationRoute.PUT_ASIDE, destination.epoch)
        match destination.readiness:
            case Readiness.READY:
                return RoutingDecision(DestinationRoute.SEND, destination.epoch)
            case Readiness.ASIDE:
                otherwise = DestinationRoute.PUT_ASIDE
            case Readiness.GONE:
                # Nothing is dead-lettered while a probe runs: the destination may exist again.
                otherwise = DestinationRoute.PUT_ASIDE if destination.probing else DestinationRoute.DEAD_LETTER
            case _:
                assert_never(destination.readiness)
        if destination.probing or now < destination.until:
            return RoutingDecision(otherwise, destination.epoch)
        destination.probing = True
        return RoutingDecision(DestinationRoute.PROBE, destination.epoch)

    def succeeded(self, path: str, epoch: int, now: float) -> bool:
        """Report a send that was accepted. Return whether the destination has become ready by this."""
        destination = self._of(path)
        if epoch != destination.epoch or destination.readiness is Readiness.READY:
            return False
        self._enter(destination, Readiness.READY, now)
        destination.missing_since = destination.cause = None
        destination.failures = 0
        return True

    def void(self, path: str, epoch: int) -> None:
        """Report a probe without a result: its message did not exist, or failed for a reason of its own."""
        destination = self._of(path)
        if epoch == destination.epoch:
            destination.probing = False

    def failed(
        self, path: str, epoch: int, kind: FailureKind, now: float, chance: float, *, retried: bool, messages: int
    ) -> FailedSendAction:
        """Report a send that failed. Return what to do with its messages.

        `chance`, from 0 to 1, shortens the pause by up to a half, so that many syphons do not probe at the same time.
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
        """Return the time at which messages that were put aside for `path` can be brought back.

        The result is -inf for now, and inf while a probe runs or the destination is held.
        """
        destination = self._of(path)
        if destination.probing or self.is_held(path):
            return inf
        return destination.until if destination.readiness is Readiness.ASIDE else -inf

    def retry_now(self, path: str, now: float) -> None:
        """Probe now a destination that was put aside, because the caller reports that it works again (Y12).

        A probe in flight began before this report. If that probe fails, another one follows at once.
        """
        destination = self._found.get(destination_key(path))
        if destination is not None and destination.readiness is not Readiness.READY:
            destination.until = min(destination.until, now)
            destination.probe_again = destination.probing

    def retry_by(self, path: str, at: float) -> bool:
        """Probe a destination that was put aside at time `at` at the latest, but not before its first pause is over.

        Returns whether this changes the time of the probe.
        """
        destination = self._found.get(destination_key(path))
        if destination is None or destination.readiness is not Readiness.ASIDE:
            return False
        at = max(at, destination.since + min(destination.pause, self.policy.first_pause))
        is_earlier = at < destination.until
        destination.until = min(destination.until, at)
        return is_earlier

    def waits(self, path: str) -> WaitingDestination:
        """Return what decides whether a drain still waits for a destination (Y11)."""
        one = self._of(path)
        failed_at = -inf if one.readiness is Readiness.READY else one.since
        return WaitingDestination(path, failed_at, one.failures, self.is_held(path))

    def is_ready(self, path: str) -> bool:
        """Return whether messages for `path` can move now."""
        return self._of(path).readiness is Readiness.READY and not self.is_held(path)

    def failures(self, path: str) -> int:
        """Return the number of failures of the destination since it was last ready."""
        return self._of(path).failures

    def statuses(self) -> tuple[DestinationStatus, ...]:
        return tuple(
            DestinationStatus(one.path, one.readiness, one.cause, one.until, one.failures)
            for one in self._found.values()
        )

    def memories(self, now: float) -> tuple[DestinationMemory, ...]:
        """Return the memories of all destinations that were ever put aside."""
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
        """Set the state of destinations to what another syphon knew about them."""
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
        """Forget destinations that were never put aside."""
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
        one.until = now if one.probe_again else now + one.pause * (1 - chance / 2)
        one.probe_again = False
        self._enter(one, Readiness.GONE if gone else Readiness.ASIDE, now)

    @staticmethod
    def _enter(one: _Destination, readiness: Readiness, now: float) -> None:
        one.readiness = readiness
        one.since = now
        one.epoch += 1
        one.probing = False
