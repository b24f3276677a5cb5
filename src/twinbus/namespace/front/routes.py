"""Which part of the management API a path means. Pure: a table of shapes, nothing is looked up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What can be asked about."""

    ROOT = "root"
    NAMESPACE = "$namespaceinfo"
    QUEUES = "queues"
    TOPICS = "topics"
    ENTITY = "entity"
    SUBSCRIPTIONS = "subscriptions"
    SUBSCRIPTION = "subscription"
    RULES = "rules"
    RULE = "rule"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Route:
    """`entity` is the queue or topic whose authorization rules count; '' for the namespace's own resources."""

    kind: Kind
    resource: str
    entity: str = ""
    subscription: str = ""
    rule: str = ""

    @property
    def path(self) -> str:
        """The path under which the entity, or the subscription, is found."""
        return f"{self.entity}/Subscriptions/{self.subscription}" if self.subscription else self.entity


def find_route(segments: tuple[str, ...]) -> Route:
    """Names of queues and topics may hold slashes, those of subscriptions and rules may not; words have any case."""
    resource = "/".join(segments)
    if not segments:
        return Route(Kind.ROOT, resource)
    words = tuple(segment.lower() for segment in segments)
    if words[0].startswith("$"):
        return Route(_OWN.get(words, Kind.UNKNOWN), resource)
    match words:
        case (_, *_, "subscriptions", _, "rules", _):
            return Route(Kind.RULE, resource, "/".join(segments[:-4]), segments[-3], segments[-1])
        case (_, *_, "subscriptions", _, "rules"):
            return Route(Kind.RULES, resource, "/".join(segments[:-3]), segments[-2])
        case (_, *_, "subscriptions", _):
            return Route(Kind.SUBSCRIPTION, resource, "/".join(segments[:-2]), segments[-1])
        case (_, *_, "subscriptions"):
            return Route(Kind.SUBSCRIPTIONS, resource, "/".join(segments[:-1]))
        case _:
            return Route(Kind.ENTITY, resource, resource)


_OWN = {
    ("$namespaceinfo",): Kind.NAMESPACE,
    ("$resources", "queues"): Kind.QUEUES,
    ("$resources", "topics"): Kind.TOPICS,
}
