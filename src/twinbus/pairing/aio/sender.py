"""The sender of an asyncio pair, with the interface of azure-servicebus. It carries out the steps of `send_flow`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import WeakSet

from azure.servicebus import ServiceBusMessageBatch
from azure.servicebus.aio import ServiceBusSender
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.ledger import Stage
from twinbus.pairing.aio.backlog_link import AioBacklogLinks
from twinbus.pairing.aio.primary_link import PrimaryLink
from twinbus.pairing.aio.timeouts import TaskTimeouts, wait_for_event
from twinbus.pairing.call_arguments import (
    IdentifiedBatch,
    MessageTypes,
    check_cancel,
    check_open,
    check_schedule,
    check_send,
)
from twinbus.pairing.call_errors import closed_error
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
from twinbus.sdk import empty_batch, supports_concurrent_sends

if TYPE_CHECKING:
    _Sender = ServiceBusSender
else:
    _Sender = object

T = TypeVar("T")
Call = Callable[[ServiceBusSender], Coroutine[Any, Any, T]]
"""An SDK call on an open link, without a timeout of the SDK: `TaskTimeouts` ends the call at its deadline."""


class PairedSender(_Sender):
    """Sends to the primary, or to the backlog while the entity is failed over. Has the methods of `ServiceBusSender`.

    `timeout` is the limit of the whole call: the primary and the backlog. Tasks may share a sender: their calls overlap
    on the primary, and a call that is cancelled or times out does not end the other calls. Type checkers and
    `isinstance` take it for a ServiceBusSender.

    Example: `async with pair.get_queue_sender("orders") as sender: await sender.send_messages(message)`.
    """

    def __init__(
        self,
        setup: SenderSetup,
        make: Callable[[], ServiceBusSender],
        links: AioBacklogLinks,
        timeouts: TaskTimeouts,
        *,
        until_ready: Callable[[float | None], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`make` returns a new sender of the SDK, prepared for `timeouts`.

        `until_ready` pairs the namespaces, or waits until they are paired, and until the pair has looked at the shared
        state (S16). It is None if both are done.
        """
        self._context, self._entity, self._primary, self._recorder, self._retries = setup
        self._make = make
        self._links = links
        self._timeouts = timeouts
        self._until_ready = until_ready
        self._send_prefix = self._recorder.prefix(Stage.SEND_PRIMARY, self._context.path)
        self._destination = f"{self._recorder.namespace}/{self._context.path}"
        self._link = PrimaryLink(make(), timeouts, self._entity.entity.episode)
        self._retired_links: WeakSet[PrimaryLink] = WeakSet()
        self._turn = None if supports_concurrent_sends(self._link.sender) else asyncio.Lock()
        self._closed = False
        self.fully_qualified_namespace: str = self._link.sender.fully_qualified_namespace
        self.entity_name: str = self._link.sender.entity_name

    # --- the interface of azure-servicebus -------------------------------------------------------------------------

    @property
    def client_identifier(self) -> str:
        """The identifier given to `get_queue_sender`; if none was given, the identifier of the present link.

        Example: `pair.get_queue_sender("orders", client_identifier="billing").client_identifier` is `"billing"`.
        """
        identifier: str = self._link.sender.client_identifier
        return identifier

    async def send_messages(
        self, message: MessageTypes | ServiceBusMessageBatch, *, timeout: float | None = None, **kwargs: Any
    ) -> None:
        """Send a message, several, or a batch. When this returns, they are on the primary or in the backlog.

        `timeout` is the limit of the whole call. Raises the SDK's errors, and those of `twinbus` for the backlog, such
        as BacklogUnavailableError: then the message stays the caller's.

        Example: `await sender.send_messages(ServiceBusMessage("two coffees"), timeout=30)`.
        """
        checked = check_send(self._closed, message, timeout)
        if checked is None:
            return
        message, until = checked
        send = self._recorder.aio_recorded(
            self._send_prefix, message, lambda sender: sender.send_messages(message, **kwargs)
        )
        await self._call(send, partial(send_flow.divert, self._context, message, until), until, True)

    async def create_message_batch(self, max_size_in_bytes: int | None = None) -> ServiceBusMessageBatch:
        """Return an empty batch, of the size that the primary allows. Works also while the entity is failed over.

        Example: `batch = await sender.create_message_batch()`, then `batch.add_message(ServiceBusMessage("tea"))`.
        """
        check_open(self._closed)

        def create_offline() -> SendSteps[ServiceBusMessageBatch]:
            return send_flow.instead(lambda: empty_batch(self._link.sender, max_size_in_bytes))

        batch = await self._call(
            lambda sender: sender.create_message_batch(max_size_in_bytes), create_offline, None, False
        )
        return IdentifiedBatch.copy_of(batch)

    async def schedule_messages(
        self, messages: MessageTypes, schedule_time_utc: datetime, *, timeout: float | None = None, **kwargs: Any
    ) -> list[int]:
        """Schedule messages. Returns a sequence number for each, or a BacklogHandle while the entity is failed over.

        Example: `await sender.schedule_messages(ServiceBusMessage("tea"), datetime.now(UTC) + timedelta(hours=1))`.
        """
        checked = check_schedule(self._closed, messages, timeout)
        if checked is None:
            return []
        message, until = checked
        schedule = self._recorder.aio_recorded(
            self._recorder.prefix(Stage.SCHEDULE_PRIMARY, self._context.path),
            message,
            lambda sender: sender.schedule_messages(message, schedule_time_utc, **kwargs),
        )
        backlog = partial(send_flow.schedule, self._context, message, schedule_time_utc, until)
        return await self._call(schedule, backlog, until, True)

    async def cancel_scheduled_messages(
        self, sequence_numbers: int | list[int], *, timeout: float | None = None, **kwargs: Any
    ) -> None:
        """Cancel scheduled messages. Raises ScheduledInBacklogError for those that wait in the backlog.

        Example: `await sender.cancel_scheduled_messages(numbers)`.
        """
        checked = check_cancel(self._closed, sequence_numbers, timeout)
        if checked is None:
            return
        numbers, until = checked
        cancel = self._recorder.aio_recorded(
            self._recorder.prefix(Stage.CANCEL_PRIMARY, self._context.path),
            None,
            lambda sender: sender.cancel_scheduled_messages(numbers, **kwargs),
        )
        await self._call(cancel, partial(send_flow.cannot_cancel, numbers), until, False)

    async def close(self) -> None:
        """Refuse all calls from now on. A call in progress in another task has a second to end.

        Example: `await sender.close()`.
        """
        if not self._closed:
            self._timeouts.claim_to_close()
            self._closed = True
            release(self)

    async def __aenter__(self) -> Self:
        check_open(self._closed)
        await self._call(_open_only, send_flow.nothing, None, False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    if not TYPE_CHECKING:

        @property
        def __class__(self) -> type:
            """For `isinstance`: programs may ask whether they got the SDK's sender."""
            return ServiceBusSender

    def __del__(self) -> None:
        # The sender was dropped without closing. No call is in progress: a call would hold a reference to the sender.
        with contextlib.suppress(Exception):
            is_in_use = not self._closed and self._entity.entity.route is not SendRoute.CLOSED
            if is_in_use and not sys.is_finalizing():
                self._link.drop()

    # --- carrying out ----------------------------------------------------------------------------------------------

    async def _call(
        self, call: Call[T], backlog: Callable[[], SendSteps[T]], until: float | None, with_message: bool
    ) -> T:
        if asyncio.get_running_loop() is not self._timeouts.loop:
            self._primary.refuse_unless_open()
            self._timeouts.claim()
        if self._until_ready is not None:
            # Nothing is sent before every backlog queue was found or created (P1).
            await self._until_ready(until)
            self._until_ready = None
        entity = self._entity.entity
        failed: Exception | None = None
        if entity.route is SendRoute.PRIMARY:
            # The usual case does not use the generator of `send_flow`: it is one SDK call under a deadline.
            seconds = self._timeouts.try_timeout if until is None else self._context.primary_seconds(until)
            try:
                result = await self._call_primary(call, time.monotonic() + seconds)
            except FailedOverMeanwhileError:
                pass
            except Exception as error:
                if self._closed:
                    raise closed_error() from error
                failed = error
            else:
                after = self._entity.entity
                if after is not entity or after.awaits_success:
                    # The entity started to fail, or changed its mode, during the call, or is on trial (S3, S5, S14).
                    self._entity.succeeded(entity.restores, with_message)
                return result
        origin = CallOrigin(entity.restores, with_message)
        return await self._carry_out(send_flow.call(self._context, origin, backlog, failed, until), call)

    async def _carry_out(self, steps: SendSteps[T], call: Call[Any]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    if isinstance(step, DivertTo):
                        await self._links[step.queue].send(step, self._destination)
                        result = None
                    elif isinstance(step, WaitForQueue):
                        await self._links.wait(step)
                        result = None
                    else:
                        result = await self._call_primary(call, time.monotonic() + step.seconds)
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

    async def _call_primary(self, call: Call[T], end: float) -> T:
        """Call the primary, with retries, until `end`."""
        try:
            return await self._try_once(call, end)
        except Exception as error:
            return await self._timeouts.retry(error, partial(self._try_once, call), end, self._retries, self._pause)

    def _try_once(self, call: Call[T], end: float) -> Coroutine[Any, Any, T]:
        return self._on_link(call, end) if self._turn is None else self._in_turn(self._turn, call, end)

    async def _in_turn(self, turn: asyncio.Lock, call: Call[T], end: float) -> T:
        """Call while no other call uses the link, where calls cannot overlap.

        Raises NoTurnError if the link is not free in time. This error is not a failure of the primary (S2).
        """
        await self._timeouts.take_turn(turn, self.entity_name, end - time.monotonic())
        try:
            return await self._on_link(call, end)
        finally:
            turn.release()

    async def _on_link(self, call: Call[T], end: float) -> T:
        link, timeouts = self._current_link(), self._timeouts
        deadline = timeouts.begin(end)
        link.calls += 1
        try:
            if not link.is_open:
                await link.wait_until_open()
            return await call(link.sender)
        except BaseException as error:
            raised = timeouts.error_of(deadline, error, link.sender)
            if isinstance(raised, OperationTimeoutError) or not isinstance(raised, Exception):
                link.give_up()
            if raised is error:
                raise
            raise raised from None
        finally:
            link.leave()
            timeouts.end(deadline)

    def _current_link(self) -> PrimaryLink:
        """Return the link for a try that starts now."""
        if self._closed:
            raise closed_error()
        entity, link = self._entity.entity, self._link
        if entity.route is not SendRoute.PRIMARY:
            raise FailedOverMeanwhileError
        if link.retired or entity.episode != link.episode:
            # After a failover the old link may be dead without an error: start with a new link.
            self._link = PrimaryLink(self._primary.remake(self._make), self._timeouts, entity.episode)
            self._retired_links.add(link)
            link.retire()
        return self._link

    async def _pause(self, seconds: float) -> None:
        """Wait between two tries. A failover, or closing the pair, ends the wait (S5, C3)."""
        if self._closed or self._entity.entity.route is not SendRoute.PRIMARY:
            # The sender was closed, or the route changed, during the failed try. The next try raises the error.
            return
        rerouted = asyncio.Event()
        entity, wake = self._entity, partial(self._timeouts.tell, rerouted.set)
        entity.on_reroute.add(wake)
        try:
            if entity.entity.route is SendRoute.PRIMARY:
                await wait_for_event(rerouted, seconds)
        finally:
            entity.on_reroute.discard(wake)


def release(sender: PairedSender) -> None:
    """Close the links in the background, after the calls in progress: the sender or the primary's side closed."""
    if sender._timeouts.ours:
        for link in (sender._link, *sender._retired_links):
            link.end()


def detach(sender: PairedSender, own: Callable[[SharedEntity], SharedEntity]) -> None:
    """Give a sender the entity that `own` returns for its old one, which the pair no longer shares (P3)."""
    shared = sender._entity
    sender._entity = sender._context.shared = own(shared)
    if sender._entity is not shared:
        shared.wake_waiting_calls()


async def _open_only(sender: ServiceBusSender) -> None:
    """Do nothing: the call that enters a sender only needs an open link."""
