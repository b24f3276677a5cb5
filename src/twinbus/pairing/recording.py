"""Record a pair's operations in its ledger (M1, S8): every try, with stage, message ids, size and result.

An operation starts on an open link: if a link cannot be opened, no operation is recorded. Without a ledger, nothing is
recorded. The module `receivers` records the operations of receivers.
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
    id_and_size,
    message_size,
    open_sync_link,
    was_interrupted_at_deadline,
)

T = TypeVar("T")
Call = Callable[[Any, float | None], T]
AioCall = Callable[[Any], Coroutine[Any, Any, T]]


def open_ledger(options: SendAvailabilityOptions) -> Ledger | None:
    """Return the Ledger that the options give, or open one in the directory that they give. None without either."""
    if options.ledger is None or isinstance(options.ledger, Ledger):
        return options.ledger
    chosen = LedgerOptions(on_error=options.ledger_on_error, durability=options.ledger_durability)
    return Ledger(options.ledger, Role.CLIENT, chosen)


class OperationRecorder:
    """Records a pair's operations on one namespace. `namespace` is the name of the namespace in the ledger (P4)."""

    def __init__(self, ledger: Ledger | None, namespace: str) -> None:
        self.namespace = namespace
        self.ledger = ledger

    def prefix(self, stage: Stage, entity: str, destination: str | None = None) -> str:
        """Return the part of a ledger entry that all operations of one kind share. `recorded` takes this text.

        `destination` has the same meaning as in `Ledger.begin`.
        """
        return operation_prefix(stage, self.namespace, entity, destination)

    def recorded(self, prefix: str, message: Any, call: Call[T]) -> Call[T]:
        """Return a call that does the same and records each try. `message` is the message that the call sends, or None.

        Raises LedgerUnavailableError if the ledger cannot be written and its `on_error` is "stop".
        """
        ledger = self.ledger
        if ledger is None:
            return call
        if ledger.stops_on_error:
            ledger.check()
        return partial(_record_try, ledger, prefix, message, call)

    def aio_recorded(self, prefix: str, message: Any, call: AioCall[T]) -> AioCall[T]:
        """Return a call that does the same and records each try, for asyncio. The link must be open before the call."""
        ledger = self.ledger
        if ledger is None:
            return call
        if ledger.stops_on_error:
            ledger.check()
        return partial(_record_aio_try, ledger, prefix, message, call)

    @contextlib.contextmanager
    def peek(self, queue: str) -> Iterator[list[Any]]:
        """Record the peek at a backlog queue inside the `with` block (Y1). The block adds the messages to the list."""
        found: list[Any] = []
        started = time.monotonic()
        try:
            yield found
        except BaseException as error:
            self._record_peek(queue, found, started, *operation_result(error))
            raise
        self._record_peek(queue, found, started)

    def _record_peek(
        self, queue: str, found: list[Any], started: float, result: str = OK, cause: str | None = None
    ) -> None:
        if self.ledger is not None:
            # A peek is one operation, billed by the total size of the messages that it returned (M2).
            size = sum(encoded_size(message.raw_amqp_message) for message in found)
            seconds = time.monotonic() - started
            self.ledger.done(
                Stage.PEEK_BACKLOG, self.namespace, queue, (), size, seconds=seconds, result=result, cause=cause
            )

    def management(self, entity: str, started: float, requests: int = 1, failure: FailureKind | None = None) -> None:
        """Record requests to the management API that began at `started` on the monotonic clock."""
        if self.ledger is not None:
            result, cause = (
                (OK, None) if failure is None else result_of_failure(failure, refused=failure in REFUSED_FAILURES)
            )
            seconds = time.monotonic() - started
            self.ledger.done(
                Stage.MANAGE, self.namespace, entity, (), (0,) * requests, seconds=seconds, result=result, cause=cause
            )


NO_RECORDER: Final = OperationRecorder(None, "")
"""A recorder without a ledger, which records nothing."""


def _record_try(ledger: Ledger, prefix: str, message: Any, call: Call[T], sender: Any, seconds: float | None) -> T:
    if seconds is not None:
        open_sync_link(sender, seconds)
    operation = _begin(ledger, prefix, message)
    try:
        result = call(sender, None)
    except BaseException as error:
        _end_failed(operation, error, at_deadline=was_interrupted_at_deadline(sender))
        raise
    operation.end()
    return result


async def _record_aio_try(ledger: Ledger, prefix: str, message: Any, call: AioCall[T], sender: Any) -> T:
    operation = _begin(ledger, prefix, message)
    try:
        result = await call(sender)
    except BaseException as error:
        _end_failed(operation, error)
        raise
    operation.end()
    return result


def _begin(ledger: Ledger, prefix: str, message: Any) -> RunningOperation:
    if type(message) is ServiceBusMessage:
        id_, size = id_and_size(message, UNIT_BYTES)
        return ledger.begin_as(prefix, id_ if isinstance(id_, str) else (id_,), size)
    return ledger.begin_as(prefix, *_ids_and_sizes(message))


def _end_failed(operation: RunningOperation, error: BaseException, *, at_deadline: bool = False) -> None:
    result, cause = operation_result(error, at_deadline=at_deadline)
    operation.end(result, cause=cause)


def operation_result(error: BaseException, *, at_deadline: bool = False) -> tuple[str, str | None]:
    """Return result and cause of an operation that started on an open link and failed.

    `at_deadline` says whether the pair's deadline ended the operation; an asyncio error carries this in its arguments.
    """
    if at_deadline or (isinstance(error, asyncio.CancelledError) and error.args == (CANCELLED_AT_DEADLINE,)):
        return result_of_failure(FailureKind.TIMEOUT, refused=False)
    return result_of_failure(failure_kind(error), refused=was_refused(error))


def _ids_and_sizes(message: Any) -> tuple[Sequence[object], Sequence[int]]:
    """Return the message ids as they are on the wire, and the size of each message."""
    raws = [] if message is None else amqp_messages(message)
    ids = [raw.properties.message_id if raw.properties is not None else None for raw in raws]
    return ids, [size_of(raw) for raw in raws]


def size_of(raw: AmqpAnnotatedMessage) -> int:
    """Return the size of a message in bytes, exact enough to count its billing units (M2)."""
    return message_size(raw, UNIT_BYTES)
