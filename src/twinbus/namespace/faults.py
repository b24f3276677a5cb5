"""Faults on demand (N4): decides which operations a fault hits, and when the fault is over.

A fault has a kind (what happens), points (at which operations), and optionally an entity, a link, a probability, a
count and a duration. The front calls `trigger` at every point of every operation, and carries out the fault that
`trigger` returns.

This module only decides. The caller supplies the clock. Each fault draws random numbers from its own seed: the same
seed and the same operations give the same hits.
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
    """What happens to an operation that a fault hits."""

    REFUSE = "refuse"
    BLACK_HOLE = "black-hole"
    DELAY = "delay"
    SERVER_BUSY = "server-busy"
    DETACH = "detach"
    INTERNAL_ERROR = "internal-error"
    DROP_ACK = "drop-ack"
    CRASH = "crash"


class FaultPoint(StrEnum):
    """Where a fault can hit an operation."""

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
# For each kind: the points that are allowed, and the default points. A crash without points happens when it is set.
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
    """The description of a fault is invalid. The text says what is wrong and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. None for `entity` or `link` means all entities or all links. `duration` and `delay` are in seconds."""

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
        """Return whether point, entity and link of an operation are among those of this fault."""
        if point not in self.points:
            return False
        if self.entity is not None and (entity is None or not _within(entity, self.entity)):
            return False
        return self.link is None or (link is not None and (link == self.link or fnmatchcase(link, self.link)))

    @property
    def is_blackout(self) -> bool:
        """Whether this is a black hole over the whole namespace, not over some of its operations."""
        return (
            self.kind is FaultKind.BLACK_HOLE
            and self.entity is None
            and self.link is None
            and self.points == _ALL
            and self.probability >= 1.0
            and self.count is None
        )


@dataclass(slots=True)
class _ActiveFault:
    fault: Fault
    ends_at: int | None
    generator: random.Random = field(init=False)
    hits: int = 0

    def __post_init__(self) -> None:
        self.generator = random.Random(self.fault.seed)

    @property
    def is_used_up(self) -> bool:
        return self.fault.count is not None and self.hits >= self.fault.count

    def as_json(self, now: int) -> dict[str, Any]:
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
    """The active faults of one namespace, in the order in which they were set."""

    def __init__(self, clock: Clock, new_seed: Callable[[], int] = lambda: secrets.randbits(32)) -> None:
        self._clock = clock
        self._new_seed = new_seed
        self._active: list[_ActiveFault] = []
        self._last_id = 0
        self._on_change: list[Callable[[], None]] = []
        self.active = False
        """Whether there is any active fault. Callers check this first, so that operations without faults are fast."""
        self.crash_now = False
        """True after a crash without points was set. The server then ends the process."""

    def trigger(self, point: FaultPoint, entity: str | None = None, link: str | None = None) -> Fault | None:
        """Return the first fault that hits this operation, and count the hit.

        A fault draws a random number only for operations that it matches.
        """
        if not self.active:
            return None
        self.expire()
        for one in self._active:
            fault = one.fault
            if not fault.matches(point, entity, link):
                continue
            if fault.probability < 1.0 and one.generator.random() >= fault.probability:
                continue
            one.hits += 1
            if one.is_used_up:
                self._active.remove(one)
                self._changed()
            return fault
        return None

    def black_hole(self, point: FaultPoint, entity: str, link: str) -> Fault | None:
        """Return the active black hole that matches an operation and has neither count nor probability, or None.

        Does not count a hit.
        """
        for one in self._active:
            fault = one.fault
            certain = fault.count is None and fault.probability >= 1.0 and not fault.is_blackout
            if fault.kind is FaultKind.BLACK_HOLE and certain and fault.matches(point, entity, link):
                return None if _is_over(one, self._clock.now()) else fault
        return None

    def is_over(self, fault: Fault) -> bool:
        """Return whether a fault is no longer active: cleared, used up, or at the end of its duration."""
        now = self._clock.now()
        return not any(one.fault is fault and not _is_over(one, now) for one in self._active)

    @property
    def is_blacked_out(self) -> bool:
        """Whether a black hole over the whole namespace is active."""
        if not self.active:
            return False
        now = self._clock.now()
        return any(one.fault.is_blackout and not _is_over(one, now) for one in self._active)

    def on_change(self, call: Callable[[], None]) -> None:
        """Call `call` after every change: a fault was set, cleared, used up or has ended."""
        self._on_change.append(call)

    def next_end(self) -> int | None:
        """Return when the duration of a fault ends next, in milliseconds since the epoch; None if no fault has one."""
        return min((one.ends_at for one in self._active if one.ends_at is not None), default=None)

    def expire(self) -> None:
        """Remove the faults whose duration has ended."""
        now = self._clock.now()
        if any(_is_over(one, now) for one in self._active):
            self._active = [one for one in self._active if not _is_over(one, now)]
            self._changed()

    def list(self) -> list[dict[str, Any]]:
        """Return the active faults as JSON objects."""
        self.expire()
        now = self._clock.now()
        return [one.as_json(now) for one in self._active]

    def set(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Add a fault and return the fault as a JSON object. Draws a seed if `spec` has none. Raises FaultSpecError."""
        fault = _read(spec, str(self._last_id + 1), self._new_seed)
        self._last_id += 1
        now = self._clock.now()
        ends_at = None if fault.duration is None else now + math.ceil(fault.duration * 1000)
        one = _ActiveFault(fault, ends_at)
        if fault.kind is FaultKind.CRASH and not fault.points:
            self.crash_now = True
        else:
            self._active.append(one)
        self._changed()
        return one.as_json(now)

    def clear(self, id: str | None = None) -> int:
        """Remove the fault with this id, or all faults. Returns the number of removed faults."""
        kept = [] if id is None else [one for one in self._active if one.fault.id != id]
        cleared = len(self._active) - len(kept)
        if cleared:
            self._active = kept
            self._changed()
        return cleared

    def _changed(self) -> None:
        self.active = bool(self._active)
        for call in self._on_change:
            call()


def _is_over(one: _ActiveFault, now: int) -> bool:
    return one.ends_at is not None and one.ends_at <= now


def _within(path: str, entity: str) -> bool:
    """Return whether `path` is `entity`, or a sub-queue, the `$management` node or a subscription of `entity`."""
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
    delay = _number(given, "delay", 0.0, _LONGEST_SECONDS, " of seconds")
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
        raise FaultSpecError(f"entity: {kind.value!r} hits whole connections, which belong to no entity")
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
        duration=_number(given, "duration", 0.0, _LONGEST_SECONDS, " of seconds"),
        delay=delay or 0.0,
        seed=new_seed() if seed is None else seed,
        after=after,
    )


def _kind(value: Any) -> FaultKind:
    try:
        return FaultKind(value)
    except ValueError:
        problem = "is missing" if value is None else f"{value!r} is no kind of fault"
        raise FaultSpecError(f"kind: {problem}; choose from {', '.join(FaultKind)}") from None


def _points(kind: FaultKind, value: Any) -> frozenset[FaultPoint]:
    allowed, default = _POINTS[kind]
    if value is None:
        return default
    if not isinstance(value, list | tuple):
        raise FaultSpecError(f"points: {value!r} is not a list")
    names = ", ".join(point for point in FaultPoint if point in allowed)
    for name in value:
        if not isinstance(name, str) or name not in allowed:
            raise FaultSpecError(f"points: {kind.value!r} cannot hit {name!r}; it can hit {names}")
    return frozenset(FaultPoint(name) for name in value) or default


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip("/ "):
        raise FaultSpecError(f"{name}: {value!r} is not a name")
    return value


def _number(given: Mapping[str, Any], name: str, above: float, most: float, unit: str = "") -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
        raise FaultSpecError(f"{name}: {value!r} is not a number{unit} above {above:g} and up to {most:g}")
    return float(value)


def _whole(given: Mapping[str, Any], name: str, least: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FaultSpecError(f"{name}: {value!r} is not a whole number of {least} or more")
    return value
