"""Receivers of a pair: receivers of the SDK on the primary, recorded in the ledger (M1), and quiet receivers.

A recorded receiver stays the SDK's object, sync or asyncio. Some of its methods are wrapped so that they record every
receive, settlement, renewal and peek.

A quiet receiver returns nothing while the primary cannot be reached, instead of raising.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiver

from twinbus.backlog import COUNTING_FAILURES, failure_kind
from twinbus.ledger import OK, Ledger, Stage
from twinbus.pairing.recording import OperationRecorder, operation_result, size_of
from twinbus.sdk import RECEIVE_METHODS, call_before_close, has_credit, is_open

if TYPE_CHECKING:
    from azure.servicebus.aio import ServiceBusReceiver as AioServiceBusReceiver

    _Receiver = ServiceBusReceiver
    _AioReceiver = AioServiceBusReceiver
else:
    _Receiver = _AioReceiver = object

_EMPTY: Final = (StopIteration, StopAsyncIteration)
_MAX_QUIET_PAUSE: Final = 1.0

OnEnd = Callable[[Any, BaseException | None, float], None]
"""Called with the result or the error of a method, and the seconds that it took."""


# --- recorded --------------------------------------------------------------------------------------------------------


def record_receiver(receiver: Any, recorder: OperationRecorder, entity: str) -> None:
    """Record the operations of a new receiver of `entity` on the primary. Does nothing without a ledger."""
    if recorder.ledger is not None:
        ReceiverRecorder(receiver, recorder.ledger, recorder.namespace, entity)


class ReceiverRecorder:
    """Records the operations of one receiver.

    Link credit that ends without a message is recorded as an empty receive (Y2). If a call returns no message, the
    SDK's credit stays on the link and ends when the link closes.
    """

    def __init__(self, receiver: Any, ledger: Ledger, namespace: str, entity: str) -> None:
        self._receiver = receiver
        self._ledger = ledger
        self._where = (namespace, entity)
        self._got_message = False
        for name in RECEIVE_METHODS:
            _wrap(receiver, name, self._received, self._receive_starts)
        _wrap(receiver, "complete_message", self._settled_as(Stage.COMPLETE_PRIMARY))
        for name in ("abandon_message", "defer_message", "dead_letter_message"):
            _wrap(receiver, name, self._settled_as(Stage.SETTLE_PRIMARY))
        _wrap(receiver, "renew_message_lock", self._settled_as(Stage.RENEW_PRIMARY))
        _wrap(receiver, "receive_deferred_messages", self._deferred_received)
        _wrap(receiver, "peek_messages", self._peeked)
        call_before_close(receiver, self._link_closes)

    def _receive_starts(self) -> None:
        if not has_credit(self._receiver):
            self._got_message = False

    def _received(self, found: Any, error: BaseException | None, seconds: float) -> None:
        if isinstance(error, _EMPTY) or (error is None and found == []):
            return
        if error is not None:
            # A link that could not be opened carried no operation.
            if is_open(self._receiver):
                self._record(Stage.EMPTY_RECEIVE, (), seconds, error)
            return
        self._got_message = True
        messages = found if isinstance(found, list) else [found]
        self._record(Stage.RECEIVE_PRIMARY, [size_of(one.raw_amqp_message) for one in messages], seconds)

    def _link_closes(self) -> None:
        if has_credit(self._receiver) and not self._got_message:
            self._record(Stage.EMPTY_RECEIVE, (), 0.0)

    def _deferred_received(self, found: Any, error: BaseException | None, seconds: float) -> None:
        sizes = [] if error is not None else [size_of(one.raw_amqp_message) for one in found]
        self._record(Stage.RECEIVE_PRIMARY, sizes, seconds, error)

    def _peeked(self, found: Any, error: BaseException | None, seconds: float) -> None:
        # A peek is one operation, billed by the total size of the messages that it returned (M2).
        size = 0 if error is not None else sum(size_of(one.raw_amqp_message) for one in found)
        self._record(Stage.PEEK_PRIMARY, size, seconds, error)

    def _settled_as(self, stage: Stage) -> OnEnd:
        return lambda _, error, seconds: self._record(stage, 0, seconds, error)

    def _record(
        self, stage: Stage, size: int | list[int] | tuple[()], seconds: float, error: BaseException | None = None
    ) -> None:
        result, cause = (OK, None) if error is None else operation_result(error)
        self._ledger.done(stage, *self._where, (), size, seconds=seconds, result=result, cause=cause)


def _wrap(receiver: Any, name: str, on_end: OnEnd, on_start: Callable[[], None] = lambda: None) -> None:
    """Wrap the method `name` of this object: `on_start` is called before the method, and `on_end` after it."""
    method = getattr(receiver, name)

    async def aio_wrapped(*arguments: Any, **keywords: Any) -> Any:
        on_start()
        started = time.monotonic()
        try:
            result = await method(*arguments, **keywords)
        except BaseException as error:
            on_end(None, error, time.monotonic() - started)
            raise
        on_end(result, None, time.monotonic() - started)
        return result

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        on_start()
        started = time.monotonic()
        try:
            result = method(*arguments, **keywords)
        except BaseException as error:
            on_end(None, error, time.monotonic() - started)
            raise
        on_end(result, None, time.monotonic() - started)
        return result

    setattr(receiver, name, aio_wrapped if inspect.iscoroutinefunction(method) else wrapped)


# --- quiet -----------------------------------------------------------------------------------------------------------


def quiet_pause(error: Exception, max_wait_time: float | None) -> float:
    """Return the seconds that a quiet receiver waits after an error before it returns no messages.

    The wait slows down an application that receives in a loop. Raises the error if its kind does not count towards
    failover (S2).
    """
    if failure_kind(error) not in COUNTING_FAILURES:
        raise error
    return _MAX_QUIET_PAUSE if max_wait_time is None else min(max_wait_time, _MAX_QUIET_PAUSE)


class QuietReceiver(_Receiver):
    """A ServiceBusReceiver whose receive and peek calls return no messages while the primary cannot be reached.

    All other methods are those of the SDK's receiver.

    Example: `with pair.get_queue_receiver("orders", quiet_while_down=True) as receiver: ...`.
    """

    def __init__(self, receiver: ServiceBusReceiver) -> None:
        self._receiver = receiver

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self._receiver, name)

        @property
        def __class__(self) -> type:
            """For `isinstance`: programs may ask whether they got the SDK's receiver."""
            return type(self._receiver)

    def receive_messages(
        self, max_message_count: int | None = 1, max_wait_time: float | None = None
    ) -> list[ServiceBusReceivedMessage]:
        """Return messages as the SDK's receiver does; none, after a pause, while the primary cannot be reached.

        Example: `receiver.receive_messages(10, max_wait_time=5)`.
        """
        try:
            return self._receiver.receive_messages(max_message_count, max_wait_time)
        except Exception as error:
            time.sleep(quiet_pause(error, max_wait_time))
            return []

    def peek_messages(
        self, max_message_count: int = 1, *, sequence_number: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> list[ServiceBusReceivedMessage]:
        """Return messages as the SDK's receiver does; none, after a pause, while the primary cannot be reached.

        Example: `receiver.peek_messages(10)`.
        """
        try:
            return self._receiver.peek_messages(
                max_message_count, sequence_number=sequence_number, timeout=timeout, **kwargs
            )
        except Exception as error:
            time.sleep(quiet_pause(error, timeout))
            return []

    def __enter__(self) -> Self:
        try:
            self._receiver.__enter__()
        except Exception as error:
            quiet_pause(error, 0.0)
        return self

    def __exit__(self, *error: Any) -> None:
        self._receiver.__exit__(*error)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ServiceBusReceivedMessage:
        while True:
            try:
                return self._receiver.__next__()
            except StopIteration:
                raise
            except Exception as error:
                time.sleep(quiet_pause(error, None))


class AioQuietReceiver(_AioReceiver):
    """A ServiceBusReceiver whose receive and peek calls return no messages while the primary cannot be reached.

    All other methods are those of the SDK's receiver.

    Example: `async with pair.get_queue_receiver("orders", quiet_while_down=True) as receiver: ...`.
    """

    def __init__(self, receiver: AioServiceBusReceiver) -> None:
        self._receiver = receiver

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self._receiver, name)

        @property
        def __class__(self) -> type:
            """For `isinstance`: programs may ask whether they got the SDK's receiver."""
            return type(self._receiver)

    async def receive_messages(
        self, max_message_count: int | None = 1, max_wait_time: float | None = None
    ) -> list[ServiceBusReceivedMessage]:
        """Return messages as the SDK's receiver does; none, after a pause, while the primary cannot be reached.

        Example: `await receiver.receive_messages(10, max_wait_time=5)`.
        """
        try:
            return await self._receiver.receive_messages(max_message_count, max_wait_time)
        except Exception as error:
            await asyncio.sleep(quiet_pause(error, max_wait_time))
            return []

    async def peek_messages(
        self, max_message_count: int = 1, *, sequence_number: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> list[ServiceBusReceivedMessage]:
        """Return messages as the SDK's receiver does; none, after a pause, while the primary cannot be reached.

        Example: `await receiver.peek_messages(10)`.
        """
        try:
            return await self._receiver.peek_messages(
                max_message_count, sequence_number=sequence_number, timeout=timeout, **kwargs
            )
        except Exception as error:
            await asyncio.sleep(quiet_pause(error, timeout))
            return []

    async def __aenter__(self) -> Self:
        try:
            await self._receiver.__aenter__()
        except Exception as error:
            quiet_pause(error, 0.0)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._receiver.__aexit__(*error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ServiceBusReceivedMessage:
        while True:
            try:
                return await self._receiver.__anext__()
            except StopAsyncIteration:
                raise
            except Exception as error:
                await asyncio.sleep(quiet_pause(error, None))
