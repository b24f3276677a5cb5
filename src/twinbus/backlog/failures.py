"""Classify a failed operation: its kind, whether it counts towards failover, and who must act (S2).

An exception becomes a `FailureKind` in two steps:

    evidence_of(exception)  ->  FailureEvidence    names of the exception and its causes, AMQP condition, status, errno
    classify(evidence)      ->  FailureKind        from the first table below that has an entry for the evidence

`FAILURE_RULES` has one row per kind. Sets such as `COUNTING_FAILURES` are made from the rows. Every decision that
depends on a kind reads one of these sets: failover, rotation of backlog queues, the records of the ledger.

The tables contain the class names of exceptions, not the classes. So this module works for both clients,
azure-servicebus and `twinbus.connect`, and imports neither client.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, NamedTuple

from twinbus.values import Condition


class FailureKind(StrEnum):
    """Why an attempt failed. `cause` and `kind` of events and errors have one of these values.

    Example: `event.cause is FailureKind.TIMEOUT`.
    """

    TIMEOUT = "timeout"
    CONNECTION_LOST = "connection_lost"
    DETACHED = "detached"
    INTERNAL = "internal"
    ENTITY_DISABLED = "entity_disabled"
    QUOTA_EXCEEDED = "quota_exceeded"
    DNS = "dns"
    TLS = "tls"
    CBS = "cbs"
    PROTOCOL = "protocol"
    UNAUTHORIZED = "unauthorized"
    AUTHENTICATION = "authentication"
    TOKEN_UNAVAILABLE = "token_unavailable"  # noqa: S105 (not a password)
    CERTIFICATE = "certificate"
    SERVER_BUSY = "server_busy"
    ENTITY_NOT_FOUND = "entity_not_found"
    MESSAGE_TOO_LARGE = "message_too_large"
    BAD_MESSAGE = "bad_message"
    UNKNOWN = "unknown"
    CANCELLED = "cancelled"
    CLOSED = "closed"
    NO_TURN = "no_turn"


class Responsible(Enum):
    """Who must act so that the operation can succeed."""

    SERVICE = "service"
    OPERATOR = "operator"
    CALLER = "caller"


class FailureRule(NamedTuple):
    """The consequences of a failure of one kind."""

    counts: bool
    """The failure counts towards failover (S2)."""
    evicts: bool
    """A backlog queue that fails with this kind leaves the rotation (S6). Also true for failures of one queue alone."""
    responsible: Responsible
    reason: str


_SERVICE, _OPERATOR, _CALLER = Responsible.SERVICE, Responsible.OPERATOR, Responsible.CALLER

FAILURE_RULES: Final[Mapping[FailureKind, FailureRule]] = {
    FailureKind.TIMEOUT: FailureRule(True, True, _SERVICE, "no answer in time"),
    FailureKind.CONNECTION_LOST: FailureRule(True, True, _SERVICE, "the connection broke or could not be opened"),
    FailureKind.DETACHED: FailureRule(True, True, _SERVICE, "the service closes the link again and again"),
    FailureKind.INTERNAL: FailureRule(True, True, _SERVICE, "the service reports an internal or an unknown error"),
    FailureKind.ENTITY_DISABLED: FailureRule(True, True, _SERVICE, "the entity accepts no messages for now"),
    FailureKind.QUOTA_EXCEEDED: FailureRule(True, True, _SERVICE, "the entity is full for now"),
    FailureKind.DNS: FailureRule(True, True, _SERVICE, "the host name does not resolve any more: an outage"),
    FailureKind.TLS: FailureRule(True, True, _SERVICE, "a TLS handshake that breaks is a broken connection"),
    FailureKind.CBS: FailureRule(True, True, _SERVICE, "$cbs broke or was silent: the credential was not judged"),
    FailureKind.PROTOCOL: FailureRule(True, True, _SERVICE, "the other end does not speak AMQP: it is no service"),
    FailureKind.UNAUTHORIZED: FailureRule(False, True, _OPERATOR, "a right is missing, perhaps on one queue only"),
    FailureKind.AUTHENTICATION: FailureRule(False, True, _OPERATOR, "the credential is refused or has expired"),
    FailureKind.TOKEN_UNAVAILABLE: FailureRule(
        False, False, _OPERATOR, "the token issuer is away; the other namespace needs a token from it too"
    ),
    FailureKind.CERTIFICATE: FailureRule(
        False, False, _OPERATOR, "a person must see a certificate that is not trusted, and decide"
    ),
    FailureKind.SERVER_BUSY: FailureRule(False, False, _SERVICE, "wait and send again"),
    FailureKind.ENTITY_NOT_FOUND: FailureRule(
        False, True, _OPERATOR, "create the entity; one backlog queue may be missing alone"
    ),
    FailureKind.MESSAGE_TOO_LARGE: FailureRule(False, False, _CALLER, "the message is at fault"),
    FailureKind.BAD_MESSAGE: FailureRule(False, False, _CALLER, "a bad argument, or a message that cannot be encoded"),
    FailureKind.UNKNOWN: FailureRule(
        False, False, _CALLER, "no service was involved: an exception of the program itself must not be hidden"
    ),
    FailureKind.CANCELLED: FailureRule(False, False, _CALLER, "the caller cancelled the call"),
    FailureKind.CLOSED: FailureRule(False, False, _CALLER, "the owner closed the sender or the client"),
    FailureKind.NO_TURN: FailureRule(
        False, False, _SERVICE, "other calls of this process held the link: the service was not asked"
    ),
}

COUNTING_FAILURES: Final = frozenset(kind for kind, row in FAILURE_RULES.items() if row.counts)
EVICTING_FAILURES: Final = frozenset(kind for kind, row in FAILURE_RULES.items() if row.evicts)
CALLER_FAILURES: Final = frozenset(kind for kind, row in FAILURE_RULES.items() if row.responsible is Responsible.CALLER)
CREDENTIAL_REFUSED: Final = frozenset({FailureKind.UNAUTHORIZED, FailureKind.AUTHENTICATION})
UNUSABLE_FAILURES: Final = CREDENTIAL_REFUSED | {FailureKind.ENTITY_NOT_FOUND}
"""Kinds of failure of a ping that mean: the primary's entity cannot be used until a person acts (G4)."""
REFUSED_FAILURES: Final = frozenset(
    {
        FailureKind.DNS,
        FailureKind.CERTIFICATE,
        FailureKind.TOKEN_UNAVAILABLE,
        FailureKind.SERVER_BUSY,
        FailureKind.UNAUTHORIZED,
        FailureKind.AUTHENTICATION,
        FailureKind.ENTITY_NOT_FOUND,
        FailureKind.ENTITY_DISABLED,
        FailureKind.QUOTA_EXCEEDED,
        FailureKind.MESSAGE_TOO_LARGE,
        FailureKind.BAD_MESSAGE,
    }
)
"""Kinds with which the service refuses an operation, or which occur before the operation reaches the service.

`was_refused` also checks that the exception is an answer to the operation.
"""


def counting_kinds(failover_on: Iterable[str] = ()) -> frozenset[FailureKind]:
    """Return the kinds that count towards failover: COUNTING_FAILURES, changed by the entries of `failover_on`.

    An entry `kind` adds a kind, `-kind` removes a kind. Raises ValueError for an unknown kind.
    """
    kinds = set(COUNTING_FAILURES)
    for entry in failover_on:
        kind = FailureKind(entry.removeprefix("-").removeprefix("+"))
        if entry.startswith("-"):
            kinds.discard(kind)
        else:
            kinds.add(kind)
    return frozenset(kinds)


# --- evidence --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FailureEvidence:
    """The facts about an exception and its causes from which `classify` finds the kind of failure."""

    names: tuple[str, ...]
    """Class names from the outermost exception to the innermost cause, each followed by the names of base classes."""
    condition: str | None = None
    """AMQP error condition."""
    status: int | None = None
    """Status of a refused token or a management request, a number as in HTTP."""
    errno: str | None = None
    text: str = ""
    cut_off: bool = False
    """The link ended in `twinbus.connect`, and the operations that were running on the link failed."""


_LONGEST_CHAIN: Final = 16
# The condition that the SDK sets if the service named no condition. A cause of the exception may name another.
_UNKNOWN_CONDITION: Final = "amqp:unknown-error"
_ROOT_NAMES: Final = frozenset({"Exception", "BaseException", "object"})


def evidence_of(error: BaseException) -> FailureEvidence:
    """Read an exception and its causes: `inner_exception` of the SDK, `inner_error` of AMQP, and `__cause__`.

    `__context__` is not read: it may be an exception that the caller was handling when the operation started.
    """
    names: list[str] = []
    condition = errno_name = status = None
    cut_off = False
    for link in _chain(error):
        names += (parent.__name__ for parent in type(link).__mro__ if parent.__name__ not in _ROOT_NAMES)
        # `_condition` and `_status_code` are private attributes of the SDK's ServiceBusError; tests/sdk tests them.
        named = _text(getattr(link, "_condition", None) or getattr(link, "condition", None))
        condition = condition or (None if named == _UNKNOWN_CONDITION else named)
        status = status or _integer(getattr(link, "status_code", None) or getattr(link, "_status_code", None))
        errno_name = errno_name or (errno.errorcode.get(link.errno or 0) if isinstance(link, OSError) else None)
        cut_off = cut_off or getattr(link, "cut_off", False)
    return FailureEvidence(tuple(names), condition, status, errno_name, str(error), cut_off)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and its causes, breadth first, each once."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _LONGEST_CHAIN:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        causes = (getattr(link, "inner_exception", None), getattr(link, "inner_error", None), link.__cause__)
        waiting += (cause for cause in causes if isinstance(cause, BaseException))


def _text(value: object) -> str | None:
    plain = value.value if isinstance(value, Enum) else value
    return plain.decode("utf-8", "replace") if isinstance(plain, bytes) else str(plain) if plain else None


def _integer(value: object) -> int | None:
    # If the link broke, the SDK sets TokenAuthFailure.status_code to a condition instead of a number.
    return int(value) if isinstance(value, int) else None


# --- classification --------------------------------------------------------------------------------------------------

# Errors of the SDK that have the same class as a bad argument: only the text differs. The SDK reports the second text
# when a link to `$management` ends, and the last text when it uses objects that no longer exist after the connection
# broke.
TEXTS: Final[tuple[tuple[str, FailureKind], ...]] = (
    ("handler has already been shutdown", FailureKind.CLOSED),
    ("Management Operation error occurred", FailureKind.DETACHED),
    ("reciprocal protocol header", FailureKind.PROTOCOL),
    ("Handler failed: 'NoneType' object", FailureKind.INTERNAL),
)

# These class names are more precise than the condition of the same exception. The SDK sets `amqp:internal-error` for an
# expired token, and `amqp:not-found` for both an unknown namespace and an unknown entity.
NAMES_BEFORE_CONDITIONS: Final[tuple[tuple[str, FailureKind], ...]] = (
    ("CancelledError", FailureKind.CANCELLED),
    ("NoTurnError", FailureKind.NO_TURN),
    ("TokenExpired", FailureKind.AUTHENTICATION),
    ("ClientAuthenticationError", FailureKind.AUTHENTICATION),
    ("CredentialUnavailableError", FailureKind.AUTHENTICATION),
    # A sender uses HTTP only to request tokens from their issuer.
    ("HttpResponseError", FailureKind.TOKEN_UNAVAILABLE),
    ("ServiceRequestError", FailureKind.TOKEN_UNAVAILABLE),
    ("ServiceResponseError", FailureKind.TOKEN_UNAVAILABLE),
    ("TokenUnavailableError", FailureKind.TOKEN_UNAVAILABLE),
    ("TokenTimeoutError", FailureKind.TOKEN_UNAVAILABLE),
    ("gaierror", FailureKind.DNS),
    ("SSLCertVerificationError", FailureKind.CERTIFICATE),
    ("ServiceBusCertificateError", FailureKind.CERTIFICATE),
    ("SSLError", FailureKind.TLS),
    ("ServiceBusCommunicationError", FailureKind.CONNECTION_LOST),
    ("ServiceBusHandshakeError", FailureKind.CONNECTION_LOST),
)

# A refused token has a status instead of a condition.
TOKEN_STATUSES: Final[Mapping[int, FailureKind]] = {
    401: FailureKind.AUTHENTICATION,
    403: FailureKind.UNAUTHORIZED,
    404: FailureKind.ENTITY_NOT_FOUND,
}

CONDITIONS: Final[Mapping[str, FailureKind]] = {
    Condition.INTERNAL_ERROR: FailureKind.INTERNAL,
    Condition.NOT_FOUND: FailureKind.ENTITY_NOT_FOUND,
    Condition.UNAUTHORIZED_ACCESS: FailureKind.UNAUTHORIZED,
    Condition.DECODE_ERROR: FailureKind.BAD_MESSAGE,
    Condition.RESOURCE_LIMIT_EXCEEDED: FailureKind.QUOTA_EXCEEDED,
    Condition.NOT_ALLOWED: FailureKind.BAD_MESSAGE,
    Condition.INVALID_FIELD: FailureKind.BAD_MESSAGE,
    Condition.NOT_IMPLEMENTED: FailureKind.BAD_MESSAGE,
    Condition.RESOURCE_LOCKED: FailureKind.INTERNAL,
    Condition.PRECONDITION_FAILED: FailureKind.BAD_MESSAGE,
    Condition.RESOURCE_DELETED: FailureKind.ENTITY_NOT_FOUND,
    Condition.ILLEGAL_STATE: FailureKind.PROTOCOL,
    Condition.FRAME_SIZE_TOO_SMALL: FailureKind.PROTOCOL,
    Condition.CONNECTION_FORCED: FailureKind.CONNECTION_LOST,
    Condition.FRAMING_ERROR: FailureKind.PROTOCOL,
    Condition.CONNECTION_REDIRECT: FailureKind.CONNECTION_LOST,
    Condition.WINDOW_VIOLATION: FailureKind.PROTOCOL,
    Condition.ERRANT_LINK: FailureKind.PROTOCOL,
    Condition.HANDLE_IN_USE: FailureKind.PROTOCOL,
    Condition.UNATTACHED_HANDLE: FailureKind.PROTOCOL,
    Condition.DETACH_FORCED: FailureKind.DETACHED,
    Condition.TRANSFER_LIMIT_EXCEEDED: FailureKind.PROTOCOL,
    Condition.MESSAGE_SIZE_EXCEEDED: FailureKind.MESSAGE_TOO_LARGE,
    Condition.LINK_REDIRECT: FailureKind.DETACHED,
    Condition.LINK_STOLEN: FailureKind.DETACHED,
    Condition.TRANSACTION_UNKNOWN_ID: FailureKind.BAD_MESSAGE,
    Condition.TRANSACTION_ROLLBACK: FailureKind.INTERNAL,
    Condition.TRANSACTION_TIMEOUT: FailureKind.TIMEOUT,
    Condition.DEAD_LETTER: FailureKind.BAD_MESSAGE,
    Condition.SERVER_BUSY: FailureKind.SERVER_BUSY,
    Condition.TIMEOUT: FailureKind.TIMEOUT,
    Condition.OPERATION_CANCELLED: FailureKind.INTERNAL,
    Condition.CONTAINER_CLOSE: FailureKind.CONNECTION_LOST,
    Condition.ENTITY_DISABLED: FailureKind.ENTITY_DISABLED,
    Condition.ENTITY_ALREADY_EXISTS: FailureKind.BAD_MESSAGE,
    Condition.MESSAGE_NOT_FOUND: FailureKind.BAD_MESSAGE,
    Condition.MESSAGE_LOCK_LOST: FailureKind.BAD_MESSAGE,
    Condition.SESSION_LOCK_LOST: FailureKind.BAD_MESSAGE,
    Condition.SESSION_CANNOT_BE_LOCKED: FailureKind.BAD_MESSAGE,
    Condition.SESSION_NOT_FOUND: FailureKind.BAD_MESSAGE,
    Condition.ARGUMENT_ERROR: FailureKind.BAD_MESSAGE,
    Condition.ARGUMENT_OUT_OF_RANGE: FailureKind.BAD_MESSAGE,
    Condition.AUTH_FAILED: FailureKind.AUTHENTICATION,
    Condition.PUBLISHER_REVOKED: FailureKind.UNAUTHORIZED,
    Condition.PARTITION_NOT_OWNED: FailureKind.CONNECTION_LOST,
}

# The order matters: a class comes before its base classes, which other classes share.
NAMES: Final[tuple[tuple[str, FailureKind], ...]] = (
    ("OperationTimeoutError", FailureKind.TIMEOUT),
    ("ServiceBusServerBusyError", FailureKind.SERVER_BUSY),
    ("MessagingEntityNotFoundError", FailureKind.ENTITY_NOT_FOUND),
    ("MessagingEntityDisabledError", FailureKind.ENTITY_DISABLED),
    ("ServiceBusQuotaExceededError", FailureKind.QUOTA_EXCEEDED),
    ("ServiceBusAuthorizationError", FailureKind.UNAUTHORIZED),
    ("ServiceBusAuthenticationError", FailureKind.AUTHENTICATION),
    ("MessageSizeExceededError", FailureKind.MESSAGE_TOO_LARGE),
    ("ServiceBusArgumentError", FailureKind.BAD_MESSAGE),
    ("ServiceBusUnsupportedError", FailureKind.BAD_MESSAGE),
    ("ServiceBusProtocolError", FailureKind.PROTOCOL),
    ("ConnectionClosedError", FailureKind.CLOSED),
    ("TimeoutError", FailureKind.TIMEOUT),
    ("ServiceBusConnectionError", FailureKind.CONNECTION_LOST),
    ("AMQPConnectionError", FailureKind.CONNECTION_LOST),
    ("AMQPLinkError", FailureKind.DETACHED),
    ("FileNotFoundError", FailureKind.BAD_MESSAGE),
    ("OSError", FailureKind.CONNECTION_LOST),
    ("IncompleteReadError", FailureKind.CONNECTION_LOST),
    ("EncodeError", FailureKind.BAD_MESSAGE),
    ("ValueError", FailureKind.BAD_MESSAGE),
    ("TypeError", FailureKind.BAD_MESSAGE),
    ("error", FailureKind.BAD_MESSAGE),  # struct.error: a number that does not fit its AMQP type
    # All other errors of these base classes come from a service, or from an SDK whose connection broke.
    ("ServiceBusInternalError", FailureKind.INTERNAL),
    ("ServiceBusError", FailureKind.INTERNAL),
    ("AMQPException", FailureKind.INTERNAL),
    ("AmqpError", FailureKind.INTERNAL),
)


def failure_kind(error: BaseException) -> FailureKind:
    """Return the kind of failure for an exception of azure-servicebus or of `twinbus.connect`."""
    return classify(evidence_of(error))


def classify(evidence: FailureEvidence) -> FailureKind:
    """Return the kind of failure; UNKNOWN if no table has an entry for the evidence. Never raises."""
    for text, kind in TEXTS:
        if text in evidence.text:
            return kind
    if kind_by_name := _first(NAMES_BEFORE_CONDITIONS, evidence.names):
        return kind_by_name
    if "AuthenticationException" in evidence.names:
        # No known status: the link to `$cbs` broke before `$cbs` answered.
        return TOKEN_STATUSES.get(evidence.status or 0, FailureKind.CBS)
    if kind_by_condition := CONDITIONS.get(evidence.condition or ""):
        return kind_by_condition
    if evidence.errno == "ETIMEDOUT":
        return FailureKind.TIMEOUT
    return _first(NAMES, evidence.names) or FailureKind.UNKNOWN


# Class names of exceptions that report the end of a link, session or connection, or a failed renewal of its token. Such
# an exception is not the answer to an operation that was running on the link.
_NO_ANSWERS: Final = frozenset(
    {"AMQPLinkError", "AMQPSessionError", "AMQPConnectionError", "AuthenticationException"}
).union(name for name, _ in NAMES_BEFORE_CONDITIONS)


def was_refused(error: BaseException) -> bool:
    """Return whether it is certain that the service did not carry out an operation that began on an open link.

    True if the service refused the operation, or the operation cannot have left this process. After any other failure
    the service may have carried out the operation, also if the exception has a condition that means a refusal.
    """
    evidence = evidence_of(error)
    unanswered = evidence.cut_off or not _NO_ANSWERS.isdisjoint(evidence.names)
    return not unanswered and classify(evidence) in REFUSED_FAILURES


def _first(table: tuple[tuple[str, FailureKind], ...], names: tuple[str, ...]) -> FailureKind | None:
    return next((kind for name, kind in table if name in names), None)
