"""A sender of a sync pair, with azure-servicebus' own interface: `calls` decides, this carries out."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, Self, TypeVar, assert_never

from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch, ServiceBusSender
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.ledger import Stage
from twinbus.pairing import calls
from twinbus.pairing.calls import (
    FailedOverMeanwhileError,
    LimitsOf,
    NoTurnError,
    OnPrimary,
    SendContext,
    SendSteps,
    ToBacklog,
    closed_error,
    end_of_call,
)
from twinbus.pairing.decide.failover import SendRoute
from twinbus.pairing.errors import ScheduledInBacklogError
from twinbus.pairing.message_copies import IdentifiedBatch, identified, is_empty
from twinbus.pairing.recording import OperationRecorder, sent
from twinbus.pairing.sync.backlog_link import BacklogLinks
from twinbus.pairing.sync.timeouts import Call, ThreadTimeouts
from twinbus.sdk import RetrySettings, amqp_messages, empty_batch, interrupt, is_open, keep_alive_of, open_sync_link

T = TypeVar("T")
# Looked up once: a member of an Enum costs as much as half a microsecond at every use.
_PRIMARY: Final = SendRoute.PRIMARY


class PairedSender:
    """Sends to the primary, or to the backlog while the entity is failed over.

    `timeout` bounds all of a call: waiting for a turn, the primary, the backlog (S6). Threads may share it: on the
    primary they take turns, as the SDK's sender demands (S13).
    """

    def __init__(
        self,
        place: SendContext,
        make: Callable[[], ServiceBusSender],
        links: BacklogLinks,
        attempts: ThreadTimeouts,
        retries: RetrySettings,
        recording: OperationRecorder,
    ) -> None:
        self._place = place
        self._make = make
        self._links = links
        self._attempts = attempts
        self._retries = retries
        self._recording = recording
        self._sends = recording.place(Stage.SEND_PRIMARY, place.path)
        self._destination = f"{recording.namespace}/{place.path}"
        self._seconds = attempts.seconds
        self._turn = threading.Lock()
        self._sender = make()
        self._episode = place.cell.entity.episode
        self._closed = False
        self.fully_qualified_namespace: str = self._sender.fully_qualified_namespace
        self.entity_name: str = self._sender.entity_name

    # --- azure-servicebus' interface -------------------------------------------------------------------------------

    @property
    def client_identifier(self) -> str:
        """The identifier given to `get_queue_sender`; without one, that of the present link."""
        return self._sender.client_identifier

    def send_messages(self, message: Any, *, timeout: float | None = None, **kwargs: Any) -> None:
        message = identified(message)
        until = end_of_call(self._closed, timeout)
        if type(message) is not ServiceBusMessage and is_empty(message):
            return
        ledger = self._recording.ledger
        if ledger is not None and ledger.stops_on_error:
            ledger.check()
        self._call(
            (lambda sender, seconds: sender.send_messages(message, timeout=seconds, **kwargs))
            if ledger is None
            else (lambda sender, seconds: sent(ledger, self._sends, message, kwargs, sender, seconds)),
            lambda: calls.divert(self._place, amqp_messages(message), until),
            until,
        )

    def create_message_batch(self, max_size_in_bytes: int | None = None) -> ServiceBusMessageBatch:
        def made(sender: ServiceBusSender, seconds: float | None) -> ServiceBusMessageBatch:
            if not is_open(sender):
                open_sync_link(sender, seconds)
            return sender.create_message_batch(max_size_in_bytes)

        batch = self._call(
            made,
            lambda: calls.instead(lambda: empty_batch(self._sender, max_size_in_bytes)),
            end_of_call(self._closed, None),
        )
        return IdentifiedBatch.copy_of(batch)

    def schedule_messages(
        self, messages: Any, schedule_time_utc: datetime, *, timeout: float | None = None, **kwargs: Any
    ) -> list[int]:
        message = identified(messages)
        until = end_of_call(self._closed, timeout)
        if is_empty(message):
            return []
        return self._call(
            self._recording.recorded(
                self._recording.place(Stage.SCHEDULE_PRIMARY, self._place.path),
                message,
                lambda sender, seconds: sender.schedule_messages(message, schedule_time_utc, timeout=seconds, **kwargs),
            ),
            lambda: calls.schedule(self._place, amqp_messages(message), until, schedule_time_utc),
            until,
        )

    def cancel_scheduled_messages(
        self, sequence_numbers: int | list[int], *, timeout: float | None = None, **kwargs: Any
    ) -> None:
        if waiting := calls.in_backlog(sequence_numbers):
            raise ScheduledInBacklogError(waiting)
        given = [sequence_numbers] if isinstance(sequence_numbers, int) else sequence_numbers
        self._call(
            self._recording.recorded(
                self._recording.place(Stage.CANCEL_PRIMARY, self._place.path),
                None,
                lambda sender, seconds: sender.cancel_scheduled_messages(sequence_numbers, timeout=seconds, **kwargs),
            ),
            lambda: calls.cannot_cancel(given),
            end_of_call(self._closed, timeout),
        )

    def close(self) -> None:
        """A call that another thread has under way may end first, if it is quick; later ones are refused (S13)."""
        if not self._closed:
            self._closed = True
            self._attempts.retire(lambda: self._sender, self._turn, self._place.cell)

    def let_go(self) -> None:
        """The primary's side closed or faulted: the link goes in the background, and the pair's state refuses calls."""
        if not self._closed:
            self._attempts.retire(lambda: self._sender, self._turn, self._place.cell)

    def __enter__(self) -> Self:
        self._call(open_sync_link, calls.nothing, end_of_call(self._closed, None))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Dropped without being closed: neither its connection nor the thread that keeps it alive stays behind. After a
        # fork both are the parent's.
        with contextlib.suppress(Exception):
            open_ = not self._closed and self._place.cell.entity.route is not SendRoute.CLOSED
            if open_ and not sys.is_finalizing() and (keep_alive := keep_alive_of(self._sender)) is not None:
                # No lock is taken here: whoever holds it may be gone, or be this very thread.
                keep_alive.cancel()
                interrupt(self._sender)

    # --- carrying out ----------------------------------------------------------------------------------------------

    def _call(self, call: Call[T], backlog: Callable[[], SendSteps[T]], until: float | None) -> T:
        entity = self._place.cell.entity
        failed: Exception | None = None
        if entity.route is _PRIMARY:
            # The healthy path: the SDK's sender under a deadline, and nothing told unless something was wrong.
            try:
                result = self._on_primary(call, until)
            except FailedOverMeanwhileError:
                if self._closed:
                    raise closed_error() from None
            except Exception as error:
                if self._closed:
                    raise closed_error() from error
                failed = error
            else:
                after = self._place.cell.entity
                if after is not entity or after.deadline is not None:
                    self._succeeded_late()
                return result
        return self._carry_out(calls.call(self._place, backlog, failed, until), call, until)

    def _carry_out(self, steps: SendSteps[T], call: Call[Any], until: float | None) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    result = self._try(step, call, until)
                except Exception as error:
                    if self._closed and isinstance(step, OnPrimary):
                        raise closed_error() from error
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return] # typeshed: the value of any generator
        finally:
            steps.close()

    def _try(self, step: calls.SendStep, call: Call[Any], until: float | None) -> Any:
        match step:
            case OnPrimary():
                # Its seconds are counted anew when its turn has come.
                return self._on_primary(call, until)
            case LimitsOf(queue, seconds):
                return self._links[queue].limits(seconds)
            case ToBacklog(queue, payload, seconds):
                return self._links[queue].take(payload, seconds, self._destination)
            case _:
                assert_never(step)

    def _on_primary(self, call: Call[T], until: float | None) -> T:
        cut_short = False
        if not self._turn.acquire(False):
            cut_short = self._wait_for_turn(until)
        try:
            if self._closed:
                raise closed_error()
            entity = self._place.cell.entity
            if entity.route is not _PRIMARY:
                # It failed over while this call waited for its turn.
                raise FailedOverMeanwhileError
            if entity.episode != self._episode:
                # After a failover the old link may be one that nobody answers on: begin anew.
                self._episode = entity.episode
                self._replace()
            seconds = self._seconds if until is None else self._place.primary_seconds(until)
            try:
                return self._attempts.attempt(self._sender, call, seconds, self._retries, self._place.cell)
            except OperationTimeoutError as error:
                self._replace()
                if cut_short:
                    raise NoTurnError(self.entity_name, seconds) from error
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

    def _wait_for_turn(self, until: float | None) -> bool:
        """Whether it took most of the call's time: if the primary does not answer in the rest, that says nothing."""
        if until is None:
            # Longer than the attempt before it can take, after which the entity may have failed over.
            seconds = 2 * self._seconds
            if not self._turn.acquire(timeout=seconds):
                raise NoTurnError(self.entity_name, seconds)
            return False
        seconds = max(until - time.monotonic(), 0.0)
        if not self._turn.acquire(timeout=seconds):
            raise NoTurnError(self.entity_name, seconds)
        left = until - time.monotonic()
        if left <= 0:
            self._turn.release()
            raise NoTurnError(self.entity_name, seconds)
        return left < seconds / 2

    def _succeeded_late(self) -> None:
        """The entity was failing, or something happened to it, while this call was under way (S3, S5, C3)."""
        self._place.cell.succeeded()
        if self._place.cell.entity.route is SendRoute.CLOSED:
            self.let_go()

    def _replace(self) -> None:
        if not self._closed:
            old = self._sender
            if self._place.cell.entity.route is not SendRoute.CLOSED:
                self._sender = self._place.primary.made(self._make)
            self._attempts.discard(old)
