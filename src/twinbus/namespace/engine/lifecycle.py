"""The parts that all entities have: counters, a record in the store, creation, deletion, and deletion when idle.

`NamespaceEntity` is the base class of Queue, Topic and Subscription. An entity is a state machine. Its method `advance`
takes an event and the time, yields reads for the rows that it needs (a generator, see `effects.PendingDecision`),
changes the state of the entity, and returns the writes and effects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinbus.namespace.engine.description_json import kind_of, write_description
from twinbus.namespace.engine.descriptions import Description, EntityMessageCounts
from twinbus.namespace.engine.effects import (
    AnswerRequest,
    DetachReceiver,
    EngineDecision,
    PendingDecision,
    ReadingPart,
    not_found,
)
from twinbus.namespace.engine.events import Deleted, DescriptionChanged, Event, SessionReceiverAttached
from twinbus.namespace.engine.storage_protocol import PutCounters, PutEntity, QueueLane


class EntityCounters:
    """The number of messages of one entity in each lane, their size in bytes, and the next sequence number.

    A commit that changes the counters stores the new totals, not the differences.
    """

    __slots__ = ("accessed", "changed", "lanes", "next_seq", "queue", "size")

    def __init__(self, stored: PutCounters) -> None:
        self.queue = stored.queue
        """The storage id of the entity."""
        self.next_seq = stored.next_seq
        self.lanes = [stored.active, stored.deferred, stored.scheduled, stored.dead, stored.dead_deferred]
        self.lanes += (stored.transfer_dead, stored.transfer_dead_deferred)
        self.size = stored.size
        self.accessed = stored.accessed
        self.changed = False

    @classmethod
    def new(cls, queue: int, now: int) -> EntityCounters:
        return cls(
            PutCounters(
                queue=queue,
                next_seq=1,
                active=0,
                deferred=0,
                scheduled=0,
                dead=0,
                dead_deferred=0,
                size=0,
                accessed=now,
            )
        )

    def take_seq(self) -> int:
        """Return the next sequence number."""
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
        """Return the write that stores the counters as they are now."""
        self.changed = False
        active, deferred, scheduled, dead, dead_deferred, transfer_dead, transfer_dead_deferred = self.lanes
        return PutCounters(
            queue=self.queue,
            next_seq=self.next_seq,
            active=active,
            deferred=deferred,
            scheduled=scheduled,
            dead=dead,
            dead_deferred=dead_deferred,
            size=self.size,
            accessed=self.accessed,
            transfer_dead=transfer_dead,
            transfer_dead_deferred=transfer_dead_deferred,
        )

    def message_counts(self) -> EntityMessageCounts:
        lanes = self.lanes
        return EntityMessageCounts(
            active=lanes[QueueLane.ACTIVE],
            deferred=lanes[QueueLane.DEFERRED],
            scheduled=lanes[QueueLane.SCHEDULED],
            dead_letter=lanes[QueueLane.DEAD] + lanes[QueueLane.DEAD_DEFERRED],
            transfer_dead_letter=lanes[QueueLane.TRANSFER_DEAD] + lanes[QueueLane.TRANSFER_DEAD_DEFERRED],
            size_bytes=self.size,
        )


class Lifecycle:
    """When an entity was created and updated, whether it was idle for too long, and whether it was deleted."""

    __slots__ = ("_reopened", "_unregister", "counters", "created", "ended", "updated")

    def __init__(
        self, counters: EntityCounters, created: int, updated: int, unregister: Callable[[str], None], *, reopened: bool
    ) -> None:
        self.counters = counters
        self.created = created
        self.updated = updated
        self.ended = False
        self._unregister = unregister
        self._reopened = reopened

    def record(self, description: Description) -> PutEntity:
        """Return the write that stores the entity's record."""
        return PutEntity(
            queue=self.counters.queue,
            kind=kind_of(description),
            path=description.path,
            text=write_description(description),
            created=self.created,
            updated=self.updated,
        )

    def end(self, path: str) -> None:
        """Remove the entity from the registry. Code that still refers to the entity finds that `ended` is True."""
        self.ended = True
        self.counters.changed = False
        self._unregister(path)

    def idle_at(self, idle: int | None) -> int | None:
        """Return the instant when the entity will have been idle for `idle` ms; None if `idle` is None (never)."""
        return None if idle is None else self.counters.accessed + idle

    def is_idle(self, idle: int | None, in_use: bool, now: int) -> bool:
        """Whether the entity is to be deleted because nobody used it for `idle` ms."""
        at = self.idle_at(idle)
        if at is None or at > now:
            return False
        # A restart counts as an access: receivers that were attached before the restart need time to attach again.
        if in_use or self._reopened or self.counters.lanes[QueueLane.SCHEDULED]:
            self._reopened = False
            self.counters.accessed = now
            self.counters.changed = True
            return False
        return True


class NamespaceEntity:
    """The base class of Queue, Topic and Subscription."""

    __slots__ = ("counters", "description", "lifecycle")

    description: Description

    def __init__(self, description: Description, lifecycle: Lifecycle) -> None:
        self.description = description
        self.lifecycle = lifecycle
        self.counters = lifecycle.counters

    @property
    def path(self) -> str:
        return self.description.path

    @property
    def next_timer(self) -> int | None:
        """The instant at which the runtime sends an EntityTimerFired event to the entity; None for never."""
        raise NotImplementedError

    def advance(self, event: Event, now: int, decision: EngineDecision | None = None) -> PendingDecision:
        """Decide about one event. The writes and effects are added to `decision`, or to a new one if it is None."""
        raise NotImplementedError

    def conclude(self, now: int, decision: EngineDecision) -> ReadingPart:
        """End a decision: deliver the rows that have become available, and write the counters if they changed."""
        raise NotImplementedError

    def _write_counters(self, decision: EngineDecision) -> None:
        if self.counters.changed:
            decision.writes.append(self.counters.put())

    def _idle_at(self) -> int | None:
        return self.lifecycle.idle_at(self.description.auto_delete_on_idle)

    def _is_idle(self, in_use: bool, now: int) -> bool:
        return self.lifecycle.is_idle(self.description.auto_delete_on_idle, in_use, now)

    def _write_record(self, event: DescriptionChanged, now: int, decision: EngineDecision) -> None:
        """Store the description, which `event` changed, and answer the event."""
        self.lifecycle.updated = now
        decision.writes.append(self.lifecycle.record(self.description))
        confirm(event, decision)


def confirm(event: DescriptionChanged | Deleted, decision: EngineDecision) -> None:
    """Answer None to a request of the operator, which was carried out. Does nothing if no answer is wanted."""
    if event.reply is not None:
        decision.effects.append(AnswerRequest(event.reply, None))


def refuse_as_deleted(event: Event, path: str) -> EngineDecision:
    """Return the decision about any event of an entity that was deleted: the refusal `not_found`."""
    reply: Any = getattr(event, "reply", None)
    if isinstance(event, SessionReceiverAttached):
        return EngineDecision(effects=[DetachReceiver(event.receiver, not_found(path))])
    return EngineDecision(effects=[AnswerRequest(reply, not_found(path))] if reply is not None else [])
