"""Runs the engine of one namespace on the event loop: feeds it events, reads and writes the store, carries out effects.

The engine decides, the runtime does. For each event:

    1. hold the lock of the event's root entity (`entity_locks`); if the lock is held already, the event waits for it
    2. run the decision, a generator. Each read that it yields is answered from the store, after all earlier writes of
       this root entity are on disk
    3. give the writes of the finished decision to the group commit (`group_commit`), and release the lock
    4. when that group is on disk, carry out the effects: answers, deliveries, metering

So no event is acknowledged before its writes are on disk. The lock is released after step 3: the engine decides about
the next event while the writes of this event go to disk. Effects of one root entity are carried out in the order of
their decisions.

Each root entity has a timer. The timer starts a decision when a message expires, a scheduled message is due or a lock
ends. Forwarding is a decision about two root entities. The runtime starts it whenever the engine has messages to
forward.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, assert_never

from twinbus.clock import Clock
from twinbus.namespace.engine.descriptions import Description, EntityInfo
from twinbus.namespace.engine.effects import (
    AcceptSession,
    AnswerRequest,
    Deliver,
    DetachReceiver,
    Drain,
    Effect,
    EngineDecision,
    ForgetEntity,
    Meter,
    MeteredOperation,
    PendingDecision,
    Refusal,
)
from twinbus.namespace.engine.events import EntityTimerFired, Event
from twinbus.namespace.engine.forwarding import forward
from twinbus.namespace.engine.registry import Entity, EntityRegistry, PendingForward, RootEntity
from twinbus.namespace.entity_locks import EntityLock, HeldTogether, hold_together, release_all
from twinbus.namespace.group_commit import GroupCommit
from twinbus.namespace.meter import OperationMeter
from twinbus.namespace.store import Store
from twinbus.values import Condition

_log = logging.getLogger(__name__)

# The longest time of a timer, in seconds: event loops refuse timers of years. A timer that fires early is set again.
_LONGEST_TIMER = 86_400.0
# After a failed decision, the timer of the entity waits this long before it fires again. A failed forward waits as long
# before the next try. Otherwise, a read that fails would be repeated without a pause.
_PAUSE_MS = 1_000
_TOKEN_BYTES = 16
_TOKENS_PER_DRAW = 1_024


class _EntityTimer:
    """The timer of one root entity."""

    __slots__ = ("at", "handle", "paused_until")

    def __init__(self) -> None:
        self.handle: asyncio.TimerHandle | None = None
        self.at = 0
        self.paused_until = 0


class NamespaceRuntime:
    """Runs the engine of one namespace on the running event loop."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        meter: OperationMeter,
        *,
        new_token: Callable[[], bytes],
        failed: Callable[[Exception], None],
    ) -> None:
        self._clock = clock
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._store = store
        self.namespace = EntityRegistry(store.open(), new_token=new_token)
        self.group_commit = GroupCommit(
            store, failed=failed, committed=meter.commit_seconds.observe, freed=self.namespace.free
        )
        self._locks: dict[RootEntity, EntityLock] = {}
        self._timers: dict[RootEntity, _EntityTimer] = {}
        for root in self.namespace.root_entities():
            self._set_timer(root)
        self._is_forwarding_soon = False
        self._forward_soon()

    async def close(self) -> None:
        """Wait until all writes are on disk, then close the store."""
        for timer in self._timers.values():
            if timer.handle is not None:
                timer.handle.cancel()
        await self.group_commit.close()
        self._store.close()

    def submit(self, entity: Entity, event: Event) -> None:
        """Let the engine decide about an event of `entity`, after all earlier events of the same root entity."""
        lock = self._lock(entity.root)
        reply = getattr(event, "reply", None)
        if lock.try_hold():
            self._decide(lock, entity.advance(event, self._clock.now()), reply)
        else:
            lock.add_job(lambda: self._decide(lock, entity.advance(event, self._clock.now()), reply))

    def count_units(self, entity: Entity, operation: MeteredOperation, more_units: int) -> None:
        """Count billable units of operations that the engine has counted with fewer units.

        The engine knows the stored size of a message. What a delivery adds to it is known when it is encoded.
        """
        if more_units:
            self._meter.count(Meter(entity.path, operation, 0, 0, more_units))

    def after(self, entity: Entity, call: Callable[[], None]) -> None:
        """Call `call` when the effects of all earlier events of the entity's root entity are carried out."""
        lock = self._lock(entity.root)
        if lock.is_idle:
            self.group_commit.when(lock.group, call)
        else:
            lock.add_job(lambda: self._decide(lock, _deciding_nothing(call), None))

    def submit_together(self, entities: Iterable[Entity], begin: Callable[[int], PendingDecision], reply: Any) -> None:
        """Make one decision about several entities. `begin` gets the time in milliseconds and returns the decision.

        Calls `reply` with a Refusal if the decision fails.
        """
        hold_together(
            [self._lock(entity.root) for entity in entities],
            lambda held: self._decide(held, begin(self._clock.now()), reply),
            call_soon=self._loop.call_soon,
        )

    def now(self) -> int:
        """Return the time of the namespace, in milliseconds since the epoch."""
        return self._clock.now()

    # --- administration ----------------------------------------------------------------------------------------

    def info(self, path: str) -> EntityInfo | None:
        """Return the description and the counts of an entity, or None if there is no entity with this path."""
        return self.namespace.info(path)

    def queues(self) -> Sequence[EntityInfo]:
        return self.namespace.queues()

    def topics(self) -> Sequence[EntityInfo]:
        return self.namespace.topics()

    def subscriptions(self, topic: str) -> Sequence[EntityInfo]:
        return self.namespace.subscriptions(topic)

    async def create(self, description: Description) -> EntityInfo | Refusal:
        """Create an entity. When this method returns, the entity is on disk."""
        decided = self.namespace.create(description, self._clock.now())
        if isinstance(decided, Refusal):
            return decided
        entity = self.namespace.find(description.path)
        assert entity is not None, "just created"
        lock = self._lock(entity.root)
        self._carry_out(lock, decided)
        self._set_timer(entity.root)
        await self._on_disk(lock)
        return self.namespace.info(description.path) or _gone(description.path)

    async def update(self, description: Description) -> EntityInfo | Refusal:
        """Replace the description of an entity. When this method returns, the new description is on disk."""
        return await self._administer(description.path, lambda now: self.namespace.update(description, now))

    async def delete(self, path: str) -> EntityInfo | Refusal:
        """Remove an entity and all its messages. Returns the description and the counts before the removal."""
        return await self._administer(path, lambda now: self.namespace.delete(path, now))

    async def ask(self, path: str, event: Callable[[Callable[[Any], None]], Event]) -> Any:
        """Submit an event and return the engine's answer, or a Refusal. `event` makes the event from a callback."""
        entity = self.namespace.find(path)
        if entity is None:
            return _gone(path)
        done: asyncio.Future[Any] = self._loop.create_future()
        self.submit(entity, event(done.set_result))
        return await done

    async def _administer(self, path: str, decide: Callable[[int], PendingDecision | Refusal]) -> EntityInfo | Refusal:
        entity = self.namespace.find(path)
        before = self.namespace.info(path)
        if entity is None or before is None:
            return _gone(path)
        lock = self._lock(entity.root)
        done: asyncio.Future[Refusal | None] = self._loop.create_future()

        def begin(now: int) -> PendingDecision:
            decision = decide(now)
            refusal = decision if isinstance(decision, Refusal) else None
            decided = EngineDecision() if isinstance(decision, Refusal) else (yield from decision)
            decided.effects.append(AnswerRequest(done.set_result, refusal))
            return decided

        lock.add_job(lambda: self._decide(lock, begin(self._clock.now()), done.set_result))
        refusal = await done
        return refusal or self.namespace.info(path) or before

    async def _on_disk(self, lock: EntityLock) -> None:
        done = self._loop.create_future()
        self.group_commit.when(lock.group, lambda: done.set_result(None))
        await done

    # --- decisions -------------------------------------------------------------------------------------------------

    def _lock(self, root: RootEntity) -> EntityLock:
        lock = self._locks.get(root)
        if lock is None:
            lock = self._locks[root] = EntityLock(root, self._set_timer)
        return lock

    def _decide(
        self, held: EntityLock | HeldTogether, decision: PendingDecision, reply: Any, answer: Any = None
    ) -> None:
        """Run a decision until it is finished or needs a read. Releases the locks when the decision is finished.

        `answer` is the answer to the decision's last read, or the exception that the read ended in.
        """
        try:
            read = decision.throw(answer) if isinstance(answer, Exception) else decision.send(answer)
        except StopIteration as decided:
            self._forward_soon()
            try:
                # The lock is still held: the engine must decide about events that the effects submit after this event.
                self._carry_out(held, decided.value)
            finally:
                held.release()
        except Exception:
            _log.exception("decision failed", extra={"entity": held.root.path})
            if isinstance(held, EntityLock):
                self._timer(held.root).paused_until = self._clock.now() + _PAUSE_MS
            if reply is not None:
                reply(Refusal(Condition.INTERNAL_ERROR, "The namespace met an internal error. See its log."))
            held.release()
        else:
            # The read waits until the writes of earlier decisions are on disk, because it must see them.
            self.group_commit.when(
                held.group,
                lambda: self.group_commit.load(read, lambda rows: self._decide(held, decision, reply, rows)),
            )

    def _forward_soon(self) -> None:
        # Not in this turn of the event loop, because the caller holds a lock. But in the next turn, so that the forward
        # is in the same commit as the message.
        if self.namespace.has_pending_forwards and not self._is_forwarding_soon:
            self._is_forwarding_soon = True
            self._loop.call_soon(self._forward)

    def _forward(self) -> None:
        self._is_forwarding_soon = False
        for pending in self.namespace.pending_forwards():
            self._forward_one(pending)

    def _forward_one(self, pending: PendingForward) -> None:
        source, lane, target = pending

        def failed(_: Refusal) -> None:
            self._loop.call_later(_PAUSE_MS / 1000, self._forward_one, pending)

        both = (source,) if target is None else (source, target)
        self.submit_together(both, lambda now: forward(source, lane, target, now), failed)

    def _carry_out(self, held: EntityLock | HeldTogether, decided: EngineDecision) -> None:
        """Commit the writes of a decision. When the writes are on disk, carry out the effects of the decision."""
        if decided.writes:
            held.group = self.group_commit.add(decided.writes)
        effects = decided.effects
        if effects:
            self.group_commit.when(held.group, lambda: self._carry_out_effects(held, effects))

    def _carry_out_effects(self, held: EntityLock | HeldTogether, effects: list[Effect]) -> None:
        # The locks are held, so that the engine decides about events that an effect submits after all effects are
        # carried out.
        locks = [lock for lock in held.locks if lock.try_hold()]
        for effect in effects:
            try:
                match effect:
                    case AnswerRequest():
                        if effect.reply is not None:  # events of the registry itself have no reply
                            effect.reply(effect.result)
                    case Deliver():
                        effect.receiver.deliver(effect)
                    case Meter():
                        self._meter.count(effect)
                    case Drain():
                        effect.receiver.drain()
                    case AcceptSession():
                        effect.receiver.accept_session(effect.session, effect.locked_until)
                    case DetachReceiver():
                        effect.receiver.detach(effect.refusal)
                    case ForgetEntity():
                        self._meter.forget(effect.entity)
                    case _:
                        assert_never(effect)
            except Exception:  # an error in one connection must not stop the answers to others
                _log.exception("an effect could not be carried out: %s", type(effect).__name__)
        release_all(locks)

    # --- timers ----------------------------------------------------------------------------------------------------

    def _timer(self, root: RootEntity) -> _EntityTimer:
        timer = self._timers.get(root)
        if timer is None:
            timer = self._timers[root] = _EntityTimer()
        return timer

    def _set_timer(self, root: RootEntity) -> None:
        """Set the timer of a root entity after a decision. Removes lock and timer of a root entity that was deleted."""
        if root.lifecycle.ended:
            self._forget(root)
            return
        timer = self._timer(root)
        at = self._next_timer(root, timer)
        if at is None or (timer.handle is not None and timer.at <= at):
            return  # a timer that fires early is set again
        if timer.handle is not None:
            timer.handle.cancel()
        timer.at = at
        seconds = (at - self._clock.now()) / 1000
        timer.handle = self._loop.call_later(min(max(0.0, seconds), _LONGEST_TIMER), self._timer_fired, root)

    def _forget(self, root: RootEntity) -> None:
        # If a caller still submits an event for the deleted entity, the event is refused under a new lock, and this
        # method removes the new lock, too.
        self._locks.pop(root, None)
        timer = self._timers.pop(root, None)
        if timer is not None and timer.handle is not None:
            timer.handle.cancel()

    def _timer_fired(self, root: RootEntity) -> None:
        timer = self._timer(root)
        timer.handle = None
        at = self._next_timer(root, timer)
        if at is None:
            return
        if at > self._clock.now():
            self._set_timer(root)
            return
        lock = self._lock(root)
        if lock.try_hold():
            self._decide(lock, root.advance(EntityTimerFired(), self._clock.now()), None)
        # If the lock is held, the timer is set when the lock is released.

    @staticmethod
    def _next_timer(root: RootEntity, timer: _EntityTimer) -> int | None:
        at = root.next_timer
        return None if at is None else max(at, timer.paused_until)


def _deciding_nothing(call: Callable[[], None]) -> PendingDecision:
    """Return a decision without changes. Its only effect is a call of `call`."""
    yield from ()
    return EngineDecision(effects=[AnswerRequest(lambda _: call(), None)])


def _gone(path: str) -> Refusal:
    return Refusal(Condition.NOT_FOUND, f"The messaging entity '{path}' could not be found.")


class LockTokens:
    """Returns a new lock token of 16 random bytes for each call. Draws 1,024 tokens at a time."""

    def __init__(self) -> None:
        self._drawn = b""
        self._used = 0

    def __call__(self) -> bytes:
        if self._used == len(self._drawn):
            self._drawn, self._used = os.urandom(_TOKEN_BYTES * _TOKENS_PER_DRAW), 0
        token = self._drawn[self._used : self._used + _TOKEN_BYTES]
        self._used += _TOKEN_BYTES
        return token
