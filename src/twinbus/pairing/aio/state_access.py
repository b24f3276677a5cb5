"""The shared state of an asyncio pair (S16): reads and writes in tasks of the pair.

The methods of a folder block, and a network file system may block for ever. So they run in a daemon thread, which
keeps neither the event loop nor the process from ending.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from azure.servicebus.aio import ServiceBusClient

from twinbus.backlog import failure_kind
from twinbus.pairing.administration import AioAdministration
from twinbus.pairing.aio.timeouts import TaskTimeouts
from twinbus.pairing.daemon_thread import in_daemon_thread
from twinbus.pairing.decide.known_state import (
    EVERY_ENTITY,
    HoldRecord,
    ReleaseRecord,
    StateChange,
    StateReading,
    refuse_impossible_path,
)
from twinbus.pairing.recording import NO_RECORDER, OperationRecorder
from twinbus.pairing.state_folder import FolderState
from twinbus.pairing.state_queue import PEEK_PAGE, STATE_PROPERTIES, state_messages, state_of_messages
from twinbus.pairing.state_sharing import (
    LOOK_SECONDS,
    ReadDone,
    StateLocation,
    WriteDone,
    state_writer,
    was_created,
)
from twinbus.sdk import open_aio_link

T = TypeVar("T")


class AioStore(Protocol):
    """A place of the shared state: a folder or a queue."""

    async def read(self) -> StateReading: ...

    async def write(self, changes: Sequence[StateChange]) -> None: ...


class AioStateQueue:
    """The state queue of a secondary. Each call opens a link and closes this link."""

    def __init__(
        self,
        client: ServiceBusClient,
        queue: str,
        timeouts: TaskTimeouts,
        recorder: OperationRecorder,
        read_seconds: float,
    ) -> None:
        self._client = client
        self._queue = queue
        self._read_seconds = read_seconds
        self._timeouts = timeouts
        self._recorder = recorder

    async def read(self) -> StateReading:
        receiver = self._client.get_queue_receiver(self._queue)
        return state_of_messages(await self._on_link(receiver, self._peek, self._read_seconds))

    async def write(self, changes: Sequence[StateChange]) -> None:
        messages = state_messages(changes)

        async def send(sender: Any) -> None:
            for message in messages:
                started = time.monotonic()
                try:
                    await sender.send_messages(message)
                except Exception as error:
                    self._recorder.management(self._queue, started, failure=failure_kind(error))
                    raise
                self._recorder.management(self._queue, started)

        await self._on_link(self._client.get_queue_sender(self._queue), send, self._timeouts.try_timeout)

    async def _peek(self, receiver: Any) -> list[Any]:
        found: list[Any] = []
        while True:
            with self._recorder.peek(self._queue) as page:
                page.extend(
                    await receiver.peek_messages(
                        PEEK_PAGE, sequence_number=found[-1].sequence_number + 1 if found else 0
                    )
                )
            if not page:
                return found
            found += page

    async def _on_link(self, made: Any, call: Callable[[Any], Awaitable[T]], seconds: float) -> T:
        handler = self._timeouts.prepare(made)

        async def opened() -> T:
            await open_aio_link(handler, seconds)
            return await call(handler)

        try:
            result = await self._timeouts.bound(opened(), seconds, handler)
        except BaseException:
            self._timeouts.discard(handler)
            raise
        self._timeouts.retire(handler)
        return result


class AioFolderState:
    """The shared state in a folder, for asyncio."""

    def __init__(self, folder: FolderState) -> None:
        self._folder = folder

    async def read(self) -> StateReading:
        return await in_daemon_thread(self._folder.read)

    async def write(self, changes: Sequence[StateChange]) -> None:
        await in_daemon_thread(lambda: self._folder.write(changes))


def _store_at(
    location: StateLocation,
    client: ServiceBusClient | None,
    timeouts: TaskTimeouts,
    recorder: OperationRecorder,
    read_seconds: float,
) -> AioStore:
    if location.folder is not None:
        return AioFolderState(FolderState(location.folder, location.primary))
    if client is None:
        raise ValueError("a state in the secondary needs the secondary's client")
    return AioStateQueue(client, location.queue, timeouts, recorder, read_seconds)


class TaskStateAccess:
    """Reads and writes the shared state in tasks. Implements `state_sharing.StateAccess`."""

    def __init__(
        self,
        location: StateLocation,
        client: ServiceBusClient,
        timeouts: TaskTimeouts,
        recorder: OperationRecorder,
        administration: Callable[[], AioAdministration],
    ) -> None:
        self._timeouts = timeouts
        self._queue = location.queue
        self._administration = administration
        self._store = _store_at(location, client, timeouts, recorder, LOOK_SECONDS)

    def read(self, done: ReadDone) -> None:
        self._start(lambda: self._read(done), done)

    async def _read(self, done: ReadDone) -> None:
        try:
            found = await self._store.read()
        except Exception as error:
            done(error)
        else:
            done(found)

    def write(self, changes: Sequence[StateChange], done: WriteDone) -> None:
        self._start(lambda: _reported(lambda: self._store.write(changes), done), done)

    def create(self, done: WriteDone) -> None:
        self._start(lambda: _reported(self._create, done), done)

    def _start(self, make: Callable[[], Coroutine[Any, Any, None]], failed: Callable[[Exception], None]) -> None:
        """Start a task in the pair's loop, for any thread (P3). Calls `failed` if the task is cancelled."""
        self._timeouts.tell(partial(_start_task, self._timeouts, make, failed))

    async def _create(self) -> None:
        async with self._administration() as administration:
            try:
                await administration.request(administration.client.create_queue, self._queue, **STATE_PROPERTIES)
            except Exception as error:
                if not was_created(error):
                    raise


def _start_task(
    timeouts: TaskTimeouts, make: Callable[[], Coroutine[Any, Any, None]], failed: Callable[[Exception], None]
) -> None:
    def ended(task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            # Another pair that shares goes on with what waits (P3).
            failed(ConnectionAbortedError("the pair closed meanwhile"))

    timeouts.start(make()).add_done_callback(ended)


async def _reported(act: Callable[[], Coroutine[Any, Any, None]], done: WriteDone) -> None:
    try:
        await act()
    except Exception as error:
        done(error)
    else:
        done(None)


class SharedState:
    """The shared state of one primary, for tools without a pair: a syphon, `twinbus drill`, `twinbus doctor`.

    Use it in one event loop, and close it. `client` is the secondary's; a folder needs none.
    """

    def __init__(
        self,
        location: StateLocation,
        client: ServiceBusClient | None = None,
        *,
        seconds: float = 10.0,
        recorder: OperationRecorder = NO_RECORDER,
    ) -> None:
        self.location = location
        self._seconds = seconds
        self._timeouts = TaskTimeouts(seconds)
        self._writer = state_writer()
        self._store = _store_at(location, client, self._timeouts, recorder, seconds)

    async def read(self) -> StateReading:
        """Return what is known. Raises FileNotFoundError if nobody has written to the folder yet."""
        self._timeouts.claim()
        # A network file system may not answer at all.
        async with asyncio.timeout(self._seconds):
            return await self._store.read()

    async def hold(self, entity: str | None) -> None:
        """Hold an entity, or all entities (None), in every process that pairs from now on (S15)."""
        await self._write(HoldRecord(EVERY_ENTITY if entity is None else entity, time.time(), self._writer))

    async def release(self, entity: str | None) -> None:
        """Release an entity, or all entities (None)."""
        await self._write(ReleaseRecord(EVERY_ENTITY if entity is None else entity, time.time(), self._writer))

    async def _write(self, change: StateChange) -> None:
        refuse_impossible_path(change.entity)
        self._timeouts.claim()
        async with asyncio.timeout(self._seconds):
            await self._store.write((change,))

    async def close(self) -> None:
        await self._timeouts.shut_down()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
