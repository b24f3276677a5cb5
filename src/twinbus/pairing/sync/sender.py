"""The sender of a sync pair, with the interface of azure-servicebus. It carries out the steps of `send_flow`."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from azure.servicebus import ServiceBusMessageBatch, ServiceBusSender
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.ledger import Stage
from twinbus.pairing.call_arguments import (
    IdentifiedBatch,
    MessageTypes,
    check_cancel,
    check_open,
    check_schedule,
    check_send,
)
from twinbus.pairing.call_errors import NoTurnError, closed_error
from twinbus.pairing.decide import send_flow
from twinbus.pairing.decide.failover import SendRoute
from twinbus.pairing.decide.send_flow import (
    CallOrigin,
    CallPrimary,
    DivertTo,
    FailedOverMeanwhileError,
    SendSteps,
    WaitForQueue,
)
from twinbus.pairing.pair_state import SenderSetup
from twinbus.pairing.shared_state import SharedEntity
from twinbus.pairing.sync.backlog_link import BacklogLinks
from twinbus.pairing.sync.timeout_thread import Call
from twinbus.pairing.sync.timeouts import RetiredLink, ThreadTimeouts
from twinbus.sdk import empty_batch, interrupt, is_open, keep_alive_of, open_sync_link

if TYPE_CHECKING:
    _Sender = ServiceBusSender
else:
    _Sender = object

T = TypeVar("T")

# The longest time that a refused call waits for a pair that is closing.
_REFUSED_CALL_SECONDS: Final = 1.0


class PairedSender(_Sender):
    """Sends to the primary, or to the backlog while the entity is failed over. Has the methods of `ServiceBusSender`.

    `timeout` is the limit of the whole call: waiting for the link, the primary and the backlog. Threads may share a
    sender. On the primary their calls run one after the other, as calls on a sender of the SDK must. Type checkers and
    `isinstance` take it for a ServiceBusSender.

    Example: `with pair.get_queue_sender("orders") as sender: sender.send_messages(ServiceBusMessage("tea"))`.
    """

    def __init__(
        self,
        setup: SenderSetup,
        make: Callable[[], ServiceBusSender],
        links: BacklogLinks,
        timeouts: ThreadTimeouts,
        until_looked: Callable[[float | None], None] | None = None,
    ) -> None:
        """`make` returns a new sender of the SDK, prepared for `timeouts`.

        `until_looked` waits until the pair has looked at the shared state (S16). It is None if the pair has done so.
        """
        self._context, self._entity, self._primary, self._recorder, self._retries = setup
        self._make = make
        self._links = links
        self._timeouts = timeouts
        self._send_prefix = self._recorder.prefix(Stage.SEND_PRIMARY, self._context.path)
        self._destination = f"{self._recorder.namespace}/{self._context.path}"
        self._turn = threading.Lock()
        self._sender = make()
        self._until_looked = until_looked
        # No entity has the episode -1: the first call then waits for the look, and later calls need not ask.
        self._episode = self._entity.entity.episode if until_looked is None else -1
        self._closed = False
        self.fully_qualified_namespace: str = self._sender.fully_qualified_namespace
        self.entity_name: str = self._sender.entity_name

    # --- the interface of azure-servicebus -------------------------------------------------------------------------

    @property
    def client_identifier(self) -> str:
        """The identifier given to `get_queue_sender`; if none was given, the identifier of the present link.

        Example: `pair.get_queue_sender("orders", client_identifier="billing").client_identifier` is `"billing"`.
        """
        return self._sender.client_identifier

    def send_messages(
        self, message: MessageTypes | ServiceBusMessageBatch, *, timeout: float | None = None, **kwargs: Any
    ) -> None:
        """Send a message, several, or a batch. When this returns, they are on the primary or in the backlog.

        `timeout` is the limit of the whole call. Raises the SDK's errors, and those of `twinbus` for the backlog, such
        as BacklogUnavailableError: then the message stays the caller's.

        Example: `sender.send_messages(ServiceBusMessage("two coffees"), timeout=30)`.
        """
        checked = check_send(self._closed, message, timeout)
        if checked is None:
            return
        message, until = checked
        send = self._recorder.recorded(
            self._send_prefix,
            message,
            lambda sender, seconds: sender.send_messages(message, timeout=seconds, **kwargs),
        )
        self._call(send, partial(send_flow.divert, self._context, message, until), until, True)

    def create_message_batch(self, max_size_in_bytes: int | None = None) -> ServiceBusMessageBatch:
        """Return an empty batch, of the size that the primary allows. Works also while the entity is failed over.

        Example: `batch = sender.create_message_batch()`, then `batch.add_message(ServiceBusMessage("tea"))`.
        """
        check_open(self._closed)

        def create(sender: ServiceBusSender, seconds: float | None) -> ServiceBusMessageBatch:
            if not is_open(sender):
                open_sync_link(sender, seconds)
            return sender.create_message_batch(max_size_in_bytes)

        def create_offline() -> SendSteps[ServiceBusMessageBatch]:
            return send_flow.instead(lambda: empty_batch(self._sender, max_size_in_bytes))

        return IdentifiedBatch.copy_of(self._call(create, create_offline, None, False))

    def schedule_messages(
        self, messages: MessageTypes, schedule_time_utc: datetime, *, timeout: float | None = None, **kwargs: Any
    ) -> list[int]:
        """Schedule messages. Returns a sequence number for each, or a BacklogHandle while the entity is failed over.

        Example: `sender.schedule_messages(ServiceBusMessage("tea"), datetime.now(UTC) + timedelta(hours=1))`.
        """
        checked = check_schedule(self._closed, messages, timeout)
        if checked is None:
            return []
        message, until = checked
        schedule = self._recorder.recorded(
            self._recorder.prefix(Stage.SCHEDULE_PRIMARY, self._context.path),
            message,
            lambda sender, seconds: sender.schedule_messages(message, schedule_time_utc, timeout=seconds, **kwargs),
        )
        backlog = partial(send_flow.schedule, self._context, message, schedule_time_utc, until)
        return self._call(schedule, backlog, until, True)

    def cancel_scheduled_messages(
        self, sequence_numbers: int | list[int], *, timeout: float | None = None, **kwargs: Any
    ) -> None:
        """Cancel scheduled messages. Raises ScheduledInBacklogError for those that wait in the backlog.

        Example: `sender.cancel_scheduled_messages(numbers)`.
        """
        checked = check_cancel(self._closed, sequence_numbers, timeout)
        if checked is None:
            return
        numbers, until = checked
        cancel = self._recorder.recorded(
            self._recorder.prefix(Stage.CANCEL_PRIMARY, self._context.path),
            None,
            lambda sender, seconds: sender.cancel_scheduled_messages(numbers, timeout=seconds, **kwargs),
        )
        self._call(cancel, partial(send_flow.cannot_cancel, numbers), until, False)

    def close(self) -> None:
        """Refuse all calls from now on. A call in progress in another thread has a second to end.

        Example: `sender.close()`.
        """
        if (link := retired_link(self)) is not None:
            self._closed = True
            self._timeouts.retire_all([link])

    def __enter__(self) -> Self:
        check_open(self._closed)
        self._call(open_sync_link, send_flow.nothing, None, False)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        @property
        def __class__(self) -> type:
            """For `isinstance`: programs may ask whether they got the SDK's sender."""
            return ServiceBusSender

    def __del__(self) -> None:
        # A sender that was dropped without closing leaves no connection and no keep-alive thread. After a fork both
        # belong to the parent.
        with contextlib.suppress(Exception):
            is_in_use = not self._closed and self._entity.entity.route is not SendRoute.CLOSED
            if is_in_use and not sys.is_finalizing() and (keep_alive := keep_alive_of(self._sender)) is not None:
                # No lock may be taken here: the thread that runs `__del__` may hold the lock.
                keep_alive.cancel()
                interrupt(self._sender)

    # --- carrying out ----------------------------------------------------------------------------------------------

    def _call(self, call: Call[T], backlog: Callable[[], SendSteps[T]], until: float | None, with_message: bool) -> T:
        entity = self._entity.entity
        failed: Exception | None = None
        if entity.route is SendRoute.PRIMARY:
            # The usual case does not use the generator of `send_flow`: it is one SDK call under a deadline.
            try:
                result = self._call_primary(call, until)
            except FailedOverMeanwhileError:
                if self._closed:
                    raise closed_error() from None
            except Exception as error:
                if self._closed:
                    raise closed_error() from error
                failed = error
            else:
                after = self._entity.entity
                if after is not entity or after.awaits_success:
                    self._succeeded_late(entity.restores, with_message)
                return result
        elif entity.route is SendRoute.CLOSED:
            # Without this wait, threads that send again and again would slow down the thread that closes the pair.
            left = _REFUSED_CALL_SECONDS if until is None else until - time.monotonic()
            self._timeouts.closed.wait(max(min(left, _REFUSED_CALL_SECONDS), 0.0))
        origin = CallOrigin(entity.restores, with_message)
        return self._carry_out(send_flow.call(self._context, origin, backlog, failed, until), call, until)

    def _carry_out(self, steps: SendSteps[T], call: Call[Any], until: float | None) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    if isinstance(step, DivertTo):
                        self._links[step.queue].send(step, self._destination)
                        result = None
                    elif isinstance(step, WaitForQueue):
                        self._links.wait(step)
                        result = None
                    else:
                        # `_call_primary` computes the seconds again after it has waited for the link.
                        result = self._call_primary(call, until)
                except Exception as error:
                    if self._closed and isinstance(step, CallPrimary):
                        raise closed_error() from error
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return] # typeshed: the value of any generator
        finally:
            steps.close()

    def _call_primary(self, call: Call[T], until: float | None) -> T:
        cut_short = False
        if not self._turn.acquire(False):
            cut_short = self._wait_for_turn(until)
        try:
            if self._closed:
                raise closed_error()
            entity = self._entity.entity
            if entity.route is not SendRoute.PRIMARY:
                # The entity failed over while this call waited for its turn.
                raise FailedOverMeanwhileError
            if entity.episode != self._episode:
                self._begin_episode(until)
            seconds = self._timeouts.try_timeout if until is None else self._context.primary_seconds(until)
            try:
                return self._timeouts.call(self._sender, call, seconds, self._retries, self._entity)
            except OperationTimeoutError as error:
                self._replace_sender()
                if cut_short:
                    raise NoTurnError(self.entity_name, seconds) from error
                raise
            except Exception:
                # If the error broke the link, the SDK has closed the link.
                raise
            except BaseException:
                # The call was perhaps interrupted in the middle of a frame: the link cannot be used again.
                self._replace_sender()
                raise
        finally:
            self._turn.release()

    def _begin_episode(self, until: float | None) -> None:
        """Make the link ready for the first call, or for the first call after a failover."""
        wait, self._until_looked = self._until_looked, None
        if wait is not None:
            wait(until)
        entity = self._entity.entity
        self._episode = entity.episode
        if wait is None:
            # After a failover the old link may be dead without an error: start with a new link.
            self._replace_sender()
        elif entity.route is not SendRoute.PRIMARY:
            raise FailedOverMeanwhileError

    def _wait_for_turn(self, until: float | None) -> bool:
        """Wait until the link is free. Returns whether the wait took more than half of the call's time.

        If it did, a timeout of the call does not show that the primary failed (S2). Raises NoTurnError if the link was
        not free in time.
        """
        if until is None:
            # Longer than one attempt of another call can take. After that attempt the entity may have failed over.
            seconds = 2 * self._timeouts.try_timeout
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

    def _succeeded_late(self, restores: int, with_message: bool) -> None:
        """Report the success of a call. The entity started to fail or changed its mode meanwhile, or is on trial."""
        self._entity.succeeded(restores, with_message)
        if self._entity.entity.route is SendRoute.CLOSED:
            release(self)

    def _replace_sender(self) -> None:
        if not self._closed:
            old = self._sender
            if self._entity.entity.route is not SendRoute.CLOSED:
                self._sender = self._primary.remake(self._make)
            self._timeouts.discard(old)


# --- for the pair ----------------------------------------------------------------------------------------------------


def release(sender: PairedSender) -> None:
    """Close the link in the background because the primary's side closed or faulted. That side refuses calls."""
    if (link := retired_link(sender)) is not None:
        sender._timeouts.retire_all([link])


def retired_link(sender: PairedSender) -> RetiredLink | None:
    """Return the link of a sender for `ThreadTimeouts.retire_all`, or None if the sender was closed."""
    return None if sender._closed else RetiredLink(lambda: sender._sender, sender._turn, sender._entity)


def detach(sender: PairedSender, own: Callable[[SharedEntity], SharedEntity]) -> None:
    """Give a sender the entity that `own` returns for its old one, which the pair no longer shares (P3)."""
    sender._entity = sender._context.shared = own(sender._entity)
