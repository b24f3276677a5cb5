"""The shared state of a sync pair (S16): reads and writes in worker threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from azure.servicebus import ServiceBusClient

from twinbus.backlog import failure_kind
from twinbus.pairing.administration import Administration
from twinbus.pairing.decide.known_state import StateChange, StateReading
from twinbus.pairing.recording import OperationRecorder
from twinbus.pairing.state_folder import FolderState
from twinbus.pairing.state_queue import PEEK_PAGE, STATE_PROPERTIES, state_messages, state_of_messages
from twinbus.pairing.state_sharing import LOOK_SECONDS, ReadDone, StateLocation, WriteDone, was_created
from twinbus.pairing.sync.timeouts import ThreadTimeouts
from twinbus.sdk import open_sync_link


class _Store(Protocol):
    def read(self) -> StateReading: ...

    def write(self, changes: Sequence[StateChange]) -> None: ...


class StateQueue:
    """The state queue of a secondary. Each call opens a link and closes this link."""

    def __init__(
        self, client: ServiceBusClient, queue: str, timeouts: ThreadTimeouts, recorder: OperationRecorder
    ) -> None:
        self._client = client
        self._queue = queue
        self._timeouts = timeouts
        self._recorder = recorder

    def read(self) -> StateReading:
        receiver = self._client.get_queue_receiver(self._queue)
        return state_of_messages(self._on_link(receiver, self._peek, LOOK_SECONDS))

    def write(self, changes: Sequence[StateChange]) -> None:
        messages = state_messages(changes)

        def send(sender: Any, seconds: float | None) -> None:
            open_sync_link(sender, seconds)
            for message in messages:
                started = time.monotonic()
                try:
                    sender.send_messages(message)
                except Exception as error:
                    self._recorder.management(self._queue, started, failure=failure_kind(error))
                    raise
                self._recorder.management(self._queue, started)

        self._on_link(self._client.get_queue_sender(self._queue), send, None)

    def _peek(self, receiver: Any, seconds: float | None) -> list[Any]:
        open_sync_link(receiver, seconds)
        found: list[Any] = []
        while True:
            with self._recorder.peek(self._queue) as page:
                page.extend(
                    receiver.peek_messages(PEEK_PAGE, sequence_number=found[-1].sequence_number + 1 if found else 0)
                )
            if not page:
                return found
            found += page

    def _on_link(self, made: Any, call: Callable[[Any, float | None], Any], seconds: float | None) -> Any:
        handler = self._timeouts.prepare(made)
        try:
            result = self._timeouts.call_once(handler, call, seconds)
        except BaseException:
            self._timeouts.discard(handler)
            raise
        self._timeouts.close_handler(handler)
        return result


class ThreadStateAccess:
    """Reads and writes the shared state in worker threads. Implements `state_sharing.StateAccess`."""

    def __init__(
        self,
        location: StateLocation,
        client: ServiceBusClient,
        timeouts: ThreadTimeouts,
        recorder: OperationRecorder,
        administration: Callable[[], Administration],
    ) -> None:
        self._timeouts = timeouts
        self._queue = location.queue
        self._administration = administration
        self._store: _Store
        if location.folder is not None:
            self._store = FolderState(location.folder, location.primary)
        else:
            self._store = StateQueue(client, location.queue, timeouts, recorder)

    def read(self, done: ReadDone) -> None:
        def run() -> None:
            try:
                found = self._store.read()
            except Exception as error:
                done(error)
            else:
                done(found)

        self._timeouts.thread.soon(run)

    def write(self, changes: Sequence[StateChange], done: WriteDone) -> None:
        self._soon(lambda: self._store.write(changes), done)

    def create(self, done: WriteDone) -> None:
        self._soon(self._create, done)

    def _create(self) -> None:
        with self._administration() as administration:
            try:
                administration.request(administration.client.create_queue, self._queue, **STATE_PROPERTIES)
            except Exception as error:
                if not was_created(error):
                    raise

    def _soon(self, act: Callable[[], None], done: WriteDone) -> None:
        def run() -> None:
            try:
                act()
            except Exception as error:
                done(error)
            else:
                done(None)

        self._timeouts.thread.soon(run)
