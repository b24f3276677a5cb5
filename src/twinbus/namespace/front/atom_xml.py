"""The vocabulary of the management API: which XML element stands for which field of a description, and its order.

Reading and writing both follow these tables. Elements that only the service fills in stand in `atom_writing`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, NamedTuple

from twinbus.namespace.engine.descriptions import (
    Description,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)

ATOM: Final = "http://www.w3.org/2005/Atom"
SERVICE_BUS: Final = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
COUNTS: Final = "http://schemas.microsoft.com/netservices/2011/06/servicebus"
INSTANCE: Final = "http://www.w3.org/2001/XMLSchema-instance"

STANDARD_MESSAGE_KILOBYTES: Final = 256
ILLEGAL: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML may hold."""


class AtomError(ValueError):
    """What is wrong with an entry, by the name of its element; the client is told it."""


class ElementType(StrEnum):
    """How the text of an element is understood."""

    DURATION = "duration"
    DURATION_OR_NEVER = "duration or never"
    BOOLEAN = "boolean"
    INTEGER = "integer"
    TEXT = "text"
    ADDRESS = "address"
    STATUS = "status"
    RULES = "authorization rules"


class AtomElement(NamedTuple):
    """One settable element."""

    name: str
    field: str
    value: ElementType


QUEUE: Final = (
    AtomElement("LockDuration", "lock_duration", ElementType.DURATION),
    AtomElement("MaxSizeInMegabytes", "max_size_megabytes", ElementType.INTEGER),
    AtomElement("RequiresDuplicateDetection", "requires_duplicate_detection", ElementType.BOOLEAN),
    AtomElement("RequiresSession", "requires_session", ElementType.BOOLEAN),
    AtomElement("DefaultMessageTimeToLive", "default_time_to_live", ElementType.DURATION_OR_NEVER),
    AtomElement("DeadLetteringOnMessageExpiration", "dead_lettering_on_expiration", ElementType.BOOLEAN),
    AtomElement("DuplicateDetectionHistoryTimeWindow", "duplicate_window", ElementType.DURATION),
    AtomElement("MaxDeliveryCount", "max_delivery_count", ElementType.INTEGER),
    AtomElement("EnableBatchedOperations", "batched_operations", ElementType.BOOLEAN),
    AtomElement("AuthorizationRules", "authorization_rules", ElementType.RULES),
    AtomElement("Status", "status", ElementType.STATUS),
    AtomElement("ForwardTo", "forward_to", ElementType.ADDRESS),
    AtomElement("UserMetadata", "user_metadata", ElementType.TEXT),
    AtomElement("AutoDeleteOnIdle", "auto_delete_on_idle", ElementType.DURATION_OR_NEVER),
    AtomElement("EnablePartitioning", "enable_partitioning", ElementType.BOOLEAN),
    AtomElement("ForwardDeadLetteredMessagesTo", "forward_dead_letters_to", ElementType.ADDRESS),
    AtomElement("EnableExpress", "enable_express", ElementType.BOOLEAN),
)

TOPIC: Final = (
    AtomElement("DefaultMessageTimeToLive", "default_time_to_live", ElementType.DURATION_OR_NEVER),
    AtomElement("MaxSizeInMegabytes", "max_size_megabytes", ElementType.INTEGER),
    AtomElement("RequiresDuplicateDetection", "requires_duplicate_detection", ElementType.BOOLEAN),
    AtomElement("DuplicateDetectionHistoryTimeWindow", "duplicate_window", ElementType.DURATION),
    AtomElement("EnableBatchedOperations", "batched_operations", ElementType.BOOLEAN),
    AtomElement("FilteringMessagesBeforePublishing", "filtering_messages_before_publishing", ElementType.BOOLEAN),
    AtomElement("AuthorizationRules", "authorization_rules", ElementType.RULES),
    AtomElement("Status", "status", ElementType.STATUS),
    AtomElement("UserMetadata", "user_metadata", ElementType.TEXT),
    AtomElement("SupportOrdering", "support_ordering", ElementType.BOOLEAN),
    AtomElement("AutoDeleteOnIdle", "auto_delete_on_idle", ElementType.DURATION_OR_NEVER),
    AtomElement("EnablePartitioning", "enable_partitioning", ElementType.BOOLEAN),
    AtomElement("EnableExpress", "enable_express", ElementType.BOOLEAN),
)

SUBSCRIPTION: Final = (
    AtomElement("LockDuration", "lock_duration", ElementType.DURATION),
    AtomElement("RequiresSession", "requires_session", ElementType.BOOLEAN),
    AtomElement("DefaultMessageTimeToLive", "default_time_to_live", ElementType.DURATION_OR_NEVER),
    AtomElement("DeadLetteringOnMessageExpiration", "dead_lettering_on_expiration", ElementType.BOOLEAN),
    AtomElement("DeadLetteringOnFilterEvaluationExceptions", "dead_lettering_on_filter_errors", ElementType.BOOLEAN),
    AtomElement("MaxDeliveryCount", "max_delivery_count", ElementType.INTEGER),
    AtomElement("EnableBatchedOperations", "batched_operations", ElementType.BOOLEAN),
    AtomElement("Status", "status", ElementType.STATUS),
    AtomElement("ForwardTo", "forward_to", ElementType.ADDRESS),
    AtomElement("UserMetadata", "user_metadata", ElementType.TEXT),
    AtomElement("ForwardDeadLetteredMessagesTo", "forward_dead_letters_to", ElementType.ADDRESS),
    AtomElement("AutoDeleteOnIdle", "auto_delete_on_idle", ElementType.DURATION_OR_NEVER),
)

KINDS: Final[dict[type[Description], tuple[str, tuple[AtomElement, ...]]]] = {
    QueueDescription: ("QueueDescription", QUEUE),
    TopicDescription: ("TopicDescription", TOPIC),
    SubscriptionDescription: ("SubscriptionDescription", SUBSCRIPTION),
}

# What an update may leave out without changing it: no update can change these.
IMMUTABLE: Final = ("requires_session", "requires_duplicate_detection", "enable_partitioning")
