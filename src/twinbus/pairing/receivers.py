"""What a pair's receivers on the primary tell its ledger (M1): receives, settlements, renewals and peeks, each try.

The receiver stays the SDK's own object, sync or asyncio; some of its methods are told to say what came of them.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiver
from azure.servicebus.aio import ServiceBusReceiver as AioServiceBusReceiver

from twinbus.backlog import COUNTING_FAILURES, failure_kind
from twinbus.ledger import OK, Ledger, Stage
from twinbus.pairing.recording import OperationRecorder, outcome_of, size_of
from twinbus.sdk import RECEIVE_METHODS, call_before_close, has_credit, is_open

# What came back or was raised, and the seconds it took.
_Ended = Callable[[Any, BaseException | None, float], None]
_EMPTY = (StopIteration, StopAsyncIteration)


R = TypeVar("R")


def recorded(receiver: R, recording: OperationRecorder, entity: str) -> R:
    """The same receiver, of this entity on the primary."""
    if recording.ledger is not None:
        _ReceiverRecording(receiver, recording.ledger, recording.namespace, entity)
    return receiver


class _ReceiverRecording:
    """Of one receiver, from its making. A grant of credit that ends without a message is an empty receive (Y2): the
    SDK's credit outlives a call that brought nothing, and ends with the link.
    """

    def __init__(self, receiver: Any, ledger: Ledger, namespace: str, entity: str) -> None:
        self._receiver = receiver
        self._ledger = ledger
        self._where = (namespace, entity)
        self._fed = False
        for name in RECEIVE_METHODS:
            _told(receiver, name, self._received, self._asking)
        _told(receiver, "complete_message", self._of_one(Stage.COMPLETE_PRIMARY))
        for name in ("abandon_message", "defer_message", "dead_letter_message"):
            _told(receiver, name, self._of_one(Stage.SETTLE_PRIMARY))
        _told(receiver, "renew_message_lock", self._of_one(Stage.RENEW_PRIMARY))
        _told(receiver, "receive_deferred_messages", self._deferred)
        _told(receiver, "peek_messages", self._peeked)
        call_before_close(receiver, self._closing)

    def _asking(self) -> None:
        if not self._has_credit():
            self._fed = False

    def _received(self, found: Any, error: BaseException | None, seconds: float) -> None:
        if isinstance(error, _EMPTY) or (error is None and found == []):
            return
        if error is not None:
            if is_open(self._receiver):  # or it could not be opened, and was asked for nothing
                self._tell(Stage.EMPTY_RECEIVE, (), seconds, error)
            return
        self._fed = True
        messages = found if isinstance(found, list) else [found]
        self._tell(Stage.RECEIVE_PRIMARY, [size_of(one.raw_amqp_message) for one in messages], seconds)

    def _closing(self) -> None:
        if self._has_credit() and not self._fed:
            self._tell(Stage.EMPTY_RECEIVE, (), 0.0)

    def _deferred(self, found: Any, error: BaseException | None, seconds: float) -> None:
        sizes = [] if error is not None else [size_of(one.raw_amqp_message) for one in found]
        self._tell(Stage.RECEIVE_PRIMARY, sizes, seconds, error)

    def _peeked(self, found: Any, error: BaseException | None, seconds: float) -> None:
        # One operation, by all that it carried (M2).
        size = 0 if error is not None else sum(size_of(one.raw_amqp_message) for one in found)
        self._tell(Stage.PEEK_PRIMARY, size, seconds, error)

    def _of_one(self, stage: Stage) -> _Ended:
        return lambda _, error, seconds: self._tell(stage, 0, seconds, error)

    def _has_credit(self) -> bool:
        return has_credit(self._receiver)

    def _tell(
        self, stage: Stage, size: int | list[int] | tuple[()], seconds: float, error: BaseException | None = None
    ) -> None:
        result, cause = (OK, None) if error is None else outcome_of(error)
        self._ledger.done(stage, *self._where, (), size, seconds=seconds, result=result, cause=cause)


def _told(receiver: Any, name: str, ended: _Ended, begun: Callable[[], None] = lambda: None) -> None:
    """The method of this one object tells, from now on, what came of it."""
    call = getattr(receiver, name)

    async def aio_tried(*arguments: Any, **keywords: Any) -> Any:
        begun()
        began = time.monotonic()
        try:
            result = await call(*arguments, **keywords)
        except BaseException as error:
            ended(None, error, time.monotonic() - began)
            raise
        ended(result, None, time.monotonic() - began)
        return result

    def tried(*arguments: Any, **keywords: Any) -> Any:
        begun()
        began = time.monotonic()
        try:
            result = call(*arguments, **keywords)
        except BaseException as error:
            ended(None, error, time.monotonic() - began)
            raise
        ended(result, None, time.monotonic() - began)
        return result

    setattr(receiver, name, aio_tried if inspect.iscoroutinefunction(call) else tried)


LONGEST_PAUSE: Final = 1.0


def quiet_pause(max_wait_time: float | None) -> float:
    return LONGEST_PAUSE if max_wait_time is None else min(max_wait_time, LONGEST_PAUSE)


class QuietReceiver:
    """A ServiceBusReceiver whose receiving calls return nothing for S2's first list; all else is the SDK's."""

    def __init__(self, receiver: ServiceBusReceiver) -> None:
        self._receiver = receiver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    def receive_messages(
        self, max_message_count: int | None = 1, max_wait_time: float | None = None
    ) -> list[ServiceBusReceivedMessage]:
        try:
            return self._receiver.receive_messages(max_message_count, max_wait_time)
        except Exception as error:
            self._quiet(error, max_wait_time)
            return []

    def peek_messages(self, *arguments: Any, **keywords: Any) -> list[ServiceBusReceivedMessage]:
        try:
            return self._receiver.peek_messages(*arguments, **keywords)
        except Exception as error:
            self._quiet(error, keywords.get("timeout"))
            return []

    def __enter__(self) -> Self:
        try:
            self._receiver.__enter__()
        except Exception as error:
            self._quiet(error, 0.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._receiver.__exit__(kind, error, trace)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ServiceBusReceivedMessage:
        while True:
            try:
                return self._receiver.__next__()
            except StopIteration:
                raise
            except Exception as error:
                self._quiet(error, None)

    def _quiet(self, error: Exception, max_wait_time: float | None) -> None:
        if failure_kind(error) not in COUNTING_FAILURES:
            raise error
        time.sleep(quiet_pause(max_wait_time))


class AioQuietReceiver:
    """A ServiceBusReceiver whose receiving calls return nothing for S2's first list; all else is the SDK's."""

    def __init__(self, receiver: AioServiceBusReceiver) -> None:
        self._receiver = receiver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    async def receive_messages(
        self, max_message_count: int | None = 1, max_wait_time: float | None = None
    ) -> list[ServiceBusReceivedMessage]:
        try:
            return await self._receiver.receive_messages(max_message_count, max_wait_time)
        except Exception as error:
            await self._quiet(error, max_wait_time)
            return []

    async def peek_messages(self, *arguments: Any, **keywords: Any) -> list[ServiceBusReceivedMessage]:
        try:
            return await self._receiver.peek_messages(*arguments, **keywords)
        except Exception as error:
            await self._quiet(error, keywords.get("timeout"))
            return []

    async def __aenter__(self) -> Self:
        try:
            await self._receiver.__aenter__()
        except Exception as error:
            await self._quiet(error, 0.0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._receiver.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ServiceBusReceivedMessage:
        while True:
            try:
                return await self._receiver.__anext__()
            except StopAsyncIteration:
                raise
            except Exception as error:
                await self._quiet(error, None)

    async def _quiet(self, error: Exception, max_wait_time: float | None) -> None:
        if failure_kind(error) not in COUNTING_FAILURES:
            raise error
        await asyncio.sleep(quiet_pause(max_wait_time))
