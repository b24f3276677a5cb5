"""Converts refusals to AMQP errors and to status codes of request/response nodes. Makes the refusals of the front."""

from __future__ import annotations

from twinbus.amqp import Error
from twinbus.namespace.engine.effects import Refusal
from twinbus.values import Condition

_STATUS_CODES = {
    Condition.NOT_FOUND: 404,
    Condition.MESSAGE_NOT_FOUND: 404,
    Condition.SESSION_NOT_FOUND: 404,
    Condition.MESSAGE_LOCK_LOST: 410,
    Condition.SESSION_LOCK_LOST: 410,
    Condition.SESSION_CANNOT_BE_LOCKED: 409,
    Condition.ENTITY_ALREADY_EXISTS: 409,
    Condition.UNAUTHORIZED_ACCESS: 401,
    Condition.ARGUMENT_ERROR: 400,
    Condition.ARGUMENT_OUT_OF_RANGE: 400,
    Condition.NOT_ALLOWED: 400,
    Condition.DECODE_ERROR: 400,
    Condition.MESSAGE_SIZE_EXCEEDED: 400,
    Condition.RESOURCE_LIMIT_EXCEEDED: 403,
    Condition.ENTITY_DISABLED: 403,
    Condition.TIMEOUT: 408,
    Condition.NOT_IMPLEMENTED: 501,
    Condition.SERVER_BUSY: 503,
}

# The most characters of a description. A description may quote text of any length that the peer sent.
_MAX_DESCRIPTION = 1000


def status_code(refusal: Refusal) -> int:
    """Return the status code for a refusal in the reply of a node."""
    return _STATUS_CODES.get(refusal.condition, 500)


def amqp_error(refusal: Refusal) -> Error:
    """Return the AMQP error for a refusal, to be sent in a rejected outcome, a detach or a close."""
    return Error(refusal.condition.value, shortened(refusal.description))


def shortened(text: str) -> str:
    """Return the text, cut to at most `_MAX_DESCRIPTION` characters."""
    return text if len(text) <= _MAX_DESCRIPTION else f"{text[: _MAX_DESCRIPTION - 1]}…"


def not_found(entity: str) -> Refusal:
    # The JavaScript client recognises this error by its text alone.
    return Refusal(Condition.NOT_FOUND, f"The messaging entity '{entity}' could not be found.")


def unauthorized(claim: str, entity: str) -> Refusal:
    return Refusal(
        Condition.UNAUTHORIZED_ACCESS,
        f"Unauthorized access. '{claim}' claim(s) are required to perform this operation. Resource: '{entity}'.",
    )


def busy() -> Refusal:
    return Refusal(
        Condition.SERVER_BUSY,
        "The request was terminated because the namespace is being throttled. Error code: 50009. "
        "Please wait 10 seconds and try again.",
    )


INTERNAL = Refusal(
    Condition.INTERNAL_ERROR, "The service was unable to process the request; please retry the operation."
)
DETACHED = Refusal(Condition.DETACH_FORCED, "The link was detached by the service.")
