"""The entities of one namespace by path: finding, creating, updating, deleting and describing them.

Paths are case-insensitive. The registry does not handle messages: an entity decides about its own messages.
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
    path_of_address,
)
from twinbus.namespace.engine.duplicate_detection import SeenIdBudget
from twinbus.namespace.engine.effects import EngineDecision, PendingDecision, Refusal, not_found
from twinbus.namespace.engine.events import Deleted, DescriptionChanged
from twinbus.namespace.engine.lifecycle import EntityCounters, Lifecycle
from twinbus.namespace.engine.limits import MIB
from twinbus.namespace.engine.queue import Queue
from twinbus.namespace.engine.read_ahead import ReadAheadBudget
from twinbus.namespace.engine.receive_state import DeliveryLane, EngineResources
from twinbus.namespace.engine.storage_protocol import OpenedStore, StoredEntity
from twinbus.namespace.engine.topic import Subscription, Topic
from twinbus.namespace.engine.validation import MAX_SUBSCRIPTIONS, change_refusal, new_entity_refusal
from twinbus.values import Condition

Entity = Queue | Topic | Subscription
RootEntity = Queue | Topic
"""An entity whose events are decided one after the other. The root entity of a subscription is its topic."""
PendingForward = tuple[Queue | Subscription, DeliveryLane, Queue | Topic | None]
"""The arguments of `forwarding.forward`: source, lane, target."""

_READ_AHEAD_BYTES: Final = 64 * MIB


class EntityRegistry:
    """The entities of one namespace. The constructor makes them from the records that the store returned."""

    def __init__(
        self, opened: OpenedStore, *, new_token: Callable[[], bytes], read_ahead_bytes: int = _READ_AHEAD_BYTES
    ) -> None:
        self._resources = EngineResources(
            new_token, opened.next_body, ReadAheadBudget(read_ahead_bytes), SeenIdBudget()
        )
        self._next_queue = opened.next_queue
        self._entities: dict[str, Entity] = {}
        self._topics: dict[int, Topic] = {}
        """The topics by storage id."""
        described = [(read_description(each.entity.kind, each.entity.text), each) for each in opened.entities]
        # Subscriptions last: each needs its topic.
        for description, stored in sorted(described, key=lambda pair: isinstance(pair[0], SubscriptionDescription)):
            self._open(description, stored)

    def _open(self, description: Description, stored: StoredEntity) -> None:
        counters = EntityCounters(stored.queue)
        lifecycle = self._lifecycle(counters, stored.entity.created, stored.entity.updated, reopened=True)
        entity: Entity
        if isinstance(description, QueueDescription):
            entity = Queue(
                description,
                lifecycle,
                self._resources,
                next_expiry=stored.next_expiry,
                next_due=stored.next_due,
                new=False,
            )
        elif isinstance(description, TopicDescription):
            entity = Topic(
                description,
                lifecycle,
                self._resources,
                next_due=stored.next_due,
                shared_bytes=stored.shared_bytes,
                new=False,
            )
        else:
            topic = self._topic(description.topic)
            assert topic is not None, "a topic is removed with its subscriptions, in one commit"
            entity = Subscription(description, topic, lifecycle, self._resources, next_expiry=stored.next_expiry)
            topic.add(entity)
        self._register(entity)

    def _register(self, entity: Entity) -> None:
        self._entities[_key(entity.path)] = entity
        if isinstance(entity, Topic):
            self._topics[entity.counters.queue] = entity

    def _lifecycle(self, counters: EntityCounters, created: int, updated: int, *, reopened: bool) -> Lifecycle:
        return Lifecycle(counters, created, updated, self._unregister, reopened=reopened)

    def _unregister(self, path: str) -> None:
        entity = self._entities.pop(_key(path), None)
        if isinstance(entity, Topic):
            del self._topics[entity.counters.queue]

    # --- finding -------------------------------------------------------------------------------------------------

    def find(self, path: str) -> Entity | None:
        """Return the queue, topic, or subscription (`topic/Subscriptions/name`) with this path."""
        return self._entities.get(_key(path))

    def root_entities(self) -> list[RootEntity]:
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
        """Subtract the bodies that the store dropped from the charged bytes of topics.

        `freed` maps the storage id of a topic to a number of bytes.
        """
        for queue, size in freed.items():
            if (topic := self._topics.get(queue)) is not None:
                topic.shared_bytes -= size

    # --- forwarding ----------------------------------------------------------------------------------------------

    def pending_forwards(self) -> list[PendingForward]:
        """Return the lanes with rows to forward, and clear the list of them. The caller must forward the rows."""
        noticed, self._resources.pending_forwards = self._resources.pending_forwards, {}
        found: list[PendingForward] = []
        for state, lane in noticed:
            source = self.find(state.path)
            if lane.forward_to is None or not isinstance(source, Queue | Subscription):
                continue
            if source.receive_state is state:  # not a newer entity with the same path
                found.append((source, lane, self._forward_target(lane.forward_to)))
        return found

    @property
    def has_pending_forwards(self) -> bool:
        return bool(self._resources.pending_forwards)

    def _forward_target(self, address: str) -> Queue | Topic | None:
        entity = self.find(path_of_address(address))
        return None if isinstance(entity, Subscription) else entity

    def _forwarding_refusal(self, description: Description) -> Refusal | None:
        if isinstance(description, TopicDescription):
            return None
        for name, address in (
            ("ForwardTo", description.forward_to),
            ("ForwardDeadLetteredMessagesTo", description.forward_dead_letters_to),
        ):
            if not address or _key(path_of_address(address)) == _key(description.path):
                continue
            if self._forward_target(address) is None:
                text = f"{name}: there is no queue or topic '{address}' in this namespace."
                return Refusal(Condition.ARGUMENT_ERROR, text)
        return None

    # --- administration ------------------------------------------------------------------------------------------

    def create(self, description: Description, now: int) -> EngineDecision | Refusal:
        """Create an entity. Returns the decision to carry out, or why the entity cannot be created."""
        refusal = new_entity_refusal(description)
        if refusal is not None:
            return refusal
        if self.find(description.path) is not None:
            text = f"The messaging entity '{description.path}' already exists."
            return Refusal(Condition.ENTITY_ALREADY_EXISTS, text)
        if (refusal := self._forwarding_refusal(description)) is not None:
            return refusal
        lifecycle = self._lifecycle(EntityCounters.new(self._next_queue, now), now, now, reopened=False)
        entity: Entity
        if isinstance(description, QueueDescription):
            entity = Queue(description, lifecycle, self._resources, new=True)
        elif isinstance(description, TopicDescription):
            entity = Topic(description, lifecycle, self._resources, new=True)
        else:
            topic = self._topic(description.topic)
            if topic is None:
                return not_found(description.topic)
            if len(topic.subscriptions) >= MAX_SUBSCRIPTIONS:
                text = f"The topic '{topic.path}' has {MAX_SUBSCRIPTIONS} subscriptions. It cannot have more."
                return Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text)
            rules = tuple(replace(rule, created=now) for rule in description.rules)
            description = replace(description, topic=topic.path, rules=rules)
            topic.counters.accessed = now
            entity = Subscription(description, topic, lifecycle, self._resources)
            topic.add(entity)
        self._next_queue += 1
        self._register(entity)
        return EngineDecision(writes=[lifecycle.record(description), lifecycle.counters.put()])

    def update(self, description: Description, now: int) -> PendingDecision | Refusal:
        """Change the description of an entity. Returns the decision to carry out, or why the change is refused."""
        entity = self.find(description.path)
        if entity is None or type(entity.description) is not type(description):
            return not_found(description.path)
        before = entity.description
        refusal = change_refusal(before, description) or self._forwarding_refusal(description)
        if refusal is not None:
            return refusal
        return entity.advance(DescriptionChanged(None, _with_name_of(before, description)), now)

    def delete(self, path: str, now: int) -> PendingDecision | Refusal:
        """Delete an entity. Returns the decision to carry out, or a refusal if there is no such entity."""
        entity = self.find(path)
        return not_found(path) if entity is None else entity.advance(Deleted(None), now)


def forward_targets_first(descriptions: Sequence[Description]) -> list[Description]:
    """Sort descriptions so that each entity is created after its topic and its forwarding targets.

    Entities that forward in a circle keep their order.
    """
    waiting, ordered = list(descriptions), list[Description]()
    while waiting:
        missing = {_key(each.path) for each in waiting}
        ready = [each for each in waiting if not missing.intersection(_required_paths(each))] or waiting
        ordered += ready
        waiting = [each for each in waiting if each not in ready]
    return ordered


def _required_paths(description: Description) -> list[str]:
    """Return the paths of the entities that must exist before the described entity is created."""
    if isinstance(description, TopicDescription):
        return []
    paths = [path_of_address(each) for each in (description.forward_to, description.forward_dead_letters_to) if each]
    if isinstance(description, SubscriptionDescription):
        paths.append(description.topic)
    return [key for key in map(_key, paths) if key != _key(description.path)]


def _key(path: str) -> str:
    return path.lower()


def _with_name_of(before: Description, description: Description) -> Description:
    """Return the new description with the name spelled as it was when the entity was created."""
    if isinstance(description, SubscriptionDescription):
        assert isinstance(before, SubscriptionDescription), "of the same kind"
        return replace(description, topic=before.topic, name=before.name)
    return replace(description, path=before.path)


def _info(entity: Entity) -> EntityInfo:
    lifecycle, counts = entity.lifecycle, entity.counters.message_counts()
    if not isinstance(entity, Topic) and entity.receive_state.main.forward_to is not None:
        # No receiver can get the messages of an entity that forwards: its active messages wait to be forwarded.
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
        # To the service, the true and the false filter are SQL filters.
        sql_filters=len(filters) - correlations,
        correlation_filters=correlations,
    )


def _infos(entities: Sequence[Entity]) -> list[EntityInfo]:
    return [_info(entity) for entity in sorted(entities, key=lambda entity: _key(entity.path))]
