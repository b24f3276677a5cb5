"""What a pair tells its ledger (M1, S8): every try of an operation, with its stage, ids and size, and how it ended.

An operation begins on an open link: what could not be opened was asked for nothing. Without a ledger a call stays as it
is. Nothing is decided here but what an outcome is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from azure.servicebus import ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage

from twinbus.backlog import REFUSED_FAILURES, FailureKind, failure_kind, was_refused
from twinbus.ledger import (
    OK,
    UNIT_BYTES,
    Ledger,
    LedgerOptions,
    Role,
    RunningOperation,
    Stage,
    operation_prefix,
    result_of_failure,
)
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.sdk import (
    CANCELLED_AT_DEADLINE,
    amqp_messages,
    encoded_size,
    message_size,
    open_sync_link,
    was_interrupted_at_deadline,
)

T = TypeVar("T")
Call = Callable[[Any, float | None], T]
AioCall = Callable[[Any], Coroutine[Any, Any, T]]


def ledger_of(options: SendAvailabilityOptions) -> Ledger | None:
    """The one that was given, or one of the pair's own in the directory that was given."""
    if options.ledger is None or isinstance(options.ledger, Ledger):
        return options.ledger
    return Ledger(options.ledger, Role.CLIENT, LedgerOptions(on_error=options.ledger_on_error))


class OperationRecorder:
    """Of a pair's operations on one namespace, by the name that a backlog queue's path has (P4)."""

    def __init__(self, ledger: Ledger | None, namespace: str) -> None:
        self.namespace = namespace
        self.ledger = ledger

    def place(self, stage: Stage, entity: str, destination: str | None = None) -> str:
        """What operations have in common, for `recorded`. `destination` as in `Ledger.begin`."""
        return operation_prefix(stage, self.namespace, entity, destination)

    def recorded(self, place: str, message: Any, call: Call[T]) -> Call[T]:
        """The call, each try of which is an operation. LedgerUnavailableError where none may be made.

        `message`: what `identified` gave, None where there is none.
        """
        ledger = self.ledger
        if ledger is None:
            return call
        ledger.check()
        return partial(_tried, ledger, place, message, call)

    def aio_recorded(self, place: str, message: Any, call: AioCall[T]) -> AioCall[T]:
        """`recorded`, for asyncio: its calls are made on open links."""
        ledger = self.ledger
        if ledger is None:
            return call
        ledger.check()
        return partial(_aio_tried, ledger, place, message, call)

    @contextlib.contextmanager
    def peeked(self, queue: str) -> Iterator[list[Any]]:
        """A peek at a backlog queue, within (Y1): what it finds is put into the list. It is told once it is over."""
        found: list[Any] = []
        begun = time.monotonic()
        try:
            yield found
        except BaseException as error:
            self._peeked(queue, found, begun, *outcome_of(error))
            raise
        self._peeked(queue, found, begun)

    def _peeked(self, queue: str, found: list[Any], begun: float, result: str = OK, cause: str | None = None) -> None:
        if self.ledger is not None:
            # One operation, by all that it carried (M2).
            size = sum(encoded_size(one.raw_amqp_message) for one in found)
            seconds = time.monotonic() - begun
            self.ledger.done(
                Stage.PEEK_BACKLOG, self.namespace, queue, (), size, seconds=seconds, result=result, cause=cause
            )

    def managed(self, entity: str, began: float, requests: int = 1, failure: FailureKind | None = None) -> None:
        """So many requests to the management API; `began` by the monotonic clock."""
        if self.ledger is not None:
            result, cause = (
                (OK, None) if failure is None else result_of_failure(failure, refused=failure in REFUSED_FAILURES)
            )
            seconds = time.monotonic() - began
            self.ledger.done(
                Stage.MANAGE, self.namespace, entity, (), (0,) * requests, seconds=seconds, result=result, cause=cause
            )


UNRECORDED: Final = OperationRecorder(None, "")


def _tried(ledger: Ledger, place: str, message: Any, call: Call[T], sender: Any, seconds: float | None) -> T:
    if seconds is not None:
        open_sync_link(sender, seconds)
    operation = ledger.begin_as(place, *_ids_and_sizes(message))
    try:
        result = call(sender, None)
    except BaseException as error:
        _failed(operation, error, given_up=was_interrupted_at_deadline(sender))
        raise
    operation.end()
    return result


async def _aio_tried(ledger: Ledger, place: str, message: Any, call: AioCall[T], sender: Any) -> T:
    operation = ledger.begin_as(place, *_ids_and_sizes(message))
    try:
        result = await call(sender)
    except BaseException as error:
        _failed(operation, error)
        raise
    operation.end()
    return result


# --- sends, which are nearly all -------------------------------------------------------------------------------------

# What runs once in a send is in no cache, and each call costs as much as what it does: so these do without `recorded`
# (docs/decisions/0015-the-ledger.md).


def sent(
    ledger: Ledger, place: str, message: Any, keywords: dict[str, Any], sender: Any, seconds: float | None
) -> None:
    """One try to send what `identified` gave. LedgerUnavailableError where it may not be made."""
    if ledger.stops_on_error:
        ledger.check()
    if seconds is not None:
        open_sync_link(sender, seconds)
    operation = _begun(ledger, place, message)
    try:
        sender.send_messages(message, **keywords)
    except BaseException as error:
        _failed(operation, error, given_up=was_interrupted_at_deadline(sender))
        raise
    operation.end()


async def aio_sent(ledger: Ledger, place: str, message: Any, keywords: dict[str, Any], sender: Any) -> None:
    """`sent`, for asyncio, on an open link."""
    if ledger.stops_on_error:
        ledger.check()
    operation = _begun(ledger, place, message)
    try:
        await sender.send_messages(message, **keywords)
    except BaseException as error:
        _failed(operation, error)
        raise
    operation.end()


def _begun(ledger: Ledger, place: str, message: Any) -> RunningOperation:
    if isinstance(message, ServiceBusMessage):
        raw = message.raw_amqp_message
        if raw.properties is not None and isinstance(raw.properties.message_id, str):
            return ledger.begin_as(place, raw.properties.message_id, size_of(raw))
    return ledger.begin_as(place, *_ids_and_sizes(message))


# --- how it ended ----------------------------------------------------------------------------------------------------


def _failed(operation: RunningOperation, error: BaseException, *, given_up: bool = False) -> None:
    result, cause = outcome_of(error, given_up=given_up)
    operation.end(result, cause=cause)


def outcome_of(error: BaseException, *, given_up: bool = False) -> tuple[str, str | None]:
    """Result and cause of an operation that began on an open link; `given_up` at its deadline."""
    if given_up or (isinstance(error, asyncio.CancelledError) and error.args == (CANCELLED_AT_DEADLINE,)):
        return result_of_failure(FailureKind.TIMEOUT, refused=False)
    return result_of_failure(failure_kind(error), refused=was_refused(error))


# --- what a message is -----------------------------------------------------------------------------------------------


def _ids_and_sizes(message: Any) -> tuple[Sequence[object], Sequence[int]]:
    """The message ids as they are on the wire, and what each message takes."""
    raws = [] if message is None else amqp_messages(message)
    ids = [raw.properties.message_id if raw.properties is not None else None for raw in raws]
    return ids, [size_of(raw) for raw in raws]


def size_of(raw: AmqpAnnotatedMessage) -> int:
    """Return the size of a message in bytes, near enough to count its billing units (M2)."""
    return message_size(raw, UNIT_BYTES)
