"""Links to the backlog queues, shared by all senders of a sync pair (S6). One call at a time on each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusSender

from twinbus.pairing.attempts import Attempts
from twinbus.pairing.calls import QueueLeftMeanwhileError
from twinbus.pairing.entity import RotationCell
from twinbus.pairing.outgoing import Payload
from twinbus.pairing.sdk import Limits, is_open, limits_of, open_link_once, quick_to_open, retries_of, without_retries


class BacklogLink:
    """One backlog queue. The SDK's sender takes one call at a time, so they queue here."""

    def __init__(self, client: ServiceBusClient, queue: str, rotation: RotationCell, attempts: Attempts) -> None:
        self._client = client
        self._queue = queue
        self._rotation = rotation
        self._attempts = attempts
        self._retries = retries_of(client)
        self._turn = threading.Lock()
        self._sender: ServiceBusSender | None = None
        self._limits: Limits | None = None

    def limits(self, seconds: float) -> Limits:
        if self._limits is None:
            with self._turn:
                if self._limits is None:
                    self._still_in_rotation()
                    self._try(open_link_once, seconds)
        assert self._limits is not None
        return self._limits

    def take(self, payload: Payload, seconds: float) -> None:
        with self._turn:
            self._still_in_rotation()
            self._try(lambda sender, left: sender.send_messages(payload, timeout=left), seconds)

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            self._attempts.discard(sender)

    def _still_in_rotation(self) -> None:
        # Those that waited behind a call that found the queue dead need not find it out each for themselves.
        if self._queue not in self._rotation.rotation.usable:
            raise QueueLeftMeanwhileError

    def _try(self, call: Callable[[Any, float | None], None], seconds: float) -> None:
        sender = self._sender
        if sender is None:
            sender = self._sender = without_retries(quick_to_open(self._client.get_queue_sender(self._queue)))
        try:
            self._attempts.attempt(sender, call, seconds, self._retries)
        except BaseException:
            self.close()
            raise
        if is_open(sender):
            self._limits = limits_of(sender)


class BacklogLinks:
    """All of them, made when first needed."""

    def __init__(self, client: ServiceBusClient, rotation: RotationCell, attempts: Attempts) -> None:
        self._client = client
        self._rotation = rotation
        self._attempts = attempts
        self._making = threading.Lock()
        self._links: dict[str, BacklogLink] = {}

    def __getitem__(self, queue: str) -> BacklogLink:
        found = self._links.get(queue)
        if found is None:
            with self._making:
                made = BacklogLink(self._client, queue, self._rotation, self._attempts)
                found = self._links.setdefault(queue, made)
        return found

    def close(self) -> None:
        with self._making:
            links, self._links = self._links, {}
        for link in links.values():
            link.close()
