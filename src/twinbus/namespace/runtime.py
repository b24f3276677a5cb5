"""Carries out what the engine decides: feeds it events one by one per family, loads the rows it needs, commits its
writes, and lets its effects leave only once those are on disk. Decides nothing about messages."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
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
    PendingDecision,
    Refusal,
)
from twinbus.namespace.engine.events import EntityTimerFired, Event
from twinbus.namespace.engine.forwarding import forward
from twinbus.namespace.engine.queue import Queue
from twinbus.namespace.engine.receive_state import DeliveryLane
from twinbus.namespace.engine.registry import Entity, EntityRegistry, RootEntity
from twinbus.namespace.engine.topic import Subscription, Topic
from twinbus.namespace.group_commit import GroupCommit
from twinbus.namespace.meter import OperationMeter
from twinbus.namespace.store import Store
from twinbus.values import Condition

_log = logging.getLogger(__name__)

# Event loops do not take timers of a thousand years; one that rings too early looks again.
_LONGEST_TIMER = 86_400.0
# After a decision that failed, a family's timer rests: what cannot be read now is not asked for again at once.
_REST_MS = 1_000


class Mailbox:
    """The events of one family in their order, and how far its writes have come."""

    __slots__ = ("busy", "family", "group", "rests_until", "timer", "timer_at", "waiting")

    def __init__(self, family: RootEntity) -> None:
        self.family = family
        self.waiting: deque[tuple[Callable[[int], PendingDecision | None], Any]] = deque()
        """How each decision begins, or None: then the family is held, and whoever holds it goes on."""
        self.busy = False
        self.group = 0
        self.timer: asyncio.TimerHandle | None = None
        self.timer_at = 0
        self.rests_until = 0

    @property
    def next_timer(self) -> int | None:
        at = self.family.next_timer
        return None if at is None else max(at, self.rests_until)

    @property
    def members(self) -> Sequence[Mailbox]:
        """Whose families are held while it is at work."""
        return (self,)


class Union(Mailbox):
    """Several families held for one decision: its writes are one commit, and none of them decides meanwhile."""

    __slots__ = ("_members",)

    def __init__(self, members: Sequence[Mailbox]) -> None:
        super().__init__(members[0].family)
        self._members = members
        self.group = max(member.group for member in members)

    @property
    def members(self) -> Sequence[Mailbox]:
        return self._members


class NamespaceRuntime:
    """One namespace at work on the running event loop."""

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
        self._boxes: dict[RootEntity, Mailbox] = {}
        for family in self.namespace.root_entities():
            self._arm(self._box(family))
        self._forwards_soon = False
        self._forward_soon()

    async def close(self) -> None:
        """Finish what is under way, then give the store back."""
        for box in self._boxes.values():
            if box.timer is not None:
                box.timer.cancel()
        await self.group_commit.close()
        self._store.close()

    def submit(self, entity: Entity, event: Event) -> None:
        """Let the entity decide about the event, after all before it of the same family."""
        box = self._box(entity.root)
        if box.busy:
            box.waiting.append((lambda now: entity.advance(event, now), getattr(event, "reply", None)))
        else:
            self._run(box, entity.advance(event, self._clock.now()), getattr(event, "reply", None))

    def after(self, entity: Entity, call: Callable[[], None]) -> None:
        """Calls `call` once all events submitted before for the entity's family were decided and carried out."""
        box = self._box(entity.root)
        if box.busy:
            box.waiting.append((lambda _: _answering(call), None))
        else:
            self.group_commit.when(box.group, call)

    def submit_together(self, entities: Iterable[Entity], begin: Callable[[int], PendingDecision], reply: Any) -> None:
        """Let one decision be made over several entities, all of it or nothing: `reply` is told if it fails."""
        # Always in the same order, so that two that wait for each other's families cannot be.
        families = {entity.root.counters.queue: entity.root for entity in entities}
        boxes = [self._box(families[queue]) for queue in sorted(families)]

        def hold(count: int) -> None:
            while count < len(boxes) and not boxes[count].busy:
                boxes[count].busy = True
                count += 1
            if count < len(boxes):
                boxes[count].waiting.append((lambda _: self._seize(boxes[count], lambda: hold(count + 1)), None))
                return
            union = Union(boxes)
            if self._proceed(union, begin(self._clock.now()), None, reply):
                self._next(union)

        hold(0)

    def now(self) -> int:
        """The namespace's time, in milliseconds since the epoch."""
        return self._clock.now()

    # --- administration ----------------------------------------------------------------------------------------

    def info(self, path: str) -> EntityInfo | None:
        """An entity's description and runtime figures."""
        return self.namespace.info(path)

    def queues(self) -> Sequence[EntityInfo]:
        return self.namespace.queues()

    def topics(self) -> Sequence[EntityInfo]:
        return self.namespace.topics()

    def subscriptions(self, topic: str) -> Sequence[EntityInfo]:
        return self.namespace.subscriptions(topic)

    async def create(self, description: Description) -> EntityInfo | Refusal:
        """Create an entity; on return it is on disk."""
        step = self.namespace.create(description, self._clock.now())
        if isinstance(step, Refusal):
            return step
        entity = self.namespace.find(description.path)
        assert entity is not None, "just created"
        box = self._box(entity.root)
        self._carry_out(box, step)
        self._arm(box)
        await self._on_disk(box)
        return self.namespace.info(description.path) or _gone(description.path)

    async def update(self, description: Description) -> EntityInfo | Refusal:
        """Replace an entity's description; on return it is on disk."""
        return await self._administer(description.path, lambda now: self.namespace.update(description, now))

    async def delete(self, path: str) -> EntityInfo | Refusal:
        """Remove an entity and all it holds; answers what it was."""
        return await self._administer(path, lambda now: self.namespace.delete(path, now))

    async def ask(self, path: str, event: Callable[[Callable[[Any], None]], Event]) -> Any:
        """What an entity answers to an event that is made with where to answer; a Refusal if there is none."""
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
        box = self._box(entity.root)
        done: asyncio.Future[Refusal | None] = self._loop.create_future()

        def begin(now: int) -> PendingDecision:
            decision = decide(now)
            refusal = decision if isinstance(decision, Refusal) else None
            step = EngineDecision() if isinstance(decision, Refusal) else (yield from decision)
            step.effects.append(AnswerRequest(done.set_result, refusal))
            return step

        if box.busy:
            box.waiting.append((begin, done.set_result))
        else:
            self._run(box, begin(self._clock.now()), done.set_result)
        refusal = await done
        return refusal or self.namespace.info(path) or before

    async def _on_disk(self, box: Mailbox) -> None:
        done = self._loop.create_future()
        self.group_commit.when(box.group, lambda: done.set_result(None))
        await done

    # --- one decision after the other --------------------------------------------------------------------------

    def _box(self, family: RootEntity) -> Mailbox:
        box = self._boxes.get(family)
        if box is None:
            box = self._boxes[family] = Mailbox(family)
        return box

    def _run(self, box: Mailbox, decision: PendingDecision, reply: Any) -> None:
        while True:
            if not self._proceed(box, decision, None, reply):
                return
            if not box.waiting:
                self._arm(box)
                return
            begin, reply = box.waiting.popleft()
            begun = begin(self._clock.now())
            if begun is None:
                return
            decision = begun

    def _proceed(self, box: Mailbox, decision: PendingDecision, answer: Any, reply: Any) -> bool:
        """Take a decision as far as it goes without rows; True once it is carried out."""
        # Busy until it is carried out: what the effects submit waits in line, or it would be decided in between.
        box.busy = True
        try:
            need = decision.throw(answer) if isinstance(answer, Exception) else decision.send(answer)
        except StopIteration as decided:
            self._forward_soon()
            try:
                self._carry_out(box, decided.value)
            finally:
                box.busy = False
            return True
        except Exception:
            _log.exception("decision failed", extra={"entity": box.family.path})
            box.rests_until = self._clock.now() + _REST_MS
            if reply is not None:
                reply(Refusal(Condition.INTERNAL_ERROR, "The namespace met an internal error; its log tells more."))
            box.busy = False
            return True

        def answered(rows: Any) -> None:
            if self._proceed(box, decision, rows, reply):
                self._next(box)

        # After the family's own writes are on disk, so that the rows show them.
        self.group_commit.when(box.group, lambda: self.group_commit.load(need, answered))
        return False

    def _next(self, box: Mailbox) -> None:
        if isinstance(box, Union):
            for member in box.members:
                member.group = max(member.group, box.group)
            self._let_go(box.members)
        elif box.waiting:
            begin, reply = box.waiting.popleft()
            begun = begin(self._clock.now())
            if begun is not None:
                self._run(box, begun, reply)
        else:
            self._arm(box)

    def _seize(self, box: Mailbox, go_on: Callable[[], None]) -> PendingDecision | None:
        """Hold a family whose turn it is. What comes then does not come in the midst of the family's own loop."""
        box.busy = True
        self._loop.call_soon(go_on)
        return None

    def _let_go(self, boxes: Sequence[Mailbox]) -> None:
        for box in boxes:
            box.busy = False
        for box in boxes:
            if not box.busy:  # else it is at work again, through what another one brought about
                self._next(box)

    def _forward_soon(self) -> None:
        # Not in the midst of a family's loop; and before the commit of what is to be forwarded, to go with it.
        if self.namespace.has_pending_forwards and not self._forwards_soon:
            self._forwards_soon = True
            self._loop.call_soon(self._forward)

    def _forward(self) -> None:
        self._forwards_soon = False
        for source, feed, target in self.namespace.pending_forwards():
            self._forward_one(source, feed, target)

    def _forward_one(self, source: Queue | Subscription, feed: DeliveryLane, target: Queue | Topic | None) -> None:
        def failed(_: Refusal) -> None:
            self._loop.call_later(_REST_MS / 1000, self._forward_one, source, feed, target)

        both = (source,) if target is None else (source, target)
        self.submit_together(both, lambda now: forward(source, feed, target, now), failed)

    def _carry_out(self, box: Mailbox, step: EngineDecision) -> None:
        if step.writes:
            box.group = self.group_commit.add(step.writes)
        effects = step.effects
        if not effects:
            return
        self.group_commit.when(box.group, lambda: self._release(box, effects))

    def _release(self, box: Mailbox, effects: list[Effect]) -> None:
        # Its families are held meanwhile: what these effects bring about must not overtake the rest of them.
        free = [member for member in box.members if not member.busy]
        for member in free:
            member.busy = True
        for effect in effects:
            try:
                match effect:
                    case AnswerRequest():
                        if effect.reply is not None:  # nobody asked: the registry's own events
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
            except Exception:  # one connection's trouble must not keep others from their answers
                _log.exception("an effect could not be carried out: %s", type(effect).__name__)
        self._let_go(free)

    # --- timers ------------------------------------------------------------------------------------------------

    def _arm(self, box: Mailbox) -> None:
        at = box.next_timer
        if box.family.lifecycle.ended:
            self._boxes.pop(box.family, None)  # whoever still has the entity in hand is told so from a new one
        if at is None or (box.timer is not None and box.timer_at <= at):
            return  # a timer that comes too early looks again
        if box.timer is not None:
            box.timer.cancel()
        box.timer_at = at
        seconds = (at - self._clock.now()) / 1000
        box.timer = self._loop.call_later(min(max(0.0, seconds), _LONGEST_TIMER), self._ring, box)

    def _ring(self, box: Mailbox) -> None:
        box.timer = None
        at = box.next_timer
        if at is None:
            return
        if at > self._clock.now():
            self._arm(box)
        elif not box.busy:
            self._run(box, box.family.advance(EntityTimerFired(), self._clock.now()), None)
        # A busy family looks at its timer when it is done.


def _answering(call: Callable[[], None]) -> PendingDecision:
    """A decision that changes nothing; `call` is its answer."""
    yield from ()
    return EngineDecision(effects=[AnswerRequest(lambda _: call(), None)])


def _gone(path: str) -> Refusal:
    return Refusal(Condition.NOT_FOUND, f"The messaging entity '{path}' could not be found.")


_DRAW = 16 * 1024


class LockTokens:
    """Call it for a fresh token."""

    def __init__(self) -> None:
        self._drawn = b""
        self._used = 0

    def __call__(self) -> bytes:
        if self._used == len(self._drawn):
            self._drawn, self._used = os.urandom(_DRAW), 0
        token = self._drawn[self._used : self._used + 16]
        self._used += 16
        return token
