"""Links to the backlog queues of a sync pair, shared by all its senders (S6).

The SDK's sender runs one call at a time, so calls wait here until the link is free (their *turn*). A call may wait for
all the time that it has left. The link makes copies of a call's messages that fit the limits of the link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from azure.servicebus import ServiceBusClient, ServiceBusSender

from twinbus.ledger import Stage
from twinbus.pairing.call_errors import NoTurnError
from twinbus.pairing.decide.send_flow import (
    Diversion,
    DivertTo,
    QueueLeftMeanwhileError,
    WaitForQueue,
    mark_whole_attempt,
)
from twinbus.pairing.message_copies import next_payload
from twinbus.pairing.pair_sides import Side
from twinbus.pairing.recording import OperationRecorder
from twinbus.pairing.shared_state import SharedRotation
from twinbus.pairing.sync.timeout_thread import Call
from twinbus.pairing.sync.timeouts import ThreadTimeouts
from twinbus.sdk import LinkLimits, link_limits, open_sync_link, retry_settings


class BacklogLink:
    """The link to one backlog queue. It opens at its first use, and again after it was dropped because of an error."""

    def __init__(
        self,
        client: ServiceBusClient,
        side: Side,
        queue: str,
        rotation: SharedRotation,
        timeouts: ThreadTimeouts,
        recorder: OperationRecorder,
    ) -> None:
        self._client = client
        self._side = side
        self._queue = queue
        self._rotation = rotation
        self._timeouts = timeouts
        self._recorder = recorder
        self._retries = retry_settings(client)
        self._turn = threading.Lock()
        self._sender: ServiceBusSender | None = None
        self._closed = False
        self._limits: LinkLimits | None = None

    def send(self, step: DivertTo, destination: str) -> None:
        """Send the next transfer of a diversion. `destination` is the `namespace/entity` on the primary.

        Raises QueueLeftMeanwhileError, NoTurnError, or the error of the SDK call.
        """
        seconds = step.seconds
        until = time.monotonic() + seconds
        if not self._turn.acquire(timeout=seconds):
            # After this error, a call on a closed pair raises PairClosedError or PairFaultedError (C3).
            raise QueueLeftMeanwhileError if self._closed else NoTurnError(self._queue, seconds)
        try:
            if self._closed or not (step.probe or self._queue in self._rotation.rotation.usable):
                # An earlier call failed on this queue: the calls that waited for the link do not try the queue again.
                raise QueueLeftMeanwhileError
            if time.monotonic() >= until:
                raise NoTurnError(self._queue, seconds)
            if self._sender is None or self._limits is None:
                self._open(until)
            self._send(step.diversion, until, destination)
        finally:
            self._turn.release()

    def close(self) -> None:
        self._closed = True
        self._drop()

    def _open(self, until: float) -> None:
        made = self._side.remake(lambda: self._client.get_queue_sender(self._queue))
        sender = self._sender = self._timeouts.prepare(made)
        self._call(sender, open_sync_link, until)
        self._limits = link_limits(sender)

    def _send(self, diversion: Diversion, until: float, destination: str) -> None:
        sender, limits = self._sender, self._limits
        if sender is None or limits is None:
            # `close` dropped the sender after this call had its turn.
            raise QueueLeftMeanwhileError
        payload = next_payload(diversion, limits)
        prefix = self._recorder.prefix(Stage.SEND_BACKLOG, self._queue, destination)
        send = self._recorder.recorded(
            prefix, payload, lambda link, timeout: link.send_messages(payload, timeout=timeout)
        )
        self._call(sender, send, until)

    def _call(self, sender: ServiceBusSender, call: Call[None], until: float) -> None:
        left = until - time.monotonic()
        try:
            self._timeouts.call(sender, call, min(left, self._timeouts.try_timeout), self._retries)
        except BaseException as error:
            if left >= self._timeouts.try_timeout:
                mark_whole_attempt(error)
            self._drop()
            if self._closed and isinstance(error, Exception):
                raise QueueLeftMeanwhileError from error
            raise
        if self._closed:
            # The link was opened, or the message sent, while the pair closed.
            self._timeouts.discard(sender)

    def _drop(self) -> None:
        sender, self._sender, self._limits = self._sender, None, None
        if sender is not None:
            self._timeouts.discard(sender)


class BacklogLinks:
    """The links of a pair to its backlog queues, by queue. A link is made at its first use."""

    def __init__(
        self,
        client: ServiceBusClient,
        side: Side,
        rotation: SharedRotation,
        timeouts: ThreadTimeouts,
        recorder: OperationRecorder,
    ) -> None:
        self._make: Callable[[str], BacklogLink] = lambda queue: BacklogLink(
            client, side, queue, rotation, timeouts, recorder
        )
        self._rotation = rotation
        self._making = threading.Lock()
        self._links: dict[str, BacklogLink] = {}
        self._closed = False

    def __getitem__(self, queue: str) -> BacklogLink:
        found = self._links.get(queue)
        if found is None:
            with self._making:
                if self._closed:
                    raise QueueLeftMeanwhileError
                found = self._links.setdefault(queue, self._make(queue))
        return found

    def wait(self, step: WaitForQueue) -> None:
        """Wait until the rotation has changed, or the pair closes."""
        changed = threading.Event()
        self._rotation.on_change.add(changed.set)
        try:
            if self._rotation.rotation is step.rotation and not self._closed:
                changed.wait(step.seconds)
        finally:
            self._rotation.on_change.discard(changed.set)

    def close(self) -> None:
        with self._making:
            self._closed = True
        for link in self._links.values():
            link.close()
