"""`$management` of an entity: each operation as the event the engine knows, and its answer as a reply body."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.events import Event
from twinbus.namespace.engine.storage_protocol import Row
from twinbus.namespace.front.outgoing_link import encode_delivery
from twinbus.namespace.front.request_response import NodeReply, NodeRequest
from twinbus.values import Array, Condition, Described, Int, Long, Timestamp, ULong

# The listing mode "all sessions" is asked for with the largest instant .NET knows, or what its codec makes of it.
_MAX_INSTANT = 253402300799999
_READS = ("peek-message", "receive-by-sequence-number")


def reads_messages(request: NodeRequest) -> bool:
    """Whether the reply carries messages, and so may be large."""
    return request.operation.removeprefix("com.microsoft:") in _READS


def translate(request: NodeRequest) -> ManagementCall | Refusal:
    """Understand one management request; a Refusal names what is wrong with it."""
    name = request.operation.removeprefix("com.microsoft:")
    operation = _OPERATIONS.get(name)
    if operation is None:
        return Refusal(Condition.NOT_IMPLEMENTED, f"The operation '{request.operation}' is not supported yet.")
    if not isinstance(request.body, dict):
        return Refusal(Condition.ARGUMENT_ERROR, f"The body of '{request.operation}' has to be a map.")
    try:
        return operation(RequestBody(request.operation, request.body), request)
    except BadRequestError as error:
        return Refusal(Condition.ARGUMENT_ERROR, str(error))


def _peek(body: RequestBody, request: NodeRequest) -> ManagementCall:
    start, count = body.number("from-sequence-number", 0), body.number("message-count", 1, 1, MAX_INT)
    session = body.text("session-id")
    dead, transfer = request.address.dead_letter, request.address.transfer

    def respond(rows: list[Row]) -> NodeReply:
        if not rows:
            return NOTHING
        return NodeReply(200, body={"messages": [{"message": _raw(row, None, None)} for row in rows]})

    def event(reply: Any) -> events.MessagesPeeked:
        return events.MessagesPeeked(reply, start, count, dead, session, transfer)

    return ManagementCall(Claim.LISTEN, event, respond)


def _renew_lock(body: RequestBody, request: NodeRequest) -> ManagementCall:
    tokens = body.tokens("lock-tokens")

    def respond(instants: list[int]) -> NodeReply:
        return NodeReply(200, body={"expirations": Array(Timestamp, map(Timestamp, instants))})

    return ManagementCall(Claim.LISTEN, lambda reply: events.LocksRenewed(reply, tokens), respond)


def _receive_by_sequence_number(body: RequestBody, request: NodeRequest) -> ManagementCall:
    numbers, peek_lock = body.numbers("sequence-numbers"), body.number("receiver-settle-mode", 1, 0, 1) == 1
    session, dead, transfer = body.text("session-id"), request.address.dead_letter, request.address.transfer

    def respond(found: list[tuple[Row, bytes | None, int | None]]) -> NodeReply:
        return NodeReply(200, body={"messages": [_locked(*entry) for entry in found]})

    return ManagementCall(
        Claim.LISTEN,
        lambda reply: events.DeferredRequested(reply, numbers, peek_lock, dead, session, transfer),
        respond,
        None if dead or transfer else session,
    )


def _update_disposition(body: RequestBody, request: NodeRequest) -> ManagementCall:
    tokens, session = body.tokens("lock-tokens"), body.text("session-id")
    properties = body.properties("properties-to-modify")
    outcome: events.MessageOutcome
    match status := body.needed_text("disposition-status"):
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
    session = body.needed_text("session-id")
    return ManagementCall(
        Claim.LISTEN,
        lambda reply: events.SessionStateRequested(reply, session),
        lambda state: NodeReply(200, body={"session-state": state}),
        session,
    )


def _set_session_state(body: RequestBody, request: NodeRequest) -> ManagementCall:
    session, state = body.needed_text("session-id"), body.blob("session-state")
    return ManagementCall(
        Claim.LISTEN,
        lambda reply: events.SessionStateSet(reply, session, state),
        lambda _: NodeReply(200, body={}),
        session,
    )


def _renew_session_lock(body: RequestBody, request: NodeRequest) -> ManagementCall:
    session = body.needed_text("session-id")
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
        return NodeReply(200, body={"message-count": Int(deleted)}) if deleted else NOTHING

    return ManagementCall(
        Claim.LISTEN, lambda reply: events.BatchDeleted(reply, count, before, dead, transfer), respond
    )


def _raw(row: Row, token: bytes | None, locked_until: int | None) -> bytes:
    return b"".join(encode_delivery(row, token=token, locked_until=locked_until))


def _locked(row: Row, token: bytes | None, locked_until: int | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"message": _raw(row, token, locked_until)}
    if token is not None:
        entry["lock-token"] = UUID(bytes_le=token)
    return entry


# Descriptors of the lists that a rule is told in.
_RULE: Final = ULong(0x137_0000_0004)
_EMPTY_ACTION: Final = ULong(0x137_0000_0005)
_SQL_ACTION: Final = ULong(0x137_0000_0006)
_SQL_FILTER: Final = ULong(0x13_7000_0006)
_TRUE_FILTER: Final = ULong(0x13_7000_0007)
_FALSE_FILTER: Final = ULong(0x13_7000_0008)
_CORRELATION_FILTER: Final = ULong(0x13_7000_0009)
_COMPATIBILITY: Final = 20

_FIELDS: Final = {
    "correlation-id": "correlation_id",
    "message-id": "message_id",
    "to": "to",
    "reply-to": "reply_to",
    "label": "label",
    "session-id": "session_id",
    "reply-to-session-id": "reply_to_session_id",
    "content-type": "content_type",
}
"""Of a correlation filter, in the order of its list."""


def add_rule(body: RequestBody, request: NodeRequest) -> ManagementCall:
    name, described = body.needed_text("rule-name"), body.properties("rule-description") or {}
    rule = RuleDescription(name, _filter(described), _action(described))
    return ManagementCall(Claim.LISTEN, lambda reply: events.RuleAdded(reply, rule), lambda _: NodeReply(200))


def remove_rule(body: RequestBody, request: NodeRequest) -> ManagementCall:
    name = body.needed_text("rule-name")
    return ManagementCall(Claim.LISTEN, lambda reply: events.RuleRemoved(reply, name), lambda _: NodeReply(200))


def enumerate_rules(body: RequestBody, request: NodeRequest) -> ManagementCall:
    skip, top = body.number("skip", 0, 0, MAX_INT), body.number("top", MAX_INT, 0, MAX_INT)

    def respond(rules: list[RuleDescription]) -> NodeReply:
        if not rules:
            return NOTHING
        return NodeReply(200, body={"rules": [{"rule-description": _told(rule)} for rule in rules]})

    return ManagementCall(Claim.LISTEN, lambda reply: events.RulesListed(reply, skip, top), respond)


def _filter(described: Mapping[str, Any]) -> RuleFilter:
    match _inner(described, "sql-filter"), _inner(described, "correlation-filter"):
        case (None, None):
            if "true-filter" in described:
                return TrueFilter()
            if "false-filter" in described:
                return FalseFilter()
            raise BadRequestError("'rule-description' of 'add-rule' needs a sql-filter or a correlation-filter.")
        case (dict() as sql, None):
            return SqlFilter(_expression(sql, "sql-filter"))
        case (None, dict() as correlation):
            return _correlation(correlation)
        case _:
            raise BadRequestError("'rule-description' of 'add-rule' has two filters.")


def _correlation(described: Mapping[str, Any]) -> CorrelationFilter:
    for name in _FIELDS:
        value = described.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequestError(f"'{name}' of a correlation filter has to be a string, not {value!r}.")
    texts = {field: described.get(name) for name, field in _FIELDS.items()}
    return CorrelationFilter(**texts, properties=_inner(described, "properties") or {})


def _action(described: Mapping[str, Any]) -> SqlAction | None:
    action = _inner(described, "sql-rule-action")
    return None if action is None else SqlAction(_expression(action, "sql-rule-action"))


def _expression(described: Mapping[str, Any], owner: str) -> str:
    expression = described.get("expression")
    if not isinstance(expression, str):
        raise BadRequestError(f"'{owner}' of 'add-rule' needs its 'expression' as a string.")
    return expression


def _inner(described: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = described.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequestError(f"'{name}' of 'add-rule' has to be a map.")
    return {str(key): entry for key, entry in value.items()}


def _told(rule: RuleDescription) -> Described:
    if rule.action is None:
        action = Described(_EMPTY_ACTION, [])
    else:
        action = Described(_SQL_ACTION, [rule.action.expression, _COMPATIBILITY])
    return Described(_RULE, [_told_filter(rule.filter), action, rule.name, Timestamp(rule.created)])


def _told_filter(described: RuleFilter) -> Described:
    match described:
        case TrueFilter():
            return Described(_TRUE_FILTER, [TRUE_EXPRESSION, _COMPATIBILITY])
        case FalseFilter():
            return Described(_FALSE_FILTER, [FALSE_EXPRESSION, _COMPATIBILITY])
        case SqlFilter():
            return Described(_SQL_FILTER, [described.expression, _COMPATIBILITY])
        case CorrelationFilter():
            texts = [getattr(described, field) for field in _FIELDS.values()]
            return Described(_CORRELATION_FILTER, [*texts, dict(described.properties)])


MAX_LONG: Final = 2**63 - 1
MAX_INT: Final = 2**31 - 1
NOTHING: Final = NodeReply(204, "No content")

Respond = Callable[[Any], NodeReply]


class BadRequestError(Exception):
    """The request's body is not what its operation takes."""


class ManagementCall(NamedTuple):
    """What a request asks of the engine, the claim it needs, and how the engine's result becomes a reply.

    `held` is the session that the asker has to hold by a link of the same connection: that somebody does is not enough.
    """

    claim: Claim
    event: Callable[[Callable[[Any], None]], Event]
    respond: Respond
    session: str | None = None


class RequestBody:
    """A request's map, read with names in the errors."""

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

    def needed_text(self, name: str) -> str:
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

    def many(self, name: str, kind: type) -> tuple[Any, ...]:
        value = self._entries.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(entry, kind) for entry in value):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be a list of {kind.__name__}.")
        return tuple(value)

    def numbers(self, name: str) -> tuple[int, ...]:
        numbers = self.many(name, int)
        if any(isinstance(number, bool) or not 0 <= number <= MAX_LONG for number in numbers):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be a list of sequence numbers.")
        return tuple(map(int, numbers))

    def tokens(self, name: str) -> tuple[bytes, ...]:
        return tuple(token.bytes_le for token in self.many(name, UUID))

    def messages(self) -> tuple[RoutingFields, ...]:
        envelopes = []
        for entry in self.many("messages", dict):
            raw = {str(key): value for key, value in entry.items()}.get("message")
            if not isinstance(raw, bytes):
                raise BadRequestError(f"Each of 'messages' of '{self._operation}' needs 'message' as binary.")
            try:
                envelopes.append(read_routing_fields(raw))
            except DecodeError as error:
                raise BadRequestError(f"A message of '{self._operation}' is malformed: {error.description}") from error
        return tuple(envelopes)


_OPERATIONS: dict[str, Callable[[RequestBody, NodeRequest], ManagementCall]] = {
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
    "add-rule": add_rule,
    "remove-rule": remove_rule,
    "enumerate-rules": enumerate_rules,
}


def supported() -> Iterable[str]:
    """The operations this namespace knows."""
    return _OPERATIONS
