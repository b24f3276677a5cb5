"""A world of processes that share failovers and holds (S15, S16), each with several pairs that share too (P3).

The product parts are real: `SharedPair` with its timers, `SharedEntity` with the failover machine, `StateSharing`. Fake
are the clock, the drivers of the pairs, the entities of the primary, and the place where the state is kept. Pairs have
threads or an event loop. A loop may be closed under its pair, or blocked for a while; a process may be killed.

`Watcher` holds what the clauses demand of one entity in one process, and is told what happens, not what the product
decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, cast

from tests.pairing.simulation.clause_model import ViolationError
from twinbus.backlog import Endpoint, FailureKind
from twinbus.pairing.decide.failover import EntityMode, SendRoute
from twinbus.pairing.decide.failover_events import (
    BacklogAccepted,
    FailoverForced,
    PairClosed,
    PingFailed,
    PingSucceeded,
    PrimarySendFailed,
    RestoreForced,
)
from twinbus.pairing.decide.known_state import (
    FailoverRecord,
    KnownState,
    StateChange,
    StateReading,
    apply_changes,
    claims_ping,
    is_current,
)
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.shared_pair import DEPUTY_SECONDS, SharedPair
from twinbus.pairing.shared_state import SharedEntity
from twinbus.pairing.state_sharing import LOOK_SECONDS, ReadDone, WriteDone

HORIZON = 60.0
TRY_TIMEOUT = 4.0
EPOCH = 1_800_000_000.0
SLACK = 1e-4
ENDPOINTS = (Endpoint.of("primary", 5671), Endpoint.of("secondary", 5671))
LONGEST_WRITE = 330.0
"""Seconds after which a write that has no answer is tried again, because a loop was closed during it."""
LATE_LOOK = 3.0
"""Seconds of a look that takes too long."""
LONGEST_PING = TRY_TIMEOUT + LOOK_SECONDS + DEPUTY_SECONDS
"""Seconds after which another process may ping, if a process ended during its ping."""
TAKE_OVER = TRY_TIMEOUT + LOOK_SECONDS + 2 * DEPUTY_SECONDS
"""The longest time for a deputy to notice that a ping has no result, and to act."""


class Timer:
    """A timer of a pair. It never fires after the pair's loop was closed, and fires late while the loop is blocked."""

    def __init__(self, pair: SimulatedPair, due: Callable[[], object]) -> None:
        self._pair, self._due = pair, due
        self.token: object = None

    def arm(self, at: float) -> None:
        token = self.token = object()
        world = self._pair.world
        self._wait(token, at + world.chance.random() * world.lateness)

    def disarm(self) -> None:
        self.token = None

    def _wait(self, token: object, at: float) -> None:
        world = self._pair.world
        world.after(max(at - world.time, 0.0), lambda: self._fire(token))

    def _fire(self, token: object) -> None:
        pair = self._pair
        if self.token is not token or not pair.runs:
            return
        if pair.blocked_until > pair.world.time:
            self._wait(token, pair.blocked_until)
            return
        self.token = None
        self._due()


class SimulatedPair:
    """One of the pairs of a process, with its driver. Implements `MemberDriver` and `StateAccess`."""

    def __init__(self, process: Process, *, threaded: bool) -> None:
        self.process, self.world = process, process.world
        self.home = None if threaded else object()
        self.driver = self.state_access = self
        self.is_alive = True
        self.is_open = True
        self.blocked_until = 0.0
        self.timers: list[Timer] = []
        self._waiting: set[Callable[[Exception], None]] = set()
        self._pings: list[tuple[SharedEntity, int]] = []
        self.good_pings: set[tuple[SharedEntity, int]] = set()
        """Pings in progress that will succeed, within a moment."""

    @property
    def runs(self) -> bool:
        return self.is_alive and self.is_open and self.process.runs

    def show_in_metrics(self) -> None:
        pass

    def timer(self, due: Callable[[], object]) -> Timer:
        self.timers.append(timer := Timer(self, due))
        return timer

    def emit(self, notice: Any) -> None:
        self.process.notices[notice.name] += 1

    # --- pings -------------------------------------------------------------------------------------------------------

    def ping(self, cell: SharedEntity, episode: int) -> None:
        """Start a ping in this pair's loop: if the loop was closed, nothing happens."""
        if self.runs:
            one = (cell, episode)
            self._pings.append(one)
            if self.world.places[cell.entity.path] in ("works", "full"):
                self.good_pings.add(one)
            self.process.watchers[cell.entity.path].ping_begins(self, episode)
            self.world.attempt(cell.entity.path, partial(self._pinged, one), with_message=False)
            if self.world.chance.random() < self.world.ends_during_pings:
                killed = self.world.chance.random() < 0.3
                self.world.after(0.0, lambda: self.world.end(self.process, killed=killed))

    def stop_ping(self, cell: SharedEntity) -> None:
        """Stop the ping of an entity. Its answer still arrives, as it may with threads."""
        self.process.watchers[cell.entity.path].pings_stop(self)

    def _pinged(self, one: tuple[SharedEntity, int], failure: FailureKind | None) -> None:
        if self.runs and one in self._pings:
            self._pings.remove(one)
            self.good_pings.discard(one)
            cell, episode = one
            self.process.watchers[cell.entity.path].ping_ends(self, episode)
            if failure is not None:
                cell.advance(PingFailed(episode, failure))
            else:
                # As PairState does.
                sharing = self.process.shared.sharing
                if sharing is None:
                    cell.advance(PingSucceeded(episode))
                else:
                    path = cell.entity.path
                    sharing.check_hold(path, lambda hold: cell.advance(hold or PingSucceeded(episode)))

    # --- ending ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.is_open = False
        others = self.process.leave(self)
        for cell, episode in self._pings:
            self.process.watchers[cell.entity.path].ping_ends(self, episode)
            if others:
                cell.advance(PingFailed(episode, FailureKind.UNKNOWN))
        for failed in list(self._waiting):
            failed(ConnectionError("closed"))
        if any(timer.token for timer in self.timers):
            raise ViolationError("a closed pair has timers")

    def die(self) -> None:
        """Close the event loop under the pair: its timers and pings end without a word."""
        self.is_alive = False
        for cell, episode in self._pings:
            self.process.watchers[cell.entity.path].ping_ends(self, episode)
        # A task of a closed loop never ends, so its result is not reported either, also when the pair is closed later.
        self._pings.clear()

    # --- the shared state --------------------------------------------------------------------------------------------

    def read(self, done: ReadDone) -> None:
        self.process.looks += 1
        self._waiting.add(done)
        store, is_first = self.world.store, self.process.looks == 1

        def answer() -> None:
            self._waiting.discard(done)
            if self.runs:
                if is_first:
                    self.process.first_look_ends(store)
                hides_holds = bool(store.unreadable)
                found = StateReading(store.state, store.unreadable, hides_holds)
                done(ConnectionError("away") if store.is_away else found)

        self.world.after(store.delay(), answer)

    def write(self, changes: Sequence[StateChange], done: WriteDone) -> None:
        self.process.writes += 1
        self.process.check_claims(changes)
        self._waiting.add(done)
        store, fails = self.world.store, self.world.store.is_away

        def answer() -> None:
            if not fails:
                # The state may be written, though nobody is left who hears of it.
                store.write(changes)
            self._waiting.discard(done)
            if self.runs:
                done(ConnectionError("away") if fails else None)

        self.world.after(store.delay(), answer)

    def create(self, done: WriteDone) -> None:
        raise ViolationError("no process may create the state")


class Store:
    """Where the state is kept: away, slow or unreadable at times."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self.state = KnownState()
        self.is_away = False
        self.is_slow = False
        self.unreadable: tuple[str, ...] = ()
        self.well_since = 0.0

    def note_trouble(self, now: float) -> None:
        if self.is_away or self.is_slow or self.unreadable:
            self.well_since = now

    def delay(self) -> float:
        return LATE_LOOK if self.is_slow else self._chance.uniform(0.01, 0.5)

    def write(self, changes: Sequence[StateChange]) -> None:
        self.state = apply_changes(changes, self.state)


class Watcher:
    """What the clauses demand of one entity in one process, from what happened to it."""

    def __init__(self, process: Process, path: str) -> None:
        self._process, self._world = process, process.world
        self._cell = process.cells[path]
        self._pinging: set[tuple[SimulatedPair, int]] = set()
        """The pings in progress that were not stopped: who sent each, and in which episode."""
        self._quiet_since: float | None = None

    def ping_begins(self, pair: SimulatedPair, episode: int) -> None:
        entity = self._cell.entity
        if entity.mode not in (EntityMode.FAILED_OVER, EntityMode.UNUSABLE):
            raise ViolationError(f"a ping while {entity.mode}")
        if any(one.runs and one.blocked_until <= self._world.time for one, _ in self._pinging):
            raise ViolationError("two pings of one process at once")
        self._pinging.add((pair, episode))
        self._quiet_since = self._world.time

    def ping_ends(self, pair: SimulatedPair, episode: int) -> None:
        self._pinging.discard((pair, episode))

    def pings_stop(self, pair: SimulatedPair) -> None:
        self._pinging = {one for one in self._pinging if one[0] is not pair}

    def check(self) -> None:
        """Check that pings come while an entity is failed over, though the loop that sent them was closed (G2)."""
        entity, world = self._cell.entity, self._world
        over = entity.mode in (EntityMode.FAILED_OVER, EntityMode.UNUSABLE)
        if not over or not self._process.has_working_pair:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = world.time
        else:
            interval = entity.ping_interval * (1 + entity.policy.ping_jitter)
            # A deputy may be needed for the ping before, and for its result.
            longest = interval + 2 * (TAKE_OVER + DEPUTY_SECONDS + world.lateness) + TRY_TIMEOUT
            if world.time > self._quiet_since + longest:
                raise ViolationError(f"no ping for {world.time - self._quiet_since} s")


class Process:
    """A process with pairs of the same two namespaces."""

    def __init__(self, world: SharingWorld) -> None:
        self.world = world
        chance = world.chance
        self.runs = True
        self.skew = chance.choice((0.0, 0.0, -2.0, 2.0))
        self.looks = self.writes = self.sends = 0
        self.notices: Counter[str] = Counter()
        self._began = world.time
        self._released: set[str] = set()
        self.shared = SharedPair(ENDPOINTS, world.options, "primary", ("b0",), now=lambda: world.time, wall=self._wall)
        self.cells: dict[str, SharedEntity] = {}
        self.pairs: list[SimulatedPair] = []
        for _ in range(chance.choice((1, 1, 2, 3))):
            self.join(threaded=chance.random() < 0.3)
        for path in world.places:
            self._make(path)
        self.watchers = {path: Watcher(self, path) for path in self.cells}
        if self.shared.sharing is not None:
            self.shared.sharing.begin()

    def _make(self, path: str) -> None:
        # As PairState does, before the first look has ended.
        sharing = self.shared.sharing
        self.cells[path] = self.shared.entities[path] = SharedEntity(
            path,
            self.world.options.policy,
            self.shared,
            now=lambda: self.world.time,
            chance=self.world.chance.random,
            on_step=None if sharing is None else sharing.advanced,
        )

    def _wall(self) -> float:
        return EPOCH + self.world.time + self.skew

    @property
    def has_working_pair(self) -> bool:
        return self.runs and any(pair.runs and pair.blocked_until <= self.world.time for pair in self.pairs)

    # --- pairs -------------------------------------------------------------------------------------------------------

    def join(self, *, threaded: bool) -> None:
        pair = SimulatedPair(self, threaded=threaded)
        self.pairs.append(pair)
        self.shared.join(cast(Any, pair))
        self.shared.changed()

    def leave(self, pair: SimulatedPair) -> bool:
        others = self.shared.leave(cast(Any, pair), closes=True)
        if not others:
            for cell in self.cells.values():
                cell.advance(PairClosed())
            self.shared.rotation.close()
        return others

    def end(self) -> None:
        """Close the pairs. The last one waits for its pings and for what it has to write, as both drivers do (S16)."""
        *others, last = [pair for pair in self.pairs if pair.is_open]
        for pair in others:
            pair.close()
        sharing, began = self.shared.sharing, self.world.time
        good_pings = set(last.good_pings) if last.runs else set()
        seconds = 0.0 if sharing is None else sharing.finish()
        if sharing is None or not seconds:
            self.close()
            return

        def finished() -> None:
            if self.runs:
                self._check_end(good_pings, began)
                self.close()

        sharing.on_finished.add(partial(self.world.after, 0.0, finished))
        self.world.after(seconds, finished)

    def _check_end(self, good_pings: set[tuple[SharedEntity, int]], began: float) -> None:
        """Check that the last pair did not close before a ping that succeeded had ended the failover for all."""
        store, sharing = self.world.store, self.shared.sharing
        assert sharing is not None
        for cell, episode in good_pings if store.well_since < began else ():
            path = cell.entity.path
            if cell.entity.episode != episode or store.state.hold_of(path) or sharing.known.hold_of(path):
                continue
            record = store.state.failovers.get(path)
            if cell.entity.engaged is not None or (record is not None and record.writer == sharing._writer):
                raise ViolationError(f"a process ended, and left {path} failed over, though its ping succeeded")
            self.world.restored_at_end += 1

    def check_claims(self, changes: Sequence[StateChange]) -> None:
        """Check that a process that ends during a ping keeps others from pinging only for a moment (S16)."""
        for change in changes:
            if not isinstance(change, FailoverRecord) or not claims_ping(self.cells[change.entity].entity):
                continue
            if change.next_ping_at > change.written_at + LONGEST_PING + SLACK:
                raise ViolationError(f"a ping is claimed for {change.next_ping_at - change.written_at} s")

    def close(self) -> None:
        for pair in self.pairs:
            if pair.is_open:
                pair.close()
        if not self.shared.is_closed or self.shared.drivers:
            raise ViolationError("the last pair did not close what is shared")
        self.runs = False

    def kill(self) -> None:
        self.runs = False

    # --- what the first look must teach ------------------------------------------------------------------------------

    def first_look_ends(self, store: Store) -> None:
        """Check, in a moment, what the first look taught, if it ended in time (S15, S16)."""
        if self.world.time < self._began + LOOK_SECONDS and not store.is_away:
            before = {path: cell.entity.mode for path, cell in self.cells.items()}
            state, wall = store.state, self._wall()
            self.world.after(0.0, lambda: self._check_first_look(before, state, wall))

    def _check_first_look(self, before: dict[str, EntityMode], state: KnownState, wall: float) -> None:
        for path, mode in before.items():
            if mode is not EntityMode.HEALTHY or path in self._released or not self.has_working_pair:
                continue
            record = state.failovers.get(path)
            entity = self.cells[path].entity
            if state.hold_of(path) is not None:
                expected = EntityMode.HELD
            elif record is not None and is_current(record, wall):
                expected = EntityMode.FAILED_OVER
                due = self.world.time + max(record.next_ping_at - wall, 0.0)
                if not entity.pinging and (entity.next_ping is None or entity.next_ping > due + SLACK):
                    raise ViolationError("the schedule of pings was not taken over")
            else:
                expected = EntityMode.HEALTHY
            if entity.mode is not expected:
                raise ViolationError(f"{entity.mode} after the first look, but {expected} by the clauses")

    # --- what callers and operators do -------------------------------------------------------------------------------

    def send(self, path: str) -> None:
        if not self.has_working_pair:
            return
        self.sends += 1
        cell = self.cells[path]
        entity = cell.entity
        if entity.route is SendRoute.BACKLOG:
            cell.advance(BacklogAccepted())
        elif entity.route is SendRoute.PRIMARY:
            self.world.attempt(path, partial(self._answered, cell, entity.restores), with_message=True)

    def _answered(self, cell: SharedEntity, restores: int, failure: FailureKind | None) -> None:
        if not self.runs or self.shared.is_closed:
            return
        if failure is None:
            cell.succeeded(restores, True)
        else:
            cell.advance(PrimarySendFailed(failure, restores))

    def hold(self, path: str) -> None:
        if self.shared.sharing is not None:
            self.shared.sharing.hold(path)
        self.cells[path].advance(FailoverForced(hold=True))

    def release(self, path: str) -> None:
        self._released.add(path)
        if self.shared.sharing is not None:
            self.shared.sharing.release(path)
        self.cells[path].advance(RestoreForced())


class SharingWorld:
    """`SharingWorld(seed).settle()` runs with faults, ends them, and checks the result. Raises ViolationError."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.time = 0.0
        self._numbers = count()
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self.lateness = chance.choice((0.0, 0.0, 0.2))
        self.options = SendAvailabilityOptions(
            failover_interval=timedelta(seconds=chance.choice((0, 0, 2))),
            ping_interval=timedelta(seconds=chance.choice((1, 3, 10))),
            ping_jitter=chance.choice((0.0, 0.5)),
            try_timeout=timedelta(seconds=TRY_TIMEOUT),
            provision="assume",
            state=Path("state") if chance.random() < 0.8 else None,
        )
        self.ends_during_pings = chance.choice((0.0, 0.0, 0.2))
        """The share of pings during which their process ends, as jobs do that live for seconds."""
        self.store = Store(chance)
        self.places = {f"q{number}": "works" for number in range(chance.randint(1, 2))}
        self.held: Counter[str] = Counter()
        self.ended: list[Process] = []
        self.restored_at_end = 0
        """Pings that succeeded while the last pair of a process was closing."""
        self.processes = [Process(self)]
        self._plan()

    def _plan(self) -> None:
        chance = self.chance
        self.is_calm = chance.random() < 0.1
        for _ in range(0 if self.is_calm else chance.randint(1, 3)):
            path, begin = chance.choice(list(self.places)), chance.uniform(0, HORIZON / 2)
            # A full entity takes pings and no messages (S14). A silent one does not answer.
            fault = chance.choice(("fails", "full", "silent"))
            self.after(begin, partial(self.places.__setitem__, path, fault))
            self.after(chance.uniform(begin, HORIZON), partial(self.places.__setitem__, path, "works"))
        for _ in range(chance.randint(5, 30)):
            self.after(chance.uniform(0, HORIZON), self._send)
        for _ in range(chance.randint(1, 4)):
            self.after(chance.uniform(0, HORIZON), self._start)
        for _ in range(chance.randint(0, 4)):
            self.after(chance.uniform(0, HORIZON), self._upset)
        for _ in range(0 if self.is_calm else chance.choice((0, 0, 1, 2))):
            self.after(chance.uniform(0, HORIZON / 2), self._hold)
        for _ in range(chance.choice((0, 1, 2))):
            fault = chance.choice(("is_away", "is_slow", "unreadable"))
            begin = chance.uniform(0, HORIZON / 2)
            value: object = ("a damaged file",) if fault == "unreadable" else True
            self.after(begin, partial(setattr, self.store, fault, value))
            self.after(chance.uniform(begin, HORIZON), partial(self._mend_store, fault))

    def _mend_store(self, fault: str) -> None:
        setattr(self.store, fault, () if fault == "unreadable" else False)

    def _send(self) -> None:
        self.chance.choice(self.processes).send(self.chance.choice(list(self.places)))

    def _start(self) -> None:
        self.processes.append(Process(self))

    def _upset(self) -> None:
        """Close, block or end the loop of a pair, add a pair, or end a process. One working pair stays."""
        chance = self.chance
        process = chance.choice(self.processes)
        pair = chance.choice(process.pairs)
        is_last = sum(one.runs for one in process.pairs) == 1
        match chance.choice(("join", "close", "die", "block", "kill", "end")):
            case "join":
                process.join(threaded=chance.random() < 0.3)
            case "close" if pair.is_open and not (is_last and pair.runs):
                pair.close()
            case "die" if pair.home is not None and pair.runs and not is_last:
                pair.die()
            case "block" if pair.home is not None and pair.runs:
                pair.blocked_until = self.time + chance.uniform(0.5, 15)
            case "kill" | "end" as how:
                self.end(process, killed=how == "kill")

    def end(self, process: Process, *, killed: bool) -> None:
        """End a process, if another one goes on."""
        if process in self.processes and len(self.processes) > 1:
            self.processes.remove(process)
            self.ended.append(process)
            process.kill() if killed else process.end()

    def _hold(self) -> None:
        path = self.chance.choice(list(self.places))
        self.chance.choice(self.processes).hold(path)
        self.held[path] += 1
        # An operator releases what an operator holds, perhaps in another process.
        self.after(self.chance.uniform(0, HORIZON / 2), lambda: self._release(path))

    def _release(self, path: str) -> None:
        self.chance.choice(self.processes).release(path)

    # --- time and entities -------------------------------------------------------------------------------------------

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heappush(self._coming, (self.time + seconds, next(self._numbers), do))

    def attempt(self, path: str, answer: Callable[[FailureKind | None], None], *, with_message: bool) -> None:
        state = self.places[path]
        if state == "works" or (state == "full" and not with_message):
            self.after(self.chance.uniform(0.01, 0.2), lambda: answer(None))
        elif state == "silent":
            self.after(TRY_TIMEOUT, lambda: answer(FailureKind.TIMEOUT))
        else:
            kind = FailureKind.QUOTA_EXCEEDED if state == "full" else FailureKind.INTERNAL
            self.after(self.chance.uniform(0.01, TRY_TIMEOUT), lambda: answer(kind))

    def _live(self, until: float) -> None:
        coming = self._coming
        while coming and coming[0][0] <= until:
            self.time, _, do = heappop(coming)
            do()
            self.store.note_trouble(self.time)
            for process in self.processes:
                for watcher in process.watchers.values():
                    watcher.check()
        self.time = until

    def settle(self) -> None:
        self._live(HORIZON)
        for path in self.places:
            self.places[path] = "works"
        for fault in ("is_away", "is_slow", "unreadable"):
            self._mend_store(fault)
        for process in self.processes:
            for pair in process.pairs:
                pair.blocked_until = 0.0
        self._live(HORIZON + 40)
        for process in self.processes:
            self._check_calm(process)
        # All that is held is released, by one process for all of them.
        for path in self.places:
            self.processes[0].release(path)
        for process in self.processes:
            if process.shared.sharing is None:
                for path in self.places:
                    process.release(path)
        longest = max(cell.entity.ping_interval for one in self.processes for cell in one.cells.values())
        self._live(self.time + 4 * longest + 6 * TAKE_OVER + LONGEST_WRITE + 60)
        for process in self.processes:
            self._check_settled(process)
        self._check_store()
        for process in [*self.processes]:
            process.close()

    def _check_settled(self, process: Process) -> None:
        for path, cell in process.cells.items():
            if cell.entity.mode not in (EntityMode.HEALTHY, EntityMode.ON_TRIAL, EntityMode.FAILING):
                raise ViolationError(f"{path} is {cell.entity.mode} at the end")

    def _check_calm(self, process: Process) -> None:
        """Check that a process pays one look, and nothing while it is healthy (S16)."""
        if self.is_calm and (process.writes or process.looks > 1):
            raise ViolationError(f"{process.looks} looks and {process.writes} writes of a healthy process")

    def _check_store(self) -> None:
        """Any restore clears the state: what is left was written by a process that ended, and is too old to believe."""
        state = self.store.state
        if state.holds:
            raise ViolationError("a hold was never released")
        wall = EPOCH + self.time
        for record in state.failovers.values():
            if is_current(record, wall - 5.0):
                raise ViolationError("a failover is in the state, though nobody is failed over")
