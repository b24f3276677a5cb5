"""Every failure has one kind, and one rule says whether it counts (S2). The exceptions are those of the real SDKs."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import struct
from typing import Any

import pytest
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
    ServiceResponseError,
)
from azure.servicebus import exceptions as sdk
from azure.servicebus._pyamqp import error as amqp
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport

from twinbus.backlog.failures import (
    CONDITIONS,
    COUNTING_FAILURES,
    FAILURE_RULES,
    FailureEvidence,
    FailureKind,
    Responsible,
    classify,
    counting_kinds,
    evidence_of,
    was_refused,
)
from twinbus.connect import errors as ours
from twinbus.pairing.call_errors import NoTurnError
from twinbus.values import Condition

K = FailureKind


class Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: None


def from_sdk(error: Exception) -> BaseException:
    """Return the exception that the SDK's sender would raise for this one."""
    return PyamqpTransport.create_servicebus_exception(Silent(), error)  # type: ignore[arg-type]  # a logger


def refused_token(status: object, description: bytes) -> Exception:
    refused: Exception = amqp.TokenAuthFailure(status, description)  # type: ignore[no-untyped-call]  # the SDK's own
    return refused


def socket_error(cause: OSError) -> Exception:
    error = amqp.AMQPConnectionError(amqp.ErrorCondition.SocketError, description=str(cause), error=cause)
    error.__cause__ = cause
    return error


FIRST_LIST = [
    (sdk.OperationTimeoutError(), K.TIMEOUT),
    (from_sdk(amqp.AMQPLinkError(b"com.microsoft:timeout")), K.TIMEOUT),
    (TimeoutError(), K.TIMEOUT),
    (TimeoutError(), K.TIMEOUT),
    (from_sdk(TimeoutError("Authentication attempt timed-out.")), K.TIMEOUT),
    (from_sdk(socket_error(TimeoutError(errno.ETIMEDOUT, "timed out"))), K.TIMEOUT),
    (OSError(errno.ETIMEDOUT, "timed out"), K.TIMEOUT),
    (from_sdk(socket_error(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))), K.CONNECTION_LOST),
    (from_sdk(socket_error(OSError(errno.ENETUNREACH, "no route"))), K.CONNECTION_LOST),
    (from_sdk(amqp.AMQPConnectionError(amqp.ErrorCondition.SocketError)), K.CONNECTION_LOST),
    (from_sdk(amqp.AMQPConnectionError(amqp.ErrorCondition.ConnectionCloseForced)), K.CONNECTION_LOST),
    (from_sdk(amqp.AMQPConnectionError(amqp.ErrorCondition.NotFound)), K.CONNECTION_LOST),
    (ConnectionResetError(), K.CONNECTION_LOST),
    (asyncio.IncompleteReadError(b"", 8), K.CONNECTION_LOST),
    (from_sdk(amqp.AMQPLinkError(amqp.ErrorCondition.LinkDetachForced)), K.DETACHED),
    (from_sdk(amqp.AMQPLinkError(amqp.ErrorCondition.LinkStolen)), K.DETACHED),
    (from_sdk(ValueError("Management Operation error occurred.")), K.DETACHED),
    (from_sdk(amqp.AMQPLinkError(amqp.ErrorCondition.InternalError)), K.INTERNAL),
    (from_sdk(amqp.AMQPException(b"com.microsoft:never-heard-of")), K.INTERNAL),
    (from_sdk(AttributeError("'NoneType' object has no attribute 'work'")), K.INTERNAL),
    (from_sdk(TypeError("'NoneType' object is not subscriptable")), K.INTERNAL),
    (sdk.ServiceBusError("Handler failed"), K.INTERNAL),
    (from_sdk(amqp.AMQPLinkError(b"com.microsoft:entity-disabled")), K.ENTITY_DISABLED),
    (sdk.MessagingEntityDisabledError(), K.ENTITY_DISABLED),
    (from_sdk(amqp.MessageException(amqp.ErrorCondition.ResourceLimitExceeded)), K.QUOTA_EXCEEDED),
    (sdk.ServiceBusQuotaExceededError(), K.QUOTA_EXCEEDED),
    (from_sdk(socket_error(socket.gaierror(socket.EAI_NONAME, "unknown"))), K.DNS),
    (from_sdk(socket_error(ssl.SSLError(1, "handshake failure"))), K.TLS),
    (from_sdk(socket_error(ssl.SSLEOFError(8, "EOF"))), K.TLS),
    (from_sdk(amqp.AuthenticationException(amqp.ErrorCondition.InternalError)), K.CBS),
    (from_sdk(refused_token(500, b"oops")), K.CBS),
    (from_sdk(refused_token(amqp.ErrorCondition.ClientError, b"broken")), K.CBS),
    (from_sdk(ValueError("Did not receive reciprocal protocol header. Disconnecting.")), K.PROTOCOL),
    (from_sdk(amqp.AMQPSessionError(amqp.ErrorCondition.SessionWindowViolation)), K.PROTOCOL),
    (ours.ServiceBusInternalError("x"), K.INTERNAL),
    (ours.ServiceBusConnectionError("x"), K.CONNECTION_LOST),
    (ours.ServiceBusCommunicationError("x"), K.CONNECTION_LOST),
    (ours.ServiceBusHandshakeError("x"), K.CONNECTION_LOST),
    (ours.ServiceBusProtocolError("x"), K.PROTOCOL),
]
NEVER = [
    (from_sdk(amqp.AMQPLinkError(amqp.ErrorCondition.UnauthorizedAccess)), K.UNAUTHORIZED),
    (sdk.ServiceBusAuthorizationError(), K.UNAUTHORIZED),
    (from_sdk(refused_token(403, b"no")), K.UNAUTHORIZED),
    (from_sdk(refused_token(401, b"no")), K.AUTHENTICATION),
    (from_sdk(amqp.TokenExpired(amqp.ErrorCondition.InternalError)), K.AUTHENTICATION),
    (sdk.ServiceBusAuthenticationError(), K.AUTHENTICATION),
    (ClientAuthenticationError("refused"), K.AUTHENTICATION),
    (from_sdk(ClientAuthenticationError("refused")), K.AUTHENTICATION),
    (from_sdk(ServiceRequestError("login is away", error=socket.gaierror())), K.TOKEN_UNAVAILABLE),
    (from_sdk(ServiceResponseError("login fell silent")), K.TOKEN_UNAVAILABLE),
    (from_sdk(HttpResponseError("login failed")), K.TOKEN_UNAVAILABLE),
    (from_sdk(socket_error(ssl.SSLCertVerificationError(1, "self-signed"))), K.CERTIFICATE),
    (ours.ServiceBusCertificateError("x"), K.CERTIFICATE),
    (from_sdk(amqp.AMQPLinkError(b"com.microsoft:server-busy")), K.SERVER_BUSY),
    (sdk.ServiceBusServerBusyError(), K.SERVER_BUSY),
    (from_sdk(amqp.AMQPLinkError(amqp.ErrorCondition.NotFound)), K.ENTITY_NOT_FOUND),
    (from_sdk(refused_token(404, b"no such entity")), K.ENTITY_NOT_FOUND),
    (sdk.MessagingEntityNotFoundError(), K.ENTITY_NOT_FOUND),
    (sdk.MessageSizeExceededError(), K.MESSAGE_TOO_LARGE),
    (from_sdk(amqp.MessageException(amqp.ErrorCondition.LinkMessageSizeExceeded)), K.MESSAGE_TOO_LARGE),
    (ValueError("the timeout must be greater than 0"), K.BAD_MESSAGE),
    (TypeError("only ServiceBusMessage"), K.BAD_MESSAGE),
    (from_sdk(TypeError("Unable to encode unknown value")), K.BAD_MESSAGE),
    (from_sdk(struct.error("int too large to convert")), K.BAD_MESSAGE),
    (from_sdk(amqp.MessageException(b"com.microsoft:argument-error")), K.BAD_MESSAGE),
    (FileNotFoundError("ca_certs"), K.BAD_MESSAGE),
    (ours.ServiceBusArgumentError("x"), K.BAD_MESSAGE),
    (ours.ServiceBusUnsupportedError("x"), K.BAD_MESSAGE),
    (asyncio.CancelledError(), K.CANCELLED),
    (ValueError("The handler has already been shutdown. Please use ServiceBusClient to create a new one."), K.CLOSED),
    (ours.ConnectionClosedError("x"), K.CLOSED),
    (NoTurnError("orders", 1.0), K.NO_TURN),
    (RuntimeError("the caller's generator"), K.UNKNOWN),
    (KeyError("x"), K.UNKNOWN),
    (MemoryError(), K.UNKNOWN),
]


def named(error: object) -> str | None:
    return f"{type(error).__name__} {error}"[:60] if isinstance(error, BaseException) else None


@pytest.mark.parametrize(("error", "kind"), FIRST_LIST, ids=named)
def test_s2_what_counts_towards_failover(error: BaseException, kind: FailureKind) -> None:
    assert classify(evidence_of(error)) is kind
    assert kind in COUNTING_FAILURES


@pytest.mark.parametrize(("error", "kind"), NEVER, ids=named)
def test_s2_what_never_counts(error: BaseException, kind: FailureKind) -> None:
    assert classify(evidence_of(error)) is kind
    assert kind not in COUNTING_FAILURES


def test_s2_the_two_lists_above_contain_every_kind() -> None:
    assert {kind for _, kind in FIRST_LIST} == COUNTING_FAILURES
    assert {kind for _, kind in NEVER} == set(FailureKind) - COUNTING_FAILURES


def test_s2_every_condition_has_a_kind() -> None:
    assert set(CONDITIONS) == set(Condition)


def test_s2_the_table_is_total_whatever_the_evidence() -> None:
    assert classify(FailureEvidence(())) is K.UNKNOWN
    assert classify(FailureEvidence(("ServiceBusError",), "a:condition", 999, "ENOENT", "text")) is K.INTERNAL


def test_s2_every_kind_has_a_rule_with_a_reason() -> None:
    assert set(FAILURE_RULES) == set(FailureKind)
    assert all(row.reason for row in FAILURE_RULES.values())


def test_s2_a_failure_that_counts_is_the_services_and_evicts_a_backlog_queue() -> None:
    assert all(row.responsible is Responsible.SERVICE and row.evicts for row in FAILURE_RULES.values() if row.counts)


def test_s2_an_exception_that_the_caller_was_handling_is_no_evidence() -> None:
    error = sdk.ServiceBusServerBusyError()
    error.__context__ = socket.gaierror()
    assert classify(evidence_of(error)) is K.SERVER_BUSY


def test_s2_a_cycle_of_causes_is_read_once() -> None:
    one, two = RuntimeError(), OSError()
    one.__cause__, two.__cause__ = two, one
    assert classify(evidence_of(one)) is K.CONNECTION_LOST


def test_s2_evidence_names_condition_status_and_errno() -> None:
    refused = socket_error(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
    evidence = evidence_of(from_sdk(refused))
    assert evidence.names[:2] == ("ServiceBusConnectionError", "ServiceBusError")
    assert "ConnectionRefusedError" in evidence.names
    assert (evidence.condition, evidence.errno, evidence.status) == ("amqp:socket-error", "ECONNREFUSED", None)
    assert evidence_of(from_sdk(refused_token(404, b""))).status == 404


def test_s2_failover_on_adds_and_removes_kinds() -> None:
    assert counting_kinds() == COUNTING_FAILURES
    assert counting_kinds(["server_busy", "-quota_exceeded", "+unknown"]) == COUNTING_FAILURES - {K.QUOTA_EXCEEDED} | {
        K.SERVER_BUSY,
        K.UNKNOWN,
    }
    assert counting_kinds([K.CERTIFICATE]) == COUNTING_FAILURES | {K.CERTIFICATE}
    with pytest.raises(ValueError, match="nonsense"):
        counting_kinds(["-nonsense"])


# --- what was answered -----------------------------------------------------------------------------------------------

NO = [Condition.UNAUTHORIZED_ACCESS, Condition.ENTITY_DISABLED, Condition.NOT_FOUND, Condition.SERVER_BUSY,
      Condition.RESOURCE_LIMIT_EXCEEDED]  # fmt: skip


def rejected(condition: str) -> Exception:
    """Return the exception that the SDK makes of a rejected disposition."""
    try:
        return amqp.MessageSendFailed(amqp.ErrorCondition(condition.encode()))
    except ValueError:
        return amqp.MessageException(condition.encode())


def with_cause(error: Exception) -> BaseException:
    """Return the exception of a send that was running when its link ended, with the cause that `twinbus.sdk` adds."""
    failed = amqp.MessageSendFailed(amqp.ErrorCondition.UnknownError)
    failed.__cause__ = error
    return from_sdk(failed)


@pytest.mark.parametrize("condition", NO)
def test_s8_a_condition_is_a_refusal_where_it_answers_and_none_where_it_takes_the_link_away(condition: str) -> None:
    raw = condition.encode()
    assert was_refused(from_sdk(rejected(condition)))
    answer = ours.error_for(condition, "no")
    assert was_refused(answer)
    gone = answer.copy()
    gone.cut_off = True
    assert not was_refused(gone.copy("entity"))
    for lost in (amqp.AMQPLinkError, amqp.AMQPSessionError, amqp.AMQPConnectionError):
        assert not was_refused(from_sdk(lost(raw)))
        assert not was_refused(with_cause(lost(raw)))
        assert classify(evidence_of(with_cause(amqp.AMQPLinkError(raw)))) is classify(evidence_of(answer))


def test_s8_the_status_of_a_request_is_an_answer_but_the_end_of_its_link_is_not() -> None:
    with pytest.raises(sdk.ServiceBusError) as answered:
        PyamqpTransport.handle_amqp_mgmt_error(Silent(), "Scheduling failed.", b"com.microsoft:server-busy", "", 503)  # type: ignore[arg-type]  # a logger, and what the SDK passes
    assert was_refused(answered.value)
    assert not was_refused(from_sdk(ValueError("Management Operation error occurred.")))


@pytest.mark.parametrize(
    "error",
    [
        from_sdk(refused_token(401, b"")),
        from_sdk(amqp.TokenExpired(amqp.ErrorCondition.InternalError)),
        ClientAuthenticationError("no login"),
        ServiceRequestError("the issuer is away"),
    ],
)
def test_s8_a_token_that_cannot_be_renewed_is_no_answer_to_running_operations(error: BaseException) -> None:
    assert not was_refused(error)


@pytest.mark.parametrize("error", [from_sdk(ValueError("no message")), sdk.MessageSizeExceededError(message="large")])
def test_s8_a_message_that_cannot_be_sent_counts_as_refused(error: BaseException) -> None:
    assert was_refused(error)
