"""What the pairs of the same two namespaces in one process share (P3): entities, backlog queues, pings and ledger.

A program may make several clients of one namespace, and pair each of them: with or without asyncio, in one event loop
or in several. All these pairs use one `SharedPair`, so that one failover, one ping and one ledger serve all of them.
Each pair keeps its own clients, credentials, links and senders.

    made      The pair exists, and its namespaces are not paired yet. It uses the shared state, and runs nothing.
    member    The namespaces are paired.
    acting    The member whose driver runs the timers and the pings.
    deputy    If the acting member has an event loop: a member in each other loop, whose timers run some seconds later.
              If a timer of a deputy fires first, the other loops are closed or blocked, and this deputy acts from then
              on.

The acting member that closes or faults hands over to another member. The last pair closes what is shared.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakSet, finalize

from twinbus.backlog import Endpoint
from twinbus.pairing.events import Notice
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.pair_sides import PairForkedError, PairingRefusedError
from twinbus.pairing.recording import open_ledger
from twinbus.pairing.shared_state import DriverTimer, PairDriver, SharedEntity, SharedRotation
from twinbus.pairing.state_sharing import LOOK_SECONDS, StateAccess, StateLocation, StateSharing

if TYPE_CHECKING:
    from twinbus.pairing.pair_state import PairState

DEPUTY_SECONDS: Final = 1.0
"""Seconds after which the first deputy does what the acting member should have done. The next one waits 1 s more."""

_registry: Final[dict[tuple[Endpoint, Endpoint], SharedPair]] = {}
_all_shared: Final[WeakSet[SharedPair]] = WeakSet()
_registering = threading.Lock()


class MemberDriver(PairDriver, Protocol):
    """The driver of a pair. Other threads and event loops may call all its methods."""

    @property
    def home(self) -> object:
        """The event loop in which the driver's timers run. None: threads run them."""

    @property
    def is_alive(self) -> bool:
        """False after the event loop was closed: no timer fires any more, and no ping is sent."""


class SharedTimer:
    """A timer of the shared part. The acting member runs it, and a deputy if that does not happen."""

    def __init__(self, shared: SharedPair, due: Callable[[], object]) -> None:
        self._shared = shared
        self._due = due
        self._lock = threading.Lock()
        self._at: float | None = None
        self._drivers: tuple[MemberDriver, ...] = ()
        self._timers: tuple[DriverTimer, ...] = ()

    def arm(self, at: float) -> None:
        with self._lock:
            self._at = at
            self._place()

    def disarm(self) -> None:
        with self._lock:
            self._at = None
            for timer in self._timers:
                timer.disarm()

    def rebind(self) -> None:
        """Use the timers of the members that act now."""
        with self._lock:
            self._place()

    def forked(self) -> None:
        self._lock = threading.Lock()

    def _place(self) -> None:
        drivers = self._shared.drivers
        if drivers != self._drivers:
            for timer in self._timers:
                timer.disarm()
            self._drivers = drivers
            self._timers = tuple([driver.timer(partial(self._fired, driver)) for driver in drivers])
        if self._at is not None:
            for place, timer in enumerate(self._timers):
                timer.arm(self._at + place * DEPUTY_SECONDS)

    def _fired(self, driver: MemberDriver) -> None:
        with self._lock:
            if self._at is None or driver not in self._drivers:
                return
            is_due = self._shared.now() >= self._at
            if is_due:
                self._at = None
                for timer in self._timers:
                    timer.disarm()
        if is_due:
            self._shared.act(driver)
        self._due()


class SharedPair:
    """The shared part of pairs. It is the driver of the shared entities and of the rotation."""

    def __init__(
        self,
        endpoints: tuple[Endpoint, Endpoint],
        options: SendAvailabilityOptions,
        name: str,
        queues: tuple[str, ...],
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`now` and `wall` are the monotonic clock and the wall clock. Both can be replaced, for simulations."""
        self.endpoints = endpoints
        self.options = options
        self.now = now
        self.ledger = open_ledger(options)
        """The ledger of the pairs and of their syphons, or None."""
        self.entities: dict[str, SharedEntity] = {}
        self.hold_all = False
        self.making = threading.Lock()
        self.members: list[PairState] = []
        self.made: WeakSet[PairState] = WeakSet()
        self.drivers: tuple[MemberDriver, ...] = ()
        """The drivers of the acting member and of its deputies. Empty without members."""
        self.is_closed = False
        self._process: int | None = None
        self._timers: list[SharedTimer] = []
        self.rotation = SharedRotation(queues, options.probation.total_seconds(), self, sought=queues, now=now)
        self.sharing: StateSharing | None = None
        """What the pairs share with other processes (S16), or None without the option `state`."""
        if options.state is not None:
            self.sharing = StateSharing(
                StateLocation.of(options.state, name),
                self,
                may_create=options.provision == "create",
                watch_interval=options.ping_interval.total_seconds(),
                longest_ping=self._longest_ping,
                now=now,
                wall=wall,
            )

    @property
    def _longest_ping(self) -> float:
        """Seconds after which every ping has a result.

        After a ping that succeeded, the acting member looks for a hold (S15). If the acting member cannot end the ping,
        because its event loop is closed, a deputy does (P3).
        """
        return self.options.try_timeout.total_seconds() + LOOK_SECONDS + DEPUTY_SECONDS

    @property
    def is_used(self) -> bool:
        """True after the first pair became a member."""
        return self._process is not None

    # --- members -----------------------------------------------------------------------------------------------------

    def has_others(self, member: PairState) -> bool:
        return any(one is not member for one in (*self.members, *self.made))

    def join(self, member: PairState) -> None:
        """Make a pair a member. The caller holds the lock of the registry, and calls `changed` after it."""
        if self._process not in (None, os.getpid()):
            # The parent of this process used the shared part: its timers and its ledger are the parent's (S13).
            raise PairForkedError
        self._process = os.getpid()
        self.made.discard(member)
        self.members.append(member)
        self._choose()
        if self.sharing is not None:
            # The last pair may be closing just now, and need not wait any more.
            self.sharing.go_on()

    def leave(self, member: PairState, *, closes: bool) -> bool:
        """Remove a pair. Returns whether others are left. If it acted, another member acts now.

        `closes` says whether the pair closed or faulted; otherwise it is a made pair again, whose pairing failed.
        """
        with _registering:
            self.made.discard(member)
            if member in self.members:
                self.members.remove(member)
            others = bool(self.members or self.made)
            if closes:
                self.is_closed = not others
                if self.sharing is not None:
                    end = self.sharing.stop if self.is_closed else self.sharing.go_on
                    end()
            else:
                self.made.add(member)
            acted = self._choose()
        if acted:
            self.changed()
        return others

    def dropped(self) -> None:
        """Note that a pair was dropped without being closed. If it was the last one, the ledger is closed.

        The garbage collector calls this, in any thread and with any lock held. So another thread does the work.
        """
        # The set may count the pair until the garbage collector is done, but does not list it.
        if self.is_used and not self.is_closed and not self.members and not list(self.made):
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                threading.Thread(target=self._close_if_unused, name="twinbus-dropped", daemon=True).start()

    def _close_if_unused(self) -> None:
        with _registering:
            if self.members or list(self.made) or self.is_closed or self._process != os.getpid():
                return
            self.is_closed = True
            if self.sharing is not None:
                self.sharing.stop()
        if self.ledger is not None and self.ledger is not self.options.ledger:
            self.ledger.close()

    def act(self, driver: MemberDriver) -> None:
        """Make the deputy the acting member, because its timer fired first. Does nothing for the acting member."""
        if self.drivers[:1] == (driver,):
            return
        with _registering:
            acted = any(one.driver is driver for one in self.members) and self._choose(driver)
        if acted:
            self.changed()

    def changed(self) -> None:
        """Move the timers to the members that act now."""
        for timer in list(self._timers):
            timer.rebind()
        for member in list(self.members):
            if self.drivers[:1] == (member.driver,):
                member.show_in_metrics()

    def _choose(self, acting: MemberDriver | None = None) -> bool:
        """Choose who acts: `acting`, or the present one, or another. Returns whether that changed anything."""
        before, found = self.drivers, [member.driver for member in self.members]
        alive = [driver for driver in found if driver.is_alive]
        if acting is None and before and before[0] in alive:
            acting = before[0]
        if acting is None and found:
            # Threads end with the process, an event loop earlier.
            acting = next((driver for driver in alive if driver.home is None), (alive or found)[0])
        if acting is None:
            self.drivers = ()
        elif acting.home is None:
            self.drivers = (acting,)
        else:
            # One deputy in each other loop, because several loops may be closed before a timer is due.
            deputies = {driver.home: driver for driver in alive if driver.home is not acting.home}
            self.drivers = (acting, *deputies.values())
        return self.drivers != before

    def _replace_closed_loops(self) -> None:
        """Choose again if the event loop of the acting member or of a deputy was closed.

        A deputy notices the closed loop of the acting member only when a timer is due. No member notices the closed
        loop of a deputy.
        """
        if not all(driver.is_alive for driver in self.drivers):
            with _registering:
                acted = self._choose()
            if acted:
                self.changed()

    def forked(self) -> None:
        """Replace locks in the child of a fork, where a copied lock may be held for ever."""
        self.making = threading.Lock()
        if self.sharing is not None:
            self.sharing.forked()
        for timer in self._timers:
            timer.forked()

    # --- what sharing with other processes needs (S16) ---------------------------------------------------------------

    def state_access(self) -> StateAccess | None:
        """Return the access of the acting member to the shared state. None without members."""
        self._replace_closed_loops()
        for member in list(self.members):
            if self.drivers[:1] == (member.driver,):
                return member.state_access
        return None

    def all_entities(self) -> list[SharedEntity]:
        return list(self.entities.values())

    def release_all(self) -> None:
        self.hold_all = False

    # --- what the shared state needs of a driver ---------------------------------------------------------------------

    def timer(self, due: Callable[[], object]) -> SharedTimer:
        timer = SharedTimer(self, due)
        self._timers.append(timer)
        return timer

    def ping(self, entity: SharedEntity, episode: int) -> None:
        self._replace_closed_loops()
        for driver in self.drivers[:1]:
            driver.ping(entity, episode)
            if driver.home is not None:
                # The event loop may be closed before the ping has ended; a deputy may join until then.
                entity.expect_ping(self.now() + self._longest_ping)

    def stop_ping(self, entity: SharedEntity) -> None:
        for member in list(self.members):
            member.driver.stop_ping(entity)

    def emit(self, notice: Notice) -> None:
        drivers = self.drivers or [one.driver for one in list(self.made)]
        for driver in drivers[:1]:
            driver.emit(notice)


def shared_pair(
    member: PairState,
    primary: Endpoint,
    secondary: Endpoint,
    options: SendAvailabilityOptions,
    name: str,
    queues: tuple[str, ...],
) -> SharedPair:
    """Return the part that a new pair shares with other pairs of the same namespaces and options, or a new one."""
    with _registering:
        for found in list(_all_shared):
            if found.endpoints == (primary, secondary) and found.options == options and not found.is_closed:
                break
        else:
            found = SharedPair((primary, secondary), options, name, queues)
            _all_shared.add(found)
        found.made.add(member)
    finalize(member, found.dropped).atexit = False
    return found


def register(shared: SharedPair, member: PairState) -> None:
    """Make a pair a member of `shared`. Raises PairingRefusedError if P3 forbids it."""
    primary, secondary = shared.endpoints
    if primary == secondary:
        raise PairingRefusedError(f"{primary} cannot be its own secondary")
    with _registering:
        if _registry.get((primary, secondary)) is not shared:
            _refuse(primary, secondary)
        shared.join(member)
        _registry[primary, secondary] = shared
    shared.changed()


def _refuse(primary: Endpoint, secondary: Endpoint) -> None:
    if (primary, secondary) in _registry:
        raise PairingRefusedError(
            f"{primary} is paired with {secondary} already, with other options: use that pair, use equal options, or "
            "close it"
        )
    if any(primary == paired for paired, _ in _registry):
        raise PairingRefusedError(f"{primary} is the primary of a pair already: use that pair, or close it")
    if any(secondary == paired for paired, _ in _registry):
        raise PairingRefusedError(f"{secondary} is itself the primary of a pair: it cannot be a secondary")
    if any(primary == backing for _, backing in _registry):
        raise PairingRefusedError(f"{primary} is the secondary of a pair: it cannot be paired itself")


def release(shared: SharedPair) -> None:
    """Remove the shared part from the registry if it has no member left."""
    with _registering:
        if not shared.members and _registry.get(shared.endpoints) is shared:
            del _registry[shared.endpoints]


def forget_all() -> None:
    """Empty the registry in the child of a fork: the pairs belong to the parent."""
    global _registering  # noqa: PLW0603 - the thread that holds the copied lock does not exist here
    _registering = threading.Lock()
    _registry.clear()
    for shared in list(_all_shared):
        if shared.is_used:
            _all_shared.discard(shared)
