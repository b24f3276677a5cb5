"""The part of a pair that is the same for both drivers: two sides, entities, backlog queues, events, and a syphon.

All senders of a pair share its `PairState`. A `PairState` opens no connection and starts no thread or task: the driver
does both.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol
from uuid import uuid4
from weakref import WeakSet

from twinbus.backlog import CREDENTIAL_REFUSED, FailureKind, backlog_queue_paths, failure_kind, primary_name
from twinbus.errors import OptionError
from twinbus.ledger import PAIRED, Fact, Ledger
from twinbus.pairing import call_errors
from twinbus.pairing.decide import rotation
from twinbus.pairing.decide.backlog_watch import MessageDiverted, PeekPage
from twinbus.pairing.decide.failover import EntityMode
from twinbus.pairing.decide.failover_events import (
    Cause,
    FailoverForced,
    PairClosed,
    PingSucceeded,
    PrimarySendFailed,
    PrimarySendSucceeded,
    Restored,
    RestoreForced,
)
from twinbus.pairing.decide.known_state import refuse_impossible_path
from twinbus.pairing.decide.send_flow import FlowErrors, SendContext
from twinbus.pairing.errors import QueueCause
from twinbus.pairing.events import (
    BacklogQueueGone,
    BacklogQueueUnsafe,
    EventPublisher,
    Notice,
    SecondaryUnreachable,
    SideClosed,
    SideFaulted,
)
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.pair_sides import (
    OTHER_SIDE_SECONDS,
    CredentialRefusals,
    CredentialRefusedError,
    OtherSideLostError,
    PairingRefusedError,
    Side,
    SideState,
)
from twinbus.pairing.provisioning import BACKGROUND_PAUSES, Provisioned, ProvisioningError, background_pause
from twinbus.pairing.recording import OperationRecorder
from twinbus.pairing.shared_pair import MemberDriver, forget_all, register, release, shared_pair
from twinbus.pairing.shared_state import SharedBacklogWatch, SharedEntity
from twinbus.pairing.state_sharing import IN_SECONDARY, ReadDone, StateAccess, StateSharing
from twinbus.sdk import (
    RetrySettings,
    client_endpoint,
    client_entity,
    hides_pings,
    is_closed,
    retry_settings,
    unopened_sender,
)

_log = logging.getLogger("twinbus.pairing")


@dataclass(frozen=True, slots=True)
class EntityState:
    """One entity, as `pair.entities()` returns it.

    `diverted` is the number of messages diverted in the present failover, or in the last one.

    Example: `for one in pair.entities(): print(one.path, one.state, one.diverted)`.
    """

    path: str
    state: EntityMode
    since: datetime
    cause: Cause | None
    diverted: int


class PairSyphon(Protocol):
    """The syphon of a pair, if the pair has one. The syphon starts and stops with the pair.

    No method may block: the pair calls them in its event loop, or in a worker thread.

    Example: `pair.syphon.state` is `"running"` while messages move.
    """

    @property
    def state(self) -> str:
        """`running` while the syphon runs; any other text means that it does not.

        Example: `pair.syphon.state`.
        """

    def start(self) -> None:
        """Start the pumps.

        Example: the pair calls `syphon.start()` after pairing.
        """

    def stop(self) -> None:
        """Signal the pumps to stop. Each pump ends at its next safe point. The pair logs an error of this method.

        Example: the pair calls `syphon.stop()` when it closes.
        """

    def restored(self, entity: str) -> None:
        """Report that an entity was restored: the syphon then sends to this entity without a pause.

        Example: the pair calls `syphon.restored("orders")`.
        """

    def queues_found(self) -> None:
        """Report that backlog queues were found or made: the syphon then searches for them at once.

        Example: the pair calls `syphon.queues_found()` when the secondary is back.
        """

    def ended(self) -> Awaitable[None] | None:
        """Wait until the pumps have stopped, for a limited time. Called after `stop`. Asyncio pairs await it.

        Example: the pair calls `syphon.ended()` after `stop`.
        """


class SenderSetup(NamedTuple):
    """What a sender of either driver gets from its pair."""

    context: SendContext
    entity: SharedEntity
    primary: Side
    recorder: OperationRecorder
    retries: RetrySettings


class PairState:
    """The state of one pair.

    `on_side_left` is called once for each side that leaves the state OPEN. `peek` starts the peeks of a backlog check.
    `recreate` starts to create a deleted backlog queue again, and reports to `queue_recreated`.
    `react` calls the given function in a thread that may use the driver's timers and tasks. The function handles a
    change of a side. `tell` does the same, and does nothing if the driver's event loop was closed.
    """

    def __init__(
        self,
        clients: tuple[Any, Any],
        options: SendAvailabilityOptions,
        driver: MemberDriver,
        *,
        threaded: bool,
        on_side_left: Callable[[Side], None],
        peek: Callable[[SharedBacklogWatch, tuple[PeekPage, ...]], None],
        recreate: Callable[[str], None],
        react: Callable[[Callable[[], None]], None] = lambda change: change(),
        tell: Callable[[Callable[[], None]], None] = lambda change: change(),
    ) -> None:
        primary, secondary = clients
        if entity := client_entity(secondary):
            raise PairingRefusedError(
                f"the secondary's connection string is for {entity!r} alone: leave its EntityPath out"
            )
        self.options = options
        self._react = react
        self._tell = tell
        self.primary = Side("primary", client_endpoint(primary), self._side_left)
        self.secondary = Side("secondary", client_endpoint(secondary), self._side_left)
        self.name = options.primary_name or primary_name(self.primary.endpoint)
        self.queues = backlog_queue_paths(self.name, options.backlog_queue_count)
        self.driver = driver
        self._shared = shared_pair(
            self, self.primary.endpoint, self.secondary.endpoint, options, self.name, self.queues
        )
        self.sharing = self._shared.sharing
        """What the pair shares with other processes (S16), or None."""
        self.state_access: StateAccess | None = None
        self.ledger = self._shared.ledger
        """The ledger of the pair and of its syphon, or None."""
        self.primary_recorder = OperationRecorder(self.ledger, self.name)
        self.secondary_recorder = OperationRecorder(self.ledger, primary_name(self.secondary.endpoint))
        self.events = EventPublisher(self.name, threaded=threaded, ledger=self.ledger, tell=tell)
        self.syphon: PairSyphon | None = None
        self._retries = retry_settings(primary)
        self._canaries = {self.primary: unopened_sender(primary), self.secondary: unopened_sender(secondary)}
        self._refusals = CredentialRefusals()
        self._on_side_left = on_side_left
        self._recreate = recreate
        self._recreate_after: dict[str, float] = {}
        self._recreate_lock = threading.Lock()
        self._entities = self._shared.entities
        self.rotation = self._shared.rotation
        self._others_go_on: bool | None = None
        self.backlog_watch = SharedBacklogWatch(
            options.backlog_check_interval, options.backlog_unattended_after, driver.timer, peek, self.events.emit
        )
        self._other_side_timer = driver.timer(self._fault_other_side)
        self._registered = False

    def begin(self, state_access: StateAccess | None = None) -> None:
        """Register the pair in this process and in the metrics. Raises PairingRefusedError if P3 forbids it.

        With `state_access`, the first of the pairs that share looks at the shared state, in the background (S16).
        """
        self.state_access = state_access
        register(self._shared, self)
        self._registered = True
        self._others_go_on = None
        if self.sharing is not None:
            self.sharing.begin()
        _pair_states.add(self)
        if self.ledger is not None:
            self.ledger.state(PAIRED, self._cost_facts(), pair=self.name)

    @property
    def _is_acting(self) -> bool:
        return self._shared.drivers[:1] == (self.driver,)

    def read_shared_state(self, done: ReadDone) -> None:
        """Read the shared state, for the pair's syphon. Calls `done` with the result, in any thread."""
        if self.state_access is None:
            done(RuntimeError("the pair shares no state"))
        else:
            self.state_access.read(done)

    def sharing_to_finish(self) -> StateSharing | None:
        """Return what closing this pair must finish. None if there is nothing, or another member goes on with it (P3).

        A member whose event loop was closed goes on with nothing.
        """
        able = [member for member in list(self._shared.members) if member is self or member.driver.is_alive]
        return self.sharing if able == [self] and not self.closed else None

    def show_in_metrics(self) -> None:
        """Show this pair in the gauges, for all pairs that share its state."""
        self.events.watch(
            lambda: [shared.entity for shared in list(self._entities.values())],
            lambda: self.rotation.rotation,
            lambda: self.backlog_watch.watch.queues,
        )

    def _cost_facts(self) -> dict[str, Fact]:
        """Return the options that the cost of a pair depends on (M4): spans in seconds."""
        options = self.options
        shared_in = "none" if options.state is None else "folder"
        return {
            "backlog_queues": options.backlog_queue_count,
            "failover_interval": options.failover_interval.total_seconds(),
            "ping_interval": options.ping_interval.total_seconds(),
            "ping_jitter": options.ping_jitter,
            "ping": options.ping,
            "backlog_check_interval": options.backlog_check_interval.total_seconds(),
            "tries": self._retries.total + 1,
            "state": IN_SECONDARY if options.state == IN_SECONDARY else shared_in,
        }

    def withdraw(self) -> None:
        """Undo `begin`: the pairing failed, or the pair is closed."""
        if self._registered:
            self._registered = False
            self.events.unwatch()
            self._leave_shared()
            release(self._shared)
            if self.primary.state is SideState.OPEN:
                # The pairing failed: this pair still uses what is shared, and may be paired again.
                self._others_go_on = None

    def _leave_shared(self) -> bool:
        """Stop sharing, once. Returns whether other pairs go on with what was shared (P3)."""
        if self._others_go_on is None:
            self._others_go_on = self._shared.leave(self, closes=self.primary.state is not SideState.OPEN)
        return self._others_go_on

    def start_syphon(self, make: SyphonFactory | None, clients: tuple[Any, Any], admin: Any) -> None:
        """Start a syphon if `enable_syphon` is set. The caller gives `make`, because this room imports no syphons."""
        if self.options.enable_syphon:
            if make is None:
                raise OptionError("enable_syphon", True, "false where no syphon is given")
            self.syphon = make(*clients, admin, self)
            self.syphon.start()

    # --- entities and queues ---------------------------------------------------------------------------------------

    def sender_setup(self, path: str) -> SenderSetup:
        """Return what a new sender of the entity at `path` needs. Raises an error if the primary's side is not open."""
        self.primary.refuse_unless_open()
        entity = self.entity(path)
        endpoint = self.primary.endpoint
        context = SendContext(
            path,
            entity,
            self,
            self.options.try_timeout.total_seconds(),
            now=time.monotonic,
            chance=random.random,
            new_number=lambda: uuid4().int >> 66,
            errors=FlowErrors(call_errors.timed_out, partial(call_errors.entity_missing, endpoint=endpoint)),
        )
        return SenderSetup(context, entity, self.primary, self.primary_recorder, self._retries)

    def entity(self, path: str) -> SharedEntity:
        """Return the state of an entity, which all senders of this entity share."""
        key = _key(path)
        with self._shared.making:
            entities = self._entities
            found = entities.get(key)
            if found is not None:
                return found
            on_step = None if self.sharing is None else self.sharing.advanced
            found = entities[key] = SharedEntity(path, self.options.policy, self._shared, on_step=on_step)
        # The lock is released first: a callback for an event may make another sender.
        if self.sharing is not None and (known := self.sharing.event_for(path)) is not None:
            found.advance(known)
        elif self._is_held_with_all(path):
            found.advance(FailoverForced(hold=True))
        if self.primary.state is not SideState.OPEN:
            # This pair closes just now. Other pairs may use the entity (P3).
            found = self._closed_copy(found)
            found.advance(PairClosed())
        return found

    def provisioned(self, result: Provisioned) -> None:
        """Put the queues that provisioning found into the rotation, and take out those that failed (P7, P8)."""
        for queue in result.found:
            self.rotation.advance(rotation.QueueFound(queue))
        if self._is_acting:
            # A pair that does not act uses the queues that another pair has found (P3).
            self.rotation.missing(result.failed)
        for queue, losing in result.losing:
            self.events.emit_of_pairing(BacklogQueueUnsafe(queue, time.monotonic(), *losing))
        if result.found and self.syphon is not None:
            try:
                self.syphon.queues_found()
            except Exception:
                # A broken syphon must not end the search for the other queues.
                _log.exception("the syphon of %s was not told of its backlog queues", self.name)

    def first_try_ended(self, result: Provisioned) -> None:
        """Report the first try of provisioning. Without a queue, the pair works without a backlog (P1)."""
        self.provisioned(result)
        if result.failed and not result.found:
            secondary = str(self.secondary.endpoint)
            kind = result.failed[0].kind
            self.events.emit_of_pairing(SecondaryUnreachable(secondary, time.monotonic(), kind, len(result.failed)))

    def first_try_failed_late(self, error: Exception) -> tuple[QueueCause, ...]:
        """Report an error that came too late for pairing to raise it (P1). Returns the queues that were not found."""
        _log.error("%s has no backlog: %s", self.name, error)
        causes = error.causes if isinstance(error, ProvisioningError) else ()
        failed = causes or tuple(QueueCause(queue, failure_kind(error), str(error)) for queue in self.queues)
        self.first_try_ended(Provisioned(failed=failed))
        return failed

    def entities(self) -> tuple[EntityState, ...]:
        now, wall = time.monotonic(), datetime.now(UTC)
        found = [shared.entity for shared in list(self._entities.values())]
        return tuple(
            EntityState(one.path, one.mode, wall - timedelta(seconds=now - one.since), one.cause, one.diverted)
            for one in found
        )

    def is_failed_over(self, path: str) -> bool:
        """Return whether the entity is failed over in this pair, so that the pair diverts its messages."""
        shared = self._entities.get(_key(path))
        return shared is not None and shared.entity.engaged is not None

    def is_held(self, path: str) -> bool:
        """Return whether an operator holds the failover of the entity, so that nothing may be delivered to it (S15)."""
        shared = self._entities.get(_key(path))
        if shared is not None:
            return shared.entity.mode is EntityMode.HELD
        if self._is_held_with_all(path):
            return True
        return self.sharing is not None and self.sharing.known.hold_of(path) is not None

    def _is_held_with_all(self, path: str) -> bool:
        """Return whether a hold of all entities covers an entity that has no sender yet.

        Another process may have released this one entity from the hold.
        """
        return self._shared.hold_all and (self.sharing is None or _key(path) not in self.sharing.known.released)

    def force_failover(self, entity: str | None, *, hold: bool) -> None:
        """Fail an entity over; None: all entities. With `hold`, None holds entities that are used later, too (S15)."""
        self._refuse(entity)
        if entity is None:
            self._shared.hold_all = self._shared.hold_all or hold
        if hold and self.sharing is not None:
            self.sharing.hold(entity)
        for shared in self._chosen(entity):
            shared.advance(FailoverForced(hold))

    def force_restore(self, entity: str | None) -> None:
        """Return an entity to the primary; None: all entities."""
        self._refuse(entity)
        if entity is None:
            self._shared.hold_all = False
        if self.sharing is not None:
            self.sharing.release(entity)
        for shared in self._chosen(entity):
            shared.advance(RestoreForced())

    def _refuse(self, entity: str | None) -> None:
        """Raise an error if the primary's side is not open, or if `entity` can be no path."""
        self.primary.refuse_unless_open()
        if entity is not None:
            refuse_impossible_path(entity)

    def ping_succeeded(self, shared: SharedEntity, episode: int) -> None:
        """Report a ping that succeeded. If an operator of another process holds the entity, hold it instead (S15)."""
        if self.sharing is None:
            shared.advance(PingSucceeded(episode))
        else:
            path = shared.entity.path
            self.sharing.check_hold(path, lambda hold: shared.advance(hold or PingSucceeded(episode)))

    def _chosen(self, entity: str | None) -> list[SharedEntity]:
        return list(self._entities.values()) if entity is None else [self.entity(entity)]

    def pings_with_message(self, sender: Any) -> bool:
        """Return True if a ping on this open link sends a message, False if opening the link is the ping (G3)."""
        return self.options.ping == "message" or (self.options.ping == "auto" and hides_pings(sender))

    def publish(self, notice: Notice) -> None:
        """Publish a notice about what pairs share, to the callbacks of all of them (P3). For any thread."""
        self.events.record(notice)
        for member in dict.fromkeys((self, *self._shared.members)):
            member._tell(partial(member._hear, notice))

    def _hear(self, notice: Notice) -> None:
        self.events.hear(notice)
        self._wake_syphon(notice)

    def _wake_syphon(self, notice: Notice) -> None:
        """Let the pair's syphon send at once to an entity that was restored (Y12)."""
        if isinstance(notice, Restored) and self.syphon is not None:
            try:
                self.syphon.restored(notice.entity)
            except Exception:
                # A broken syphon must not keep an entity from returning.
                _log.exception("the syphon of %s was not told that %s is restored", self.name, notice.entity)

    # --- what the pair's syphon reports ------------------------------------------------------------------------------

    def delivery_began(self, path: str) -> int:
        """Return the number of restores of the entity, for `delivery_ended`."""
        shared = self._entities.get(_key(path))
        return 0 if shared is None else shared.entity.restores

    def delivery_ended(self, path: str, restores: int, failure: FailureKind | None) -> None:
        """Report a delivery of the pair's syphon, which passes or fails a trial like a send (S14). For any thread."""
        shared = self._entities.get(_key(path))
        if shared is None or shared.entity.mode is not EntityMode.ON_TRIAL:
            return
        shared.advance(PrimarySendSucceeded(restores) if failure is None else PrimarySendFailed(failure, restores))

    def backlog_queue_works(self, queue: str) -> None:
        """Report that the pair's syphon used a backlog queue, which brings the queue back into the rotation (S6)."""
        rotation_now = self.rotation.rotation
        if len(rotation_now.usable) < len(rotation_now.queues):
            for known in rotation_now.queues:
                if known.lower() == queue.lower() and known not in rotation_now.usable:
                    self.rotation.advance(rotation.QueueFound(known))

    # --- what senders report ---------------------------------------------------------------------------------------

    def notice_closed_clients(self) -> None:
        """Close every side whose client the application has closed (C1)."""
        for side, canary in self._canaries.items():
            if is_closed(canary):
                side.leave(SideState.CLOSED)

    def refuse_unless_open(self) -> None:
        """Raise PairClosedError or PairFaultedError if a side is not open, or if its client was closed."""
        self.notice_closed_clients()
        for side in (self.primary, self.secondary):
            if side.state is not SideState.OPEN:
                raise side.refusal()

    def backlog_answered(self, queue: str, error: Exception | None = None) -> None:
        """Report that a backlog queue accepted a message, or failed with `error`.

        Faults the secondary if it refuses the credential for good (C1).
        """
        if error is None and self.backlog_watch.watch.needs_event_for(queue):
            self.backlog_watch.advance(MessageDiverted(queue))
        if error is not None and failure_kind(error) in CREDENTIAL_REFUSED:
            if self._refusals.refused(queue, self.rotation.rotation.found, time.monotonic()):
                self.secondary.leave(SideState.FAULTED, CredentialRefusedError(error))
        elif self._refusals.spans:
            self._refusals.forget(queue)
        if error is not None and failure_kind(error) is FailureKind.ENTITY_NOT_FOUND:
            self._queue_deleted(queue)

    def _queue_deleted(self, queue: str) -> None:
        """Let the driver create a deleted backlog queue again, or report the queue (P6)."""
        now = time.monotonic()
        with self._recreate_lock:
            if self.secondary.state is not SideState.OPEN or now < self._recreate_after.get(queue, now):
                return
            # Until its result is known, no second try begins.
            self._recreate_after[queue] = math.inf
        if self.options.provision == "assume":
            self.queue_recreated(queue, Provisioned(), 'provision="assume": this pair creates no queues')
        else:
            self._recreate(queue)

    def queue_recreated(self, queue: str, result: Provisioned, reason: str = "") -> None:
        """Report the result of creating a deleted backlog queue again. `reason` says why it was not tried."""
        self.provisioned(Provisioned(result.found))
        if not result.found:
            causes = ", ".join(f"{one.kind}: {one.detail}" if one.detail else one.kind for one in result.failed)
            self.events.emit(BacklogQueueGone(queue, time.monotonic(), causes or reason))
        with self._recreate_lock:
            pause = 0.0 if result.found else background_pause(len(BACKGROUND_PAUSES), result.failed)
            self._recreate_after[queue] = time.monotonic() + pause

    # --- closing ---------------------------------------------------------------------------------------------------

    @property
    def own_ledger(self) -> Ledger | None:
        """The ledger that the pair must close after the last event.

        None if the application gave the ledger, or another pair still uses it (P3).
        """
        return None if self._others_go_on or self.ledger is self.options.ledger else self.ledger

    @property
    def closed(self) -> bool:
        return self.primary.state is not SideState.OPEN and self.secondary.state is not SideState.OPEN

    @property
    def closed_without_fault(self) -> bool:
        return self.closed and self.primary.cause is None and self.secondary.cause is None

    def forked(self) -> None:
        """Fault the pair in the child of a fork."""
        self.primary.forked()
        self.secondary.forked()
        self._recreate_lock = threading.Lock()
        self.events.forked()
        self._shared.forked()
        self.backlog_watch.forked()
        for shared in self._entities.values():
            shared.forked()

    def _side_left(self, side: Side) -> None:
        self._react(partial(self._side_changed, side))

    def _side_changed(self, side: Side) -> None:
        at = time.monotonic()
        faulted = side.state is SideState.FAULTED
        self.events.emit(SideFaulted(side.name, at, str(side.cause)) if faulted else SideClosed(side.name, at))
        self.backlog_watch.close()
        leaves = side is self.primary or self.closed
        others_go_on = self._leave_shared() if leaves else self._shared.has_others(self)
        if side is self.primary:
            if others_go_on:
                self._entities = {key: self._closed_copy(one) for key, one in list(self._entities.items())}
            for shared in list(self._entities.values()):
                shared.advance(PairClosed())
        if side is self.primary or others_go_on:
            self.rotation.wake_waiting_calls()
        else:
            self.rotation.close()
        if self.closed:
            self._other_side_timer.disarm()
            self.withdraw()
        self._stop_syphon(at)
        self._on_side_left(side)

    def _closed_copy(self, shared: SharedEntity) -> SharedEntity:
        """Return a copy of an entity for this pair alone. The caller closes the copy; other pairs use `shared` (P3)."""
        return SharedEntity(shared.entity.path, self.options.policy, self.driver)

    def own_entity(self, shared: SharedEntity) -> SharedEntity:
        """Return the entity that a sender of this pair must use: a copy after the pair stopped sharing."""
        return self._entities.get(_key(shared.entity.path), shared)

    def _stop_syphon(self, at: float) -> None:
        """Stop the syphon if neither side is open. If only one side is open, fault that side after 5 s (C2)."""
        if self.syphon is None:
            return
        try:
            if self.closed:
                self.syphon.stop()
            elif self.syphon.state == "running":
                self._other_side_timer.arm(at + OTHER_SIDE_SECONDS)
        except Exception:
            # A broken syphon must not keep the pair from closing.
            _log.exception("the syphon of %s could not be stopped", self.name)

    def _fault_other_side(self) -> None:
        lost, left = self.primary, self.secondary
        if lost.state is SideState.OPEN:
            lost, left = left, lost
        if lost.state is not SideState.OPEN:
            left.leave(SideState.FAULTED, OtherSideLostError(lost.name, lost.state))


def _key(path: str) -> str:
    return path.strip("/").lower()


SyphonFactory = Callable[[Any, Any, Any, PairState], PairSyphon]
"""Arguments: primary client, secondary client, the secondary's admin client or None, and the pair's state."""


_pair_states: WeakSet[PairState] = WeakSet()


def _after_fork_in_child() -> None:
    forget_all()
    for state in list(_pair_states):
        state.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
