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


class Value(StrEnum):
    """How the text of an element is understood."""

    DURATION = "duration"
    DURATION_OR_NEVER = "duration or never"
    BOOLEAN = "boolean"
    INTEGER = "integer"
    TEXT = "text"
    ADDRESS = "address"
    STATUS = "status"
    RULES = "authorization rules"


class Element(NamedTuple):
    """One settable element."""

    name: str
    field: str
    value: Value


QUEUE: Final = (
    Element("LockDuration", "lock_duration", Value.DURATION),
    Element("MaxSizeInMegabytes", "max_size_megabytes", Value.INTEGER),
    Element("RequiresDuplicateDetection", "requires_duplicate_detection", Value.BOOLEAN),
    Element("RequiresSession", "requires_session", Value.BOOLEAN),
    Element("DefaultMessageTimeToLive", "default_time_to_live", Value.DURATION_OR_NEVER),
    Element("DeadLetteringOnMessageExpiration", "dead_lettering_on_expiration", Value.BOOLEAN),
    Element("DuplicateDetectionHistoryTimeWindow", "duplicate_window", Value.DURATION),
    Element("MaxDeliveryCount", "max_delivery_count", Value.INTEGER),
    Element("EnableBatchedOperations", "batched_operations", Value.BOOLEAN),
    Element("AuthorizationRules", "authorization_rules", Value.RULES),
    Element("Status", "status", Value.STATUS),
    Element("ForwardTo", "forward_to", Value.ADDRESS),
    Element("UserMetadata", "user_metadata", Value.TEXT),
    Element("AutoDeleteOnIdle", "auto_delete_on_idle", Value.DURATION_OR_NEVER),
    Element("EnablePartitioning", "enable_partitioning", Value.BOOLEAN),
    Element("ForwardDeadLetteredMessagesTo", "forward_dead_letters_to", Value.ADDRESS),
    Element("EnableExpress", "enable_express", Value.BOOLEAN),
)

TOPIC: Final = (
    Element("DefaultMessageTimeToLive", "default_time_to_live", Value.DURATION_OR_NEVER),
    Element("MaxSizeInMegabytes", "max_size_megabytes", Value.INTEGER),
    Element("RequiresDuplicateDetection", "requires_duplicate_detection", Value.BOOLEAN),
    Element("DuplicateDetectionHistoryTimeWindow", "duplicate_window", Value.DURATION),
    Element("EnableBatchedOperations", "batched_operations", Value.BOOLEAN),
    Element("FilteringMessagesBeforePublishing", "filtering_messages_before_publishing", Value.BOOLEAN),
    Element("AuthorizationRules", "authorization_rules", Value.RULES),
    Element("Status", "status", Value.STATUS),
    Element("UserMetadata", "user_metadata", Value.TEXT),
    Element("SupportOrdering", "support_ordering", Value.BOOLEAN),
    Element("AutoDeleteOnIdle", "auto_delete_on_idle", Value.DURATION_OR_NEVER),
    Element("EnablePartitioning", "enable_partitioning", Value.BOOLEAN),
    Element("EnableExpress", "enable_express", Value.BOOLEAN),
)

SUBSCRIPTION: Final = (
    Element("LockDuration", "lock_duration", Value.DURATION),
    Element("RequiresSession", "requires_session", Value.BOOLEAN),
    Element("DefaultMessageTimeToLive", "default_time_to_live", Value.DURATION_OR_NEVER),
    Element("DeadLetteringOnMessageExpiration", "dead_lettering_on_expiration", Value.BOOLEAN),
    Element("DeadLetteringOnFilterEvaluationExceptions", "dead_lettering_on_filter_errors", Value.BOOLEAN),
    Element("MaxDeliveryCount", "max_delivery_count", Value.INTEGER),
    Element("EnableBatchedOperations", "batched_operations", Value.BOOLEAN),
    Element("Status", "status", Value.STATUS),
    Element("ForwardTo", "forward_to", Value.ADDRESS),
    Element("UserMetadata", "user_metadata", Value.TEXT),
    Element("ForwardDeadLetteredMessagesTo", "forward_dead_letters_to", Value.ADDRESS),
    Element("AutoDeleteOnIdle", "auto_delete_on_idle", Value.DURATION_OR_NEVER),
)

KINDS: Final[dict[type[Description], tuple[str, tuple[Element, ...]]]] = {
    QueueDescription: ("QueueDescription", QUEUE),
    TopicDescription: ("TopicDescription", TOPIC),
    SubscriptionDescription: ("SubscriptionDescription", SUBSCRIPTION),
}

# What an update may leave out without changing it: no update can change these.
IMMUTABLE: Final = ("requires_session", "requires_duplicate_detection", "enable_partitioning")
