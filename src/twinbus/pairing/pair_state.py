"""What a pair is, whichever driver runs it: two sides, its entities, its rotation, its events, its syphon's slot.

All senders of the pair share it. It opens no connection and starts no thread or task.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from twinbus.backlog import CREDENTIAL_REFUSED, backlog_queue_paths, failure_kind, primary_name
from twinbus.errors import OptionError
from twinbus.ledger import Ledger
from twinbus.pairing.attending import SharedBacklogWatch
from twinbus.pairing.calls import SendContext
from twinbus.pairing.decide import rotation
from twinbus.pairing.decide.backlog_watch import Peek
from twinbus.pairing.decide.failover import Cause, EntityMode, FailoverForced, PairClosed, RestoreForced
from twinbus.pairing.events import EventPublisher, SideClosed, SideFaulted
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.pair_sides import (
    OTHER_SIDE_SECONDS,
    CredentialRefusals,
    CredentialRefusedError,
    OtherSideLostError,
    PairingRefusedError,
    Side,
    SideState,
    forget_all,
    register,
    release,
)
from twinbus.pairing.provisioning import Provisioned
from twinbus.pairing.recording import OperationRecorder, ledger_of
from twinbus.pairing.shared_state import PairDriver, SharedEntity, SharedRotation
from twinbus.sdk import client_endpoint, client_entity, is_closed, unopened_sender

_log = logging.getLogger("twinbus.pairing")


@dataclass(frozen=True, slots=True)
class EntityState:
    """One entity as `pair.entities()` shows it. `diverted` counts the messages of the present or last failover."""

    path: str
    state: EntityMode
    since: datetime
    cause: Cause | None
    diverted: int


class PairSyphon(Protocol):
    """A pair's syphon, if it has one: a component that is started and stopped with the pair (C2).

    Nothing of it may block: it is asked in the event loop, or in the thread that keeps the deadlines.
    """

    @property
    def state(self) -> str:
        """`running`, or anything else."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """Only the signal: pumps end by themselves, each at its next safe point. What it raises is logged."""

    def ended(self) -> Awaitable[None] | None:
        """Wait until they have, though not for long; awaited where the pair is of asyncio. Told to stop before."""


class PairState:
    """The state of one pair.

    `let_go` is called once for each side that leaves OPEN. `look` begins a look at the backlog. `react` runs what
    follows from a side's change, where the driver's timers and tasks may be touched.
    """

    def __init__(
        self,
        clients: tuple[Any, Any],
        options: SendAvailabilityOptions,
        driver: PairDriver,
        *,
        threaded: bool,
        let_go: Callable[[Side], None],
        look: Callable[[SharedBacklogWatch, tuple[Peek, ...]], None],
        react: Callable[[Callable[[], None]], None] = lambda change: change(),
    ) -> None:
        primary, secondary = clients
        self.options = options
        self._react = react
        self.primary = Side("primary", client_endpoint(primary), self._side_left)
        self.secondary = Side("secondary", client_endpoint(secondary), self._side_left)
        self.name = options.primary_name or primary_name(self.primary.endpoint)
        self.queues = backlog_queue_paths(self.name, options.backlog_queue_count)
        self.ledger = ledger_of(options)
        """What its syphon writes to as well."""
        self.on_primary = OperationRecorder(self.ledger, self.name)
        self.on_secondary = OperationRecorder(self.ledger, primary_name(self.secondary.endpoint))
        self.events = EventPublisher(self.name, threaded=threaded, ledger=self.ledger)
        self.syphon: PairSyphon | None = None
        self._canaries = {self.primary: unopened_sender(primary), self.secondary: unopened_sender(secondary)}
        self._refusals = CredentialRefusals()
        self._driver = driver
        self._let_go = let_go
        self._cells: dict[str, SharedEntity] = {}
        self._making = threading.Lock()
        self.rotation = SharedRotation(self.queues, options.probation.total_seconds(), driver)
        self.attendance = SharedBacklogWatch(
            options.backlog_check_interval, options.backlog_unattended_after, driver.timer, look, self.events.emit
        )
        self._other_side = driver.timer(self._other_side_due)
        if bound := client_entity(secondary):
            raise PairingRefusedError(
                f"the secondary's connection string is for {bound!r} alone: leave its EntityPath out"
            )
        self._registered = False

    def begin(self) -> None:
        """Registers the pair in this process and shows it in the metrics. PairingRefusedError where P3 forbids it."""
        register(self.primary.endpoint, self.secondary.endpoint)
        self._registered = True
        self.events.watch(
            lambda: [cell.entity for cell in list(self._cells.values())],
            lambda: self.rotation.rotation,
            lambda: self.attendance.attendance.watches,
        )
        _partnerships.add(self)

    def withdraw(self) -> None:
        """Undoes `begin`: the pairing failed, or the pair is closed."""
        if self._registered:
            self._registered = False
            self.events.unwatch()
            release(self.primary.endpoint, self.secondary.endpoint)

    def start_syphon(self, make: SyphonFactory | None, clients: tuple[Any, Any], admin: Any) -> None:
        """Where `enable_syphon` says so. Syphons are made above this room: the public functions say how."""
        if self.options.enable_syphon:
            if make is None:
                raise OptionError("enable_syphon", True, "false where no syphon is given")
            self.syphon = make(*clients, admin, self)
            self.syphon.start()

    def place(self, path: str) -> SendContext:
        """For one more sender of this entity."""
        return SendContext(path, self.cell(path), self)

    def cell(self, path: str) -> SharedEntity:
        key = _key(path)
        with self._making:
            found = self._cells.get(key)
            if found is None:
                found = self._cells[key] = SharedEntity(path, self.options.policy, self._driver)
                if self.primary.state is not SideState.OPEN:
                    found.advance(PairClosed())
        return found

    def provisioned(self, result: Provisioned) -> None:
        """What came of looking for the backlog queues, at first or later (P7, P8)."""
        for queue in result.found:
            self.rotation.advance(rotation.QueueFound(queue))
        self.rotation.missing(result.failed)

    def entities(self) -> tuple[EntityState, ...]:
        now, wall = time.monotonic(), datetime.now(UTC)
        found = [cell.entity for cell in list(self._cells.values())]
        return tuple(
            EntityState(one.path, one.mode, wall - timedelta(seconds=now - one.since), one.cause, one.diverted)
            for one in found
        )

    def failed_over(self, path: str) -> bool:
        """Whether sends to it are kept from the primary here."""
        cell = self._cells.get(_key(path))
        return cell is not None and cell.entity.mode in (EntityMode.FAILED_OVER, EntityMode.UNUSABLE)

    def force_failover(self, entity: str) -> None:
        self.primary.refuse_unless_open()
        self.cell(entity).advance(FailoverForced())

    def force_restore(self, entity: str) -> None:
        self.primary.refuse_unless_open()
        self.cell(entity).advance(RestoreForced())

    def notice_closed_clients(self) -> None:
        """C1: a client that its owner closed behind the pair's back counts as its side's close."""
        for side, canary in self._canaries.items():
            if is_closed(canary):
                side.leave(SideState.CLOSED)

    def backlog_answered(self, queue: str, error: Exception | None = None) -> None:
        """What a backlog queue said to a message. C1: refused for good, the credential faults the secondary."""
        if error is None:
            self.attendance.used(queue)
        if error is None or failure_kind(error) not in CREDENTIAL_REFUSED:
            self._refusals.forget(queue)
        elif self._refusals.refused(queue, self.rotation.rotation.found, time.monotonic()):
            self.secondary.leave(SideState.FAULTED, CredentialRefusedError(error))

    @property
    def own_ledger(self) -> Ledger | None:
        """To be closed after the last event, which waits for the disk."""
        return None if self.ledger is self.options.ledger else self.ledger

    @property
    def closed(self) -> bool:
        return self.primary.state is not SideState.OPEN and self.secondary.state is not SideState.OPEN

    def forked(self) -> None:
        self.primary.forked()
        self.secondary.forked()
        self._making = threading.Lock()
        self.attendance.forked()
        for cell in self._cells.values():
            cell.forked()

    def _side_left(self, side: Side) -> None:
        self._react(partial(self._side_changed, side))

    def _side_changed(self, side: Side) -> None:
        at = time.monotonic()
        faulted = side.state is SideState.FAULTED
        self.events.emit(SideFaulted(side.name, at, str(side.cause)) if faulted else SideClosed(side.name, at))
        self.attendance.close()
        if side is self.primary:
            for cell in list(self._cells.values()):
                cell.advance(PairClosed())
        else:
            self.rotation.close()
        if self.closed:
            self._other_side.disarm()
            self.withdraw()
        self._tell_syphon(at)
        self._let_go(side)

    def _tell_syphon(self, at: float) -> None:
        """C2. Whatever is wrong with the syphon, the pair goes on closing."""
        if self.syphon is None:
            return
        try:
            if self.closed:
                self.syphon.stop()
            elif self.syphon.state == "running":
                self._other_side.arm(at + OTHER_SIDE_SECONDS)
        except Exception:
            _log.exception("the syphon of %s could not be stopped", self.name)

    def _other_side_due(self) -> None:
        lost, left = self.primary, self.secondary
        if lost.state is SideState.OPEN:
            lost, left = left, lost
        if lost.state is not SideState.OPEN:
            left.leave(SideState.FAULTED, OtherSideLostError(lost.name, lost.state))


def _key(path: str) -> str:
    return path.strip("/").lower()


# Primary and secondary client, the secondary's admin client where the caller gave one, and the pair.
SyphonFactory = Callable[[Any, Any, Any, PairState], PairSyphon]

_partnerships: WeakSet[PairState] = WeakSet()


def _after_fork_in_child() -> None:
    forget_all()
    for partnership in list(_partnerships):
        partnership.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
