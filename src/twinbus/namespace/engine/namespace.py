"""The entities of a namespace by path: which exist, which may be made, and what is known about each.

Paths are case-insensitive. What happens inside an entity is decided by the entity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from twinbus.amqp.conditions import Condition
from twinbus.namespace.engine.counters import Counters
from twinbus.namespace.engine.descriptions import (
    Description,
    EntityInfo,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.duplicates import IdBudget
from twinbus.namespace.engine.effects import Decision, Refusal, Step
from twinbus.namespace.engine.events import Deleted, DescriptionChanged
from twinbus.namespace.engine.life import Life
from twinbus.namespace.engine.limits import MIB
from twinbus.namespace.engine.queue import Queue
from twinbus.namespace.engine.records import read_description
from twinbus.namespace.engine.refusals import not_found
from twinbus.namespace.engine.rows import Opened, StoredEntity
from twinbus.namespace.engine.rules.descriptions import CorrelationFilter
from twinbus.namespace.engine.shelf import Supplies
from twinbus.namespace.engine.subscription import Subscription
from twinbus.namespace.engine.topic import Topic
from twinbus.namespace.engine.validation import refusal_of_change, refusal_of_new
from twinbus.namespace.engine.window import Budget

Entity = Queue | Topic | Subscription
Family = Queue | Topic

_HOT_BYTES: Final = 64 * MIB


class Namespace:
    """The registry of one namespace."""

    def __init__(self, opened: Opened, *, new_token: Callable[[], bytes], hot_bytes: int = _HOT_BYTES) -> None:
        self._supplies = Supplies(new_token, opened.next_body, Budget(hot_bytes), IdBudget())
        self._next_queue = opened.next_queue
        self._entities: dict[str, Entity] = {}
        described = [(read_description(each.entity.kind, each.entity.text), each) for each in opened.entities]
        # Topics first: a subscription needs its topic.
        for description, stored in sorted(described, key=lambda pair: isinstance(pair[0], SubscriptionDescription)):
            self._open(description, stored)

    def _open(self, description: Description, stored: StoredEntity) -> None:
        life = self._life(Counters(stored.queue), stored.entity.created, stored.entity.updated, reopened=True)
        entity: Entity
        if isinstance(description, QueueDescription):
            instants = {"next_expiry": stored.next_expiry, "next_due": stored.next_due}
            entity = Queue(description, life, self._supplies, **instants, new=False)
        elif isinstance(description, TopicDescription):
            entity = Topic(description, life, self._supplies, next_due=stored.next_due, new=False)
        else:
            topic = self._topic(description.topic)
            assert topic is not None, "a topic is removed with its subscriptions, in one commit"
            entity = Subscription(description, topic, life, self._supplies, next_expiry=stored.next_expiry)
            topic.adopt(entity)
        self._entities[_key(description.path)] = entity

    def _life(self, counters: Counters, created: int, updated: int, *, reopened: bool) -> Life:
        return Life(counters, created, updated, self._forget, reopened=reopened)

    def _forget(self, path: str) -> None:
        self._entities.pop(_key(path), None)

    # --- finding -------------------------------------------------------------------------------------------------

    def find(self, path: str) -> Entity | None:
        """A queue, a topic, or `topic/Subscriptions/name`."""
        return self._entities.get(_key(path))

    def families(self) -> list[Family]:
        """What is serial and has timers of its own."""
        return [entity for entity in self._entities.values() if not isinstance(entity, Subscription)]

    def info(self, path: str) -> EntityInfo | None:
        entity = self.find(path)
        return None if entity is None else _info(entity)

    def queues(self) -> list[EntityInfo]:
        return _infos([entity for entity in self._entities.values() if isinstance(entity, Queue)])

    def topics(self) -> list[EntityInfo]:
        return _infos([entity for entity in self._entities.values() if isinstance(entity, Topic)])

    def subscriptions(self, topic: str) -> list[EntityInfo]:
        found = self._topic(topic)
        return [] if found is None else _infos(list(found.subscriptions.values()))

    def _topic(self, path: str) -> Topic | None:
        entity = self.find(path)
        return entity if isinstance(entity, Topic) else None

    # --- administration ------------------------------------------------------------------------------------------

    def create(self, description: Description, now: int) -> Step | Refusal:
        refusal = refusal_of_new(description)
        if refusal is not None:
            return refusal
        if self.find(description.path) is not None:
            text = f"The messaging entity '{description.path}' already exists."
            return Refusal(Condition.ENTITY_ALREADY_EXISTS, text)
        queue = self._next_queue
        life = self._life(Counters.new(queue, now), now, now, reopened=False)
        entity: Entity
        if isinstance(description, QueueDescription):
            entity = Queue(description, life, self._supplies, new=True)
        elif isinstance(description, TopicDescription):
            entity = Topic(description, life, self._supplies, new=True)
        else:
            topic = self._topic(description.topic)
            if topic is None:
                return not_found(description.topic)
            rules = tuple(replace(rule, created=now) for rule in description.rules)
            description = replace(description, topic=topic.path, rules=rules)
            topic.counters.accessed = now
            entity = Subscription(description, topic, life, self._supplies)
            topic.adopt(entity)
        self._next_queue += 1
        self._entities[_key(description.path)] = entity
        return Step(writes=[life.record(description), life.counters.put()])

    def update(self, description: Description, now: int) -> Decision | Refusal:
        entity = self.find(description.path)
        if entity is None or type(entity.description) is not type(description):
            return not_found(description.path)
        before = entity.description
        refusal = refusal_of_change(before, description)
        if refusal is not None:
            return refusal
        return entity.advance(DescriptionChanged(None, _renamed(description, before)), now)

    def delete(self, path: str, now: int) -> Decision | Refusal:
        entity = self.find(path)
        return not_found(path) if entity is None else entity.advance(Deleted(None), now)


def _key(path: str) -> str:
    return path.lower()


def _renamed(description: Description, before: Description) -> Description:
    """An entity keeps the spelling it was created with."""
    if isinstance(description, SubscriptionDescription):
        assert isinstance(before, SubscriptionDescription), "of the same kind"
        return replace(description, topic=before.topic, name=before.name)
    return replace(description, path=before.path)


def _info(entity: Entity) -> EntityInfo:
    life, counts = entity.life, entity.counters.counts()
    info = EntityInfo(entity.description, life.created, life.updated, entity.counters.accessed, counts)
    if not isinstance(entity, Topic):
        return info
    filters = [rule.filter for each in entity.subscriptions.values() for rule in each.description.rules]
    correlations = sum(isinstance(each, CorrelationFilter) for each in filters)
    return replace(
        info,
        counts=replace(counts, size_bytes=entity.size),
        subscriptions=len(entity.subscriptions),
        # The true and the false filter are SQL filters to the service.
        sql_filters=len(filters) - correlations,
        correlation_filters=correlations,
    )


def _infos(entities: Sequence[Entity]) -> list[EntityInfo]:
    return [_info(entity) for entity in sorted(entities, key=lambda entity: _key(entity.path))]
