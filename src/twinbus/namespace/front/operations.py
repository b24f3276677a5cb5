"""`$management` of an entity: each operation as the event the engine knows, and its answer as a reply body."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.rows import Row
from twinbus.namespace.front.asking import MAX_INT, NOTHING, BadRequestError, Body, Translated
from twinbus.namespace.front.receiving import encoded
from twinbus.namespace.front.requests import Reply, Request
from twinbus.namespace.front.rule_operations import add_rule, enumerate_rules, remove_rule
from twinbus.values import Array, Condition, Int, Long, Timestamp

# The listing mode "all sessions" is asked for with the largest instant .NET knows, or what its codec makes of it.
_MAX_INSTANT = 253402300799999
_READS = ("peek-message", "receive-by-sequence-number")


def reads_messages(request: Request) -> bool:
    """Whether the reply carries messages, and so may be large."""
    return request.operation.removeprefix("com.microsoft:") in _READS


def translate(request: Request) -> Translated | Refusal:
    """Understand one management request; a Refusal names what is wrong with it."""
    name = request.operation.removeprefix("com.microsoft:")
    operation = _OPERATIONS.get(name)
    if operation is None:
        return Refusal(Condition.NOT_IMPLEMENTED, f"The operation '{request.operation}' is not supported yet.")
    if not isinstance(request.body, dict):
        return Refusal(Condition.ARGUMENT_ERROR, f"The body of '{request.operation}' has to be a map.")
    try:
        return operation(Body(request.operation, request.body), request)
    except BadRequestError as error:
        return Refusal(Condition.ARGUMENT_ERROR, str(error))


def _peek(body: Body, request: Request) -> Translated:
    start, count = body.number("from-sequence-number", 0), body.number("message-count", 1, 1, MAX_INT)
    session = body.text("session-id")
    dead, transfer = request.address.dead_letter, request.address.transfer

    def respond(rows: list[Row]) -> Reply:
        if not rows:
            return NOTHING
        return Reply(200, body={"messages": [{"message": _raw(row, None, None)} for row in rows]})

    def event(reply: Any) -> events.MessagesPeeked:
        return events.MessagesPeeked(reply, start, count, dead, session, transfer)

    return Translated(Claim.LISTEN, event, respond)


def _renew_lock(body: Body, request: Request) -> Translated:
    tokens = body.tokens("lock-tokens")

    def respond(instants: list[int]) -> Reply:
        return Reply(200, body={"expirations": Array(Timestamp, map(Timestamp, instants))})

    return Translated(Claim.LISTEN, lambda reply: events.LocksRenewed(reply, tokens), respond)


def _receive_by_sequence_number(body: Body, request: Request) -> Translated:
    numbers, peek_lock = body.numbers("sequence-numbers"), body.number("receiver-settle-mode", 1, 0, 1) == 1
    session, dead, transfer = body.text("session-id"), request.address.dead_letter, request.address.transfer

    def respond(found: list[tuple[Row, bytes | None, int | None]]) -> Reply:
        return Reply(200, body={"messages": [_locked(*entry) for entry in found]})

    return Translated(
        Claim.LISTEN,
        lambda reply: events.DeferredRequested(reply, numbers, peek_lock, dead, session, transfer),
        respond,
        None if dead or transfer else session,
    )


def _update_disposition(body: Body, request: Request) -> Translated:
    tokens, session = body.tokens("lock-tokens"), body.text("session-id")
    properties = body.properties("properties-to-modify")
    outcome: events.Outcome
    match status := body.needed_text("disposition-status"):
        case "completed":
            outcome = events.Complete()
        case "abandoned":
            outcome = events.Abandon(properties)
        case "defered":
            outcome = events.Defer(properties)
        case "suspended":
            outcome = events.DeadLetter(body.text("deadletter-reason"), body.text("deadletter-description"), properties)
        case _:
            raise BadRequestError(
                f"'disposition-status' has to be completed, abandoned, defered or suspended, not {status!r}."
            )

    def respond(results: list[Refusal | None]) -> Reply:
        refusal = next((result for result in results if result is not None), None)
        return Reply(200) if refusal is None else Reply.refused(refusal)

    return Translated(Claim.LISTEN, lambda reply: events.MessagesSettled(reply, tokens, outcome, session), respond)


def _schedule(body: Body, request: Request) -> Translated:
    messages = body.messages()
    return Translated(
        Claim.SEND,
        lambda reply: events.MessagesScheduled(reply, messages),
        lambda numbers: Reply(200, body={"sequence-numbers": Array(Long, map(Long, numbers))}),
    )


def _cancel_scheduled(body: Body, request: Request) -> Translated:
    numbers = body.numbers("sequence-numbers")
    return Translated(Claim.SEND, lambda reply: events.ScheduleCancelled(reply, numbers), lambda _: Reply(200))


def _get_session_state(body: Body, request: Request) -> Translated:
    session = body.needed_text("session-id")
    return Translated(
        Claim.LISTEN,
        lambda reply: events.SessionStateRequested(reply, session),
        lambda state: Reply(200, body={"session-state": state}),
        session,
    )


def _set_session_state(body: Body, request: Request) -> Translated:
    session, state = body.needed_text("session-id"), body.blob("session-state")
    return Translated(
        Claim.LISTEN,
        lambda reply: events.SessionStateSet(reply, session, state),
        lambda _: Reply(200, body={}),
        session,
    )


def _renew_session_lock(body: Body, request: Request) -> Translated:
    session = body.needed_text("session-id")
    return Translated(
        Claim.LISTEN,
        lambda reply: events.SessionLockRenewed(reply, session),
        lambda instant: Reply(200, body={"expiration": Timestamp(instant)}),
        session,
    )


def _list_sessions(body: Body, request: Request) -> Translated:
    skip, top = body.number("skip", 0, 0, MAX_INT), body.number("top", 100, 0, MAX_INT)
    since = body.number("last-updated-time", _MAX_INSTANT)

    def respond(sessions: list[str]) -> Reply:
        if not sessions:
            return Reply(204, "No content", condition=Condition.SESSION_NOT_FOUND.value)
        return Reply(200, body={"skip": Int(skip + len(sessions)), "sessions-ids": Array(str, sessions)})

    updated_since = None if since >= _MAX_INSTANT else since
    return Translated(Claim.LISTEN, lambda reply: events.SessionsListed(reply, skip, top, updated_since), respond)


def _delete_batch(body: Body, request: Request) -> Translated:
    count, before = body.number("message-count", None, 1, MAX_INT), body.number("enqueued-time-utc", _MAX_INSTANT)
    dead, transfer = request.address.dead_letter, request.address.transfer

    def respond(deleted: int) -> Reply:
        return Reply(200, body={"message-count": Int(deleted)}) if deleted else NOTHING

    return Translated(Claim.LISTEN, lambda reply: events.BatchDeleted(reply, count, before, dead, transfer), respond)


def _raw(row: Row, token: bytes | None, locked_until: int | None) -> bytes:
    return b"".join(encoded(row, token=token, locked_until=locked_until))


def _locked(row: Row, token: bytes | None, locked_until: int | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"message": _raw(row, token, locked_until)}
    if token is not None:
        entry["lock-token"] = UUID(bytes_le=token)
    return entry


_OPERATIONS: dict[str, Callable[[Body, Request], Translated]] = {
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
