"""Links to the backlog queues, shared by all senders of a sync pair (S6). One call at a time on each."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusSender

from twinbus.ledger import Stage
from twinbus.pairing.calls import NoTurnError, QueueLeftMeanwhileError
from twinbus.pairing.message_copies import Payload
from twinbus.pairing.pair_sides import Side
from twinbus.pairing.recording import OperationRecorder
from twinbus.pairing.shared_state import SharedRotation
from twinbus.pairing.sync.timeouts import ThreadTimeouts
from twinbus.sdk import LinkLimits, is_open, link_limits, open_sync_link, retry_settings


class BacklogLink:
    """One backlog queue. The SDK's sender takes one call at a time, so they queue here."""

    def __init__(
        self,
        client: ServiceBusClient,
        side: Side,
        queue: str,
        rotation: SharedRotation,
        attempts: ThreadTimeouts,
        recording: OperationRecorder,
    ) -> None:
        self._client = client
        self._side = side
        self._queue = queue
        self._rotation = rotation
        self._attempts = attempts
        self._recording = recording
        self._retries = retry_settings(client)
        self._turn = threading.Lock()
        self._sender: ServiceBusSender | None = None
        self._closed = False
        self._limits: LinkLimits | None = None

    def limits(self, seconds: float) -> LinkLimits:
        if self._limits is None:
            with self._turn_within(seconds) as until:
                if self._limits is None:
                    self._try(open_sync_link, until)
        assert self._limits is not None
        return self._limits

    def take(self, payload: Payload, seconds: float, destination: str) -> None:
        """`destination`: the `namespace/entity` on the primary that it is for."""
        call = self._recording.recorded(
            self._recording.place(Stage.SEND_BACKLOG, self._queue, destination),
            payload,
            lambda sender, left: sender.send_messages(payload, timeout=left),
        )
        with self._turn_within(seconds) as until:
            self._try(call, until)

    def close(self) -> None:
        self._closed = True
        self._drop()

    @contextlib.contextmanager
    def _turn_within(self, seconds: float) -> Iterator[float]:
        until = time.monotonic() + seconds
        if not self._turn.acquire(timeout=seconds):
            # Once the pair is closed that is what the call is told (C3).
            raise QueueLeftMeanwhileError if self._closed else NoTurnError(self._queue, seconds)
        try:
            if self._closed or self._queue not in self._rotation.rotation.usable:
                # Those that waited behind a call that found the queue dead need not find it out each for themselves.
                raise QueueLeftMeanwhileError
            if time.monotonic() >= until:
                raise NoTurnError(self._queue, seconds)
            yield until
        finally:
            self._turn.release()

    def _try(self, call: Callable[[Any, float | None], None], until: float) -> None:
        sender = self._sender
        if sender is None:
            made = self._side.made(lambda: self._client.get_queue_sender(self._queue))
            sender = self._sender = self._attempts.ready(made)
        try:
            self._attempts.attempt(sender, call, min(until - time.monotonic(), self._attempts.seconds), self._retries)
        except BaseException as error:
            self._drop()
            if self._closed and isinstance(error, Exception):
                raise QueueLeftMeanwhileError from error
            raise
        if is_open(sender):
            self._limits = link_limits(sender)
        if self._closed:
            # Opened while the pair closed.
            self._attempts.discard(sender)

    def _drop(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            self._attempts.discard(sender)


class BacklogLinks:
    """All of them, made when first needed."""

    def __init__(
        self,
        client: ServiceBusClient,
        side: Side,
        rotation: SharedRotation,
        attempts: ThreadTimeouts,
        recording: OperationRecorder,
    ) -> None:
        self._client = client
        self._side = side
        self._rotation = rotation
        self._attempts = attempts
        self._recording = recording
        self._making = threading.Lock()
        self._links: dict[str, BacklogLink] = {}
        self._closed = False

    def __getitem__(self, queue: str) -> BacklogLink:
        found = self._links.get(queue)
        if found is None:
            with self._making:
                if self._closed:
                    raise QueueLeftMeanwhileError
                made = BacklogLink(self._client, self._side, queue, self._rotation, self._attempts, self._recording)
                found = self._links.setdefault(queue, made)
        return found

    def close(self) -> None:
        with self._making:
            self._closed = True
        for link in self._links.values():
            link.close()
