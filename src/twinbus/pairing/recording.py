"""What a pair tells its ledger (M1, S8): every try of an operation, with its stage, ids and size, and how it ended.

A try on a link that is not open opens it first: what fails there has surely not happened. Without a ledger a call stays
as it is. Nothing is decided here but what an outcome is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from azure.servicebus.amqp import AmqpAnnotatedMessage

from twinbus.ledger import UNKNOWN, Ledger, LedgerOptions, Role, RunningOperation, Stage
from twinbus.ledger.units import UNIT
from twinbus.pairing.failures import REFUSED, FailureKind
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.outgoing import encoded_size, raws_of
from twinbus.pairing.sdk import GIVEN_UP, kind_of, open_link, open_link_once, was_given_up

T = TypeVar("T")
Call = Callable[[Any, float | None], T]
AioCall = Callable[[Any, float | None], Coroutine[Any, Any, T]]

# The word for a failure of no known kind that came before anything was sent: `unknown` would say that it may have been.
_ERROR: Final = "error"
# What a message takes beside its body and the texts in its properties, and how far that may be off.
_PLAIN_BYTES: Final = 27
_DOUBT_BYTES: Final = 2048


def ledger_of(options: SendAvailabilityOptions) -> Ledger | None:
    """The one that was given, or one of the pair's own in the directory that was given."""
    if options.ledger is None or isinstance(options.ledger, Ledger):
        return options.ledger
    return Ledger(options.ledger, Role.CLIENT, LedgerOptions(on_error=options.ledger_on_error))


class Recording:
    """Of a pair's operations on one namespace, by the name that a backlog queue's path has (P4)."""

    def __init__(self, ledger: Ledger | None, namespace: str) -> None:
        self.namespace = namespace
        self._ledger = ledger

    def recorded(
        self, stage: Stage, entity: str, message: Any, call: Call[T], destination: str | None = None
    ) -> Call[T]:
        """The call, each try of which is an operation. LedgerUnavailableError where none may be made.

        `message`: what `identified` gave, None where there is none. `destination` as in `Ledger.begin`.
        """
        ledger = self._ledger
        if ledger is None:
            return call
        ledger.check()
        namespace = self.namespace
        ids, sizes = ids_and_sizes(message)

        def tried(sender: Any, seconds: float | None) -> T:
            operation = ledger.begin(stage, namespace, entity, ids, sizes, destination)
            opened = False
            try:
                if seconds is not None:
                    open_link_once(sender, seconds)
                opened = True
                result = call(sender, None)
            except BaseException as error:
                _failed(operation, FailureKind.TIMEOUT if was_given_up(sender) else kind_of(error), opened)
                raise
            operation.end()
            return result

        return tried

    def aio_recorded(
        self, stage: Stage, entity: str, message: Any, call: AioCall[T], destination: str | None = None
    ) -> AioCall[T]:
        """`recorded`, for asyncio."""
        ledger = self._ledger
        if ledger is None:
            return call
        ledger.check()
        namespace = self.namespace
        ids, sizes = ids_and_sizes(message)

        async def tried(sender: Any, seconds: float | None) -> T:
            operation = ledger.begin(stage, namespace, entity, ids, sizes, destination)
            opened = False
            try:
                if seconds is not None:
                    await open_link(sender, seconds)
                opened = True
                result = await call(sender, None)
            except BaseException as error:
                _failed(operation, FailureKind.TIMEOUT if _past_deadline(error) else kind_of(error), opened)
                raise
            operation.end()
            return result

        return tried


def _failed(operation: RunningOperation, kind: FailureKind, opened: bool) -> None:
    if opened and kind not in REFUSED:
        operation.end(UNKNOWN, cause=str(kind))
    else:
        operation.end(_ERROR if kind is FailureKind.UNKNOWN else str(kind))


def _past_deadline(error: BaseException) -> bool:
    return isinstance(error, asyncio.CancelledError) and error.args == (GIVEN_UP,)


# --- what a message is -----------------------------------------------------------------------------------------------


def ids_and_sizes(message: Any) -> tuple[Sequence[object], int | Sequence[int]]:
    """The message ids as they are on the wire, and what each message takes."""
    if message is None:
        return (), 0
    raws = raws_of(message)
    if len(raws) == 1:
        return (_id(raws[0]),), size_of(raws[0])
    return [_id(raw) for raw in raws], [size_of(raw) for raw in raws]


def size_of(raw: AmqpAnnotatedMessage) -> int:
    """What it takes encoded, within a few bytes; exactly where these may tell a billable unit (M2).

    Encoding every message once more would cost more than all the rest of the ledger.
    """
    body: Any = raw._data_body
    if body is None:
        return encoded_size(raw)
    size = _PLAIN_BYTES + sum(map(len, body))
    if raw.properties is not None:
        for value in vars(raw.properties).values():
            if type(value) is str or type(value) is bytes:
                size += len(value) + 1
    for named in (raw.application_properties, raw.annotations):
        if named:
            size += sum(len(name) + _length(value) + 4 for name, value in named.items())
    if max(size - _DOUBT_BYTES, 1) // UNIT != (size + _DOUBT_BYTES) // UNIT:
        return encoded_size(raw)
    return size


def _length(value: object) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode())
    return len(value) if isinstance(value, bytes) else 8


def _id(raw: AmqpAnnotatedMessage) -> object:
    return raw.properties.message_id if raw.properties else None
