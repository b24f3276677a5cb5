"""The life of an entity: its record, when it was made and changed, when it was idle for too long, and its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinbus.namespace.engine.description_json import kind_of, write_description
from twinbus.namespace.engine.descriptions import Description, EntityMessageCounts
from twinbus.namespace.engine.effects import AnswerRequest, DetachReceiver, EngineDecision, not_found
from twinbus.namespace.engine.events import Deleted, DescriptionChanged, Event, SessionReceiverAttached
from twinbus.namespace.engine.storage_protocol import PutCounters, PutEntity, QueueLane


class Lifecycle:
    """One entity from its creation to its end."""

    __slots__ = ("_forget", "_reopened", "counters", "created", "ended", "updated")

    def __init__(
        self, counters: EntityCounters, created: int, updated: int, forget: Callable[[str], None], *, reopened: bool
    ) -> None:
        self.counters = counters
        self.created = created
        self.updated = updated
        self.ended = False
        self._forget = forget
        self._reopened = reopened

    def record(self, description: Description) -> PutEntity:
        text = write_description(description)
        queue = self.counters.queue
        return PutEntity(queue, kind_of(description), description.path, text, self.created, self.updated)

    def end(self, path: str) -> None:
        """From now on nobody finds the entity; who still has it in hand is told that it is gone."""
        self.ended = True
        self.counters.changed = False
        self._forget(path)

    def idle_at(self, idle: int | None) -> int | None:
        """When the entity will have been idle for so long that it is deleted."""
        return None if idle is None else self.counters.accessed + idle

    def is_idle(self, idle: int | None, in_use: bool, now: int) -> bool:
        at = self.idle_at(idle)
        if at is None or at > now:
            return False
        # A restart counts as an access: who was attached before it needs time to come back.
        if in_use or self._reopened or self.counters.lanes[QueueLane.SCHEDULED]:
            self._reopened = False
            self.counters.accessed = now
            self.counters.changed = True
            return False
        return True


def confirm(event: DescriptionChanged | Deleted, step: EngineDecision) -> None:
    if event.reply is not None:
        step.effects.append(AnswerRequest(event.reply, None))


def refuse_as_gone(event: Event, path: str) -> EngineDecision:
    """Whatever is asked of an entity that has ended."""
    reply: Any = getattr(event, "reply", None)
    if isinstance(event, SessionReceiverAttached):
        return EngineDecision(effects=[DetachReceiver(event.receiver, not_found(path))])
    return EngineDecision(effects=[AnswerRequest(reply, not_found(path))] if reply is not None else [])


class EntityCounters:
    """What one queue holds, by lane."""

    __slots__ = ("accessed", "changed", "lanes", "next_seq", "queue", "size")

    def __init__(self, stored: PutCounters) -> None:
        self.queue = stored.queue
        self.next_seq = stored.next_seq
        self.lanes = [stored.active, stored.deferred, stored.scheduled, stored.dead, stored.dead_deferred]
        self.lanes += (stored.transfer_dead, stored.transfer_dead_deferred)
        self.size = stored.size
        self.accessed = stored.accessed
        self.changed = False

    @classmethod
    def new(cls, queue: int, now: int) -> EntityCounters:
        return cls(PutCounters(queue, 1, 0, 0, 0, 0, 0, 0, now))

    def take_seq(self) -> int:
        seq = self.next_seq
        self.next_seq = seq + 1
        self.changed = True
        return seq

    def add(self, lane: int, size: int) -> None:
        self.lanes[lane] += 1
        self.size += size
        self.changed = True

    def drop(self, lane: int, size: int) -> None:
        self.lanes[lane] -= 1
        self.size -= size
        self.changed = True

    def move(self, lane: int, to_lane: int) -> None:
        self.lanes[lane] -= 1
        self.lanes[to_lane] += 1
        self.changed = True

    def put(self) -> PutCounters:
        self.changed = False
        lanes = self.lanes
        place = (self.queue, self.next_seq)
        return tuple.__new__(PutCounters, (*place, *lanes[:5], self.size, self.accessed, lanes[5], lanes[6]))

    def counts(self) -> EntityMessageCounts:
        lanes = self.lanes
        return EntityMessageCounts(
            active=lanes[QueueLane.ACTIVE],
            deferred=lanes[QueueLane.DEFERRED],
            scheduled=lanes[QueueLane.SCHEDULED],
            dead_letter=lanes[QueueLane.DEAD] + lanes[QueueLane.DEAD_DEFERRED],
            transfer_dead_letter=lanes[QueueLane.TRANSFER_DEAD] + lanes[QueueLane.TRANSFER_DEAD_DEFERRED],
            size_bytes=self.size,
        )
