"""A receiver that gives nothing while the primary is away, instead of failing."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiver

from twinbus.backlog import COUNTING_FAILURES, failure_kind
from twinbus.pairing.receiving import quiet_pause


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
