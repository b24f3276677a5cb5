"""Operations of the `$management` node: each request becomes an event of the engine, each result a reply.

`translate` returns a `ManagementCall` for a request: the claim that the caller needs, the event, and a function that
makes the reply from the engine's result. Operations and map entries have the same names as in the service, including
the service's spelling mistakes.

The operations on rules need only the Listen claim, as in the service: a client that may receive from a subscription may
also choose which messages the subscription receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from twinbus.amqp import DecodeError, RoutingFields, read_routing_fields
from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import (
    FALSE_EXPRESSION,
    TRUE_EXPRESSION,
    Claim,
    CorrelationFilter,
    FalseFilter,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.namespace.engine.effects import MeteredOperation, Refusal
from twinbus.namespace.engine.events import Event
from twinbus.namespace.engine.storage_protocol import Row
from twinbus.namespace.front.outgoing_link import encode_delivery, units_added
from twinbus.namespace.front.request_response import NodeReply, NodeRequest
from twinbus.values import Array, Condition, Described, Int, Long, Timestamp, ULong

MAX_LONG: Final = 2**63 - 1
MAX_INT: Final = 2**31 - 1
# Clients send the largest instant of .NET, in milliseconds, when they want a list of all sessions.
_MAX_INSTANT: Final = 253402300799999
_NO_CONTENT: Final = NodeReply(204, "No content")
_MESSAGE_READS: Final = ("peek-message", "receive-by-sequence-number")

# Descriptors of the described lists in which a rule is encoded.
_RULE: Final = ULong(0x137_0000_0004)
_EMPTY_ACTION: Final = ULong(0x137_0000_0005)
_SQL_ACTION: Final = ULong(0x137_0000_0006)
_SQL_FILTER: Final = ULong(0x13_7000_0006)
_TRUE_FILTER: Final = ULong(0x13_7000_0007)
_FALSE_FILTER: Final = ULong(0x13_7000_0008)
_CORRELATION_FILTER: Final = ULong(0x13_7000_0009)
_COMPATIBILITY: Final = 20

# Fields of a correlation filter, in the order of the described list that encodes the filter.
_CORRELATION_FIELDS: Final = {
    "correlation-id": "correlation_id",
    "message-id": "message_id",
    "to": "to",
    "reply-to": "reply_to",
    "label": "label",
    "session-id": "session_id",
    "reply-to-session-id": "reply_to_session_id",
    "content-type": "content_type",
}


class BadRequestError(Exception):
    """The body of a request is not valid for the operation."""


class ManagementCall(NamedTuple):
    """A request, translated for the engine."""

    claim: Claim
    """The claim that the caller needs."""
    event: Callable[[Callable[[Any], None]], Event]
    """Returns the event. Its argument is the function that the engine calls with the result."""
    respond: Callable[[Any], NodeReply]
    """Turns the result into a reply."""
    session: str | None = None
    """The session that a receiver of the same connection must hold, or None if the operation needs no session."""
    delivers: MeteredOperation | None = None
    """The operation that is metered if the reply has messages: `NodeReply.more_units` belongs to it."""


class RequestBody:
    """Reads the map of a request. Each method reads one entry, and raises BadRequestError if that entry is invalid."""

    def __init__(self, operation: str, entries: dict[Any, Any]) -> None:
        self._operation = operation
        self._entries = {str(key): value for key, value in entries.items()}

    def number(self, name: str, default: int | None = None, least: int = -MAX_LONG - 1, most: int = MAX_LONG) -> int:
        value = self._entries.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be a number, not {value!r}.")
        if not least <= value <= most:
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be from {least} to {most}, not {value!r}.")
        return int(value)

    def text(self, name: str) -> str | None:
        value = self._entries.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be a string, not {value!r}.")
        return value

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise BadRequestError(f"'{self._operation}' needs '{name}'.")
        return value

    def blob(self, name: str) -> bytes | None:
        value = self._entries.get(name)
        if value is not None and not isinstance(value, bytes):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be binary.")
        return value

    def properties(self, name: str) -> dict[str, Any] | None:
        value = self._entries.get(name)
        if value is not None and not isinstance(value, dict):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be a map.")
        return {str(key): entry for key, entry in value.items()} if value else None

    def list_of(self, name: str, kind: type) -> tuple[Any, ...]:
        value = self._entries.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(entry, kind) for entry in value):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be a list of {kind.__name__}.")
        return tuple(value)

    def numbers(self, name: str) -> tuple[int, ...]:
        numbers = self.list_of(name, int)
        if any(isinstance(number, bool) or not 0 <= number <= MAX_LONG for number in numbers):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be a list of sequence numbers.")
        return tuple(map(int, numbers))

    def tokens(self, name: str) -> tuple[bytes, ...]:
        return tuple(token.bytes_le for token in self.list_of(name, UUID))

    def messages(self) -> tuple[RoutingFields, ...]:
        messages = []
        for entry in self.list_of("messages", dict):
            raw = {str(key): value for key, value in entry.items()}.get("message")
            if not isinstance(raw, bytes):
                raise BadRequestError(f"Each of 'messages' of '{self._operation}' needs 'message' as binary.")
            try:
                messages.append(read_routing_fields(raw))
            except DecodeError as error:
                raise BadRequestError(f"A message of '{self._operation}' is malformed: {error.description}") from error
        return tuple(messages)


# --- messages and sessions ------------------------------------------------------------------------------------------


def _peek(body: RequestBody, request: NodeRequest) -> ManagementCall:
    start, count = body.number("from-sequence-number", 0), body.number("message-count", 1, 1, MAX_INT)
    session = body.text("session-id")
    dead, transfer = request.address.dead_letter, request.address.transfer

    def respond(rows: list[Row]) -> NodeReply:
        if not rows:
            return _NO_CONTENT
        found = [_encode_message(row, None, None) for row in rows]
        # A peek is one operation, billed by the total size.
        more = units_added(sum(row.size for row in rows), sum(map(len, found)))
        return NodeReply(200, body={"messages": [{"message": message} for message in found]}, more_units=more)

    def event(reply: Any) -> events.MessagesPeeked:
        return events.MessagesPeeked(reply, start, count, dead, session, transfer)

    return ManagementCall(Claim.LISTEN, event, respond, delivers=MeteredOperation.PEEK)


def _renew_lock(body: RequestBody, request: NodeRequest) -> ManagementCall:
    tokens = body.tokens("lock-tokens")

    def respond(instants: list[int]) -> NodeReply:
        return NodeReply(200, body={"expirations": Array(Timestamp, map(Timestamp, instants))})

    return ManagementCall(Claim.LISTEN, lambda reply: events.LocksRenewed(reply, tokens), respond)


def _receive_by_sequence_number(body: RequestBody, request: NodeRequest) -> ManagementCall:
    numbers, peek_lock = body.numbers("sequence-numbers"), body.number("receiver-settle-mode", 1, 0, 1) == 1
    session, dead, transfer = body.text("session-id"), request.address.dead_letter, request.address.transfer

    def respond(found: list[tuple[Row, bytes | None, int | None]]) -> NodeReply:
        entries = [_locked_entry(*entry) for entry in found]
        sizes = zip(found, entries, strict=True)
        more = sum(units_added(row.size, len(entry["message"])) for (row, _, _), entry in sizes)
        return NodeReply(200, body={"messages": entries}, more_units=more)

    return ManagementCall(
        Claim.LISTEN,
        lambda reply: events.DeferredRequested(reply, numbers, peek_lock, dead, session, transfer),
        respond,
        None if dead or transfer else session,
        MeteredOperation.RECEIVE_DEFERRED,
    )


def _update_disposition(body: RequestBody, request: NodeRequest) -> ManagementCall:
    tokens, session = body.tokens("lock-tokens"), body.text("session-id")
    properties = body.properties("properties-to-modify")
    outcome: events.MessageOutcome
    match status := body.required_text("disposition-status"):
        case "completed":
            outcome = events.Complete()
        case "abandoned":
            outcome = events.Abandon(properties)
        case "defered":
            outcome = events.Defer(properties)
        case "suspended":
            outcome = events.MoveToDeadLetter(
                body.text("deadletter-reason"), body.text("deadletter-description"), properties
            )
        case _:
            raise BadRequestError(
                f"'disposition-status' has to be completed, abandoned, defered or suspended, not {status!r}."
            )

    def respond(results: list[Refusal | None]) -> NodeReply:
        refusal = next((result for result in results if result is not None), None)
        return NodeReply(200) if refusal is None else NodeReply.refused(refusal)

    return ManagementCall(Claim.LISTEN, lambda reply: events.MessagesSettled(reply, tokens, outcome, session), respond)


def _schedule(body: RequestBody, request: NodeRequest) -> ManagementCall:
    messages = body.messages()
    return ManagementCall(
        Claim.SEND,
        lambda reply: events.MessagesScheduled(reply, messages),
        lambda numbers: NodeReply(200, body={"sequence-numbers": Array(Long, map(Long, numbers))}),
    )


def _cancel_scheduled(body: RequestBody, request: NodeRequest) -> ManagementCall:
    numbers = body.numbers("sequence-numbers")
    return ManagementCall(Claim.SEND, lambda reply: events.ScheduleCancelled(reply, numbers), lambda _: NodeReply(200))


def _get_session_state(body: RequestBody, request: NodeRequest) -> ManagementCall:
    session = body.required_text("session-id")
    return ManagementCall(
        Claim.LISTEN,
        lambda reply: events.SessionStateRequested(reply, session),
        lambda state: NodeReply(200, body={"session-state": state}),
        session,
    )


def _set_session_state(body: RequestBody, request: NodeRequest) -> ManagementCall:
    session, state = body.required_text("session-id"), body.blob("session-state")
    return ManagementCall(
        Claim.LISTEN,
        lambda reply: events.SessionStateSet(reply, session, state),
        lambda _: NodeReply(200, body={}),
        session,
    )


def _renew_session_lock(body: RequestBody, request: NodeRequest) -> ManagementCall:
    session = body.required_text("session-id")
    return ManagementCall(
        Claim.LISTEN,
        lambda reply: events.SessionLockRenewed(reply, session),
        lambda instant: NodeReply(200, body={"expiration": Timestamp(instant)}),
        session,
    )


def _list_sessions(body: RequestBody, request: NodeRequest) -> ManagementCall:
    skip, top = body.number("skip", 0, 0, MAX_INT), body.number("top", 100, 0, MAX_INT)
    since = body.number("last-updated-time", _MAX_INSTANT)

    def respond(sessions: list[str]) -> NodeReply:
        if not sessions:
            return NodeReply(204, "No content", condition=Condition.SESSION_NOT_FOUND.value)
        return NodeReply(200, body={"skip": Int(skip + len(sessions)), "sessions-ids": Array(str, sessions)})

    updated_since = None if since >= _MAX_INSTANT else since
    return ManagementCall(Claim.LISTEN, lambda reply: events.SessionsListed(reply, skip, top, updated_since), respond)


def _delete_batch(body: RequestBody, request: NodeRequest) -> ManagementCall:
    count, before = body.number("message-count", None, 1, MAX_INT), body.number("enqueued-time-utc", _MAX_INSTANT)
    dead, transfer = request.address.dead_letter, request.address.transfer

    def respond(deleted: int) -> NodeReply:
        return NodeReply(200, body={"message-count": Int(deleted)}) if deleted else _NO_CONTENT

    return ManagementCall(
        Claim.LISTEN, lambda reply: events.BatchDeleted(reply, count, before, dead, transfer), respond
    )


def _encode_message(row: Row, token: bytes | None, locked_until: int | None) -> bytes:
    return b"".join(encode_delivery(row, token=token, locked_until=locked_until))


def _locked_entry(row: Row, token: bytes | None, locked_until: int | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"message": _encode_message(row, token, locked_until)}
    if token is not None:
        entry["lock-token"] = UUID(bytes_le=token)
    return entry


# --- rules ----------------------------------------------------------------------------------------------------------


def _add_rule(body: RequestBody, request: NodeRequest) -> ManagementCall:
    name, described = body.required_text("rule-name"), body.properties("rule-description") or {}
    rule = RuleDescription(name, _read_filter(described), _read_action(described))
    return ManagementCall(Claim.LISTEN, lambda reply: events.RuleAdded(reply, rule), lambda _: NodeReply(200))


def _remove_rule(body: RequestBody, request: NodeRequest) -> ManagementCall:
    name = body.required_text("rule-name")
    return ManagementCall(Claim.LISTEN, lambda reply: events.RuleRemoved(reply, name), lambda _: NodeReply(200))


def _enumerate_rules(body: RequestBody, request: NodeRequest) -> ManagementCall:
    skip, top = body.number("skip", 0, 0, MAX_INT), body.number("top", MAX_INT, 0, MAX_INT)

    def respond(rules: list[RuleDescription]) -> NodeReply:
        if not rules:
            return _NO_CONTENT
        return NodeReply(200, body={"rules": [{"rule-description": _encode_rule(rule)} for rule in rules]})

    return ManagementCall(Claim.LISTEN, lambda reply: events.RulesListed(reply, skip, top), respond)


def _read_filter(described: Mapping[str, Any]) -> RuleFilter:
    match _read_map(described, "sql-filter"), _read_map(described, "correlation-filter"):
        case (None, None):
            if "true-filter" in described:
                return TrueFilter()
            if "false-filter" in described:
                return FalseFilter()
            raise BadRequestError("'rule-description' of 'add-rule' needs a sql-filter or a correlation-filter.")
        case (dict() as sql, None):
            return SqlFilter(_read_expression(sql, "sql-filter"))
        case (None, dict() as correlation):
            return _read_correlation_filter(correlation)
        case _:
            raise BadRequestError("'rule-description' of 'add-rule' has two filters.")


def _read_correlation_filter(described: Mapping[str, Any]) -> CorrelationFilter:
    for name in _CORRELATION_FIELDS:
        value = described.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequestError(f"'{name}' of a correlation filter has to be a string, not {value!r}.")
    texts = {field: described.get(name) for name, field in _CORRELATION_FIELDS.items()}
    return CorrelationFilter(**texts, properties=_read_map(described, "properties") or {})


def _read_action(described: Mapping[str, Any]) -> SqlAction | None:
    action = _read_map(described, "sql-rule-action")
    return None if action is None else SqlAction(_read_expression(action, "sql-rule-action"))


def _read_expression(described: Mapping[str, Any], owner: str) -> str:
    expression = described.get("expression")
    if not isinstance(expression, str):
        raise BadRequestError(f"'{owner}' of 'add-rule' needs its 'expression' as a string.")
    return expression


def _read_map(described: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = described.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequestError(f"'{name}' of 'add-rule' has to be a map.")
    return {str(key): entry for key, entry in value.items()}


def _encode_rule(rule: RuleDescription) -> Described:
    if rule.action is None:
        action = Described(_EMPTY_ACTION, [])
    else:
        action = Described(_SQL_ACTION, [rule.action.expression, _COMPATIBILITY])
    return Described(_RULE, [_encode_filter(rule.filter), action, rule.name, Timestamp(rule.created)])


def _encode_filter(rule_filter: RuleFilter) -> Described:
    match rule_filter:
        case TrueFilter():
            return Described(_TRUE_FILTER, [TRUE_EXPRESSION, _COMPATIBILITY])
        case FalseFilter():
            return Described(_FALSE_FILTER, [FALSE_EXPRESSION, _COMPATIBILITY])
        case SqlFilter():
            return Described(_SQL_FILTER, [rule_filter.expression, _COMPATIBILITY])
        case CorrelationFilter():
            texts = [getattr(rule_filter, field) for field in _CORRELATION_FIELDS.values()]
            return Described(_CORRELATION_FILTER, [*texts, dict(rule_filter.properties)])


# --- dispatch -------------------------------------------------------------------------------------------------------


OPERATIONS: Final[dict[str, Callable[[RequestBody, NodeRequest], ManagementCall]]] = {
    "peek-message": _peek,
    "renew-lock": _renew_lock,
    "receive-by-sequence-number": _receive_by_sequence_number,
    "update-disposition": _update_disposition,
    "schedule-message": _schedule,
    "cancel-scheduled-message": _cancel_scheduled,
    "get-session-state": _get_session_state,
    "set-session-state": _set_session_state,
    "renew-session-lock": _renew_session_lock,
    "get-message-sessions": _list_sessions,
    "batch-delete-messages": _delete_batch,
    "add-rule": _add_rule,
    "remove-rule": _remove_rule,
    "enumerate-rules": _enumerate_rules,
}


def reads_messages(request: NodeRequest) -> bool:
    """Return whether the reply to a request carries messages. Such a reply may be large."""
    return request.operation.removeprefix("com.microsoft:") in _MESSAGE_READS


def translate(request: NodeRequest) -> ManagementCall | Refusal:
    """Return the call for a request, or a refusal that says what is wrong with the request."""
    name = request.operation.removeprefix("com.microsoft:")
    operation = OPERATIONS.get(name)
    if operation is None:
        return Refusal(Condition.NOT_IMPLEMENTED, f"The operation '{request.operation}' is not supported yet.")
    if not isinstance(request.body, dict):
        return Refusal(Condition.ARGUMENT_ERROR, f"The body of '{request.operation}' has to be a map.")
    try:
        return operation(RequestBody(request.operation, request.body), request)
    except BadRequestError as error:
        return Refusal(Condition.ARGUMENT_ERROR, str(error))
