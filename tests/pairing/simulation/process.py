"""A process that holds a pair: its shared state, its sides and its senders, driven by the clock of a world."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple, cast
from uuid import uuid4

from tests.pairing.simulation.call_messages import CallMessages
from tests.pairing.simulation.call_oracle import CallKind, CallOracle, Sides
from tests.pairing.simulation.clause_model import TRY_TIMEOUT, BacklogModel, EntityModel, Rules, ViolationError
from tests.pairing.simulation.fake_entities import At, DeliveryCounts, Failure, FakeEntity
from twinbus.backlog import Endpoint
from twinbus.pairing import call_errors
from twinbus.pairing.decide import failover, failover_events
from twinbus.pairing.decide.send_flow import FlowErrors, SendContext
from twinbus.pairing.events import Notice
from twinbus.pairing.pair_sides import Side, SideState
from twinbus.pairing.shared_state import SharedEntity, SharedRotation

from .sending import QueueAnswered, SimulatedCall, Turn

SENDERS = 2
ENDPOINTS = {name: Endpoint.of(name, 5671) for name in ("primary", "secondary")}


class Sender(NamedTuple):
    """A simulated sender. `turn` is for a sync sender, whose calls on the primary run one after the other."""

    context: SendContext
    turn: Turn | None


class Timer:
    """A timer. In some worlds it fires late, and may fire after it was cancelled, as in a driver with threads."""

    def __init__(self, process: SimulatedProcess, due: Callable[[], object]) -> None:
        self._process = process
        self._due = due
        self.token: object = None
        self.before: Callable[[], object] = lambda: None

    def arm(self, at: float) -> None:
        process = self._process
        token = self.token = object()
        lateness = process.rules.lateness
        stale = lateness > 0 and process.chance.random() < 0.3
        # The delay counts from the requested time: a timer that is armed again when it is overdue has no second delay.
        wait = at + process.chance.random() * lateness - process.now()
        process.at(max(wait, 0.0), lambda: self._fire(token, stale=stale))

    def disarm(self) -> None:
        self.token = None

    def _fire(self, token: object, *, stale: bool) -> None:
        if self.token is token:
            self.token = None
        elif not stale:
            return
        if self._process.alive:
            self.before()
            self._due()


class SimulatedProcess:
    """A process with a pair. Implements `send_flow.FlowPair` and `shared_state.PairDriver` for the product."""

    def __init__(
        self,
        rules: Rules,
        chance: Random,
        now: Callable[[], float],
        at: At,
        stock: DeliveryCounts,
        sides: tuple[dict[str, FakeEntity], dict[str, FakeEntity]],
    ) -> None:
        self.rules, self.chance, self.now, self.at, self.stock = rules, chance, now, at, stock
        self.events = self
        self.primary_places, self.backlog = sides
        self.primary, self.secondary = (Side(name, ENDPOINTS[name], self._side_changed) for name in ENDPOINTS)
        self.shut = {"primary": False, "secondary": False}
        self.alive = True
        self.calls: set[SimulatedCall] = set()
        self.links = {queue: Turn() for queue in self.backlog}
        self.opened: set[str] = set()
        self.heard = QueueAnswered("", None, None)
        self.answers = self.diversions = self.failed_late = 0
        self.notices: list[Any] = []
        self._watch()

    def _watch(self) -> None:
        """Make the entities and senders, and the models that they are compared with."""
        rules, now = self.rules, self.now
        policy = failover.FailoverPolicy(
            failover_interval=rules.failover_interval,
            ping_interval=rules.ping_interval,
            ping_jitter=rules.ping_jitter,
            counting=rules.counting,
            divert_while_unusable=not rules.raise_while_unusable,
        )
        chance = self.chance.random
        self.beliefs = {path: EntityModel(rules) for path in self.primary_places}
        self.shelf = BacklogModel(rules, tuple(self.backlog))
        self.rotation = SharedRotation(tuple(self.backlog), rules.probation, self, now=now)
        self.cells = {path: SharedEntity(path, policy, self, now=now, chance=chance) for path in self.primary_places}
        for path, cell in self.cells.items():
            cast(Timer, cell._failover_timer).before = partial(self._timer_due, self.beliefs[path])
        cast(Timer, self.rotation._timer).before = lambda: self.shelf.ended(self.now())
        self._gone = Sides(partial(self._is_gone, self.primary), partial(self._is_gone, self.secondary))
        self.senders = {
            path: [Sender(self._context(path, cell), Turn() if number else None) for number in range(SENDERS)]
            for path, cell in self.cells.items()
        }

    def _context(self, path: str, cell: SharedEntity) -> SendContext:
        errors = FlowErrors(call_errors.timed_out, partial(call_errors.entity_missing, endpoint=ENDPOINTS["primary"]))
        return SendContext(
            path,
            cell,
            self,
            TRY_TIMEOUT,
            now=self.now,
            chance=self.chance.random,
            new_number=lambda: uuid4().int >> 66,
            errors=errors,
        )

    def _timer_due(self, belief: EntityModel) -> None:
        belief.timer(self.now())

    def _is_gone(self, side: Side) -> bool:
        return self.shut[side.name] or side.state is not SideState.OPEN

    def send(
        self, what: CallKind, path: str, letter: CallMessages, timeout: float | None, cancelled_at: int | None
    ) -> CallOracle:
        number = self.chance.randrange(SENDERS)
        until = None if timeout is None else self.now() + timeout
        belief, key = self.beliefs[path], f"{path} {number}"
        story = CallOracle(what, letter, path, key, belief, self.shelf, self._gone, self.stock, until)
        sending = SimulatedCall(self, self.senders[path][number], story, cancelled_at)
        self.calls.add(sending)
        sending.begin()
        return story

    # --- what the product asks of a pair -----------------------------------------------------------------------------

    def notice_closed_clients(self) -> None:
        for side in (self.primary, self.secondary):
            if self.shut[side.name]:
                side.leave(SideState.CLOSED)

    def refuse_unless_open(self) -> None:
        self.notice_closed_clients()
        self.primary.refuse_unless_open()
        self.secondary.refuse_unless_open()

    def backlog_answered(self, queue: str, error: Exception | None = None) -> None:
        if (queue, error) != self.heard[:2]:
            raise ViolationError(f"{queue} is said to have answered {error!r}, but {self.heard}")
        self.answers += 1

    def diverted(self, entity: str, queue: str, messages: int, seconds: float) -> None:
        parcel = self.heard.parcel
        if parcel is None or (entity, queue, messages) != (parcel.path, self.heard.queue, len(parcel.ids)):
            raise ViolationError(f"{messages} messages for {entity} are said to be in {queue}, but {self.heard}")
        if not 0 < seconds < 100 * TRY_TIMEOUT:
            raise ViolationError(f"they are said to have taken {seconds} s")
        self.diversions += messages

    # --- what it asks of a driver ------------------------------------------------------------------------------------

    def timer(self, due: Callable[[], object]) -> Timer:
        return Timer(self, due)

    def ping(self, cell: SharedEntity, episode: int) -> None:
        path = cell.entity.path
        belief = self.beliefs[path]
        belief.ping(self.now())
        which = belief.failovers

        def answered(found: Failure | None) -> None:
            if self.alive:
                kind = None if found is None else found.kind
                belief.pinged(which, kind)
                cell.advance(
                    failover_events.PingSucceeded(episode)
                    if kind is None
                    else failover_events.PingFailed(episode, kind)
                )

        self.primary_places[path].attempt(None, TRY_TIMEOUT, answered)

    def stop_ping(self, cell: SharedEntity) -> None:
        """Do nothing: the answer of the ping still arrives, as it may with threads."""

    def emit(self, notice: Notice) -> None:
        self.notices.append(notice)

    # --- what an operator does ---------------------------------------------------------------------------------------

    def force(self, path: str, *, over: bool, hold: bool = False) -> None:
        belief = self.beliefs[path]
        if not belief.closed:
            if hold and over:
                belief.hold(self.now())
            elif over and not belief.over:
                belief.engage(self.now())
            elif not over:
                belief.restore()
            self.cells[path].advance(failover_events.FailoverForced(hold) if over else failover_events.RestoreForced())

    def close(self) -> None:
        self.primary.leave(SideState.CLOSED)
        self.secondary.leave(SideState.CLOSED)

    def lose(self, name: str, how: int) -> None:
        """End one side: close it, fault it, or close its client without telling the pair (C1)."""
        if how == 0:
            self.shut[name] = True
        else:
            side = self.primary if name == "primary" else self.secondary
            state = SideState.CLOSED if how == 1 else SideState.FAULTED
            side.leave(state, None if how == 1 else RuntimeError("told to"))

    def kill(self) -> None:
        """End the process as kill -9 does: no waiting call gets an answer."""
        self.alive = False
        for call in self.calls:
            call.left_behind()
        self.calls.clear()

    def _side_changed(self, side: Side) -> None:
        # As PairState does.
        if side is self.secondary:
            self.rotation.close()
            self.shelf.closed = True
            return
        self.rotation.wake_waiting_calls()
        for path, cell in self.cells.items():
            self.beliefs[path].close()
            cell.advance(failover_events.PairClosed())
            if cast(Timer, cell._failover_timer).token or cast(Timer, cell._ping_timer).token:
                raise ViolationError("a closed pair has timers")

    def check(self) -> None:
        now = self.now()
        for path, belief in self.beliefs.items():
            entity = self.cells[path].entity
            belief.check(now, entity.mode, entity.diverted)
        self.shelf.check(now, self.rotation.rotation.usable)
        if (self.answers, self.diversions) != (self.shelf.answers, self.shelf.diverted):
            raise ViolationError("not everything that backlog queues answered was told")
