"""What processes tell each other about failovers and holds (S15, S16). Pure.

Each process writes *changes* to a place that all of them can read: a folder, or a queue of the secondary. There are
four kinds:

    FailoverRecord   an entity failed over, or its next ping moved: a ping of it began, or failed
    RestoreRecord    an entity returned to the primary
    HoldRecord       an operator holds an entity, or all entities, until they are released
    ReleaseRecord    an operator released an entity, or all entities

`apply_change` adds a change to a `KnownState`. Changes are applied in the order in which they were written, so the last
change of an entity decides. Holds are separate from failovers: a process that reports its pings never ends a hold, and
a ping that succeeds never ends a hold. A released entity is not held by an earlier hold of all entities.

`known_failover` returns what a process takes over. Times in records are wall-clock times of the process that wrote the
record, in seconds since 1970. The clocks of two machines may differ, so this module trusts them only so far:

    age       A failover is believed if its record was written less than 3 ping intervals ago, or less than 3 ping
              intervals in the future. A hold is believed at any age.
    pings     A ping that was due in the past is due now. The failover machine limits a ping in the future to one
              interval. So a wrong record diverts for one ping interval at most.
    claims    A process that begins a ping claims it only for the longest time of a ping. If the process ends before
              the ping has a result, the next ping is due then. A ping that failed moves it to its usual time.
    engaged   A failover that engaged in the future engaged now.

Records are JSON. A reader ignores kinds that it does not know, and raises `StateFormatError` for anything else that it
cannot read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar

from twinbus.backlog import FailureKind
from twinbus.pairing.decide.failover import MAX_PING_INTERVAL, Entity, EntityMode
from twinbus.pairing.decide.failover_events import Cause, DrillCause, Event, FailoverKnown

T = TypeVar("T")

EVERY_ENTITY: Final = "*"
"""The name of all entities in a HoldRecord or a ReleaseRecord. No entity can have this name."""
AGE_LIMIT: Final = 3
"""A FailoverRecord is too old after this number of ping intervals (S16)."""
STATE_VERSION: Final = 1
MAX_STATE_BYTES: Final = 1024 * 1024
"""The most bytes of one file or message of the state. A longer one is not read."""
LONGEST_PATH: Final = 260
"""The most characters of the path of an entity, as in the service."""
_LONGEST_TEXT: Final = 1024
_MOST_TRIALS: Final = 64
"""A record has at most this number of failed trials. Fewer already lead to the longest ping interval."""
_EARLIEST, _LATEST = datetime(1970, 1, 2, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


class StateFormatError(ValueError):
    """A text is no shared state, or is damaged."""


# --- changes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FailoverRecord:
    """An entity is failed over. `ping_interval` is the current one in seconds, doubled by `failed_trials` (S14)."""

    entity: str
    cause: Cause
    engaged_at: float
    next_ping_at: float
    ping_interval: float
    failed_trials: int
    written_at: float
    writer: str


@dataclass(frozen=True, slots=True)
class RestoreRecord:
    """An entity returned to the primary."""

    entity: str
    written_at: float
    writer: str


@dataclass(frozen=True, slots=True)
class HoldRecord:
    """An operator holds `entity`, or all entities (EVERY_ENTITY)."""

    entity: str
    engaged_at: float
    writer: str


@dataclass(frozen=True, slots=True)
class ReleaseRecord:
    """An operator released `entity`, or all entities (EVERY_ENTITY)."""

    entity: str
    written_at: float
    writer: str


StateChange = FailoverRecord | RestoreRecord | HoldRecord | ReleaseRecord


def entity_key(entity: str) -> str:
    """Return the same key for all spellings of a path: paths are case-insensitive."""
    return entity.strip("/").lower()


def refuse_impossible_path(entity: str) -> None:
    """Raise ValueError for a text that can be no path: its hold would make the holds of other entities unreadable."""
    if not 0 < len(entity_key(entity)) <= LONGEST_PATH:
        raise ValueError(
            f"{entity[:30]!r} is no path of a queue or topic: give 1 to {LONGEST_PATH} characters, or leave it out for "
            "all entities"
        )


# --- what is known ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownState:
    """All changes so far, by the keys of their entities.

    `released` has entities that were released from a hold of all entities.
    """

    failovers: Mapping[str, FailoverRecord] = field(default_factory=dict)
    holds: Mapping[str, HoldRecord] = field(default_factory=dict)
    released: frozenset[str] = frozenset()

    def hold_of(self, entity: str) -> HoldRecord | None:
        """Return the hold of an entity: its own, or that of all entities. None if nobody holds the entity."""
        key = entity_key(entity)
        own = self.holds.get(key)
        return self.holds.get(EVERY_ENTITY) if own is None and key not in self.released else own

    def held_names(self) -> tuple[str, ...]:
        """Return what is held, for a person: "all entities", exceptions such as "not bills", and paths."""
        exceptions = [f"not {path}" for path in sorted(self.released)]
        every = ["all entities", *exceptions] if EVERY_ENTITY in self.holds else []
        return (*every, *sorted(hold.entity for key, hold in self.holds.items() if key != EVERY_ENTITY))


NOTHING_KNOWN: Final = KnownState()


class StateReading(NamedTuple):
    """What was read from the shared state. `unreadable` names files or messages that could not be read, and why.

    `hides_holds`: one of these may have had a hold that was read before. Then a hold that is missing has not ended.
    """

    state: KnownState
    unreadable: tuple[str, ...] = ()
    hides_holds: bool = False


def apply_change(state: KnownState, change: StateChange) -> KnownState:
    """Return the state after a change."""
    key = entity_key(change.entity)
    match change:
        case FailoverRecord():
            return replace(state, failovers={**state.failovers, key: change})
        case RestoreRecord():
            return replace(state, failovers=_without(state.failovers, key))
        case HoldRecord():
            released = frozenset() if key == EVERY_ENTITY else state.released - {key}
            return replace(state, holds={**state.holds, key: change}, released=released)
        case ReleaseRecord() if key == EVERY_ENTITY:
            return replace(state, holds={}, released=frozenset())
        case ReleaseRecord():
            released = state.released | {key} if EVERY_ENTITY in state.holds else state.released
            return replace(state, holds=_without(state.holds, key), released=released)


def apply_changes(changes: Iterable[StateChange], state: KnownState = NOTHING_KNOWN) -> KnownState:
    for change in changes:
        state = apply_change(state, change)
    return state


def hold_changes(state: KnownState) -> tuple[StateChange, ...]:
    """Return the shortest list of changes that makes the holds of `state`."""
    every = state.holds.get(EVERY_ENTITY)
    if every is None:
        return tuple(state.holds.values())
    others = [hold for key, hold in state.holds.items() if key != EVERY_ENTITY]
    released = [ReleaseRecord(key, every.engaged_at, every.writer) for key in sorted(state.released)]
    return (every, *released, *others)


def is_current(record: FailoverRecord, wall: float) -> bool:
    """Return whether a record is young enough to be believed at the wall-clock time `wall`."""
    return abs(wall - record.written_at) <= AGE_LIMIT * record.ping_interval


def known_failover(state: KnownState, entity: str, wall: float, now: float) -> FailoverKnown | None:
    """Return the event with which a process takes over what is known about an entity, or None.

    `wall` and `now` are the present time on the wall clock and on the monotonic clock.
    """
    hold = state.hold_of(entity)
    if hold is not None:
        return FailoverKnown(DrillCause.FORCED, engaged=now - max(wall - hold.engaged_at, 0.0), hold=True)
    record = state.failovers.get(entity_key(entity))
    if record is None or not is_current(record, wall):
        return None
    return FailoverKnown(
        record.cause,
        engaged=now - max(wall - record.engaged_at, 0.0),
        next_ping=now + max(record.next_ping_at - wall, 0.0),
        failed_trials=record.failed_trials,
    )


def claims_ping(entity: Entity) -> bool:
    """Return whether a ping of the entity is in progress, and other processes leave this ping to this process."""
    return entity.pinging and isinstance(entity.cause, FailureKind)


def change_to_share(
    before: Entity, after: Entity, event: Event, now: float, wall: float, writer: str, *, longest_ping: float
) -> FailoverRecord | RestoreRecord | None:
    """Return what other processes must learn from a step of the failover machine, or None.

    A failover that was taken over is in the state already. A failover that an operator forced without a hold is a
    drill of one process: other processes must not follow it. A ping that begins is claimed for `longest_ping` seconds.
    """
    if before.engaged is not None and after.mode is EntityMode.ON_TRIAL:
        return RestoreRecord(after.path, wall, writer)
    if after.next_ping is None or after.engaged is None or not isinstance(after.cause, FailureKind):
        return None
    is_same = (after.next_ping, after.pinging, after.cause) == (before.next_ping, before.pinging, before.cause)
    if isinstance(event, FailoverKnown) or is_same:
        return None
    next_ping = min(after.next_ping, now + longest_ping) if after.pinging else after.next_ping
    return FailoverRecord(
        after.path,
        after.cause,
        engaged_at=wall - (now - after.engaged),
        next_ping_at=wall + (next_ping - now),
        ping_interval=after.ping_interval,
        failed_trials=after.failed_trials,
        written_at=wall,
        writer=writer,
    )


def _without(mapping: Mapping[str, T], key: str) -> Mapping[str, T]:
    return {one: value for one, value in mapping.items() if one != key}


# --- changes as text -------------------------------------------------------------------------------------------------


def state_text(changes: Sequence[StateChange]) -> str:
    """Return changes as JSON."""
    return json.dumps({"version": STATE_VERSION, "changes": [_to_json(change) for change in changes]})


def read_state(text: str | bytes) -> tuple[StateChange, ...]:
    """Return the changes of a JSON text. Raises StateFormatError."""
    if len(text) > MAX_STATE_BYTES:
        raise StateFormatError(f"the text is longer than {MAX_STATE_BYTES} bytes")
    try:
        found = json.loads(text)
        version, changes = found["version"], found["changes"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateFormatError(f"the text is no shared state: {error}") from None
    if version != STATE_VERSION or not isinstance(changes, list):
        raise StateFormatError(f"the state has version {str(version)[:20]!r}; this Twinbus reads {STATE_VERSION}")
    return tuple(made for one in changes if (made := _from_json(one)) is not None)


def _to_json(change: StateChange) -> dict[str, str | float | int]:
    common: dict[str, str | float | int] = {"entity": change.entity, "writer": change.writer}
    match change:
        case FailoverRecord():
            return {
                "what": "failed_over",
                **common,
                "cause": str(change.cause),
                "engaged_at": _time_text(change.engaged_at),
                "next_ping_at": _time_text(change.next_ping_at),
                "ping_interval": change.ping_interval,
                "failed_trials": min(change.failed_trials, _MOST_TRIALS),
                "written_at": _time_text(change.written_at),
            }
        case RestoreRecord():
            return {"what": "restored", **common, "written_at": _time_text(change.written_at)}
        case HoldRecord():
            cause = str(DrillCause.FORCED)
            return {"what": "held", **common, "cause": cause, "engaged_at": _time_text(change.engaged_at)}
        case ReleaseRecord():
            return {"what": "released", **common, "written_at": _time_text(change.written_at)}


def _from_json(found: Any) -> StateChange | None:
    if not isinstance(found, dict):
        raise StateFormatError("a change is no JSON object")
    what, entity, writer = found.get("what"), _text(found, "entity"), _text(found, "writer")
    match what:
        case "failed_over":
            trials = found.get("failed_trials")
            if type(trials) is not int or trials < 0:
                raise StateFormatError("failed_trials is no count")
            return FailoverRecord(
                entity,
                _cause(_text(found, "cause")),
                engaged_at=_time(found, "engaged_at"),
                next_ping_at=_time(found, "next_ping_at"),
                ping_interval=_interval(found.get("ping_interval")),
                failed_trials=min(trials, _MOST_TRIALS),
                written_at=_time(found, "written_at"),
                writer=writer,
            )
        case "restored":
            return RestoreRecord(entity, _time(found, "written_at"), writer)
        case "held":
            return HoldRecord(entity, _time(found, "engaged_at"), writer)
        case "released":
            return ReleaseRecord(entity, _time(found, "written_at"), writer)
        case _:
            return None


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _time(found: Mapping[str, Any], name: str) -> float:
    try:
        moment = datetime.fromisoformat(_text(found, name))
    except ValueError:
        raise StateFormatError(f"{name} is no time") from None
    if moment.tzinfo is None or not _EARLIEST < moment.replace(tzinfo=UTC) < _LATEST:
        raise StateFormatError(f"{name} has no time zone, or is far from today")
    return moment.timestamp()


def _text(found: Mapping[str, Any], name: str) -> str:
    text = found.get(name)
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_TEXT:
        raise StateFormatError(f"{name} is no text")
    return text


def _interval(found: Any) -> float:
    if type(found) not in (int, float) or not math.isfinite(found) or not 0 < found <= MAX_PING_INTERVAL:
        raise StateFormatError("ping_interval is no interval")
    return float(found)


def _cause(text: str) -> Cause:
    try:
        return FailureKind(text)
    except ValueError:
        # Another version of Twinbus may know more kinds.
        return FailureKind.UNKNOWN
