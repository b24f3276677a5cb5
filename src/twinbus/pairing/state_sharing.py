"""Share a pair's failovers and holds with other processes (S15, S16).

A pair with the option `state` looks at the shared state once, when the namespaces are paired, in the background. A look
ends after a second at the latest; then nothing is known. What it finds is taken over: entities that have a sender at
once, other entities with their first sender. The first call of a sender that was made before the look ended waits for
the look, so that a hold covers the first message too.

While all entities are healthy, the pair neither reads nor writes the state. It writes when an entity fails over, when a
ping of it begins or fails (so that other processes know the time of the next ping), and when it is restored. It reads
again only

    after a ping succeeded       an operator may have set a hold meanwhile: then the entity is held, not restored
    while it knows of a hold     every ping interval: the hold ends when the operator has released it

`decide.known_state` decides what a state means. A `StateAccess` of the driver reads and writes: it must not block, and
calls `done` later, in any thread. Changes that wait for a write in progress are written together; if one entity changes
twice, only its last change is written.

The last pair that closes waits for a ping in progress, and for changes that are not written. A process that lives for
seconds would otherwise begin a ping, and end before the ping has a result.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol
from uuid import uuid4

from twinbus.backlog import COUNTING_FAILURES, CREDENTIAL_REFUSED, FailureKind, failure_kind, state_queue_path
from twinbus.pairing.administration import management_failure
from twinbus.pairing.decide.failover import Entity, EntityMode
from twinbus.pairing.decide.failover_events import Event, FailoverKnown, RestoreForced
from twinbus.pairing.decide.known_state import (
    EVERY_ENTITY,
    NOTHING_KNOWN,
    HoldRecord,
    KnownState,
    ReleaseRecord,
    StateChange,
    StateReading,
    apply_changes,
    change_to_share,
    claims_ping,
    entity_key,
    known_failover,
)
from twinbus.pairing.shared_state import DriverTimer, SharedEntity
from twinbus.storage_location import refuse_url

_log = logging.getLogger("twinbus.pairing")

IN_SECONDARY: Final = "secondary"
"""The value of the option `state` that keeps the state in the secondary."""
LOOK_SECONDS: Final = 1.0
"""The longest time that a look takes (S16)."""
FLUSH_SECONDS: Final = 1.0
"""The longest time that closing a pair waits for changes that are not written yet."""
CLOSING_PING_SECONDS: Final = 4.0
"""The longest time that closing a pair waits for a ping in progress, before it waits for changes.

3 s for the ping (the `try_timeout` of `for_short_lived_processes`), and 1 s for the look for a hold."""
# Seconds between two writes of a pair, so that many entities that change together need few writes.
_WRITE_PAUSE: Final = 1.0
_RETRY_SECONDS: Final = 30.0
# Seconds after which a write without an answer has failed. Every attempt of a pair ends earlier (S12).
_LONGEST_WRITE: Final = 330.0

ReadDone = Callable[[StateReading | Exception], None]
WriteDone = Callable[[Exception | None], None]


@dataclass(frozen=True, slots=True)
class StateLocation:
    """Where the state of the primary with the name `primary` is: in `folder`, or, if it is None, in the secondary."""

    primary: str
    folder: Path | None

    @classmethod
    def of(cls, state: str | os.PathLike[str], primary: str) -> StateLocation:
        """Return the location that a value of the option `state` means."""
        # Absolute: the process may change its directory later.
        return cls(primary, None if state == IN_SECONDARY else refuse_url(state).absolute())

    @property
    def queue(self) -> str:
        return state_queue_path(self.primary)

    def is_missing(self) -> bool:
        """Return whether the folder does not exist: no process has shared anything there, or it is a wrong folder."""
        return self.folder is not None and not self.folder.exists()

    def __str__(self) -> str:
        return f"queue {self.queue} of the secondary" if self.folder is None else f"folder {self.folder}"


class StateAccess(Protocol):
    """What a driver does for `StateSharing`. No method blocks; `done` is called exactly once, later."""

    def read(self, done: ReadDone) -> None: ...

    def write(self, changes: Sequence[StateChange], done: WriteDone) -> None: ...

    def create(self, done: WriteDone) -> None:
        """Create the state queue. An existing queue is no error."""


class SharingPair(Protocol):
    """The pair that shares. `shared_pair.SharedPair` implements this protocol."""

    @property
    def hold_all(self) -> bool: ...

    def timer(self, due: Callable[[], object]) -> DriverTimer: ...

    def state_access(self) -> StateAccess | None:
        """Return the access to the state, or None while no pair is paired."""

    def all_entities(self) -> Iterable[SharedEntity]: ...

    def release_all(self) -> None:
        """End the hold of entities that are used later."""


def state_writer() -> str:
    """Return a name for this process in the shared state."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"


class StateSharing:
    """Shares the failovers and holds of one pair.

    `may_create` says whether the pair may create a state queue that is missing (P6). `watch_interval` is the seconds
    between two looks while an entity is held. `longest_ping` is the seconds after which every ping has a result.
    """

    def __init__(
        self,
        location: StateLocation,
        pair: SharingPair,
        *,
        may_create: bool,
        watch_interval: float,
        longest_ping: float,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.location = location
        self.known = NOTHING_KNOWN
        self.has_looked = False
        self.on_looked: set[Callable[[], None]] = set()
        """Callbacks for the end of the first look, called in any thread. None may block."""
        self.on_finished: set[Callable[[], None]] = set()
        """Callbacks for the end of what `finish` began, called in any thread. None may block."""
        self._pair = pair
        self._may_create = may_create
        self._watch_interval = watch_interval
        self._longest_ping = longest_ping
        self._now = now
        self._wall = wall
        self._writer = state_writer()
        self._lock = threading.Lock()
        self._looks: set[_StateLook] = set()
        self._look_timer = pair.timer(self._end_late_looks)
        self._watch_timer = pair.timer(self._watch)
        self._write_timer = pair.timer(self._write_due)
        self._began = False
        self._watching = False
        self._pending: dict[tuple[bool, str], StateChange] = {}
        self._writing: _Write | None = None
        self._wrote_at = -_WRITE_PAUSE
        self._exists_from = -math.inf
        """A write that began before this time may find no queue: the queue was being created."""
        self._confirmed: set[str] = set()
        self._hold_changes = 0
        self._releasing = 0
        self._finishing = False
        self._refused = False
        self._stopped = False
        self._warned = False

    @property
    def _off(self) -> bool:
        return self._refused or self._stopped

    # --- looking -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the first look. Later calls do nothing."""
        with self._lock:
            began, self._began = self._began, True
        if not began:
            self._look(self._first_look_ended, self._first_look_failed)

    def _look(self, then: Callable[[StateReading], None], failed: Callable[[Exception, bool], None]) -> None:
        """Read the state. Calls `then`, or `failed` with the error and whether it came in time."""
        access = self._access()
        if access is None:
            failed(RuntimeError("no pair is open"), True)
            return
        if self._pending:
            self._write_soon()
        look = _StateLook(self._now() + LOOK_SECONDS, then, failed)
        with self._lock:
            self._looks.add(look)
            self._look_timer.arm(min(one.until for one in self._looks))

        def done(result: StateReading | Exception) -> None:
            with self._lock:
                self._looks.discard(look)
            look.end(result)

        access.read(done)

    def _end_late_looks(self) -> None:
        with self._lock:
            late = [look for look in self._looks if look.until <= self._now()]
            self._looks.difference_update(late)
            if self._looks:
                self._look_timer.arm(min(look.until for look in self._looks))
        for look in late:
            look.expire()

    def _first_look_ended(self, reading: StateReading) -> None:
        for text in reading.unreadable:
            _log.warning("the shared state in %s is unreadable, and counts as healthy: %s", self.location, text)
        self._learn(reading, holds_only=False)
        self._end_first_look()

    def _first_look_failed(self, error: Exception, in_time: bool) -> None:
        if in_time:
            self._end_first_look()
        kind = failure_kind(error)
        if isinstance(error, FileNotFoundError):
            # No process has written to the folder yet.
            return
        if kind is FailureKind.ENTITY_NOT_FOUND and self.location.folder is None and self._may_create:
            self._create()
        elif kind in CREDENTIAL_REFUSED or kind is FailureKind.ENTITY_NOT_FOUND:
            self._share_no_more(kind, error)
        else:
            _log.warning("the shared state in %s was not read, and counts as healthy: %s", self.location, error)

    def _create(self) -> None:
        access = self._pair.state_access()
        if access is None:
            self._may_create = True
        else:
            self._exists_from = self._now() + _RETRY_SECONDS
            access.create(self._created)

    def _created(self, error: Exception | None) -> None:
        self._exists_from = self._now() if error is None else -math.inf
        if error is None:
            self._write()
        elif _is_transient(error):
            self._may_create = True
            _log.warning("the %s was not created, the next write tries again: %s", self.location, error)
        else:
            self._share_no_more(FailureKind.ENTITY_NOT_FOUND, error)

    def _share_no_more(self, kind: FailureKind, error: Exception) -> None:
        with self._lock:
            if self._refused:
                return
            self._refused = True
            self._pending.clear()
        self._tell_if_finished()
        hint = (
            f"`twinbus provision --state secondary` creates {self.location.queue}"
            if kind is FailureKind.ENTITY_NOT_FOUND
            else "give the secondary's key the Send and Listen rights"
        )
        _log.warning(
            "this pair does not share its state with other processes (%s): %s. To share it, %s", kind, error, hint
        )

    def _end_first_look(self) -> None:
        self.has_looked = True
        for call in tuple(self.on_looked):
            call()

    def _learn(self, reading: StateReading, *, holds_only: bool) -> None:
        """Replace what is known, and take over what concerns the entities of the pair.

        Only a new process takes over failovers (S16): later, the pair's own calls and pings know better.
        """
        self._remember(reading)
        for shared in self._pair.all_entities():
            event = self.event_for(shared.entity.path)
            if event is not None and (event.hold or not holds_only):
                shared.advance(event)
        if reading.state.holds:
            self._start_watching()

    def _remember(self, reading: StateReading) -> None:
        state = reading.state
        with self._lock:
            self._confirmed.update(state.holds)
            if reading.hides_holds:
                state = replace(state, holds={**self.known.holds, **state.holds}, released=self.known.released)
            # What this pair has not written yet, or is writing, is newer than what it has read.
            self.known = apply_changes(self._unwritten(), state)

    def _unwritten(self) -> list[StateChange]:
        """Return the changes that are being written, and then those that wait. The caller holds the lock."""
        being_written = () if self._writing is None else self._writing.changes.values()
        return [*being_written, *self._pending.values()]

    def _hold_changes_so_far(self) -> int | None:
        """Return how many holds and releases this process has made. None if one is not written yet.

        A reading has all of them only if the number was the same before it began. The caller holds the lock.
        """
        is_written = not any(isinstance(one, HoldRecord | ReleaseRecord) for one in self._unwritten())
        return self._hold_changes if is_written else None

    def event_for(self, path: str) -> FailoverKnown | None:
        """Return what is known about an entity, as the event that takes it over. None: nothing."""
        if self.known is NOTHING_KNOWN:
            return None
        return known_failover(self.known, path, self._wall(), self._now())

    def check_hold(self, path: str, then: Callable[[FailoverKnown | None], object]) -> None:
        """Look whether an operator holds an entity that a ping found working. Calls `then` with the hold, or None."""
        if self._off:
            then(None)
            return

        def found(reading: StateReading) -> None:
            self._remember(reading)
            if self.known.holds:
                self._start_watching()
            event = self.event_for(path)
            then(event if event is not None and event.hold else None)

        def failed(_: Exception, in_time: bool) -> None:
            if in_time:
                then(None)

        self._look(found, failed)

    # --- holds -------------------------------------------------------------------------------------------------------

    def hold(self, entity: str | None) -> None:
        """Tell other processes that an operator holds an entity, or all entities (None)."""
        self._change(HoldRecord(EVERY_ENTITY if entity is None else entity, self._wall(), self._writer))
        self._start_watching()

    def release(self, entity: str | None) -> None:
        """Tell other processes that an operator released an entity, or all entities (None).

        Writes nothing if the state holds nothing. The state is read first if this process knows of no hold.
        """
        change = ReleaseRecord(EVERY_ENTITY if entity is None else entity, self._wall(), self._writer)

        def is_held(state: KnownState) -> bool:
            return bool(state.holds) if entity is None else state.hold_of(entity) is not None

        def end(is_needed: bool) -> None:
            holds = [hold for key, hold in self.known.holds.items() if entity is None or key == entity_key(entity)]
            is_held_again = any(one.writer == self._writer and one.engaged_at > change.written_at for one in holds)
            if is_needed and not is_held_again:
                self._change(change)
                self._release_entities(entity)
            with self._lock:
                self._releasing -= 1
            self._tell_if_finished()

        def failed(_: Exception, in_time: bool) -> None:
            if in_time:
                end(True)

        if is_held(self.known):
            self._change(change)
        elif not self._off:
            with self._lock:
                self._releasing += 1
            self._look(lambda reading: end(bool(reading.unreadable) or is_held(reading.state)), failed)

    def _release_entities(self, entity: str | None) -> None:
        """Release what the first look held: it may have ended after the operator had released the entities."""
        if entity is None:
            self._pair.release_all()
        for shared in filter(_is_held, self._pair.all_entities()):
            if entity is None or entity_key(shared.entity.path) == entity_key(entity):
                shared.advance(RestoreForced())

    def _start_watching(self) -> None:
        with self._lock:
            if self._watching or self._off:
                return
            self._watching = True
        self._watch_timer.arm(self._now() + self._watch_interval)

    def _watch(self) -> None:
        """Look whether the operator has released what this pair holds."""
        is_needed = bool(self.known.holds) or self._pair.hold_all or any(map(_is_held, self._pair.all_entities()))
        with self._lock:
            self._watching = is_needed and not self._off
            changes = self._hold_changes_so_far()
        if self._watching:
            self._look(lambda reading: self._watched(reading, changes), self._not_watched)

    def _watched(self, reading: StateReading, changes: int | None) -> None:
        with self._lock:
            is_whole = changes is not None and changes == self._hold_changes_so_far()
            confirmed = frozenset(self._confirmed)
        if reading.hides_holds:
            # A hold is not ended by a state that cannot be read. New holds are taken over.
            if is_whole:
                self._learn(reading, holds_only=True)
            self._not_watched(ValueError(reading.unreadable[0]), True)
            return
        # A hold or release of this process may be younger than the reading. Then the next reading decides.
        if is_whole:
            if EVERY_ENTITY in confirmed and EVERY_ENTITY not in reading.state.holds:
                self._pair.release_all()
            for shared in filter(_is_held, self._pair.all_entities()):
                path = shared.entity.path
                was_shared = EVERY_ENTITY in confirmed or entity_key(path) in confirmed
                if was_shared and reading.state.hold_of(path) is None:
                    shared.advance(RestoreForced())
            self._learn(reading, holds_only=True)
        self._watch_again()

    def _not_watched(self, error: Exception, in_time: bool) -> None:
        if in_time:
            _log.info("the shared state in %s was not read; what is held stays held: %s", self.location, error)
            self._watch_again()

    def _watch_again(self) -> None:
        self._watch_timer.arm(self._now() + self._watch_interval)

    # --- writing -----------------------------------------------------------------------------------------------------

    def advanced(self, before: Entity, after: Entity, event: Event, now: float) -> None:
        """Note a step of the failover machine. The caller holds the lock of the entity."""
        wall, longest = self._wall(), self._longest_ping
        change = change_to_share(before, after, event, now, wall, self._writer, longest_ping=longest)
        if change is not None:
            self._change(change)
        if after.mode is EntityMode.HELD and before.mode is not EntityMode.HELD:
            self._start_watching()
        if before.pinging and not after.pinging:
            self._tell_if_finished()

    def _change(self, change: StateChange) -> None:
        is_hold = isinstance(change, HoldRecord | ReleaseRecord)
        key = (is_hold, entity_key(change.entity))
        with self._lock:
            if self._off:
                return
            self.known = apply_changes([change], self.known)
            self._hold_changes += is_hold
            if isinstance(change, ReleaseRecord):
                self._confirmed.discard(key[1])
            if key == (True, EVERY_ENTITY):
                # It decides about all entities: earlier holds and releases need not be written.
                for one in [one for one in self._pending if one[0]]:
                    del self._pending[one]
            # The last change is written last.
            self._pending.pop(key, None)
            self._pending[key] = change
        self._write_soon()

    @property
    def is_written(self) -> bool:
        """Whether no change waits to be written, and no release waits for a look."""
        return not self._pending and self._writing is None and not self._releasing

    def finish(self) -> float:
        """Write what waits without pauses and without retries, because the last pair closes.

        Returns for how many seconds at most the pair must wait for `on_finished`. 0: nothing has to be waited for.
        """
        with self._lock:
            self._finishing = True
        self._write()
        if self._is_finished():
            return 0.0
        return FLUSH_SECONDS + (CLOSING_PING_SECONDS if self._awaits_ping() else 0.0)

    def go_on(self) -> None:
        """Write with pauses and retries again, because another pair uses the state. Ends the wait after `finish`."""
        with self._lock:
            was_finishing, self._finishing = self._finishing, False
        if was_finishing:
            self._call_finished()

    def _is_finished(self) -> bool:
        return self._off or (self.is_written and not self._awaits_ping())

    def _awaits_ping(self) -> bool:
        return any(claims_ping(shared.entity) for shared in self._pair.all_entities())

    def _write_soon(self) -> None:
        self._access()  # gives up a write whose event loop was closed
        if self._writing is not None:
            # `_wrote` goes on with what waits. Until then the timer watches over the write.
            return
        due = self._wrote_at + _WRITE_PAUSE
        if due <= self._now() or self._finishing:
            self._write()
        else:
            self._write_timer.arm(due)

    def _write_due(self) -> None:
        writing = self._writing
        if writing is not None and writing.until <= self._now():
            # The event loop of the pair that wrote was closed (P3), or a file system does not answer.
            self._wrote(writing, TimeoutError("no answer"))
        else:
            self._write()

    def _write(self) -> None:
        access = self._access()
        with self._lock:
            if self._writing is not None or not self._pending or access is None:
                return
            self._wrote_at = self._now()
            writing = self._writing = _Write(access, self._pending, self._wrote_at)
            self._pending = {}
        self._write_timer.arm(writing.until)
        access.write(tuple(writing.changes.values()), lambda error: self._wrote(writing, error))

    def _access(self) -> StateAccess | None:
        """Return the access of the acting member. None without members.

        If another member acted when a write began, that member has closed, or its event loop was closed or is blocked.
        Then the changes wait again. If they were written minutes later, they could bring back a hold that was released
        meanwhile.
        """
        access = self._pair.state_access()
        with self._lock:
            writing = self._writing
            if writing is not None and access is not None and writing.access is not access and not self._off:
                self._writing = None
                self._put_back(writing.changes)
        return access

    def _put_back(self, changes: dict[tuple[bool, str], StateChange]) -> None:
        """Let changes wait again, unless a newer one of the same entity waits. The caller holds the lock."""
        older = {key: change for key, change in changes.items() if key not in self._pending}
        # The last change is written last: it may concern all entities.
        self._pending = {**older, **self._pending}

    def _wrote(self, writing: _Write, error: Exception | None) -> None:
        changes = writing.changes
        with self._lock:
            if self._writing is not writing:
                # It was given up before.
                return
            self._writing = None
            if error is None:
                self._confirmed.update(key for (_, key), one in changes.items() if isinstance(one, HoldRecord))
            elif self._finishing:
                self._pending.clear()
            elif not self._off:
                self._put_back(changes)
            is_left, warn = bool(self._pending), error is not None and not self._warned
            self._warned = error is not None
        if error is not None:
            if warn:
                _log.warning(
                    "the shared state in %s was not written, the pair tries again every %g s: %s",
                    self.location,
                    _RETRY_SECONDS,
                    error,
                )
            self._write_failed(error, writing.began)
        elif is_left:
            self._write_soon()
        self._tell_if_finished()

    def _write_failed(self, error: Exception, began: float) -> None:
        kind = failure_kind(error)
        if self._finishing:
            return
        if kind is FailureKind.ENTITY_NOT_FOUND and began < self._exists_from:
            # `_created` writes, unless the creation ended during this write.
            if self._exists_from <= self._now():
                self._write_soon()
            else:
                self._write_timer.arm(self._now() + _RETRY_SECONDS)
            return
        if self.location.folder is None and kind in (FailureKind.ENTITY_NOT_FOUND, FailureKind.UNAUTHORIZED):
            if kind is FailureKind.UNAUTHORIZED or not self._may_create:
                self._share_no_more(kind, error)
                return
            # It was deleted, or the look had no time to find that it is missing. It is created once.
            self._may_create = False
            self._create()
        self._write_timer.arm(self._now() + _RETRY_SECONDS)

    def _tell_if_finished(self) -> None:
        if self._finishing and self._is_finished():
            self._call_finished()

    def _call_finished(self) -> None:
        for call in tuple(self.on_finished):
            call()

    # --- closing -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Look and write no more: the last pair is closed."""
        with self._lock:
            self._stopped = True
            self._pending.clear()
        for timer in (self._look_timer, self._watch_timer, self._write_timer):
            timer.disarm()

    def forked(self) -> None:
        """Share no more in the child of a fork, where a copied lock may be held for ever."""
        self._lock = threading.Lock()
        self._stopped = self.has_looked = self._began = True
        self._pending.clear()


class _Write:
    """Changes that are being written. After `until` they count as not written."""

    def __init__(self, access: StateAccess, changes: dict[tuple[bool, str], StateChange], began: float) -> None:
        self.access = access
        self.changes = changes
        self.began = began
        self.until = began + _LONGEST_WRITE


class _StateLook:
    """One look: its result, or its time limit, whichever comes first, decides. A late error is reported as late."""

    def __init__(
        self, until: float, then: Callable[[StateReading], None], failed: Callable[[Exception, bool], None]
    ) -> None:
        self.until = until
        self._then = then
        self._failed = failed
        self._lock = threading.Lock()
        self._ended = False

    def expire(self) -> None:
        if self._end():
            self._failed(TimeoutError(f"no answer within {LOOK_SECONDS:g} s"), True)

    def end(self, result: StateReading | Exception) -> None:
        in_time = self._end()
        if isinstance(result, Exception):
            self._failed(result, in_time)
        elif in_time:
            self._then(result)

    def _end(self) -> bool:
        with self._lock:
            was_ended, self._ended = self._ended, True
            return not was_ended


def look_seconds(until: float | None, now: float) -> float:
    """Return how long a call waits for the first look: LOOK_SECONDS, but at most half of the time until `until`."""
    return LOOK_SECONDS if until is None else min(LOOK_SECONDS, max((until - now) / 2, 0.0))


def was_created(error: Exception) -> bool:
    """Return whether a request to create a queue failed because another process has created the queue."""
    return getattr(error, "status_code", None) == 409 and "40901" not in str(error)


def _is_transient(error: Exception) -> bool:
    """Return whether a request to create a queue failed for a reason that may be gone later."""
    kind = management_failure(error).kind
    return kind in COUNTING_FAILURES or kind in (FailureKind.SERVER_BUSY, FailureKind.TOKEN_UNAVAILABLE)


def _is_held(shared: SharedEntity) -> bool:
    return shared.entity.mode is EntityMode.HELD
