"""A namespace of plain dictionaries: the management API's other side where no message is sent."""

from collections.abc import Sequence

from twinbus.amqp.conditions import Condition
from twinbus.namespace.engine.descriptions import (
    Counts,
    Description,
    EntityInfo,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.effects import Refusal

BORN = 1_700_000_000_000


class Entities:
    """Entities by lower-case path; both the directory and what changes it."""

    def __init__(self, *descriptions: Description) -> None:
        self.clock = BORN
        self._found: dict[str, EntityInfo] = {}
        for description in descriptions:
            self.put(EntityInfo(description, BORN, BORN, 0))

    @property
    def namespace(self) -> "Entities":
        return self

    def now(self) -> int:
        return self.clock

    def put(self, info: EntityInfo) -> None:
        self._found[info.description.path.lower()] = info

    def count(self, path: str, counts: Counts) -> None:
        info = self._found[path.lower()]
        self.put(EntityInfo(info.description, info.created, info.updated, BORN + 5, counts))

    def info(self, path: str) -> EntityInfo | None:
        info = self._found.get(path.lower())
        if info is None or not isinstance(info.description, TopicDescription):
            return info
        subscriptions = len(self.subscriptions(path))
        return EntityInfo(info.description, info.created, info.updated, info.accessed, info.counts, subscriptions)

    def queues(self) -> Sequence[EntityInfo]:
        return self._all(QueueDescription)

    def topics(self) -> Sequence[EntityInfo]:
        return self._all(TopicDescription)

    def subscriptions(self, topic: str) -> Sequence[EntityInfo]:
        below = topic.lower() + "/subscriptions/"
        return [info for info in self._all(SubscriptionDescription) if info.description.path.lower().startswith(below)]

    async def create(self, description: Description) -> EntityInfo | Refusal:
        if description.path.lower() in self._found:
            return Refusal(Condition.ENTITY_ALREADY_EXISTS, f"{description.path} exists")
        if isinstance(description, SubscriptionDescription) and description.topic.lower() not in self._found:
            return Refusal(Condition.NOT_FOUND, f"there is no topic {description.topic}")
        self.put(EntityInfo(description, BORN, BORN, 0))
        return self._found[description.path.lower()]

    async def update(self, description: Description) -> EntityInfo | Refusal:
        before = self._found.get(description.path.lower())
        if before is None:
            return Refusal(Condition.NOT_FOUND, "gone")
        if getattr(before.description, "requires_session", None) != getattr(description, "requires_session", None):
            return Refusal(Condition.ARGUMENT_ERROR, "RequiresSession cannot be changed")
        self.put(EntityInfo(description, before.created, BORN + 1, before.accessed, before.counts))
        return self._found[description.path.lower()]

    async def delete(self, path: str) -> EntityInfo | Refusal:
        gone = self._found.pop(path.lower(), None)
        return gone or Refusal(Condition.NOT_FOUND, f"there is no {path}")

    def _all(self, kind: type[Description]) -> Sequence[EntityInfo]:
        found = [info for info in self._found.values() if isinstance(info.description, kind)]
        return sorted(found, key=lambda info: info.description.path.lower())
