"""Errors of the client, in three families: the caller must change the call, retry, or the operator must act.

The classes have the same names as in azure-servicebus. The table `ERRORS` maps AMQP conditions to classes; an unknown
condition becomes a ServiceBusInternalError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Self

from twinbus.errors import CallerError, OperatorError, RetryError, TwinbusError
from twinbus.values import Condition


class ServiceBusError(TwinbusError):
    """Base of all errors of the client.

    `failed`: the messages that the error concerns, if the operation had several messages (a send or a settlement).
    `cut_off`: the link ended during the operation, and this error is not the service's answer to the operation. The
    service may have carried out the operation.
    """

    default_hint: ClassVar[str] = ""
    cut_off: bool = False

    def __init__(
        self,
        description: str,
        *,
        condition: str | None = None,
        entity: str | None = None,
        failed: Sequence[Any] = (),
    ) -> None:
        Exception.__init__(self, description)
        self.description = self.text = description
        self.hint = self.default_hint
        self.condition = condition
        self.entity = entity
        self.failed = tuple(failed)

    def copy(self, entity: str | None = None, failed: Sequence[Any] = ()) -> Self:
        """Return a copy of the error. Each waiting call raises its own: a shared object would collect tracebacks."""
        made = type(self)(
            self.description, condition=self.condition, entity=entity or self.entity, failed=failed or self.failed
        )
        made.cut_off = self.cut_off
        return made

    def __str__(self) -> str:
        place = f" (entity {self.entity})" if self.entity else ""
        kind = f"{self.condition}: " if self.condition else ""
        hint = f" {self.hint}" if self.hint else ""
        return f"{kind}{self.description}{place}{hint}"


# --- the caller acts -------------------------------------------------------------------------------------------


class ServiceBusArgumentError(ServiceBusError, CallerError, ValueError):
    """The service does not accept the request or the message."""


class MessageSizeExceededError(ServiceBusError, CallerError, ValueError):
    """The message is larger than the link accepts."""


class MessageAlreadySettled(ServiceBusError, CallerError, ValueError):  # noqa: N818 (its name in azure-servicebus)
    """The message is already settled, or was delivered without a lock."""


class MessageNotFoundError(ServiceBusError, CallerError):
    """No message of this entity has the requested sequence number, or the message is not in the expected state."""


class MessageLockLostError(ServiceBusError, CallerError):
    """This receiver no longer holds the message's lock. The message was or will be delivered again."""


class SessionLockLostError(ServiceBusError, CallerError):
    """This receiver no longer holds the session. Accept the session again with a new receiver."""


class ConnectionClosedError(ServiceBusError, CallerError):
    """The caller closed the connection, sender or receiver."""


# --- the caller retries ----------------------------------------------------------------------------------------


class ServiceBusServerBusyError(ServiceBusError, RetryError):
    """The service is overloaded. Wait some seconds and try again."""


class OperationTimeoutError(ServiceBusError, RetryError):
    """No answer came within the timeout. The service may have carried out the operation."""


class ServiceBusConnectionError(ServiceBusError, RetryError):
    """The connection or the link broke. The next operation connects again.

    The service may have carried out operations that had no answer.
    """


class ServiceBusCommunicationError(ServiceBusError, RetryError):
    """The connection could not be made."""


class SessionCannotBeLockedError(ServiceBusError, RetryError):
    """Another receiver holds the session."""


class ServiceBusInternalError(ServiceBusError, RetryError):
    """The service failed, or reported an unknown condition."""


# --- the operator acts -----------------------------------------------------------------------------------------


class MessagingEntityNotFoundError(ServiceBusError, OperatorError):
    default_hint = "Create the entity, or correct its name."


class MessagingEntityAlreadyExistsError(ServiceBusError, OperatorError):
    default_hint = "Choose another name."


class MessagingEntityDisabledError(ServiceBusError, OperatorError):
    default_hint = "Enable the entity."


class ServiceBusQuotaExceededError(ServiceBusError, OperatorError):
    default_hint = "Receive messages from it, or raise its size."


class ServiceBusAuthenticationError(ServiceBusError, OperatorError):
    default_hint = "Check the key and its name, and this machine's clock."


class ServiceBusCredentialError(ServiceBusAuthenticationError):
    """A credential gave no token: nobody is signed in, or the issuer refuses."""

    default_hint = "Sign in, or check the identity and the variables that the credential uses."


class ServiceBusAuthorizationError(ServiceBusError, OperatorError):
    default_hint = "Give the key's rule the claim it lacks, or the credential's identity the role."


class ServiceBusCertificateError(ServiceBusError, OperatorError):
    default_hint = (
        "Trust the CA that signed it: load its certificate into the SSLContext for `connect(tls=…)`, or give "
        "its file as connection_verify."
    )


class ServiceBusHandshakeError(ServiceBusError, OperatorError):
    """A proxy or a gateway refused the connection, or the other end is no proxy or takes no WebSocket."""

    default_hint = "Check the addresses of proxy and namespace, and the proxy's credentials."


class ServiceBusProtocolError(ServiceBusError, OperatorError):
    default_hint = "One side violates the AMQP protocol. Please report this defect."


class ServiceBusUnsupportedError(ServiceBusError, OperatorError):
    default_hint = "This namespace does not support the operation."


ERRORS: Final[dict[str, type[ServiceBusError]]] = {
    Condition.INTERNAL_ERROR: ServiceBusInternalError,
    Condition.NOT_FOUND: MessagingEntityNotFoundError,
    Condition.UNAUTHORIZED_ACCESS: ServiceBusAuthorizationError,
    Condition.DECODE_ERROR: ServiceBusProtocolError,
    Condition.RESOURCE_LIMIT_EXCEEDED: ServiceBusQuotaExceededError,
    Condition.NOT_ALLOWED: ServiceBusArgumentError,
    Condition.INVALID_FIELD: ServiceBusArgumentError,
    Condition.NOT_IMPLEMENTED: ServiceBusUnsupportedError,
    Condition.RESOURCE_LOCKED: ServiceBusInternalError,
    Condition.PRECONDITION_FAILED: ServiceBusArgumentError,
    Condition.RESOURCE_DELETED: MessagingEntityNotFoundError,
    Condition.ILLEGAL_STATE: ServiceBusProtocolError,
    Condition.FRAME_SIZE_TOO_SMALL: ServiceBusProtocolError,
    Condition.CONNECTION_FORCED: ServiceBusConnectionError,
    Condition.FRAMING_ERROR: ServiceBusProtocolError,
    Condition.CONNECTION_REDIRECT: ServiceBusConnectionError,
    Condition.WINDOW_VIOLATION: ServiceBusProtocolError,
    Condition.ERRANT_LINK: ServiceBusProtocolError,
    Condition.HANDLE_IN_USE: ServiceBusProtocolError,
    Condition.UNATTACHED_HANDLE: ServiceBusProtocolError,
    Condition.DETACH_FORCED: ServiceBusConnectionError,
    Condition.TRANSFER_LIMIT_EXCEEDED: ServiceBusProtocolError,
    Condition.MESSAGE_SIZE_EXCEEDED: MessageSizeExceededError,
    Condition.LINK_REDIRECT: ServiceBusConnectionError,
    Condition.LINK_STOLEN: ServiceBusConnectionError,
    Condition.TRANSACTION_UNKNOWN_ID: ServiceBusArgumentError,
    Condition.TRANSACTION_ROLLBACK: ServiceBusInternalError,
    Condition.TRANSACTION_TIMEOUT: OperationTimeoutError,
    Condition.DEAD_LETTER: ServiceBusArgumentError,
    Condition.SERVER_BUSY: ServiceBusServerBusyError,
    Condition.TIMEOUT: OperationTimeoutError,
    Condition.OPERATION_CANCELLED: ServiceBusInternalError,
    Condition.CONTAINER_CLOSE: ServiceBusConnectionError,
    Condition.ENTITY_DISABLED: MessagingEntityDisabledError,
    Condition.ENTITY_ALREADY_EXISTS: MessagingEntityAlreadyExistsError,
    Condition.MESSAGE_NOT_FOUND: MessageNotFoundError,
    Condition.MESSAGE_LOCK_LOST: MessageLockLostError,
    Condition.SESSION_LOCK_LOST: SessionLockLostError,
    Condition.SESSION_CANNOT_BE_LOCKED: SessionCannotBeLockedError,
    Condition.SESSION_NOT_FOUND: MessageNotFoundError,
    Condition.ARGUMENT_ERROR: ServiceBusArgumentError,
    Condition.ARGUMENT_OUT_OF_RANGE: ServiceBusArgumentError,
    Condition.AUTH_FAILED: ServiceBusAuthenticationError,
    Condition.PUBLISHER_REVOKED: ServiceBusAuthorizationError,
    Condition.PARTITION_NOT_OWNED: ServiceBusConnectionError,
}

# By status code: the condition for a reply of a request/response node that names no condition.
_STATUS_CONDITIONS: Final[dict[int, str]] = {
    400: Condition.ARGUMENT_ERROR,
    401: Condition.UNAUTHORIZED_ACCESS,
    403: Condition.RESOURCE_LIMIT_EXCEEDED,
    404: Condition.NOT_FOUND,
    408: Condition.TIMEOUT,
    410: Condition.MESSAGE_LOCK_LOST,
    501: Condition.NOT_IMPLEMENTED,
    503: Condition.SERVER_BUSY,
}


def error_for(
    condition: str | None,
    description: str | None,
    *,
    entity: str | None = None,
    failed: Sequence[Any] = (),
) -> ServiceBusError:
    """Return the error for an AMQP condition."""
    kind = ERRORS.get(condition or "", ServiceBusInternalError)
    text = description or "The service gave no description."
    return kind(text, condition=str(condition) if condition else None, entity=entity, failed=failed)


def error_for_status(status: int, condition: str | None, description: str | None, entity: str) -> ServiceBusError:
    """Return the error for a reply of a `$management` node whose status is not a success."""
    return error_for(condition or _STATUS_CONDITIONS.get(status), description or f"status {status}", entity=entity)


def error_for_token(status: int, description: str | None, entity: str) -> ServiceBusError:
    """Return the error for a refused token. The service also refuses a token whose entity does not exist (404)."""
    text = description or f"status {status}"
    if status == 404:
        return MessagingEntityNotFoundError(text, condition=Condition.NOT_FOUND.value, entity=entity)
    if status in {408, 503}:
        return error_for(_STATUS_CONDITIONS[status], text, entity=entity)
    return ServiceBusAuthenticationError(text, condition=Condition.UNAUTHORIZED_ACCESS.value, entity=entity)
