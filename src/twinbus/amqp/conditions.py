"""The error conditions of AMQP 1.0 and of Service Bus, and the error that carries one.

Which condition belongs to which violation is decided where the violation is found; what a client makes of a
condition is decided by the client.
"""

from collections.abc import Mapping
from enum import StrEnum


class Condition(StrEnum):
    # amqp-core-transport §2.8.15
    INTERNAL_ERROR = "amqp:internal-error"
    NOT_FOUND = "amqp:not-found"
    UNAUTHORIZED_ACCESS = "amqp:unauthorized-access"
    DECODE_ERROR = "amqp:decode-error"
    RESOURCE_LIMIT_EXCEEDED = "amqp:resource-limit-exceeded"
    NOT_ALLOWED = "amqp:not-allowed"
    INVALID_FIELD = "amqp:invalid-field"
    NOT_IMPLEMENTED = "amqp:not-implemented"
    RESOURCE_LOCKED = "amqp:resource-locked"
    PRECONDITION_FAILED = "amqp:precondition-failed"
    RESOURCE_DELETED = "amqp:resource-deleted"
    ILLEGAL_STATE = "amqp:illegal-state"
    FRAME_SIZE_TOO_SMALL = "amqp:frame-size-too-small"
    # §2.8.16
    CONNECTION_FORCED = "amqp:connection:forced"
    FRAMING_ERROR = "amqp:connection:framing-error"
    CONNECTION_REDIRECT = "amqp:connection:redirect"
    # §2.8.17
    WINDOW_VIOLATION = "amqp:session:window-violation"
    ERRANT_LINK = "amqp:session:errant-link"
    HANDLE_IN_USE = "amqp:session:handle-in-use"
    UNATTACHED_HANDLE = "amqp:session:unattached-handle"
    # §2.8.18
    DETACH_FORCED = "amqp:link:detach-forced"
    TRANSFER_LIMIT_EXCEEDED = "amqp:link:transfer-limit-exceeded"
    MESSAGE_SIZE_EXCEEDED = "amqp:link:message-size-exceeded"
    LINK_REDIRECT = "amqp:link:redirect"
    LINK_STOLEN = "amqp:link:stolen"
    # amqp-core-transactions §4.5.8
    TRANSACTION_UNKNOWN_ID = "amqp:transaction:unknown-id"
    TRANSACTION_ROLLBACK = "amqp:transaction:rollback"
    TRANSACTION_TIMEOUT = "amqp:transaction:timeout"
    # Service Bus
    DEAD_LETTER = "com.microsoft:dead-letter"
    SERVER_BUSY = "com.microsoft:server-busy"
    TIMEOUT = "com.microsoft:timeout"
    OPERATION_CANCELLED = "com.microsoft:operation-cancelled"
    CONTAINER_CLOSE = "com.microsoft:container-close"
    ENTITY_DISABLED = "com.microsoft:entity-disabled"
    ENTITY_ALREADY_EXISTS = "com.microsoft:entity-already-exists"
    MESSAGE_NOT_FOUND = "com.microsoft:message-not-found"
    MESSAGE_LOCK_LOST = "com.microsoft:message-lock-lost"
    SESSION_LOCK_LOST = "com.microsoft:session-lock-lost"
    SESSION_CANNOT_BE_LOCKED = "com.microsoft:session-cannot-be-locked"
    SESSION_NOT_FOUND = "com.microsoft:session-not-found"
    ARGUMENT_ERROR = "com.microsoft:argument-error"
    ARGUMENT_OUT_OF_RANGE = "com.microsoft:argument-out-of-range"
    AUTH_FAILED = "com.microsoft:auth-failed"
    PUBLISHER_REVOKED = "com.microsoft:publisher-revoked"
    PARTITION_NOT_OWNED = "com.microsoft:partition-not-owned"


class AmqpError(Exception):
    """Something the peer, or the caller, did that AMQP has a condition for."""

    def __init__(self, condition: str, description: str, info: Mapping[object, object] | None = None) -> None:
        super().__init__(f"{condition}: {description}")
        self.condition = str(condition)
        self.description = description
        self.info = info


class DecodeError(AmqpError):
    """The bytes are not AMQP (§2.8.15, amqp:decode-error)."""

    def __init__(self, description: str) -> None:
        super().__init__(Condition.DECODE_ERROR, description)


class EncodeError(ValueError):
    """The value cannot be written as the AMQP type it claims to be: the caller's fault."""
