"""A sender of a sync pair, with azure-servicebus' own interface: `calls` decides, this carries out."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Self, TypeVar, assert_never

from azure.servicebus import ServiceBusMessageBatch, ServiceBusSender
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.pairing import calls
from twinbus.pairing.attempts import Attempts, Call
from twinbus.pairing.backlog import BacklogLinks
from twinbus.pairing.calls import FailedOverMeanwhileError, LimitsOf, OnPrimary, Place, Steps, ToBacklog
from twinbus.pairing.errors import ScheduledInBacklogError
from twinbus.pairing.failover import Route
from twinbus.pairing.outgoing import IdentifiedBatch, identified, is_empty, raws_of
from twinbus.pairing.sdk import Retries, empty_batch, is_open, keep_alive_of, open_link_once, shut_socket

T = TypeVar("T")


class PairedSender:
    """Sends to the primary, or to the backlog while the entity is failed over.

    `timeout` bounds the attempt on the primary and, should the call go on there, the backlog: each on its own. Threads
    may share it: on the primary they take turns, as the SDK's sender demands (S13).
    """

    def __init__(
        self,
        place: Place,
        make: Callable[[], ServiceBusSender],
        links: BacklogLinks,
        attempts: Attempts,
        retries: Retries,
    ) -> None:
        self._place = place
        self._make = make
        self._links = links
        self._attempts = attempts
        self._retries = retries
        self._turn = threading.Lock()
        self._sender = make()
        self._episode = place.cell.entity.episode
        self._closed = False
        self.fully_qualified_namespace: str = self._sender.fully_qualified_namespace
        self.entity_name: str = self._sender.entity_name

    # --- azure-servicebus' interface -------------------------------------------------------------------------------

    def send_messages(self, message: Any, *, timeout: float | None = None, **kwargs: Any) -> None:
        message = identified(message)
        if is_empty(message):
            self._check(timeout)
            return
        until = None if timeout is None else time.monotonic() + timeout
        self._call(
            lambda sender, seconds: sender.send_messages(message, timeout=seconds, **kwargs),
            lambda: calls.divert(self._place, raws_of(message), until),
            timeout,
        )

    def create_message_batch(self, max_size_in_bytes: int | None = None) -> ServiceBusMessageBatch:
        def made(sender: ServiceBusSender, seconds: float | None) -> ServiceBusMessageBatch:
            if not is_open(sender):
                open_link_once(sender, seconds)
            return sender.create_message_batch(max_size_in_bytes)

        batch = self._call(made, lambda: calls.instead(lambda: empty_batch(self._sender, max_size_in_bytes)), None)
        return IdentifiedBatch.of(batch)

    def schedule_messages(
        self, messages: Any, schedule_time_utc: datetime, *, timeout: float | None = None, **kwargs: Any
    ) -> list[int]:
        message = identified(messages)
        if is_empty(message):
            self._check(timeout)
            return []
        until = None if timeout is None else time.monotonic() + timeout
        return self._call(
            lambda sender, seconds: sender.schedule_messages(message, schedule_time_utc, timeout=seconds, **kwargs),
            lambda: calls.schedule(self._place, raws_of(message), until, schedule_time_utc),
            timeout,
        )

    def cancel_scheduled_messages(
        self, sequence_numbers: int | list[int], *, timeout: float | None = None, **kwargs: Any
    ) -> None:
        if waiting := calls.in_backlog(sequence_numbers):
            raise ScheduledInBacklogError(waiting)
        given = [sequence_numbers] if isinstance(sequence_numbers, int) else sequence_numbers
        self._call(
            lambda sender, seconds: sender.cancel_scheduled_messages(sequence_numbers, timeout=seconds, **kwargs),
            lambda: calls.cannot_cancel(given),
            timeout,
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._attempts.discard(self._sender, politely=self._place.cell.entity.route is Route.PRIMARY)

    def let_go(self) -> None:
        """The primary's side closed or faulted: the link goes in the background, and the pair's state refuses calls."""
        if not self._closed:
            self._attempts.discard(self._sender, politely=True)

    def __enter__(self) -> Self:
        self._call(open_link_once, calls.nothing, None)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Dropped without being closed: neither its connection nor the thread that keeps it alive stays behind. After a
        # fork both are the parent's.
        with contextlib.suppress(Exception):
            open_ = not self._closed and self._place.cell.entity.route is not Route.CLOSED
            if open_ and not sys.is_finalizing() and (keep_alive := keep_alive_of(self._sender)) is not None:
                # No lock is taken here: whoever holds it may be gone, or be this very thread.
                keep_alive.cancel()
                shut_socket(self._sender)

    # --- carrying out ----------------------------------------------------------------------------------------------

    def _call(self, call: Call[T], backlog: Callable[[], Steps[T]], timeout: float | None) -> T:
        self._check(timeout)
        entity = self._place.cell.entity
        failed: Exception | None = None
        if entity.route is Route.PRIMARY and entity.episode == self._episode:
            # The healthy path: the SDK's sender under a deadline, and nothing told unless something was wrong.
            try:
                result = self._on_primary(call, timeout)
            except FailedOverMeanwhileError:
                pass
            except Exception as error:
                failed = error
            else:
                after = self._place.cell.entity
                if after is not entity or after.deadline is not None:
                    self._succeeded_late()
                return result
        return self._carry_out(calls.call(self._place, backlog, failed), call, timeout)

    def _carry_out(self, steps: Steps[T], call: Call[Any], timeout: float | None) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    result = self._try(step, call, timeout)
                except Exception as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return] # typeshed: the value of any generator
        finally:
            steps.close()

    def _try(self, step: calls.Step, call: Call[Any], timeout: float | None) -> Any:
        seconds = self._attempts.span(timeout)
        match step:
            case OnPrimary():
                return self._on_primary(call, timeout)
            case LimitsOf(queue):
                return self._links[queue].limits(seconds)
            case ToBacklog(queue, payload):
                return self._links[queue].take(payload, seconds)
            case _:
                assert_never(step)

    def _on_primary(self, call: Call[T], timeout: float | None) -> T:
        seconds = self._attempts.span(timeout)
        if not (self._turn.acquire(blocking=False) or self._turn.acquire(timeout=seconds)):
            raise OperationTimeoutError(message=f"other calls of this sender took longer than {seconds:g} s")
        try:
            entity = self._place.cell.entity
            if entity.route is not Route.PRIMARY:
                # It failed over while this call waited for its turn.
                raise FailedOverMeanwhileError
            if entity.episode != self._episode:
                # After a failover the old link may be one that nobody answers on: begin anew.
                self._episode = entity.episode
                self._replace()
            sender = self._sender
            try:
                return self._attempts.attempt(sender, call, seconds, self._retries, timeout)
            except OperationTimeoutError:
                self._replace()
                raise
            except Exception:
                # The SDK has closed its link where it had to.
                raise
            except BaseException:
                # Interrupted in the middle of a frame, perhaps: the link cannot be used again.
                self._replace()
                raise
        finally:
            self._turn.release()

    def _succeeded_late(self) -> None:
        """The entity was failing, or something happened to it, while this call was under way (S3, S5, C3)."""
        self._place.cell.succeeded()
        if self._place.cell.entity.route is Route.CLOSED:
            self.let_go()

    def _replace(self) -> None:
        if not self._closed:
            old = self._sender
            if self._place.cell.entity.route is not Route.CLOSED:
                self._sender = self._make()
            self._attempts.discard(old)

    def _check(self, timeout: float | None) -> None:
        if self._closed:
            raise ValueError("The handler has already been shutdown. Please use the pair to create a new instance.")
        if timeout is not None and timeout <= 0:
            raise ValueError("The timeout must be greater than 0.")
