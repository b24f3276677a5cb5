"""A receiver that gives nothing while the primary is away, instead of failing, for asyncio."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

from azure.servicebus import ServiceBusReceivedMessage
from azure.servicebus.aio import ServiceBusReceiver

from twinbus.backlog import COUNTING_FAILURES, failure_kind
from twinbus.pairing.receiving import quiet_pause


class QuietReceiver:
    """A ServiceBusReceiver whose receiving calls return nothing for S2's first list; all else is the SDK's."""

    def __init__(self, receiver: ServiceBusReceiver) -> None:
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
