"""What an operator says about an entity, and the checks the service makes of it.

Plain data in the vocabulary of the management API. Nothing here knows XML, time or messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from twinbus.namespace.engine import limits


class EntityStatus(StrEnum):
    """Which sides of an entity are open."""

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
    """What a shared access rule allows."""

    SEND = "Send"
    LISTEN = "Listen"
    MANAGE = "Manage"


@dataclass(frozen=True, slots=True)
class AuthorizationRule:
    """A named key of a namespace or of one entity."""

    name: str
    primary_key: str
    secondary_key: str
    claims: frozenset[Claim]


DEFAULT_RULE: Final = "$Default"
TRUE_EXPRESSION: Final = "1=1"
FALSE_EXPRESSION: Final = "1=0"


@dataclass(frozen=True, slots=True)
class TrueFilter:
    """Takes every message."""


@dataclass(frozen=True, slots=True)
class FalseFilter:
    """Takes none."""


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """Takes what the expression is true of. Parameters by name, with or without the @."""

    expression: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrelationFilter:
    """Takes what is equal in everything that is named here; None names nothing."""

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
    """Changes the subscription's copy of a message."""

    expression: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RuleDescription:
    """One rule. `created` is in milliseconds since the epoch; 0 until its subscription has it."""

    name: str
    filter: RuleFilter = field(default_factory=TrueFilter)
    action: SqlAction | None = None
    created: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDescription:
    """Everything settable about a queue. Durations in milliseconds, None for never."""

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
    """Everything settable about a topic."""

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
    """Everything settable about a subscription, and its rules, which an update of the rest leaves as they are."""

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
    """Runtime figures of one queue, subscription or topic."""

    active: int = 0
    deferred: int = 0
    scheduled: int = 0
    dead_letter: int = 0
    transfer: int = 0
    """What waits to be forwarded; where something forwards, nothing is active."""
    transfer_dead_letter: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EntityInfo:
    """A description with what the namespace knows about the entity; the last three are for topics only."""

    description: Description
    created: int
    updated: int
    accessed: int
    counts: EntityMessageCounts = field(default_factory=EntityMessageCounts)
    subscriptions: int = 0
    sql_filters: int = 0
    correlation_filters: int = 0
