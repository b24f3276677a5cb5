"""A process that holds a pair: the smallest driver there can be. It carries out effects and reports events, no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from twinbus.pairing import aliases, failover, rotation
from twinbus.pairing.failures import FailureKind

from .judge import Belief, Rules, Shelf, ViolationError
from .places import TRY_TIMEOUT, At, Delivery, Message, Place

CALL_TIMEOUT = 3 * TRY_TIMEOUT


@dataclass(slots=True, eq=False)
class Call:
    sender: int
    message: Message
    until: float


class Process:
    def __init__(
        self,
        rules: Rules,
        chance: Random,
        now: Callable[[], float],
        at: At,
        primary: dict[str, Place],
        backlog: dict[str, Place],
    ) -> None:
        policy = failover.Policy(
            failover_interval=rules.failover_interval,
            ping_interval=rules.ping_interval,
            ping_jitter=rules.ping_jitter,
            counting=rules.counting,
            divert_while_unusable=not rules.raise_while_unusable,
        )
        self.rules, self.chance, self.now, self.at = rules, chance, now, at
        self.primary, self.backlog = primary, backlog
        self.entities = {path: failover.Entity(path, policy, now()) for path in primary}
        self.rotation = rotation.Rotation(tuple(backlog), rules.probation)
        self.queues: dict[int, str] = {}
        self.timers: dict[str, object] = {}
        self.alive = True
        self.calls: set[Call] = set()
        self.beliefs = {path: Belief(rules) for path in primary}
        self.shelf = Shelf(rules, tuple(backlog))
        self.notices: list[failover.Notice] = []

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, sender: int, message: Message) -> None:
        call = Call(sender, message, self.now() + CALL_TIMEOUT)
        self.calls.add(call)
        route, belief = self.entities[message.entity].route, self.beliefs[message.entity]
        if route is failover.Route.PRIMARY:
            if belief.over:
                raise ViolationError("a send to the primary while failed over")
            delivery = Delivery(message, message.original)
            self.primary[message.entity].attempt(delivery, lambda kind: self._primary_answered(call, kind))
        elif route is failover.Route.BACKLOG:
            self._divert(call)
        elif route is failover.Route.UNUSABLE and belief.unusable and self.rules.raise_while_unusable:
            self._raise(call)
        else:
            raise ViolationError(f"{route} for an entity that is {belief.mode}")

    def _primary_answered(self, call: Call, kind: FailureKind | None) -> None:
        if not self.alive:
            return
        path, belief = call.message.entity, self.beliefs[call.message.entity]
        if kind is None:
            belief.sent()
            # A driver need not tell successes while no timer runs; one that does changes nothing.
            if self.entities[path].deadline is not None or self.chance.random() < 0.3:
                self.tell(path, failover.PrimarySendSucceeded())
            self._accept(call)
            return
        goes_on = belief.failed(kind, self.now())
        answers = [
            effect
            for effect in self.tell(path, failover.PrimarySendFailed(kind))
            if isinstance(effect, failover.SendToBacklog | failover.RaiseToCaller | failover.RaiseUnusable)
        ]
        if len(answers) != 1:
            raise ViolationError(f"a failed call has {len(answers)} answers")
        raises = belief.unusable and self.rules.raise_while_unusable
        expected: type[failover.Effect] = failover.RaiseToCaller
        if goes_on:
            expected = failover.RaiseUnusable if raises else failover.SendToBacklog
        if type(answers[0]) is not expected:
            raise ViolationError(f"a call that failed with {kind} while {belief.mode} got {answers[0]}")
        if goes_on and not raises:
            self._divert(call)
        else:
            self._raise(call)

    def _divert(self, call: Call) -> None:
        queue = rotation.choose(self.rotation, self.queues.get(call.sender), self.chance.random())
        if queue is None:
            if self.shelf.usable() or not self.rotation.causes:
                raise ViolationError("no queue was chosen though one is usable")
            self._raise(call)
            return
        self.shelf.picked(call.sender, queue)
        self.queues[call.sender] = queue
        copy = aliases.divert(call.message.original, call.message.entity)
        delivery = Delivery(call.message, copy)
        self.backlog[queue].attempt(delivery, lambda kind: self._backlog_answered(call, queue, kind))

    def _backlog_answered(self, call: Call, queue: str, kind: FailureKind | None) -> None:
        if not self.alive:
            return
        if kind is None:
            self.tell(call.message.entity, failover.MessagesDiverted())
            self._accept(call)
            return
        again = self.shelf.failed(queue, kind, self.now())
        effects = self.tell_rotation(rotation.BacklogSendFailed(queue, kind))
        if again is not (rotation.TryAnother() in effects) or again is (rotation.RaiseToCaller() in effects):
            raise ViolationError(f"a backlog send that failed with {kind} got {effects}")
        closed = self.beliefs[call.message.entity].closed
        if again and not closed and self.now() + TRY_TIMEOUT <= call.until:
            self._divert(call)
        else:
            self._raise(call)

    def _accept(self, call: Call) -> None:
        self.calls.remove(call)
        call.message.accepted = True

    def _raise(self, call: Call) -> None:
        self.calls.remove(call)
        call.message.refused = True

    # --- effects and timers ------------------------------------------------------------------------------------------

    def tell(self, path: str, event: failover.Event) -> tuple[failover.Effect, ...]:
        self.entities[path], effects = failover.advance(self.entities[path], event, self.now(), self.chance.random())
        for effect in effects:
            match effect:
                case failover.ArmFailoverTimer(at):
                    self._arm(f"failover {path}", at, lambda: self._timer_fired(path))
                case failover.DisarmFailoverTimer():
                    self.timers.pop(f"failover {path}", None)
                case failover.ArmPing(at):
                    self._arm(f"ping {path}", at, lambda: self.tell(path, failover.PingDue()))
                case failover.StopPings():
                    self.timers.pop(f"ping {path}", None)
                case failover.SendPing(episode):
                    self._ping(path, episode)
                case failover.Emit(notice):
                    self.notices.append(notice)
        return effects

    def _timer_fired(self, path: str) -> None:
        self.beliefs[path].timer(self.now())
        self.tell(path, failover.TimerFired())

    def _ping(self, path: str, episode: int) -> None:
        belief = self.beliefs[path]
        belief.ping(self.now())
        which = belief.failovers

        def answered(kind: FailureKind | None) -> None:
            if self.alive:
                belief.pinged(which, kind)
                self.tell(path, failover.PingSucceeded(episode) if kind is None else failover.PingFailed(episode, kind))

        self.primary[path].attempt(None, answered)

    def tell_rotation(self, event: rotation.Event) -> tuple[rotation.Effect, ...]:
        self.rotation, effects = rotation.advance(self.rotation, event, self.now())
        for effect in effects:
            if isinstance(effect, rotation.ArmProbation):
                self._arm("probation", effect.at, self._probation_ended)
        return effects

    def _probation_ended(self) -> None:
        self.shelf.ended(self.now())
        self.tell_rotation(rotation.ProbationEnded())

    def _arm(self, name: str, at: float, fire: Callable[[], object]) -> None:
        token = self.timers[name] = object()
        # In some worlds timers are late, and one that was taken back may fire all the same: a driver with threads.
        stale = self.rules.lateness > 0 and self.chance.random() < 0.3

        def fired() -> None:
            if self.timers.get(name) is token:
                del self.timers[name]
                fire()
            elif self.alive and stale:
                fire()

        # Late by the time that was asked for: one that is armed anew when overdue gets no second delay.
        self.at(max(at + self.chance.random() * self.rules.lateness - self.now(), 0.0), fired)

    # --- what an operator does ---------------------------------------------------------------------------------------

    def force(self, path: str, *, over: bool) -> None:
        belief = self.beliefs[path]
        if over and not belief.over:
            belief.engage(self.now())
        elif not over:
            belief.restore()
        self.tell(path, failover.FailoverForced() if over else failover.RestoreForced())

    def close(self) -> None:
        for path, belief in self.beliefs.items():
            belief.close()
            self.tell(path, failover.PairClosed())
            if self.entities[path].route is not failover.Route.CLOSED:
                raise ViolationError("a closed pair takes sends")
        if any(not name.startswith("probation") for name in self.timers):
            raise ViolationError("a closed pair has timers")

    def kill(self) -> None:
        """kill -9: whoever waits for an answer gets none."""
        self.alive = False
        self.timers.clear()
        for call in self.calls:
            call.message.doubtful = True

    def check(self) -> None:
        now = self.now()
        for path, belief in self.beliefs.items():
            belief.check(now, self.entities[path].mode)
        self.shelf.check(now, self.rotation.usable)
