"""The properties of queues, topics and subscriptions that can be set: one table with their names in every format.

The same property has three names: `default_time_to_live` in a description, `DefaultMessageTimeToLive` in the ATOM
documents of the management API and in the emulator's configuration file, `default_message_time_to_live` in our own
configuration file (the name that azure-servicebus uses). `ENTITY_PROPERTIES` has one row for each property with all
its names, its type and its range. A module that reads or writes one of the formats goes through the rows:

    for row in properties_of(QueueDescription):       # in the order of the ATOM document
        value = getattr(description, row.field)

`properties_of` also answers which kind of entity has which property. The default of a property is the default of the
field in the description; `EntityProperty.default` returns it.

The table leaves out the fields that identify an entity (`path`, `topic`, `name`), and the rules of a subscription,
which have formats of their own.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any, Final

from twinbus.namespace.engine import limits
from twinbus.namespace.engine.descriptions import (
    Description,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)


class PropertyType(Enum):
    """The type of a property. In a description, a duration is an integer, in milliseconds."""

    DURATION = "duration"
    DURATION_OR_NEVER = "duration or never"
    """None in a description stands for never."""
    BOOLEAN = "boolean"
    INTEGER = "integer"
    TEXT = "text"
    ENTITY_ADDRESS = "entity address"
    """The path of a queue or topic, or its address `sb://host/path`. None for no target."""
    STATUS = "status"
    """A member of EntityStatus."""
    AUTHORIZATION_RULES = "authorization rules"
    """A tuple of AuthorizationRule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntityProperty:
    """One property of entities: a row of the table `ENTITY_PROPERTIES`."""

    field: str
    """Name of the field in QueueDescription, TopicDescription and SubscriptionDescription."""
    atom_name: str
    """Name of the XML element in ATOM documents, and of the member in the emulator's configuration file."""
    config_name: str | None
    """Name in our own configuration file, as in azure-servicebus. None: the file cannot set the property."""
    type: PropertyType
    minimum: int | None = None
    """The smallest value of a duration or integer; None for no bound. A duration of None (never) is always allowed."""
    maximum: int | None = None
    choices: tuple[int, ...] = ()
    """The only values allowed; empty if the property has no such list."""
    is_fixed: bool = False
    """Whether the property cannot change after the entity was created."""

    @property
    def default(self) -> Any:
        """The value for an entity that was created without this property. The same for every kind of entity."""
        return _DEFAULTS[self.field]


_LOCK_DURATION: Final = EntityProperty(
    field="lock_duration",
    atom_name="LockDuration",
    config_name="lock_duration",
    type=PropertyType.DURATION,
    minimum=limits.MIN_LOCK,
    maximum=limits.MAX_LOCK,
)
_MAX_SIZE: Final = EntityProperty(
    field="max_size_megabytes",
    atom_name="MaxSizeInMegabytes",
    config_name="max_size_in_megabytes",
    type=PropertyType.INTEGER,
    choices=limits.QUEUE_MEGABYTES,
)
_REQUIRES_DUPLICATE_DETECTION: Final = EntityProperty(
    field="requires_duplicate_detection",
    atom_name="RequiresDuplicateDetection",
    config_name="requires_duplicate_detection",
    type=PropertyType.BOOLEAN,
    is_fixed=True,
)
_REQUIRES_SESSION: Final = EntityProperty(
    field="requires_session",
    atom_name="RequiresSession",
    config_name="requires_session",
    type=PropertyType.BOOLEAN,
    is_fixed=True,
)
_DEFAULT_TIME_TO_LIVE: Final = EntityProperty(
    field="default_time_to_live",
    atom_name="DefaultMessageTimeToLive",
    config_name="default_message_time_to_live",
    type=PropertyType.DURATION_OR_NEVER,
    minimum=limits.MIN_TTL,
)
_DEAD_LETTERING_ON_EXPIRATION: Final = EntityProperty(
    field="dead_lettering_on_expiration",
    atom_name="DeadLetteringOnMessageExpiration",
    config_name="dead_lettering_on_message_expiration",
    type=PropertyType.BOOLEAN,
)
_DEAD_LETTERING_ON_FILTER_ERRORS: Final = EntityProperty(
    field="dead_lettering_on_filter_errors",
    atom_name="DeadLetteringOnFilterEvaluationExceptions",
    config_name="dead_lettering_on_filter_evaluation_exceptions",
    type=PropertyType.BOOLEAN,
)
_DUPLICATE_WINDOW: Final = EntityProperty(
    field="duplicate_window",
    atom_name="DuplicateDetectionHistoryTimeWindow",
    config_name="duplicate_detection_history_time_window",
    type=PropertyType.DURATION,
    minimum=limits.MIN_DUPLICATE_WINDOW,
    maximum=limits.MAX_DUPLICATE_WINDOW,
)
_MAX_DELIVERY_COUNT: Final = EntityProperty(
    field="max_delivery_count",
    atom_name="MaxDeliveryCount",
    config_name="max_delivery_count",
    type=PropertyType.INTEGER,
    minimum=1,
    maximum=limits.MAX_DELIVERY_COUNT,
)
_BATCHED_OPERATIONS: Final = EntityProperty(
    field="batched_operations",
    atom_name="EnableBatchedOperations",
    config_name="enable_batched_operations",
    type=PropertyType.BOOLEAN,
)
_FILTERING_BEFORE_PUBLISHING: Final = EntityProperty(
    field="filtering_messages_before_publishing",
    atom_name="FilteringMessagesBeforePublishing",
    config_name=None,
    type=PropertyType.BOOLEAN,
)
_AUTHORIZATION_RULES: Final = EntityProperty(
    field="authorization_rules",
    atom_name="AuthorizationRules",
    config_name=None,
    type=PropertyType.AUTHORIZATION_RULES,
)
_STATUS: Final = EntityProperty(
    field="status",
    atom_name="Status",
    config_name="status",
    type=PropertyType.STATUS,
)
_FORWARD_TO: Final = EntityProperty(
    field="forward_to",
    atom_name="ForwardTo",
    config_name="forward_to",
    type=PropertyType.ENTITY_ADDRESS,
)
_FORWARD_DEAD_LETTERS_TO: Final = EntityProperty(
    field="forward_dead_letters_to",
    atom_name="ForwardDeadLetteredMessagesTo",
    config_name="forward_dead_lettered_messages_to",
    type=PropertyType.ENTITY_ADDRESS,
)
_USER_METADATA: Final = EntityProperty(
    field="user_metadata",
    atom_name="UserMetadata",
    config_name="user_metadata",
    type=PropertyType.TEXT,
)
_SUPPORT_ORDERING: Final = EntityProperty(
    field="support_ordering",
    atom_name="SupportOrdering",
    config_name="support_ordering",
    type=PropertyType.BOOLEAN,
)
_AUTO_DELETE_ON_IDLE: Final = EntityProperty(
    field="auto_delete_on_idle",
    atom_name="AutoDeleteOnIdle",
    config_name="auto_delete_on_idle",
    type=PropertyType.DURATION_OR_NEVER,
    minimum=limits.MIN_IDLE_DELETE,
)
_ENABLE_PARTITIONING: Final = EntityProperty(
    field="enable_partitioning",
    atom_name="EnablePartitioning",
    config_name="enable_partitioning",
    type=PropertyType.BOOLEAN,
    is_fixed=True,
)
_ENABLE_EXPRESS: Final = EntityProperty(
    field="enable_express",
    atom_name="EnableExpress",
    config_name="enable_express",
    type=PropertyType.BOOLEAN,
)

# The service's serializer reads elements in a fixed order, which differs between the kinds of entities.
_BY_KIND: Final[dict[type[Description], tuple[EntityProperty, ...]]] = {
    QueueDescription: (
        _LOCK_DURATION,
        _MAX_SIZE,
        _REQUIRES_DUPLICATE_DETECTION,
        _REQUIRES_SESSION,
        _DEFAULT_TIME_TO_LIVE,
        _DEAD_LETTERING_ON_EXPIRATION,
        _DUPLICATE_WINDOW,
        _MAX_DELIVERY_COUNT,
        _BATCHED_OPERATIONS,
        _AUTHORIZATION_RULES,
        _STATUS,
        _FORWARD_TO,
        _USER_METADATA,
        _AUTO_DELETE_ON_IDLE,
        _ENABLE_PARTITIONING,
        _FORWARD_DEAD_LETTERS_TO,
        _ENABLE_EXPRESS,
    ),
    TopicDescription: (
        _DEFAULT_TIME_TO_LIVE,
        _MAX_SIZE,
        _REQUIRES_DUPLICATE_DETECTION,
        _DUPLICATE_WINDOW,
        _BATCHED_OPERATIONS,
        _FILTERING_BEFORE_PUBLISHING,
        _AUTHORIZATION_RULES,
        _STATUS,
        _USER_METADATA,
        _SUPPORT_ORDERING,
        _AUTO_DELETE_ON_IDLE,
        _ENABLE_PARTITIONING,
        _ENABLE_EXPRESS,
    ),
    SubscriptionDescription: (
        _LOCK_DURATION,
        _REQUIRES_SESSION,
        _DEFAULT_TIME_TO_LIVE,
        _DEAD_LETTERING_ON_EXPIRATION,
        _DEAD_LETTERING_ON_FILTER_ERRORS,
        _MAX_DELIVERY_COUNT,
        _BATCHED_OPERATIONS,
        _STATUS,
        _FORWARD_TO,
        _USER_METADATA,
        _FORWARD_DEAD_LETTERS_TO,
        _AUTO_DELETE_ON_IDLE,
    ),
}
_DEFAULTS: Final = {
    field.name: field.default for kind in _BY_KIND for field in fields(kind) if field.default is not MISSING
}

ENTITY_PROPERTIES: Final = tuple(dict.fromkeys(row for rows in _BY_KIND.values() for row in rows))
"""The properties of all kinds of entities, each property once."""
PROPERTY_BY_FIELD: Final = {row.field: row for row in ENTITY_PROPERTIES}
FIXED_FIELDS: Final = tuple(row.field for row in ENTITY_PROPERTIES if row.is_fixed)
"""Fields of a description that an update cannot change."""


def properties_of(kind: type[Description]) -> tuple[EntityProperty, ...]:
    """Return the properties of this kind of entity, in the order of its ATOM document."""
    return _BY_KIND[kind]
