"""Descriptions of entities and rules: the settings that an operator gives, in the vocabulary of the management API.

Plain data. Durations are in milliseconds; None stands for never (P10675199DT2H48M5.4775807S in the service's XML).
`entity_properties` has the names of all settings in every format, `validation` the checks, `description_json` the
format of the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from twinbus.namespace.engine import limits


class EntityStatus(StrEnum):
    """Whether an entity accepts sends and receives."""

    ACTIVE = "Active"
    DISABLED = "Disabled"
    SEND_DISABLED = "SendDisabled"
    RECEIVE_DISABLED = "ReceiveDisabled"

    @property
    def takes_sends(self) -> bool:
        return self in (EntityStatus.ACTIVE, EntityStatus.RECEIVE_DISABLED)

    @property
    def gives_receives(self) -> bool:
        return self in (EntityStatus.ACTIVE, EntityStatus.SEND_DISABLED)


class Claim(StrEnum):
    """A right that a shared access rule gives."""

    SEND = "Send"
    LISTEN = "Listen"
    MANAGE = "Manage"


@dataclass(frozen=True, slots=True)
class AuthorizationRule:
    """A shared access rule of a namespace or of one entity."""

    name: str
    primary_key: str
    secondary_key: str
    claims: frozenset[Claim]


DEFAULT_RULE: Final = "$Default"
TRUE_EXPRESSION: Final = "1=1"
FALSE_EXPRESSION: Final = "1=0"


@dataclass(frozen=True, slots=True)
class TrueFilter:
    """A filter that selects every message."""


@dataclass(frozen=True, slots=True)
class FalseFilter:
    """A filter that selects no message."""


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """A filter that selects the messages for which the expression is true. Names of parameters may omit the @."""

    expression: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrelationFilter:
    """A filter that selects the messages whose properties equal those given here. None: do not compare the property."""

    correlation_id: str | None = None
    message_id: str | None = None
    to: str | None = None
    reply_to: str | None = None
    label: str | None = None
    session_id: str | None = None
    reply_to_session_id: str | None = None
    content_type: str | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)


RuleFilter = TrueFilter | FalseFilter | SqlFilter | CorrelationFilter


@dataclass(frozen=True, slots=True)
class SqlAction:
    """An action: SQL statements that change the subscription's copy of a selected message."""

    expression: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RuleDescription:
    """One rule of a subscription. `created` is in milliseconds since the epoch, and 0 until the rule is added.

    The values of parameters and properties keep their AMQP types.
    """

    name: str
    filter: RuleFilter = field(default_factory=TrueFilter)
    action: SqlAction | None = None
    created: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDescription:
    """The settings of a queue."""

    path: str
    lock_duration: int = limits.DEFAULT_LOCK
    max_size_megabytes: int = limits.DEFAULT_QUEUE_MEGABYTES
    requires_duplicate_detection: bool = False
    requires_session: bool = False
    default_time_to_live: int | None = None
    dead_lettering_on_expiration: bool = False
    duplicate_window: int = limits.DEFAULT_DUPLICATE_WINDOW
    max_delivery_count: int = limits.DEFAULT_MAX_DELIVERY_COUNT
    batched_operations: bool = True
    authorization_rules: tuple[AuthorizationRule, ...] = ()
    status: EntityStatus = EntityStatus.ACTIVE
    user_metadata: str | None = None
    auto_delete_on_idle: int | None = None
    enable_partitioning: bool = False
    enable_express: bool = False
    forward_to: str | None = None
    forward_dead_letters_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDescription:
    """The settings of a topic."""

    path: str
    default_time_to_live: int | None = None
    max_size_megabytes: int = limits.DEFAULT_QUEUE_MEGABYTES
    requires_duplicate_detection: bool = False
    duplicate_window: int = limits.DEFAULT_DUPLICATE_WINDOW
    batched_operations: bool = True
    filtering_messages_before_publishing: bool = False
    authorization_rules: tuple[AuthorizationRule, ...] = ()
    status: EntityStatus = EntityStatus.ACTIVE
    user_metadata: str | None = None
    support_ordering: bool = False
    auto_delete_on_idle: int | None = None
    enable_partitioning: bool = False
    enable_express: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionDescription:
    """The settings of a subscription, and its rules. An update of the settings does not change the rules."""

    topic: str
    name: str
    lock_duration: int = limits.DEFAULT_LOCK
    requires_session: bool = False
    default_time_to_live: int | None = None
    dead_lettering_on_expiration: bool = False
    dead_lettering_on_filter_errors: bool = True
    max_delivery_count: int = limits.DEFAULT_MAX_DELIVERY_COUNT
    batched_operations: bool = True
    status: EntityStatus = EntityStatus.ACTIVE
    user_metadata: str | None = None
    auto_delete_on_idle: int | None = None
    forward_to: str | None = None
    forward_dead_letters_to: str | None = None
    rules: tuple[RuleDescription, ...] = (RuleDescription(DEFAULT_RULE),)

    @property
    def path(self) -> str:
        return f"{self.topic}/Subscriptions/{self.name}"


Description = QueueDescription | TopicDescription | SubscriptionDescription


@dataclass(frozen=True, slots=True)
class EntityMessageCounts:
    """Numbers of messages in one queue, subscription or topic, and their size."""

    active: int = 0
    deferred: int = 0
    scheduled: int = 0
    dead_letter: int = 0
    transfer: int = 0
    """Messages that wait to be forwarded. An entity that forwards has no active messages."""
    transfer_dead_letter: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EntityInfo:
    """A description with runtime information about the entity. The last three fields are for topics only."""

    description: Description
    created: int
    updated: int
    accessed: int
    counts: EntityMessageCounts = field(default_factory=EntityMessageCounts)
    subscriptions: int = 0
    sql_filters: int = 0
    correlation_filters: int = 0


def path_of_address(address: str) -> str:
    """Return the path in an address. An address is `path`, or `sb://host:port/path` as clients write it."""
    _, scheme, rest = address.partition("://")
    return (rest.partition("/")[2] if scheme else address).strip("/")
