"""Faults on demand (N4): which operation is struck, by what, and when it is over.

Decides only: time comes from the clock given in, chance from each fault's own seed, so that the same seed and the same
operations give the same hits. What a fault does to a connection or link is carried out by the front.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Final

from twinbus.clock import Clock


class FaultKind(StrEnum):
    """What happens to an operation that is struck."""

    REFUSE = "refuse"
    BLACK_HOLE = "black-hole"
    DELAY = "delay"
    SERVER_BUSY = "server-busy"
    DETACH = "detach"
    INTERNAL_ERROR = "internal-error"
    DROP_ACK = "drop-ack"
    CRASH = "crash"


class FaultPoint(StrEnum):
    """Where an operation can be struck."""

    CONNECT = "connect"
    ATTACH = "attach"
    SEND = "send"
    RECEIVE = "receive"
    SETTLE = "settle"
    REQUEST = "request"
    HTTP = "http"


_ALL: Final = frozenset(FaultPoint)
_ON_A_CONNECTION: Final = _ALL - {FaultPoint.CONNECT}
_STORING: Final = frozenset({FaultPoint.SEND, FaultPoint.SETTLE, FaultPoint.REQUEST})
# For each kind: where it can be set, and where it is when nothing is said. A crash on no point is a crash now.
_POINTS: Final[Mapping[FaultKind, tuple[frozenset[FaultPoint], frozenset[FaultPoint]]]] = {
    FaultKind.REFUSE: (frozenset({FaultPoint.CONNECT}), frozenset({FaultPoint.CONNECT})),
    FaultKind.BLACK_HOLE: (_ALL, _ALL),
    FaultKind.DELAY: (_ALL, _ON_A_CONNECTION),
    FaultKind.SERVER_BUSY: (_ON_A_CONNECTION, frozenset({FaultPoint.ATTACH, FaultPoint.SEND, FaultPoint.REQUEST})),
    FaultKind.DETACH: (
        frozenset({FaultPoint.ATTACH, FaultPoint.SEND, FaultPoint.RECEIVE, FaultPoint.SETTLE, FaultPoint.REQUEST}),
        frozenset({FaultPoint.SEND, FaultPoint.RECEIVE}),
    ),
    FaultKind.INTERNAL_ERROR: (
        _ON_A_CONNECTION,
        frozenset({FaultPoint.ATTACH, FaultPoint.SEND, FaultPoint.SETTLE, FaultPoint.REQUEST}),
    ),
    FaultKind.DROP_ACK: (
        _STORING,
        frozenset({FaultPoint.SEND, FaultPoint.SETTLE}),
    ),
    FaultKind.CRASH: (_ALL, frozenset()),
}
_FIELDS: Final = (
    "kind",
    "entity",
    "link",
    "points",
    "probability",
    "count",
    "duration",
    "delay",
    "seed",
    "after",
)
_LONGEST_SECONDS: Final = 7 * 24 * 3600.0


class FaultSpecError(ValueError):
    """A fault that cannot be set: what is wrong with it, and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault as it was set. `entity` and `link` of None mean all; durations are in seconds."""

    id: str
    kind: FaultKind
    points: frozenset[FaultPoint]
    seed: int
    entity: str | None = None
    link: str | None = None
    probability: float = 1.0
    count: int | None = None
    duration: float | None = None
    delay: float = 0.0
    after: bool = False

    def matches(self, point: FaultPoint, entity: str | None, link: str | None) -> bool:
        """Whether an operation is one of those this fault is for."""
        if point not in self.points:
            return False
        if self.entity is not None and (entity is None or not _within(entity, self.entity)):
            return False
        return self.link is None or (link is not None and (link == self.link or fnmatchcase(link, self.link)))

    @property
    def is_blackout(self) -> bool:
        """A black hole that swallows the whole namespace, not single operations of it."""
        return (
            self.kind is FaultKind.BLACK_HOLE
            and self.entity is None
            and self.link is None
            and self.points == _ALL
            and self.probability >= 1.0
            and self.count is None
        )


@dataclass(slots=True)
class _InForce:
    fault: Fault
    ends_at: int | None
    chance: random.Random = field(init=False)
    hits: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.fault.seed)

    @property
    def used_up(self) -> bool:
        return self.fault.count is not None and self.hits >= self.fault.count

    def shown(self, now: int) -> dict[str, Any]:
        fault = self.fault
        return {
            "id": fault.id,
            "kind": fault.kind.value,
            "entity": fault.entity,
            "link": fault.link,
            "points": [point.value for point in FaultPoint if point in fault.points],
            "probability": fault.probability,
            "count": fault.count,
            "duration": fault.duration,
            "delay": fault.delay,
            "seed": fault.seed,
            "after": fault.after,
            "hits": self.hits,
            "ends_in": None if self.ends_at is None else max(0, self.ends_at - now) / 1000,
        }


class Faults:
    """The faults in force on one namespace, in the order they were set."""

    def __init__(self, clock: Clock, new_seed: Callable[[], int] = lambda: secrets.randbits(32)) -> None:
        self._clock = clock
        self._new_seed = new_seed
        self._in_force: list[_InForce] = []
        self._made = 0
        self._callers: list[Callable[[], None]] = []
        self.active = False
        """False while there is nothing to check: all that a quiet namespace pays for this."""
        self.crash_now = False
        """True once a crash without a point was set: whoever set it ends the process."""

    def trigger(self, point: FaultPoint, entity: str | None = None, link: str | None = None) -> Fault | None:
        """The first fault, in the order set, that hits this operation. Only what it aims at draws on its chance."""
        if not self.active:
            return None
        self.expire()
        for one in self._in_force:
            fault = one.fault
            if not fault.matches(point, entity, link):
                continue
            if fault.probability < 1.0 and one.chance.random() >= fault.probability:
                continue
            one.hits += 1
            if one.used_up:
                self._in_force.remove(one)
                self._changed()
            return fault
        return None

    def black_hole(self, point: FaultPoint, entity: str, link: str) -> Fault | None:
        """The black hole, without count or chance, that lies over a part of the namespace; it is no hit."""
        for one in self._in_force:
            fault = one.fault
            certain = fault.count is None and fault.probability >= 1.0 and not fault.is_blackout
            if fault.kind is FaultKind.BLACK_HOLE and certain and fault.matches(point, entity, link):
                return None if _is_over(one, self._clock.now()) else fault
        return None

    def is_over(self, fault: Fault) -> bool:
        """Whether a fault is no longer in force: lifted, used up, or over by its duration."""
        now = self._clock.now()
        return not any(one.fault is fault and not _is_over(one, now) for one in self._in_force)

    @property
    def is_blacked_out(self) -> bool:
        """Whether a black hole over the whole namespace is in force."""
        if not self.active:
            return False
        now = self._clock.now()
        return any(one.fault.is_blackout and not _is_over(one, now) for one in self._in_force)

    def on_change(self, call: Callable[[], None]) -> None:
        """Have `call` made after every change: a fault set, cleared, used up or over."""
        self._callers.append(call)

    def next_end(self) -> int | None:
        """When the next fault is over by its duration, in milliseconds since the epoch."""
        return min((one.ends_at for one in self._in_force if one.ends_at is not None), default=None)

    def expire(self) -> None:
        """Drop what is over by now."""
        now = self._clock.now()
        if any(_is_over(one, now) for one in self._in_force):
            self._in_force = [one for one in self._in_force if not _is_over(one, now)]
            self._changed()

    def list(self) -> list[dict[str, Any]]:
        """What is in force, as it is told to operators."""
        self.expire()
        now = self._clock.now()
        return [one.shown(now) for one in self._in_force]

    def set(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Put a fault in force, or raise FaultSpecError. A seed that was not given is drawn, and told."""
        fault = _read(spec, str(self._made + 1), self._new_seed)
        self._made += 1
        now = self._clock.now()
        ends_at = None if fault.duration is None else now + math.ceil(fault.duration * 1000)
        one = _InForce(fault, ends_at)
        if fault.kind is FaultKind.CRASH and not fault.points:
            self.crash_now = True
        else:
            self._in_force.append(one)
        self._changed()
        return one.shown(now)

    def clear(self, id: str | None = None) -> int:
        """Lift one fault, or all of them; how many were lifted."""
        kept = [] if id is None else [one for one in self._in_force if one.fault.id != id]
        cleared = len(self._in_force) - len(kept)
        if cleared:
            self._in_force = kept
            self._changed()
        return cleared

    def _changed(self) -> None:
        self.active = bool(self._in_force)
        for call in self._callers:
            call()


def _is_over(one: _InForce, now: int) -> bool:
    return one.ends_at is not None and one.ends_at <= now


def _within(path: str, entity: str) -> bool:
    """The entity itself, its sub-queues and `$management`, and the subscriptions of a topic; never a longer name."""
    path, entity = path.strip("/").lower(), entity.strip("/").lower()
    if not path.startswith(entity):
        return False
    rest = path[len(entity) :]
    return not rest or rest.startswith(("/$", "/subscriptions/"))


def _read(spec: Mapping[str, Any], id: str, new_seed: Callable[[], int]) -> Fault:
    unknown = [name for name in spec if name not in _FIELDS]
    if unknown:
        raise FaultSpecError(f"unknown: {', '.join(map(repr, unknown))}; a fault has {', '.join(_FIELDS)}")
    given = {name: value for name, value in spec.items() if value is not None}
    kind = _kind(given.get("kind"))
    points = _points(kind, given.get("points"))
    delay = _number(given, "delay", 0.0, _LONGEST_SECONDS)
    if kind is FaultKind.DELAY and delay is None:
        raise FaultSpecError("delay: a fault of kind 'delay' needs its length in seconds")
    if kind is not FaultKind.DELAY and delay is not None:
        raise FaultSpecError(f"delay: only a fault of kind 'delay' has one, not {kind.value!r}")
    after = given.get("after", False)
    if not isinstance(after, bool):
        raise FaultSpecError(f"after: {after!r} is neither true nor false")
    if after and (kind is not FaultKind.CRASH or not points or not points <= _STORING):
        raise FaultSpecError("after: only a crash on send, settle or request can come after storing")
    entity, link = _text(given, "entity"), _text(given, "link")
    if entity is not None and points <= {FaultPoint.CONNECT} and points:
        raise FaultSpecError(f"entity: {kind.value!r} strikes whole connections, and those belong to no entity")
    if kind is FaultKind.CRASH and not points and (entity or link):
        raise FaultSpecError("entity, link: a crash that waits for an operation needs points")
    seed = _whole(given, "seed", 0)
    return Fault(
        id=id,
        kind=kind,
        entity=entity,
        link=link,
        points=points,
        probability=_number(given, "probability", 0.0, 1.0) or 1.0,
        count=_whole(given, "count", 1),
        duration=_number(given, "duration", 0.0, _LONGEST_SECONDS),
        delay=delay or 0.0,
        seed=new_seed() if seed is None else seed,
        after=after,
    )


def _kind(value: Any) -> FaultKind:
    try:
        return FaultKind(value)
    except ValueError:
        told = "is missing" if value is None else f"{value!r} is none"
        raise FaultSpecError(f"kind: {told}; choose from {', '.join(FaultKind)}") from None


def _points(kind: FaultKind, value: Any) -> frozenset[FaultPoint]:
    allowed, default = _POINTS[kind]
    if value is None:
        return default
    if not isinstance(value, list | tuple):
        raise FaultSpecError(f"points: {value!r} is not a list")
    names = ", ".join(point for point in FaultPoint if point in allowed)
    for name in value:
        if not isinstance(name, str) or name not in allowed:
            raise FaultSpecError(f"points: {kind.value!r} cannot trigger {name!r}; it can trigger {names}")
    return frozenset(FaultPoint(name) for name in value) or default


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip("/ "):
        raise FaultSpecError(f"{name}: {value!r} is not a name")
    return value


def _number(given: Mapping[str, Any], name: str, above: float, most: float) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
        raise FaultSpecError(f"{name}: {value!r} is not a number above {above:g} and up to {most:g}")
    return float(value)


def _whole(given: Mapping[str, Any], name: str, least: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FaultSpecError(f"{name}: {value!r} is not a whole number of {least} or more")
    return value
