"""A sender of an asyncio pair, with azure-servicebus' own interface: `calls` decides, this carries out."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import partial
from typing import Any, Final, Self, TypeVar, assert_never
from weakref import WeakSet

from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch
from azure.servicebus.aio import ServiceBusSender
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.ledger import Stage
from twinbus.pairing import calls
from twinbus.pairing.aio.backlog_link import AioBacklogLinks
from twinbus.pairing.aio.primary_link import PrimaryLink
from twinbus.pairing.aio.timeouts import TaskTimeouts, wait
from twinbus.pairing.calls import (
    FailedOverMeanwhileError,
    LimitsOf,
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
from twinbus.pairing.recording import OperationRecorder, aio_sent
from twinbus.sdk import RetrySettings, amqp_messages, empty_batch, supports_concurrent_sends

T = TypeVar("T")
# On an open link, without a time-out of the SDK's: ours holds.
Call = Callable[[ServiceBusSender], Coroutine[Any, Any, T]]
# Looked up once: a member of an Enum costs as much as half a microsecond at every use.
_PRIMARY: Final = SendRoute.PRIMARY


class PairedSender:
    """Sends to the primary, or to the backlog while the entity is failed over.

    `timeout` bounds all of a call: the primary, the backlog (S6). Tasks may share it: their calls overlap, and one that
    is cancelled or gives up takes nothing from the others (S13).
    """

    def __init__(
        self,
        place: SendContext,
        make: Callable[[], ServiceBusSender],
        links: AioBacklogLinks,
        attempts: TaskTimeouts,
        retries: RetrySettings,
        recording: OperationRecorder,
        *,
        pairing: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`pairing`: pairs the namespaces, or waits until that is done; None where they are paired."""
        self._place = place
        self._pairing = pairing
        self._make = make
        self._links = links
        self._attempts = attempts
        self._retries = retries
        self._seconds = attempts.seconds
        self._recording = recording
        self._sends = recording.place(Stage.SEND_PRIMARY, place.path)
        self._destination = f"{recording.namespace}/{place.path}"
        self._link = PrimaryLink(make(), attempts, place.cell.entity.episode)
        self._before: WeakSet[PrimaryLink] = WeakSet()
        self._turn = None if supports_concurrent_sends(self._link.sender) else asyncio.Lock()
        self._closed = False
        self.fully_qualified_namespace: str = self._link.sender.fully_qualified_namespace
        self.entity_name: str = self._link.sender.entity_name

    # --- azure-servicebus' interface -------------------------------------------------------------------------------

    @property
    def client_identifier(self) -> str:
        """The identifier given to `get_queue_sender`; without one, that of the present link."""
        identifier: str = self._link.sender.client_identifier
        return identifier

    async def send_messages(self, message: Any, *, timeout: float | None = None, **kwargs: Any) -> None:
        until = end_of_call(self._closed, timeout)
        message = identified(message)
        if type(message) is not ServiceBusMessage and is_empty(message):
            return
        ledger = self._recording.ledger
        if ledger is not None and ledger.stops_on_error:
            ledger.check()
        await self._call(
            (lambda sender: sender.send_messages(message, **kwargs))
            if ledger is None
            else (lambda sender: aio_sent(ledger, self._sends, message, kwargs, sender)),
            lambda: calls.divert(self._place, amqp_messages(message), until),
            until,
        )

    async def create_message_batch(self, max_size_in_bytes: int | None = None) -> ServiceBusMessageBatch:
        batch = await self._call(
            lambda sender: sender.create_message_batch(max_size_in_bytes),
            lambda: calls.instead(lambda: empty_batch(self._link.sender, max_size_in_bytes)),
            end_of_call(self._closed, None),
        )
        return IdentifiedBatch.copy_of(batch)

    async def schedule_messages(
        self, messages: Any, schedule_time_utc: datetime, *, timeout: float | None = None, **kwargs: Any
    ) -> list[int]:
        until = end_of_call(self._closed, timeout)
        message = identified(messages)
        if is_empty(message):
            return []
        return await self._call(
            self._recording.aio_recorded(
                self._recording.place(Stage.SCHEDULE_PRIMARY, self._place.path),
                message,
                lambda sender: sender.schedule_messages(message, schedule_time_utc, **kwargs),
            ),
            lambda: calls.schedule(self._place, amqp_messages(message), until, schedule_time_utc),
            until,
        )

    async def cancel_scheduled_messages(
        self, sequence_numbers: int | list[int], *, timeout: float | None = None, **kwargs: Any
    ) -> None:
        until = end_of_call(self._closed, timeout)
        if waiting := calls.in_backlog(sequence_numbers):
            raise ScheduledInBacklogError(waiting)
        given = [sequence_numbers] if isinstance(sequence_numbers, int) else sequence_numbers
        await self._call(
            self._recording.aio_recorded(
                self._recording.place(Stage.CANCEL_PRIMARY, self._place.path),
                None,
                lambda sender: sender.cancel_scheduled_messages(sequence_numbers, **kwargs),
            ),
            lambda: calls.cannot_cancel(given),
            until,
        )

    async def close(self) -> None:
        """A call that another task has under way may end first, if it is quick; later ones are refused (S13)."""
        if not self._closed:
            self._attempts.claim_to_close()
            self._closed = True
            self.let_go()

    def let_go(self) -> None:
        """Closed, or its pair's primary is: its links go in the background, after the calls under way on them."""
        if self._attempts.ours:
            for link in (self._link, *self._before):
                link.end()

    async def __aenter__(self) -> Self:
        await self._call(_opened, calls.nothing, end_of_call(self._closed, None))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        # Dropped without being closed, and no call under way: that would hold it.
        with contextlib.suppress(Exception):
            open_ = not self._closed and self._place.cell.entity.route is not SendRoute.CLOSED
            if open_ and not sys.is_finalizing():
                self._link.drop()

    # --- carrying out ----------------------------------------------------------------------------------------------

    async def _call(self, call: Call[T], backlog: Callable[[], SendSteps[T]], until: float | None) -> T:
        if asyncio.get_running_loop() is not self._attempts.loop:
            self._place.primary.refuse_unless_open()
            self._attempts.claim()
        if self._pairing is not None:
            # Nothing is sent before every backlog queue was found or created (P1).
            paired = self._pairing()
            await (paired if until is None else self._attempts.bound(paired, until - time.monotonic()))
            self._pairing = None
        entity = self._place.cell.entity
        failed: Exception | None = None
        if entity.route is _PRIMARY:
            # The healthy path: the SDK's sender under a deadline, and nothing told unless something was wrong.
            end = time.monotonic() + (self._seconds if until is None else self._place.primary_seconds(until))
            try:
                try:
                    result = await self._once(call, end)
                except Exception as error:
                    result = await self._again(error, call, end)
            except FailedOverMeanwhileError:
                pass
            except Exception as error:
                if self._closed:
                    raise closed_error() from error
                failed = error
            else:
                after = self._place.cell.entity
                if after is not entity or after.deadline is not None:
                    self._succeeded_late()
                return result
        return await self._carry_out(calls.call(self._place, backlog, failed, until), call, until)

    async def _carry_out(self, steps: SendSteps[T], call: Call[Any], until: float | None) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    result = await self._try(step, call, until)
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

    async def _try(self, step: calls.SendStep, call: Call[Any], until: float | None) -> Any:
        match step:
            case OnPrimary(seconds):
                return await self._on_primary(call, seconds)
            case LimitsOf(queue, seconds):
                return await self._links[queue].limits(seconds)
            case ToBacklog(queue, payload, seconds):
                return await self._links[queue].take(payload, seconds, self._destination)
            case _:
                assert_never(step)

    async def _on_primary(self, call: Call[T], seconds: float) -> T:
        end = time.monotonic() + seconds
        try:
            return await self._once(call, end)
        except Exception as error:
            return await self._again(error, call, end)

    def _again(self, failed: Exception, call: Call[T], end: float) -> Coroutine[Any, Any, T]:
        return self._attempts.again(failed, partial(self._once, call), end, self._retries, self._paused)

    def _once(self, call: Call[T], end: float) -> Coroutine[Any, Any, T]:
        return self._on_link(call, end) if self._turn is None else self._in_turn(self._turn, call, end)

    async def _in_turn(self, turn: asyncio.Lock, call: Call[T], end: float) -> T:
        """Where calls cannot overlap. A turn that never came says nothing about the primary (S2)."""
        await self._attempts.turn(turn, self.entity_name, end - time.monotonic())
        try:
            return await self._on_link(call, end)
        finally:
            turn.release()

    async def _on_link(self, call: Call[T], end: float) -> T:
        link, attempts = self._current(), self._attempts
        deadline = attempts.begin(end)
        link.calls += 1
        try:
            if not link.is_open:
                await link.opened()
            return await call(link.sender)
        except BaseException as error:
            told = attempts.verdict(deadline, error, link.sender)
            if isinstance(told, OperationTimeoutError) or not isinstance(told, Exception):
                link.give_up()
            if told is error:
                raise
            raise told from None
        finally:
            link.leave()
            attempts.lift(deadline)

    def _current(self) -> PrimaryLink:
        """The link for a try that begins now."""
        if self._closed:
            raise closed_error()
        entity, link = self._place.cell.entity, self._link
        if entity.route is not _PRIMARY:
            raise FailedOverMeanwhileError
        if link.retired or entity.episode != link.episode:
            # After a failover the old link may be one that nobody answers on: begin anew.
            self._link = PrimaryLink(self._place.primary.made(self._make), self._attempts, entity.episode)
            self._before.add(link)
            link.retire()
        return self._link

    async def _paused(self, seconds: float) -> None:
        """Between two tries, cut short where calls go another way meanwhile (S5, C3)."""
        if self._closed or self._place.cell.entity.route is not _PRIMARY:
            # They went it while the try that failed was under way: the next one finds it out.
            return
        rerouted = asyncio.Event()
        self._place.cell.rerouted.add(rerouted.set)
        try:
            await wait(rerouted, seconds)
        finally:
            self._place.cell.rerouted.discard(rerouted.set)

    def _succeeded_late(self) -> None:
        """The entity was failing, or something happened to it, while this call was under way (S3, S5)."""
        self._place.cell.succeeded()


async def _opened(sender: ServiceBusSender) -> None:
    """Entering: all that is asked for is an open link."""
