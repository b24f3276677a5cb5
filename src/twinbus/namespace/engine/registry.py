"""The entities of a namespace by path: which exist, which may be made, and what is known about each.

Paths are case-insensitive. What happens inside an entity is decided by the entity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from twinbus.namespace.engine.description_json import read_description
from twinbus.namespace.engine.descriptions import (
    CorrelationFilter,
    Description,
    EntityInfo,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.duplicate_detection import IdBudget
from twinbus.namespace.engine.effects import EngineDecision, PendingDecision, Refusal, not_found
from twinbus.namespace.engine.events import Deleted, DescriptionChanged
from twinbus.namespace.engine.lifecycle import EntityCounters, Lifecycle
from twinbus.namespace.engine.limits import MIB
from twinbus.namespace.engine.queue import Queue
from twinbus.namespace.engine.read_ahead import ReadAheadBudget
from twinbus.namespace.engine.receive_state import DeliveryLane, EngineResources
from twinbus.namespace.engine.storage_protocol import OpenedStore, StoredEntity
from twinbus.namespace.engine.topic import Subscription, Topic
from twinbus.namespace.engine.validation import change_refusal, new_entity_refusal
from twinbus.values import Condition

Entity = Queue | Topic | Subscription
RootEntity = Queue | Topic

_HOT_BYTES: Final = 64 * MIB


class EntityRegistry:
    """The registry of one namespace."""

    def __init__(self, opened: OpenedStore, *, new_token: Callable[[], bytes], hot_bytes: int = _HOT_BYTES) -> None:
        self._supplies = EngineResources(new_token, opened.next_body, ReadAheadBudget(hot_bytes), IdBudget())
        self._next_queue = opened.next_queue
        self._entities: dict[str, Entity] = {}
        self._topics: dict[int, Topic] = {}
        """By storage id."""
        described = [(read_description(each.entity.kind, each.entity.text), each) for each in opened.entities]
        # Topics first: a subscription needs its topic.
        for description, stored in sorted(described, key=lambda pair: isinstance(pair[0], SubscriptionDescription)):
            self._open(description, stored)

    def _open(self, description: Description, stored: StoredEntity) -> None:
        lifecycle = self._life(
            EntityCounters(stored.queue), stored.entity.created, stored.entity.updated, reopened=True
        )
        entity: Entity
        if isinstance(description, QueueDescription):
            instants = {"next_expiry": stored.next_expiry, "next_due": stored.next_due}
            entity = Queue(description, lifecycle, self._supplies, **instants, new=False)
        elif isinstance(description, TopicDescription):
            shared = stored.shared_bytes
            entity = Topic(
                description, lifecycle, self._supplies, next_due=stored.next_due, shared_bytes=shared, new=False
            )
        else:
            topic = self._topic(description.topic)
            assert topic is not None, "a topic is removed with its subscriptions, in one commit"
            entity = Subscription(description, topic, lifecycle, self._supplies, next_expiry=stored.next_expiry)
            topic.adopt(entity)
        self._keep(entity)

    def _keep(self, entity: Entity) -> None:
        self._entities[_key(entity.path)] = entity
        if isinstance(entity, Topic):
            self._topics[entity.counters.queue] = entity

    def _life(self, counters: EntityCounters, created: int, updated: int, *, reopened: bool) -> Lifecycle:
        return Lifecycle(counters, created, updated, self._forget, reopened=reopened)

    def _forget(self, path: str) -> None:
        entity = self._entities.pop(_key(path), None)
        if isinstance(entity, Topic):
            del self._topics[entity.counters.queue]

    # --- finding -------------------------------------------------------------------------------------------------

    def find(self, path: str) -> Entity | None:
        """A queue, a topic, or `topic/Subscriptions/name`."""
        return self._entities.get(_key(path))

    def root_entities(self) -> list[RootEntity]:
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

    def free(self, freed: Mapping[int, int]) -> None:
        """Shared bodies are gone from the store: so many bytes of each topic, by its storage id."""
        for queue, size in freed.items():
            if (topic := self._topics.get(queue)) is not None:
                topic.shared_bytes -= size

    # --- forwarding ----------------------------------------------------------------------------------------------

    def pending_forwards(self) -> list[tuple[Queue | Subscription, DeliveryLane, Queue | Topic | None]]:
        """What has to be forwarded, from where to where; whoever asks has it done. The target may be missing."""
        noticed, self._supplies.onward = self._supplies.onward, {}
        found: list[tuple[Queue | Subscription, DeliveryLane, Queue | Topic | None]] = []
        for state, feed in noticed:
            source = self.find(state.path)
            if feed.onward is not None and isinstance(source, Queue | Subscription) and source.receive_state is state:
                found.append((source, feed, self._target(feed.onward)))
        return found

    @property
    def has_pending_forwards(self) -> bool:
        return bool(self._supplies.onward)

    def _target(self, address: str) -> Queue | Topic | None:
        entity = self.find(_path_of(address))
        return None if isinstance(entity, Subscription) else entity

    def _forwarding_fault(self, description: Description) -> Refusal | None:
        if isinstance(description, TopicDescription):
            return None
        topic = description.topic if isinstance(description, SubscriptionDescription) else description.path
        for name, address in (
            ("ForwardTo", description.forward_to),
            ("ForwardDeadLetteredMessagesTo", description.forward_dead_letters_to),
        ):
            if not address:
                continue
            if _key(_path_of(address)) == _key(topic):
                return Refusal(Condition.ARGUMENT_ERROR, f"{name}: '{description.path}' cannot forward to itself.")
            if self._target(address) is None:
                text = f"{name}: there is no queue or topic '{address}' in this namespace."
                return Refusal(Condition.ARGUMENT_ERROR, text)
        return None

    # --- administration ------------------------------------------------------------------------------------------

    def create(self, description: Description, now: int) -> EngineDecision | Refusal:
        refusal = new_entity_refusal(description)
        if refusal is not None:
            return refusal
        if self.find(description.path) is not None:
            text = f"The messaging entity '{description.path}' already exists."
            return Refusal(Condition.ENTITY_ALREADY_EXISTS, text)
        if (refusal := self._forwarding_fault(description)) is not None:
            return refusal
        queue = self._next_queue
        lifecycle = self._life(EntityCounters.new(queue, now), now, now, reopened=False)
        entity: Entity
        if isinstance(description, QueueDescription):
            entity = Queue(description, lifecycle, self._supplies, new=True)
        elif isinstance(description, TopicDescription):
            entity = Topic(description, lifecycle, self._supplies, new=True)
        else:
            topic = self._topic(description.topic)
            if topic is None:
                return not_found(description.topic)
            rules = tuple(replace(rule, created=now) for rule in description.rules)
            description = replace(description, topic=topic.path, rules=rules)
            topic.counters.accessed = now
            entity = Subscription(description, topic, lifecycle, self._supplies)
            topic.adopt(entity)
        self._next_queue += 1
        self._keep(entity)
        return EngineDecision(writes=[lifecycle.record(description), lifecycle.counters.put()])

    def update(self, description: Description, now: int) -> PendingDecision | Refusal:
        entity = self.find(description.path)
        if entity is None or type(entity.description) is not type(description):
            return not_found(description.path)
        before = entity.description
        refusal = change_refusal(before, description) or self._forwarding_fault(description)
        if refusal is not None:
            return refusal
        return entity.advance(DescriptionChanged(None, _renamed(description, before)), now)

    def delete(self, path: str, now: int) -> PendingDecision | Refusal:
        entity = self.find(path)
        return not_found(path) if entity is None else entity.advance(Deleted(None), now)


def _key(path: str) -> str:
    return path.lower()


def forward_targets_first(descriptions: Sequence[Description]) -> list[Description]:
    """In an order in which each can be created: what another one forwards to before that one. Circles stay as given."""
    waiting, ordered = list(descriptions), list[Description]()
    while waiting:
        missing = {_key(each.path) for each in waiting}
        ready = [each for each in waiting if not missing.intersection(_needed(each))] or waiting
        ordered += ready
        waiting = [each for each in waiting if each not in ready]
    return ordered


def _needed(description: Description) -> list[str]:
    if isinstance(description, TopicDescription):
        return []
    needed = [_path_of(each) for each in (description.forward_to, description.forward_dead_letters_to) if each]
    if isinstance(description, SubscriptionDescription):
        needed.append(description.topic)
    return [_key(path) for path in needed]


def _path_of(address: str) -> str:
    """Given as a path, or as clients write it: `sb://host:port/path`."""
    _, scheme, rest = address.partition("://")
    return (rest.partition("/")[2] if scheme else address).strip("/")


def _renamed(description: Description, before: Description) -> Description:
    """An entity keeps the spelling it was created with."""
    if isinstance(description, SubscriptionDescription):
        assert isinstance(before, SubscriptionDescription), "of the same kind"
        return replace(description, topic=before.topic, name=before.name)
    return replace(description, path=before.path)


def _info(entity: Entity) -> EntityInfo:
    lifecycle, counts = entity.lifecycle, entity.counters.counts()
    if not isinstance(entity, Topic) and entity.receive_state.main.onward is not None:
        # Nobody receives from here: what has not been moved yet waits for its transfer.
        counts = replace(counts, active=0, transfer=counts.active)
    info = EntityInfo(entity.description, lifecycle.created, lifecycle.updated, entity.counters.accessed, counts)
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
