"""S2 as one total table: what a failure is called, whether it counts towards failover, whose it is.

It judges by AMQP condition, status and the names of exceptions along the chain of causes, so that no SDK comes in here.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, NamedTuple

from twinbus.values import Condition


class FailureKind(StrEnum):
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
    """Who mends it."""

    SERVICE = "service"
    OPERATOR = "operator"
    CALLER = "caller"


class FailureRule(NamedTuple):
    """One row of the table.

    `counts`: towards failover, S2's first list. `evicts`: a backlog queue that fails so leaves the rotation (S6): S2's
    first list, and what one queue can suffer alone while its neighbours still take the message.
    """

    counts: bool
    evicts: bool
    blame: Responsible
    reason: str


_SERVICE, _OPERATOR, _CALLER = Responsible.SERVICE, Responsible.OPERATOR, Responsible.CALLER

FAILURE_RULES: Final[Mapping[FailureKind, FailureRule]] = {
    FailureKind.TIMEOUT: FailureRule(True, True, _SERVICE, "S2: nobody answered in time"),
    FailureKind.CONNECTION_LOST: FailureRule(True, True, _SERVICE, "S2: the connection broke and stayed broken"),
    FailureKind.DETACHED: FailureRule(True, True, _SERVICE, "S2: the link is thrown off again and again"),
    FailureKind.INTERNAL: FailureRule(
        True, True, _SERVICE, "S2: the service says that it failed, or says nothing known"
    ),
    FailureKind.ENTITY_DISABLED: FailureRule(True, True, _SERVICE, "S2: the entity takes nothing for now"),
    FailureKind.QUOTA_EXCEEDED: FailureRule(True, True, _SERVICE, "S2: the entity is full for now"),
    FailureKind.DNS: FailureRule(True, True, _SERVICE, "a name that resolved and no longer does is an outage like any"),
    FailureKind.TLS: FailureRule(True, True, _SERVICE, "a handshake that breaks off is a connection that broke"),
    FailureKind.CBS: FailureRule(True, True, _SERVICE, "$cbs broke or was silent: no verdict about the credential"),
    FailureKind.PROTOCOL: FailureRule(True, True, _SERVICE, "whoever answers there does not speak AMQP: no service"),
    FailureKind.UNAUTHORIZED: FailureRule(
        False, True, _OPERATOR, "S2: a right is missing; one queue may lack it alone"
    ),
    FailureKind.AUTHENTICATION: FailureRule(False, True, _OPERATOR, "S2: the credential is refused or has expired"),
    FailureKind.TOKEN_UNAVAILABLE: FailureRule(
        False, False, _OPERATOR, "the token's issuer is away: neither namespace is, and the other would want one too"
    ),
    FailureKind.CERTIFICATE: FailureRule(
        False, False, _OPERATOR, "trust is mended by a person, and a stranger's certificate must be seen by one"
    ),
    FailureKind.SERVER_BUSY: FailureRule(False, False, _SERVICE, "S2, S6: wait and send again"),
    FailureKind.ENTITY_NOT_FOUND: FailureRule(
        False, True, _OPERATOR, "S2: create it; one backlog queue may be gone alone"
    ),
    FailureKind.MESSAGE_TOO_LARGE: FailureRule(False, False, _CALLER, "S2, S6: the message's fault"),
    FailureKind.BAD_MESSAGE: FailureRule(False, False, _CALLER, "S2, S6: a bad argument, or it cannot be encoded"),
    FailureKind.UNKNOWN: FailureRule(
        False, False, _CALLER, "no service spoke: an exception of the program itself must be seen, not diverted"
    ),
    FailureKind.CANCELLED: FailureRule(False, False, _CALLER, "the caller took the call back (S13)"),
    FailureKind.CLOSED: FailureRule(False, False, _CALLER, "the sender or client was closed by its owner (C1)"),
    FailureKind.NO_TURN: FailureRule(False, False, _SERVICE, "calls of this process held the link: nobody was asked"),
}

COUNTING_FAILURES: Final = frozenset(kind for kind, row in FAILURE_RULES.items() if row.counts)
EVICTING_FAILURES: Final = frozenset(kind for kind, row in FAILURE_RULES.items() if row.evicts)
CALLER_FAILURES: Final = frozenset(kind for kind, row in FAILURE_RULES.items() if row.blame is Responsible.CALLER)
CREDENTIAL_REFUSED: Final = frozenset({FailureKind.UNAUTHORIZED, FailureKind.AUTHENTICATION})
# G4: the entity is gone, or the credential refused.
UNUSABLE_FAILURES: Final = CREDENTIAL_REFUSED | {FailureKind.ENTITY_NOT_FOUND}
# The service says no so, or was never asked. Where it may have taken the messages all the same, `was_refused` tells.
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


def counting_kinds(failover_on: Iterable[str] = ()) -> frozenset[FailureKind]:
    """S2's first list with `failover_on=`: `kind` is added, `-kind` taken away; ValueError for an unknown one."""
    kinds = set(COUNTING_FAILURES)
    for entry in failover_on:
        kind = FailureKind(entry.removeprefix("-").removeprefix("+"))
        if entry.startswith("-"):
            kinds.discard(kind)
        else:
            kinds.add(kind)
    return frozenset(kinds)


# --- what a failure shows --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FailureEvidence:
    """`names` are those of the exceptions from the outermost to the innermost, each with its parents' after it.

    `cut_off`: `twinbus.connect` says that it ended a link with what was under way on it.
    """

    names: tuple[str, ...]
    condition: str | None = None
    status: int | None = None
    errno: str | None = None
    text: str = ""
    cut_off: bool = False


_LONGEST_CHAIN: Final = 16
# The SDK's own, where nobody said anything: a cause behind it may know more.
_UNTOLD: Final = "amqp:unknown-error"
_ROOTS: Final = frozenset({"Exception", "BaseException", "object"})


def evidence_of(error: BaseException) -> FailureEvidence:
    """Read from an exception and from what it names as its cause: the SDK's `inner_exception`, AMQP's `inner_error`.

    `__context__` is left out: it may be an exception that the caller was handling when it sent.
    """
    names: list[str] = []
    condition = number = status = None
    cut_off = False
    for link in _chain(error):
        names += (parent.__name__ for parent in type(link).__mro__ if parent.__name__ not in _ROOTS)
        told = _text(getattr(link, "_condition", None) or getattr(link, "condition", None))
        condition = condition or (None if told == _UNTOLD else told)
        status = status or _number(getattr(link, "status_code", None) or getattr(link, "_status_code", None))
        number = number or (errno.errorcode.get(link.errno or 0) if isinstance(link, OSError) else None)
        cut_off = cut_off or getattr(link, "cut_off", False)
    return FailureEvidence(tuple(names), condition, status, number, str(error), cut_off)


def _chain(error: BaseException) -> Iterator[BaseException]:
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


def _number(value: object) -> int | None:
    # The SDK puts a condition into TokenAuthFailure.status_code when its link broke.
    return int(value) if isinstance(value, int) else None


# --- what it is called -----------------------------------------------------------------------------------------------

# ValueError and TypeError of the SDK that are no bad argument. The second is all it says when a link to `$management`
# ends; the last is its own state, gone with the connection.
TEXTS: Final[tuple[tuple[str, FailureKind], ...]] = (
    ("handler has already been shutdown", FailureKind.CLOSED),
    ("Management Operation error occurred", FailureKind.DETACHED),
    ("reciprocal protocol header", FailureKind.PROTOCOL),
    ("Handler failed: 'NoneType' object", FailureKind.INTERNAL),
)

# These say more than the condition beside them: the SDK gives an expired token `amqp:internal-error`, and calls a
# namespace that its gateway does not know `amqp:not-found`, like an entity.
NAMES_BEFORE_CONDITIONS: Final[tuple[tuple[str, FailureKind], ...]] = (
    ("CancelledError", FailureKind.CANCELLED),
    ("NoTurnError", FailureKind.NO_TURN),
    ("TokenExpired", FailureKind.AUTHENTICATION),
    ("ClientAuthenticationError", FailureKind.AUTHENTICATION),
    ("CredentialUnavailableError", FailureKind.AUTHENTICATION),
    # A sender speaks HTTP to nobody but the issuer of its tokens.
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
)

# A token that was refused names a status instead of a condition.
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

# In this order: a more telling name before the parents it shares with others.
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
    # What is left of these came from a service, or from an SDK whose connection broke under it.
    ("ServiceBusInternalError", FailureKind.INTERNAL),
    ("ServiceBusError", FailureKind.INTERNAL),
    ("AMQPException", FailureKind.INTERNAL),
    ("AmqpError", FailureKind.INTERNAL),
)


def failure_kind(error: BaseException) -> FailureKind:
    """Return the kind of failure that an exception of azure-servicebus or of `twinbus.connect` stands for."""
    return classify(evidence_of(error))


def classify(evidence: FailureEvidence) -> FailureKind:
    """Total: whatever the evidence, one kind."""
    for text, kind in TEXTS:
        if text in evidence.text:
            return kind
    if kind_by_name := _first(NAMES_BEFORE_CONDITIONS, evidence.names):
        return kind_by_name
    if "AuthenticationException" in evidence.names:
        # Refused with a status, or `$cbs` broke before it could say one.
        return TOKEN_STATUSES.get(evidence.status or 0, FailureKind.CBS)
    if kind_by_condition := CONDITIONS.get(evidence.condition or ""):
        return kind_by_condition
    if evidence.errno == "ETIMEDOUT":
        return FailureKind.TIMEOUT
    return _first(NAMES, evidence.names) or FailureKind.UNKNOWN


# What ends a link, a session or a connection, or fails to prolong the right to them, answers nothing that was asked on
# them.
_NO_ANSWERS: Final = frozenset(
    {"AMQPLinkError", "AMQPSessionError", "AMQPConnectionError", "AuthenticationException"}
).union(name for name, _ in NAMES_BEFORE_CONDITIONS)


def was_refused(error: BaseException) -> bool:
    """Of an operation that began on an open link: it was answered with no, or cannot have left.

    Of one that failed otherwise nobody knows whether the service carried it out, whatever the condition says.
    """
    evidence = evidence_of(error)
    unanswered = evidence.cut_off or not _NO_ANSWERS.isdisjoint(evidence.names)
    return not unanswered and classify(evidence) in REFUSED_FAILURES


def _first(table: tuple[tuple[str, FailureKind], ...], names: tuple[str, ...]) -> FailureKind | None:
    return next((kind for name, kind in table if name in names), None)
