"""A stream reader called in Spark's order, by this process, so that a process can end between any two steps.

`Query` does what Spark does with a stream reader and its checkpoint. What is in a queue is counted with the official
client (`Entity`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from typing import Any, TypeVar

import pytest
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
    ServiceBusSender,
)
from pyspark.sql.streaming.datasource import ReadLimit

from tests.pipeline.queues import new_queue
from twinbus.pipeline.servicebus import broker as broker_module
from twinbus.pipeline.servicebus.rows import READ_SCHEMA
from twinbus.pipeline.servicebus.session_stream_reader import SessionStreamReader
from twinbus.pipeline.servicebus.source import ServiceBusDataSource
from twinbus.pipeline.servicebus.stream_reader import StreamReader
from twinbus.testing import LocalNamespace

next_names = (f"streamed-{number}" for number in count())
H = TypeVar("H", ServiceBusSender, ServiceBusReceiver)
_opened: list[ServiceBusSender | ServiceBusReceiver] = []


def keep_open(opened: H) -> H:
    """Leave this open until `close_opened`."""
    _opened.append(opened)
    return opened


def close_opened() -> None:
    """Close them all at once: closing one takes a second."""
    with ThreadPoolExecutor(max(1, len(_opened))) as pool:
        list(pool.map(lambda one: one.close(), _opened))
    _opened.clear()


class Entity:
    """A queue, used with the official client. It has one sender and one receiver, because opening takes a second.

    Its `peek_messages` goes on where the last call ended, unless a sequence number is given.
    """

    def __init__(self, namespace: LocalNamespace, client: ServiceBusClient, **settings: Any) -> None:
        self.name = new_queue(namespace, next(next_names), **settings)
        self.namespace = namespace
        self.client = client

    def send(self, *ids: str, **properties: Any) -> None:
        if ids:
            self._sender.send_messages([ServiceBusMessage(one, message_id=one, **properties) for one in ids])

    @cached_property
    def _sender(self) -> ServiceBusSender:
        return keep_open(self.client.get_queue_sender(self.name))

    @cached_property
    def receiver(self) -> ServiceBusReceiver:
        """A receiver that is not the stream's."""
        return keep_open(self.client.get_queue_receiver(self.name))

    @cached_property
    def dead_letters(self) -> ServiceBusReceiver:
        return keep_open(self.client.get_queue_receiver(self.name, sub_queue="deadletter"))

    def received(self, count: int) -> list[ServiceBusReceivedMessage]:
        """Receive this number of messages with the other receiver, and keep them locked."""
        got: list[ServiceBusReceivedMessage] = []
        while len(got) < count and (more := self.receiver.receive_messages(count - len(got), 5)):
            got += more
        return got

    def left(self) -> list[str]:
        return ids_of(self.receiver.peek_messages(1000, sequence_number=1))

    def delivery_counts(self) -> set[int]:
        return {one.delivery_count or 0 for one in self.receiver.peek_messages(1000, sequence_number=1)}

    def numbers(self) -> list[int]:
        return [one.sequence_number or 0 for one in self.receiver.peek_messages(1000, sequence_number=1)]

    def query(self, **options: object) -> Query:
        told: dict[str, object] = {"connectionString": self.namespace.connection_string, "entity": self.name}
        told |= {"pollInterval": NO_PAUSE, **options}
        return Query({name: str(value) for name, value in told.items()})


def ids_of(messages: Iterable[ServiceBusReceivedMessage]) -> list[str]:
    return [str(one.message_id) for one in messages]


NO_PAUSE = "1e-9"
"""The option pollInterval with which each trigger peeks at the queue. A send may take less than a millisecond."""

BETWEEN_COMPLETIONS = "between completions"
STEPS = ("planned", "offset logged", "committed to the source", "read", "batch committed", BETWEEN_COMPLETIONS)


class Killed(BaseException):
    """The process is killed at this step."""


class Query:
    """One streaming query with its checkpoint, step by step as Spark's MicroBatchExecution runs it."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self.offsets: list[str] = []
        self.committed = -1
        self.read: list[list[str]] = []
        self.tasks: list[list[str]] = []
        """What each task of the last batch has read."""
        self.start = ""
        self.reader = self._new_reader()

    def restart(self) -> None:
        """Start a new process, which has only the checkpoint of the old one."""
        self.reader.stop()
        self.reader = self._new_reader()

    def _new_reader(self) -> StreamReader | SessionStreamReader:
        return ServiceBusDataSource(self.options).streamReader(READ_SCHEMA)

    def trigger(self, step: Callable[[str], None] = lambda _: None, limit: ReadLimit | None = None) -> bool:
        """Run one batch, or repeat one. Returns False if there is nothing to read."""
        if len(self.offsets) == self.committed + 1:
            self.start = self.start or json.dumps(self.reader.initialOffset())
            start = self.offsets[-1] if self.offsets else self.start
            end = json.dumps(self.reader.latestOffset(json.loads(start), limit or self.reader.getDefaultReadLimit()))
            if end == start:
                return False
            step("planned")
            self.offsets.append(end)
            step("offset logged")
            if self.committed >= 0:
                self.reader.commit(json.loads(self.offsets[self.committed]))
            step("committed to the source")
        self._run(step)
        return True

    def _run(self, step: Callable[[str], None]) -> None:
        batch = len(self.offsets) - 1
        start = json.loads(self.offsets[batch - 1] if batch else self.start)
        parts = self.reader.partitions(start, json.loads(self.offsets[batch]))
        read = self.reader.read
        self.tasks = [[id_ for rows in read(part) for id_ in rows["message_id"].to_pylist()] for part in parts]
        step("read")
        self.read[batch:] = [[id_ for task in self.tasks for id_ in task]]
        self.committed = batch
        step("batch committed")

    def run(self, step: Callable[[str], None] = lambda _: None) -> None:
        """Run batches until there is nothing more to read."""
        while self.trigger(step):
            pass

    def run_until_killed(self, at: str, monkeypatch: pytest.MonkeyPatch, *, after: int = -1) -> None:
        """Run batches until the process is killed at this step, once the batch `after` is committed.

        The step BETWEEN_COMPLETIONS is within a trigger: some messages of a batch are completed, and others are not.
        """
        completed = broker_module._completed

        def step(name: str) -> None:
            if name == at and self.committed >= after:
                raise Killed

        async def then_killed(*arguments: Any) -> set[int]:
            done = await completed(*arguments)
            if done:
                raise Killed
            return done

        with monkeypatch.context() as until:
            if at == BETWEEN_COMPLETIONS:
                until.setattr(broker_module, "_completed", then_killed)
            with pytest.raises(Killed):
                self.run(step)

    @property
    def ids(self) -> list[str]:
        return [one for batch in self.read for one in batch]


@contextmanager
def started_at_first_try(namespace: LocalNamespace) -> Iterator[list[str]]:
    """Start the namespace again as soon as the source has found that it is away. Yields what the source logged."""
    tried: list[str] = []

    class Starter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "trying again" in record.getMessage() and not tried:
                tried.append("trying again")
                namespace.start()

    logger, starter = logging.getLogger("twinbus.pipeline.servicebus"), Starter()
    logger.addHandler(starter)
    try:
        yield tried
    finally:
        logger.removeHandler(starter)


def numbered(prefix: str, number: int) -> list[str]:
    return [f"{prefix}{one}" for one in range(number)]
